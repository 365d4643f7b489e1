"""Scratch of a blocked GEMM, and addresses of its operands: in place, packed, or in scratch.

Owns `Workspace`, the sizes of packed blocks and of sums and where they begin, and `Operands`, the addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.address import offset, strides
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, round_up, var
from portmm.ir.nodes import LetPtr
from portmm.kernels.cpu.blocking import WORKERS, Blocks, M, N
from portmm.kernels.cpu.int4_panels import centred, starts_of_group
from portmm.kernels.cpu.packing import sum_units
from portmm.spec.dtype import BY_NAME
from portmm.spec.layouts import operand
from portmm.spec.problem import family
from portmm.target.model import CPU as MODEL
from portmm.target.summation import BlockOfK

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt


class Workspace(Blocks):
    """Scratch of one kernel: all of B where it is packed once, then buffers of each worker, then quantised rows of A.

    A worker's buffers are panels of B, a block of A, sums until the epilogue, sums of A over
    quantization groups, and sums of runs.
    """

    __slots__ = ()

    def workspace(self) -> Index:
        """Number of elements of scratch for all workers."""
        size = self.shared_size + self.own_size * WORKERS + self.quantised_size
        if self.s.parallel.over == "k":
            size += self.runs * M * N
        return size if size == const(0) else size + 64

    @property
    def shared_size(self) -> Index:
        """Number of elements of a slab of B in panels."""
        if not self.s.b.once:
            return const(0)
        return round_up(minimum(ceil_div(N, self.s.nr), self.slab_panels) * self.b_step * self.scaled("b"), 64)

    @property
    def own_size(self) -> Index:
        """Number of elements of one worker's scratch."""
        return self.b_size + self.a_size + self.c_size + self.t_size + self.part_size + self.kept_size

    @property
    def a_size(self) -> Index:
        """Number of elements of one worker's packed block of A; stores may go one vector beyond."""
        if not self.s.a.packed:
            return const(0)
        return round_up((self.block_rows * self.kb + self.atom.n) * self.scaled("a"), 64)

    @property
    def b_size(self) -> Index:
        """Number of elements of one worker's packed panels of B."""
        if not self.s.b.packed or self.s.b.once:
            return const(0)
        return round_up((self.kb * self.s.nr + self.tail) * (self.near * self.scaled("b")), 64)

    @property
    def c_size(self) -> Index:
        """Number of elements of one worker's sums: a tile, or a block by columns where k is cut or swept."""
        if not self.finishes:
            return const(0)
        tile = self.s.mr * self.s.nr * self.s.b.panels
        if not self.s.kc:
            return const(-(-tile // 64) * 64)
        whole = const(1) if self.sweeps else self.kb.lt(self.k)
        return round_up(maximum(tile, whole * (self.block_rows * self.chunk_width)), 64)

    @property
    def kept_size(self) -> Index:
        """Number of elements of one worker's sums of runs, where blocks of k are parts of them."""
        if self.block_of_k is not BlockOfK.PART:
            return const(0)
        width = self.part_width(self.chunk_width) if self.s.c.packed else self.chunk_width
        return round_up(self.run.lt(self.k) * (self.block_rows * width), 64)

    @property
    def part_size(self) -> Index:
        """Number of elements of one worker's tiles of sums of a part of a run, if they are not in C."""
        if not self.s.c.packed:
            return const(0)
        return round_up(self.block_rows * self.part_width(self.chunk_width), 64)

    def part_width(self, columns: Index) -> Index:
        """Elements that such tiles take for each row: a narrow tile may be before those of NR columns."""
        return columns + (self.s.nr + self.atom.n)

    @property
    def t_size(self) -> Index:
        """Number of elements of one worker's sums of A over groups of k."""
        if not self.int4_in_place:
            return const(0)
        return sum((self.row_buffer_size(count) for _, count in self.group_sum_buffers.values()), const(0))

    def row_buffer_size(self, count: Index) -> Index:
        """Number of elements of one worker's scratch for so many of each row."""
        return round_up(self.block_rows * count, 64)

    @property
    def group_sum_buffers(self) -> dict[str, tuple[str, Index]]:
        """Buffers of sums of A over quantization groups, by name: their type, and the number per row."""
        kept = {"totals": ("f32", self.groups_of_k)}
        layout = family(self.s.family)
        if not centred(self.atom, layout):
            kept["starts"] = (self.atom.acc, self.groups_of_k * starts_of_group(self.atom, layout))
        return kept

    @property
    def quantised_size(self) -> Index:
        """Number of elements of scratch for all rows of A, quantised, and their scales."""
        if not self.s.a.source:
            return const(0)
        return M * (self.quantised_step // self.atom_bytes) + round_up(M, 64)

    @property
    def quantised_step(self) -> Index:
        """Stride in elements between quantised rows of A: whole cache lines."""
        return round_up(var("k"), 64)

    @property
    def tail(self) -> int:
        """Number of units behind each panel of B, for the sums of its columns."""
        storage = self.read_types[1]
        kept = self.unshifts if self.s.b.packed else self.s.b.layout == "packed" and self.atom.acc == "s32"
        return sum_units(self.atom, self.s.nr, storage) if kept else 0

    @property
    def b_near(self) -> Index:
        """Stride in units between panels of B that a worker packs together."""
        return self.whole(var("kd")) * self.s.nr + self.tail

    @property
    def b_step(self) -> Index:
        """Stride in units between panels of B where all of B is packed first."""
        return self.whole(self.k) * self.s.nr + self.tail

    @property
    def panel_step(self) -> Index | None:
        """Stride in elements between panels of B, if B is in panels of full depth; else None."""
        if self.s.b.once:
            return self.b_step
        return var("b_n") if self.s.b.layout == "packed" else None

    def scaled(self, name: str) -> int:
        """Number of elements of scratch per packed unit of "a" or "b"."""
        packed = self.atom.left if name == "a" else self.atom.right
        return max(1, BY_NAME[packed].bytes // self.atom_bytes)

    def of_panels(self, units: Index) -> Index:
        """Number of elements of scratch that packed units of B take, of which two may share one."""
        return units * self.scaled("b") // max(1, self.atom_bytes // BY_NAME[self.atom.right].bytes)

    def private(self) -> Ptr:
        """Address of this worker's scratch: a panel of B, then a block of A, then sums."""
        return Ptr("work", self.shared_size + var("worker") * self.own_size)

    def quantised_rows(self) -> tuple[Stmt, ...]:
        """Local names of the quantised rows of A, and of their scales."""
        if not self.s.a.source:
            return ()
        start = self.shared_size + self.own_size * WORKERS
        codes = M * (self.quantised_step // self.atom_bytes)
        return (LetPtr("codes", Ptr("work", start), "s8"), LetPtr("scales", Ptr("work", start + codes), "f32"))


class Operands(Workspace):
    """Operands of one kernel."""

    __slots__ = ()

    def operand(self, name: str, offset: Index) -> Ptr:
        """Address of an element of A, B or C of the current item."""
        return Ptr(name, var("item") * var(f"{name}_batch") + offset)

    def strided(self, name: str, word: str, index: Index, other: Index) -> tuple[Ptr, Index, Index]:
        """Address of an element of an operand in place, by units of k, and the operand's strides."""
        layout = operand(name, word)
        units = layout.slice(1 - "ab".index(name), 0, "units", self.s.atom.kr)
        step, other_step = strides(layout)
        return self.operand(name, offset(units, index, other)), step, other_step

    def left(self, row: Index, unit: Index) -> tuple[Ptr, Index, Index]:
        """Address of an element of A in place, and its strides: of the operand, or of its quantised rows."""
        if self.s.a.source:
            return Ptr("codes", row * self.quantised_step + unit * self.s.atom.kr), self.quantised_step, const(1)
        # One stride is 1 by layout: as a constant it becomes part of an address.
        return self.strided("a", self.s.a.layout, row, unit)

    def unpacked_a(self) -> tuple[Ptr, Index, Index]:
        """Address and strides of the slice of A that is to be packed; of a view, its address and the coordinate."""
        row = var("row") + var("r")
        if self.s.a.source:
            return self.left(row, self.pc)
        if self.view:
            return self.operand("a", const(0)), row, self.pc * self.s.atom.kr
        return self.strided("a", "any", row, self.pc)

    def source(self, column: Index, row: Index) -> Ptr:
        """Address of an element of B in place."""
        return self.strided("b", "row" if self.s.b.layout == "row" else "any", row, column + self.slab_first)[0]

    def result(self, row: Index, column: Index) -> Ptr:
        """Address of an element of C, or of this run's own C, or of the sum that will become it."""
        if self.s.parallel.over == "k":
            return Ptr("cp", row * N + column)
        if self.finishes:
            return self.sums(row, column)
        return self.element(row, column)

    def element(self, row: Index, column: Index) -> Ptr:
        """Address of an element of C."""
        return self.operand("c", row * var("c_m") + (column + self.slab_first))

    def sums(self, row: Index, column: Index) -> Ptr:
        """Address of a sum that is not yet an element of C: in one tile, or at its position in the block."""
        if not self.s.kc:
            return Ptr("cp")
        place = (row - var("row")) * var("c_wide") + (column - self.first_column)
        return Ptr("cp", var("deep") * place)

    @property
    def c_step(self) -> Index:
        """Stride in elements between rows of results."""
        if self.finishes:
            return var("c_wide")
        return N if self.s.parallel.over == "k" else var("c_m")

    @property
    def streams(self) -> tuple[str, ...]:
        """Operands to prefetch: those not packed here, or all of the next item; of grouped rows, hardware follows A."""
        s = self.s
        if not s.c.prefetch:
            return ()
        if s.parallel.over == "batch":
            return ("a", "b")
        a = not (s.a.packed or self.grouped)
        return (("a",) if a else ()) + (("b",) if self.panel_step is not None or not s.b.packed else ())

    @property
    def grouped(self) -> bool:
        """Whether the tallest slice of A in place has more rows than have an integer register each."""
        s = self.s
        return not (s.a.packed or s.static) and s.a.layout == "row" and s.mr > MODEL.in_place_rows

    @property
    def packed_slice(self) -> Ptr:
        """Address of the current packed slice of A."""
        return Ptr("ap", var("r") * var("kd"))

    def rows_of_a(self, before: Index) -> tuple[Index | Ptr, ...]:
        """Address and strides of the slice of A, from so many units on: packed, or in place."""
        if self.s.a.packed:
            return (self.packed_slice + before * var("h"),)
        return self.left(var("row") + var("r"), self.pc + before)

    def panel(self) -> Ptr:
        """Address of the current panel of B."""
        s = self.s
        if s.b.once:
            return Ptr("work", self.of_panels(var("j") * self.b_step + self.pc * s.nr))
        if s.b.inside:
            return self.private()
        if s.b.packed:
            return self.private() + (var("j") - var("jg")) * self.of_panels(self.b_near)
        if s.b.layout in ("packed", "codes"):
            return self.operand("b", var("j") * var("b_n") + self.pc * s.nr)
        return self.source(var("column"), self.pc)
