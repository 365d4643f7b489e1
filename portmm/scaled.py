"""Products of quantised operands, with their scales.

Owns `linear`: what a caller says about scales, zero points and a bias, reduced
to the vectors that a kernel's last step reads (kernels/finish.py). Imports
`api`, `arrays`, `packed`, `problem`, `settings`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from portmm import api, arrays, settings
from portmm.errors import ScheduleError
from portmm.packed import pack, packed_class, unpack
from portmm.problem import Problem, family
from portmm.run.host import runtime

PAD = 64
"""Vectors by columns reach to a multiple of this: kernels read whole vectors of them."""

Array = np.ndarray[Any, Any]


def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    x_scale: Any = 1.0,
    x_zero: Any = 0,
    w_scale: Any = 1.0,
    w_zero: Any = 0,
    out_scale: Any = None,
    out_zero: int = 0,
    dynamic: bool = False,
    dtype: Any = None,
) -> Any:
    """X . w + bias for quantised operands: values are scale * (code - zero).

    The sum over k is exact in integers, zero points included, modulo 2**32; then
    come three roundings in float32 and one to the result.

    Args:
        x: int8 or uint8 codes (..., k), or float32, float16 or bfloat16 values,
            which are multiplied as they are and take no scale or zero point.
        w: int8 codes (k, n), or those packed by `pack` for the dtype of `x`.
            They are packed in every call otherwise.
        bias: (n,), of the result's values; none by default.
        x_scale: a number, or one for each row: x's shape without k.
        x_zero: as `x_scale`, integers.
        w_scale: a number, or one for each column, (n,).
        w_zero: as `w_scale`, integers. Zero points of w cost a sum over x.
        out_scale: quantise the result again: round to nearest even, saturate.
        out_zero: zero point of the result.
        dynamic: quantise the float rows of `x` to int8 on the way, each by its largest
            magnitude; `w` is then to be packed for int8.
        dtype: float32, float16 or bfloat16; with `out_scale` int8 or uint8. By
            default float32, or the type of `x` with `out_scale`.

    Returns:
        The result, (..., n), of type `dtype`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes do not fit, or a scale is not a positive finite number.
        ScheduleError: `w` was packed for other activations.
        NoCompilerError: there is no compiler.
    """
    left = arrays.as_operand(x, "x")
    k = left.shape[-1]
    rows = np.ascontiguousarray(left).reshape(-1, k) if left.ndim != 2 else left
    if rows.dtype not in (np.int8, np.uint8) and (np.any(x_zero) or np.any(np.asarray(x_scale) != 1)):
        raise ValueError(f"x has dtype {left.dtype}: only integer codes have a scale and a zero point")
    source = arrays.name_of(left.dtype) if dynamic else ""
    if dynamic and source not in ("f32", "f16", "bf16"):
        raise TypeError(f"x has dtype {left.dtype}: only float32, float16 and bfloat16 rows are quantised")
    factor = np.dtype(np.int8) if dynamic else left.dtype
    weight = _weight(w, factor, k)
    n = weight.shape[1]
    types = _types(factor, weight.owner.dtype, dtype, requantised=out_scale is not None)
    out = np.empty((rows.shape[0], n), types[2])
    vectors, post = _vectors(rows, n, bias, (x_scale, x_zero, w_scale, w_zero, out_scale, out_zero))
    if out.size:
        _run(np.ascontiguousarray(rows) if dynamic else rows, weight, out, types, post, vectors, source)
    return out.reshape(*left.shape[:-1], n)


def _weight(w: Any, activations: np.dtype[Any], k: int) -> Any:
    weight = w if isinstance(w, packed_class()) else pack(np.asarray(w), activations=activations)
    if len(weight.shape) != 2 or weight.shape[0] != k:
        raise ValueError(f"w has shape {weight.shape}; x has {k} columns, so w must have shape ({k}, n)")
    if weight.dtype != "s8":
        raise TypeError(f"w has type {weight.dtype}; linear takes int8 codes, use matmul for floats")
    return weight


def _types(x: np.dtype[Any], w: np.dtype[Any], dtype: Any, *, requantised: bool) -> arrays.DTypes:
    usual = x if requantised else np.dtype(np.float32)
    wanted = usual if dtype is None else np.dtype(dtype)
    allowed = ("s8", "u8") if requantised else ("f32", "f16", "bf16")
    if arrays.name_of(wanted) not in allowed:
        raise TypeError(f"dtype is {wanted}; {'with' if requantised else 'without'} out_scale use one of {allowed}")
    left, right, _ = arrays.types_of(x, w)
    return left, right, wanted


def _spread(name: str, given: Any, count: int, dtype: Any, pad: int = 1) -> Array:
    """A number, or one for each row or column, as a vector; padded with zeros."""
    values = np.asarray(given)
    if values.size not in (1, count):
        raise ValueError(f"{name} has shape {values.shape}; give a number, or {count} of them")
    whole = np.zeros(-(-count // pad) * pad, dtype)
    whole[:count] = values.ravel()
    return whole


def _scales(name: str, given: Any, count: int, pad: int = 1) -> Array:
    found = _spread(name, given, count, np.float32, pad)
    if not np.isfinite(found).all() or (found < 0).any():
        raise ValueError(f"{name} must be finite and not negative; it has {found[~(found >= 0)][:1] or found.max()}")
    return found


def _zeros(name: str, given: Any, count: int, pad: int = 1) -> Array:
    values = np.asarray(given)
    if values.dtype.kind not in "iu" or (values.size and (values.min() < -(1 << 15) or values.max() >= 1 << 15)):
        raise ValueError(f"{name} must be integers that fit 16 bits; got {values.dtype}")
    return _spread(name, values, count, np.int32, pad)


def _vectors(rows: Array, n: int, bias: Any, given: tuple[Any, ...]) -> tuple[tuple[Array, ...], str]:
    """The six vectors of a kernel's last step, and which of its steps there are."""
    x_scale, x_zero, w_scale, w_zero, out_scale, out_zero = given
    m, k = rows.shape
    a_scale, b_scale = _scales("x_scale", x_scale, m), _scales("w_scale", w_scale, n, PAD)
    shift = _spread("bias", 0 if bias is None else bias, n, np.float32, PAD)
    a_zero, b_zero = _zeros("x_zero", x_zero, m), _zeros("w_zero", w_zero, n, PAD)
    if out_scale is not None:
        step = _scales("out_scale", out_scale, 1)[0]
        if not step:
            raise ValueError("out_scale is 0; it must be positive")
        a_scale = a_scale / step
        shift = (shift.astype(np.float64) / step + out_zero).astype(np.float32)
    words = ["scale"]
    words += ["azero"] if a_zero.any() else []
    words += ["bzero"] if b_zero.any() else []
    words += ["bias"] if shift.any() else []
    a_sum = np.zeros(m, np.int32)
    if "bzero" in words:
        a_sum = -(rows.sum(axis=1, dtype=np.int64) - k * a_zero.astype(np.int64)).astype(np.int32)
    return (a_scale, b_scale, shift, -a_zero, a_sum, b_zero), "+".join(words)


def _run(  # noqa: PLR0917 - one place calls it
    rows: Array, weight: Any, out: Array, types: arrays.DTypes, post: str, vectors: tuple[Array, ...], source: str
) -> None:
    left = arrays.canonical(rows, rows.dtype.newbyteorder("=") if source else types[0])
    m, n = out.shape
    word = arrays.word(types)
    deterministic = settings.current().deterministic
    p = Problem(
        m,
        n,
        rows.shape[1],
        word,
        a=left.layout,
        b="packed",
        family=weight.family,
        deterministic=deterministic,
        post=post,
        source=source,
    )
    if p.acc == "s32" and not family(weight.family).sums:
        raise ScheduleError(f"w is packed as {weight.family}, for activations of another type: pack it for {types[0]}")
    if p.k == 0:
        out[...] = _last(np.zeros((m, n)), vectors, out.dtype)
        return
    api.begin()
    try:
        route = api.route(p)
    except ScheduleError:  # packed on another machine
        weight = pack(unpack(weight), activations=types[0])
        p = replace(p, family=weight.family)
        route = api.route(p)
    addresses = [int(x.__array_interface__["data"][0]) for x in (weight.owner, out, *vectors)]
    runtime().execute(
        route, m, n, p.k, 1, left.address, left.row, left.col, 0,
        addresses[0], weight.b_k, weight.b_n, weight.b_batch, addresses[1], n, 1, 0, None, *addresses[2:],
    )  # fmt: skip


def _last(sums: Array, vectors: tuple[Array, ...], dtype: np.dtype[Any]) -> Array:
    """The last step for sums over nothing."""
    values = sums + vectors[2][: sums.shape[1]]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = np.clip(np.rint(values), info.min, info.max)
    return values.astype(dtype)
