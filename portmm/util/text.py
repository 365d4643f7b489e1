"""Times, sizes and terms, for people.

Owns how explanations spell them. Imports nothing of portmm.
"""

from __future__ import annotations

INDENT = 12
"""Columns before what is said of something."""


def time(seconds: float) -> str:
    """A time, for people."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def flop(count: float) -> str:
    """A number of operations, for people."""
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} FLOP"


def size(count: float) -> str:
    """A number of bytes, for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} bytes"


def field(name: str, text: str) -> str:
    """A line of what an explanation says of something."""
    return f"{name:<{INDENT}}{text}"


def terms(found: dict[str, float]) -> str:
    """Terms of a predicted time."""
    return ", ".join(f"{name} {time(value)}" for name, value in found.items())
