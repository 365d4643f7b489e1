"""Load that other processes put on the machine.

Owns the measurement of how many cores other processes kept busy, and the words for it.
Imports nothing of portmm.

The source is /proc/stat: the time that the cores which this process may use were busy, less the
CPU time of this process, of its children that ended, and of workers that are named. Time that a
hypervisor gave to others (steal) counts as theirs. Where there is no such file, the load average
of the last minute stands in.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LEAST, SHARE = 0.5, 0.1
"""Cores, and part of all cores: a machine on which others use more than the larger of both is busy. Half a core is
what disturbs one thread on two cores noticeably, a tenth of the cores what lowers bandwidths that all share."""
NAP = 0.25
"""Seconds over which the load of the moment is measured: 25 ticks of the kernel's clock."""
_NOT_BUSY = (3, 4)
"""Columns of /proc/stat: idle, and waiting for a disk."""
_GUEST = 8
"""The first column that other columns contain already."""
_TIMES = slice(11, 15)
"""Fields of /proc/PID/stat behind the name: CPU time of a process and of its children that ended, in ticks."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """CPU time until now.

    Attributes:
        seconds: of a monotonic clock.
        used: CPU seconds of all processes on the cores that this one may use, None if that is not told.
        own: CPU seconds of this process and its workers.
        average: the load average of the last minute, None if there is none.
    """

    seconds: float
    used: float | None
    own: float
    average: float | None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def snapshot(workers: Iterable[int] = ()) -> Snapshot:
    """CPU time until now; `workers` are the ids of children that have not ended."""
    own = sum(os.times()[:4]) + sum(map(_of_process, workers))
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Snapshot(time.monotonic(), _used(), own, average)


def _used() -> float | None:
    """CPU seconds of everyone on the cores that this process may use."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
    total, found = 0, 0
    for line in _lines("/proc/stat"):
        name, *ticks = line.split()
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in mine:
            total += sum(int(x) for i, x in enumerate(ticks[:_GUEST]) if i not in _NOT_BUSY)
            found += 1
    return total / _ticks() if found else None


def _of_process(pid: int) -> float:
    """CPU seconds of a process and its children that ended; 0 if it is gone."""
    text = "".join(_lines(f"/proc/{pid}/stat"))
    fields = text.rpartition(")")[2].split()
    return sum(map(int, fields[_TIMES])) / _ticks()


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text(errors="replace").splitlines()
    return []


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")


def others(before: Snapshot, after: Snapshot) -> float | None:
    """Cores that other processes kept busy on average between two snapshots, None if that is unknown."""
    wall = after.seconds - before.seconds
    if before.used is None or after.used is None or wall <= 0:
        return before.average
    return max(0.0, (after.used - before.used - (after.own - before.own)) / wall)


def now() -> float | None:
    """Cores that other processes keep busy at the moment, None if that is unknown; takes `NAP` seconds."""
    before = snapshot()
    time.sleep(NAP)
    return others(before, snapshot())


def is_busy(load: float | None, of: int) -> bool:
    """Whether a load disturbs measurements on a machine of `of` cores."""
    return load is not None and load > max(LEAST, SHARE * of)


def sentence(load: float | None, of: int) -> str:
    """How busy the machine was, and what to do about it; empty if that is unknown."""
    if load is None:
        return ""
    used = f"others kept {load:.2g} of {of} cores busy"
    if is_busy(load, of):
        return f"the machine was busy ({used}): measure again on an idle machine"
    return f"the machine was otherwise idle ({used})"
