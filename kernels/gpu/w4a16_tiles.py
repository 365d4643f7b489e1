"""Tiles of A, and of weights of four bits, in shared memory, for `kernels.coded`.

Owns `Tile`: how threads copy lines of pieces of 16 bytes, asynchronously, and where pieces lie; and `Scales`. Imports
`ir.index`, `ir.nodes`, `ir.thread_nodes`.

The lanes of a warp read columns, or rows, g = lane / 4, and of each what belongs to t = lane % 4: words, of 8 codes, in
turn 4 * `wide` words at once, t having `wide` neighbours, and of A the pieces of the same k. Reads of 16 bytes take
turns of 8 lanes, of 4 bytes all lanes at once; they meet no bank twice because

- pieces of A that the four t read at once, for the c-th word of each, are side by side: piece t * wide + c lies
  at c * 4 + t;
- the place of a piece is put at the xor with the bits of g in reverse order: two g, four or all eight of them are in
  different banks whether they read four pieces each, two or one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import For, If, Let, LetPtr
from portmm.ir.thread_nodes import WHOLE, CopyAsync, Shared
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

PIECE = 16
LINE = 128
"""Bytes after which banks repeat."""
LANES = 4
"""Lanes that share a row, or a column."""


def reversed_bits(x: Index) -> Index:
    """The three bits of 0 to 7 in reverse order."""
    return x % 2 * 4 + x // 2 % 2 * 2 + x // 4


@dataclass(frozen=True, slots=True)
class Tile:
    """One operand's part of a block's step.

    Attributes:
        name: "a" or "b".
        dtype: of its elements: of codes, words.
        lines: rows of A, or columns of B.
        width: elements of a line.
        vector: elements that a thread copies at once.
        threads: that copy.
        step: elements from one line to the next in memory.
        first: the block's first line.
        end: lines that there are.
        together: lines that lie in the banks one after the other, for one g.
        wide: pieces of a lane that are neighbours in memory, 0 where they stay so.
        stages: tiles.
    """

    name: str
    dtype: str
    lines: int
    width: int
    vector: int
    threads: int
    step: Index
    first: Index
    end: Index
    together: int
    wide: int
    stages: int

    @property
    def per_piece(self) -> int:
        """Elements of a piece."""
        return PIECE // BY_NAME[self.dtype].bytes

    @property
    def pieces(self) -> int:
        """Of a line."""
        return self.width // self.per_piece

    @property
    def size(self) -> int:
        """Elements of one tile."""
        return self.lines * self.width

    def shared(self) -> Shared:
        """The tiles."""
        return Shared(f"{self.name}_tile", self.size * self.stages, self.dtype, LINE)

    def at(self, line: Index, place: Index, turned: Index) -> Index:
        """The first element of the piece at a place in a line, `turned` being the bits of its g."""
        return ((line * self.pieces + place) ^ turned) * self.per_piece

    def place(self, piece: Index) -> Index:
        """Where a piece of a line lies: see above."""
        if not self.wide:
            return piece
        unit, inside = piece // (LANES * self.wide), piece % (LANES * self.wide)
        return unit * (LANES * self.wide) + inside % self.wide * LANES + inside // self.wide

    def copy(self, k: Index, end: Index, stage: Index) -> tuple[Stmt, ...]:
        """Begin to copy this thread's vectors of the tile at element k of lines, zeros from `end` on."""
        n, across = self.name, self.width // self.vector
        count = self.size // self.vector
        e, line, column = var(f"{n}_vector"), var(f"{n}_line"), var(f"{n}_column")
        turned = reversed_bits(line // self.together % 8)
        within = column % self.per_piece if self.vector < self.per_piece else const(0)
        at = self.at(line, self.place(column // self.per_piece), turned) + within
        src = Ptr(f"{n}_item", minimum(self.first + line, self.end - 1) * self.step + (k + column))
        copied: tuple[Stmt, ...] = (
            Let(f"{n}_line", e // across),
            Let(f"{n}_column", e % across * self.vector),
            LetPtr(f"{n}_from", src, self.dtype, readonly=True),
            CopyAsync(
                Ptr(f"{n}_tile", stage * self.size + at), Ptr(f"{n}_from"),
                self.vector * BY_NAME[self.dtype].bytes, (k + column).lt(end),
            ),
        )  # fmt: skip
        return _each(n, count, self.threads, copied)


def _each(name: str, count: int, threads: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Run for each of so many vectors that this thread has."""
    turn, e = var("turn"), var(f"{name}_vector")
    inside = (If(e.lt(count), body),) if count % threads else body
    turns = -(-count // threads)
    each = (Let(f"{name}_vector", var("thread") + turn * threads), *inside)
    return (For("turn", const(0), const(turns), const(1), each, WHOLE),)


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales, or offsets, of a block's step: for each span of k those of all columns.

    Attributes:
        name: "scales" or "offsets".
        columns: of a block.
        spans: of a step.
        span: rows of k of a span, all of one group.
        group: rows of a group, 0 for all.
        threads: that copy.
        stages: tiles.
    """

    name: str
    columns: int
    spans: int
    span: int
    group: int
    threads: int
    stages: int

    @property
    def size(self) -> int:
        """Of a step."""
        return self.columns * self.spans

    def shared(self) -> Shared:
        """Those of all stages."""
        return Shared(f"{self.name}_tile", self.size * self.stages, "f32")

    def copy(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """Begin to copy those of the step at k."""
        n = self.name
        e, column = var(f"{n}_vector"), var(f"{n}_column")
        span = e % self.spans
        number = minimum((k + span * self.span) // self.group, var("groups") - 1) if self.group else const(0)
        at = minimum(var("column_0") + column, var("n") - 1) * var("groups") + number
        body: tuple[Stmt, ...] = (
            Let(f"{n}_column", e // self.spans),
            CopyAsync(Ptr(f"{n}_tile", stage * self.size + span * self.columns + column), Ptr(n, at), 4, const(1)),
        )
        return _each(n, self.size, self.threads, body)
