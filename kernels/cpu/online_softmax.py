"""Online softmax: block by block, in lanes of queries.

A sum of weights w(x, r) = exp(x - r), r being the largest x so far, must change when r does.
Weights that satisfy w(x, r') = w(x, r) w(r, r') make that a product: sums of
them, of the weights alone or of rows of V, are multiplied by w(r, r'), which is the same
expression as a weight, of another argument. So everything here follows from `weight` and the
expression of the scores (Milakov & Gimelshein 2018; Dao et al. 2022).

A block of scores is s[key][query]: vectors hold queries, so that the largest and the sum of
each query's keys need no reduction across lanes, and the weights are
the left operand of the product with V in its layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, round_up, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import For, Function, If, Let, Param, Scratch, Verb
from portmm.kernels.cpu.elementwise import Elements, parameters, vectors
from portmm.spec import vector_math
from portmm.spec.epilogue import C, Fused, acc, argument, index
from portmm.spec.expr import Expr, ordered
from portmm.spec.expr_functions import bits, fma, from_bits, select
from portmm.spec.expr_ops import OPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.attention_program import Bounds
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

WORTH_KEEPING = 3
"""Operations from which a score is stored between the passes over a block: a load and a store take as long."""
MOST, BEFORE, KEPT, TOTAL = (argument(i, "f32") for i in range(4))
"""Largest score of a query, largest before this block, a score stored by the first pass, and the sum of weights."""
ENDED = select(TOTAL > 0.0, 1.0 / TOTAL, TOTAL * 0.0), MOST + vector_math.log(TOTAL)
"""Factor of a query's result, 0 if it saw no key, and the logarithm of its sum."""


LEAST = -87.0
"""Least difference of a score from the largest: below, the weight would be subnormal, and is 0."""
_WHOLE = 1.5 * 2**23 + 127  # added to a small number, it leaves its integer part in the last bits: an exponent


def weight(x: Expr, most: Expr) -> Expr:
    """Weight of a score relative to the largest one, exp(x - most).

    The difference is not positive, so that half of the guards of `vector_math.exp` are not needed. The error relative
    to the weight is that of f32 times the difference; relative to the weight of the largest it is negligible.
    """
    # A product that is recomputed must be rounded as for the maximum, and not be fused with the difference.
    return decay((fma(x.args[0], x.args[1], 0.0) if x.op == "mul" else x) - most)


def decay(less: Expr) -> Expr:
    """The exponential of a difference that is not positive; 0 where it would be subnormal."""
    shifted = fma(less, vector_math.LOG2E, _WHOLE)
    rest = fma(less, vector_math.LOG2E, -(shifted - _WHOLE))
    power = vector_math.poly(rest, vector_math.EXP2)
    return select(less < LEAST, 0.0, power * from_bits(bits(shifted) << 23))


class _Scores(Elements):
    """Expressions on scores, with positions and the window; registers carry the number of their row."""

    def __init__(self, isa: Isa, real: Atom, fused: Fused, number: int) -> None:
        row = var("r") + number
        super().__init__(isa, real, fused, row, var("key") + row, var("query"), further={"w": var("window")})
        self.number = number

    def name(self, x: Expr) -> str:
        return f"{super().name(x)}_{self.number}"

    def leaf(self, x: Expr, j: Index, few: str) -> tuple[Stmt, ...]:
        if x.op == "index" and x.args == ("p",):
            at = self.column + j + var("offset")
            return (Map("lanes", self.name(x), (), "s32", "s32", self.real.name, at),)
        return super().leaf(x, j, few)

    def load(self, x: Expr, j: Index, few: str) -> tuple[Stmt, ...]:
        stmts = super().load(x, j, few)
        # Gathered elements are copied through scratch that all rows share.
        return (
            stmts if len(stmts) == 1 or "n" not in self.axes[x] else (For("once", const(0), const(1), const(1), stmts),)
        )


def operations(x: Expr) -> int:
    """Number of operations of an expression."""
    return sum(y.op in OPS for y in ordered((x,)))


def tile(isa: Isa, real: Atom, scores: Fused, bounds: Bounds) -> Function:
    """Function that turns s[keys][queries] into weights, and updates `most`, `sums` and `change`.

    `scores` is the expression of the score, and of a factor of each weight that is stored, if it has one. Earlier sums
    of weights are to be multiplied by `change`.
    """
    score, *factors = (x for _, x in scores.results)
    score = select(bounds.seen(index("p"), index("m"), index("w")), score, float("-inf")) if bounds else score
    keeps = operations(score) >= WORTH_KEEPING
    weighed = weight(KEPT if keeps else score, MOST)
    stored = math.prod(factors, start=weighed)
    wanted = [score, weighed, weight(BEFORE, MOST), stored]
    fused = Fused(scores.operands, tuple((C, x) for x in wanted))
    many = any(x.registers >= 32 for x in (isa, *isa.below))  # vector registers; tiles are counted apart
    each = [_Scores(isa, real, fused, e) for e in range(4 if many else 2)]
    at = each[0]
    walk = _Walk(each, score, weighed, stored, wanted[2], keeps)
    lanes, columns = real.n, var("columns")
    fixed: tuple[Stmt, ...] = at.once([score, weighed, stored], "bhw")
    walk.fixed = dict(at.names)
    short = any("n" in x.axes for x in scores.operands) and lanes > 1
    end = columns - columns % lanes if short else round_up(columns, lanes)
    body: list[Stmt] = [*at.scratch(), *fixed, For("j", const(0), end, const(lanes), walk.step(var("j"), ""))]
    if short:
        count = (Let("j", end), Let("left", columns - end), *at.few(columns - end))
        body.append(If(end.lt(columns), (*count, *walk.step(var("j"), "left"))))
    params = [Param("rows"), Param("columns"), Param("item"), Param("head"), Param("key"), Param("query")]
    params += [Param("offset"), Param("window")]
    params += [Param("s", "f32"), Param("wide"), Param("beside")] + [
        Param(x, "f32") for x in ("mosts", "sums", "changes")
    ]
    name = f"softmax{'_bounded' if bounds else ''}"
    comment = "s[rows][columns] = weights of scores, beside those of the blocks before; columns are `beside` apart"
    return Function(name, "inner", (*params, *parameters(scores)), tuple(body), comment)


@dataclass(slots=True)
class _Walk:
    """Two passes over a vector of queries, some rows interleaved to hide the latency of each."""

    each: list[_Scores]
    score: Expr
    weighed: Expr
    stored: Expr
    change: Expr
    keeps: bool
    fixed: dict[Expr, str] = field(default_factory=dict)

    @property
    def real(self) -> str:
        return self.each[0].real.name

    def step(self, j: Index, few: str) -> tuple[Stmt, ...]:
        """Statements for all rows of one vector of queries."""
        at, real, count = self.each[0], self.real, len(self.each)
        at.names = dict(self.fixed)
        most = [f"most{e}" for e in range(count)]
        stmts: list[Stmt] = [Verb("load_c", x, p=Ptr("mosts", j), of=real) for x in ("before", *most)]
        stmts += at.once([self.score, self.weighed, self.stored], "bhnpw", j, few)
        registers = at.names | {MOST: most[0], BEFORE: "before"}
        stmts += self.rows(lambda x: self.largest(x, registers, j, few))
        stmts += [y for x in most[1:] for y in self.larger(most[0], x)]
        at.names = dict(registers)
        stmts += at.compute([self.change], j, "")
        change = at.names[self.change]
        stmts.append(Verb("store", change, p=Ptr("changes", j), of=real))
        stmts += [Map("literal", f"sum{e}", (0.0,), "f32", "f32", real) for e in range(count)]
        stmts += self.rows(lambda x: self.weights(x, registers, j, few))
        stmts += [Map("add", "sum0", ("sum0", f"sum{e}"), "f32", "f32", real) for e in range(1, count)]
        stmts += [Verb("load_c", "total", p=Ptr("sums", j), of=real)]
        stmts += [Map("fma", "total", ("total", change, "sum0"), "f32", "f32", real)]
        stmts += [Verb("store", "total", p=Ptr("sums", j), of=real), Verb("store", most[0], p=Ptr("mosts", j), of=real)]
        return tuple(stmts)

    def rows(self, one: Callable[[_Scores], tuple[Stmt, ...]]) -> tuple[Stmt, ...]:
        """Loop over groups of rows, interleaved statement by statement, then one over the remaining rows."""
        count, rows = len(self.each), var("rows")
        whole = rows - rows % count
        several = [one(x) for x in self.each]
        together = tuple(s for alike in zip(*several, strict=True) for s in alike)
        loop = For("r", const(0), whole, const(count), together)
        return (loop, For("r", whole, rows, const(1), several[0]))

    def load(self, at: _Scores, x: Expr, j: Index) -> Stmt:
        """Load of a score, from its product or stored."""
        at.names[x] = at.name(x)
        return Verb("load_c", at.names[x], p=self.place(at, j), of=self.real)

    @staticmethod
    def place(at: _Scores, j: Index) -> Ptr:
        return Ptr("s", at.inner * var("wide") + j * var("beside"))

    def larger(self, most: str, x: str) -> tuple[Stmt, ...]:
        """Update of the maximum; a NaN is not the largest, but becomes a weight of NaN."""
        return (Map("greater", most, (x, most), "f32", "f32", self.real),)

    def largest(self, at: _Scores, registers: dict[Expr, str], j: Index, few: str) -> tuple[Stmt, ...]:
        """First pass: a score, and the maximum."""
        at.names = dict(registers)
        stmts = [self.load(at, acc(), j), *at.compute([self.score], j, few)]
        value, before = at.value(self.score)
        stmts += before
        stmts += [Verb("store", value, p=self.place(at, j), of=self.real)] if self.keeps else []
        return (*stmts, *self.larger(f"most{at.number}", value))

    def weights(self, at: _Scores, registers: dict[Expr, str], j: Index, few: str) -> tuple[Stmt, ...]:
        """Second pass: a weight, and the sum of weights."""
        at.names = dict(registers)
        stmts = [self.load(at, KEPT if self.keeps else acc(), j), *at.compute([self.weighed, self.stored], j, few)]
        value, into = at.names[self.weighed], f"sum{at.number}"
        store = Verb("store", at.names[self.stored], p=self.place(at, j), of=self.real)
        return (*stmts, Map("add", into, (into, value), "f32", "f32", self.real), store)


def last(isa: Isa, real: Atom, *, lse: bool) -> Function:
    """Function that turns `sums` into factors of rows of results: 0 for a query that saw no key."""
    inverse, lse_value = ENDED
    at = Elements(isa, real, Fused((), ((C, inverse), (C, lse_value))))
    at.names = {TOTAL: "total", MOST: "largest"}
    here, columns = var("j"), var("columns")
    stmts: list[Stmt] = [Verb("load_c", "total", p=Ptr("sums", here), of=real.name)]
    stmts += at.compute([inverse], here, "")
    stmts.append(Verb("store", at.names[inverse], p=Ptr("sums", here), of=real.name))
    if lse:
        stmts.append(Verb("load_c", "largest", p=Ptr("mosts", here), of=real.name))
        stmts += at.compute([lse_value], here, "")
        stmts.append(Verb("store", at.names[lse_value], p=Ptr("mosts", here), of=real.name))
    loop = For("j", const(0), round_up(columns, real.n), const(real.n), tuple(stmts))
    params = (Param("columns"), Param("sums", "f32"), Param("mosts", "f32"))
    return Function("last", "inner", params, (loop,), "The inverse of each sum; most = the logarithm of the whole sum")


def scaled(here: Ptr, real: Atom, by: str = "by") -> tuple[Stmt, ...]:
    """Statements that multiply a vector of sums by a register."""
    return (
        Verb("load_c", "x", p=here, of=real.name),
        Map("mul", "x", ("x", by), "f32", "f32", real.name),
        Verb("store", "x", p=here, of=real.name),
    )


def rescale(real: Atom) -> Function:
    """Function that rescales rows: o[row] *= change[row]."""
    i, j = var("i"), var("j")
    step = scaled(Ptr("o", i * var("across") + j), real)
    row = (
        Verb("load_a", "one", p=Ptr("change", i), of=real.name),
        Map("splat", "by", ("one",), "f32", "f32", real.name),
        For("j", const(0), var("across"), const(real.n), step, 2),
    )
    params = (Param("rows"), Param("across"), Param("o", "f32"), Param("change", "f32", readonly=True))
    return Function(
        "rescale", "inner", params, (For("i", const(0), var("rows"), const(1), row),), "o[row] *= change[row]"
    )


def rescale_strips(real: Atom) -> Function:
    """Function that rescales columns in strips: o[j / lanes][row][j % lanes] *= change[j]."""
    i, j = var("i"), var("j")
    step = scaled(Ptr("o", j * var("rows") + i * real.n), real)
    column = (
        Verb("load_c", "by", p=Ptr("change", j), of=real.name),
        For("i", const(0), var("rows"), const(1), step, 4),
    )
    params = (Param("rows"), Param("columns"), Param("o", "f32"), Param("change", "f32", readonly=True))
    loop = For("j", const(0), var("columns"), const(real.n), column)
    return Function("rescale", "inner", params, (loop,), f"o[j / {real.n}][row][j % {real.n}] *= change[j]")


def divided(isa: Isa, real: Atom, to: str) -> Function:
    """Function that divides rows of sums by the sums of weights, in the type of the result."""
    at = Elements(isa, real, Fused((), ((C, argument(0, "f32")),)))
    value = argument(0, "f32")
    at.names = {value: "x"}
    i = var("i")

    def step(j: Index, few: str) -> tuple[Stmt, ...]:
        load = Verb("load_c", "x", p=Ptr("o", i * var("across") + j), of=real.name)
        scale = Map("mul", "x", ("x", "by"), "f32", "f32", real.name)
        return (load, scale, *at.write(value, to, Ptr("to", i * var("to_m")), j, few, const(1)))

    row: list[Stmt] = [
        Verb("load_a", "one", p=Ptr("by_row", i), of=real.name),
        Map("splat", "by", ("one",), "f32", "f32", real.name),
        *vectors(at, const(0), var("dv"), step),
    ]
    params = (
        Param("rows"), Param("dv"), Param("o", "f32", readonly=True), Param("across"),
        Param("by_row", "f32", readonly=True), Param("to", to), Param("to_m"),
    )  # fmt: skip
    scratch = (Scratch(f"few_{to}", real.n, to),)
    body = (*scratch, For("i", const(0), var("rows"), const(1), tuple(row)))
    return Function("divided", "inner", params, body, "to[rows][dv] = o[rows][dv] over sums")
