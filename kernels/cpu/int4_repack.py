"""Repacking of int4 weights into words, before all products: see `int4_panels` for the panels.

B holds int4 values [k][n], a byte each, by rows. Words of eight values of one column are packed
from eight rows at once, by the atom's own loads; strips of rows and groups of
panels are distributed over threads as by `prepack`. A unit that rows or columns do not fill is
padded with zeros in scratch first. Scales, and offsets if there are any, which are the
operands x0 and x1, are copied unchanged, as words; those of 16 bits are padded to whole panels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, LetPtr, Move, Param, Scratch, Verb
from portmm.kernels.cpu.prepack import entry_of
from portmm.spec.dtype import CODES_KR
from portmm.spec.kernel_name import KernelName
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.spec.problem import Family
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(isa: Isa, atom: Atom, kept: Family) -> Kernel:
    """Kernel that repacks an int4 weight: C[panel] = scales, offsets and words of a packed layout."""
    n, task, nr = var("n"), var("task"), kept.nr
    near, strip = max(1, MODEL.run_bytes // nr), MODEL.pack_rows // CODES_KR
    units, groups = ceil_div(var("k"), CODES_KR), ceil_div(ceil_div(n, nr), near)
    body: tuple[Stmt, ...] = (
        Let("column", task % groups * (near * nr)),
        Let("columns", minimum(n - var("column"), near * nr)),
        Let("step", kept.panel(var("k"))),
        LetPtr("panels", Ptr("c", task % groups * near * var("step")), "s32"),
        Let("first", task // groups * strip),
        For("u", var("first"), minimum(var("first") + strip, units), const(1), _unit(atom, kept)),
    )
    one = Function("share_of_codes", "task", (), body, "Some units of a few panels")
    name = KernelName("fold", "s32", "u4", "u4", 1, nr, CODES_KR, isa.name)
    types = (("b", "u4"), ("c", "s32"))
    entry = entry_of(one, ceil_div(units, strip) * groups, "s32")
    return Kernel(str(name), isa, atom, entry, const(64), types=types, operands=(("s32", False),) * kept.heads)


def _unit(atom: Atom, kept: Family) -> tuple[Stmt, ...]:
    """Statements for unit u of some panels, and for the scales and offsets of the group that it begins, if any."""
    n, u, q, nr, columns, step = var("n"), var("u"), var("q"), kept.nr, var("columns"), var("step")
    long = kept.group // CODES_KR
    group, within = (u // long, u % long) if long else (const(0), u)
    at = Ptr("panels", (u + kept.heads * group) * nr - group * kept.saved)
    wide = kept.head_words // kept.heads
    # Scales of 16 bits are in rows of whole panels.
    row, across, column = n, columns, var("column")
    if kept.half:
        row, across, column = ceil_div(n, nr) * wide, ceil_div(columns, nr) * wide, column // nr * wide
    heads = tuple(
        Call(_heads(atom, wide), (across, Ptr(x, group * row + column), at + i * wide, step))
        for i, x in enumerate(("x0", "x1")[: kept.heads])
    )
    edge = (var("rows"), minimum(columns - q * nr, nr), Ptr("codes", q * nr), var("b_k"), Ptr("to", q * step))
    return (
        If(within.eq(0), heads),
        LetPtr("codes", Ptr("b", u * (var("b_k") * CODES_KR) + var("column")), "u4", readonly=True),
        LetPtr("to", at + kept.head_words, "s32"),
        Let("rows", minimum(var("k") - u * CODES_KR, CODES_KR)),
        Let("whole", var("rows").eq(CODES_KR) * (columns // nr)),
        Call(_words(atom, nr), (var("whole"), Ptr("codes"), var("b_k"), Ptr("to"), step)),
        For("q", var("whole"), ceil_div(columns, nr), const(1), (Call(_edge(atom, nr), edge),)),
    )


def _words(atom: Atom, nr: int) -> Function:
    """Function that packs a unit of eight whole rows in each of some whole panels."""
    q = var("q")
    body: list[Stmt] = []
    for v in range(0, nr, atom.n):
        body.append(Verb("load_rows", f"word{v}", p=Ptr("b", q * nr + v), step=var("b_k"), to="s32"))
        body.append(Verb("store", f"word{v}", p=Ptr("to", q * var("panel_step") + v)))
    params = (Param("panels"), Param("b", "u4", readonly=True), Param("b_k"), Param("to", "s32"), Param("panel_step"))
    loop = For("q", const(0), var("panels"), const(1), tuple(body))
    return Function("words", "inner", params, (loop,), f"to[panels][{nr}] = words of codes[8][panels * {nr}]")


def _edge(atom: Atom, nr: int) -> Function:
    """Function that packs a unit of one panel that rows or columns do not fill, padded with zeros."""
    e, i, j = var("e"), var("i"), var("j")
    clear = For("i", const(0), const(CODES_KR * nr), const(1), (Move(Ptr("tile", i), None),))
    move = Move(Ptr("tile", e * nr + j), Ptr("b", e * var("b_k") + j))
    fill = For("e", const(0), var("rows"), const(1), (For("j", const(0), var("columns"), const(1), (move,)),))
    source = (Ptr("tile"), const(nr), Ptr("to"), const(nr))
    body: tuple[Stmt, ...] = (
        Scratch("tile", CODES_KR * nr, "u4"),
        clear,
        fill,
        Call(_words(atom, nr), (const(1), *source)),
    )
    params = (Param("rows"), Param("columns"), Param("b", "u4", readonly=True), Param("b_k"), Param("to", "s32"))
    return Function("edge", "inner", params, body, f"to[{nr}] = words of codes[rows][columns], padded with zeros")


def _heads(atom: Atom, nr: int) -> Function:
    """Function that copies a row of scales or offsets to some panels, padded with zeros past the last column."""
    q, j, whole = var("q"), var("j"), var("columns") // nr
    copy: list[Stmt] = []
    for v in range(0, nr, atom.n):
        copy.append(Verb("load_b", f"v{v}", p=Ptr("row", q * nr + v)))
        copy.append(Verb("store", f"v{v}", p=Ptr("to", q * var("panel_step") + v)))
    last = Ptr("to", whole * var("panel_step") + j - whole * nr)
    fill = If(j.lt(var("columns")), (Move(last, Ptr("row", j)),), (Move(last, None),))
    body = (
        For("q", const(0), whole, const(1), tuple(copy)),
        For("j", whole * nr, ceil_div(var("columns"), nr) * nr, const(1), (fill,)),
    )
    params = (Param("columns"), Param("row", "s32", readonly=True), Param("to", "s32"), Param("panel_step"))
    return Function("heads", "inner", params, body, f"to[panel][{nr}] = row[columns], padded with zeros")
