"""Measurement of schedules in a worker process: prepare, build, check, time.

Owns `Bench`, which measures one case through the functions that a user calls, so that whatever they compute can be
tuned: weights packed or quantised, products with an epilogue, any types; and `Candidates`, which replies to requests
with it, as a bench of `comparison.worker`. A candidate that crashes or hangs takes only its process with it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from portmm.comparison import measure
from portmm.comparison.case import Case
from portmm.comparison.data import Arrays, arrays
from portmm.comparison.ours import open_portmm
from portmm.comparison.peers import UnsupportedError
from portmm.dispatch import config, cpu_kernels, cpu_routes, cpu_units, overrides
from portmm.errors import BuildError, ScheduleError, TargetError
from portmm.ops import host_matmul
from portmm.schedule.schedule import Schedule, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.comparison.environment import Setup
    from portmm.comparison.peers import Library, Run
    from portmm.spec.problem import Problem

REASON = 300
"""Characters of a compiler's message that are kept."""

_parsed = lru_cache(4096)(parse)


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
        methods, self.data = measure.prepared(self.library, case, data, self.setup)
        self.run = next(iter(methods.values()))
        with overrides.intercept() as interception:
            self.run(1)
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
        run = self._overridden(schedule, workers)
        assert self.case is not None  # noqa: S101 - it is prepared
        return measure.checked(self.case, run, self.data)

    def seconds(self, schedule: Schedule, workers: int, seconds: float) -> float:
        """Seconds of a call by a schedule, measured for about `seconds`."""
        return measure.seconds_per_call(self._overridden(schedule, workers), seconds)

    def _overridden(self, schedule: Schedule, workers: int) -> Run:
        """The run of the case, by a schedule from now on."""
        assert self.problem is not None  # noqa: S101 - it is prepared
        assert self.run is not None  # noqa: S101 - it is prepared
        if self.override != (schedule, workers):
            # First outside the user's call, which would fall back to NumPy if the kernel cannot be loaded.
            cpu_routes.route_by(schedule, self.problem, config.target(), workers)
            overrides.override(self.problem, schedule, workers)
            self.override = schedule, workers
        return self.run


def open_bench(setup: Setup) -> Any:
    """The bench of this process."""
    library = open_portmm(setup)
    host_matmul.begin()
    return Bench(library, setup)


class Candidates:
    """Replies of a bench to a tuner's requests."""

    def __init__(self, setup: Setup, opener: str) -> None:
        self.hello: dict[str, Any] = {}
        module, _, function = opener.partition(":")
        self.bench: Bench = getattr(import_module(module), function)(setup)

    def prepare(self, case: dict[str, Any], seed: int) -> dict[str, Any]:
        """Prepare a case; the reply has the problem of its call."""
        try:
            problem = self.bench.prepare(Case(**case), seed)
        except (ScheduleError, UnsupportedError, TypeError) as error:
            return {"state": "unsupported", "reason": str(error)}
        return {"state": "ok", "problem": asdict(problem)}

    def build(self, schedules: Sequence[str]) -> dict[str, Any]:
        """Compile several schedules in parallel, since compilers are processes of their own."""

        def one(schedule: Schedule) -> str:
            try:
                self.bench.build(schedule)
            except Exception as error:  # noqa: BLE001 - a candidate's failure must not end the others
                return f"{type(error).__name__}: {error}".strip()[:REASON]
            return ""

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
            return {"state": "ok", "reasons": list(pool.map(one, map(_parsed, schedules)))}

    def check(self, schedule: str, workers: int) -> dict[str, Any]:
        """Compute once and compare."""
        try:
            error, bound = self.bench.check(_parsed(schedule), workers)
        except (BuildError, ScheduleError, TargetError, ValueError, MemoryError) as refused:
            return {"state": "unbuildable", "reason": str(refused)[:REASON]}
        if not error <= bound:
            return {"state": "wrong", "reason": f"error {error:.3g} exceeds {bound:.3g}"}
        return {"state": "ok"}

    def time(self, schedule: str, workers: int, seconds: float) -> dict[str, Any]:
        """Seconds of a call by a schedule."""
        return {"state": "ok", "seconds": self.bench.seconds(_parsed(schedule), workers, seconds)}
