"""Options of convolutions: stride, padding, dilation and groups as users pass them, checked against the operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from portmm.errors import ConvolutionError
from portmm.spec.convolution import Convolution

LAYOUTS = {
    "NWC": (1, True), "NHWC": (2, True), "NDHWC": (3, True), "NCW": (1, False), "NCHW": (2, False), "NCDHW": (3, False),
}  # fmt: skip
"""Layout of images -> number of dimensions, and whether channels are last."""
MOST_PIXELS = 1 << 40
"""Pixels of an image of a result beyond which sizes are no longer compared with those of blocks."""


class Options(NamedTuple):
    """The options of a call.

    Attributes:
        stride: of windows.
        padding: zeros around the images.
        dilation: distance of the taps of a filter.
        groups: of channels.
        layout: of the images.
        padding_value: of integer images.
    """

    stride: Any
    padding: Any
    dilation: Any
    groups: int
    layout: str
    padding_value: int = 0


def layout_of(layout: str) -> tuple[int, bool]:
    """The number of dimensions of images of a layout, and whether channels are last.

    Raises:
        ConvolutionError: it is none.
    """
    known = LAYOUTS.get(layout)
    if known is None:
        raise ConvolutionError(f"layout is {layout!r}; use one of {', '.join(LAYOUTS)}")
    return known


def hashable(x: Any) -> Any:
    """An option as a key of a memo: numbers, words, or tuples of these."""
    if isinstance(x, (int, str)):
        return x
    if isinstance(x, np.integer):
        return int(x)
    if not isinstance(x, (tuple, list, np.ndarray)):
        raise ConvolutionError(f"an option is {x!r}; pass an integer, or a tuple with one for each dimension")
    return tuple(map(hashable, x))


def sizes(x: tuple[int, ...], w: tuple[int, ...], options: Options) -> Convolution:
    """The sizes of a convolution of images and filters of these shapes.

    Raises:
        ConvolutionError: they do not fit together.
    """
    layout, groups = options.layout, options.groups
    count, last = layout_of(layout)
    if len(x) != count + 2 or len(w) != count + 2:
        raise ConvolutionError(f"x has shape {x} and w {w}; with {layout} both have {count + 2} dimensions")
    spatial, channels = (x[1:-1], x[-1]) if last else (x[2:], x[1])
    kernel, (outputs, inputs) = w[2:], w[:2]
    if groups < 1 or channels != groups * inputs or outputs % groups:
        raise ConvolutionError(
            f"x of {layout} {x} has {channels} channels, w {w} has {outputs} filters of {inputs}, in {groups} groups: "
            f"channels are {inputs} times the groups, and filters a multiple of them"
        )
    if min(kernel) < 1:
        raise ConvolutionError(f"w has shape {w}: a filter has at least one tap along each dimension")
    stride, dilation = each("stride", options.stride, count), each("dilation", options.dilation, count)
    pads = paddings(options.padding, count) or _same(spatial, kernel, stride, dilation)
    before, after = (tuple(p[i] for p in pads) for i in range(2))
    if not isinstance(options.padding_value, int):
        raise ConvolutionError(f"padding_value is {options.padding_value!r}; pass an integer")
    value = options.padding_value
    size = Convolution(groups, inputs, outputs // groups, spatial, kernel, stride, dilation, before, after, value)
    for n, b, a, reach in zip(spatial, before, after, size.reach, strict=True):
        if n + b + a < reach:
            raise ConvolutionError(f"a window of {reach} does not fit {n} elements with padding {b} and {a}")
    if size.pixels > MOST_PIXELS:
        raise ConvolutionError(f"an image of the result has {size.out} pixels, which no memory holds: pad less")
    return size


def each(name: str, x: Any, count: int, least: int = 1) -> tuple[int, ...]:
    """An option for each dimension.

    Raises:
        ConvolutionError: it is below the least value, or of another number of dimensions.
    """
    values = (x,) * count if isinstance(x, int) else x
    fits = isinstance(values, tuple) and len(values) == count
    if not fits or not all(isinstance(y, int) and y >= least for y in values):
        kind = "a positive integer" if least else "an integer that is not negative"
        raise ConvolutionError(f"{name} is {x!r}; pass {kind}, or {count} of them")
    return tuple(values)


def paddings(x: Any, count: int) -> list[tuple[int, int]]:
    """Zeros before and after each dimension; none for "same".

    Raises:
        ConvolutionError: the option is malformed.
    """
    if x == "same":
        return []
    x = 0 if x == "valid" else x
    values = (x,) * count if isinstance(x, int) else x if isinstance(x, tuple) else ()
    pairs = [(y, y) if isinstance(y, int) else y for y in values]
    if len(pairs) != count or not all(isinstance(y, tuple) and len(y) == 2 and _are_counts(y) for y in pairs):
        raise ConvolutionError(
            f"padding is {x!r}; pass a number that is not negative, {count} of them or of pairs (before, after), "
            '"same" or "valid"'
        )
    return pairs


def _are_counts(x: tuple[Any, ...]) -> bool:
    return all(isinstance(y, int) and y >= 0 for y in x)


def _same(
    spatial: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Padding with which a result has as many elements as images, divided by the stride; the odd zero is the last."""
    sizes = zip(spatial, kernel, stride, dilation, strict=True)
    total = [max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n) for n, k, s, d in sizes]
    return [(t // 2, t - t // 2) for t in total]
