"""Packing of a few panels of B together, by a task before the blocks of C or by a worker just before use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Call, For, Function, If, Let, LetPtr, Parallel, Param
from portmm.kernels.cpu import packing
from portmm.kernels.cpu.blocking import N
from portmm.kernels.cpu.int4_panels import dequantize
from portmm.spec.dtype import CODES_KR
from portmm.spec.problem import family
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.operands import Operands

PREFETCH = 8
"""Prefetch distance in rows of B: a miss takes as long as copying some rows."""
Q, FIRST = var("q"), var("jg")
"""Panel, and first of the panels that are packed together."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Units of k that are packed, and where they are stored.

    Attributes:
        row: the first unit.
        depth: number of units.
        base: address of the panels.
        step: stride in units between panels.
        panel: address of the units in panel Q.
        first: address of the units in the first panel.
    """

    row: Index
    depth: Index
    base: Ptr
    step: Index
    panel: Ptr
    first: Ptr


def _place(g: Operands) -> _Place:
    if g.s.b.once:  # at their position among all panels
        row, step = var("p_first"), g.b_step
        depth = minimum(g.k - row, g.k if g.unshifts else MODEL.pack_rows)
        above = row * g.s.nr
        return _Place(
            row, depth, Ptr("work"), step, Ptr("panels", above + Q * step), Ptr("panels", above + FIRST * step)
        )
    step = g.b_near
    return _Place(g.pc, var("kd"), g.private(), step, Ptr("panels", (Q - FIRST) * step), Ptr("panels"))


def pack_once(g: Operands) -> Stmt:
    """Packing of all of B by parallel tasks, each some rows of a few panels; items with the same B share the panels."""
    panels, cuts = ceil_div(N, g.s.nr), g.cuts
    body = (
        Let("jg", var("task") // cuts * g.near),
        Let("p_first", var("task") % cuts * MODEL.pack_rows),
        *pack_panels(g, panels),
    )
    task = Function("pack_share", "task", (Param("item"),), body, "Some rows of a few panels of B")
    fresh_b = const(0).lt(var("item").eq(0) + (1 - var("b_batch").eq(0)))
    return If(fresh_b, (Parallel(task, ceil_div(panels, g.near) * cuts, (var("item"),)),))


def pack_panels(g: Operands, end: Index) -> tuple[Stmt, ...]:
    """Packing of a few panels before `end`: all together, or one by one where the last is partial."""
    s, near, at = g.s, g.near, _place(g)
    panels = LetPtr("panels", at.base, g.move_atom.right)
    single = (_dequantize(g, at),) if s.b.layout == "codes" else (*_one(g, at, const(0)), *_sums(g, at))
    singly = For("q", FIRST, minimum(end, FIRST + near), const(1), single)
    if s.b.layout != "row" or near == 1:
        return (panels, singly)
    partial = minimum(end * s.nr, N).lt((FIRST + near) * s.nr)
    return (panels, If(partial, (singly,), _together(g, at)))


def _dequantize(g: Operands, at: _Place) -> Stmt:
    """Conversion of int4 values of a packed B to elements of a panel."""
    kr = g.s.atom.kr
    words = (at.row * kr // CODES_KR, ceil_div((at.row + at.depth) * kr, CODES_KR))
    args = (*words, g.operand("b", Q * var("b_n")), at.panel)
    return Call(dequantize(g.isa, g.move_atom, family(g.s.family)), args)


def _one(g: Operands, at: _Place, unit: Index) -> tuple[Stmt, ...]:
    """Packing of one panel, from a unit on."""
    s, column = g.s, Q * g.s.nr
    filled = (g.filled(at.row, at.depth), unit) if s.atom.kr > 1 else ()
    source = (minimum(N - column, s.nr), g.source(column, at.row), var("b_k"), var("b_n"))
    pack = packing.pack_b(g.isa, g.move_atom, s.nr, s.b.layout, s.types[1], g.move_atom.right)
    return (Call(pack, (at.depth, *filled, *source, at.panel)),)


def _sums(g: Operands, at: _Place) -> tuple[Stmt, ...]:
    """Sums of the columns of a panel, behind it, where A is shifted."""
    if not g.unshifts:
        return ()
    return (Call(packing.sum_columns(g.move_atom, g.s.nr, g.move_atom.right), (at.depth, at.panel)),)


def _together(g: Operands, at: _Place) -> tuple[Stmt, ...]:
    """Packing of whole panels along the rows of B."""
    s, near, atom = g.s, g.near, g.move_atom
    full = g.filled(at.row, at.depth) // s.atom.kr if s.atom.kr > 1 else at.depth
    rows = packing.pack_b_rows(atom, s.nr, near, PREFETCH, s.types[1], atom.right)
    body: tuple[Stmt, ...] = (Call(rows, (full, g.source(FIRST * s.nr, at.row), var("b_k"), at.first, at.step)),)
    if s.atom.kr > 1:  # the remainder of k after whole units
        rest = For("q", FIRST, FIRST + near, const(1), _one(g, at, full))
        body += (If(full.lt(at.depth), (rest,)),)
    sums = _sums(g, at)
    return (*body, For("q", FIRST, FIRST + near, const(1), sums)) if sums else body
