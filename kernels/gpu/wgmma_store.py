"""Sums of warpgroups, on their way to memory.

Owns `Ending`. Where C is rows of halves that the copy engine can address, results of 64 columns pass through shared
memory: a warpgroup puts them there as matrices of eight rows (stmatrix), exchanged as the copy engine wants them,
and one thread sends them off (TMA) while the next are made, or the next tile is multiplied. Everything else goes
from registers to memory: `kernels.storing`. With `swap`, matrices are transposed on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, MapOf
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, Scratch
from portmm.ir.thread_nodes import WHOLE, Do, Shared
from portmm.kernels.gpu.epilogue_store import Storing, bottom, element, operands
from portmm.schedule.gpu_wgmma import BUFFERS, LINE, STRIP, SWIZZLED, columns, panel, staged, strips
from portmm.schedule.schedule import WARPGROUP
from portmm.spec.epilogue import parse

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.target.isa import Atom, Isa

PAIR, HIGH = 2, 8
"""Neighbours that a lane has, and rows and columns of a matrix."""
HALVES = 2
"""Matrices below each other that a warp has."""
FIRST_BARRIER = 1
"""The barrier of the first warpgroup; 0 is that of the whole block."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How sums are stored.

    Attributes:
        s: the schedule.
        isa: the instruction set.
        atom: what summed.
    """

    s: Schedule
    isa: Isa
    atom: Atom

    @property
    def staged(self) -> bool:
        """Results pass through shared memory."""
        return staged(self.s)

    @property
    def storing(self) -> Storing:
        """How results leave registers."""
        return Storing(self.s, self.isa, self.atom, (1, 1 if self.s.swap else PAIR))

    @property
    def fused(self) -> Fused | None:
        """What is computed of the sums."""
        return parse(self.s.fused) if self.s.fused else None

    @property
    def lines(self) -> int:
        """Rows of C that are sent at once."""
        return columns(self.s) if self.s.swap else STRIP

    @property
    def buffers(self) -> int:
        """Pieces of C in shared memory, of each warpgroup."""
        return min(BUFFERS, self.pieces)

    @property
    def pieces(self) -> int:
        """Of the tile of a warpgroup."""
        across = 1 if self.s.swap else columns(self.s) // panel(self.s)
        return strips(self.s) * across

    @property
    def size(self) -> int:
        """Elements of a piece."""
        return self.lines * panel(self.s)

    def argument(self) -> Argument:
        """C as the copy engine sees it."""
        wide, name = panel(self.s), self.s.types[2]
        sizes = (var("n"), var("m"), var("batch"))
        of = MapOf("c", name, sizes, (var("c_m"), var("c_batch")), (wide, self.lines, 1), wide * 2)
        return Argument("c_map", "map", map=of)

    def shared(self) -> list[Stmt]:
        """Where results wait for the copy engine."""
        if not self.staged:
            return []
        return [Shared("c_tile", self.s.groups * self.buffers * self.size, self.s.types[2], SWIZZLED)]

    def before(self) -> list[Stmt]:
        """What results pass through."""
        if not self.staged:
            return []
        found: list[Stmt] = [Scratch("c_words", self.puts * self.words, "b32")]
        return [*found, Scratch("c_out", self.words * PAIR, "f32")] if self.fused else found

    def after(self) -> list[Stmt]:
        """Shared memory must last until it is read."""
        return [If(self._elected, (Do("tma_store_read_0"),))] if self.staged else []

    def statements(self, first: Index) -> tuple[Stmt, ...]:
        """Store the sums of a warpgroup, whose rows on the left of the atom begin there in the tile."""
        if self.staged:
            return self._sent(first)
        return self._swapped(first) if self.s.swap else self._plain(first)

    # -- from registers ----------------------------------------------------------

    def _plain(self, first: Index) -> tuple[Stmt, ...]:
        i, cell, half = var("i"), var("cell"), var("half")
        at = (i * (columns(self.s) // HIGH) + cell) * (HALVES * PAIR) + half * PAIR
        row = var("row_0") + (first + i * STRIP) + var("warp") * (HALVES * HIGH) + half * HIGH + var("lane") // 4
        column = var("column_0") + cell * HIGH + var("lane") % 4 * PAIR
        storing, e = self.storing, var("e")
        if storing.vector == PAIR:
            piece: tuple[Stmt, ...] = (Let("column", column), *storing.piece(at))
        else:
            one = (Let("column", column + e), *storing.piece(at + e))
            piece = (For("e", const(0), const(PAIR), const(1), one, WHOLE),)
        cells = For("cell", const(0), const(columns(self.s) // HIGH), const(1), piece, WHOLE)
        rows = (Let("row", row), If(var("row").lt(bottom(self.s)), (cells,)))
        halves = For("half", const(0), const(HALVES), const(1), rows, WHOLE)
        return (*self.storing.before(), For("i", const(0), const(strips(self.s)), const(1), (halves,), WHOLE))

    def _swapped(self, first: Index) -> tuple[Stmt, ...]:
        i, cell, half, e = var("i"), var("cell"), var("half"), var("e")
        at = (i * (columns(self.s) // HIGH) + cell) * (HALVES * PAIR) + half * PAIR + e
        column = var("column_0") + (first + i * STRIP) + var("warp") * (HALVES * HIGH) + half * HIGH + var("lane") // 4
        row = var("row_0") + cell * HIGH + var("lane") % 4 * PAIR + e
        # A lane's two sums are of neighbouring rows of C.
        inner = (Let("row", row), If(var("row").lt(bottom(self.s)), self.storing.piece(at)))
        each = For("e", const(0), const(PAIR), const(1), inner, WHOLE)
        cells = For("cell", const(0), const(columns(self.s) // HIGH), const(1), (each,), WHOLE)
        halves = For("half", const(0), const(HALVES), const(1), (Let("column", column), cells), WHOLE)
        return (*self.storing.before(), For("i", const(0), const(strips(self.s)), const(1), (halves,), WHOLE))

    # -- through shared memory -----------------------------------------------------

    @property
    def _elected(self) -> Index:
        return (var("thread") % WARPGROUP).eq(0)

    @property
    def words(self) -> int:
        """Registers of a lane for what one instruction puts into shared memory: matrices, of which a warp has two."""
        return HALVES * (2 if columns(self.s) // HIGH % 2 == 0 else 1)

    @property
    def _tile(self) -> Index:
        """The number of a tile, of those of the warpgroup."""
        return var("number") // 2 if self.s.pingpong else var("number")

    def _sent(self, first: Index) -> tuple[Stmt, ...]:
        s, wide = self.s, panel(self.s)
        piece = var("piece") if self.pieces > 1 else const(0)
        across = self.pieces // strips(s)
        strip, part = piece // across, piece % across
        below = first + strip * STRIP
        row, column = (const(0), below) if s.swap else (below, part * wide)
        # Pieces of a tile that are odd in number leave the next tile another buffer to begin with.
        before = self._tile * self.pieces if self.pieces % self.buffers else const(0)
        buffer = (var("group") * self.buffers + (before + piece) % self.buffers) * self.size
        meet = Do("block_barrier_sync", (var("group") + FIRST_BARRIER, const(WARPGROUP)))
        # All that is fused of a piece is computed before any of it is put: what it reads is asked for at once.
        made = For("put", const(0), const(self.puts), const(1), self._made(strip, part), WHOLE)
        puts = For("put", const(0), const(self.puts), const(1), (self._put(),), WHOLE)
        send = Do("tma_store", (Ptr("c_map"), Ptr("c_tile", var("buffer")), var("column_1"), var("row_1"), var("item")))
        body: tuple[Stmt, ...] = (
            Let("row_1", var("row_0") + row),
            Let("column_1", var("column_0") + column),
            made,
            Let("buffer", buffer),
            # What was sent from this buffer before has been read.
            If(self._elected, (Do(f"tma_store_read_{self.buffers - 1}"),)),
            meet,
            puts,
            Do("fence_async_shared"),
            meet,
            If(self._elected, (send, Do("tma_store_commit"))),
        )
        found = operands(self.isa, self.fused) if self.fused else []
        if self.pieces > 1:
            body = (For("piece", const(0), const(self.pieces), const(1), body, WHOLE),)
        return (*found, *body)

    @property
    def puts(self) -> int:
        """Instructions that put a piece."""
        return (self.lines if self.s.swap else panel(self.s)) // HIGH // (self.words // HALVES)

    def _made(self, strip: Index, part: Index) -> tuple[Stmt, ...]:
        """Compute what one instruction puts, in pairs of 16 bits."""
        s, put, q = self.s, var("put"), var("q")
        columns_before = part * (panel(s) // HIGH) + put * (self.words // HALVES)
        at = (strip * (columns(s) // HIGH) + columns_before) * (HALVES * PAIR)
        source = Ptr("c_out", q * PAIR) if self.fused else Ptr("acc", at + q * PAIR)
        pack = Do(f"pair_{s.types[2]}", (Ptr("c_words", put * self.words + q), source))
        values = self._values(self.fused, at) if self.fused else ()
        return (*values, For("q", const(0), const(self.words), const(1), (pack,), WHOLE))

    def _put(self) -> Stmt:
        """Put matrices side by side, two of the warp's below each other, into shared memory."""
        s, wide, put = self.s, panel(self.s), var("put")
        near = self.words // HALVES
        lane, warp = var("lane"), var("warp")
        if s.swap:
            line, piece = (
                (put * near + lane // (HALVES * HIGH)) * HIGH + lane % HIGH,
                warp * HALVES + lane // HIGH % HALVES,
            )
        else:
            line, piece = warp * (HALVES * HIGH) + lane % (HALVES * HIGH), put * near + lane // (HALVES * HIGH)
        turned = line // (LINE // (wide * 2)) % (wide // HIGH)
        to = Ptr("c_tile", var("buffer") + line * wide + (piece ^ turned) * HIGH)
        name = f"stmatrix_{'trans_' if s.swap else ''}x{self.words}"
        return Do(name, (to, Ptr("c_words", put * self.words)))

    def _values(self, fused: Fused, at: Index) -> tuple[Stmt, ...]:
        """Compute what is fused of the sums of one instruction, where they are inside."""
        s, put, lane = self.s, var("put"), var("lane")
        near, half, e = var("near"), var("half"), var("e")
        count = self.words // HALVES
        which = (near * HALVES + half) * PAIR + e
        down = var("warp") * (HALVES * HIGH) + half * HIGH + lane // 4
        along = (put * count + near) * HIGH + lane % 4 * PAIR + e
        row, column = (along, down) if s.swap else (down, along)
        made = element(self.isa, fused, Ptr("acc", at + which), Ptr("c_out", which), var("column"))
        inside = var("row").lt(var("m")) * var("column").lt(var("n"))
        body: tuple[Stmt, ...] = (
            Let("row", var("row_1") + row), Let("column", var("column_1") + column), If(inside, made),
        )  # fmt: skip
        for name, count_of in (("e", PAIR), ("half", HALVES), ("near", count)):
            body = (For(name, const(0), const(count_of), const(1), body, WHOLE),)
        return body
