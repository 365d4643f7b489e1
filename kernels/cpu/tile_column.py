"""Column of register tiles: one call of a micro-kernel for many slices of rows of A by one panel of few steps of k.

A tile of a few steps takes little longer than a call with its arguments does, and less than a line from L3: C is
prefetched two slices before its stores, A one before its loads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.index import Index, Ptr, const, var
from portmm.ir.nodes import Call, For, Function, If, Param
from portmm.kernels.cpu.microkernel import micro_kernel
from portmm.target.summation import BlockOfK

if TYPE_CHECKING:
    from portmm.kernels.cpu.microkernel import Shape
    from portmm.target.atom import Atom

MOST_WRITTEN = 512
"""Multiply-adds of a tile whose steps compilers are to write out."""
C_AHEAD, A_AHEAD = 2, 1
"""Slices from a prefetch to the slice: 65536x32x32 on Granite Rapids, 8 rows, in order of C's and A's: (0, 0) 120,
(1, 1) 125, (2, 0) 130, (2, 1) 140, (3, 1) 143 GFLOP/s."""


def column(atom: Atom, s: Shape, kc: int, *, ahead: bool) -> Function:
    """Function C[count][rows][columns] = A[count][rows][k] . B[k][nr], of an A in place and a packed panel of B.

    Args:
        atom: the multiply-add.
        s: the geometry of a tile.
        kc: most steps of k; of as many, steps may be written out.
        ahead: prefetch C and A.
    """
    s = replace(s, b_packed=True, block_of_k=BlockOfK.RUN, inline=True, unroll=1, near=True)
    s = replace(s, ahead=("a",) if ahead else None)
    edge = micro_kernel(atom, replace(s, partial=True))
    edge = replace(edge, name=f"{edge.name}_edge")
    whole = replace(s, ragged=False, unroll=4)
    macs = atom.strips(s.rows) * (s.nr // atom.n)
    written = replace(whole, unroll=kc if kc * macs <= MOST_WRITTEN else 8)
    full, short = micro_kernel(atom, written), micro_kernel(atom, whole)
    full, short = replace(full, name=f"{full.name}_full"), replace(short, name=f"{short.name}_short")
    t, rows = var("t"), const(s.rows)

    def each(f: Function, k: Index) -> For:
        own: dict[str, Index | Ptr] = {
            "k": k,
            "a": Ptr("a", t * rows * var("a_m")),
            "c": Ptr("c", t * rows * var("c_m")),
            "accumulate": const(0),
            "c_next": Ptr("c", (t + C_AHEAD) * rows * var("c_m")),
            "a_next": Ptr("a", (t + A_AHEAD) * rows * var("a_m")),
        }
        args = tuple(own.get(x.name, Ptr(x.name) if x.dtype else var(x.name)) for x in f.params)
        return For("t", const(0), var("count"), const(1), (Call(f, args),))

    tiles = If(var("k").eq(kc), (each(full, const(kc)),), (each(short, var("k")),))
    body = (If(var("columns").eq(s.nr), (tiles,), (each(edge, var("k")),)),)
    inner = {"c_next", "a_next", "accumulate"}
    params = (Param("count"), *(x for x in edge.params if x.name not in inner))
    comment = f"C[count][{s.rows}][columns] = A[count][{s.rows}][k] . B[k][{s.nr}]"
    return Function(f"column_{s.rows}x{kc}", "inner", params, body, comment)
