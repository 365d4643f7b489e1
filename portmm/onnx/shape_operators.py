"""Operators that move elements: reshapes, transposes, parts, joins and gathers, and those that make arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from portmm.onnx.arrays import CHANNELS_FIRST, channels_first, channels_last
from portmm.onnx.model import Node, OnnxError
from portmm.onnx.operators import UnsupportedError, is_traced, operator

FLOATS = ("float32", "float16", "bfloat16")
NEAREST = {
    "mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor",
    "axes": None, "keep_aspect_ratio_policy": "stretch",
}  # fmt: skip
"""Attributes of Resize that decide on the nearest element, with their defaults."""
REPEATS = tuple(
    ("nearest", *x, None, "stretch")
    for x in (("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil"))
)
"""Modes of Resize whose i-th element of s times as many, s a whole number, is the element at floor(i / s)."""


def integers(x: Any) -> list[int]:
    """Integers of an attribute or a known array."""
    return [int(i) for i in np.asarray(x).reshape(-1)]


def axes_of(node: Node, axes_input: Any, name: str = "axes") -> list[int] | None:
    """Axes of an input, or of an attribute in older operator sets."""
    if axes_input is not None:
        return integers(axes_input)
    value = node.attribute(name)
    return None if value is None else integers(value)


@operator("Shape")
def _shape(node: Node, x: Any) -> Any:
    rank = x.ndim
    start, end = node.attribute("start", 0), node.attribute("end", rank)
    return np.asarray(x.shape[slice(start, end)], np.int64)


@operator("Size")
def _size(_: Node, x: Any) -> Any:
    return np.asarray(math.prod(x.shape), np.int64)


def resolved(x: Any, shape: Any) -> tuple[int, ...]:
    """The extents that a reshape gives to an array: 0 is an extent of its own, and -1 the rest."""
    wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(integers(shape))]
    rest = math.prod(x.shape) // max(math.prod(n for n in wanted if n >= 0), 1)
    return tuple(rest if n < 0 else n for n in wanted)


@operator("Reshape", host=(1,))
def _reshape(node: Node, x: Any, shape: Any = None) -> Any:
    wanted = integers(node.attribute("shape") if shape is None else shape)
    if not node.attribute("allowzero", 0):
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return x.reshape(tuple(wanted))


@operator("Flatten")
def _flatten(node: Node, x: Any) -> Any:
    axis = node.attribute("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape((math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@operator("Squeeze", host=(1,))
def _squeeze(node: Node, x: Any, axes: Any = None) -> Any:
    at = axes_of(node, axes)
    gone = {i % x.ndim for i in at} if at is not None else {i for i, n in enumerate(x.shape) if n == 1}
    if any(x.shape[i] != 1 for i in gone):
        raise OnnxError(f"{node.name}: axes {sorted(gone)} of shape {x.shape} are not of extent 1")
    return x.reshape(tuple(n for i, n in enumerate(x.shape) if i not in gone))


@operator("Unsqueeze", host=(1,))
def _unsqueeze(node: Node, x: Any, axes: Any = None) -> Any:
    new = axes_of(node, axes) or []
    rank = x.ndim + len(new)
    at = {i % rank for i in new}
    rest = iter(x.shape)
    return x.reshape(tuple(1 if i in at else next(rest) for i in range(rank)))


@operator("Transpose")
def _transpose(node: Node, x: Any) -> Any:
    return x.transpose(tuple(node.attribute("perm", range(x.ndim - 1, -1, -1))))


@operator("Expand", host=(1,))
def _expand(_: Node, x: Any, shape: Any) -> Any:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(integers(shape))))


@operator("Concat")
def _concat(node: Node, *xs: Any) -> Any:
    axis = node.attribute("axis", 1) % xs[0].ndim
    if len(xs) == 1:
        return xs[0]
    if len({x.dtype for x in xs}) > 1 or xs[0].dtype.name not in FLOATS or not all(map(is_traced, xs)):
        return np.concatenate(xs, axis=axis)
    if axis == 1 and any(x.node.name == CHANNELS_FIRST for x in xs):
        return channels_first(xs[0].recorder.joined([channels_last(x) for x in xs]))
    last = axis == xs[0].ndim - 1
    return xs[0].recorder.joined(xs) if last else np.concatenate(xs, axis=axis)


@operator("Resize", host=(1, 2, 3))
def _resize(node: Node, x: Any, region: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    del region
    how = tuple(node.attribute(n, d) for n, d in NEAREST.items())
    if not is_traced(x) or x.ndim < 3 or node.version < 11 or how not in REPEATS:
        raise UnsupportedError("only elements repeated a whole number of times are a copy")
    known = scales if scales is not None and np.asarray(scales).size else np.asarray(sizes) / x.shape
    times = [float(n) for n in np.asarray(known).reshape(-1)]
    if times[:2] != [1, 1] or not all(n == int(n) >= 1 for n in times):
        raise UnsupportedError("only elements repeated a whole number of times are a copy")
    images = channels_last(x)
    (n, *size, c), counts = images.shape, [int(i) for i in times[2:]]
    apart = images.reshape((n, *(i for m in size for i in (m, 1)), c))
    repeated = np.broadcast_to(apart, (n, *(i for pair in zip(size, counts, strict=True) for i in pair), c))
    return channels_first(repeated.reshape((n, *(m * i for m, i in zip(size, counts, strict=True)), c)))


@operator("Split", host=(1,))
def _split(node: Node, x: Any, sizes: Any = None) -> Any:
    axis = node.attribute("axis", 0) % x.ndim
    lengths = axes_of(node, sizes, "split")
    if lengths is None:
        count = node.attribute("num_outputs", len(node.outputs))
        step = -(-x.shape[axis] // count)
        lengths = [min(step, max(x.shape[axis] - i * step, 0)) for i in range(count)]
    parts, start = [], 0
    for length in lengths:
        parts.append(x[(slice(None),) * axis + (slice(start, start + length),)])
        start += length
    return tuple(parts)


@operator("Slice", host=(1, 2, 3, 4))
def _slice(node: Node, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Any:
    begin = axes_of(node, starts, "starts") or []
    stop = axes_of(node, ends, "ends") or []
    where = axes_of(node, axes) or list(range(len(begin)))
    step = integers(steps) if steps is not None else [1] * len(begin)
    key = [slice(None)] * x.ndim
    for i, a, b, s in zip(where, begin, stop, step, strict=True):
        n = x.shape[i]
        if s > 0:
            low, high = _clamped(a, n, 0, n), _clamped(b, n, 0, n)
            key[i % x.ndim] = slice(low, high, s)
        else:
            low, high = _clamped(a, n, 0, n - 1), _clamped(b, n, -1, n - 1)
            key[i % x.ndim] = slice(low, None if high < 0 else high, s)
    return x[tuple(key)]


def _clamped(i: int, n: int, low: int, high: int) -> int:
    return min(max(i + n if i < 0 else i, low), high)


@operator("Gather")
def _gather(node: Node, x: Any, indices: Any) -> Any:
    axis = node.attribute("axis", 0) % x.ndim
    if is_traced(x) and not is_traced(indices) and indices.ndim == 0:
        return x[(slice(None),) * axis + (int(indices),)]
    if is_traced(x, indices):
        raise UnsupportedError
    if not axis:
        return np.asarray(x[indices])  # a quarter less time than np.take
    return np.take(x, np.where(indices < 0, indices + x.shape[axis], indices), axis=axis)


@operator("GatherElements", computed=True)
def _gather_elements(node: Node, x: Any, indices: Any) -> Any:
    axis = node.attribute("axis", 0)
    key = list(np.indices(indices.shape, sparse=True))
    key[axis] = indices
    return x[tuple(key)]


@operator("GatherND", computed=True)
def _gather_nd(node: Node, x: Any, indices: Any) -> Any:
    batch = node.attribute("batch_dims", 0)
    if not batch:
        return x[tuple(np.moveaxis(indices, -1, 0))]
    items = math.prod(x.shape[:batch])
    flat, at = x.reshape(items, *x.shape[batch:]), indices.reshape(items, *indices.shape[batch:])
    rows = np.stack([flat[i][tuple(np.moveaxis(at[i], -1, 0))] for i in range(items)])
    return rows.reshape(*x.shape[:batch], *rows.shape[1:])


_COMBINE = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@operator("ScatterElements", "Scatter", computed=True)
def _scatter_elements(node: Node, x: Any, indices: Any, updates: Any) -> Any:
    result = x.copy()
    axis = node.attribute("axis", 0)
    key = list(np.indices(indices.shape, sparse=True))
    key[axis] = np.where(indices < 0, indices + x.shape[axis], indices)
    _put(node, result, tuple(np.broadcast_arrays(*key)), updates)
    return result


@operator("ScatterND", computed=True)
def _scatter_nd(node: Node, x: Any, indices: Any, updates: Any) -> Any:
    result = x.copy()
    _put(node, result, tuple(np.moveaxis(indices, -1, 0)), updates)
    return result


def _put(node: Node, result: Any, key: Any, updates: Any) -> None:
    reduction = node.attribute("reduction", "none")
    if reduction == "none":
        result[key] = updates
    else:
        _COMBINE[reduction].at(result, key, updates)


@operator("Pad", host=(1, 2, 3), computed=True)
def _pad(node: Node, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    widths = integers(node.attribute("pads", node.attribute("paddings")) if pads is None else pads)
    at = integers(axes) if axes is not None else list(range(x.ndim))
    fill = node.attribute("value", 0) if value is None or not np.asarray(value).size else np.asarray(value).reshape(())
    pairs = [(0, 0)] * x.ndim
    for i, axis in enumerate(at):
        pairs[axis % x.ndim] = (widths[i], widths[len(at) + i])
    key = tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(pairs, x.shape, strict=True))
    grown = [(max(a, 0), max(b, 0)) for a, b in pairs]
    mode = node.attribute("mode", "constant")
    if mode == "constant":
        return np.pad(x[key], grown, constant_values=np.asarray(fill).astype(x.dtype))
    return np.pad(x[key], grown, mode=mode)


@operator("Tile", host=(1, 2))
def _tile(node: Node, x: Any, repeats: Any, axis: Any = None) -> Any:
    counts = integers(repeats)
    if axis is not None:
        counts = [counts[0] if i == int(axis) else 1 for i in range(x.ndim)]
    if is_traced(x):
        if any(n != 1 for n in counts):
            raise UnsupportedError
        return x
    del node
    return np.tile(x, counts)


@operator("DepthToSpace")
def _depth_to_space(node: Node, x: Any) -> Any:
    return depth_to_space(x, node.attribute("blocksize"), node.attribute("mode", "DCR"))


def depth_to_space(x: Any, b: int, mode: str) -> Any:
    """Images whose channels become blocks of b x b pixels: "DCR", pixels are outer channels, or "CRD", inner ones."""
    n, c, h, w = x.shape
    if mode == "DCR":
        y = x.reshape((n, b, b, c // b**2, h, w)).transpose((0, 3, 4, 1, 5, 2))
    else:
        y = x.reshape((n, c // b**2, b, b, h, w)).transpose((0, 1, 4, 2, 5, 3))
    return y.reshape((n, c // b**2, h * b, w * b))


@operator("SpaceToDepth")
def _space_to_depth(node: Node, x: Any) -> Any:
    n, c, h, w = x.shape
    b = node.attribute("blocksize")
    order = (0, 3, 5, 1, 2, 4) if node.attribute("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return x.reshape((n, c, h // b, b, w // b, b)).transpose(order).reshape((n, c * b * b, h // b, w // b))


@operator("Optional", "OptionalGetElement", alone=True)
def _optional(_: Node, x: Any = None) -> Any:
    return x


@operator("OptionalHasElement", alone=True)
def _has_element(_: Node, x: Any = None) -> Any:
    return np.asarray(x is not None)


@operator("ConstantOfShape", host=(0,))
def _constant_of_shape(node: Node, shape: Any) -> Any:
    value = node.attribute("value", np.zeros(1, np.float32))
    return np.full(tuple(integers(shape)), np.asarray(value).reshape(-1)[0], np.asarray(value).dtype)


@operator("Constant")
def _constant(node: Node) -> Any:
    for name, dtype in (
        ("value", None), ("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64),
        ("value_ints", np.int64), ("value_string", object), ("value_strings", object), ("sparse_value", None),
    ):  # fmt: skip
        if name in node.attributes:
            return np.asarray(node.attributes[name], dtype)
    raise UnsupportedError


@operator("Range", host=(0, 1, 2))
def _range(_: Node, start: Any, limit: Any, delta: Any) -> Any:
    count = max(math.ceil((limit.item() - start.item()) / delta.item()), 0)
    return (np.arange(count) * delta + start).astype(start.dtype)


@operator("Trilu", host=(1,), computed=True)
def _trilu(node: Node, x: Any, k: Any = None) -> Any:
    function = np.triu if node.attribute("upper", 1) else np.tril
    return function(x, 0 if k is None else int(np.asarray(k).reshape(())))


@operator("OneHot", host=(1,), computed=True)
def _one_hot(node: Node, indices: Any, depth: Any, values: Any) -> Any:
    count = int(np.asarray(depth).reshape(-1)[0])
    axis = node.attribute("axis", -1)
    at = np.mod(indices.astype(np.int64), count)
    hot = np.expand_dims(at, axis) == np.arange(count).reshape(
        [-1 if i == axis % (indices.ndim + 1) else 1 for i in range(indices.ndim + 1)]
    )
    inside = np.expand_dims((indices >= -count) & (indices < count), axis)
    return np.where(hot & inside, values[1], values[0]).astype(values.dtype)


@operator("CumSum", host=(1,), computed=True)
def _cumsum(node: Node, x: Any, axis: Any) -> Any:
    at = int(np.asarray(axis).reshape(-1)[0])
    y = np.flip(x, at) if node.attribute("reverse", 0) else x
    total = np.cumsum(y, axis=at, dtype=x.dtype)
    if node.attribute("exclusive", 0):
        total = total - y
    return np.flip(total, at) if node.attribute("reverse", 0) else total


@operator("ArgMax", "ArgMin", computed=True)
def _arg(node: Node, x: Any) -> Any:
    axis, keep = node.attribute("axis", 0), bool(node.attribute("keepdims", 1))
    function = np.argmax if node.op == "ArgMax" else np.argmin
    if not node.attribute("select_last_index", 0):
        return function(x, axis=axis, keepdims=keep).astype(np.int64)
    return (x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis, keepdims=keep)).astype(np.int64)


@operator("TopK", host=(1,), computed=True)
def _top_k(node: Node, x: Any, k: Any = None) -> Any:
    count = node.attribute("k") if k is None else int(np.asarray(k).reshape(-1)[0])
    axis = node.attribute("axis", -1)
    largest = node.attribute("largest", 1)
    if largest:  # the first of equals, as the stable order of reversed values has the last first
        order = np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
        order = x.shape[axis] - 1 - order
    else:
        order = np.argsort(x, axis=axis, kind="stable")
    order = np.take(order, np.arange(count), axis=axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64)
