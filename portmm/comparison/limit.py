"""Limits of rates: the machine's, which are measured, and a device's, which its description has.

Owns the limit of a case, the gauges of the machine, and the facts of a device that a report shows.

The limit is the roofline: the multiply-add rate, or the rate at which the nearest level of memory that holds all
operands delivers the compulsory traffic. On the processor `Machine`, a bench of `comparison.worker`, measures both in
alternation with the contenders, so that a limit and the rates that are compared with it are measured at the same time.
A device's driver is queried by `Device` in a process of its own, since the coordinator opens no device; its limit is
that of the chip's description, without a measurement.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from typing import Any

from portmm.comparison.case import Case
from portmm.comparison.device_arrays import parsed
from portmm.comparison.measure import UNKNOWN, seconds_per_call
from portmm.comparison.peers import Contender, MissingError, Setup
from portmm.comparison.process import Worker, reply
from portmm.comparison.worker import TRIAL, error_of
from portmm.dispatch.machine import described
from portmm.errors import NoDeviceError, PortmmError, ScheduleError
from portmm.host import calibrate, gauge
from portmm.host.detect import host, resolve
from portmm.host.gauge import Gauge
from portmm.host.host_probe import CPUINFO, processors, text_of
from portmm.runtime import backends, cuda, opencl
from portmm.schedule.candidates import units
from portmm.target.cache_levels import MemoryLevel
from portmm.target.target import GENERIC_DEVICES, Target

MEMORY = "memory"
"""Name of the last level of memory, which holds every case."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates of this machine.

    Attributes:
        rates: "<atom>" in GFLOP/s, "<level>" and "memory" in GB/s, of one core.
        levels: the caches, nearest first.
        atoms: word of types -> name of the atom that multiplies them.
    """

    rates: dict[str, float] = field(default_factory=dict)
    levels: tuple[MemoryLevel, ...] = ()
    atoms: dict[str, str] = field(default_factory=dict)

    def of(self, case: Case, threads: int, *, cold: bool = False) -> float | None:
        """Limit of `case` in GFLOP/s, None if it is unknown.

        Bandwidth is known for one core only, and the share of each of several cores
        is not: there is no limit for memory-bound cases on many threads. With cold
        caches all operands come from memory.
        """
        peak = self.rates.get(self.atoms.get(case.problem.dtype, ""))
        if peak is None:
            return None
        bound = self._bound(case, cold=cold)
        if bound < peak and threads > 1:
            return None
        return min(peak, bound) * threads

    def roof(self, case: Case, *, cold: bool = False) -> str:
        """Name of the rate that sets the limit of a case."""
        atom = self.atoms.get(case.problem.dtype, "")
        peak = self.rates.get(atom, 0.0)
        return level_of(case, self.levels, cold=cold) if self._bound(case, cold=cold) < peak else atom

    def _bound(self, case: Case, *, cold: bool) -> float:
        """GFLOP/s of one core that bandwidth allows, infinite if the bandwidth is unknown."""
        bandwidth = self.rates.get(level_of(case, self.levels, cold=cold), inf)
        return bandwidth * case.flops / case.bytes


def level_of(case: Case, levels: Sequence[MemoryLevel], *, cold: bool = False) -> str:
    """Name of the nearest level that holds all operands of a case; with cold caches they come from memory."""
    return next((x.name for x in levels if case.bytes <= x.bytes and not cold), MEMORY)


def forced_isa(target: str) -> str:
    """ISA that `target` restricts this machine to, empty if it is the machine's best one.

    Raises:
        TargetError: the target is unknown, or this machine cannot run it.
    """
    best = resolve(target).isas[0].name
    return "" if best == host().isas[0].name else best


def chip() -> str:
    """Name of the processor: portmm's title of its target, and its model name in /proc/cpuinfo."""
    own = next((x["model name"] for x in processors(text_of(CPUINFO)) if "model name" in x), "")
    return f"{host().title}, {own}" if own else host().title


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


OPENING = 120.0
"""Seconds for drivers to initialise."""
ROTATED = 2.5
"""Bytes of all copies of operands as a multiple of the last cache, so that none is cached when its turn comes again."""
QUERY = "clocks.max.sm,power.limit"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a device that reports show.

    Attributes:
        name: of the target that describes it.
        title: the driver's name for it, and its clocks.
        kind: "gpu", "cpu" or "accelerator".
        cache: bytes of its last cache.
        peaks: "bf16-bf16", the types of A and B -> GFLOP/s; empty where no document says.
        memory_gbs: bandwidth of its memory, 0 where no document says.
    """

    name: str
    title: str
    kind: str
    cache: int = 0
    peaks: dict[str, float] = field(default_factory=dict)
    memory_gbs: float = 0.0

    @property
    def cold(self) -> int:
        """Bytes whose use evicts all earlier data from its caches."""
        return int(ROTATED * self.cache) or UNKNOWN

    @property
    def rates(self) -> dict[str, float]:
        """Rates that set the limits, by name."""
        return self.peaks | ({"memory": self.memory_gbs} if self.memory_gbs else {})

    def of(self, case: Case, _threads: int = 1, *, cold: bool = False) -> float | None:
        """Limit of a case in GFLOP/s, None if it is unknown: the bandwidth of caches is."""
        peak = self.peaks.get("-".join(case.types[:2]))
        if peak is None or not self.memory_gbs:
            return peak
        bound = self.memory_gbs * case.flops / case.bytes
        if bound < peak and not cold and case.bytes <= self.cache:
            return None
        return min(peak, bound)


def facts(device: str) -> Facts:
    """Facts of a device, queried in another process.

    Raises:
        ValueError: the device is unknown.
        NoDeviceError: it is not there, or its driver does not reply.
    """
    parsed(device)
    worker = Worker(Contender("device", ""), Setup(device=device), "portmm.comparison.limit:Device")
    hello = reply(worker, OPENING)
    worker.close()
    if hello["state"] != "ok":
        raise NoDeviceError(f"device {device}: {hello['reason']}" if "lost" in hello else hello["reason"])
    return Facts(**hello["facts"])


class Device:
    """Facts of a device as the first message of a bench of `comparison.worker`.

    Raises:
        MissingError: it is not there.
    """

    def __init__(self, setup: Setup, _adapter: str) -> None:
        try:
            self.hello = {"facts": asdict(queried(setup.device))}
        except PortmmError as error:
            raise MissingError(str(error)) from error


def queried(device: str) -> Facts:
    """Facts of a device, queried in this process.

    Raises:
        NoDeviceError: it is not there.
    """
    language, number = parsed(device)
    if language == "cuda":
        at = cuda.current(number)
        driver_facts = cuda.facts(at)
    else:
        driver_facts = opencl.facts()
    target = described(driver_facts)
    extra = [f"{driver_facts.processors} processors"]
    extra += [f"up to {driver_facts.clock_ghz:.2f} GHz"] if driver_facts.clock_ghz else []
    driver = driver_facts.driver
    extra += [f"driver for CUDA {driver}" if language == "cuda" else f"OpenCL, driver {driver}"]
    extra += _limits_of_power(number) if language == "cuda" else []
    title = f"{' '.join(driver_facts.name.split())}, {', '.join(extra)}"
    return Facts(
        target.name, title, driver_facts.kind, driver_facts.l2_bytes, peaks(target, driver_facts), memory(target)
    )


def peaks(target: Target, driver_facts: backends.Facts) -> dict[str, float]:
    """Peak rates of a described device, of the fastest instruction for each pair of types; empty for others.

    tf32 is left out: it rounds operands of float32.
    """
    if target.name in GENERIC_DEVICES or target.device is None:
        return {}
    hertz = 1e9 * (target.frequency_ghz or driver_facts.clock_ghz)
    by_types: dict[str, float] = {}
    for isa in target.isas:
        for atom in isa.atoms:
            if "tf32" in atom.name or atom.name not in target.rates:
                continue
            word = f"{_element(atom.a)}-{_element(atom.b)}"
            rate = 2e-9 * target.rates[atom.name] * target.device.processors * hertz
            by_types[word] = max(by_types.get(word, 0.0), rate)
    return by_types


def _element(name: str) -> str:
    from portmm.spec.dtype import base

    return base(name)


def memory(target: Target) -> float:
    """Bandwidth of a described device's memory in GB/s, 0 where no document says."""
    return target.device.memory_gbs if target.device and target.name not in GENERIC_DEVICES else 0.0


def _limits_of_power(number: int | None) -> list[str]:
    """Power limit of a device by nvidia-smi, as words of the device's title."""
    # With this variable CUDA numbers devices otherwise than nvidia-smi.
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return []
    values = nvidia_smi(QUERY, str(number or 0))
    return [f"{values['power.limit']} at most"] if values.get("power.limit", "").endswith("W") else []


def nvidia_smi(query: str, which: str = "0") -> dict[str, str]:
    """Current values of a device by nvidia-smi, by the fields of a comma-separated query."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": str(error)}
    values = [x.strip() for x in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    return dict(zip(query.split(","), values, strict=False))
