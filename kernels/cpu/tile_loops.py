"""Loops of a blocked GEMM on tile units (AMX): those of `gemm` around another micro-kernel.

One instruction multiplies 16 rows of A, of 64 bytes each, by as many rows of B,
which are units of k, into 16 x 16 sums. A register tile is R by V of these, R of A
and V of B loaded in each step; its sums stay in tiles over a block of k, and in
scratch between blocks, contiguous for each register tile: rows of C may be a
multiple of 4096 bytes apart, all in one set of L1, and are written once, when
the epilogue converts sums to elements of C.

B is in the panels of the vector units, [k][NR] units, so that one packed weight
serves both: rows of a tile are NR units apart. A is packed here, slice by slice,
[step][row][16] units, a tile's rows contiguous. Where k is not whole steps, A has
zeros, and the last units of a panel of B are copied to scratch and padded with zeros:
memory behind a panel must not be read, and need not be finite.

Blocks of k are either deep, and both operands come from L2, or such that a panel of B stays in L1 while tiles of A
pass by, loaded with a hint that they are not read again. While a panel is multiplied, the next one is prefetched into
L2 if it comes from an outer cache.

The time of an instruction is proportional to the rows of A's tile. So tiles have just the rows
of the tallest slice of a block, halved for R = 2; a slice that is one row shorter has an
undefined row, whose sums are unused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, maximum, round_up, var
from portmm.ir.nodes import Call, Configure, If, Let, LetPtr, Scratch
from portmm.kernels.cpu.gemm import Gemm
from portmm.kernels.cpu.packing import line_of
from portmm.kernels.cpu.tile_microkernel import TALL, Grid, micro_kernel
from portmm.kernels.cpu.tile_packing import pack_lines, rest_of_b

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt


class Tiles(Gemm):
    """Loops of one kernel, where they differ from those around vectors."""

    __slots__ = ()

    @property
    def grid(self) -> Grid:
        """Tiles of the widest call of the micro-kernel."""
        return Grid(-(-self.s.mr // self.atom.m), self.s.nr // self.atom.n * self.s.b.panels)

    @property
    def kb(self) -> Index:
        """Extent of a block of k: equal blocks of whole steps, none longer than KC."""
        if not self.s.kc:
            return self.whole(self.k)
        return round_up(ceil_div(self.k, maximum(1, ceil_div(self.k, self.s.kc))), self.atom.deep)

    @property
    def scratch_rows(self) -> Index:
        """Maximum number of rows of all slices of a block in scratch, where each may have one more."""
        return self.block_rows + ceil_div(self.block_rows, self.s.mr) + self.grid.rows

    @property
    def a_size(self) -> Index:
        """Number of elements of one worker's packed block of A."""
        return round_up(self.scratch_rows * round_up(self.kb, self.atom.deep) * self.scaled("a"), 64)

    @property
    def c_size(self) -> Index:
        """Number of elements of one worker's sums: a register tile, or where k is cut a block by a chunk of columns."""
        tile = const(self.grid.rows * self.atom.m * self.s.nr * self.s.b.panels)
        if not self.s.kc:
            return tile
        return round_up(maximum(tile, self.kb.lt(self.k) * (self.scratch_rows * self.chunk_width)), 64)

    def sums(self, row: Index, column: Index) -> Ptr:  # noqa: ARG002 - addressed by tile
        """Address of the sums of the current register tile, `c_wide` of each row."""
        if not self.s.kc:
            return Ptr("cp")
        place = var("i") * (var("last") - var("first")) + (var("j") - var("first"))
        return Ptr("cp", var("deep") * (place * (TALL * self.s.nr)))

    def scratch(self) -> tuple[Stmt, ...]:
        """Scratch for sums until the epilogue."""
        place = LetPtr("cp", self.private() + (self.b_size + self.a_size), self.atom.acc)
        return (place, Let("deep", var("kb").lt(self.k))) if self.s.kc else (place,)

    def ready(self) -> tuple[Stmt, ...]:
        """Configuration of this thread's tiles."""
        tall = maximum(self.grid.rows, var("height") + const(0).lt(var("taller")))
        return (Let("tall", tall), Configure(self.grid.tile_rows(self.atom)))

    def done(self) -> tuple[Stmt, ...]:
        """Release of the tiles: unused ones need not be saved at a context switch."""
        return (Configure(()),)

    def pack_a(self) -> tuple[Stmt, ...]:
        """Packing of the block of A, slice by slice."""
        return (LetPtr("ap", self.private() + self.b_size, self.atom.left), self.slices(self.pack_slice()))

    def pack_slice(self) -> Stmt:
        """Packing of the current slice of A."""
        s = self.s
        pack = pack_lines(self.isa, self.atom, self.move_atom, s.a.layout, s.types[0], self.view)
        args = (self.filled(self.pc, var("kd")), var("h"), TALL, *self.unpacked_a(), self.slice_of_a())
        return Call(pack, args)

    def slice_of_a(self) -> Ptr:
        """Address of the current packed slice."""
        return Ptr("ap", var("i") * (TALL * round_up(var("kd"), self.atom.deep)))

    def across(self, panels: int) -> tuple[Stmt, ...]:
        """Copy of the panels' last units, where k is not whole steps."""
        atom, n = self.atom, self.s.nr * panels
        rest = var("kd") % atom.deep
        args: tuple[Index | Ptr, ...] = (rest, Ptr("bp", (var("kd") - rest) * self.s.nr))
        args += (self.panel_step or const(0),) if panels > 1 else ()
        fill = Call(rest_of_b(atom, self.move_atom, self.s.nr, panels), (*args, Ptr("rest")))
        return (
            Let("c_wide", const(n)),
            Scratch("rest", atom.deep * n, atom.right),
            If(const(0).lt(rest), (fill,)),
        )

    def visit(self, panels: int) -> tuple[Stmt, ...]:
        """Micro-kernel call, for slices of any number of rows."""
        args: list[Index | Ptr] = [var("kd"), self.slice_of_a(), TALL, Ptr("bp")]
        args += [self.panel_step or const(0)] if panels > 1 else []
        args += [Ptr("rest"), self.sums(const(0), const(0)), const(0).lt(self.pc) if self.s.kc else const(0)]
        vector, follows = self.isa.sum_row_atom(self.atom), self.s.c.prefetch > 0
        passing = bool(self.s.mc) and self.s.tiles[1].k == self.s.kc
        args += self.next_panels(panels) if follows else []
        shape = self.atom, self.grid, self.s.nr, panels
        kernel = micro_kernel(*shape, self.s.b.prefetch, vector, follows=follows, passing=passing)
        return (Call(kernel, tuple(args)),)

    def next_panels(self, panels: int) -> list[Index | Ptr]:
        """Address of this slice's share of the next panels of B, and the number of its lines for each step."""
        line, step = line_of(self.atom, self.atom.right), self.panel_step or const(0)
        lines = ceil_div(const(self.atom.deep * self.s.nr * panels // line), var("slices"))
        more = (var("j") + panels).lt(var("last"))
        share = var("i") * (lines * (var("kd") // self.atom.deep) * line)
        return [Ptr("bp", step * panels + share), more * lines]
