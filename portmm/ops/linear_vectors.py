"""The vectors that the epilogue of a quantized product reads.

Owns the conversion of scales, zero points and a bias to vectors along rows and columns (`spec.dequantization`), and
the epilogue by NumPy for scales that are too large for a kernel.
"""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from portmm.arrays import pages
from portmm.runtime.cpu import types as runtime_types
from portmm.util.array_subclasses import refuse_class

LARGEST = float(np.finfo(np.float32).max)
"""The largest scale that is a number."""
SAFE = 2.0**96
"""Kernels multiply a sum by the column's scale first: below this one no product with an integer of 32 bits overflows
float32. None underflows, either: it is a multiple of the scale. The row's scale then decides whether a result does."""

Array = np.ndarray[Any, Any]


def is_default(x: Any, value: int) -> bool:
    """Whether a number is the default one."""
    kind = type(x)
    return (kind is int or kind is float or isinstance(x, (int, float, np.number))) and x == value


def _spread(name: str, value: Any, count: int, dtype: Any) -> Array:
    """A number, or one for each row or column, as a vector."""
    refuse_class(value, name)
    values = np.asarray(value)
    if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {values.dtype}; pass numbers")
    if values.size not in (1, count):
        raise ValueError(f"{name} has shape {values.shape}; pass a number, or {count} of them")
    if values.shape == (count,) and values.dtype == dtype:
        flags = values.flags
        if flags.c_contiguous and flags.aligned:
            return values
    vector = np.empty(count, dtype)
    vector[:] = values.ravel()
    return vector


def _scales(name: str, value: Any, count: int) -> tuple[Array, float]:
    """A vector of scales, and the largest."""
    if is_default(value, 1):
        return pages.ones(count), 1.0
    if type(value) is float and 0 <= value <= LARGEST:
        equal = np.empty(count, np.float32)
        equal.fill(value)
        return equal, value
    scales = _spread(name, value, count, np.float32)
    most = runtime_types().largest_scale(scales)
    if most < 0:
        raise ValueError(f"{name} must be finite and not negative; it ranges from {scales.min()} to {scales.max()}")
    return scales, most


def _zeros(name: str, value: Any, count: int) -> Array:
    refuse_class(value, name)
    values = np.asarray(value)
    if values.dtype.kind not in "iu" or (values.size and (values.min() < -(1 << 15) or values.max() >= 1 << 15)):
        raise ValueError(f"{name} must be integers that fit 16 bits; got {values.dtype}")
    return _spread(name, values, count, np.int32)


def zero_point(value: Any) -> int:
    """The zero point of an integer result."""
    zero = index(value)
    if not -(1 << 15) <= zero < 1 << 15:
        raise ValueError(f"out_zero is {zero}; pass an integer that fits 16 bits")
    return zero


def _step(out_scale: Any) -> np.float32:
    """The scale of an integer result."""
    step: np.float32 = _scales("out_scale", out_scale, 1)[0][0]
    if not step:
        raise ValueError("out_scale is 0; it must be positive")
    return step


def vectors_of(
    left: Array, size: tuple[int, int], bias: Any, scaling: tuple[Any, ...], unit: float, *, dynamic: bool
) -> tuple[Array, ...] | None:
    """The vectors that a `Dequantization` names; None if float32 may not hold what it computes with them.

    Args:
        left: x.
        size: (m, n).
        bias: as for `linear`.
        scaling: x_scale, x_zero, w_scale, w_zero, out_scale and out_zero.
        unit: the most that an integer adds to sums: 1, except for weights with scales of their own.
        dynamic: the kernel quantizes rows, and so has their scales.
    """
    x_scale, x_zero, w_scale, w_zero, out_scale, out_zero = scaling
    m, n = size
    (a_scale, _), (b_scale, most) = _scales("x_scale", x_scale, m), _scales("w_scale", w_scale, n)
    a_zero = None if is_default(x_zero, 0) else _zeros("x_zero", x_zero, m)
    b_zero = None if is_default(w_zero, 0) else _zeros("w_zero", w_zero, n)
    shift, fits = None, True
    if bias is not None or out_scale is not None:
        shift = _spread("bias", 0 if bias is None else bias, n, np.float32)
    if out_scale is not None:
        step = _step(out_scale)
        # Dynamic rows have scales from the quantization.
        with np.errstate(over="ignore"):
            a_scale, b_scale = (a_scale, b_scale / step) if dynamic else (a_scale / step, b_scale)
            shift = (shift.astype(np.float64) / step + zero_point(out_zero)).astype(np.float32)  # type: ignore[union-attr]
        divided = runtime_types().largest_scale(b_scale if dynamic else a_scale)
        most = divided if dynamic else most
        fits = divided >= 0 and bool(np.isfinite(shift).all())
    elif not is_default(out_zero, 0):
        raise ValueError(f"out_zero is {out_zero!r}, but there is no out_scale: the result has no zero point")
    if most * unit > SAFE or not fits:
        return None
    vectors: tuple[Array, ...] = (b_scale,) if dynamic else (a_scale, b_scale)
    vectors += () if shift is None else (shift,)
    vectors += () if a_zero is None else (-a_zero,)
    if b_zero is None:
        return vectors
    zeros = 0 if a_zero is None else a_zero.astype(np.int64)
    sums = left.sum(axis=-1, dtype=np.int64).ravel() - left.shape[-1] * zeros
    return (*vectors, (-sums).astype(np.int32), b_zero)


def scaled_in_float64(
    sums: Array, rows: Array | None, bias: Any, scaling: tuple[Any, ...], dtype: np.dtype[Any]
) -> Array:
    """The epilogue of sums that are free of zero points, where `vectors_of` returns None.

    Args:
        sums: (m, n).
        rows: scales of rows, in the place of x_scale, or None.
        bias: as for `linear`.
        scaling: as for `vectors_of`.
        dtype: of the result.
    """
    x_scale, _, w_scale, _, out_scale, out_zero = scaling
    m, n = sums.shape
    by_row = _scales("x_scale", x_scale, m)[0] if rows is None else rows
    with np.errstate(all="ignore"):
        values = sums.astype(np.float64) * by_row[:, None] * _scales("w_scale", w_scale, n)[0].astype(np.float64)
        if bias is not None:
            values += _spread("bias", bias, n, np.float32)
        if out_scale is not None:
            values = values / np.float64(_step(out_scale)) + zero_point(out_zero)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            values = np.clip(np.rint(values), info.min, info.max)
        return values.astype(dtype)
