"""Kernels of convolutions in the host's memory: their problem, and operands as one kernel reads them.

Owns `HostConvolution`, one call, and `ConvolutionKernel`, the kernel for calls of its kind: the programs of products,
with windows as a view of A, or of B where channels are first. Pixels of all images are rows of one product where the
epilogue treats them alike. Groups are products of their own, one after the other, with the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.dispatch.view_routes import direct_route, view_route
from portmm.errors import ScheduleError
from portmm.ops import routes
from portmm.ops.product_kernel import HostProduct, merges, of_part
from portmm.runtime.cpu import runtime
from portmm.spec.convolution import Convolution, planes, windows
from portmm.spec.dequantization import IDENTITY
from portmm.spec.dtype import spell
from portmm.spec.layouts import Views
from portmm.spec.problem import Problem
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.ops.convolution_weights import PackedConv
    from portmm.trace.bind import Bound, Step
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]
_Memory = tuple[Array, int, int]
FEW_PIXELS = 32
"""Pixels below which products of few rows are faster than register tiles along a row of a result."""
LEAST_ROW = 6
"""Pixels of a row of a result from which register tiles have enough rows; pixels of several rows are packed else."""


@dataclass(frozen=True, slots=True)
class ConvolutionKernel:
    """The kernel for calls of one kind.

    Attributes:
        route: the kernel.
        results: shapes, of (image, pixel, channel) or with channels first (image, channel, pixel), and types.
        size: m, n, k and items of the product of one group.
        strides: of its operands, a_m to b_batch; those of C follow from the array that it is written to.
        steps: bytes from a group to the next, of images, and elements, of C.
        ends: the same of the last group, which may have channels of the one before.
        bound: operands of the epilogue, or None.
        indexed: place among the numbers of the first channel of a group, as bits; -1 if it is not read.
        along: place of the axis of channels in the table of operands.
        types: of the operands.
        several: the function returns a tuple.
        channels: of a result.
    """

    route: Any
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    size: tuple[int, int, int, int]
    strides: tuple[int, ...]
    steps: tuple[int, int]
    ends: tuple[int, int]
    bound: Bound | None = None
    indexed: int = -1
    along: int = 3
    types: tuple[str, ...] = ()
    several: bool = False
    channels: int = 0

    @property
    def overlaps(self) -> bool:
        """Whether the last matrix of groups has channels of the one before, which are computed twice."""
        return bool(self.steps[1] and self.ends[1] % self.steps[1])

    def run(self, x: Array, w: PackedConv, c: _Memory, closure: Any = None, more: Sequence[Array] = ()) -> None:
        """Compute all groups.

        Args:
            x: the images.
            w: the filters.
            c: memory of the first result, with its strides, of rows and of items.
            closure: arrays and numbers that the epilogue captures.
            more: memory of further results.
        """
        out, row, item = c
        m, n, k, batch = self.size
        a_m, a_k, a_batch, b_k, b_n, b_batch = self.strides
        last, execute = w.channels_last, runtime().execute
        table, numbers, arrays = None, None, []
        image: Any = x
        to: Any = out
        if len(w.weight) > 1:
            places = [y.__array_interface__["data"][0] for y in (x, out)]
            steps, ends = (tuple(map(mul, y, (1, out.itemsize))) for y in (self.steps, self.ends))
        if self.bound is not None:
            table, numbers, *arrays = self.bound.fill(closure, [], list(more))
        for group, weight in enumerate(w.weight):
            filters = getattr(weight, "owner", weight)
            if group:
                image, to = (p + min(group * s, e) for p, s, e in zip(places, steps, ends, strict=True))
            a, b = (image, filters) if last else (filters, image)
            operands = (m, n, k, batch, a, a_m, a_k, a_batch, b, b_k, b_n, b_batch, to, row, 1, item, None)
            if self.bound is None:
                execute(self.route, *operands)
            else:
                execute(self.route, *operands, *self._of_group(group, table, numbers), *arrays)

    def _of_group(self, group: int, table: Any, numbers: Any) -> tuple[Any, Any]:
        """The table of operands, and the numbers, of a group."""
        if not group and self.indexed < 0:
            return table, numbers
        size = self.size[0 if self.along == 2 else 1]
        first = min(group * size, self.channels - size)
        at = (0, first, 0) if self.along == 2 else (0, 0, first)
        return of_part(table, numbers, self.types, at, (self.indexed, (first,)))


class HostConvolution(HostProduct):
    """A convolution in the host's memory: the images' product, with an epilogue or without.

    Args:
        x: images, native, with strides in whole elements, none negative.
        w: filters.
        size: the convolution.
        wanted: the requested type of results, or None.
        first: the type of the first result, if different.
    """

    def __init__(
        self, x: Array, w: PackedConv, size: Convolution, wanted: np.dtype[Any] | None, first: np.dtype[Any] | None
    ) -> None:
        self.x, self.w, self.convolution, self.wanted, self.first, self.after = x, w, size, wanted, first, None
        self.last, self.images = w.channels_last, x.shape[0]
        self.int4 = w.int4
        self.items, self.m, self.n = self.shape
        self.batch = (self.items,)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a result: (image, pixel, channel), or with channels first (image, channel, pixel)."""
        channels, pixels = self.w.shape[0], self.convolution.pixels
        return (self.images, pixels, channels) if self.last else (self.images, channels, pixels)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties of a call that kernels depend on."""
        x = self.x
        return (x.shape, x.strides, x.dtype, self.convolution, self.w.kind, self.wanted, self.first)

    def writes(self) -> bool:
        """Whether kernels write results of the requested type."""
        return self.types()[2] == self.wanted

    def types(self, *, fused: bool = False) -> numpy_arrays.DTypes:
        """The types of A, B and a result."""
        x = self.x.dtype.newbyteorder("=")
        if self.int4:
            if numpy_arrays.name_of(x) not in ("f32", "f16", "bf16", "s8"):
                raise TypeError(
                    f"x has dtype {x}; filters of four bits are for float32, float16, bfloat16 or int8 images"
                )
            usual = np.dtype(np.float32) if x.kind in "iu" else x
            if self.wanted and (fused or numpy_arrays.name_of(self.wanted) in ("f32", "f16", "bf16")):
                usual = self.wanted
            return x, np.dtype(np.uint8), usual
        left, right = (x, self.w.dtype) if self.last or self.w.depthwise else (self.w.dtype, x)
        left, right, usual = numpy_arrays.types_of(left, right, self.wanted)
        usual = np.dtype(np.float32) if fused and usual.kind in "iu" else usual
        return left, right, (self.wanted if fused and self.wanted else usual).newbyteorder("=")

    def usual(self) -> np.dtype[Any]:
        """The default type of a result with an epilogue."""
        return self.types(fused=True)[2]

    def selected(self, traced: Traced | None, c: tuple[int, ...]) -> Any:  # type: ignore[override]
        """The kernel for calls of this kind, a `ConvolutionKernel`.

        Args:
            traced: the user's function, if there is one.
            c: strides of rows and of items of the first result, and of a row of pixels, if these are not equally apart.
        """
        size, indexed = self.convolution, -1
        step = None if traced is None else self.step(traced)
        to = (c[2], c[0]) if len(c) > 2 else None
        merged = self._merges(c, step) and (to is None or self.images == 1)
        if step is not None and size.groups > 1:
            step, indexed = self.step_of_part(step.traced, "n" if self.last else "m")
        m, n = (size.pixels * (self.images if merged else 1), size.outputs)
        m, n = (m, n) if self.last else (n, m)
        batch = 1 if merged else self.images
        _, route, strides = self.routed_view((m, n, batch), step, to)
        channel, row = self.x.strides[self._channel], 1 if self.last else c[0]
        steps = (size.channels * channel, size.outputs * row)
        ends = ((self.x.shape[self._channel] - size.channels) * channel, (self.w.shape[0] - size.outputs) * row)
        dims = (m, n, size.depth, batch)
        if step is None:
            return ConvolutionKernel(route, ((self.shape, self.types()[2]),), dims, strides, steps, ends)
        bound, results = self._bound(step)
        types = tuple(x.dtype for x in step.fused.operands)
        along = 3 if self.last else 2
        return ConvolutionKernel(
            route,
            results,
            dims,
            strides,
            steps,
            ends,
            bound,
            indexed,
            along,
            types,
            step.traced.several,
            self.w.shape[0],
        )

    @property
    def _channel(self) -> int:
        """The axis of channels of the images."""
        return -1 if self.last else 1

    def _element_strides(self) -> tuple[int, ...]:
        """Strides of the images as (n, *spatial, c), in elements."""
        steps = [s // self.x.itemsize for s in self.x.strides]
        if not self.last:
            steps = [steps[0], *steps[2:], steps[1]]
        return tuple(steps)

    def _merges(self, c: tuple[int, ...], step: Step | None) -> bool:
        """Whether the pixels of all images are rows of one product."""
        if not self.last or (self.images > 1 and c[1] != c[0] * self.convolution.pixels):
            return False
        return self.images == 1 or step is None or merges(step, self.convolution.pixels)

    def routed_view(
        self, dims: tuple[int, int, int], step: Any, to: tuple[int, int] | None = None
    ) -> tuple[Problem, Any, tuple[int, ...]]:
        """The problem of some m, n and items, a route, and the strides of A and B.

        Args:
            dims: these.
            step: the epilogue, with its `text` and the `types` of its results, or None.
            to: strides of rows and of pixels of a result whose pixels are not equally far apart, or None.

        Raises:
            ScheduleError: no kernel computes it, or none writes such a result.
        """
        (_, _, batch), size, steps = dims, self.convolution, self._element_strides()
        pixel, plain = collapsed(size.spatial, steps[1:-1]), self._plain(steps, batch)
        item = steps[0] if batch > 1 else 0
        one = self.w.weight[0]
        if self.last:
            strides: tuple[int, ...] = (pixel or 0, 1, item) if plain else (0, 0, item)
            strides += (one.b_k, one.b_n, 0)
        else:
            strides = (size.depth, 1, 0) + ((steps[-1], 1, item) if plain else (0, 0, item))
        p = self._problem(dims, step, plain=plain)
        own = _single(steps, self.images, size)
        target, threads = config.target(), config.limit() or config.get_num_threads()
        direct = self.last and (to is not None or self._in_rows())
        if direct and (route := direct_route(p, target, threads, size, own, to)) is not None:
            return p, route, strides
        if to is not None:
            raise ScheduleError("only direct convolutions write pixels that are not equally far apart")
        if plain:
            return p, routes.route(p), strides
        fill = size.padding if any((*size.before, *size.after)) else 0
        views = Views(a=windows(size, own), padding=fill)
        views = views if self.last else Views(b=planes(size, own[1:]), padding=fill)
        return p, view_route(p, target, threads, views), strides

    def _in_rows(self) -> bool:
        """Whether rows of a result are long enough for register tiles, or there is one image of more than one pixel."""
        size = self.convolution
        if size.pointwise and size.pixels < FEW_PIXELS:
            return False
        return size.out[-1] >= LEAST_ROW or (self.images == 1 < size.pixels and not size.pointwise)

    def _plain(self, steps: Sequence[int], batch: int) -> bool:
        """Whether windows are a matrix with strides: pixels at equal distances, and contiguous along n or k."""
        if not self.convolution.pointwise:
            return False
        pixel = collapsed(self.convolution.spatial, steps[1:-1])
        if pixel is None:
            return False
        if not self.last:
            return pixel == 1 and steps[-1] >= self.convolution.pixels
        even = self.images == 1 or batch > 1 or steps[0] == pixel * self.convolution.pixels
        return even and steps[-1] == 1 and pixel >= self.convolution.channels

    def _problem(self, dims: tuple[int, int, int], step: Any, *, plain: bool) -> Problem:
        """The problem of one group."""
        (m, n, batch), (a, b, c) = dims, self.types()
        c = c if step is None else step.types[0]
        names = (numpy_arrays.name_of(a), "u4" if self.int4 else numpy_arrays.name_of(b), numpy_arrays.name_of(c))
        text = step.text if step is not None else IDENTITY if self.sums() == "s32" != names[2] else ""
        image = "row" if plain else "any"
        words = (image, "codes" if self.int4 else "packed") if self.last else ("row", image)
        return Problem(
            m, n, self.convolution.depth, spell(*names), batch, *words,
            family=self.w.weight[0].family if self.last else "",
            deterministic=config.current().deterministic, fused=text,
        )  # fmt: skip


def collapsed(extents: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of axes as one, None if they are at no equal distances; extents of 1 have any."""
    known = [(n, s) for n, s in zip(extents, strides, strict=True) if n != 1]
    if not known:
        return strides[-1] if strides else 1
    for (_, outer), (n, inner) in pairwise(known):
        if outer != n * inner:
            return None
    return known[-1][1]


def _single(steps: Sequence[int], images: int, size: Convolution) -> tuple[int, ...]:
    """Strides of images; that of a single image, which is never used, as if there were no gap after it."""
    if images > 1:
        return tuple(steps)
    return (math.prod(size.spatial) * size.groups * size.channels, *steps[1:])
