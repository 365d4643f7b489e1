"""Flash decoding: attention of a few queries, with keys split into runs that are then combined.

    for each item of the batch, each head of keys, each run of keys   <- threads
      for each block of keys
        s[query][key] = Q . K^T                                       dot products, kernels/cpu/row_pairs.py
        s becomes weights, a query at a time; earlier sums are rescaled
        o[query][column] += weights . V                               micro-kernel
    for each item, each head of keys                                  <- threads
      the runs' sums become one

K and V are read once, for all heads of Q that share them. Vectors hold keys, as there are too few
queries to fill one. Runs of keys are combined by the rule for blocks (`online_softmax`): both sides are
multiplied by the weight of their own maximum relative to the maximum of both. The number of runs
follows from the sizes, so that results do not depend on threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, round_up, var
from portmm.ir.nodes import (
    Call,
    For,
    Function,
    If,
    Kernel,
    Let,
    LetPtr,
    Mac,
    Move,
    Parallel,
    Read,
    Verb,
)
from portmm.kernels.cpu import dot, row_pairs
from portmm.kernels.cpu.attention_geometry import FIELDS, AttentionMemory, D, M, N
from portmm.kernels.cpu.decoding_softmax import joined, weights
from portmm.kernels.cpu.elementwise import arguments
from portmm.kernels.cpu.microkernel import Shape, micro_kernel
from portmm.kernels.cpu.online_softmax import rescale
from portmm.schedule.cpu_attention import by_pairs

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

QUERIES = 4
"""Queries of a register tile of dot products with lanes along elements, which share each load of K or V."""
TALL = 8
"""Queries of a tall register tile of values, two vectors wide."""
AHEAD = 16
"""Rows of K and V that are prefetched ahead where a tile reads all of its rows once: 4 KiB of heads of 64 elements,
past which hardware does not prefetch."""
PAD = 64
"""Padding of a row of scores past its keys: a vector."""
ROWS = M * var(FIELDS["group"])
"""Number of queries that share keys."""


def build(form: Form, s: Schedule, isa: Isa, real: Atom) -> Kernel:
    """Kernel for few queries of a kind of attention, in lanes of `real`."""
    a = FlashDecoding(form, s, isa, real)
    items = var("batch") // var(FIELDS["group"])
    body = (Parallel(a.run(), items * a.runs), Parallel(a.join(), items))
    entry = Function("entry", "entry", (), body, "All items and heads of keys")
    name = f"portmm_decode_{form.dtype}_{real.name}"
    return Kernel(name, isa, real, entry, a.workspace(), operands=a.operands())


class FlashDecoding(AttentionMemory):
    """Loops of one kernel."""

    @property
    def runs(self) -> Index:
        """Number of runs of keys."""
        return ceil_div(N, var(FIELDS["run"]))

    @property
    def across(self) -> Index:
        """Number of columns of a row of sums."""
        return round_up(var(FIELDS["dv"]), self.real.n)

    @property
    def pairs(self) -> bool:
        """Whether scores are computed by vectors of pairs."""
        return by_pairs(self.isa, self.real, self.form.dtype)

    @property
    def height(self) -> int:
        """Queries of a tall tile: of scores by pairs, or of values alone; 0 without them."""
        if self.pairs:
            return self.real.n // 2
        return TALL if self.isa.registers >= 32 and self.real.n >= TALL else 0

    @property
    def padded(self) -> Index:
        """Number of queries that share keys, with those that fill tall tiles."""
        return round_up(ROWS, self.height) if self.pairs else ROWS

    @property
    def tall(self) -> Index:
        """Number of queries in tall tiles, of which by pairs the last may be partial, of more than `QUERIES`."""
        if not self.height:
            return const(0)
        whole, rest = ROWS // self.height * self.height, ROWS % self.height
        return whole + const(min(QUERIES, self.height // 2)).lt(rest) * self.height if self.pairs else whole

    @property
    def whole(self) -> Index:
        """Number of queries in tiles of more than one; by pairs, up to four behind tall ones are in one."""
        if self.pairs:
            return self.tall + const(1).lt(ROWS - self.tall) * QUERIES
        return maximum(self.tall, ROWS // QUERIES * QUERIES)

    @property
    def line(self) -> Index:
        """Number of elements of a vector by queries."""
        return round_up(ROWS, 64)

    @property
    def part(self) -> Index:
        """Number of elements of a run's results."""
        return self.line * 3 + round_up(self.padded * self.across, 64)

    @property
    def shared(self) -> Index:
        """Number of elements for all runs."""
        return var("batch") // var(FIELDS["group"]) * self.runs * self.part

    def sizes(self) -> dict[str, Index]:
        """Number of elements of each buffer of a worker's scratch, by name."""
        sizes = {"s": round_up(self.padded * (var(FIELDS["step"]) + PAD), 64)}
        if self.pairs:
            sizes |= {"pairs": round_up(self.padded * D, 64), "rest": round_up(D * QUERIES, 64)}
        return sizes

    def lets(self) -> tuple[Stmt, ...]:
        """Local names of the sizes."""
        return (
            *super().lets(),
            Let("few", var("heads") // var("group")),
            Let("rows", ROWS),
            Let("across", self.across),
            Let("tall", self.tall),
            Let("whole", self.whole),
        )

    def buffers(self, number: Index, more: str = "") -> tuple[Stmt, ...]:
        """Local names of the buffers of a run's results."""
        start = [Let(f"part{more}", number * self.part)]
        at: Index = var(f"part{more}")
        names = ("mosts", "sums", "changes", "o")
        return (*start, *(LetPtr(x + more, Ptr("work", at + self.line * i), "f32") for i, x in enumerate(names)))

    # -- a run of keys -------------------------------------------------------

    def run(self) -> Function:
        """Task for a run of keys and all queries that share them."""
        task, bounds = var("task"), self.form.bounds
        number, key = task % self.runs, var("run")
        end: Index = minimum(N, (number + 1) * key)
        body: list[Stmt] = [*self.lets(), *self.scratch(), *self.buffers(task)]
        body += [Let("item", task // self.runs // var("few")), Let("other", task // self.runs % var("few"))]
        body.append(self.offset())
        if self.form.lengths:
            body.append(Read("length", self.place("lengths", ("b", var("item")))))
            end = minimum(end, var("length"))
        start = number * key
        if bounds.window:
            start = maximum(start, var("offset") + 1 - var("window"))
        body += [Let("first", start), Let("end", maximum(end, var("first"))), *self.begin()]
        body += self.packs()
        body.append(For("key", var("first"), var("end"), var("step"), self.block()))
        return Function("run_of_keys", "task", (), tuple(body), "A run of keys, all queries that share them")

    def begin(self) -> tuple[Stmt, ...]:
        """Initial sums and maxima."""
        return self.nothing("mosts", var("rows"), var("rows") * var("across"))

    def packs(self) -> tuple[Stmt, ...]:
        """Packing of the queries of tall tiles in pairs, and copies of the last ones that fill no tile, with zeros."""
        if not self.pairs:
            return ()
        r, j, to, start = var("r"), var("j"), Ptr("rest", var("j")), var("tall") * D
        args = (D, minimum(var("rows") - r, self.height), self.query(r), D, Ptr("pairs", r * D))
        pack = Call(row_pairs.pack(self.real), args)
        rest, n = (var("rows") - var("tall")) * D, self.real.n
        source = self.query(const(0)) + start + j
        copies = (
            For("j", const(0), rest - rest % n, const(n), (Verb("load_b", "x", p=source), Verb("store", "x", p=to))),
            For("j", rest - rest % n, rest, const(1), (Move(to, source),)),
            For("j", rest, D * QUERIES, const(1), (Move(to, None),)),
        )
        return (
            If(const(1) - D % 2, (For("r", const(0), var("tall"), const(self.height), (pack,)),)),
            If(var("tall").lt(var("whole")), copies),
        )

    def query(self, row: Index) -> Ptr:
        """Address of a query of those that share keys."""
        return self.place("q", ("b", var("item")), ("h", var("other") * var("group"))) + row * D

    def block(self) -> tuple[Stmt, ...]:
        """Statements for one block of keys."""
        r, wide = var("r"), var("wide")
        head, query = var("other") * var("group") + r // M, r % M
        place = (var("item"), var("head"), var("key"), query, var("offset"), var("window"))
        here = (Ptr("s", r * wide), *(Ptr(x, r) for x in ("mosts", "sums", "changes")))
        more = arguments(self.fused, var("item"), query, var("key"))
        soft = Call(
            weights(self.isa, self.real, self.form.score, self.form.bounds), (var("keys"), *place, *here, *more)
        )
        change = Call(rescale(self.real), (var("rows"), var("across"), Ptr("o"), Ptr("changes")))
        return (
            Let("keys", minimum(var("end") - var("key"), var("step"))),
            Let("wide", var("step") + PAD),
            *self.scores_by_pairs(),
            *self.scores(QUERIES, var("tall") if self.pairs else const(0), var("whole"), 4),
            *self.scores(1, var("whole"), var("rows"), 8),
            For("r", const(0), var("rows"), const(1), (Let("head", head), soft)),
            If(var("first").lt(var("key")), (change,)),
            *self.values(),
        )

    def scores(self, rows: int, begin: Index, end: Index, columns: int, *, whole: bool = False) -> tuple[Stmt, ...]:
        """First product, s[query][key] = Q . K^T, in tiles of `rows` queries by `columns` keys; all `whole`."""
        r, c, storage = var("r"), var("c"), self.form.dtype
        most = var("keys") - var("keys") % columns
        q = self.query(r) if whole or rows == 1 or not self.pairs else Ptr("rest", (r - var("tall")) * D)
        k = self.place("k", ("b", var("item")), ("h", var("other")), ("m", var("key") + c))
        ahead = self.height and rows > 1
        masks = self.real.mask and self.isa.spelling(self.real, "load_mask", storage)
        atom = self.real if masks else replace(self.real, mask="")

        def call(many: int) -> tuple[Stmt, ...]:
            f = dot.micro_kernel(atom, rows, many, (storage, storage, "f32"), short=True, ahead=AHEAD if ahead else 0)
            to = Ptr("s", r * var("wide") + c)
            return (Call(f, (D, q, D, k, var(f"{self.at['k']}_m"), to, var("wide"))),)

        inner = (
            For("c", const(0), most, const(columns), call(columns)),
            For("c", most, var("keys"), const(1), call(1)),
        )
        return (For("r", begin, end, const(rows), inner),)

    def scores_by_pairs(self) -> tuple[Stmt, ...]:
        """First product for queries of tall tiles: keys behind the last whole tile are in one that ends with them."""
        if not self.pairs:
            return ()
        r, c, n, keys, height = var("r"), var("c"), self.real.n, var("keys"), self.height
        k = self.place("k", ("b", var("item")), ("h", var("other")), ("m", var("key") + c))
        two = var("tall") // (2 * height) * (2 * height) if self.isa.registers >= 32 else const(0)

        def tile(panels: int) -> Stmt:
            args = (D, Ptr("pairs", r * D), k, var(f"{self.at['k']}_m"))
            to = (Ptr("s", r * var("wide") + c), var("wide"))
            return Call(row_pairs.micro_kernel(self.real, AHEAD, panels), (*args, *to))

        tiles = (
            For("r", const(0), two, const(2 * height), (tile(2),)),
            For("r", two, var("tall"), const(height), (tile(1),)),
        )
        every = For("c", const(0), keys - keys % n, const(n), tiles)
        last = If(const(0).lt(keys % n), (Let("c", keys - n), *tiles))
        end = minimum(var("tall"), var("rows"))
        fours = end // QUERIES * QUERIES
        others = (*self.scores(QUERIES, const(0), fours, 4, whole=True), *self.scores(1, fours, end, 8))
        return (If(keys.lt(n) + D % 2, others, (every, last)),)

    def values(self) -> tuple[Stmt, ...]:
        """Second product, o[query][column] += weights . V."""
        two = 2 * self.real.n
        wide = two * 2 if self.isa.registers >= 32 else two
        tall = self.values_of(self.height, const(0), var("tall"), two) if self.height else ()
        rest = self.values_of(QUERIES, var("tall"), var("whole"), wide)
        return (*tall, *rest, *self.values_of(1, var("whole"), var("rows"), wide))

    def values_of(self, rows: int, begin: Index, end: Index, n: int) -> tuple[Stmt, ...]:
        """Second product for some queries, in register tiles of `rows` queries by `n` columns."""
        lanes, dv = self.real.n, var("dv")
        most, whole = dv // n * n, dv // lanes * lanes
        there = (rows, begin, end)
        loops: tuple[Stmt, ...] = (
            For("c", const(0), most, const(n), self.columns(there, n)),
            For("c", most, whole, const(lanes), self.columns(there, lanes)),
        )
        if lanes > 1:
            loops += (If(whole.lt(dv), (Let("c", whole), *self.last_columns(there))),)
        return (If(begin.lt(end), loops),)

    def columns(self, there: tuple[int, Index, Index], n: int, *, ragged: bool = False) -> tuple[Stmt, ...]:
        """Second product for some columns of V: rows of a tile, its first query, and the end of the last one."""
        i, c, (rows, begin, end) = var("i"), var("c"), there
        near = self.place("v", ("b", var("item")), ("h", var("other")), ("m", var("key"))) + c
        shape = Shape(rows, n, a_packed=False, b_packed=False, b=self.form.dtype, ragged=ragged, unroll=2)
        shape = replace(shape, prefetch=AHEAD if self.height and rows > 1 else 0)
        f = micro_kernel(self.real, shape)
        f = replace(f, name=f"values_{rows}x{n}{'_last' if ragged else ''}")
        args = (var("keys"), Ptr("s", i * var("wide")), var("wide"), const(1), near, var(f"{self.at['v']}_m"))
        to = (Ptr("o", i * var("across") + c), var("across"))
        call = Call(f, (*args, *to, minimum(var("dv") - c, n), var("first").lt(var("key"))))
        return (For("i", begin, end, const(rows), (call,)),)

    def last_columns(self, there: tuple[int, Index, Index]) -> tuple[Stmt, ...]:
        """Second product for the columns of V that do not fill a vector: masked, or one by one."""
        if self.real.mask and self.isa.spelling(self.real, "load_mask", self.form.dtype):
            return self.columns(there, self.real.n, ragged=True)
        i, j, p, (_, begin, end) = var("i"), var("j"), var("p"), there
        v = self.place("v", ("b", var("item")), ("h", var("other")), ("m", var("key") + p)) + j
        to = Ptr("o", i * var("across") + j)
        one = (
            If(var("first").eq(var("key")), (Move(to, None),)),
            For("p", const(0), var("keys"), const(1), (Mac(to, Ptr("s", i * var("wide") + p), v),)),
        )
        across = For("j", var("c"), var("dv"), const(1), one)
        return (For("i", begin, end, const(1), (across,)),)

    # -- all runs ------------------------------------------------------------

    def join(self) -> Function:
        """Task that combines the runs of an item and a head of keys into results."""
        task, i, head = var("task"), var("i"), var("other") * var("group")
        names = ("mosts", "sums", "changes", "o")
        args: tuple[Index | Ptr, ...] = (var("rows"), var("across"), *map(Ptr, names))
        args += tuple(Ptr(f"{x}_next") for x in names)
        runs = For(
            "r",
            const(1),
            self.runs,
            const(1),
            (*self.buffers(task * self.runs + var("r"), "_next"), Call(joined(self.isa, self.real), args)),
        )
        to = self.place("o", ("b", var("item")), ("h", head))
        ends = (var("rows"), var("dv"), Ptr("o"), var("across"), Ptr("sums"), to, var(f"{self.at['o']}_m"))
        body: list[Stmt] = [*self.lets(), Let("item", task // var("few")), Let("other", task % var("few"))]
        body += [*self.buffers(task * self.runs), runs]
        lse = self.place("lse", ("b", var("item")), ("h", head)) + i if self.form.lse else None
        body += self.ended("mosts", ends, lse)
        return Function("join", "task", (), tuple(body), "The runs of an item and a head of keys become results")
