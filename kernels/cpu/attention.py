"""Flash attention: two products with a softmax in between, block by block.

    for each item of the batch, each head, each block of queries   <- threads
      for each block of keys                                       (L2)
        s[key][query] = K . Q^T                                    micro-kernel
        s becomes weights; earlier sums are rescaled               kernels/cpu/online_softmax.py
        o[query][column] += weights^T . V                          micro-kernel

Scores never leave L2. They are computed transposed: K is the left operand, read in place as the
rows that are broadcast, and a block of Q, in panels, is the right one. The scores in this layout are
the left operand of the second product, with V, by rows, on the right. Nothing is packed but
each block of queries, once, and V where it cannot be read in place: first, by all threads.

Keys that bounds exclude are skipped by whole blocks; only blocks on an edge are masked per key.
Tasks are blocks of queries, each summed in the order of keys: results do not depend on threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.attention_program import Bounds
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, round_up, var
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, LetPtr, Move, Parallel, Read, Switch, Verb
from portmm.kernels.cpu import packing
from portmm.kernels.cpu.attention_geometry import FIELDS, AttentionMemory, D, M, N
from portmm.kernels.cpu.elementwise import arguments
from portmm.kernels.cpu.microkernel import Shape, micro_kernel
from portmm.kernels.cpu.online_softmax import rescale, tile
from portmm.spec.dtype import unit

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(form: Form, s: Schedule, isa: Isa, atom: Atom, loops: type[Attention] | None = None) -> Kernel:
    """Kernel for a kind of attention, with products by `atom` and sums in as many lanes."""
    a = (loops or Attention)(form, s, isa, atom)
    tasks = (Parallel(a.task(), var("batch") * ceil_div(M, a.g.queries)),)
    entry = Function("entry", "entry", (), (*a.packs(), *tasks), "All items, heads and queries")
    name = f"portmm_attention_{form.dtype}_{atom.name}"
    return Kernel(name, isa, atom, entry, a.workspace(), operands=a.operands())


class Attention(AttentionMemory):
    """Loops of one kernel, as statements."""

    __slots__ = ()

    # -- V in panels ---------------------------------------------------------

    def packs(self) -> tuple[Stmt, ...]:
        """Packing of all of V, as parallel tasks."""
        if not self.packs_v:
            return ()
        g, panels = self.g, ceil_div(var(FIELDS["dv"]), self.g.pv_n)
        task, few = var("task"), var("heads") // var("group")
        # Keys that an item does not have are not read, and their unit is padded with zeros.
        seen = N
        many: tuple[Stmt, ...] = ()
        if self.form.lengths:
            many = (Read("length", self.place("lengths", ("b", var("item")))),)
            seen = maximum(0, minimum(N, var("length")))
        body = (
            Let("heads", var(FIELDS["heads"])),
            Let("group", var(FIELDS["group"])),
            Let("item", task // panels // few),
            Let("head", task // panels % few),
            *many,
            Let("seen", seen),
            Let("column", task % panels * g.pv_n),
            Let("columns", minimum(var(FIELDS["dv"]) - var("column"), g.pv_n)),
            LetPtr("to", Ptr("work", task * self.panel), self.atom.right),
            self.pack_values(self.place("v", ("b", var("item")), ("h", var("head")), ("n", var("column")))),
        )
        share = Function("pack_v", "task", (), body, "A panel of V")
        return (Parallel(share, var("batch") // var(FIELDS["group"]) * panels),)

    def pack_values(self, source: Ptr) -> Stmt:
        """Packing of one panel of V."""
        pack = packing.pack_b(self.isa, self.atom, self.g.pv_n, "row", self.form.dtype, self.atom.right)
        units = (var("seen"), const(0)) if self.kr > 1 else ()
        strides = tuple(var(f"{self.at['v']}_{x}") for x in "mn")
        args = (ceil_div(var("seen"), self.kr), *units, var("columns"), source, *strides, Ptr("to"))
        return Call(replace(pack, name="pack_values"), args)

    # -- a block of queries --------------------------------------------------

    def task(self) -> Function:
        """Task for one block of queries of a head."""
        g, task, blocks = self.g, var("task"), var("blocks")
        lets: list[Stmt] = [
            *self.lets(),
            Let("blocks", ceil_div(M, g.queries)),
            Let("item", task // blocks // var("heads")),
            Let("head", task // blocks % var("heads")),
            self.offset(),
            Let("other", var("head") // var("group")),
            # Under causal bounds the last queries see most keys: the longest tasks are first.
            Let("query", (blocks - 1 - task % blocks) * g.queries),
            Let("rows", minimum(M - var("query"), g.queries)),
            *self.reach(),
        ]
        body = (
            *lets,
            *self.scratch(),
            *self.ready(),
            *self.queries(),
            *self.begin(),
            For("key", var("first"), var("end"), var("step"), self.block()),
            *self.done(),
            *self.finish(),
        )
        return Function("block", "task", (), body, "A block of queries of a head, all keys")

    def ready(self) -> tuple[Stmt, ...]:
        """Statements before the first product."""
        return ()

    def done(self) -> tuple[Stmt, ...]:
        """Statements after the last product."""
        return ()

    def reach(self) -> tuple[Stmt, ...]:
        """Range of keys that some query of the block sees: from `first` to `end`."""
        bounds, at = self.form.bounds, var("query") + var("offset")
        reads: list[Stmt] = []
        end: Index = N
        if self.form.lengths:
            reads.append(Read("length", self.place("lengths", ("b", var("item")))))
            end = maximum(0, minimum(end, var("length")))
        first, end = bounds.keys(end, (at, at + var("rows") - 1, at + var("rows")), var("window"))
        first = first // self.atom.k * self.atom.k
        return (*reads, Let("first", first), Let("end", maximum(var("first"), end)))

    def queries(self) -> tuple[Stmt, ...]:
        """Packing of the block of queries."""
        g, c = self.g, var("c")
        pack = packing.pack_b(self.isa, self.move_atom, g.nr, "col", self.form.dtype, self.move_atom.right)
        pack = replace(pack, name="pack_queries")
        units = (D, const(0)) if self.kr > 1 else ()
        here = self.place("q", ("b", var("item")), ("h", var("head")), ("m", var("query") + c * g.nr))
        columns = minimum(var("rows") - c * g.nr, g.nr)
        args = (self.depth, *units, columns, here, const(1), var(f"{self.at['q']}_m"))
        call = Call(pack, (*args, Ptr("panels", c * (self.depth * g.nr))))
        return (Let("count", ceil_div(var("rows"), g.nr)), For("c", const(0), var("count"), const(1), (call,)))

    def begin(self) -> tuple[Stmt, ...]:
        """Initial sums and maxima."""
        return self.nothing("most", const(self.g.queries), self.o_size)

    @property
    def summed(self) -> str:
        """Name of the buffer of sums, by rows of queries."""
        return "o"

    @property
    def o_size(self) -> Index:
        """Number of elements of `o`."""
        return var("rows") * self.across

    def block(self) -> tuple[Stmt, ...]:
        """Statements for one block of keys."""
        bounds, plain = self.form.bounds, self.softmax(Bounds())
        soft: tuple[Stmt, ...] = (plain,)
        if bounds:
            at, key, far = var("query") + var("offset"), var("key"), var("key") + var("keys")
            edge = bounds.edge(const(0), (key, far), (at, at + var("rows")), var("window"))
            soft = (If(edge, (self.softmax(bounds),), (plain,)),)
        return (
            Let("keys", minimum(var("end") - var("key"), var("step"))),
            *self.scores(),
            *soft,
            If(
                var("first").lt(var("key")),
                (self.rescaled(),),
            ),
            *self.units(),
            *self.values(),
        )

    def rescaled(self) -> Stmt:
        """Rescaling of earlier sums to a new maximum."""
        return Call(rescale(self.real), (var("rows"), self.across, Ptr("o"), Ptr("change")))

    def scores(self) -> tuple[Stmt, ...]:
        """First product: s[key][query] = K . Q^T."""
        g, c, r, left = self.g, var("c"), var("r"), var("keys") % self.g.mr
        whole = var("keys") - left
        here = self.place("k", ("b", var("item")), ("h", var("other")), ("m", var("key") + r))

        def call(height: int) -> tuple[Stmt, ...]:
            keys = unit(self.form.dtype, self.kr)
            shape = Shape(height, g.nr, a_packed=False, ragged=False, a=keys, b=self.atom.right)
            shape = replace(shape, unroll=4 if height == g.mr else 1)
            f = replace(micro_kernel(self.atom, shape), name=f"scores_{height}")
            a_m = var(f"{self.at['k']}_m") // self.kr
            args = (self.depth, here, a_m, const(1), Ptr("panels", c * (self.depth * g.nr)))
            return (Call(f, (*args, Ptr("s", r * g.queries + c * g.nr), const(g.queries), const(g.nr), const(0))),)

        full = For("r", const(0), whole, const(g.mr), call(g.mr))
        rest = tuple((h, call(h)) for h in range(1, g.mr))
        tail: tuple[Stmt, ...] = ()
        if rest:
            tail = (If(whole.lt(var("keys")), (Let("r", whole), *((Switch(left, rest),)))),)
        return (For("c", const(0), var("count"), const(1), (full, *tail)),)

    @property
    def rows_of_s(self) -> tuple[Index, Index]:
        """Strides of s: from one key to the next, and from one query to the next."""
        return const(self.g.queries), const(1)

    def softmax(self, bounds: Bounds) -> Stmt:
        """Call that turns scores into weights."""
        f = tile(self.isa, self.real, self.form.score, bounds)
        place = (var("keys"), var("rows"), var("item"), var("head"), var("key"), var("query"))
        rest = (Ptr("s"), *self.rows_of_s, Ptr("most"), Ptr("sums"), Ptr("change"))
        more = arguments(self.fused, var("item"), var("key"), var("query"))
        return Call(f, (*place, var("offset"), var("window"), *rest, *more))

    def units(self) -> tuple[Stmt, ...]:
        """Weights interleaved in units of two keys (VNNI), the last padded with zeros."""
        if self.kr == 1:
            return ()
        g, p, j, e, lines = self.g, var("p"), var("j"), var("e"), self.move_atom
        interleave = self.interleave(p * (g.queries * self.kr) + j, g.queries, p * g.queries + j)
        fill = For("e", const(0), const(g.queries), const(1), (Move(Ptr("s", var("keys") * g.queries + e), None),))
        every = For("j", const(0), round_up(var("rows"), lines.n), const(lines.n), interleave)
        return (
            If(var("keys") % self.kr, (fill,)),
            For("p", const(0), ceil_div(var("keys"), self.kr), const(1), (every,)),
        )

    def interleave(self, at: Index, row: int, to: Index) -> tuple[Stmt, ...]:
        """Interleaved vector of the weights at index `at` of s, whose rows are `row` apart."""
        right, of = self.move_atom.right, self.move_atom.name
        return (
            Verb("load_rows", "v", p=Ptr("s", at), step=const(row), to=right, of=of),
            Verb("store", "v", p=Ptr("units", to), to=right, of=of),
        )

    def values(self) -> tuple[Stmt, ...]:
        """Second product: o[query][column] += weights^T . V."""
        g, i, c = self.g, var("i"), var("c")
        packed = self.packs_v
        shape = Shape(g.pv_m, g.pv_n, a_packed=False, b_packed=packed, a=self.atom.left, b=self.v_dtype, unroll=2)
        shape = replace(shape, ragged=not packed)
        f = replace(micro_kernel(self.atom, shape), name="values")
        left = Ptr("units" if self.kr > 1 else "s", i)
        if packed:
            few = var("heads") // var("group")
            panels = ceil_div(var("dv"), g.pv_n)
            item = (var("item") * few + var("other")) * panels
            at = (item + c) * self.panel + var("key") // self.kr * g.pv_n
            right: tuple[Index | Ptr, ...] = (Ptr("near"),)
            near: Stmt = LetPtr("near", Ptr("work", at), self.atom.right, readonly=True)
            columns: Index = const(g.pv_n)
        else:
            here = self.place("v", ("b", var("item")), ("h", var("other")), ("m", var("key")))
            near = LetPtr("near", here + c * g.pv_n, self.v_dtype, readonly=True)
            right = (Ptr("near"), var(f"{self.at['v']}_m"))
            columns = minimum(var("dv") - c * g.pv_n, g.pv_n)
        args = (ceil_div(var("keys"), self.kr), left, const(1), const(g.queries), *right)
        out = (Ptr("o", i * self.across + c * g.pv_n), self.across, columns, var("first").lt(var("key")))

        def rows(f: Function) -> tuple[Stmt, ...]:
            return (For("i", const(0), var("rows"), const(g.pv_m), (Call(f, (*args, *out)),)),)

        inner, one = rows(f), self.atom.n
        if not packed and self.kr == 1 and one < g.pv_n:
            # Of the last columns, no more than a vector of which there are, as of heads of 40 or 80 elements.
            narrow = replace(micro_kernel(self.atom, replace(shape, nr=one)), name="values_of_a_vector")
            inner = (If(columns.lt(one + 1), rows(narrow), inner),)
        return (For("c", const(0), ceil_div(var("dv"), g.pv_n), const(1), (near, *inner)),)

    @property
    def v_dtype(self) -> str:
        """Type of the elements of V that the micro-kernel of values reads."""
        return self.atom.right if self.packs_v else self.form.dtype

    def finish(self) -> tuple[Stmt, ...]:
        """Statements that store results, and the logarithms of sums."""
        to = self.place("o", ("b", var("item")), ("h", var("head")), ("m", var("query")))
        args = (var("rows"), var("dv"), Ptr(self.summed), self.across, Ptr("sums"), to, var(f"{self.at['o']}_m"))
        row = ("m", var("query") + var("i"))
        lse = self.place("lse", ("b", var("item")), ("h", var("head")), row) if self.form.lse else None
        return self.ended("most", args, lse)
