"""Functions over rows: element-wise, with reductions along rows or down columns, without a product.

Owns `over_rows`. Imports `ops.matmul`, `dispatch.cpu`, `trace.bind`, `trace.tracer`. A reduction down columns is a
kernel before: what comes of it is an operand of the kernel over rows.
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
from portmm.ops import matmul as matmul_op
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import Operand, argument
from portmm.spec.expr import ordered
from portmm.trace.bind import Around, Bound, dense, native, settle, typed
from portmm.trace.column_reductions import down
from portmm.trace.tracer import Indices, Traced, arity, described, element

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
BYTES_PER_SECOND = 8e9
"""At least what a core moves: rows that one moves in less than FORK are left to it."""
FORK = 20e-6


@lru_cache(maxsize=64)
def _leaves(types: tuple[str, ...], names: tuple[tuple[str, str], ...]) -> tuple[Any, ...]:
    """What a function is given in place of arrays of these types, and the indices."""
    return (*(argument(i, x) for i, x in enumerate(types)), Indices(dict(names)))


class _Numbers:
    """The places of all elements of arrays of a shape (..., m, n), as `Indices` has those of one."""

    def __init__(self, shape: tuple[int, ...], names: dict[str, str]) -> None:
        *lead, m, n = shape
        batch = np.arange(math.prod(lead)).reshape(*lead, 1, 1)
        every = {"b": batch, "m": np.arange(m)[:, None], "n": np.arange(n)[None, :]}
        for name, axis in names.items():
            setattr(self, name, every[axis])


def by_numpy(
    function: Callable[..., Any],
    given: tuple[Array, ...],
    names: dict[str, str],
    usual: np.dtype[Any],
    places: Any = None,
) -> tuple[tuple[Array, ...], bool]:
    """The results of `over_rows`, computed with NumPy in float32; `places` are those of elements, if not the usual."""
    shape = given[0].shape
    values = [x.astype(np.float32) if element(x.dtype)[0] != "s32" else x for x in given]
    both = (*values, _Numbers(shape, names) if places is None else places)
    found = function(*both[: arity(function, len(both))])
    results = []
    for x in found if isinstance(found, tuple) else (found,):
        made = np.asarray(x)
        made = made.astype(usual) if made.dtype.kind == "f" and made.dtype.itemsize >= BY_NAME["f32"].bytes else made
        wide = shape[-1] if made.ndim and made.shape[-1] != 1 else 1
        results.append(np.ascontiguousarray(np.broadcast_to(made, (*shape[:-1], wide))))
    return tuple(results), isinstance(found, tuple)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A kernel over rows for one kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        size: rows, columns, items of a batch.
        results: shapes and types.
        several: the function gives a tuple.
        order: of a kernel that reduces columns, where the function's results are: see `down`.
        passed: how many of its results the next kernel is given.
    """

    route: Any
    bound: Bound
    size: tuple[int, int, int]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    several: bool
    order: tuple[int, ...] | None = None
    passed: int = 0

    def run(self, found: dict[Any, Any], values: list[Array], out: Any) -> list[Array]:
        """The results, of which the first is `out` if that is given."""
        results = [np.empty(s, t) for s, t in self.results]
        if out is not None:
            results[0] = out
        operands, numbers, alive = self.bound.fill(found, values, results)
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
    given: tuple[Array, ...],
    names: dict[str, str],
    out: Any = None,
    dtype: Any = None,
    *,
    first: Any = None,
) -> tuple[tuple[Array, ...], bool]:
    """A function of values in arrays of one shape, element by element, with reductions along the last axis.

    Args:
        function: takes a value for each array, and the indices.
        given: arrays of one shape, (..., m, n).
        names: what the function calls the axes -> axes.
        out: where to put the one result, dense and of its type.
        dtype: type of results that no `cast` gives one, by default that of the first array.
        first: of the first of them, if it is another.

    Returns:
        The results, and whether the function gave a tuple of them.
    """
    *lead, m, n = given[0].shape
    size = (m, n, math.prod(lead))
    values = [native(x.reshape(size[2], m, n)) for x in given]
    usual = np.dtype(dtype) if dtype is not None else given[0].dtype.newbyteorder("=")
    around = Around.of(function)
    key = ("rows", tuple([(x.shape, x.strides, x.dtype) for x in values]), len(lead), usual, first, tuple(names))

    views = tuple([described(x, ("b", "m", "n")) for x in values])
    strides = [tuple([s // x.itemsize for s in x.strides]) for x in values]

    def make(traced: Traced) -> tuple[_Rows, ...]:
        matmul_op.begin()
        runtime()  # without one, there is no use in making a kernel
        traced = typed(traced, first)
        return _once(traced, made)

    def made(traced: Traced) -> tuple[_Rows, ...]:
        split = down(traced, len(values), usual)
        if split is None:
            return (_rows(traced, size, views, strides, usual, lead),)
        sums, rest, order, passed = split
        kernel = replace(_rows(sums, size, views, strides, usual, lead), order=order, passed=passed)
        if not rest.results:
            return (kernel,)
        more, lines = (Operand("f32", "bn"),) * passed, [dense("bn", size)] * passed
        return kernel, _rows(rest, size, (*views, *more), [*strides, *lines], usual, lead)

    leaves = _leaves(tuple([element(x.dtype)[0] for x in values]), tuple(names.items()))
    try:
        ready: tuple[_Rows, ...] = around.ready(key, make, leaves, 3 if lead else 2)
    except BuildError as error:
        fall_back(error)
        return by_numpy(function, given, names, usual)
    head = ready[0]
    if head.order is None:
        return tuple(head.run(around.found, values, out)), head.several
    if not m:  # a kernel of no rows does nothing
        return by_numpy(function, given, names, usual)
    sums = head.run(around.found, values, None)
    rest = ready[1].run(around.found, values + sums[: head.passed], None) if len(ready) > 1 else []
    results = [sums[i] if i >= 0 else rest[-1 - i] for i in head.order]
    if out is not None:
        np.copyto(out, results[0])
        results[0] = out
    return tuple(results), head.several


def _once(traced: Traced, make: Callable[[Traced], tuple[_Rows, ...]]) -> tuple[_Rows, ...]:
    """The kernels of a function; an error that says so where columns would have to be reduced twice."""
    try:
        return make(traced)
    except ScheduleError as error:
        if not any(x.op == "fold" for x in ordered(tuple(x for x, _ in traced.results))):
            raise
        raise TraceError("what is reduced down columns cannot be reduced again there: take two steps") from error


def _rows(  # noqa: PLR0917 - what they read is three of them
    traced: Traced,
    size: tuple[int, int, int],
    views: tuple[Operand, ...],
    strides: list[tuple[int, ...]],
    usual: np.dtype[Any],
    lead: list[int],
) -> _Rows:
    """The kernel of a function over rows, or of sums down columns."""
    from portmm.dispatch import cpu as cpu_dispatch

    m, n, _ = size
    step = settle(traced, views, usual, ends=False)
    bytes_ = math.prod(size) * 4 * len(step.fused.operands)
    workers = config.get_num_threads() if bytes_ > FORK * BYTES_PER_SECOND else 1
    route = cpu_dispatch.rows_route(step.text, size, config.target(), workers)
    bound = Bound(traced, size, strides, [dense(x, size) for x in step.axes])
    shapes = [(*lead, m if "m" in x else 1, n if "n" in x else 1) for x in step.axes]
    return _Rows(route, bound, size, tuple(zip(shapes, step.types, strict=True)), traced.several)
