"""Raw facts about a host with macOS, where sysctl has what /proc and the auxiliary vector have on Linux."""

from __future__ import annotations

import ctypes

# Apple, "Determining Instruction Set Characteristics": names for sysctl, each a 1 where there is the feature of Linux's
# name. macOS before 12 has none of them.
FEATURES = {
    "fphp": "hw.optional.arm.FEAT_FP16",
    "asimdhp": "hw.optional.arm.FEAT_FP16",
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "bf16": "hw.optional.arm.FEAT_BF16",
}
ALWAYS = ("fp", "asimd")
"""Features of every Apple processor."""
APPLE = 0x61
"""Linux's number of the implementer."""
PARTS = {"Apple M1": 0x023, "Apple M2": 0x033}
"""Beginnings of a processor's name, with Linux's number of the part: see targets/chip."""
_BYTES = 128


def _value(name: str) -> bytes:
    """The value that sysctl has for a name; empty if there is none."""
    value, size = ctypes.create_string_buffer(_BYTES), ctypes.c_size_t(_BYTES)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]


def cpuinfo() -> str:
    """Facts about the performance cores in the format of /proc/cpuinfo on Arm."""
    brand = _value("machdep.cpu.brand_string").rstrip(b"\0").decode(errors="replace")
    count = int.from_bytes(_value("hw.perflevel0.physicalcpu") or _value("hw.physicalcpu"), "little") or 1
    features = *ALWAYS, *(name for name, key in FEATURES.items() if any(_value(key)))
    lines = [f"model name\t: {brand}", f"Features\t: {' '.join(features)}"]
    part = next((number for start, number in PARTS.items() if brand.startswith(start)), 0)
    lines += [f"CPU implementer\t: {APPLE:#x}", f"CPU part\t: {part:#05x}"] if part else []
    return "\n\n".join("\n".join((f"processor\t: {i}", *lines)) for i in range(count))
