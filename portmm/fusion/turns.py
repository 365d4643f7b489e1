"""Interleaved timing of programs.

Owns `timed`, `in_turns`, of a program beside another one, and `drawn`, of the last few beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from portmm.fusion.finding import Run

LONGEST = 0.2
"""Seconds of all runs of a program in a turn."""
TURNS = 3
FINAL, SHORT = 5, 0.1
"""Turns of the last draw, and seconds of all runs of a program in one of them."""
FASTER = 0.95
"""Time of a program over that of the program as it is, from which it takes its place."""
CLEAR = 1.1
"""The same ratio in the first turn, from which there are no more: turns of one program differ less."""


class Times(NamedTuple):
    """Times of a program and of another one that may take its place.

    Attributes:
        before, seconds: the least of all turns.
        ratio: of the second program's time over that of the first one, of a turn that stands for the others.
    """

    before: float
    seconds: float
    ratio: float

    @property
    def faster(self) -> bool:
        """Whether the second program is faster, by its best runs and in most turns."""
        return self.seconds < FASTER * self.before and self.ratio < FASTER


def in_turns(before: Run, run: Run, arrays: Sequence[Any]) -> Times:
    """The times of two programs: what else the machine does slows a turn of both."""
    turns: list[tuple[float, float]] = []
    while len(turns) < TURNS and (not turns or turns[0][1] < CLEAR * turns[0][0]):
        turns.append((timed(before, arrays), timed(run, arrays)))
    first, second = (min(x) for x in zip(*turns, strict=True))
    return Times(first, second, statistics.median(y / x for x, y in turns))


def drawn(before: Run, runs: Sequence[Run], arrays: Sequence[Any]) -> list[Times]:
    """The times of each of some programs beside the program as it is, each turn in another order.

    Their ratio is one that all turns but one stay below, so that a program is faster by few chances.
    """
    every = [before, *runs]
    turns: list[list[float]] = []
    for i in range(FINAL):
        order = [(i + j) % len(every) for j in range(len(every))]
        took = {j: timed(every[j], arrays, SHORT) for j in (order if i % 2 else order[::-1])}
        turns.append([took[j] for j in range(len(every))])
    first, *others = zip(*turns, strict=True)
    ratios = [sorted(y / x for x, y in zip(first, other, strict=True)) for other in others]
    return [Times(min(first), min(x), y[-2]) for x, y in zip(others, ratios, strict=True)]


def timed(run: Run, arrays: Sequence[Any], longest: float = LONGEST) -> float:
    """Least seconds of some runs of a program: of three, and of more until they took `longest` seconds."""
    run(arrays)
    least, began, runs = float("inf"), time.perf_counter(), 0
    while runs < 3 or (time.perf_counter() - began < longest and runs < 200):
        start = time.perf_counter()
        run(arrays)
        least, runs = min(least, time.perf_counter() - start), runs + 1
    return least
