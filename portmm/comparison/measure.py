"""Measurement of a run: its operands, its check and its clock.

Owns what comparisons, the tuner and the gauges of the machine's limits measure with, and the rotation and the
flushes that keep operands out of the caches.

With cold caches calls rotate through a few copies of all operands, prepared one by one, packed weights
among them. Where the copies together exceed the caches, each call finds its own in
memory. Where they do not, the caches are flushed before each round over the copies, which
is not timed: a buffer larger than they are is written by as many threads as the
library has, since each core has caches of its own. Python calls each copy separately,
which costs a fraction of a microsecond, and that is part of the times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import cycle, islice
from typing import Any

import numpy as np

from portmm.comparison.case import Case
from portmm.comparison.data import EXACT, Arrays, judge
from portmm.comparison.peers import Fetched, Library, Run, Setup
from portmm.target.cache_levels import MemoryLevel

COPIES = 8
"""Most copies: libraries that compile for each of them must not take minutes."""
LARGEST = 1 << 30
"""Most bytes of all copies of a case, and of the buffer that flushes caches."""
# Caches do not always evict the least recently used line.
MARGIN = 2
UNKNOWN = 1 << 26
"""Bytes of caches whose size is unknown."""
LINE = 64
SAMPLES = 3
LONG = 0.25
"""Seconds of a call that needs no second one to warm up."""


def enough(levels: Sequence[MemoryLevel], threads: int) -> int:
    """Bytes whose use evicts all earlier data from the caches of `threads` cores."""
    own = max((x.bytes for x in levels if not x.shared), default=0)
    shared = max((x.bytes for x in levels if x.shared), default=0)
    return min(MARGIN * (own * threads + shared) or UNKNOWN, LARGEST)


def copies(case: Case, flushed: int) -> int:
    """Number of copies of a case's operands through which calls rotate, at least two if they fit.

    Args:
        case: the case.
        flushed: bytes, as `enough` returns them.
    """
    wanted = -(-flushed // max(case.bytes, 1)) + 1
    return max(1, min(wanted, COPIES, LARGEST // max(case.bytes, 1)))


def copied(data: Arrays) -> Arrays:
    """Copies of the operands, in the same layouts."""
    own = {x.name: getattr(data, x.name) for x in fields(data)}
    return replace(data, **{name: _copied(x) for name, x in own.items() if isinstance(x, np.ndarray)})


def _copied(array: Any) -> Any:
    copy = np.empty_like(array)  # keeps the order of strides
    copy[...] = array
    return copy


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@cache
def _ballast(flushed: int) -> Any:
    return np.zeros(flushed // 8, np.int64)


def flush(flushed: int, threads: int) -> None:
    """Write a buffer of `flushed` bytes, each thread a part of it."""
    # One word of each cache line is enough, and ordinary stores, unlike those of a fill, go through the caches.
    lines = _ballast(flushed)[:: LINE // 8]
    list(_pool(threads).map(lambda part: np.add(part, 1, out=part), np.array_split(lines, threads)))


@dataclass(slots=True)
class Round:
    """A method that computes a case, prepared on each copy of its operands; a call takes the next copy.

    Attributes:
        runs: one for each copy.
        flushed: bytes that are written before each round; 0 if the copies exceed the caches.
        threads: number of threads that write them.
    """

    runs: Sequence[Run]
    flushed: int
    threads: int
    _turns: Iterator[Run] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = cycle(self.runs)

    def __call__(self, count: int) -> None:
        """Compute `count` times."""
        for run in islice(self._turns, count):
            run(1)

    def chill(self) -> None:
        """Evict the copies from the caches."""
        if self.flushed:
            flush(self.flushed, self.threads)

    @property
    def longest(self) -> int:
        """Number of calls on cold copies after a first call."""
        return max(len(self.runs) - 1, 1) if self.flushed else 1 << 30


def prepared(library: Library, case: Case, data: Arrays, setup: Setup) -> tuple[Mapping[str, Run], tuple[Arrays, ...]]:
    """Methods of a library by name, and their operands: with cold caches several copies.

    Raises:
        UnsupportedError: the library does not compute the case.
    """
    # On a device, adapters rotate through copies of the operands themselves.
    if not setup.cold or setup.device:
        return library.prepare(case, data), (data,)
    number = copies(case, setup.cold)
    all_data = (data, *(copied(data) for _ in range(number - 1)))
    methods = [library.prepare(case, x) for x in all_data]
    needed = setup.cold if (number - 1) * case.bytes < setup.cold else 0
    names = [name for name in methods[0] if all(name in x for x in methods)]
    return {name: Round([x[name] for x in methods], needed, setup.threads) for name in names}, all_data


def checked(case: Case, run: Run, all_data: Sequence[Arrays], precision: str = EXACT) -> tuple[float, float]:
    """Compute once into each spoiled result; return the error and its bound of the worst."""
    for data in all_data:
        data.spoil()
    for each in run.runs if isinstance(run, Round) else (run,):
        if isinstance(each, Fetched):
            each.spoil()
        each(1)
        if isinstance(each, Fetched):
            each.fetch()
    first = all_data[0]
    errors = [judge(case, first, precision)]
    # Copies have the same operands: results that are bitwise equal have the same error.
    errors += [judge(case, x, precision) for x in all_data[1:] if not np.array_equal(x.c, first.c)]
    return max(errors, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])


def seconds_per_call(run: Run, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median of a few samples that together take about `seconds`.

    The first calls, which find cold caches and sleeping threads, are not counted. With cold caches flushes are
    included in `seconds`, and each call finds cold operands.
    """
    if isinstance(run, Round):
        return _cold_seconds(run, seconds, clock)
    share = seconds / SAMPLES
    count, taken = 1, _clocked(run, 1, clock)
    if taken >= LONG:
        return taken
    taken = _clocked(run, 1, clock)
    while taken < share / 2 and count < 1 << 30:
        wanted = count * share / max(taken, 1e-9)
        count = int(min(max(wanted, 2 * count), 16 * count))
        taken = _clocked(run, count, clock)
    samples = SAMPLES if taken < seconds else 1
    return statistics.median(_clocked(run, count, clock) for _ in range(samples)) / count


def _cold_seconds(run: Round, seconds: float, clock: Callable[[], float]) -> float:
    deadline = clock() + seconds
    taken = _sample(run, 1, clock)
    count = int(min(max(seconds / SAMPLES / max(taken, 1e-9), 1), run.longest))
    samples = [] if count > 1 else [taken]
    while len(samples) < SAMPLES and (not samples or clock() < deadline):
        samples.append(_sample(run, count, clock) / count)
    return statistics.median(samples)


def _sample(run: Round, count: int, clock: Callable[[], float]) -> float:
    run.chill()
    if len(run.runs) > 1:
        # After a flush the library's threads sleep and its code is cold too; neither is so in a running program.
        run(1)
    return _clocked(run, count, clock)


def _clocked(run: Run, count: int, clock: Callable[[], float]) -> float:
    start = clock()
    run(count)
    return clock() - start
