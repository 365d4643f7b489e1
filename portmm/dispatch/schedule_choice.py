"""Choice of a schedule for a problem: that of the cost model, or one that was measured to be faster.

Owns `Choice`, and the decision whether a tuned schedule replaces the model's, on CPUs and on devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.errors import DatabaseError
from portmm.schedule.cpu_neighbourhood import unsound
from portmm.target.model import CPU as MODEL
from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portmm.schedule.roofline import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target


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


def overlaid(
    choice: Choice,
    listed: Sequence[Schedule],
    threads: int,
    predict: Callable[[Problem, Schedule, Target, int], Cost],
) -> Choice:
    """The model's selection, or a schedule tuned on this chip, or on a similar one if the model predicts no loss.

    Args:
        choice: the model's selection.
        listed: the candidates.
        threads: the most that may be used.
        predict: the cost model.
    """
    from portmm.dispatch import tuned_lookup
    from portmm.dispatch.tuned_schedule import architecture

    p, target = choice.problem, choice.target
    least = min(c.seconds for c in (choice.cost, *(c for _, c in choice.runners_up[:1])))
    try:
        tuned = tuned_lookup.find(p, target, threads)
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
        terms = predict(p, x.schedule, target, x.workers)
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
