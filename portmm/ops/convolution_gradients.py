"""Transposed convolution, and the gradients of a convolution.

Owns `conv_transpose`, `conv_input_gradient` and `conv_filter_gradient`, of NumPy's arrays and tensors; those on a
device are computed by `grid_gradients`. With a stride, results of one phase, every
stride-th pixel, are a convolution by every stride-th tap: no zeros are multiplied. The gradient in filters is a product
whose B is the view of the windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import wraps
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config
from portmm.dispatch.view_routes import view_route
from portmm.errors import BuildError, ConvolutionError
from portmm.ops import host_matmul
from portmm.ops.convolution import conv
from portmm.ops.convolution_options import Options, each, hashable, layout_of, paddings, sizes
from portmm.runtime.cpu import runtime
from portmm.spec.convolution import windows
from portmm.spec.dtype import spell
from portmm.spec.layouts import Views
from portmm.spec.problem import Problem

Array = np.ndarray[Any, Any]


def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gives tensors of tensors in the host's memory."""

    @wraps(function)
    def call(*arrays: Any, **options: Any) -> Any:
        every = (*arrays, *options.values())
        if any(map(libraries.is_tensor, every)) and not any(map(libraries.on_device, every)):
            from portmm.arrays.interop import through

            return through(function, *arrays, **options)
        return function(*arrays, **options)

    return call


def _operands(**arrays: Any) -> Any:
    """Two arrays of NumPy's, or the descriptions of arrays on a device."""
    if any(map(libraries.on_device, arrays.values())):
        from portmm.ops.grid_gradients import adopted

        return adopted(*arrays.items())
    return [numpy_arrays.as_operand(x, name, matrix=False) for name, x in arrays.items()]


@_of_tensors
def conv_transpose(
    x: Any,
    w: Any,
    *,
    stride: int | Sequence[int] = 1,
    padding: Any = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    layout: str = "NHWC",
    output_padding: int | Sequence[int] = 0,
) -> Any:
    """Transposed convolution, as in PyTorch and ONNX: the gradient of `conv` in its images.

    Args:
        x: images in `layout`, float32 or another type of `conv`.
        w: filters (channels, outputs of a group, *kernel).
        stride: pixels of the result between those of the images.
        padding: pixels that are cut off: a number, one for each dimension, or a pair (before, after) for each.
        dilation: distance of the taps of a filter.
        groups: of channels.
        layout: as in `conv`.
        output_padding: pixels that are added at the end of each dimension.

    Returns:
        The result in `layout`.

    Raises:
        ConvolutionError: shapes or options do not fit together.
    """
    images, filters = _operands(x=x, w=w)
    count, last = layout_of(layout)
    if len(images.shape) != count + 2 or len(filters.shape) != count + 2:
        raise ConvolutionError(f"x has shape {images.shape} and w {filters.shape}; both have {count + 2} dimensions")
    spatial = images.shape[1:-1] if last else images.shape[2:]
    steps, gaps = each("stride", hashable(stride), count), each("dilation", hashable(dilation), count)
    more, cut = each("output_padding", hashable(output_padding), count, 0), hashable(padding)
    if cut == "same":
        raise ConvolutionError("padding of a transposed convolution is a number, or numbers or pairs; got 'same'")
    pads = paddings(cut, count)
    out = [
        (n - 1) * s - sum(p) + (k - 1) * d + 1 + e
        for n, s, p, k, d, e in zip(spatial, steps, pads, filters.shape[2:], gaps, more, strict=True)
    ]
    return _transposed(images, filters, (steps, [p[0] for p in pads], gaps), out, groups, layout)


@_of_tensors
def conv_input_gradient(
    dy: Any, w: Any, spatial: Sequence[int], *, stride: int | Sequence[int] = 1, padding: Any = 0,
    dilation: int | Sequence[int] = 1, groups: int = 1, layout: str = "NHWC",
) -> Any:  # fmt: skip
    """The gradient of a convolution in its images.

    Args:
        dy: the gradient in its result.
        w: its filters (outputs, channels of a group, *kernel).
        spatial: extents of its images.
        stride: as in `conv`, like the options that follow.
        padding: numbers, pairs, or "same".
        dilation: of taps.
        groups: of channels.
        layout: of images and results.

    Raises:
        ConvolutionError: shapes or options do not fit together.
    """
    gradient, filters = _operands(dy=dy, w=w)
    last = layout_of(layout)[1]
    options = Options(hashable(stride), hashable(padding), hashable(dilation), groups, layout)
    extents, channels = tuple(map(int, spatial)), groups * filters.shape[1]
    size = sizes((1, *extents, channels) if last else (1, channels, *extents), filters.shape, options)
    outputs = filters.shape[0]
    wanted = (*size.out, outputs) if last else (outputs, *size.out)
    if gradient.shape[1:] != wanted:
        raise ConvolutionError(
            f"dy has shape {gradient.shape}; results of images of {extents} have (images, *{wanted})"
        )
    return _transposed(gradient, filters, (size.stride, size.before, size.dilation), list(extents), groups, layout)


class Phase(NamedTuple):
    """Pixels of the result along a dimension that are a stride apart, as a convolution.

    Attributes:
        first: the first of them.
        pixels: their number.
        taps: taps of the filter, in the order in which they meet the pixels of an image.
        dilation: of these in an image.
        begin: pixel of the image that the first tap meets first; it may be in padding.
    """

    first: int
    pixels: int
    taps: list[int]
    dilation: int
    begin: int

    def reach(self, pixels: int) -> tuple[int, int, int, int]:
        """The first of some pixels that windows reach, the number of those, and padding before and after them."""
        end = self.begin + max(0, len(self.taps) - 1) * self.dilation + self.pixels
        first, last = min(max(0, self.begin), pixels), max(0, min(pixels, end))
        return first, max(0, last - first), max(0, -self.begin), max(0, end - pixels)


def _phases(out: int, kernel: int, stride: int, before: int, dilation: int) -> list[Phase]:
    """The phases along a dimension: result o is the sum over taps t of the pixel (o + before - t dilation) / stride."""
    phases = []
    for first in range(min(stride, out)):
        taps = [t for t in range(kernel) if (first + before - t * dilation) % stride == 0][::-1]
        begin = (first + before - taps[0] * dilation) // stride if taps else 0
        phases.append(Phase(first, -(-(out - first) // stride), taps, dilation // gcd(stride, dilation), begin))
    return phases


def _transposed(  # noqa: PLR0917 - operands and options
    x: Any, w: Any, how: tuple[Any, Any, Any], out: list[int], groups: int, layout: str
) -> Any:
    """The sum over taps that reach each pixel of the result, phase by phase."""
    last = layout_of(layout)[1]
    channels = x.shape[-1] if last else x.shape[1]
    if groups < 1 or channels % groups or w.shape[0] != channels or min(out, default=1) < 1:
        raise ConvolutionError(
            f"x {x.shape} has {channels} channels, w {w.shape} is (channels, outputs of a group, *kernel), in {groups} "
            f"groups; the result has {out} pixels: each is at least 1"
        )
    phases = [_phases(*y) for y in zip(out, w.shape[2:], *how, strict=True)]
    if not isinstance(x, np.ndarray):
        from portmm.ops.grid_gradients import transposed

        return transposed(x, w, phases, how[0], groups, layout)
    inputs, outputs = channels // groups, w.shape[1]
    swapped = (
        w.reshape(groups, inputs, outputs, *w.shape[2:]).swapaxes(1, 2).reshape(groups * outputs, inputs, *w.shape[2:])
    )
    shape = (len(x), *out, groups * outputs) if last else (len(x), groups * outputs, *out)
    axes = range(1, 1 + len(out)) if last else range(2, 2 + len(out))
    result = np.zeros(shape, numpy_arrays.types_of(x.dtype, w.dtype)[2])
    for phase in itertools.product(*phases):
        cut, pads = _cut(x, axes, phase)
        if not cut.size or not all(y.taps for y in phase):
            continue
        filters: Any = swapped
        for axis, y in enumerate(phase, 2):
            filters = filters.take(y.taps, axis)
        gaps = tuple(y.dilation for y in phase)
        at = tuple(slice(y.first, None, s) for y, s in zip(phase, how[0], strict=True))
        pixels = result[(slice(None), *at) if last else (slice(None), slice(None), *at)]
        conv(cut, filters, out=pixels, padding=pads, dilation=gaps, groups=groups, layout=layout)
    return result


def _cut(x: Array, axes: Sequence[int], phase: Sequence[Phase]) -> tuple[Array, tuple[tuple[int, int], ...]]:
    """The pixels of images that windows of a phase reach, and the padding around them."""
    pads = []
    for axis, y in zip(axes, phase, strict=True):
        first, count, before, after = y.reach(x.shape[axis])
        x = x[(slice(None),) * axis + (slice(first, first + count),)]
        pads.append((before, after))
    return x, tuple(pads)


@_of_tensors
def conv_filter_gradient(
    x: Any, dy: Any, kernel: Sequence[int], *, stride: int | Sequence[int] = 1, padding: Any = 0,
    dilation: int | Sequence[int] = 1, groups: int = 1, layout: str = "NHWC",
) -> Any:  # fmt: skip
    """The gradient of a convolution in its filters, (outputs, channels of a group, *kernel).

    Args:
        x: its images, of a type of floats.
        dy: the gradient in its result.
        kernel: extents of a filter.
        stride: as in `conv`, like the options that follow.
        padding: numbers, pairs, or "same".
        dilation: of taps.
        groups: of channels.
        layout: of images and results.

    Raises:
        ConvolutionError: shapes or options do not fit together.
    """
    options = Options(hashable(stride), hashable(padding), hashable(dilation), groups, layout)
    if libraries.on_device(x) or libraries.on_device(dy):
        from portmm.ops.grid_gradients import filter_gradient

        return filter_gradient(x, dy, tuple(map(int, kernel)), options)
    images, gradient = _operands(x=x, dy=dy)
    last = layout_of(layout)[1]
    if not last:
        images, gradient = np.moveaxis(images, 1, -1), np.moveaxis(gradient, 1, -1)
    outputs, channels = gradient.shape[-1], images.shape[-1]
    options = options._replace(layout="N" + "DHW"[-len(kernel) :] + "C")
    size = sizes(images.shape, (outputs, channels // max(1, groups), *kernel), options)
    wanted = (len(images), *size.out, outputs)
    if gradient.shape != wanted:
        raise ConvolutionError(f"dy has shape {dy.shape}; results have shape {wanted}, channels last")
    dtype = np.result_type(images, gradient)
    if dtype.kind in "iu":
        raise ConvolutionError(f"x has dtype {images.dtype} and dy {gradient.dtype}; gradients are floats: convert one")
    images, gradient = (np.ascontiguousarray(y, dtype) for y in (images, gradient))
    m, n, k = size.outputs, size.depth, len(images) * size.pixels
    result = np.zeros((groups, m, n), dtype)
    if 0 not in (m, n, k):
        host_matmul.begin()
        name = numpy_arrays.name_of(dtype)
        p = Problem(m, n, k, spell(name, name, name), a="col", b="any")
        strides = [s // images.itemsize for s in images.strides]
        view = windows(size, strides).bind(images=len(images))
        try:
            route = view_route(p, config.target(), config.limit() or config.get_num_threads(), Views(b=view))
            for g in range(groups):
                rows, inputs = gradient[..., g * m :], images[..., g * size.channels :]
                runtime().execute(route, m, n, k, 1, rows, 1, outputs, 0, inputs, 0, 0, 0, result[g], n, 1, m * n, None)
        except BuildError as error:
            fall_back(error)
            for g in range(groups):
                matrix = view.gather(np.ascontiguousarray(images[..., g * size.channels : (g + 1) * size.channels]))
                result[g] = gradient[..., g * m : (g + 1) * m].reshape(k, m).T @ matrix
    split = result.reshape(groups * m, *size.kernel, size.channels)
    return np.ascontiguousarray(np.moveaxis(split, -1, 1))
