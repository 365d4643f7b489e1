"""Runs of k, each with accumulators of its own: see `portmm.summation`.

Owns the loop over k of a block of C, and what the parts of a run do with its sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir import For, If, Let, LetPtr, const, var

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.kernels.blocks import Blocks

    from portmm.index import Index, Ptr
    from portmm.ir import Stmt


def over_k(g: Blocks, inside: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The loop over blocks of k, each of some runs, or over runs and their parts; where KC is ALL, there is none."""
    if g.parts:
        each = For("pc", var("run_start"), g.last_of_run, var("kb"), inside)
        place = LetPtr("kept", g.private() + (g.own_size - g.kept_size), g.atom.acc)
        return (place, Let("run", g.run), For("run_start", g.start, g.end, var("run"), (each,)))
    if g.s.kc:
        inside = (For("pc", g.start, g.end, var("kb"), inside),)
    return (Let("run", g.run), *inside) if g.many else inside


def in_parts(g: Blocks, row: Index, call: Callable[..., tuple[Stmt, ...]]) -> tuple[Stmt, ...]:
    """A visit of a tile for a part of a run.

    The sums of the first run are those of C. Sums of a later one are kept apart until its last part, which adds C.

    Args:
        g: the blocks.
        row: the first row of the tile.
        call: the visit, given where the sums of the parts before are, where to write, the elements from a row to the
            next of each, and whether to add what is there.
    """
    c: tuple[Ptr, Index] = (g.result(row, var("column")), g.c_step)
    kept: tuple[Ptr, Index] = (g.kept(row, var("column")), g.kept_wide)
    last = (var("pc") + var("kd")).eq(g.last_of_run)
    later = (If(last, call(*kept, *c, const(1)), call(*kept, *kept, const(0))),)
    return (If(var("run_start").eq(g.start), call(*c, *c, const(0)), later),)
