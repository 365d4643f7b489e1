"""Choice of a schedule for a problem, on CPUs and on devices: the cost model's, or one that was measured to be faster.

Owns `Choice`. `choose` ranks all candidates for one problem, and takes a tuned schedule where there is one;
`select_for_class` selects for a class of row counts of CPUs, on the way to a kernel: the candidate whose
predicted time is nearest to the best at every sampled M, since a class has one schedule, and no M of it should lose
much by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from portmm.codegen.lower import atom_of, grid_atom
from portmm.dispatch.cpu_kernels import isa_of
from portmm.errors import DatabaseError, ScheduleError
from portmm.runtime.cpu import replayer
from portmm.schedule import cpu_cost, gpu_cost
from portmm.schedule.candidates import UNUSED, candidates, takes_panels, units_for
from portmm.schedule.cpu_candidate_sets import CandidateSet, candidate_set
from portmm.schedule.cpu_neighbourhood import unsound
from portmm.schedule.cpu_textbook import ORIGIN, preferred
from portmm.spec.row_classes import rows
from portmm.target.model import CPU as MODEL
from portmm.util.records import dataclass
from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from portmm.schedule.cpu_partition import Array
    from portmm.schedule.program import Vectors
    from portmm.schedule.roofline import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

ANALYTICAL = "analytical"


@dataclass(frozen=True, slots=True)
class Choice:
    """The selected schedule of a problem, and the runners-up.

    Attributes:
        problem: the problem.
        target: the machine.
        workers: threads that will share the work.
        schedule: the selected one.
        cost: its predicted time, with terms.
        runners_up: the other candidates, best first.
        origin: "analytical", "textbook" (see `cpu_textbook.preferred`), or "tuned on" which chip.
    """

    problem: Problem
    target: Target
    workers: int
    schedule: Schedule
    cost: Cost
    runners_up: tuple[tuple[Schedule, Cost], ...]
    origin: str = "analytical"


def choose(p: Problem, target: Target, threads: int = 1, vectors: Vectors = UNUSED, *, tuned: bool = True) -> Choice:
    """The schedule measured to be fastest, or the model's selection.

    The model selects the least predicted time, the first of equals, unless `cpu_textbook.preferred` selects another.

    Args:
        p: the problem.
        target: the machine.
        threads: the most threads to use on a CPU; one is used if that is predicted faster.
        vectors: of a device, elements of a vector access to A, B and C.
        tuned: look in the database of tuned schedules.

    Raises:
        ScheduleError: no schedule is legal, or the product is empty.
    """
    check(p, target)
    if target.device is None:
        best = select_for_class(p, target, threads)
        schedules, selected, workers, origin = best.listed.schedules, best.index, best.workers, best.origin
        (costs,) = candidate_costs(p, best.listed, (p.n if p.c == "col" else p.m,), (workers,))
        terms = costs.at(0)
    else:
        schedules, selected, workers, origin = tuple(candidates(p, target, vectors)), -1, 1, ANALYTICAL
        terms = [schedule_cost(p, s, target) for s in schedules]
    order = sorted(range(len(schedules)), key=lambda i: terms[i].seconds)
    selected = order[0] if selected < 0 else selected
    rest = tuple((schedules[i], terms[i]) for i in order if i != selected)
    choice = Choice(p, target, workers, schedules[selected], terms[selected], rest, origin)
    return _overlaid(choice, schedules, threads) if tuned else choice


def check(p: Problem, target: Target) -> None:
    """Check that a product is not empty, and that panels of a packed B are multiples of a CPU's vectors.

    Raises:
        ScheduleError: it is empty, or B is packed for another target.
    """
    if 0 in (p.m, p.n, p.k, p.batch):
        raise ScheduleError(f"{p} has no products: there is nothing to choose")
    if p.b != "packed" or target.device is not None:
        return
    pairs = units_for(p, target)
    if not any(takes_panels(p, *x) for x in pairs):
        takes = [(isa.columns(atom), atom.k_pack) for isa, atom in pairs]
        multiples = " or ".join(f"multiples of {n}{f' by {kr}' if kr > 1 else ''}" for n, kr in takes)
        raise ScheduleError(f"B is packed as {p.family}; {target.name} takes {multiples}: pack it again here")


def schedule_cost(p: Problem, s: Schedule, target: Target, workers: int = 1) -> Cost:
    """The predicted time of a schedule, with its terms."""
    isa = isa_of(s, target)
    if s.on_device:
        return gpu_cost.cost(p, s, grid_atom(isa, s), target)
    return cpu_cost.cost(p, s, atom_of(isa, s.dtype, s.atom.lanes), target, workers)


def _overlaid(choice: Choice, listed: Sequence[Schedule], threads: int) -> Choice:
    """The model's selection, or a schedule tuned on this chip, or on a similar one if the model predicts no loss."""
    from portmm.dispatch import tuning_database
    from portmm.dispatch.tuned_schedule import architecture

    p, target = choice.problem, choice.target
    least = min(c.seconds for c in (choice.cost, *(c for _, c in choice.runners_up[:1])))
    try:
        tuned = tuning_database.find(p, target, threads)
    except DatabaseError as error:
        _warn_once(str(error))
        return choice
    for x in tuned:
        own = (x.chip, x.architecture) == (target.name, architecture(target))
        if x.gain < 1 and x.schedule != choice.schedule:
            continue
        try:
            why = unsound(x.schedule, p, target, listed) or ("" if 0 < x.workers <= threads else f"{x.workers} threads")
        except (ArithmeticError, LookupError, ValueError) as error:
            why = repr(error)
        if why:
            if own:
                _warn_once(f"a tuned schedule is not used, here or for other sizes: {why}; tune again, {p}")
            continue
        terms = schedule_cost(p, x.schedule, target, x.workers)
        if own or terms.seconds <= MODEL.trust * least:
            others = ((choice.schedule, choice.cost), *choice.runners_up)
            rest = tuple((s, c) for s, c in others if s != x.schedule)
            return Choice(p, target, x.workers, x.schedule, terms, rest, f"tuned on {x.title or x.chip}")
    return choice


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if not _warned:
        _warned.add(text)
        warn(text)


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
    return _seconds(p, listed, (p.n if p.c == "col" else p.m,), (workers,))[0].tolist()


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
    return cpu_cost.costs(listed.table, q, ms, counts)
