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


def join(s: Schedule, tiles: Index) -> list[Stmt]:
    """Sum of all slices of this tile, of so many tiles; all blocks but the last end here."""
    if not s.parallel.fixup:
        return []
    operands = (Ptr("counters", var("block")), const(s.parallel.split), var("thread"), Ptr("ticket"))
    return [
        *ticket(s),
        *_store_partials(s, tiles, s.threads),
        Get("last", "last_to_come", operands),
        Leave(var("last").eq(0)),
        *_sum_partials(s, s.threads),
    ]


def join_groups(s: Schedule, tiles: Index, threads: int, barrier: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Sum as by `join`, of so many threads, with a barrier of their own; only the last block's run `body`."""
    if not s.parallel.fixup:
        return body
    operands = (
        Ptr("counters", var("block")),
        const(s.parallel.split),
        var("thread"),
        Ptr("ticket"),
        const(barrier),
        const(threads),
    )
    last = Get("last", "last_groups_to_come", operands)
    return (*_store_partials(s, tiles, threads), last, If(var("last"), (*_sum_partials(s, threads), *body)))


def _sums_of(s: Schedule, threads: int, slice_: Index) -> Ptr:
    """Address of sum number `sum` of this thread, of a slice."""
    tile = (slice_ * var("tiles") + var("block")) * (s.mr * s.nr * threads)
    return Ptr("work", tile + var("sum") * threads + var("thread"))


def _store_partials(s: Schedule, tiles: Index, threads: int) -> list[Stmt]:
    move = Move(_sums_of(s, threads, var("slice")), Ptr("acc", var("sum")))
    return [Let("tiles", tiles), unrolled("sum", s.mr * s.nr, move)]


def _sum_partials(s: Schedule, threads: int) -> list[Stmt]:
    far = (Ptr("acc", var("sum")), _sums_of(s, threads, var("other")))
    add = unrolled("sum", s.mr * s.nr, Do(f"add_far_{accumulator(*s.types[:2])}", far))
    # Sums of several slices are read at once, as far as registers suffice.
    together = at_once(s)
    unroll = together if together > 1 else 0
    return [Clear("acc", s.mr * s.nr), For("other", const(0), const(s.parallel.split), const(1), (add,), unroll)]
