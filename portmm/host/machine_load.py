"""Load of other processes on the machine.

Owns the measurement of the number of cores that other processes kept busy, and its text form.

The source is /proc/stat: the busy time of the cores which this process may use, less the CPU time of
this process, of its children that ended, and of its workers that still run. Time that a hypervisor
assigned to other guests (steal) counts as theirs. Where there is no such file, the load average of
the last minute is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BUSY_CORES, BUSY_SHARE = 0.5, 0.1
"""Cores, and share of all cores: a machine on which others use more than the larger of both is busy. Half a core
disturbs one thread on two cores noticeably; a tenth of the cores lowers bandwidths that all share."""
SAMPLE_SECONDS = 0.25
"""Seconds over which the current load is measured: 25 ticks of the kernel's clock."""
_NOT_BUSY = (3, 4)
"""Columns of /proc/stat: idle, and waiting for a disk."""
_GUEST = 8
"""First of the columns that others include already."""
_TIMES = slice(11, 15)
"""Fields of /proc/PID/stat after the name: CPU time of a process and of its children that ended, in ticks."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """CPU time at one moment.

    Attributes:
        seconds: time of a monotonic clock.
        used: CPU seconds of all processes on the cores that this one may use, None if unknown.
        own: CPU seconds of this process and its workers.
        average: the load average of the last minute, None if there is none.
    """

    seconds: float
    used: float | None
    own: float
    average: float | None


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def snapshot(workers: Iterable[int] = ()) -> Snapshot:
    """CPU time at this moment; `workers` are the ids of children that have not ended."""
    own = sum(os.times()[:4]) + sum(map(_of_process, workers))
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Snapshot(time.monotonic(), _used(), own, average)


def _used() -> float | None:
    """CPU seconds of all processes on the cores that this process may use; None if unknown."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
    total, cpus = 0, 0
    for line in _lines("/proc/stat"):
        name, *ticks = line.split()
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in mine:
            total += sum(int(x) for i, x in enumerate(ticks[:_GUEST]) if i not in _NOT_BUSY)
            cpus += 1
    return total / _ticks() if cpus else None


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
    """Average number of cores that other processes kept busy between two snapshots, None if unknown."""
    wall = after.seconds - before.seconds
    if before.used is None or after.used is None or wall <= 0:
        return before.average
    return max(0.0, (after.used - before.used - (after.own - before.own)) / wall)


def now() -> float | None:
    """Number of cores that other processes keep busy now, None if unknown; takes `SAMPLE_SECONDS` seconds."""
    before = snapshot()
    time.sleep(SAMPLE_SECONDS)
    return others(before, snapshot())


def is_busy(load: float | None, of: int) -> bool:
    """Whether a load disturbs measurements on a machine of `of` cores."""
    return load is not None and load > max(BUSY_CORES, BUSY_SHARE * of)


def sentence(load: float | None, of: int) -> str:
    """Sentence on the load of the machine during a measurement, with a remedy if it was busy; empty if unknown."""
    if load is None:
        return ""
    used = f"others kept {load:.2g} of {of} cores busy"
    if is_busy(load, of):
        return f"the machine was busy ({used}): measure again on an idle machine"
    return f"the machine was otherwise idle ({used})"
