"""Kernels that are missing where there is no compiler: what a call does then, and what it says.

Owns `$PORTMM_MISSING`: "fallback", the default, takes the fastest kernel that is there, and else NumPy; "error" raises
what is missing. A fallback warns once per process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from portmm.spec.problem import Problem

ERROR, FALLBACK = "error", "fallback"
_warned: set[str] = set()


def strict() -> bool:
    """Whether a missing kernel is an error."""
    setting = os.environ.get("PORTMM_MISSING", "").strip()
    if setting not in ("", ERROR, FALLBACK):
        _warn_once("setting", f"PORTMM_MISSING is {setting!r}, not {ERROR} or {FALLBACK}: kernels fall back")
    return setting == ERROR


def substituted(p: Problem, loss: float, reason: str) -> None:
    """Warn once that another kernel takes the place of the selected one.

    Args:
        p: the problem.
        loss: its predicted time, relative to that of the selected kernel.
        reason: why that is not built.
    """
    _warn_once(
        "substitute",
        f"the kernel that was selected for {p} is not there, and another one, predicted to take {loss:.2f} of its "
        f"time, takes its place, as for others that are missing: {reason}",
    )


def _warn_once(about: str, text: str) -> None:
    if about not in _warned:
        _warned.add(about)
        warn(text)


def forget() -> None:
    """Repeat warnings at the next fallback."""
    _warned.clear()
