"""Online softmax on a GPU: tile by tile, with scores in the registers of threads.

Owns `Softmax`, `FragmentSoftmax`, and the kernel that combines runs of keys. The rescaling of earlier sums after a tile
of keys follows from the expression of a weight, as on CPUs: `kernels.cpu.online_softmax`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.attention_program import LOWEST
from portmm.ir.fragment_index import Registers, coordinate, in_row, row_masks
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, LetPtr, Scratch
from portmm.ir.thread_nodes import Apply, Barrier, Exchange, Vector
from portmm.kernels.cpu.online_softmax import BEFORE, ENDED, KEPT, MOST, TOTAL, scaled
from portmm.kernels.gpu.attention_scores import Scores
from portmm.kernels.gpu.fragments import of
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.parameters import integers, longs, read
from portmm.spec.epilogue import acc
from portmm.spec.expr_functions import fma
from portmm.spec.vector_math import LOG2E
from portmm.util.locks import once

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.grid_kernel import Argument
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.gpu_attention import AttentionTiles, Tiling
    from portmm.schedule.gpu_mma_attention import MatrixTiling
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.fragment import Fragment
    from portmm.target.isa import Isa

LANES, WORD = 4, 4
PAIR = 2
"""Neighbouring columns of a lane in fragments."""
LARGER = "larger_f32"
"""Primitive: the larger of two numbers, the other one of a NaN."""
THREADS = 64
"""Number of threads of a block that combines runs."""


@dataclass(frozen=True)
class Softmax(Scores):
    """Statements for the scores of a tile in plain threads, whose weights are stored to shared memory.

    A thread has the scores of some rows and columns; the maximum of a row is computed from those that its threads
    store in shared memory, by each of them in the same order. Sums of weights stay apart, one for each thread of a
    row, until the last tile.
    """

    t: Tiling

    # -- parts of the kernel -------------------------------------------------

    def statements(self) -> tuple[Stmt, ...]:
        """Statements that turn the scores of a tile into weights, and rescale earlier sums."""
        t, i, j = self.t, var("i"), var("j")
        row, key = var("down") + i * t.down, var("key") + var("across") + j * t.across
        scores = self.scored(row, key, Ptr("s", i * t.columns + j), self.part(var("across")), (("j", t.columns),))
        return (scores, Barrier(), self.weights())

    def part(self, which: Index) -> Ptr:
        """Address of the partial result of one of the threads of row i."""
        return Ptr("part", (var("down") + var("i") * self.t.down) * self.t.across + which)

    def over(self, op: str, into: str) -> Stmt:
        """Reduction of the partial results of all threads of row i, in order."""
        c, e = var("c"), var("e")
        one = (self.get("one", Ptr("words", e)), self.map(op, into, "one", into))
        load = Vector(Ptr("words"), self.part(c * LANES), LANES * WORD)
        return unrolled("c", self.t.across // LANES, load, unrolled("e", LANES, *one))

    def weights(self) -> Stmt:
        """Loop over rows that stores weights to shared memory, and rescales earlier sums to the new maximum."""
        t, at, i, j = self.t, self.at, var("i"), var("j")
        weighed, change = self.weighed
        at.names = {MOST: "largest", BEFORE: "before"}
        first = [self.get(x, Ptr("most", i)) for x in ("before", "largest")]
        first += [self.over("greater", "largest"), self.keep("largest", Ptr("most", i))]
        first += [*at.compute([change], const(0), ""), self.get("sum", Ptr("sums", i))]
        by = at.names[change]
        at.names = {MOST: "largest", KEPT: at.name(KEPT)}
        one = [self.get(at.names[KEPT], Ptr("s", i * t.columns + j)), *at.compute([weighed], const(0), "")]
        to = Ptr("weights", (var("down") + i * t.down) * t.p_pitch + var("across") + j * t.across)
        one += [self.keep(at.names[weighed], to), self.map("add", "sum", "sum", at.names[weighed])]
        here = Ptr("o_sums", i * t.sums + var("c"))
        return unrolled(
            "i", t.rows, *first,
            self.map("mul", "sum", "sum", by), unrolled("j", t.columns, *one), self.keep("sum", Ptr("sums", i)),
            unrolled("c", t.sums, *scaled(here, self.real, by)),
        )  # fmt: skip

    def ends(self) -> tuple[Stmt, ...]:
        """Sum of row i, and its results; one thread stores the row's numbers."""
        first = (self.map("literal", "sum", 0.0), self.over("add", "sum"), self.get("largest", Ptr("most", var("i"))))
        return self.row_results(first, var("across").eq(0))

    def totals(self) -> tuple[Stmt, ...]:
        """Stores of the sums of weights to shared memory."""
        own = (self.get("sum", Ptr("sums", var("i"))), self.keep("sum", self.part(var("across"))))
        return (unrolled("i", self.t.rows, *own), Barrier())


@dataclass(frozen=True)
class FragmentSoftmax(Scores):
    """Statements for the scores of a tile in fragments: those of a row are in the registers of four lanes.

    Of every eight keys a lane has two of row l / 4, for each eight rows of a warp. So the largest score of a row, and
    the sum of its weights, are computed within a lane and by two shuffles, without shared memory. Scores are
    multiplied by log2(e) with the number that scales them, and weights are powers of two, for which devices have an
    instruction.
    """

    t: MatrixTiling

    @property
    def sums(self) -> Fragment:
        """Scores, or sums, of an atom in the registers of lanes."""
        return of(self.atom.acc_fragment)

    @once
    def score(self) -> Expr:
        """Expression of a score times log2(e)."""
        score = self.form.score.results[0][1]
        # Rounded here: fused with a later difference, that of the maximum from itself would not be 0.
        if score.op == "mul" and score.args[1].op in ("number", "const"):
            return fma(score.args[0], score.args[1] * LOG2E, 0.0)
        return fma(score, LOG2E, 0.0)

    def spot(self, key: Index, e: Index) -> Ptr:
        """Address of the score of row i and the e-th of a lane's two of every eight keys."""
        i = var("i")
        return Ptr("s", ((i // 2 * self.t.strips + key) * 2 + i % 2) * PAIR + e)

    @once
    def factor(self) -> Expr | None:
        """Number by which products are scaled to scores times log2(e), if that is all a score is; else None."""
        score = self.form.score.results[0][1]
        plain = score.op == "mul" and score.args[0] is acc() and score.args[1].op in ("number", "const")
        return score.args[1] * LOG2E if plain else None

    @property
    def constants(self) -> tuple[Expr, ...]:
        """The factor, and whether it is positive."""
        by = self.factor
        return () if by is None or by.op == "const" else (by, by > 0.0)

    def statements(self, *, later: bool = False) -> tuple[Stmt, ...]:
        """Statements that turn the scores of a tile into weights, and rescale earlier sums.

        Where no key is masked and the factor is positive, the largest product has the largest score: products are
        multiplied as the maximum is subtracted, with one rounding, and `scale` is the factor, otherwise 1.

        Args:
            later: sums are left as they are: `rescaled` does it.
        """
        j, e = var("j"), var("e")
        key, columns = var("first_key") + j * 8 + e, (("j", self.t.strips), ("e", PAIR))
        scored = self.scored(self.row(), key, self.spot(j, e), Ptr("bigs", var("i")), columns)
        by = self.factor
        if by is not None and (by.op != "const" or by.args[0] > 0):
            scored = self.unmasked(scored, by)
        one = (Scratch("scale", 1, "f32"), self.map("literal", "by", 1.0), self.keep("by", Ptr("scale")))
        return (*one, scored, self.weights(later=later))

    def unmasked(self, scored: Stmt, by: Expr) -> Stmt:
        """Maxima of products, times a factor, where no key is masked and the factor is positive; else `scored`."""
        i, j, e, pairs = var("i"), var("j"), var("e"), Ptr("pairs", var("e"))
        factor: tuple[Stmt, ...]
        if by.op == "const":
            here, factor = self.edge.eq(0), (self.map("literal", "by", by.args[0]), self.keep("by", Ptr("scale")))
        else:
            names = self.at.names
            here, factor = self.edge.eq(0) * var(names[self.constants[1]]), (self.keep(names[by], Ptr("scale")),)
        rows = unrolled(
            "i", self.t.rows,
            self.map("literal", "big", LOWEST), unrolled("e", PAIR, self.keep("big", pairs)),
            unrolled("j", self.t.strips, unrolled("e", PAIR, Apply(pairs, LARGER, (pairs, self.spot(j, e))))),
            Apply(Ptr("pairs"), LARGER, (Ptr("pairs"), Ptr("pairs", const(1)))),
            self.get("big", Ptr("pairs")), self.get("by", Ptr("scale")),
            self.map("mul", "big", "big", "by"), self.keep("big", Ptr("bigs", i)),
        )  # fmt: skip
        return If(here, (*factor, Scratch("pairs", PAIR, "f32"), rows), (scored,))

    def row(self) -> Index:
        """Index of row i of a lane in the block's tile."""
        i = var("i")
        own = Registers(self.sums)
        return var("first_row") + (i // own.rows * self.sums.rows + coordinate(i % own.rows, own.row_weights))

    def together(self, op: str, name: str) -> tuple[Stmt, ...]:
        """Reduction over the lanes of a row, with the result in each of them."""
        masks = row_masks(self.sums)
        return tuple(x for bit in masks for x in (Exchange("theirs", name, bit), self.map(op, name, name, "theirs")))

    def rescaled(self) -> Stmt:
        """Loop over rows that rescales earlier sums by `factors`."""
        one = unrolled("c", self.t.columns, unrolled("e", PAIR, *scaled(self.sum(var("c"), var("e")), self.real)))
        return unrolled("i", self.t.rows, self.get("by", Ptr("factors", var("i"))), one)

    def weights(self, *, later: bool) -> Stmt:
        """Loop over rows that turns scores into weights, and rescales earlier sums to the new maximum, or keeps how."""
        t, i, j, e, c = self.t, var("i"), var("j"), var("e"), var("c")
        power = "exp2_f32"
        change = (
            self.get("big", Ptr("bigs", i)),
            self.get("before", Ptr("most", i)),
            *self.together("greater", "big"),
            self.map("greater", "largest", "before", "big"),
            self.keep("largest", Ptr("most", i)),
            self.map("sub", "x", "before", "largest"),
            self.keep("x", Ptr("one")),
            Apply(Ptr("one"), power, (Ptr("one"),)),
            self.get("by", Ptr("one")),
            self.get("sum", Ptr("sums", i)),
            self.map("mul", "sum", "sum", "by"),
            self.map("mul", "negated", "largest", -1.0),
            self.get("factor", Ptr("scale")),
        )
        here, spot = self.sum(c, e), self.spot(j, e)
        rescaled = unrolled("c", t.columns, unrolled("e", PAIR, *scaled(here, self.real)))
        one = (
            self.get("x", spot),
            self.map("fma", "x", "x", "factor", "negated"),
            self.keep("x", spot),
            Apply(spot, power, (spot,)),
            self.get("x", spot),
            self.map("add", "sum", "sum", "x"),
        )
        return unrolled(
            "i", t.rows, *change,
            self.keep("by", Ptr("factors", i)) if later else rescaled,
            unrolled("j", t.strips, unrolled("e", PAIR, *one)),
            self.keep("sum", Ptr("sums", i)),
        )  # fmt: skip

    def sum(self, strip: Index, e: Index) -> Ptr:
        """Address of the sum of row i and the e-th of a lane's two of every eight columns."""
        i = var("i")
        return Ptr("o_sums", ((i // 2 * self.t.columns + strip) * 2 + i % 2) * PAIR + e)

    def totals(self) -> Stmt:
        """Reduction of the sums of weights over the lanes of each row."""
        here = Ptr("sums", var("i"))
        return unrolled("i", self.t.rows, self.get("sum", here), *self.together("add", "sum"), self.keep("sum", here))

    def ends(self, there: Index) -> tuple[Stmt, ...]:
        """Results of row i from its sum; one lane stores the row's numbers, if the row is in bounds."""
        first = (
            self.get("sum", Ptr("sums", var("i"))),
            self.get("largest", Ptr("most", var("i"))),
            self.map("mul", "largest", "largest", math.log(2)),
        )
        return self.row_results(first, in_row(self.sums, var("lane")).eq(0) * there)


def joined(form: Form, t: AttentionTiles, isa: Isa, atom: Atom) -> tuple[tuple[Argument, ...], tuple[Stmt, ...]]:
    """Parameters and body of the kernel that combines runs: a block of threads for each query of each head.

    Each thread computes the maximum of all runs, and for its columns the sum over runs, by the rule
    for tiles: the runs in order, whatever the number of blocks.
    """
    s = Scores(form, t, isa, atom)
    at, r = s.at, var("r")
    inverse, logarithm = ENDED
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
    scale, names = at.names[inverse], dict(at.names)
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
    params = [*integers("m", "heads", "runs"), read("work", "f32"), *longs("all_rows", "mosts_at", "sums_at")]
    if form.lse:
        at.names = names
        kept = (*at.compute([logarithm], const(0), ""), s.keep(at.names[logarithm], Ptr("lse", row)))
        body.append(If(var("thread").eq(0), kept))
    return tuple(params), tuple(body)
