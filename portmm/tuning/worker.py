"""Process that candidates run in.

Owns the child's side of the protocol. Started by `tuning.lane` as `python -m
portmm.tuning.worker OPENER READ WRITE SETUP`, as the workers of `comparison` are;
one JSON object per line each way. A candidate that crashes or hangs takes this
process with it, and nothing else.

Requests: {"do": "prepare", "case": {...}, "seed": int}, {"do": "build", "schedules":
[...]}, {"do": "check", "schedule": str, "workers": int}, {"do": "time", "schedule",
"workers", "seconds": float}. Each has a "limit": seconds after which the operating
system ends this process, in case the parent is gone. Replies carry "state": "ok",
"unsupported", "unbuildable" or "wrong" and, when not ok, "reason"; the first is sent
without a request, once the bench is open.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from portmm.comparison.case import Case
from portmm.comparison.environment import Setup
from portmm.comparison.peers import MissingError, UnsupportedError
from portmm.errors import BuildError, ScheduleError, TargetError
from portmm.schedule.text import parse

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.tuning.bench import Bench

GRACE = 5
"""Seconds after a request's limit in which its sender may end this process itself."""
REASON = 300
"""Characters of a compiler's message that are kept."""

_parsed = lru_cache(4096)(parse)


def _prepare(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    try:
        problem = bench.prepare(Case(**request["case"]), request["seed"])
    except (ScheduleError, UnsupportedError, TypeError) as error:
        return {"state": "unsupported", "reason": str(error)}
    return {"state": "ok", "problem": asdict(problem)}


def _build(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """Compile several schedules in parallel: compilers are processes of their own."""

    def one(schedule: Schedule) -> str:
        try:
            bench.build(schedule)
        except Exception as error:  # noqa: BLE001 - a candidate's failure must not end the others
            return f"{type(error).__name__}: {error}".strip()[:REASON]
        return ""

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
        return {"state": "ok", "reasons": list(pool.map(one, map(_parsed, request["schedules"])))}


def _check(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    try:
        error, bound = bench.check(_parsed(request["schedule"]), request["workers"])
    except (BuildError, ScheduleError, TargetError, ValueError, MemoryError) as refused:
        return {"state": "unbuildable", "reason": str(refused)[:REASON]}
    if not error <= bound:
        return {"state": "wrong", "reason": f"error {error:.3g} exceeds {bound:.3g}"}
    return {"state": "ok"}


def _time(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    s, workers = _parsed(request["schedule"]), request["workers"]
    return {"state": "ok", "seconds": bench.seconds(s, workers, request["seconds"])}


_ACTIONS = {"prepare": _prepare, "build": _build, "check": _check, "time": _time}


def reply(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """Reply to a request; SIGALRM ends the process if it takes too long."""
    signal.alarm(math.ceil(request["limit"]) + GRACE)
    try:
        return _ACTIONS[request["do"]](bench, request)
    finally:
        signal.alarm(0)


def main(arguments: list[str]) -> int:
    """Serve requests until the pipe closes."""
    opener, read, write, setup_text = arguments
    # Ctrl-C is for the parent, which reports its results and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, function = opener.partition(":")
    with os.fdopen(int(read)) as source, os.fdopen(int(write), "w") as sink:

        def send(message: dict[str, Any]) -> None:
            sink.write(json.dumps(message) + "\n")
            sink.flush()

        try:
            bench = getattr(import_module(module), function)(Setup(**json.loads(setup_text)))
        except (MissingError, BuildError, TargetError) as error:
            send({"state": "missing", "reason": str(error)})
            return 0
        send({"state": "ok"})
        for line in source:
            send(reply(bench, json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
