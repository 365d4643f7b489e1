"""Row-wise functions: element-wise, with reductions along rows or down columns, without a product.

Owns `over_rows`. A reduction down columns is a kernel that runs first: its result is an operand of the kernel over
rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError, TraceError
from portmm.ops import host_matmul
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import Operand, argument
from portmm.spec.expr import ordered
from portmm.trace.bind import Bound, UserFunction, bind_operands, dense, native, typed
from portmm.trace.column_reductions import split_column_reductions
from portmm.trace.recorder import described, element
from portmm.trace.tracer import Indices, Traced, arity

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
BYTES_PER_SECOND = 8e9
"""Least bandwidth of a core: rows that one core processes in less than FORK seconds use one thread."""
FORK = 20e-6


@lru_cache(maxsize=64)
def _leaves(types: tuple[str, ...], names: tuple[tuple[str, str], ...]) -> tuple[Any, ...]:
    """The placeholder arguments of a function of arrays of these types, and the indices."""
    return (*(argument(i, x) for i, x in enumerate(types)), Indices(dict(names)))


class _Numbers:
    """The indices of all elements of arrays of a shape (..., m, n), in the form of `Indices`."""

    def __init__(self, shape: tuple[int, ...], names: dict[str, str]) -> None:
        *lead, m, n = shape
        batch = np.arange(math.prod(lead)).reshape(*lead, 1, 1)
        every = {"b": batch, "m": np.arange(m)[:, None], "n": np.arange(n)[None, :]}
        for name, axis in names.items():
            setattr(self, name, every[axis])


def by_numpy(
    function: Callable[..., Any],
    arrays: tuple[Array, ...],
    names: dict[str, str],
    usual: np.dtype[Any],
    indices: Any = None,
) -> tuple[tuple[Array, ...], bool]:
    """The results of `over_rows`, computed by NumPy in float32; `indices` replace those of the elements."""
    shape = arrays[0].shape
    values = [x.astype(np.float32) if element(x.dtype)[0] != "s32" else x for x in arrays]
    both = (*values, _Numbers(shape, names) if indices is None else indices)
    result = function(*both[: arity(function, len(both))])
    results = []
    for x in result if isinstance(result, tuple) else (result,):
        value = np.asarray(x)
        value = (
            value.astype(usual) if value.dtype.kind == "f" and value.dtype.itemsize >= BY_NAME["f32"].bytes else value
        )
        columns = shape[-1] if value.ndim and value.shape[-1] != 1 else 1
        results.append(np.ascontiguousarray(np.broadcast_to(value, (*shape[:-1], columns))))
    return tuple(results), isinstance(result, tuple)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The kernel of one kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        size: rows, columns, items of a batch.
        results: shapes and types.
        several: the function returns a tuple.
        order: of a kernel that reduces columns, the indices of the function's results: see `split_column_reductions`.
        passed: the number of its results that are operands of the next kernel.
    """

    route: Any
    bound: Bound
    size: tuple[int, int, int]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    several: bool
    order: tuple[int, ...] | None = None
    passed: int = 0

    def run(self, closure: dict[Any, Any], values: list[Array], out: Any) -> list[Array]:
        """Run the kernel; the first result is `out` if there is one."""
        results = [np.empty(s, t) for s, t in self.results]
        if out is not None:
            results[0] = out
        operands, numbers, alive = self.bound.fill(closure, values, results)
        m, n, batch = self.size
        if m and batch:
            runtime().execute(
                self.route, m, n, 1, batch, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, *_NOTHING, operands, numbers
            )
        del alive
        return results


_NOTHING = (None,) * 7


def over_rows(
    function: Callable[..., Any],
    arrays: tuple[Array, ...],
    names: dict[str, str],
    out: Any = None,
    dtype: Any = None,
    *,
    first: Any = None,
) -> tuple[tuple[Array, ...], bool]:
    """The results of a function over arrays of one shape, element-wise, with reductions along the last axis.

    Args:
        function: takes a value for each array, and the indices.
        arrays: arrays of one shape, (..., m, n).
        names: names of indices -> axes.
        out: the array of a single result, dense and of its type.
        dtype: type of results without a `cast`, by default that of the first array.
        first: of the first of them, if different.

    Returns:
        The results, and whether the function returned a tuple.
    """
    *lead, m, n = arrays[0].shape
    size = (m, n, math.prod(lead))
    values = [native(x.reshape(size[2], m, n)) for x in arrays]
    usual = np.dtype(dtype) if dtype is not None else arrays[0].dtype.newbyteorder("=")
    user_function = UserFunction.of(function)
    key = ("rows", tuple([(x.shape, x.strides, x.dtype) for x in values]), len(lead), usual, first, tuple(names))

    views = tuple([described(x, ("b", "m", "n")) for x in values])
    strides = [tuple([s // x.itemsize for s in x.strides]) for x in values]

    def make(traced: Traced) -> tuple[_Rows, ...]:
        host_matmul.begin()
        runtime()  # raises before a kernel is lowered in vain
        traced = typed(traced, first)
        return _checked(traced, build)

    def build(traced: Traced) -> tuple[_Rows, ...]:
        split = split_column_reductions(traced, len(values), usual)
        if split is None:
            return (_rows(traced, size, views, strides, usual, lead),)
        sums, rest, order, passed = split
        kernel = replace(_rows(sums, size, views, strides, usual, lead), order=order, passed=passed)
        if not rest.results:
            return (kernel,)
        column_operands, column_strides = (Operand("f32", "bn"),) * passed, [dense("bn", size)] * passed
        return kernel, _rows(rest, size, (*views, *column_operands), [*strides, *column_strides], usual, lead)

    leaves = _leaves(tuple([element(x.dtype)[0] for x in values]), tuple(names.items()))
    try:
        ready: tuple[_Rows, ...] = user_function.ready(key, make, leaves, 3 if lead else 2)
    except BuildError as error:
        fall_back(error)
        return by_numpy(function, arrays, names, usual)
    head = ready[0]
    if head.order is None:
        return tuple(head.run(user_function.closure, values, out)), head.several
    if not m:  # a kernel without rows writes nothing
        return by_numpy(function, arrays, names, usual)
    sums = head.run(user_function.closure, values, None)
    rest = ready[1].run(user_function.closure, values + sums[: head.passed], None) if len(ready) > 1 else []
    results = [sums[i] if i >= 0 else rest[-1 - i] for i in head.order]
    if out is not None:
        np.copyto(out, results[0])
        results[0] = out
    return tuple(results), head.several


def _checked(traced: Traced, make: Callable[[Traced], tuple[_Rows, ...]]) -> tuple[_Rows, ...]:
    """The kernels of a function; an error that explains it where columns would be reduced twice."""
    try:
        return make(traced)
    except ScheduleError as error:
        if not any(x.op == "fold" for x in ordered(tuple(x for x, _ in traced.results))):
            raise
        raise TraceError("results of column reductions cannot be reduced down columns again: take two steps") from error


def _rows(  # noqa: PLR0917 - three describe operands
    traced: Traced,
    size: tuple[int, int, int],
    views: tuple[Operand, ...],
    strides: list[tuple[int, ...]],
    usual: np.dtype[Any],
    lead: list[int],
) -> _Rows:
    """The kernel of a function over rows, or of sums down columns."""
    from portmm.dispatch import cpu_routes

    m, n, _ = size
    step = bind_operands(traced, views, usual, ends=False)
    bytes_ = math.prod(size) * 4 * len(step.fused.operands)
    workers = config.get_num_threads() if bytes_ > FORK * BYTES_PER_SECOND else 1
    route = cpu_routes.rows_route(step.text, size, config.target(), workers)
    bound = Bound(traced, size, strides, [dense(x, size) for x in step.axes])
    shapes = [(*lead, m if "m" in x else 1, n if "n" in x else 1) for x in step.axes]
    return _Rows(route, bound, size, tuple(zip(shapes, step.types, strict=True)), traced.several)
