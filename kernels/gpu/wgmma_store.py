"""Epilogue of wgmma kernels: stores of the sums of warpgroups.

Owns `WgmmaEpilogue`. Where C is rows of 16-bit elements that TMA can address, results of 64 columns are staged in
shared memory: a warpgroup stores them there as matrices of eight rows (stmatrix), in the swizzled layout of TMA,
and one thread starts their TMA store while the next are computed, or the next tile is multiplied. Everything else goes
from registers to memory: `epilogue_store`. With `swap`, matrices are transposed by stmatrix. What fused expressions
read comes beforehand: `wgmma_operands`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, MapOf
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import If, Let, Scratch
from portmm.ir.thread_nodes import Do, Shared
from portmm.kernels.gpu.epilogue_store import EpilogueStore, cell_of, element, operands
from portmm.kernels.gpu.fragments import of
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.wgmma_operands import HALVES, PAIR, SIDE, WgmmaOperands
from portmm.schedule.gpu_wgmma import SWIZZLED, columns, k_groups, panel, strips

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused


@dataclass(frozen=True, slots=True)
class WgmmaEpilogue(WgmmaOperands):
    """Epilogue of a warpgroup's sums."""

    @property
    def store(self) -> EpilogueStore:
        """Epilogue that stores from registers."""
        return EpilogueStore(self.s, self.isa, self.atom, cell_of(of(self.atom.acc_fragment), self.s))

    def argument(self) -> Argument:
        """Tensor map of C."""
        n, name = panel(self.s), self.s.types[2]
        sizes = (var("n"), var("m"), var("batch"))
        of = MapOf("c", name, sizes, (var("c_m"), var("c_batch")), (n, self.lines, 1), n * 2)
        return Argument("c_map", "map", map=of)

    def shared(self) -> list[Stmt]:
        """Shared memory of staged results, and of operands."""
        if not self.staged:
            return []
        stored = self.s.parallel.warpgroups // k_groups(self.s)
        tile = Shared("c_tile", stored * self.buffers * self.size, self.s.types[2], SWIZZLED)
        return [tile, *self.of_operands()]

    def before(self) -> list[Stmt]:
        """Registers for results and operands."""
        if not self.staged:
            return []
        words: list[Stmt] = [Scratch("c_words", self.puts * self.words, "b32")]
        words += [Scratch("c_out", self.words * PAIR, "f32")] if self.s.fused else []
        return [*words, *self.registers()]

    def after(self) -> list[Stmt]:
        """Wait for the last TMA stores to read shared memory."""
        return [If(self.elected, (Do("tma_store_read_0"),))] if self.staged else []

    def ahead(self, first: Index) -> tuple[Stmt, ...]:
        """Statements before the multiplication of a tile: loads that it hides.

        Of a slice of k the last block of a tile alone stores results, and loads what they take then.
        """
        return self.early(first) if self.s.parallel.split == 1 else ()

    def statements(self, first: Index) -> tuple[Stmt, ...]:
        """Stores of the sums of a warpgroup, whose rows of the left operand begin at `first` in the tile."""
        if self.staged:
            return (*(self.early(first) if self.s.parallel.split > 1 else ()), *self._sent(first))
        sums, store = of(self.atom.acc_fragment), self.store
        own = (first, var("warp") * (HALVES * SIDE) + self.own_row), (const(0), self.own_column)
        return (
            *store.before(),
            *store.fragments(sums, (strips(self.s), columns(self.s) // SIDE), own, columns_first=True),
        )

    # -- through shared memory -----------------------------------------------------

    def _buffer(self, piece: Index) -> Index:
        """First element of the buffer of a panel of results."""
        if self.read:
            return self.at(piece)
        # If the number of panels of a tile is odd, the next tile begins with another buffer.
        tile = var("number") // 2 if self.s.parallel.pingpong else var("number")
        before = tile * self.panels if self.panels % self.buffers else const(0)
        return (var("group") * self.buffers + (before + piece) % self.buffers) * self.size

    def _sent(self, first: Index) -> tuple[Stmt, ...]:
        piece = var("piece") if self.panels > 1 else const(0)
        across = self.panels // strips(self.s)
        strip, part = piece // across, piece % across
        row_1, column_1 = self.corner(first, piece)
        # All fused expressions of a panel are computed before its first store: their loads overlap.
        compute = unrolled("put", self.puts, *self._packed(strip, part, piece))
        puts = unrolled("put", self.puts, self._put())
        send = Do("tma_store", (Ptr("c_map"), Ptr("c_tile", var("buffer")), var("column_1"), var("row_1"), var("item")))
        free = (If(self.elected, (Do(f"tma_store_read_{self.buffers - 1}"),)), self.sync())
        body: tuple[Stmt, ...] = (
            Let("row_1", row_1),
            Let("column_1", column_1),
            *self.landed(),
            compute,
            Let("buffer", self._buffer(piece)),
            # Earlier TMA stores from this buffer have read it.
            *(() if self.read else free),
            puts,
            Do("fence_async_shared"),
            self.sync(),
            If(self.elected, (send, Do("tma_store_commit"))),
            *self.further(first),
        )
        setup = operands(self.isa, self.s.fused) if self.s.fused else []
        if self.panels > 1:
            body = (unrolled("piece", self.panels, *body),)
        return (*setup, *self.kept(), *body)

    def _packed(self, strip: Index, part: Index, piece: Index) -> tuple[Stmt, ...]:
        """Results of one stmatrix, computed and packed to pairs of 16 bits."""
        s, put, q = self.s, var("put"), var("q")
        columns_before = part * (panel(s) // SIDE) + put * (self.words // HALVES)
        at = (strip * (columns(s) // SIDE) + columns_before) * (HALVES * PAIR)
        source = Ptr("c_out", q * PAIR) if self.s.fused else Ptr("acc", at + q * PAIR)
        pack = Do(f"pair_{s.types[2]}", (Ptr("c_words", put * self.words + q), source))
        values = self._values(self.s.fused, at) if self.s.fused else ()
        return (*self.matrices(piece), *self.of_columns(part), *values, unrolled("q", self.words, pack))

    def _put(self) -> Stmt:
        """Store of matrices to shared memory (stmatrix): neighbours along n, two along m."""
        s, put = self.s, var("put")
        to = Ptr("c_tile", var("buffer") + self.place(*self.matrix_of_lane()))
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
            Let("row", var("row_1") + row), Let("column", var("column_1") + column),
            *(results if self.whole else (If(inside, results),)),
        )  # fmt: skip
        for name, count_of in (("e", PAIR), ("half", HALVES), ("near", count)):
            body = (unrolled(name, count_of, *body),)
        return body
