"""Description of a device in a report: the driver's name for it, its clocks and its limits.

Owns `Facts`, and the separate process that queries a driver, `python -m
portmm.comparison.device_facts cuda:1`: the coordinator opens no device.

The limit is the roofline of the chip's description, without a measurement: the rate
of its fastest instruction for the types, or the bandwidth of its memory over the compulsory traffic.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from portmm.comparison.cold import UNKNOWN
from portmm.comparison.device_arrays import parsed
from portmm.dispatch.machine import described
from portmm.errors import NoDeviceError, PortmmError
from portmm.runtime import cuda, opencl
from portmm.target.target import GENERIC_DEVICES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portmm.comparison.case import Case
    from portmm.runtime import device_facts
    from portmm.target.target import Target

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


def facts(device: str, environ: Mapping[str, str] = os.environ) -> Facts:
    """Facts of a device, queried in another process.

    Raises:
        ValueError: the device is unknown.
        NoDeviceError: it is not there, or its driver does not reply.
    """
    parsed(device)
    env = {**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "portmm.comparison.device_facts", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=OPENING)
    except subprocess.TimeoutExpired as error:
        raise NoDeviceError(f"the driver of device {device} did not answer in {OPENING:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        message = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        raise NoDeviceError(f"device {device}: {message}")
    values = json.loads(lines[-1])
    if "missing" in values:
        raise NoDeviceError(values["missing"])
    return Facts(**values)


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


def peaks(target: Target, driver_facts: device_facts.Facts) -> dict[str, float]:
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


def main(arguments: list[str]) -> int:
    """Print the facts of a device, or the reason why it is missing, as one line of JSON."""
    try:
        values: dict[str, Any] = asdict(queried(arguments[0]))
    except PortmmError as error:
        values = {"missing": str(error)}
    sys.stdout.write(json.dumps(values) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
