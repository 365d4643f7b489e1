"""Kernels that are built in the background, while another kernel with the same results serves the calls.

Owns the thread that builds them, and the choice of the kernel in their place: a candidate for the problem whose code is
loaded, that adds the same products in the same order, so that no bit of a result depends on which of the two ran, and
that loses little time. Where there is none, the call waits for the compiler.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.build import child_process
from portmm.spec.dtype import UNCONVERTED
from portmm.target.model import CPU as MODEL
from portmm.util import locks

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem

ORDERED = ("gemm", "dot", "tiles")
"""Programs whose schedules add in one order each: summation runs, one after the other (see `target.summation`)."""

_lock = locks.lock()
_waiting: dict[Any, Callable[[], Any]] = {}
_failed: set[Any] = set()
_threads: list[threading.Thread] = []


class StandIn(NamedTuple):
    """A loaded kernel that serves a call while the selected one is being built.

    Attributes:
        schedule: of the loaded kernel.
        workers: threads that share the work.
    """

    schedule: Schedule
    workers: int


def same_results(s: Schedule, other: Schedule) -> bool:
    """Whether two schedules for one problem give the same bits: each adds in one order, or sums are of integers."""
    if (s.dtype, s.epilogue) != (other.dtype, other.epilogue):
        return False
    if not s.epilogue and s.types[2] == "s32":
        return True
    return (
        s.program == other.program
        and s.program in ORDERED
        and (s.isa, s.atom) == (other.isa, other.atom)
        and "k" not in (s.parallel.over, other.parallel.over)
        # Int4 values in place are multiplied before they are scaled, in panels after that.
        and (s.b.layout != "codes" or s.b.packed == other.b.packed)
    )


def stand_in(
    p: Problem, wanted: Schedule, listed: Sequence[Schedule], seconds: Callable[[], Any], is_loaded: Callable[..., bool]
) -> Schedule | None:
    """The fastest loaded schedule that may take the place of another for a while; None if there is none.

    Args:
        p: the problem.
        wanted: the schedule that is selected.
        listed: candidates for the problem.
        seconds: returns their predicted times.
        is_loaded: whether the code of a schedule is loaded.
    """
    if p.static or p.dtype not in UNCONVERTED:
        return None
    usable = [i for i, s in enumerate(listed) if is_loaded(s) and same_results(s, wanted)]
    if not usable:
        return None
    predicted = seconds()
    best = min(usable, key=predicted.__getitem__)
    return listed[best] if predicted[best] - predicted[listed.index(wanted)] <= MODEL.stand_in_loss else None


def begin(key: Any, build: Callable[[], Any]) -> bool:
    """Build something in the background, once for each key; False once after it failed, and where threads cannot start.

    Errors are suppressed: a caller that then builds in the foreground gets them.
    """
    with _lock:
        if key in _failed:
            _failed.remove(key)
            return False
        _waiting.setdefault(key, build)
        if not _threads or not _threads[0].is_alive():
            _threads.clear()
            # No daemon: what was begun is in the cache when the process ends.
            thread = threading.Thread(target=_work, name="portmm-background")
            try:
                thread.start()
            except RuntimeError:  # the interpreter shuts down, or the process has as many threads as it may have
                _waiting.clear()
                return False
            _threads.append(thread)
    return True


def _work() -> None:
    child_process.background.set(True)
    while True:
        with _lock:
            if not threading.main_thread().is_alive():
                _waiting.clear()  # the process ends when the build that ran has ended
            if not _waiting:
                _threads.clear()
                return
            key, build = next(iter(_waiting.items()))
        failed = True
        with suppress(Exception):
            build()
            failed = False
        with _lock:
            _waiting.pop(key, None)
            if failed:
                _failed.add(key)


def wait() -> None:
    """Return when nothing is being built."""
    for thread in tuple(_threads):
        thread.join()


def _in_child() -> None:
    """A forked child has no such thread."""
    for each in (_waiting, _failed, _threads):
        each.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
