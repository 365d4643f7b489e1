"""Row-wise functions: element-wise, with reductions along rows or down columns, without a product.

Owns `over_rows`, for arrays in the host's memory, and `HostRows`, the kernels of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.numpy_fallback import fall_back
from portmm.errors import BuildError
from portmm.ops import host_matmul, row_kernels
from portmm.ops.product_kernel import ProductKernel
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import BY_NAME
from portmm.trace.bind import Bound, bind_rows, dense
from portmm.trace.recorder import element, native
from portmm.trace.tracer import Traced, arity

if TYPE_CHECKING:
    from portmm.spec import epilogue

Array = np.ndarray[Any, Any]


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


def over_rows(
    function: Callable[..., Any],
    arrays: tuple[Array, ...],
    names: dict[str, str],
    out: Any = None,
    dtype: Any = None,
    *,
    first: Any = None,
) -> tuple[tuple[Any, ...], bool]:
    """The results of a function over arrays of one shape, element-wise, with reductions along the last axis.

    Args:
        function: takes a value for each array, and the indices.
        arrays: arrays of one shape, (..., m, n).
        names: names of indices -> axes.
        out: the array of a single result, dense and of its type.
        dtype: type of results without a `cast`, by default that of the first array.
        first: of the first of them, if different.

    Returns:
        The results, dense, and whether the function returned a tuple.

    Raises:
        TypeError: an array, or one that the function captures, is not where the others are, or of an unsupported type.
        TraceError: the function cannot be traced.
    """
    there = HostRows(arrays)
    try:
        return row_kernels.over(there, function, names, out, dtype, first=first)
    except BuildError as error:
        fall_back(error)
    except _NoRowsError:
        pass
    return by_numpy(function, arrays, names, there.usual(dtype))


def spread(x: Array, shape: tuple[int, ...]) -> Array:
    """An array in C's order with these extents."""
    return np.ascontiguousarray(np.broadcast_to(x, shape))


class _NoRowsError(Exception):
    """Raised where columns without rows are reduced: a kernel without rows writes nothing."""


class HostRows:
    """Arrays of one shape in the host's memory, and the kernels over their rows.

    Attributes:
        values: the arrays as (batch, m, n).
        kinds: the properties of them that kernels depend on.
        types: of their elements in expressions.
    """

    def __init__(self, arrays: tuple[Array, ...]) -> None:
        *self.lead, m, n = arrays[0].shape
        self.dtype, self.size = arrays[0].dtype, (m, n, math.prod(self.lead))
        self.types = tuple([element(x.dtype)[0] for x in arrays])
        self.values = [native(x.reshape(self.size[2], m, n)) for x in arrays]
        self.kinds = tuple([(x.shape, x.strides, x.dtype) for x in self.values])

    def usual(self, dtype: Any) -> np.dtype[Any]:
        """The type of results without a `cast`."""
        return self.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)

    def kernel(
        self, traced: Traced, columns: tuple[epilogue.Operand, ...], usual: np.dtype[Any], _: dict[Any, Any]
    ) -> ProductKernel:
        """The kernel of a function, or of its sums down columns; `columns` are results of these, read again."""
        from portmm.dispatch import cpu_routes

        host_matmul.begin()
        runtime()  # raises before a kernel is lowered in vain
        size, m = self.size, self.size[0]
        strides = [tuple([s // x.itemsize for s in x.strides]) for x in self.values]
        strides += [dense("bn", size)] * len(columns)
        step, shapes, written = bind_rows(self, traced, self.values, columns, usual)
        if not m and step.fused.column_reductions:
            raise _NoRowsError
        results, route = tuple(zip(shapes, step.types, strict=True)), cpu_routes.expressions_route(step.fused, size)
        return ProductKernel(results, (m, m), route, Bound(traced, size, strides, written))

    def run(
        self, kernel: ProductKernel, closure: dict[Any, Any], values: list[Array], out: Any
    ) -> tuple[list[Array], bool]:
        """Run a kernel: the results, and whether the first was written to `out`."""
        results = [np.empty(s, t) for s, t in kernel.results]
        if out is not None:
            results[0] = out
        m, n, batch = self.size
        if m and batch:
            operands = kernel.bound.fill(closure, values, results)
            runtime().execute(kernel.route, m, n, 1, batch, *(0,) * 12, None, *operands)
        return results, out is not None

    def put(self, result: Array, out: Array) -> None:
        """Copy a result to an array of the user."""
        np.copyto(out, result)
