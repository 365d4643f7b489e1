"""Scores of attention on a GPU, and the expressions of their softmax.

Owns `Request`, what kernels are built for, and `Scores`, the base of the softmax of all units: expressions of a score,
of a weight and of a row's end, their statements for one element, and the test whether a tile has keys that some of its
queries do not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.attention_program import LOWEST
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import If, Let, Verb
from portmm.kernels.cpu.elementwise import Elements
from portmm.kernels.cpu.online_softmax import BEFORE, ENDED, KEPT, MOST, TOTAL, weight
from portmm.kernels.gpu.epilogue_store import addresses, numbers
from portmm.kernels.gpu.loops import unrolled
from portmm.spec.epilogue import C, Fused, acc, index
from portmm.spec.expr_functions import select
from portmm.util.locks import once

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.gpu_attention import AttentionTiles
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


_LEAVES = {"p": var("query") + var("at"), "w": var("window"), "k": var("at_key"), "e": var("end")}
"""Further axes of scores: a query's position, the window, a key that may be past the end, and the end."""


@dataclass(frozen=True, slots=True)
class Request:
    """A kernel of attention to build.

    Attributes:
        form: the kind of attention.
        t: the tiles.
        isa: the instruction set.
        atom: the multiply-add.
    """

    form: Form
    t: AttentionTiles
    isa: Isa
    atom: Atom


@dataclass(frozen=True)
class Scores(Request):
    """Expressions and statements for the scores of a tile."""

    @once
    def real(self) -> Atom:
        """Atom of one lane of f32."""
        atom = self.isa.vector("f32", 1)
        assert atom is not None  # noqa: S101 - every device has it
        return atom

    @once
    def score(self) -> Expr:
        """Expression of a score."""
        return self.form.score.results[0][1]

    @once
    def bounded(self) -> Expr:
        """Expression of a masked score."""
        seen = index("k") < index("e")
        seen = seen & self.form.bounds.seen(index("p"), index("k"), index("w")) if self.form.bounds else seen
        return select(seen, self.score, float("-inf"))

    @once
    def weighed(self) -> tuple[Expr, Expr]:
        """Expressions of a weight, and of the factor of earlier sums after a new maximum."""
        return weight(KEPT, MOST), weight(BEFORE, MOST)

    @property
    def constants(self) -> tuple[Expr, ...]:
        """Further expressions that are the same for all scores."""
        return ()

    @once
    def at(self) -> Elements:
        """Statements for all these expressions."""
        wanted = (self.score, self.bounded, *self.weighed, *ENDED, *self.constants)
        fused = Fused(self.form.score.operands, tuple((C, x) for x in wanted))
        return Elements(self.isa, self.real, fused, var("query"), var("query"), further=_LEAVES)

    # -- statements ----------------------------------------------------------

    def get(self, name: str, p: Ptr) -> Stmt:
        """Load of a register."""
        return Verb("load_c", name, p=p, of=self.real.name)

    def keep(self, name: str, p: Ptr) -> Stmt:
        """Store of a register."""
        return Verb("store", name, p=p, of=self.real.name)

    def map(self, op: str, d: str, *args: str | float) -> Stmt:
        """Operation on registers and literals."""
        return Map(op, d, args, "f32", "f32", self.real.name)

    # -- parts of the kernel -------------------------------------------------

    def fixed(self) -> tuple[Stmt, ...]:
        """Statements that are the same for all scores."""
        self.at.names.clear()
        if self.t.runs:
            return (*numbers(self.at), *self.at.once(list(self.constants), ""))
        same = self.at.once([self.score, self.bounded, *self.constants], "bh")
        return (*numbers(self.at), *addresses(self.at.fused), *same)

    @property
    def edge(self) -> Index:
        """Condition that some query of the block does not see some key of the tile."""
        key, far, low, high = var("key"), var("key") + self.t.keys, var("at") + var("low"), var("at") + var("high")
        return self.form.bounds.edge(var("end").lt(far), (key, far), (low, high + 1), var("window"))

    def scored(self, row: Index, key: Index, here: Ptr, big: Ptr, columns: tuple[tuple[str, int], ...]) -> Stmt:
        """Scores of this thread, from products, and the maximum of each row; masked if the block needs it.

        Args:
            row: of row i in the block's tile.
            key: of a column in loops over `columns`, outermost first.
            here: address of its score.
            big: address of the maximum of row i.
            columns: names and counts of loops.
        """
        registers = dict(self.at.names)
        row = minimum(var("row_0") + row, var("last"))
        lets: tuple[Stmt, ...] = (Let("query", row),)
        if self.t.runs:
            head = var("other") * var("group") + var("row") // var("m")
            lets = (Let("row", row), Let("query", var("row") % var("m")), Let("head", head))
            lets += tuple(addresses(self.at.fused))

        def each_row(value: Expr, column: Index) -> Stmt:
            at = self.at
            at.names = dict(registers)
            fixed = at.once([value], "bhmpwe")
            at.names[acc()] = at.name(acc())
            score = [self.get(at.names[acc()], here), *at.compute([value], var("column"), "")]
            register, before = at.value(value)
            score += [*before, self.keep(register, here), self.map("greater", "big", register, "big")]
            body: tuple[Stmt, ...] = (Let("at_key", key), Let("column", column), *score)
            for name, count in reversed(columns):
                body = (unrolled(name, count, *body),)
            lowest = self.map("literal", "big", LOWEST)
            return unrolled("i", self.t.rows, *lets, *fixed, lowest, *body, self.keep("big", big))

        plain = each_row(self.score, var("at_key"))
        bounded = each_row(self.bounded, minimum(var("at_key"), var("end") - 1))
        return If(self.edge, (bounded,), (plain,))

    def row_results(self, first: tuple[Stmt, ...], leads: Index) -> tuple[Stmt, ...]:
        """Results of row i after `first`, which computes its sum and maximum; the lane that `leads` stores them."""
        at = self.at
        inverse, logarithm = ENDED
        at.names = {TOTAL: "sum", MOST: "largest"}
        if self.t.runs:
            kept: tuple[Stmt, ...] = tuple(
                self.keep(x, Ptr("work", var(f"{to}_at") + var("place")))
                for x, to in (("largest", "mosts"), ("sum", "sums"))
            )
            return (*first, If(leads, kept))
        stmts = (*first, *at.compute([inverse], const(0), ""))
        if not self.form.lse:
            return stmts
        registers = dict(at.names)
        here = Ptr("lse", (var("item") * var("heads") + var("head")) * var("m") + var("row"))
        kept = (*at.compute([logarithm], const(0), ""), self.keep(at.names[logarithm], here))
        at.names = registers
        return (*stmts, If(leads, kept))

    def divided(self, src: Ptr, to: Ptr) -> tuple[Stmt, ...]:
        """Statements that divide a sum by the sum of its weights; for runs, they copy it."""
        by = () if self.t.runs else (self.map("mul", "x", "x", self.at.names[ENDED[0]]),)
        return (self.get("x", src), *by, self.keep("x", to))

    def begin(self) -> tuple[Stmt, ...]:
        """Initial maxima and sums."""
        each_row = (self.keep("largest", Ptr("most", var("i"))), self.keep("sum", Ptr("sums", var("i"))))
        return (
            self.map("literal", "largest", LOWEST),
            self.map("literal", "sum", 0.0),
            unrolled("i", self.t.rows, *each_row),
            *self.fixed(),
        )
