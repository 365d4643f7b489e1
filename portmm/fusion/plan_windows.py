"""Steps over images in a program on the CPU: convolutions and group norms with what follows them, and pooling.

Owns `Filter`, `Pool` and `Norm`, what the kernels of such a node are made for, and the functions that add its steps.
Images have their channels last. A convolution is a product whose A is a view of windows (`ops.convolution_kernel`); the
element-wise operations that follow it are its epilogue. Pooling is a kernel over rows of channels for each region of
the result whose windows have the same taps inside the image: one for the interior, and one for each border and corner.
"""

from __future__ import annotations

import functools
import math
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.errors import ScheduleError
from portmm.fusion.plan import Expressions, counts
from portmm.fusion.program import Kernel
from portmm.ops.convolution_kernel import HostConvolution
from portmm.ops.convolution_weights import PackedConv, of_filters
from portmm.spec.expr import apply
from portmm.trace.buffers import Place, Walk, looked, walk

if TYPE_CHECKING:
    from portmm.fusion.partition import Unit
    from portmm.spec.convolution import Convolution

Ints = tuple[int, ...]
MOST_TAPS, MOST_REGIONS = 32, 32
"""Taps of a window that one kernel reads, and kernels of one pooling; NumPy computes larger ones."""


class Filter(NamedTuple):
    """A convolution without its images.

    Attributes:
        weight: packed filters, of one group.
        size: the convolution.
        rows: filters of each row of a block, the first of which are `weight`, where channels of the result are blocks
            of pixels: it is (n, h, row of a block, w, channel) then.
    """

    weight: PackedConv
    size: Convolution
    rows: tuple[PackedConv, ...] = ()


class Region(NamedTuple):
    """Results along an axis whose windows have the same taps inside the image.

    Attributes:
        first: result.
        results: number of results.
        taps: number of each tap.
        starts: of each tap, the element of the image that the first result reads.
    """

    first: int
    results: int
    taps: Ints
    starts: Ints


class Pool(NamedTuple):
    """Pooling over windows, or a convolution of each channel by a filter of its own.

    Attributes:
        operation: "max", "mean" or "dot": with filters, the second operand of a node: (taps, channels).
        divisor: of sums; 0 for the number of elements inside the image.
        axes: of each axis its regions.
        kernel: extents of a window.
        strides: of windows.
        bias: the next operand is added to each row.
        residual: the last operand is added to the result.
        relu: the result is at least 0.
    """

    operation: str
    divisor: int
    axes: tuple[tuple[Region, ...], ...]
    kernel: Ints
    strides: Ints
    bias: bool = False
    residual: bool = False
    relu: bool = False


class Norm(NamedTuple):
    """A group norm of images, scaled and shifted by channels if there is a second and a third operand.

    Attributes:
        groups: of channels.
        eps: added to variances.
    """

    groups: int
    eps: float

    def plain(self, images: Any) -> Any:
        """The groups of images, normalized in NumPy."""
        shape = images.shape
        each = images.reshape((shape[0], -1, self.groups, shape[-1] // self.groups)).astype(np.float32, copy=False)
        centred = each - each.mean((1, 3), keepdims=True)
        deviation = np.sqrt(np.square(centred).mean((1, 3), keepdims=True) + np.float32(self.eps))
        return (centred / deviation).reshape(shape)


class _Ending(NamedTuple):
    """An epilogue as a convolution's problem has it.

    Attributes:
        text: its expressions.
        types: of its results.
    """

    text: str
    types: tuple[Any, ...]


def regions(size: int, result: int, window: tuple[int, int, int, int]) -> tuple[Region, ...]:
    """The regions of results along an axis whose windows have the same taps inside an image of some size.

    Args:
        size: of the image.
        result: number of results.
        window: its taps, the stride, the dilation and the padding before the image.
    """
    kernel, stride, dilation, begin = window

    def inside(i: int) -> Ints:
        return tuple(t for t in range(kernel) if 0 <= i * stride + t * dilation - begin < size)

    runs = []
    for taps, group in groupby(range(result), inside):
        first, *rest = group
        starts = tuple(first * stride + t * dilation - begin for t in taps)
        runs.append(Region(first, 1 + len(rest), taps, starts))
    return tuple(runs)


def is_small(pool: Pool) -> bool:
    """Test whether kernels compute it: windows have few taps, and none lies outside of the image."""
    taps = math.prod(max(len(r.taps) for r in axis) for axis in pool.axes)
    few = taps <= MOST_TAPS and math.prod(map(len, pool.axes)) <= MOST_REGIONS
    return few and all(r.taps for axis in pool.axes for r in axis)


def add_pool(builder: Any, unit: Unit) -> None:
    """Add the kernels of pooling to a builder of a program on the CPU (`plan_cpu.HostBuilder`)."""
    (x,) = unit.members
    pool: Pool = builder.graph.windows[x]
    operands, to = [builder.buffer_of(y) for y in x.inputs], builder.allocate(x)
    for region in product(*pool.axes):
        along = tuple(slice(r.first, r.first + r.results) for r in region)
        part = _part(to, along)
        fusing = Expressions(part.like.shape, lambda _: False, builder.buffer_of)
        value = _over_taps(pool, region, operands, fusing)
        if pool.bias:
            value = apply("add", value, fusing.load(operands[2]))
        if pool.residual:
            value = apply("add", value, fusing.load(_part(operands[-1], along)))
        fusing.write(apply("max", value, 0.0) if pool.relu else value, part)
        builder.run_rows(fusing, whole=False)
    builder.buffers[x] = to
    kind = "conv" if pool.operation == "dot" else "pool"
    builder.kernels.append(Kernel(kind, x.name, (x.where,), detail=" x ".join(map(str, x.shape))))


def _over_taps(pool: Pool, region: tuple[Region, ...], operands: list[Place], fusing: Expressions) -> Any:
    """The reduction of the taps of windows of a region, as an expression."""
    elements, each = [], [list(zip(r.taps, r.starts, strict=True)) for r in region]
    for taps in product(*each):
        at = tuple(
            slice(i, i + (r.results - 1) * s + 1, s) for (_, i), r, s in zip(taps, region, pool.strides, strict=True)
        )
        element = fusing.load(_part(operands[0], at))
        if pool.operation == "dot":
            number = functools.reduce(lambda n, x: n * x[1] + x[0][0], zip(taps, pool.kernel, strict=True), 0)
            row = looked(operands[1], lambda y, number=number: y[number])
            assert row is not None  # noqa: S101 - a row is a view
            element = apply("mul", element, fusing.load(row))
        elements.append(element)
    operation = "max" if pool.operation == "max" else "add"
    value = functools.reduce(lambda a, b: apply(operation, a, b), elements)
    return apply("div", value, float(pool.divisor or len(elements))) if pool.operation == "mean" else value


def _part(place: Place, along: tuple[slice, ...]) -> Place:
    """A part of images along their spatial axes."""
    part = looked(place, lambda y: y[(slice(None), *along)])
    assert part is not None  # noqa: S101 - slices are views
    return part


def add_convolution(builder: Any, unit: Unit) -> None:
    """Add a convolution with what follows it to a builder of a program on the CPU (`plan_cpu.HostBuilder`).

    Raises:
        ScheduleError: no kernel computes it.
    """
    x = unit.members[0]
    weight, size, blocks = builder.graph.windows[x]
    size = of_filters(size, weight)
    image = builder.buffer_of(x.inputs[0])
    adjacent = image.like.strides[-1] == image.like.itemsize or x.inputs[0].shape[-1] == 1
    if not adjacent or min(image.like.strides) < 0:
        raise ScheduleError("channels of the images are not adjacent in memory")
    fusing = builder.expressions(unit, x)
    builder.store(unit.stored, fusing)
    steps = [p.strides(x.shape) for p in (fusing.written[0], *fusing.buffers)]
    w, to = _of_blocks(x.shape, steps) if blocks else _of_pixels(unit, steps, size)
    fusing.bind(w, [s[-1] for s in steps[1:]], 1)
    call = HostConvolution(image.like, weight, size, x.dtype, None)
    types = tuple(p.like.dtype for p in fusing.written)
    ending = _Ending(fusing.text(), types) if len(unit.members) > 1 else None
    (m, rows), (items, apart) = w.rows, w.batch
    viewed = builder.ready(functools.partial(call.routed_view, (m, x.shape[-1], items), ending, to))
    if viewed is None:
        return
    p, route, strides = viewed
    numbers = [m, x.shape[-1], size.depth, items, *strides, rows[0], 1, apart[0]]
    for i, one in enumerate(blocks or (weight,)):
        owner = one.weight[0].owner
        name = builder.writer.name("weight", one)  # the program stores its address, so it keeps it alive
        filters = Place(str(owner.__array_interface__["data"][0]), 0, owner, name)
        moved = [i * s[2] for s in steps] if blocks else [0, *fusing.repeats[0]]
        builder.launch((route, numbers), (image, filters, fusing.written[0]), fusing, (0, 0, *moved))
    lines = tuple(dict.fromkeys(y.where for y in unit.members))
    fused = (*(y.name for y in unit.members[1:]), *("depth to space" for _ in blocks[:1]))
    text, flop = fusing.text() if ending else "", p.flops * len(blocks or (weight,))
    builder.kernels.append(Kernel("conv", x.name, lines, fused, text, str(p), flop=flop))


def _of_pixels(unit: Unit, steps: list[Ints], size: Convolution) -> tuple[Walk, None]:
    """The loops over the pixels of a result, of the strides of its arrays; of each image, where pixels are counted."""
    shape = unit.members[0].shape
    w = walk(shape[:-1], [s[:-1] for s in steps], whole=counts(unit))
    m, items = w.rows[0], w.batch[0]
    if len(w.repeats) > 1 or m * items != shape[0] * size.pixels or (items > 1 and m != size.pixels):
        raise ScheduleError("pixels of an operand of its epilogue are at no equal distances")
    return w, None


def _of_blocks(shape: Ints, steps: list[Ints]) -> tuple[Walk, tuple[int, int]]:
    """The loops over the pixels of one row of each block, and the strides of rows and pixels of the result."""
    (image, row, _, pixel, _), *others = steps
    if any(s[axis] for s in others for axis in (0, 1, 3)):
        raise ScheduleError("an operand of its epilogue varies along pixels, which are blocks of the result")
    none = (0,) * len(others)
    w = Walk((shape[1] * shape[3], (pixel, *none)), (shape[0], (image, *none)), [(0,) * len(steps)])
    return w, (row, pixel)


def add_norm(builder: Any, unit: Unit) -> None:
    """Add a group norm with what follows it to a builder of a program on the CPU (`plan_cpu.HostBuilder`).

    Raises:
        ScheduleError: no kernel computes it.
    """
    from portmm.dispatch.cpu_routes import group_norm_route
    from portmm.spec.epilogue import parse

    x = unit.members[0]
    form: Norm = builder.graph.windows[x]
    if counts(unit):
        raise ScheduleError("what follows a group norm counts rows or columns")
    image, *vectors = (builder.buffer_of(y) for y in x.inputs)
    channels, owner = x.shape[-1], np.empty(x.shape[-1], np.float32)
    own = [Place(image.root, image.offset, owner, image.text)] * 2  # the kernel has them in its scratch
    fusing = builder.expressions(unit)
    element, mean, deviation = (fusing.load(y) for y in (image, *own))
    value = apply("mul", apply("sub", element, mean), deviation)
    for operation, y in zip(("mul", "add"), vectors, strict=False):
        value = apply(operation, value, fusing.load(y))
    fusing.known[x] = value
    builder.store(unit.stored, fusing)
    steps = [p.strides(x.shape) for p in fusing.buffers]
    pixels = walk(x.shape[1:-1], [s[1:-1] for s in steps])
    if pixels.batch[0] > 1 or len(pixels.repeats) > 1:
        raise ScheduleError("pixels of an operand of a group norm are at no equal distances")
    w = Walk(pixels.rows, (x.shape[0], tuple(s[0] for s in steps)), pixels.repeats)
    fusing.bind(w, [s[-1] for s in steps])
    if not {"m", "n"} <= {*fusing.operands[0].axes, *"n"[: channels == 1]}:
        raise ScheduleError("images of a group norm are broadcast along pixels or channels")
    text = fusing.text()
    size = (w.rows[0], channels, w.batch[0])
    make = functools.partial(group_norm_route, parse(text), channels // form.groups, form.eps, size)
    route = builder.ready(make)
    builder.launch((route, [size[0], channels, 1, size[2], *(0,) * 9]), (), fusing, (0,) * len(fusing.buffers))
    lines, names = tuple(dict.fromkeys(y.where for y in unit.members)), tuple(y.name for y in unit.members[1:])
    detail = f"{form.groups} groups, {' x '.join(map(str, x.shape))}"
    builder.kernels.append(Kernel("norm", x.name, lines, names, text, detail))
