"""Tiles of attention on a device.

Owns `Tiling`, and the choice of one. Imports `spec.dtype`, `schedule.gpu_candidates`, `target.target`. A block of threads keeps BM queries
and their sums O, and walks over blocks of BN keys, whose K and V pass through shared memory in chunks:

    Q[BM][d]          for the whole walk
    K[BN][depth]      a chunk of the elements of a head, or
    V[values][dv]     a chunk of the keys, in the same place
    P[BM][BN]         weights
    part[BM][across]  the largest scores, or the sums, that threads of a row have found

in words of f32, rows of Q, K and P padded to an odd number of vectors of four, so that threads of
neighbouring rows read other banks. A thread has BM / down rows and BN / across columns of the scores, and
of the same rows its share of the columns of O. For each four words that it loads of them there are
as many multiply-adds as the other side has, so tiles are as large as can be with

- no more than `STATIC` bytes of shared memory,
- no more registers than a thread may have,
- as many blocks as there are processors,
- room for two of them on a processor, so that one computes while another waits.

Of `TILES`, which go from large to small, the first is taken that lacks least of this, registers counting most:
what has none spills. On CPUs under OpenCL, which have other registers, those are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.schedule.gpu_candidates import on_gpu
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.target.target import Target

STATIC = 48 << 10
"""CUDA C++ Programming Guide: shared memory that a kernel may have without asking for more."""
WIDEST = 16
"""Bytes that a thread moves at once, at most."""
LANES = 4
"""Words that a thread reads from shared memory at once."""
DEPTH = 32
"""Elements of a head in a chunk of K, about."""
ADDRESSES = 72
"""Registers of a thread for addresses, counters, an expression and what a compiler needs: with NVRTC 13, 32 x 64
scores beside 128 columns of O take 168 in all."""
TILES = ((64, 64, 16, 16), (32, 64, 8, 16), (32, 32, 8, 16), (16, 64, 8, 16), (16, 32, 8, 16), (16, 16, 4, 16))
"""Queries and keys of a block, threads down and across: of many queries."""
FEWEST = ((4, 64, 4, 16), (4, 16, 4, 16))
FEW = ((16, 64, 8, 16), (16, 32, 8, 16), (16, 16, 4, 16))
"""The same for few queries, up to 4 and up to 16. Each row of threads reads all of K from shared memory, which is what
they wait for where memory does not: 4 rows of 16 threads take half of that of 8 rows, whatever is in them."""
RUN = 256
"""Keys that a block walks over, at least, where those of few queries are handed out in runs."""
BUSY = 512
"""Threads for each processor that runs are to make: four vectors that each of them waits for are some 32 KB."""
MOST_RUNS = 128
"""Runs that the keys are cut in, at most: a second kernel puts them together."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of tiles, and how operands lie.

    Attributes:
        d: elements of a head of Q and K.
        dv: of V.
        queries: of a block of threads; heads that share keys have theirs in turn where there are `runs`.
        keys: of a step.
        down: threads along queries.
        across: threads along keys, and along columns of V.
        vectors: elements of Q, K, V and of the result that are moved at once.
        loose: names of those whose rows are not dense in memory.
        runs: keys are handed out in runs, for another kernel to put together.
    """

    d: int
    dv: int
    queries: int
    keys: int
    down: int
    across: int
    vectors: tuple[int, int, int, int] = (1, 1, 1, 1)
    loose: str = ""
    runs: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.down * self.across

    @property
    def rows(self) -> int:
        """Queries of a thread."""
        return self.queries // self.down

    @property
    def columns(self) -> int:
        """Keys of a thread."""
        return self.keys // self.across

    @property
    def chunks(self) -> int:
        """Of K."""
        return -(-self.d // DEPTH)

    @property
    def depth(self) -> int:
        """Elements of a head in a chunk of K: whole vectors."""
        return _whole(-(-self.d // self.chunks))

    @property
    def deep(self) -> int:
        """Words from one row of Q to the next."""
        return _odd(self.depth * self.chunks)

    @property
    def step(self) -> int:
        """Words from one row of a chunk of K to the next."""
        return _odd(self.depth)

    @property
    def beside(self) -> int:
        """Words from one row of P to the next."""
        return _odd(self.keys)

    @property
    def cell(self) -> int:
        """Columns of V side by side in a thread: as many as add no more columns than fewer would."""
        return min((4, 2, 1), key=lambda x: (self._padded(x), -x))

    def _padded(self, cell: int) -> int:
        return -(-self.dv // (cell * self.across)) * cell * self.across

    @property
    def wide(self) -> int:
        """Words from one row of V to the next: columns of all threads."""
        return self._padded(self.cell)

    @property
    def sums(self) -> int:
        """Columns of V of a thread."""
        return self.wide // self.across

    @property
    def values(self) -> int:
        """Keys of a chunk of V: what fits in the place of K's, or four."""
        most = self.keys
        while most > LANES and most * self.wide > max(self.keys * self.step, LANES * self.wide):
            most //= 2
        return most

    @property
    def buffer(self) -> int:
        """Words for chunks of K and of V."""
        return max(self.keys * self.step, self.values * self.wide)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return 4 * (self.queries * (self.deep + self.beside + self.across) + self.buffer)

    @property
    def waiting(self) -> int:
        """Elements of a thread that are on their way to shared memory, at most."""
        parts = ((self.keys * self.depth, self.vectors[1]), (self.values * self.wide, self.vectors[2]))
        return max(-(-size // (vector * self.threads)) * vector for size, vector in parts)

    def registers(self, held: str) -> int:
        """Registers of a thread, about."""
        moved = -(-self.waiting * BY_NAME[held].bytes // 4)
        own = self.rows * (self.columns + self.sums + LANES + 2) + max(LANES, self.sums)
        return own + moved + ADDRESSES


def _whole(x: int) -> int:
    return -(-x // LANES) * LANES


def _odd(x: int) -> int:
    """Words of an odd number of vectors, which hold so many."""
    return x + LANES if x // LANES % 2 == 0 else x


@dataclass(frozen=True, slots=True)
class Asked:
    """What tiles are for.

    Attributes:
        held: type of Q, K and V.
        d: elements of a head of Q and K.
        dv: of V.
        queries: of a head.
        heads: of all items, of Q.
        group: heads that share keys.
        keys: of a head.
        vectors: elements of Q, K, V and of the result that may be moved at once.
        loose: names of those whose rows are not dense in memory.
    """

    held: str
    d: int
    dv: int
    queries: int
    heads: int
    group: int
    keys: int
    vectors: tuple[int, int, int, int]
    loose: str


def tilings(asked: Asked, target: Target) -> list[Tiling]:
    """Legal tiles, best first: see above."""
    device = target.device
    assert device is not None  # noqa: S101 - whoever asks has one
    together = asked.queries * asked.group
    runs = asked.queries <= FEW[0][0] and together <= TILES[0][0] and asked.keys >= 2 * RUN
    rows = together if runs else asked.queries
    found = []
    for queries, keys, down, across in FEWEST if rows <= FEWEST[0][0] else FEW if rows <= FEW[0][0] else TILES:
        if queries >= 2 * rows and queries > FEW[0][0]:
            continue  # half of it would be empty
        t = Tiling(asked.d, asked.dv, queries, keys, down, across, loose=asked.loose, runs=runs)
        most = WIDEST // BY_NAME[asked.held].bytes
        q, k, v, o = (min(x, most) for x in asked.vectors)
        stored = t.cell if runs else min(o, t.cell)
        t = replace(t, vectors=(math.gcd(q, t.depth), math.gcd(k, t.depth), math.gcd(v, t.wide), stored))
        if t.threads <= device.block_threads and t.shared_bytes <= min(STATIC, device.shared_bytes):
            found.append(t)
    if not found:
        raise ScheduleError(
            f"attention of heads of {asked.d} and {asked.dv} elements needs more than the "
            f"{min(STATIC, device.shared_bytes)} bytes of shared memory of {target.name}"
        )
    return sorted(found, key=lambda t: _lacks(t, asked, target))


def _lacks(t: Tiling, asked: Asked, target: Target) -> tuple[int, int, bool]:
    """What tiles lack of registers, of blocks for all processors, and of room for a second block."""
    device = target.device
    assert device is not None  # noqa: S101 - whoever asks has one
    most = device.thread_registers if on_gpu(target) else 0
    short = max(0, t.registers(asked.held) - most) if most else 0
    blocks = min(device.processors, asked.heads * -(-asked.queries // t.queries))
    return short, 0 if t.runs else -blocks, 2 * t.shared_bytes > device.processor_shared_bytes > 0


def choose(asked: Asked, target: Target) -> Tiling:
    """The tiles to use.

    Raises:
        ScheduleError: none are legal.
    """
    return tilings(asked, target)[0]


def runs_of(t: Tiling, asked: Asked, target: Target) -> tuple[int, int]:
    """How many runs the keys are cut in, and the keys of each: a number that follows from sizes and device alone."""
    device = target.device
    assert device is not None  # noqa: S101 - whoever asks has one
    if not t.runs:
        return 1, asked.keys
    blocks = asked.heads // asked.group
    wanted = min(MOST_RUNS, max(1, -(-(BUSY // t.threads) * device.processors // blocks)), -(-asked.keys // RUN))
    each = -(-asked.keys // (wanted * t.keys)) * t.keys
    return -(-asked.keys // each), each
