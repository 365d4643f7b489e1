"""Tiles of attention for matrix units that multiply fragments of a warp: see `kernels.gpu.mma_attention`.

Owns `MatrixTiling`, the schedules and their selection, and the choice between these and those of plain threads.

A block of warps keeps BM queries and their sums O in registers, 16 or 32
rows per warp, and iterates over blocks of BN keys, whose K and V alternate in slots of shared memory, K, V, K, V:

    Q[BM][d]          for all blocks of keys; fragments in registers if these allow
    slots x [BN][d]   of K or V: one is multiplied while the others are in flight

The time of tiles is estimated from the target's rates, in cycles of a processor for one block of keys: products by
matrix units, fragments and copies through shared memory at 128 bytes a cycle, and the softmax in
plain threads. Products and shared memory overlap with each other, the softmax with both only if there are
other warps. Blocks without neighbours, or with fewer queries, take as long as full ones. The fastest tiles are used.

These units are used for f16 and bf16 if the target has an atom of theirs, heads are of multiples of 16 elements up to
`WIDEST_HEAD`, and rows of Q, K and V dense and aligned to 4 bytes; else threads multiply: see `attention_tiling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.schedule.gpu_attention import AttentionTiles, attention_schedule
from portmm.schedule.parts import ALL, ASYNC, REGISTERS, SHARED, THROUGH, Tile
from portmm.schedule.program import (
    LEAST_COPY,
    VECTOR_BYTES,
    Program,
    asynchronous,
    capacities_of,
    device_of,
    exceeded,
    footprint_of,
    room,
)
from portmm.schedule.roofline import Work, roofline
from portmm.target.device import CUDA_WARP
from portmm.target.model import DEVICE as MODEL
from portmm.target.supports import multiplies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.gpu_attention import AttentionSizes
    from portmm.schedule.program import Footprint
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.device import Device
    from portmm.target.isa import Isa
    from portmm.target.target import Target

TYPES = ("f16", "bf16")
WIDEST_HEAD = 256
UNIT = 16
"""Elements of heads, rows of fragments and keys that are multiplied together."""
SIZE, WORD, ROWS_OF_LANES = 2, 4, 8
"""Bytes of an element and of a register, and rows of the lanes of a warp."""
MANY = (
    (128, 4, 64), (128, 4, 32), (128, 8, 64), (64, 4, 64), (64, 4, 32), (64, 2, 64), (64, 2, 32),
    (32, 2, 64), (32, 2, 32), (16, 1, 64), (16, 1, 32),
)  # fmt: skip
"""Queries, warps, keys."""
SLOTS = (2, 4)
FEW = 16
"""Queries of a head up to which those of all heads that share keys form one tile, and keys are split (KV splits)."""
MOST_TOGETHER = 64
"""Maximum number of rows of such a tile."""


class MatrixTiling(AttentionTiles):
    """The numbers of a schedule of attention for matrix units.

    Attributes:
        warps: of a block.
        warp: lanes of a warp.
        slots: tiles of K and V in shared memory.
        copies: tiles are copied asynchronously, without registers; else through them, to two slots.
        q_in_registers: fragments of Q stay in registers.
        high: fragments of a warp along queries.
        strips, columns: groups of eight keys, and of eight columns of V.
    """

    __slots__ = ("columns", "copies", "high", "q_in_registers", "slots", "strips", "warp", "warps")

    def __init__(self, s: Schedule) -> None:
        super().__init__(s)
        self.warps, self.warp, self.slots = self.queries // s.tile("warp").m, s.warp_lanes, s.stages
        self.copies, self.q_in_registers = s.b.asynchronous, s.a.at(REGISTERS) is not None
        self.high, self.strips, self.columns = self.queries // (self.warps * UNIT), self.keys // 8, self.dv // 8

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        most = max(pitch(self.d), pitch(self.dv))
        return SIZE * (self.queries * pitch(self.d) + self.slots * self.keys * most)

    @property
    def registers(self) -> int:
        """Approximate number of registers of a thread."""
        queries = self.d // UNIT * 4 if self.q_in_registers else 4
        moved = 0
        if not self.copies:
            words = -(-self.keys * max(self.d, self.dv) * SIZE // (WORD * self.threads))
            moved = words + words // 2 + MODEL.moving
        uneven = any(self.threads % (x * SIZE // VECTOR_BYTES) for x in (self.d, self.dv))
        own = self.high * (4 * (self.strips + self.columns) + queries + 8)
        return int(own + moved + MODEL.fragment_addresses + (MODEL.uneven_rows if uneven else 0))


def pitch(width: int) -> int:
    """Pitch of a tile in shared memory, in elements: see `kernels.gpu.attention_tiles`."""
    vectors = width * SIZE // VECTOR_BYTES
    return width if vectors % 8 == 0 or vectors in (2, 4) else width + VECTOR_BYTES // SIZE


def units(element: str, target: Target, by: str) -> Iterator[tuple[Isa, Atom]]:
    """The matrix instructions of a device for a type, of threads that multiply together: "warp" or "warpgroup"."""
    device = target.device
    if device is None or element not in TYPES:
        return
    for isa in target.isas:
        fits = (x for x in isa.atoms if x.unit == by and x.a == x.b == element)
        yield from ((isa, x) for x in fits if multiplies(isa, x, device))


def unit(element: str, target: Target) -> tuple[Isa, Atom] | None:
    """The matrix instruction of a warp for a type, or None.

    Weights are a left operand as they lie in registers, and fragments are loaded as matrices: both are so where an
    atom's operands have a `load`.
    """
    fits = units(element, target, "warp")
    return next(((isa, x) for isa, x in fits if x.a_fragment is not None and x.a_fragment.load), None)


def lacks(shape: AttentionSizes, target: Target) -> str:
    """The reason why matrix units cannot be used, or an empty string."""
    why = _unsuited(shape, target)
    return why or ("" if candidates(shape, target) else "no tiles fit its registers and shared memory")


def _unsuited(shape: AttentionSizes, target: Target) -> str:
    """The reason why matrix units cannot have an attention's types and layouts, or an empty string."""
    if unit(shape.dtype, target) is None:
        return f"{target.name} multiplies no fragments of {shape.dtype}"
    if shape.d % UNIT or shape.dv % UNIT or max(shape.d, shape.dv) > WIDEST_HEAD or 0 in (shape.d, shape.dv):
        return f"heads have {shape.d} and {shape.dv} elements: no multiples of {UNIT} up to {WIDEST_HEAD}"
    if set(shape.loose) & set("qkv") or min(shape.vectors[:3]) * SIZE < LEAST_COPY:
        return "rows of an operand are not dense, or not aligned to 4 bytes"
    return ""


def schedule_of(  # noqa: PLR0917 - parts of one record
    dtype: str, heads: tuple[int, int], shape: tuple[int, int, int], slots: int = 2,
    vectors: tuple[int, int, int, int] = (8, 8, 8, 8), loose: str = "", *, in_registers: bool = True,
    runs: bool = False, copies: bool = True, warp: int = CUDA_WARP,
) -> Schedule:  # fmt: skip
    """A schedule for queries, warps and keys of a block."""
    queries, warps, keys = shape
    rows = queries // warps
    tiles = (
        Tile(REGISTERS, rows // ROWS_OF_LANES, keys * ROWS_OF_LANES // warp, UNIT), Tile("warp", rows, keys, UNIT),
        Tile(SHARED, queries, keys, heads[0]), Tile("L2", queries, ALL, ALL),
    )  # fmt: skip
    method = ASYNC if copies else THROUGH
    return attention_schedule(
        "mma_attention", dtype, heads, tiles, vectors, loose, method, slots, runs=runs, in_registers=in_registers
    )


def candidates(shape: AttentionSizes, target: Target) -> list[Schedule]:
    """Legal schedules, fastest first by `time`; none where matrix units cannot be used."""
    if _unsuited(shape, target):
        return []
    device, copies, has = device_of(target), asynchronous(target), capacities_of(target, dynamic=True)
    together = shape.queries * shape.group
    runs = shape.queries <= FEW and shape.keys >= 2 * MODEL.split_keys
    rows = together if runs else shape.queries
    q, k, v, o = (min(x, VECTOR_BYTES // SIZE) for x in shape.vectors)
    legal = []
    for queries, warps, keys in MANY:
        half_empty = queries > UNIT and queries >= 2 * rows
        again = queries < min(rows, MOST_TOGETHER)  # keys are read again for the rest
        if half_empty or (runs and (again or warps * UNIT != queries or queries > MOST_TOGETHER)):
            continue
        for slots in SLOTS if copies else SLOTS[:1]:
            ways = (
                schedule_of(
                    shape.dtype, (shape.d, shape.dv), (queries, warps, keys), slots, (q, k, v, o), shape.loose,
                    in_registers=x, runs=runs, copies=copies, warp=device.warp,
                )
                for x in (True, False)
            )  # fmt: skip
            legal += [s for s in ways if not exceeded(footprint(s), has)][:1]
    return sorted(legal, key=lambda s: time(s, shape, target))


def footprint(s: Schedule) -> Footprint:
    """Registers of a thread, and shared memory of a block."""
    return footprint_of(s, MatrixTiling(s).registers, MatrixTiling(s).shared_bytes)


def occupancy(t: MatrixTiling, device: Device) -> int:
    """Number of blocks that run on a processor at once."""
    warps = room(device, t.registers, t.warp)
    return max(1, min(warps // t.warps, device.processor_shared_bytes // t.shared_bytes, device.threads // t.threads))


def work(s: Schedule, target: Target) -> Work:
    """Work of a block for one block of keys; only other warps hide the softmax."""
    t, plain = MatrixTiling(s), target.rates["simt_f32"]
    elements, scores = t.keys * (t.d + t.dv), t.queries * t.keys
    again = 0 if t.q_in_registers else t.queries * t.d
    softmax = scores * (MODEL.score_operations / plain + 1 / MODEL.powers) + t.queries * t.dv / plain
    counts = {
        "multiply-adds": t.queries * elements, "shared memory": SIZE * (elements * (t.warps + 1) + again),
        "L2": SIZE * elements,
    }  # fmt: skip
    return Work(counts, softmax)


def time(s: Schedule, shape: AttentionSizes, target: Target) -> float:
    """Estimated time of attention, in cycles of a processor."""
    t, device, pair, own = MatrixTiling(s), device_of(target), unit(shape.dtype, target), work(s, target)
    assert pair is not None  # noqa: S101 - checked by `lacks`
    rates = {"multiply-adds": target.rates[pair[1].name], "shared memory": MODEL.shared_bytes, "L2": MODEL.tile_bytes}
    step = roofline(own.counts, rates, {"softmax": own.waiting}, 0.0).seconds
    rows = shape.queries * (shape.group if t.runs else 1)
    blocks = shape.heads // (shape.group if t.runs else 1) * -(-rows // t.queries)
    blocks *= min(MODEL.most_splits, -(-shape.keys // MODEL.split_keys)) if t.runs else 1
    together = min(occupancy(t, device), -(-blocks // device.processors))
    waits = 1 + MODEL.warps_hiding / (together * t.warps)
    if t.runs:
        # Loads in flight hide the latency of memory, which takes about the keys of a tile of two blocks.
        waits = 1 + 2 * 64 / (occupancy(t, device) * (t.slots - 1) * t.keys)
    steps = -(-blocks // device.processors) * -(-shape.keys // t.keys)
    return float(steps * step * waits)


PROGRAM = Program(
    "gpu.mma_attention", candidates, footprint, work, device=True, dynamic_shared=True, time=time, unit=unit
)
