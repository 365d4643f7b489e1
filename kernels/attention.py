"""Attention: two products with a softmax in between, block by block.

    for each item of the batch, each head, each block of queries   <- threads
      for each block of keys                                       (L2)
        s[key][query] = K . Q^T                                    micro-kernel
        s becomes weights; what was summed before is changed       kernels/online.py
        o[query][column] += weights^T . V                          micro-kernel

Scores never leave L2. They are computed the other way round, K on the left, which is read in
place as rows of what is broadcast, and a block of Q as panels on the right; so they are the
left operand of the second product as they lie, with V, by rows, on the right. Nothing is packed but
each block of queries, once, and V where it cannot be read in place: first, by all threads.

The keys that bounds exclude are left out by whole blocks; only blocks on an edge look at each key.
Tasks are blocks of queries, each summed in the order of keys: results do not depend on threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.kernels import packing
from portmm.kernels.elementwise import Elements, arguments
from portmm.kernels.microkernel import Shape, micro_kernel
from portmm.kernels.online import LOWEST, Bounds, last, tile

from portmm.dtype import BY_NAME, unit
from portmm.fused import C, Fused, given, parse
from portmm.ir import (
    Call,
    For,
    Function,
    If,
    Kernel,
    Let,
    LetPtr,
    Map,
    Move,
    Parallel,
    Param,
    Ptr,
    Read,
    Switch,
    Verb,
    ceil_div,
    const,
    maximum,
    minimum,
    round_up,
    var,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir import Index, Stmt
    from portmm.target import Atom, Isa

FIELDS = {"dv": "c_n", "heads": "a_m", "group": "a_k", "window": "b_k", "step": "b_n", "offset": "c_m"}
"""What this kernel calls fields of the argument block that it has no other use for: columns of V, heads, heads that
share keys, width of the window, keys of a block, and how far the first query is from the first key."""
QUERIES = 64
"""About how many queries a block has: for each key that is read, as many multiply-adds per element."""
IN_PLACE_ROWS = 8
"""Rows on the left that can be addressed without running out of integer registers: see `candidates`."""
M, N, D = var("m"), var("n"), var("k")


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of attention.

    Attributes:
        score: what a score is, in terms of its product: see `fused`.
        held: type of Q, K and V.
        to: type of the result.
        bounds: which keys are seen.
        lengths: each item has a number of keys of its own.
        lse: the logarithms of sums of exponentials are wanted.
        packs: V is packed first.
    """

    score: str
    held: str
    to: str
    bounds: Bounds
    lengths: bool = False
    lse: bool = False
    packs: bool = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of tiles.

    Attributes:
        nr: queries beside each other in the first product.
        mr: keys below each other in it.
        wide: columns of V beside each other in the second.
        high: queries below each other in it.
        queries: of a block.
    """

    nr: int
    mr: int
    wide: int
    high: int
    queries: int

    @classmethod
    def of(cls, isa: Isa, atom: Atom) -> Geometry:
        """Those whose loads per multiply-add are fewest, of blocks of about `QUERIES`."""

        def rows(v: int) -> int:
            return min(IN_PLACE_ROWS, (isa.registers - v - 1) // v)

        first = min((v for v in (1, 2, 3, 4) if rows(v) > 0), key=lambda v: (v + rows(v)) / (v * rows(v)))
        first = first if isa.registers >= 32 else min(first, 2)
        nr, high = first * atom.n, rows(2)
        step = next(x for x in range(nr, nr * high + 1, nr) if x % high == 0)
        return cls(nr, rows(first), 2 * atom.n, high, max(1, QUERIES // step) * step)


def keys_of(bytes_: int, geometry: Geometry, head: int) -> int:
    """Keys of a block: as many as fit half of L2 with their scores, K and V, in whole tiles of both products.

    More make the change of what was summed cheaper; no more than 512, as that is cheap by then.
    """
    per_key = 4 * (geometry.queries + 2 * head)
    step = geometry.mr * 2
    return max(1, min(512, bytes_ // 2 // per_key) // step) * step


def build(form: Form, isa: Isa, atom: Atom, real: Atom) -> Kernel:
    """The kernel for a kind of attention, whose products are those of `atom`, sums in lanes of `real`."""
    a = Attention(form, isa, atom, real)
    tasks = (Parallel(a.task(), var("batch") * ceil_div(M, a.g.queries)),)
    entry = Function("entry", "entry", (), (*a.packs(), *tasks), "All items, heads and queries")
    name = f"portmm_attention_{form.held}_{atom.name}"
    return Kernel(name, isa, atom, entry, a.workspace(), operands=a.operands())


class Attention:
    """The loops of one kernel."""

    def __init__(self, form: Form, isa: Isa, atom: Atom, real: Atom) -> None:
        self.form, self.isa, self.atom, self.real = form, isa, atom, real
        self.g = Geometry.of(isa, atom)
        self.fused = parse(form.score)
        names = ["q", "k", "v", "o", *(["lse"] if form.lse else []), *(["lengths"] if form.lengths else [])]
        first = len(self.fused.operands)
        self.at = {x: f"x{first + i}" for i, x in enumerate(names)}
        self.kr = atom.k_pack

    # -- memory --------------------------------------------------------------

    def operands(self) -> tuple[tuple[str, bool], ...]:
        """Types of the operands, and whether they are written."""
        form, mine = self.form, [(x.dtype, False) for x in self.fused.operands]
        mine += [(form.held, False)] * 3 + [(form.to, True)]
        return (*mine, *((("f32", True),) if form.lse else ()), *((("s32", False),) if form.lengths else ()))

    def place(self, name: str, *along: tuple[str, Index]) -> Ptr:
        """An element of an operand."""
        offset = const(0)
        for axis, at in along:
            offset += at * var(f"{self.at[name]}_{axis}")
        return Ptr(self.at[name], offset)

    @property
    def depth(self) -> Index:
        """Units of a head."""
        return ceil_div(D, self.kr)

    @property
    def across(self) -> Index:
        """Columns of a row of sums: whole panels."""
        return round_up(var(FIELDS["dv"]), self.g.wide)

    @property
    def panel(self) -> Index:
        """Units of a panel of V."""
        return ceil_div(N, self.kr) * self.g.wide

    @property
    def shared(self) -> Index:
        """Elements of all of V, packed."""
        if not self.form.packs:
            return const(0)
        items = var("batch") // var(FIELDS["group"])
        return items * (ceil_div(var(FIELDS["dv"]), self.g.wide) * self.panel)

    def sizes(self) -> dict[str, Index]:
        """Elements of each piece of a worker's scratch."""
        g, step = self.g, var(FIELDS["step"])
        line = const(-(-g.queries // 64) * 64)
        found = {"panels": self.depth * g.queries, "s": (step + 1) * g.queries, "o": self.across * g.queries}
        found |= {"most": line, "sums": line, "change": line}
        if self.kr > 1:
            found["units"] = ceil_div(step, self.kr) * g.queries
        return {name: round_up(x, 64) for name, x in found.items()}

    def workspace(self) -> Index:
        """Elements of scratch."""
        own = const(0)
        for x in self.sizes().values():
            own += x
        return round_up(self.shared, 64) + own * var("workers") + 64

    def scratch(self) -> tuple[Stmt, ...]:
        """Names for the pieces."""
        own = const(0)
        for x in self.sizes().values():
            own += x
        found: list[Stmt] = [Let("own", round_up(self.shared, 64) + var("worker") * own)]
        at = var("own")
        for name, x in self.sizes().items():
            dtype = self.atom.right if name == "panels" else self.atom.left if name == "units" else "f32"
            found.append(LetPtr(name, Ptr("work", at), dtype))
            at += x
        return tuple(found)

    # -- V in panels ---------------------------------------------------------

    def packs(self) -> tuple[Stmt, ...]:
        """Pack all of V."""
        if not self.form.packs:
            return ()
        g, panels = self.g, ceil_div(var(FIELDS["dv"]), self.g.wide)
        task, few = var("task"), var("heads") // var("group")
        pack = packing.pack_b(self.isa, self.atom, g.wide, "row", self.form.held, self.atom.right)
        column = task % panels * g.wide
        source = self.place("v", ("b", var("item")), ("h", var("head")), ("n", column))
        units = (N, const(0)) if self.kr > 1 else ()
        m, n = (var(f"{self.at['v']}_{x}") for x in "mn")
        args = (ceil_div(N, self.kr), *units, minimum(var(FIELDS["dv"]) - column, g.wide), source, m, n)
        body = (
            Let("heads", var(FIELDS["heads"])),
            Let("group", var(FIELDS["group"])),
            Let("item", task // panels // few),
            Let("head", task // panels % few),
            LetPtr("to", Ptr("work", task * self.panel), self.atom.right),
            Call(pack, (*args, Ptr("to"))),
        )
        share = Function("pack_v", "task", (), body, "A panel of V")
        return (Parallel(share, var("batch") // var(FIELDS["group"]) * panels),)

    # -- a block of queries --------------------------------------------------

    def task(self) -> Function:
        """One block of queries of a head."""
        g, task, blocks = self.g, var("task"), var("blocks")
        lets: list[Stmt] = [Let(name, var(field)) for name, field in FIELDS.items()]
        lets += [
            Let("blocks", ceil_div(M, g.queries)),
            Let("item", task // blocks // var("heads")),
            Let("head", task // blocks % var("heads")),
            Let("other", var("head") // var("group")),
            # Under causal bounds the last queries see most: first come those that take longest.
            Let("query", (blocks - 1 - task % blocks) * g.queries),
            Let("rows", minimum(M - var("query"), g.queries)),
            *self.reach(),
        ]
        body = (
            *lets,
            *self.scratch(),
            *self.queries(),
            *self.begin(),
            For("key", var("first"), var("end"), var("step"), self.block()),
            *self.finish(),
        )
        return Function("block", "task", (), body, "A block of queries of a head, all keys")

    def reach(self) -> tuple[Stmt, ...]:
        """The keys that some query of the block sees: from `first` to `end`."""
        bounds, at = self.form.bounds, var("query") + var("offset")
        found: list[Stmt] = []
        end: Index = N
        if self.form.lengths:
            found.append(Read("length", self.place("lengths", ("b", var("item")))))
            end = maximum(0, minimum(end, var("length")))
        if bounds.causal:
            end = minimum(end, at + var("rows"))
        elif bounds.window:
            end = minimum(end, at + var("rows") - 1 + var("window"))
        first = maximum(0, at + 1 - var("window")) // self.kr * self.kr if bounds.window else const(0)
        return (*found, Let("first", first), Let("end", maximum(var("first"), end)))

    def queries(self) -> tuple[Stmt, ...]:
        """Pack the block of queries."""
        g, c = self.g, var("c")
        pack = packing.pack_b(self.isa, self.atom, g.nr, "col", self.form.held, self.atom.right)
        units = (D, const(0)) if self.kr > 1 else ()
        here = self.place("q", ("b", var("item")), ("h", var("head")), ("m", var("query") + c * g.nr))
        columns = minimum(var("rows") - c * g.nr, g.nr)
        args = (self.depth, *units, columns, here, const(1), var(f"{self.at['q']}_m"))
        call = Call(pack, (*args, Ptr("panels", c * (self.depth * g.nr))))
        return (Let("count", ceil_div(var("rows"), g.nr)), For("c", const(0), var("count"), const(1), (call,)))

    def begin(self) -> tuple[Stmt, ...]:
        """Nothing has been summed; where there are no keys, that is the result."""
        g, real, j = self.g, self.real, var("j")
        clear = (
            Map("literal", "lowest", (LOWEST,), "f32", "f32", real.name),
            Map("literal", "none", (0.0,), "f32", "f32", real.name),
            For(
                "j",
                const(0),
                const(g.queries),
                const(real.n),
                (
                    Verb("store", "lowest", p=Ptr("most", j), of=real.name),
                    Verb("store", "none", p=Ptr("sums", j), of=real.name),
                ),
            ),
        )
        zero = For(
            "j",
            const(0),
            var("rows") * self.across,
            const(real.n),
            (Verb("store", "none", p=Ptr("o", j), of=real.name),),
        )
        return (*clear, If(var("first").eq(var("end")), (zero,)))

    def block(self) -> tuple[Stmt, ...]:
        """One block of keys."""
        bounds, plain = self.form.bounds, self.softmax(Bounds())
        soft: tuple[Stmt, ...] = (plain,)
        if bounds:
            at, key, far = var("query") + var("offset"), var("key"), var("key") + var("keys")
            edge = const(0)
            if bounds.causal:
                edge += (at + 1).lt(far)
            if bounds.window:
                edge += key.lt(at + var("rows") - var("window"))
                edge += const(0) if bounds.causal else (at + var("window")).lt(far)
            soft = (If(edge, (self.softmax(bounds),), (plain,)),)
        return (
            Let("keys", minimum(var("end") - var("key"), var("step"))),
            *self.scores(),
            *soft,
            If(var("first").lt(var("key")), (Call(self.rescale(), (var("rows"), self.across, Ptr("o"), Ptr("change"))),)),
            *self.units(),
            *self.values(),
        )

    def scores(self) -> tuple[Stmt, ...]:
        """s[key][query] = K . Q^T."""
        g, c, r, left = self.g, var("c"), var("r"), var("keys") % self.g.mr
        whole = var("keys") - left
        here = self.place("k", ("b", var("item")), ("h", var("other")), ("m", var("key") + r))

        def call(height: int) -> tuple[Stmt, ...]:
            shape = Shape(height, g.nr, a_packed=False, ragged=False, a=self.given, b=self.atom.right)
            shape = replace(shape, unroll=4 if height == g.mr else 1)
            f = replace(micro_kernel(self.atom, shape), name=f"scores_{height}", inline=True)
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
    def given(self) -> str:
        """What the micro-kernel of scores reads of K."""
        return unit(self.form.held, self.kr)

    def softmax(self, bounds: Bounds) -> Stmt:
        """Scores become weights."""
        f = tile(self.isa, self.real, self.form.score, bounds)
        place = (var("keys"), var("rows"), var("item"), var("head"), var("key"), var("query"))
        rest = (Ptr("s"), const(self.g.queries), Ptr("most"), Ptr("sums"), Ptr("change"))
        more = arguments(self.fused, var("item"), var("key"), var("query"))
        return Call(f, (*place, var("offset"), var("window"), *rest, *more))

    def rescale(self) -> Function:
        """o[row] *= change[row]."""
        real, i, j = self.real, var("i"), var("j")
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
        return Function("rescale", "inner", params, (For("i", const(0), var("rows"), const(1), row),), "o[row] *= change[row]")

    def units(self) -> tuple[Stmt, ...]:
        """Weights in units of two keys, the last filled up with zeros."""
        if self.kr == 1:
            return ()
        g, p, j, e = self.g, var("p"), var("j"), var("e")
        lines = self.atom
        weave = (
            Verb("load_rows", "v", p=Ptr("s", p * (g.queries * self.kr) + j), step=const(g.queries), to=lines.right, of=lines.name),
            Verb("store", "v", p=Ptr("units", p * g.queries + j), to=lines.right, of=lines.name),
        )
        fill = For("e", const(0), const(g.queries), const(1), (Move(Ptr("s", var("keys") * g.queries + e), None),))
        every = For("j", const(0), round_up(var("rows"), lines.n), const(lines.n), weave)
        return (
            If(var("keys") % self.kr, (fill,)),
            For("p", const(0), ceil_div(var("keys"), self.kr), const(1), (every,)),
        )

    def values(self) -> tuple[Stmt, ...]:
        """o[query][column] += weights^T . V."""
        g, i, c = self.g, var("i"), var("c")
        packed = self.form.packs
        shape = Shape(g.high, g.wide, a_packed=False, b_packed=packed, a=self.atom.left, b=self.held_v, unroll=2)
        shape = replace(shape, ragged=not packed)
        f = replace(micro_kernel(self.atom, shape), name="values", inline=True)
        left = Ptr("units" if self.kr > 1 else "s", i)
        if packed:
            few = var("heads") // var("group")
            panels = ceil_div(var("dv"), g.wide)
            item = (var("item") * few + var("other")) * panels
            at = (item + c) * self.panel + var("key") // self.kr * g.wide
            right: tuple[Index | Ptr, ...] = (Ptr("near"),)
            near: Stmt = LetPtr("near", Ptr("work", at), self.atom.right, readonly=True)
            columns: Index = const(g.wide)
        else:
            here = self.place("v", ("b", var("item")), ("h", var("other")), ("m", var("key")))
            near = LetPtr("near", here + c * g.wide, self.held_v, readonly=True)
            right = (Ptr("near"), var(f"{self.at['v']}_m"))
            columns = minimum(var("dv") - c * g.wide, g.wide)
        args = (ceil_div(var("keys"), self.kr), left, const(1), const(g.queries), *right)
        out = (Ptr("o", i * self.across + c * g.wide), self.across, columns, var("first").lt(var("key")))
        call = Call(f, (*args, *out))
        inner = For("i", const(0), var("rows"), const(g.high), (call,))
        return (For("c", const(0), ceil_div(var("dv"), g.wide), const(1), (near, inner)),)

    @property
    def held_v(self) -> str:
        """What the micro-kernel of values reads of V."""
        return self.atom.right if self.form.packs else self.form.held

    def finish(self) -> tuple[Stmt, ...]:
        """Results, and the logarithms of sums."""
        lse = self.form.lse
        found: list[Stmt] = [Call(last(self.isa, self.real, lse=lse), (var("rows"), Ptr("sums"), Ptr("most")))]
        to = self.place("o", ("b", var("item")), ("h", var("head")), ("m", var("query")))
        args = (var("rows"), var("dv"), Ptr("o"), self.across, Ptr("sums"), to, var(f"{self.at['o']}_m"))
        found.append(Call(self.divided(), args))
        if lse:
            i = var("i")
            here = self.place("lse", ("b", var("item")), ("h", var("head")), ("m", var("query") + i))
            found.append(For("i", const(0), var("rows"), const(1), (Move(here, Ptr("most", i)),)))
        return tuple(found)

    def divided(self) -> Function:
        """Rows of sums over the sums of weights, in the type of the result."""
        isa, real, to = self.isa, self.real, self.form.to
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
        from portmm.ir import Scratch

        scratch = (Scratch(f"few_{to}", real.n, to),)
        body = (*scratch, For("i", const(0), var("rows"), const(1), tuple(row)))
        return Function("divided", "inner", params, body, "to[rows][dv] = o[rows][dv] over sums")
