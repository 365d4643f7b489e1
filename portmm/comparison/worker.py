"""Process of a contender, of the gauges of the machine's limits, or of a tuner's candidates: the child's side.

Owns the child's side of the protocol, and the bench of a contender. Started by `comparison.process` as
`python -m portmm.comparison.worker BENCH ADAPTER READ WRITE SETUP` with two inherited pipe descriptors; one JSON object
per line each way, so that the output of a library on its standard output does not disturb the protocol.

BENCH is the "module:name" of a class, which is called with the setup and ADAPTER and has `hello`, the fields of the
first message, and a method for each request: {"do": "time", "seconds": 0.1} calls `time(seconds=0.1)`, which replies.
Replies carry "state": "ok", "unsupported", "wrong", "crashed" and others and, when not ok, "reason", one line, with
"details" if the message has more lines. The first message is sent without a request; its state is "missing" where the
bench cannot be opened. A request with "within" ends this process after so many seconds, in case the parent is gone.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from importlib import import_module
from typing import Any

from portmm.comparison import measure
from portmm.comparison.case import Case
from portmm.comparison.data import APPROXIMATE, Arrays, arrays
from portmm.comparison.peers import Library, MissingError, Run, Setup, UnsupportedError, open_adapter
from portmm.errors import BuildError, TargetError
from portmm.host.calibrate import free_memory

GIB = 1 << 30
TRIAL = 0.01
"""Seconds for each method when the fastest is selected."""
# Libraries' threads spin after a call, OpenBLAS's for tens of milliseconds and
# Intel's OpenMP for 200; the next contender must not start before they sleep.
QUIET_STEP, QUIET_SHARE, QUIET_LIMIT = 0.005, 0.2, 0.5
GRACE = 5
"""Seconds after a request's limit in which its sender may end this process itself."""


class Bench:
    """The library of a contender, and the case that is prepared."""

    def __init__(self, setup: Setup, adapter: str | Library) -> None:
        self.setup = setup
        self.library = adapter if isinstance(adapter, Library) else open_adapter(adapter, setup)
        self.hello = {"version": self.library.version, "approximate": self.library.precision == APPROXIMATE}
        self._prepared: tuple[Case, Run, tuple[Arrays, ...]] | None = None

    def prepare(self, case: dict[str, Any], seed: int) -> dict[str, Any]:
        """Allocate the arrays of a case, check every method once, and select the fastest right one."""
        self._prepared = None
        reply = self._prepare(Case(**case), seed)
        self._wait()
        return reply

    def _prepare(self, case: Case, seed: int) -> dict[str, Any]:
        if reason := _refusal(self.library, case):
            return {"state": "unsupported", "reason": reason}
        try:
            methods, copies = measure.prepared(self.library, case, arrays(case, seed), self.setup)
        except TypeError as missing:
            return {"state": "unsupported", "reason": str(missing)}
        except (UnsupportedError, BuildError) as refused:
            state = "unsupported" if isinstance(refused, UnsupportedError) else "crashed"
            return {"state": state, **error_of(refused)}
        right: dict[str, float] = {}
        wrong: list[str] = []
        worst = allowed = 0.0
        for name, run in methods.items():
            if self.library.await_races is not None:
                self.library.await_races(run)
            error, bound = measure.checked(case, run, copies, self.library.precision)
            if error > bound:
                wrong.append(f"{name}: error {error:.3g} exceeds {bound:.3g}")
                continue
            worst, allowed = max((worst, allowed), (error, bound))
            right[name] = measure.seconds_per_call(run, TRIAL) if len(methods) > 1 else 0.0
        if not right:
            return {"state": "wrong", "reason": "; ".join(wrong) or "no method"}
        best = min(right, key=lambda name: right[name])
        self._prepared = case, methods[best], copies
        return {"state": "ok", "method": best, "methods": right, "wrong": wrong, "error": worst, "bound": allowed}

    def time(self, seconds: float) -> dict[str, Any]:
        """Seconds of a call, measured for about `seconds`."""
        if self._prepared is None:
            return {"state": "unsupported", "reason": "nothing is prepared"}
        taken = measure.seconds_per_call(self._prepared[1], seconds)
        self._wait()
        return {"state": "ok", "seconds": taken}

    def drop(self) -> dict[str, Any]:
        """Check a case for the last time, as a race may show only after many calls, and forget it."""
        if self._prepared is None:
            return {"state": "unsupported", "reason": "nothing is prepared"}
        error, bound = measure.checked(*self._prepared, self.library.precision)
        self._prepared = None
        self._wait()
        if error > bound:
            return {"state": "wrong", "reason": f"after timing, error {error:.3g} exceeds {bound:.3g}"}
        return {"state": "ok", "error": error}

    def _wait(self) -> None:
        if self.setup.threads > 1:
            wait_until_idle()


def wait_until_idle() -> None:
    """Wait until this process's threads have stopped spinning."""
    deadline = time.monotonic() + QUIET_LIMIT
    while time.monotonic() < deadline:
        before = time.process_time()
        time.sleep(QUIET_STEP)
        if time.process_time() - before < QUIET_STEP * QUIET_SHARE:
            return


def error_of(error: Exception) -> dict[str, str]:
    """Fields of a reply for an error: the message's first line as reason, and all of it as details if it has more."""
    reason, _, more = str(error).strip().partition("\n")
    return {"reason": reason.rstrip(":; ")} | ({"details": str(error)} if more else {})


def _refusal(library: Library, case: Case) -> str:
    """Reason to refuse a case without a run, empty if there is none."""
    if library.dtypes is not None and case.dtype not in library.dtypes:
        return f"does not multiply {case.dtype}"
    if case.fused and not library.fused:
        return "fuses nothing"
    # The operating system grants more memory than is free, and ends some process when it is written to.
    if 0 < (free := free_memory()) < case.bytes:
        return f"operands take {case.bytes / GIB:.3g} GiB, and {free / GIB:.3g} GiB of memory are free"
    return ""


def replied(bench: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Reply of a bench to a request; SIGALRM ends the process if it takes longer than its limit."""
    limit, action = request.pop("within", None), getattr(bench, request.pop("do"))
    if limit is not None:
        signal.alarm(math.ceil(limit) + GRACE)
    try:
        reply: dict[str, Any] = action(**request)
    finally:
        signal.alarm(0)
    return reply


def main(arguments: list[str]) -> int:
    """Serve requests until the pipe closes."""
    bench, adapter, read, write, setup = arguments
    # Ctrl-C is for the parent, which reports its results and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, name = bench.partition(":")
    with os.fdopen(int(read)) as source, os.fdopen(int(write), "w") as sink:

        def send(message: dict[str, Any]) -> None:
            sink.write(json.dumps(message) + "\n")
            sink.flush()

        try:
            opened = getattr(import_module(module), name)(Setup(**json.loads(setup)), adapter)
        except (MissingError, BuildError, TargetError) as error:
            send({"state": "missing", **error_of(error)})
            return 0
        send({"state": "ok"} | opened.hello)
        for line in source:
            send(replied(opened, json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
