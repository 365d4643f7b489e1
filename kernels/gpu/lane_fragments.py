"""Fragments of tiles in shared memory that lanes read element by element, for units without a load of matrices.

Owns `LaneFragments`, with the same parts as `fragments.WarpFragments`. A lane reads as many neighbours at once as its
registers hold of the axis that is contiguous in shared memory, of up to 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import Registers, coordinate, lane_column, lane_row
from portmm.ir.index import Ptr, var
from portmm.ir.nodes import Let
from portmm.ir.thread_nodes import Vector
from portmm.kernels.gpu.loops import unrolled

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.gpu.mma_transfer import MmaTile
    from portmm.target.fragment import Fragment


@dataclass(frozen=True, slots=True)
class LaneFragments:
    """Fragments of a warp's rows of an operand.

    Attributes:
        side: the operand.
        rows: rows of the warp.
        fragment: the elements of a lane, rows by k.
        first: the warp's first row in the tile.
    """

    side: MmaTile
    rows: int
    fragment: Fragment
    first: Index

    @property
    def words(self) -> int:
        """Number of registers of a lane for a fragment: one for each element."""
        return self.fragment.elements

    @property
    def dtype(self) -> str:
        """Type of a register."""
        return self.side.dtype

    @property
    def fragments(self) -> int:
        """Number of fragments of one step of k."""
        return self.rows // self.fragment.rows

    @property
    def count(self) -> int:
        """Number of registers of a lane for one step of k."""
        return self.fragments * self.words

    @property
    def at_once(self) -> int:
        """Number of elements of one load."""
        along_k = self.side.along == "k"
        return min(Registers(self.fragment if along_k else self.fragment.transposed).neighbours, self.side.per_vector)

    def lane_offsets(self) -> tuple[Stmt, ...]:
        """Row and k of this lane's first element, in the tile."""
        n, lane = self.side.name, var("lane")
        row, k = self.first + lane_row(self.fragment, lane), lane_column(self.fragment, lane)
        return (Let(f"{n}_top", row), Let(f"{n}_left", k))

    def load(self, to: Ptr, tile: Index, step: Index) -> tuple[Stmt, ...]:
        """Loads of all fragments of a step of k of the tile that begins at element `tile`."""
        n, side, fragment = self.side.name, self.side, self.fragment
        group, element = var("group"), var("piece") * self.at_once
        row = coordinate(element, [row for row, _ in fragment.register])
        k = coordinate(element, [k for _, k in fragment.register])
        row += var(f"{n}_top") + group * fragment.rows
        k += var(f"{n}_left") + step * fragment.columns
        line, along = (row, k) if side.along == "k" else (k, row)
        at = side.at(line, along // side.per_vector) + along % side.per_vector
        move = Vector(to + (group * self.words + element), Ptr(f"{n}_tile", tile + at), self.at_once * side.bytes)
        pieces = unrolled("piece", self.words // self.at_once, move)
        return (unrolled("group", self.fragments, pieces),)
