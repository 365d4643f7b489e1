"""Fragments of tiles in shared memory, loaded to the registers of a warp.

Owns `LaneFragments`, for any unit, and `WarpFragments`, for those with a load of matrices (ldmatrix). There a fragment
consists of matrices of eight rows of 16 bytes along k, in the order of its registers. Up to four are loaded at once;
lane l holds the address of row l % 8 of matrix l / 8.
Elements of f32 are then rounded to tf32; those that are contiguous along rows are loaded one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import Registers, coordinate, lane_column, lane_row
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import Let
from portmm.ir.thread_nodes import Do, Vector
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.mma_transfer import WORD
from portmm.spec.layouts import VECTOR

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.gpu.mma_transfer import MmaTile
    from portmm.target.fragment import Fragment

MATRIX_ROWS = 8
"""Number of rows of a matrix."""


def of(fragment: Fragment | None) -> Fragment:
    """A fragment of a unit of a warp, which has one for each operand."""
    assert fragment is not None  # noqa: S101 - checked when the instruction set is read
    return fragment


def matrices(fragment: Fragment, size: int) -> list[tuple[int, int]]:
    """Steps of a fragment's matrices: (matrices along rows, along k) of each bit of a matrix's number.

    Args:
        fragment: rows by k.
        size: bytes of an element.
    """
    within = (WORD // size).bit_length() - 1
    return [(row // MATRIX_ROWS, k * size // VECTOR) for row, k in fragment.register[within:]]


@dataclass(frozen=True, slots=True)
class LaneFragments:
    """Fragments of a warp's rows of an operand, that lanes read element by element.

    A lane reads as many neighbours at once as its registers hold of the axis that is contiguous in shared memory, of
    up to 16 bytes.

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


@dataclass(frozen=True, slots=True)
class WarpFragments(LaneFragments):
    """Fragments that are loaded as matrices."""

    @property
    def matrices_k(self) -> int:
        """Number of matrices of a fragment along k."""
        return self.fragment.columns * self.side.bytes // VECTOR

    @property
    def words(self) -> int:
        """Number of registers of a lane for a fragment."""
        return 1 << len(matrices(self.fragment, self.side.bytes))

    @property
    def dtype(self) -> str:
        """Type of a register."""
        return "b32"

    @property
    def at_once(self) -> int:
        """Number of matrices of one load."""
        return next(x for x in (4, 2, 1) if self.count % x == 0)

    @property
    def matrices_m(self) -> int:
        """Number of matrices of a fragment along rows."""
        return self.fragment.rows // MATRIX_ROWS

    def lane_offsets(self) -> tuple[Stmt, ...]:
        """Base coordinates of this lane's addresses: row of the tile, vector, and swizzle.

        Fragments are whole periods of the swizzle apart, so that one number is valid for all.
        """
        if self.side.by_words:
            return self._word_offsets()
        n, side, words = self.side.name, self.side, min(self.words, self.at_once)
        own = var("lane") // MATRIX_ROWS % self.at_once if self.at_once > 1 else const(0)
        matrix = own % words if words < self.at_once else own
        fragment = own // words if words < self.at_once else const(0)
        steps = matrices(self.fragment, side.bytes)
        row = (fragment * self.matrices_m + coordinate(matrix, [m for m, _ in steps])) * MATRIX_ROWS
        along_k = coordinate(matrix, [k for _, k in steps])
        inside = var("lane") % MATRIX_ROWS
        if side.along == "k":
            line, vector = self.first + row + inside, along_k
        else:
            line, vector = along_k * MATRIX_ROWS + inside, (self.first + row) // side.per_vector
        swizzle = side.swizzle(line if side.along == "k" else inside)
        return (Let(f"{n}_top", line), Let(f"{n}_left", vector), Let(f"{n}_turn", swizzle))

    def load(self, to: Ptr, tile: Index, step: Index) -> tuple[Stmt, ...]:
        """Loads of all fragments of a step of k of the tile that begins at element `tile`."""
        if self.side.by_words:
            return self._load_words(to, tile, step)
        n, side, group = self.side.name, self.side, var("group")
        # A group of matrices is whole fragments: none has more than four.
        rows = group * (self.at_once // self.words) * self.fragment.rows
        along_k = step * self.matrices_k
        line, vector = var(f"{n}_top"), var(f"{n}_left")
        if side.along == "k":
            line, vector = line + rows, vector + along_k
        else:
            line, vector = line + along_k * MATRIX_ROWS, vector + rows // side.per_vector
        at = line * side.width + (vector ^ var(f"{n}_turn")) * side.per_vector
        trans = "" if side.along == "k" else "trans_"
        name = f"ldmatrix_{trans}x{self.at_once}"
        call = Do(name, (to + group * self.at_once, Ptr(f"{n}_tile", tile + at)))
        loads = unrolled("group", self.count // self.at_once, call)
        return (loads, *self._rounded(to)) if side.bytes == WORD else (loads,)

    def _rounded(self, to: Ptr) -> tuple[Stmt, ...]:
        """Rounding of loaded words to tf32."""
        return (unrolled("word", self.count, Do("tf32_round", (to + var("word"),))),)

    def _word_offsets(self) -> tuple[Stmt, ...]:
        n, side, lane = self.side.name, self.side, var("lane")
        row, k = self.first + lane_row(self.fragment, lane), lane_column(self.fragment, lane)
        return (Let(f"{n}_top", k), Let(f"{n}_left", row // side.per_vector), Let(f"{n}_turn", side.swizzle(k)))

    def _load_words(self, to: Ptr, tile: Index, step: Index) -> tuple[Stmt, ...]:
        """Loads of fragments word by word, where rows are contiguous."""
        n, side, q = self.side.name, self.side, var("matrix")
        within = q % self.matrices_m if self.matrices_m > 1 else const(0)
        rows = (q // self.words * self.matrices_m + within) * MATRIX_ROWS
        line = var(f"{n}_top") + (step * self.matrices_k + q % self.words // self.matrices_m) * WORD
        vector = (var(f"{n}_left") + rows // side.per_vector) ^ var(f"{n}_turn")
        at = line * side.width + vector * side.per_vector + lane_row(self.fragment, var("lane")) % side.per_vector
        call = Do("tf32_load", (to + q, Ptr(f"{n}_tile", tile + at)))
        return (unrolled("matrix", self.count, call),)
