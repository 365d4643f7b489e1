"""Products of quantised operands, with their scales.

Owns `linear`: what a caller says about scales, zero points and a bias, reduced
to the vectors that a kernel's last step reads (kernels/finish.py). Imports
`api`, `arrays`, `packed`, `problem`, `settings`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from portmm import api, arrays, settings
from portmm.dtype import spell
from portmm.errors import ScheduleError
from portmm.folded import Folded, fold, unfold
from portmm.packed import pack, packed_class, unpack
from portmm.problem import Problem, family
from portmm.quantized import Quantized
from portmm.run.host import runtime

PAD = 64
"""Vectors by columns reach to a multiple of this: kernels read whole vectors of them."""
LONGEST_GROUP = (2**31 - 1) // (128 * 15)
"""Rows of codes of four bits whose sum with int8 stays under 2**31."""
MOST_ROUTES = 1024
"""Kernels remembered before starting afresh."""

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
    out: Any = None,
) -> Any:
    """X . w + bias for quantised operands: values are scale * (code - zero).

    The sum over k is exact in integers, zero points included, modulo 2**32; then
    come three roundings in float32 and one to the result. With a weight of four bits
    sums are exact within a group, and the groups are summed in float32.

    Args:
        x: int8 or uint8 codes (..., k), or float32, float16 or bfloat16 values,
            which take no scale or zero point and are multiplied as they are, or `dynamic`.
        w: int8 codes (k, n), or those packed by `pack` for the dtype of `x`, or a weight
            of four bits from `quantize`, packed or not. What is not packed is packed in
            every call.
        bias: (n,), of the result's values; none by default.
        x_scale: a number, or one for each row: x's shape without k.
        x_zero: as `x_scale`, integers.
        w_scale: a number, or one for each column, (n,).
        w_zero: as `w_scale`, integers. Zero points of w cost a sum over x. A weight of
            four bits has its own zero points, and takes an `x` without any.
        out_scale: quantise the result again: round to nearest even, saturate.
        out_zero: zero point of the result.
        dynamic: quantise the float rows of `x` to int8 on the way, each by its largest
            magnitude; `w` is then to be packed for int8.
        dtype: float32, float16 or bfloat16; with `out_scale` int8 or uint8. By
            default float32, or the type of `x` with `out_scale`.
        out: where to put the result, an array of that type.

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
    rows = left if left.ndim == 2 else np.ascontiguousarray(left).reshape(-1, k)
    weight = _weight(w, np.dtype(np.int8) if dynamic else left.dtype, k)
    types, source = _types(left.dtype, dtype, requantised=out_scale is not None, dynamic=dynamic)
    if arrays.name_of(left.dtype) not in ("s8", "u8") and not (_is_default(x_scale, 1) and _is_default(x_zero, 0)):
        raise ValueError(f"x has dtype {left.dtype}: only integer codes have a scale and a zero point")
    if weight.dtype == "u4":
        _check_coded(types[0], weight, x_zero, w_zero)
    shape = (*left.shape[:-1], weight.shape[1])
    result = np.empty(shape, dtype or types[2]) if out is None else _checked_out(out, shape, types[2])
    vectors, post = _vectors(rows, weight.shape[1], bias, (x_scale, x_zero, w_scale, w_zero, out_scale, out_zero))
    if result.size:
        to = result if arrays.dense_at(result, types[2], left) else np.empty(shape, types[2])
        _run(np.ascontiguousarray(rows) if source else rows, weight, to, types, post, vectors, source)
        if to is not result:
            result[...] = to
    return result


def _is_default(x: Any, value: int) -> bool:
    return isinstance(x, (int, float)) and x == value


def _checked_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    into = arrays.check_out(out, shape, dtype)
    if into.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"out has dtype {into.dtype}; the result is {dtype}: say so with dtype=")
    return into


def _weight(w: Any, activations: np.dtype[Any], k: int) -> Any:
    weight = fold(w) if isinstance(w, Quantized) else w
    if not isinstance(weight, (Folded, packed_class())):
        weight = pack(np.asarray(w), activations=activations.newbyteorder("="))
    if len(weight.shape) != 2 or weight.shape[0] != k:
        raise ValueError(f"w has shape {weight.shape}; x has {k} columns, so w must have shape ({k}, n)")
    if weight.dtype not in ("s8", "u4"):
        raise TypeError(f"w has type {weight.dtype}; linear takes int8 codes or four bits, use matmul for floats")
    return weight


def _check_coded(activations: np.dtype[Any], weight: Folded, x_zero: Any, w_zero: Any) -> None:
    """What a weight of four bits cannot be multiplied by."""
    for name, zero in (("x_zero", x_zero), ("w_zero", w_zero)):
        if not _is_default(zero, 0):
            raise ValueError(f"{name} is {zero!r}: with a weight of four bits there is no zero point beside its own")
    if activations == np.uint8:
        raise TypeError("x has dtype uint8; a weight of four bits is multiplied by int8 or floats")
    group = family(weight.family).group or weight.shape[0]
    if activations == np.int8 and group > LONGEST_GROUP:
        raise ValueError(
            f"w has groups of {group} rows; sums in int32 are exact up to {LONGEST_GROUP}: quantize in smaller groups"
        )


@cache
def _types(x: np.dtype[Any], dtype: Any, *, requantised: bool, dynamic: bool) -> tuple[arrays.DTypes, str]:
    """The types of the product, and that which rows of A are quantised from."""
    source = arrays.name_of(x) if dynamic else ""
    if dynamic and source not in ("f32", "f16", "bf16"):
        raise TypeError(f"x has dtype {x}: only float32, float16 and bfloat16 rows are quantised")
    factor = np.dtype(np.int8) if dynamic else x
    wanted = np.dtype(dtype or (factor if requantised else np.float32)).newbyteorder("=")
    allowed = ("s8", "u8") if requantised else ("f32", "f16", "bf16")
    if arrays.name_of(wanted) not in allowed:
        raise TypeError(f"dtype is {wanted}; {'with' if requantised else 'without'} out_scale use one of {allowed}")
    left, right, _ = arrays.types_of(factor, np.dtype(np.int8))
    return (left, right, wanted), source


def _spread(name: str, given: Any, count: int, dtype: Any, pad: int = 1) -> Array:
    """A number, or one for each row or column, as a vector; padded with zeros."""
    values = np.asarray(given)
    if values.size not in (1, count):
        raise ValueError(f"{name} has shape {values.shape}; give a number, or {count} of them")
    if values.shape == (count,) and values.dtype == dtype and count % pad == 0 and values.flags.c_contiguous:
        return values
    whole = np.zeros(-(-count // pad) * pad, dtype)
    whole[:count] = values.ravel()
    return whole


def _scales(name: str, given: Any, count: int, pad: int = 1) -> Array:
    found = _spread(name, given, count, np.float32, pad)
    # NaN is neither.
    if count and not (found.min() >= 0 and found.max() < np.inf):
        raise ValueError(f"{name} must be finite and not negative; it goes from {found.min()} to {found.max()}")
    return found


def _zeros(name: str, given: Any, count: int, pad: int = 1) -> Array | None:
    """Zero points; None where there are none."""
    if _is_default(given, 0):
        return None
    values = np.asarray(given)
    if values.dtype.kind not in "iu" or (values.size and (values.min() < -(1 << 15) or values.max() >= 1 << 15)):
        raise ValueError(f"{name} must be integers that fit 16 bits; got {values.dtype}")
    return _spread(name, values, count, np.int32, pad)


def _vectors(rows: Array, n: int, bias: Any, given: tuple[Any, ...]) -> tuple[tuple[Array | None, ...], str]:
    """The six vectors of a kernel's last step, and which of its steps there are."""
    x_scale, x_zero, w_scale, w_zero, out_scale, out_zero = given
    m, k = rows.shape
    a_scale, b_scale = _scales("x_scale", x_scale, m), _scales("w_scale", w_scale, n, PAD)
    a_zero, b_zero = _zeros("x_zero", x_zero, m), _zeros("w_zero", w_zero, n, PAD)
    shift = None
    if bias is not None or out_scale is not None:
        shift = _spread("bias", 0 if bias is None else bias, n, np.float32, PAD)
    if out_scale is not None:
        step = _scales("out_scale", out_scale, 1)[0]
        if not step:
            raise ValueError("out_scale is 0; it must be positive")
        a_scale = a_scale / step
        shift = (shift.astype(np.float64) / step + out_zero).astype(np.float32)  # type: ignore[union-attr]
    a_sum = None
    if b_zero is not None:
        a_sum = -(rows.sum(axis=1, dtype=np.int64) - k * (0 if a_zero is None else a_zero.astype(np.int64)))
        a_sum = a_sum.astype(np.int32)
    words = ("scale", "azero" * (a_zero is not None), "bzero" * (b_zero is not None), "bias" * (shift is not None))
    return (a_scale, b_scale, shift, None if a_zero is None else -a_zero, a_sum, b_zero), "+".join(filter(None, words))


def _run(  # noqa: PLR0917 - one place calls it
    rows: Array,
    weight: Any,
    out: Array,
    types: arrays.DTypes,
    post: str,
    vectors: tuple[Array | None, ...],
    source: str,
) -> None:
    left = arrays.canonical(rows, rows.dtype.newbyteorder("=") if source else types[0])
    m, k = rows.shape
    n = weight.shape[1]
    if k == 0:
        out[...] = _last(np.zeros(out.shape), vectors, out.dtype)
        return
    route, weight = _route((m, n, k), left.layout, weight, types, post, source)
    addresses = [0 if x is None else int(x.__array_interface__["data"][0]) for x in (weight.owner, out, *vectors)]
    runtime().execute(
        route, m, n, k, 1, left.address, left.row, left.col, 0,
        addresses[0], weight.b_k, weight.b_n, weight.b_batch, addresses[1], n, 1, 0, None, *addresses[2:],
    )  # fmt: skip


_routes: dict[Any, Any] = {}


def _route(  # noqa: PLR0917 - one place calls it
    size: tuple[int, int, int], layout: str, weight: Any, types: arrays.DTypes, post: str, source: str
) -> tuple[Any, Any]:
    """The kernel for a product, remembered, and the weight as it reads it."""
    current = settings.current()
    key = (size, layout, weight.family, types, post, source, current, settings.limit())
    found = _routes.get(key)
    if found is not None:
        return found, weight
    api.begin()
    word = spell(arrays.name_of(types[0]), weight.dtype, arrays.name_of(types[2]))
    coded = weight.dtype == "u4"
    p = Problem(
        *size, word, a=layout, b="codes" if coded else "packed", family=weight.family,
        deterministic=current.deterministic, post=post, source=source,
    )  # fmt: skip
    if p.acc == "s32" and not coded and not family(weight.family).sums:
        raise ScheduleError(f"w is packed as {weight.family}, for activations of another type: pack it for {types[0]}")
    try:
        found = api.route(p)
    except ScheduleError:  # packed on another machine
        again = fold(unfold(weight)) if coded else pack(unpack(weight), activations=types[0])
        return api.route(replace(p, family=again.family)), again
    if len(_routes) >= MOST_ROUTES:
        _routes.clear()
    _routes[key] = found
    return found, weight


def _last(sums: Array, vectors: tuple[Array | None, ...], dtype: np.dtype[Any]) -> Array:
    """The last step for sums over nothing."""
    shift = vectors[2]
    values = sums if shift is None else sums + shift[: sums.shape[-1]]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = np.clip(np.rint(values), info.min, info.max)
    return values.astype(dtype)
