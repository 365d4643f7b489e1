"""Workers of contenders, from the coordinator's side.

Owns `Worker`: the start of a process, requests with a time limit, and its end; a worker that ends, hangs or raises is
reported as its library's failure, with the reason, and never stops the others. And `Lane`, a contender's worker during
a comparison, with the details of failures: a worker that is busy at the deadline is ended, and the state of its reply
is "late".
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from portmm.build.cache import write_note
from portmm.comparison.case import Case
from portmm.comparison.peers import Contender, Setup, environment
from portmm.comparison.report import Entrant

WORKER = "portmm.comparison.worker"
BENCH = f"{WORKER}:Bench"
"""Bench of a contender."""
PATIENCE = 2.0
RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Missing)\b.*")
"""Line of a traceback that names the exception; further lines of its message, often a compiler's, follow."""


class WorkerError(Exception):
    """A worker ended or hung; the message is the reason in one line.

    Attributes:
        state: "crashed" or "timeout".
        details: its whole output.
    """

    def __init__(self, state: str, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.state, self.details = state, details


def last_words(text: str) -> str:
    """Last exception in the output of a process, or its last line."""
    lines = text.strip().splitlines()
    raised = [
        line for line in lines[text.count("\n", 0, max(text.rfind("Traceback (most"), 0)) :] if RAISED.match(line)
    ]
    return next(iter(raised[:1] or lines[-1:]), "").strip()[:300]


class Worker:
    """A running worker process; its owner calls `close`.

    Args:
        contender: its contender.
        setup: threads, ISA and target.
        bench: "module:name" of what replies to its requests: see `comparison.worker`.
    """

    def __init__(self, contender: Contender, setup: Setup, bench: str = BENCH) -> None:
        self.contender = contender
        child_read, self._write = os.pipe()
        self._read, child_write = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        env = environment(os.environ, setup, uses_openblas=contender.uses_openblas)
        # The worker must find the same modules as its parent, for example an adapter of the caller's.
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        fds = (child_read, child_write)
        command = [sys.executable, "-P", "-m", WORKER, bench, contender.adapter, *map(str, fds)]
        self._process = subprocess.Popen(
            [*command, json.dumps(asdict(setup))],
            env=env,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        for fd in fds:
            os.close(fd)
        self._rest = b""
        self._open = True

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and wait for the reply.

        Raises:
            WorkerError: the worker ended, or took longer than `timeout` seconds.
        """
        try:
            os.write(self._write, (json.dumps(request) + "\n").encode())
        except BrokenPipeError:
            raise self._ended() from None
        return self.hear(timeout)

    def hear(self, timeout: float) -> dict[str, Any]:
        """Wait for the next message of the worker.

        Raises:
            WorkerError: the worker ended, or took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    self._kill()
                    raise WorkerError("timeout", f"no answer in {timeout:.0f} s", self._log_text())
                data = os.read(self._read, 1 << 16)
                if not data:
                    raise self._ended()
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ended(self) -> WorkerError:
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._kill()
            return WorkerError("crashed", "closed its pipe")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        output = self._log_text()
        last = last_words(output)
        return WorkerError("crashed", f"{how}: {last}" if last else how, output)

    def _log_text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def hang_up(self) -> None:
        """Close the pipe, at whose end the worker exits."""
        if self._open:
            self._open = False
            for fd in (self._write, self._read):
                os.close(fd)

    def close(self, patience: float = PATIENCE) -> None:
        """End the worker: close its pipe, and kill it if it has not exited after `patience` seconds."""
        self.hang_up()
        if self._log.closed:
            return
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._kill()
        self._log.close()


def reply(worker: Worker, timeout: float, request: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reply to a request, or the first message; where there is none, the state says so, and "lost" is true."""
    try:
        return worker.ask(request, timeout) if request else worker.hear(timeout)
    except WorkerError as error:
        return {"state": error.state, "reason": str(error), "details": error.details, "lost": True}


OPENING = 120.0
# Rate in flop/s of the slowest contender that may finish a request, which has several calls.
SLOWEST = 1e8
LONGEST = 3600.0
LIVES = 3
LATE = "late"
"""State of a reply for which no time was left."""
LIMIT = Contender("limit", "", "a C compiler; see `portmm doctor`")
"""Measures the machine's limits, alternating with the contenders."""
LIMIT_BENCH = "portmm.comparison.limit:Machine"
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

    def launch(self, rules: Rules) -> None:
        """Start the worker, which opens its library; several do so in parallel, since nothing is timed meanwhile."""
        if rules.left > 0:
            self.worker = Worker(self.contender, rules.setup, self.bench)

    def relaunch(self, rules: Rules) -> None:
        """Start the worker again if it is gone, as long as it may still crash."""
        if self.worker is None and self.lives > 0:
            self.launch(rules)
            self.greet(rules)

    def greet(self, rules: Rules) -> None:
        """Receive the worker's first message and set the entrant; a missing library is a state, not an error."""
        contender = self.contender
        hello: dict[str, Any] = {"state": "timeout", "reason": UNOPENED}
        if self.worker is not None:
            hello = reply(self.worker, max(0.0, min(OPENING, rules.left)))
            hello |= {"reason": UNOPENED} if "lost" in hello and rules.left <= 0 else {}
        hello |= {"reason": _brief(hello, contender.name, "opening", rules)}
        if hello["state"] != "ok":
            close([self], 0.0)
        if self.entrant is None:
            version, rough = hello.get("version", ""), hello.get("approximate", False)
            self.entrant = Entrant(
                contender.name, contender.peer, hello["state"], version, hello["reason"], contender.hint, rough
            )

    def ask(self, request: dict[str, Any], case: Case, rules: Rules) -> dict[str, Any]:
        """Reply of the worker to a request; a crash and the deadline are states of the reply too."""
        left = rules.left
        if left <= 0:
            return {"state": LATE, "reason": "no time was left"}
        if self.worker is None:
            return {"state": "crashed", "reason": "crashed before, given up"}
        answer = reply(self.worker, min(rules.patience + case.flops / SLOWEST, LONGEST, left), request)
        if "lost" in answer:
            close([self], 0.0)
            if rules.left <= 0:
                return {"state": LATE, "reason": "no time was left"}
            self.lives -= 1
        return answer if answer["state"] == "ok" else answer | {"reason": _brief(answer, self.name, case.name, rules)}


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
