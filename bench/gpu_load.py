"""Clocks and power of NVIDIA's device 0 while others work on it: samples by a thread, through NVML.

Function and constant names are NVML's (nvml.h); the library comes with the driver. Where it is not found, `nvidia-smi`
is read, which samples more slowly. Nothing here changes a setting of the device.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import threading
import time
from collections import deque

EVERY = 0.03
"""Seconds between samples."""
KEPT = 40_000
"""Samples, twenty minutes of them."""
LIBRARIES = (
    "libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
)  # fmt: skip
# nvmlClockType_t, nvmlTemperatureSensors_t.
CLOCK_SM, CLOCK_MEM, TEMPERATURE_GPU = 1, 2, 0
REASONS = {
    0x1: "idle", 0x2: "set clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal",
    0x40: "hardware thermal", 0x80: "power brake",
}  # fmt: skip
"""nvmlClocksEventReasons: why clocks are lower than they could be."""
SMI = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Nvml:
    """The library, and its first device.

    Raises:
        OSError: it is not there, or refuses.
    """

    def __init__(self, libraries=LIBRARIES):
        said = "no library is named"
        for name in libraries:
            try:
                self.library = ctypes.CDLL(name)
                break
            except OSError as error:
                said = str(error)
        else:
            raise OSError(said)
        self.handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.handle))

    def _call(self, name, *given):
        status = getattr(self.library, name)(*given)
        if status:
            raise OSError(f"{name} returned status {status}")

    def _number(self, name, *given, kind=ctypes.c_uint):
        found = kind()
        try:
            self._call(name, self.handle, *given, ctypes.byref(found))
        except (OSError, AttributeError):
            return None
        return found.value

    def sample(self):
        """MHz, W, degrees, and the reasons for lower clocks."""
        power = self._number("nvmlDeviceGetPowerUsage")
        return {
            "sm_mhz": self._number("nvmlDeviceGetClockInfo", CLOCK_SM),
            "mem_mhz": self._number("nvmlDeviceGetClockInfo", CLOCK_MEM),
            "watts": None if power is None else power / 1e3,
            "celsius": self._number("nvmlDeviceGetTemperature", TEMPERATURE_GPU),
            "reasons": self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong),
        }


class Smi:
    """The same by NVIDIA's tool, a process for each sample.

    Raises:
        OSError: it is not there, or refuses.
    """

    def __init__(self):
        if self.sample() is None:
            raise OSError("nvidia-smi says nothing")

    @staticmethod
    def sample():
        words = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader,nounits", "-i", "0"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
            values = [float(x) for x in done.stdout.splitlines()[0].split(",")]
        except (ValueError, IndexError, subprocess.TimeoutExpired):
            return None
        return dict(zip(("sm_mhz", "mem_mhz", "watts", "celsius"), values, strict=False))


class Load:
    """Samples of a source, taken in the background until `stop`; none if there is no source."""

    def __init__(self, source=None, every=EVERY):
        self.samples, self.every, self.why = deque(maxlen=KEPT), every, ""
        self.source = source or self._found()
        self.over = threading.Event()
        if self.source is not None:
            threading.Thread(target=self._run, daemon=True).start()

    def _found(self):
        for kind in (Nvml, Smi):
            try:
                return kind()
            except (OSError, AttributeError) as error:
                self.why = f"{self.why} {kind.__name__}: {error}".strip()
        return None

    def _run(self):
        while not self.over.wait(self.every):
            try:
                found = self.source.sample()
            except OSError:
                continue
            if found:
                self.samples.append((time.monotonic(), found))

    def stop(self):
        self.over.set()

    def between(self, first, last):
        """A summary of the samples of an interval; {} if there are none. Power lags behind: the later half counts."""
        middle = (first + last) / 2
        found = [x for at, x in list(self.samples) if middle <= at <= last]
        if not found:
            return {}
        said = {"samples": len(found)}
        for name in ("sm_mhz", "mem_mhz", "watts", "celsius"):
            values = [x[name] for x in found if x.get(name) is not None]
            said |= {name: round(statistics.median(values), 1)} if values else {}
        bits = 0
        for x in found:
            bits |= x.get("reasons") or 0
        reasons = [text for bit, text in REASONS.items() if bits & bit]
        return said | ({"reasons": reasons} if reasons else {})
