"""Global-to-shared transfer of tiles of A and B.

Owns `Transfer`: the threads of a block load a slice of an operand, R rows (of A, or
columns of B) by BK units of k, and store it to shared memory as [k][R], so that a step of k reads
neighbours. A thread moves a *piece* at once: `vector` neighbours along k or along
rows, whichever are contiguous in memory; else one unit.

Past the last row, rows are read again: their results are not stored. Past the last k, zeros
are stored, for both operands, so a NaN in memory does not spread.

Of int4 weights it moves a word, eight values of one column, with the scale and the offset of their group, and stores
floats.

Bank conflicts. Where memory is contiguous along k, the threads of a warp that store one piece's u-th
unit differ in row and in k; all banks repeat after 32 words, so row r of unit u
is stored at r xor s(u), where s moves as many rows as there are in a warp per k to the next
free banks (`Transfer.swizzle`). This is a bijection of each 32 rows, and of whole vectors of four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.address import offset
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import If, Let, LetPtr, Mac, Move, Scratch
from portmm.ir.thread_nodes import Codes, CopyAsync, Interleave, Shared, Vector
from portmm.kernels.gpu.loops import or_zeros, unrolled
from portmm.kernels.gpu.product import OperandTile
from portmm.spec.dtype import CODES_KR

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

BANKS = 32
WORD = 4
LANES = 4
"""Maximum number of words that a thread reads from shared memory at once."""

_SCALES = {"scale": "scales", "offset": "offsets"}


@dataclass(frozen=True, slots=True)
class Transfer(OperandTile):
    """Tile of one operand, in units; vectors along rows are of four units, or one.

    Attributes:
        storage: type in shared memory: "f32", or "s32" for units of four bytes.
        kr: elements of a unit.
        group: quantization group of int4 weights, in rows of k, 0 for all; -1 for other types.
    """

    storage: str
    kr: int
    group: int = -1

    @property
    def units(self) -> int:
        """Number of units of k in a piece."""
        return max(1, self.vector // self.kr) if self.along == "k" else 1

    @property
    def lines(self) -> int:
        """Number of rows in a piece."""
        return self.vector if self.along == "row" else 1

    @property
    def pieces(self) -> int:
        """Number of pieces of a tile."""
        return self.rows // self.lines * (self.depth // self.units)

    @property
    def turns(self) -> int:
        """Number of pieces of each thread."""
        return -(-self.pieces // self.threads)

    @property
    def elements_of_k(self) -> int:
        """Number of elements of k of a tile."""
        return self.depth * self.kr

    @property
    def elements(self) -> int:
        """Number of elements of a piece, rounded up to whole units."""
        return self.lines * self.units * self.kr

    def shared(self) -> Shared:
        """Shared memory array of the tiles."""
        return Shared(f"{self.name}_tile", self.size * self.stages, self.storage)

    def registers(self) -> tuple[Stmt, ...]:
        """Registers for pieces in flight."""
        if self.group >= 0:
            return _int4_registers(self.turns)
        registers: list[Stmt] = [Scratch(f"{self.name}_next", self.turns * self.elements, self.dtype)]
        if self.lines > 1 and self.dtype != self.storage:
            registers.append(Scratch(f"{self.name}_wide", self.lines, self.storage))
        return tuple(registers)

    def swizzle(self, unit: Index) -> Index:
        """Number that the rows of a unit of k are xored with: see above."""
        if self.along != "k" or self.rows % BANKS:
            return const(0)
        across = min(self.depth // self.units, BANKS)
        apart = max(BANKS // across, LANES)  # vectors of four stay together
        turns = BANKS // apart
        if turns < 2 or across < 2:
            return const(0)
        return unit // self.units % turns * apart

    def _piece(self, turn: Index) -> tuple[Stmt, ...]:
        """Coordinates of a piece of this thread: its first row and unit."""
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
        """Loop over the pieces of this thread."""
        turn = var("turn")
        if self.pieces % self.threads:
            body = (If(var(f"{self.name}_piece").lt(self.pieces), body),)
        return (unrolled("turn", self.turns, *self._piece(turn), *body),)

    @property
    def _row(self) -> Index:
        """First row of a piece in memory; past the last row it is read again."""
        return minimum(self.first + var(f"{self.name}_row"), self.end - self.lines)

    def _source(self, k: Index) -> tuple[Stmt, ...]:
        """Address of a piece, of a tile that begins at k."""
        n = self.name
        within = var(f"{n}_unit") * self.kr
        at = self.address(self._row, var(f"{n}_at"), within)
        return (
            Let(f"{n}_at", k + within),
            LetPtr(f"{n}_from", Ptr(f"{n}_item", at), self.dtype, readonly=True),
        )

    def fetch(self, k: Index, end: Index) -> tuple[Stmt, ...]:
        """Loads of this thread's pieces of the tile at k to registers, zeros from `end` on."""
        if self.group >= 0:
            return self._each(_fetch_int4(minimum(self.first + var("b_row"), self.end - 1), self.group, k, end))
        n, size, row = self.name, self.bytes, self._row
        to, src, at = Ptr(f"{n}_next", var("turn") * self.elements), Ptr(f"{n}_from"), var(f"{n}_at")
        body: list[Stmt] = list(self._source(k))
        if self.along == "k" and self.vector >= self.kr:
            body.append(or_zeros(self.inside(row, at, end), to, src, self.vector, size, self.padding))
        elif self.layout.transforms:  # neighbours may be in other lines of memory
            within = var(f"{n}_unit") * self.kr
            for j in range(self.kr):
                element = Ptr(f"{n}_item", self.address(row, at + j, within + j))
                body.append(or_zeros(self.inside(row, at + j, end), to + j, element, 1, size, self.padding))
        else:
            body += [
                or_zeros((at + j).lt(end), to + j * self.lines, src + offset(self.layout, 0, j), self.lines, size)
                for j in range(self.kr)
            ]
        return (*self.of_tile(k), *self._each(tuple(body)))

    def put(self, stage: Index) -> tuple[Stmt, ...]:
        """Stores of the pieces in registers to a tile in shared memory, in its type and layout."""
        n = self.name
        row, unit = var(f"{n}_row"), var(f"{n}_unit")
        tile = Ptr(f"{n}_tile", stage * self.size)
        if self.group >= 0:
            return self._each(_put_int4(tile + (unit * self.rows + (row ^ self.swizzle(unit))), self.rows))
        next_ = Ptr(f"{n}_next", var("turn") * self.elements)
        body: list[Stmt] = []
        if self.kr > 1:
            body.append(LetPtr(f"{n}_words", next_, self.storage))
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
        """Stores of neighbouring rows of one unit, four words at once."""
        n = self.name
        body: list[Stmt] = []
        if self.kr > 1:
            words = Ptr(f"{n}_wide")
            body.append(Interleave(words, src))
            src = words
        elif self.dtype != self.storage:
            words, e = Ptr(f"{n}_wide"), var("e")
            body.append(unrolled("e", self.lines, Move(words + e, src + e)))
            src = words
        at_once = min(self.lines, LANES)
        body += [Vector(to + i, src + i, at_once * WORD) for i in range(0, self.lines, at_once)]
        return body

    @property
    def copies(self) -> int:
        """Number of bytes of an asynchronous copy, 0 where it is impossible: it cannot convert types."""
        if self.dtype != self.storage or self.kr > 1:
            return 0
        return WORD * (self.vector if self.along == "row" else 1)

    def copy(self, k: Index, end: Index, stage: Index) -> tuple[Stmt, ...]:
        """Asynchronous copies of this thread's pieces of the tile at k."""
        n = self.name
        row, unit, at = var(f"{n}_row"), var(f"{n}_unit"), var(f"{n}_at")
        tile, src = Ptr(f"{n}_tile", stage * self.size), Ptr(f"{n}_from")
        body: list[Stmt] = list(self._source(k))
        for u in range(self.units):
            where = (unit + u) * self.rows + (row ^ self.swizzle(unit))
            source = src + (const(u) if self.along == "k" or not u else offset(self.layout, 0, u))
            body.append(CopyAsync(tile + where, source, self.copies, self.inside(self._row, at + u, end)))
        return (*self.of_tile(k), *self._each(tuple(body)))


def _int4_registers(turns: int) -> tuple[Stmt, ...]:
    """Registers for words and scales in flight."""
    scales = (Scratch(name, turns, "f32") for name in _SCALES)
    return (Scratch("b_next", turns, "s32"), *scales, Scratch("code", CODES_KR, "f32"), Scratch("number", 1, "f32"))


def _fetch_int4(column: Index, group: int, k: Index, end: Index) -> tuple[Stmt, ...]:
    """Load of a word of the tile at k, zeros from `end` on; `group` rows share a scale, or all if it is 0."""
    turn, at = var("turn"), var("b_at")
    number = at // group if group else const(0)
    word = Move(Ptr("b_next", turn), Ptr("b_item", var("b_column") * var("words") + at // CODES_KR))
    scales = [Move(Ptr(to, turn), Ptr(src, var("b_column") * var("groups") + number)) for to, src in _SCALES.items()]
    zeros = tuple(Move(Ptr(to, turn), None) for to in ("b_next", *_SCALES))
    return (Let("b_at", k + var("b_unit")), Let("b_column", column), If(at.lt(end), (word, *scales), zeros))


def _put_int4(to: Ptr, rows: int) -> tuple[Stmt, ...]:
    """Stores of the eight weights of a word, `rows` words apart."""
    turn, e, number = var("turn"), var("e"), Ptr("number")
    weight = (Move(number, Ptr("offset", turn)), Mac(number, Ptr("scale", turn), Ptr("code", e)))
    each = (*weight, Move(to + e * rows, number))
    return (Codes(Ptr("code"), Ptr("b_next", turn)), unrolled("e", CODES_KR, *each))
