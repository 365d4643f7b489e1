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

from portmm.ir.address import offset
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import Let, LetPtr, Scratch
from portmm.ir.thread_nodes import WHOLE, CopyAsync, Shared, Vector
from portmm.kernels.gpu.loops import or_zeros, pieces
from portmm.kernels.gpu.product import OperandTile
from portmm.spec.layouts import BANKS, VECTOR, swizzle, swizzled

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import For, Stmt

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
        return offset(layout, line, vector, element)

    @property
    def by_words(self) -> bool:
        """Whether fragments are loaded word by word: their elements are words, contiguous along rows."""
        return self.bytes == WORD and self.along == "row"

    # -- to shared memory ------------------------------------------------------

    @property
    def turns(self) -> int:
        """Number of vectors that each thread moves."""
        return -(-self.lines * self.width // (self.vector * self.threads))

    @property
    def clamped(self) -> bool:
        """Whether past the last row it is read again; else zeros are stored."""
        return False

    def registers(self) -> Scratch:
        """Registers for vectors in flight."""
        return Scratch(f"{self.name}_next", self.turns * self.vector, self.dtype)

    def copy(self, k: Index, end: Index, stage: Index) -> tuple[Stmt, ...]:
        """Asynchronous copies of this thread's vectors of the tile at k, zeros from `end` on and past the last row."""
        return self.fill("copy", k, end, stage)

    def fetch(self, k: Index, end: Index) -> tuple[Stmt, ...]:
        """Loads of this thread's vectors of the tile at k to registers, zeros from `end` on."""
        return self.fill("fetch", k, end, const(0))

    def put(self, stage: Index) -> tuple[Stmt, ...]:
        """Stores of the vectors in registers to a tile in shared memory."""
        return self.fill("put", const(0), const(0), stage)

    def fill(self, how: str, k: Index, end: Index, stage: Index) -> tuple[Stmt, ...]:
        """Transfer of this thread's vectors of the tile at k to a stage: see `moved`."""
        n = self.name
        line, column, row, deep = (var(f"{n}_{x}") for x in ("line", "column", "row", "deep"))
        of_row, of_k = (line, column) if self.along == "k" else (column, line)
        place = (
            Let(f"{n}_deep", k + of_k),
            Let(f"{n}_row", minimum(self.first + of_row, self.end - 1) if self.clamped else self.first + of_row),
        )
        # Of addresses that are not clamped, compilers keep one and a step.
        inside = self.inside(row, deep, end)
        there = inside if self.clamped else row.lt(self.end) * inside
        to = Ptr(f"{n}_tile", stage * self.size)
        each = self.each(how, to, self.address(row, deep, of_k), there, place, prefix=f"{n}_")
        return (each,) if how == "put" else (*self.of_tile(k), each)

    def each(
        self, how: str, to: Ptr, source: Index, there: Index, place: tuple[Stmt, ...] = (), *,
        prefix: str = "", unroll: int = WHOLE,
    ) -> For:  # fmt: skip
        """Loop over this thread's vectors of a tile at `to`: see `moved`.

        Args:
            how: the stage of the transfer.
            to: the tile.
            source: offset of a vector in memory, of its line and column, whose names begin with `prefix`.
            there: 1 if it is in bounds.
            place: statements before its address is computed.
            prefix: of names.
            unroll: factor of the loop.
        """
        across, size = self.width // self.vector, self.per_vector
        piece, line, column, src = (f"{prefix}{x}" for x in ("piece", "line", "column", "from"))
        at = self.at(var(line), var(column) // size, var(column) % size if self.vector < size else 0)
        return pieces(
            piece, self.lines * across, self.threads,
            Let(line, var(piece) // across),
            Let(column, var(piece) % across * self.vector),
            *place,
            LetPtr(src, Ptr(f"{self.name}_item", source), self.dtype, readonly=True),
            *self.moved(how, to + at, Ptr(src), there),
            unroll=unroll,
        )  # fmt: skip

    def moved(self, how: str, to: Ptr, src: Ptr, there: Index) -> tuple[Stmt, ...]:
        """Statements for one stage of the transfer of a vector.

        Args:
            how: "copy", start an asynchronous copy; "fetch", load it to registers; "put", store it from
                registers; "move", both.
            to: its address in shared memory.
            src: its address in global memory.
            there: 1 if it is in bounds, else zeros are stored.
        """
        size = self.vector * self.bytes
        if how == "copy":
            return (CopyAsync(to, src, size, there),)
        turn = const(0) if how == "move" else var("turn")
        waits = Ptr(f"{self.name}_next", turn * self.vector)
        load, store = or_zeros(there, waits, src, self.vector, self.bytes, self.padding), Vector(to, waits, size)
        return (load, store) if how == "move" else (load,) if how == "fetch" else (store,)
