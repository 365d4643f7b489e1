"""A lesser host than this one: instructions and processors of the machine are hidden from portmm.

Python imports this module at its start where this folder is on PYTHONPATH, in every process that tests start as well:

    PYTHONPATH=tests/support/lesser TESTS_HOST=x86-64-v3 pytest

runs the tests as a machine with AVX2 and nothing beyond it would; `x86-64-v2` as one with SSE only, and
TESTS_PROCESSORS=1 as one with a single core. Kernels run natively: no emulator is needed.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

HOST, PROCESSORS = "TESTS_HOST", "TESTS_PROCESSORS"

# FMA, MOVBE, AVX and F16C of leaf 1's ECX; ABM of leaf 80000001's. All other bits stay.
_ALL, _AVX, _ABM = 0xFFFFFFFF, 1 << 12 | 1 << 22 | 1 << 28 | 1 << 29, 1 << 5

# Bits of XCR0 that remain: x87 and SSE (3), AVX (4). Bits of (EAX, EBX, ECX, EDX) that remain of leaves of cpuid
# (Intel SDM volume 2, CPUID). Linux's words in /proc/cpuinfo that go, by prefix. EAX of leaf 1, family and model
# of a chip of that level.
_KEPT = {
    "x86-64-v3": {
        "xcr0": 0b111,
        "leaf": {"7.0": (0, 1 << 3 | 1 << 5 | 1 << 8, 0, 0), "7.1": (0, 0, 0, 0)},
        "hidden": ("avx512", "avx_vnni", "avx_ifma", "amx", "gfni", "vaes", "vpclmulqdq"),
        # Zen 3 and Haswell-EP.
        "models": {"AuthenticAMD": (0x00A00F11, 25, 1), "GenuineIntel": (0x000306F2, 6, 63)},
    },
    "x86-64-v2": {
        "xcr0": 0b011,
        "leaf": {
            "1.0": (_ALL, _ALL, _ALL & ~_AVX, _ALL),
            "7.0": (0, 0, 0, 0),
            "7.1": (0, 0, 0, 0),
            "80000001.0": (_ALL, _ALL, _ALL & ~_ABM, _ALL),
        },
        "hidden": ("avx", "amx", "gfni", "vaes", "vpclmulqdq", "fma", "f16c", "bmi", "abm", "movbe"),
        # K10 and Westmere-EP.
        "models": {"AuthenticAMD": (0x00100F91, 16, 9), "GenuineIntel": (0x000206C2, 6, 44)},
    },
}


def lesser_cpuinfo(text: str, kept: dict) -> str:
    """The first block of /proc/cpuinfo without the flags and the model of a better host."""
    if not text:
        return ""  # there is no such file
    words = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    signature, family, model = kept["models"].get(words.get("vendor_id", ""), (0, 0, 0))
    flags = [x for x in words.get("flags", "").split() if not x.startswith(kept["hidden"])]
    words |= {"flags": " ".join(flags), "cpu family": str(family), "model": str(model), "model name": "of a test"}
    words["stepping"] = str(signature & 15)
    return "\n".join(f"{key}\t: {value}" for key, value in words.items())


def lesser_cpuid(answers: dict[str, tuple[int, int, int, int]], xcr0: int, kept: dict) -> tuple[dict, int]:
    """Cpuid's answers and XCR0 of the lesser host."""
    _, b, c, d = answers.get("0.0", (0, 0, 0, 0))
    vendor = b"".join(x.to_bytes(4, "little") for x in (b, d, c)).decode("ascii", "replace")
    found = {
        leaf: tuple(x & y for x, y in zip(row, kept["leaf"].get(leaf, row), strict=True))
        for leaf, row in answers.items()
    }
    if "1.0" in found:
        found["1.0"] = (kept["models"].get(vendor, (0, 0, 0))[0], *found["1.0"][1:])
    return found, xcr0 & kept["xcr0"]


class Finder:
    """An import hook that replaces what `portmm.host.host_probe` reads as soon as that module is there."""

    def __init__(self, kept: dict) -> None:
        self.kept = kept

    def find_spec(self, name: str, path=None, target=None):  # noqa: ARG002 - as imports call it
        if name != "portmm.host.host_probe":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            run(module)
            first, cpuid = module.first_processor, module._cpuid
            module.first_processor = lambda: lesser_cpuinfo(first(), self.kept)
            module._cpuid = lambda: lesser_cpuid(*cpuid(), self.kept)

        spec.loader.exec_module = exec_module
        return spec


if PROCESSORS in os.environ:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ[PROCESSORS])])
if HOST in os.environ:
    if os.environ[HOST] not in _KEPT:
        raise ValueError(f"{HOST}={os.environ[HOST]!r} is none of {', '.join(_KEPT)}")
    sys.meta_path.insert(0, Finder(_KEPT[os.environ[HOST]]))
