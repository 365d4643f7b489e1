"""What a worker does with one case: pose, build, check, time.

Owns `Bench`. Imports `api`, `comparison`, `dispatch`, `orders`, `settings`. Everything
goes through the functions that a user calls, so whatever they can compute can be
tuned: weights packed or quantised, sums with an epilogue, any types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portmm import api, dispatch, orders, settings
from portmm.comparison.data import Arrays, arrays, judge
from portmm.comparison.peers import Fetched, Run, open_portmm
from portmm.comparison.worker import seconds_per_call
from portmm.errors import ScheduleError

if TYPE_CHECKING:
    from portmm.comparison.environment import Setup
    from portmm.comparison.peers import Library
    from portmm.comparison.suite import Case
    from portmm.problem import Problem
    from portmm.schedule import Schedule
    from portmm.tuning.cold import Sweep


@dataclass(slots=True)
class Bench:
    """A case laid out, and one schedule at a time to compute it by.

    Attributes:
        library: portmm as `compare` calls it.
        case: what is laid out.
        data: its operands and its result.
        run: computes it.
        problem: what `dispatch` is asked for when it runs.
        ordered: the schedule and the threads that compute it now.
        sweep: empties the caches.
    """

    library: Library
    case: Case | None = None
    data: Arrays | None = None
    run: Run | None = None
    problem: Problem | None = None
    ordered: tuple[Schedule, int] | None = None
    sweep: Sweep | None = field(default=None, repr=False)

    def pose(self, case: Case, seed: int) -> Problem:
        """Lay a case out; the problem that its call asks to have solved. Nothing is computed.

        Raises:
            ScheduleError: it is computed without a kernel of its own.
            UnsupportedError: it cannot be called.
        """
        self.case, self.ordered = case, None
        self.data = arrays(case, seed)
        orders.withdraw()
        self.run = next(iter(self.library.prepare(case, self.data).values()))
        try:
            with orders.asking():
                self.run(1)
        except orders.Asked as asked:
            self.problem = asked.problem
            return asked.problem
        raise ScheduleError(f"{case.name} is computed without a kernel of its own: there is nothing to tune")

    def build(self, schedule: Schedule) -> None:
        """Compile a schedule's kernel into the cache; nothing of it is loaded.

        Raises:
            BuildError: the compiler failed.
            TargetError: this machine lacks its instruction set.
        """
        dispatch.build_kernel(dispatch.kernel_of(schedule, dispatch.isa_of(schedule, settings.target())))

    def check(self, schedule: Schedule, workers: int) -> tuple[float, float]:
        """Compute once by a schedule into a poisoned result; the error and what is allowed.

        Raises:
            BuildError: the kernel cannot be loaded.
        """
        self._order(schedule, workers)
        assert self.case is not None and self.data is not None and self.run is not None  # noqa: PT018, S101 - it is posed
        self.data.spoil()
        self.run(1)
        if isinstance(self.run, Fetched):
            self.run.fetch()
        return judge(self.case, self.data)

    def seconds(self, schedule: Schedule, workers: int, seconds: float, *, cold: bool) -> float:
        """Seconds of a call by a schedule, measured in about so many; `cold` empties the caches before each."""
        self._order(schedule, workers)
        assert self.run  # noqa: S101 - it is posed
        if not cold:
            return seconds_per_call(self.run, seconds)
        if self.sweep is None:
            from portmm.tuning.cold import Sweep

            self.sweep = Sweep.of(settings.target())
        return self.sweep.seconds_per_call(self.run, seconds)

    def _order(self, schedule: Schedule, workers: int) -> None:
        if self.ordered != (schedule, workers):
            assert self.problem  # noqa: S101 - it is posed
            # First without the call around it, which would make do with NumPy if it cannot be loaded.
            dispatch.route_by(schedule, self.problem, settings.target(), workers)
            orders.order(self.problem, schedule, workers)
            self.ordered = schedule, workers


def open_bench(setup: Setup) -> Any:
    """The bench of this process."""
    library = open_portmm(setup)
    api.begin()
    return Bench(library)
