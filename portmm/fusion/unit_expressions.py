"""Epilogue expressions of a unit, and the arrays that it reads and writes.

Owns `Expressions`, which builds the `Fused` expression of the nodes of a unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.arrays import numpy_arrays
from portmm.spec.epilogue import C, Fused, Operand, acc, load
from portmm.spec.expr import apply, const, node
from portmm.trace.bind import filled

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.fusion.graph import Node
    from portmm.spec.expr import Expr
    from portmm.trace.buffers import Place, Walk


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
        self.operands: list[Operand] = []
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
            return acc()
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
        self.values.append(node("select", (value, const(1.0), const(0.0)), "f32") if value.dtype == "mask" else value)
        self.written.append(to)

    @property
    def buffers(self) -> list[Place]:
        """All operands in the order of the argument block, without C."""
        return [*self.read, *self.written[self.product is not None :]]

    def bind(self, walk: Walk, columns: list[int], before: int = 0) -> None:
        """Bind operands to the axes along which they vary; in `walk` they follow `before` others."""
        self.operands = []
        for i, buffer in enumerate(self.buffers):
            written, full = i >= len(self.read), buffer.like.shape == self.shape
            b, m, n = walk.batch[1][before + i], walk.rows[1][before + i], columns[i]
            # Arrays of the full shape vary along rows even if there is one row: the same kernel serves any number.
            axes = ("b" if b else "") + ("m" if m or full or written else "") + ("n" if n or (written and full) else "")
            self.operands.append(Operand(kernel_type(buffer.like.dtype), axes, n in (0, 1)))

    def text(self) -> str:
        """The spelling of the epilogue expression."""
        first = self.product is not None
        numbers = [C] * first + list(range(len(self.read), len(self.operands)))
        return str(Fused(tuple(self.operands), tuple(zip(numbers, self.values, strict=True))))
