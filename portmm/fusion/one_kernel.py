"""Programs of one kernel: a block program that a search has found, as a function of a call's arrays.

Owns `laid_out`, a kernel whose operands have their dimensions in the order of memory, and `compiled_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.codegen.lower import atom_of
from portmm.dispatch import config
from portmm.errors import ScheduleError
from portmm.fusion.program import Kernel as Described
from portmm.fusion.program import Writer
from portmm.fusion.term_reader import MIXED
from portmm.ir.nodes import FIELDS
from portmm.ir.tile_program import extent_fields, stride_field
from portmm.schedule.block_tiles import candidates
from portmm.spec.dtype import BY_NUMPY
from portmm.spec.problem import AXES
from portmm.trace.buffers import Place
from portmm.trace.placeholders import Placeholder

if TYPE_CHECKING:
    from portmm.fusion.term_reader import Labelled
    from portmm.ir.mugraph import MuGraph
    from portmm.schedule.schedule import Schedule

Array = np.ndarray[Any, Any]


class _Input:
    """An input of terms as a kernel reads it: a view of an argument, without dimensions of extent 1."""

    def __init__(self, arrays: Sequence[Any], leaf: int, views: Any, dtype: np.dtype[Any]) -> None:
        base, size = arrays[leaf], dtype.itemsize
        if not isinstance(base, np.ndarray) or not numpy_arrays.addressable(base, dtype):
            raise ScheduleError(f"a kernel reads arrays of {dtype} where they lie")
        view = base
        for one in views:
            view = one(view)
        if not np.may_share_memory(view, base):
            raise ScheduleError("a view of an argument is a copy")
        self.leaf, self.offset = leaf, view.ctypes.data - base.ctypes.data
        self.strides = [s // size for s, n in zip(view.strides, view.shape, strict=True) if n > 1]
        self.order = tuple(sorted(range(len(self.strides)), key=lambda i: -self.strides[i]))
        if self.strides and min(self.strides) != 1:
            raise ScheduleError("a kernel reads arrays that are contiguous along a dimension")


def _dtype(labelled: Labelled) -> np.dtype[Any]:
    """The type of all arrays.

    Raises:
        ScheduleError: there are several.
    """
    if labelled.dtype == MIXED:
        raise ScheduleError("one kernel has arrays of one type")
    return np.dtype(labelled.dtype)


def _inputs(labelled: Labelled, arrays: Sequence[Any]) -> list[_Input]:
    dtype = _dtype(labelled)
    return [_Input(arrays, leaf, views, dtype) for leaf, views in labelled.leaves]


def laid_out(graph: MuGraph, labelled: Labelled, arrays: Sequence[Any]) -> MuGraph:
    """A graph of one kernel whose operands have their dimensions in the order of memory.

    Raises:
        ScheduleError: an argument is of another type than others, or contiguous along none of its dimensions.
    """
    (step,) = graph.steps
    kind = BY_NUMPY[_dtype(labelled).name].name
    operands = [replace(x, dtype=kind) for x in step.program.operands]
    bindings = list(step.operands)
    for i, x in enumerate(_inputs(labelled, arrays)):
        if x.order != tuple(sorted(x.order)):
            axes = operands[i].axes
            operands[i] = replace(operands[i], axes="".join(axes[j] for j in x.order))
            bindings[i] = bindings[i]._replace(dims=tuple((j,) for j in x.order))
    program = replace(step.program, operands=tuple(operands))
    return replace(graph, steps=(step._replace(program=program, operands=tuple(bindings)),))


def compiled_kernel(  # noqa: PLR0917 - a kernel, and a call of it
    graph: MuGraph, labelled: Labelled, arrays: Sequence[Any], result: Any, sizes: dict[str, int], schedule: Schedule
) -> tuple[Any, tuple[Described, ...], str]:  # fmt: skip
    """The program of a graph of one kernel, its description and its text.

    Args:
        graph: of `laid_out`.
        labelled: the function.
        arrays: of a call.
        result: placeholders of the results.
        sizes: the extent of each label of the kernel.
        schedule: of the kernel.

    Raises:
        ScheduleError: there are no loops for it, or it has several results.
    """
    from portmm.dispatch import cpu_routes

    if not isinstance(result, Placeholder) or len(labelled.axes) != 1 or 0 in sizes.values():
        raise ScheduleError("one kernel has one result, of any elements")
    program, target, threads = graph.steps[0].program, config.target(), config.get_num_threads()
    isa = next(x for x in target.isas if x.name == schedule.isa)
    ints = dict.fromkeys(FIELDS, 1) | {field: sizes[x] for x, field in extent_fields(program).items()}
    ints["workers"] = threads
    route = cpu_routes.program_route(program, schedule, isa, atom_of(isa, schedule.dtype), ints)
    writer, inputs, dtype = Writer(), _inputs(labelled, arrays), _dtype(labelled)
    for leaf in dict.fromkeys(x.leaf for x in inputs):
        writer.line(f"a{leaf} = address(L{leaf})")
    shape = tuple(1 if y == "1" else labelled.extents[y] for y in labelled.axes[0])
    writer.line(f"out = empty({shape}, {writer.name('t', dtype)})")
    writer.line("o = address(out)")
    places = [Place(f"a{x.leaf}", x.offset, np.empty(0, dtype), "") for x in inputs]
    steps = [[x.strides[i] for i in x.order] for x in inputs]
    places.append(Place("o", 0, np.empty(0, dtype), "out"))
    steps.append([s // dtype.itemsize for s, n in zip(np.empty(shape, dtype).strides, shape, strict=True) if n > 1])
    strides = [
        tuple(dict(_fields(x.axes, step)).get(y, 0) for y in AXES)
        for x, step in zip(program.operands, steps, strict=True)
    ]
    table = writer.operands(places, strides, (0,) * len(places))
    writer.execute(route, [ints[x] for x in FIELDS if x != "workers"], [None, None, None, table, None])
    run, source = writer.program(len(arrays), "out")
    words = ", ".join(f"{y}={sizes[y]}" for y in sizes)
    return run, (Described("block", "one kernel", (result.node.where,), detail=words),), source


def schedules(graph: MuGraph, sizes: dict[str, int]) -> tuple[Schedule, ...]:
    """The schedules of a graph of one kernel, each of which may be the fastest.

    Raises:
        ScheduleError: no unit of this machine computes it.
    """
    return candidates(graph.steps[0].program, config.target(), sizes, config.get_num_threads())


def _fields(axes: str, steps: list[int]) -> list[tuple[str, int]]:
    return [(stride_field(axes, y), int(n)) for y, n in zip(axes, steps, strict=False)]
