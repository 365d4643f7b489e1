"""Gradients of convolutions as operators of `torch.library`.

Owns `conv_input_gradient` and `conv_filter_gradient` of tensors with channels first. A convolution is linear in its
images and in its filters, and so are both gradients: their own gradients are convolutions and the other gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.library import custom_op

from portmm.arrays.interop import as_numpy, as_tensor
from portmm.ops import convolution_gradients as arrays

if TYPE_CHECKING:
    Tensor = Any
else:
    Tensor = torch.Tensor  # `custom_op` reads it

LAYOUTS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}
"""Layout of images, by their number of dimensions."""
_WIDE = (torch.float32, torch.float64)


def _computed(function: Any, x: Tensor, y: Tensor, *extents: Any, **options: Any) -> Tensor:
    """A gradient of two tensors, of the type of the first: in the host's memory it is summed in float32 or float64."""
    x, y = x.detach(), y.detach()
    if x.is_cuda:
        return function(x, y, *extents, layout=LAYOUTS[x.ndim], **options)
    arrays_ = [as_numpy(z if z.dtype in _WIDE else z.float()) for z in (x, y)]
    return as_tensor(function(*arrays_, *extents, layout=LAYOUTS[x.ndim], **options)).to(x.dtype)


@custom_op("portmm::conv_input_gradient", mutates_args=())
def conv_input_gradient(
    dy: Tensor, w: Tensor, spatial: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """The gradient of a convolution in its images, of extents `spatial`."""
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _computed(arrays.conv_input_gradient, dy, w, spatial, **options)


@conv_input_gradient.register_fake
def _(dy: Tensor, w: Tensor, spatial: list[int], *options: Any) -> Tensor:
    return dy.new_empty((dy.shape[0], w.shape[1] * options[-1], *spatial))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    ctx.options = inputs[3:]
    ctx.save_for_backward(*inputs[:2])


def _input_backward(ctx: Any, g: Tensor) -> Any:
    dy, w = ctx.saved_tensors
    of_dy = torch.ops.portmm.conv(g, w, None, *ctx.options) if ctx.needs_input_grad[0] else None
    of_w = None
    if ctx.needs_input_grad[1]:
        of_w = conv_filter_gradient(g, dy, list(w.shape[2:]), *ctx.options)
    return of_dy, of_w, None, None, None, None, None


conv_input_gradient.register_autograd(_input_backward, setup_context=_save)


@custom_op("portmm::conv_filter_gradient", mutates_args=())
def conv_filter_gradient(
    x: Tensor, dy: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """The gradient of a convolution in its filters, of extents `kernel`."""
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _computed(arrays.conv_filter_gradient, x, dy, kernel, **options)


@conv_filter_gradient.register_fake
def _(x: Tensor, dy: Tensor, kernel: list[int], *options: Any) -> Tensor:
    return x.new_empty((dy.shape[1], x.shape[1] // options[-1], *kernel))


def _filter_backward(ctx: Any, g: Tensor) -> Any:
    x, dy = ctx.saved_tensors
    of_x = None
    if ctx.needs_input_grad[0]:
        of_x = conv_input_gradient(dy, g, list(x.shape[2:]), *ctx.options)
    of_dy = torch.ops.portmm.conv(x, g, None, *ctx.options) if ctx.needs_input_grad[1] else None
    return of_x, of_dy, None, None, None, None, None


conv_filter_gradient.register_autograd(_filter_backward, setup_context=_save)
