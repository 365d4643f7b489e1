"""The flow of a function over rows, wherever its arrays are.

Owns `over`: the trace, the kernels of a kind of call and their order. A reduction down columns is a kernel that runs
first: its result is an operand of the kernel over rows. Arrays and kernels are those of `rowwise.HostRows` or
`kernel_call.GridRows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from portmm.errors import ScheduleError, TraceError
from portmm.spec import epilogue
from portmm.spec.expr import ordered
from portmm.trace.bind import UserFunction, split_column_reductions, typed
from portmm.trace.tracer import Traced, indices
from portmm.util.memo import cached
from portmm.util.records import dataclass

if TYPE_CHECKING:
    import numpy as np


_OF = {
    "a": {"m": "m", "k": "n", "b": "b"},
    "b": {"k": "m", "n": "n", "b": "b"},
    "planes": {"m": "n", "k": "m", "b": "b"},
}
"""Operand, or images with channels first -> axes of its prologue's indices -> axes of rows."""


def before(
    over: Callable[..., Any], spread: Callable[..., Any], function: Callable[..., Any], x: Any, name: str
) -> Any:
    """An operand after its prologue; `over` computes functions over rows wherever it is, and `spread` broadcasts.

    Raises:
        ValueError: it is no matrix.
        TraceError: the prologue returns a tuple.
    """
    if len(x.shape) < 2:
        raise ValueError(f"{name} has shape {x.shape}; a prologue takes matrices")
    results, several = over(function, (x,), _OF[name])
    if several:
        raise TraceError(f"a prologue returns one value, not a tuple of {len(results)}")
    return spread(results[0], x.shape)


@cached("calls", 64)
def _leaves(types: tuple[str, ...], names: tuple[tuple[str, str], ...]) -> tuple[Any, ...]:
    """The placeholder arguments of a function of arrays of these types, and the indices."""
    return (*(epilogue.argument(i, x) for i, x in enumerate(types)), indices(dict(names)))


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of one kind of call.

    Attributes:
        each: one, or the one that reduces columns and that over rows.
        several: the function returns a tuple.
        order: if columns are reduced, the indices of the function's results: see `split_column_reductions`.
        passed: the number of results of the first that are operands of the second.
    """

    each: tuple[Any, ...]
    several: bool
    order: tuple[int, ...] | None = None
    passed: int = 0


def over(
    there: Any, function: Callable[..., Any], names: dict[str, str], out: Any = None, dtype: Any = None,
    *, first: Any = None,
) -> tuple[tuple[Any, ...], bool]:  # fmt: skip
    """The results of a function over `there`, arrays of one shape: see `rowwise.over_rows`.

    Raises:
        TypeError: an array that the function captures is elsewhere, or of an unsupported type.
        TraceError: the function cannot be traced.
    """
    usual, user_function = there.usual(dtype), UserFunction(function)
    key = ("rows", there.kinds, tuple(there.lead), usual, first, tuple(names.items()))
    leaves = _leaves(there.types, tuple(names.items()))

    def make(traced: Traced) -> _Kernels:
        return _kernels(there, typed(traced, first), usual, user_function.closure)

    ready: _Kernels = user_function.ready(key, make, leaves, 3 if there.lead else 2)
    head, closure = ready.each[0], user_function.closure
    if ready.order is None:
        results, direct = there.run(head, closure, there.values, out)
    else:
        (sums, direct), rest = there.run(head, closure, there.values, None), []
        for kernel in ready.each[1:]:
            rest, _ = there.run(kernel, closure, [*there.values, *sums[: ready.passed]], None)
        results = [sums[i] if i >= 0 else rest[-1 - i] for i in ready.order]
    if out is not None and not direct:
        there.put(results[0], out)
        results[0] = out
    return tuple(results), ready.several


def _kernels(there: Any, traced: Traced, usual: np.dtype[Any], closure: dict[Any, Any]) -> _Kernels:
    """The kernels of a function."""
    try:
        split = split_column_reductions(traced, len(there.values), usual)
        if split is None:
            return _Kernels((there.kernel(traced, (), usual, closure),), traced.several)
        sums, rest, order, passed = split
        every = [there.kernel(sums, (), usual, closure)]
        if rest.results:
            every.append(there.kernel(rest, (epilogue.Operand("f32", "bn"),) * passed, usual, closure))
    except ScheduleError as error:
        if not any(x.op == "fold" for x in ordered(tuple(x for x, _ in traced.results))):
            raise
        raise TraceError("results of column reductions cannot be reduced down columns again: take two steps") from error
    return _Kernels(tuple(every), traced.several, order, passed)
