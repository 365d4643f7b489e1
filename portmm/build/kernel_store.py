"""Kernel stores: look-ups of machine code that was built before, without a compiler.

Owns the identity of a source without regard to who compiles it, and the order of look-ups: bundles that the process
uses, then the cache, then the base set of the wheel. A build looks here before it searches for a compiler. In the
cache an identity leads to the key of an object; a bundle answers questions about sources, schedules and problems.

An object in the cache is used while the compiler that built it is as it was, or is not on this machine: a cache that
is copied to an image without that compiler serves there. Where the compiler has changed in its place, the source is
compiled again.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.build import cache
from portmm.build.bundle import Bundle, open_bundle
from portmm.build.trusted_files import file_fault
from portmm.errors import BundleError
from portmm.ir import abi
from portmm.util import system
from portmm.util.records import dataclass
from portmm.util.user_warnings import warn
from portmm.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

BUILDS = "made-"
"""The start of the name of a note: which object a source became, and by which programs."""


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


SOURCE = "source "
"""The start of a bundle's question for the object of a source, which ends with its identity."""
CUBIN = "cubin "
"""The start of one for the cubin of a source for CUDA, likewise, for an architecture as sm_90a."""

_used: list[Bundle] = []
_base: list[Bundle] = []
_opened: list[str] = []
"""`$PORTMM_BUNDLE` as it was when its bundles were opened."""


def use(bundle: Bundle) -> None:
    """Look into a bundle first, from now on."""
    _used[:] = [bundle, *(x for x in _used if x.path != bundle.path)]


def bundles() -> list[Bundle]:
    """The bundles that this process uses, the latest first, and then those of `$PORTMM_BUNDLE`.

    Raises:
        BundleError: one of these cannot be used.
    """
    text = os.environ.get("PORTMM_BUNDLE", "")
    if text and _opened != [text]:
        opened = [open_bundle(x) for x in text.split(os.pathsep) if x]
        _opened[:] = [text]  # not before: each look-up raises, not only the first
        _used.extend(opened)
    return _used


def base() -> Bundle | None:
    """The base set of the wheel for this platform; None in a wheel without one, and where `$PORTMM_BASE` is off.

    `$PORTMM_BASE` may name the directory of another.

    Raises:
        BundleError: it cannot be used.
    """
    if not _base and os.environ.get("PORTMM_BASE", "") != "off":
        name = f"{system.platform()}.bundle"
        setting = os.environ.get("PORTMM_BASE", "")
        path = Path(setting or Path(__file__).parent.parent / "base") / name
        if os.access(path, os.R_OK):
            _base.append(open_bundle(path, verify=False))
        elif setting:
            _without_base(path)
    return _base[0] if _base else None


@functools.cache
def _without_base(path: Path) -> None:
    warn(f"PORTMM_BASE names a directory without {path.name}, or one that cannot be read: there is no base set")


@functools.cache
def library(path: Path) -> str:
    """The path of a shared object of the base set, if no other user can have written it.

    Raises:
        BundleError: one can, or it is not there.
    """
    try:
        checked = bool(_base) and _base[0].path.parent == path.parent  # in a directory that was checked
        reason = file_fault(path, path.stat(), directory=not checked)
    except OSError as error:
        reason = str(error)
    if reason:
        raise BundleError(f"{path} is not used: {reason}; install portmm again, for this user or for root alone")
    return str(path)


def forget() -> None:
    """Use no bundles; those of `$PORTMM_BUNDLE` are opened again at the next look-up."""
    for each in (_used, _base, _opened):
        each.clear()


def close_base() -> None:
    """Drop the base set; it is opened again at the next look-up, as the environment says by then."""
    _base.clear()


def answer(question: str, *, last: bool = False) -> tuple[Bundle, list[str]] | None:
    """The answer of the bundles to a question, with the bundle whose objects it names; None if there is none.

    Args:
        question: as `dispatch.bundle_build` writes it.
        last: ask the base set instead, after the cache.
    """
    for bundle in filter(None, (base(),)) if last else bundles():
        fields = bundle.answer(question)
        if fields is not None:
            return bundle, fields
    return None


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
