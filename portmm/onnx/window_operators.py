"""Operators over windows of images: convolution and pooling.

Convolutions by constant filters are `portmm.conv`, with the bias, residual and ReLU that follow. For others windows are
gathered by NumPy, whose copies a product then multiplies: `gather_windows` is im2col, an intermediate of kernel size
times the image.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.numpy_arrays import name_of
from portmm.fusion.depth_to_space import by_rows
from portmm.fusion.plan_windows import Filter, Pool, is_small, regions
from portmm.onnx.arrays import channels_first, channels_last
from portmm.onnx.image_copies import adjacent, edges, whole_steps, widened
from portmm.onnx.operators import UnsupportedError, is_traced, once, operator
from portmm.onnx.precision import summed
from portmm.onnx.quantized_operators import own_call
from portmm.onnx.rewrites import DOMAIN
from portmm.onnx.shape_operators import depth_to_space
from portmm.onnx.windows import Windows, windows_of
from portmm.ops import epilogues
from portmm.ops.convolution import conv
from portmm.ops.convolution_options import Options, sizes
from portmm.ops.convolution_weights import pack_conv
from portmm.ops.prepack import pack
from portmm.spec import elementwise as e

if TYPE_CHECKING:
    from portmm.onnx.model import Node


Array = np.ndarray[Any, Any]


Ints = tuple[int, ...]
NARROW = ("float32", "float16", "bfloat16")
CODES = ("int8", "uint8")


def padded(x: Any, w: Windows, fill: Any) -> Any:
    """Images with their padding, in the order of axes in memory that they have."""
    grown = [b + n + z for b, n, z in zip(w.begin, x.shape[2:], w.end, strict=True)]
    if x.ndim > 2 and x.strides[1] == x.itemsize:
        result = np.full((x.shape[0], *grown, x.shape[1]), fill, x.dtype)
        result = result.transpose((0, x.ndim - 1, *range(1, x.ndim - 1)))
    else:
        result = np.full((*x.shape[:2], *grown), fill, x.dtype)
    inside = tuple(slice(b, b + n) for b, n in zip(w.begin, x.shape[2:], strict=True))
    result[(slice(None), slice(None), *inside)] = x
    return result


def views(x: Any, w: Windows, fill: Any) -> Any:
    """A view of the windows of a padded image: (n, c, windows along each axis, extents of the kernel)."""
    if any(w.begin) or any(w.end):
        x = padded(x, w, fill)
    inner = x.strides[2:]
    shape = (*x.shape[:2], *w.result, *w.kernel)
    steps = (s * t for s, t in zip(w.strides, inner, strict=True))
    strides = (*x.strides[:2], *steps, *(d * t for d, t in zip(w.dilations, inner, strict=True)))
    return np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)


def reduced_windows(x: Any, w: Windows, fill: Any, ufunc: Any) -> Any:
    """A reduction of the elements of each window, one axis after the other; `fill` where there is only padding."""
    for axis in range(len(w.kernel)):
        x = _reduced_axis(x, w, axis, fill, ufunc)
    return x


def _reduced_axis(x: Any, w: Windows, axis: int, fill: Any, ufunc: Any) -> Any:
    """A reduction along one axis of windows, in the order of axes in memory that images have."""
    size = [*x.shape[2:]]
    n, size[axis] = size[axis], w.result[axis]
    last = x.strides[1] == x.itemsize
    result = np.full((x.shape[0], *size, x.shape[1]) if last else (*x.shape[:2], *size), fill, x.dtype)
    whole = result.transpose((0, x.ndim - 1, *range(1, x.ndim - 1))) if last else result
    before, step = (slice(None),) * (2 + axis), w.strides[axis]
    for tap in range(w.kernel[axis]):
        start = tap * w.dilations[axis] - w.begin[axis]
        first = max(-(start // step), 0)
        count = min((n - 1 - start) // step + 1, w.result[axis]) - first
        if count > 0:
            begin = start + first * step
            inside = (*before, slice(first, first + count))
            ufunc(whole[inside], x[(*before, slice(begin, begin + count * step, step))], out=whole[inside])
    return whole


def gather_windows(x: Any, w: Windows, groups: int) -> Any:
    """Windows as columns of a matrix: (n, groups, channels of a group times extents, windows)."""
    rank = len(w.kernel)
    n, c = x.shape[:2]
    order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    columns = views(x, w, 0).transpose(order)
    return columns.reshape(n, groups, c // groups * math.prod(w.kernel), math.prod(w.result))


LAYOUTS = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
"""Layouts of images between convolutions by their dimensions: with channels last, kernels are fastest."""


@operator("Conv", domains=("", DOMAIN))
def _conv(node: Node, x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
    return summed(node, _convolution(node, x, weight, bias, residual))


def _convolution(node: Node, x: Any, weight: Any, bias: Any, residual: Any) -> Any:
    """The result of a convolution, in the type of its images or, with a float32 bias, in float32."""
    kernel = tuple(weight.shape[2:])
    w = windows_of(node, tuple(x.shape[2:]), kernel)
    if b := node.attribute("blocks", 0):
        order, plain = node.attribute("order"), is_traced(x) and not is_traced(weight, bias) and residual is None
        if plain and x.dtype.name == "float32" and len(kernel) == 2 and node.attribute("group", 1) == 1:
            how = _options(w, 1)
            y = to_space(adjacent(channels_last(x)), (weight, bias), how, (b, order))
            return finished(y, b, relu=bool(node.attribute("relu")))
        whole = replace(node, attributes={k: v for k, v in node.attributes.items() if k != "blocks"})
        return depth_to_space(_conv(whole, x, weight, bias, residual), b, order)
    if is_traced(x) and not is_traced(weight, bias) and x.dtype.name in NARROW and len(kernel) in LAYOUTS:
        if residual is None or tuple(residual.shape) == (x.shape[0], weight.shape[0], *w.result):
            return _by_kernel(node, w, (x, weight, bias, residual))
        alone = replace(node, attributes=node.attributes | {"relu": False})
        y = _by_kernel(alone, w, (x, weight, bias, None)) + residual  # of other extents: one for each channel, mostly
        return e.relu(y) if node.attribute("relu") else y
    y = _by_product(x, weight, w, node.attribute("group", 1))
    y = y if bias is None else y + bias.reshape((1, -1, *(1,) * len(kernel)))
    y = y if residual is None else y + residual
    return e.relu(y) if node.attribute("relu") else y


def _by_kernel(node: Node, w: Windows, operands: tuple[Any, Any, Any, Any]) -> Any:
    """Record a convolution with a constant filter, packed once, and what follows it."""
    x, weight, bias, residual = operands
    groups, layout = node.attribute("group", 1), LAYOUTS[len(w.kernel)]
    x, residual = channels_last(x), None if residual is None else channels_last(residual)
    if groups == 1 and is_pointwise(w):
        return _pointwise(x, weight, bias, residual, relu=bool(node.attribute("relu")))
    shape = (x.shape[0], *w.result, weight.shape[0])
    more, taps = whole_steps(weight, w, name_of(x.dtype)) if groups == 1 and x.dtype != np.float32 else (0, 0)
    if more or taps:
        x = adjacent(x, more, edges(w, taps))
        weight, w = widened(weight, w, more, taps)
    packed = once(weight, f"convolution {groups}", lambda: pack_conv(weight, groups=groups, layout=layout))
    how = _options(w, groups)
    relu = bool(node.attribute("relu"))
    x = adjacent(x)
    if groups == x.shape[-1] == weight.shape[0] and (pool := _by_channel(node, w, x, (bias, residual))) is not None:

        def each(images: Any, *others: Any) -> Any:
            y = conv(images, packed, **how)
            y = y if bias is None else y + bias
            y = y if residual is None else y + others[-1]
            return e.relu(y) if relu else y

        taps = once(weight, "taps", lambda: np.ascontiguousarray(weight.reshape(weight.shape[0], -1).T))
        operands = (x, taps, *(y for y in (bias, residual) if y is not None))
        return channels_first(x.recorder.over_windows("pool", operands, pool, shape, each))
    if groups == 1:

        def alone(images: Any) -> Any:
            return conv(images, packed, **how)

        size = sizes(tuple(x.shape), packed.shape, Options(**how))
        y = x.recorder.over_windows("conv", x, Filter(packed, size), shape, alone)
        y = y if bias is None else y + bias
        y = y if residual is None else y + residual
        return channels_first(e.relu(y) if relu else y)
    flat = (shape[0], math.prod(w.result), shape[-1])

    def run(images: Any, added: Any = None) -> Any:
        epilogue = epilogues.of_convolution(bias, None if added is None else added.reshape(flat), rectified=relu)
        return conv(images, packed, **how, epilogue=epilogue)

    y = own_call("conv", run, x, *([] if residual is None else [residual]), shape=shape, dtype=x.dtype)
    return channels_first(y)


def _options(w: Windows, groups: int) -> dict[str, Any]:
    """Options of `conv` for windows of images with channels last."""
    padding = tuple(zip(w.begin, w.end, strict=True))
    return {
        "stride": w.strides, "padding": padding, "dilation": w.dilations, "groups": groups,
        "layout": LAYOUTS[len(w.kernel)],
    }  # fmt: skip


def _by_channel(node: Node, w: Windows, x: Any, more: tuple[Any, Any]) -> Pool | None:
    """The record of a convolution of each channel by a filter of its own, or None if kernels do not compute it."""
    windows = zip(w.kernel, w.strides, w.dilations, w.begin, strict=True)
    axes = tuple(regions(*axis) for axis in zip(x.shape[1:-1], w.result, windows, strict=True))
    bias, residual = more
    pool = Pool(
        "dot", 0, axes, w.kernel, w.strides, bias is not None, residual is not None, bool(node.attribute("relu"))
    )
    return pool if is_small(pool) else None


@operator("ScaledConv", domains=(DOMAIN,))
def _scaled_conv(node: Node, x: Any, weight: Any, bias: Any, zero: Any, x_scale: Any, w_scale: Any) -> Any:
    """A convolution of the codes of images and filters, with their scales and the bias."""
    kernel, outputs = tuple(weight.shape[2:]), weight.shape[0]
    w, point = windows_of(node, tuple(x.shape[2:]), kernel), int(zero.reshape(()))
    scales = np.broadcast_to((w_scale * x_scale).astype(np.float32).reshape(-1), (outputs,)).copy()
    if not is_traced(x):
        y = _by_product(x.astype(np.float32) - np.float32(point), weight.astype(np.float32), w, 1)
        y = y * scales.reshape((-1, *(1,) * len(kernel)))
        return y if bias is None else y + bias.reshape((1, -1, *(1,) * len(kernel)))
    if len(kernel) not in LAYOUTS or is_traced(bias):
        raise UnsupportedError("its bias or its number of dimensions has no kernel")
    layout, (more, taps) = LAYOUTS[len(kernel)], whole_steps(weight, w, name_of(x.dtype))
    total = weight.reshape(outputs, -1).astype(np.float64).sum(1) * point * scales
    shift = ((0 if bias is None else bias.astype(np.float64)) - total).astype(np.float32)
    x = channels_last(x)
    if more or taps:  # with their padding, so that channels and taps of zeros take nothing of others
        x = adjacent(x, more, edges(w, taps), point)
        weight, w = widened(weight, w, more, taps)
    packed = once(weight, f"codes {x.dtype}", lambda: pack_conv(weight, layout=layout, activations=x.dtype))
    how = _options(w, 1) | {"padding_value": point}
    x = adjacent(x)

    def alone(images: Any) -> Any:
        return conv(images, packed, **how).astype(np.float32)

    about = Filter(packed, sizes(tuple(x.shape), packed.shape, Options(**how)))
    y = x.recorder.over_windows("conv", x, about, (x.shape[0], *w.result, outputs), alone, np.dtype(np.float32))
    return channels_first(y * scales + shift)


def _pointwise(x: Any, weight: Any, bias: Any, residual: Any, *, relu: bool) -> Any:
    """Record a convolution of single pixels: a product of pixels and the packed filter, with what follows it."""
    outputs, channels = weight.shape[:2]
    packed = once(weight, "pointwise", lambda: pack(weight.reshape(outputs, channels).T))
    y = x @ x.recorder.weight(packed)
    y = y if bias is None else y + bias
    y = y if residual is None else y + residual
    return channels_first(e.relu(y) if relu else y)


def is_pointwise(w: Windows) -> bool:
    """Test whether windows are the pixels of an image."""
    return all(k == 1 for k in w.kernel) and all(s == 1 for s in w.strides) and not any((*w.begin, *w.end))


def _by_product(x: Any, weight: Any, w: Windows, groups: int) -> Any:
    """A convolution as a product of its filter and of windows that NumPy gathers."""
    (n, c), m = x.shape[:2], weight.shape[0]
    rows = weight.reshape((groups, m // groups, c // groups * math.prod(w.kernel)))
    if is_pointwise(w):
        columns = x.reshape((n, groups, c // groups, math.prod(w.result)))
    elif is_traced(x):
        columns = x.recorder.called(
            "im2col", lambda y: np.ascontiguousarray(gather_windows(y, w, groups)), (x,), {}, own=True
        )
    else:
        columns = gather_windows(x, w, groups)
    if groups == 1:
        rows, columns = rows.reshape(rows.shape[1:]), columns.reshape((n, *columns.shape[2:]))
    return (rows @ columns).reshape((n, m, *w.result))


@operator("MaxPool", "AveragePool", "LpPool")
def _pool(node: Node, x: Any) -> Any:
    if len(node.outputs) > 1 and node.outputs[1]:
        raise UnsupportedError
    w = windows_of(node, x.shape[2:], tuple(node.attribute("kernel_shape")))
    if is_traced(x):
        order = (0, x.ndim - 1, *range(1, x.ndim - 1))
        back = (0, *range(2, x.ndim), 1)
        shape = (x.shape[0], *w.result, x.shape[1])
        image = channels_last(x)

        def run(y: Any) -> Any:
            return _pool(node, y.transpose(order)).transpose(back)

        pool = _pool_of(node, x, w)
        if pool is not None:
            return channels_first(x.recorder.over_windows("pool", image, pool, shape, run))
        call = x.recorder.call(node.op, run, (image.node,), "NumPy computes it", shape=shape, dtype=x.dtype)
        return channels_first(x.recorder.wrap(call))
    axes = tuple(range(2 + len(w.kernel), 2 + 2 * len(w.kernel)))
    if node.op == "MaxPool":
        least = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        return reduced_windows(x, w, least, np.maximum)
    if node.op == "LpPool":
        power = node.attribute("p", 2)
        total = (np.abs(views(x, w, 0)) ** power).sum(axes)
        return (total ** (1.0 / power)).astype(x.dtype)
    total = reduced_windows(x, w, 0, np.add)
    if node.attribute("count_include_pad", 0) and node.attribute("ceil_mode", 0):
        pads = tuple(node.attribute("pads", (0,) * (2 * len(w.kernel))))[len(w.kernel) :]
        ones = np.pad(
            np.ones((1, 1, *x.shape[2:])), ((0, 0), (0, 0), *zip(w.begin, pads, strict=True)), constant_values=1
        )
        rest = w._replace(begin=(0,) * len(pads), end=tuple(b - a for a, b in zip(pads, w.end, strict=True)))
        count = views(ones, rest, 0).sum(axes)
    elif node.attribute("count_include_pad", 0):
        count = math.prod(w.kernel)
    else:
        count = views(np.ones((1, 1, *x.shape[2:])), w, 0).sum(axes)
    return (total / count).astype(x.dtype)


def _pool_of(node: Node, x: Any, w: Windows) -> Pool | None:
    """The record of pooling that kernels compute, or None."""
    padded, ceil = node.attribute("count_include_pad", 0), node.attribute("ceil_mode", 0)
    average = node.op == "AveragePool"
    known = x.dtype.name in NARROW or (x.dtype.name in CODES and node.op == "MaxPool")
    if node.op == "LpPool" or not known or (average and padded and ceil):
        return None
    windows = zip(w.kernel, w.strides, w.dilations, w.begin, strict=True)
    axes = zip(x.shape[2:], w.result, windows, strict=True)
    count = math.prod(w.kernel) if padded else 0
    pool = Pool("mean" if average else "max", count, tuple(regions(*axis) for axis in axes), w.kernel, w.strides)
    return pool if is_small(pool) else None


def to_space(x: Any, filters: tuple[Array, Array | None], how: dict[str, Any], blocks: tuple[int, str]) -> Any:
    """Record a convolution of images, channels last, whose channels become blocks; its result is (n, h, b, w, b c).

    There are b sets of filters, one for each row of a block, with the channels of its pixels one after the other: a set
    computes every b-th row of the result, where it lies.

    Args:
        x: the images, traced.
        filters: filters and bias, constants.
        how: options of `conv`.
        blocks: extent of a block, and the order of channels, "DCR" or "CRD".
    """
    (weight, bias), (b, order) = filters, blocks

    def packed() -> Any:
        return tuple(pack_conv(y, layout=how["layout"]) for y in by_rows(weight, b, order))

    rows = once(weight, f"rows of blocks {b} {order}", packed)
    size = sizes(tuple(x.shape), rows[0].shape, Options(**how))

    def alone(images: Any) -> Any:
        return np.stack([conv(images, y, **how) for y in rows], 2)

    shape = (x.shape[0], size.out[0], b, size.out[1], size.outputs)
    y = x.recorder.over_windows("conv", x, Filter(rows[0], size, rows), shape, alone)
    return y if bias is None else y + by_rows(bias, b, order).reshape((1, 1, b, 1, size.outputs))


def finished(y: Any, b: int, *, relu: bool) -> Any:
    """The image of blocks, with channels first, after a ReLU, if there is one."""
    n, h, _, w, outputs = y.shape
    y = e.relu(y) if relu else y
    return channels_first(y.reshape((n, h * b, w * b, outputs // b)))
