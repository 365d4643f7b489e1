"""Convolution on tile units (AMX): tiles of A are loaded from images where they lie, with channels last.

    for each few rows of a result, and a share of its columns    <- threads
      strip of the images, with padding on all sides              (L2)
      for each panel of filters
        for each row of the result, or two
          for each few pixels
            micro-kernel over all taps; a few rows of the tile before in each of its first steps

Rows of a tile of A are pixels of a row of the result, equally far apart in an image; its columns are a step of a run of
k. Where rows of the result are short, each tile has pixels of a row of its own. Pixels of a row are in slices of one
height, of which the last may begin within the one before: its first sums are computed twice and written once. Sums stay
in tiles over all of k, then pass scratch to the epilogue. Images without padding are read in place.

The epilogue of a register tile runs a few rows at a time between the steps of the next one: vector units work while the
tile unit does, which waits for no sums. So all register tiles of a block are one loop, whose counter tells panel, row
and slice, and two tiles' sums are in scratch in turn. Granite Rapids, bf16, a 1x1 convolution of 320 channels: 10
steps take 0.86 of the time.

While a panel is multiplied the next one is prefetched into L2.

Panels of several groups of channels follow each other. A strip has a part for each group, so that the channels of
neighbouring taps are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import Call, Configure, For, Function, If, Kernel, Let, LetPtr, Param, Verb
from portmm.kernels.cpu.blocking import N
from portmm.kernels.cpu.convolution_blocks import FIRST, IMAGE, LAST, LOW, rows_of_task, share
from portmm.kernels.cpu.elementwise import arguments
from portmm.kernels.cpu.packing import line_of
from portmm.kernels.cpu.tile_microkernel import Finishing, Grid, Outer, Strides, awake, prefetch_next
from portmm.kernels.cpu.tile_strip import TiledStrip
from portmm.spec.dtype import base

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.schedule.tile_convolution import Tiled
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

TILE_NAME = "tile"
TILE = var(TILE_NAME)
"""Register tile of a block."""
LEAST_PART = 4
"""Rows of a register tile that a step of the next one finishes, at least: eight steps at most call the epilogue."""


def build(s: Schedule, isa: Isa, atom: Atom, sizes: Tiled) -> Kernel:
    """Kernel of a convolution by a schedule for panels, and sizes of blocks.

    Raises:
        ScheduleError: the schedule is not of tiles, or filters are not in panels.
    """
    if s.b.layout != "packed" or s.b.packed or not atom.tiled or base(atom.left) != s.types[0]:
        raise ScheduleError(f"a convolution by tiles reads A in place and filters in panels; {s.name(atom)} does not")
    g = _Loops(s, isa, atom, sizes)
    return g.kernel(g.block(), g.own_size)


@dataclass(frozen=True, slots=True)
class _Loops(TiledStrip):
    """Loops of one kernel."""

    @property
    def grid(self) -> Grid:
        """Tiles of a register tile: of columns just those that panels fill, where a panel has more."""
        n = self.atom.n
        return Grid(self.x.across, min(self.s.nr * self.x.panels, -(-self.x.outputs // n) * n) // n)

    @property
    def wide(self) -> int:
        """Columns of the sums of a register tile: of one panel all."""
        return self.s.nr if self.x.panels == 1 else self.grid.columns * self.atom.n

    @property
    def panels(self) -> Index:
        """Runs of panels of filters, each of a register tile."""
        every: Index = super(_Loops, self).panels
        return const(self.x.groups * self.per) if self.x.groups > 1 else ceil_div(every, self.x.panels)

    @property
    def height(self) -> int:
        """Rows of a tile of A, the same of all."""
        return self.x.tall if self.x.paired else -(-self.x.tall // self.x.across)

    @property
    def rows(self) -> int:
        """Rows of a register tile."""
        return self.x.tall * (self.x.across if self.x.paired else 1)

    @property
    def cut(self) -> tuple[Index, ...]:
        """First row of each tile of A; the last one may have rows of the one before, which are computed twice."""
        return tuple(const(min(r * self.height, self.rows - self.height)) for r in range(self.x.across))

    @property
    def sums_size(self) -> int:
        """Elements of the sums of a register tile."""
        return -(-self.rows * self.wide // 64) * 64

    @property
    def own_size(self) -> Index:
        """Elements of a worker's scratch: sums, and a strip."""
        return const(2 * self.sums_size + -(-self.x.strip_size // 64) * 64)

    def block(self) -> tuple[Stmt, ...]:
        """Statements for one block."""
        x, (first, last) = self.x, share(self.panels)
        of_task = (Let("last", last), Let("first", first))
        own = Ptr("work", var("worker") * self.own_size)
        return (
            *rows_of_task(self.chunks, self.blocks, x.out),
            Let("low", FIRST * x.stride[0]),
            LetPtr("sums", own, self.atom.acc),
            LetPtr("source", self.image, self.read, readonly=True),
            *(of_task if x.groups > 1 else ()),
            *self.strip(own + 2 * self.sums_size),
            self.configured(),
            *(() if x.groups > 1 else of_task),
            *self.products(),
            Configure(()),
        )

    def configured(self) -> Configure:
        """Shapes of tiles: of A of a height, and of a step of k."""
        atom, grid, deep = self.atom, self.grid, self.x.deep
        rows, words = list(grid.tile_rows(atom)), [atom.n] * len(grid.tile_rows(atom))
        for r in range(grid.rows):
            for i in (*(grid.c(r, v) for v in range(grid.columns)), grid.a(r)):
                rows[i] = const(self.height)
            words[grid.a(r)] = deep
        if deep == atom.deep:
            return Configure(tuple(rows))
        for v in range(grid.columns):
            rows[grid.b(v)] = const(deep)
        return Configure(tuple(rows), tuple(words))

    # -- products --------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps of k of a register tile."""
        return self.x.kernel[0] * self.x.kernel[1] * self.x.channels // self.x.deep

    @property
    def part(self) -> int:
        """Rows of the tile before that one step finishes: an even number, since epilogues may take pairs of rows."""
        return min(self.rows, max(LEAST_PART, 2 * -(-self.rows // (2 * self.steps))))

    def products(self) -> tuple[Stmt, ...]:
        """The loop over all register tiles of a block, and one more, which finishes the last of them."""
        x = self.x
        lines = const(x.deep * self.s.nr * x.panels // line_of(self.atom, self.atom.right))
        tiles = const(x.slices) if x.by_rows else (LAST - FIRST) * x.slices
        count = var("bands") * var("count") * x.slices
        before = maximum(0, TILE - 1)
        body = (
            *self.place(TILE),
            *self.place(before, "_done"),
            Let("rows_done", const(0).lt(TILE) * self.written("_done")[0]),
            *self.multiply(),
        )
        end = (
            *self.place(before, "_done"),
            Let("rows_done", self.written("_done")[0]),
            Call(self.finishing.end, self.of_finished),
        )
        return (
            Let("lines", ceil_div(lines, tiles)),
            Let("count", var("last") - var("first")),
            Let("bands", ceil_div(LAST - FIRST, 1 + x.paired)),
            Let("tiles", count),
            For(TILE_NAME, const(0), var("tiles") + 1, const(1), (If(TILE.lt(var("tiles")), body, end),)),
        )

    def place(self, tile: Index, s: str = "") -> tuple[Stmt, ...]:
        """Names of the panel, the row, the slice and the columns of a register tile, with a suffix."""
        x, bands, panels, wide = self.x, var("bands"), var("count"), self.wide
        row, number, j = tile // x.slices % bands, tile % x.slices, tile // (bands * x.slices)
        if x.by_rows:
            row, j = tile // (panels * x.slices), tile // x.slices % panels
        if x.by_slices:
            number, j = tile // panels % x.slices, tile % panels
        named = (
            Let(f"y{s}", FIRST + row * (1 + x.paired)),
            Let(f"slice{s}", number),
            Let(f"j{s}", var("first") + j),
            Let(f"z{s}", minimum(var(f"slice{s}") * x.tall, x.out[1] - x.tall)),
        )
        if x.groups == 1:
            column = var(f"j{s}") * wide
            return (*named, Let(f"column{s}", column), Let(f"columns{s}", minimum(wide, N - var(f"column{s}"))))
        part = var(f"j{s}") % self.per * wide
        return (
            *named,
            Let(f"group{s}", var(f"j{s}") // self.per),
            Let(f"column{s}", var(f"group{s}") * x.outputs + part),
            Let(f"columns{s}", minimum(wide, const(x.outputs) - part)),
        )

    def written(self, s: str = "") -> tuple[Index, Index]:
        """Rows of a register tile that are written, and those before them, which the slice before has written."""
        x = self.x
        if x.paired:
            return minimum(2, LAST - var(f"y{s}")) * x.tall, const(0)
        skipped = var(f"slice{s}") * x.tall - var(f"z{s}")
        return const(x.tall) - skipped, skipped

    @property
    def finishing(self) -> Finishing:
        """The epilogue of a register tile."""
        return Finishing.of(self.s, self.isa, self.atom)

    @property
    def of_finished(self) -> tuple[Index | Ptr, ...]:
        """Arguments for the epilogue of the register tile before."""
        x, s, wide = self.x, self.s, self.wide
        skipped = self.written("_done")[1]
        row = IMAGE * x.pixels + var("y_done") * x.out[1] + var("z_done") + skipped
        place = (var("item"), row, var("column_done"))
        sums = Ptr("sums", maximum(0, TILE - 1) % 2 * self.sums_size + skipped * wide)
        into = Ptr("c", var("item") * var("c_batch") + row * var("c_m") + var("column_done"))
        more = (*place, *arguments(s.fused, *place)) if s.fused else ()
        return (var("rows_done"), var("columns_done"), sums, const(wide), into, var("c_m"), *more)

    def multiply(self) -> tuple[Stmt, ...]:
        """Micro-kernel of a register tile, and the epilogue of the one before."""
        x, y, z = self.x, var("y"), var("z")
        below = (minimum(2, LAST - y) - 1) * (x.stride[0] * x.row)
        follow = (var("j") + 1).lt(var("last")) * var("lines")
        follow = follow * y.eq(FIRST) if x.by_rows else follow
        done = var("slice") if x.by_rows else (y - FIRST) * x.slices + var("slice")
        passed = done * (var("lines") * self.steps * line_of(self.atom, self.atom.right))
        ahead = Ptr("bp", var("b_n") * x.panels + passed)
        at = (y * x.stride[0] - LOW) * x.row + z * (x.stride[1] * x.pixel)
        if x.groups > 1:
            group = var("group") - var("first") // self.per if x.copies else var("group")
            at = at + group * (x.reached * x.row if x.copies else x.channels)
        filters = Ptr("b", var("item") * var("b_batch") + var("j") * (var("b_n") * x.panels))
        sums = Ptr("sums", TILE % 2 * self.sums_size)
        args = (Ptr("strip", at), *((below,) if x.paired else ()), Ptr("bp"), *((var("b_n"),) if x.panels > 1 else ()))
        args += (sums, ahead, follow)
        return (
            LetPtr("bp", filters, self.atom.right, readonly=True),
            Call(self.micro_kernel(), (*args, *self.of_finished)),
        )

    def micro_kernel(self) -> Function:
        """Micro-kernel C[tall][nr] = A . B over all taps, which finishes the register tile before."""
        x, atom, deep, nr, wide = self.x, self.atom, self.x.deep, self.s.nr, self.wide
        steps, per, finishing = x.run // deep, x.runs_of_row, self.finishing
        by = Strides(const(x.stride[1] * x.pixel), const(deep), nr, wide, a_next=var("below") if x.paired else None)
        outer = Outer(atom, self.grid, self.cut, self.grid.columns, by, passing=x.near, left="line", flowing=x.by_rows)
        tap, run, step = var("tap"), var("run"), var("step")
        at = tap * (x.dilation[0] * x.row) + run * (x.dilation[1] * x.pixel)
        vector = self.isa.sum_row_atom(atom)
        body = (
            Let("t", (tap * per + run) * steps + step),
            *prefetch_next(atom),
            *outer.step(step, nr, Ptr("b", var("t") * (deep * nr))),
            *(awake(vector) if vector else ()),
            If((var("t") * self.part).lt(var("rows_done")), (finishing.rows(var("t") * self.part, const(self.part)),)),
        )
        line = LetPtr("line", Ptr("a", at), atom.left, readonly=True)
        runs = For("run", const(0), const(per), const(1), (line, For("step", const(0), const(steps), const(1), body)))
        params = (
            Param("a", atom.left, readonly=True), *((Param("below"),) if x.paired else ()),
            Param("b", atom.right, readonly=True), *((Param("b_panel"),) if x.panels > 1 else ()),
            Param("c", atom.acc), Param("b_next", atom.right, readonly=True), Param("lines"),
            *finishing.params,
        )  # fmt: skip
        zero = tuple(Verb("zero", str(self.grid.c(r, v))) for r in range(x.across) for v in range(self.grid.columns))
        loops = For("tap", const(0), const(x.kernel[0]), const(1), (runs,))
        comment = f"C[{self.rows}][{wide}] = A[..][k] . B[k][{wide}], in tiles; the epilogue of the tile before"
        return Function("ukr_conv", "inner", params, (*zero, loops, *outer.sums("store")), comment)
