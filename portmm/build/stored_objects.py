"""Objects that were built before: look-ups by their source, without a compiler.

Owns the identity of a source without regard to who compiles it, and the order of look-ups: bundles that the process
uses, then the cache, then the base set of the wheel. A build looks here before it searches for a compiler. In the
cache an identity leads to the key of an object.

An object in the cache is used while the compiler that built it is as it was, or is not on this machine: a cache that
is copied to an image without that compiler serves there. Where the compiler has changed in its place, the source is
compiled again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from portmm.build import cache
from portmm.build.kernel_store import answer, bundles
from portmm.ir import abi
from portmm.util.records import dataclass
from portmm.version import VERSION

BUILDS = "made-"
"""The start of the name of a note: which object a source became, and by which programs."""
SOURCE = "source "
"""The start of a bundle's question for the object of a source, which ends with its identity."""
CUBIN = "cubin "
"""The start of one for the cubin of a source for CUDA, likewise, for an architecture as sm_90a."""


@dataclass(frozen=True, slots=True)
class Stored:
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
        arch: platform of the code: see `util.system`.
        interface: identity of what the source includes: Python's ABI, for an extension module.
    """
    text = "\0".join((VERSION, str(abi.VERSION), arch, interface, *flags, source))
    return cache.digest(text.encode("utf-8", "surrogateescape"))


def find(name: str) -> Stored | None:
    """The object of an identity; None if none was built."""
    return _bundled(name) or _cached(name) or _bundled(name, last=True)


def cubin(source: str, architecture: str) -> Stored | None:
    """The cubin of a source in a bundle; None if there is none.

    Args:
        source: in CUDA.
        architecture: as "90a".
    """
    return _bundled(identity(source, (), f"sm_{architecture}"), start=CUBIN) if bundles() else None


def _bundled(name: str, *, last: bool = False, start: str = SOURCE) -> Stored | None:
    answered = answer(start + name, last=last)
    if answered is None:
        return None
    bundle, (number, *_) = answered
    if not number.isdecimal():
        raise bundle.damaged(f"the answer for a source names object {number!r}")
    return Stored(*bundle.load(int(number)), current=True)


def _cached(name: str) -> Stored | None:
    key, *programs = (cache.read_note(BUILDS + name) or "").splitlines()[:16] or [""]
    loaded = cache.load(key) if key else None
    return None if loaded is None else Stored(*loaded, current=all(map(_unchanged, programs)))


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
