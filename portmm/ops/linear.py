"""Products of quantised operands, with their scales.

Owns `linear`: what a caller says about scales, zero points and a bias, reduced
to the vectors that a kernel's last step reads (kernels/cpu/epilogue.py). Imports
`ops.matmul`, `arrays.numpy_arrays`, `ops.prepack`, `spec.problem`, `ops.linear_vectors`, `dispatch.config`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import interop, numpy_arrays, numpy_fallback
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError
from portmm.ops import matmul as matmul_op
from portmm.ops.int4_panels import Folded, fold, unfold
from portmm.ops.linear_vectors import is_default, last_step, vectors_of
from portmm.ops.prepack import current, is_packed, pack, unpack
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import spell
from portmm.spec.problem import Problem, family
from portmm.spec.row_classes import row_class
from portmm.util.array_subclasses import refuse_class
from portmm.util.memo import Memory
from portmm.weights.quantized import Quantized, dequantize

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_GROUP = (2**31 - 1) // (128 * 15)
"""Rows of codes of four bits whose sum with int8 stays under 2**31."""
MOST_CALLS = 1024
"""Kinds of calls remembered before starting afresh."""

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
    epilogue: Callable[..., Any] | None = None,
) -> Any:
    """X . w + bias for quantised operands: values are scale * (code - zero).

    The sum over k is exact in integers, zero points included, modulo 2**32; then
    come three roundings in float32 and one to the result. With a weight of four bits
    sums are exact within a group, and the groups are summed in float32.

    Args:
        x: int8 or uint8 codes (..., k), or float32, float16 or bfloat16 values,
            which take no scale or zero point and are multiplied as they are, or `dynamic`. Arrays on a
            device are codes, or dynamic, and have no zero points; w, scales and a bias lie there too.
        w: int8 codes (k, n), or those packed by `pack` for the dtype of `x`, or a weight
            of four bits from `quantize`, packed or not. What is not packed is packed in
            every call.
        bias: (n,), of the result's values; none by default.
        x_scale: a number, or one for each row: x's shape without k.
        x_zero: as `x_scale`, integers.
        w_scale: a number, or one for each column, (n,).
        w_zero: as `w_scale`, integers, not beside `dynamic`. Zero points of w cost a sum
            over x. A weight of four bits has its own, and takes an `x` without any.
        out_scale: quantise the result again: round to nearest even, saturate.
        out_zero: zero point of the result.
        dynamic: quantise the float rows of `x` to int8 on the way, each by its largest
            magnitude: codes are x * (127 / max |x|), in float32, rounded half to even, and
            their scale is max |x| / 127. A row with a NaN or an infinity gives none but
            such. `w` is then to be packed for int8.
        dtype: float32, float16 or bfloat16; with `out_scale` int8 or uint8. By
            default float32, or the type of `x` with `out_scale`.
        out: where to put the result, an array of that type.
        epilogue: what becomes of the scaled sums, as in `matmul`, before they are rounded.
            Not beside `out_scale`: `quantize_rows` and `cast` do that.

    Returns:
        The result, (..., n), of type `dtype`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes do not fit, a scale is negative or not finite, or a zero point
            does not fit 16 bits.
        ScheduleError: `w` was packed for other activations.
    """
    if (taker := numpy_arrays.taker(x, w, bias, x_scale, w_scale)) is not None:
        more = {"x_scale": x_scale, "x_zero": x_zero, "w_scale": w_scale, "w_zero": w_zero, "out_scale": out_scale}
        more |= {"out_zero": out_zero, "dynamic": dynamic, "dtype": dtype, "out": out, "epilogue": epilogue}
        return taker.call_(linear, (x, w, bias), more)
    if interop.on_device(x) or interop.on_device(w):
        from portmm.ops.linear_gpu import linear as there

        options = {"x_scale": x_scale, "x_zero": x_zero, "w_scale": w_scale, "w_zero": w_zero}
        options |= {"out_scale": out_scale, "out_zero": out_zero, "dynamic": dynamic}
        return there(x, w, bias, options, dtype, out, epilogue)
    left = numpy_arrays.as_operand(x, "x", matrix=False)
    weight = (
        current(w)
        if isinstance(w, Folded) or is_packed(w)
        else _weight(w, np.dtype(np.int8) if dynamic else left.dtype)
    )
    given = (not is_default(x_zero, 0), not is_default(w_zero, 0), not is_default(x_scale, 1))
    asked = _Asked(None if dtype is None else np.dtype(dtype), dynamic, *given, bias is not None, out_scale is not None)
    m = prod(left.shape[:-1])
    key = (row_class(m)[1], *_laid(left), left.dtype, left.flags.aligned, weight.family, weight.shape, asked)
    said = (x_scale, x_zero, w_scale, w_zero, out_scale, out_zero)
    if epilogue is not None:
        return _surrounded(key, left, weight, asked, out, epilogue, bias, said)
    call, shape = _remembered(key, m, left, weight, asked), (*left.shape[:-1], weight.shape[1])
    vectors = vectors_of(left, (m, shape[-1]), call.source, bias, said)
    if out is None:
        result = np.empty(shape, call.dtype)
        to = result
    else:
        result = _checked_out(out, shape, call.dtype)
        free = numpy_arrays.dense_at(result, call.dtype, left) and not any(
            np.may_share_memory(x, result) for x in vectors
        )
        to = result if free else np.empty(shape, call.dtype)
    if result.size:
        _run(call, m, left, weight, to, vectors)
        if to is not result:
            result[...] = to
    return result if out is not None or dtype is None else result.astype(dtype, copy=False)


def _surrounded(  # noqa: PLR0917 - one place calls it
    key: tuple[Any, ...],
    left: Array,
    weight: Any,
    asked: _Asked,
    out: Any,
    epilogue: Callable[..., Any],
    bias: Any,
    given: tuple[Any, ...],
) -> Any:
    """The product, and what an epilogue makes of it: in one kernel, or over its rows."""
    from portmm.ops.fused_matmul import NAMES, fit
    from portmm.ops.rowwise import over_rows
    from portmm.spec.epilogue import acc
    from portmm.trace.bind import Around
    from portmm.trace.tracer import Indices

    if asked.again:
        raise ValueError("out_scale is given beside an epilogue; let that scale and cast the result")
    around = Around.of(epilogue)
    values, rank, m = (acc(), Indices(NAMES)), 2 if left.ndim == 2 else 3, prod(left.shape[:-1])

    def made(traced: Any) -> _Call | None:
        return _fused(left, weight, asked, traced)

    call: _Call | None = around.ready(("linear", rank, key), made, values, rank)
    if call is not None and not call.rows[0] <= m <= call.rows[1]:
        call = around.ready(("linear", rank, m, key), made, values, rank)
    if call is None or call.bound is None:
        wide = np.dtype(np.float32)
        usual = wide if asked.dtype is None else asked.dtype
        names = ("x_scale", "x_zero", "w_scale", "w_zero", "out_scale", "out_zero")
        options = dict(zip(names, given, strict=True))
        whole = linear(left, weight, bias, **options, dynamic=asked.dynamic, dtype=wide)
        found, several = over_rows(epilogue, (whole,), NAMES, dtype=usual)
        return fit(list(found), out, several=several)
    vectors = vectors_of(left, (m, weight.shape[1]), call.source, bias, given)
    results = [np.empty((m, width), t) for width, t in call.results]
    table = call.bound.fill(around.found, [], results[1:])
    _run(call, m, left, weight, results[0], vectors, table[:2])
    return fit(results, out, several=call.several)


def _fused(left: Array, weight: Any, asked: _Asked, traced: Any) -> _Call | None:
    """The kernel of a product and its epilogue; None where it takes two."""
    from portmm.trace.bind import Bound, dense, settle

    if left.ndim != 2 or 0 in (*left.shape, *weight.shape):
        return None
    types, _ = _types(left.dtype, asked.dtype, again=False, dynamic=asked.dynamic)
    step = settle(traced, (), types[2], ends=True)
    if step.fused.reductions or step.fused.column_reductions or not step.wide or step.types[0] == np.int32:
        return None
    try:
        call = _prepared(left, weight, asked, step)
    except ScheduleError:
        return None
    if call.plain:
        return None
    (m, _), n = left.shape, weight.shape[1]
    size = (m, n, 1)
    bound = Bound(traced, size, [], [dense(x, size) for x in step.axes[1:]])
    widths = [n if "n" in axes else 1 for axes in step.axes]
    served = call.rows if call.rows == (m, m) else bound.served(call.rows)
    results = tuple(zip(widths, step.types, strict=True))
    return replace(call, bound=bound, rows=served, results=results, several=traced.several)


class _Asked(NamedTuple):
    """What a caller wants, so far as kernels depend on it: which vectors there are, and types."""

    dtype: np.dtype[Any] | None
    dynamic: bool
    x_zero: bool
    w_zero: bool
    x_scale: bool
    bias: bool
    again: bool

    @property
    def post(self) -> str:
        """The steps of a kernel's end."""
        shift = self.bias or self.again
        words = ("scale", "azero" * self.x_zero, "bzero" * self.w_zero, "bias" * shift)
        return "+".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class _Call:
    """How operands like these are multiplied.

    Attributes:
        rows: the least and the largest number of rows of x that it serves.
        dtype: of the result, in native order.
        source: the type that rows are quantised from, or "".
        route: the kernel; None if there is nothing to sum.
        strides: of x, by rows and by columns, in elements; None if it must be copied first.
        weight: as the kernel reads it, if it had to be packed again.
        bound: the operands of an epilogue.
        results: columns and types of its results.
        several: it gives a tuple.
        plain: there is no kernel, and NumPy computes.
    """

    rows: tuple[int, int]
    dtype: np.dtype[Any]
    source: str
    route: Any
    strides: tuple[int, int] | None
    weight: Any
    bound: Any = None
    results: tuple[tuple[int, np.dtype[Any]], ...] = ()
    several: bool = False
    plain: bool = False


def _checked_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    into = numpy_arrays.check_out(out, shape, dtype)
    if into.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"out has dtype {into.dtype}; the result is {dtype}: say so with dtype=")
    return into


def _weight(w: Any, activations: np.dtype[Any]) -> Any:
    """A weight that is not packed yet, packed."""
    if isinstance(w, Quantized):
        return fold(w)
    refuse_class(w, "w")
    codes = np.asarray(w)
    if codes.ndim != 2:
        raise ValueError(f"w has shape {codes.shape}; it must be a matrix")
    return pack(codes, activations=activations.newbyteorder("="))


def _laid(x: Array) -> tuple[Any, ...]:
    """Columns and strides of x, whatever its number of rows where that is possible."""
    if x.ndim == 2:
        return x.shape[1], x.strides
    return (x.shape[-1], None) if x.flags.c_contiguous else (x.shape, x.strides)


def _remembered(key: tuple[Any, ...], m: int, left: Array, weight: Any, asked: _Asked) -> _Call:
    """How operands like these are multiplied, worked out once: for the class of M, where that has one kernel."""
    key = (*key, config.current(), config.limit())
    found: _Call | None = _calls.get(key) or _calls.get((m, key))
    if found is None:
        found = _prepared(left, weight, asked)
        if found.weight is None and not found.plain:
            _calls.keep(key if found.rows == row_class(m) else (m, key), found)
    return found


_calls = Memory(MOST_CALLS)


def _prepared(left: Array, weight: Any, asked: _Asked, step: Any = None) -> _Call:
    types, source = _types(left.dtype, asked.dtype, again=asked.again, dynamic=asked.dynamic)
    _check(left, weight, types, asked)
    k, n = weight.shape
    m = prod(left.shape[:-1])
    if k == 0 or m == 0 or n == 0:
        return _Call(row_class(m), types[2], source, None, None, None)
    rows = left if left.ndim == 2 else left.reshape(m, k)
    if source and rows.strides[1] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    operand = numpy_arrays.canonical(rows, left.dtype.newbyteorder("="))
    in_place = operand.address == left.__array_interface__["data"][0]
    layout, strides = (operand.layout, (operand.row, operand.col)) if in_place else ("row", None)
    deterministic = config.current().deterministic
    held = family(weight.family).dtype
    word = spell(numpy_arrays.name_of(types[0]), held, numpy_arrays.name_of(step.types[0] if step else types[2]))
    p = Problem(
        m, n, k, word, a="row" if source else layout, b="codes" if held == "u4" else "packed",
        family=weight.family, deterministic=deterministic, post=asked.post, source=source,
        fused=step.text if step else "",
    )  # fmt: skip
    if p.acc == "s32" and p.b == "packed" and not family(weight.family).sums:
        raise ScheduleError(f"w is packed as {weight.family}, for activations of another type: pack it for {types[0]}")
    matmul_op.begin()
    again = None
    try:
        try:
            route, shared = matmul_op.routed(p)
        except ScheduleError:  # packed on another machine
            again = fold(unfold(weight)) if p.b == "codes" else pack(unpack(weight), activations=types[0])
            route, shared = matmul_op.routed(replace(p, family=again.family))
    except BuildError as error:
        numpy_fallback.fall_back(error)
        return _Call((m, m), types[2], source, None, None, None, plain=True)
    return _Call(row_class(m) if shared else (m, m), types[2], source, route, strides, again)


def _check(left: Array, weight: Any, types: numpy_arrays.DTypes, asked: _Asked) -> None:
    """That operands fit each other, and what was given of scales and zero points fits them."""
    k = left.shape[-1]
    if len(weight.shape) != 2 or weight.shape[0] != k:
        raise ValueError(f"w has shape {weight.shape}; x has {k} columns, so w must have shape ({k}, n)")
    held = family(weight.family).dtype
    if held not in ("s8", "u4"):
        raise TypeError(f"w has dtype {weight.dtype}; linear takes int8 codes or four bits, use matmul for floats")
    if numpy_arrays.name_of(left.dtype) not in ("s8", "u8") and (asked.x_scale or asked.x_zero):
        raise ValueError(f"x has dtype {left.dtype}: only integer codes have a scale and a zero point")
    if asked.dynamic and asked.w_zero:
        raise ValueError("w_zero is given: with dynamic rows the weight has none; quantise x first, and give x_scale")
    if held == "s8":
        return
    if asked.x_zero or asked.w_zero:
        raise ValueError("x_zero or w_zero is given: with a weight of four bits there is no zero point beside its own")
    if types[0] == np.uint8:
        raise TypeError("x has dtype uint8; a weight of four bits is multiplied by int8 or floats")
    group = family(weight.family).group or k
    if types[0] == np.int8 and group > LONGEST_GROUP:
        raise ValueError(
            f"w has groups of {group} rows; sums in int32 are exact up to {LONGEST_GROUP}: quantize in smaller groups"
        )


@cache
def _types(
    x: np.dtype[Any], dtype: np.dtype[Any] | None, *, again: bool, dynamic: bool
) -> tuple[numpy_arrays.DTypes, str]:
    """The types of the product, and that which rows of A are quantised from."""
    source = numpy_arrays.name_of(x) if dynamic else ""
    if dynamic and source not in ("f32", "f16", "bf16"):
        raise TypeError(f"x has dtype {x}: only float32, float16 and bfloat16 rows are quantised")
    factor = np.dtype(np.int8) if dynamic else x
    if numpy_arrays.name_of(factor) not in ("s8", "u8", "f32", "f16", "bf16"):
        raise TypeError(f"x has dtype {x}; linear takes int8, uint8, float32, float16 and bfloat16")
    usual = factor if again else np.dtype(np.float32)
    wanted = (usual if dtype is None else dtype).newbyteorder("=")
    allowed = ("s8", "u8") if again else ("f32", "f16", "bf16")
    if numpy_arrays.name_of(wanted) not in allowed:
        raise TypeError(f"dtype is {wanted}; {'with' if again else 'without'} out_scale use one of {allowed}")
    left, right, _ = numpy_arrays.types_of(factor, np.dtype(np.int8))
    return (left, right, wanted), source


def _run(  # noqa: PLR0917 - operands, then what follows them
    call: _Call,
    m: int,
    left: Array,
    weight: Any,
    out: Array,
    vectors: tuple[Array | None, ...],
    table: tuple[Any, ...] = (),
) -> None:
    k, n = weight.shape
    if call.plain:
        out[...] = _by_numpy(left.reshape(m, k), weight, call.source, vectors, out.dtype).reshape(out.shape)
        return
    if call.route is None:
        out[...] = last_step(np.zeros(out.shape), vectors, out.dtype)
        return
    strides = call.strides
    if strides is None:
        left, strides = np.require(left, left.dtype.newbyteorder("="), ("C", "A")), (k, 1)
    b = weight if call.weight is None else call.weight
    runtime().execute(
        call.route, m, n, k, 1, left, *strides, 0,
        b.owner, b.b_k, b.b_n, b.b_batch, out, n, 1, 0, None, *vectors, *table,
    )  # fmt: skip


def _by_numpy(left: Array, weight: Any, source: str, vectors: tuple[Array | None, ...], dtype: np.dtype[Any]) -> Array:
    """The product, and the last step."""
    a_scale, b_scale, *rest = vectors
    if source:
        left, scales = numpy_fallback.quantised_rows(left)
        a_scale = scales if a_scale is None else a_scale * scales
    columns: Array = np.zeros(1, np.int64)
    if isinstance(weight, Folded):
        # Codes and their scales are exact in float64, where groups are summed, too.
        sums = left.astype(np.float64) @ dequantize(unfold(weight), np.float64)
    elif left.dtype.kind in "iu":
        whole = unpack(weight).astype(np.int64)
        sums, columns = (left.astype(np.int64) @ whole).astype(np.int32), whole.sum(axis=0)
    else:
        sums = left.astype(np.float32) @ unpack(weight).astype(np.float32)
    return numpy_fallback.scaled(sums, (a_scale, b_scale, *rest), columns, dtype)
