"""Tiles of attention in plain threads of a device.

Owns `Tiling`, the schedules and their selection.

A block of threads keeps BM queries and their sums O, and iterates over blocks of BN
keys, whose K and V pass through shared memory in chunks:

    Q[BM][d]          for all blocks of keys
    K[BN][depth]      a chunk of the elements of a head, or
    V[values][dv]     a chunk of the keys, in the same buffer
    P[BM][BN]         weights
    part[BM][across]  partial maxima, or sums, of the threads of a row

in words of f32, rows of Q, K and P padded to an odd number of vectors of four, so that threads of
neighbouring rows read different banks. A thread computes BM / down rows and BN / across columns of the scores, and
its part of the columns of O in the same rows. Each four words that it loads of one operand take part in
as many multiply-adds as the thread has rows or columns of the other, so tiles are as large as possible with

- no more than `STATIC` bytes of shared memory,
- no more registers than a thread may have,
- as many blocks as there are processors,
- room for two blocks on a processor, so that one computes while another waits.

Of `TILES`, in order from large to small, the first that violates these least is selected, registers first:
a thread without enough spills. On CPUs under OpenCL, whose registers differ, registers are not counted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from portmm.errors import ScheduleError
from portmm.schedule.parts import ALL, LOAD, REGISTERS, SHARED, THROUGH, OperandPlan, Parallel, Staging, Tile
from portmm.schedule.program import Program, capacities_of, device_of, exceeded, footprint_of, on_gpu
from portmm.schedule.schedule import Schedule
from portmm.spec.dtype import BY_NAME
from portmm.target.device import STATIC_SHARED
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from portmm.schedule.program import Footprint
    from portmm.target.target import Target

STATIC = STATIC_SHARED
WIDEST = 16
"""Largest vector that a thread moves at once, in bytes."""
LANES = 4
"""Words that a thread reads from shared memory at once."""
DEPTH = 32
"""Approximate number of elements of a head in a chunk of K."""
TILES = ((64, 64, 16, 16), (32, 64, 8, 16), (32, 32, 8, 16), (16, 64, 8, 16), (16, 32, 8, 16), (16, 16, 4, 16))
"""Queries and keys of a block, threads down and across, for many queries."""
FEWEST = ((4, 64, 4, 16), (4, 16, 4, 16))
FEW = ((16, 64, 8, 16), (16, 32, 8, 16), (16, 16, 4, 16))
"""The same for few queries, up to 4 and up to 16. Each row of threads reads all of K from shared memory, which limits
them where memory does not: 4 rows of 16 threads take half of the time of 8 rows, at any number of queries."""


class AttentionSizes(NamedTuple):
    """Sizes, types and layouts of one attention, which schedules are selected for.

    Attributes:
        dtype: type of Q, K and V.
        d: elements of a head of Q and K.
        dv: of V.
        queries: of a head.
        heads: heads of Q, of all items.
        group: heads that share keys.
        keys: of a head.
        vectors: elements of Q, K, V and of the result that may be moved at once.
        loose: names of those whose rows are not dense in memory.
        boxed: rows of Q, K and V, heads and items follow each other in memory, or are one, as copy engines read boxes.
        causal: no query sees keys after its own position, that of the last one being the last key's.
    """

    dtype: str
    d: int
    dv: int
    queries: int
    heads: int
    group: int
    keys: int
    vectors: tuple[int, int, int, int]
    loose: str
    boxed: bool = True
    causal: bool = False


def attention_schedule(  # noqa: PLR0917 - parts of one record
    program: str, dtype: str, heads: tuple[int, int], tiles: tuple[Tile, ...], vectors: tuple[int, int, int, int],
    loose: str = "", method: str = THROUGH, slots: int = 1, *, runs: bool = False, in_registers: bool = False,
) -> Schedule:  # fmt: skip
    """A schedule of attention.

    Args:
        program: the block program.
        dtype: type of Q, K and V.
        heads: elements of a head of Q and K, and of V.
        tiles: queries by keys of a thread, a warp and a block; with `runs`, queries of all heads that share keys are
            adjacent.
        vectors: elements of Q, K, V and of the result that are moved at once.
        loose: names of those whose rows are not dense in memory.
        method: what fills shared memory with K and V.
        slots: tiles of K and V in shared memory.
        runs: keys are partitioned into KV splits, which another kernel combines.
        in_registers: fragments of Q stay in registers.
    """
    layouts = ["any" if x in loose else "row" for x in "qkvo"]
    first = (Staging(REGISTERS, LOAD, 1, vectors[0]),) if in_registers else ()
    plans = [OperandPlan(x, (Staging(SHARED, method, slots, y),)) for x, y in zip(layouts, vectors, strict=True)]
    q = OperandPlan(layouts[0], (*first, Staging(SHARED, THROUGH, 1, vectors[0])))
    o = OperandPlan(layouts[3], (Staging(REGISTERS, LOAD, 1, vectors[3]),))
    return Schedule(
        program, "", dtype, tiles, a=q, b=plans[1], c=o, parallel=Parallel("keys" if runs else "tiles"),
        static=(ALL, *heads[::-1]), v=plans[2],
    )  # fmt: skip


class AttentionTiles:
    """The numbers of a schedule of attention, by their names there.

    Attributes:
        s: the schedule.
        d, dv: elements of a head of Q and K, and of V.
        queries: of a block; with `runs`, queries of all heads that share keys are adjacent.
        keys: of a step.
        rows: queries of a thread.
        threads: of a block.
        vectors: elements of Q, K, V and of the result that are moved at once.
        loose: names of operands whose rows are not dense in memory.
        runs: keys are partitioned into KV splits, which another kernel combines.
    """

    __slots__ = ("d", "dv", "keys", "loose", "queries", "rows", "runs", "s", "threads", "vectors")

    def __init__(self, s: Schedule) -> None:
        self.s, self.runs, self.rows, self.threads = s, s.parallel.over == "keys", s.mr, s.threads
        self.queries, self.keys, self.d, self.dv = s.block.m, s.block.n, s.block.k, s.static[1] if s.static else 0
        self.vectors = s.a.vector, s.b.vector, s.v.vector if s.v else 1, s.c.vector
        plans = zip("qkvo", (s.a, s.b, s.v, s.c), strict=True)
        self.loose = "".join(name for name, x in plans if x and x.layout == "any")


class Tiling(AttentionTiles):
    """The numbers of a schedule of attention in plain threads.

    Attributes:
        columns: keys of a thread.
        down: threads along queries.
        across: threads along keys, and along columns of V.
        chunks: of K.
    """

    __slots__ = ("across", "chunks", "columns", "down")

    def __init__(self, s: Schedule) -> None:
        super().__init__(s)
        self.columns, self.chunks = s.nr, -(-self.d // DEPTH)
        self.down, self.across = self.queries // self.rows, self.keys // s.nr

    @property
    def depth(self) -> int:
        """Elements of a head in a chunk of K: whole vectors."""
        return _whole(-(-self.d // self.chunks))

    @property
    def q_pitch(self) -> int:
        """Pitch of Q in shared memory, in words."""
        return _odd(self.depth * self.chunks)

    @property
    def k_pitch(self) -> int:
        """Pitch of a chunk of K, in words."""
        return _odd(self.depth)

    @property
    def p_pitch(self) -> int:
        """Pitch of P, in words."""
        return _odd(self.keys)

    @property
    def cell(self) -> int:
        """Adjacent columns of V in a thread: as many as need no more padding than fewer would."""
        return min((4, 2, 1), key=lambda x: (self._padded(x), -x))

    def _padded(self, cell: int) -> int:
        return -(-self.dv // (cell * self.across)) * cell * self.across

    @property
    def v_pitch(self) -> int:
        """Pitch of a chunk of V, in words: columns of all threads."""
        return self._padded(self.cell)

    @property
    def sums(self) -> int:
        """Columns of O that a thread sums."""
        return self.v_pitch // self.across

    @property
    def values(self) -> int:
        """Keys of a chunk of V: as many as fit the buffer of K, or four."""
        most = self.keys
        while most > LANES and most * self.v_pitch > max(self.keys * self.k_pitch, LANES * self.v_pitch):
            most //= 2
        return most

    @property
    def buffer(self) -> int:
        """Words for chunks of K and of V."""
        return max(self.keys * self.k_pitch, self.values * self.v_pitch)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return 4 * (self.queries * (self.q_pitch + self.p_pitch + self.across) + self.buffer)

    @property
    def waiting(self) -> int:
        """Maximum number of elements of a thread in flight to shared memory."""
        parts = ((self.keys * self.depth, self.vectors[1]), (self.values * self.v_pitch, self.vectors[2]))
        return max(-(-size // (vector * self.threads)) * vector for size, vector in parts)

    def registers(self, element: str) -> int:
        """Approximate number of registers of a thread, for operands of a type."""
        moved = -(-self.waiting * BY_NAME[element].bytes // 4)
        own = self.rows * (self.columns + self.sums + LANES + 2) + max(LANES, self.sums)
        return int(own + moved + MODEL.attention_addresses)


def _whole(x: int) -> int:
    return -(-x // LANES) * LANES


def _odd(x: int) -> int:
    """A number of words rounded up to an odd number of vectors."""
    return x + LANES if x // LANES % 2 == 0 else x


def schedule_of(  # noqa: PLR0917 - parts of one record
    dtype: str, heads: tuple[int, int], block: tuple[int, int], threads: tuple[int, int],
    vectors: tuple[int, int, int, int] = (1, 1, 1, 1), loose: str = "", *, runs: bool = False,
) -> Schedule:  # fmt: skip
    """A schedule for queries and keys of a block, by threads down and across."""
    own = tuple(x // y for x, y in zip(block, threads, strict=True))
    tiles = (
        Tile(REGISTERS, own[0], own[1], LANES), Tile("warp", *block, LANES), Tile(SHARED, *block, heads[0]),
        Tile("L2", block[0], ALL, ALL),
    )  # fmt: skip
    return attention_schedule("simt_attention", dtype, heads, tiles, vectors, loose, runs=runs)


def candidates(shape: AttentionSizes, target: Target) -> list[Schedule]:
    """Legal schedules, best first, in the order that the module's docstring describes.

    Raises:
        ScheduleError: there are none.
    """
    has = capacities_of(target, dynamic=False)
    together = shape.queries * shape.group
    runs = shape.queries <= FEW[0][0] and together <= TILES[0][0] and shape.keys >= 2 * MODEL.split_keys
    rows = together if runs else shape.queries
    legal = []
    for queries, keys, down, across in FEWEST if rows <= FEWEST[0][0] else FEW if rows <= FEW[0][0] else TILES:
        if queries >= 2 * rows and queries > FEW[0][0]:
            continue  # half of it would be empty
        heads, block, threads = (shape.d, shape.dv), (queries, keys), (down, across)
        t = Tiling(schedule_of(shape.dtype, heads, block, threads, loose=shape.loose, runs=runs))
        most = WIDEST // BY_NAME[shape.dtype].bytes
        q, k, v, o = (min(x, most) for x in shape.vectors)
        stored = t.cell if runs else min(o, t.cell)
        moved = (math.gcd(q, t.depth), math.gcd(k, t.depth), math.gcd(v, t.v_pitch), stored)
        t = Tiling(schedule_of(shape.dtype, heads, block, threads, moved, shape.loose, runs=runs))
        if not exceeded(footprint(t.s), has):
            legal.append(t.s)
    if not legal:
        raise ScheduleError(
            f"attention of heads of {shape.d} and {shape.dv} elements needs more than the "
            f"{has['shared']} bytes of shared memory of {target.name}"
        )
    return sorted(legal, key=lambda s: work(s, shape, target))


def footprint(s: Schedule) -> Footprint:
    """Shared memory of a block; registers are counted in `work`, as threads without enough spill."""
    return footprint_of(s, 0, Tiling(s).shared_bytes)


def work(s: Schedule, shape: AttentionSizes, target: Target) -> tuple[int, int, bool]:
    """Missing registers, the negated number of busy processors, and whether there is no room for a second block."""
    t, device = Tiling(s), device_of(target)
    most = device.thread_registers if on_gpu(target) else 0
    short = max(0, t.registers(shape.dtype) - most) if most else 0
    blocks = min(device.processors, shape.heads * -(-shape.queries // t.queries))
    return short, 0 if t.runs else -blocks, 2 * t.shared_bytes > device.processor_shared_bytes > 0


def splits(s: Schedule, shape: AttentionSizes, target: Target) -> tuple[int, int]:
    """Number of KV splits, and the keys of each: a function of the sizes and the device alone."""
    blocks = shape.heads // shape.group
    wanted = max(1, -(-(MODEL.split_threads // s.threads) * device_of(target).processors // blocks))
    return split_keys(s, shape, min(MODEL.most_splits, wanted, -(-shape.keys // MODEL.split_keys)))


def split_keys(s: Schedule, shape: AttentionSizes, wanted: int) -> tuple[int, int]:
    """About `wanted` KV splits of whole steps, and the keys of each; one where keys are not partitioned."""
    if s.parallel.over != "keys":
        return 1, shape.keys
    each = -(-shape.keys // (wanted * s.block.n)) * s.block.n
    return -(-shape.keys // each), each


PROGRAM = Program("gpu.simt_attention", candidates, footprint, work, device=True)
