"""Budget of scratch memory, and how much of it arenas have.

Owns the budget, and the limit of kernels' workspaces that follows from it: every process sets that with its first
call, while arenas (`scratch_arena`) are of fused programs only.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any
from weakref import WeakSet

from portmm.util import locks
from portmm.util.user_warnings import warn

DEFAULT_MIB = 160
"""Scratch memory of a process: with the interpreter, NumPy and all memos of many thousand
shapes it stays under 256 MiB, operands not counted (bench/many_shapes.py)."""
VARIABLE = "PORTMM_SCRATCH_MIB"

arenas: WeakSet[Any] = WeakSet()
"""Memory of arenas that outlive a call."""
lock = locks.reentrant_lock()
"""Guards arenas: garbage collection may end one while another is made."""


@lru_cache(maxsize=4)
def _bytes(text: str) -> int:
    if text:
        try:
            mebibytes = int(text)
            if mebibytes >= 0:
                return mebibytes << 20
        except ValueError:
            pass
        message = f"{VARIABLE} is {text!r}, not a number of MiB: the default of {DEFAULT_MIB} is used"
        warn(message)
    return DEFAULT_MIB << 20


def budget() -> int:
    """Bytes of scratch memory that this process keeps between calls, all threads together."""
    return _bytes(os.environ.get(VARIABLE, ""))


def kept() -> int:
    """Bytes of all arenas of this process."""
    with lock:
        return sum(x.bytes.size for x in arenas)


def bound(rt: Any) -> None:
    """Limit the workspaces of kernels to the rest of the budget."""
    rt.set_scratch(max(0, budget() - kept()))
