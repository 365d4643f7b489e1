"""Convolution on tile units (AMX): tiles of A are loaded from images where they lie, with channels last.

    for each few rows of a result, and a share of its columns    <- threads
      strip of the images, with padding on all sides              (L2)
      for each panel of filters
        for each row of the result, or two
          for each few pixels
            micro-kernel over all taps

Rows of a tile of A are pixels of a row of the result, equally far apart in an image; its columns are a step of a run of
k. Where rows of the result are short, each tile has pixels of a row of its own. Pixels of a row are in slices of one
height, of which the last may begin within the one before: its first sums are computed twice and written once. Sums stay
in tiles over all of k, then pass scratch to the epilogue. Images without padding are read in place.

While a panel is multiplied the next one is prefetched into L2.

Panels of several groups of channels follow each other. A strip has a part for each group, so that the channels of
neighbouring taps are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import (
    Call,
    Configure,
    For,
    Function,
    If,
    Kernel,
    Let,
    LetPtr,
    Move,
    Param,
    Scratch,
    Verb,
)
from portmm.kernels.cpu.convolution_blocks import FIRST, IMAGE, LAST, LOW, Loops, finished, rows_of_task, share
from portmm.kernels.cpu.packing import keep, line_of
from portmm.kernels.cpu.tile_microkernel import Grid, Outer, Strides, awake, prefetch_next
from portmm.spec.dtype import base

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.schedule.tile_convolution import Tiled
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

Y = var("y")
"""Row of an image, or of the result."""


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
class _Loops(Loops):
    """Loops of one kernel."""

    x: Tiled

    @property
    def grid(self) -> Grid:
        """Tiles of a register tile."""
        return Grid(2, self.s.nr // self.atom.n)

    @property
    def per(self) -> int:
        """Panels of a group."""
        return -(-self.x.outputs // self.s.nr)

    @property
    def panels(self) -> Index:
        """Panels of filters."""
        every: Index = super(_Loops, self).panels
        return const(self.x.groups * self.per) if self.x.groups > 1 else every

    @property
    def panel(self) -> tuple[Stmt, ...]:
        """Names of the columns and the filters of a panel, and the pointer to its group's channels."""
        x, j, nr = self.x, var("j"), self.s.nr
        names: tuple[Stmt, ...] = super(_Loops, self).panel
        if x.groups == 1:
            return names
        part = j % self.per * nr
        group = var("group") - var("first") // self.per if x.copies else var("group")
        apart = x.reached * x.row if x.copies else x.channels
        return (
            Let("group", j // self.per),
            LetPtr("channels", Ptr("strip", group * apart), self.atom.left, readonly=True),
            Let("column", var("group") * x.outputs + part),
            Let("columns", minimum(nr, const(x.outputs) - part)),
            names[-1],
        )

    @property
    def heights(self) -> tuple[int, int]:
        """Rows of the two tiles of A."""
        tall = self.x.tall
        return (tall, tall) if self.x.paired else ((tall + 1) // 2, tall // 2)

    @property
    def sums_size(self) -> int:
        """Elements of the sums of a register tile."""
        return -(-sum(self.heights) * self.s.nr // 64) * 64

    @property
    def own_size(self) -> Index:
        """Elements of a worker's scratch: sums, and a strip."""
        return const(self.sums_size + -(-self.x.strip_size // 64) * 64)

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
            *self.strip(own + self.sums_size),
            self.configured(),
            *(() if x.groups > 1 else of_task),
            *self.products(),
            Configure(()),
        )

    def configured(self) -> Configure:
        """Shapes of tiles: of A of the two heights, and of a step of k."""
        atom, grid, deep = self.atom, self.grid, self.x.deep
        rows, words = list(grid.tile_rows(atom)), [atom.n] * len(grid.tile_rows(atom))
        for r, height in enumerate(self.heights):
            for i in (*(grid.c(r, v) for v in range(grid.columns)), grid.a(r)):
                rows[i] = const(height)
            words[grid.a(r)] = deep
        if deep == atom.deep:
            return Configure(tuple(rows))
        for v in range(grid.columns):
            rows[grid.b(v)] = const(deep)
        return Configure(tuple(rows), tuple(words))

    # -- strip -----------------------------------------------------------------

    def strip(self, place: Ptr) -> tuple[Stmt, ...]:
        """Copy of the rows of an image that a block reads, with its padding, from which rows count."""
        x, kind = self.x, self.atom.left
        if not x.copies:
            return (LetPtr("strip", Ptr("source", LOW * x.steps[0]), kind, readonly=True),)
        inside = 1 - Y.lt(x.before[0])
        inside = inside * Y.lt(x.before[0] + x.spatial[0])
        left, width = x.before[1] * x.channels, x.spatial[1] * x.channels
        right = x.row - left - width
        line = Ptr("source", (Y - x.before[0]) * x.steps[0])
        line = line + var("group") * x.channels if x.groups > 1 else line
        copy = (
            LetPtr("line", line, self.read, readonly=True),
            *self.filled(0, left),
            *self.copied(left, width),
            *self.filled(left + width, right),
        )
        to = Ptr("padded", (Y - LOW) * x.row)
        each: tuple[Stmt, ...] = (LetPtr("to", to, kind), If(inside, copy, self.filled(0, x.row)))
        groups = (var("first") // self.per, (var("last") + (self.per - 1)) // self.per)
        if x.groups > 1:
            at = LetPtr("to", to + (var("group") - var("begin")) * (x.reached * x.row), kind)
            each = (For("group", var("begin"), var("end"), const(1), (at, *each[1:])),)
        high = (LAST - 1) * x.stride[0] + x.reach[0]
        body = (*self._padding(), For("y", LOW, var("high"), const(1), each))
        lines = self.move_atom.name
        strip = Function("strip", "inner", self._params(), body, "Rows of an image with their padding", of=lines)
        return (
            LetPtr("padded", place, kind),
            Call(strip, (LOW, high, Ptr("source"), Ptr("padded"), *(groups if x.groups > 1 else ()))),
            LetPtr("strip", Ptr("padded"), kind, readonly=True),
        )

    def _params(self) -> tuple[Param, ...]:
        groups = (Param("begin"), Param("end")) if self.x.groups > 1 else ()
        source, padded = Param("source", self.read, readonly=True), Param("padded", self.atom.left)
        return (Param("low"), Param("high"), source, padded, *groups)

    @property
    def move_atom(self) -> Atom:
        """The atom whose vectors move units, a cache line at a time."""
        return self.isa.row_atom(self.atom) or self.atom

    def _padding(self) -> tuple[Stmt, ...]:
        """A vector of padding."""
        elements, kind = self.move_atom.n * self.s.atom.kr, base(self.atom.left)
        one = Move(Ptr("fill", var("e")), None, self.x.fill)
        return (
            Scratch("fill", elements, kind),
            For("e", const(0), const(elements), const(1), (one,)),
            LetPtr("padding", Ptr("fill"), self.atom.left, readonly=True),
            Verb("load_b", "z", p=Ptr("padding"), to=self.atom.left),
        )

    def filled(self, begin: int, count: int) -> tuple[Stmt, ...]:
        """Padding in a row of the strip."""
        vector = (Verb("store", "z", p=Ptr("to", var("e") + begin), to=self.atom.left),)
        one = (Move(Ptr("to", var("e") + begin), Ptr("padding")),)
        return self._vectors(count, vector, one)

    def copied(self, begin: int, count: int) -> tuple[Stmt, ...]:
        """Pixels of an image in a row of the strip."""
        x, e, kind = self.x, var("e"), self.atom.left

        def moved(line: str, to: Ptr, count: int) -> tuple[Stmt, ...]:
            load = Verb("load_b", "x", p=Ptr(line, e), to=kind), Verb("store", "x", p=to + e, to=kind)
            return self._vectors(count, load, (Move(to + e, Ptr(line, e)),))

        if x.few:
            return self.spread(begin)
        if x.steps[1] == x.channels:
            return moved("line", Ptr("to", const(begin)), count)
        at = LetPtr("pixel", Ptr("line", var("z") * x.steps[1]), kind, readonly=True)
        to, whole = Ptr("to", var("z") * x.channels + begin), x.channels // self.move_atom.n * self.move_atom.n
        pixel = moved("pixel", to, x.channels)
        if x.groups > 1 and whole < x.channels:
            pixel = (*(moved("pixel", to, whole) if whole else ()), *self._few("pixel", to, whole))
        return (For("z", const(0), const(x.spatial[1]), const(1), (at, *pixel)),)

    def _few(self, line: str, to: Ptr, begin: int) -> tuple[Stmt, ...]:
        """Copy of the last channels of a pixel, fewer than a vector, as words, which are moved as floats."""
        kind, word = "f32", self.isa.vector("f32", self.move_atom.n)
        assert word is not None  # noqa: S101 - machines with tiles have such vectors
        return (
            LetPtr("from", Ptr(line, const(begin)), kind, readonly=True),
            LetPtr("words", to + begin, kind),
            keep(word, "kept", const(self.x.channels - begin), of=word.name),
            Verb("load_mask", "w", p=Ptr("from"), mask="kept", of=word.name),
            Verb("store_mask", "w", p=Ptr("words"), mask="kept", of=word.name),
        )

    def _vectors(self, count: int, vector: tuple[Stmt, ...], one: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Loops over the vectors of some units, and over those that remain."""
        lanes = self.move_atom.n
        whole = count // lanes * lanes
        loops = (For("e", const(0), const(whole), const(lanes), vector, 2),) if whole else ()
        return loops if whole == count else (*loops, For("e", const(whole), const(count), const(1), one))

    # -- products --------------------------------------------------------------

    def products(self) -> tuple[Stmt, ...]:
        """Loops over panels, rows and slices of rows."""
        x, s = self.x, self.s
        steps = x.kernel[0] * x.kernel[1] * x.channels // x.deep
        lines = const(x.deep * s.nr // line_of(self.atom, self.atom.right))
        tiles = const(x.slices) if x.by_rows else (LAST - FIRST) * x.slices
        follow = (var("j") + 1).lt(var("last")) * var("lines")
        if x.by_rows:
            follow = follow * Y.eq(FIRST)
        slices = ("slice", const(0), const(x.slices), const(1))
        whole = For(*slices, self.tile(steps))
        step = const(2 if x.paired else 1)
        panels = ("j", var("first"), var("last"), const(1))
        named = (*self.panel, Let("follow", follow))
        loops: tuple[Stmt, ...] = (For(*panels, (*named, For("y", FIRST, LAST, step, (whole,)))),)
        if x.by_rows:
            loops = (For("y", FIRST, LAST, step, (For(*panels, (*named, whole)),)),)
        if x.by_slices:
            of_slice = For(*slices, (For(*panels, (*named, *self.tile(steps))),))
            loops = (For("y", FIRST, LAST, step, (of_slice,)),)
        return (Let("lines", ceil_div(lines, tiles)), *loops)

    def tile(self, steps: int) -> tuple[Stmt, ...]:
        """Micro-kernel and epilogue of a register tile."""
        x, s, number = self.x, self.s, var("slice")
        first = minimum(number * x.tall, x.out[1] - x.tall)
        apart = const(self.heights[0] * x.stride[1] * x.pixel)
        count, skipped = const(x.tall) - (number * x.tall - var("z")), number * x.tall - var("z")
        if x.paired:
            rows = minimum(2, LAST - Y)
            apart, count, skipped = (rows - 1) * (x.stride[0] * x.row), rows * x.tall, const(0)
        done = number if x.by_rows else (Y - FIRST) * x.slices + number
        ahead = Ptr("bp", var("b_n") + done * (var("lines") * steps * line_of(self.atom, self.atom.right)))
        a = Ptr(
            "channels" if x.groups > 1 else "strip",
            (Y * x.stride[0] - LOW) * x.row + var("z") * (x.stride[1] * x.pixel),
        )
        row = IMAGE * x.pixels + Y * x.out[1] + var("z") + skipped
        into = Ptr("c", var("item") * var("c_batch") + (var("row") * var("c_m") + var("column"))), var("c_m")
        sums = (Ptr("sums", skipped * s.nr), const(s.nr))
        return (
            Let("z", first),
            Let("row", row),
            Call(self.micro_kernel(), (a, apart, Ptr("bp"), Ptr("sums"), ahead, var("follow"))),
            finished(self.isa, self.atom, s.types[2], s.fused, count, sums, into),
        )

    def micro_kernel(self) -> Function:
        """Micro-kernel C[tall][nr] = A . B over all taps."""
        x, atom, deep, nr = self.x, self.atom, self.x.deep, self.s.nr
        steps, per = x.run // deep, x.runs_of_row
        by = Strides(const(x.stride[1] * x.pixel), const(deep), nr, nr, a_next=var("apart"))
        cut = (const(0), const(self.heights[0]))
        outer = Outer(atom, self.grid, cut, self.grid.columns, by, passing=x.near, left="line", flowing=x.by_rows)
        tap, run, step = var("tap"), var("run"), var("step")
        at = tap * (x.dilation[0] * x.row) + run * (x.dilation[1] * x.pixel)
        vector = self.isa.sum_row_atom(atom)
        body = (
            Let("t", (tap * per + run) * steps + step),
            *prefetch_next(atom),
            *outer.step(step, nr, Ptr("b", var("t") * (deep * nr))),
            *(awake(vector) if vector else ()),
        )
        line = LetPtr("line", Ptr("a", at), atom.left, readonly=True)
        runs = For("run", const(0), const(per), const(1), (line, For("step", const(0), const(steps), const(1), body)))
        params = (
            Param("a", atom.left, readonly=True), Param("apart"), Param("b", atom.right, readonly=True),
            Param("c", atom.acc), Param("b_next", atom.right, readonly=True), Param("lines"),
        )  # fmt: skip
        zero = tuple(Verb("zero", str(self.grid.c(r, v))) for r in range(2) for v in range(self.grid.columns))
        loops = For("tap", const(0), const(x.kernel[0]), const(1), (runs,))
        comment = f"C[{sum(self.heights)}][{nr}] = A[..][k] . B[k][{nr}], in tiles"
        return Function("ukr_conv", "inner", params, (*zero, loops, *outer.sums("store")), comment)
