"""Terms of the cost model of CPUs: multiply-adds, tiles, packing, traffic of cache levels, and load balance of threads.

Owns the terms, each by value of M, then by candidate. Most of the constants were fitted, as `schedule.cpu_cost` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.schedule.cpu_cost_columns import WHOLE, Flags
from portmm.schedule.cpu_cost_table import DEFAULT_BYTES_PER_CYCLE, LINE
from portmm.target.model import CPU as MODEL
from portmm.util.memo import cached

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.schedule.cpu_cost_table import Table
    from portmm.spec.problem import Problem

MOST_SIMULATED = 64
"""Maximum number of tasks whose scheduling is simulated; with more, simulation would take longer than it saves."""

Array = np.ndarray[Any, np.dtype[np.float64]]
"""Numbers by value of M, or one for all of them, then by candidate."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of problems that differ in M.

    Attributes:
        m: values of M, as a column.
        n, k, batch: the sizes that all of them share.
        reached: number of sets of a level that rows of a B in place start in, by the level's name.
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
    """Number of sets of each level that rows of a B in place of `n` columns start in."""
    row = int(n * t.strided)
    return {name: float(sets // gcd(max(1, row // line), sets)) for name, line, sets in t.sets}


@dataclass(frozen=True, slots=True)
class Extents:
    """A problem partitioned into the blocks of each candidate.

    Attributes:
        t: the candidates.
        sizes: sizes of the problem.
        k: steps of a full sum: units of k.
        visits: calls of the micro-kernel along N.
        blocks: blocks of rows.
        slices: register tiles along M.
        passes: blocks of k.
        depth: units of k of a block.
        rows: rows of a block.
        fewest: blocks of NC columns.
        mr_variants: rows of the register tiles: at most two values.
        counts: number of register tiles with each.
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
    mr_variants: Array
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
            visits=np.ceil(q.n / x.visit_n),
            blocks=np.ceil(m / x.mc),
            slices=slices,
            passes=np.ceil(k / x.kc),
            depth=np.minimum(k, x.kc),
            rows=np.minimum(m, x.mc),
            fewest=np.ceil(q.n / x.nc),
            mr_variants=np.stack((low + 1, low)),
            counts=np.stack((taller, slices - taller)),
        )

    @property
    def m(self) -> Array:
        """Values of M."""
        return self.sizes.m

    def home(self, size: Array) -> Any:
        """The index of the nearest level with room for `size` bytes; that of memory is last."""
        return np.searchsorted(self.t.reach, size)

    def outward(self, size: Array) -> Any:
        """Cycles to move `size` bytes between a core and the nearest level with room for them."""
        return size / np.choose(self.home(size), self.t.bandwidth)


def compute(v: Extents) -> Array:
    """Cycles of one item: per step of k, the slowest of mac ports, load ports and latency."""
    t, x, mr = v.t, v.t.x, v.mr_variants
    # The time of a tile is proportional to its rows.
    strips = np.ceil(mr / x.strip_rows) if "strips" in t.some else mr
    macs = strips * (x.vectors / np.where(x.tiled, x.m, 1.0))
    if "decodes" in t.some:
        macs = np.where(x.decodes, mr * x.vectors * (1 + _group_ends(v)) + MODEL.decode * x.vectors + mr, macs)
    if t.some & {"left", "right"}:
        macs = macs + MODEL.convert * (mr * x.left + x.vectors * x.right) * t.rate
    loads = (strips + x.vectors * x.deep) / MODEL.loads_per_cycle
    # A chain advances one step per latency, however far it is unrolled.
    step = np.maximum(np.maximum(macs / t.rate, loads), x.latency) + MODEL.conflicts * loads
    cycles: Array = (v.counts * (step + t.steps)).sum(axis=0) * (v.visits * np.ceil(v.k / x.covers))
    if "tiled" in t.some:
        cycles = cycles * np.where(x.tiled & ~_b_fits(v, "L1"), MODEL.both_far, 1.0)
    return cycles * _crowding(v) * np.where(_short(v), t.apart, 1.0)


def _group_ends(v: Extents) -> Array:
    """Cost of scaling a group's integer sums, per multiply-add of the group."""
    x = v.t.x
    waiting = 2 * v.mr_variants * np.floor(x.vectors / x.panels) > x.registers
    return np.where(x.spans, (MODEL.group_end + MODEL.group_waits * waiting) * x.k_pack / np.maximum(x.group, 1.0), 0.0)


def _short(v: Extents) -> Flags:
    """Whether B is read in place, in rows with a stride."""
    return v.t.x.strided & (v.sizes.n > v.t.x.visit_n)


def _crowding(v: Extents) -> Array | float:
    """Slowdown by rows of an A in place that start in one set of L1, where B and C need ways too."""
    level = v.t.target.level("L1")
    if level is None or "rows_in_place" not in v.t.some:
        return 1.0
    aligned = (v.sizes.k * v.t.x.a) % (level.bytes // level.ways) == 0
    return np.where(aligned & (v.m != 1), v.t.crowded, 1.0)


def tile_setup(v: Extents) -> Array:
    """Cycles to start and finish register tiles: one access to C per vector and block of k."""
    t, x, q = v.t, v.t.x, v.sizes
    # A sum over lanes halves them repeatedly, with a shuffle and an addition each time.
    each = np.where(v.passes > 1, t.carried[1], t.carried[0])
    one = (v.counts * (MODEL.tile_cycles + x.latency + v.mr_variants * (x.vectors * each))).sum(axis=0)
    cycles: Array = one * (v.visits * v.passes) + np.where(x.static, 0.0, 40.0)
    if "finishes" in t.some:
        cycles = cycles + x.finishes * (MODEL.finish * v.m * np.ceil(q.n / x.vector))
    if "tiled" in t.some:
        cycles = cycles + x.tiled * (MODEL.configure * v.blocks)
    return cycles


def packing_b(v: Extents) -> Array:
    """Cycles to pack B: a panel once per block of rows, or all of it once for all threads."""
    t, x, q = v.t, v.t.x, v.sizes
    cycles = t.packs
    if "pack_b" in t.some:
        columns = (
            v.visits * x.visit_n
            if "panels" not in t.some
            else np.ceil(q.n * x.panels / x.visit_n) * x.visit_n / x.panels
        )
        cycles = cycles + v.k * columns * np.where(x.once, 1.0, v.blocks) * t.copy_b
    if "once" in t.some:
        # The copy is written to, and read from, the level that it fits; half of that overlaps.
        cycles = cycles + x.once * v.outward(v.k * q.n * x.b)
    return cycles


def _b_fits(v: Extents, name: str) -> Flags:
    """Whether a panel of B and a slice of A fit a level."""
    x, level = v.t.x, v.t.target.level(name)
    fits: Flags = (x.visit_n * x.b + x.mr * x.a) * v.depth <= (level.bytes if level else WHOLE)
    return fits


def _b_stays(v: Extents, name: str) -> Flags:
    """Whether a panel of B stays in a level while the slices of A pass.

    Rows of a B in place have a stride; no more of them fit than the sets that
    the stride reaches have ways. This holds in L1, whose sets follow virtual
    addresses, and in L2, where matrices are in large pages
    and the next panel is prefetched meanwhile.
    """
    x, level, fits = v.t.x, v.t.target.level(name), _b_fits(v, name)
    if level is None or "strided" not in v.t.some:
        return fits
    sets = level.bytes // (level.line * level.ways)
    lines = np.maximum(1.0, x.visit_n * x.b // level.line)
    panels = np.where(x.ahead, 2.0, 1.0) if name != "L1" else 1.0
    room = level.ways * np.minimum(v.sizes.reached[name], sets // lines)
    stays: Flags = fits & (~x.strided | (np.minimum(x.kc, v.sizes.k) * panels <= room))
    return stays


def traffic(v: Extents) -> tuple[dict[str, Array], dict[str, Array]]:
    """Cycles of each level's loads for one item; and of the levels that are slower where threads split rows of B."""
    t, x, q, levels = v.t, v.t.x, v.sizes, v.t.target
    names = [level.name for level in levels.levels]
    capacity = {level.name: levels.counted(level.name) for level in levels.levels}
    stays, short = _b_stays(v, "L1"), _short(v)
    across = v.visits * x.visit_n * v.k
    # Registers <- L1: every step of k reads MR of A and NR of B per tile.
    reads = v.visits * v.m * v.k * x.a + v.slices * across * x.b
    # L1 <- L2: a block of A passes once per visit, B once if it stays.
    block = v.rows * v.depth * x.a
    a_once = v.m * v.k
    a_l2 = a_once * np.where(block <= capacity.get("L1", 0) // 2, 1.0, v.visits)
    b_l2 = across * np.where(stays, v.blocks, v.slices * np.where(short, t.runs, 1.0))
    c_once = v.m * q.n
    c_again = c_once * (2 * v.passes - 2)
    # Between passes over k, the block of C stays in the nearest level with room for it.
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
    slow = np.where(short & (v.depth > MODEL.streams), t.runs, 1.0)
    slow = slow * np.where(
        short & ~x.prefetches & (v.depth * x.visit_n * x.b > MODEL.fills * LINE), MODEL.overfull, 1.0
    )
    far = b_bytes * np.where(b_bytes > capacity.get("L3", 0), b_again, 1.0)
    c_last = c_once * x.c_stored + c_again * x.c * (c_home == len(names))
    in_memory = home == len(names)

    def outside(slow: Array) -> dict[str, Array]:
        from_memory = in_memory * ((far * slow + c_last + a_bytes) / bandwidth["memory"])
        if "L3" in names:
            return {"L3": beyond * (outer * slow / bandwidth["L3"]), "memory": from_memory}
        return {"memory": np.where(in_memory, from_memory, beyond * (outer * slow / bandwidth["memory"]))}

    cut = short & t.cut
    return terms | outside(slow), outside(slow * np.where(cut, MODEL.cut_runs, 1.0)) if t.cut.any() else {}


def _bytes(v: Extents) -> Array:
    """Compulsory traffic, as in `Problem.bytes`, by value of M."""
    q, (a, b, c) = v.sizes, v.t.elements
    return q.batch * (q.m * q.k * a + q.k * q.n * b + q.m * q.n * c)


def shared(v: Extents, workers: int) -> tuple[Array, Array, Array, Array]:
    """Column blocks, tasks, threads with at least one, and the part of the work that the busiest thread does.

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
        column_blocks = np.maximum(fewest, np.minimum(visits, np.ceil((threads - 1) * 4 / blocks)))
        tasks = np.where(over_k, np.minimum(threads, passes), blocks * column_blocks)
        return column_blocks, np.where(over_batch, np.minimum(q.batch, threads * 4), tasks)

    column_blocks, tasks = cut(workers)
    packed = np.where(over_k | over_batch, 1.0, column_blocks)[:, of]
    threads = np.minimum(workers, tasks)
    parts, mine = cut(threads)
    share = np.ceil(mine / threads) / mine
    played = ~(over_k | over_batch) & (threads > 1) & (mine <= MOST_SIMULATED)
    for i, j in zip(*map(np.ndarray.tolist, played.nonzero()), strict=True):
        share[i, j] = _busiest(int(visits[j]), int(parts[i, j]), int(blocks[i, j]), int(threads[i, j]))
    return packed, tasks[:, of], threads[:, of], np.where(threads == 1, 1.0, share)[:, of]


@cached("routes", 4096)
def _busiest(visits: int, column_blocks: int, blocks: int, threads: int) -> float:
    """Part of all calls of the micro-kernel that the busiest thread makes, each taking the next task when free."""
    low, wider = divmod(visits, column_blocks)
    load = [0] * threads  # a heap
    for task in range(column_blocks * blocks):
        heapreplace(load, load[0] + low + (task % column_blocks < wider))
    return max(load) / (visits * blocks)
