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
pass by, loaded with a hint that they are not read again. Beside a single slice of rows, tiles of B are loaded with it,
and a panel at a time is faster than two. Granite Rapids, bf16, 768x768 in L2: 1, 4 and 16 rows take 0.85, 0.70 and 0.88
of the time. While a panel is multiplied, the next one is prefetched into L2 if it comes from an outer cache.

The epilogue of a register tile runs a few rows at a time between the steps of the next one: vector units work while the
tile unit does, which waits for no sums. Two tiles' sums are in scratch in turn. Granite Rapids, bf16: 128x3072x768
takes 0.91 of the time, 197x3072x768 with GELU 0.83.

The time of an instruction is proportional to the rows of A's tile. So tiles have just the rows
of the tallest slice of a block, halved for R = 2; a slice that is one row shorter has an
undefined row, whose sums are unused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, round_up, var
from portmm.ir.nodes import Call, Configure, For, If, Let, LetPtr, Scratch
from portmm.kernels.cpu.blocking import N
from portmm.kernels.cpu.elementwise import arguments, own
from portmm.kernels.cpu.gemm import Gemm, slice_of
from portmm.kernels.cpu.packing import line_of
from portmm.kernels.cpu.tile_microkernel import TALL, Finishing, Grid, micro_kernel
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
    def overlaps(self) -> bool:
        """Whether a register tile is finished while the next one is multiplied; not with vectors of the product's."""
        return self.s.parallel.over != "k" and not (self.s.fused and own(self.s.fused))

    @property
    def tile_size(self) -> int:
        """Number of sums of a register tile."""
        return self.grid.rows * self.atom.m * self.s.nr * self.s.b.panels

    @property
    def c_size(self) -> Index:
        """Number of elements of one worker's sums: of two register tiles in turn, or a block by a chunk of columns.

        The latter are kept where k is cut.
        """
        tile = const(self.tile_size * (1 + self.overlaps))
        if not self.s.kc:
            return tile
        return round_up(maximum(tile, self.kb.lt(self.k) * (self.scratch_rows * self.chunk_width)), 64)

    def sums(self, row: Index, column: Index) -> Ptr:  # noqa: ARG002 - addressed by tile
        """Address of the sums of the current register tile, `c_wide` of each row."""
        return self.sums_of(var("i"), var("j"), var("turn"))

    def sums_of(self, i: Index, j: Index, turn: Index) -> Ptr:
        """Address of the sums of a register tile: in its turn, or where k is cut at its place in the block."""
        alternate = turn * self.tile_size if self.overlaps else const(0)
        if not self.s.kc:
            return Ptr("cp", alternate)
        place = (i * (var("last") - var("first")) + (j - var("first"))) * (TALL * self.s.nr)
        if not self.overlaps:
            return Ptr("cp", var("deep") * place)
        return Ptr("cp", var("deep") * place + (1 - var("deep")) * alternate)

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

    def tiles(self, panels: int, begin: Index, end: Index) -> Stmt:
        """Loop over the register tiles of a run of panels, each of which finishes the one before."""
        if not self.overlaps:
            return super().tiles(panels, begin, end)
        i, j, first = var("i"), var("j"), var("i").eq(0)
        before = (
            Let("turn", ((j - begin) // panels * var("slices") + i) % 2),
            *self.done_tile(i - 1 + first * var("slices"), j - first * panels, panels),
            Let("rows_done", var("h_done") * self.complete * (1 - first * j.eq(begin))),
        )
        body = (*self.at_panels(panels, const(self.s.nr * panels)), self.slices(*before, *self.visit(panels)))
        count = ceil_div(end - begin, panels)
        last = (
            Let("turn", count * var("slices") % 2),
            *self.done_tile(var("slices") - 1, begin + (count - 1) * panels, panels),
            Let("rows_done", var("h_done")),
            Let("c_wide", const(self.s.nr * panels)),
            Call(self.finishing.end, self.of_finished()),
        )
        loop = For("j", begin, end, const(panels), body)
        return If(begin.lt(end), (loop, If(self.complete, last)))

    @property
    def complete(self) -> Index:
        """Whether the current block of k is the last one."""
        return (var("pc") + var("kd")).eq(self.k) if self.s.kc else const(1)

    @property
    def finishing(self) -> Finishing:
        """The epilogue of a register tile, after the last block of k."""
        return Finishing.of(self.s, self.isa, self.atom)

    def done_tile(self, i: Index, j: Index, panels: int) -> tuple[Stmt, ...]:
        """Names of the rows and columns of a register tile that is multiplied."""
        return (
            Let("i_done", i),
            Let("j_done", j),
            *slice_of(var("i_done"), "_done"),
            Let("column_done", var("j_done") * self.s.nr),
            Let("columns_done", minimum(N - var("column_done"), self.s.nr * panels)),
        )

    def of_finished(self) -> tuple[Index | Ptr, ...]:
        """Arguments for the epilogue of such a tile, whose turn was the one before."""
        row, column, fused = var("row") + var("r_done"), var("column_done"), self.s.fused
        place = (var("item"), row, column + self.slab_first)
        more = (*place, *arguments(fused, *place)) if fused else ()
        sums = self.sums_of(var("i_done"), var("j_done"), 1 - var("turn"))
        into = (self.element(row, column), var("c_m"))
        return (var("rows_done"), var("columns_done"), sums, var("c_wide"), *into, *more)

    def visit(self, panels: int) -> tuple[Stmt, ...]:
        """Micro-kernel call, for slices of any number of rows."""
        args: list[Index | Ptr] = [var("kd"), self.slice_of_a(), TALL, Ptr("bp")]
        args += [self.panel_step or const(0)] if panels > 1 else []
        args += [Ptr("rest"), self.sums(const(0), const(0)), const(0).lt(self.pc) if self.s.kc else const(0)]
        vector, follows = self.isa.sum_row_atom(self.atom), self.s.c.prefetch > 0
        passing = bool(self.s.mc) and self.s.tiles[1].k == self.s.kc
        args += self.next_panels(panels) if follows else []
        args += self.of_finished() if self.overlaps else ()
        shape = self.atom, self.grid, self.s.nr, panels
        finishing = self.finishing if self.overlaps else None
        kernel = micro_kernel(
            *shape, self.s.b.prefetch, vector,
            follows=follows, passing=passing, flowing=self.flowing, finishing=finishing,
        )  # fmt: skip
        return (Call(kernel, tuple(args)),)

    @property
    def flowing(self) -> bool:
        """Whether each tile of B is read once, by the only slice of rows, from a cache."""
        s = self.s
        return s.b.layout == "packed" and not (s.mc or s.b.prefetch or s.parallel.over == "batch")

    def next_panels(self, panels: int) -> list[Index | Ptr]:
        """Address of this slice's share of the next panels of B, and the number of its lines for each step."""
        line, step = line_of(self.atom, self.atom.right), self.panel_step or const(0)
        lines = ceil_div(const(self.atom.deep * self.s.nr * panels // line), var("slices"))
        more = (var("j") + panels).lt(var("last"))
        share = var("i") * (lines * (var("kd") // self.atom.deep) * line)
        return [Ptr("bp", step * panels + share), more * lines]
