"""Kernel stores: the bundles that a process uses, and the base set of the wheel.

Owns which these are, and the answers of all to a question about sources, schedules and problems. Objects of sources are
looked up by `stored_objects`, in the cache as well.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from portmm.build.bundle import Bundle, open_bundle
from portmm.build.trusted_files import file_fault
from portmm.errors import BundleError
from portmm.util import system
from portmm.util.user_warnings import warn

_OWN = f"{__file__.rsplit('/', 2)[0]}/base"
"""The directory of the wheel's base set."""
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
        path = Path(f"{setting or _OWN}/{name}")
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
        text = str(path)
        checked = bool(_base) and os.path.dirname(_base[0].path) == os.path.dirname(text)  # noqa: PTH120 - faster
        reason = file_fault(text, os.stat(text), directory=not checked)  # noqa: PTH116 - likewise
    except OSError as error:
        reason = str(error)
    if reason:
        raise BundleError(f"{path} is not used: {reason}; install portmm again, for this user or for root alone")
    return text


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
        question: as `ops.bundle_build` writes it.
        last: ask the base set instead, after the cache.
    """
    for bundle in filter(None, (base(),)) if last else bundles():
        fields = bundle.answer(question)
        if fields is not None:
            return bundle, fields
    return None
