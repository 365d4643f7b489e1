"""Fragments of tiles in shared memory, in the registers of a warp.

Owns `Part`: how a warp loads the fragments of its rows of an operand. A fragment is made of matrices of eight
rows of 16 bytes along k: of an operand on the left as many below each other as the atom has rows, then along k; on
the right along k. Up to four are loaded at once, of which lane l gives the address of row l % 8 of matrix l / 8.
Elements of f32 are rounded to tf32 then; those that lie along rows are loaded one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, Let
from portmm.ir.thread_nodes import WHOLE, Do
from portmm.kernels.gpu.mma_transfer import PIECE, WORD

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.gpu.mma_transfer import Side

HIGH = 8
"""Rows of a matrix."""


@dataclass(frozen=True, slots=True)
class Part:
    """A warp's rows of an operand.

    Attributes:
        side: the operand.
        rows: of the warp.
        high: rows of an atom's fragment.
        k: elements of k of an atom.
        first: the warp's first row in the tile.
    """

    side: Side
    rows: int
    high: int
    k: int
    first: Index

    @property
    def deep(self) -> int:
        """Matrices of a fragment along k."""
        return self.k * self.side.bytes // PIECE

    @property
    def words(self) -> int:
        """Registers of a lane for a fragment."""
        return self.high // HIGH * self.deep

    @property
    def fragments(self) -> int:
        """Of one step of k."""
        return self.rows // self.high

    @property
    def count(self) -> int:
        """Registers of a lane for one step of k."""
        return self.fragments * self.words

    @property
    def at_once(self) -> int:
        """Matrices of one load."""
        return next(x for x in (4, 2, 1) if self.count % x == 0)

    @property
    def below(self) -> int:
        """Matrices of a fragment below each other."""
        return self.high // HIGH

    def places(self) -> tuple[Stmt, ...]:
        """What this lane's addresses have in common: line, piece, and what pieces of its lines are exchanged by.

        Fragments are whole turns of the exchange apart, so that one number serves all.
        """
        if self.side.by_words:
            return self._places_of_words()
        n, side, words = self.side.name, self.side, min(self.words, self.at_once)
        own = var("lane") // HIGH % self.at_once if self.at_once > 1 else const(0)
        matrix = own % words if words < self.at_once else own
        fragment = own // words if words < self.at_once else const(0)
        row = (fragment * self.below + (matrix % self.below if self.below > 1 else const(0))) * HIGH
        deep = matrix // self.below
        inside = var("lane") % HIGH
        if side.along == "k":
            line, piece = self.first + row + inside, deep
        else:
            line, piece = deep * HIGH + inside, (self.first + row) // side.per_piece
        turn = side.turned(line if side.along == "k" else inside)
        return (Let(f"{n}_top", line), Let(f"{n}_left", piece), Let(f"{n}_turn", turn))

    def load(self, to: Ptr, tile: Index, step: Index) -> tuple[Stmt, ...]:
        """Load all fragments of a step of k of the tile that begins at some element."""
        if self.side.by_words:
            return self._load_words(to, tile, step)
        n, side, group = self.side.name, self.side, var("group")
        # A group of matrices is whole fragments, or a part of one.
        parts = max(1, self.words // self.at_once)
        rows = group // parts * max(1, self.at_once // self.words) * self.high
        deep = step * self.deep + group % parts * (self.at_once // self.below)
        line, piece = var(f"{n}_top"), var(f"{n}_left")
        if side.along == "k":
            line, piece = line + rows, piece + deep
        else:
            line, piece = line + deep * HIGH, piece + rows // side.per_piece
        at = line * side.width + (piece ^ var(f"{n}_turn")) * side.per_piece
        trans = "" if side.along == "k" else "trans_"
        name = f"ldmatrix_{trans}x{self.at_once}"
        call = Do(name, (to + group * self.at_once, Ptr(f"{n}_tile", tile + at)))
        loads = For("group", const(0), const(self.count // self.at_once), const(1), (call,), WHOLE)
        return (loads, *self._rounded(to)) if side.bytes == WORD else (loads,)

    def _rounded(self, to: Ptr) -> tuple[Stmt, ...]:
        """Make tf32 of what was loaded."""
        return (For("word", const(0), const(self.count), const(1), (Do("tf32_round", (to + var("word"),)),), WHOLE),)

    def _places_of_words(self) -> tuple[Stmt, ...]:
        n, side, lane = self.side.name, self.side, var("lane")
        row = self.first + lane // WORD
        turn = side.turned(lane % WORD)
        return (Let(f"{n}_top", lane % WORD), Let(f"{n}_left", row // side.per_piece), Let(f"{n}_turn", turn))

    def _load_words(self, to: Ptr, tile: Index, step: Index) -> tuple[Stmt, ...]:
        """Load fragments word by word, from lines along rows."""
        n, side, q = self.side.name, self.side, var("matrix")
        rows = (q // self.words * self.below + (q % self.below if self.below > 1 else const(0))) * HIGH
        line = var(f"{n}_top") + (step * self.deep + q % self.words // self.below) * WORD
        piece = (var(f"{n}_left") + rows // side.per_piece) ^ var(f"{n}_turn")
        at = line * side.width + piece * side.per_piece + var("lane") // WORD % side.per_piece
        call = Do("tf32_load", (to + q, Ptr(f"{n}_tile", tile + at)))
        return (For("matrix", const(0), const(self.count), const(1), (call,), WHOLE),)
