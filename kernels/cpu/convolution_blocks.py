"""Blocks of rows of a convolution's result, and their tasks: the outer loops of kernels that read images in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Index, ceil_div, const, minimum, var
from portmm.ir.nodes import For, Function, Let, Parallel, Param
from portmm.kernels.cpu.blocking import TASKS_PER_WORKER, WORKERS, M

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt

IMAGE, FIRST, LAST, LOW = var("image"), var("first_row"), var("last_row"), var("low")
"""The image of a block, its first row of the result and that after its last, and the first row of the strip."""


def blocks_of(out: tuple[int, ...], rows: int) -> Index:
    """Number of blocks of `rows` rows at most, of one image's result."""
    return const(-(-out[0] // rows))


def chunks_of(panels: Index, blocks: Index, pixels: int) -> Index:
    """Shares of panels, so that every thread has work, as much as the others where blocks are few."""
    every = M // pixels * blocks
    fewest = ceil_div((WORKERS - 1) * TASKS_PER_WORKER + 1, every)
    uneven = minimum(1, every % WORKERS) * every.lt(WORKERS * TASKS_PER_WORKER)
    return minimum(panels, fewest + uneven * (ceil_div(fewest, WORKERS) * WORKERS - fewest))


def entry(block: tuple[Stmt, ...], tasks: Index, comment: str) -> tuple[Stmt, ...]:
    """Loop over the items of the batch, whose blocks are tasks."""
    task = Function("block", "task", (Param("item"),), block, comment)
    return (For("item", const(0), var("batch"), const(1), (Parallel(task, tasks, (var("item"),)),)),)


def rows_of_task(chunks: Index, blocks: Index | int, out: tuple[int, ...]) -> tuple[Stmt, ...]:
    """Names of the image and the rows of a task; `chunks` shares of panels have the same rows."""
    number = var("number")
    return (
        Let("chunks", chunks),
        Let("index", var("task") // var("chunks")),
        Let("image", var("index") // blocks),
        Let("number", var("index") % blocks),
        Let("first_row", number * out[0] // blocks),
        Let("last_row", (number + 1) * out[0] // blocks),
    )
