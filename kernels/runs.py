"""Runs of k, each with accumulators of its own: see `portmm.summation`.

Owns the loop over k of a block of C, and what adds the sums of a run to those
before where blocks of k are parts of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.kernels.packing import keep

from portmm.ir import (
    Add,
    Call,
    For,
    Function,
    If,
    Let,
    LetPtr,
    Move,
    Param,
    Ptr,
    Verb,
    const,
    var,
)

if TYPE_CHECKING:
    from portmm.kernels.blocks import Blocks

    from portmm.ir import Stmt
    from portmm.target import Atom


def carry(atom: Atom) -> Function:
    """The sums of a run, C, and of those before it: kept = C of the `first`, or kept += C; of the last run, C += kept.

    Rows of what is kept are whole vectors.
    """
    i, j, columns, n = var("i"), var("j"), var("columns"), atom.n
    whole = columns - columns % n
    c, kept = Ptr("c", i * var("c_m") + j), Ptr("kept", i * var("wide") + j)

    def add(few: str) -> tuple[Stmt, ...]:
        load = Verb("load_mask", "x", p=c, mask=few, to=atom.acc) if few else Verb("load_c", "x", p=c)
        last = Verb("store_mask", "x", p=c, mask=few) if few else Verb("store", "x", p=c)
        before = (Verb("load_c", "y", p=kept), Verb("add", "x", "y"))
        return (load, If(1 - var("first"), before), If(var("more"), (Verb("store", "x", p=kept),), (last,)))

    body: tuple[Stmt, ...] = (For("j", const(0), whole, const(n), add("")),)
    if n > 1:
        tail: tuple[Stmt, ...]
        if atom.mask:
            tail = (Let("j", whole), keep(atom, "m", columns - whole), *add("m"))
        else:
            one = If(var("first"), (Move(kept, c),), (Add(kept, c),))
            tail = (For("j", whole, columns, const(1), (If(var("more"), (one,), (Add(c, kept),)),)),)
        body = (*body, If(whole.lt(columns), tail))
    params = [Param("rows"), Param("columns"), Param("c", atom.acc), Param("c_m"), Param("kept", atom.acc)]
    params += [Param("wide"), Param("first"), Param("more")]
    comment = "kept[rows][columns] (+)= C, or C += kept after the last run of k"
    loop = For("i", const(0), var("rows"), const(1), body)
    return Function("carry", "inner", tuple(params), (loop,), comment, of=atom.name)


def over_k(g: Blocks, inside: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The loop over blocks of k, each a run, or over runs and their parts; where KC is ALL, visits loop over runs."""
    if g.parts:
        each = For("pc", var("run_start"), g.last_of_run, var("kb"), inside)
        place = LetPtr("kept", g.private() + (g.own_size - g.kept_size), g.atom.acc)
        return (place, Let("run", g.run), For("run_start", g.start, g.end, var("run"), (each,)))
    if g.s.kc:
        return (For("pc", g.start, g.end, var("kb"), inside),)
    return (Let("run", g.run), *inside) if g.many else inside


def carried(g: Blocks) -> tuple[Stmt, ...]:
    """Add the sums of a run to those before, once the last of its parts is done."""
    if not g.parts:
        return ()
    row, column, done = var("row") + var("r"), var("column"), var("pc") + var("kd")
    first, more = var("run_start").eq(g.start), done.lt(g.end)
    tile = (var("h"), var("columns"), g.result(row, column), g.c_step, g.kept(row, column), g.kept_wide)
    call = Call(carry(g.sum_lines), (*tile, first, more))
    return (If(var("run").lt(g.end - g.start), (If(done.eq(g.last_of_run), (call,)),)),)
