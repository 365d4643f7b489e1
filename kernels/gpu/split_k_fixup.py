"""Split-K fixup: the block of a tile that finishes last adds the sums of all slices of k.

Each block stores its sums in scratch, thread after thread, so that the same threads of another block read
neighbouring addresses; takes a number from the counter of its tile (`last_to_come` in `targets/isa/simt.toml`); and
ends, unless all others have finished before. The last one adds the stored sums in the order of k, whatever the order in
which blocks finished, so that results are always the same, and goes on with the epilogue. It resets
the counter. Sums of other blocks are read past L1, whose lines may be stale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, Move
from portmm.ir.thread_nodes import Clear, Do, Get, Leave, Shared
from portmm.kernels.gpu.loops import unrolled
from portmm.schedule.gpu_variants import TICKET, at_once
from portmm.spec.dtype import accumulator

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule


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
