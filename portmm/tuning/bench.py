"""Measurement of one case in a worker: prepare, build, check, time.

Owns `Bench`. Everything goes through the functions that a user calls, so whatever they
compute can be tuned: weights packed or quantised, products with an epilogue, any types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portmm.comparison import cold
from portmm.comparison.data import EXACT, Arrays, arrays, judge
from portmm.comparison.ours import open_portmm
from portmm.comparison.peers import Fetched, Run
from portmm.comparison.worker import seconds_per_call
from portmm.dispatch import config, cpu_kernels, cpu_routes, cpu_units, overrides
from portmm.errors import ScheduleError
from portmm.ops import host_matmul

if TYPE_CHECKING:
    from portmm.comparison.case import Case
    from portmm.comparison.environment import Setup
    from portmm.comparison.peers import Library
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem


@dataclass(slots=True)
class Bench:
    """A case with its operands in memory, computed by one schedule at a time.

    Attributes:
        library: portmm as `compare` calls it.
        setup: threads, and whether caches are cold.
        case: the case that is prepared.
        data: its operands and its result; with cold caches, each copy of them.
        run: computes it.
        problem: the problem that its call passes to `dispatch`.
        override: the schedule and the threads that compute it now.
    """

    library: Library
    setup: Setup
    case: Case | None = None
    data: tuple[Arrays, ...] = ()
    run: Run | None = None
    problem: Problem | None = None
    override: tuple[Schedule, int] | None = None

    def prepare(self, case: Case, seed: int) -> Problem:
        """Allocate the operands of a case and return the problem of its call. Nothing is computed.

        Raises:
            ScheduleError: it is computed without a kernel of its own.
            UnsupportedError: it cannot be called.
        """
        self.case, self.override = case, None
        data = arrays(case, seed)
        overrides.clear_overrides()
        if self.setup.cold:
            ways, self.data = cold.rounds(self.library, case, data, self.setup.cold, self.setup.threads)
            self.run = next(iter(ways.values()))
        else:
            self.run, self.data = next(iter(self.library.prepare(case, data).values())), (data,)
        with overrides.intercept() as interception:
            self._call(1)
        if interception.problem is not None:
            self.problem = interception.problem
            return interception.problem
        raise ScheduleError(f"{case.name} is computed without a kernel of its own: there is nothing to tune")

    def build(self, schedule: Schedule) -> None:
        """Compile a schedule's kernel into the cache, without loading it.

        Raises:
            BuildError: the compiler failed.
            TargetError: this machine lacks its instruction set.
        """
        cpu_kernels.build_kernel(cpu_kernels.kernel_of(schedule, cpu_units.isa_of(schedule, config.target())))

    def check(self, schedule: Schedule, workers: int) -> tuple[float, float]:
        """Compute once by a schedule into a poisoned result; return the error and its bound.

        Raises:
            BuildError: the kernel cannot be loaded.
        """
        self._override(schedule, workers)
        assert self.case is not None  # noqa: S101 - it is prepared
        if isinstance(self.run, cold.Round):
            return cold.checked(self.case, self.run, self.data, EXACT)
        (data,) = self.data
        data.spoil()
        self._call(1)
        if isinstance(self.run, Fetched):
            self.run.fetch()
        return judge(self.case, data)

    def _call(self, count: int) -> None:
        assert self.run is not None  # noqa: S101 - it is prepared
        self.run(count)

    def seconds(self, schedule: Schedule, workers: int, seconds: float) -> float:
        """Seconds of a call by a schedule, measured for about `seconds`."""
        self._override(schedule, workers)
        if isinstance(self.run, cold.Round):
            return cold.seconds_per_call(self.run, seconds)
        return seconds_per_call(self._call, seconds)

    def _override(self, schedule: Schedule, workers: int) -> None:
        if self.override != (schedule, workers):
            assert self.problem  # noqa: S101 - it is prepared
            # First outside the user's call, which would fall back to NumPy if the kernel cannot be loaded.
            cpu_routes.route_by(schedule, self.problem, config.target(), workers)
            overrides.override(self.problem, schedule, workers)
            self.override = schedule, workers


def open_bench(setup: Setup) -> Any:
    """The bench of this process."""
    library = open_portmm(setup)
    host_matmul.begin()
    return Bench(library, setup)
