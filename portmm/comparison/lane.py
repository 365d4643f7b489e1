"""Workers of contenders during a comparison, with a deadline for each request.

Owns `Lane`: starting, requests and ending of one contender's worker, and the details of failures.

A worker that is busy at the deadline is ended, and the state of its reply is "late".
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portmm.build.cache import write_note
from portmm.comparison.peers import Contender
from portmm.comparison.process import BENCH, PATIENCE, Worker, WorkerError
from portmm.comparison.report import Entrant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from portmm.comparison.case import Case
    from portmm.comparison.environment import Setup

OPENING = 120.0
# Rate in flop/s of the slowest contender that may finish a request, which has several calls.
SLOWEST = 1e8
LONGEST = 3600.0
LIVES = 3
LATE = "late"
"""State of a reply for which no time was left."""
LIMIT = Contender("limit", "", "a C compiler; see `portmm doctor`")
"""Measures the machine's limits, alternating with the contenders."""
LIMIT_BENCH = "portmm.comparison.limit_worker:Machine"
LOG = "compare-log"
"""Name of the cache note with the details of failures of the last comparison."""
SEE = f"; the rest is in {LOG}.note, in the folder that `portmm cache --where` names"
UNOPENED = "no time was left to open it; give more with --budget SECONDS, in Python budget_s"


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a comparison.

    Attributes:
        setup: settings of workers.
        rounds: turns of each contender on each case, at most.
        turn: seconds of one turn.
        patience: seconds after which a contender that does not reply is ended.
        seed: of the inputs.
        deadline: end of the comparison, by `time.monotonic`.
        log: contender, case, and the whole output of each failure.
    """

    setup: Setup
    rounds: int
    turn: float
    patience: float
    seed: int
    deadline: float
    log: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds until the deadline; not positive after it."""
        return self.deadline - time.monotonic()


@dataclass(slots=True)
class Lane:
    """State of a contender during a comparison.

    Attributes:
        contender: the contender.
        worker: its process, None while it has none.
        entrant: its entry in the report, None before it was opened.
        lives: number of times that its worker may still crash.
        samples: seconds per call of the current case, round by round.
        bench: what replies to its requests.
    """

    contender: Contender
    worker: Worker | None = None
    entrant: Entrant | None = None
    lives: int = LIVES
    samples: list[float] = field(default_factory=list)
    bench: str = BENCH

    @property
    def name(self) -> str:
        """The contender's name."""
        return self.contender.name

    @property
    def opened(self) -> bool:
        """Whether its library was opened."""
        return self.entrant is not None and self.entrant.state == "ok"


def launch(lane: Lane, rules: Rules) -> None:
    """Start a lane's worker, which opens its library; several do so in parallel, since nothing is timed meanwhile."""
    if rules.left > 0:
        lane.worker = Worker(lane.contender, rules.setup, lane.bench)


def greet(lane: Lane, rules: Rules) -> None:
    """Receive the first message of a lane's worker and set its entrant; a missing library is a state, not an error."""
    contender = lane.contender
    hello: dict[str, Any] = {"state": "timeout", "reason": UNOPENED}
    if lane.worker is not None:
        try:
            hello = lane.worker.hear(max(0.0, min(OPENING, rules.left)))
        except WorkerError as error:
            late = rules.left <= 0
            hello = {"state": error.state, "reason": UNOPENED if late else str(error), "details": error.details}
    hello |= {"reason": _brief(hello, contender.name, "opening", rules)}
    if hello["state"] != "ok":
        close([lane], 0.0)
    if lane.entrant is None:
        version, rough = hello.get("version", ""), hello.get("approximate", False)
        lane.entrant = Entrant(
            contender.name, contender.peer, hello["state"], version, hello["reason"], contender.hint, rough
        )


def ask(lane: Lane, request: dict[str, Any], case: Case, rules: Rules) -> dict[str, Any]:
    """Reply of a lane's worker to a request; a crash and the deadline are states of the reply too."""
    left = rules.left
    if left <= 0:
        return {"state": LATE, "reason": "no time was left"}
    if lane.worker is None:
        return {"state": "crashed", "reason": "crashed before, given up"}
    try:
        answer = lane.worker.ask(request, min(rules.patience + case.flops / SLOWEST, LONGEST, left))
    except WorkerError as error:
        close([lane], 0.0)
        if rules.left <= 0:
            return {"state": LATE, "reason": "no time was left"}
        lane.lives -= 1
        answer = {"state": error.state, "reason": str(error), "details": error.details}
    return answer if answer["state"] == "ok" else answer | {"reason": _brief(answer, lane.name, case.name, rules)}


def close(lanes: Iterable[Lane], patience: float = PATIENCE) -> None:
    """End the workers of lanes; those that are left after `patience` seconds in all are killed."""
    workers = [lane.worker for lane in lanes if lane.worker]
    for lane in lanes:
        lane.worker = None
    for worker in workers:
        worker.hang_up()
    end = time.monotonic() + patience
    for worker in workers:
        worker.close(max(0.0, end - time.monotonic()))


def _brief(answer: dict[str, str], name: str, where: str, rules: Rules) -> str:
    """Reason of a reply, with a hint at its details, which go into the log."""
    reason, details = answer.get("reason", ""), answer.get("details", "").strip()
    # A traceback or the output of a compiler has details; a single line of a library that hung has none.
    if "\n" not in details:
        return reason
    rules.log.append((name, where, details))
    return f"{reason}{SEE}"


def keep_log(log: Sequence[tuple[str, str, str]]) -> None:
    """Write the details of failures into the cache."""
    if log:
        write_note(LOG, "\n".join(f"{name}, {where}:\n{text.strip()}\n" for name, where, text in log))
