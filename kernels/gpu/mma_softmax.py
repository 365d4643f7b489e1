"""Online softmax on fragments: the scores of a row are in the registers of four lanes.

Of every eight keys a lane has two of row l / 4, for each eight rows of a warp. So the largest score of a row, and the
sum of its weights, are computed within a lane and by two shuffles, without shared memory. Scores are
multiplied by log2(e) with the number that scales them, and weights are powers of two, for which devices have
an instruction. Rescaling of earlier sums: `kernels.cpu.online_softmax`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import Registers, coordinate, in_row, row_masks
from portmm.ir.index import Ptr, var
from portmm.ir.thread_nodes import Apply, Exchange
from portmm.kernels.cpu.online_softmax import LOG2E
from portmm.kernels.gpu.attention_scores import Scores
from portmm.kernels.gpu.fragments import of
from portmm.kernels.gpu.loops import unrolled
from portmm.spec.epilogue import parse
from portmm.spec.expr_functions import fma
from portmm.util.locks import once

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.gpu_mma_attention import MatrixTiling
    from portmm.spec.expr import Expr
    from portmm.target.fragment import Fragment

PAIR = 2


@dataclass(frozen=True)
class FragmentSoftmax(Scores):
    """Statements for the scores of a tile, in registers."""

    t: MatrixTiling

    @property
    def sums(self) -> Fragment:
        """Scores, or sums, of an atom in the registers of lanes."""
        return of(self.atom.acc_fragment)

    @once
    def score(self) -> Expr:
        """Expression of a score times log2(e)."""
        score = parse(self.form.score).results[0][1]
        # Rounded here: fused with a later difference, that of the maximum from itself would not be 0.
        if score.op == "mul" and score.args[1].op in ("number", "const"):
            return fma(score.args[0], score.args[1] * LOG2E, 0.0)
        return fma(score, LOG2E, 0.0)

    def spot(self, key: Index, e: Index) -> Ptr:
        """Address of the score of row i and the e-th of a lane's two of every eight keys."""
        i = var("i")
        return Ptr("s", ((i // 2 * self.t.strips + key) * 2 + i % 2) * PAIR + e)

    def statements(self) -> tuple[Stmt, ...]:
        """Statements that turn the scores of a tile into weights, and rescale earlier sums."""
        j, e = var("j"), var("e")
        key, columns = var("first_key") + j * 8 + e, (("j", self.t.strips), ("e", PAIR))
        return (self.scored(self.row(), key, self.spot(j, e), Ptr("bigs", var("i")), columns), self.weights())

    def row(self) -> Index:
        """Index of row i of a lane in the block's tile."""
        i = var("i")
        own = Registers(self.sums)
        return var("first_row") + (i // own.rows * self.sums.rows + coordinate(i % own.rows, own.row_weights))

    def together(self, op: str, name: str) -> tuple[Stmt, ...]:
        """Reduction over the lanes of a row, with the result in each of them."""
        masks = row_masks(self.sums)
        return tuple(x for bit in masks for x in (Exchange("theirs", name, bit), self.map(op, name, name, "theirs")))

    def weights(self) -> Stmt:
        """Loop over rows that turns scores into weights, and rescales earlier sums to the new maximum."""
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
        )
        here, spot = self.sum(c, e), self.spot(j, e)
        one = (
            self.get("x", spot),
            self.map("sub", "x", "x", "largest"),
            self.keep("x", spot),
            Apply(spot, power, (spot,)),
            self.get("x", spot),
            self.map("add", "sum", "sum", "x"),
        )
        return unrolled(
            "i", t.rows, *change,
            unrolled("c", t.columns, unrolled("e", PAIR, *self.rescaled(here, "by"))),
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
