"""Process that measures the machine's limits.

Owns the child's side of that protocol. Started by `comparison.lane` as `python -m
portmm.comparison.limit_worker ADAPTER READ WRITE SETUP`, as the workers of contenders are, and
alternating with them, so that a limit and the rates that are compared with it are measured at
the same time.

Requests are those of `comparison.worker`. "prepare" selects the rates that bound a case: the fastest atom for
its types, and the level of memory that holds its operands; its reply has them as "peak" and "level".
"time" measures both for half of the seconds each, by the statistic of the contenders' times; its reply has
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
from portmm.comparison.worker import TRIAL, error_of, seconds_per_call
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
    """Gauges of the machine.

    Attributes:
        target: the machine's target.
        cold: operands of every case come from memory.
        gauges: name -> gauge; None where memory is too small for one.
        peaks: word of types -> name of the fastest atom for them, empty if there is none.
        loop: kernel that measures bandwidths, once it is built.
    """

    target: Target
    cold: bool
    gauges: dict[str, Gauge | None] = field(default_factory=dict)
    peaks: dict[str, str] = field(default_factory=dict)
    loop: Any = None

    def gauge(self, name: str, make: Callable[[], Gauge | None]) -> Gauge | None:
        """Gauge of a rate, created on first use."""
        if name not in self.gauges:
            self.gauges[name] = make()
        return self.gauges[name]


def _rate(meter: Gauge, seconds: float) -> float:
    return meter.work / seconds_per_call(meter.run, seconds)


def _peak(machine: Machine, word: str) -> str:
    """Name of the atom that multiplies these types fastest, by a measurement: rates differ with the vector width."""
    if word not in machine.peaks:
        try:
            able = units(word, machine.target)
        except ScheduleError:
            able = []
        gauges = [x for isa, atom in able if (x := machine.gauge(atom.name, partial(gauge.peak, isa, atom)))]
        machine.peaks[word] = max(gauges, key=lambda x: _rate(x, TRIAL)).name if gauges else ""
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
    """Select the rates that bound a case, and create their gauges."""
    peak = _peak(machine, case.problem.dtype)
    if not peak:
        return {"state": "unsupported", "reason": f"no unit multiplies {case.problem.dtype}"}
    level = level_of(case, host().levels, cold=machine.cold)
    bandwidth = machine.gauge(level, partial(_bandwidth, machine, level))
    return {"state": "ok", "peak": peak, "level": level if bandwidth else ""}


def rates(machine: Machine, names: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Rates by name, measured for about `seconds` in all."""
    gauges = [x for name in names if (x := machine.gauges.get(name))]
    return {"state": "ok", "rates": {x.name: _rate(x, seconds / max(1, len(gauges))) for x in gauges}}


def main(arguments: list[str]) -> int:
    """Serve requests until the pipe closes."""
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
                reply = {"state": "unsupported", **error_of(error)}
            send(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
