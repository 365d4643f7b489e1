"""Calls that find cold caches.

Owns how a contender's operands are kept out of the caches while it is timed, the same for
all. Imports `comparison.data`, `comparison.peers` and `comparison.suite`.

Calls go round over a few copies of all operands, prepared one by one, weights that are
packed among them. Where the copies together outgrow the caches, each call finds its own in
memory. Where they do not, the caches are flushed before each round over the copies, which
is not timed: memory is written that is larger than they are, by as many threads as the
library has, since each core has caches of its own. Python calls each copy by itself,
which costs a fraction of a microsecond, and that is part of the times.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.comparison.data import Arrays, judge
from portmm.comparison.peers import Fetched, Library, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from portmm.comparison.case import Case
    from portmm.target.target import MemoryLevel

COPIES = 8
"""Most copies: libraries that compile for each of them must not take minutes."""
LARGEST = 1 << 30
"""Bytes that all copies of a case, and what is flushed, may have."""
# The least recently used line is not always the one that goes.
MARGIN = 2
UNKNOWN = 1 << 26
"""Bytes of caches that nobody knows the size of."""
LINE = 64
SAMPLES = 3


def enough(levels: Sequence[MemoryLevel], threads: int) -> int:
    """Bytes after which nothing that was used before is left in any cache of `threads` cores."""
    own = max((x.bytes for x in levels if not x.shared), default=0)
    shared = max((x.bytes for x in levels if x.shared), default=0)
    return min(MARGIN * (own * threads + shared) or UNKNOWN, LARGEST)


def copies(case: Case, flushed: int) -> int:
    """How many copies of a case's operands calls go round over, at least two if they fit.

    Args:
        case: what is computed.
        flushed: what `enough` says.
    """
    wanted = -(-flushed // max(case.bytes, 1)) + 1
    return max(1, min(wanted, COPIES, LARGEST // max(case.bytes, 1)))


def copied(data: Arrays) -> Arrays:
    """The same operands elsewhere, in the same layouts."""
    held = {x.name: getattr(data, x.name) for x in fields(data)}
    return replace(data, **{name: _copied(x) for name, x in held.items() if isinstance(x, np.ndarray)})


def _copied(array: Any) -> Any:
    made = np.empty_like(array)  # keeps the order of strides
    made[...] = array
    return made


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@cache
def _ballast(flushed: int) -> Any:
    return np.zeros(flushed // 8, np.int64)


def flush(flushed: int, threads: int) -> None:
    """Write so many bytes, each of the threads its part."""
    # One word of each line is enough, and ordinary stores, unlike those of a fill, go through the caches.
    lines = _ballast(flushed)[:: LINE // 8]
    list(_pool(threads).map(lambda part: np.add(part, 1, out=part), np.array_split(lines, threads)))


@dataclass(slots=True)
class Round:
    """One way of computing a case, prepared on each copy of its operands; a call takes the next copy.

    Attributes:
        runs: one for each copy.
        flushed: bytes that are written before each round; 0 if the copies outgrow the caches.
        threads: that write them.
    """

    runs: Sequence[Run]
    flushed: int
    threads: int
    _turns: Iterator[Run] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = self._endless()

    def _endless(self) -> Iterator[Run]:
        while True:
            yield from self.runs

    def __call__(self, count: int) -> None:
        """Compute so many times."""
        for run in islice(self._turns, count):
            run(1)

    def chill(self) -> None:
        """Make the copies cold."""
        if self.flushed:
            flush(self.flushed, self.threads)

    @property
    def longest(self) -> int:
        """Calls until a copy is warm, if one call went before them."""
        return max(len(self.runs) - 1, 1) if self.flushed else 1 << 30


def rounds(
    library: Library, case: Case, data: Arrays, flushed: int, threads: int
) -> tuple[dict[str, Round], tuple[Arrays, ...]]:
    """Each way that a library knows, over several copies of the operands; and the copies.

    Raises:
        UnsupportedError: the library does not compute the case.
    """
    number = copies(case, flushed)
    all_data = [data, *(copied(data) for _ in range(number - 1))]
    prepared: list[Mapping[str, Run]] = [library.prepare(case, x) for x in all_data]
    needed = flushed if (number - 1) * case.bytes < flushed else 0
    names = [name for name in prepared[0] if all(name in x for x in prepared)]
    return {name: Round([x[name] for x in prepared], needed, threads) for name in names}, tuple(all_data)


def checked(case: Case, run: Round, all_data: Sequence[Arrays], precision: str) -> tuple[float, float]:
    """Run each copy once; the error and its bound of the worst."""
    for data in all_data:
        data.spoil()
    for each in run.runs:
        each(1)
        if isinstance(each, Fetched):
            each.fetch()
    first = all_data[0]
    found = [judge(case, first, precision)]
    # Copies have the same operands; those whose results are the same, bit by bit, are as right.
    found += [judge(case, x, precision) for x in all_data[1:] if not np.array_equal(x.c, first.c)]
    return max(found, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])


def seconds_per_call(run: Round, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median of a few samples in about `seconds` with the flushes; each call finds cold operands."""
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
        # The library's threads sleep and its code is cold as well; a program that computes has neither.
        run(1)
    start = clock()
    run(count)
    return clock() - start
