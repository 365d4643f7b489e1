"""Tiles of attention for the matrix units of warpgroups: see `kernels.gpu.wgmma_attention`.

Owns `WarpgroupTiling`, the schedules, and their estimated time. Two warpgroups of a block have 64 queries each; a third
one brings Q, and tiles of K and V in turns, by the copy engine:

    Q[2][64][d]       for all blocks of keys
    stages x [BN][d]  of K, and as many of V

Heads are of whole swizzled rows, of equal lengths in Q, K and V, and the copy engine can address them. The time of a
tile of keys is that of the products, or of the scores of both warpgroups in plain threads, whichever is longer, as one
warpgroup multiplies while the other has scores.
"""

from __future__ import annotations

from dataclasses import replace
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

GROUPS, STAGES = 2, 2
"""Consumer warpgroups of a block, and stages of K, and of V."""
KEYS = (176, 128, 96, 80, 64)
"""Keys of a tile."""
PRODUCER, CONSUMER = 24, 240
"""Registers of a thread of the producer and of the consumer warpgroups."""
OWN = 36
"""Registers of a consumer for addresses, maxima and sums of weights."""


class WarpgroupTiling(MatrixTiling):
    """The numbers of a schedule of attention for warpgroups."""

    __slots__ = ()

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; barriers are in the first swizzled rows' alignment."""
        return SIZE * self.d * (self.queries + 2 * self.slots * self.keys) + 8 * (1 + 4 * self.slots)

    @property
    def registers(self) -> int:
        """Approximate number of registers of a consumer: scores, weights of half the size, sums."""
        return 4 * self.strips + 2 * self.strips + 4 * self.columns + OWN


def unit(element: str, target: Target) -> tuple[Isa, Atom] | None:
    """The matrix instruction of a warpgroup for a type, or None."""
    return next(units(element, target, "warpgroup"), None)


def schedule_of(
    dtype: str, d: int, keys: int, o_vector: int = 8, loose: str = "", *, pingpong: bool = True
) -> Schedule:
    """A schedule for the keys of a tile, by heads of d elements."""
    rows, vector = GROUPS * STRIP, ALIGNED // SIZE
    tiles = (
        Tile(REGISTERS, 2, keys // 4, UNIT), Tile("warp", STRIP // 4, keys, UNIT), Tile(SHARED, rows, keys, d),
        Tile("L2", rows, ALL, ALL),
    )  # fmt: skip
    s = attention_schedule(
        "wgmma_attention", dtype, (d, d), tiles, (vector, vector, vector, o_vector), loose, TMA, STAGES
    )
    return replace(s, parallel=Parallel(warpgroups=GROUPS, pingpong=pingpong))


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
    has, vector = capacities_of(target, dynamic=True), min(shape.vectors[3], ALIGNED // SIZE)
    every = (schedule_of(shape.dtype, d, keys, vector, shape.loose, pingpong=x) for keys in KEYS for x in (True, False))
    legal = [s for s in every if WarpgroupTiling(s).registers <= CONSUMER and not exceeded(footprint(s), has)]
    return sorted(legal, key=lambda s: time(s, shape, target))


def footprint(s: Schedule) -> Footprint:
    """Registers of a thread at the start of a block, and its shared memory."""
    return footprint_of(s, (PRODUCER + GROUPS * CONSUMER) // (GROUPS + 1), WarpgroupTiling(s).shared_bytes)


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
    # Scores are hidden behind products of the other warpgroup; what is left is the way from one to the other.
    step = max(products, own.waiting, copied) + (0.25 if s.parallel.pingpong else 0.3) * min(products, own.waiting)
    blocks = shape.heads * -(-shape.queries // t.queries)
    steps = -(-blocks // device.processors) * -(-shape.keys // t.keys)
    return float(steps * (step + MODEL.group_step) + -(-blocks // device.processors) * MODEL.engine_start)


PROGRAM = Program("gpu.wgmma_attention", candidates, footprint, work, device=True, dynamic_shared=True)
