"""Products of Dask's arrays: `matmul`, `einsum` and `linear`.

Owns the graphs of tasks. A task multiplies one chunk by one chunk with portmm, which remembers a plan for each shape of
chunks. Along a contracted axis tasks form chains: each adds its product to the sum that it receives, small ones in the
kernel, so that a worker holds two chunks, a sum and its successor, and no partial products wait to be added.
Results of tasks are never changed in place: Dask may send them elsewhere, or run a task again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as combinations
from math import ceil
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
from dask import delayed
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from portmm.arrays.numpy_arrays import as_operand, product_shape, types_of
from portmm.ops.einsum import einsum as array_einsum
from portmm.ops.einsum import wide
from portmm.ops.einsum_plan import ELLIPSIS, Labels, extents_of, order_of, pairs_of, parsed, spelled, type_of_product
from portmm.ops.linear import linear as array_linear
from portmm.ops.matmul import matmul as array_matmul
from portmm.trace.closures import traced_through

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


Array = np.ndarray[Any, Any]
PARALLEL = 16
"""Tasks that a product has for workers to run in parallel, if it has as many: fewer chunks of a result have several
chains each, whose sums are added."""
FUSED = 1 << 21
"""Sums of a chunk up to which the kernel adds them: 2048 squared and 4096 squared take 0.7 and 0.89 of the time if they
are added after the product, 1024 squared 1.06 (Granite Rapids)."""
ROWS, SUMS, COLUMNS = range(3)
"""Labels of the axes of matrices."""


def matmul(a: Any, b: Any, *, dtype: DTypeLike | None = None) -> Any:
    """The matrix product of two arrays of Dask's, like `dask.array.matmul`, by `portmm.matmul` of chunks.

    Chunks along k, and of batches, are made those of both arrays. Narrow floats are summed in float32 over all chunks,
    and rounded once.

    Args:
        a: (..., m, k) or (k,), of the types of `portmm.matmul`; or an array in memory.
        b: (..., k, n) or (k,), likewise.
        dtype: type of the result, as in `portmm.matmul`.

    Returns:
        An array of Dask's, (..., m, n).

    Raises:
        TypeError: the two types have no product.
        ValueError: shapes do not match.
    """
    x, y = da.asanyarray(a), da.asanyarray(b)
    product_shape(x.shape[-2:], y.shape[-2:])  # raises before anything is computed
    left = (*_batch(x.ndim - 2), ROWS, SUMS)[-x.ndim :]
    right = (*_batch(y.ndim - 2), SUMS, COLUMNS) if y.ndim > 1 else (SUMS,)
    result = (*_batch(max(x.ndim, y.ndim) - 2), *(ROWS,) * (x.ndim > 1), *(COLUMNS,) * (y.ndim > 1))
    kinds = (as_operand(np.empty((1, 1), z.dtype), name).dtype for name, z in (("a", x), ("b", y)))
    natural = types_of(*(z.newbyteorder("=") for z in kinds))[2]
    return _product(array_matmul, (x, left), (y, right), result, natural if dtype is None else np.dtype(dtype))


def _batch(count: int) -> tuple[int, ...]:
    """Labels of leading dimensions, the same for the last ones."""
    return tuple(range(ELLIPSIS + count - 1, ELLIPSIS - 1, -1))


def einsum(subscripts: str, *operands: Any, dtype: DTypeLike | None = None, optimize: Any = True) -> Any:
    """The sum of products that labels of axes describe, like `dask.array.einsum`, by `portmm.einsum` of chunks.

    Two arrays at a time are multiplied, in an order of few operations, so that what lies between is an array of
    Dask's, too.

    Args:
        subscripts: labels of the operands' axes and of the result's, as in "...ij,jk->...ik".
        operands: arrays of Dask's, or in memory.
        dtype: type of the result and of the sums, as in `portmm.einsum`.
        optimize: the order of products, as in `portmm.einsum`.

    Returns:
        An array of Dask's.

    Raises:
        TypeError: `dtype` cannot hold the result.
        ValueError: subscripts do not fit the operands.
    """
    arrays = [da.asanyarray(x) for x in operands]
    if len(arrays) == 1:
        return da.einsum(subscripts, *arrays, **({} if dtype is None else {"dtype": dtype, "casting": "same_kind"}))
    labels, output = parsed(subscripts, tuple(x.ndim for x in arrays))
    extents = extents_of(labels, [x.shape for x in arrays], subscripts)
    wanted = type_of_product([x.dtype for x in arrays]) if dtype is None else np.dtype(dtype)
    left = []
    for number, (x, own) in enumerate(zip(arrays, labels, strict=True)):
        others = {i for j, y in enumerate(labels) if j != number for i in y}
        left.append(_single(x, own, others | set(output)))
    for first, second in pairs_of(order_of([own for _, own in left], output, extents, optimize), len(left)):
        x, y = left[first], left[second]
        rest = [z for i, z in enumerate(left) if i not in (first, second)]
        kept = {i for _, own in rest for i in own} | set(output)
        result = tuple(dict.fromkeys(i for i in (*x[1], *y[1]) if i in kept)) if rest else output
        function = partial(array_einsum, spelled([x[1], y[1]], result))
        left = [*rest, (_product(function, x, y, result, wanted), result)]
    return left[0][0]


def _single(x: Any, labels: Labels, kept: set[int]) -> tuple[Any, Labels]:
    """An operand of which each label is there once, summed along those that are nowhere else."""
    once = tuple(i for i in dict.fromkeys(labels) if i in kept)
    return (x, labels) if once == labels else (da.einsum(spelled([labels], once), x), once)


# -- chains of tasks -------------------------------------------------------------------


def _product(
    function: Callable[..., Any], x: tuple[Any, Labels], y: tuple[Any, Labels], result: Labels, dtype: np.dtype[Any]
) -> Any:
    """The product of two arrays with labelled axes, of which those that the result lacks are summed."""
    chunks, (left, right) = da.core.unify_chunks(*x, *y)
    grid = {label: len(sizes) for label, sizes in chunks.items()}
    summed = [i for i in chunks if i not in result]
    steps = list(combinations(*(range(grid[i]) for i in summed)))
    places = list(combinations(*(range(grid[i]) for i in result)))
    name = f"portmm-{tokenize(function, left, right, result, dtype)}"
    inner = dtype if len(steps) == 1 else wide(dtype)
    tasks: dict[Any, Any] = {}

    def pair(place: tuple[int, ...], step: tuple[int, ...]) -> Iterator[Any]:
        at = dict(zip((*result, *summed), (*place, *step), strict=True))
        for array, (_, labels) in ((left, x), (right, y)):
            index = (at[i] if n > 1 else 0 for i, n in zip(labels, array.numblocks, strict=True))
            yield (array.name, *index)

    run = max(1, len(steps) // ceil(PARALLEL / max(1, len(places))))
    for place in places:
        ends: list[Any] = []
        for i, step in enumerate(steps):
            key = (f"sum-{name}", *place, i)
            if i % run == 0:
                tasks[key] = (partial(_first, function, inner), *pair(place, step))
            else:
                tasks[key] = (partial(_next, function, inner), ends.pop(), *pair(place, step))
            ends.append(key)
        tasks[(name, *place)] = (partial(_total, dtype), ends)
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=[left, right])
    return da.Array(graph, name, tuple(chunks[i] for i in result), dtype=dtype)


def _first(function: Callable[..., Any], dtype: np.dtype[Any], a: Array, b: Array) -> Any:
    """The product of two chunks."""
    return function(a, b, dtype=dtype)


def _next(function: Callable[..., Any], dtype: np.dtype[Any], sums: Any, a: Array, b: Array) -> Any:
    """The product of two chunks, added to sums."""
    if function is array_matmul and a.ndim == b.ndim == 2 and dtype == np.float32 and sums.size <= FUSED:
        return array_matmul(a, b, epilogue=_added(sums), dtype=dtype)
    return _sum(function(a, b, dtype=dtype), sums)


def _sum(own: Any, other: Any) -> Any:
    """The sum of two results, in the memory of the first one."""
    return np.add(own, other, out=own if isinstance(own, np.ndarray) else None)


def _added(sums: Array) -> Callable[..., Any]:
    @traced_through
    def epilogue(acc: Any, i: Any) -> Any:
        return acc + sums[i.m, i.n]

    return epilogue


def _total(dtype: np.dtype[Any], ends: list[Any]) -> Any:
    """The sum of the ends of chains."""
    total = ends[0] + ends[1] if len(ends) > 1 else ends[0]
    for x in ends[2:]:
        total = _sum(total, x)
    return np.asarray(total).astype(dtype, copy=False)


# -- layers ----------------------------------------------------------------------------


def linear(x: Any, w: Any, bias: Any = None, *, x_scale: Any = 1.0, x_zero: Any = 0, **options: Any) -> Any:
    """A linear layer by `portmm.linear` of chunks of rows.

    The weight goes to each worker once; one that is packed is for machines with its instruction set.

    Args:
        x: an array of Dask's, (..., k), whose rows become whole.
        w: a weight of `portmm.linear`, in memory.
        bias: (n,), in memory.
        x_scale: a number, or one for each row: an array of Dask's, or in memory.
        x_zero: likewise, integers.
        options: those of `portmm.linear` for columns and results, but `out`.

    Returns:
        An array of Dask's, (..., n).

    Raises:
        TypeError: `out` is passed, or `x` and `w` have no product.
        ValueError: shapes do not match.
    """
    if "out" in options:
        raise TypeError("linear of Dask's arrays has no out; the result is an array of Dask's")
    rows = da.asanyarray(x)
    rows = rows.rechunk({rows.ndim - 1: -1})
    if rows.shape[-1] != w.shape[0]:
        raise ValueError(f"x has shape {rows.shape}, w {w.shape}; they differ in k: w has a row for each column of x")
    quantized = np.int8 if options.get("out_scale") is not None and rows.dtype.kind == "f" else rows.dtype
    usual = np.float32 if options.get("out_scale") is None else quantized
    dtype = np.dtype(options.get("dtype") or usual)
    axes = tuple(range(rows.ndim))
    result = (*axes[:-1], COLUMNS + rows.ndim)
    scales = [(da.asanyarray(s), axes[:-1]) if np.ndim(s) else (s, None) for s in (x_scale, x_zero)]
    layer = partial(_linear, options=options)
    return da.blockwise(
        layer, result, rows, axes, *scales[0], *scales[1], delayed(w, pure=True), None, bias, None,
        new_axes={result[-1]: w.shape[1]}, dtype=dtype, concatenate=True, align_arrays=True,
        meta=np.empty((0,) * rows.ndim, dtype),
    )  # fmt: skip


def _linear(x: Array, x_scale: Any, x_zero: Any, w: Any, bias: Any, *, options: dict[str, Any]) -> Array:
    return array_linear(x, w, bias, x_scale=x_scale, x_zero=x_zero, **options)
