"""Kernel stores: look-ups of machine code that was built before, without a compiler.

Owns the identity of a source without regard to who compiles it, and the order of look-ups: a build asks here before
it searches for a compiler. The identity leads to the key of an object, whose bytes `build.cache` has.

An object in the cache is used while the compiler that built it is as it was, or is not on this machine: a cache that
is copied to an image without that compiler serves there. Where the compiler has changed in its place, the source is
compiled again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from portmm.build import cache
from portmm.ir import abi
from portmm.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

BUILDS = "made-"
"""The start of the name of a note: which object a source became, and by which programs."""


class Stored(NamedTuple):
    """An object that was built before.

    Attributes:
        entry: the object's facts.
        code: its bytes, which were verified.
        current: whether the programs that built it are as they were, or absent here.
    """

    entry: cache.Entry
    code: bytes
    current: bool


def identity(source: str, flags: Sequence[str], arch: str, interface: str = "") -> str:
    """Digest of all that an object depends on but its compiler.

    Args:
        source: the C source.
        flags: the flags that its build needs.
        arch: architecture of the code.
        interface: identity of what the source includes: Python's ABI, for an extension module.
    """
    text = "\0".join((VERSION, str(abi.VERSION), arch, interface, *flags, source))
    return cache.digest(text.encode("utf-8", "surrogateescape"))


def find(name: str) -> Stored | None:
    """The object of an identity; None if none was built."""
    key, *programs = (cache.read_note(BUILDS + name) or "").splitlines()[:16] or [""]
    loaded = cache.load(key) if key else None
    return None if loaded is None else Stored(*loaded, all(map(_unchanged, programs)))


def record(name: str, key: str, programs: Sequence[str]) -> None:
    """Record which object an identity became.

    Args:
        name: the identity.
        key: the object's key in the cache.
        programs: state of the programs that built it, as by `state`.
    """
    text = "\n".join((key, *programs))
    if cache.read_note(BUILDS + name) != text:
        cache.write_note(BUILDS + name, text)


def state(program: str) -> str:
    """A line with a program's path and its state, which changes when it is replaced.

    Raises:
        OSError: there is no such file.
    """
    info = os.stat(program)  # noqa: PTH116 - on the path of every first call
    return f"{info.st_mtime_ns} {info.st_size} {program}"


def _unchanged(line: str) -> bool:
    """Whether a program is as it was, or absent."""
    try:
        return state(line.split(" ", 2)[-1]) == line
    except OSError:
        return True
