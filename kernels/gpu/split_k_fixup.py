"""Sums of slices of k, added by the block of a tile that comes last.

Each block leaves its sums in scratch, thread after thread, so that the same thread of another block finds them at
neighbouring addresses; takes a number from the counter of its tile (`last_to_come` in `targets/isa/simt.toml`); and
ends, unless all others have come before. The last one adds what they left in the order of k, whatever the order in
which they came, so that results are always the same, and goes on as if nobody had shared the work with it. It leaves
the counter as it found it. What other blocks wrote is read past L1, whose lines may be older.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, Move
from portmm.ir.thread_nodes import WHOLE, Clear, Do, Get, Leave, Shared
from portmm.schedule.gpu_candidates import TICKET, at_once
from portmm.spec.dtype import accumulator

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule


def given(s: Schedule) -> list[Argument]:
    """The parameters for sums that are on their way, and for the counters of tiles, which are zeros."""
    held = accumulator(*s.types[:2])
    return [Argument("work", "pointer", held), Argument("counters", "pointer", "s32")] if s.joined else []


def ticket(s: Schedule) -> list[Stmt]:
    """Where threads learn whether their block is the last of its tile."""
    return [Shared("ticket", TICKET // 4, "s32")] if s.joined else []


def join(s: Schedule, tiles: Index) -> list[Stmt]:
    """Add what all slices of this tile summed, of so many tiles; only the last block comes further."""
    if not s.joined:
        return []
    come = (Ptr("counters", var("block")), const(s.split), var("thread"), Ptr("ticket"))
    return [
        *ticket(s),
        *_left_for_others(s, tiles, s.threads),
        Get("last", "last_to_come", come),
        Leave(var("last").eq(0)),
        *_added(s, s.threads),
    ]


def join_groups(s: Schedule, tiles: Index, threads: int, barrier: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The same of so many threads, which meet at a barrier of their own; only the last block's run `body`."""
    if not s.joined:
        return body
    given = (
        Ptr("counters", var("block")),
        const(s.split),
        var("thread"),
        Ptr("ticket"),
        const(barrier),
        const(threads),
    )
    last = Get("last", "last_groups_to_come", given)
    return (*_left_for_others(s, tiles, threads), last, If(var("last"), (*_added(s, threads), *body)))


def _sums_of(s: Schedule, threads: int, slice_: Index) -> Ptr:
    """Where a slice leaves the sum of this thread that has a number."""
    tile = (slice_ * var("tiles") + var("block")) * (s.mr * s.nr * threads)
    return Ptr("work", tile + var("sum") * threads + var("thread"))


def _each_sum(s: Schedule, body: Stmt) -> Stmt:
    return For("sum", const(0), const(s.mr * s.nr), const(1), (body,), WHOLE)


def _left_for_others(s: Schedule, tiles: Index, threads: int) -> list[Stmt]:
    move = Move(_sums_of(s, threads, var("slice")), Ptr("acc", var("sum")))
    return [Let("tiles", tiles), _each_sum(s, move)]


def _added(s: Schedule, threads: int) -> list[Stmt]:
    far = (Ptr("acc", var("sum")), _sums_of(s, threads, var("other")))
    add = _each_sum(s, Do(f"add_far_{accumulator(*s.types[:2])}", far))
    # What several slices have is read at once, as far as registers hold it.
    together = at_once(s)
    unroll = together if together > 1 else 0
    return [Clear("acc", s.mr * s.nr), For("other", const(0), const(s.split), const(1), (add,), unroll)]
