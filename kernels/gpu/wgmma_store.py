"""Epilogue of wgmma kernels: stores of the sums of warpgroups.

Owns `WgmmaEpilogue`. Where C is rows of 16-bit elements that TMA can address, results of 64 columns are staged in
shared memory: a warpgroup stores them there as matrices of eight rows (stmatrix), in the swizzled layout of TMA,
and one thread starts their TMA store while the next are computed, or the next tile is multiplied. Everything else goes
from registers to memory: `epilogue_store`. With `swap`, matrices are transposed by stmatrix.

Arrays of 16 bits of C's rows and columns that fused expressions read come the same way: a warp copies its rows of a
panel to shared memory, 16 bytes at once, and loads matrices of them. Otherwise each element would be a load of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import lane_column, lane_row
from portmm.ir.grid_kernel import Argument, MapOf
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import If, Let, LetPtr, Move, Scratch
from portmm.ir.thread_nodes import Do, Get, Shared, Vector
from portmm.kernels.gpu.epilogue_store import EpilogueStore, cell_of, element, operands
from portmm.kernels.gpu.fragments import of
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.product import Product
from portmm.schedule.gpu_wgmma import BUFFERS, STRIP, SWIZZLED, columns, panel, staged, strips
from portmm.schedule.schedule import WARPGROUP
from portmm.spec.dtype import BY_NAME
from portmm.spec.layouts import VECTOR, swizzled

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused

PAIR, SIDE = 2, 8
"""Neighbouring columns of a lane, and rows and columns of an 8 x 8 matrix."""
HALVES = 2
"""Matrices of a warp along m."""
SIZE = 2
"""Bytes of an element of C, where it is staged."""
FIRST_BARRIER = 1
"""Barrier of the first warpgroup; 0 is that of the whole block."""


@dataclass(frozen=True, slots=True)
class WgmmaEpilogue(Product):
    """Epilogue of a warpgroup's sums."""

    @property
    def staged(self) -> bool:
        """Whether results are staged in shared memory."""
        return staged(self.s)

    @property
    def store(self) -> EpilogueStore:
        """Epilogue that stores from registers."""
        return EpilogueStore(self.s, self.isa, self.atom, cell_of(of(self.atom.acc_fragment), self.s))

    @property
    def lines(self) -> int:
        """Number of rows of C of one TMA store."""
        return columns(self.s) if self.s.atom.swap else STRIP

    @property
    def buffers(self) -> int:
        """Number of panels of C in shared memory, of each warpgroup."""
        return min(BUFFERS, self.panels)

    @property
    def panels(self) -> int:
        """Number of panels of the tile of a warpgroup."""
        across = 1 if self.s.atom.swap else columns(self.s) // panel(self.s)
        return strips(self.s) * across

    @property
    def size(self) -> int:
        """Number of elements of a panel."""
        return self.lines * panel(self.s)

    def argument(self) -> Argument:
        """Tensor map of C."""
        n, name = panel(self.s), self.s.types[2]
        sizes = (var("n"), var("m"), var("batch"))
        of = MapOf("c", name, sizes, (var("c_m"), var("c_batch")), (n, self.lines, 1), n * 2)
        return Argument("c_map", "map", map=of)

    def shared(self) -> list[Stmt]:
        """Shared memory of staged results."""
        if not self.staged:
            return []
        return [Shared("c_tile", self.s.parallel.warpgroups * self.buffers * self.size, self.s.types[2], SWIZZLED)]

    def before(self) -> list[Stmt]:
        """Registers for results."""
        if not self.staged:
            return []
        registers: list[Stmt] = [Scratch("c_words", self.puts * self.words, "b32")]
        registers += [Scratch("c_out", self.words * PAIR, "f32")] if self.s.fused else []
        count = self.words // HALVES * PAIR
        registers += [Scratch(f"x{i}_now", count, self.dtype_of(i)) for i in self.along]
        for i in self.read:
            registers.append(Scratch(f"x{i}_words", self.words, "b32"))
            registers.append(LetPtr(f"x{i}_part", Ptr(f"x{i}_words"), self.dtype_of(i), readonly=True))
        return registers

    def after(self) -> list[Stmt]:
        """Wait for the last TMA stores to read shared memory."""
        return [If(self._elected, (Do("tma_store_read_0"),))] if self.staged else []

    def statements(self, first: Index) -> tuple[Stmt, ...]:
        """Stores of the sums of a warpgroup, whose rows of the left operand begin at `first` in the tile."""
        if self.staged:
            return self._sent(first)
        sums, store = of(self.atom.acc_fragment), self.store
        own = (first, var("warp") * (HALVES * SIDE) + self.own_row), (const(0), self.own_column)
        return (
            *store.before(),
            *store.fragments(sums, (strips(self.s), columns(self.s) // SIDE), own, columns_first=True),
        )

    @property
    def own_row(self) -> Index:
        """Row of a lane's first sum, of those of its warp."""
        return lane_row(of(self.atom.acc_fragment), var("lane"), self.isa.warp)

    @property
    def own_column(self) -> Index:
        """Column of a lane's first sum."""
        return lane_column(of(self.atom.acc_fragment), var("lane"), self.isa.warp)

    # -- operands of fused expressions -----------------------------------------------

    @property
    def read(self) -> tuple[int, ...]:
        """Operands that come through shared memory: as many as there are panels for."""
        if not self.s.fused or self.s.atom.swap:
            return ()
        written = dict(self.s.fused.results)
        whole = (
            i
            for i, x in enumerate(self.s.fused.operands)
            if i not in written and x.dense and {"m", "n"} <= set(x.axes) and BY_NAME[x.dtype].bytes == SIZE
        )
        return tuple(whole)[: self.buffers]

    def dtype_of(self, i: int) -> str:
        """Type of an operand."""
        assert self.s.fused is not None  # noqa: S101 - it has operands
        return self.s.fused.operands[i].dtype

    def _panel(self, at: int) -> Index:
        """First element of a panel of this warpgroup."""
        return (var("group") * self.buffers + at) * self.size

    def _place(self, line: Index, vector: Index) -> Index:
        """Offset of a vector of a line in a panel."""
        return swizzled(panel(self.s), SIZE).offset((line, vector, 0))

    def _aligned(self) -> tuple[Stmt, ...]:
        """Whether rows of each operand are whole vectors."""
        own: list[Stmt] = []
        for i in self.read:
            own.append(Get(f"x{i}_low", "misaligned", (Ptr(f"x{i}"),)))
            strided = var(f"x{i}_m") % (VECTOR // SIZE)
            own.append(Let(f"x{i}_whole", var(f"x{i}_low").eq(0) * strided.eq(0)))
        return tuple(own)

    def _brought(self) -> tuple[Stmt, ...]:
        """Copies of a warp's rows of a panel of each operand to shared memory, where they are in bounds."""
        n, per = panel(self.s), VECTOR // SIZE
        lines = HALVES * SIDE
        t, j, column = var("t"), var("j"), var("column")
        place = var("lane") + t * self.isa.warp
        stmts: list[Stmt] = []
        for at, i in enumerate(self.read):
            to = Ptr("c_tile", self._panel(at) + self._place(var("line"), place % (n // per)))
            src = Ptr(f"x{i}", var("row") * var(f"x{i}_m") + column)
            one = If((column + j).lt(var("n")), (Move(to + j, src + j),))
            inside = var("row").lt(var("m"))
            vector = If(
                var(f"x{i}_whole") * (column + (per - 1)).lt(var("n")),
                (Vector(to, src, VECTOR),),
                (unrolled("j", per, one),),
            )
            body = (
                Let("line", var("warp") * lines + place // (n // per)),
                Let("row", var("row_1") + var("line")),
                Let("column", var("column_1") + place % (n // per) * per),
                If(inside, (vector,)),
            )
            stmts.append(unrolled("t", lines * n // per // self.isa.warp, *body))
        return tuple(stmts)

    def _matrices(self) -> tuple[Stmt, ...]:
        """Loads of the matrices of each operand that belong to the sums of one stmatrix."""
        own, name = self._place(*self._matrix_of_lane()), f"ldmatrix_x{self.words}"
        return tuple(
            Do(name, (Ptr(f"x{i}_words"), Ptr("c_tile", self._panel(at) + own))) for at, i in enumerate(self.read)
        )

    @property
    def along(self) -> tuple[int, ...]:
        """Operands of columns alone, whose elements are loaded once for both rows of a lane."""
        if not self.s.fused or self.s.atom.swap:
            return ()
        written = dict(self.s.fused.results)
        of_columns = (i for i, x in enumerate(self.s.fused.operands) if x.dense and {"n"} <= set(x.axes) <= {"b", "n"})
        return tuple(i for i in of_columns if i not in written)

    def _of_columns(self) -> tuple[Stmt, ...]:
        """Loads of the elements of a lane's columns of one stmatrix, where they are in bounds."""
        count, near, e = self.words // HALVES, var("near"), var("e")
        column = Let("column", var("column_1") + (var("put") * count + near) * SIDE + self.own_column + e)
        moves = tuple(Move(Ptr(f"x{i}_now", near * PAIR + e), Ptr(f"x{i}", var("column"))) for i in self.along)
        if not moves:
            return ()
        return (unrolled("near", count, unrolled("e", PAIR, column, If(var("column").lt(var("n")), moves))),)

    # -- through shared memory -----------------------------------------------------

    @property
    def _elected(self) -> Index:
        return (var("thread") % WARPGROUP).eq(0)

    @property
    def words(self) -> int:
        """Number of registers of a lane for one stmatrix: matrices, of which a warp has two along m."""
        return HALVES * (2 if columns(self.s) // SIDE % 2 == 0 else 1)

    @property
    def _tile(self) -> Index:
        """Number of a tile, of those of the warpgroup."""
        return var("number") // 2 if self.s.parallel.pingpong else var("number")

    def _sent(self, first: Index) -> tuple[Stmt, ...]:
        s, n = self.s, panel(self.s)
        piece = var("piece") if self.panels > 1 else const(0)
        across = self.panels // strips(s)
        strip, part = piece // across, piece % across
        strip_row = first + strip * STRIP
        row, column = (const(0), strip_row) if s.atom.swap else (strip_row, part * n)
        # If the number of panels of a tile is odd, the next tile begins with another buffer.
        before = self._tile * self.panels if self.panels % self.buffers else const(0)
        buffer = (var("group") * self.buffers + (before + piece) % self.buffers) * self.size
        sync = Do("block_barrier_sync", (var("group") + FIRST_BARRIER, const(WARPGROUP)))
        # All fused expressions of a panel are computed before its first store: their loads overlap.
        compute = unrolled("put", self.puts, *self._packed(strip, part))
        puts = unrolled("put", self.puts, self._put())
        send = Do("tma_store", (Ptr("c_map"), Ptr("c_tile", var("buffer")), var("column_1"), var("row_1"), var("item")))
        free = (If(self._elected, (Do(f"tma_store_read_{0 if self.read else self.buffers - 1}"),)), sync)
        body: tuple[Stmt, ...] = (
            Let("row_1", var("row_0") + row),
            Let("column_1", var("column_0") + column),
            # Earlier TMA stores have read all panels, that of this buffer included.
            *((*free, *self._brought(), sync) if self.read else ()),
            compute,
            Let("buffer", buffer),
            # Earlier TMA stores from this buffer have read it.
            *(() if self.read else free),
            puts,
            Do("fence_async_shared"),
            sync,
            If(self._elected, (send, Do("tma_store_commit"))),
        )
        setup = [*operands(self.isa, self.s.fused), *self._aligned()] if self.s.fused else []
        if self.panels > 1:
            body = (unrolled("piece", self.panels, *body),)
        return (*setup, *body)

    @property
    def puts(self) -> int:
        """Number of stmatrix instructions of a panel."""
        return (self.lines if self.s.atom.swap else panel(self.s)) // SIDE // (self.words // HALVES)

    def _packed(self, strip: Index, part: Index) -> tuple[Stmt, ...]:
        """Results of one stmatrix, computed and packed to pairs of 16 bits."""
        s, put, q = self.s, var("put"), var("q")
        columns_before = part * (panel(s) // SIDE) + put * (self.words // HALVES)
        at = (strip * (columns(s) // SIDE) + columns_before) * (HALVES * PAIR)
        source = Ptr("c_out", q * PAIR) if self.s.fused else Ptr("acc", at + q * PAIR)
        pack = Do(f"pair_{s.types[2]}", (Ptr("c_words", put * self.words + q), source))
        values = self._values(self.s.fused, at) if self.s.fused else ()
        return (*self._matrices(), *self._of_columns(), *values, unrolled("q", self.words, pack))

    def _matrix_of_lane(self) -> tuple[Index, Index]:
        """Line and vector of a panel that a lane addresses of the matrices of one stmatrix."""
        put, near, lane, warp = var("put"), self.words // HALVES, var("lane"), var("warp")
        if self.s.atom.swap:
            return (
                (put * near + lane // (HALVES * SIDE)) * SIDE + lane % SIDE,
                warp * HALVES + lane // SIDE % HALVES,
            )
        return warp * (HALVES * SIDE) + lane % (HALVES * SIDE), put * near + lane // (HALVES * SIDE)

    def _put(self) -> Stmt:
        """Store of matrices to shared memory (stmatrix): neighbours along n, two along m."""
        s, put = self.s, var("put")
        to = Ptr("c_tile", var("buffer") + self._place(*self._matrix_of_lane()))
        name = f"stmatrix_{'trans_' if s.atom.swap else ''}x{self.words}"
        return Do(name, (to, Ptr("c_words", put * self.words)))

    def _values(self, fused: Fused, at: Index) -> tuple[Stmt, ...]:
        """Fused expressions of the sums of one stmatrix, where they are in bounds."""
        s, put = self.s, var("put")
        near, half, e = var("near"), var("half"), var("e")
        count = self.words // HALVES
        which = (near * HALVES + half) * PAIR + e
        down = var("warp") * (HALVES * SIDE) + half * SIDE + self.own_row
        along = (put * count + near) * SIDE + self.own_column + e
        row, column = (along, down) if s.atom.swap else (down, along)
        parts = {i: Ptr(f"x{i}_part", which) for i in self.read}
        parts |= {i: Ptr(f"x{i}_now", near * PAIR + e) for i in self.along}
        results = element(self.isa, fused, Ptr("acc", at + which), Ptr("c_out", which), var("column"), parts)
        inside = var("row").lt(var("m")) * var("column").lt(var("n"))
        body: tuple[Stmt, ...] = (
            Let("row", var("row_1") + row), Let("column", var("column_1") + column), If(inside, results),
        )  # fmt: skip
        for name, count_of in (("e", PAIR), ("half", HALVES), ("near", count)):
            body = (unrolled(name, count_of, *body),)
        return body
