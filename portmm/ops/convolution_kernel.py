"""Kernels of convolutions in the host's memory: their problem, and operands as one kernel reads them.

Owns `HostConvolution`, one call, and `ConvolutionKernel`, the kernel for calls of its kind: the programs of products,
with windows as a view of A, or of B where channels are first. Pixels of all images are rows of one product where the
epilogue treats them alike. Groups are products of their own, one after the other, with the same kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.dispatch.view_routes import Views, direct_route, view_route
from portmm.errors import ScheduleError
from portmm.ops import routes
from portmm.ops.product_kernel import merges
from portmm.runtime.cpu import runtime
from portmm.spec.convolution import planes, windows
from portmm.spec.dequantization import IDENTITY
from portmm.spec.dtype import BY_NAME, accumulator, spell
from portmm.spec.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.ops.convolution_weights import PackedConv
    from portmm.spec.convolution import Convolution
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
        bound: operands of the epilogue, or None.
        indexed: place among the numbers of the first channel of a group, as bits; -1 if it is not read.
        along: place of the axis of channels in the table of operands.
        types: of the operands.
        several: the function returns a tuple.
    """

    route: Any
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    size: tuple[int, int, int, int]
    strides: tuple[int, ...]
    steps: tuple[int, int]
    bound: Bound | None = None
    indexed: int = -1
    along: int = 3
    types: tuple[str, ...] = ()
    several: bool = False

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
        if self.bound is not None:
            table, numbers, *arrays = self.bound.fill(closure, [], list(more))
        for group, weight in enumerate(w.weight):
            image, to, filters = x, out, getattr(weight, "owner", weight)
            if group:
                image = x.__array_interface__["data"][0] + group * self.steps[0]
                to = out.__array_interface__["data"][0] + group * self.steps[1] * out.itemsize
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
        table, channels = table.copy(), self.size[0 if self.along == 2 else 1]
        for row, operand in zip(table, self.types, strict=False):
            row[0] += group * channels * row[self.along] * BY_NAME[operand].bytes
        if self.indexed >= 0:
            first = np.array([group * channels], np.int32).view(np.float32)
            numbers = np.concatenate([numbers[: self.indexed], first])
        return table, numbers


class HostConvolution:
    """A convolution in the host's memory.

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
        self.x, self.w, self.size, self.wanted, self.first = x, w, size, wanted, first
        self.last, self.images = w.channels_last, x.shape[0]
        self.int4 = self.last and not hasattr(w.weight[0], "element")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a result: (image, pixel, channel), or with channels first (image, channel, pixel)."""
        channels, pixels = self.size.groups * self.size.outputs, self.size.pixels
        return (self.images, pixels, channels) if self.last else (self.images, channels, pixels)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties of a call that kernels depend on."""
        x = self.x
        return (x.shape, x.strides, x.dtype, self.size, self.w.kind, self.wanted, self.first)

    def writes(self) -> bool:
        """Whether kernels write results of the requested type."""
        return self.int4 or self.types()[2] == self.wanted

    def types(self, *, fused: bool = False) -> numpy_arrays.DTypes:
        """The types of A, B and a result."""
        x = self.x.dtype.newbyteorder("=")
        if self.int4:
            return x, np.dtype(np.uint8), self.wanted or x
        left, right = (x, self.w.dtype) if self.last else (self.w.dtype, x)
        left, right, usual = numpy_arrays.types_of(left, right, self.wanted)
        usual = np.dtype(np.float32) if fused and usual.kind in "iu" else usual
        return left, right, (self.wanted if fused and self.wanted else usual).newbyteorder("=")

    def sums(self) -> str:
        """The accumulator's type."""
        a, b, _ = self.types()
        return accumulator(numpy_arrays.name_of(a), "u4" if self.int4 else numpy_arrays.name_of(b))

    def step(self, traced: Traced) -> Step:
        """The user's function as expressions.

        Raises:
            ScheduleError: it cannot be one.
        """
        from portmm.ops.epilogues import fusible
        from portmm.trace.bind import typed

        if self.int4 and self.sums() == "s32":
            raise ScheduleError("expressions are in float32, not in s32")
        return fusible(typed(traced, self.first), self.sums(), lambda: self.types(fused=True)[2])

    def ready(self, c: tuple[int, int], traced: Traced | None = None) -> ConvolutionKernel | ScheduleError:
        """The kernel for calls of this kind, or the reason why there is none."""
        try:
            return self.selected(c, traced)
        except ScheduleError as error:
            return ScheduleError(str(error))  # for the memo without its traceback, whose frames reference operands

    def selected(self, c: tuple[int, int], traced: Traced | None = None) -> ConvolutionKernel:
        """The kernel for calls of this kind.

        Args:
            c: strides of rows and of items of the first result.
            traced: the user's function, if there is one.

        Raises:
            ScheduleError: there is none.
            NoCompilerError: there is no compiler.
            BuildError: the compiler failed.
        """
        size, indexed = self.size, -1
        step = None if traced is None else self.step(traced)
        merged = self._merges(c, step)
        if step is not None and size.groups > 1:
            step, indexed = self._by_group(step)
        m, n = (size.pixels * (self.images if merged else 1), size.outputs)
        m, n = (m, n) if self.last else (n, m)
        batch = 1 if merged else self.images
        route, strides = self._routed((m, n, batch), step)
        steps = (size.channels * self.x.strides[self._channel], size.outputs * (1 if self.last else c[0]))
        dims = (m, n, size.depth, batch)
        if step is None:
            return ConvolutionKernel(route, ((self.shape, self.types()[2]),), dims, strides, steps)
        bound, results = self._bound(step)
        types = tuple(x.dtype for x in step.fused.operands)
        along = 3 if self.last else 2
        return ConvolutionKernel(
            route, results, dims, strides, steps, bound, indexed, along, types, step.traced.several
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

    def _merges(self, c: tuple[int, int], step: Step | None) -> bool:
        """Whether the pixels of all images are rows of one product."""
        if not self.last or (self.images > 1 and c[1] != c[0] * self.size.pixels):
            return False
        return self.images == 1 or step is None or merges(step, self.size.pixels)

    def _by_group(self, step: Step) -> tuple[Step, int]:
        """An epilogue whose index of channels begins at a number, that of a group's first, and the number's place."""
        from portmm.spec.epilogue import number
        from portmm.spec.expr import apply
        from portmm.spec.expr_functions import substituted

        traced, axis, indices = step.traced, "n" if self.last else "m", []

        def change(e: Any) -> Any:
            if e.op != "index" or e.args[0] != axis:
                return None
            indices.append(e)
            return e + apply("bits", number(len(traced.numbers)))  # numbers are floats: these are an integer's bits

        done: dict[Any, Any] = {}
        values = tuple((substituted(x, change, done), t) for x, t in traced.results)
        if not indices:
            return step, -1
        changed = self.step(replace(traced, results=values))
        return changed, len(traced.numbers)

    def _bound(self, step: Step) -> tuple[Any, tuple[Any, ...]]:
        """The operands of an epilogue, and its results."""
        from portmm.trace.bind import Bound, dense

        images, m, n = self.shape
        bound = Bound(step.traced, (m, n, images), [], [dense(x, (m, n, images)) for x in step.axes[1:]])
        shapes = [(images, m, n if "n" in x else 1) for x in step.axes]
        return bound, tuple(zip(shapes, step.types, strict=True))

    def _routed(self, dims: tuple[int, int, int], step: Step | None) -> tuple[Any, tuple[int, ...]]:
        """A route, and the strides of A and B."""
        (_, _, batch), size, steps = dims, self.size, self._element_strides()
        pixel, plain = _collapsed(size.spatial, steps[1:-1]), self._plain(steps, batch)
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
        if self.last and self._in_rows() and (route := direct_route(p, size, own, target, threads)) is not None:
            return route, strides
        if plain:
            return routes.route(p), strides
        views = Views(a=windows(size, own), padding=size.padding)
        views = views if self.last else Views(b=planes(size, own[1:]), padding=size.padding)
        return view_route(p, views, target, threads), strides

    def _in_rows(self) -> bool:
        """Whether rows of a result are long enough for register tiles, or there is one image of more than one pixel."""
        size = self.size
        if size.pointwise and size.pixels < FEW_PIXELS:
            return False
        return size.out[-1] >= LEAST_ROW or (self.images == 1 < size.pixels and not size.pointwise)

    def _plain(self, steps: Sequence[int], batch: int) -> bool:
        """Whether windows are a matrix with strides: pixels at equal distances, and contiguous along n or k."""
        if not self.size.pointwise:
            return False
        pixel = _collapsed(self.size.spatial, steps[1:-1])
        if pixel is None:
            return False
        if not self.last:
            return pixel == 1 and steps[-1] >= self.size.pixels
        even = self.images == 1 or batch > 1 or steps[0] == pixel * self.size.pixels
        return even and steps[-1] == 1 and pixel >= self.size.channels

    def _problem(self, dims: tuple[int, int, int], step: Step | None, *, plain: bool) -> Problem:
        """The problem of one group."""
        (m, n, batch), (a, b, c) = dims, self.types()
        c = c if step is None else step.types[0]
        names = (numpy_arrays.name_of(a), "u4" if self.int4 else numpy_arrays.name_of(b), numpy_arrays.name_of(c))
        text = step.text if step is not None else IDENTITY if self.sums() == "s32" != names[2] else ""
        image = "row" if plain else "any"
        words = (image, "codes" if self.int4 else "packed") if self.last else ("row", image)
        return Problem(
            m, n, self.size.depth, spell(*names), batch, *words, family=self.w.weight[0].family if self.last else "",
            deterministic=config.current().deterministic, fused=text,
        )  # fmt: skip


def _collapsed(extents: Sequence[int], strides: Sequence[int]) -> int | None:
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
