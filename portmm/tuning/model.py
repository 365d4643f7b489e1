"""Candidate schedules of a problem, ranked by the cost model.

Owns `Candidate` and `ranked`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.dispatch.cpu_selection import schedule_cost
from portmm.schedule.cpu_candidates import candidates
from portmm.schedule.cpu_textbook import preferred
from portmm.schedule.text import spell

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target


@dataclass(frozen=True)
class Candidate:
    """A schedule and the number of threads that run it.

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
        cache = self.__dict__  # functools.cached_property has a lock, which a forked child may find held
        if "text" not in cache:
            cache["text"] = spell(self.schedule)
        text: str = cache["text"]
        return text

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the candidate: schedule and threads."""
        return self.text, self.workers


def ranked(p: Problem, target: Target, threads: int) -> list[Candidate]:
    """All candidates for `threads` threads and for one, by predicted time, but the cost model's selection first.

    Raises:
        ScheduleError: no schedule is legal.
    """
    counts = dict.fromkeys((1, max(1, threads)))
    order = [Candidate(s, w, schedule_cost(p, s, target, w).seconds) for s in candidates(p, target) for w in counts]
    order.sort(key=lambda x: x.predicted)
    first = preferred([(x.predicted, x.schedule) for x in order], p, target)
    return [order[first], *order[:first], *order[first + 1 :]]
