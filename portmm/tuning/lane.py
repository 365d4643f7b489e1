"""Parent's side of the process that candidates run in.

Owns `Lane`: it sends requests with a time limit, restarts the worker after a candidate
crashed it, and turns every outcome into a result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from portmm.comparison.peers import Contender
from portmm.comparison.process import Worker, WorkerError
from portmm.errors import PortmmError
from portmm.spec.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.comparison.case import Case
    from portmm.comparison.environment import Setup

OPENER = "portmm.tuning.bench:open_bench"
BENCH = "portmm.tuning.bench:Candidates"
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
        try:
            return self._worker.ask(request | {"within": limit}, limit)
        except WorkerError as error:
            self.close()
            raise LostError(error.state, str(error)) from None

    def _start(self) -> None:
        if self._worker is not None:
            return
        self._worker = Worker(Contender("portmm", self.opener), self.setup, BENCH)
        try:
            hello = self._worker.hear(OPENING)
        except WorkerError as error:
            hello = {"state": error.state, "reason": str(error)}
        if hello["state"] != "ok":
            self.close()
            raise PortmmError(f"nothing can be tuned: {hello['reason']}")

    def close(self) -> None:
        """End the worker."""
        worker, self._worker, self._prepared = self._worker, None, False
        if worker:
            worker.close()
