"""Schedule overrides, by which tuning measures schedules.

Owns the overrides of this process. An override applies to
every form of a call, since all of them get their routes from `dispatch`;
a process with overrides neither reads nor writes a route cache, so that
no other process uses a route of an override.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.util.memo import forget_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem

_overrides: dict[Problem, tuple[Schedule, int]] = {}
_capturing = False


class Captured(Exception):  # noqa: N818 - control flow, not a fault
    """Raised out of a call while `capturing`, with the problem that it would compute."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def override(p: Problem, schedule: Schedule, workers: int) -> None:
    """Override the schedule and the number of threads of a problem from now on; legality is not checked."""
    _overrides[p] = schedule, workers
    _forget()


def withdraw() -> None:
    """Drop all overrides: `dispatch` selects schedules again."""
    _overrides.clear()
    _forget()


def renew() -> None:
    """Drop all selections of this process, after a change of the tuning database."""
    route_cache.forget()
    forget_all()
    runtime().clear_memo()


def active() -> bool:
    """Test whether overrides or `capturing` apply to single problems: a selection then serves one problem only."""
    return _capturing or bool(_overrides)


def override_of(p: Problem) -> tuple[Schedule, int] | None:
    """The override of a problem: schedule and threads, or None.

    Raises:
        Captured: inside `capturing`.
    """
    if _capturing:
        raise Captured(p)
    return _overrides.get(p)


@contextmanager
def capturing() -> Iterator[None]:
    """Make the next product raise `Captured` instead of being computed, so that nothing is built."""
    global _capturing  # noqa: PLW0603 - of the whole process
    _capturing = True
    _forget()
    try:
        yield
    finally:
        _capturing = False
        _forget()


def _forget() -> None:
    """Drop routes, so that calls look them up again; loaded code stays."""
    route_cache.close()
    forget_all()
    runtime().clear_memo()
