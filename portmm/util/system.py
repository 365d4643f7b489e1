"""Platforms: what machine code is for, an architecture under an operating system.

Owns their names: an architecture as Linux spells it, "aarch64", where the system is Linux, and "aarch64-macos" for
another; and what this process knows of its own only through functions that systems lack.
"""

from __future__ import annotations

import os
import sys

MACOS = "macos"


def machine() -> str:
    """The architecture of this machine, as `uname -m` spells it on Linux."""
    name = os.uname().machine
    return "aarch64" if name == "arm64" else name


def platform() -> str:
    """The platform of this process."""
    return f"{machine()}-{MACOS}" if sys.platform == "darwin" else machine()


def of(platform: str) -> tuple[str, str]:
    """The architecture and the system of a platform; the system is empty for Linux."""
    arch, _, system = platform.partition("-")
    return arch, system


def named(arch: str, system: str) -> str:
    """The platform of an architecture and a system, which is empty for Linux."""
    return f"{arch}-{system}" if system else arch


def processors() -> tuple[int, ...]:
    """The processors that this process may use, by their numbers; all, where threads are bound to none."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
