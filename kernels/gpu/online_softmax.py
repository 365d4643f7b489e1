"""Online softmax on a GPU: tile by tile, with scores in the registers of threads.

The rescaling of earlier sums after a tile of keys follows from the expression of a weight, as on
CPUs: `kernels.cpu.online_softmax`. A thread has the scores of some rows and columns; the maximum of a row is computed
from those that its threads store in shared memory, by each of them in the same order. Sums of weights stay
apart, one for each thread of a row, until the last tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, LetPtr
from portmm.ir.thread_nodes import Barrier, Vector
from portmm.kernels.cpu.online_softmax import BEFORE, KEPT, LOWEST, MOST
from portmm.kernels.gpu.attention_scores import TOTAL, Scores
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.parameters import integers, longs, read

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import Argument
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.attention_geometry import Form
    from portmm.schedule.gpu_attention import AttentionTiles, Tiling
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

LANES, WORD = 4, 4


@dataclass(frozen=True)
class Softmax(Scores):
    """Statements for the scores of a tile, in shared memory."""

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
            unrolled("c", t.sums, *self.rescaled(here, by)),
        )  # fmt: skip

    def ends(self) -> tuple[Stmt, ...]:
        """Sum of row i, and its results; one thread stores the row's numbers."""
        first = (self.map("literal", "sum", 0.0), self.over("add", "sum"), self.get("largest", Ptr("most", var("i"))))
        return self.row_results(first, var("across").eq(0))

    def totals(self) -> tuple[Stmt, ...]:
        """Stores of the sums of weights to shared memory."""
        own = (self.get("sum", Ptr("sums", var("i"))), self.keep("sum", self.part(var("across"))))
        return (unrolled("i", self.t.rows, *own), Barrier())


def joined(form: Form, t: AttentionTiles, isa: Isa, atom: Atom) -> tuple[tuple[Argument, ...], tuple[Stmt, ...]]:
    """Parameters and body of the kernel that combines runs: a block of threads for each query of each head.

    Each thread computes the maximum of all runs, and for its columns the sum over runs, by the rule
    for tiles: the runs in order, whatever the number of blocks.
    """
    s = Scores(form, t, isa, atom)
    at, r = s.at, var("r")
    inverse, logarithm = s.ended
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


THREADS = 64
"""Number of threads of a block that combines runs."""
