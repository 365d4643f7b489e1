"""TMA transfer of tiles of A and B to shared memory, in the layout of wgmma.

Owns `TmaTile`, one operand of a block tile. A tile consists of lines of 128 bytes: of a row (of A, or a
column of B) along k, or, where memory is contiguous along rows, of one k along 64 rows; the lines of further rows
follow. TMA swizzles the 16-byte vectors of every eight lines, and fills elements out of bounds
with zeros; `matrix_descriptor` describes the same layout to the tensor cores. Either way 64 rows take as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, MapOf
from portmm.ir.index import Ptr, const, maximum, var
from portmm.ir.nodes import Let
from portmm.ir.thread_nodes import Do, Get, Shared
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.product import OperandTile
from portmm.schedule.gpu_wgmma import LINE, SWIZZLED, WIDE_ROWS, padded_rows
from portmm.spec.layouts import swizzled_tile

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.layout import Layout

VECTOR = 16
"""Unit of descriptors, in bytes."""
LINES = 8
"""Lines that are swizzled together."""
ATOM_BYTES = 32
"""Bytes of a row along k that one instruction multiplies."""


@dataclass(frozen=True, slots=True)
class TmaTile(OperandTile):
    """Tile of one operand of a block, in shared memory.

    Attributes:
        cluster: blocks of a cluster, of which each loads a part of the tile for all (multicast).
        rounds: elements of f32 are rounded to tf32 by the copy: the tensor cores ignore the bits that tf32 lacks.
    """

    cluster: int = 1
    rounds: bool = False

    @property
    def memory(self) -> Layout:
        """Layout (row, k) of a tile in shared memory."""
        return swizzled_tile(self.bytes, self.depth, along_k=self.along == "k")

    def step(self, axis: int, count: int) -> int:
        """Number of bytes between lines `count` rows, or elements of k, apart, whose swizzles agree."""
        return int(replace(self.memory, swizzle=None).step(axis, count) or 0) * self.bytes

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile in shared memory."""
        return padded_rows(self.rows, along_k=self.along == "k")

    @property
    def size(self) -> int:
        """Number of elements of a tile in shared memory."""
        return self.tile_rows * self.depth

    @property
    def box(self) -> int:
        """Number of rows of one copy."""
        return self.rows // self.cluster if self.along == "k" else WIDE_ROWS

    @property
    def extent(self) -> str:
        """Name of the number of rows of the operand."""
        return "m" if self.name == "a" else "n"

    def shared(self) -> Shared:
        """Shared memory array of the tiles."""
        return Shared(f"{self.name}_tile", self.size * self.stages, self.dtype, SWIZZLED)

    def arguments(self) -> list[Argument]:
        """Tensor map of the operand, and its batch stride. An operand of the whole batch has one item."""
        name = self.name
        step = var(f"{name}_{self.extent if self.along == 'k' else 'k'}")
        items = maximum(var("batch") * const(0).lt(var(f"{name}_batch")), 1)
        ends, lines = (var("k"), var(self.extent)), self.box
        if self.along != "k":
            ends, lines = ends[::-1], self.depth
        box = (int(self.memory.shape[-1]), lines, 1)
        of = MapOf(name, self.dtype, (*ends, items), (step, var(f"{name}_batch")), box, LINE, self.rounds)
        return [Argument(f"{name}_map", "map", map=of), Argument(f"{name}_batch", "long")]

    # -- to shared memory ------------------------------------------------------

    def place(self) -> list[Stmt]:
        """Index of the operand's item."""
        return [Let(f"{self.name}_item", var("item") * const(0).lt(var(f"{self.name}_batch")))]

    def load(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """TMA copy of this block's part of the tile at k to a stage: `full[stage]` counts bytes that have landed."""
        name, count = self.name, self.tile_rows // self.box // self.cluster
        box = var("box") if count > 1 else const(0)
        row = box * self.box + (var("rank") * (self.tile_rows // self.cluster) if self.cluster > 1 else const(0))
        at = (k, self.first + row) if self.along == "k" else (self.first + row, k)
        operands = (
            Ptr(f"{name}_tile", stage * self.size + row * self.depth), Ptr(f"{name}_map"), Ptr("full", stage), *at,
            var(f"{name}_item"),
        )  # fmt: skip
        if self.cluster > 1:
            call = Do("tma_load_multicast", (*operands, const((1 << self.cluster) - 1)))
        else:
            call = Do("tma_load", operands)
        return (unrolled("box", count, call),) if count > 1 else (call,)

    # -- to the tensor cores ---------------------------------------------------

    def describe(self, row: Index) -> Stmt:
        """Descriptor of the first stage's tile, from a row on."""
        along_k = self.along == "k"
        leading, stride = VECTOR if along_k else self.step(0, WIDE_ROWS), self.step(0 if along_k else 1, LINES)
        at = Ptr(f"{self.name}_tile", row * self.depth)
        return Get(f"{self.name}_matrix", "matrix_descriptor", (at, const(leading), const(stride)), "long")

    def matrix(self, stage: Index, strip: Index, unit: Index) -> Index:
        """Descriptor of 64 rows, and those after, at one step of k of a stage."""
        step, strips = self.step(1, ATOM_BYTES // self.bytes), strip * (self.step(0, WIDE_ROWS) // VECTOR)
        return (
            var(f"{self.name}_matrix") + stage * (self.size * self.bytes // VECTOR) + strips + unit * (step // VECTOR)
        )
