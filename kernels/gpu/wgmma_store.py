"""Epilogue of wgmma kernels: stores of the sums of warpgroups.

Owns `WgmmaEpilogue`. Where C is rows of 16-bit elements that TMA can address, results of 64 columns are staged in
shared memory: a warpgroup stores them there as matrices of eight rows (stmatrix), in the swizzled layout of TMA,
and one thread starts their TMA store while the next are computed, or the next tile is multiplied. Everything else goes
from registers to memory: `epilogue_store`. With `swap`, matrices are transposed by stmatrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import lane_column, lane_row
from portmm.ir.grid_kernel import Argument, MapOf
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import If, Let, Scratch
from portmm.ir.thread_nodes import Do, Shared
from portmm.kernels.gpu.epilogue_store import EpilogueStore, cell_of, element, operands
from portmm.kernels.gpu.fragments import of
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.product import Product
from portmm.schedule.gpu_wgmma import BUFFERS, STRIP, SWIZZLED, columns, panel, staged, strips
from portmm.schedule.schedule import WARPGROUP
from portmm.spec.dtype import BY_NAME
from portmm.spec.layouts import swizzled

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused

PAIR, SIDE = 2, 8
"""Neighbouring columns of a lane, and rows and columns of an 8 x 8 matrix."""
HALVES = 2
"""Matrices of a warp along m."""
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
        return [*registers, Scratch("c_out", self.words * PAIR, "f32")] if self.s.fused else registers

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
        body: tuple[Stmt, ...] = (
            Let("row_1", var("row_0") + row),
            Let("column_1", var("column_0") + column),
            compute,
            Let("buffer", buffer),
            # Earlier TMA stores from this buffer have read it.
            If(self._elected, (Do(f"tma_store_read_{self.buffers - 1}"),)),
            sync,
            puts,
            Do("fence_async_shared"),
            sync,
            If(self._elected, (send, Do("tma_store_commit"))),
        )
        setup = operands(self.isa, self.s.fused) if self.s.fused else []
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
        return (*values, unrolled("q", self.words, pack))

    def _put(self) -> Stmt:
        """Store of matrices to shared memory (stmatrix): neighbours along n, two along m."""
        s, put, near = self.s, var("put"), self.words // HALVES
        lane, warp = var("lane"), var("warp")
        if s.atom.swap:
            line, vector = (
                (put * near + lane // (HALVES * SIDE)) * SIDE + lane % SIDE,
                warp * HALVES + lane // SIDE % HALVES,
            )
        else:
            line, vector = (
                warp * (HALVES * SIDE) + lane % (HALVES * SIDE),
                put * near + lane // (HALVES * SIDE),
            )
        to = Ptr("c_tile", var("buffer") + swizzled(panel(s), BY_NAME[s.types[2]].bytes).offset((line, vector, 0)))
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
        results = element(self.isa, fused, Ptr("acc", at + which), Ptr("c_out", which), var("column"))
        inside = var("row").lt(var("m")) * var("column").lt(var("n"))
        body: tuple[Stmt, ...] = (
            Let("row", var("row_1") + row), Let("column", var("column_1") + column), If(inside, results),
        )  # fmt: skip
        for name, count_of in (("e", PAIR), ("half", HALVES), ("near", count)):
            body = (unrolled(name, count_of, *body),)
        return body
