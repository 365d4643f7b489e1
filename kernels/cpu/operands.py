"""Addresses of the operands of a blocked GEMM: in place, packed, or in scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.address import offset, strides
from portmm.ir.index import Ptr, const, var
from portmm.kernels.cpu.blocking import N
from portmm.kernels.cpu.workspace import Workspace
from portmm.spec.layouts import operand

if TYPE_CHECKING:
    from portmm.ir.index import Index


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
        """Operands to prefetch: those not packed here, or all of the next item."""
        s = self.s
        if not s.c.prefetch:
            return ()
        if s.parallel.over == "batch":
            return ("a", "b")
        return (() if s.a.packed else ("a",)) + (("b",) if self.panel_step is not None or not s.b.packed else ())

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
