"""Tiles of Q, K and V in shared memory, for units that multiply fragments.

Owns `HeadTile`: rows of a head as they lie in memory, in pieces of 16 bytes, that fragments are loaded from. A
matrix of eight rows of one piece is loaded at once if these are in different banks, which repeat after eight
pieces: of rows of whole eights, piece p of row r is put at p xor r % 8; of shorter powers of two, at p xor as many
as are needed; other rows are padded to an odd number of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, LetPtr, Scratch
from portmm.ir.thread_nodes import WHOLE, CopyAsync, Do, Shared, Vector
from portmm.kernels.gpu.global_to_shared import or_zeros

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

PIECE, SIZE = 16, 2
PER_PIECE = PIECE // SIZE
EIGHT = 8
"""Pieces after which banks repeat, and rows of a matrix."""
MOST_TURNS, SOME_TURNS = 8, 4
"""Copies of a thread that are all written out, and that are in loops of more: each has an address."""


def pitch(width: int) -> int:
    """Elements from one row to the next, of rows of so many."""
    pieces = width // PER_PIECE
    return width if pieces % EIGHT == 0 or pieces in (2, 4) else width + PER_PIECE


@dataclass(frozen=True, slots=True)
class HeadTile:
    """Rows of an operand in shared memory.

    Attributes:
        name: "q", "k" or "v".
        dtype: of its elements.
        rows: of a tile.
        width: elements of a row.
        vector: elements that a thread moves at once.
        threads: that move it.
    """

    name: str
    dtype: str
    rows: int
    width: int
    vector: int
    threads: int

    @property
    def pitch(self) -> int:
        """Elements from one row to the next."""
        return pitch(self.width)

    @property
    def size(self) -> int:
        """Elements of a tile."""
        return self.rows * self.pitch

    def turned(self, line: Index) -> Index:
        """What the pieces of a row are exchanged by."""
        pieces = self.width // PER_PIECE
        if self.pitch != self.width:
            return const(0)
        return line // max(1, EIGHT // pieces) % min(pieces, EIGHT)

    # -- from global memory ----------------------------------------------------

    def moved(self, how: str, to: Ptr, src: Ptr, there: Index) -> tuple[Stmt, ...]:
        """Move a vector on one leg of its way.

        Args:
            how: "copy", begin to copy it past the registers; "fetch", load it to registers; "put", store it from
                there; "move", both.
            to: where it goes in shared memory.
            src: where it lies in memory.
            there: 1 if it is there, else zeros are put.
        """
        size = self.vector * SIZE
        if how == "copy":
            return (CopyAsync(to, src, size, there),)
        turn = const(0) if how == "move" else var("turn")
        waits = Ptr(f"{self.name}_next", turn * self.vector)
        load, store = or_zeros(there, waits, src, self.vector, SIZE), Vector(to, waits, size)
        return (load, store) if how == "move" else (load,) if how == "fetch" else (store,)

    def registers(self) -> Scratch:
        """What is on its way, of copies that pass through registers."""
        turns = -(-self.rows * self.width // (self.vector * self.threads))
        return Scratch(f"{self.name}_next", turns * self.vector, self.dtype)

    @staticmethod
    def turns(how: str, count: int, most: int, body: tuple[Stmt, ...]) -> For:
        """A thread's vectors: written out if that needs few addresses, or if they stay in registers."""
        whole = count <= most or how in ("fetch", "put")
        return For("turn", const(0), const(count), const(1), body, WHOLE if whole else SOME_TURNS)

    def tile(self, how: str, to: Ptr, source: Index, there: Index) -> tuple[Stmt, ...]:
        """Move a tile to `to`, see `moved`, whose row `line` begins at `source` and is `there`."""
        across = self.width // self.vector
        count = self.rows * across
        piece, line, column = var("piece"), var("line"), var("column")
        at = line * self.pitch + (column // PER_PIECE ^ self.turned(line)) * PER_PIECE
        at += column % PER_PIECE if self.vector < PER_PIECE else const(0)
        body: tuple[Stmt, ...] = (
            Let("line", piece // across),
            Let("column", piece % across * self.vector),
            LetPtr("from", Ptr(f"{self.name}_item", source + column), self.dtype, readonly=True),
            *self.moved(how, to + at, Ptr("from"), there),
        )
        if count % self.threads:
            body = (If(piece.lt(count), body),)
        turns = -(-count // self.threads)
        inner = (Let("piece", var("thread") + var("turn") * self.threads), *body)
        return (self.turns(how, turns, SOME_TURNS, inner),)

    @property
    def down(self) -> int:
        """Rows that the threads move at once, if all of them move whole rows; else 0."""
        across = self.width // self.vector
        fits = self.threads % across == 0 and self.rows * across % self.threads == 0
        return self.threads // across if fits and self.vector == PER_PIECE else 0

    def mover(self) -> tuple[Stmt, ...]:
        """Where a thread's part of the first rows comes from, and goes to."""
        if not self.down:
            return ()
        n, across = self.name, self.width // self.vector
        line, piece = var("thread") // across, var("thread") % across
        return (
            Let(f"{n}_row", line),
            LetPtr(f"{n}_from", Ptr(f"{n}_item", line * var(f"{n}_n") + piece * PER_PIECE), self.dtype, readonly=True),
            Let(f"{n}_to", line * self.pitch + (piece ^ self.turned(line)) * PER_PIECE),
        )

    def lines(self, how: str, to: Ptr, first: Index, end: Index) -> tuple[Stmt, ...]:
        """Move the rows of memory from `first` on, zeros from `end` on: see `moved`."""
        n, step, turn = self.name, var(f"{self.name}_n"), var("turn")
        if not self.down:
            row = first + var("line")
            return self.tile(how, to, row * step, row.lt(end))
        # What rows further down are exchanged by differs in bits that the first rows' numbers do not have.
        at = var(f"{n}_to") + turn * (self.down * self.pitch)
        if self.down < EIGHT and self.pitch == self.width:
            at = (var(f"{n}_to") ^ turn * self.down % EIGHT * PER_PIECE) + turn * (self.down * self.pitch)
        row = first + turn * self.down
        one = self.moved(how, to + at, Ptr(f"{n}_from", row * step), (row + var(f"{n}_row")).lt(end))
        return (self.turns(how, self.rows // self.down, MOST_TURNS, one),)

    # -- to fragments ------------------------------------------------------------

    def lane(self, *, below: bool) -> tuple[Stmt, ...]:
        """Where a lane finds its row of four matrices: of sixteen rows, whose eights follow before pieces if `below`.

        Of an operand on the left, and of one that is transposed on its way, matrices lie below each other first;
        of one on the right beside each other.
        """
        n, lane = self.name, var("lane")
        row = lane % 16 if below else lane // 16 * EIGHT + lane % EIGHT
        beside = lane // 16 if below else lane // EIGHT % 2
        return (
            Let(f"{n}_line", row * self.pitch),
            Let(f"{n}_turn", self.turned(row) ^ beside if self.pitch == self.width else beside),
        )

    def matrices(self, to: Ptr, tile: Ptr, row: Index, piece: Index, *, trans: bool = False) -> Stmt:
        """Load four matrices: sixteen rows from `row` on of two pieces from `piece` on, which is even."""
        turn = var(f"{self.name}_turn")
        # Only eight pieces change places: what is beyond is added, so that addresses differ in constants.
        beside = (turn ^ piece % EIGHT) + piece // EIGHT * EIGHT if self.pitch == self.width else turn + piece
        at = tile + (row * self.pitch + var(f"{self.name}_line") + beside * PER_PIECE)
        return Do("ldmatrix_trans_x4" if trans else "ldmatrix_x4", (to, at))


def shared(name: str, elements: int, dtype: str) -> Shared:
    """Shared memory for tiles."""
    return Shared(name, elements, dtype, 128)
