"""Direct convolution: micro-kernels read windows of images where they lie, with channels last.

    for each few rows of a result, and a share of its columns    <- threads
      strip of the images, with padding at both ends of its rows  (L2)
      for each panel of filters                                   (the two loops are exchanged where filters
        for each block of k: some rows of taps, or a part of one   are larger than L2, to read them once)
          for each row of the result that these taps reach        (block of a panel in L1)
            for each MR pixels
              micro-kernel

Pixels of a row of the result are equally far apart in an image, and so are rows of A. Channels of neighbouring taps are
contiguous, so that a row of taps is one run of k, and nothing is copied once for each tap. Rows of an image are padded
in a copy of a strip, which is skipped where windows stay within rows; taps above and below the image are skipped. Sums
of a panel stay in scratch until they are whole; `epilogue` then writes the tile.

(oneDNN's brgemm convolutions do likewise; Georganas et al., SC 2018.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import Call, For, If, Kernel, Let, LetPtr, Move, Verb
from portmm.kernels.cpu.convolution_blocks import FIRST, LAST, LOW, Loops, finished, rows_of_task, share, slices
from portmm.kernels.cpu.microkernel import Shape, micro_kernel
from portmm.kernels.cpu.packing import line_of
from portmm.spec.dtype import unit

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.direct_convolution import Direct
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(s: Schedule, isa: Isa, atom: Atom, direct: Direct) -> Kernel:
    """Kernel of a convolution by a schedule for panels and register tiles, and sizes of blocks.

    Raises:
        ScheduleError: the schedule converts elements of A, or filters are not in panels.
    """
    if s.b.layout != "packed" or s.b.packed or unit(s.types[0], s.atom.kr) != atom.left or atom.m != 1:
        raise ScheduleError(f"a direct convolution reads A in place and filters in panels; {s.name(atom)} does not")
    g = _Loops(s, isa, atom, direct)
    return g.kernel(g.block(), g.own_size)


@dataclass(frozen=True, slots=True)
class _Loops(Loops):
    """Loops of one kernel."""

    x: Direct

    @property
    def of_panel(self) -> int:
        """Elements of the sums of a panel."""
        return -(-self.x.rows * self.x.out[1] * self.s.nr // 64) * 64

    @property
    def sums_size(self) -> Index:
        """Elements of the sums that are kept: of a panel, or where blocks of k are the outer loop of all."""
        return self.panels * self.of_panel if self.x.k_outer else const(self.of_panel)

    @property
    def own_size(self) -> Index:
        """Elements of a worker's scratch: sums, and a strip."""
        return self.sums_size + -(-self.x.strip_size // 64) * 64

    def block(self) -> tuple[Stmt, ...]:
        """Statements for one block."""
        x, (first, last) = self.x, share(self.panels)
        own = Ptr("work", var("worker") * self.own_size)
        return (
            *rows_of_task(self.chunks, self.blocks, x.out),
            Let("low", maximum(0, FIRST * x.stride[0] - x.before[0])),
            Let("high", minimum(x.spatial[0], (LAST - 1) * x.stride[0] - x.before[0] + x.reach[0])),
            LetPtr("scratch", own, self.atom.acc),
            LetPtr("source", self.image, self.read, readonly=True),
            *self.strip(own + self.sums_size),
            Let("first", first),
            Let("last", last),
            *self.products(),
        )

    # -- strip -----------------------------------------------------------------

    def strip(self, place: Ptr) -> tuple[Stmt, ...]:
        """Copy of the rows of an image that a block reads, with zeros at their ends."""
        x, kind = self.x, self.copied_as
        if not x.copies:
            return (LetPtr("strip", Ptr("source", LOW * x.steps[0]), self.atom.left, readonly=True),)
        row = Ptr("padded", (var("y") - LOW) * x.row)
        width = x.spatial[1] * x.channels
        copies: tuple[Stmt, ...] = (
            LetPtr("to", row + x.before[1] * x.channels, kind),
            LetPtr("line", Ptr("source", var("y") * x.steps[0]), self.read if x.few else kind, readonly=True),
        )
        if x.few:
            copies += self.spread(0)
        elif x.steps[1] == x.channels:
            copies += self.copied("line", "to", width)
        else:
            of_pixel = (
                LetPtr("to_pixel", Ptr("to", var("z") * x.channels), kind),
                LetPtr("pixel", Ptr("line", var("z") * x.steps[1]), kind, readonly=True),
                *self.copied("pixel", "to_pixel", x.channels),
            )
            copies += (For("z", const(0), const(x.spatial[1]), const(1), of_pixel),)
        left, right = x.before[1] * x.channels, x.after * x.channels
        zeros = (*self.zeros(row, 0, left), *self.zeros(row, left + width, right))
        return (
            LetPtr("padded", place, kind),
            For("y", LOW, var("high"), const(1), (*zeros, *copies)),
            LetPtr("strip", Ptr("padded"), self.atom.left, readonly=True),
        )

    @property
    def copied_as(self) -> str:
        """The type as which a strip is copied: units as sums, which have as many bytes."""
        return self.atom.left if self.s.atom.kr == 1 else self.atom.acc

    def zeros(self, row: Ptr, begin: int, count: int) -> tuple[Stmt, ...]:
        """Zeros in a row of the strip."""
        one = Move(row + (var("e") + begin), None)
        return (For("e", const(0), const(count), const(1), (one,)),) if count else ()

    def copied(self, line: str, to: str, count: int) -> tuple[Stmt, ...]:
        """Copy of contiguous elements, by vectors."""
        e, whole = var("e"), count // self.atom.n * self.atom.n
        load = "load_b" if self.s.atom.kr == 1 else "load_c"
        vector = (Verb(load, "t", p=Ptr(line, e)), Verb("store", "t", p=Ptr(to, e)))
        loops = (For("e", const(0), const(whole), const(self.atom.n), vector, 2),) if whole else ()
        rest = (For("e", const(whole), const(count), const(1), (Move(Ptr(to, e), Ptr(line, e)),)),)
        return loops if whole == count else (*loops, *rest)

    # -- products --------------------------------------------------------------

    def products(self) -> tuple[Stmt, ...]:
        """Loops over panels and blocks of k."""
        rows = For("y", FIRST, LAST, const(1), self.row())
        kept = (var("j") - var("first")) * self.of_panel if self.x.k_outer else const(0)

        def panels(inside: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
            body = (*self.panel, LetPtr("sums", Ptr("scratch", kept), self.atom.acc), *inside)
            return (For("j", var("first"), var("last"), const(1), body),)

        return self.over_k(panels((rows,))) if self.x.k_outer else panels(self.over_k((rows,)))

    def over_k(self, inside: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Loops over blocks of k: some runs, or a part of one."""
        x = self.x
        if x.kc < x.run:
            depth = Let("depth", minimum(x.kc, const(x.run) - var("part")))
            inside = (For("part", const(0), const(x.run), const(x.kc), (depth, *inside)),)
        else:
            inside = (Let("part", const(0)), Let("depth", const(x.run)), *inside)
        taps = Let("taps", minimum(x.of_block, const(x.runs) - var("tap")))
        return (For("tap", const(0), const(x.runs), const(x.of_block), (taps, *inside)),)

    def row(self) -> tuple[Stmt, ...]:
        """Products of one row of the result, with the taps of a block that lie within the image."""
        x, y, tap = self.x, var("y"), var("tap")
        top = y * x.stride[0] - x.before[0]
        per = x.runs_of_row
        begin = maximum(0, ceil_div(const(x.before[0]) - y * x.stride[0], x.dilation[0]))
        end = minimum(x.kernel[0], ceil_div(const(x.spatial[0]) - top, x.dilation[0]))
        first, last = var("tap_first"), var("tap_last")
        if per == 1:
            bounds: tuple[Stmt, ...] = (
                Let("tap_first", maximum(tap, begin)),
                Let("tap_last", minimum(tap + var("taps"), end)),
            )
            at = first * (x.dilation[0] * x.row)
            start = begin
        else:  # one run in a block
            inside = (1 - (tap // per).lt(begin)) * (tap // per).lt(end)
            bounds = (Let("tap_first", tap), Let("tap_last", tap + inside))
            at = tap // per * (x.dilation[0] * x.row) + tap % per * (x.dilation[1] * x.pixel)
            start = begin * per
        a = Ptr("strip", (top - LOW) * x.row + at + var("part"))
        b = Ptr("bp", (first * x.run + var("part")) * self.s.nr)
        done = last.eq(end * per) * (var("part") + var("depth")).eq(x.run)
        body = (
            *(() if self.in_place else (Let("done", done),)),
            Let("again", 1 - (first.eq(start) * var("part").eq(0))),
            LetPtr("ap", a, self.atom.left, readonly=True),
            LetPtr("filters", b, self.atom.right, readonly=True),
            *slices(x, self.s.mr, self.multiply),
        )
        return (*bounds, If(first.lt(last), body))

    @property
    def in_place(self) -> bool:
        """Whether micro-kernels write C: no sums are kept for a further block of k, or for an epilogue."""
        return self.x.whole and not self.s.fused and self.s.types[2] == self.atom.acc

    def multiply(self, rows: int) -> tuple[Stmt, ...]:
        """Micro-kernel and epilogue of a tile of some pixels."""
        x, s, z, columns = self.x, self.s, var("z"), var("columns")
        shape = Shape(
            rows, s.nr, a_packed=False, ragged=self.in_place, a=self.atom.left, b=self.atom.right,
            a_row=x.stride[1] * x.pixel, steps_of_run=(x.dilation[0] * x.row, x.run * s.nr),
            ahead=("b",) if x.k_outer else None,
        )  # fmt: skip
        into = self.result()
        sums = (Ptr("sums", ((var("y") - FIRST) * x.out[1] + z) * s.nr), const(s.nr))
        args = (
            var("depth"),
            var("tap_last") - var("tap_first"),
            Ptr("ap", z * (x.stride[1] * x.pixel)),
            Ptr("filters"),
        )
        kernel = micro_kernel(self.atom, shape)
        if self.in_place:
            return (Call(kernel, (*args, *into, columns, const(0), *self.ahead(into[0], rows))),)
        call = finished(self.isa, self.atom, s.types[2], s.fused, const(rows), sums, into)
        return (
            Call(kernel, (*args, *sums, columns, var("again"), *self.ahead(sums[0], rows))),
            If(var("done"), (call,)),
        )

    def result(self) -> tuple[Ptr, Index]:
        """Place of a tile in the result, and elements from a pixel to the next."""
        place, step = var("row") * var("c_m"), var("c_m")
        if self.x.to is not None:
            row, pixel = self.x.to
            place, step = var("y") * row + var("z") * pixel, const(pixel)
        return Ptr("c", var("item") * var("c_batch") + (place + var("column"))), step

    def ahead(self, c: Ptr, rows: int) -> tuple[Index | Ptr, ...]:
        """Arguments for prefetches: of the tile of C, and of the next panel's filters, a part by each tile."""
        x, line = self.x, line_of(self.atom)
        if not x.k_outer:
            return ()
        of_row = -(-x.out[1] // self.s.mr)
        step = min(line, -(-self.s.nr * x.of_block // (x.rows * of_row)))
        tile = (var("y") - FIRST) * of_row + var("z") // rows
        return (c, Ptr("filters", var("b_n") + tile * step * var("depth")), const(step))
