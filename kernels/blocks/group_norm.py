"""Group norm of images with channels last, with what follows it, on cores of a host: one kernel.

    for each image, for each few groups of channels     <- threads
      sums of channels down the pixels, and the means of groups of them
      sums of squares of what is left, and the deviations of groups
      for each pixel: normalize, compute the expressions, store

Each step is a block program over a part of the images; a task's channels stay in L2 from one to the next. Sums, means
and deviations of channels are in a task's scratch, where the expressions read them as operands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portmm.ir.block_program import of_rows
from portmm.ir.index import Ptr, ceil_div, const, minimum, round_up, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import Call, For, Function, Let, LetPtr, Param
from portmm.kernels.blocks.core import kernel_of, row_function
from portmm.kernels.cpu.elementwise import Elements, arguments, parameters, vectors
from portmm.schedule.rows import core_schedule
from portmm.spec.epilogue import Fused, Operand, column_reduction, extent, load, reduction
from portmm.spec.expr import apply, real

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Kernel, Stmt
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

CHANNELS = Operand("f32", "n")
CHAINS = 8
"""Vectors of channels that are summed at once: an addition takes four cycles on most cores, which start two in each."""
IMAGES, MEANS, DEVIATIONS = range(3)
"""Operands of the expressions: the images, and two vectors of channels that the kernel computes."""


def build(  # noqa: PLR0917 - what a kernel is made for
    isa: Isa, lanes: Atom, fused: Fused, group: int, eps: float, width: int
) -> Kernel:
    """Kernel of a group norm.

    Args:
        isa: the instruction set.
        lanes: its vectors of f32.
        fused: expressions of elements of images, of means, and of what deviations are divided by, and their results.
        group: channels of a group.
        eps: added to variances.
        width: channels of a task, whole groups.
    """
    m, n, task, item, column, columns = (var(x) for x in ("m", "n", "task", "item", "column", "columns"))
    parts, size = ceil_div(n, const(width)), round_up(const(width), 64)
    names = ("sums", "means", "deviations")
    own = [LetPtr(x, Ptr("work", (var("worker") * len(names) + i) * size), "f32") for i, x in enumerate(names)]
    images, at = fused.operands[IMAGES], [Ptr(x) for x in names]
    pixels = arguments(Fused((images,), ()), item, const(0), column)
    value, mean = load(0, images.dtype), load(1, "f32")
    centred, of_item = apply("sub", value, mean), replace(images, axes="mn")
    squares = Fused((of_item, CHANNELS, CHANNELS), ((2, column_reduction("add", apply("mul", centred, centred))),))
    body = (
        Let("item", task // parts),
        Let("column", task % parts * width),
        Let("columns", minimum(n - column, const(width))),
        *own,
        _down(isa, lanes, Fused((of_item, CHANNELS), ((1, column_reduction("add", value)),)), [*pixels, at[0]]),
        _groups(isa, lanes, group, _share(group), (at[0], at[1])),
        _down(isa, lanes, squares, [*pixels, at[1], at[0]], "squares"),
        _groups(isa, lanes, group, _deviation(group, eps), (at[0], at[2]), "deviations"),
        _each(isa, lanes, fused, (m, columns, item), at[1:]),
    )
    share = Function("some_groups", "task", (), body, "Some groups of channels of an image")
    work = size * (var("workers") * len(names))
    return kernel_of("group_norm", isa, lanes, fused, share, (parts * var("batch"), work))


def _share(group: int) -> Expr:
    """The mean over pixels and channels of a group, of sums over pixels."""
    return apply("div", reduction("add", load(0, "f32")), apply("mul", real(extent("m")), float(group)))


def _deviation(group: int, eps: float) -> Expr:
    """The factor of a group's elements, of sums of squares over pixels."""
    return apply("div", 1.0, apply("sqrt", apply("add", _share(group), eps)))


def _down(isa: Isa, lanes: Atom, fused: Fused, args: list[Any], name: str = "sums") -> Call:
    """The call that sums a value over the pixels, for each channel of a task."""
    at = Elements(isa, lanes, fused, inner=var("i"))
    block, end = const(CHAINS * lanes.n), var("columns")
    whole = end - end % block
    body = (
        *at.scratch(),
        For("j", const(0), whole, block, _sums(at, var("j"), CHAINS)),
        *vectors(at, whole, end, lambda j, few: _sums(at, j, 1, few)),
    )
    params = (Param("m"), Param("columns"), *parameters(fused))
    function = Function(f"down_{name}", "inner", params, body, "Sums of a few channels")
    return Call(function, (var("m"), var("columns"), *args))


def _sums(at: Elements, j: Index, chains: int, few: str = "") -> tuple[Stmt, ...]:
    """Statements that sum some vectors of channels: neighbours, so that whole lines are read."""
    real = at.real
    ((operand, total),) = at.fused.results
    names = [f"all_{e}" for e in range(chains)]
    each: list[Stmt] = []
    for e, into in enumerate(names):
        at.names = {}
        each += at.compute([total.args[1]], j + e * real.n, few)
        each.append(Map("add", into, (into, at.names[total.args[1]]), "f32", "f32", real.name))
    stores: list[Stmt] = []
    for e, into in enumerate(names):
        at.names = {total: into}
        stores += at.store(total, operand, j + e * real.n, few)
    none = (Map("literal", x, (0.0,), "f32", "f32", real.name) for x in names)
    return (*none, For("i", const(0), var("m"), const(1), tuple(each)), *stores)


def _groups(  # noqa: PLR0917 - two callers
    isa: Isa, lanes: Atom, group: int, value: Expr, at: tuple[Ptr, Ptr], name: str = "means"
) -> For:
    """The loop over groups that stores a value of sums of its channels for each channel."""
    program = of_rows(Fused((CHANNELS, CHANNELS), ((1, value),)))
    function = replace(row_function(core_schedule(program, isa, lanes), isa, lanes, program), name=f"group_{name}")
    first = var("group") * group
    call = Call(function, (var("m"), const(group), var("item"), const(0), *(x + first for x in at)))
    return For("group", const(0), var("columns") // group, const(1), (call,))


def _each(isa: Isa, lanes: Atom, fused: Fused, size: tuple[Index, Index, Index], own: list[Ptr]) -> For:
    """The loop over pixels that computes the expressions."""
    m, columns, item = size
    program = of_rows(fused)
    function = replace(row_function(core_schedule(program, isa, lanes), isa, lanes, program), name="one_pixel")
    args = arguments(fused, item, var("row"), var("column"))
    places = dict(zip((f"x{MEANS}", f"x{DEVIATIONS}"), own, strict=True))
    here = [places.get(x.name, x) if isinstance(x, Ptr) else x for x in args]
    return For("row", const(0), m, const(1), (Call(function, (m, columns, item, var("row"), *here)),))
