"""The geometry of attention: tiles, blocks, scratch and addresses.

Numbers, index expressions and pointers over the fields of the argument block and the variables of loops, and the
initial and final statements of a query's numbers, which all kernels share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.attention_program import LOWEST
from portmm.ir.index import Index, Ptr, ceil_div, const, round_up, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import Call, For, If, Let, LetPtr, Move, Read, Verb
from portmm.kernels.cpu.online_softmax import divided, last
from portmm.schedule.cpu_attention import Geometry

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

FIELDS = {
    "dv": "c_n",
    "heads": "a_m",
    "group": "a_k",
    "window": "b_k",
    "step": "b_n",
    "offset": "c_m",
    "run": "c_batch",
}
"""Names for fields of the argument block that attention has no other use for: columns of V, heads, heads that share
keys, width of the window, keys of a block, distance of the first query from the first key, and keys of a run."""
M, N, D = var("m"), var("n"), var("k")


class AttentionMemory:
    """Addresses and sizes of the operands and scratch of one kernel."""

    def __init__(self, form: Form, s: Schedule, isa: Isa, atom: Atom) -> None:
        real = isa.vector("f32", atom.n)
        assert real is not None and s.v is not None  # noqa: S101, PT018 - else there is no schedule
        self.form, self.isa, self.atom, self.real = form, isa, atom, real
        self.g, self.packs_v = Geometry(s), s.v.packed
        self.fused = form.score
        names = ["q", "k", "v", "o", *(x for x in ("lse", "lengths", "starts") if getattr(form, x))]
        first = len(self.fused.operands)
        self.at = {x: f"x{first + i}" for i, x in enumerate(names)}
        self.kr = atom.k_pack
        self.move_atom = isa.row_atom(atom) or atom
        """The atom whose vectors move operands, a cache line at a time."""

    def operands(self) -> tuple[tuple[str, bool], ...]:
        """Types of the operands, each with whether it is written."""
        form, mine = self.form, [(x.dtype, False) for x in self.fused.operands]
        mine += [(form.dtype, False)] * 3 + [(form.to, True)]
        return (*mine, *((("f32", True),) if form.lse else ()), *((("s32", False),) * (form.lengths + form.starts)))

    def lets(self) -> tuple[Stmt, ...]:
        """Local names of fields."""
        return tuple(Let(name, var(field)) for name, field in FIELDS.items() if name != "offset")

    def offset(self) -> Stmt:
        """Distance of the first query of an item from its first key."""
        if self.form.starts:
            return Read("offset", self.place("starts", ("b", var("item"))))
        return Let("offset", var(FIELDS["offset"]))

    def place(self, name: str, *along: tuple[str, Index]) -> Ptr:
        """Address of an element of an operand."""
        offset = const(0)
        for axis, at in along:
            offset += at * var(f"{self.at[name]}_{axis}")
        return Ptr(self.at[name], offset)

    @property
    def depth(self) -> Index:
        """Number of units of a head."""
        return ceil_div(D, self.kr)

    @property
    def across(self) -> Index:
        """Number of columns of a row of sums: whole panels."""
        return round_up(var(FIELDS["dv"]), self.g.pv_n)

    @property
    def panel(self) -> Index:
        """Number of units of a panel of V: whole steps."""
        return round_up(ceil_div(N, self.kr), self.atom.deep) * self.g.pv_n

    @property
    def shared(self) -> Index:
        """Number of elements of all of V, packed."""
        if not self.packs_v:
            return const(0)
        items = var("batch") // var(FIELDS["group"])
        return items * (ceil_div(var(FIELDS["dv"]), self.g.pv_n) * self.panel)

    def sizes(self) -> dict[str, Index]:
        """Number of elements of each buffer of a worker's scratch, by name."""
        g, step = self.g, var(FIELDS["step"])
        line = const(-(-g.queries // 64) * 64)
        sizes = {"panels": self.depth * g.queries, "s": (step + 1) * g.queries, "o": self.across * g.queries}
        sizes |= {"most": line, "sums": line, "change": line}
        if self.kr > 1:
            sizes["units"] = ceil_div(step, self.kr) * g.queries
        return {name: round_up(x, 64) for name, x in sizes.items()}

    @property
    def types(self) -> dict[str, str]:
        """Types of the buffers that do not hold sums."""
        return {"panels": self.atom.right, "units": self.atom.left}

    def workspace(self) -> Index:
        """Number of elements of scratch."""
        own = const(0)
        for x in self.sizes().values():
            own += x
        return round_up(self.shared, 64) + own * var("workers") + 64

    def scratch(self) -> tuple[Stmt, ...]:
        """Local names of the buffers."""
        own = const(0)
        for x in self.sizes().values():
            own += x
        buffers: list[Stmt] = [Let("own", round_up(self.shared, 64) + var("worker") * own)]
        at = var("own")
        for name, x in self.sizes().items():
            buffers.append(LetPtr(name, Ptr("work", at), self.types.get(name, "f32")))
            at += x
        return tuple(buffers)

    # -- initial and final numbers of queries --------------------------------

    def nothing(self, most: str, queries: Index, size: Index) -> tuple[Stmt, ...]:
        """Sums and maxima of no keys; where there are none, the `size` elements of the result are zeros."""
        real, j = self.real, var("j")
        clear = tuple(Verb("store", x, p=Ptr(to, j), of=real.name) for x, to in (("lowest", most), ("none", "sums")))
        zero = For("j", const(0), size, const(real.n), (Verb("store", "none", p=Ptr("o", j), of=real.name),))
        return (
            Map("literal", "lowest", (LOWEST,), "f32", "f32", real.name),
            Map("literal", "none", (0.0,), "f32", "f32", real.name),
            For("j", const(0), queries, const(real.n), clear),
            If(var("first").eq(var("end")), (zero,)),
        )

    def ended(self, most: str, result: tuple[Index | Ptr, ...], lse: Ptr | None) -> tuple[Stmt, ...]:
        """Statements that store results, with the arguments of `divided`, and the logarithms of sums of rows i."""
        i, numbers = var("i"), (var("rows"), Ptr("sums"), Ptr(most))
        ends = Call(last(self.isa, self.real, lse=lse is not None), numbers)
        stored = () if lse is None else (For("i", const(0), var("rows"), const(1), (Move(lse, Ptr(most, i)),)),)
        return (ends, Call(divided(self.isa, self.real, self.form.to), result), *stored)
