"""Selection of a schedule for a problem on a CPU, by the cost model.

Owns the comparison of all candidates at once. `choose` ranks them for one problem, and takes a tuned schedule where
there is one; `select_for_class` selects for a class of row counts, on the way to a kernel: the candidate whose
predicted time is nearest to the best at every sampled M, since a class has one schedule, and no M of it should lose
much by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from portmm.codegen.lower import atom_of
from portmm.dispatch.cpu_units import isa_of
from portmm.dispatch.schedule_choice import Choice, overlaid
from portmm.errors import ScheduleError
from portmm.runtime.cpu import replayer
from portmm.schedule.cpu_candidate_sets import CandidateSet, candidate_set
from portmm.schedule.cpu_candidates import units
from portmm.schedule.cpu_cost import cost, costs
from portmm.schedule.cpu_textbook import ORIGIN, preferred
from portmm.spec.problem import family
from portmm.spec.row_classes import rows
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from portmm.schedule.cpu_cost import Array
    from portmm.schedule.roofline import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

ANALYTICAL = "analytical"


def choose(p: Problem, target: Target, threads: int = 1, *, tuned: bool = True) -> Choice:
    """The schedule measured to be fastest, or the model's selection.

    The model selects the least predicted time, the first of equals, unless `cpu_textbook.preferred` selects another.

    Args:
        p: the problem.
        target: the machine.
        threads: the most threads to use; one is used if that is predicted faster.
        tuned: look in the database of tuned schedules.

    Raises:
        ScheduleError: no schedule is legal, or the product is empty.
    """
    check(p, target)
    best = select_for_class(p, target, threads)
    schedules = best.listed.schedules
    (costs,) = candidate_costs(p, best.listed, (p.n if p.c == "col" else p.m,), (best.workers,))
    terms = costs.at(0)
    order = sorted(range(len(schedules)), key=lambda i: terms[i].seconds)
    rest = tuple((schedules[i], terms[i]) for i in order if i != best.index)
    choice = Choice(p, target, best.workers, best.schedule, terms[best.index], rest, best.origin)
    return overlaid(choice, schedules, threads, schedule_cost) if tuned else choice


def check(p: Problem, target: Target) -> None:
    """Check that a product is not empty, and that panels of a packed B are multiples of this target's vectors.

    Raises:
        ScheduleError: it is empty, or B is packed for another target.
    """
    if 0 in (p.m, p.n, p.k, p.batch):
        raise ScheduleError(f"{p} has no products: there is nothing to choose")
    if p.b != "packed":
        return
    takes = [(isa.columns(atom), atom.k_pack) for isa, atom in units(p.dtype, target)]
    layout = family(p.family)
    if not any(layout.nr % n == 0 and layout.kr == kr for n, kr in takes):
        multiples = " or ".join(f"multiples of {n}{f' by {kr}' if kr > 1 else ''}" for n, kr in takes)
        raise ScheduleError(f"B is packed as {p.family}; {target.name} takes {multiples}: pack it again here")


def schedule_cost(p: Problem, s: Schedule, target: Target, workers: int) -> Cost:
    """The predicted time of a schedule, with its terms."""
    return cost(p, s, atom_of(isa_of(s, target), s.dtype, s.atom.lanes), target, workers)


@dataclass(frozen=True, slots=True)
class ClassSelection:
    """The candidates for a class of problems, and the selected one.

    Attributes:
        listed: the candidates.
        rows: the least and the largest M of the class.
        index: that of the selected candidate.
        workers: threads that share the work.
        origin: of the selection: "analytical" (the cost model) or "textbook".
    """

    listed: CandidateSet
    rows: tuple[int, int]
    index: int
    workers: int
    origin: str

    @property
    def schedule(self) -> Schedule:
        """The selected schedule."""
        return self.listed.schedules[self.index]


def select_for_class(p: Problem, target: Target, threads: int) -> ClassSelection:
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
        listed = candidate_set(p, target, least)
        # A kernel is legal for the whole class if it is legal at both ends.
        if listed.schedules == candidate_set(p, target, most).schedules:
            best = _fastest(p, listed, tuple(dict.fromkeys((least, (least + most) // 2, most))), counts, target)
            if best is not None:
                return ClassSelection(listed, (least, most), *best)
    listed = candidate_set(p, target)
    best = _fastest(p, listed, (p.n if p.c == "col" else p.m,), counts, target)
    assert best is not None  # noqa: S101 - with one M, the best has no loss
    return ClassSelection(listed, (p.m, p.m), *best)


def predicted(p: Problem, listed: CandidateSet, workers: int) -> list[float]:
    """Predicted seconds of the candidates for a problem."""
    seconds: list[float] = _seconds(p, listed, (p.n if p.c == "col" else p.m,), (workers,))[0].tolist()
    return seconds


def _fastest(
    p: Problem, listed: CandidateSet, ms: tuple[int, ...], counts: tuple[int, ...], target: Target
) -> tuple[int, int, str] | None:
    """Index, threads and origin of the candidate that is fastest at the last M and loses little at the others.

    Round numbers, which are the most frequent, are the last of their classes. On chips with stored searches, to which
    the model was fitted, textbook blockings are excluded; on others `cpu_textbook.preferred` decides.
    """
    seconds = _seconds(p, listed, ms, counts)
    textbook = listed.textbook if len(counts) == 1 else np.repeat(listed.textbook, len(counts))
    if target.searches and listed.some_textbook and not listed.all_textbook:
        seconds = np.where(textbook, np.inf, seconds)
    every: list[list[float]] = seconds.tolist()  # a few dozen numbers: NumPy takes three times as long
    least, last = [min(row) for row in every], every[-1]

    def loss(i: int) -> float:
        return max([row[i] / best for row, best in zip(every, least, strict=True)])

    # Of equals, the first candidate, on one thread.
    first, origin, allowed = last.index(least[-1]), ANALYTICAL, MODEL.class_loss
    if not target.searches and listed.some_textbook:
        near = sorted([i for i, x in enumerate(last) if MODEL.within * x <= least[-1]], key=last.__getitem__)
        ranked = [(last[i], listed.schedules[i // len(counts)]) for i in near]
        index = near[preferred(ranked, p, target, [bool(textbook[i]) for i in near])]
        if index != first:
            first, origin, allowed = index, ORIGIN, MODEL.class_loss / MODEL.within
    if loss(first) > allowed:
        good = [i for i in range(len(last)) if loss(i) <= MODEL.class_loss] if origin == ANALYTICAL else []
        if not good:
            return None
        first = min(good, key=last.__getitem__)
    candidate, at = divmod(first, len(counts))
    return candidate, counts[at], origin


def _seconds(p: Problem, listed: CandidateSet, ms: tuple[int, ...], counts: tuple[int, ...]) -> Array:
    """Predicted seconds, indexed by number of rows, then by candidate and number of threads."""
    run = replayer()
    tapes = [listed.tape(len(ms), several=x > 1) for x in counts] if run is not None else []
    if run is None or None in tapes:
        every = [x.seconds for x in candidate_costs(p, listed, ms, counts)]
    else:
        q = p.transposed() if p.c == "col" else p
        every = [x.replayed(run, listed.table, q, ms, n) for x, n in zip(tapes, counts, strict=True) if x is not None]
    return every[0] if len(every) == 1 else np.stack(every, axis=2).reshape(len(ms), -1)


def candidate_costs(p: Problem, listed: CandidateSet, ms: tuple[int, ...], counts: tuple[int, ...]) -> list[Cost]:
    """Costs of candidates for problems that differ in M from `p`, for each number of threads."""
    q = p.transposed() if p.c == "col" else p
    return costs(listed.table, q, ms, counts)
