"""The process that measures what the machine could reach.

Owns the child's side of that protocol. Started by `comparison.lane` as `python -m
portmm.comparison.limit_worker ADAPTER READ WRITE SETUP`, as the workers of contenders are, and asked in turn with
them, so that a limit is of the same moment as the rates that are held against it.
Imports `host.calibrate`, `schedule.cpu_candidates`, `host.gauge` and the rest of `comparison`.

Requests are those of `comparison.worker`. "prepare" picks what bounds a case: the fastest atom for
its types, and the level of memory that its operands lie in; its reply has them as "peak" and "level".
"time" measures both for half of the seconds each, by the statistic that contenders are timed by; its reply has
"rates" by these names, in GFLOP/s and GB/s of one core.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from portmm.comparison.case import Case
from portmm.comparison.environment import Setup
from portmm.comparison.limit import level_of
from portmm.comparison.worker import TRIAL, seconds_per_call, told
from portmm.errors import PortmmError, ScheduleError
from portmm.host import calibrate, gauge
from portmm.host.detect import host, resolve
from portmm.schedule.cpu_candidates import units

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.host.gauge import Gauge
    from portmm.target.target import Target


@dataclass(slots=True)
class Machine:
    """The gauges that were made so far.

    Attributes:
        target: what is measured.
        cold: operands of every case come from memory.
        made: name -> gauge; None where there is none, for want of memory.
        peaks: word of types -> name of the fastest atom for them, empty if there is none.
        loop: what bandwidths are measured with, once it is built.
    """

    target: Target
    cold: bool
    made: dict[str, Gauge | None] = field(default_factory=dict)
    peaks: dict[str, str] = field(default_factory=dict)
    loop: Any = None

    def gauge(self, name: str, make: Callable[[], Gauge | None]) -> Gauge | None:
        """The gauge of a rate, made when it is first asked for."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]


def _rate(found: Gauge, seconds: float) -> float:
    return found.work / seconds_per_call(found.run, seconds)


def _peak(machine: Machine, word: str) -> str:
    """The atom that multiplies these types fastest, which only a measurement tells: not all widths run at one rate."""
    if word not in machine.peaks:
        try:
            able = units(word, machine.target)
        except ScheduleError:
            able = []
        made = [machine.gauge(atom.name, partial(gauge.peak, isa, atom)) for isa, atom in able]
        found = [x for x in made if x]
        machine.peaks[word] = max(found, key=lambda x: _rate(x, TRIAL)).name if found else ""
    return machine.peaks[word]


def _bandwidth(machine: Machine, name: str) -> Gauge | None:
    size = next((x.bytes // 2 for x in host().levels if x.name == name), 0)
    window = 0 if size else gauge.WINDOW
    size = size or calibrate.memory_buffer(machine.target)
    if not size:
        return None
    if machine.loop is None:
        machine.loop = gauge.streaming(calibrate.basis(machine.target), calibrate.widest(machine.target))
    return gauge.bandwidth(machine.loop, name, size, window)


def prepare(machine: Machine, case: Case) -> dict[str, Any]:
    """Pick what bounds a case, and make its gauges."""
    peak = _peak(machine, case.problem.dtype)
    if not peak:
        return {"state": "unsupported", "reason": f"no unit multiplies {case.problem.dtype}"}
    level = level_of(case, host().levels, cold=machine.cold)
    there = machine.gauge(level, partial(_bandwidth, machine, level))
    return {"state": "ok", "peak": peak, "level": level if there else ""}


def rates(machine: Machine, names: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Measure for about some seconds in all."""
    found = [x for name in names if (x := machine.made.get(name))]
    return {"state": "ok", "rates": {x.name: _rate(x, seconds / max(1, len(found))) for x in found}}


def main(arguments: list[str]) -> int:
    """Serve until the pipe closes."""
    _, read, write, setup_text = arguments
    setup = Setup(**json.loads(setup_text))
    machine = Machine(resolve(setup.target), bool(setup.cold))
    names: tuple[str, ...] = ()
    with os.fdopen(int(read)) as source, os.fdopen(int(write), "w") as sink:

        def send(message: dict[str, Any]) -> None:
            sink.write(json.dumps(message) + "\n")
            sink.flush()

        send({"state": "ok"})
        for line in source:
            request = json.loads(line)
            try:
                if request["do"] == "prepare":
                    reply = prepare(machine, Case(**request["case"]))
                    names = (reply.get("peak", ""), reply.get("level", ""))
                else:
                    reply = rates(machine, names, request["seconds"])
            except PortmmError as error:
                reply = {"state": "unsupported", **told(error)}
            send(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
