"""A graph becomes kernels: which operations run together.

Owns `Unit`, the operations of one kernel, and `split`, which makes units of a
graph. Imports `fusion.graph`. A product takes the element-wise operations that follow it
and have its shape; what is left, with reductions along rows, goes over rows; what
NumPy computes stands alone. An operation joins a kernel that computes one of its
operands, if all others are there before that kernel runs: it then saves reading what
it takes from there, and writing that too, if nobody else wants it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portmm.fusion.graph import Graph, Node

LEAVES = ("array", "weight", "number")
_EACH = ("map", "reduce")
FAR = 1 << 62
MOST_INLINE, MOST_ONCE = 8, 64
"""Operations up to which a value is computed where it is used: one that is smaller than its users, one used once."""


@dataclass(eq=False, slots=True)
class Unit:
    """What runs as one kernel, or as one call of NumPy.

    Attributes:
        kind: "product", "rows", "copy" (a reshape that moves elements) or "call".
        shape: of what it goes over; the last axis is a row.
        members: its nodes, first the product.
        stored: those that others need.
    """

    kind: str
    shape: tuple[int, ...]
    members: list[Node] = field(default_factory=list)
    stored: list[Node] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Split:
    """The units of a graph.

    Attributes:
        units: in the order in which they run.
        of: node -> its unit.
        inline: nodes that are computed wherever they are used.
        apart: line -> why something there is a kernel of its own.
    """

    units: list[Unit]
    of: dict[Node, Unit]
    inline: set[Node]
    apart: list[tuple[str, str]]


class Splitter:
    """Makes units.

    Args:
        graph: the graph.
        outputs: what is wanted of it.
        plain: products that take nothing else -> why.
        numpy: what NumPy computes -> why.
    """

    def __init__(self, graph: Graph, outputs: list[Node], plain: dict[Node, str], numpy: dict[Node, str]) -> None:
        self.outputs, self.plain, self.numpy = outputs, plain, numpy
        self.live = _live(graph, outputs)
        self.users: dict[Node, list[Node]] = {x: [] for x in self.live}
        for x in self.live:
            for y in x.inputs:
                self.users[y].append(x)
        self.of: dict[Node, Unit] = {}
        self.units: list[Unit] = []
        self.apart: list[tuple[str, str]] = []
        self.inline: set[Node] = set()
        self.effort: dict[Node, int] = {}

    def split(self) -> Split:
        """All of it."""
        for x in self.live:
            if x.kind in _EACH and x not in self.numpy and self.small(x):
                self.inline.add(x)
        for x in self.live:
            if x.kind in ("view", *LEAVES) or (x in self.inline and not self.wanted(x)):
                continue
            self.place(x)
        for unit in self.units:
            unit.stored = [x for x in unit.members if self.leaves_unit(x, unit)]
        return Split(self.ordered(), self.of, self.inline, self.apart)

    def small(self, x: Node) -> bool:
        """A value is worth computing where it is used: it is made of arrays, and used once, or by what is larger."""
        ready = all(self.root(y).kind in LEAVES or y in self.inline for y in x.inputs)
        if not ready or x.kind != "map" or x.rounds or x.of("index"):
            return False
        users = [y for y in self.users[x] if y.kind in _EACH and y not in self.numpy and y.shape]
        self.effort[x] = x.operations() + sum(self.effort[y] for y in x.inputs if y in self.inline)
        if len(users) == len(self.users[x]) == 1 and x not in self.outputs and users[0].size <= x.size:
            return self.effort[x] <= MOST_ONCE
        return bool(users) and self.effort[x] <= MOST_INLINE and all(y.size > x.size for y in users)

    def wanted(self, x: Node) -> bool:
        """Somebody needs it in memory."""
        return x in self.outputs or any(y.kind not in _EACH or y in self.numpy for y in self.users[x])

    @staticmethod
    def root(x: Node) -> Node:
        """What a view looks at."""
        while x.kind == "view":
            x = x.inputs[0]
        return x

    def leaves_unit(self, x: Node, unit: Unit) -> bool:
        """A result is needed outside the unit that computes it."""
        return x in self.outputs or any(self.of.get(y) is not unit for y in self.users[x])

    def place(self, x: Node) -> None:
        """Put a node in a unit."""
        if x.kind == "matmul" and x not in self.numpy:
            self.start("product", x)
        elif x.kind == "item":
            unit = self.of[x.inputs[0]]
            unit.members.append(x)
            self.of[x] = unit
        elif x.kind not in _EACH or x in self.numpy or not x.shape:
            self.start("call", x)
        else:
            self.join(x)

    def start(self, kind: str, x: Node) -> Unit:
        """A kernel that begins with a node."""
        unit = Unit(kind, x.inputs[0].shape if x.kind == "reduce" else x.shape, [x])
        self.units.append(unit)
        self.of[x] = unit
        return unit

    def join(self, x: Node) -> None:
        """Put an operation on elements where it fits, or start a kernel with it."""
        near = list(dict.fromkeys(self.of[y] for y in self.read(x) if y in self.of))
        fits, reasons = [], []
        for unit in near:
            why = self.refusal(x, unit)
            if why:
                reasons.append((unit, why))
            else:
                fits.append(unit)
        beside = [u for u in self.units if u.kind == "rows" and u not in near and self.shares(x, u)]
        fits += [u for u in beside if not self.refusal(x, u)]
        if not fits:
            for unit, why in reasons:
                if unit.kind in ("product", "rows"):
                    kernel = f"{unit.members[0].name} ({unit.members[0].where})"
                    self.apart.append((x.where, f"{x.name} is not in the kernel of {kernel}: {why}"))
            self.start("rows", x)
            return
        # The shorter its sums, the nearer a product's tile is when they are whole: x W + (x A) B is 2 to 6 %
        # faster for adding to (x A) B, on Zen 4.
        best = min(fits, key=lambda u: u.members[0].inputs[0].shape[-1] if u.kind == "product" else FAR)
        best.members.append(x)
        self.of[x] = best

    def refusal(self, x: Node, unit: Unit) -> str:
        """Why a node cannot be in a unit, or nothing."""
        why = self.in_product(x, unit) if unit.kind == "product" else self.in_rows(x, unit)
        for y in x.inputs if not why else ():
            if self.of.get(y) is unit:
                why = f"{y.name} rounds to {y.dtype} first" if y.rounds else why
            elif unit in self.needs(y):
                why = f"{y.name} ({y.where}), which it reads, comes after that"
        return why

    def in_product(self, x: Node, unit: Unit) -> str:
        """Why a node cannot follow a product in its kernel, for what it is."""
        if unit.members[0] in self.plain:
            return self.plain[unit.members[0]]
        if x.kind == "reduce":
            return "a reduction needs whole rows of sums"
        return "" if x.shape == unit.shape else f"its shape is {x.shape}, not the product's {unit.shape}"

    @staticmethod
    def in_rows(x: Node, unit: Unit) -> str:
        """Why a node cannot be computed with others over rows, for what it is."""
        if unit.kind != "rows":
            return "NumPy computes that"
        if x.kind == "reduce":
            same = x.inputs[0].shape == unit.shape
            return "" if same else f"it reduces {x.inputs[0].shape}, not {unit.shape}"
        fits = x.shape == unit.shape or (x.shape == (*unit.shape[:-1], 1) and not x.of("index"))
        return "" if fits else f"its shape is {x.shape}, not {unit.shape}"

    def shares(self, x: Node, unit: Unit) -> bool:
        """A node reads a whole array that a unit reads too."""
        theirs = {y for z in unit.members for y in self.read(z) if y.shape == unit.shape}
        return any(y in theirs for y in self.read(x))

    def read(self, x: Node) -> list[Node]:
        """What a node reads, through what is computed where it is used."""
        return [z for y in x.inputs for z in (self.read(y) if y in self.inline else (y,))]

    def needs(self, x: Node) -> set[Unit]:
        """Units that must have run before a node is there, its own among them."""
        found: set[Unit] = set()
        seen: set[Node] = set()
        stack = [x]
        while stack:
            y = stack.pop()
            if y in seen:
                continue
            seen.add(y)
            unit = self.of.get(y)
            if unit is None:
                stack += y.inputs
            elif unit not in found:
                found.add(unit)
                stack += [z for member in unit.members for z in member.inputs]
        return found

    def ordered(self) -> list[Unit]:
        """Units, each after those that it needs; else as they come."""
        done: list[Unit] = []
        started: set[Unit] = set()

        def visit(unit: Unit) -> None:
            if unit in started:
                return
            started.add(unit)
            for needed in sorted(self.before(unit), key=self.units.index):
                visit(needed)
            done.append(unit)

        for unit in self.units:
            visit(unit)
        return done

    def before(self, unit: Unit) -> Iterable[Unit]:
        """Units whose results a unit reads."""
        found = set()
        stack = [y for x in unit.members for y in x.inputs]
        while stack:
            y = stack.pop()
            other = self.of.get(y)
            if other is None:
                stack += y.inputs
            elif other is not unit:
                found.add(other)
        return found


def _live(graph: Graph, outputs: list[Node]) -> list[Node]:
    """What outputs need, in order."""
    needed: set[Node] = set()
    stack = list(outputs)
    while stack:
        x = stack.pop()
        if x not in needed:
            needed.add(x)
            stack += x.inputs
    return [x for x in graph.nodes if x in needed]
