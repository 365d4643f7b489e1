"""Tiles of queries of persistent blocks, for attention by warpgroups.

Owns `TileQueue`. A block computes one tile of queries after the other, so that the copies of a tile's Q, K and V, and
the first scores of one warpgroup, take place while another warpgroup multiplies or stores the tile before.

Tiles that take equal times are given to blocks in turns. Under bounds, or where items have numbers of keys of their
own, the producer draws the number of the block's next tile from a counter in global memory, and hands it to each
warpgroup with its part of Q, by the same barriers:

    q_full[warpgroup]    Q has landed, and `given` is the tile's number; past the last one, nothing more comes
    q_empty[warpgroup]   all threads of the warpgroup have read both
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import For, If, Let, Read, Scratch
from portmm.ir.thread_nodes import Clear, Do, Get, Leave
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.mma_attention import Work as MmaWork
from portmm.schedule.gpu_mma_attention import SIZE
from portmm.schedule.schedule import WARPGROUP

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.gpu_wgmma_attention import WarpgroupTiling

TOGETHER = 24 << 20
"""Bytes of K and V of the heads whose tiles are sorted: about half of L2."""


@dataclass(frozen=True, slots=True)
class TileQueue(MmaWork):
    """Loops of warpgroups over the tiles of queries of a block."""

    t: WarpgroupTiling

    @property
    def consumers(self) -> int:
        """Threads of all consumer warpgroups."""
        return self.t.groups * WARPGROUP

    @property
    def tiles(self) -> Index:
        """Number of tiles of queries, of all heads and items."""
        return var("items") * var("heads") * ceil_div(var("m"), self.t.queries)

    @property
    def grid(self) -> tuple[Index, Index]:
        """Number of blocks."""
        return minimum(self.tiles, self.t.s.parallel.persistent), const(1)

    @property
    def counted(self) -> bool:
        """Whether tiles take unequal times: blocks take the next one when they are done, by a counter."""
        return bool(self.form.bounds) or self.form.lengths

    def coordinates(self) -> tuple[Stmt, ...]:
        """Head and queries of a tile.

        Of some heads together, whose keys and values fit L2, those tiles are first that see most keys.
        """
        t, tile, blocks = self.t, var("tile"), var("blocks")
        if self.counted:
            inside, width = tile % (var("together") * blocks), var("width")
            order: tuple[Stmt, ...] = (
                Let("together", maximum(1, const(TOGETHER // (2 * SIZE * t.d)) // maximum(1, var("keys")))),
                Let("head_0", tile // (var("together") * blocks) * var("together")),
                Let("width", minimum(var("together"), var("items") * var("heads") - var("head_0"))),
                Let("index", var("head_0") + inside % width),
                Let("row_0", (blocks - 1 - inside // width) * t.queries),
            )
        else:
            order = (Let("index", tile // blocks), Let("row_0", tile % blocks * t.queries))
        return (
            Let("blocks", ceil_div(var("m"), t.queries)),
            *order,
            Let("item", var("index") // var("heads")),
            Let("head", var("index") % var("heads")),
            Let("other", var("head") // var("group")),
            Let("low", var("row_0")),
            Let("high", minimum(var("m"), var("row_0") + t.queries) - 1),
            Let("last", var("m") - 1),
            *self.items(),
        )

    def each(self, number: tuple[Stmt, ...], body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Loop over the tiles of queries of a block, `number`, whose `tile` some statements declare.

        The variable `done` is the number of all tiles of keys before it.
        """
        turns = maximum(0, var("end") - var("first") + self.t.keys - 1) // self.t.keys
        one = (
            *number,
            Read("done", Ptr("turns")),
            *self.coordinates(),
            *self.reach(),
            *body,
            Do("advance", (Ptr("turns"), turns)),
        )
        count = ceil_div(var("tiles") - var("block"), self.t.s.parallel.persistent)
        last = var("tiles") + 1 if self.counted else count
        counter = (Scratch("turns", 1, "s32"), Clear("turns", 1))
        return (*counter, Let("tiles", self.tiles), For("number", const(0), last, const(1), one))

    # -- between the producer and consumers -----------------------------------

    def drawn(self) -> tuple[Stmt, ...]:
        """The producer's next tile; past the last one, consumers learn so."""
        most, strip = self.t.s.parallel.persistent, var("strip")
        if not self.counted:
            return (Let("tile", var("number") * most + var("block")),)
        blocks = minimum(var("tiles"), most)
        none = unrolled("strip", self.t.groups, *self.handed_over(), Do("mbarrier_arrive", (Ptr("q_full", strip),)))
        over = var("tile").lt(var("tiles")).eq(0)
        return (
            Get("tile", "next_tile", (Ptr("counters"), var("number"), var("block"), blocks, var("tiles"))),
            If(over, (none,)),
            Leave(over),
        )

    def handed_over(self) -> tuple[Stmt, ...]:
        """Wait until a warpgroup is done with its part of Q, and the number of its next tile."""
        strip = var("strip")
        wait = Do("mbarrier_wait", (Ptr("q_empty", strip), (var("number") + 1) % 2))
        return (wait, Do("assign", (Ptr("given", strip), var("tile")))) if self.counted else (wait,)

    def taken(self) -> tuple[Stmt, ...]:
        """A consumer's next tile."""
        if not self.counted:
            return (Let("tile", var("number") * self.t.s.parallel.persistent + var("block")),)
        return (
            *self.landed_q(),
            Read("given_tile", Ptr("given", var("warpgroup"))),
            Get("tile", "same_in_warp", (var("given_tile"),)),
            Leave(var("tile").lt(var("tiles")).eq(0)),
        )

    @staticmethod
    def landed_q() -> tuple[Stmt, ...]:
        """Wait for a warpgroup's part of Q."""
        return (Do("mbarrier_wait", (Ptr("q_full", var("warpgroup")), var("number") % 2)),)

    @staticmethod
    def unused() -> Stmt:
        """Arrival of this thread where Q's part of a warpgroup, and the number of a tile, may be overwritten."""
        return Do("mbarrier_arrive", (Ptr("q_empty", var("warpgroup")),))
