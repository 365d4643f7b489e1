"""Loops of a thread: unrolled ones, and those over the pieces of a tile that the threads of a block share; loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import const, var
from portmm.ir.nodes import For, If, Let, Move
from portmm.ir.thread_nodes import WHOLE, Vector

if TYPE_CHECKING:
    from portmm.ir.index import Index, Ptr
    from portmm.ir.nodes import Stmt


def unrolled(name: str, count: int, *body: Stmt) -> For:
    """Unrolled loop."""
    return For(name, const(0), const(count), const(1), body, WHOLE)


def pieces(name: str, count: int, threads: int, *body: Stmt, unroll: int = WHOLE) -> For:
    """Loop over this thread's pieces of `count`, which threads take cyclically; `name` is a piece's number."""
    inside = (If(var(name).lt(count), body),) if count % threads else body
    own = (Let(name, var("thread") + var("turn") * threads), *inside)
    return For("turn", const(0), const(-(-count // threads)), const(1), own, unroll)


def or_zeros(there: Index, to: Ptr, src: Ptr, count: int, size: int) -> If:
    """Load of `count` elements of `size` bytes if `there`, else of zeros."""
    if count == 1:
        return If(there, (Move(to, src),), (Move(to, None),))
    return If(there, (Vector(to, src, count * size),), (unrolled("e", count, Move(to + var("e"), None)),))
