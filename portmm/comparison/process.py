"""Coordinator's side of a worker process.

Owns the start of a worker, requests with a time limit, and its end. A worker that ends,
hangs or raises is reported as its library's failure, with the reason; it never stops the
other workers.
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
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from portmm.comparison.environment import Setup, environment

if TYPE_CHECKING:
    from portmm.comparison.peers import Contender

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
        return json.loads(line)  # type: ignore[no-any-return]

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
