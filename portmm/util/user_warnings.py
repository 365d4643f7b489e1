"""Warnings at the line of the user's program that called portmm.

Owns the search for that line, and `warn`, which every warning of the package goes through.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_PASS_THROUGH = frozenset(("portmm", "numpy", "contextlib", "functools", "threading", "typer", "click"))
"""Packages whose frames may occur between portmm and its caller."""


def is_users(names: Mapping[str, Any]) -> bool:
    """Whether the globals of a frame belong to a module of the user: neither portmm nor a package in between."""
    return _is_users(str(names.get("__name__", "")))


@lru_cache(maxsize=1024)
def _is_users(module: str) -> bool:
    return module.partition(".")[0] not in _PASS_THROUGH


def caller() -> FrameType | None:
    """Innermost frame of the user's code; None in a thread that has none."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - what tracebacks are made of
    while frame is not None and not is_users(frame.f_globals):
        frame = frame.f_back
    return frame


def warn(message: str) -> None:
    """Issue a RuntimeWarning at the line of the user's code that called portmm."""
    frame = caller() or sys._getframe(1)  # noqa: SLF001
    warnings.warn_explicit(
        message,
        RuntimeWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "<unknown>"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )
