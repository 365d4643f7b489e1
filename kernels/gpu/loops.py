"""Loops of a thread: unrolled ones, those over the pieces of a tile that the threads of a block share, and over k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import const, var
from portmm.ir.nodes import For, If, Let, Move
from portmm.ir.thread_nodes import WHOLE, Barrier, CopyCommit, CopyWait, Vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.index import Index, Ptr
    from portmm.ir.nodes import Stmt

    Statements = tuple[Stmt, ...]
    Copies = Callable[[Index, Index], Statements]


def unrolled(name: str, count: int, *body: Stmt) -> For:
    """Unrolled loop."""
    return For(name, const(0), const(count), const(1), body, WHOLE)


def pieces(name: str, count: int, threads: int, *body: Stmt, unroll: int = WHOLE) -> For:
    """Loop over this thread's pieces of `count`, which threads take cyclically; `name` is a piece's number."""
    inside = (If(var(name).lt(count), body),) if count % threads else body
    own = (Let(name, var("thread") + var("turn") * threads), *inside)
    return For("turn", const(0), const(-(-count // threads)), const(1), own, unroll)


def or_zeros(there: Index, to: Ptr, src: Ptr, count: int, size: int, fill: int = 0) -> If:  # noqa: PLR0917
    """Load of `count` elements of `size` bytes if `there`, else of zeros, or of another integer."""
    if count == 1:
        return If(there, (Move(to, src),), (Move(to, None, fill),))
    return If(there, (Vector(to, src, count * size),), (unrolled("e", count, Move(to + var("e"), None, fill)),))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The loop over k: a step's tiles in shared memory are multiplied while those of later steps are copied.

    Attributes:
        depth: elements of k of a step.
        stages: tiles in shared memory.
    """

    depth: int
    stages: int

    def start(self, copies: Copies, step: Index) -> Statements:
        """Start of the asynchronous copies of a step, if there is one: `copies` at a k, to a stage."""
        return (If(step.lt(var("steps")), copies(var("k_0") + step * self.depth, step % self.stages)), CopyCommit())

    def ahead(self, copies: Copies) -> Statements:
        """Copies of the first steps, of all stages but one."""
        return tuple(x for i in range(self.stages - 1) for x in self.start(copies, const(i)))

    def copied(self, copies: Copies, multiply: Statements) -> tuple[Statements, Statements]:
        """Statements before the loop, and of a step, with asynchronous copies."""
        step = var("step")
        body = (
            CopyWait(self.stages - 2),
            Barrier(),
            *self.start(copies, step + (self.stages - 1)),
            Let("stage", step % self.stages),
            *multiply,
        )
        return self.ahead(copies), body

    def fetched(
        self, fetch: Callable[[Index], Statements], put: Callable[[Index], Statements], multiply: Statements
    ) -> tuple[Statements, Statements]:
        """The same with copies through registers: `fetch` at a k, `put` in a stage."""
        step, end = var("step"), Barrier()
        if self.stages == 1:
            return (), (*fetch(var("k_0") + step * self.depth), end, *put(const(0)), end, *multiply)
        more = (step + 1).lt(var("steps"))
        body = (
            If(more, fetch(var("k_0") + (step + 1) * self.depth)),
            Let("stage", step % 2),
            *multiply,
            If(more, put(const(1) - var("stage"))),
            end,
        )
        return (*fetch(var("k_0")), *put(const(0)), end), body
