"""Convolutions among the operators of PyTorch, as operations on traced arrays.

Between convolutions images lie with channels last, which PyTorch, too, sees as images with channels first. Filters that
are parameters are packed once, with the normalisation that follows; an array that is added and a ReLU are part of
the kernel.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from portmm.arrays.interop import as_numpy
from portmm.ops import epilogues
from portmm.ops.convolution import conv
from portmm.ops.convolution_weights import pack_conv
from portmm.torch.aten import HANDLERS, Unsupported, row
from portmm.trace.placeholders import Array

LAYOUTS = {3: "NWC", 4: "NHWC", 5: "NDHWC"}
NORM = "aten._native_batch_norm_legit_no_training.default"
_LAST = "channels first"
"""Name of views of images whose channels are last in memory."""


class _Tail(NamedTuple):
    """Operators that follow a convolution and that its kernel computes.

    Attributes:
        nodes: of the graph, in order.
        norm: factors, offsets, means and variances of a normalisation by channel, and the number that is added to the
            last; empty if there is none.
        residual: the array that is added.
        relu: whether negative results become zeros.
    """

    nodes: tuple[Any, ...] = ()
    norm: tuple[Any, ...] = ()
    residual: Any = None
    relu: bool = False


def _user(node: Any) -> Any:
    """The only operator that reads a result."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def tail_of(t: Any, node: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Tail:
    """Operators after a convolution with results of a shape and a type, as far as its kernel computes them."""
    tail, user = _Tail(), _user(node)
    if str(getattr(user, "target", "")) == NORM and user.args[0] is node:
        norm = (*[t.values.get(x) if isinstance(x, torch.fx.Node) else x for x in user.args[1:5]], user.args[6])
        item = _user(user)
        if _fixed(norm[:4]) and item is not None and getattr(item.target, "__name__", "") == "getitem":
            node, tail = item, tail._replace(nodes=(user, item), norm=norm)
            user = _user(node)
    if str(getattr(user, "target", "")) == "aten.add.Tensor" and not user.kwargs and len(user.args) == 2:
        other = t.values.get(user.args[1 if user.args[0] is node else 0])
        if type(other) is Array and (other.shape, other.dtype) == (shape, dtype):
            node, tail = user, tail._replace(nodes=(*tail.nodes, user), residual=other)
            user = _user(node)
    if str(getattr(user, "target", "")) == "aten.relu.default":
        tail = tail._replace(nodes=(*tail.nodes, user), relu=True)
    return tail


def _fixed(values: Any) -> bool:
    """Whether values are tensors that no call changes, or None, with a mean and a variance."""
    return all(x is None or isinstance(x, torch.Tensor) for x in values) and None not in (values[2], values[3])


def _packed(weight: Any, bias: Any, norm: tuple[Any, ...], groups: int) -> tuple[Any, Any]:
    """Filters in panels, and what is added to each channel."""
    added = None if bias is None else bias.detach()
    filters = weight.detach()
    if norm:
        factor, offset = factors(norm)
        filters = (filters.float() * factor.reshape(-1, *(1,) * (filters.ndim - 1))).to(filters.dtype)
        added = offset if added is None else added.float() * factor + offset
    panels = pack_conv(as_numpy(filters), groups=groups, layout=LAYOUTS[filters.ndim])
    return panels, None if added is None else np.array(as_numpy(added.float()))


def factors(norm: tuple[Any, ...]) -> tuple[Any, Any]:
    """The factor and the offset of each channel."""
    scale, offset, mean, variance, eps = norm
    factor = torch.rsqrt(variance.detach().float() + eps)
    factor = factor if scale is None else factor * scale.detach().float()
    shift = -mean.detach().float() * factor
    return factor, shift if offset is None else shift + offset.detach().float()


def _channels_last(x: Array) -> Any:
    """Images with channels last: as they lie in memory, where a convolution wrote them."""
    if x.node.kind == "view" and x.node.name == _LAST:
        return Array(x.recorder, x.node.inputs[0])
    order = (0, *range(2, x.ndim), 1)
    return x.recorder.viewed("transpose", lambda y: y.transpose(order), x)


@row("convolution")
def _convolution(
    t: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, _: Any,
    groups: int,
) -> Any:  # fmt: skip
    images = t.array(x)
    if transposed or images.ndim not in LAYOUTS:
        raise Unsupported("a transposed convolution" if transposed else f"a convolution of {images.ndim} dimensions")
    if not isinstance(weight, torch.Tensor) or isinstance(bias, Array):
        raise Unsupported("filters that are no parameters")
    if images.dtype.name not in ("float32", "float16", "bfloat16") or 0 in images.shape:
        raise Unsupported(f"convolutions of {images.dtype} {images.shape}")
    shape = tuple(map(t.extent, t.now.meta["val"].shape))
    tail = tail_of(t, t.now, shape, images.dtype)
    tensors = [y for y in (weight, bias, *tail.norm[:4]) if y is not None]
    panels, added = t.constants.panels(
        tensors, lambda: _packed(weight, bias, tail.norm, groups), "convolution", groups, *tail.norm[4:]
    )
    options: dict[str, Any] = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation)}
    layout, relu = LAYOUTS[images.ndim], tail.relu
    pixels = (shape[0], math.prod(shape[2:]), shape[1])

    def plain(y: Any, residual: Any = None) -> Any:
        y = np.ascontiguousarray(y)  # a copy takes less than reading channels that are apart, tap by tap
        more = None if residual is None else residual.reshape(pixels)
        epilogue = epilogues.of_convolution(added, more, rectified=relu)
        return conv(y, panels, layout=layout, groups=groups, epilogue=epilogue, **options)

    return placed(t, plain, images, tail, shape)


def placed(t: Any, plain: Any, images: Any, tail: _Tail, shape: tuple[int, ...]) -> Any:
    """The results (batch, outputs, *extents) of a function of images with channels last, and those of its tail."""
    operands = [images] if tail.residual is None else [images, tail.residual]
    inputs = tuple([_channels_last(y).node for y in operands])
    node = t.recorder.add("call", (shape[0], *shape[2:], shape[1]), images.dtype, inputs, plain, "conv")
    order = (0, len(shape) - 1, *range(1, len(shape) - 1))
    value = t.recorder.viewed(_LAST, lambda y: y.transpose(order), Array(t.recorder, node))
    t.ready.update(dict.fromkeys(tail.nodes, value))
    if tail.norm:
        t.ready[tail.nodes[0]] = [value, None, None]
    return value


def _batch_norm(t: Any, x: Any, scale: Any, offset: Any, mean: Any, variance: Any, _: float, eps: float) -> Any:
    if not _fixed((scale, offset, mean, variance)):
        raise Unsupported("a normalisation whose statistics are no parameters")
    y = t.operand(x)
    tensors = [z for z in (scale, offset, mean, variance) if z is not None]
    factor, shift = t.constants.panels(
        tensors, lambda: [z.reshape(-1, *(1,) * (y.ndim - 2)) for z in factors((scale, offset, mean, variance, eps))],
        "norm", eps, y.ndim,
    )  # fmt: skip
    return [y * t.array(factor) + t.array(shift), None, None]


HANDLERS[NORM] = _batch_norm
