"""Text forms of times, sizes and cost terms.

Owns their units and number of digits in explanations and tables.
"""

from __future__ import annotations


def time(seconds: float) -> str:
    """Text of a time, with a unit from ns to s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def flop(count: float) -> str:
    """Text of a number of operations, with a unit from FLOP to TFLOP."""
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} FLOP"


def size(count: float) -> str:
    """Text of a number of bytes, with a unit up to GiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} bytes"


def number(count: int, noun: str) -> str:
    """Text of a count of things: 1 step, 2 steps."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def terms(seconds: dict[str, float]) -> str:
    """Text of the terms of a predicted time, in seconds by name."""
    return ", ".join(f"{name} {time(value)}" for name, value in seconds.items())
