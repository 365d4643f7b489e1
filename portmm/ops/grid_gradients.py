"""Transposed convolutions, and the gradients of convolutions, of arrays on a device.

Owns `transposed`, a convolution of the images for each phase of the result, by filters that are turned round, and
`filter_gradient`, a product over all pixels for each tap. Views are shapes, strides and addresses; filters, and the
pixels of a tap, are copied so that they are dense.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from portmm.arrays.grid_call import Product
from portmm.arrays.interop import adopt_all, empty_like
from portmm.arrays.numpy_arrays import contiguous as dense_strides
from portmm.arrays.operand import Operand, result_type
from portmm.errors import ConvolutionError
from portmm.ops.convolution_options import Options, layout_of, sizes
from portmm.ops.grid_convolution import convolution
from portmm.ops.grid_product import GridProduct
from portmm.ops.kernel_call import clear, contiguous, copy
from portmm.spec.dtype import BY_NAME
from portmm.util.records import replace

if TYPE_CHECKING:
    from collections.abc import Sequence

_FLOATS = ("f32", "f64", "f16", "bf16")


def adopted(first: tuple[str, Any], second: tuple[str, Any]) -> tuple[Operand, Operand]:
    """Two named arrays on one device, of one type of floats.

    Raises:
        TypeError: one is in the host's memory.
        ValueError: they are on two devices.
        ConvolutionError: their types differ, or are no floats.
    """
    x, y = adopt_all(dict((first, second))).values()
    if x.dtype != y.dtype or x.dtype not in _FLOATS:
        raise ConvolutionError(
            f"{first[0]} has elements of {x.dtype} and {second[0]} of {y.dtype}; on a device both are of one type of "
            f"{', '.join(_FLOATS)}: convert one"
        )
    return x, replace(y, queue=x.queue)


def transposed(  # noqa: PLR0917 - as `convolution_gradients.transposed`
    x: Operand, w: Operand, phases: Sequence[Sequence[Any]], stride: Sequence[int], groups: int, layout: str
) -> Any:
    """The sum over taps that reach each pixel of the result: see `convolution_gradients`, which makes the phases."""
    last, inputs, outputs = layout_of(layout)[1], w.shape[0] // groups, w.shape[1]
    out = [sum(phase.pixels for phase in along) for along in phases]
    first = 1 if last else 2
    shape = (x.shape[0], *out, groups * outputs) if last else (x.shape[0], groups * outputs, *out)
    result = empty_like(x, shape, result_type(x.dtype, w.dtype))
    step, item = w.strides[0], BY_NAME[w.dtype].bytes
    swapped = replace(
        w, shape=(groups, outputs, inputs, *w.shape[2:]), strides=(inputs * step, w.strides[1], step, *w.strides[2:])
    )
    for phase in itertools.product(*phases):
        to, images, filters, padding = result, x, swapped, []
        for i, y in enumerate(phase):
            to = sliced(to, first + i, y.first, y.pixels, stride[i])
            begin, count, before, after = y.reach(images.shape[first + i])
            images = sliced(images, first + i, begin, count)
            padding.append((before, after))
            if y.taps:
                apart = y.taps[1] - y.taps[0] if len(y.taps) > 1 else 1
                filters = sliced(filters, 3 + i, y.taps[0], len(y.taps), apart)
        if not (images.size and filters.size and all(y.taps for y in phase)):
            clear(to)
            continue
        dense = contiguous(filters)
        kernel = dense.shape[3:]
        rows = groups * outputs, inputs, *kernel
        dense = replace(dense, shape=rows, strides=dense_strides(rows, item))
        gaps = tuple(y.dilation for y in phase)
        convolution(
            images, dense, to, stride=1, padding=tuple(padding), dilation=gaps, groups=groups, layout=layout,
            padding_value=0, epilogue=None, prologue_a=None, dtype=None,
        )  # fmt: skip
    return result.source


def filter_gradient(x: Any, dy: Any, kernel: tuple[int, ...], options: Options) -> Any:
    """The gradient of a convolution in its filters: see `convolution_gradients.conv_filter_gradient`."""
    images, gradient = adopted(("x", x), ("dy", dy))
    if not layout_of(options.layout)[1]:
        images, gradient = _last(images), _last(gradient)
    options = options._replace(layout="N" + "DHW"[-len(kernel) :] + "C")
    outputs, channels, groups = gradient.shape[-1], images.shape[-1], max(1, options.groups)
    size = sizes(images.shape, (outputs, channels // groups, *kernel), options)
    wanted = (images.shape[0], *size.out, outputs)
    if gradient.shape != wanted:
        raise ConvolutionError(f"dy has shape {dy.shape}; results have shape {wanted}, channels last")
    m, n, pixels, taps = size.outputs, size.channels, images.shape[0] * size.pixels, math.prod(size.kernel)
    dtype, width = images.dtype, BY_NAME[images.dtype].bytes
    sums = empty_like(images, (taps, groups, m, n), dtype)
    rows = _dense(gradient, (pixels, outputs))
    columns = replace(rows, shape=(outputs, pixels), strides=rows.strides[::-1])
    whole = _padded(images, size)
    for tap, at in enumerate(itertools.product(*map(range, size.kernel))):
        seen = whole
        for i, t in enumerate(at):
            seen = sliced(seen, 1 + i, t * size.dilation[i], size.out[i], size.stride[i])
        read = _dense(seen, (pixels, channels))
        for g in range(groups):
            a, b = sliced(columns, 0, g * m, m), sliced(read, 1, g * n, n)
            to = sliced(sliced(sums, 0, tap, 1), 1, g, 1)
            GridProduct(Product(a, b, replace(to, shape=(m, n), strides=to.strides[2:]))).plain()
    extents, steps = size.kernel, dense_strides((*size.kernel, groups, m, n), width)
    shape = (groups, m, n, *extents)
    ordered = replace(sums, shape=shape, strides=(*steps[-3:], *steps[:-3]))
    result = empty_like(images, (groups * m, n, *extents), dtype)
    copy(ordered, replace(result, shape=shape, strides=dense_strides(shape, width)))
    return result.source


def sliced(x: Operand, axis: int, first: int, count: int, step: int = 1) -> Operand:
    """A view of `count` of the elements along an axis, from `first`, `step` apart."""
    shape, strides, far = list(x.shape), list(x.strides), first * x.strides[axis]
    shape[axis], strides[axis] = count, strides[axis] * step
    pointer = x.pointer + far if isinstance(x.pointer, int) else (x.pointer[0], x.pointer[1] + far)
    return replace(x, pointer=pointer if count else x.pointer, shape=tuple(shape), strides=tuple(strides))


def _last(x: Operand) -> Operand:
    """The array with its second dimension last."""
    return replace(
        x, shape=(x.shape[0], *x.shape[2:], x.shape[1]), strides=(x.strides[0], *x.strides[2:], x.strides[1])
    )


def _dense(x: Operand, shape: tuple[int, int]) -> Operand:
    """The elements as dense rows, copied if need be."""
    strides = dense_strides(x.shape, BY_NAME[x.dtype].bytes)
    dense = x if x.strides == strides else contiguous(x)
    return replace(dense, shape=shape, strides=dense_strides(shape, BY_NAME[x.dtype].bytes))


def _padded(x: Operand, size: Any) -> Operand:
    """The images with zeros around them, as far as windows reach."""
    before = size.before
    reach = [(n - 1) * s + (k - 1) * d + 1
             for n, s, k, d in zip(size.out, size.stride, size.kernel, size.dilation, strict=True)]  # fmt: skip
    if not any(before) and all(r <= n for r, n in zip(reach, x.shape[1:], strict=False)):
        return x
    extents = [max(r, b + n) for r, b, n in zip(reach, before, x.shape[1:], strict=False)]
    whole = empty_like(x, (x.shape[0], *extents, x.shape[-1]), x.dtype)
    clear(whole)
    inner = whole
    for i, b in enumerate(before):
        inner = sliced(inner, 1 + i, b, x.shape[1 + i])
    copy(x, inner)
    return whole
