"""Calls that find nothing in the caches.

Owns `Sweep`. Imports `target`'s records only.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from portmm.comparison.peers import Run
    from portmm.target import Target

TIMES = 2
"""Of the largest cache that are walked over: caches that are not inclusive hold what they pushed out of each other."""
USUAL = 32 << 20
FEWEST = 3


@dataclass(frozen=True, slots=True)
class Sweep:
    """Memory larger than the caches.

    Attributes:
        memory: written all over, so that nothing else stays cached.
    """

    memory: Any

    @classmethod
    def of(cls, target: Target) -> Sweep:
        """Enough for the largest cache of a target."""
        largest = max((level.bytes for level in target.levels), default=USUAL)
        return cls(np.zeros(TIMES * largest, np.uint8))

    def seconds_per_call(self, run: Run, seconds: float) -> float:
        """The median of single calls, each after a sweep, that together with their sweeps take about `seconds`."""
        run(1)
        taken: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(taken) < FEWEST or time.perf_counter() < deadline:
            np.add(self.memory, 1, out=self.memory)
            start = time.perf_counter()
            run(1)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)
