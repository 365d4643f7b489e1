"""Quantized linear layers: products of quantized operands, with their scales.

Owns `linear`: scales, zero points and a bias, reduced to the vectors that a kernel's epilogue
reads (kernels/cpu/epilogue.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import libraries, numpy_arrays, numpy_fallback
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError
from portmm.ops import host_matmul, routes
from portmm.ops.int4_panels import PackedInt4, pack_int4, unpack_int4
from portmm.ops.linear_vectors import is_default, last_step, vectors_of
from portmm.ops.prepack import current, is_packed, pack, unpack
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import spell
from portmm.spec.problem import Problem, family
from portmm.spec.row_classes import last_of_class, row_class
from portmm.util.array_subclasses import refuse_class
from portmm.util.memo import Memory
from portmm.weights.quantized import Quantized, dequantize

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_GROUP = (2**31 - 1) // (128 * 15)
"""Rows of int4 values whose sum of products with int8 is below 2**31."""
MOST_CALLS = 1024
"""Kinds of calls remembered before the memo is emptied."""

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
    """X . w + bias for quantized operands: values are scale * (code - zero).

    The sum over k is exact in integers, zero points included, modulo 2**32; then follow
    three roundings in float32 and one to the result. With an int4 weight
    sums are exact within a group, and the groups are summed in float32.

    Args:
        x: int8 or uint8 values (..., k), or float32, float16 or bfloat16 values,
            which have no scale or zero point and are multiplied without conversion, or are `dynamic`. Arrays on a
            device are integers, or dynamic, and have no zero points; w, scales and a bias are there too.
        w: int8 values (k, n), or those packed by `pack` for the dtype of `x`, or an int4 weight
            from `quantize`, packed or not. An unpacked weight is packed in
            every call.
        bias: (n,), of the result's values; none by default.
        x_scale: a number, or one for each row: x's shape without k.
        x_zero: as `x_scale`, integers.
        w_scale: a number, or one for each column, (n,).
        w_zero: as `w_scale`, integers, not with `dynamic`. Zero points of w cost a sum
            over x. An int4 weight has its own, and takes an `x` without any.
        out_scale: quantize the result: round to nearest even, saturate.
        out_zero: zero point of the result.
        dynamic: dynamic quantization: quantize the float rows of `x` to int8, each by its largest
            magnitude: values are x * (127 / max |x|), in float32, rounded half to even, and
            their scale is max |x| / 127. The results of a row with a NaN or an infinity are all
            not finite. `w` must be packed for int8.
        dtype: float32, float16 or bfloat16; with `out_scale` int8 or uint8. By
            default float32, or the type of `x` with `out_scale`.
        out: the array of the result, of that type.
        epilogue: a function of the scaled sums, as in `matmul`, before they are rounded.
            Not with `out_scale`: `quantize_rows` and `cast` do that.

    Returns:
        The result, (..., n), of type `dtype`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes do not match, a scale is negative or not finite, or a zero point
            does not fit 16 bits.
        ScheduleError: `w` was packed for other activations.
    """
    if (tracer := numpy_arrays.tracing_operand(x, w, bias, x_scale, w_scale)) is not None:
        more = {"x_scale": x_scale, "x_zero": x_zero, "w_scale": w_scale, "w_zero": w_zero, "out_scale": out_scale}
        more |= {"out_zero": out_zero, "dynamic": dynamic, "dtype": dtype, "out": out, "epilogue": epilogue}
        return tracer.call_(linear, (x, w, bias), more)
    if libraries.on_device(x) or libraries.on_device(w):
        from portmm.ops.linear_gpu import linear as linear_on_device

        scaling_options = {"x_scale": x_scale, "x_zero": x_zero, "w_scale": w_scale, "w_zero": w_zero}
        scaling_options |= {"out_scale": out_scale, "out_zero": out_zero, "dynamic": dynamic}
        return linear_on_device(x, w, bias, scaling_options, dtype, out, epilogue)
    left = numpy_arrays.as_operand(x, "x", matrix=False)
    if isinstance(w, PackedInt4):
        weight = w
    elif is_packed(w):
        weight = current(w)
    else:
        weight = _weight(w, np.dtype(np.int8) if dynamic else left.dtype)
    options_used = (not is_default(x_zero, 0), not is_default(w_zero, 0), not is_default(x_scale, 1))
    options = _Options(
        None if dtype is None else np.dtype(dtype), dynamic, *options_used, bias is not None, out_scale is not None
    )
    m = left.shape[0] if left.ndim == 2 else prod(left.shape[:-1])
    key = (last_of_class(m), *_layout(left), left.dtype, left.flags.aligned, weight.family, weight.shape, options)
    scaling = (x_scale, x_zero, w_scale, w_zero, out_scale, out_zero)
    if epilogue is not None:
        return _with_epilogue(key, left, weight, options, out, epilogue, bias, scaling)
    call, shape = _remembered(key, m, left, weight, options), (*left.shape[:-1], weight.shape[1])
    vectors = vectors_of(left, (m, shape[-1]), call.source, bias, scaling)
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


def _with_epilogue(  # noqa: PLR0917 - one caller
    key: tuple[Any, ...],
    left: Array,
    weight: Any,
    options: _Options,
    out: Any,
    epilogue: Callable[..., Any],
    bias: Any,
    scaling: tuple[Any, ...],
) -> Any:
    """The product with an epilogue: in one kernel, or with a second one over its rows."""
    from portmm.ops.fused_matmul import NAMES, fit
    from portmm.ops.rowwise import over_rows
    from portmm.spec.epilogue import acc
    from portmm.trace.bind import UserFunction
    from portmm.trace.tracer import Indices

    if options.requantize:
        raise ValueError("out_scale is passed with an epilogue; let that scale and cast the result")
    user_function = UserFunction.of(epilogue)
    values, rank, m = (acc(), Indices(NAMES)), 2 if left.ndim == 2 else 3, prod(left.shape[:-1])

    def build(traced: Any) -> _Call | None:
        return _fused(left, weight, options, traced)

    call: _Call | None = user_function.ready(("linear", rank, key), build, values, rank)
    if call is not None and not call.rows[0] <= m <= call.rows[1]:
        call = user_function.ready(("linear", rank, m, key), build, values, rank)
    if call is None or call.bound is None:
        f32 = np.dtype(np.float32)
        usual = f32 if options.dtype is None else options.dtype
        names = ("x_scale", "x_zero", "w_scale", "w_zero", "out_scale", "out_zero")
        scaling_by_name = dict(zip(names, scaling, strict=True))
        product = linear(left, weight, bias, **scaling_by_name, dynamic=options.dynamic, dtype=f32)
        row_results, several = over_rows(epilogue, (product,), NAMES, dtype=usual)
        return fit(list(row_results), out, several=several)
    vectors = vectors_of(left, (m, weight.shape[1]), call.source, bias, scaling)
    results = [np.empty((m, width), t) for width, t in call.results]
    table = call.bound.fill(user_function.closure, [], results[1:])
    _run(call, m, left, weight, results[0], vectors, table[:2])
    return fit(results, out, several=call.several)


def _fused(left: Array, weight: Any, options: _Options, traced: Any) -> _Call | None:
    """The kernel of a product and its epilogue; None if they need two."""
    from portmm.trace.bind import Bound, bind_operands, dense

    if left.ndim != 2 or 0 in (*left.shape, *weight.shape):
        return None
    types, _ = _types(left.dtype, options.dtype, requantize=False, dynamic=options.dynamic)
    step = bind_operands(traced, (), types[2], ends=True)
    if step.fused.reductions or step.fused.column_reductions or not step.wide or step.types[0] == np.int32:
        return None
    try:
        call = _prepared(left, weight, options, step)
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


class _Options(NamedTuple):
    """The options of a call that kernels depend on: vectors that are not default, and types."""

    dtype: np.dtype[Any] | None
    dynamic: bool
    x_zero: bool
    w_zero: bool
    x_scale: bool
    bias: bool
    requantize: bool

    @property
    def post(self) -> str:
        """The steps of a kernel's epilogue."""
        shift = self.bias or self.requantize
        words = ("scale", "azero" * self.x_zero, "bzero" * self.w_zero, "bias" * shift)
        return "+".join(filter(None, words))


@dataclass(frozen=True, slots=True)
class _Call:
    """The kernel of one kind of call.

    Attributes:
        rows: the least and the largest number of rows of x that it supports.
        dtype: of the result, in native order.
        source: the type that rows are quantized from, or "".
        route: the kernel; None for empty sums.
        strides: of x, between rows and columns, in elements; None if it must be copied first.
        weight: the weight, if it had to be repacked.
        bound: the operands of an epilogue.
        results: columns and types of its results.
        several: it returns a tuple.
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
        raise TypeError(f"out has dtype {into.dtype}; the result is {dtype}: set it with dtype=")
    return into


def _weight(w: Any, activations: np.dtype[Any]) -> Any:
    """The packed weight of an unpacked one."""
    if isinstance(w, Quantized):
        return pack_int4(w)
    refuse_class(w, "w")
    codes = np.asarray(w)
    if codes.ndim != 2:
        raise ValueError(f"w has shape {codes.shape}; it must be a matrix")
    return pack(codes, activations=activations.newbyteorder("="))


def _layout(x: Array) -> tuple[Any, ...]:
    """Columns and strides of x, independent of its number of rows where possible."""
    if x.ndim == 2:
        return x.shape[1], x.strides
    return (x.shape[-1], None) if x.flags.c_contiguous else (x.shape, x.strides)


def _remembered(key: tuple[Any, ...], m: int, left: Array, weight: Any, options: _Options) -> _Call:
    """The kernel for operands of this kind, from the memo: for the class of M, where that has one kernel."""
    key = (*key, config.current(), config.limit())
    call: _Call | None = _calls.get(key) or _calls.get((m, key))
    if call is None:
        call = _prepared(left, weight, options)
        if call.weight is None and not call.plain:
            _calls.keep(key if call.rows == row_class(m) else (m, key), call)
    return call


_calls = Memory(MOST_CALLS)


def _prepared(left: Array, weight: Any, options: _Options, step: Any = None) -> _Call:
    types, source = _types(left.dtype, options.dtype, requantize=options.requantize, dynamic=options.dynamic)
    _check(left, weight, types, options)
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
    w_type = family(weight.family).dtype
    word = spell(numpy_arrays.name_of(types[0]), w_type, numpy_arrays.name_of(step.types[0] if step else types[2]))
    p = Problem(
        m, n, k, word, a="row" if source else layout, b="codes" if w_type == "u4" else "packed",
        family=weight.family, deterministic=deterministic, post=options.post, source=source,
        fused=step.text if step else "",
    )  # fmt: skip
    if p.acc == "s32" and p.b == "packed" and not family(weight.family).sums:
        raise ScheduleError(f"w is packed as {weight.family}, for activations of another type: pack it for {types[0]}")
    host_matmul.begin()
    repacked = None
    try:
        try:
            route, shared = routes.routed(p)
        except ScheduleError:  # packed on another machine
            repacked = pack_int4(unpack_int4(weight)) if p.b == "codes" else pack(unpack(weight), activations=types[0])
            route, shared = routes.routed(replace(p, family=repacked.family))
    except BuildError as error:
        numpy_fallback.fall_back(error)
        return _Call((m, m), types[2], source, None, None, None, plain=True)
    return _Call(row_class(m) if shared else (m, m), types[2], source, route, strides, repacked)


def _check(left: Array, weight: Any, types: numpy_arrays.DTypes, options: _Options) -> None:
    """Check shapes and types of operands, and the options for them."""
    k = left.shape[-1]
    if len(weight.shape) != 2 or weight.shape[0] != k:
        raise ValueError(f"w has shape {weight.shape}; x has {k} columns, so w must have shape ({k}, n)")
    w_type = family(weight.family).dtype
    if w_type not in ("s8", "u4"):
        raise TypeError(f"w has dtype {weight.dtype}; linear takes int8 or int4 values, use matmul for floats")
    if numpy_arrays.name_of(left.dtype) not in ("s8", "u8") and (options.x_scale or options.x_zero):
        raise ValueError(f"x has dtype {left.dtype}: only integers have a scale and a zero point")
    if options.dynamic and options.w_zero:
        raise ValueError("w_zero is set: with dynamic rows the weight has none; quantize x first, and pass x_scale")
    if w_type == "s8":
        return
    if options.x_zero or options.w_zero:
        raise ValueError("x_zero or w_zero is set: an int4 weight has zero points of its own only")
    if types[0] == np.uint8:
        raise TypeError("x has dtype uint8; an int4 weight is multiplied by int8 or floats")
    group = family(weight.family).group or k
    if types[0] == np.int8 and group > LONGEST_GROUP:
        raise ValueError(
            f"w has groups of {group} rows; sums in int32 are exact up to {LONGEST_GROUP}: quantize in smaller groups"
        )


@cache
def _types(
    x: np.dtype[Any], dtype: np.dtype[Any] | None, *, requantize: bool, dynamic: bool
) -> tuple[numpy_arrays.DTypes, str]:
    """The types of the product, and the type that rows of A are quantized from."""
    source = numpy_arrays.name_of(x) if dynamic else ""
    if dynamic and source not in ("f32", "f16", "bf16"):
        raise TypeError(f"x has dtype {x}: only float32, float16 and bfloat16 rows are quantized")
    factor = np.dtype(np.int8) if dynamic else x
    if numpy_arrays.name_of(factor) not in ("s8", "u8", "f32", "f16", "bf16"):
        raise TypeError(f"x has dtype {x}; linear takes int8, uint8, float32, float16 and bfloat16")
    usual = factor if requantize else np.dtype(np.float32)
    result = (usual if dtype is None else dtype).newbyteorder("=")
    allowed = ("s8", "u8") if requantize else ("f32", "f16", "bf16")
    if numpy_arrays.name_of(result) not in allowed:
        raise TypeError(f"dtype is {result}; {'with' if requantize else 'without'} out_scale use one of {allowed}")
    left, right, _ = numpy_arrays.types_of(factor, np.dtype(np.int8))
    return (left, right, result), source


def _run(  # noqa: PLR0917 - operands, then options
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
    """The product and its epilogue, computed by NumPy."""
    a_scale, b_scale, *rest = vectors
    if source:
        left, scales = numpy_fallback.quantized_rows(left)
        a_scale = scales if a_scale is None else a_scale * scales
    columns: Array = np.zeros(1, np.int64)
    if isinstance(weight, PackedInt4):
        # Values and scales are exact in float64, in which groups are summed, too.
        sums = left.astype(np.float64) @ dequantize(unpack_int4(weight), np.float64)
    elif left.dtype.kind in "iu":
        dense = unpack(weight).astype(np.int64)
        sums, columns = (left.astype(np.int64) @ dense).astype(np.int32), dense.sum(axis=0)
    else:
        sums = left.astype(np.float32) @ unpack(weight).astype(np.float32)
    return numpy_fallback.scaled(sums, (a_scale, b_scale, *rest), columns, dtype)
