"""Products of tiles: register tiles of rows and columns, in blocks of k, swept along the rows of B.

Owns `product`, one function for all products of a kernel: any extents, A with any strides, B contiguous along its
columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.index import Index, Ptr, const, maximum, minimum, var
from portmm.ir.nodes import Call, For, Function, If, Let, Param
from portmm.kernels.cpu.microkernel import Shape, micro_kernel

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom

FEW = 4
"""Rows up to which all steps of k are in a loop that compilers unroll."""


def product(s: Schedule, atom: Atom) -> Function:
    """Function C[rows][columns] (+)= A[rows][k] . B[k][columns], in blocks of k and register tiles of a schedule.

    Many columns are swept in panels that stay in L1 for all rows, in blocks of few rows of B, which are streams.
    """
    rows, r, p, j = var("rows"), var("r"), var("p"), var("j")
    heights = [s.mr >> i for i in range(s.mr.bit_length())]
    body: list[For] = []
    for i, h in enumerate(heights):
        begin = rows - rows % heights[i - 1] if i else const(0)
        args: tuple[Index | Ptr, ...] = (
            var("depth"), Ptr("a", r * var("a_m") + p * var("a_k")), var("a_m"), var("a_k"),
            Ptr("b", p * var("b_k") + j), var("b_k"), Ptr("c", r * var("c_m") + j), var("c_m"),
            minimum(s.nc, var("columns") - j), var("more"),
        )  # fmt: skip
        body.append(For("r", begin, rows - rows % h, const(h), (Call(_sweep(atom, h, s), args),)))
    panels = For("j", const(0), var("columns"), const(s.nc), tuple(body))
    block = (Let("depth", minimum(var("by"), var("k") - p)), Let("more", maximum(var("accumulate"), const(0).lt(p))))
    deep = var("columns").lt(s.nc) * (s.tile("L3").k - s.kc) + s.kc
    loop = For("p", const(0), var("k"), var("by"), (*block, panels))
    params = [Param("k"), Param("rows"), Param("columns"), Param("a", "f32", readonly=True), Param("a_m"), Param("a_k")]
    params += [Param("b", "f32", readonly=True), Param("b_k"), Param("c", "f32"), Param("c_m"), Param("accumulate")]
    comment = "C[rows][columns] (+)= A[rows][k] . B[k][columns]"
    return Function("product", "inner", tuple(params), (Let("by", deep), loop), comment)


def _sweep(atom: Atom, rows: int, s: Schedule) -> Function:
    """Function of a slice of A and any number of columns: register tiles, then vectors, of which the last is masked."""
    nr, kc = s.nr, s.kc
    whole = Shape(rows=rows, nr=nr, a_packed=False, b_packed=False, ragged=False, inline=True, along=s.b.along)
    written = 1 if rows <= FEW else 2
    steps = replace(whole, written=written, unroll=1 if written > 1 else 8)
    full = replace(micro_kernel(atom, steps), name=f"tile_{rows}x{nr}")
    short = replace(micro_kernel(atom, whole), name=f"tile_{rows}x{nr}_short")
    edge = micro_kernel(atom, replace(whole, nr=atom.n, along=0, ragged=True, partial=True, inline=False))
    j, width, columns = var("j"), var("width"), var("columns")

    def tile(f: Function, k: Index, n: Index) -> Call:
        own: dict[str, Index | Ptr] = {"k": k, "columns": n, "b": Ptr("b", j), "c": Ptr("c", j)}
        return Call(f, tuple(own.get(x.name, Ptr(x.name) if x.dtype else var(x.name)) for x in f.params))

    def tiles(f: Function, k: Index) -> For:
        return For("j", const(0), width, const(nr), (tile(f, k, const(nr)),))

    body = (
        Let("width", columns - columns % nr),
        If(var("k").eq(kc), (tiles(full, const(kc)),), (tiles(short, var("k")),)),
        For("j", width, columns, const(atom.n), (tile(edge, var("k"), minimum(atom.n, columns - j)),)),
    )
    comment = f"C[{rows}][columns] (+)= A[{rows}][k] . B[k][columns]"
    return Function(f"sweep_{rows}", "inner", edge.params, body, comment)
