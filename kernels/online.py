"""A softmax that is found block by block, in lanes of queries.

A sum of weights w(x, r) = exp(x - r), r being the largest x so far, must change when r does.
Weights that satisfy w(x, r') = w(x, r) w(r, r') make that a product: whatever has been summed
with them, the weights alone or rows of V, is multiplied by w(r, r'), which is the same
expression as a weight, of another argument. So all here follows from `weight`, and from what
the scores are (Milakov & Gimelshein 2018; Dao et al. 2022).

A block of scores is s[key][query]: vectors hold queries, so that the largest and the sum of
each query's keys are found without looking across lanes, and what comes out is
the left operand of the product with V as that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.kernels.elementwise import Elements, parameters

from portmm import vecmath
from portmm.expr import OPS, Expr, ordered, select
from portmm.fused import C, Fused, acc, given, index, parse
from portmm.ir import For, Function, If, Let, Map, Param, Ptr, Scratch, Verb, const, round_up, var

if TYPE_CHECKING:
    from portmm.ir import Index, Stmt
    from portmm.target import Atom, Isa

LOWEST = -3.0e38
"""The largest of no scores: less than any, and a number, as -inf less itself is none."""
WORTH_KEEPING = 3
"""Operations from which a score is kept between the passes over a block: a load and a store take as long."""
MOST, BEFORE, KEPT = (given(i, "f32") for i in range(3))
"""The largest score of a query, the largest before this block, a score that was kept."""


def weight(x: Expr, most: Expr) -> Expr:
    """The weight of a score beside the largest one."""
    return vecmath.exp(x - most)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which keys a query sees beside those that a function says.

    Attributes:
        causal: none after its own position.
        window: none as far away as the window is wide.
    """

    causal: bool = False
    window: bool = False

    def __bool__(self) -> bool:
        return self.causal or self.window

    def seen(self, query: str, key: str) -> Expr:
        """Whether the key on an axis is seen from the position on another."""
        at, to = index(query), index(key)
        found = to <= at if self.causal else None
        if self.window:
            near = at - index("w") < to
            found = near if found is None else found & near
            found = found if self.causal else found & (to < at + index("w"))
        assert found is not None  # noqa: S101 - there are bounds
        return found


class _Scores(Elements):
    """Elements that know positions and the window."""

    __slots__ = ()

    def leaf(self, x: Expr, j: Index, few: str) -> tuple[Stmt, ...]:
        d, real = self.name(x), self.real.name
        if x.op == "index" and x.args == ("p",):
            return (Map("lanes", d, (), "s32", "s32", real, self.column + j + var("offset")),)
        if x.op == "index" and x.args == ("w",):
            return (Map("whole", d, (), "s32", "s32", real, var("window")),)
        return super().leaf(x, j, few)


def operations(x: Expr) -> int:
    """How many operations an expression takes."""
    return sum(y.op in OPS for y in ordered((x,)))


def tile(isa: Isa, real: Atom, text: str, bounds: Bounds) -> Function:
    """s[keys][queries] become weights; `most`, `sums` and `change` follow.

    `text` is the score. The weights that were summed before are to be multiplied by `change`.
    """
    scores = parse(text)
    ((_, score),) = scores.results
    score = select(bounds.seen("p", "m"), score, float("-inf")) if bounds else score
    keeps = operations(score) >= WORTH_KEEPING
    weighed = weight(KEPT if keeps else score, MOST)
    wanted = [score, weighed, weight(BEFORE, MOST)]
    fused = Fused(scores.operands, tuple((C, x) for x in wanted))
    at = _Scores(isa, real, fused, var("r"), var("key") + var("r"), var("query"))
    walk = _Walk(at, score, weighed, wanted[2], keeps)
    lanes, columns = real.n, var("columns")
    fixed: tuple[Stmt, ...] = at.once(wanted[:2], "bhw")
    walk.fixed = dict(at.names)
    short = any("n" in x.axes for x in scores.operands) and lanes > 1
    end = columns - columns % lanes if short else round_up(columns, lanes)
    body: list[Stmt] = [*at.scratch(), *fixed, For("j", const(0), end, const(lanes), walk.step(var("j"), ""))]
    if short:
        count = (Let("j", end), Let("left", columns - end), *at.few(columns - end))
        body.append(If(end.lt(columns), (*count, *walk.step(var("j"), "left"))))
    params = [Param("rows"), Param("columns"), Param("item"), Param("head"), Param("key"), Param("query")]
    params += [Param("offset"), Param("window")]
    params += [Param("s", "f32"), Param("wide")] + [Param(x, "f32") for x in ("mosts", "sums", "changes")]
    name = f"softmax{'_bounded' if bounds else ''}"
    comment = "s[rows][columns] = weights of scores, beside those of the blocks before"
    return Function(name, "inner", (*params, *parameters(scores)), tuple(body), comment)


@dataclass(slots=True)
class _Walk:
    """The two passes over a vector of queries."""

    at: Elements
    score: Expr
    weighed: Expr
    change: Expr
    keeps: bool
    fixed: dict[Expr, str] = field(default_factory=dict)

    def step(self, j: Index, few: str) -> tuple[Stmt, ...]:
        """All rows of one vector of queries."""
        at, real = self.at, self.at.real.name
        at.names = dict(self.fixed)
        found: list[Stmt] = [Verb("load_c", x, p=Ptr("mosts", j), of=real) for x in ("most", "before")]
        found += at.once([self.score, self.weighed], "bhnpw", j, few)
        held = at.names | {MOST: "most", BEFORE: "before"}
        found += [self.rows(self.largest(held, j, few)), *self.changed(held, j)]
        found += [self.rows(self.weights(held, j, few))]
        found += [Verb("load_c", "total", p=Ptr("sums", j), of=real)]
        found += [Map("fma", "total", ("total", at.names[self.change], "sum"), "f32", "f32", real)]
        found += [Verb("store", "total", p=Ptr("sums", j), of=real), Verb("store", "most", p=Ptr("mosts", j), of=real)]
        return tuple(found)

    @staticmethod
    def rows(body: tuple[Stmt, ...]) -> Stmt:
        return For("r", const(0), var("rows"), const(1), body)

    def place(self, j: Index) -> Ptr:
        return Ptr("s", var("r") * var("wide") + j)

    def load(self, into: str, j: Index) -> Stmt:
        return Verb("load_c", into, p=self.place(j), of=self.at.real.name)

    def largest(self, held: dict[Expr, str], j: Index, few: str) -> tuple[Stmt, ...]:
        """Scores, and the largest of them."""
        at, real = self.at, self.at.real.name
        at.names = dict(held)
        found = [self.load(_acc_name(at), j), *at.compute([self.score], j, few)]
        value, before = at.value(self.score)
        found += before
        found += [Verb("store", value, p=self.place(j), of=real)] if self.keeps else []
        # A NaN is not the largest; it becomes a weight of NaN.
        over = Map("lt", "over", ("most", value), "mask", "f32", real)
        return (*found, over, Map("select", "most", ("over", value, "most"), "f32", "f32", real))

    def changed(self, held: dict[Expr, str], j: Index) -> tuple[Stmt, ...]:
        """What the weights before are multiplied by."""
        at, real = self.at, self.at.real.name
        at.names = dict(held)
        found = at.compute([self.change], j, "")
        store = Verb("store", at.names[self.change], p=Ptr("changes", j), of=real)
        return (*found, store, Map("literal", "sum", (0.0,), "f32", "f32", real))

    def weights(self, held: dict[Expr, str], j: Index, few: str) -> tuple[Stmt, ...]:
        """Weights, and their sum."""
        at, real, change = self.at, self.at.real.name, self.at.names[self.change]
        at.names = dict(held)
        first: list[Stmt]
        if self.keeps:
            at.names[KEPT] = at.name(KEPT)
            first = [self.load(at.names[KEPT], j)]
        else:
            first = [self.load(_acc_name(at), j)]
        found = [*first, *at.compute([self.weighed], j, few)]
        value = at.names[self.weighed]
        at.names[self.change] = change
        store = Verb("store", value, p=self.place(j), of=real)
        return (*found, Map("add", "sum", ("sum", value), "f32", "f32", real), store)


def _acc_name(at: Elements) -> str:
    at.names[acc()] = at.name(acc())
    return at.names[acc()]


def last(isa: Isa, real: Atom, *, lse: bool) -> Function:
    """`sums` become what a row of results is multiplied by: 0 for a query that saw nothing."""
    total, most = given(0, "f32"), given(1, "f32")
    inverse = select(total > 0.0, 1.0 / total, total * 0.0)
    said = most + vecmath.log(total)
    fused = Fused((), ((C, inverse), (C, said)))
    at = Elements(isa, real, fused)
    at.names = {total: "total", most: "largest"}
    here, columns = var("j"), var("columns")
    found: list[Stmt] = [Verb("load_c", "total", p=Ptr("sums", here), of=real.name)]
    found += at.compute([inverse], here, "")
    found.append(Verb("store", at.names[inverse], p=Ptr("sums", here), of=real.name))
    if lse:
        found.append(Verb("load_c", "largest", p=Ptr("mosts", here), of=real.name))
        found += at.compute([said], here, "")
        found.append(Verb("store", at.names[said], p=Ptr("mosts", here), of=real.name))
    loop = For("j", const(0), round_up(columns, real.n), const(real.n), tuple(found))
    params = (Param("columns"), Param("sums", "f32"), Param("mosts", "f32"))
    return Function("last", "inner", params, (loop,), "The inverse of each sum; most = the logarithm of the whole sum")


def rescale(real: Atom) -> Function:
    """o[row] *= change[row]."""
    i, j = var("i"), var("j")
    here = Ptr("o", i * var("across") + j)
    step = (
        Verb("load_c", "x", p=here, of=real.name),
        Map("mul", "x", ("x", "by"), "f32", "f32", real.name),
        Verb("store", "x", p=here, of=real.name),
    )
    row = (
        Verb("load_a", "one", p=Ptr("change", i), of=real.name),
        Map("splat", "by", ("one",), "f32", "f32", real.name),
        For("j", const(0), var("across"), const(real.n), step, 2),
    )
    params = (Param("rows"), Param("across"), Param("o", "f32"), Param("change", "f32", readonly=True))
    return Function(
        "rescale", "inner", params, (For("i", const(0), var("rows"), const(1), row),), "o[row] *= change[row]"
    )


def divided(isa: Isa, real: Atom, to: str) -> Function:
    """Rows of sums over the sums of weights, in the type of the result."""
    at = Elements(isa, real, Fused((), ((C, given(0, "f32")),)))
    value = given(0, "f32")
    at.names = {value: "x"}
    i, j, whole = var("i"), var("j"), var("dv") - var("dv") % real.n

    def step(j: Index, few: str) -> tuple[Stmt, ...]:
        load = Verb("load_c", "x", p=Ptr("o", i * var("across") + j), of=real.name)
        scale = Map("mul", "x", ("x", "by"), "f32", "f32", real.name)
        return (load, scale, *at.write(value, to, Ptr("to", i * var("to_m")), j, few, const(1)))

    row: list[Stmt] = [
        Verb("load_a", "one", p=Ptr("by_row", i), of=real.name),
        Map("splat", "by", ("one",), "f32", "f32", real.name),
        For("j", const(0), whole, const(real.n), step(j, "")),
    ]
    if real.n > 1:
        count = (Let("j", whole), Let("left", var("dv") - whole), *at.few(var("dv") - whole))
        row.append(If(whole.lt(var("dv")), (*count, *step(var("j"), "left"))))
    params = (
        Param("rows"), Param("dv"), Param("o", "f32", readonly=True), Param("across"),
        Param("by_row", "f32", readonly=True), Param("to", to), Param("to_m"),
    )  # fmt: skip
    scratch = (Scratch(f"few_{to}", real.n, to),)
    body = (*scratch, For("i", const(0), var("rows"), const(1), tuple(row)))
    return Function("divided", "inner", params, body, "to[rows][dv] = o[rows][dv] over sums")
