"""Sums of slices of k, added by the block of a tile that comes last.

Each block leaves its sums in scratch, thread after thread, so that the same thread of another block finds them at
neighbouring addresses; takes a number from the counter of its tile (`last_to_come` in `targets/isa/simt.toml`); and
ends, unless all others have come before. The last one adds what they left in the order of k, whatever the order in
which they came, so that results are always the same, and goes on as if nobody had shared the work with it. It leaves
the counter as it found it. What other blocks wrote is read past L1, whose lines may be older.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.dtype import accumulator
from portmm.grid import Argument
from portmm.grid_candidates import TICKET
from portmm.index import Ptr, const, var
from portmm.ir import For, Let, Move
from portmm.threads import WHOLE, Clear, Do, Get, Leave, Shared

if TYPE_CHECKING:
    from portmm.index import Index
    from portmm.ir import Stmt
    from portmm.schedule import Schedule


def given(s: Schedule) -> list[Argument]:
    """The parameters for sums that are on their way, and for the counters of tiles, which are zeros."""
    held = accumulator(*s.types[:2])
    return [Argument("work", "pointer", held), Argument("counters", "pointer", "s32")] if s.joined else []


def join(s: Schedule, tiles: Index) -> list[Stmt]:
    """Add what all slices of this tile summed, of so many tiles; only the last block comes further."""
    if not s.joined:
        return []
    sums, i = s.mr * s.nr, var("sum")

    def left(slice_: Index) -> Ptr:
        tile = (slice_ * var("tiles") + var("block")) * (sums * s.threads)
        return Ptr("work", tile + i * s.threads + var("thread"))

    def each(body: Stmt) -> Stmt:
        return For("sum", const(0), const(sums), const(1), (body,), WHOLE)

    add = Do(f"add_far_{accumulator(*s.types[:2])}", (Ptr("acc", i), left(var("other"))))
    come = (Ptr("counters", var("block")), const(s.split), var("thread"), Ptr("ticket"))
    return [
        Shared("ticket", TICKET // 4, "s32"),
        Let("tiles", tiles),
        each(Move(left(var("slice")), Ptr("acc", i))),
        Get("last", "last_to_come", come),
        Leave(var("last").eq(0)),
        Clear("acc", sums),
        For("other", const(0), const(s.split), const(1), (each(add),), 0),  # else all that is read is held at once
    ]
