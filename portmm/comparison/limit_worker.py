"""Gauges of the machine's limits, a bench of `comparison.worker`.

Owns that bench: it alternates with the contenders, so that a limit and the rates that are compared with it are measured
at the same time.

"prepare" selects the rates that bound a case: the fastest atom for its types, and the level of memory that holds its
operands; its reply has them as "peak" and "level". "time" measures both for half of the seconds each, by the statistic
of the contenders' times; its reply has "rates" by these names, in GFLOP/s and GB/s of one core.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from portmm.comparison.case import Case
from portmm.comparison.limit import level_of
from portmm.comparison.measure import seconds_per_call
from portmm.comparison.worker import TRIAL, error_of
from portmm.errors import PortmmError, ScheduleError
from portmm.host import calibrate, gauge
from portmm.host.detect import host, resolve
from portmm.schedule.cpu_candidates import units

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.comparison.environment import Setup
    from portmm.host.gauge import Gauge


class Machine:
    """Gauges of the machine.

    Attributes:
        gauges: name -> gauge; None where memory is too small for one.
        peaks: word of types -> name of the fastest atom for them, empty if there is none.
    """

    def __init__(self, setup: Setup, _adapter: str = "") -> None:
        self.hello: dict[str, Any] = {}
        self.target, self.cold = resolve(setup.target), bool(setup.cold)
        self.gauges: dict[str, Gauge | None] = {}
        self.peaks: dict[str, str] = {}
        self._loop: Any = None
        self._selected: tuple[str, ...] = ()

    def prepare(self, case: dict[str, Any], seed: int = 0) -> dict[str, Any]:
        """Select the rates that bound a case, and create their gauges."""
        del seed  # gauges have operands of their own
        self._selected = ()
        one = Case(**case)
        try:
            peak = self._peak(one.problem.dtype)
            if not peak:
                return {"state": "unsupported", "reason": f"no unit multiplies {one.problem.dtype}"}
            level = level_of(one, host().levels, cold=self.cold)
            self._selected = (peak, level) if self._gauge(level, partial(self._bandwidth, level)) else (peak, "")
        except PortmmError as error:
            return {"state": "unsupported", **error_of(error)}
        return {"state": "ok", "peak": peak, "level": self._selected[1]}

    def time(self, seconds: float) -> dict[str, Any]:
        """The selected rates by name, measured for about `seconds` in all."""
        gauges = [x for name in self._selected if (x := self.gauges.get(name))]
        return {"state": "ok", "rates": {x.name: _rate(x, seconds / max(1, len(gauges))) for x in gauges}}

    def _gauge(self, name: str, make: Callable[[], Gauge | None]) -> Gauge | None:
        """Gauge of a rate, created on first use."""
        if name not in self.gauges:
            self.gauges[name] = make()
        return self.gauges[name]

    def _peak(self, word: str) -> str:
        """Name of the atom that multiplies these types fastest, measured: rates differ with the vector width."""
        if word not in self.peaks:
            try:
                able = units(word, self.target)
            except ScheduleError:
                able = []
            gauges = [x for isa, atom in able if (x := self._gauge(atom.name, partial(gauge.peak, isa, atom)))]
            self.peaks[word] = max(gauges, key=lambda x: _rate(x, TRIAL)).name if gauges else ""
        return self.peaks[word]

    def _bandwidth(self, name: str) -> Gauge | None:
        size = next((x.bytes // 2 for x in host().levels if x.name == name), 0)
        window = 0 if size else gauge.WINDOW
        size = size or calibrate.memory_buffer(self.target)
        if not size:
            return None
        if self._loop is None:
            self._loop = gauge.streaming(calibrate.basis(self.target), calibrate.widest(self.target))
        return gauge.bandwidth(self._loop, name, size, window)


def _rate(meter: Gauge, seconds: float) -> float:
    return meter.work / seconds_per_call(meter.run, seconds)
