"""Programs of fused functions on a device: launches of units, and the arrays between them.

Owns `GridBuilder`, which selects kernels for the units of a graph whose arrays are on a device, and writes the program
that launches them. An operation without a kernel is an error: NumPy does not compute on a device. Each call allocates
the arrays between kernels in the library of its first array, and on its queue; it drops them after their last read, and
their library frees them when the queue is done with them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, operand
from portmm.arrays.grid_call import numbers
from portmm.arrays.numpy_arrays import contiguous, stand_in
from portmm.arrays.operand import WIDEST, Operand, address
from portmm.dispatch import config, device_routes
from portmm.dispatch.device_routes import launches
from portmm.dispatch.machine import machine_of
from portmm.errors import ScheduleError
from portmm.fusion.partition import LEAVES, Split, Unit
from portmm.fusion.plan import Builder, Expressions, Operands, kernel_type
from portmm.fusion.program import Kernel, Text
from portmm.ops.kernel_call import start
from portmm.spec.dtype import spell
from portmm.spec.problem import Problem
from portmm.trace.buffers import Place, Walk

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node

_TEMPORARY = re.compile(r"\bM\d+\b")


def _returned(x: Operand, shape: tuple[int, ...], *, masks: bool) -> Any:
    """The array to return, of a shape; `masks`: its elements are bytes of 0 and 1."""
    source = x.source
    if masks:
        own = isinstance(source.dtype, np.dtype)
        source = source.view(np.dtype(np.bool_) if own else sys.modules["torch"].bool)
    return source if x.shape == shape else source.reshape(shape)


class GridBuilder(Builder):
    """A builder of the launches of units: see `Builder`.

    Raises:
        TypeError: some arrays are in the host's memory.
        ValueError: they are on several devices.
    """

    between = False

    def __init__(self, graph: Graph, outputs: list[Node], split: Split) -> None:
        super().__init__(graph, outputs, split)
        arrays = graph.device_arrays
        operand.same_device(list(arrays.values()))
        for x in graph.nodes:
            if x.leaf >= 0 and x.leaf not in arrays and x.kind in ("array", "weight"):
                what = "a packed weight" if x.kind == "weight" else "an array in the host's memory"
                raise TypeError(f"{x.name} ({x.where}) is {what}, others are on a device: copy it there first")
        self.on = machine_of(next(iter(arrays.values())))
        self.writer = Text(
            on=self.on, adopt=interop.adopt, empty=interop.empty_like, address=address, start=start, returned=_returned
        )
        self.aligned = {f"L{i}": math.gcd(x.at, WIDEST) for i, x in arrays.items()}
        self.shapes = {f"L{i}": x.shape for i, x in arrays.items()}

    # Buffers.

    def leaf(self, x: Node) -> Place:
        """The buffer of an argument."""
        if x.leaf not in self.graph.device_arrays:
            raise ScheduleError(f"{x.name} ({x.where}) cannot be read on a device")
        return Place(f"L{x.leaf}", 0, operand.standin(self.graph.device_arrays[x.leaf]), "")

    def moved(self, x: Node, _base: Place) -> Place:
        """A new array with the elements of a view that neither strides nor kernels over rows can express: none here."""
        raise ScheduleError(f"{x.name} ({x.where}) moves elements in a way that has no kernel")

    def allocate(self, x: Node, shape: tuple[int, ...] | None = None, fusing: Expressions | None = None) -> Place:
        """Allocate an array for a node; no memory is reused."""
        del fusing
        shape, kind = x.shape if shape is None else shape, kernel_type(np.dtype(x.dtype))
        if not kind:
            raise ScheduleError(f"kernels do not write {x.dtype}")
        return self.place(f"empty(like, {shape}, {kind!r})", shape, x.dtype)

    def place(self, text: str, shape: tuple[int, ...], dtype: Any) -> Place:
        """A new array, the value of an expression."""
        name = f"M{len(self.shapes)}"
        self.writer.line(f"{name} = {text}")
        self.aligned[name], self.shapes[name] = WIDEST, shape
        strides = contiguous(shape, np.dtype(dtype).itemsize)
        return Place(name, 0, stand_in(shape, np.dtype(dtype), strides), "")

    def gcd(self, x: Place, moved: list[int]) -> int:
        """The alignment in bytes of a buffer at all offsets from which kernels run."""
        return math.gcd(self.aligned[x.root], x.offset, *(i * x.like.itemsize for i in moved))

    # Kernels.

    def over_rows(self, fusing: Expressions, text: str, size: tuple[int, int, int]) -> Any:
        """Kernels over rows for expressions, spelled `text`, of `size` rows, columns and items, and their workspace."""
        aligned = [self.gcd(p, [moved[i] for moved in fusing.repeats]) for i, p in enumerate(fusing.buffers)]
        return launches(text, size, fusing.strides, aligned, self.on)

    def multiply(
        self, operands: Operands, size: tuple[int, int], fusing: Expressions, w: Walk, text: str
    ) -> tuple[Problem, Any]:
        """The problem of a product of `size` k and n with an epilogue `text`, its kernels, and their workspace."""
        p, values, vectors = self.problem(operands, size, w, text)
        for i, steps in enumerate(fusing.strides):
            values |= {f"x{i}_{axis}": s for axis, s in zip("bmn", steps, strict=True)}
        route = device_routes.route(replace(p, k=max(p.k, 1)), self.on, vectors)
        every, (workspace, _) = route.launches(values, p)
        return p, (every, workspace)

    def launch(self, kernel: Any, operands: tuple[Place, ...], fusing: Expressions, moved: tuple[int, ...]) -> None:
        """Add a run of kernels, on operands of a product, if they are one, and of expressions, advanced by elements."""
        (every, workspace), names = kernel, [*"abc"[: len(operands)], *(f"x{i}_all" for i in range(len(moved)))]
        places = zip(names, (*operands, *fusing.buffers), moved, strict=False)
        arguments = {name: _address(x, far) for name, x, far in places}
        arguments |= {f"number_{i}": f"float(leaves[{leaf}])" for i, leaf in enumerate(fusing.numbers)}
        values = ", ".join(f"{name!r}: {x}" for name, x in arguments.items())
        kernels = self.writer.name("k", tuple((launch, ()) for launch in every))
        self.writer.line(f"start(on, {kernels}, {{{values}}}, like, ({workspace}, 'f32'))")

    def problem(
        self, operands: tuple[Place, Place, Place], size: tuple[int, int], w: Walk, text: str
    ) -> tuple[Problem, dict[str, Any], tuple[int, int, int]]:
        """The problem, its sizes and strides by parameter, and the vector widths of A, B and C."""
        a, b, _ = operands
        (k, n), (m, rows), (items, apart) = size, w.rows, w.batch
        columns = max(n, 1)
        parts = []
        ends = ((m, k, rows[0], _step(a, -1)), (k, n, _step(b, -2), _step(b, -1)), (m, n, rows[2] or columns, 1))
        for i, (x, (rows_, columns_, row, col)) in enumerate(zip(operands, ends, strict=True)):
            others = (apart[i], *(moved[i] for moved in w.repeats))
            at = self.gcd(x, [])
            stand_in = Operand(None, "cuda", (), at, (), (), kernel_type(x.like.dtype), None, readonly=False)
            parts.append(operand.matrix(stand_in, rows_, columns_, (row, col), others))
        word = spell(*(kernel_type(x.like.dtype) for x in operands))
        p = Problem(
            m, n, k, word, items, parts[0].layout, parts[1].layout, "row",
            deterministic=config.current().deterministic, fused=text, tf32=config.rounds(word),
        )  # fmt: skip
        left, right, result = parts
        result = replace(result, row=rows[2] or columns, col=1)
        values = numbers((m, n, k), items, (left, right, result), apart)
        vector = parts[2].vector if parts[2].layout == "row" else 1
        return p, values, (parts[0].vector, parts[1].vector, vector)

    def call(self, unit: Unit) -> None:
        """Add a call of a function of portmm.

        Raises:
            ScheduleError: it is another function, or does not take arrays on a device.
        """
        x, *items = unit.members
        if x.kind != "call" or items:
            raise ScheduleError(f"{x.name} ({x.where}) has no kernel, and NumPy does not compute on a device")
        arguments = ", ".join(f"{self.contiguous(y)}.source" for y in x.inputs)
        self.buffers[x] = self.place(f"adopt({self.writer.name('f', x.plain)}({arguments}))", x.shape, x.dtype)
        self.kernels.append(Kernel("product", x.name, (x.where,)))

    def contiguous(self, x: Node) -> str:
        """The name of an array with the elements of a node only; copied if needed."""
        buffer = self.buffer_of(x)
        if buffer.root.startswith("L") and x.kind in LEAVES:
            return buffer.root
        if not buffer.offset and buffer.like.flags.c_contiguous and self.shapes[buffer.root] == x.shape:
            return buffer.root
        to = self.allocate(x)
        self.copy(buffer, to, x)
        return to.root

    def text(self, x: Node) -> str:
        """A returned array in the program's text."""
        buffer = self.buffer_of(x)
        own = buffer.root.startswith("M") and not buffer.offset and buffer.like.flags.c_contiguous
        root = buffer.root if own and math.prod(self.shapes[buffer.root]) == x.size else self.contiguous(x)
        return f"returned({root}, {x.shape}, masks={x.dtype == np.bool_})"

    def program(self, result: Any) -> tuple[Callable[[list[Any]], Any], str]:
        """The function of the arrays and numbers of a call, and its text."""
        value, arrays = self.result(result), tuple(self.graph.device_arrays)
        last: dict[str, int] = {}
        for i, line in enumerate(self.writer.lines):
            last |= dict.fromkeys(_TEMPORARY.findall(line), i)
        kept = {*_TEMPORARY.findall(value)}
        free = {i: ", ".join(x for x, at in last.items() if at == i and x not in kept) for i in last.values()}
        lines = [f"L{i} = adopt(leaves[{i}])" for i in arrays] + [f"like = L{arrays[0]}"]
        for i, line in enumerate(self.writer.lines):
            lines += [line, f"del {free[i]}"] if free.get(i) else [line]
        return self.writer.function([*lines, f"return {value}"])


def _address(x: Place, moved: int) -> str:
    """The address of an array's first element, advanced by some elements, in a program's text."""
    at = x.offset + moved * x.like.itemsize
    return f"address({x.root}{f', {at}' if at else ''})"


def _step(x: Place, axis: int) -> int:
    """The stride along an axis, in elements."""
    return int(x.like.strides[axis]) // x.like.itemsize if x.like.shape[axis] > 1 else 1 if axis == -1 else 0
