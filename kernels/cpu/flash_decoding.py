"""Flash decoding: attention of a few queries, with keys split into runs that are then combined.

    for each item of the batch, each head of keys, each run of keys   <- threads
      for each block of keys
        s[query][key] = Q . K^T                                       dot products
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
from portmm.ir.lane_nodes import Map, Total
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
    Param,
    Read,
    Scratch,
    Verb,
)
from portmm.kernels.cpu import dot
from portmm.kernels.cpu.attention_geometry import FIELDS, AttentionMemory, D, M, N
from portmm.kernels.cpu.elementwise import Elements, arguments, parameters, spread, vectors
from portmm.kernels.cpu.microkernel import Shape, micro_kernel
from portmm.kernels.cpu.online_softmax import BEFORE, KEPT, MOST, rescale, weight
from portmm.spec.epilogue import C, Fused, acc, index
from portmm.spec.expr_functions import select

if TYPE_CHECKING:
    from portmm.ir.attention_program import Bounds, Form
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

QUERIES = 4
"""Queries of a register tile, which share each load of K or V."""
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
    def line(self) -> Index:
        """Number of elements of a vector by queries."""
        return round_up(ROWS, 64)

    @property
    def part(self) -> Index:
        """Number of elements of a run's results."""
        return self.line * 3 + round_up(ROWS * self.across, 64)

    @property
    def shared(self) -> Index:
        """Number of elements for all runs."""
        return var("batch") // var(FIELDS["group"]) * self.runs * self.part

    def sizes(self) -> dict[str, Index]:
        """Number of elements of each buffer of a worker's scratch, by name."""
        return {"s": round_up(ROWS * (var(FIELDS["step"]) + PAD), 64)}

    def lets(self) -> tuple[Stmt, ...]:
        """Local names of the sizes."""
        return (
            *super().lets(),
            Let("few", var("heads") // var("group")),
            Let("rows", ROWS),
            Let("across", self.across),
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
        body.append(For("key", var("first"), var("end"), var("step"), self.block()))
        return Function("run_of_keys", "task", (), tuple(body), "A run of keys, all queries that share them")

    def begin(self) -> tuple[Stmt, ...]:
        """Initial sums and maxima."""
        return self.nothing("mosts", var("rows"), var("rows") * var("across"))

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
            Let("tall", var("rows") // QUERIES * QUERIES),
            *self.scores(QUERIES, const(0), var("tall"), 4),
            *self.scores(1, var("tall"), var("rows"), 8),
            For("r", const(0), var("rows"), const(1), (Let("head", head), soft)),
            If(var("first").lt(var("key")), (change,)),
            *self.values(),
        )

    def scores(self, rows: int, begin: Index, end: Index, columns: int) -> tuple[Stmt, ...]:
        """First product, s[query][key] = Q . K^T, in register tiles of `rows` queries by `columns` keys."""
        r, c, storage = var("r"), var("c"), self.form.dtype
        whole = var("keys") - var("keys") % columns
        q = self.place("q", ("b", var("item")), ("h", var("other") * var("group"))) + r * D
        k = self.place("k", ("b", var("item")), ("h", var("other")), ("m", var("key") + c))
        masks = self.real.mask and self.isa.spelling(self.real, "load_mask", storage)
        atom = self.real if masks else replace(self.real, mask="")

        def call(many: int) -> tuple[Stmt, ...]:
            f = dot.micro_kernel(atom, rows, many, (storage, storage, "f32"), short=True)
            to = Ptr("s", r * var("wide") + c)
            return (Call(f, (D, q, D, k, var(f"{self.at['k']}_m"), to, var("wide"))),)

        inner = (
            For("c", const(0), whole, const(columns), call(columns)),
            For("c", whole, var("keys"), const(1), call(1)),
        )
        return (For("r", begin, end, const(rows), inner),)

    def values(self) -> tuple[Stmt, ...]:
        """Second product, o[query][column] += weights . V."""
        lanes, dv = self.real.n, var("dv")
        n = lanes * (4 if self.isa.registers >= 32 else 2)
        most, whole = dv // n * n, dv // lanes * lanes
        loops = (
            For("c", const(0), most, const(n), self.columns(n)),
            For("c", most, whole, const(lanes), self.columns(lanes)),
        )
        if lanes == 1:
            return loops
        return (*loops, If(whole.lt(dv), (Let("c", whole), *self.last_columns())))

    def columns(self, n: int, *, ragged: bool = False) -> tuple[Stmt, ...]:
        """Second product for some columns of V, all queries."""
        i, c = var("i"), var("c")
        near = self.place("v", ("b", var("item")), ("h", var("other")), ("m", var("key"))) + c

        def call(rows: int) -> Stmt:
            shape = Shape(rows, n, a_packed=False, b_packed=False, b=self.form.dtype, ragged=ragged, unroll=2)
            f = micro_kernel(self.real, shape)
            f = replace(f, name=f"values_{rows}x{n}{'_last' if ragged else ''}")
            args = (var("keys"), Ptr("s", i * var("wide")), var("wide"), const(1), near, var(f"{self.at['v']}_m"))
            to = (Ptr("o", i * var("across") + c), var("across"))
            return Call(f, (*args, *to, minimum(var("dv") - c, n), var("first").lt(var("key"))))

        return (
            For("i", const(0), var("tall"), const(QUERIES), (call(QUERIES),)),
            For("i", var("tall"), var("rows"), const(1), (call(1),)),
        )

    def last_columns(self) -> tuple[Stmt, ...]:
        """Second product for the columns of V that do not fill a vector: masked, or one by one."""
        if self.real.mask and self.isa.spelling(self.real, "load_mask", self.form.dtype):
            return self.columns(self.real.n, ragged=True)
        i, j, p = var("i"), var("j"), var("p")
        v = self.place("v", ("b", var("item")), ("h", var("other")), ("m", var("key") + p)) + j
        to = Ptr("o", i * var("across") + j)
        one = (
            If(var("first").eq(var("key")), (Move(to, None),)),
            For("p", const(0), var("keys"), const(1), (Mac(to, Ptr("s", i * var("wide") + p), v),)),
        )
        across = For("j", var("c"), var("dv"), const(1), one)
        return (For("i", const(0), var("rows"), const(1), (across,)),)

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


def weights(isa: Isa, real: Atom, scores: Fused, bounds: Bounds) -> Function:
    """Function that turns s[keys], the scores of one query, into weights, and updates its maximum, sum and change."""
    ((_, score),) = scores.results
    score = select(bounds.seen(index("p"), index("n"), index("w")), score, float("-inf")) if bounds else score
    weighed, change = weight(KEPT, MOST), weight(BEFORE, MOST)
    at = Elements(
        isa, real, Fused(scores.operands, ((C, score), (C, weighed), (C, change))), const(0), var("query"), var("key"),
        further={"p": var("query") + var("offset"), "w": var("window")},
    )  # fmt: skip
    name, n, lanes = real.name, var("keys"), real.n
    fixed: tuple[Stmt, ...] = at.once([score], "bhmpw")
    row_names = dict(at.names)

    def largest(j: Index, few: str) -> tuple[Stmt, ...]:
        at.names = row_names | {acc(): at.name(acc())}
        stmts = [Verb("load_c", at.names[acc()], p=Ptr("s", j), of=name), *at.compute([score], j, few)]
        value, before = at.value(score)
        stmts += before
        if few:
            stmts += [
                Map("lanes", "place", (), "s32", "s32", name, const(0)),
                Map("whole", "count", (), "s32", "s32", name, var(few)),
                Map("lt", "there", ("place", "count"), "mask", "s32", name),
                Map("select", "kept", ("there", value, float("-inf")), "f32", "f32", name),
            ]
            value = "kept"
        store = Verb("store", value, p=Ptr("s", j), of=name)
        return (*stmts, store, Map("greater", "most", (value, "most"), "f32", "f32", name))

    def weigh(j: Index, few: str) -> tuple[Stmt, ...]:  # noqa: ARG001 - past the last key are scores of -inf
        at.names = {MOST: "largest", KEPT: at.name(KEPT)}
        stmts = [Verb("load_c", at.names[KEPT], p=Ptr("s", j), of=name), *at.compute([weighed], j, "")]
        value = at.names[weighed]
        store = Verb("store", value, p=Ptr("s", j), of=name)
        return (*stmts, store, Map("add", "sum", ("sum", value), "f32", "f32", name))

    body: list[Stmt] = [*at.scratch(), Scratch("lane", lanes, "f32"), Scratch("whole_sum", 1, "f32"), *fixed]
    body += [
        *spread(real, "before", Ptr("mosts")),
        *spread(real, "most", Ptr("mosts")),
        *vectors(at, const(0), n, largest),
    ]
    body += [Verb("store", "most", p=Ptr("lane"), of=name), Total("max", Ptr("mosts"), Ptr("lane"), lanes)]
    body += [
        *spread(real, "largest", Ptr("mosts")),
        Map("literal", "sum", (0.0,), "f32", "f32", name),
        *vectors(at, const(0), n, weigh),
    ]
    body += [Verb("store", "sum", p=Ptr("lane"), of=name), Total("add", Ptr("whole_sum"), Ptr("lane"), lanes)]
    at.names = {MOST: "largest", BEFORE: "before"}
    body += [*at.compute([change], const(0), ""), Verb("store", at.names[change], p=Ptr("lane"), of=name)]
    body += [
        Move(Ptr("changes"), Ptr("lane")),
        *spread(real, "total", Ptr("sums")),
        *spread(real, "fresh", Ptr("whole_sum")),
    ]
    body += [Map("fma", "total", ("total", at.names[change], "fresh"), "f32", "f32", name)]
    body += [Verb("store", "total", p=Ptr("lane"), of=name), Move(Ptr("sums"), Ptr("lane"))]
    params = [Param(x) for x in ("keys", "item", "head", "key", "query", "offset", "window")]
    params += [Param(x, "f32") for x in ("s", "mosts", "sums", "changes")]
    comment = "s[keys] = weights of the scores of one query, beside those of the blocks before"
    return Function("weights", "inner", (*params, *parameters(scores)), tuple(body), comment)


def joined(isa: Isa, real: Atom) -> Function:
    """Function that combines two runs of keys, in place of the first."""
    mine, other = weight(BEFORE, MOST), weight(KEPT, MOST)
    at = Elements(isa, real, Fused((), ((C, mine), (C, other))))
    name, j, i = real.name, var("j"), var("i")
    at.names = {MOST: "most", BEFORE: "before", KEPT: "next"}
    numbers: list[Stmt] = [Verb("load_c", "before", p=Ptr("mosts", j)), Verb("load_c", "next", p=Ptr("mosts_next", j))]
    numbers += [Map("greater", "most", ("next", "before"), "f32", "f32", name)]
    numbers += [*at.compute([mine, other], j, ""), Verb("load_c", "sum", p=Ptr("sums", j))]
    numbers += [Verb("load_c", "more", p=Ptr("sums_next", j))]
    numbers += [Map("mul", "sum", ("sum", at.names[mine]), "f32", "f32", name)]
    numbers += [Map("fma", "sum", ("more", at.names[other], "sum"), "f32", "f32", name)]
    kept = (("most", "mosts"), ("sum", "sums"), (at.names[mine], "changes"), (at.names[other], "changes_next"))
    numbers += [Verb("store", x, p=Ptr(to, j)) for x, to in kept]
    here = i * var("across") + j
    row = [*spread(real, "a", Ptr("changes", i)), *spread(real, "b", Ptr("changes_next", i))]
    step = (
        Verb("load_c", "x", p=Ptr("o", here)),
        Verb("load_c", "y", p=Ptr("o_next", here)),
        Map("mul", "x", ("x", "a"), "f32", "f32", name),
        Map("fma", "x", ("y", "b", "x"), "f32", "f32", name),
        Verb("store", "x", p=Ptr("o", here)),
    )
    row.append(For("j", const(0), var("across"), const(real.n), step))
    body = (
        For("j", const(0), var("rows"), const(real.n), tuple(numbers)),
        For("i", const(0), var("rows"), const(1), tuple(row)),
    )
    names = ("mosts", "sums", "changes", "o")
    params = [Param("rows"), Param("across"), *(Param(x, "f32") for x in names)]
    params += [Param(f"{x}_next", "f32") for x in names]
    return Function("joined", "inner", tuple(params), body, "Two runs of keys together")
