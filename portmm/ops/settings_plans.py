"""Plans of products that are called in blocks of `config`.

Owns a memo by settings and operands' forms: those in C are for the settings of the process, and every product in a
block would be prepared anew, for some 50 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.dispatch import config
from portmm.ops.prepack import current, is_packed
from portmm.util.memo import Memory

MOST_PLANS = 1024
_plans = Memory(MOST_PLANS, "calls")
_NEW = object()
"""In place of the plan of a form that has not come yet."""


def multiply(planner: Callable[[Any, Any, Any], Any], a: Any, b: Any, out: Any) -> Any:
    """The product of ordinary arrays, or of one and a packed weight, by a plan; None for other operands.

    Args:
        planner: returns the plan for operands of new forms, with a packed weight's panels as its second; None for none.
        a: an array.
        b: an array or a packed weight.
        out: an array for the result, or None.
    """
    packed = is_packed(b)
    weight = current(b) if packed else b
    right = weight.owner if packed else b
    if not (_plain(a) and _plain(right) and (out is None or (_plain(out) and out.flags.writeable))):
        return None
    if out is not None and (np.may_share_memory(out, a) or np.may_share_memory(out, right)):
        return None
    if packed and out is not None and out.strides[-1:] != (out.itemsize,):
        return None  # panels give rows
    kind = (weight.family, weight.shape) if packed else None
    key = (config.current(), config.limit(), kind, *(_form(x) for x in (a, right, out)))
    plan = _plans.get(key, _NEW)
    if plan is _NEW:
        plan = _plans.keep(key, planner(a, weight, out))
    return None if plan is None else plan(a, right) if out is None else plan(a, right, out)


def _plain(x: Any) -> bool:
    return type(x) is np.ndarray and x.size > 0 and x.flags.aligned


def _form(x: np.ndarray[Any, Any] | None) -> Any:
    return None if x is None else (x.shape, x.strides, x.dtype)
