"""Kernels by order, in place of choice: what measurements of schedules rest on.

Owns the orders of this process. Imports `util.memo` and `run`. An order holds for
every way in which a user may call a product, since all of them ask `dispatch`
for a route; a process that has given orders reads and writes no book, so that
no other process ever sees what came of them.
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

_orders: dict[Problem, tuple[Schedule, int]] = {}
_asking = False


class Asked(Exception):  # noqa: N818 - an answer, not an error
    """What a call would have to be computed: raised out of it while `asking`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def order(p: Problem, schedule: Schedule, workers: int) -> None:
    """Have a problem computed by a schedule and so many threads from now on, legal or not."""
    _orders[p] = schedule, workers
    _forget()


def withdraw() -> None:
    """Drop all orders: `dispatch` chooses again."""
    _orders.clear()
    _forget()


def renew() -> None:
    """Have all calls of this process choose again: what choices rest on has changed."""
    route_cache.forget()
    forget_all()
    runtime().clear_memo()


def active() -> bool:
    """Whether products are ordered or asked for, one by one: no choice holds for more than one problem then."""
    return _asking or bool(_orders)


def given(p: Problem) -> tuple[Schedule, int] | None:
    """What is ordered for a problem.

    Raises:
        Asked: somebody is `asking`.
    """
    if _asking:
        raise Asked(p)
    return _orders.get(p)


@contextmanager
def asking() -> Iterator[None]:
    """Have the next product raise `Asked` instead of being computed, so that nothing is built."""
    global _asking  # noqa: PLW0603 - one process asks or computes
    _asking = True
    _forget()
    try:
        yield
    finally:
        _asking = False
        _forget()


def _forget() -> None:
    """Calls find their routes anew; code that is loaded stays."""
    route_cache.close()
    forget_all()
    runtime().clear_memo()
