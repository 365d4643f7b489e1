"""Scores of attention on a device, and what follows from them.

Owns `Scores`, which the softmax of kernels of all units begins with: expressions of a score, of a weight and of
what ends a row, what computes them an element at a time, and where a tile has keys that some of its queries do not
see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, LetPtr, Map, Scratch, Verb
from portmm.ir.thread_nodes import WHOLE
from portmm.kernels.cpu.elementwise import Elements
from portmm.kernels.cpu.online_softmax import BEFORE, KEPT, LOWEST, MOST, weight
from portmm.spec import vector_math
from portmm.spec.epilogue import C, Fused, argument, index, parse
from portmm.spec.expr import select
from portmm.util.locks import once

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.attention_geometry import Form
    from portmm.kernels.gpu.attention_blocks import Tiles
    from portmm.spec.expr import Expr
    from portmm.target.isa import Atom, Isa

TOTAL = argument(3, "f32")
"""The sum of a row's weights."""


class _Scores(Elements):
    """Elements that know positions, the window, and the end of what is read."""

    __slots__ = ()

    def leaf(self, x: Expr, j: Index, few: str) -> tuple[Stmt, ...]:
        if x.op == "index" and x.args[0] in _LEAVES:
            return (Map("whole", self.name(x), (), "s32", "s32", self.real.name, _LEAVES[x.args[0]]),)
        return super().leaf(x, j, few)


_LEAVES = {"p": var("query") + var("at"), "w": var("window"), "k": var("at_key"), "e": var("end")}
"""Axes of scores beside those of functions: a query's position, the window, a key that may be past the end, the end."""


def each(name: str, count: int, *body: Stmt) -> Stmt:
    """A loop that is unrolled."""
    return For(name, const(0), const(count), const(1), body, WHOLE)


@dataclass(frozen=True)
class Scores:
    """What becomes of the scores of a tile.

    Attributes:
        form: the kind of attention.
        t: the tiles.
        isa: the instruction set.
        atom: multiplies.
    """

    form: Form
    t: Tiles
    isa: Isa
    atom: Atom

    @once
    def real(self) -> Atom:
        """One lane of f32."""
        found = self.isa.vector("f32", 1)
        assert found is not None  # noqa: S101 - every device has it
        return found

    @once
    def score(self) -> Expr:
        """A score."""
        return parse(self.form.score).results[0][1]

    @once
    def bounded(self) -> Expr:
        """The same of a key that a query may not see."""
        seen = index("k") < index("e")
        seen = seen & self.form.bounds.seen("p", "k") if self.form.bounds else seen
        return select(seen, self.score, float("-inf"))

    @once
    def weighed(self) -> tuple[Expr, Expr]:
        """A weight, and what a new largest score makes of what was summed."""
        return weight(KEPT, MOST), weight(BEFORE, MOST)

    @once
    def ended(self) -> tuple[Expr, Expr]:
        """What a row of O is multiplied by, and the logarithm of its sum: 0 for a query that saw nothing."""
        return select(TOTAL > 0.0, 1.0 / TOTAL, TOTAL * 0.0), MOST + vector_math.log(TOTAL)

    @once
    def at(self) -> Elements:
        """What computes all of them."""
        wanted = (self.score, self.bounded, *self.weighed, *self.ended)
        fused = Fused(parse(self.form.score).operands, tuple((C, x) for x in wanted))
        return _Scores(self.isa, self.real, fused, inner=var("query"), row=var("query"))

    # -- words ---------------------------------------------------------------

    def get(self, name: str, p: Ptr) -> Stmt:
        """Load a register."""
        return Verb("load_c", name, p=p, of=self.real.name)

    def keep(self, name: str, p: Ptr) -> Stmt:
        """Store a register."""
        return Verb("store", name, p=p, of=self.real.name)

    def map(self, op: str, d: str, *args: str | float) -> Stmt:
        """An operation on registers and literals."""
        return Map(op, d, args, "f32", "f32", self.real.name)

    # -- parts of the kernel -------------------------------------------------

    def fixed(self) -> tuple[Stmt, ...]:
        """What is the same for all scores."""
        fused = parse(self.form.score)
        self.at.names.clear()
        found: list[Stmt] = [*self.at.scratch()]
        found += [Scratch("numbers", fused.numbers, "f32")] if fused.numbers else []
        found += [self.keep(f"number_{i}", Ptr("numbers", const(i))) for i in range(fused.numbers)]
        if self.t.runs:
            return tuple(found)
        return (*found, *self.operands(), *self.at.once([self.score, self.bounded], "bh"))

    def operands(self) -> tuple[Stmt, ...]:
        """Where this head of this item has its operands."""
        found = []
        for i, x in enumerate(parse(self.form.score).operands):
            at = var("item") * var(f"x{i}_b") if "b" in x.axes else const(0)
            at += var("head") * var(f"x{i}_h") if "h" in x.axes else const(0)
            found.append(LetPtr(f"x{i}", Ptr(f"x{i}_all", at), x.dtype, readonly=True))
        return tuple(found)

    @property
    def edge(self) -> Index:
        """Some query of the block does not see some key of the tile."""
        bounds = self.form.bounds
        key, far, low, high = var("key"), var("key") + self.t.keys, var("at") + var("low"), var("at") + var("high")
        edge = var("end").lt(far)
        if bounds.causal:
            edge += (low + 1).lt(far)
        if bounds.window:
            edge += key.lt(high + 1 - var("window"))
            edge += const(0) if bounds.causal else (low + var("window")).lt(far)
        return edge

    def said(self, first: tuple[Stmt, ...], leads: Index) -> tuple[Stmt, ...]:
        """What follows from the sum of row i and its largest score, `first` found; who leads stores them."""
        at = self.at
        inverse, logarithm = self.ended
        at.names = {TOTAL: "sum", MOST: "largest"}
        if self.t.runs:
            kept: tuple[Stmt, ...] = tuple(
                self.keep(x, Ptr("work", var(f"{to}_at") + var("place")))
                for x, to in (("largest", "mosts"), ("sum", "sums"))
            )
            return (*first, If(leads, kept))
        found = (*first, *at.compute([inverse], const(0), ""))
        if not self.form.lse:
            return found
        held = dict(at.names)
        here = Ptr("lse", (var("item") * var("heads") + var("head")) * var("m") + var("row"))
        kept = (*at.compute([logarithm], const(0), ""), self.keep(at.names[logarithm], here))
        at.names = held
        return (*found, If(leads, kept))

    def divided(self, src: Ptr, to: Ptr) -> tuple[Stmt, ...]:
        """A sum over the sum of its weights; of runs, as it is."""
        by = () if self.t.runs else (self.map("mul", "x", "x", self.at.names[self.ended[0]]),)
        return (self.get("x", src), *by, self.keep("x", to))

    def begin(self) -> tuple[Stmt, ...]:
        """No scores have been seen."""
        each_row = (self.keep("largest", Ptr("most", var("i"))), self.keep("sum", Ptr("sums", var("i"))))
        return (
            self.map("literal", "largest", LOWEST),
            self.map("literal", "sum", 0.0),
            each("i", self.t.rows, *each_row),
            *self.fixed(),
        )
