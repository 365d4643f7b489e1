"""Reductions, softmax and normalisations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.fusion.plan_windows import Norm
from portmm.onnx.arrays import CHANNELS_FIRST, channels_first, channels_last, grouped_channels
from portmm.onnx.elementwise_operators import FLOATS, same_type
from portmm.onnx.operators import MICROSOFT, UnsupportedError, is_traced, operator
from portmm.onnx.rewrites import DOMAIN
from portmm.onnx.shape_operators import axes_of, resolved
from portmm.spec import elementwise as e

if TYPE_CHECKING:
    from portmm.onnx.model import Node

KERNELS = ("float32", "float16", "bfloat16")


def reduced(x: Any, axes: list[int], function: Callable[[Any], Any], *, keep: bool) -> Any:
    """A function along the last axis, which it keeps with extent 1, applied to some axes of a traced array."""
    rest = [i for i in range(x.ndim) if i not in axes]
    order = (*rest, *sorted(axes))
    moved = x if order == tuple(range(x.ndim)) else x.transpose(order)
    outer, inner = [x.shape[i] for i in rest], math.prod(x.shape[i] for i in axes)
    value = function(moved.reshape((*outer, inner)))
    return value.reshape(tuple(1 if i in axes else x.shape[i] for i in range(x.ndim)) if keep else tuple(outer))


def _logsumexp(x: Any, **how: Any) -> Any:
    most = np.max(x, initial=-np.inf, **(how | {"keepdims": True}))
    safe = np.where(np.isfinite(most), most, 0)
    total = np.log(np.sum(np.exp(x - safe), **how))
    return total + safe.reshape(total.shape)


def _least(dtype: Any, *, most: bool) -> Any:
    if dtype.kind == "b":
        return most
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if most else np.iinfo(dtype).min
    return np.inf if most else -np.inf


_PLAIN: dict[str, Callable[..., Any]] = {
    "ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceProd": np.prod,
    "ReduceMax": lambda x, **how: np.max(x, initial=_least(x.dtype, most=False), **how),
    "ReduceMin": lambda x, **how: np.min(x, initial=_least(x.dtype, most=True), **how),
    "ReduceL1": lambda x, **how: np.sum(np.abs(x), **how), "ReduceSumSquare": lambda x, **how: np.sum(x * x, **how),
    "ReduceL2": lambda x, **how: np.sqrt(np.sum(np.square(x.astype(np.float64)), **how)),
    "ReduceLogSum": lambda x, **how: np.log(np.sum(x, **how)), "ReduceLogSumExp": _logsumexp,
}  # fmt: skip
_TRACED: dict[str, Callable[[Any], Any]] = {
    "ReduceSum": e.sum, "ReduceMean": lambda x: x.mean(-1, keepdims=True), "ReduceMax": e.max,
    "ReduceMin": lambda x: -e.max(-x), "ReduceL1": lambda x: e.sum(abs(x)), "ReduceSumSquare": lambda x: e.sum(x * x),
    "ReduceL2": lambda x: e.sqrt(e.sum(x * x)), "ReduceLogSum": lambda x: e.log(e.sum(x)),
    "ReduceLogSumExp": e.logsumexp,
}  # fmt: skip


@operator(*_PLAIN, host=(1,))
def _reduce(node: Node, x: Any, axes: Any = None) -> Any:
    wanted = axes_of(node, axes)
    if not wanted and node.attribute("noop_with_empty_axes", 0):
        return _PLAIN[node.op](x[None], axis=0).astype(x.dtype) if not is_traced(x) else _unreduced(node, x)
    at = sorted({i % x.ndim for i in wanted}) if wanted else list(range(x.ndim))
    keep = bool(node.attribute("keepdims", 1))
    if is_traced(x):
        if node.op not in _TRACED or x.dtype.name not in KERNELS or not at:
            raise UnsupportedError
        return reduced(x, at, _TRACED[node.op], keep=keep)
    return np.asarray(_PLAIN[node.op](x, axis=tuple(at), keepdims=keep)).astype(x.dtype)


def _unreduced(node: Node, x: Any) -> Any:
    """The reduction of each element by itself."""
    if node.op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
        return x
    raise UnsupportedError


def moved_last(x: Any, axis: int, function: Callable[[Any], Any]) -> Any:
    """A function of rows, applied along an axis."""
    axis %= x.ndim
    if axis == x.ndim - 1:
        return function(x)
    order = (*(i for i in range(x.ndim) if i != axis), axis)
    back = tuple(int(i) for i in np.argsort(order))
    return function(x.transpose(order)).transpose(back)


@operator("Softmax", "LogSoftmax")
def _softmax(node: Node, x: Any) -> Any:
    function = e.log_softmax if node.op == "LogSoftmax" else _once_divided if is_traced(x) else e.softmax
    if node.version >= 13:
        return same_type(moved_last(x, node.attribute("axis", -1), function), x)
    axis = node.attribute("axis", 1) % max(x.ndim, 1)
    rows = x.reshape((math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return same_type(function(rows).reshape(x.shape), x)


def _once_divided(x: Any) -> Any:
    """The softmax of traced rows, with one division for each."""
    powers = e.exp(x - e.max(x))
    return powers * (1.0 / e.sum(powers))


def _eps(node: Node, default: float) -> float:
    return float(node.attribute("epsilon", default))


def _float32(*xs: Any) -> tuple[Any, ...]:
    """Arrays of narrow floats in float32 where NumPy computes; kernels compute in it anyway."""
    return tuple(x if x is None or is_traced(x) or x.dtype == np.float64 else x.astype(np.float32) for x in xs)


@operator("LayerNormalization")
def _layer_norm(node: Node, x: Any, scale: Any, bias: Any = None) -> Any:
    axis = node.attribute("axis", -1) % x.ndim
    rows = x.reshape((*x.shape[:axis], math.prod(x.shape[axis:])))
    rows, weight, shift = _float32(rows, scale.reshape((-1,)), None if bias is None else bias.reshape((-1,)))
    mean = rows.mean(-1, keepdims=True)
    centred = rows - mean
    inverse = e.rsqrt((centred * centred).mean(-1, keepdims=True) + _eps(node, 1e-5))
    y = centred * inverse * weight
    y = same_type(y if shift is None else y + shift, x).reshape(x.shape)
    if len(node.outputs) == 1:
        return y
    small = (*x.shape[:axis], *(1,) * (x.ndim - axis))
    return (y, mean.reshape(small), inverse.reshape(small))[: len(node.outputs)]


@operator("RMSNormalization")
def _rms_norm(node: Node, x: Any, scale: Any) -> Any:
    axis = node.attribute("axis", -1) % x.ndim
    rows, weight = _float32(x.reshape((*x.shape[:axis], math.prod(x.shape[axis:]))), scale)
    inverse = e.rsqrt((rows * rows).mean(-1, keepdims=True) + _eps(node, 1e-5))
    return same_type((rows * inverse).reshape(x.shape) * weight, x)


@operator("SimplifiedLayerNormalization", domains=("", MICROSOFT))
def _simplified(node: Node, x: Any, scale: Any) -> Any:
    return _rms_norm(node, x, scale)


@operator("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domains=(MICROSOFT,))
def _skip_norm(node: Node, x: Any, skip: Any, gamma: Any, *more: Any) -> Any:
    simple = node.op != "SkipLayerNormalization"
    beta, bias = (None, *more, None)[:2] if simple else (*more, None, None)[:2]
    if any(name for name in node.outputs[1:3]):
        raise UnsupportedError
    total = x + skip if bias is None else x + skip + bias
    if simple:
        y = total * e.rsqrt((total * total).mean(-1, keepdims=True) + _eps(node, 1e-5)) * gamma
    else:
        centred = total - total.mean(-1, keepdims=True)
        y = centred * e.rsqrt((centred * centred).mean(-1, keepdims=True) + _eps(node, 1e-12)) * gamma
        y = y if beta is None else y + beta
    return (y, None, None, total)[: len(node.outputs)] if len(node.outputs) > 1 else y


@operator("InstanceNormalization")
def _instance_norm(node: Node, x: Any, scale: Any, bias: Any) -> Any:
    return _grouped(x, x.shape[1], scale, bias, _eps(node, 1e-5))


@operator("GroupNormalization")
def _group_norm(node: Node, x: Any, scale: Any, bias: Any) -> Any:
    groups, channels = int(node.attribute("num_groups")), x.shape[1]
    if scale.shape[0] != channels:  # before operator set 21 a scale for each group
        scale, bias = (
            np.broadcast_to(y.reshape((-1, 1)), (groups, channels // groups)).reshape((-1,)) for y in (scale, bias)
        )
    return _grouped(x, groups, scale, bias, _eps(node, 1e-5))


def _grouped(x: Any, groups: int, scale: Any, bias: Any, eps: float) -> Any:
    """Groups of channels less their means, over their standard deviations, with a scale and a bias by channel."""
    n, c = x.shape[:2]
    if _is_last(x) and not is_traced(scale, bias):
        weight, shift = (np.asarray(y, np.float32).reshape((groups, -1)) for y in (scale, bias))
        return channels_first(_grouped_last(channels_last(x), weight, shift, eps))
    split = (n, groups, c // groups, math.prod(x.shape[2:]))
    rows, scale, bias = _float32(x.reshape((n, groups, math.prod(split[2:]))), scale, bias)
    mean = rows.mean(-1, keepdims=True)
    inverse = e.rsqrt(e.square(rows - mean).mean(-1, keepdims=True) + eps)
    # Values are normalized where they get their scales: kernels read them again, and store them once.
    each = (rows.reshape(split) - mean.reshape((n, groups, 1, 1))) * inverse.reshape((n, groups, 1, 1))
    own = (groups, c // groups, 1)
    each = same_type(each * scale.reshape(own) + bias.reshape(own), x)
    return grouped_channels(each, x.shape) if is_traced(each) else each.reshape(x.shape)


@operator("GroupedNormalization", domains=(DOMAIN,))
def _grouped_norm(node: Node, x: Any, *constants: Any) -> Any:
    """An instance norm of reshaped images, whose result is reshaped, multiplied and added to."""
    first, scale, bias, second, factor, offset = constants
    rows, shape, each = resolved(x, first), resolved(x, second), (x.shape[1], *(1,) * (x.ndim - 2))
    fits = rows[:2] == (x.shape[0], scale.size) and shape == tuple(x.shape)
    if _is_last(x) and fits and factor.shape[1 - x.ndim :] == each == offset.shape[1 - x.ndim :]:
        factor, offset = (y.reshape((scale.size, -1)) for y in (factor, offset))
        weight, shift = factor * scale.reshape((-1, 1)), factor * bias.reshape((-1, 1)) + offset
        return channels_first(_grouped_last(channels_last(x), weight, shift, _eps(node, 1e-5)))
    return _grouped(x.reshape(rows), rows[1], scale, bias, _eps(node, 1e-5)).reshape(shape) * factor + offset


def _is_last(x: Any) -> bool:
    """Test whether an array is traced images of float32 whose channels are last in memory."""
    return is_traced(x) and x.node.name == CHANNELS_FIRST and x.dtype == np.float32


def _grouped_last(x: Any, weight: Any, shift: Any, eps: float) -> Any:
    """Groups of channels of images with channels last, normalized, with a scale and a bias."""
    form = Norm(weight.shape[0], eps)
    vectors = [np.ascontiguousarray(y, np.float32).reshape(x.shape[-1]) for y in (weight, shift)]

    def alone(images: Any, scale: Any, bias: Any) -> Any:
        return form.plain(images) * scale + bias

    return x.recorder.over_windows("norm", (x, *vectors), form, x.shape, alone)


@operator("BatchNormalization")
def _batch_norm(node: Node, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    if node.attribute("training_mode", 0) or any(node.outputs[1:]):
        raise UnsupportedError
    shape = (1, -1, *(1,) * (x.ndim - 2)) if x.ndim > 1 else (-1,)
    if not is_traced(scale, bias, mean, variance):
        factor = scale / np.sqrt(variance + _eps(node, 1e-5))
        offset = bias - mean * factor
        factor, offset = (y.astype(x.dtype).reshape(shape) for y in (factor, offset))
        return same_type(x * factor + offset, x)
    scale, bias, mean, variance = (y.reshape(shape) for y in (scale, bias, mean, variance))
    return same_type((x - mean) * (scale * e.rsqrt(variance + _eps(node, 1e-5))) + bias, x)


@operator("LpNormalization")
def _lp_norm(node: Node, x: Any) -> Any:
    if x.dtype.name not in FLOATS:
        raise UnsupportedError
    power = node.attribute("p", 2)

    def rows(y: Any) -> Any:
        norm = e.sum(abs(y)) if power == 1 else e.sqrt(e.sum(y * y))
        return e.where(norm == 0, 0.0, y / norm)

    return same_type(moved_last(x, node.attribute("axis", -1), rows), x)


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(node: Node, x: Any) -> Any:
    small, pixels = (*x.shape[:2], *(1,) * (x.ndim - 2)), math.prod(x.shape[2:])
    if is_traced(x) and x.node.name == CHANNELS_FIRST and node.op == "GlobalAveragePool":
        rows = channels_last(x).reshape((x.shape[0], pixels, x.shape[1]))
        return (np.full((1, pixels), 1 / pixels, x.dtype) @ rows).reshape(small)
    rows = x.reshape((*x.shape[:2], pixels))
    value = rows.mean(-1, keepdims=True) if node.op == "GlobalAveragePool" else e.max(rows)
    return same_type(value, x).reshape(small)
