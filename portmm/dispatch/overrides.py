"""Schedule overrides, for measurements of schedules.

Owns the overrides of this process, and the interception of a call's problem. An override holds for every way in which
a user may call a product, since all of them get their routes from `dispatch`; a process with overrides neither reads
nor writes the route cache, so that no other process sees their effects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from portmm.dispatch import config
from portmm.errors import ScheduleError
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_neighbourhood import unsound
from portmm.schedule.text import spell
from portmm.util.memo import forget_all
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem

_overrides: dict[Problem, tuple[Schedule, int]] = {}
_interceptions: list[Interception] = []


class _StopCall(Exception):  # noqa: N818 - ends a call whose problem was intercepted
    pass


@dataclass(slots=True)
class Interception:
    """The problem of the first product inside `intercept`; None if there was none."""

    problem: Problem | None = None


def override(p: Problem, schedule: Schedule, workers: int) -> None:
    """Compute a problem by a schedule and a number of threads from now on.

    Raises:
        ScheduleError: the schedule is not legal for the problem on this target: it would compute another one.
    """
    target = config.target()
    if why := unsound(schedule, p, target, candidates(p, target)):
        raise ScheduleError(f"{spell(schedule)} is no schedule of {p} on {target.name}: {why}")
    if workers < 1:
        raise ScheduleError(f"{workers} threads cannot compute {p}: pass 1 or more")
    route_cache.close()
    _overrides[p] = schedule, workers
    renew()


def clear_overrides() -> None:
    """Drop all overrides: `dispatch` selects again."""
    _overrides.clear()
    renew()


def renew() -> None:
    """Select again for all calls of this process, after a change of what selections depend on; loaded code stays."""
    route_cache.forget()
    forget_all()
    runtime().clear_memo()


def active() -> bool:
    """Whether there are overrides or an interception: no selection holds for more than one problem then."""
    return bool(_interceptions) or bool(_overrides)


def schedule_for(p: Problem) -> tuple[Schedule, int] | None:
    """The override of a problem: a schedule and a number of threads. Inside `intercept` the call ends here."""
    if _interceptions:
        _interceptions[-1].problem = p
        raise _StopCall
    return _overrides.get(p)


@contextmanager
def intercept() -> Iterator[Interception]:
    """Record the problem of the next product in place of computing it: nothing is built, and the block ends there."""
    interception = Interception()
    route_cache.close()
    _interceptions.append(interception)
    renew()
    try:
        with suppress(_StopCall):
            yield interception
    finally:
        _interceptions.remove(interception)
        renew()
