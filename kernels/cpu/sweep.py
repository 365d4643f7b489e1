"""Sweep of B: one call of a micro-kernel for all columns of a slice of rows, a few rows of B at a time, or panels."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from portmm.ir.index import Index, Ptr, const, var
from portmm.ir.nodes import Call, For, Function, If, Let, Param, UntilAligned
from portmm.kernels.cpu.microkernel import FEW_ROWS, continued, micro_kernel
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.microkernel import Shape
    from portmm.target.atom import Atom

FEW_STEPS, MOST_STEPS, LEAST_STEPS = 16, 8, 2
"""Steps of k of a full tile that are written out: many of few rows, each of which has an address in each
step, in blocks of few, which are of a B that comes from afar; as many as those for one row in deeper blocks; few of
more rows (Zen 5: up to a fifth faster, one row up to a half)."""
WIDE = 4
"""Vectors across a sweep, for each of its rows, from which a narrow first tile is worth its time: a chain waits there
for the latency of each step."""


def sweep(atom: Atom, s: Shape, kc: int) -> Function:
    """Function C[rows][columns] (+)= A . B[k][columns] over any number of tiles of NR columns, along the rows of B.

    B is read in place, in a few long streams, or in panels `b_n` times NR elements apart. Full tiles have no masks, and
    some steps of theirs are written out.
    Where rows of B start in the middle of a vector, all alike, columns up to the next are a narrow tile of their own:
    no vector of the others is in two cache lines. Where sums are in tiles of their own, full tiles inside a run only
    load and store those, and the first slice of rows alone prefetches B, whose lines it leaves in L2 for the others.

    Args:
        atom: the multiply-add.
        s: the geometry of a tile, whose last may be partial.
        kc: steps of all blocks of k but those at the end of a run.
    """
    edge = micro_kernel(atom, replace(s, partial=True))
    whole_tile = replace(s, ragged=False, inline=True, unroll=s.unroll if s.grouped else 1)
    written = _written(s, kc)
    steps = replace(whole_tile, written=written, unroll=1 if written > 1 else min(kc, MOST_STEPS))
    short = replace(micro_kernel(atom, whole_tile), name=f"{edge.name}_short")
    j, width = var("j"), var("width")
    begin = var("begin") if _peels(atom, s) else const(0)
    aligned = j - begin + (atom.n if _peels(atom, s) else 0)

    def tile(f: Function, k: Index, columns: Index, before: Index = aligned) -> Call:
        own: dict[str, Index | Ptr] = {"k": k, "columns": columns} | {x: Ptr(x, j) for x in ("c", "kept")}
        own["b"] = Ptr("b", j * var("b_n") if s.b_packed else j)
        own |= {x: Ptr(x, before * s.rows) for x in ("part", "kept")} if s.apart else {}
        return Call(f, tuple(own.get(x.name, Ptr(x.name) if x.dtype else var(x.name)) for x in f.params))

    def whole(f: Function, k: Index) -> For:
        return For("j", begin, width, const(s.nr), (tile(f, k, const(s.nr)),))

    most = var("k").eq(kc)
    if s.apart:
        near = continued(atom, replace(steps, along=0))
        far = replace(continued(atom, steps), name=f"{edge.name}_far")
        most = most * var("accumulate") * (1 - var("add")) * (1 - var("keep")) * (1 - var("done"))
        full: Stmt = If(var("far"), (whole(far, const(kc)),), (whole(near, const(kc)),))
    else:
        full = whole(replace(micro_kernel(atom, steps), name=f"{edge.name}_full"), const(kc))
    rest = (Let("j", width), tile(edge, var("k"), var("columns") - width))
    body = (
        *_until_aligned(atom, s, tile),
        Let("width", begin + (var("columns") - begin) // s.nr * s.nr),
        If(most, (full,), (whole(short, var("k")),)),
        If(width.lt(var("columns")), rest),
    )
    params = (*edge.params, *((Param("far"),) if s.apart else ()), *((Param("b_n"),) if s.b_packed else ()))
    name, comment = f"sweep_{s.rows}x{kc}", f"C[{s.rows}][columns] (+)= A[{s.rows}][k] . B[k][columns]"
    return Function(name, "inner", params, body, comment)


def _written(s: Shape, kc: int) -> int:
    """Steps of k of a full tile that are written out; 1 where compilers do it better: with prefetches, for example."""
    deep, few = kc > FEW_STEPS, s.rows <= FEW_ROWS
    if s.prefetch or (deep and few and s.rows > 1):
        return 1
    return gcd(kc, FEW_STEPS if deep and few else MOST_STEPS if few else LEAST_STEPS)


def _peels(atom: Atom, s: Shape) -> bool:
    """Whether a sweep may have a narrow first tile; lines of a B in memory, which is prefetched, are late anyway."""
    return bool(atom.mask) and not (s.prefetch or s.b_packed)


def _until_aligned(atom: Atom, s: Shape, tile: Callable[[Function, Index, Index, Index], Call]) -> tuple[Stmt, ...]:
    """First tile of a wide sweep: columns before the first aligned vector of B, if rows of B are vectors apart."""
    if not _peels(atom, s):
        return ()
    begin = var("begin")
    worth = (var("b_k") % atom.n).eq(0) * const(WIDE * s.rows * atom.n - 1).lt(var("columns"))
    narrow = micro_kernel(atom, replace(s, nr=atom.n, partial=True))
    first = (Let("j", const(0)), tile(narrow, var("k"), begin, const(0)))
    return (
        UntilAligned("misaligned", Ptr("b"), atom.n * BY_NAME[s.b].bytes),
        Let("begin", var("misaligned") * worth),
        If(const(0).lt(begin), first),
    )
