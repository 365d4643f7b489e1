"""Global-to-shared transfer of tiles of A and B for mma.

Owns `MmaTile`, one operand of a block tile in shared memory: in *lines*, each of vectors of 16
bytes. Where memory is contiguous along k, a line is a row (of A, or a column of B); where it is contiguous
along rows, a line is one k, and is transposed as fragments are loaded. Nothing is converted.

Bank conflicts. Fragments are loaded as matrices of eight lines of one vector (PTX ISA, ldmatrix), each at once if
their vectors are in different banks: `layouts.swizzled`. For lines of words along rows, lanes load words of four
lines, each of two neighbouring vectors, so that these are swizzled in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import Let, LetPtr, Scratch
from portmm.ir.thread_nodes import CopyAsync, Shared, Vector
from portmm.kernels.gpu.loops import or_zeros, pieces
from portmm.kernels.gpu.product import OperandTile
from portmm.spec.layouts import BANKS, VECTOR, swizzle, swizzled

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

WORD = 4
PAIR = 2


@dataclass(frozen=True, slots=True)
class MmaTile(OperandTile):
    """Tile of one operand, in lines of vectors of 16 bytes."""

    @property
    def lines(self) -> int:
        """Number of lines of a tile."""
        return self.rows if self.along == "k" else self.depth

    @property
    def width(self) -> int:
        """Number of elements of a line."""
        return self.depth if self.along == "k" else self.rows

    @property
    def per_vector(self) -> int:
        """Number of elements of a vector of 16 bytes."""
        return VECTOR // self.bytes

    def shared(self) -> Shared:
        """Shared memory array of the tiles."""
        return Shared(f"{self.name}_tile", self.size * self.stages, self.dtype, BANKS)

    def swizzle(self, line: Index) -> Index:
        """Number that the indices of a line's vectors are xored with."""
        number: Index = swizzle(self.width, self.bytes, PAIR if self.by_words else 1).number(line)
        return number

    def at(self, line: Index, vector: Index, element: Index | int = 0) -> Index:
        """Offset of an element of a vector of a line, in a tile."""
        layout = swizzled(self.width, self.bytes, PAIR if self.by_words else 1)
        offset: Index = layout.offset((line, vector, element))
        return offset

    @property
    def by_words(self) -> bool:
        """Whether fragments are loaded word by word: their elements are words, contiguous along rows."""
        return self.bytes == WORD and self.along == "row"

    # -- to shared memory ------------------------------------------------------

    @property
    def turns(self) -> int:
        """Number of vectors that each thread moves."""
        return -(-self.size // self.vector // self.threads)

    def registers(self) -> Scratch:
        """Registers for vectors in flight."""
        return Scratch(f"{self.name}_next", self.turns * self.vector, self.dtype)

    def _each(self, k: Index, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Loop over the vectors of this thread: line and column of each, its first k, and its source address."""
        n, across = self.name, self.width // self.vector
        e, line, column = var(f"{n}_piece"), var(f"{n}_line"), var(f"{n}_column")
        row, k_index = (line, column) if self.along == "k" else (column, line)
        here = (
            Let(f"{n}_line", e // across),
            Let(f"{n}_column", e % across * self.vector),
            Let(f"{n}_deep", k + k_index),
            Let(f"{n}_row", self.first + row),
            LetPtr(
                f"{n}_from",
                Ptr(f"{n}_item", var(f"{n}_row") * self.row_step + var(f"{n}_deep") * self.k_step),
                self.dtype, readonly=True,
            ),
            *body,
        )  # fmt: skip
        return (pieces(f"{n}_piece", self.size // self.vector, self.threads, *here),)

    def _to(self, stage: Index) -> Ptr:
        line, column = var(f"{self.name}_line"), var(f"{self.name}_column")
        within = column % self.per_vector if self.vector < self.per_vector else const(0)
        return Ptr(f"{self.name}_tile", stage * self.size + self.at(line, column // self.per_vector, within))

    def _there(self, end: Index) -> Index:
        """Condition that a vector is in bounds: of addresses that are not clamped, compilers keep one and a step."""
        n = self.name
        return var(f"{n}_row").lt(self.end) * var(f"{n}_deep").lt(end)

    def copy(self, k: Index, end: Index, stage: Index) -> tuple[Stmt, ...]:
        """Asynchronous copies of this thread's vectors of the tile at k, zeros from `end` on and past the last row."""
        copy = CopyAsync(self._to(stage), Ptr(f"{self.name}_from"), self.vector * self.bytes, self._there(end))
        return self._each(k, (copy,))

    def fetch(self, k: Index, end: Index) -> tuple[Stmt, ...]:
        """Loads of this thread's vectors of the tile at k to registers, zeros from `end` on."""
        n = self.name
        to = Ptr(f"{n}_next", var("turn") * self.vector)
        return self._each(k, (or_zeros(self._there(end), to, Ptr(f"{n}_from"), self.vector, self.bytes),))

    def put(self, stage: Index) -> tuple[Stmt, ...]:
        """Stores of the vectors in registers to a tile in shared memory."""
        src = Ptr(f"{self.name}_next", var("turn") * self.vector)
        return self._each(const(0), (Vector(self._to(stage), src, self.vector * self.bytes),))
