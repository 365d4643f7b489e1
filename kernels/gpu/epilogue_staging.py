"""Epilogue through shared memory, for results of fragments.

Owns `StagedStore`. A lane has two neighbouring results of a row, so that the stores of four lanes would fill half
of a memory transaction where elements have 16 bits or fewer. So a block stores its results in the shared memory of its
tiles, in rows of C, and threads move `move` neighbours each. Rows are a vector longer than C's, which
puts the eight rows that a warp writes at once into different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import If, Let, LetPtr, Move
from portmm.ir.thread_nodes import Barrier, Vector
from portmm.kernels.gpu.epilogue_store import EpilogueStore, bottom
from portmm.kernels.gpu.loops import pieces, unrolled
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

VECTOR = 16


@dataclass(frozen=True, slots=True)
class StagedStore(EpilogueStore):
    """Epilogue that stores sums through the shared array `tile`."""

    tile: str = "a_tile"

    @property
    def move(self) -> int:
        """Number of elements that a thread moves at once."""
        return min(self.s.c.vector, VECTOR // BY_NAME[self.type].bytes)

    @property
    def step(self) -> int:
        """Stride in elements between rows."""
        return self.s.block.n + VECTOR // BY_NAME[self.type].bytes

    def before(self) -> tuple[Stmt, ...]:
        """Addresses, and registers for elements."""
        return (*EpilogueStore.before(self), LetPtr("c_tile", Ptr(self.tile), self.type))

    def store_vector(self, at: Index) -> tuple[Stmt, ...]:
        """Store of a few neighbouring columns of one row to shared memory."""
        to = Ptr("c_tile", (var("row") - var("row_0")) * self.step + (var("column") - var("column_0")))
        if self.vector == 1:
            element = (*self.value(at, var("column"), const(0)), Move(to, Ptr("c_out")))
            return (If(var("column").lt(var("n")), element),)
        return (*self.values(at), Vector(to, Ptr("c_out"), self.vector * BY_NAME[self.type].bytes))

    def after(self) -> tuple[Stmt, ...]:
        """Transfer of the block's results to global memory."""
        s, e = self.s, var("piece")
        across = s.block.n // self.move
        vectors = s.block.m * across
        src = Ptr("c_tile", (var("row") - var("row_0")) * self.step + (var("column") - var("column_0")))
        to = Ptr("c_item", var("row") * var("c_m") + var("column"))
        j = var("j")
        one = If((var("column") + j).lt(var("n")), (Move(to + j, src + j),))
        inside = (var("column") + (self.move - 1)).lt(var("n"))
        moved = If(
            inside,
            (Vector(to, src, self.move * BY_NAME[self.type].bytes),),
            (unrolled("j", self.move, one),),
        )
        body: tuple[Stmt, ...] = (
            Let("row", var("row_0") + e // across),
            Let("column", var("column_0") + e % across * self.move),
            If(var("row").lt(bottom(s)), (moved,)),
        )
        return (Barrier(), pieces("piece", vectors, s.threads, *body, unroll=1))
