"""What the cost model says of the schedules of a problem.

Owns `Candidate` and their order. Imports `schedule.cpu_candidates`, `dispatch.cpu`, `schedule.schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.dispatch.cpu import predicted
from portmm.schedule.cpu_candidates import candidates
from portmm.schedule.schedule import spell
from portmm.schedule.textbook import preferred

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target


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

    @property
    def text(self) -> str:
        """The schedule in one word."""
        known = self.__dict__  # functools.cached_property has a lock, which a forked child may find held
        if "text" not in known:
            known["text"] = spell(self.schedule)
        found: str = known["text"]
        return found

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from others."""
        return self.text, self.workers


def ranked(p: Problem, target: Target, threads: int) -> list[Candidate]:
    """All candidates for as many threads, and for one, by predicted time, but the analytical choice first.

    Raises:
        ScheduleError: nothing is legal.
    """
    counts = dict.fromkeys((1, max(1, threads)))
    found = [Candidate(s, w, predicted(p, s, target, w).seconds) for s in candidates(p, target) for w in counts]
    found.sort(key=lambda x: x.predicted)
    first = preferred([(x.predicted, x.schedule) for x in found], p, target)
    return [found[first], *found[:first], *found[first + 1 :]]
