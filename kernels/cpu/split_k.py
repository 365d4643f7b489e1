"""Split-K: a C for each thread's run of k, and their sum in the order of k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Add, For, Function, Let, LetPtr, Move, Parallel, Param
from portmm.kernels.cpu.blocking import WORKERS, M, N
from portmm.kernels.cpu.summation_runs import extents_of_k
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.operands import Operands


def split_k(g: Operands, blocks: Stmt) -> tuple[Stmt, ...]:
    """Products of one item: `blocks` over each thread's run of k, then the sum of the results."""
    task, steps, runs, item = var("task"), var("steps"), var("runs"), var("item")
    counts = (
        *extents_of_k(g),
        Let("steps", ceil_div(g.k, var("kb"))),
        Let("runs", minimum(WORKERS, steps)),
    )
    partial = Ptr("work", g.own_size * WORKERS)
    part = (
        *counts,
        Let("k_first", steps * task // runs * var("kb")),
        Let("k_last", minimum(g.k, steps * (task + 1) // runs * var("kb"))),
        LetPtr("cp", partial + task * (M * N), g.atom.acc),
        blocks,
    )
    segments = ceil_div(N, MODEL.sum_columns)
    total = (
        Let("i", task // segments),
        Let("j_first", task % segments * MODEL.sum_columns),
        Let("j_last", minimum(N, var("j_first") + MODEL.sum_columns)),
        *counts,
        *_sum(g, partial),
    )
    one = Function("run_of_k", "task", (Param("item"),), part, "All of C over a run of k")
    sums = Function("sum_runs", "task", (Param("item"),), total, "A piece of a row of C: the sum over runs")
    return (Parallel(one, g.runs, (item,)), Parallel(sums, M * segments, (item,)))


def _sum(g: Operands, partial: Ptr) -> tuple[Stmt, ...]:
    """Sum over runs of a piece of a row of C.

    Run by run, because the runs of one element are a whole C apart: often in one set of L1.
    """
    i, j, run = var("i"), var("j"), var("run")
    first, last = var("j_first"), var("j_last")
    c = g.operand("c", i * var("c_m") + j)
    row = partial + i * N + j
    add = For("j", first, last, const(1), (Add(c, row + run * (M * N)),))
    return (
        For("j", first, last, const(1), (Move(c, row),)),
        For("run", const(1), var("runs"), const(1), (add,)),
    )
