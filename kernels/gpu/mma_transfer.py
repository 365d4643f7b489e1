"""Tiles of A and B for units that multiply fragments, from global to shared memory.

Owns `Tile`, one operand's side of a block tile, as it lies in shared memory: in *lines*, each of pieces of 16
bytes. Where memory runs along k, a line is a row (of A, or a column of B) and runs along k; where it runs
along rows, a line is one k and runs along rows, and is transposed as fragments are loaded. Nothing is converted.

Bank conflicts. Fragments are loaded as matrices of eight lines of one piece (PTX ISA, ldmatrix), each at once if
their pieces are in different banks, which repeat after `SPAN` bytes. So piece p of line r is put at p xor
s(r), where s counts the spans that lines fill: r itself where a line has `SPAN` bytes or more, one for each two
lines of half of that. Of lines of words along rows, lanes load words: of four lines, each of two neighbouring pieces,
so that s counts in pairs. The first is the swizzle of 128, 64 and 32 bytes that the copy engine of Hopper makes, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, LetPtr, Scratch
from portmm.ir.thread_nodes import WHOLE, CopyAsync, Shared, Vector
from portmm.kernels.gpu.global_to_shared import or_zeros
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

PIECE = 16
SPAN = 128
WORD = 4
PAIR = 2


@dataclass(frozen=True, slots=True)
class Side:
    """One operand of a block tile.

    Attributes:
        name: "a" or "b".
        dtype: of its elements, in memory and in fragments.
        along: "k" or "row", what is side by side in memory.
        vector: elements that a thread moves at once.
        rows: of the tile.
        depth: elements of k of the tile.
        threads: that move it.
        row_step: elements from one row to the next.
        k_step: elements from one k to the next.
        first: the block's first row.
        end: rows that there are.
        stages: tiles in shared memory.
    """

    name: str
    dtype: str
    along: str
    vector: int
    rows: int
    depth: int
    threads: int
    row_step: Index
    k_step: Index
    first: Index
    end: Index
    stages: int

    @property
    def bytes(self) -> int:
        """Of an element."""
        return BY_NAME[self.dtype].bytes

    @property
    def lines(self) -> int:
        """Of a tile."""
        return self.rows if self.along == "k" else self.depth

    @property
    def width(self) -> int:
        """Elements of a line."""
        return self.depth if self.along == "k" else self.rows

    @property
    def per_piece(self) -> int:
        """Elements of a piece."""
        return PIECE // self.bytes

    @property
    def pieces(self) -> int:
        """Of a line."""
        return self.width // self.per_piece

    @property
    def size(self) -> int:
        """Elements of one tile in shared memory."""
        return self.lines * self.width

    def shared(self) -> Shared:
        """The tiles."""
        return Shared(f"{self.name}_tile", self.size * self.stages, self.dtype, SPAN)

    def turned(self, line: Index) -> Index:
        """What the pieces of a line are exchanged by: s(r) above."""
        each = max(1, SPAN // (self.width * self.bytes))
        most = min(self.pieces, SPAN // PIECE)
        return line // each % (most // PAIR) * PAIR if self.by_words else line // each % most

    @property
    def by_words(self) -> bool:
        """Fragments are loaded word by word: their elements are words, and side by side along rows."""
        return self.bytes == WORD and self.along == "row"

    def at(self, line: Index, piece: Index) -> Index:
        """The first element of a piece of a line, in a tile."""
        return line * self.width + (piece ^ self.turned(line)) * self.per_piece

    # -- to shared memory ------------------------------------------------------

    @property
    def turns(self) -> int:
        """Vectors that each thread moves."""
        return -(-self.size // self.vector // self.threads)

    def registers(self) -> Scratch:
        """What is on its way."""
        return Scratch(f"{self.name}_next", self.turns * self.vector, self.dtype)

    def _each(self, k: Index, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Run for each vector of this thread: its line, its place there, its first k, and where it comes from."""
        n, across = self.name, self.width // self.vector
        e, line, column = var(f"{n}_piece"), var(f"{n}_line"), var(f"{n}_column")
        row, deep = (line, column) if self.along == "k" else (column, line)
        here = (
            Let(f"{n}_line", e // across),
            Let(f"{n}_column", e % across * self.vector),
            Let(f"{n}_deep", k + deep),
            Let(f"{n}_row", self.first + row),
            LetPtr(
                f"{n}_from",
                Ptr(f"{n}_item", var(f"{n}_row") * self.row_step + var(f"{n}_deep") * self.k_step),
                self.dtype, readonly=True,
            ),
            *body,
        )  # fmt: skip
        if self.size // self.vector % self.threads:
            here = (If(e.lt(self.size // self.vector), here),)
        turn = var("turn")
        inner = (Let(f"{n}_piece", var("thread") + turn * self.threads), *here)
        return (For("turn", const(0), const(self.turns), const(1), inner, WHOLE),)

    def _to(self, stage: Index) -> Ptr:
        line, column = var(f"{self.name}_line"), var(f"{self.name}_column")
        at = self.at(line, column // self.per_piece)
        within = column % self.per_piece if self.vector < self.per_piece else const(0)
        return Ptr(f"{self.name}_tile", stage * self.size + at + within)

    def _there(self, end: Index) -> Index:
        """Whether a vector is inside: of addresses that are not clamped, compilers keep one and a step."""
        n = self.name
        return var(f"{n}_row").lt(self.end) * var(f"{n}_deep").lt(end)

    def copy(self, k: Index, end: Index, stage: Index) -> tuple[Stmt, ...]:
        """Begin to copy this thread's vectors of the tile at k, zeros from `end` on and past the last row."""
        copy = CopyAsync(self._to(stage), Ptr(f"{self.name}_from"), self.vector * self.bytes, self._there(end))
        return self._each(k, (copy,))

    def fetch(self, k: Index, end: Index) -> tuple[Stmt, ...]:
        """Load this thread's vectors of the tile at k to registers, zeros from `end` on."""
        n = self.name
        to = Ptr(f"{n}_next", var("turn") * self.vector)
        return self._each(k, (or_zeros(self._there(end), to, Ptr(f"{n}_from"), self.vector, self.bytes),))

    def put(self, stage: Index) -> tuple[Stmt, ...]:
        """Store the vectors in registers to a tile in shared memory."""
        src = Ptr(f"{self.name}_next", var("turn") * self.vector)
        return self._each(const(0), (Vector(self._to(stage), src, self.vector * self.bytes),))
