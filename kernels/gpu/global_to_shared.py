"""Tiles of A and B, from global to shared memory.

Owns `Feed`: how the threads of a block fetch a slice of an operand, R rows (of A, or
columns of B) by BK units of k, and put it to shared memory as [k][R], so that a step of k reads
neighbours. A thread moves a *piece* at once: `vector` neighbours along k or along
rows, whichever lie side by side in memory; else one unit.

Past the last row, rows are read again: what they give is not stored. Past the last k, zeros
are put: both operands have them, so a NaN in memory does not spread.

Bank conflicts. Where memory runs along k, the threads of a warp that put one piece's u-th
unit differ in row and in k; all banks repeat after 32 words, so row r of unit u
is put at r xor s(u), where s takes as many rows as there are in a warp per k to the next
free banks (`Feed.swizzle`). A bijection of each 32 rows, and of whole vectors of four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import For, If, Let, LetPtr, Move, Scratch
from portmm.ir.thread_nodes import WHOLE, CopyAsync, Interleave, Shared, Vector
from portmm.kernels.gpu import w4a16_transfer
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

BANKS = 32
WORD = 4
LANES = 4
"""Words that a thread reads from shared memory at once, at most."""


@dataclass(frozen=True, slots=True)
class Feed:
    """How an operand is fed.

    Attributes:
        name: "a" or "b".
        memory: type of its elements in memory.
        held: type in shared memory: "f32", or "s32" for units of four bytes.
        along: "k" or "row", what is side by side in memory; "any" if nothing is.
        vector: elements moved at once; beside units of four bytes, along rows, four or one.
        rows: of the tile.
        depth: units of k of the tile.
        kr: elements of a unit.
        threads: of the block.
        row_step: elements from one row to the next.
        k_step: elements from one k to the next.
        first: the block's first row.
        end: rows that there are.
        stages: tiles in shared memory.
        group: of codes, rows of k that share a scale, 0 for all; -1 where there are no codes.
    """

    name: str
    memory: str
    held: str
    along: str
    vector: int
    rows: int
    depth: int
    kr: int
    threads: int
    row_step: Index
    k_step: Index
    first: Index
    end: Index
    stages: int
    group: int = -1

    @property
    def units(self) -> int:
        """Units of k in a piece."""
        return max(1, self.vector // self.kr) if self.along == "k" else 1

    @property
    def lines(self) -> int:
        """Rows in a piece."""
        return self.vector if self.along == "row" else 1

    @property
    def pieces(self) -> int:
        """Of a tile."""
        return self.rows // self.lines * (self.depth // self.units)

    @property
    def turns(self) -> int:
        """Pieces of each thread."""
        return -(-self.pieces // self.threads)

    @property
    def elements(self) -> int:
        """Elements of a piece, filled up to whole units."""
        return self.lines * self.units * self.kr

    @property
    def size(self) -> int:
        """Words of one tile in shared memory."""
        return self.rows * self.depth

    def shared(self) -> Shared:
        """The tiles."""
        return Shared(f"{self.name}_tile", self.size * self.stages, self.held)

    def registers(self) -> tuple[Stmt, ...]:
        """What is on its way."""
        if self.group >= 0:
            return w4a16_transfer.registers(self.turns)
        found: list[Stmt] = [Scratch(f"{self.name}_next", self.turns * self.elements, self.memory)]
        if self.lines > 1 and self.memory != self.held:
            found.append(Scratch(f"{self.name}_wide", self.lines, self.held))
        return tuple(found)

    def swizzle(self, unit: Index) -> Index:
        """What the row of a unit of k is put at the xor with: see above."""
        if self.along != "k" or self.rows % BANKS:
            return const(0)
        across = min(self.depth // self.units, BANKS)
        apart = max(BANKS // across, LANES)  # vectors of four stay together
        turns = BANKS // apart
        if turns < 2 or across < 2:
            return const(0)
        return unit // self.units % turns * apart

    def _piece(self, turn: Index) -> tuple[Stmt, ...]:
        """Where a piece of this thread is: its first row and unit."""
        n = self.name
        e = var(f"{n}_piece")
        if self.along == "row":
            across = self.rows // self.lines
            row, unit = e % across * self.lines, e // across
        else:
            across = self.depth // self.units
            row, unit = e // across, e % across * self.units
        return (Let(f"{n}_piece", var("thread") + turn * self.threads), Let(f"{n}_row", row), Let(f"{n}_unit", unit))

    def _each(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Run for each piece of this thread."""
        turn = var("turn")
        if self.pieces % self.threads:
            body = (If(var(f"{self.name}_piece").lt(self.pieces), body),)
        return (For("turn", const(0), const(self.turns), const(1), (*self._piece(turn), *body), WHOLE),)

    def _source(self, k: Index) -> tuple[Stmt, ...]:
        """The address of a piece, of a tile that begins at some k."""
        n = self.name
        last = self.end - self.lines
        row = minimum(self.first + var(f"{n}_row"), last)
        at = row * self.row_step + var(f"{n}_at") * self.k_step
        return (
            Let(f"{n}_at", k + var(f"{n}_unit") * self.kr),
            LetPtr(f"{n}_from", Ptr(f"{n}_item", at), self.memory, readonly=True),
        )

    def fetch(self, k: Index, end: Index) -> tuple[Stmt, ...]:
        """Load this thread's pieces of the tile at k to registers, zeros from `end` on."""
        if self.group >= 0:
            return self._each(
                w4a16_transfer.fetch(minimum(self.first + var("b_row"), self.end - 1), self.group, k, end)
            )
        n, size = self.name, BY_NAME[self.memory].bytes
        to, src, at = Ptr(f"{n}_next", var("turn") * self.elements), Ptr(f"{n}_from"), var(f"{n}_at")
        body: list[Stmt] = list(self._source(k))
        if self.along == "k" and self.vector >= self.kr:
            body.append(or_zeros(at.lt(end), to, src, self.vector, size))
        else:
            body += [
                or_zeros((at + j).lt(end), to + j * self.lines, src + const(j) * self.k_step, self.lines, size)
                for j in range(self.kr)
            ]
        return self._each(tuple(body))

    def put(self, stage: Index) -> tuple[Stmt, ...]:
        """Store the pieces in registers to a tile in shared memory, as it holds them."""
        n = self.name
        row, unit = var(f"{n}_row"), var(f"{n}_unit")
        tile = Ptr(f"{n}_tile", stage * self.size)
        if self.group >= 0:
            return self._each(w4a16_transfer.put(tile + (unit * self.rows + (row ^ self.swizzle(unit))), self.rows))
        next_ = Ptr(f"{n}_next", var("turn") * self.elements)
        body: list[Stmt] = []
        if self.kr > 1:
            body.append(LetPtr(f"{n}_words", next_, self.held))
            next_ = Ptr(f"{n}_words")
        if self.lines > 1:
            to = tile + (unit * self.rows + row)
            body += self._put_lines(to, next_)
        else:
            for u in range(self.units):
                where = (unit + u) * self.rows + (row ^ self.swizzle(unit))
                body.append(Move(tile + where, next_ + u))
        return self._each(tuple(body))

    def _put_lines(self, to: Ptr, src: Ptr) -> list[Stmt]:
        """Neighbouring rows of one unit, four words at once."""
        n = self.name
        body: list[Stmt] = []
        if self.kr > 1:
            wide = Ptr(f"{n}_wide")
            body.append(Interleave(wide, src))
            src = wide
        elif self.memory != self.held:
            wide, e = Ptr(f"{n}_wide"), var("e")
            body.append(For("e", const(0), const(self.lines), const(1), (Move(wide + e, src + e),), WHOLE))
            src = wide
        at_once = min(self.lines, LANES)
        body += [Vector(to + i, src + i, at_once * WORD) for i in range(0, self.lines, at_once)]
        return body

    @property
    def copies(self) -> int:
        """Bytes of an asynchronous copy, 0 where there can be none: nothing can be converted on the way."""
        if self.memory != self.held or self.kr > 1:
            return 0
        return WORD * (self.vector if self.along == "row" else 1)

    def copy(self, k: Index, end: Index, stage: Index) -> tuple[Stmt, ...]:
        """Begin to copy this thread's pieces of the tile at k."""
        n = self.name
        row, unit, at = var(f"{n}_row"), var(f"{n}_unit"), var(f"{n}_at")
        tile, src = Ptr(f"{n}_tile", stage * self.size), Ptr(f"{n}_from")
        body: list[Stmt] = list(self._source(k))
        for u in range(self.units):
            where = (unit + u) * self.rows + (row ^ self.swizzle(unit))
            body.append(CopyAsync(tile + where, src + const(u) * self.k_step, self.copies, (at + u).lt(end)))
        return self._each(tuple(body))


def or_zeros(there: Index, to: Ptr, src: Ptr, count: int, size: int) -> If:
    """Load `count` elements of `size` bytes, or zeros."""
    e = var("e")
    if count == 1:
        return If(there, (Move(to, src),), (Move(to, None),))
    zeros = For("e", const(0), const(count), const(1), (Move(to + e, None),), WHOLE)
    return If(there, (Vector(to, src, count * size),), (zeros,))
