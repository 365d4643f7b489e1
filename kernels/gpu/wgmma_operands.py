"""Operands of fused epilogues of wgmma kernels, which come while their tile is multiplied.

Owns `WgmmaOperands`, the geometry of a warpgroup's panels of C and what fused expressions read in them. Elements of
arrays of columns are loaded before a tile's multiplication and wait in shared memory. Arrays of 16 bits of C's rows
and columns are copied there panel by panel, asynchronously: each warp copies its rows, 16 bytes at once, and loads
matrices of them. The first panels are copied before the multiplication, each later one when a panel has been stored.
Results of a panel replace what its first array had there. Other operands are loaded element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import lane_column, lane_row
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import For, If, Let, LetPtr, Move, Scratch
from portmm.ir.thread_nodes import CopyAsync, CopyCommit, CopyWait, Do, Get, Shared, Vector
from portmm.kernels.gpu.fragments import of
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.product import Product
from portmm.schedule.gpu_wgmma import (
    STRIP,
    column_operands,
    columns,
    panel,
    panel_buffers,
    panel_rows,
    panels,
    staged,
    strips,
    whole_operands,
)
from portmm.schedule.schedule import WARPGROUP
from portmm.spec.dtype import BY_NAME
from portmm.spec.layouts import VECTOR, swizzled

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

PAIR, SIDE = 2, 8
"""Neighbouring columns of a lane, and rows and columns of an 8 x 8 matrix."""
HALVES = 2
"""Matrices of a warp along m."""
WORD = 4
"""Bytes of the least vector."""
SIZE = 2
"""Bytes of an element of C, where it is staged."""
FIRST_BARRIER = 1
"""Barrier of the first warpgroup; 0 is that of the whole block."""


@dataclass(frozen=True, slots=True)
class WgmmaOperands(Product):
    """Panels of a warpgroup's results, and operands of their expressions."""

    @property
    def staged(self) -> bool:
        """Whether results are staged in shared memory."""
        return staged(self.s)

    @property
    def lines(self) -> int:
        """Number of rows of C of one TMA store."""
        return panel_rows(self.s)

    @property
    def buffers(self) -> int:
        """Number of panels in shared memory, of each warpgroup: of C, or of arrays that come there."""
        return panel_buffers(self.s)

    @property
    def slots(self) -> int:
        """Number of panels that are in shared memory, each with all arrays that come there."""
        return self.buffers // max(len(self.read), 1)

    @property
    def panels(self) -> int:
        """Number of panels of the tile of a warpgroup."""
        return panels(self.s)

    @property
    def size(self) -> int:
        """Number of elements of a panel."""
        return self.lines * panel(self.s)

    @property
    def words(self) -> int:
        """Number of registers of a lane for one stmatrix: matrices, of which a warp has two along m."""
        return HALVES * (2 if columns(self.s) // SIDE % 2 == 0 else 1)

    @property
    def puts(self) -> int:
        """Number of stmatrix instructions of a panel."""
        return (self.lines if self.s.atom.swap else panel(self.s)) // SIDE // (self.words // HALVES)

    @property
    def own_row(self) -> Index:
        """Row of a lane's first sum, of those of its warp."""
        return lane_row(of(self.atom.acc_fragment), var("lane"), self.isa.warp)

    @property
    def own_column(self) -> Index:
        """Column of a lane's first sum."""
        return lane_column(of(self.atom.acc_fragment), var("lane"), self.isa.warp)

    @property
    def elected(self) -> Index:
        """Whether this thread starts the TMA stores of its warpgroup."""
        return (var("thread") % WARPGROUP).eq(0)

    def sync(self) -> Stmt:
        """Barrier of a warpgroup."""
        return Do("block_barrier_sync", (var("group") + FIRST_BARRIER, const(WARPGROUP)))

    def place(self, line: Index, vector: Index) -> Index:
        """Offset of a vector of a line in a panel."""
        return swizzled(panel(self.s), SIZE).offset((line, vector, 0))

    def dtype_of(self, i: int) -> str:
        """Type of an operand."""
        assert self.s.fused is not None  # noqa: S101 - it has operands
        return self.s.fused.operands[i].dtype

    @property
    def read(self) -> tuple[int, ...]:
        """Operands whose panels come through shared memory."""
        return whole_operands(self.s)

    @property
    def along(self) -> tuple[int, ...]:
        """Operands of columns alone, whose elements of a tile are in shared memory."""
        return column_operands(self.s)

    @property
    def whole(self) -> bool:
        """Whether expressions may be computed for elements out of bounds, as nothing is loaded or stored there."""
        fused = self.s.fused
        if fused is None or len(fused.results) > 1:
            return False
        brought = (*self.read, *self.along)
        return all(i in brought or set(x.axes) <= {"b"} for i, x in enumerate(fused.operands))

    def of_operands(self) -> list[Stmt]:
        """Shared memory of operands of columns."""
        groups = self.s.parallel.warpgroups
        return [Shared(f"x{i}_line", groups * columns(self.s), self.dtype_of(i)) for i in self.along]

    def registers(self) -> list[Stmt]:
        """Registers for elements of operands."""
        registers: list[Stmt] = []
        count = self.words // HALVES * PAIR
        for i in self.along:
            dtype = self.dtype_of(i)
            registers += [Scratch(f"x{i}_now", count, dtype), Scratch(f"x{i}_first", self.pieces, dtype)]
        for i in self.read:
            registers.append(Scratch(f"x{i}_words", self.words, "b32"))
            registers.append(LetPtr(f"x{i}_part", Ptr(f"x{i}_words"), self.dtype_of(i), readonly=True))
        return registers

    def early(self, first: Index) -> tuple[Stmt, ...]:
        """Loads and copies that the multiplication of a tile hides, whose rows of a warpgroup begin at `first`."""
        if not self.staged or not (self.along or self.read):
            return ()
        own = [self._beginning(i) for i in (*self.along, *self.read)]
        return (*own, *self._loaded(), *self._first_panels(first))

    def _beginning(self, i: int) -> Stmt:
        """Address of the item's part of an operand."""
        assert self.s.fused is not None  # noqa: S101 - it has operands
        x = self.s.fused.operands[i]
        at = var("item") * var(f"x{i}_b") if "b" in x.axes else const(0)
        return LetPtr(f"x{i}_from", Ptr(f"x{i}_all", at), x.dtype, readonly=True)

    # -- of columns ------------------------------------------------------------------

    @property
    def pieces(self) -> int:
        """Number of elements of a tile's columns that a thread brings."""
        return -(-columns(self.s) // WARPGROUP)

    def _which(self) -> Stmt:
        """Column of a tile that a thread brings."""
        return Let("place", var("thread") % WARPGROUP + var("e") * WARPGROUP)

    def _loaded(self) -> tuple[Stmt, ...]:
        """Loads of a tile's columns into registers."""
        place, e = var("place"), var("e")
        inside = place.lt(columns(self.s)) * (var("column_0") + place).lt(var("n"))
        loads = tuple(
            If(inside, (Move(first, Ptr(f"x{i}_from", var("column_0") + place)),), (Move(first, None),))
            for i, first in ((i, Ptr(f"x{i}_first", e)) for i in self.along)
        )
        return (unrolled("e", self.pieces, self._which(), *loads),) if loads else ()

    def kept(self) -> tuple[Stmt, ...]:
        """Stores of these registers to shared memory: all panels of the tile before have been computed."""
        line, e = var("group") * columns(self.s), var("e")
        moves = tuple(Move(Ptr(f"x{i}_line", line + var("place")), Ptr(f"x{i}_first", e)) for i in self.along)
        stores = If(var("place").lt(columns(self.s)), moves)
        return (unrolled("e", self.pieces, self._which(), stores), self.sync()) if moves else ()

    def of_columns(self, part: Index) -> tuple[Stmt, ...]:
        """Loads of the elements of a lane's columns of one stmatrix of a panel."""
        count, near = self.words // HALVES, var("near")
        place = part * panel(self.s) + (var("put") * count + near) * SIDE + self.own_column
        at = var("group") * columns(self.s) + place
        moves: list[Stmt] = []
        for i in self.along:
            moves += self._pair(i, Ptr(f"x{i}_now", near * PAIR), Ptr(f"x{i}_line", at))
        return (unrolled("near", count, *moves),) if moves else ()

    def _pair(self, i: int, to: Ptr, src: Ptr) -> tuple[Stmt, ...]:
        """Loads of two neighbours, as a vector if they are words."""
        size = PAIR * BY_NAME[self.dtype_of(i)].bytes
        if size >= WORD:
            return (Vector(to, src, size),)
        return tuple(Move(to + e, src + e) for e in range(PAIR))

    # -- of rows and columns -----------------------------------------------------------

    def at(self, piece: Index, which: int = 0) -> Index:
        """First element of a panel of one of the arrays that come, or of the results that replace the first."""
        slot = var("group") * self.slots + piece % self.slots
        return (slot * len(self.read) + which) * self.size

    def _first_panels(self, first: Index) -> tuple[Stmt, ...]:
        """Copies of the first panels of a tile, when TMA stores have read those of the tile before."""
        if not self.read:
            return ()
        aligned = [y for i in self.read for y in self._aligned(i)]
        free = (If(self.elected, (Do("tma_store_read_0"),)), self.sync())
        copies = unrolled("piece", self.slots, *self._brought(first), CopyCommit())
        return (*aligned, *free, copies)

    def landed(self) -> tuple[Stmt, ...]:
        """Wait for the copies of a panel: `further` has ended as many groups since as there were panels."""
        return (CopyWait(1 if self.panels > self.slots else 0), self.sync()) if self.read else ()

    def further(self, first: Index) -> tuple[Stmt, ...]:
        """Copies for a panel in the place of the one before that which has been sent last."""
        if not self.read or self.panels <= self.slots:
            return ()
        free = (If(self.elected, (Do("tma_store_read_1"),)), self.sync())
        later = Let("later", var("piece") + (self.slots - 1))
        moved = const(0).lt(var("piece")) * (var("piece") + (self.slots - 1)).lt(self.panels)
        return (If(moved, (*free, later, *self._brought(first, var("later")))), CopyCommit())

    def _aligned(self, i: int) -> tuple[Stmt, ...]:
        """Whether rows of an operand are whole vectors, those in bounds too."""
        per = VECTOR // SIZE
        low = Get(f"x{i}_low", "misaligned", (Ptr(f"x{i}_from"),))
        return (low, Let(f"x{i}_whole", var(f"x{i}_low").eq(0) * (var(f"x{i}_m") % per).eq(0) * (var("n") % per).eq(0)))

    def corner(self, first: Index, piece: Index) -> tuple[Index, Index]:
        """First row and column of a panel."""
        across = self.panels // strips(self.s)
        strip_row = first + (piece // across) * STRIP
        if self.s.atom.swap:
            return var("row_0"), var("column_0") + strip_row
        return var("row_0") + strip_row, var("column_0") + (piece % across) * panel(self.s)

    def _brought(self, first: Index, piece: Index | None = None) -> tuple[Stmt, ...]:
        """Copies of a warp's rows of a panel of each array to shared memory, where they are in bounds."""
        piece = var("piece") if piece is None else piece
        n, per = panel(self.s), VECTOR // SIZE
        count = HALVES * SIDE
        t, j, column = var("t"), var("j"), var("column")
        vector = var("lane") + t * self.isa.warp
        row_1, column_1 = self.corner(first, piece)
        turns = count * n // per // self.isa.warp
        stmts: list[Stmt] = []
        for which, i in enumerate(self.read):
            to = Ptr("c_tile", self.at(piece, which) + self.place(var("line"), vector % (n // per)))
            src = Ptr(f"x{i}_from", var("row") * var(f"x{i}_m") + column)
            where = (
                Let("line", var("warp") * count + vector // (n // per)),
                Let("row", row_1 + var("line")),
                Let("column", column_1 + vector % (n // per) * per),
            )
            rows = var("row").lt(var("m"))
            copies = unrolled("t", turns, *where, CopyAsync(to, src, VECTOR, rows * column.lt(var("n"))))
            # Rarely taken, so that its code is short.
            end = minimum(var("n") - column, per)
            single = If(rows, (For("j", const(0), end, const(1), (Move(to + j, src + j),), 0),))
            stmts.append(
                If(var(f"x{i}_whole"), (copies,), (For("t", const(0), const(turns), const(1), (*where, single), 0),))
            )
        return tuple(stmts)

    def matrices(self, piece: Index) -> tuple[Stmt, ...]:
        """Loads of the matrices of each array that belong to the sums of one stmatrix of a panel."""
        own, name = self.place(*self.matrix_of_lane()), f"ldmatrix_x{self.words}"
        return tuple(
            Do(name, (Ptr(f"x{i}_words"), Ptr("c_tile", self.at(piece, which) + own)))
            for which, i in enumerate(self.read)
        )

    def matrix_of_lane(self) -> tuple[Index, Index]:
        """Line and vector of a panel that a lane addresses of the matrices of one stmatrix."""
        put, near, lane, warp = var("put"), self.words // HALVES, var("lane"), var("warp")
        if self.s.atom.swap:
            return (
                (put * near + lane // (HALVES * SIDE)) * SIDE + lane % SIDE,
                warp * HALVES + lane // SIDE % HALVES,
            )
        return warp * (HALVES * SIDE) + lane % (HALVES * SIDE), put * near + lane // (HALVES * SIDE)
