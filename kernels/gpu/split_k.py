"""Split-K: the sums of slices of k are added by the block that finishes last (fixup), or by another kernel (reduction).

Fixup: each block stores its sums in scratch, thread after thread, so that the same threads of another block read
neighbouring addresses; takes a number from the counter of its tile (`last_to_come` in `targets/isa/simt.toml`); and
ends, unless all others have finished before. The last one adds the stored sums in the order of k, whatever the order in
which blocks finished, so that results are always the same, and goes on with the epilogue. It resets
the counter. Sums of other blocks are read past L1, whose lines may be stale.

Reduction: each slice has stored its sums in scratch, row after row of n; a thread adds those of one element in the
order of k and stores the epilogue's result: `epilogue_store.element`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.address import offset
from portmm.ir.grid_kernel import GridKernel
from portmm.ir.index import Ptr, ceil_div, const, var
from portmm.ir.nodes import Add, For, If, Let, Move, Scratch
from portmm.ir.thread_nodes import Clear, Do, Get, Leave, Shared
from portmm.kernels.gpu import parameters
from portmm.kernels.gpu.epilogue_store import element, operands
from portmm.kernels.gpu.loops import unrolled
from portmm.schedule.program import TICKET, at_once
from portmm.spec.dtype import accumulator
from portmm.spec.layouts import operand

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

THREADS = 128
"""Number of threads of a block of the reduction."""


def ticket(s: Schedule) -> list[Stmt]:
    """Shared memory that tells threads whether their block is the last of its tile."""
    return [Shared("ticket", TICKET // 4, "s32")] if s.parallel.fixup else []


def fixup(
    s: Schedule, tiles: Index, body: tuple[Stmt, ...], threads: int = 0, barrier: int | None = None
) -> tuple[Stmt, ...]:
    """Sum of all slices of this tile, of so many tiles, and `body`, which only the last block runs.

    With a barrier of their own, only so many threads take part; else the others end here.
    """
    if not s.parallel.fixup:
        return body
    acc, count, group = accumulator(*s.types[:2]), threads or s.threads, s.mr * s.nr
    of_thread = var("sum") * count + var("thread")

    def partial(slice_: Index) -> Ptr:
        return Ptr("work", (slice_ * var("tiles") + var("block")) * (group * count) + of_thread)

    store = unrolled("sum", group, Move(partial(var("slice")), Ptr("acc", var("sum"))))
    add = unrolled("sum", group, Do(f"add_far_{acc}", (Ptr("acc", var("sum")), partial(var("other")))))
    # Sums of several slices are read at once, as far as registers suffice.
    together = at_once(s)
    slices = For("other", const(0), const(s.parallel.split), const(1), (add,), together if together > 1 else 0)
    total = (Clear("acc", group), slices, *body)
    operands = (Ptr("counters", var("block")), const(s.parallel.split), var("thread"), Ptr("ticket"))
    before = (Let("tiles", tiles), store)
    if barrier is None:
        return (*ticket(s), *before, Get("last", "last_to_come", operands), Leave(var("last").eq(0)), *total)
    last = Get("last", "last_groups_to_come", (*operands, const(barrier), const(threads)))
    return (*before, last, If(var("last"), total))


def reduction(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel that adds the slices of a schedule: a thread adds those of one element of C, in the order of k."""
    c = s.types[2]
    each = ceil_div(var("n"), THREADS)
    column, row = var("column"), var("row")
    work = Ptr("work", var("item") * var("work_batch") + row * var("n") + column)
    to = Ptr("c", var("item") * var("c_batch") + offset(operand("c", s.c.layout), row, column))
    more = For(
        "i", const(1), const(s.parallel.split), const(1),
        (Add(Ptr("sum"), work + var("i") * (var("batch") * var("work_batch"))),),
    )  # fmt: skip
    total: list[Stmt] = [Scratch("sum", 1, atom.acc), Move(Ptr("sum"), work), more]
    if s.fused:
        total += [*operands(isa, s.fused), Scratch("c_out", 1, c)]
        total += [*element(isa, s.fused, Ptr("sum"), Ptr("c_out"), column), Move(to, Ptr("c_out"))]
    else:
        total.append(Move(to, Ptr("sum")))
    body: tuple[Stmt, ...] = (
        Let("item", var("block") // (var("m") * each)),
        Let("row", var("block") % (var("m") * each) // each),
        Let("column", var("block") % each * THREADS + var("thread")),
        If(column.lt(var("n")), tuple(total)),
    )
    params = (
        *parameters.integers("m", "n", "batch"), *parameters.longs("work_batch"), parameters.read("work", atom.acc),
        *parameters.of_results(s),
    )  # fmt: skip
    grid = (var("batch") * var("m") * each, const(1))
    name = str(replace(s.name(atom), op="slices"))
    return GridKernel(name, isa, atom, params, THREADS, grid, body)
