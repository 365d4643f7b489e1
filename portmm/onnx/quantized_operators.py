"""Quantization, and products of quantized operands by kernels of integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.fusion.partition import LEAVES
from portmm.onnx.elementwise_operators import FLOATS
from portmm.onnx.operators import MICROSOFT, UnsupportedError, is_traced, once, operator
from portmm.onnx.rewrites import DOMAIN
from portmm.ops.linear import linear
from portmm.ops.matmul import matmul
from portmm.ops.prepack import pack
from portmm.spec import elementwise as e
from portmm.spec.epilogue import acc, argument, column_sum
from portmm.spec.expr import apply, real
from portmm.spec.expr_functions import fma
from portmm.weights.quantized import Quantized

if TYPE_CHECKING:
    from portmm.onnx.model import Node

BYTES = ("int8", "uint8")


def along(x: Any, parameter: Any, axis: int, block: int = 0) -> Any:
    """A scale or a zero point, shaped to broadcast to x."""
    if parameter is None or parameter.ndim == 0 or (parameter.size == 1 and not block):
        return parameter if parameter is None else parameter.reshape(())
    if block:
        return np.repeat(parameter, block, axis=axis)[tuple(slice(0, n) for n in x.shape)]
    return parameter.reshape(tuple(-1 if i == axis % x.ndim else 1 for i in range(x.ndim)))


@operator("QuantizeLinear", domains=("", MICROSOFT))
def _quantize(node: Node, x: Any, scale: Any, zero: Any = None) -> Any:
    target = np.dtype(np.uint8) if zero is None else zero.dtype
    kinds = (x.dtype.name, scale.dtype.name)
    known = kinds in {("float32", "float32"), ("float16", "float16")}
    if target.name not in BYTES or not known or node.attribute("output_dtype", 0):
        raise UnsupportedError("integers are rounded between kernels")
    axis, block = node.attribute("axis", 1), node.attribute("block_size", 0)
    if is_traced(x, scale, zero):
        if x.dtype != np.float32 or block:
            raise UnsupportedError("integers are rounded between kernels")
        factor = along(x, scale, axis)
        # Between kernels a product takes the place of a quotient: a code that is next to a tie may be its neighbour.
        values = x / factor if is_traced(scale) or x.node.kind in LEAVES else x * (np.float32(1) / factor)
        codes = nearest(values)  # large ones lose last places, and saturate
        return e.cast(codes if zero is None else codes + along(x, zero, axis).astype(np.float32), target)
    return quantized(x, along(x, scale, axis, block), zero is not None and along(x, zero, axis, block), target)


@operator("RoundToCodes", domains=(DOMAIN,))
def _round(_: Node, x: Any, scale: Any, zero: Any) -> Any:
    """Values quantized and dequantized: the nearest of those that codes stand for."""
    limits, step, point = np.iinfo(zero.dtype), np.float32(scale.reshape(())), float(zero.reshape(()))
    if x.dtype != np.float32:
        raise UnsupportedError("only arrays of float32 are quantized by kernels")
    if is_traced(x):
        values = x / step if x.node.kind in LEAVES else x * (np.float32(1) / step)
        return nearest(e.clip(values, limits.min - point, limits.max - point)) * step
    return np.clip(np.rint(x / step), limits.min - point, limits.max - point).astype(np.float32) * step


def quantized(x: Any, scale: Any, zero: Any, target: Any) -> Any:
    """Values over their scale, rounded to the nearest even integer, plus the zero point, saturated."""
    limits = np.iinfo(target)
    codes = np.rint(x / scale)
    if zero is not False and zero is not None:
        codes = codes + zero.astype(codes.dtype)
    return np.clip(codes, limits.min, limits.max).astype(target)


@operator("DequantizeLinear", domains=("", MICROSOFT))
def _dequantize(node: Node, x: Any, scale: Any, zero: Any = None) -> Any:
    block = node.attribute("block_size", 0)
    if x.dtype.name not in (*BYTES, "int32") or scale.dtype.name not in FLOATS or node.attribute("output_dtype", 0):
        raise UnsupportedError
    if is_traced(scale, zero) and block:
        raise UnsupportedError
    axis = node.attribute("axis", 1)
    factor, point = along(x, scale, axis, block), along(x, zero, axis, block)
    values = x.astype(np.float32)
    if point is not None and (is_traced(point) or np.any(point)):
        values = values - point.astype(np.float32)
    return (values * factor).astype(scale.dtype)


@operator("DynamicQuantizeLinear")
def _dynamic(_: Node, x: Any) -> Any:
    if is_traced(x):
        return _dynamic_by_kernels(x)
    low, high = min(0.0, float(x.min(initial=0))), max(0.0, float(x.max(initial=0)))
    scale = np.float32((np.float32(high) - np.float32(low)) / np.float32(255)) or np.float32(1)
    zero = np.uint8(np.clip(np.rint((0 - np.float32(low)) / scale), 0, 255))
    values = x / scale
    np.rint(values, out=values)
    values += np.float32(zero)
    codes = np.clip(values, 0, 255, out=values).astype(np.uint8)
    return codes, np.asarray(scale, np.float32), np.asarray(zero, np.uint8)


def _dynamic_by_kernels(x: Any) -> tuple[Any, Any, Any]:
    """The same of a traced array: extremes of rows, where those are computed, then of all, then the codes."""
    if x.dtype != np.float32 or not x.ndim:
        raise UnsupportedError("only arrays of float32 are quantized by kernels")

    def most(rows: Any) -> Any:
        return e.maximum(e.max(e.max(rows).reshape((1, -1))), 0.0)

    high, low = most(x), -most(-x)
    step = (high - low) / TOP
    scale = e.where(step == 0, 1.0, step)
    zero = nearest((0.0 - low) / scale)
    codes = e.cast(nearest(x / scale) + zero, np.uint8)
    return codes.reshape(x.shape), scale.reshape(()), e.cast(zero, np.uint8).reshape(())


TOP = 255.0
"""The most that a code of uint8 is."""


def nearest(x: Any) -> Any:
    """The nearest integer of a float32 below 2**22, half to even: adding 1.5 * 2**23 leaves no fraction."""
    return (x + WHOLE) - WHOLE


WHOLE = 1.5 * 2.0**23


class _Integers:
    """A constant matrix of bytes as kernels of int8 take it: packed, with its zero point shifted, and column sums."""

    def __init__(self, b: Any) -> None:
        self.shift = 128 if b.dtype == np.uint8 else 0
        signed = (b.astype(np.int16) - self.shift).astype(np.int8)
        self.sums = signed.astype(np.int32).sum(0, dtype=np.int32)
        self.packed = {kind: pack(signed, activations=np.dtype(kind)) for kind in BYTES}


def integer_product(a: Any, b: Any, a_zero: Any, b_zero: Any, weight: _Integers | None = None) -> Any:
    """The exact product of bytes less their zero points, in int32."""
    if weight is None and b.ndim == 2:
        weight = _Integers(b)
    if weight is None or 0 in a.shape or 0 in b.shape:
        left = a.astype(np.int32) - _by_row(a_zero, a)
        return np.matmul(left, b.astype(np.int32) - (0 if b_zero is None else b_zero.astype(np.int32)))
    k = a.shape[-1]
    result = matmul(a, weight.packed[a.dtype.name])
    point = (0 if b_zero is None else b_zero.astype(np.int32)) - np.int32(weight.shift)
    if np.any(point):
        result -= a.sum(-1, dtype=np.int32, keepdims=True) * point
    left = _by_row(a_zero, a)
    if np.any(left):
        result -= left * (weight.sums - np.int32(k) * point)
    return result


def _by_row(zero: Any, a: Any) -> Any:
    """The zero point of the left operand as int32, one or one for each row."""
    if zero is None:
        return np.int32(0)
    point = zero.astype(np.int32)
    return point.reshape((*point.shape, 1)) if point.ndim and point.size > 1 and point.ndim < a.ndim else point


@operator("MatMulInteger")
def _matmul_integer(_: Node, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    if not is_traced(a, b, a_zero, b_zero):
        return integer_product(a, b, a_zero, b_zero)
    if is_traced(b, b_zero) or b.ndim != 2 or a.ndim < 2:
        raise UnsupportedError
    weight = once(b, "integers", lambda: _Integers(b))

    def run(x: Any, *zero: Any) -> Any:
        return integer_product(x, b, zero[0] if zero else a_zero, b_zero, weight)

    return own_call(
        "linear",
        run,
        a,
        *([a_zero] if is_traced(a_zero) else []),
        shape=(*a.shape[:-1], b.shape[1]),
        dtype=np.dtype(np.int32),
    )


@operator("ScaledMatMulInteger", domains=(DOMAIN,))
def _scaled(_: Node, a: Any, b: Any, a_zero: Any, b_zero: Any, a_scale: Any, b_scale: Any, bias: Any = None) -> Any:
    columns = b.shape[-1]
    simple = b.ndim == 2 and b_zero.size in (1, columns) and b_scale.size in (1, columns)
    if not (is_traced(a, a_zero, a_scale) and simple and a.ndim > 1 and a_zero.size == a_scale.size == 1):
        if is_traced(a, a_zero, a_scale):
            raise UnsupportedError("only one scale of the left operand has a kernel")
        rows = a[None] if a.ndim == 1 else a
        y = integer_product(rows, b, a_zero, b_zero).astype(np.float32) * (a_scale * b_scale)
        y = y[0] if a.ndim == 1 else y
        return y if bias is None else y + bias
    weight = once(b, "integers", lambda: _Integers(b))
    points = b_zero.astype(np.int32).reshape(-1) - np.int32(weight.shift)
    scales = np.broadcast_to(b_scale.reshape(-1), (columns,)).copy()
    zeros = np.broadcast_to(points, (columns,)).copy() if np.any(points) else None
    packed = weight.packed[a.dtype.name]

    def run(x: Any, zero: Any, scale: Any) -> Any:
        how = {"x_scale": scale.item(), "x_zero": zero.item(), "w_scale": scales}
        return linear(x, packed, bias, **how, w_zero=0 if zeros is None else zeros)

    return _scaled_product(a, packed, (a_zero, a_scale, scales), (bias, zeros), run)


def _scaled_product(
    a: Any, packed: Any, scaling: tuple[Any, ...], more: tuple[Any, Any], run: Callable[..., Any]
) -> Any:
    """Record a product with the scales of its sums, which is a kernel with what follows: see `spec.dequantization`."""
    recorder, (bias, zeros), k = a.recorder, more, a.shape[-1]
    operands = list(scaling)

    def operand(x: Any, dtype: str) -> Any:
        operands.append(x)
        return argument(len(operands) - 1, dtype)

    zero, scale, scales = apply("int", argument(0, "u8")), argument(1, "f32"), argument(2, "f32")
    total = acc("s32") - zero * column_sum()
    if zeros is not None:
        if k > MOST_SUMMED:
            raise UnsupportedError("sums of so many codes are no integers of float32")
        rows = apply("int", operand(e.sum(a.astype(np.float32)), "f32"))
        total = total - operand(zeros, "s32") * (rows - zero * k)
    template = fma(scale, real(total) * scales, 0.0 if bias is None else operand(bias, "f32"))
    nodes = tuple(recorder.node_of(y) for y in operands)

    def plain(x: Any, _: Any, zero: Any, scale: Any, *__: Any) -> Any:  # what follows is constant
        return run(x, zero, scale)

    return recorder.wrap(recorder.scaled(recorder.node_of(a), recorder.weight(packed).node, nodes, template, plain))


MOST_SUMMED = 2**24 // 255
"""Codes whose sum float32 holds."""


def own_call(name: str, function: Callable[..., Any], *operands: Any, shape: Any, dtype: Any) -> Any:
    """Record a function of portmm with a kernel of its own."""
    recorder = operands[0].recorder
    nodes = tuple(recorder.node_of(x) for x in operands)
    return recorder.wrap(recorder.call(name, function, nodes, "", shape=shape, dtype=dtype, own=True))


@operator("QLinearMatMul")
def _qlinear_matmul(node: Node, a: Any, a_scale: Any, a_zero: Any, b: Any, *more: Any) -> Any:
    b_scale, b_zero, scale, zero = more
    if is_traced(a_scale, a_zero, b, b_scale, b_zero, scale, zero):
        raise UnsupportedError
    if a.dtype.name not in BYTES or b.dtype.name not in BYTES:
        raise UnsupportedError
    del node
    limits, target = np.iinfo(zero.dtype), zero.dtype
    weight = once(b, "integers", lambda: _Integers(b)) if b.ndim == 2 else None

    def run(x: Any) -> Any:
        total = integer_product(x, b, a_zero, b_zero, weight)
        factor = _by_row_scale(a_scale, x) * b_scale.astype(np.float32) / scale.astype(np.float32)
        codes = np.rint(total.astype(np.float32) * factor) + zero.astype(np.float32)
        return np.clip(codes, limits.min, limits.max).astype(target)

    if not is_traced(a):
        return run(a)
    if a.ndim < 2 or b.ndim != 2:
        raise UnsupportedError
    one = all(x.size == 1 for x in (a_scale, a_zero, scale, zero))
    if one and weight is not None and b_zero.size in (1, b.shape[1]) and b_scale.size in (1, b.shape[1]):
        points = b_zero.astype(np.int32).reshape(-1) - np.int32(weight.shift)
        how = {
            "x_scale": float(a_scale.reshape(())), "x_zero": int(a_zero.reshape(())),
            "w_scale": np.broadcast_to(b_scale.astype(np.float32).reshape(-1), (b.shape[1],)).copy(),
            "w_zero": np.broadcast_to(points, (b.shape[1],)).copy() if np.any(points) else 0,
            "out_scale": float(scale.reshape(())), "out_zero": int(zero.reshape(())), "dtype": target,
        }  # fmt: skip
        ready = weight.packed[a.dtype.name]

        def run(x: Any) -> Any:
            return linear(x, ready, **how)

    return own_call("linear", run, a, shape=(*a.shape[:-1], b.shape[1]), dtype=target)


def _by_row_scale(scale: Any, a: Any) -> Any:
    value = scale.astype(np.float32)
    return value.reshape((*value.shape, 1)) if value.ndim and value.size > 1 and value.ndim < a.ndim else value


@operator("MatMulNBits", domains=(MICROSOFT,))
def _matmul_bits(
    node: Node, a: Any, b: Any, scales: Any, zeros: Any = None, order: Any = None, bias: Any = None
) -> Any:
    if node.attribute("bits", 4) != 4 or (order is not None) or is_traced(b, scales, zeros):
        raise UnsupportedError("only weights of four bits, in the order of K, have kernels")
    k, n, group = (int(node.attribute(x)) for x in ("K", "N", "block_size"))
    weight = once(b, "four bits", lambda: pack(four_bits(b, scales, zeros, k, n, group)))
    y = a @ a.recorder.weight(weight) if is_traced(a) else matmul(a, weight)
    return y if bias is None else y + bias


def four_bits(b: Any, scales: Any, zeros: Any, k: int, n: int, group: int) -> Quantized:
    """The weight of MatMulNBits: nibbles of K along rows of N, with a scale and a zero point for each block."""
    blocks = -(-k // group)
    codes = nibbles(b.reshape(n, -1))[:, : blocks * group][:, :k]
    steps = scales.reshape(n, blocks).astype(np.float32)
    if zeros is None:
        points = np.full((n, blocks), 8, np.float32)
    elif zeros.dtype == np.uint8:
        points = nibbles(zeros.reshape(n, -1))[:, :blocks].astype(np.float32)
    else:
        points = zeros.reshape(n, blocks).astype(np.float32)
    return Quantized(
        np.ascontiguousarray(codes.T),
        np.ascontiguousarray(steps.T),
        np.ascontiguousarray((-points * steps).T),
        4,
        group,
    )


def nibbles(x: Any) -> Any:
    """The values of bytes, the lower four bits first."""
    return np.stack([x & 15, x >> 4], axis=-1).reshape(*x.shape[:-1], -1)
