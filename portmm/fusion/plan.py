"""Plan of a fused function: kernels of units, their expressions, and buffers between them.

Owns `Expressions`, which builds the `Fused` expression of the nodes of a unit, and `Builder`, what is the same wherever
the kernels of a program run: the loops of kernels over their operands, and the order of steps. `plan_cpu` and
`plan_grid` find memory and kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from portmm.arrays import numpy_arrays
from portmm.errors import ScheduleError
from portmm.fusion.partition import LEAVES, Split, Unit
from portmm.fusion.program import Kernel, Text
from portmm.spec.epilogue import C, Fused, Operand, acc, load
from portmm.spec.expr import Expr, apply, node
from portmm.trace.bind import filled, unmasked
from portmm.trace.buffers import Place, Walk, looked, walk
from portmm.trace.placeholders import Array

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node
    from portmm.spec.problem import Problem


def kernel_type(dtype: Any) -> str:
    """The name of an element type in kernels; empty if they do not support it."""
    return "u8" if dtype.kind == "b" else numpy_arrays.name_of(dtype)


class Expressions:
    """The expressions that a kernel computes for each element of a shape.

    Args:
        shape: the iteration shape of the kernel.
        inside: tests whether the kernel computes a node.
        buffer_of: finds the buffers of other nodes.
        product: the node whose sums are the accumulator, or None.
    """

    def __init__(
        self, shape: tuple[int, ...], inside: Callable[[Node], bool], buffer_of: Callable[[Node], Place],
        product: Node | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.inside, self.buffer_of, self.product = shape, inside, buffer_of, product
        self.read: list[Place] = []
        self.written: list[Place] = []
        self.values: list[Expr] = []
        self.numbers: list[int] = []
        self.fixed: tuple[float, ...] = ()
        self.operands: list[Operand] = []
        self.strides: list[tuple[int, int, int]] = []
        self.repeats: list[tuple[int, ...]] = []
        self.nodes: dict[Node, Place] = {}
        self.known: dict[Node, Expr] = {}

    def of(self, x: Node) -> Expr:
        """The expression of a node in this kernel."""
        if x not in self.known:
            self.known[x] = self.build(x)
        return self.known[x]

    def build(self, x: Node) -> Expr:
        """Build the expression of a node."""
        if x is self.product:
            return acc() if x.template is None else filled(x.template, [self.of(y) for y in x.inputs[2:]])
        if x.kind == "number":
            if x.leaf not in self.numbers:
                self.numbers.append(x.leaf)
            return node("number", (self.numbers.index(x.leaf),), "f32")
        if self.inside(x):
            assert x.template is not None  # noqa: S101 - the splitter takes no others
            return filled(x.template, [self.of(y) for y in x.inputs])
        self.nodes[x] = self.buffer_of(x)
        return self.load(self.nodes[x])

    def load(self, buffer: Place) -> Expr:
        """An expression that loads the element of an array."""
        self.read.append(buffer)
        element = load(len(self.read) - 1, kernel_type(buffer.like.dtype))
        return apply("ne", element, 0) if buffer.like.dtype.kind == "b" else element

    def write(self, value: Expr, to: Place) -> None:
        """Add a result and its buffer; that of a product first."""
        self.values.append(unmasked(value))
        self.written.append(to)

    @property
    def buffers(self) -> list[Place]:
        """All operands in the order of the argument block, without C."""
        return [*self.read, *self.written[self.product is not None :]]

    def bind(self, walk: Walk, columns: list[int], before: int = 0) -> None:
        """Bind operands to the axes along which they vary; in `walk` they follow `before` others."""
        self.operands, self.repeats = [], [moved[before:] for moved in walk.repeats]
        self.strides = list(zip(walk.batch[1][before:], walk.rows[1][before:], columns, strict=True))
        for i, (buffer, (b, m, n)) in enumerate(zip(self.buffers, self.strides, strict=True)):
            written, full = i >= len(self.read), buffer.like.shape == self.shape
            # Arrays of the full shape vary along rows even if there is one row: the same kernel serves any number.
            axes = ("b" if b else "") + ("m" if m or full or written else "") + ("n" if n or (written and full) else "")
            self.operands.append(Operand(kernel_type(buffer.like.dtype), axes, n in (0, 1)))

    def text(self) -> str:
        """The spelling of the epilogue expression."""
        first = self.product is not None
        numbers = [C] * first + list(range(len(self.read), len(self.operands)))
        return str(Fused(tuple(self.operands), tuple(zip(numbers, self.values, strict=True))))


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
    writer: Text

    def __init__(self, graph: Graph, outputs: list[Node], split: Split) -> None:
        self.graph, self.outputs, self.split = graph, outputs, split
        self.buffers: dict[Node, Place] = {}
        self.kernels: list[Kernel] = []
        self.now = 0

    # Methods for one kind of memory and kernels.

    def leaf(self, x: Node) -> Place:
        """The buffer of an argument."""
        raise NotImplementedError

    def moved(self, x: Node, base: Place) -> Place:
        """A new array with the elements of a view that neither strides nor kernels over rows can express."""
        raise NotImplementedError

    def allocate(self, x: Node, shape: tuple[int, ...] | None = None, fusing: Expressions | None = None) -> Place:
        """Allocate a buffer for a node, which may reuse the memory of an operand of `fusing`."""
        raise NotImplementedError

    def call(self, unit: Unit) -> None:
        """Add a call of a function between kernels."""
        raise NotImplementedError

    def pool(self, unit: Unit) -> None:
        """Add kernels of pooling."""
        raise NotImplementedError

    def over_rows(self, fusing: Expressions, text: str, size: tuple[int, int, int]) -> Any:
        """A kernel over rows for expressions, spelled `text`, of `size` rows, columns and items, for `launch`."""
        raise NotImplementedError

    def multiply(
        self, operands: Operands, size: tuple[int, int], fusing: Expressions, w: Walk, text: str
    ) -> tuple[Problem, Any]:
        """The problem of a product of `size` k and n with an epilogue `text`, and its kernel."""
        raise NotImplementedError

    def launch(self, kernel: Any, operands: tuple[Place, ...], fusing: Expressions, moved: tuple[int, ...]) -> None:
        """Add a run of a kernel, on operands of a product, if it is one, and of expressions, advanced by elements."""
        raise NotImplementedError

    def text(self, x: Node) -> str:
        """A returned array, a weight or a number in the program's text."""
        raise NotImplementedError

    def program(self, result: Any) -> tuple[Callable[[list[Any]], Any], str]:
        """The function of the arrays, weights and numbers of a call, and its text."""
        raise NotImplementedError

    def result(self, x: Any) -> str:
        """The expression of the result in a program's text."""
        if isinstance(x, Array):
            return self.text(x.node)
        if type(x) is tuple:
            return f"({''.join(f'{self.result(y)}, ' for y in x)})"
        if type(x) is list:
            return f"[{', '.join(map(self.result, x))}]"
        if type(x) is dict:
            return f"{{{', '.join(f'{self.result(k)}: {self.result(y)}' for k, y in x.items())}}}"
        return self.writer.name("x", x)

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
                elif self.between and unit.kind in ("product", "rows", "pool"):
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
        steps = {"rows": self.rows, "product": self.product, "join": self.join, "pool": self.pool}
        steps.get(unit.kind, self.call)(unit)

    def buffer_of(self, x: Node) -> Place:
        """The buffer of a node."""
        if x not in self.buffers:
            self.buffers[x] = self.leaf(x) if x.kind in LEAVES else self.view(x)
        return self.buffers[x]

    def view(self, x: Node) -> Place:
        """A view of a buffer, or a copy where strides cannot express the view."""
        base, function = self.buffer_of(x.inputs[0]), self.writer.name("f", x.plain)
        # Every call constructs returned arrays: an inline reshape takes half the time of a call through a function.
        text = f"{base.text}.reshape({x.shape})" if x.name == "reshape" else f"{function}({base.text})"
        viewed = looked(base, x.plain, text)
        if viewed is None and (not self.between or (x.name == "reshape" and kernel_type(x.dtype))):
            to = self.allocate(x, base.like.shape)
            self.copy(base, to, x)
            viewed = looked(to, x.plain, f"{function}({to.text})")
        return self.moved(x, base) if viewed is None else viewed

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
        text = self.run_rows(fusing, whole=counts(unit))
        detail = " x ".join(map(str, unit.shape))
        self.kernels.append(Kernel("rows", unit.members[0].name, _lines(unit), _names(unit), text, detail))

    def run_rows(self, fusing: Expressions, *, whole: bool) -> str:
        """Add runs of a kernel over rows for the expressions; returns their spelling."""
        shape = fusing.shape
        steps = [p.strides(shape) for p in fusing.buffers]
        w, columns = walk(shape[:-1], [s[:-1] for s in steps], whole=whole), [s[-1] for s in steps]
        fusing.bind(w, columns)
        text = fusing.text()
        kernel = self.over_rows(fusing, text, (w.rows[0], shape[-1], w.batch[0]))
        for moved in w.repeats:
            self.launch(kernel, (), fusing, moved)
        return text

    def join(self, unit: Unit) -> None:
        """Add copies of vectors, or of rows, one after the other in memory."""
        (x,) = unit.members
        to, start = self.allocate(x), 0
        for y in x.inputs:
            source, size = self.buffer_of(y), y.shape[-1] if len(x.shape) > 1 else y.size
            part = looked(to, lambda t, y=y, at=slice(start, start + size): t[..., at].reshape(y.shape))
            assert part is not None  # noqa: S101 - parts of rows and whole vectors are views
            fusing = Expressions(y.shape, lambda _: False, self.buffer_of)
            fusing.write(fusing.load(source), part)
            self.run_rows(fusing, whole=False)
            start += size
        self.buffers[x] = to
        self.kernels.append(Kernel("copy", x.name, (x.where,), detail=" + ".join(str(y.size) for y in x.inputs)))

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
        w, columns = walk(x.shape[:-1], outer, 1, whole=counts(unit)), [s[-1] for s in steps]
        fusing.bind(w, columns, 3)
        text = fusing.text() if len(unit.members) > 1 or x.template is not None else ""
        p, kernel = self.multiply((a, b, c), (k, n), fusing, w, text)
        for moved in w.repeats:
            self.launch(kernel, (a, b, c), fusing, moved)
        notes = (x.note,) if x.note else ()
        self.kernels.append(Kernel("product", x.name, _lines(unit), _names(unit), text, str(p), notes, p, p.flops))


def counts(unit: Unit) -> bool:
    """Test whether an expression of a unit depends on row and column indices."""
    return any(x.of("index") for x in unit.members)


def _lines(unit: Unit) -> tuple[str, ...]:
    return tuple(dict.fromkeys(x.where for x in unit.members))


def _names(unit: Unit) -> tuple[str, ...]:
    return tuple(x.name for x in unit.members[1:])
