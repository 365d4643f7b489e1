"""Reduction of a matmul call to the numbers of a kernel call, and the problem of a call.

Owns the step from operands to a `Problem` and the integers of the argument block: the layout of each operand, the
strides of a batch, the merging of a batch into the rows of one product, and compilation for one size. Owns
`problem_of_call`, the way from operands, or only their shapes, to the `Problem` that `matmul` would solve for them:
nothing is computed there, and no operand is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.spec.dtype import BY_NUMPY, types
from portmm.spec.problem import Problem
from portmm.weights.kinds import WeightKind, weight_kind

STATIC_BATCH = 16
"""Batch size from which compiling for one size pays."""


def problem(
    dtype: str,
    size: tuple[int, int, int],
    layouts: tuple[str, str, str],
    family: str = "",
    batch: int = 1,
    *,
    dense: bool = False,
    static: bool = False,
    fused: str = "",
) -> Problem:
    """The problem of a call under the current settings.

    With one column, B is a vector: if it is dense it is contiguous along k, and C along m
    as well, so that A determines whether the product is transposed; but u8 stays on the left.
    """
    m, n, k = size
    a, b, c = layouts
    if n == 1 and dense and b not in ("packed", "codes"):
        b = "col"
        c = "col" if a == "col" and not dtype.startswith("u8") else "row"
    if static:
        from portmm.schedule.candidates import compiled_in

        static = dense and compiled_in(m, n, k)
    return Problem(m, n, k, dtype, batch, a, b, c, family, config.current().deterministic, static, fused=fused)


class Call(NamedTuple):
    """A product reduced to the arguments of a kernel."""

    problem: Problem
    a: numpy_arrays.Operand
    b: Any
    c: numpy_arrays.Operand
    walk: numpy_arrays.Batch

    def numbers(self) -> tuple[int, ...]:
        """The integers of the argument block, in the order of `execute`."""
        p, w = self.problem, self.walk
        if isinstance(self.b, numpy_arrays.Operand):
            b = (self.b.address, self.b.row, self.b.col)
        else:
            b = (int(self.b.owner.__array_interface__["data"][0]), self.b.b_k, self.b.b_n)
        return (
            *(p.m, p.n, p.k, w.count),
            *(self.a.address, self.a.row, self.a.col, w.strides[0]),
            *(*b, w.strides[1]),
            *(self.c.address, self.c.row, self.c.col, w.strides[2]),
        )


def reduce_call(a: Any, b: Any, c: Any, dtypes: numpy_arrays.DTypes, *, static: bool = False) -> Call:
    """Operands with at least two dimensions as one strided batch.

    `b` may be a packed weight; `c` has the product's shape. The types are those that A, B and C are converted to.
    """
    batch = c.shape[:-2]
    is_packed = not isinstance(b, np.ndarray)
    left, right = numpy_arrays.canonical(a, dtypes[0]), b if is_packed else numpy_arrays.canonical(b, dtypes[1])
    result = numpy_arrays.canonical(c, dtypes[2])
    m, n, k = c.shape[-2], c.shape[-1], a.shape[-1]
    b_strides = _packed_steps(b, batch) if is_packed else numpy_arrays.strides_over(right.array, batch)
    a_strides, c_strides = numpy_arrays.strides_over(left.array, batch), numpy_arrays.strides_over(result.array, batch)
    if left.layout == result.layout == "row" and not any(b_strides):
        # One B for the whole batch: its items are more rows of one product.
        rows = numpy_arrays.collapse((*batch, m), ((*a_strides, left.row), (*b_strides, 0), (*c_strides, result.row)))
        if rows.outer is None and (m > 1 or rows.strides[0] >= k) and rows.count > m:
            left, result = left._replace(row=rows.strides[0]), result._replace(row=rows.strides[2])
            m, walk = rows.count, numpy_arrays.Batch(1, (0, 0, 0), None)
        else:
            walk = numpy_arrays.collapse(batch, (a_strides, b_strides, c_strides))
    else:
        walk = numpy_arrays.collapse(batch, (a_strides, b_strides, c_strides))
    b_layout = "packed" if is_packed else right.layout
    dense = _dense(left, m, k) and _dense(result, m, n) and (is_packed or _dense(right, k, n))
    family = b.family if is_packed else ""
    static = (static or walk.count >= STATIC_BATCH) and not is_packed
    layouts = (left.layout, b_layout, result.layout)
    return Call(
        problem(numpy_arrays.word(dtypes), (m, n, k), layouts, family, walk.count, dense=dense, static=static),
        left,
        right,
        result,
        walk,
    )


def _dense(x: numpy_arrays.Operand, rows: int, cols: int) -> bool:
    return (x.layout == "row" and x.row == cols) or (x.layout == "col" and x.col == rows)


def _packed_steps(b: Any, batch: tuple[int, ...]) -> tuple[int, ...]:
    own = b.shape[:-2]
    strides, total = [], b.b_batch
    for n in reversed(own):
        strides.append(0 if n == 1 else total)
        total *= n
    return (0,) * (len(batch) - len(own)) + tuple(reversed(strides))


def problem_of_call(a: Any, b: Any, out: Any = None, *, dtype: str = "f32", static: bool = False) -> Problem:
    """The problem of a product of two operands: arrays, shapes or a packed weight.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes do not match.
    """
    if b is None:
        raise ValueError("b is missing; pass two operands, or one Problem")
    if weight_kind(b) is WeightKind.QUANTIZED:
        raise TypeError("b is not packed; pass pack(b) to explain a quantized weight")
    dtype = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if getattr(b, "family", "").startswith("u4"):
        return _int4_problem(a, b, out, dtype)
    types = _types(a, b, out, dtype)
    is_packed = hasattr(b, "family") and b.owner.dtype == types[1]
    if hasattr(b, "family") and not is_packed:
        b = tuple(b.shape)  # matmul unpacks a weight of another type
    left, right = _example(a, "a", types[0]), b if is_packed else _example(b, "b", types[1])
    _, batch, (m, n, k) = numpy_arrays.product_shape(left.shape, tuple(right.shape))
    left = left[np.newaxis, :] if left.ndim == 1 else left
    right = right[:, np.newaxis] if not is_packed and right.ndim == 1 else right
    shape = (*batch, m, n)
    if 0 in shape or 0 in left.shape:
        return Problem(m, n, k, numpy_arrays.word(types), int(np.prod(batch)))
    return reduce_call(left, right, _result(out, shape, types[2], is_packed), types, static=static).problem


def _int4_problem(a: Any, b: Any, out: Any, dtype: str) -> Problem:
    """The problem of activations, floats or int8, and an int4 weight."""
    left = _example(a, "a", _named(dtype)[0])
    rows = left[np.newaxis, :] if left.ndim == 1 else left.reshape(-1, left.shape[-1])
    if rows.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {left.shape} by {b.shape}: a has {rows.shape[1]} columns")
    names = [numpy_arrays.name_of(x) for x in (left.dtype, left.dtype if out is None else out.dtype)]
    fused = ""
    if names[0] == "s8":  # the product that `linear` computes
        from portmm.spec.dequantization import Dequantization

        names[1], fused = "f32" if out is None else names[1], Dequantization().text
    layout = numpy_arrays.canonical(rows, rows.dtype).layout
    deterministic = config.current().deterministic
    word, shape = f"{names[0]}-u4-{names[1]}", (rows.shape[0], b.shape[1], rows.shape[1])
    return Problem(*shape, word, a=layout, b="codes", family=b.family, deterministic=deterministic, fused=fused)


def _types(a: Any, b: Any, out: Any, dtype: str) -> numpy_arrays.DTypes:
    """The types that are computed in: those of the arrays, or the named ones.

    A shape next to an array has the array's type, unless `dtype` names three.
    """
    named = _named(dtype)
    owned = [None if _is_shape(x) else x.owner.dtype if hasattr(x, "family") else np.asarray(x).dtype for x in (a, b)]
    if named[0] == named[1] and any(owned):
        known = next(x for x in owned if x is not None)
        named = (known, known, None)
    left, right = (x or y for x, y in zip(owned, named, strict=False))
    return numpy_arrays.types_of(left, right, named[2] if out is None else out.dtype)


def _named(dtype: str) -> tuple[Any, Any, Any]:
    """NumPy's types for a spelling of portmm's, or the name of one of NumPy's."""
    short = BY_NUMPY[dtype].name if dtype in BY_NUMPY else dtype
    try:
        a, b, c = map(numpy_arrays.numpy_of, types(short))
    except ValueError as error:
        known = "f32, f64, bf16, f16, s8, or three as in u8-s8-s32"
        raise TypeError(f"dtype {dtype!r} is not supported; use one of {known}") from error
    return a, b, c if "-" in short else None


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def _example(x: Any, name: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An operand; for a shape, an array that takes no memory and must not be read."""
    if not _is_shape(x):
        return numpy_arrays.as_operand(x, name)
    if not x or min(x) < 0:
        raise ValueError(f"{name} has shape {x}; pass at least one dimension, none negative")
    return numpy_arrays.stand_in(x, dtype)


def _result(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], is_packed: bool) -> np.ndarray[Any, Any]:
    """The array that kernels write: `out`, or a dense array where they cannot write it."""
    dense = numpy_arrays.stand_in(shape, dtype)
    if out is None:
        return dense
    out = numpy_arrays.check_out(out, shape, dtype)
    if out.dtype != dtype or not out.flags.aligned or any(s % dtype.itemsize for s in out.strides):
        return dense
    return out if numpy_arrays.canonical(out, dtype).layout in (("row",) if is_packed else ("row", "col")) else dense
