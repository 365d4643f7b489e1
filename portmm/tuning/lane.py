"""The process that candidates run in, from both sides.

Owns `Lane`, the parent's side, which sends requests with a time limit, restarts the worker after a candidate crashed
it, and turns every outcome into a result; `Bench`, which measures one case through the functions that a user calls, so
that whatever they compute can be tuned: weights packed or quantised, products with an epilogue, any types; and
`Candidates`, which replies to requests with it, as a bench of `comparison.worker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from portmm.comparison import measure
from portmm.comparison.case import Case
from portmm.comparison.data import Arrays, arrays
from portmm.comparison.ours import open_portmm
from portmm.comparison.peers import Contender, Library, Run, Setup, UnsupportedError
from portmm.comparison.process import Worker, reply
from portmm.dispatch import config, cpu_kernels, cpu_routes, overrides
from portmm.errors import BuildError, PortmmError, ScheduleError, TargetError
from portmm.host import machine_load
from portmm.ops import host_matmul
from portmm.schedule.schedule import Schedule
from portmm.schedule.text import parse
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
            TargetError: this machine lacks its instruction set.
        """
        cpu_kernels.build_kernel(cpu_kernels.kernel_of(schedule, cpu_kernels.isa_of(schedule, config.target())))

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

        with ThreadPoolExecutor(machine_load.cores()) as pool:
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


OPENER = "portmm.tuning.lane:open_bench"
BENCH = "portmm.tuning.lane:Candidates"
OPENING = 120.0
COMPILING = 60.0
"""Seconds to compile one batch of kernels."""
TIMES = 50
"""Multiple of the base schedule's time that a candidate may take: it computes several times, and some are far worse."""


class LostError(Exception):
    """A candidate crashed the worker or hung: `state` is "crashed" or "timeout", the message says how."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


@dataclass(slots=True)
class Lane:
    """A worker process that is restarted when it is needed; its owner calls `close`.

    Attributes:
        setup: threads and target.
        seed: of the operands.
        patience: seconds that a candidate may take in addition to `TIMES` the base schedule's time.
        opener: "module:function" that opens its bench.
        case: the case that is prepared.
    """

    setup: Setup
    seed: int = 0
    patience: float = 10.0
    opener: str = OPENER
    case: Case | None = None
    _worker: Worker | None = None
    _prepared: bool = False

    def prepare(self, case: Case) -> Problem | str:
        """Prepare a case; return the problem of its call, or the reason why there is none."""
        self.case, self._prepared = case, False
        try:
            answer = self._prepare()
        except LostError as lost:
            return str(lost)
        if answer["state"] != "ok":
            return str(answer["reason"])
        self._prepared = True
        return Problem(**answer["problem"])

    def build(self, schedules: Sequence[str]) -> list[str]:
        """Compile schedules in parallel; return for each "" or the reason of its failure."""
        if not schedules:
            return []
        try:
            return list(self._ask({"do": "build", "schedules": list(schedules)}, COMPILING)["reasons"])
        except LostError as lost:
            if len(schedules) == 1:
                return [str(lost)]
        return [reason for one in schedules for reason in self.build([one])]

    def check(self, schedule: str, workers: int, usual: float) -> tuple[str, str]:
        """Compute once; return the state, "ok" or another, and its reason. `usual` is the expected time in seconds."""
        try:
            answer = self._ask({"do": "check", "schedule": schedule, "workers": workers}, self._limit(usual))
        except LostError as lost:
            return lost.state, str(lost)
        return answer["state"], answer.get("reason", "")

    def time(self, schedule: str, workers: int, seconds: float, usual: float) -> float:
        """Seconds of a call, measured for about `seconds`.

        Raises:
            LostError: the worker is gone.
        """
        request = {"do": "time", "schedule": schedule, "workers": workers, "seconds": seconds}
        return float(self._ask(request, self._limit(usual) + seconds)["seconds"])

    def _limit(self, usual: float) -> float:
        return self.patience + TIMES * usual

    def _ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        if self._worker is None or not self._prepared:
            self._prepared = self._prepare()["state"] == "ok"
        return self._send(request, limit)

    def _prepare(self) -> dict[str, Any]:
        assert self.case  # noqa: S101 - callers prepare one first
        self._start()
        return self._send({"do": "prepare", "case": asdict(self.case), "seed": self.seed}, OPENING)

    def _send(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        assert self._worker  # noqa: S101 - it is started
        answer = reply(self._worker, limit, request | {"within": limit})
        if "lost" in answer:
            self.close()
            raise LostError(answer["state"], answer["reason"])
        return answer

    def _start(self) -> None:
        if self._worker is not None:
            return
        self._worker = Worker(Contender("portmm", self.opener), self.setup, BENCH)
        hello = reply(self._worker, OPENING)
        if hello["state"] != "ok":
            self.close()
            raise PortmmError(f"nothing can be tuned: {hello['reason']}")

    def close(self) -> None:
        """End the worker."""
        worker, self._worker, self._prepared = self._worker, None, False
        if worker:
            worker.close()
