"""Epilogues of products: the rules for them that all kernels share.

Owns the arguments of an epilogue, and `fusible`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from portmm.errors import ScheduleError
from portmm.spec.epilogue import acc
from portmm.trace.bind import bind_operands
from portmm.trace.tracer import indices

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from portmm.spec.dequantization import Dequantization
    from portmm.trace.bind import Step
    from portmm.trace.tracer import Traced

NAMES = {"m": "m", "n": "n", "b": "b"}
VALUES = (acc(), indices(NAMES))
"""The placeholder arguments of an epilogue."""
NOT_F64 = "expressions are in float32; convert float64 operands, or multiply without an epilogue"


def fusible(traced: Traced, sums: str, usual: Callable[[], np.dtype[Any]], after: Dequantization | None = None) -> Step:
    """An epilogue as expressions of sums of a type, if it can be fused.

    Args:
        traced: the epilogue.
        sums: the accumulator's type.
        usual: the default type of a result.
        after: the steps before it, whose vectors are the first operands.

    Raises:
        ScheduleError: it cannot be.
    """
    if sums == "f64":
        raise ScheduleError(NOT_F64)
    before, value = ((), None) if after is None else (after.operands, after.value())
    step = bind_operands(traced, before, usual(), ends=True, sums=value)
    if not step.wide:
        raise ScheduleError("its first result is constant along a row")
    if step.fused.reductions or step.fused.column_reductions:
        raise ScheduleError("a reduction needs whole rows, or columns, of sums")
    if sums == "s32" and step.types[0] == np.int32:
        raise ScheduleError("scaled sums of integers are not written as s32")
    return step
