"""A softmax that is found tile by tile, by the threads of a device.

What a tile of keys changes in what was summed with weights follows from the expression of a weight, as on
CPUs: `kernels.online`. A thread has the scores of some rows and columns; the largest score of a row is found
from those that its threads leave in shared memory, by each of them in the same order. Sums of weights stay
apart, one for each thread of a row, until the last tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from portmm.kernels.elementwise import Elements
from portmm.kernels.online import BEFORE, KEPT, LOWEST, MOST, weight

from portmm import vecmath
from portmm.expr import select
from portmm.fused import C, Fused, acc, given, index, parse
from portmm.grid import Argument
from portmm.index import Ptr, const, minimum, var
from portmm.ir import For, If, Let, LetPtr, Map, Scratch, Verb
from portmm.threads import WHOLE, Barrier, Vector

if TYPE_CHECKING:
    from portmm.kernels.heads import Form

    from portmm.attention_tiling import Tiling
    from portmm.expr import Expr
    from portmm.index import Index
    from portmm.ir import Stmt
    from portmm.isa import Atom, Isa

LANES, WORD = 4, 4
TOTAL = given(3, "f32")
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
class Softmax:
    """What becomes of the scores of a tile.

    Attributes:
        form: the kind of attention.
        t: the tiles.
        isa: the instruction set.
        atom: multiplies.
    """

    form: Form
    t: Tiling
    isa: Isa
    atom: Atom

    @cached_property
    def real(self) -> Atom:
        """One lane of f32."""
        found = self.isa.vector("f32", 1)
        assert found is not None  # noqa: S101 - every device has it
        return found

    @cached_property
    def score(self) -> Expr:
        """A score."""
        return parse(self.form.score).results[0][1]

    @cached_property
    def bounded(self) -> Expr:
        """The same of a key that a query may not see."""
        seen = index("k") < index("e")
        seen = seen & self.form.bounds.seen("p", "k") if self.form.bounds else seen
        return select(seen, self.score, float("-inf"))

    @cached_property
    def weighed(self) -> tuple[Expr, Expr]:
        """A weight, and what a new largest score makes of what was summed."""
        return weight(KEPT, MOST), weight(BEFORE, MOST)

    @cached_property
    def ended(self) -> tuple[Expr, Expr]:
        """What a row of O is multiplied by, and the logarithm of its sum: 0 for a query that saw nothing."""
        return select(TOTAL > 0.0, 1.0 / TOTAL, TOTAL * 0.0), MOST + vecmath.log(TOTAL)

    @cached_property
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

    def begin(self) -> tuple[Stmt, ...]:
        """No scores have been seen; what is the same for all of them."""
        fused, t = parse(self.form.score), self.t
        self.at.names.clear()
        found: list[Stmt] = [
            self.map("literal", "largest", LOWEST),
            self.map("literal", "sum", 0.0),
            each("i", t.rows, self.keep("largest", Ptr("most", var("i"))), self.keep("sum", Ptr("sums", var("i")))),
            *self.at.scratch(),
        ]
        found += [Scratch("numbers", fused.numbers, "f32")] if fused.numbers else []
        found += [self.keep(f"number_{i}", Ptr("numbers", const(i))) for i in range(fused.numbers)]
        return (
            (*found, *self.operands(), *self.at.once([self.score, self.bounded], "bh")) if not t.runs else tuple(found)
        )

    def operands(self) -> tuple[Stmt, ...]:
        """Where this head of this item has its operands."""
        found = []
        for i, x in enumerate(parse(self.form.score).operands):
            at = var("item") * var(f"x{i}_b") if "b" in x.axes else const(0)
            at += var("head") * var(f"x{i}_h") if "h" in x.axes else const(0)
            found.append(LetPtr(f"x{i}", Ptr(f"x{i}_all", at), x.dtype, readonly=True))
        return tuple(found)

    def statements(self) -> tuple[Stmt, ...]:
        """The scores of a tile become weights; sums so far are changed."""
        bounds, t = self.form.bounds, self.t
        key, far, low, high = var("key"), var("key") + t.keys, var("at") + var("low"), var("at") + var("high")
        edge = var("end").lt(far)
        if bounds.causal:
            edge += (low + 1).lt(far)
        if bounds.window:
            edge += key.lt(high + 1 - var("window"))
            edge += const(0) if bounds.causal else (low + var("window")).lt(far)
        held = dict(self.at.names)
        plain, bounded = self.scored(self.score, held, edge=False), self.scored(self.bounded, held, edge=True)
        return (If(edge, (bounded,), (plain,)), Barrier(), self.weights())

    def scored(self, value: Expr, held: dict[Expr, str], *, edge: bool) -> Stmt:
        """Scores, and the largest of each row that this thread has."""
        t, at, i, j = self.t, self.at, var("i"), var("j")
        row = minimum(var("row_0") + var("down") + i * t.down, var("last"))
        lets: tuple[Stmt, ...] = (Let("query", row),)
        if t.runs:
            head = var("other") * var("group") + var("row") // var("m")
            lets = (Let("row", row), Let("query", var("row") % var("m")), Let("head", head), *self.operands())
        at.names = dict(held)
        fixed = at.once([value], "bhmpwe")
        key, here = var("key") + var("across") + j * t.across, Ptr("s", i * t.columns + j)
        column = minimum(var("at_key"), var("end") - 1) if edge else var("at_key")
        at.names[acc()] = at.name(acc())
        found = [self.get(at.names[acc()], here), *at.compute([value], var("column"), "")]
        said, before = at.value(value)
        found += [*before, self.keep(said, here), self.map("greater", "big", said, "big")]
        return each(
            "i", t.rows, *lets, *fixed,
            self.map("literal", "big", LOWEST),
            each("j", t.columns, Let("at_key", key), Let("column", column), *found),
            self.keep("big", self.part(var("across"))),
        )  # fmt: skip

    def part(self, which: Index) -> Ptr:
        """What one of the threads of row i has found."""
        return Ptr("part", (var("down") + var("i") * self.t.down) * self.t.across + which)

    def over(self, op: str, into: str) -> Stmt:
        """What all threads of row i have found, put together in order."""
        c, e = var("c"), var("e")
        one = (self.get("one", Ptr("words", e)), self.map(op, into, "one", into))
        load = Vector(Ptr("words"), self.part(c * LANES), LANES * WORD)
        return each("c", self.t.across // LANES, load, each("e", LANES, *one))

    def weights(self) -> Stmt:
        """Weights, to shared memory; what was summed is multiplied by what the new largest makes of it."""
        t, at, i, j = self.t, self.at, var("i"), var("j")
        weighed, change = self.weighed
        at.names = {MOST: "largest", BEFORE: "before"}
        first = [self.get(x, Ptr("most", i)) for x in ("before", "largest")]
        first += [self.over("greater", "largest"), self.keep("largest", Ptr("most", i))]
        first += [*at.compute([change], const(0), ""), self.get("sum", Ptr("sums", i))]
        by = at.names[change]
        at.names = {MOST: "largest", KEPT: at.name(KEPT)}
        one = [self.get(at.names[KEPT], Ptr("s", i * t.columns + j)), *at.compute([weighed], const(0), "")]
        to = Ptr("weights", (var("down") + i * t.down) * t.beside + var("across") + j * t.across)
        one += [self.keep(at.names[weighed], to), self.map("add", "sum", "sum", at.names[weighed])]
        here = Ptr("o_sums", i * t.sums + var("c"))
        return each(
            "i", t.rows, *first,
            self.map("mul", "sum", "sum", by), each("j", t.columns, *one), self.keep("sum", Ptr("sums", i)),
            each("c", t.sums, self.get("x", here), self.map("mul", "x", "x", by), self.keep("x", here)),
        )  # fmt: skip

    def totals(self) -> tuple[Stmt, ...]:
        """Sums of weights to shared memory."""
        own = (self.get("sum", Ptr("sums", var("i"))), self.keep("sum", self.part(var("across"))))
        return (each("i", self.t.rows, *own), Barrier())

    def ends(self) -> tuple[Stmt, ...]:
        """The sum of row i, and what follows from it; one thread stores what it has of a row's numbers."""
        at = self.at
        inverse, said = self.ended
        at.names = {TOTAL: "sum", MOST: "largest"}
        first = (self.map("literal", "sum", 0.0), self.over("add", "sum"), self.get("largest", Ptr("most", var("i"))))
        if self.t.runs:
            kept: tuple[Stmt, ...] = tuple(
                self.keep(x, Ptr("work", var(f"{to}_at") + var("place")))
                for x, to in (("largest", "mosts"), ("sum", "sums"))
            )
            return (*first, If(var("across").eq(0), kept))
        found = (*first, *at.compute([inverse], const(0), ""))
        if not self.form.lse:
            return found
        held = dict(at.names)
        here = Ptr("lse", (var("item") * var("heads") + var("head")) * var("m") + var("row"))
        kept = (*at.compute([said], const(0), ""), self.keep(at.names[said], here))
        at.names = held
        return (*found, If(var("across").eq(0), kept))

    def divided(self, src: Ptr, to: Ptr) -> tuple[Stmt, ...]:
        """A sum over the sum of its weights; of runs, as it is."""
        by = () if self.t.runs else (self.map("mul", "x", "x", self.at.names[self.ended[0]]),)
        return (self.get("x", src), *by, self.keep("x", to))


def joined(form: Form, t: Tiling, isa: Isa, atom: Atom) -> tuple[tuple[Argument, ...], tuple[Stmt, ...]]:
    """The parameters and the body of what puts runs together: a block of threads for each query of each head.

    Each thread finds the largest score of all runs, and of its columns the sum of what they have, by the rule
    that joins tiles: the runs in order, however many blocks there were.
    """
    s = Softmax(form, t, isa, atom)
    at, r = s.at, var("r")
    inverse, said = s.ended
    weighed, _ = s.weighed
    row, to_row = var("block"), var("item") * var("o_b") + var("head") * var("o_h") + var("query") * var("o_m")
    place = r * var("all_rows") + row

    def loop(*body: Stmt) -> Stmt:
        return For("r", const(0), var("runs"), const(1), body)

    at.names = {MOST: "largest", KEPT: "before"}
    load = s.get("before", Ptr("work", var("mosts_at") + place))
    weigh = (load, *at.compute([weighed], const(0), ""))
    by = at.names[weighed]
    more = s.get("one", Ptr("work", var("sums_at") + place))
    at.names = {MOST: "largest", TOTAL: "sum"}
    ends = at.compute([inverse], const(0), "")
    scale, held = at.names[inverse], dict(at.names)
    column = var("column")
    value = s.get("one", Ptr("work", place * t.dv + column))
    to = Ptr("to", column * (var("o_d") if "o" in t.loose else const(1)))
    body: list[Stmt] = [
        Let("item", row // (var("m") * var("heads"))), Let("head", row // var("m") % var("heads")),
        Let("query", row % var("m")),
        LetPtr("to", Ptr("o", to_row), form.to),
        s.map("literal", "largest", LOWEST), loop(load, s.map("greater", "largest", "before", "largest")),
        s.map("literal", "sum", 0.0), loop(*weigh, more, s.map("fma", "sum", "one", by, "sum")), *ends,
        For(
            "column", var("thread"), const(t.dv), const(THREADS),
            (
                s.map("literal", "x", 0.0), loop(*weigh, value, s.map("fma", "x", "one", by, "x")),
                s.map("mul", "x", "x", scale), s.keep("x", to),
            ),
        ),
    ]  # fmt: skip
    given = [Argument(x, "int") for x in ("m", "heads", "runs")]
    given += [Argument("work", "pointer", "f32", readonly=True, alone=True)]
    given += [Argument(x, "long") for x in ("all_rows", "mosts_at", "sums_at")]
    if form.lse:
        at.names = held
        kept = (*at.compute([said], const(0), ""), s.keep(at.names[said], Ptr("lse", row)))
        body.append(If(var("thread").eq(0), kept))
    return tuple(given), tuple(body)


THREADS = 64
"""Of a block that puts runs together."""
