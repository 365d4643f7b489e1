"""Interleaved timing of two programs.

Owns `timed` and `in_turns`.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.fusion.finding import Run

LONGEST = 0.2
"""Seconds of all runs of a program in a turn."""
TURNS = 3
FASTER = 0.97
"""Time of a program over that of the program as it is, from which it takes its place."""
CLEAR = 1.1
"""The same ratio in the first turn, from which there are no more: turns of one program differ less."""


class Times(NamedTuple):
    """Times of a program and of another one that may take its place.

    Attributes:
        before, seconds: the least of all turns.
        ratio: of the second program's time over that of the first one, the median of those of each turn.
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


def timed(run: Run, arrays: Sequence[Any], longest: float = LONGEST) -> float:
    """Least seconds of some runs of a program: of three, and of more until they took `longest` seconds."""
    run(arrays)
    least, began, runs = float("inf"), time.perf_counter(), 0
    while runs < 3 or (time.perf_counter() - began < longest and runs < 200):
        start = time.perf_counter()
        run(arrays)
        least, runs = min(least, time.perf_counter() - start), runs + 1
    return least
