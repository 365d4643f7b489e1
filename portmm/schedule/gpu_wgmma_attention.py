"""Tiles of attention for the matrix units of warpgroups: see `kernels.gpu.wgmma_attention`.

Owns `WarpgroupTiling`, the schedules, and their estimated time. Two or three warpgroups of a block have 64 queries
each; one more brings Q, and tiles of K and V in turns, by the copy engine:

    Q[groups][64][d]  for all tiles of keys
    stages x [BN][d]  of K, and as many of V

Heads are of whole swizzled rows, of equal lengths in Q, K and V, and the copy engine can address them. As many blocks
as there are processors compute one tile of queries after the other. The time of a tile of keys is that of the products,
or of the scores of all warpgroups in plain threads, whichever is longer, and a share of the other: one warpgroup
multiplies while another has scores, the better the more there are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from portmm.schedule.gpu_attention import attention_schedule
from portmm.schedule.gpu_mma_attention import FEW, SIZE, UNIT, WIDEST_HEAD, MatrixTiling, units
from portmm.schedule.gpu_wgmma import ALIGNED, LINE, STRIP
from portmm.schedule.parts import ALL, REGISTERS, SHARED, TMA, Parallel, Tile
from portmm.schedule.program import Program, asynchronous, capacities_of, device_of, exceeded, footprint_of
from portmm.schedule.roofline import Work
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from portmm.schedule.gpu_attention import AttentionSizes
    from portmm.schedule.program import Footprint
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

GROUPS, STAGES = (2, 3), (4, 2)
"""Consumer warpgroups of a block; and stages of K, and of V, of which the first that fit are used."""
KEYS = (176, 128, 96, 80, 64)
"""Keys of a tile."""
BUDGETS = {2: (40, 232), 3: (32, 160)}
"""Registers of a thread of the producer and of the consumer warpgroups, by the number of these."""
NARROW = 64
"""Elements of a head up to which scores take longer than products, and three warpgroups less than two."""
OWN = 32
"""Registers of a consumer for addresses, maxima and sums of weights."""


class WarpgroupTiling(MatrixTiling):
    """The numbers of a schedule of attention for warpgroups."""

    __slots__ = ()

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return self.s.parallel.warpgroups

    @property
    def budgets(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of the consumers."""
        return BUDGETS[self.groups]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; barriers are in the first swizzled rows' alignment."""
        return SIZE * self.d * (self.queries + 2 * self.slots * self.keys) + 8 * (2 * self.groups + 4 * self.slots)

    @property
    def registers(self) -> int:
        """Approximate number of registers of a consumer: scores, weights of half the size, sums."""
        return 4 * self.strips + 2 * self.strips + 4 * self.columns + OWN


def unit(element: str, target: Target) -> tuple[Isa, Atom] | None:
    """The matrix instruction of a warpgroup for a type, or None."""
    return next(units(element, target, "warpgroup"), None)


def schedule_of(  # noqa: PLR0917 - parts of one record
    dtype: str, d: int, keys: int, blocks: int, o_vector: int = 2, loose: str = "", *, groups: int = 2,
    stages: int = 2, pingpong: bool = True,
) -> Schedule:  # fmt: skip
    """A schedule for the keys of a tile, by heads of d elements, of at most so many blocks."""
    rows, vector = groups * STRIP, ALIGNED // SIZE
    tiles = (
        Tile(REGISTERS, 2, keys // 4, UNIT), Tile("warp", STRIP // 4, keys, UNIT), Tile(SHARED, rows, keys, d),
        Tile("L2", rows, ALL, ALL),
    )  # fmt: skip
    s = attention_schedule(
        "wgmma_attention", dtype, (d, d), tiles, (vector, vector, vector, o_vector), loose, TMA, stages
    )
    return replace(s, parallel=Parallel(warpgroups=groups, pingpong=pingpong, persistent=blocks))


def candidates(shape: AttentionSizes, target: Target) -> list[Schedule]:
    """Legal schedules, fastest first by `time`; none where warpgroups or the copy engine cannot be used."""
    d, addressed = shape.d, shape.boxed and min(shape.vectors[:3]) * SIZE >= ALIGNED
    if unit(shape.dtype, target) is None or not asynchronous(target) or shape.queries <= FEW or not shape.keys:
        return []
    if (
        d != shape.dv
        or d % (LINE // SIZE)
        or not 0 < d <= WIDEST_HEAD
        or set(shape.loose) & set("qkv")
        or not addressed
    ):
        return []
    has, vector, blocks = capacities_of(target, dynamic=True), min(shape.vectors[3], 2), device_of(target).processors
    legal = []
    for groups, keys, pingpong in product(GROUPS[: 2 if d <= NARROW else 1], KEYS, (True, False)):
        ways = (
            schedule_of(shape.dtype, d, keys, blocks, vector, shape.loose, groups=groups, stages=x, pingpong=pingpong)
            for x in STAGES
        )
        legal += [s for s in ways if fits(WarpgroupTiling(s)) and not exceeded(footprint(s), has)][:1]
    return sorted(legal, key=lambda s: time(s, shape, target))


def fits(t: WarpgroupTiling) -> bool:
    """Whether consumers have enough registers."""
    return t.registers <= t.budgets[1]


def footprint(s: Schedule) -> Footprint:
    """Registers of a thread at the start of a block, and its shared memory."""
    t = WarpgroupTiling(s)
    down, up = t.budgets
    return footprint_of(s, (down + t.groups * up) // (t.groups + 1), t.shared_bytes)


def work(s: Schedule, target: Target) -> Work:
    """Work of a block for one tile of keys."""
    t, plain = WarpgroupTiling(s), target.rates["simt_f32"]
    scores = t.queries * t.keys
    softmax = scores * (MODEL.score_operations / plain + 1 / MODEL.powers) + t.queries * t.dv / plain
    counts = {"multiply-adds": scores * (t.d + t.dv), "L2": SIZE * t.keys * (t.d + t.dv) / MODEL.engine_gain}
    return Work(counts, softmax)


def time(s: Schedule, shape: AttentionSizes, target: Target) -> float:
    """Estimated time of attention, in cycles of a processor."""
    t, device, pair, own = WarpgroupTiling(s), device_of(target), unit(shape.dtype, target), work(s, target)
    assert pair is not None  # noqa: S101 - candidates have one
    products = own.counts["multiply-adds"] / target.rates[pair[1].name]
    copied = own.counts["L2"] / MODEL.tile_bytes
    exposed = MODEL.exposed_scores if s.parallel.pingpong else MODEL.exposed_apart
    step = max(products, own.waiting, copied) + exposed[t.groups - 2] * min(products, own.waiting) + MODEL.scores_step
    starts = range(0, shape.queries, t.queries)
    steps = sum(-(-_seen(shape, min(x + t.queries, shape.queries)) // t.keys) for x in starts)
    tile = MODEL.tile_result * t.queries * t.dv
    busy = -(-shape.heads * len(starts) // device.processors) / len(starts)
    if shape.causal:  # blocks take tiles as they are done with others, the longest first
        busy = max(shape.heads / device.processors, 1 / len(starts))
    return float(busy * (steps * step + len(starts) * tile) + MODEL.engine_start)


def _seen(shape: AttentionSizes, end: int) -> int:
    """Number of keys that some of the queries before `end` see."""
    return max(0, min(shape.keys, shape.keys - shape.queries + end)) if shape.causal else shape.keys


PROGRAM = Program(
    "gpu.wgmma_attention", candidates, footprint, work, device=True, dynamic_shared=True, time=time, unit=unit
)
