"""Blocks of the problems of a table, and their partition among threads, as kernels and the pool of threads do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.util.memo import cached

if TYPE_CHECKING:
    from portmm.schedule.cpu_table import Table
    from portmm.spec.problem import Problem

Array = np.ndarray[Any, np.dtype[np.float64]]
"""Numbers by value of M, or one for all of them, then by candidate."""

MOST_SIMULATED = 64
"""Maximum number of tasks whose scheduling is simulated; with more, simulation would take longer than it saves."""


class Extents:
    """Problems that differ in M, partitioned into the blocks of each candidate.

    Attributes:
        t: the candidates.
        m: values of M, as a column.
        n, elements, batch: N, K and the number of items, which all of them share.
        reached: number of sets of a level that rows in place start in, by "B" or "A" and the level's name.
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

    def __init__(self, t: Table, sizes: tuple[Any, Any, Any, Any], reached: dict[str, Any]) -> None:
        self.t, self.reached, (m, n, k, self.batch) = t, reached, sizes
        self.m, self.n, self.elements = m, n, k
        self.k = np.ceil(k / t.k_pack)
        self.visits, self.fewest = np.ceil(n / t.visit_n), np.ceil(n / t.nc)
        self.blocks, self.rows = np.ceil(m / t.mc), np.minimum(m, t.mc)
        self.passes, self.depth = np.ceil(self.k / t.kc), np.minimum(self.k, t.kc)
        self.slices = np.ceil(m / t.mr)
        low = np.floor(m / self.slices)
        taller = m - low * self.slices
        self.mr_variants, self.counts = np.stack((low + 1, low)), np.stack((taller, self.slices - taller))

    @classmethod
    def of(cls, t: Table, q: Problem, rows: Sequence[int]) -> Extents:
        """The extents of a problem, for several values of M."""
        m = np.array(rows, np.float64)[:, np.newaxis]
        return cls(t, (m, float(q.n), float(q.k), float(q.batch)), reached(t, q.n, q.k))

    def home(self, size: Array) -> Any:
        """The index of the nearest level with room for `size` bytes; that of memory is last."""
        return np.searchsorted(self.t.reach, size)

    def outward(self, size: Array, times: float = 1.0) -> Any:
        """Cycles to move `size` bytes between a core and the nearest level with room for them, some times over."""
        return size / np.choose(self.home(times * size), self.t.bandwidth)


def reached(t: Table, n: int, k: int) -> dict[str, float]:
    """Number of sets of each level that rows in place start in: of a B of `n` columns, and of an A of `k`."""

    def of(row: int) -> Iterator[float]:
        return (float(sets // gcd(max(1, row // line), sets)) for _, line, sets in t.sets)

    names = [name for name, _, _ in t.sets]
    sides = (("B", int(n * t.strided_bytes)), ("A", int(k * t.rows_bytes)))
    return {side + name: x for side, row in sides if row for name, x in zip(names, of(row), strict=True)}


class Partition(NamedTuple):
    """Tasks of candidates, by value of M and candidate.

    Attributes:
        row_blocks: blocks of rows; `column_blocks`, of columns in each.
        tasks: number of tasks.
        threads: threads with at least one.
        share: part of the work that the busiest thread does.
    """

    row_blocks: Any
    column_blocks: Any
    tasks: Any
    threads: Any
    share: Any


def shared(v: Extents, workers: int) -> Partition:
    """The partition of work among threads."""
    t = v.t
    if workers == 1:
        one = np.ones(1)
        return Partition(v.blocks, np.where(t.over_k | t.over_batch, 1.0, v.fewest), one, one, one)
    first, of = t.firsts, t.group_of
    visits, blocks, fewest, passes = v.visits[first], v.blocks[:, first], v.fewest[first], v.passes[first]
    over_k, over_batch = t.over_k[first], t.over_batch[first]
    # Threads that sweep panels have rows of their own, if these are many.
    blocks = np.maximum(blocks, np.minimum(workers, np.floor(v.m / t.thread_rows[first])))
    # Blocks of rows that are not cut along the columns are as many for every thread.
    whole = ~(over_k | over_batch) & (blocks >= (workers - 1) * 4)
    blocks = np.where(whole, np.ceil(blocks / workers) * workers, blocks)

    def cut(threads: Any) -> tuple[Array, Array]:
        column_blocks = np.maximum(fewest, np.minimum(visits, np.ceil((threads - 1) * 4 / blocks)))
        tasks = np.where(over_k, np.minimum(threads, passes), blocks * column_blocks)
        return column_blocks, np.where(over_batch, np.minimum(v.batch, threads * 4), tasks)

    column_blocks, tasks = cut(workers)
    packed = np.where(over_k | over_batch, 1.0, column_blocks)[:, of]
    threads = np.minimum(workers, tasks)
    parts, mine = cut(threads)
    share = np.ceil(mine / threads) / mine
    played = ~(over_k | over_batch) & (threads > 1) & (mine <= MOST_SIMULATED)
    for i, j in zip(*map(np.ndarray.tolist, played.nonzero()), strict=True):
        share[i, j] = _busiest(int(visits[j]), int(parts[i, j]), int(blocks[i, j]), int(threads[i, j]))
    share = np.where(threads == 1, 1.0, share)
    return Partition(blocks[:, of], packed, tasks[:, of], threads[:, of], share[:, of])


@cached("routes", 4096)
def _busiest(visits: int, column_blocks: int, blocks: int, threads: int) -> float:
    """Part of all calls of the micro-kernel that the busiest thread makes.

    Each thread takes neighbouring tasks, then those that are left of the threads that follow it.
    """
    chunks = [visits * (i + 1) // column_blocks - visits * i // column_blocks for i in range(column_blocks)]
    calls = chunks * blocks
    left = [calls[len(calls) * i // threads : len(calls) * (i + 1) // threads][::-1] for i in range(threads)]
    now = [(0, i) for i in range(threads)]  # a heap of the times at which threads are free
    end = 0
    while now:
        at, me = heappop(now)
        share = next((x for i in range(threads) if (x := left[(me + i) % threads])), None)
        if share:
            heappush(now, (at + share.pop(), me))
        end = max(end, at)
    return end / (visits * blocks)
