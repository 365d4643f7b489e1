"""Convolution as a product: the windows of images are a matrix, as a view of their memory.

Owns `Convolution`, the sizes of one convolution, `Windows`, those of its windows as of more dimensions, and the layouts
of its windows: pad, embed, permute and merge, as in Composable Kernel's implicit GEMM. With channels last, windows are
A: their rows are the pixels of all images, and columns are (tap, channel). With channels first, they are B: rows are
(channel, tap), columns the pixels of one image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field

from portmm.spec.layout import Layout
from portmm.spec.layout_transforms import Embed, Pad
from portmm.util.records import dataclass

Extents = tuple[int, ...]
SIDES = ("output", "tap")
"""Axes of a view in place of a dimension of images."""
IMAGES = "images"
"""Name of the number of images in the layout of windows of all of them, which kernels do not depend on."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """The sizes of a convolution over one to three dimensions.

    Attributes:
        groups: of channels; each is convolved by itself.
        channels: of the input, in one group.
        outputs: channels of the result, in one group.
        spatial: extents of an image.
        kernel: extents of a filter.
        stride: of windows, along each dimension.
        dilation: distance of taps.
        before: zeros before the first element, along each dimension.
        after: zeros after the last.
        padding: value of padding, if not zero: the zero point of integers.
        filler: channels of filters beyond those of images, which are zero: filters are whole units of channels.
        out: extents of a result; 0 where no window fits.
        pixels: elements of a channel of a result.
    """

    groups: int
    channels: int
    outputs: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    padding: int = 0
    filler: int = 0
    out: tuple[int, ...] = field(init=False)
    pixels: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = zip(self.spatial, self.before, self.after, self.reach, self.stride, strict=True)
        out = tuple([max(0, (n + b + a - r) // s + 1) for n, b, a, r, s in sizes])
        object.__setattr__(self, "out", out)
        object.__setattr__(self, "pixels", math.prod(out))

    @property
    def reach(self) -> tuple[int, ...]:
        """Extents of a window, dilation included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def taps(self) -> int:
        """Number of elements of a channel of a filter."""
        return math.prod(self.kernel)

    @property
    def depth(self) -> int:
        """Number of products of each sum."""
        return self.taps * (self.channels + self.filler)

    @property
    def pointwise(self) -> bool:
        """Whether windows are the pixels themselves, one by one."""
        return {*self.kernel, *self.stride} == {1} and not any((*self.before, *self.after))

    def __str__(self) -> str:
        sizes = zip(self.spatial, self.kernel, self.stride, self.dilation, self.before, self.after, strict=True)
        along = " x ".join(_along(*x) for x in sizes)
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{self.channels} to {self.outputs} channels{groups}, {along}"


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a convolution, as if over some dimensions: images of fewer have an extent of 1 along the first.

    Attributes:
        spatial: extents of an image.
        out: extents of a result.
        kernel: extents of a filter.
        stride: of windows.
        dilation: of taps.
        before: padding before the first element, along each dimension.
    """

    spatial: Extents
    out: Extents
    kernel: Extents
    stride: Extents
    dilation: Extents
    before: Extents

    @classmethod
    def of(cls, x: Convolution, count: int) -> Windows:
        """The windows of a convolution over `count` dimensions at most."""
        ones, zeros = (1,) * (count - len(x.spatial)), (0,) * (count - len(x.spatial))
        extents = (ones + x.spatial, ones + x.out, ones + x.kernel)
        return Windows(*extents, ones + x.stride, ones + x.dilation, zeros + x.before)

    @property
    def sizes(self) -> tuple[Extents, Extents, Extents, Extents, Extents, Extents]:
        """All of these."""
        return self.spatial, self.out, self.kernel, self.stride, self.dilation, self.before

    @property
    def pixels(self) -> int:
        """Pixels of a result."""
        return math.prod(self.out)

    @property
    def reach(self) -> tuple[int, ...]:
        """Extents of a window."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))


def _along(*sizes: int) -> str:
    """A dimension in words: its extent, that of filters, stride, dilation and padding."""
    n, kernel, stride, dilation, before, after = sizes
    steps = f" / {stride}" if stride > 1 else ""
    taps = f", dilation {dilation}" if dilation > 1 else ""
    zeros = f", padding {before}+{after}" if before or after else ""
    return f"{n} by {kernel}{steps}{taps}{zeros}"


def _embedded(view: Layout, x: Convolution) -> Layout:
    """An image (n, *spatial, c) with axes (output, tap) in place of each dimension."""
    for i in reversed(range(len(x.spatial))):
        axis = 1 + i
        view = view.pad(axis, x.before[i], x.after[i]) if x.before[i] or x.after[i] else view
        view = view.embed(axis, (x.out[i], x.kernel[i]), (x.stride[i], x.dilation[i]))
    return view.pad(1 + 2 * len(x.spatial), 0, x.filler) if x.filler else view


def windows(x: Convolution, strides: Sequence[int]) -> Layout:
    """Matrix (n y x, r s c) of the windows of all images, for one group.

    Args:
        x: the convolution.
        strides: of images (n, *spatial, c), in elements.
    """
    count = len(x.spatial)
    view = _embedded(Layout((IMAGES, *x.spatial, x.channels), tuple(strides)), x)
    outputs, taps = range(1, 2 * count + 1, 2), range(2, 2 * count + 1, 2)
    return view.permute(0, *outputs, *taps, 2 * count + 1).merge(0, 1 + count).merge(1, 1 + count)


def of_windows(view: Layout) -> tuple[Convolution, tuple[int, ...]] | None:
    """Convolution of one output whose `windows` a view is, and the strides of its images; None if it is none."""
    count = len(view.shape) - 2
    pads: dict[int, tuple[int, int]] = {}
    taps: dict[int, tuple[int, int, int]] = {}
    try:
        for x in view.transforms:
            if isinstance(x, Pad):
                pads[x.axis - 1] = int(x.before), int(x.after)
            elif isinstance(x, Embed) and len(x.shape) == len(SIDES):
                taps[x.axis - 1] = int(x.shape[1]), int(x.stride[0]), int(x.stride[1])
        if count < 1 or sorted(taps) != list(range(count)):
            return None
        spatial, strides = tuple(map(int, view.shape[1:-1])), tuple(map(int, view.stride))
        kernel, stride, dilation = zip(*(taps[i] for i in range(count)), strict=True)
        before, after = zip(*(pads.get(i, (0, 0)) for i in range(count)), strict=True)
        one = Convolution(1, int(view.shape[-1]), 1, spatial, kernel, stride, dilation, before, after)
    except ValueError:  # extents that have names
        return None
    return (one, strides) if windows(one, strides) == view else None


def planes(x: Convolution, strides: Sequence[int]) -> Layout:
    """Matrix (c r s, y x) of the windows of one image, for one group.

    Args:
        x: the convolution.
        strides: of an image (*spatial, c), in elements.
    """
    count = len(x.spatial)
    view = _embedded(Layout((1, *x.spatial, x.channels), (0, *strides)), x).freeze(0, 0)
    outputs, taps = range(0, 2 * count, 2), range(1, 2 * count, 2)
    return view.permute(2 * count, *taps, *outputs).merge(0, 1 + count).merge(1, count)
