"""Tiles of Q, K and V in shared memory, for matrix units (mma).

Owns `HeadTile`: rows of a head in their order in memory, in vectors of 16 bytes, that fragments are loaded from. A
matrix of eight rows of one vector is loaded at once if these are in different banks: rows of a multiple of eight
vectors, and shorter powers of two, are swizzled (`layouts.swizzled`); others are padded to an odd number of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from portmm.ir.address import offset
from portmm.ir.fragment_index import coordinate
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, Let, LetPtr
from portmm.ir.thread_nodes import WHOLE, Do, Shared
from portmm.kernels.gpu.fragments import matrices
from portmm.kernels.gpu.mma_transfer import MmaTile
from portmm.schedule.gpu_mma_attention import pitch
from portmm.spec.layout import Layout
from portmm.spec.layouts import VECTOR, swizzled

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.target.fragment import Fragment

SIZE = 2
PER_VECTOR = VECTOR // SIZE
EIGHT = 8
"""Vectors after which banks repeat, and rows of a matrix."""
MOST_TURNS, SOME_TURNS = 8, 4
"""Unroll factors of a thread's copies: at most so many are unrolled fully, or in longer loops; each has an address."""


@cache
def rows_of(name: str) -> Layout:
    """Layout of rows of an operand, whose elements are contiguous."""
    return Layout(("n", "d"), (f"{name}_n", 1))


@dataclass(frozen=True, slots=True)
class HeadTile(MmaTile):
    """Tile of rows of an operand of attention, whose k are the elements of a head."""

    @property
    def pitch(self) -> int:
        """Stride in elements between rows."""
        return pitch(self.width)

    @property
    def size(self) -> int:
        """Number of elements of a tile."""
        return self.rows * self.pitch

    def at(self, line: Index, vector: Index, element: Index | int = 0) -> Index:
        """Offset of an element of a vector of a row, in a tile."""
        padded = Layout(("lines", "vectors", PER_VECTOR), (self.pitch, PER_VECTOR, 1))
        layout = padded if self.pitch != self.width else swizzled(self.width, self.bytes)
        return offset(layout, line, vector, element)

    # -- from global memory ----------------------------------------------------

    @staticmethod
    def unroll(how: str, count: int, most: int) -> int:
        """Unroll factor of a loop over a thread's vectors: all if they need few addresses, or stay in registers."""
        return WHOLE if count <= most or how in ("fetch", "put") else SOME_TURNS

    def tile(self, how: str, to: Ptr, source: Index, there: Index) -> tuple[Stmt, ...]:
        """Transfer of a tile to `to` (see `moved`) whose row `line` begins at `source` and is in bounds if `there`."""
        turns = self.unroll(how, self.turns, SOME_TURNS)
        return (self.each(how, to, source + var("column"), there, unroll=turns),)

    @property
    def down(self) -> int:
        """Number of rows that the threads move at once, if all of them move whole rows; else 0."""
        across = self.width // self.vector
        fits = self.threads % across == 0 and self.rows * across % self.threads == 0
        return self.threads // across if fits and self.vector == PER_VECTOR else 0

    def mover(self) -> tuple[Stmt, ...]:
        """Source and target addresses of a thread's part of the first rows."""
        if not self.down:
            return ()
        n, across = self.name, self.width // self.vector
        line, piece = var("thread") // across, var("thread") % across
        source = Ptr(f"{n}_item", offset(self.layout, line, piece * PER_VECTOR))
        return (
            Let(f"{n}_row", line),
            LetPtr(f"{n}_from", source, self.dtype, readonly=True),
            Let(f"{n}_to", self.at(line, piece)),
        )

    def rows_from(self, how: str, to: Ptr, first: Index, end: Index) -> tuple[Stmt, ...]:
        """Transfer of the rows of memory from `first` on, zeros from `end` on: see `moved`."""
        n, turn = self.name, var("turn")
        if not self.down:
            row = first + var("line")
            return self.tile(how, to, offset(self.layout, row, 0), row.lt(end))
        # The swizzles of rows further down differ in bits that the first rows' numbers do not have.
        at = var(f"{n}_to") + turn * (self.down * self.pitch)
        if self.down < EIGHT and self.pitch == self.width:
            at = (var(f"{n}_to") ^ turn * self.down % EIGHT * PER_VECTOR) + turn * (self.down * self.pitch)
        row = first + turn * self.down
        one = self.moved(how, to + at, Ptr(f"{n}_from", offset(self.layout, row, 0)), (row + var(f"{n}_row")).lt(end))
        count = self.rows // self.down
        return (For("turn", const(0), const(count), const(1), one, self.unroll(how, count, MOST_TURNS)),)

    # -- to fragments ------------------------------------------------------------

    def lane(self, fragment: Fragment, *, rows_first: bool) -> tuple[Stmt, ...]:
        """Offsets of a lane's row of four matrices: two of eight rows by two vectors, in the order of registers.

        Args:
            fragment: an atom's, of rows and columns of this tile.
            rows_first: fragments of fewer matrices are repeated along rows first.
        """
        n, lane = self.name, var("lane")
        bits = [(1, 0), (2, 0), (4, 0), *((m * EIGHT, k) for m, k in matrices(fragment, SIZE))]
        further = ((EIGHT, 0), (0, 1)) if rows_first else ((0, 1), (EIGHT, 0))
        bits += [bit for bit in further if bit not in bits]
        row, vector = coordinate(lane, [m for m, _ in bits]), coordinate(lane, [k for _, k in bits])
        return (
            Let(f"{n}_line", row * self.pitch),
            Let(f"{n}_turn", self.swizzle(row) ^ vector if self.pitch == self.width else vector),
        )

    def matrices(self, to: Ptr, tile: Ptr, row: Index, piece: Index, *, trans: bool = False) -> Stmt:
        """Load of four matrices: sixteen rows from `row` on of two vectors from `piece` on, which is even."""
        turn = var(f"{self.name}_turn")
        # Only eight vectors are swizzled: the rest is added, so that addresses differ in constants.
        vector = (turn ^ piece % EIGHT) + piece // EIGHT * EIGHT if self.pitch == self.width else turn + piece
        at = tile + (row * self.pitch + var(f"{self.name}_line") + vector * PER_VECTOR)
        return Do("ldmatrix_trans_x4" if trans else "ldmatrix_x4", (to, at))


def shared(name: str, elements: int, dtype: str) -> Shared:
    """Shared memory array for tiles."""
    return Shared(name, elements, dtype, 128)
