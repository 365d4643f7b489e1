"""Kernel of a quantized linear layer on the host: its problem and its types, for calls of one kind.

Owns the memo of these kernels, and the rules for types, shapes and options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_arrays, numpy_fallback
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError
from portmm.ops import host_matmul, routes
from portmm.ops.int4_panels import pack_int4, unpack_int4
from portmm.ops.prepack import pack, unpack
from portmm.spec.dequantization import Dequantization
from portmm.spec.dtype import spell
from portmm.spec.epilogue import AXES
from portmm.spec.problem import Problem, family
from portmm.spec.row_classes import row_class
from portmm.util.memo import Memory, cached

LONGEST_GROUP = (2**31 - 1) // (128 * 15)
"""Rows of int4 values whose sum of products with int8 is below 2**31."""
MOST_CALLS = 1024
"""Kinds of calls remembered before the memo is emptied."""

_kernels = Memory(MOST_CALLS, "calls")

Array = np.ndarray[Any, Any]


class LinearOptions(NamedTuple):
    """The options of a call that kernels depend on: vectors that are not default, and types."""

    dtype: np.dtype[Any] | None
    dynamic: bool
    x_zero: bool
    w_zero: bool
    x_scale: bool
    bias: bool
    requantize: bool

    @property
    def dequantization(self) -> Dequantization:
        """The steps of a kernel's epilogue."""
        return Dequantization(self.x_zero, self.w_zero, self.bias or self.requantize, self.dynamic)


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """The kernel of one kind of call.

    Attributes:
        rows: the least and the largest number of rows of x that it supports.
        dtype: of the result, in native order.
        source: the type that rows are quantized from, or "".
        route: the kernel; None where NumPy computes: for empty sums, and without a compiler.
        strides: of x, between rows and columns, in elements; None if it must be copied first.
        weight: the weight, if it had to be repacked.
        table: the operands of `vectors_of`, without addresses.
        bound: the operands of an epilogue, those first.
        results: columns and types of its results.
        several: it returns a tuple.
    """

    rows: tuple[int, int]
    dtype: np.dtype[Any]
    source: str
    route: Any
    strides: tuple[int, int] | None
    weight: Any
    table: Any = None
    bound: Any = None
    results: tuple[tuple[int, np.dtype[Any]], ...] = ()
    several: bool = False


def layout_of(x: Array) -> tuple[Any, ...]:
    """Columns and strides of x, independent of its number of rows where possible."""
    if x.ndim == 2:
        return x.shape[1], x.strides
    return (x.shape[-1], None) if x.flags.c_contiguous else (x.shape, x.strides)


def kernel_of(key: tuple[Any, ...], m: int, left: Array, weight: Any, options: LinearOptions) -> LinearKernel:
    """The kernel for operands of this kind, from the memo: for the class of M, where that has one kernel."""
    key = (*key, config.current(), config.limit())
    kernel: LinearKernel | None = _kernels.get(key) or _kernels.get((m, key))
    if kernel is None:
        kernel = _prepared(left, weight, options)
        if kernel.weight is None and kernel.route is not None:
            _kernels.keep(key if kernel.rows == row_class(m) else (m, key), kernel)
    return kernel


def fused_kernel(left: Array, weight: Any, options: LinearOptions, traced: Any) -> LinearKernel | None:
    """The kernel of a product and its epilogue; None if they need two."""
    from portmm.ops.epilogues import fusible
    from portmm.trace.bind import Bound, dense

    if left.ndim != 2 or 0 in (*left.shape, *weight.shape):
        return None
    types, _ = _types_of(left.dtype, options.dtype, requantize=False, dynamic=options.dynamic)
    try:
        step = fusible(traced, "s32", lambda: types[2], options.dequantization)
        kernel = _prepared(left, weight, options, step)
    except ScheduleError:
        return None
    if kernel.route is None:
        return None
    (m, _), n = left.shape, weight.shape[1]
    size = (m, n, 1)
    arguments = [tuple(map(int, row[1:4])) for row in _table(options.dequantization)]
    bound = Bound(traced, size, arguments, [dense(x, size) for x in step.axes[1:]])
    widths = [n if "n" in axes else 1 for axes in step.axes]
    served = kernel.rows if kernel.rows == (m, m) else bound.served(kernel.rows)
    results = tuple(zip(widths, step.types, strict=True))
    return replace(kernel, bound=bound, rows=served, results=results, several=traced.several)


def _prepared(left: Array, weight: Any, options: LinearOptions, step: Any = None) -> LinearKernel:
    types, source = _types_of(left.dtype, options.dtype, requantize=options.requantize, dynamic=options.dynamic)
    _check(left, weight, types, options)
    k, n = weight.shape
    m = prod(left.shape[:-1])
    if k == 0 or m == 0 or n == 0:
        return LinearKernel(row_class(m), types[2], source, None, None, None)
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
        family=weight.family, deterministic=deterministic, source=source,
        fused=step.text if step else options.dequantization.text,
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
        return LinearKernel((m, m), types[2], source, None, None, None)
    table = _table(options.dequantization)
    return LinearKernel(row_class(m) if shared else (m, m), types[2], source, route, strides, repacked, table)


@cached("calls", MOST_CALLS)
def _table(how: Dequantization) -> Array:
    """The operands of a dequantization, without addresses: one element for each row, or column."""
    return np.array([(0, *(int(axis == x.axes) for axis in AXES)) for x in how.operands], np.int64)


def _check(left: Array, weight: Any, types: numpy_arrays.DTypes, options: LinearOptions) -> None:
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
        if options.w_zero and numpy_arrays.name_of(types[0]) not in ("s8", "u8"):
            raise ValueError(
                f"w_zero is set, and x has dtype {left.dtype}: only products of integers have zero points; pass an "
                "integer x with x_scale, or dequantize w first"
            )
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


@cached("calls", MOST_CALLS)
def _types_of(
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
