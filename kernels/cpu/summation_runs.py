"""Summation runs: runs of k, each with accumulators of its own (see `portmm.target.summation`).

Owns the extents of runs, the loop over k of a block of C, and the buffer of the sums of runs while parts of the
next are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, var
from portmm.ir.nodes import For, Let, LetPtr
from portmm.kernels.cpu.blocking import run_of
from portmm.target.summation import BlockOfK

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.operands import Operands


def extents_of_k(g: Operands) -> tuple[Stmt, ...]:
    """Local names of the extents of runs and of blocks of k, each division made once."""
    runs: tuple[Stmt, ...] = ()
    kb = g.kb
    if g.block_of_k is BlockOfK.RUNS:
        count, run = var("run_count"), var("run")
        runs = (Let("run_count", g.run_count), Let("run", run_of(g.k, g.s.atom.kr, count)))
        kb = run * g.runs_of_block(count) if g.s.kc else kb
    return (*runs, Let("kb", kb)) if g.s.kc or g.s.parallel.over == "k" else runs


def over_k(g: Operands, inside: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Loop over blocks of k, each of some runs, or over runs and their parts; no loop where KC is ALL."""
    if g.block_of_k is BlockOfK.PART:
        each = For("pc", var("run_start"), g.last_of_run, var("kb"), inside)
        end = g.own_size - g.kept_size
        places = (
            LetPtr("kept", g.private() + end, g.atom.acc),
            LetPtr("parts", g.private() + (end - g.part_size), g.atom.acc),
        )
        return (*places[: 1 + g.s.c.packed], Let("run", g.run), For("run_start", g.start, g.end, var("run"), (each,)))
    return (For("pc", g.start, g.end, var("kb"), inside),) if g.s.kc else inside


def kept(g: Operands, row: Index, column: Index) -> tuple[Index | Ptr, ...]:
    """Arguments for the sums of earlier runs: address, row stride of a matrix, whether to add, and to keep the sum.

    The chains of a run are in C, part by part; in the last part of a run they are added up.
    """
    ends = (var("pc") + var("kd")).eq(g.last_of_run)
    row_stride = (var("last") - var("first")) * g.s.nr
    flags = ends * g.start.lt(var("run_start")), ends * g.last_of_run.lt(g.end)
    if g.s.c.packed:
        return Ptr("kept", (row - var("row")) * g.part_width(row_stride)), *flags
    return Ptr("kept", (row - var("row")) * row_stride + (column - g.first_column)), row_stride, *flags


def apart(g: Operands, row: Index) -> tuple[Index | Ptr, ...]:
    """Arguments for sums of a part of a run in tiles of their own.

    These are their address, whether they are complete, and whether this is the first slice of rows.
    """
    place = Ptr("parts", (row - var("row")) * g.part_width((var("last") - var("first")) * g.s.nr))
    return place, (var("pc") + var("kd")).eq(g.end), var("r").eq(0)
