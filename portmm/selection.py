"""The schedule with the least predicted time, for a class of row counts.

Owns the comparison of all candidates for a problem at once. Imports `candidate_sets`, `cost`, `row_classes`. The
candidate that is selected is the one whose predicted time is nearest to the best at every M that is looked at: a
class has one schedule, and no M of it should lose much by that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from portmm.candidate_sets import CandidateSet, candidate_set
from portmm.cost import costs
from portmm.row_classes import rows
from portmm.textbook import ORIGIN, WITHIN, preferred

if TYPE_CHECKING:
    from portmm.cost import Costs
    from portmm.problem import Problem
    from portmm.schedule import Schedule
    from portmm.target import Target


ANALYTICAL = "analytical"
MOST_LOSS = 1.02
"""Predicted time over the best up to which all M of a class take one schedule: the model is never that exact."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The candidates for a class of problems, and which of them is selected.

    Attributes:
        listed: the candidates.
        rows: the least and the largest M that it holds for.
        index: the place of the selected one.
        workers: threads that share the work.
        origin: whose choice it is: the model's, or a textbook's.
    """

    listed: CandidateSet
    rows: tuple[int, int]
    index: int
    workers: int
    origin: str

    @property
    def schedule(self) -> Schedule:
        """The schedule that is selected."""
        return self.listed.schedules[self.index]


def select(p: Problem, target: Target, threads: int) -> Selection:
    """The selection for the class of a problem.

    Args:
        p: the problem.
        target: the machine.
        threads: the most threads to use; one is used if that is predicted faster.

    Raises:
        ScheduleError: nothing is legal.
    """
    counts = tuple(dict.fromkeys((1, max(1, threads))))
    least, most = rows(p)
    if least < most:
        listed = candidate_set(replace(p, m=least), target)
        # A kernel is legal throughout the class if it is at both ends.
        if listed.schedules == candidate_set(replace(p, m=most), target).schedules:
            found = _fastest(p, listed, tuple(dict.fromkeys((least, (least + most) // 2, most))), counts, target)
            if found is not None:
                return Selection(listed, (least, most), *found)
    listed = candidate_set(p, target)
    found = _fastest(p, listed, (p.n if p.c == "col" else p.m,), counts, target)
    assert found is not None  # noqa: S101 - the best of one M loses nothing
    return Selection(listed, (p.m, p.m), *found)


def _fastest(
    p: Problem, listed: CandidateSet, ms: tuple[int, ...], counts: tuple[int, ...], target: Target
) -> tuple[int, int, str] | None:
    """The candidate, the threads and whose choice it is: the fastest at the last M that loses little at the others.

    Round numbers, which are the most frequent, are the last of their classes. On chips with stored searches, to which
    the model was fitted, textbook blockings take no part; on others `textbook.preferred` has the last word.
    """
    seconds = np.stack([x.seconds for x in predict(p, listed, ms, counts)], axis=2).reshape(len(ms), -1)
    textbook = np.repeat(listed.textbook, len(counts))
    if target.searches and not textbook.all():
        seconds = np.where(textbook, np.inf, seconds)
    relative = seconds / seconds.min(axis=1, keepdims=True)
    good = (relative <= MOST_LOSS).all(axis=0)
    # Of equals, the first candidate, on one thread.
    first, origin = int(np.where(good, seconds[-1], np.inf).argmin()), ANALYTICAL
    if not target.searches and textbook.any():
        order = np.argsort(seconds[-1], kind="stable").tolist()
        ranked = [(float(seconds[-1, i]), listed.schedules[i // len(counts)]) for i in order]
        found = order[preferred(ranked, p, target)]
        if found != order[0]:
            first, origin, good = found, ORIGIN, (relative <= MOST_LOSS / WITHIN).all(axis=0)
    if not good[first]:
        return None
    index, at = divmod(first, len(counts))
    return index, counts[at], origin


def predict(p: Problem, listed: CandidateSet, ms: tuple[int, ...], counts: tuple[int, ...]) -> list[Costs]:
    """Costs of candidates for problems that differ in M from `p`, for each number of threads."""
    q = p.transposed() if p.c == "col" else p
    return costs(listed.table, q, ms, counts)
