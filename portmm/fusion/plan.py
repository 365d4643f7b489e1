"""Plan of a fused function: kernels of units, and buffers between them.

Owns `Builder`, what is the same wherever the kernels of a program run: the expressions of units, the loops of kernels
over their operands, and the order of steps. `plan_cpu` and `plan_grid` find memory and kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import ScheduleError
from portmm.fusion.partition import LEAVES
from portmm.fusion.program_cpu import Kernel
from portmm.fusion.unit_expressions import Expressions
from portmm.trace.buffers import Place, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.fusion.graph import Graph, Node
    from portmm.fusion.partition import Split, Unit
    from portmm.spec.problem import Problem
    from portmm.trace.buffers import Walk

Operands = tuple[Place, Place, Place]
"""A, B and C of a product."""


class Builder:
    """A builder of a program, but for its memory and its kernels.

    Args:
        graph: the graph of a function.
        outputs: its results.
        split: its partition into units.

    Attributes:
        between: NumPy may compute between kernels.
    """

    between = True

    def __init__(self, graph: Graph, outputs: list[Node], split: Split) -> None:
        self.graph, self.outputs, self.split = graph, outputs, split
        self.buffers: dict[Node, Place] = {}
        self.kernels: list[Kernel] = []
        self.now = 0

    # Methods for one kind of memory and kernels.

    def leaf(self, x: Node) -> Place:
        """The buffer of an argument."""
        raise NotImplementedError

    def view(self, x: Node) -> Place:
        """A view of a buffer, or a copy where strides cannot express the view."""
        raise NotImplementedError

    def allocate(self, x: Node, shape: tuple[int, ...] | None = None, fusing: Expressions | None = None) -> Place:
        """Allocate a buffer for a node, which may reuse the memory of an operand of `fusing`."""
        raise NotImplementedError

    def call(self, unit: Unit) -> None:
        """Add a call of a function between kernels."""
        raise NotImplementedError

    def launch_rows(self, fusing: Expressions, w: Walk, columns: list[int], size: tuple[int, int, int]) -> None:
        """Add runs of a kernel over rows for expressions, of `size` rows, columns and items."""
        raise NotImplementedError

    def launch_product(
        self, operands: Operands, size: tuple[int, int], fusing: Expressions, w: Walk, columns: list[int], *, text: str
    ) -> Problem:
        """Add runs of a product of `size` k and n with an epilogue `text`, and return its problem."""
        raise NotImplementedError

    def program(self, result: Any) -> tuple[Callable[[list[Any]], Any], str]:
        """The function of the arrays, weights and numbers of a call, and its text."""
        raise NotImplementedError

    # Steps.

    def built(self, plain: dict[Node, str], numpy: dict[Node, str]) -> bool:
        """Add the steps of all units; False if one has no kernel: the graph must be split further.

        Args:
            plain: takes the product that has no kernel with its epilogue, with the reason.
            numpy: takes the nodes that NumPy must compute.

        Raises:
            ScheduleError: a unit has no kernel, and NumPy does not compute it.
        """
        for i, unit in enumerate(self.split.units):
            self.now = i
            try:
                self.step(unit)
            except ScheduleError as error:
                if unit.kind == "product" and len(unit.members) > 1:
                    plain[unit.members[0]] = str(error)
                elif self.between and unit.kind in ("product", "rows"):
                    numpy.update(dict.fromkeys(unit.members, str(error)))
                else:
                    raise
                return False
        self.now = len(self.split.units)
        return True

    def step(self, unit: Unit) -> None:
        """Add the kernel or the call of a unit.

        Raises:
            ScheduleError: there is no such kernel.
        """
        {"rows": self.rows, "product": self.product}.get(unit.kind, self.call)(unit)

    def buffer_of(self, x: Node) -> Place:
        """The buffer of a node."""
        if x not in self.buffers:
            self.buffers[x] = self.leaf(x) if x.kind in LEAVES else self.view(x)
        return self.buffers[x]

    def right(self, x: Node) -> Place:
        """The buffer of B of a product."""
        return self.buffer_of(x)

    def expressions(self, unit: Unit, product: Node | None = None) -> Expressions:
        """The expressions of a unit."""

        def inside(x: Node) -> bool:
            return self.split.of.get(x) is unit or x in self.split.inline

        return Expressions(unit.shape, inside, self.buffer_of, product)

    def store(self, stored: list[Node], fusing: Expressions) -> None:
        """Allocate buffers for the results of a unit."""
        values = [fusing.of(x) for x in stored]
        for x, value in zip(stored, values, strict=True):
            self.buffers[x] = self.allocate(x, fusing=fusing)
            fusing.write(value, self.buffers[x])

    def rows(self, unit: Unit) -> None:
        """Add a kernel over rows."""
        fusing = self.expressions(unit)
        self.store(unit.stored, fusing)
        if 0 in unit.shape[:-1]:
            return
        self.run_rows(fusing, whole=_counts(unit))
        detail = " x ".join(map(str, unit.shape))
        self.kernels.append(Kernel("rows", unit.members[0].name, _lines(unit), _names(unit), fusing.text(), detail))

    def run_rows(self, fusing: Expressions, *, whole: bool) -> None:
        """Add runs of a kernel over rows for the expressions."""
        shape = fusing.shape
        steps = [p.strides(shape) for p in fusing.buffers]
        w, columns = walk(shape[:-1], [s[:-1] for s in steps], whole=whole), [s[-1] for s in steps]
        fusing.bind(w, columns)
        self.launch_rows(fusing, w, columns, (w.rows[0], shape[-1], w.batch[0]))

    def copy(self, source: Place, to: Place, x: Node) -> None:
        """Add a copy of elements into a contiguous buffer."""
        shape = source.like.shape or (1,)
        fusing = Expressions(shape, lambda _: False, self.buffer_of)
        fusing.write(fusing.load(source), to)
        if 0 not in shape:
            self.run_rows(fusing, whole=False)
        self.kernels.append(Kernel("copy", x.name, (x.where,), detail=" x ".join(map(str, shape))))

    def product(self, unit: Unit) -> None:
        """Add a product with its epilogue.

        Raises:
            ScheduleError: no kernel computes it with its epilogue.
        """
        x = unit.members[0]
        fusing = self.expressions(unit, x)
        stored = sorted(unit.stored, key=lambda y: y.dtype.kind in "iub")
        if stored[0].dtype.kind in "iub":
            raise ScheduleError("its results are integers or masks, which kernels write only together with floats")
        a, b = self.buffer_of(x.inputs[0]), self.right(x.inputs[1])
        self.store(stored, fusing)
        c, k, n = fusing.written[0], x.inputs[0].shape[-1], x.shape[-1]
        if 0 in x.shape:
            return
        batch, packed = x.shape[:-2], x.inputs[1].kind == "weight"
        b_steps = (*((0,) * len(batch) if packed else b.strides((*batch, k, n))[:-2]), 0)
        steps = [p.strides(x.shape) for p in fusing.buffers]
        outer = [a.strides((*x.shape[:-1], k))[:-1], b_steps, c.strides(x.shape)[:-1], *(s[:-1] for s in steps)]
        w, columns = walk(x.shape[:-1], outer, 1, whole=_counts(unit)), [s[-1] for s in steps]
        fusing.bind(w, columns, 3)
        text = fusing.text() if len(unit.members) > 1 else ""
        p = self.launch_product((a, b, c), (k, n), fusing, w, columns, text=text)
        self.kernels.append(Kernel("product", x.name, _lines(unit), _names(unit), text, str(p)))


def stand_in(shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of these strides in bytes over one element of memory, which must not be read."""
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides, writeable=False)


def _counts(unit: Unit) -> bool:
    """Test whether an expression of a unit depends on row and column indices."""
    return any(x.of("index") for x in unit.members)


def _lines(unit: Unit) -> tuple[str, ...]:
    return tuple(dict.fromkeys(x.where for x in unit.members))


def _names(unit: Unit) -> tuple[str, ...]:
    return tuple(x.name for x in unit.members[1:])
