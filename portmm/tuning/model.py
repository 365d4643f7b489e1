"""What the cost model says of the schedules of a problem.

Owns `Candidate` and their order. Imports `candidates`, `dispatch`, `schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from portmm.candidates import candidates
from portmm.dispatch import predicted
from portmm.schedule import spell

if TYPE_CHECKING:
    from portmm.problem import Problem
    from portmm.schedule import Schedule
    from portmm.target import Target


@dataclass(frozen=True)
class Candidate:
    """A schedule, and threads to share it.

    Attributes:
        schedule: the schedule.
        workers: threads.
        predicted: seconds of a call.
    """

    schedule: Schedule
    workers: int
    predicted: float

    @cached_property
    def text(self) -> str:
        """The schedule in one word."""
        return spell(self.schedule)

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from others."""
        return self.text, self.workers


def ranked(p: Problem, target: Target, threads: int) -> list[Candidate]:
    """All candidates for as many threads, and for one, by predicted time: the first is the analytical choice.

    Raises:
        ScheduleError: nothing is legal.
    """
    counts = dict.fromkeys((1, max(1, threads)))
    found = [Candidate(s, w, predicted(p, s, target, w).seconds) for s in candidates(p, target) for w in counts]
    return sorted(found, key=lambda x: x.predicted)
