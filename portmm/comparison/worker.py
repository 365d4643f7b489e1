"""Process that one contender runs in.

Owns the child's side of the protocol and the clock. Started by
`comparison.contest` as `python -m portmm.comparison.worker ADAPTER READ WRITE SETUP`
with two inherited pipe descriptors; one JSON object per line each way, so that the
output of a library on its standard output does not disturb the protocol.

Requests: {"do": "prepare", "case": {...}, "seed": int}, {"do": "time",
"seconds": float}, {"do": "drop"}. Replies carry "state": "ok", "unsupported",
"wrong" or "crashed" and, when not ok, "reason", one line, with "details" if the message has
more lines. The first message is sent without a request: the library's version and whether
it only approximates, or "state": "missing".
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portmm.comparison import cold
from portmm.comparison.case import Case
from portmm.comparison.data import APPROXIMATE, EXACT, Arrays, arrays, judge
from portmm.comparison.environment import Setup
from portmm.comparison.peers import Fetched, Library, MissingError, Run, UnsupportedError, open_adapter
from portmm.errors import BuildError
from portmm.host.calibrate import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

GIB = 1 << 30
SAMPLES = 3
# Seconds for each method when the fastest is selected.
TRIAL = 0.01
# Seconds of a call that needs no second one to warm up.
LONG = 0.25
# Libraries' threads spin after a call, OpenBLAS's for tens of milliseconds and
# Intel's OpenMP for 200; the next contender must not start before they sleep.
QUIET_STEP, QUIET_SHARE, QUIET_LIMIT = 0.005, 0.2, 0.5


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case that is ready to be timed.

    Attributes:
        case: the case.
        data: its operands; with cold caches, each copy of them.
        run: computes it.
        precision: rounding of the library, one of `data.PRECISIONS`.
    """

    case: Case
    data: tuple[Arrays, ...]
    run: Run
    precision: str = EXACT


def seconds_per_call(run: Run, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median of a few samples that together take about `seconds`.

    The first calls, which find cold caches and sleeping threads, are not counted.
    """
    share = seconds / SAMPLES
    count, taken = 1, _clocked(run, 1, clock)
    if taken >= LONG:
        return taken
    taken = _clocked(run, 1, clock)
    while taken < share / 2 and count < 1 << 30:
        wanted = count * share / max(taken, 1e-9)
        count = int(min(max(wanted, 2 * count), 16 * count))
        taken = _clocked(run, count, clock)
    samples = SAMPLES if taken < seconds else 1
    return statistics.median(_clocked(run, count, clock) for _ in range(samples)) / count


def _clocked(run: Run, count: int, clock: Callable[[], float]) -> float:
    start = clock()
    run(count)
    return clock() - start


def wait_until_idle() -> None:
    """Wait until this process's threads have stopped spinning."""
    deadline = time.monotonic() + QUIET_LIMIT
    while time.monotonic() < deadline:
        before = time.process_time()
        time.sleep(QUIET_STEP)
        if time.process_time() - before < QUIET_STEP * QUIET_SHARE:
            return


def prepare(
    library: Library, case: Case, seed: int, setup: Setup | None = None
) -> tuple[Prepared | None, dict[str, Any]]:
    """Allocate the arrays, check every method once, and select the fastest right one.

    Args:
        library: the library.
        case: the case.
        seed: of the inputs.
        setup: threads, and whether caches are cold.

    Returns:
        The case to time, None if no method is right, and the reply.
    """
    if reason := _refusal(library, case):
        return None, {"state": "unsupported", "reason": reason}
    try:
        data = arrays(case, seed)
    except TypeError as missing:
        return None, {"state": "unsupported", "reason": str(missing)}
    methods: Mapping[str, Run]
    copies: tuple[Arrays, ...] = (data,)
    try:
        # On a device, adapters rotate through copies of the operands themselves.
        if setup and setup.cold and not setup.device:
            methods, copies = cold.rounds(library, case, data, setup.cold, setup.threads)
        else:
            methods = library.prepare(case, data)
    except (UnsupportedError, BuildError) as refused:
        state = "unsupported" if isinstance(refused, UnsupportedError) else "crashed"
        return None, {"state": state, **error_of(refused)}
    right: dict[str, float] = {}
    wrong: list[str] = []
    worst = allowed = 0.0
    for name, run in methods.items():
        error, bound = _checked(Prepared(case, copies, run, library.precision))
        if error > bound:
            wrong.append(f"{name}: error {error:.3g} exceeds {bound:.3g}")
            continue
        worst, allowed = max((worst, allowed), (error, bound))
        right[name] = _seconds(run, TRIAL) if len(methods) > 1 else 0.0
    if not right:
        return None, {"state": "wrong", "reason": "; ".join(wrong) or "no method"}
    best = min(right, key=lambda name: right[name])
    reply = {"state": "ok", "method": best, "methods": right, "wrong": wrong, "error": worst, "bound": allowed}
    return Prepared(case, copies, methods[best], library.precision), reply


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


def _checked(prepared: Prepared) -> tuple[float, float]:
    """Run once; return the error and its bound."""
    run, case = prepared.run, prepared.case
    if isinstance(run, cold.Round):
        return cold.checked(case, run, prepared.data, prepared.precision)
    (data,) = prepared.data
    data.spoil()
    if isinstance(run, Fetched):
        run.spoil()
    run(1)
    if isinstance(run, Fetched):
        run.fetch()
    return judge(case, data, prepared.precision)


def _seconds(run: Run, seconds: float) -> float:
    return cold.seconds_per_call(run, seconds) if isinstance(run, cold.Round) else seconds_per_call(run, seconds)


def _time(prepared: Prepared, seconds: float) -> dict[str, Any]:
    return {"state": "ok", "seconds": _seconds(prepared.run, seconds)}


def _drop(prepared: Prepared) -> dict[str, Any]:
    """Reply to the last check of a case: a race may show only after many calls."""
    error, bound = _checked(prepared)
    if error > bound:
        return {"state": "wrong", "reason": f"after timing, error {error:.3g} exceeds {bound:.3g}"}
    return {"state": "ok", "error": error}


def replies(library: Library, requests: Iterator[dict[str, Any]], setup: Setup) -> Iterator[dict[str, Any]]:
    """Replies to requests, in their order."""
    prepared: Prepared | None = None
    for request in requests:
        if request["do"] == "prepare":
            prepared = None
            prepared, reply = prepare(library, Case(**request["case"]), request["seed"], setup)
        elif prepared is None:
            reply = {"state": "unsupported", "reason": "nothing is prepared"}
        elif request["do"] == "time":
            reply = _time(prepared, request["seconds"])
        else:
            reply = _drop(prepared)
            prepared = None
        if setup.threads > 1:
            wait_until_idle()
        yield reply


def main(arguments: list[str]) -> int:
    """Serve requests for one contender until the pipe closes."""
    adapter, read, write, setup_text = arguments
    setup = Setup(**json.loads(setup_text))
    with os.fdopen(int(read)) as source, os.fdopen(int(write), "w") as sink:

        def send(message: dict[str, Any]) -> None:
            sink.write(json.dumps(message) + "\n")
            sink.flush()

        try:
            library = open_adapter(adapter, setup)
        except MissingError as error:
            send({"state": "missing", **error_of(error)})
            return 0
        send({"state": "ok", "version": library.version, "approximate": library.precision == APPROXIMATE})
        requests = (json.loads(line) for line in source)
        for reply in replies(library, requests, setup):
            send(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
