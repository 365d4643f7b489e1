"""What a device is, for a report: its name by the driver, its clocks, and what it could reach.

Owns `Facts`, and the process of its own in which a driver is asked, `python -m
portmm.comparison.device_facts cuda:1`: the coordinator opens no device. Imports
`comparison.cold`, `comparison.device_arrays`, `errors`, `dispatch.gpu`, `run`, `target.target`.

The limit is the roofline of the chip's description, of which nothing is measured: the rate
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
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import NoDeviceError, PortmmError
from portmm.runtime import cuda, opencl
from portmm.target.target import GENERIC_DEVICES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portmm.comparison.case import Case
    from portmm.runtime import device_facts
    from portmm.target.target import Target

OPENING = 120.0
"""Seconds for drivers to wake up."""
ROTATED = 2.5
"""Times the last cache that operands fill together, so that none is found there when its turn comes again."""
QUERY = "clocks.max.sm,power.limit"


@dataclass(frozen=True, slots=True)
class Facts:
    """A device, as reports need it.

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
        """Bytes after which its caches hold nothing that was used before."""
        return int(ROTATED * self.cache) or UNKNOWN

    @property
    def rates(self) -> dict[str, float]:
        """What the limits rest on."""
        return self.peaks | ({"memory": self.memory_gbs} if self.memory_gbs else {})

    def of(self, case: Case, _threads: int = 1, *, cold: bool = False) -> float | None:
        """GFLOP/s that could be reached on a case, None if that is not known: what caches give is not."""
        peak = self.peaks.get("-".join(case.types[:2]))
        if peak is None or not self.memory_gbs:
            return peak
        bound = self.memory_gbs * case.flops / case.bytes
        if bound < peak and not cold and case.bytes <= self.cache:
            return None
        return min(peak, bound)


def facts(device: str, environ: Mapping[str, str] = os.environ) -> Facts:
    """Ask the driver, in another process.

    Raises:
        ValueError: no device is called that.
        NoDeviceError: it is not there, or its driver does not answer.
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
        said = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        raise NoDeviceError(f"device {device}: {said}")
    found = json.loads(lines[-1])
    if "missing" in found:
        raise NoDeviceError(found["missing"])
    return Facts(**found)


def asked(device: str) -> Facts:
    """Ask the driver here.

    Raises:
        NoDeviceError: it is not there.
    """
    language, number = parsed(device)
    if language == "cuda":
        at = cuda.current(number)
        said = cuda.facts(at)
    else:
        said = opencl.facts()
    target = gpu_dispatch.described(said)
    extra = [f"{said.processors} processors"]
    extra += [f"up to {said.clock_ghz:.2f} GHz"] if said.clock_ghz else []
    extra += [f"driver for CUDA {said.driver}" if language == "cuda" else f"OpenCL, driver {said.driver}"]
    extra += _limits_of_power(number) if language == "cuda" else []
    title = f"{' '.join(said.name.split())}, {', '.join(extra)}"
    return Facts(target.name, title, said.kind, said.l2_bytes, peaks(target, said), memory(target))


def peaks(target: Target, said: device_facts.Facts) -> dict[str, float]:
    """Rates of whole devices that a document describes, of the best instruction of each pair of types.

    tf32 is left out: it rounds what is asked for in float32.
    """
    if target.name in GENERIC_DEVICES or target.device is None:
        return {}
    hertz = 1e9 * (target.frequency_ghz or said.clock_ghz)
    found: dict[str, float] = {}
    for isa in target.isas:
        for atom in isa.atoms:
            if "tf32" in atom.name or atom.name not in target.rates:
                continue
            word = f"{_element(atom.a)}-{_element(atom.b)}"
            rate = 2e-9 * target.rates[atom.name] * target.device.processors * hertz
            found[word] = max(found.get(word, 0.0), rate)
    return found


def _element(name: str) -> str:
    from portmm.spec.dtype import base

    return base(name)


def memory(target: Target) -> float:
    """Bandwidth of a described device's memory in GB/s, 0 where no document says."""
    return target.device.memory_gbs if target.device and target.name not in GENERIC_DEVICES else 0.0


def _limits_of_power(number: int | None) -> list[str]:
    """What NVIDIA's tool says of the device's highest clock and power."""
    # With these, CUDA counts otherwise than the tool.
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return []
    found = told(QUERY, str(number or 0))
    return [f"{found['power.limit']} at most"] if found.get("power.limit", "").endswith("W") else []


def told(query: str, which: str = "0") -> dict[str, str]:
    """What NVIDIA's tool says of a device now, by the names of what is asked for."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": str(error)}
    values = [x.strip() for x in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    return dict(zip(query.split(","), values, strict=False))


def main(arguments: list[str]) -> int:
    """Print what is known of a device, or why it is missing, as one line of JSON."""
    try:
        found: dict[str, Any] = asdict(asked(arguments[0]))
    except PortmmError as error:
        found = {"missing": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
