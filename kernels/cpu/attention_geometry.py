"""The geometry of attention: tiles, blocks, scratch and addresses.

Everything here is a number, an index expression or a pointer over the fields of the
argument block and the variables of `attention`'s loops; nothing is a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.nodes import Index, Let, LetPtr, Ptr, Read, ceil_div, const, round_up, var
from portmm.spec.epilogue import parse

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.online_softmax import Bounds
    from portmm.target.target import Atom, Isa

FIELDS = {
    "dv": "c_n",
    "heads": "a_m",
    "group": "a_k",
    "window": "b_k",
    "step": "b_n",
    "offset": "c_m",
    "run": "c_batch",
}
"""What this kernel calls fields of the argument block that it has no other use for: columns of V, heads, heads that
share keys, width of the window, keys of a block, how far the first query is from the first key, and keys of a run."""
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
        starts: each item has a position of its own for its first query.
        lse: the logarithms of sums of exponentials are wanted.
        packs: V is packed first.
        few: there are few queries: see `decode`.
    """

    score: str
    held: str
    to: str
    bounds: Bounds
    lengths: bool = False
    starts: bool = False
    lse: bool = False
    packs: bool = False
    few: bool = False


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
        if atom.tiled:
            side = 2 * atom.m  # two by two tiles of sums: of keys, or columns of V, by queries, in strips of a tile
            return cls(atom.n, side, side, 2 * atom.n, QUERIES)

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


class Heads:
    """Operands and scratch of one kernel: addresses and sizes, no loops."""

    def __init__(self, form: Form, isa: Isa, atom: Atom, real: Atom) -> None:
        self.form, self.isa, self.atom, self.real = form, isa, atom, real
        self.g = Geometry.of(isa, atom)
        self.fused = parse(form.score)
        names = ["q", "k", "v", "o", *(x for x in ("lse", "lengths", "starts") if getattr(form, x))]
        first = len(self.fused.operands)
        self.at = {x: f"x{first + i}" for i, x in enumerate(names)}
        self.kr = atom.k_pack
        self.lines = isa.row_atom(atom) or atom
        """The vocabulary of what moves operands, a line at a time."""

    def operands(self) -> tuple[tuple[str, bool], ...]:
        """Types of the operands, and whether they are written."""
        form, mine = self.form, [(x.dtype, False) for x in self.fused.operands]
        mine += [(form.held, False)] * 3 + [(form.to, True)]
        return (*mine, *((("f32", True),) if form.lse else ()), *((("s32", False),) * (form.lengths + form.starts)))

    def lets(self) -> tuple[Stmt, ...]:
        """Names for fields."""
        return tuple(Let(name, var(field)) for name, field in FIELDS.items() if name != "offset")

    def offset(self) -> Stmt:
        """How far the first query of an item is from its first key."""
        if self.form.starts:
            return Read("offset", self.place("starts", ("b", var("item"))))
        return Let("offset", var(FIELDS["offset"]))

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
        """Units of a panel of V: whole steps."""
        return round_up(ceil_div(N, self.kr), self.atom.deep) * self.g.wide

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

    @property
    def types(self) -> dict[str, str]:
        """Types of the pieces that do not hold sums."""
        return {"panels": self.atom.right, "units": self.atom.left}

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
            found.append(LetPtr(name, Ptr("work", at), self.types.get(name, "f32")))
            at += x
        return tuple(found)
