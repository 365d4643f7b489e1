"""Packing of a few panels of B together, by a task before the blocks of C or by a worker just before use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Call, For, Function, If, Let, LetPtr, Parallel, Param
from portmm.kernels.cpu import packing
from portmm.kernels.cpu.blocking import N
from portmm.kernels.cpu.int4_panels import dequantize
from portmm.kernels.cpu.view_packing import Viewed
from portmm.spec.dtype import CODES_KR
from portmm.spec.problem import family
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.operands import Operands
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

PREFETCH = 8
"""Prefetch distance in rows of B: a miss takes as long as copying some rows."""
TOGETHER = 8
"""Panels that are packed together, at most: a power of two apart, their lines are in one set of L1."""
Q, FIRST = var("q"), var("jg")
"""Panel, and first of the panels that are packed together."""


@dataclass(frozen=True, slots=True)
class Panels:
    """Panels of B that are packed together, from the same rows.

    Attributes:
        isa: the instruction set.
        atom: its instructions that move elements.
        nr: columns of a panel.
        near: panels that are packed together.
        layout: of B, as a word.
        storage: type of B's elements.
        to: type of a panel's elements, or units.
        prefetch: distance in rows.
        first: the first panel.
        last: end of the panels.
        columns: end of the columns.
        n: number of columns of B.
        depth: number of units of k.
        elements: number of elements of k.
        source: address in B of the first of the rows, at a column.
        place: address of the first of the units in a panel.
        step: stride in units between panels.
        sums: whether each panel is followed by the sums of its columns.
    """

    isa: Isa
    atom: Atom
    nr: int
    near: int
    layout: str
    storage: str
    to: str
    prefetch: int
    first: Index
    last: Index
    columns: Index
    n: Index
    depth: Index
    elements: Index
    source: Callable[[Index], Ptr]
    place: Callable[[Index], Ptr]
    step: Index
    sums: bool

    def packed(self) -> Stmt:
        """Packing of the panels: all together, or one by one where the last is partial; of many, some at a time."""
        if self.layout == "row" and self.near > TOGETHER:
            some = var("jp")
            last = minimum(self.last, some + TOGETHER)
            part = replace(self, near=TOGETHER, first=some, last=last, columns=minimum(self.columns, last * self.nr))
            return For("jp", self.first, self.last, const(TOGETHER), (part.packed(),))
        singly = For("q", self.first, self.last, const(1), (*self._one(const(0)), *self._summed()))
        if self.layout != "row" or self.near == 1:
            return singly
        return If(self.columns.lt((self.first + self.near) * self.nr), (singly,), self._together())

    def _one(self, unit: Index) -> tuple[Stmt, ...]:
        """Packing of one panel, from a unit on."""
        column = Q * self.nr
        filled = (self.elements, unit) if self.atom.k_pack > 1 else ()
        source = (minimum(self.n - column, self.nr), self.source(column), var("b_k"), var("b_n"))
        pack = packing.pack_b(self.isa, self.atom, self.nr, self.layout, self.storage, self.to)
        return (Call(pack, (self.depth, *filled, *source, self.place(Q))),)

    def _summed(self) -> tuple[Stmt, ...]:
        """Sums of the columns of a panel, behind it."""
        sums = packing.sum_columns(self.atom, self.nr, self.to) if self.sums else None
        return (Call(sums, (self.depth, self.place(Q))),) if sums else ()

    def _together(self) -> tuple[Stmt, ...]:
        """Packing of whole panels along the rows of B."""
        kr, end = self.atom.k_pack, self.first + self.near
        full = self.elements // kr if kr > 1 else self.depth
        rows = packing.pack_b_rows(self.atom, self.nr, self.near, self.prefetch, self.storage, self.to)
        source, to = self.source(self.first * self.nr), self.place(self.first)
        body: tuple[Stmt, ...] = (Call(rows, (full, source, var("b_k"), to, self.step)),)
        if kr > 1:  # the remainder of k after whole units
            rest = For("q", self.first, end, const(1), self._one(full))
            body += (If(full.lt(self.depth), (rest,)),)
        sums = self._summed()
        return (*body, For("q", self.first, end, const(1), sums)) if sums else body


def params_of_tasks(g: Operands) -> tuple[tuple[Param, ...], tuple[Index, ...]]:
    """Parameters of tasks, and their values: the item, and where all of B is packed the columns of a slab."""
    names = ("item", "n", "across") if g.s.b.once else ("item",)
    return tuple(map(Param, names)), tuple(map(var, names))


def pack_once(g: Operands) -> Stmt:
    """Packing of a slab of B by parallel tasks, each some rows of a few panels; items share those of the same B."""
    panels, cuts = ceil_div(N, g.s.nr), g.cuts
    body = (
        Let("jg", var("task") // cuts * g.near),
        Let("p_first", var("task") % cuts * MODEL.pack_rows),
        *pack_panels(g, panels),
    )
    params, args = params_of_tasks(g)
    task = Function("pack_share", "task", params, body, "Some rows of a few panels of B")
    fresh_b = const(0).lt(var("item").eq(0) + (1 - var("b_batch").eq(0)) + var("slab").lt(var("all")))
    return If(fresh_b, (Parallel(task, ceil_div(panels, g.near) * cuts, args),))


def pack_panels(g: Operands, end: Index) -> tuple[Stmt, ...]:
    """Packing of a few panels before `end`, at their position among all panels, or in a worker's scratch."""
    s, atom, near = g.s, g.move_atom, g.near
    last = minimum(end, FIRST + near)
    if s.b.once:
        row, step, base = var("p_first"), g.b_step, Ptr("work")
        depth = minimum(g.k - row, g.k if g.unshifts else MODEL.pack_rows)
    else:
        row, step, base, depth = g.pc, g.b_near, g.private(), var("kd")

    def place(q: Index) -> Ptr:
        if s.b.once:
            return Ptr("panels", row * s.nr + q * step)
        return Ptr("panels") if q == FIRST else Ptr("panels", (q - FIRST) * step)

    panels = LetPtr("panels", base, atom.right)
    if g.view_b:
        pack = Viewed("b", g.view_b.permute(1, 0), s.types[1], atom.right, s.nr, g.padding).pack(g.isa, atom)
        filled = (g.filled(row, depth),) if s.atom.kr > 1 else ()
        call = Call(
            pack, (depth, *filled, g.operand("b", const(0)), Q * s.nr + g.slab_first, row * s.atom.kr, place(Q))
        )
        sums = (Call(packing.sum_columns(atom, s.nr, atom.right), (depth, place(Q))),) if g.unshifts else ()
        return (panels, For("q", FIRST, last, const(1), (call, *sums)))
    if s.b.layout == "codes":
        kr = s.atom.kr
        words = (row * kr // CODES_KR, ceil_div((row + depth) * kr, CODES_KR))
        dequantized = dequantize(g.isa, atom, family(s.family))
        panel = g.operand("b", (Q + g.slab_first // s.nr) * var("b_n"))
        one = Call(dequantized, (*words, panel, place(Q)))
        return (panels, For("q", FIRST, last, const(1), (one,)))
    several = Panels(
        g.isa, atom, s.nr, near, s.b.layout, s.types[1], atom.right, PREFETCH, FIRST, last, minimum(end * s.nr, N), N,
        depth, g.filled(row, depth), lambda column: g.source(column, row), place, step, g.unshifts,
    )  # fmt: skip
    return (panels, several.packed())
