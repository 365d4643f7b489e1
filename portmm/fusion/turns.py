"""Interleaved timing of programs.

Owns `timed`, `in_turns`, of a program beside another one, and `drawn`, of the last few beside it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from portmm.fusion.finding import Run

LONGEST = 0.2
"""Seconds of all runs of a program in a turn."""
TURNS = 3
FINAL, SHORT = 5, 0.1
"""Turns of the last draw, and seconds of all runs of a program in one of them."""
FASTER = 0.97
"""Time of a program over that of the program as it is, from which it takes its place."""
CLEAR = 1.1
"""The same ratio in the first turn, from which there are no more: turns of one program differ less."""
ALONE, PAUSE, OTHER = 5, 5e-4, 8 << 20
"""Calls of a program in a turn between which something else happens: seconds of a pause, and bytes of other memory that
is read, more than an L2 has (Granite Rapids: attention of 16 heads of bfloat16 that share keys takes 0.81 to 0.85 of
the time of two products in a row, 0.94 to 1.04 with other memory read between, and 1.07 to 1.10 after a pause)."""
MANY, BRIEF = 21, 1e-3
"""The same number of calls for programs of fewer seconds a call, where the budget lasts: medians of 5 calls of 30
microseconds differ by 5 % (Granite Rapids: a program of 0.71 of the time in a row and 0.90 to 0.96 apart was read as
1.02 to 1.17 apart in three of four draws), of 21 by 1 %."""
LONG = 0.01
"""Seconds of a call from which its own memory is more than caches have: calls in a row are then like those apart."""


class Times(NamedTuple):
    """Times of a program and of another one that may take its place.

    Attributes:
        before, seconds: the least of all turns.
        ratio: of the second program's time over that of the first one, of a turn that stands for the others.
        apart: the same of calls between which something else happens, or 0 if there were none.
    """

    before: float
    seconds: float
    ratio: float
    apart: float = 0.0

    @property
    def faster(self) -> bool:
        """Whether the second program is faster, by its best runs and in most turns, and no slower apart."""
        return self.seconds < FASTER * self.before and self.ratio < FASTER and self.apart < 1

    @property
    def both(self) -> float:
        """The mean of the ratios of calls in a row and apart."""
        return math.sqrt(self.ratio * (self.apart or self.ratio))


def in_turns(before: Run, run: Run, arrays: Sequence[Any], longest: float = LONGEST) -> Times:
    """The times of two programs: what else the machine does slows a turn of both."""
    turns: list[tuple[float, float]] = []
    while len(turns) < TURNS and (not turns or turns[0][1] < CLEAR * turns[0][0]):
        turns.append((timed(before, arrays, longest), timed(run, arrays, longest)))
    first, second = (min(x) for x in zip(*turns, strict=True))
    return Times(first, second, statistics.median(y / x for x, y in turns))


def drawn(before: Run, runs: Sequence[Run], arrays: Sequence[Any], short: float = SHORT) -> list[Times]:
    """The times of each of some programs beside the program as it is, each turn in another order.

    In a turn each program is called in a row, then with a pause before each call, and then with other memory read
    before it: what is faster from caches and predictors that know it may be slower elsewhere. Ratios are those that all
    turns but one stay below, so that a program is faster by few chances.

    Args:
        before: the program as it is.
        runs: the others.
        arrays: of a call.
        short: seconds of all runs of a program in a turn.
    """
    every, other = [before, *runs], np.ones(OTHER // 4, np.float32)
    between: list[Callable[[], Any]] = [partial(time.sleep, PAUSE), other.max]
    call = timed(before, arrays, 0.0)
    if call > LONG:
        between = []
    calls = MANY if call < BRIEF and short >= SHORT else ALONE
    in_a_row: list[list[float]] = []
    alone: list[list[list[float]]] = [[] for _ in between]
    for i in range(FINAL):
        order = [(i + j) % len(every) for j in range(len(every))]
        order = order if i % 2 else order[::-1]
        took = {j: timed(every[j], arrays, short) for j in order}
        in_a_row.append([took[j] for j in range(len(every))])
        for way, what in zip(alone, between, strict=True):
            way.append(apart(every, arrays, order, what, calls))
    least, *others = (min(x) for x in zip(*in_a_row, strict=True))
    worst = [max(x) for x in zip(*map(_ratios, alone), strict=True)] or [0.0] * len(others)
    return [Times(least, *x) for x in zip(others, _ratios(in_a_row), worst, strict=True)]


def _ratios(turns: Sequence[Sequence[float]]) -> list[float]:
    """The ratio of each program to the first that all turns but one stay below."""
    first, *others = zip(*turns, strict=True)
    return [sorted(y / x for x, y in zip(first, other, strict=True))[-2] for other in others]


def apart(
    every: Sequence[Run], arrays: Sequence[Any], order: Sequence[int], between: Callable[[], Any], calls: int = ALONE
) -> list[float]:
    """The median seconds of some single calls of each program, in an order; something else is done between them."""
    times: list[list[float]] = [[] for _ in every]
    for i in range(calls):
        for j in order if i % 2 else order[::-1]:
            between()
            start = time.perf_counter()
            every[j](arrays)
            times[j].append(time.perf_counter() - start)
    return [statistics.median(x) for x in times]


def timed(run: Run, arrays: Sequence[Any], longest: float = LONGEST) -> float:
    """Least seconds of some runs of a program: of three, and of more until they took `longest` seconds.

    One that takes longer by itself is run once more.
    """
    began = time.perf_counter()
    run(arrays)
    start = time.perf_counter()
    least, runs, most = float("inf"), 0, 3 if start - began < longest or not longest else 1
    began = start
    while runs < most or (start - began < longest and runs < 200):
        run(arrays)
        now = time.perf_counter()
        least, start, runs = min(least, now - start), now, runs + 1
    return least
