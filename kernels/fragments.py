"""Fragments of tiles in shared memory, in the registers of a warp.

Owns `Part`: how a warp loads the fragments of its rows of an operand. A fragment is made of matrices of eight
rows of 16 bytes along k: of an operand on the left as many below each other as the atom has rows, then along k; on
the right along k. Up to four are loaded at once, of which lane l gives the address of row l % 8 of matrix l / 8.
Elements of f32 are rounded to tf32 then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.kernels.matrix_feed import PIECE, WORD

from portmm.index import Ptr, const, var
from portmm.ir import For, Let
from portmm.threads import WHOLE, Do

if TYPE_CHECKING:
    from portmm.kernels.matrix_feed import Side

    from portmm.index import Index
    from portmm.ir import Stmt

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

    def load(self, to: Ptr, tile: Index, step: Index) -> tuple[Stmt, ...]:
        """Load all fragments of a step of k of the tile that begins at some element."""
        side = self.side
        if side.by_words:
            return self._load_words(to, tile, step)
        at_once = 4 if self.count % 4 == 0 else 2 if self.count % 2 == 0 else 1
        q = var("matrix")
        below = self.high // HIGH
        row = (q // self.words * below + (q % below if below > 1 else const(0))) * HIGH
        deep = q % self.words // below
        inside = var("lane") % HIGH
        if side.along == "k":
            line, piece = self.first + row + inside, step * self.deep + deep
        else:
            line, piece = (step * self.deep + deep) * HIGH + inside, (self.first + row) // side.per_piece
        trans = "" if side.along == "k" else "trans_"
        group = var("group")
        name = f"ldmatrix_{trans}x{at_once}"
        call = Do(name, (to + group * at_once, Ptr(f"{side.name}_tile", tile + side.at(line, piece))))
        own = var("lane") // HIGH % at_once if at_once > 1 else const(0)
        body = (Let("matrix", group * at_once + own), call)
        loads = For("group", const(0), const(self.count // at_once), const(1), body, WHOLE)
        return (loads, *self._rounded(to)) if side.bytes == WORD else (loads,)

    def _rounded(self, to: Ptr) -> tuple[Stmt, ...]:
        """Make tf32 of what was loaded."""
        return (For("word", const(0), const(self.count), const(1), (Do("tf32_round", (to + var("word"),)),), WHOLE),)

    def _load_words(self, to: Ptr, tile: Index, step: Index) -> tuple[Stmt, ...]:
        """Load fragments of tf32 word by word, from lines along rows."""
        side, q, lane = self.side, var("matrix"), var("lane")
        below = self.high // HIGH
        row = self.first + (q // self.words * below + (q % below if below > 1 else const(0))) * HIGH + lane // WORD
        line = (step * self.deep + q % self.words // below) * WORD + lane % WORD
        at = side.at(line, row // side.per_piece) + row % side.per_piece
        call = Do("tf32_load", (to + q, Ptr(f"{side.name}_tile", tile + at)))
        return (For("matrix", const(0), const(self.count), const(1), (call,), WHOLE),)
