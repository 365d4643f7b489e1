"""Convolutions of each channel by a filter of its own, in the host's memory: kernels over rows, in place of products.

Owns `HostDepthwise`, one call, and `DepthwiseKernel`, the kernel for calls of its kind. An element of the result is an
expression, the sum over taps of pixels times filters, and what follows it. Its operands are views of the images, one
for each tap, shifted against each other: rows are of channels where these are last, and else of pixels. One kernel
computes all parts of a result: the interior reads images in place, and at borders a strip of the images is padded in a
copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.errors import ScheduleError
from portmm.ops import host_matmul
from portmm.ops.convolution_kernel import HostConvolution
from portmm.ops.epilogues import NOT_F64
from portmm.runtime.cpu import runtime
from portmm.spec.convolution import Convolution, Windows
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import Operand, acc, index, load, number
from portmm.spec.expr import Expr, apply
from portmm.spec.expr_functions import fma, substituted
from portmm.trace.bind import Bound, Step, bind_operands, dense, typed
from portmm.trace.tracer import Traced

if TYPE_CHECKING:
    from portmm.ops.convolution_weights import PackedConv

Array = np.ndarray[Any, Any]
INTERIOR = 0.5
"""Share of a result in the interior below which all of the images is padded in a copy: further parts cost calls."""
_PLAIN = Traced(((acc(), None),), several=False, operands=(), sources=(), numbers=())


class Part(NamedTuple):
    """A box of the result, over three dimensions.

    Attributes:
        first: its first element, along each dimension.
        extents: of the box.
        inside: whether all its windows lie within the images.
    """

    first: tuple[int, ...]
    extents: tuple[int, ...]
    inside: bool


def parts(x: Convolution) -> list[Part]:
    """Boxes that cover a result: the interior, and what is before and after it along each dimension."""
    sizes = Windows.of(x, 3)
    bounds: list[tuple[int, int]] = []
    for n, out, kernel, stride, dilation, before in zip(*sizes.sizes, strict=True):
        low = min(out, -(-before // stride))
        high = min(out, (n - 1 + before - (kernel - 1) * dilation) // stride + 1)
        bounds.append((low, max(low, high)))
    inner = math.prod(high - low for low, high in bounds)
    if inner < INTERIOR * x.pixels:
        return [Part((0, 0, 0), sizes.out, inside=False)]
    boxes = [Part(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds), inside=True)]
    for axis, (low, high) in enumerate(bounds):
        for begin, end in ((0, low), (high, sizes.out[axis])):
            box = [*bounds[:axis], (begin, end), *((0, n) for n in sizes.out[axis + 1 :])]
            if begin < end:
                boxes.append(Part(tuple(y for y, _ in box), tuple(z - y for y, z in box), inside=False))
    return boxes


@dataclass(frozen=True, slots=True)
class DepthwiseKernel:
    """The kernel for calls of one kind: see `ConvolutionKernel`, which has the same methods.

    Attributes:
        route: the kernel.
        results: shapes, of (image, pixel, channel) or with channels first (image, channel, pixel), and types.
        axes: the windows of the convolution, over three dimensions.
        padding: value of padding.
        parts: of the result.
        bound: captured operands and results of the epilogue, by image, row and column of the product.
        bytes: of an element of each of these.
        counted: the number of numbers before the first pixel and the image; -1 if no index is read.
        several: the function returns a tuple.
    """

    route: Any
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    axes: Windows
    padding: int
    parts: tuple[Part, ...]
    bound: Bound
    bytes: Array
    counted: int
    several: bool

    def run(
        self, x: Array, w: PackedConv, c: tuple[Array, int, int], closure: Any = None, more: Sequence[Array] = ()
    ) -> None:
        """Compute all images: see `ConvolutionKernel.run`."""
        out, row, item = c
        last, filters, address = w.channels_last, w.weight[0], runtime().address
        images, taps = _five(x, last=last), len(filters)
        template, numbers, *arrays = self.bound.fill(closure or {}, (), [out, *more])
        table = np.array(template)
        table[taps : 2 * taps, 0] = address(filters) + filters.strides[0] * np.arange(taps)
        table[taps : 2 * taps, 1:4] = (0, 0, 1) if last else (1, 0, 0)
        table[-1 - len(more), 1:4] = item, row, 1
        table[2 * taps :, 0] += [address(y) for y in arrays]
        own = table[2 * taps :].copy()
        pixels = own[:, 2] if last else own[:, 3]
        down = pixels * self.axes.out[2]
        table[2 * taps :, 1:4] = np.stack((down, pixels, own[:, 3]) if last else (own[:, 2], down, pixels), 1)
        for part in self.parts:
            source = images if part.inside else self._buffer(images, part, last=last)
            _, rows, columns = part.extents
            m, n, batch = (columns, x.shape[-1], rows) if last else (rows, columns, x.shape[1])
            first, table[:taps, 1:4] = self._taps(source, part, last=last)
            for image, plane in itertools.product(range(len(x)), range(part.extents[0])):
                if not part.inside and not plane:
                    self._fill(source, images[image], part)
                moved = (image if part.inside else 0) * source.strides[0]
                table[:taps, 0] = first + address(source) + moved + plane * self.axes.stride[0] * source.strides[1]
                pixel = self._pixel(part, plane)
                table[2 * taps :, 0] = own[:, 0] + self.bytes * (image * own[:, 1] + pixel * pixels)
                if self.counted >= 0:
                    bits = np.array((pixel, image), np.int32).view(np.float32)
                    numbers = np.concatenate([numbers[: self.counted], bits])
                runtime().execute(self.route, m, n, 1, batch, *(0,) * 12, None, table, numbers)

    def _pixel(self, part: Part, plane: int) -> int:
        """The first pixel of a plane of a part."""
        (z, y, x), (_, rows, columns) = part.first, self.axes.out
        return ((z + plane) * rows + y) * columns + x

    def _taps(self, source: Array, part: Part, *, last: bool) -> tuple[Array, tuple[int, ...]]:
        """Of each tap the bytes to what the first window reads, and strides along a batch, rows and columns."""
        sizes, channel = self.axes, source.strides[-1]
        taps = np.array(list(itertools.product(*map(range, sizes.kernel)))) * sizes.dilation
        if part.inside:
            taps += np.array(part.first) * sizes.stride - sizes.before
        down, across = (s * t for s, t in zip(source.strides[2:4], sizes.stride[1:], strict=True))
        steps = (down, across, channel) if last else (channel, down, across)
        return taps @ np.array(source.strides[1:4]), tuple(s // source.itemsize for s in steps)

    def _buffer(self, images: Array, part: Part, *, last: bool) -> Array:
        """Memory for what windows of a part read of one image, filled with padding."""
        extents, channels = self._extents(part), images.shape[-1]
        shape = (1, *extents, channels) if last else (1, channels, *extents)
        whole = np.full(shape, self.padding, images.dtype)
        return whole if last else np.moveaxis(whole, 1, -1)

    def _extents(self, part: Part) -> tuple[int, ...]:
        """Extents of what windows of a part read, with padding."""
        sizes = zip(part.extents, self.axes.kernel, self.axes.stride, self.axes.dilation, strict=True)
        return tuple((n - 1) * s + (k - 1) * d + 1 for n, k, s, d in sizes)

    def _fill(self, buffer: Array, image: Array, part: Part) -> None:
        """Copy what lies within an image to a buffer."""
        to: list[slice] = []
        of: list[slice] = []
        for first, extent, stride, before, n in zip(
            part.first, self._extents(part), self.axes.stride, self.axes.before, self.axes.spatial, strict=True
        ):
            begin = first * stride - before
            low, high = max(0, begin), min(n, begin + extent)
            to.append(slice(low - begin, max(low, high) - begin))
            of.append(slice(low, max(low, high)))
        np.copyto(buffer[0][tuple(to)], image[tuple(of)])


def _five(x: Array, *, last: bool) -> Array:
    """Images as (n, z, y, x, c), a view."""
    x = x if last else np.moveaxis(x, 1, -1)
    return np.expand_dims(x, tuple(range(1, 6 - x.ndim)))


class HostDepthwise(HostConvolution):
    """A convolution of each channel by itself: see `HostConvolution`."""

    def selected(self, traced: Traced | None, c: tuple[int, ...]) -> Any:  # type: ignore[override]
        """The kernel for calls of this kind, a `DepthwiseKernel`, wherever its results are."""
        from portmm.dispatch import cpu_routes

        del c
        host_matmul.begin()
        runtime()  # raises before a kernel is lowered in vain
        size, x, last = self.convolution, self.x, self.last
        every = tuple(parts(size))
        usual = self.types()[2] if traced is None else self.usual()
        step, counted = _step(self, _PLAIN if traced is None else traced, usual, inside=any(y.inside for y in every))
        seen = (self.m, self.n, self.items)
        places: list[tuple[int, ...]] = [(0, 0, 0)] * (2 * size.taps)
        axes = ["bmn", *("bmn" if "n" in y else "bm" for y in step.axes[1:])]
        bound = Bound(step.traced, seen, places, [dense(y, seen) for y in axes])
        shapes = [self.shape, *((*self.shape[:2], self.shape[2] if "n" in y else 1) for y in axes[1:])]
        _, rows, columns = max(every, key=lambda y: math.prod(y.extents)).extents
        most = (columns, x.shape[-1], rows) if last else (rows, columns, x.shape[1])
        results, route = tuple(zip(shapes, step.types, strict=True)), cpu_routes.expressions_route(step.fused, most)
        return DepthwiseKernel(
            route, results, Windows.of(size, 3), size.padding, every, bound,
            np.array([BY_NAME[y.dtype].bytes for y in step.fused.operands[len(places) :]], np.int64), counted,
            traced is not None and traced.several,
        )  # fmt: skip


def _step(call: HostConvolution, traced: Traced, usual: np.dtype[Any], *, inside: bool) -> tuple[Step, int]:
    """The expressions of the kernel, and the number of numbers before those of indices, -1 if there are none."""
    if call.sums() == "f64":
        raise ScheduleError(NOT_F64)
    size, last, count, indexed = call.convolution, call.last, len(traced.numbers), False
    adjacent = not inside or call.x.strides[-1] == call.x.itemsize
    unit = adjacent and (last or size.stride[-1] == 1)
    pixels = Operand(numpy_arrays.name_of(call.x.dtype), "bmn", unit)
    filters = Operand(numpy_arrays.name_of(call.w.weight[0].dtype), "n" if last else "b")
    arguments = (pixels,) * size.taps + (filters,) * size.taps
    value: Expr = load(0, pixels.dtype) * load(size.taps, filters.dtype)
    for tap in range(1, size.taps):
        value = fma(load(tap, pixels.dtype), load(size.taps + tap, filters.dtype), value)

    def change(e: Expr) -> Expr | None:
        nonlocal indexed
        if e.op != "index":
            return None
        axis = e.args[0]
        if axis == "b":
            indexed = True
            return apply("bits", number(count + 1))
        if axis == ("m" if last else "n"):
            indexed = True
            down, across = (index("b"), index("m")) if last else (index("m"), index("n"))
            return down * size.out[-1] + across + apply("bits", number(count))
        return index("n" if last else "b")

    done: dict[Expr, Expr] = {}
    results = tuple((substituted(y, change, done), t) for y, t in typed(traced, call.first).results)
    renamed = tuple(replace(y, axes=_renamed(y.axes, last=last)) for y in traced.operands)
    step = bind_operands(replace(traced, results=results, operands=renamed), arguments, usual, ends=False, sums=value)
    if "n" not in step.axes[0] or (not last and any("n" not in y for y in step.axes)):
        raise ScheduleError("a result is constant along a row")
    if step.fused.reductions or step.fused.column_reductions:
        raise ScheduleError("a reduction needs whole rows, or columns, of sums")
    return step, count if indexed else -1


def _renamed(axes: str, *, last: bool) -> str:
    """Axes of a kernel over rows along which an operand varies, of those of the product."""
    if last:
        return ("bm" if "m" in axes else "") + ("n" if "n" in axes else "")
    return ("b" if "m" in axes else "") + ("mn" if "n" in axes else "")
