"""Partition of a graph into kernels.

Owns `Unit`, the operations of one kernel, and `Splitter`, which partitions a
graph into units. A product takes the element-wise operations that follow it
and have its shape; the rest, with reductions along rows, run over rows; a call of
NumPy is a unit of its own. An operation joins a kernel that computes one of its
operands, if all others are computed before that kernel runs: it then saves reading that
operand, and writing it too, if no other kernel reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import TYPE_CHECKING

from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.fusion.graph import Graph, Node

LEAVES = ("array", "weight", "number")
_EACH = ("map", "reduce")
FAR = 1 << 62
MOST_INLINE, MOST_ONCE = 8, 64
"""Operations up to which a value is recomputed at its uses: for one smaller than its users, and for one used once."""


@dataclass(eq=False, slots=True)
class Unit:
    """The operations of one kernel, or of one call of NumPy.

    Attributes:
        kind: "product", "rows", "join" (vectors, one after the other), "pool" or "call".
        shape: its iteration shape; the last axis is a row.
        members: its nodes, first the product.
        stored: those that other units or the caller read.
        arrays: what members read of the unit's shape.
    """

    kind: str
    shape: tuple[int, ...]
    members: list[Node] = field(default_factory=list)
    stored: list[Node] = field(default_factory=list)
    arrays: set[Node] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Split:
    """The units of a graph.

    Attributes:
        units: in the order in which they run.
        of: node -> its unit.
        inline: nodes that are recomputed at each use.
        apart: line -> the reason why an operation there is a kernel of its own.
    """

    units: list[Unit]
    of: dict[Node, Unit]
    inline: set[Node]
    apart: list[tuple[str, str]]


class Splitter:
    """A builder of units.

    Args:
        graph: the graph.
        outputs: its results.
        plain: products without a fused epilogue -> the reason.
        numpy: nodes that NumPy computes -> the reason.
    """

    def __init__(self, graph: Graph, outputs: list[Node], plain: dict[Node, str], numpy: dict[Node, str]) -> None:
        self.outputs, self.plain, self.numpy = outputs, plain, numpy
        self.live = live_nodes(graph, outputs)
        self.users = users_of(self.live)
        self.of: dict[Node, Unit] = {}
        self.units: list[Unit] = []
        self.apart: list[tuple[str, str]] = []
        self.inline: set[Node] = set()
        self.effort: dict[Node, int] = {}

    def split(self) -> Split:
        """Partition the graph."""
        for x in self.live:
            if x.kind in _EACH and x not in self.numpy and self.small(x):
                self.inline.add(x)
        for x in self.live:
            if x.kind in ("view", *LEAVES) or (x in self.inline and not self.materialized(x)):
                continue
            self.assign(x)
        for unit in self.units:
            unit.stored = [x for x in unit.members if self.leaves_unit(x, unit)]
        return Split(self.ordered(), self.of, self.inline, self.apart)

    def small(self, x: Node) -> bool:
        """Test whether to recompute a value at its uses: computed from arrays, and used once, or by larger nodes.

        With one use it may be computed from values that round first: these are in memory anyway, and narrower.
        """
        once = len(self.users[x]) == 1
        ready = all(y.origin.kind in LEAVES or y in self.inline or (once and y.origin.rounds) for y in x.inputs)
        if not ready or x.kind != "map" or x.rounds or x.of("index"):
            return False
        users = [y for y in self.users[x] if y.kind in _EACH and y not in self.numpy and y.shape]
        self.effort[x] = x.operations() + sum(self.effort[y] for y in x.inputs if y in self.inline)
        if len(users) == len(self.users[x]) == 1 and x not in self.outputs and users[0].size <= x.size:
            return self.effort[x] <= MOST_ONCE
        return bool(users) and self.effort[x] <= MOST_INLINE and all(y.size > x.size for y in users)

    def materialized(self, x: Node) -> bool:
        """Test whether a value must be stored in memory."""
        return x in self.outputs or any(y.kind not in _EACH or y in self.numpy for y in self.users[x])

    def leaves_unit(self, x: Node, unit: Unit) -> bool:
        """Test whether a result is read outside the unit that computes it."""
        return x in self.outputs or any(self.of.get(y) is not unit for y in self.users[x])

    def assign(self, x: Node) -> None:
        """Assign a node to a unit."""
        if x.kind in ("matmul", "conv", "norm") and x not in self.numpy:
            self.start("product", x)
        elif x.kind in ("join", "pool") and x not in self.numpy:
            self.start(x.kind, x)
        elif x.kind == "item":
            self.take(x, self.of[x.inputs[0]])
        elif x.kind not in _EACH or x in self.numpy or not x.shape:
            self.start("call", x)
        elif self.only_reduced(x):
            self.inline.add(x)
        else:
            self.join(x)

    def only_reduced(self, x: Node) -> bool:
        """Test whether a value is reduced, and else unused, and computed of what a product stores: an array less."""
        users, inputs = self.users[x], [y for y in x.inputs if y.shape]
        reduced = len(users) == 1 and users[0].kind == "reduce" and users[0] not in self.numpy and x not in self.outputs
        if not reduced or x.kind != "map" or x.rounds or x.of("index") or len(inputs) != 1:
            return False
        unit, self.effort[x] = self.of.get(inputs[0]), x.operations()
        follows = unit is not None and unit.kind == "product" and len(self.users[inputs[0]]) > 1
        return follows and not inputs[0].rounds and self.effort[x] <= MOST_ONCE

    def start(self, kind: str, x: Node) -> Unit:
        """A new unit that begins with a node."""
        unit = Unit(kind, x.inputs[0].shape if x.kind == "reduce" else x.shape)
        self.units.append(unit)
        self.take(x, unit)
        return unit

    def take(self, x: Node, unit: Unit) -> None:
        """Make a node a member of a unit."""
        unit.members.append(x)
        unit.arrays.update(y for y in self.read(x) if y.shape == unit.shape)
        self.of[x] = unit

    def join(self, x: Node) -> None:
        """Assign an element-wise operation or a reduction to a unit that can take it, or start a unit with it."""
        read = self.read(x)
        producers = list(dict.fromkeys(self.of[y] for y in read if y in self.of))
        fits, reasons = [], []
        for unit in producers:
            why = self.refusal(x, unit)
            if why:
                reasons.append((unit, why))
            else:
                fits.append(unit)
        others = [u for u in self.units if u.kind == "rows" and u not in producers and not u.arrays.isdisjoint(read)]
        fits += [u for u in others if not self.refusal(x, u)]
        if not fits:
            for unit, why in reasons:
                if unit.kind in ("product", "rows"):
                    kernel = f"{unit.members[0].name} ({unit.members[0].where})"
                    self.apart.append((x.where, f"{x.name} is not in the kernel of {kernel}: {why}"))
            self.start("rows", x)
            return
        # The smaller k is, the closer to the core a product's tile is cached when its sums are complete:
        # x W + (x A) B is 2 to 6 % faster if the addition is fused with (x A) B, on Zen 4.
        best = min(fits, key=lambda u: u.members[0].inputs[0].shape[-1] if u.kind == "product" else FAR)
        self.take(x, best)

    def refusal(self, x: Node, unit: Unit) -> str:
        """The reason why a node cannot be in a unit, or ""."""
        why = self.in_product(x, unit) if unit.kind == "product" else self.in_rows(x, unit)
        for y in x.inputs if not why else ():
            if self.of.get(y) is unit:
                why = f"{y.name} rounds to {y.dtype} first" if y.rounds else why
            elif unit in self.needs(y):
                why = f"{y.name} ({y.where}), which it reads, is computed after that kernel"
        return why

    def in_product(self, x: Node, unit: Unit) -> str:
        """The reason why a node of this kind and shape cannot follow a product in its kernel, or ""."""
        if unit.members[0] in self.plain:
            return self.plain[unit.members[0]]
        if x.kind == "reduce":
            return "a reduction needs complete rows of the product"
        return "" if x.shape == unit.shape else f"its shape is {x.shape}, not the product's {unit.shape}"

    @staticmethod
    def in_rows(x: Node, unit: Unit) -> str:
        """The reason why a node of this kind and shape cannot be computed with others over rows, or ""."""
        if unit.kind != "rows":
            return "NumPy computes that operation"
        if x.kind == "reduce":
            same = x.inputs[0].shape == unit.shape
            return "" if same else f"it reduces {x.inputs[0].shape}, not {unit.shape}"
        fits = x.shape == unit.shape or (x.shape == (*unit.shape[:-1], 1) and not x.of("index"))
        return "" if fits else f"its shape is {x.shape}, not {unit.shape}"

    def read(self, x: Node) -> list[Node]:
        """The nodes that a node reads, through inlined ones."""
        return [z for y in x.inputs for z in (self.read(y) if y in self.inline else (y,))]

    def needs(self, x: Node) -> set[Unit]:
        """Units that must have run before a node is computed, its own among them."""
        units: set[Unit] = set()
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
            elif unit not in units:
                units.add(unit)
                stack += [z for member in unit.members for z in member.inputs]
        return units

    def ordered(self) -> list[Unit]:
        """Units in topological order; otherwise in the order of the graph."""
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
        units = set()
        stack = [y for x in unit.members for y in x.inputs]
        while stack:
            y = stack.pop()
            other = self.of.get(y)
            if other is None:
                stack += y.inputs
            elif other is not unit:
                units.add(other)
        return units


def users_of(live: list[Node]) -> dict[Node, list[Node]]:
    """The nodes that read each node, once for each operand, in order."""
    users: dict[Node, list[Node]] = {x: [] for x in live}
    for x in live:
        for y in x.inputs:
            users[y].append(x)
    return users


def live_nodes(graph: Graph, outputs: list[Node]) -> list[Node]:
    """Nodes that outputs depend on, in order."""
    needed: set[Node] = set()
    stack = list(outputs)
    while stack:
        x = stack.pop()
        if x not in needed:
            needed.add(x)
            stack += x.inputs
    return [x for x in graph.nodes if x in needed]
