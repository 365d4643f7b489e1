"""The terms of the cost model: multiply-adds, tiles, packing, traffic of levels, and what threads share.

Owns the terms, each by number of rows, then by candidate. Imports `schedule.cpu_candidates`, `schedule.cost_columns`, `schedule.cost_table`. Most
of the constants were fitted, as `cost` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.schedule.cost_columns import WHOLE, Flags
from portmm.schedule.cost_table import DEFAULT_BYTES_PER_CYCLE, LINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.schedule.cost_table import Table
    from portmm.spec.problem import Problem

LOADS_PER_CYCLE = 2.0
"""Load ports of every out-of-order core described so far."""
CONFLICTS = 0.31
"""Share of the loads that a multiply-add has to wait for: banks, lines split in two, full queues."""
FILLS, OVERFULL = 24, 1.35
"""Lines that a core can wait for at once, and the slowdown of a stream that asks for more."""
TILE_CYCLES = 70.0
"""Calling a micro-kernel, computing its addresses, leaving its loop."""
CONFIGURE = 100.0
"""Configuring tiles for a block and giving them up. Assumed."""
CUT_RUNS = 1.4
"""Slowdown of a stream whose rows threads cut: each piece starts with misses. Measured 1.2 to 1.7."""
CONVERT = 1.0
"""Cycles to convert a fragment as it is loaded: two instructions beside the load, on ports that multiply."""
DECODE = 1.0
"""Cycles to make a vector of numbers of codes that are multiplied at once."""
GROUP_END, GROUP_WAITS = 3.0, 2.0
"""Multiply-adds' worth of converting a vector of integer sums and adding it scaled, and of fetching
what it is added to where there is no register for that."""
FINISH = 4.0
"""Cycles to turn a vector of sums into elements of C."""
BOTH_FAR = 1.3
"""Slowdown of tiles when both operands come from L2: measured on Sapphire Rapids, 1.90 TFLOP/s for 2.50."""
STREAMS = 16
"""Rows that a hardware prefetcher follows at once; past that, each row of a
strided operand starts with a miss."""
MOST_SIMULATED = 64
"""Tasks whose hand-over is played through; with more, it would take longer than it is worth."""

Array = np.ndarray[Any, np.dtype[np.float64]]
"""Numbers by number of rows, or one for all of them, then by candidate."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of problems that differ in M.

    Attributes:
        m: values of M, one below the other.
        n, k, batch: those of all of them.
        reached: sets of a level that rows of a B in place start in, by the level's name.
    """

    m: Array
    n: float
    k: float
    batch: float
    reached: dict[str, float]

    @classmethod
    def of(cls, t: Table, q: Problem, rows: Sequence[int]) -> Sizes:
        """The sizes of a problem, for several values of M."""
        m = np.array(rows, np.float64)[:, np.newaxis]
        return cls(m, float(q.n), float(q.k), float(q.batch), reached(t, q.n))


def reached(t: Table, n: int) -> dict[str, float]:
    """Sets of each level that rows of a B in place of `n` columns start in."""
    if "strided" not in t.some:
        return {}
    # All rows in place hold elements of one type.
    row = int(n * t.x.b[t.x.strided][0])
    found = {}
    for level in t.target.levels:
        sets = level.bytes // (level.line * level.ways)
        found[level.name] = float(sets // gcd(max(1, row // level.line), sets))
    return found


@dataclass(frozen=True, slots=True)
class Extents:
    """A problem cut into the blocks of each candidate.

    Attributes:
        t: the candidates.
        sizes: those of the problem.
        k: steps of a full sum: units of k.
        visits: visits of the micro-kernel across C.
        blocks: blocks of rows.
        slices: register tiles along M.
        passes: blocks of k.
        depth: units of k of a block.
        rows: rows of a block.
        fewest: pieces that NC cuts the columns into.
        heights: heights of the slices: at most two.
        counts: how many slices have each.
    """

    t: Table
    sizes: Sizes
    k: Array
    visits: Array
    blocks: Array
    slices: Array
    passes: Array
    depth: Array
    rows: Array
    fewest: Array
    heights: Array
    counts: Array

    @classmethod
    def of(cls, t: Table, q: Sizes) -> Extents:
        """The extents of problems of these sizes."""
        x, m = t.x, q.m
        k = np.ceil(q.k / x.k_pack)
        slices = np.ceil(m / x.mr)
        low = np.floor(m / slices)
        taller = m - low * slices
        return cls(
            t,
            q,
            k,
            visits=np.ceil(q.n / x.wide),
            blocks=np.ceil(m / x.mc),
            slices=slices,
            passes=np.ceil(k / x.kc),
            depth=np.minimum(k, x.kc),
            rows=np.minimum(m, x.mc),
            fewest=np.ceil(q.n / x.nc),
            heights=np.stack((low + 1, low)),
            counts=np.stack((taller, slices - taller)),
        )

    @property
    def m(self) -> Array:
        """Values of M."""
        return self.sizes.m

    def home(self, size: Array) -> Any:
        """The nearest level that can hold `size` bytes: its place among the levels, memory being last."""
        return np.searchsorted(self.t.reach, size)

    def outward(self, size: Array) -> Any:
        """Cycles in which `size` bytes pass between a core and the nearest level that can hold them."""
        return size / np.choose(self.home(size), self.t.bandwidth)


def compute(v: Extents) -> Array:
    """Cycles of one item: per step of k, the slowest of mac ports, load ports and latency."""
    t, x, h = v.t, v.t.x, v.heights
    # A tile takes as long as it has rows.
    strips = np.ceil(h / x.strip_rows) if "strips" in t.some else h
    macs = strips * (x.vectors / np.where(x.tiled, x.m, 1.0))
    if "decodes" in t.some:
        macs = np.where(x.decodes, h * x.vectors * (1 + _group_ends(v)) + DECODE * x.vectors + h, macs)
    if t.some & {"left", "right"}:
        macs = macs + CONVERT * (h * x.left + x.vectors * x.right) * t.rate
    loads = (strips + x.vectors * x.deep) / LOADS_PER_CYCLE
    # A chain advances one step per latency; unrolling cannot help it.
    step = np.maximum(np.maximum(macs / t.rate, loads), x.latency) + CONFLICTS * loads
    cycles: Array = (v.counts * (step + t.steps)).sum(axis=0) * (v.visits * np.ceil(v.k / x.covers))
    if "tiled" in t.some:
        cycles = cycles * np.where(x.tiled & ~_b_fits(v, "L1"), BOTH_FAR, 1.0)
    return cycles * _crowding(v) * np.where(_short(v), t.apart, 1.0)


def _group_ends(v: Extents) -> Array:
    """Cost of scaling a group's integer sums, per multiply-add of the group."""
    x = v.t.x
    waiting = 2 * v.heights * np.floor(x.vectors / x.panels) > x.registers
    return np.where(x.spans, (GROUP_END + GROUP_WAITS * waiting) * x.k_pack / np.maximum(x.group, 1.0), 0.0)


def _short(v: Extents) -> Flags:
    """B is read in place, and its rows lie apart."""
    return v.t.x.strided & (v.sizes.n > v.t.x.wide)


def _crowding(v: Extents) -> Array | float:
    """Slowdown by rows of an A in place that start in one set of L1, of which B and C need ways too."""
    level = v.t.target.level("L1")
    if level is None or "rows_in_place" not in v.t.some:
        return 1.0
    aligned = (v.sizes.k * v.t.x.a) % (level.bytes // level.ways) == 0
    return np.where(aligned & (v.m != 1), v.t.crowded, 1.0)


def tile_setup(v: Extents) -> Array:
    """Cycles to start and finish register tiles: one access to C per vector and block of k."""
    t, x, q = v.t, v.t.x, v.sizes
    # A sum over lanes folds them in half, a shuffle and an addition each time.
    each = np.where(v.passes > 1, t.carried[1], t.carried[0])
    one = (v.counts * (TILE_CYCLES + x.latency + v.heights * (x.vectors * each))).sum(axis=0)
    cycles: Array = one * (v.visits * v.passes) + np.where(x.static, 0.0, 40.0)
    if "finishes" in t.some:
        cycles = cycles + x.finishes * (FINISH * v.m * np.ceil(q.n / x.line))
    if "tiled" in t.some:
        cycles = cycles + x.tiled * (CONFIGURE * v.blocks)
    return cycles


def packing_b(v: Extents) -> Array:
    """Cycles to pack B: a panel once per block of rows, or all of it once for all threads."""
    t, x, q = v.t, v.t.x, v.sizes
    cycles = t.packs
    if "pack_b" in t.some:
        columns = v.visits * x.wide if "panels" not in t.some else np.ceil(q.n * x.panels / x.wide) * x.wide / x.panels
        cycles = cycles + v.k * columns * np.where(x.once, 1.0, v.blocks) * t.copy_b
    if "once" in t.some:
        # The copy is written to, and comes back from, where it fits; half of that overlaps.
        cycles = cycles + x.once * v.outward(v.k * q.n * x.b)
    return cycles


def _b_fits(v: Extents, name: str) -> Flags:
    """A panel of B and the slice of A that passes fit a level."""
    x, level = v.t.x, v.t.target.level(name)
    fits: Flags = (x.wide * x.b + x.mr * x.a) * v.depth <= (level.bytes if level else WHOLE)
    return fits


def _b_stays(v: Extents, name: str) -> Flags:
    """A panel of B keeps its place in a level while the slices of A pass.

    Rows of a B in place lie a stride apart; only so many of them fit as sets
    that the stride reaches have ways. So it is in L1, whose sets follow the
    addresses that a program sees, and in L2, where matrices lie in large pages
    and the next panel comes in meanwhile.
    """
    x, level, fits = v.t.x, v.t.target.level(name), _b_fits(v, name)
    if level is None or "strided" not in v.t.some:
        return fits
    sets = level.bytes // (level.line * level.ways)
    lines = np.maximum(1.0, x.wide * x.b // level.line)
    panels = np.where(x.ahead, 2.0, 1.0) if name != "L1" else 1.0
    room = level.ways * np.minimum(v.sizes.reached[name], sets // lines)
    stays: Flags = fits & (~x.strided | (np.minimum(x.kc, v.sizes.k) * panels <= room))
    return stays


def traffic(v: Extents) -> tuple[dict[str, Array], dict[str, Array]]:
    """Cycles that each level's loads take for one item; and where threads cut rows of B, for those levels it slows."""
    t, x, q, levels = v.t, v.t.x, v.sizes, v.t.target
    names = [level.name for level in levels.levels]
    capacity = {level.name: levels.counted(level.name) for level in levels.levels}
    stays, short = _b_stays(v, "L1"), _short(v)
    across = v.visits * x.wide * v.k
    # Registers <- L1: every step of k reads MR of A and NR of B per tile.
    reads = v.visits * v.m * v.k * x.a + v.slices * across * x.b
    # L1 <- L2: a block of A passes once per visit, B once if it stays.
    block = v.rows * v.depth * x.a
    a_once = v.m * v.k
    a_l2 = a_once * np.where(block <= capacity.get("L1", 0) // 2, 1.0, v.visits)
    b_l2 = across * np.where(stays, v.blocks, v.slices * np.where(short, t.runs, 1.0))
    c_once = v.m * q.n
    c_again = c_once * (2 * v.passes - 2)
    # Between passes over k, the block of C waits in the nearest level that holds it.
    c_home = v.home(np.minimum(c_once, v.rows * np.minimum(x.nc, q.n)) * x.c)
    near = names.index("L1") if "L1" in names else WHOLE
    l2 = a_l2 * x.a + b_l2 * x.b + (c_once + c_again * (c_home != near)) * x.c
    bandwidth = {name: float(each) for name, each in zip((*names, "memory"), t.bandwidth, strict=True)}
    terms = {
        "L1": reads / (bandwidth.get("L1") or DEFAULT_BYTES_PER_CYCLE["L1"]),
        "L2": l2 / (bandwidth.get("L2") or DEFAULT_BYTES_PER_CYCLE["L2"]),
    }
    home = v.home(_bytes(v))
    nearest = sum(name in ("L1", "L2") for name in names)
    beyond = home >= nearest
    # L2 <- further out: B once per block of rows, C once per pass, A again if its block does not fit.
    a_fits = block <= capacity.get("L2", 0)
    b_again = np.where(a_fits & _b_stays(v, "L2"), v.blocks, v.slices)
    b_bytes, a_bytes = v.k * q.n * x.b_far, a_once * x.a_far
    c_far = c_once * x.c_stored + c_again * x.c * (c_home >= nearest)
    outer = b_bytes * b_again + c_far + a_bytes * np.where(a_fits, 1.0, v.visits)
    slow = np.where(short & (v.depth > STREAMS), t.runs, 1.0)
    slow = slow * np.where(short & ~x.asks & (v.depth * x.wide * x.b > FILLS * LINE), OVERFULL, 1.0)
    far = b_bytes * np.where(b_bytes > capacity.get("L3", 0), b_again, 1.0)
    c_last = c_once * x.c_stored + c_again * x.c * (c_home == len(names))
    in_memory = home == len(names)

    def outside(slow: Array) -> dict[str, Array]:
        from_memory = in_memory * ((far * slow + c_last + a_bytes) / bandwidth["memory"])
        if "L3" in names:
            return {"L3": beyond * (outer * slow / bandwidth["L3"]), "memory": from_memory}
        return {"memory": np.where(in_memory, from_memory, beyond * (outer * slow / bandwidth["memory"]))}

    cut = short & t.cut
    return terms | outside(slow), outside(slow * np.where(cut, CUT_RUNS, 1.0)) if t.cut.any() else {}


def _bytes(v: Extents) -> Array:
    """Compulsory traffic, as `Problem.bytes` has it, by number of rows."""
    q, (a, b, c) = v.sizes, v.t.elements
    return q.batch * (q.m * q.k * a + q.k * q.n * b + q.m * q.n * c)


def shared(v: Extents, workers: int) -> tuple[Array, Array, Array, Array]:
    """Pieces of the columns, tasks, threads that have some, and the part of the work that the busiest one does.

    A task is taken by the next thread that is free.
    """
    t, x, q = v.t, v.t.x, v.sizes
    if workers == 1:
        one = np.ones(1)
        return np.where(x.over_k | x.over_batch, 1.0, v.fewest), one, one, one
    first, of = t.firsts, t.group_of
    visits, blocks, fewest, passes = v.visits[first], v.blocks[:, first], v.fewest[first], v.passes[first]
    over_k, over_batch = x.over_k[first], x.over_batch[first]

    def cut(threads: Any) -> tuple[Array, Array]:
        shares = np.maximum(fewest, np.minimum(visits, np.ceil((threads - 1) * 4 / blocks)))
        tasks = np.where(over_k, np.minimum(threads, passes), blocks * shares)
        return shares, np.where(over_batch, np.minimum(q.batch, threads * 4), tasks)

    shares, tasks = cut(workers)
    packed = np.where(over_k | over_batch, 1.0, shares)[:, of]
    threads = np.minimum(workers, tasks)
    parts, mine = cut(threads)
    share = np.ceil(mine / threads) / mine
    played = ~(over_k | over_batch) & (threads > 1) & (mine <= MOST_SIMULATED)
    for i, j in zip(*map(np.ndarray.tolist, played.nonzero()), strict=True):
        share[i, j] = _busiest(int(visits[j]), int(parts[i, j]), int(blocks[i, j]), int(threads[i, j]))
    return packed, tasks[:, of], threads[:, of], np.where(threads == 1, 1.0, share)[:, of]


@lru_cache(maxsize=4096)
def _busiest(visits: int, shares: int, blocks: int, threads: int) -> float:
    """Part of all visits that the busiest thread makes, each taking the next task when free."""
    low, wider = divmod(visits, shares)
    load = [0] * threads  # a heap
    for task in range(shares * blocks):
        heapreplace(load, load[0] + low + (task % shares < wider))
    return max(load) / (visits * blocks)
