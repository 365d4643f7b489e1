"""Steps over windows of images in a program on the CPU: convolutions with what follows them, and pooling.

Owns `Filter` and `Pool`, what the kernels of such a node are made for, and the functions that add its steps. Images
have their channels last. A convolution is a product whose A is a view of windows (`ops.convolution_kernel`); the
element-wise operations that follow it are its epilogue. Pooling is a kernel over rows of channels for each region of
the result whose windows have the same taps inside the image: one for the interior, and one for each border and corner.
"""

from __future__ import annotations

import functools
import math
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.errors import ScheduleError
from portmm.fusion.plan import Expressions
from portmm.fusion.program import Kernel
from portmm.ops.convolution_kernel import HostConvolution
from portmm.spec.expr import apply
from portmm.trace.buffers import Place, looked, walk

if TYPE_CHECKING:
    from portmm.fusion.partition import Unit
    from portmm.ops.convolution_weights import PackedConv
    from portmm.spec.convolution import Convolution

Ints = tuple[int, ...]
MOST_TAPS, MOST_REGIONS = 32, 32
"""Taps of a window that one kernel reads, and kernels of one pooling; NumPy computes larger ones."""


class Filter(NamedTuple):
    """A convolution without its images.

    Attributes:
        weight: packed filters, of one group.
        size: the convolution.
    """

    weight: PackedConv
    size: Convolution


class Pool(NamedTuple):
    """Pooling over windows.

    Attributes:
        operation: "max" or "add".
        divisor: of sums; 0 for the number of elements inside the image.
        axes: of each axis its regions: first result, number of results, offset of the first tap's first element and
            of those of further taps in the image.
        strides: of windows.
    """

    operation: str
    divisor: int
    axes: tuple[tuple[tuple[int, int, Ints], ...], ...]
    strides: Ints


class _Ending(NamedTuple):
    """An epilogue as a convolution's problem has it.

    Attributes:
        text: its expressions.
        types: of its results.
    """

    text: str
    types: tuple[Any, ...]


def regions(size: int, result: int, window: tuple[int, int, int, int]) -> tuple[tuple[int, int, Ints], ...]:
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
        runs.append((first, 1 + len(rest), tuple(first * stride + t * dilation - begin for t in taps)))
    return tuple(runs)


def is_small(pool: Pool) -> bool:
    """Test whether kernels compute it: windows have few taps, and none lies outside of the image."""
    taps = math.prod(max(len(r[2]) for r in axis) for axis in pool.axes)
    return taps <= MOST_TAPS and math.prod(map(len, pool.axes)) <= MOST_REGIONS and all(
        r[2] for axis in pool.axes for r in axis
    )  # fmt: skip


def add_pool(builder: Any, unit: Unit) -> None:
    """Add the kernels of pooling to a builder of a program on the CPU (`plan_cpu.HostBuilder`).

    Raises:
        ScheduleError: there are none.
    """
    (x,) = unit.members
    pool: Pool = builder.graph.windows[x]
    image, to = builder.buffer_of(x.inputs[0]), builder.allocate(x)
    for region in product(*pool.axes):
        part = _part(to, tuple(slice(first, first + count) for first, count, _ in region))
        fusing = Expressions(part.like.shape, lambda _: False, builder.buffer_of)
        taps = []
        for at in product(*(starts for _, _, starts in region)):
            each = zip(at, region, pool.strides, strict=True)
            taps.append(_part(image, tuple(slice(i, i + (count - 1) * s + 1, s) for i, (_, count, _), s in each)))
        value = functools.reduce(lambda a, b: apply(pool.operation, a, b), map(fusing.load, taps))
        if pool.operation == "add":
            value = apply("div", value, float(pool.divisor or len(taps)))
        fusing.write(value, part)
        builder.run_rows(fusing, whole=False)
    builder.buffers[x] = to
    builder.kernels.append(Kernel("pool", x.name, (x.where,), detail=" x ".join(map(str, x.shape))))


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
    weight, size = builder.graph.windows[x]
    image = builder.buffer_of(x.inputs[0])
    adjacent = image.like.strides[-1] == image.like.itemsize or x.inputs[0].shape[-1] == 1
    if not adjacent or min(image.like.strides) < 0:
        raise ScheduleError("channels of the images are not adjacent in memory")
    fusing = builder.expressions(unit, x)
    builder.store(unit.stored, fusing)
    c = fusing.written[0]
    steps = [p.strides(x.shape) for p in (c, *fusing.buffers)]
    w, columns = walk(x.shape[:-1], [s[:-1] for s in steps]), [s[-1] for s in steps[1:]]
    images, (m, rows), (items, apart) = x.shape[0], w.rows, w.batch
    if len(w.repeats) > 1 or m * items != images * size.pixels or (items > 1 and m != size.pixels):
        raise ScheduleError("pixels of an operand of its epilogue are at no equal distances")
    fusing.bind(w, columns, 1)
    call = HostConvolution(image.like, weight, size, x.dtype, None)
    types = tuple(p.like.dtype for p in fusing.written)
    ending = _Ending(fusing.text(), types) if len(unit.members) > 1 else None
    p, route, strides = call.routed_view((m, x.shape[-1], items), ending)
    a_m, a_k, a_batch, b_k, b_n, b_batch = strides
    numbers = [m, x.shape[-1], size.depth, items, a_m, a_k, a_batch, b_k, b_n, b_batch, rows[0], 1, apart[0]]
    owner = weight.weight[0].owner
    builder.writer.name("weight", weight)  # the program stores its address, so it keeps it alive
    addresses: list[Any] = [(image.root, image.offset), (str(owner.__array_interface__["data"][0]), 0)]
    table = None
    if ending is not None:
        offsets = list(zip(apart[1:], rows[1:], columns, strict=True))
        table = builder.writer.operands(fusing.buffers, offsets, w.repeats[0][1:])
    addresses += [(c.root, c.offset), table, builder.writer.pass_numbers(fusing.numbers)]
    builder.writer.execute(route, numbers, addresses)
    lines = tuple(dict.fromkeys(y.where for y in unit.members))
    fused = tuple(y.name for y in unit.members[1:])
    builder.kernels.append(Kernel("conv", x.name, lines, fused, fusing.text() if ending else "", str(p)))
