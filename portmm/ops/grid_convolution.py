"""Convolutions of arrays on a device: products whose A, or B, is the view of the windows.

Owns `GridConvolution`, the counterpart of `convolution_kernel.HostConvolution`: with channels last windows are A, with
channels first B, so that rows of an item of C are planes. Kernels read images through the view as they fill shared
memory, or registers; epilogues and results are those of `grid_product`. Groups are products of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import operand
from portmm.arrays.grid_call import Product, Shape, numbers, settings
from portmm.arrays.interop import adopt_all
from portmm.arrays.numpy_arrays import contiguous as dense_strides
from portmm.arrays.numpy_arrays import numpy_of
from portmm.arrays.operand import WIDEST, Matrix, Operand, dense_like, matrix, named
from portmm.dispatch import config, device_routes
from portmm.errors import ConvolutionError, ScheduleError
from portmm.ops.convolution_kernel import collapsed
from portmm.ops.convolution_options import Options, hashable, layout_of, sizes
from portmm.ops.convolution_weights import DeviceFilters, filter_rows
from portmm.ops.epilogues import CHANNELS_FIRST, NAMES, VALUES, VALUES_FIRST, fused, step_of_part
from portmm.ops.grid_product import GridProduct, spread
from portmm.ops.kernel_call import KernelCall, contiguous, copy, over_rows
from portmm.ops.product_kernel import merges
from portmm.ops.row_kernels import before
from portmm.spec.convolution import Convolution, planes, windows
from portmm.spec.dtype import BY_NAME
from portmm.spec.layouts import Views
from portmm.spec.problem import Problem

if TYPE_CHECKING:
    from portmm.dispatch.machine import Machine
    from portmm.trace.bind import Step

MOST_OFFSET = (1 << 31) - 1
"""Offsets within a view have 32 bits."""


def convolution(x: Any, w: Any, out: Any = None, **options: Any) -> Any:
    """The convolution of arrays on a device: see `convolution.conv`, which has the options."""
    epilogue, prologue, dtype = (options.pop(name) for name in ("epilogue", "prologue_a", "dtype"))
    how = Options(**{name: hashable(y) for name, y in options.items()})
    packed, last = isinstance(w, DeviceFilters), layout_of(how.layout)[1]
    there = adopt_all({"x": x, "w": w}, {"out": out})
    if packed:
        how = how._replace(groups=w.groups if how.groups == 1 else how.groups)
    images, size = there["x"], sizes(there["x"].shape, tuple(w.shape), how)
    if not size.depth:
        raise ConvolutionError(f"x has shape {images.shape}, without channels: there is nothing to convolve")
    value, kind = size.padding, numpy_of(images.dtype)
    if value and (kind.kind not in "iu" or not np.iinfo(kind).min <= value <= np.iinfo(kind).max):
        raise ConvolutionError(f"padding_value is {value}, which images of {images.dtype} do not have")
    if images.dtype == "u8" and not last:
        raise ConvolutionError("images of uint8 are convolved with channels last on a device: move them there")
    if packed and layout_of(w.layout)[1] != last:
        raise ConvolutionError(f"filters are packed for {w.layout}, images are {how.layout}: pack them for these")
    filters = there["w"] if packed else filter_rows(replace(there["w"], queue=images.queue), last=last)
    filters = replace(filters, queue=images.queue)  # one queue for all, that of the images
    if prologue is not None and images.size:
        images = _after_prologue(images, prologue, last=last)
    repeated = images.shape[0] > 1 and images.strides[0] == 0
    if repeated or min(images.strides, default=0) < 0:
        images = contiguous(images)
    sides = (images, filters) if last else (filters, images)
    requested = "" if dtype is None else named(dtype)
    call = GridConvolution(Product(*sides, there.get("out")), requested, convolution=size, last=last)
    return call.plain().source if epilogue is None else fused(call, epilogue)


def _after_prologue(x: Operand, function: Callable[..., Any], *, last: bool) -> Operand:
    """The images after a prologue.

    Raises:
        TraceError: it returns a tuple.
    """
    x = x if operand.is_dense(x) else contiguous(x)
    rows = _viewed(x, (x.shape[0], prod(x.shape[1:-1]), x.shape[-1]) if last else (*x.shape[:2], prod(x.shape[2:])))
    whole = before(over_rows, spread, function, rows, "a" if last else "planes")
    return _viewed(whole if operand.is_dense(whole) else contiguous(whole), x.shape)


def _viewed(x: Operand, shape: Shape) -> Operand:
    """A dense array in another shape."""
    return replace(x, shape=shape, strides=dense_strides(shape, BY_NAME[x.dtype].bytes))


@dataclass(frozen=True, slots=True, eq=False)
class GridConvolution(GridProduct):
    """A convolution on a device.

    Attributes:
        convolution: its sizes.
        last: channels are last: images are A, and filters, (outputs, sum), B; else the other way round.
    """

    convolution: Convolution = field(kw_only=True)
    last: bool = field(kw_only=True)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that kernels depend on."""
        return (*self.x.kind, self.requested, self.convolution, self.last)

    @property
    def images(self) -> Operand:
        """The images."""
        return self.x.a if self.last else self.x.b

    @property
    def filters(self) -> Operand:
        """The filters, (outputs, sum)."""
        return self.x.b if self.last else self.x.a

    @property
    def shapes(self) -> tuple[Shape, Shape, tuple[int, int, int]]:
        """The shape of the result, that of a batch, and m, n and k."""
        size, count = self.convolution, self.images.shape[0]
        channels = size.groups * size.outputs
        if self.last:
            return (count, *size.out, channels), (count,), (size.pixels, channels, size.depth)
        return (count, channels, *size.out), (count,), (channels, size.pixels, size.depth)

    @property
    def rank(self) -> int:
        """The number of indices of an epilogue's elements."""
        return 3

    @property
    def values(self) -> tuple[Any, ...]:
        """The placeholder arguments of an epilogue."""
        return VALUES if self.last else VALUES_FIRST

    def shaped(self, shape: Shape) -> Shape:
        """A result (image, row, column) in the layout of the images; one that does not vary has extents of 1."""
        size, (count, m, n) = self.convolution, shape
        pixels, channels = (m, n) if self.last else (n, m)
        along = size.out if pixels == size.pixels else (1,) * len(size.out)
        return (count, *along, channels) if self.last else (count, channels, *along)

    def writes(self, out: Operand, *others: Operand) -> bool:
        """Whether kernels can write to an array: its pixels are equally apart, and it overlaps no operand."""
        fits = out.shape != self.shapes[0] or self._place(out) is not None
        return fits and not operand.overlap(out, (*self.parts.values(), *others))

    def split(self, epilogue: Callable[..., Any]) -> Any:
        """The results of two kernels: the convolution, and the epilogue over its rows."""
        sums, out, (_, batch, (m, n, _)) = self.sums(), self.x.out, self.shapes
        rows = _viewed(self.into(None, sums).plain(), (*batch, m, n))
        rows = rows if sums == "f32" else contiguous(rows, "f32")
        first = None if out is None or out.dtype == "f64" else numpy_of(out.dtype)
        names = NAMES if self.last else CHANNELS_FIRST
        results, several = over_rows(epilogue, (rows,), names, None, self.usual(), first=first)
        arrays = [y.source.reshape(self.shaped(y.shape)) for y in results]
        if out is not None:
            one = _viewed(results[0], self.shaped(results[0].shape))
            operand.check_out(out, one.shape)
            operand.check_type(out, one.dtype)
            copy(one, out)
            arrays[0] = out.source
        return tuple(arrays) if several else arrays[0]

    # -- kernels -----------------------------------------------------------------------

    def launches(self, on: Machine, first: str, step: Step | None, values: dict[str, Any], *, static: bool) -> Any:
        """The kernels of a result that is not empty: see `GridProduct`."""
        x, size, indexed = self.x, self.convolution, -1
        direct = x.out is not None and x.out.dtype == first
        to = x.out if x.out is not None and direct else dense_like(x.a, self.shapes[0], first)
        place = self._place(to)
        if place is None:  # it is written by way of a temporary
            to = dense_like(x.a, self.shapes[0], first)
            place = self._place(to)
        assert place is not None  # noqa: S101 - pixels of a dense array are equally apart
        if (plain := self._matrices(to if direct else None, place)) is not None:
            return plain.launches(on, first, step, values, static=static)
        merged = self._merges(place, step)
        if step is not None and size.groups > 1:
            step, indexed = step_of_part(self.step, step.traced, "n" if self.last else "m")
        p, vectors, views, own = self._problem(to, place, "" if step is None else step.text, merged=merged)
        values = own | values
        route, every = device_routes.route(p, on, vectors, views), []
        for group in range(size.groups):
            at = np.array(group * size.outputs, np.int32).view(np.float32)
            here = values | ({f"number_{indexed}": float(at)} if indexed >= 0 else {})
            kernels, workspace = route.launches(here, p)
            every += [(kernel, self._moves(group, place, to, step, values)) for kernel in kernels]
        return KernelCall(on, (), tuple(every), workspace)

    def _moves(
        self, group: int, place: tuple[int, int], to: Operand, step: Step | None, values: dict[str, Any]
    ) -> tuple[tuple[str, int, int], ...]:
        """The operands of a group, and elements and bytes by which they are moved."""
        size, outputs = self.convolution, group * self.convolution.outputs
        image = group * size.channels * self._steps()[-1]
        moves = [("c", outputs * (1 if self.last else place[0]), to.dtype)]
        sides = "ab" if self.last else "ba"
        moves += [(sides[0], image, self.images.dtype), (sides[1], outputs * size.depth, self.filters.dtype)]
        for i, y in enumerate(() if step is None else step.fused.operands):
            moves.append((f"x{i}_all", outputs * values[f"x{i}_{'n' if self.last else 'm'}"], y.dtype))
        return tuple((name, by, BY_NAME[dtype].bytes) for name, by, dtype in moves if by)

    def _steps(self) -> tuple[int, ...]:
        """Strides of the images as (n, *spatial, c), in elements."""
        item, *rest = operand.elements(self.images)
        return (item, *rest) if self.last else (item, *rest[1:], rest[0])

    def _place(self, to: Operand) -> tuple[int, int] | None:
        """Strides of rows and of items of an array of the result; None if pixels are not equally apart."""
        size, (item, *rest) = self.convolution, operand.elements(to)
        spatial, channel = (rest[:-1], rest[-1]) if self.last else (rest[1:], rest[0])
        pixel = collapsed(size.out, spatial)
        dense, row = (channel, pixel) if self.last else (pixel, channel)
        extents = (size.groups * size.outputs, size.pixels)
        columns, rows = extents if self.last else extents[::-1]
        if pixel is None or row is None or (columns > 1 and dense != 1):
            return None
        return row if rows > 1 else columns, item

    def _merges(self, place: tuple[int, int], step: Step | None) -> bool:
        """Whether the pixels of all images are rows of one product."""
        size, count = self.convolution, self.images.shape[0]
        if count == 1 or not self.last:
            return count == 1
        within = _span(self.images.shape, self._steps()) <= MOST_OFFSET
        return within and place[1] == place[0] * size.pixels and (step is None or merges(step, size.pixels))

    def _matrices(self, out: Operand | None, place: tuple[int, int]) -> GridProduct | None:
        """The product of matrices that a convolution of single pixels is; None where windows are a view."""
        size, steps, count = self.convolution, self._steps(), self.images.shape[0]
        pixel = collapsed(size.spatial, steps[1:-1])
        if not size.pointwise or size.groups > 1 or pixel is None:
            return None
        m, n, k = self.shapes[2]
        width, each = (BY_NAME[x.dtype].bytes for x in (self.images, self.filters))
        apart = (pixel, steps[-1]) if self.last else (steps[-1], pixel)
        shape = (count, m, k) if self.last else (count, k, n)
        images = replace(self.images, shape=shape, strides=tuple(s * width for s in (steps[0], *apart)))
        own = replace(self.filters, shape=(m, k), strides=(k * each, each))
        own = replace(self.filters, shape=(k, n), strides=(each, k * each)) if self.last else own
        if out is not None:
            width = BY_NAME[out.dtype].bytes
            out = replace(out, shape=(count, m, n), strides=(place[1] * width, place[0] * width, width))
        return GridProduct(Product(*((images, own) if self.last else (own, images)), out), self.requested)

    def _problem(
        self, to: Operand, place: tuple[int, int], text: str, *, merged: bool
    ) -> tuple[Problem, tuple[int, int, int], Views, dict[str, int]]:
        """The problem of one group, vectors of its operands, the view of the windows, and the numbers of a kernel."""
        size, steps, (row, item) = self.convolution, self._steps(), place
        count, (images, filters), k = self.images.shape[0], (self.images, self.filters), size.depth
        if _span(images.shape[1:], operand.elements(images)[1:]) > MOST_OFFSET:
            raise ScheduleError(
                f"an image of {images.shape[1:]}: kernels count its elements in 32 bits; split it along its rows"
            )
        items = 1 if merged else count
        m, n = (size.pixels * count // items, size.outputs) if self.last else (size.outputs, size.pixels)
        view = windows(size, steps) if self.last else planes(size, steps[1:])
        of_group = (size.outputs,) if size.groups > 1 and self.last else ()
        c = matrix(to, m, n, (row, 1), (item, *of_group))
        weight = size.outputs * k if size.groups > 1 else 0
        rows, columns, apart = (k, size.outputs, (1, k)) if self.last else (size.outputs, k, (k, 1))
        own = matrix(filters, rows, columns, apart, (weight,))
        image = Matrix("row", 0, 0, self._vector(view) if self.last else 1)
        step = steps[0] if items > 1 else 0
        a, b = (image, own) if self.last else (own, image)
        how = settings(self.x.a.dtype, self.x.b.dtype, to.dtype, text)
        p = Problem(m, n, k, batch=items, a=a.layout, b=b.layout, c="row", tf32=config.rounds(how["dtype"]), **how)
        offsets = (step, 0) if self.last else (0, step)
        own_values = numbers((m, n, k), items, (a, b, c), (*offsets, item))
        views = Views(view, padding=size.padding) if self.last else Views(b=view, padding=size.padding)
        return p, (a.vector, b.vector, c.vector), views, own_values

    def _vector(self, view: Any) -> int:
        """Elements of the widest vector access to windows: channels, wherever an image or a group begins."""
        bytes_, size = BY_NAME[self.images.dtype].bytes, self.convolution
        others = (self.images.at // bytes_, self._steps()[0], size.channels if size.groups > 1 else 0)
        aligned = gcd(*others, WIDEST // bytes_)
        return int(view.vector(1, aligned & -aligned))


def _span(shape: Shape, steps: tuple[int, ...]) -> int:
    """Elements from the first to the last of an array."""
    return sum((n - 1) * abs(s) for n, s in zip(shape, steps, strict=True))
