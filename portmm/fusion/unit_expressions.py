"""The expressions of one kernel, and the arrays that it reads and writes.

Owns `Expressions`, which makes `fused.Fused` of the nodes of a unit. Imports `spec.expr`,
`spec.epilogue`, `trace.bind`, `trace.buffers`.
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
    """The type that kernels know elements by; empty if they do not."""
    return "u8" if dtype.kind == "b" else numpy_arrays.name_of(dtype)


class Expressions:
    """What is computed for each element of a shape.

    Args:
        shape: what the kernel goes over.
        inside: tells the nodes that it computes.
        place: finds where others lie.
        product: the node whose sums it takes, or None.
    """

    def __init__(
        self, shape: tuple[int, ...], inside: Callable[[Node], bool], place: Callable[[Node], Place],
        product: Node | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.inside, self.place, self.product = shape, inside, place, product
        self.read: list[Place] = []
        self.written: list[Place] = []
        self.values: list[Expr] = []
        self.numbers: list[int] = []
        self.words: list[Operand] = []
        self.nodes: dict[Node, Place] = {}
        self.known: dict[Node, Expr] = {}

    def of(self, x: Node) -> Expr:
        """What a node is, here."""
        if x not in self.known:
            self.known[x] = self.find(x)
        return self.known[x]

    def find(self, x: Node) -> Expr:
        """What a node is, met first."""
        if x is self.product:
            return acc()
        if x.kind == "number":
            if x.leaf not in self.numbers:
                self.numbers.append(x.leaf)
            return node("number", (self.numbers.index(x.leaf),), "f32")
        if self.inside(x):
            assert x.template is not None  # noqa: S101 - the splitter takes no others
            return filled(x.template, [self.of(y) for y in x.inputs])
        self.nodes[x] = self.place(x)
        return self.load(self.nodes[x])

    def load(self, place: Place) -> Expr:
        """The element of an array."""
        self.read.append(place)
        found = load(len(self.read) - 1, kernel_type(place.like.dtype))
        return apply("ne", found, 0) if place.like.dtype.kind == "b" else found

    def write(self, value: Expr, to: Place) -> None:
        """A result, and where it goes; that of a product first."""
        self.values.append(node("select", (value, const(1.0), const(0.0)), "f32") if value.dtype == "mask" else value)
        self.written.append(to)

    @property
    def places(self) -> list[Place]:
        """All operands, in the order of the argument block: C is none."""
        return [*self.read, *self.written[self.product is not None :]]

    def settle(self, walk: Walk, columns: list[int], before: int = 0) -> None:
        """Along which axes operands vary; in `walk` they come after `before` others."""
        self.words = []
        for i, place in enumerate(self.places):
            made, full = i >= len(self.read), place.like.shape == self.shape
            b, m, n = walk.batch[1][before + i], walk.rows[1][before + i], columns[i]
            # Whole arrays vary along rows even if there is but one: the same kernel serves any number.
            axes = ("b" if b else "") + ("m" if m or full or made else "") + ("n" if n or (made and full) else "")
            self.words.append(Operand(kernel_type(place.like.dtype), axes, n in (0, 1)))

    def text(self) -> str:
        """All of it, as a word."""
        first = self.product is not None
        numbers = [C] * first + list(range(len(self.read), len(self.words)))
        return str(Fused(tuple(self.words), tuple(zip(numbers, self.values, strict=True))))
