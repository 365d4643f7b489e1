"""Epilogues of products: the rules for them that all kernels share.

Owns the arguments of an epilogue, `fusible`, `fused`, the way of a call wherever its arrays are, and `of_convolution`,
the epilogue of layers of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import ScheduleError
from portmm.spec.elementwise import relu
from portmm.spec.epilogue import acc, number
from portmm.spec.expr import apply
from portmm.spec.expr_functions import substituted
from portmm.trace.bind import Step, UserFunction, bind_operands
from portmm.trace.closures import traced_through
from portmm.trace.tracer import Traced, indices
from portmm.util.records import replace

if TYPE_CHECKING:
    from portmm.spec.dequantization import Dequantization

NAMES = {"m": "m", "n": "n", "b": "b"}
VALUES = (acc(), indices(NAMES))
"""The placeholder arguments of an epilogue."""
CHANNELS_FIRST = {"m": "n", "n": "m", "b": "b"}
"""Names of indices -> axes of a product whose rows are channels."""
VALUES_FIRST = (acc(), indices(CHANNELS_FIRST))
"""The placeholder arguments of its epilogue."""
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


def step_of_part(step: Callable[[Traced], Step], traced: Traced, axes: str) -> tuple[Step, int]:
    """A user's function for a part of rows, columns or items, and the place of the part among its numbers.

    Indices along these axes begin at numbers after those of the function, which are the bits of integers. A part
    has one item, whose index is the number. The place is -1 where there are no such indices.

    Args:
        step: the function as expressions.
        traced: the function.
        axes: along which it has parts.

    Raises:
        ScheduleError: it cannot be an epilogue.
    """
    count, whole, done, indices = len(traced.numbers), step(traced), dict[Any, Any](), list[Any]()

    def change(e: Any) -> Any:
        if e.op != "index" or e.args[0] not in axes:
            return None
        indices.append(e)
        first = apply("bits", number(count + axes.index(e.args[0])))
        return first if e.args[0] == "b" else e + first

    values = tuple((substituted(x, change, done), t) for x, t in traced.results)
    return (step(replace(traced, results=values)), count) if indices else (whole, -1)


def rank_of(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The number of indices of an epilogue of operands of these shapes.

    Raises:
        ValueError: one of them is a vector.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError(f"an epilogue takes matrices; got {a} by {b}: add a dimension of 1")
    return 2 if len(a) == len(b) == 2 else 3


def fused(x: Any, epilogue: Callable[..., Any]) -> Any:
    """The product of a call, `fused_matmul.HostCall` or `grid_product.GridProduct`, with its epilogue.

    It is one kernel, `x.run(x.kernel(function), function)`, or two, `x.split(epilogue)`.
    """
    function = UserFunction(epilogue)
    kernel = x.kernel(function)
    if not isinstance(kernel, ScheduleError):
        return x.run(kernel, function)
    if x.sums() == "f64":
        raise TypeError(NOT_F64)
    return x.split(epilogue)


def of_convolution(bias: Any, residual: Any, *, rectified: bool) -> Callable[..., Any] | None:
    """The epilogue of a convolution in a model.

    Args:
        bias: by channel, or None.
        residual: an array by image, pixel and channel, or None.
        rectified: whether a ReLU is last.

    Returns:
        The function; None if there is nothing to compute.
    """
    if bias is None and residual is None and not rectified:
        return None

    @traced_through
    def epilogue(acc: Any, i: Any) -> Any:
        y = acc if bias is None else acc + bias[i.n]
        y = y if residual is None else y + residual[i.b, i.m, i.n]
        return relu(y) if rectified else y

    return epilogue
