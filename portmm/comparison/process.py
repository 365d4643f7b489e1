"""The coordinator's end of a worker process.

Owns starting, asking with a time limit, and ending a worker. Imports
`comparison.environment` and `comparison.peers`. A worker that ends, hangs or raises
is a fact about its library, reported with its reason; it never stops the
others.
"""

from __future__ import annotations

import json
import os
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

PATIENCE = 2.0


class WorkerError(Exception):
    """A worker is gone: `state` is "crashed" or "timeout", the message says how."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


class Worker:
    """A running worker process; whoever starts one calls `close`.

    Args:
        contender: whom it is for.
        setup: how it runs.
        module: what is run, by its name.
    """

    def __init__(self, contender: Contender, setup: Setup, module: str = "portmm.comparison.worker") -> None:
        self.contender = contender
        child_read, self._write = os.pipe()
        self._read, child_write = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        env = environment(os.environ, setup, uses_openblas=contender.uses_openblas)
        # The worker must find the same modules as its parent, an adapter of the caller's among them.
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        fds = (child_read, child_write)
        command = [sys.executable, "-P", "-m", module, contender.adapter, *map(str, fds)]
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
                    raise WorkerError("timeout", f"no answer in {timeout:.0f} s")
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
        last = self._last_line()
        return WorkerError("crashed", f"{how}: {last}" if last else how)

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""

    def close(self) -> None:
        """End the worker: close its pipe, and kill it if it lingers."""
        if not self._open:
            return
        self._open = False
        for fd in (self._write, self._read):
            os.close(fd)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._kill()
        self._log.close()
