"""Convolution of groups of few channels: several groups in a vector, with channels last.

    for each few rows of a result, and a share of its groups    <- threads
      strip of the images, with padding at both ends of its rows  (L2)
      for each panel: a vector of outputs, of some groups or of a part of one
        for each row of the result
          for each H pixels
            for each row of taps that lies within the image, and each channel of a group
              a vector for each pixel, times filters: lanes of a group have its channel

A product for each group would leave most lanes of a vector idle, and begin anew for each. Here a pixel's channels of
the groups of a vector are loaded at once, and spread among the lanes by a shuffle that the taps of a row share: of H
pixels of a result with a stride of 1, and a filter of three taps, H + 2 shuffles are for 3 H multiply-adds. A vector of
outputs of one group takes a channel as a broadcast. Taps above and below the image are skipped; sums are whole when a
register tile ends, so that it writes the result, or `epilogue` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.lane_nodes import Shuffle
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, LetPtr, Move, Param, Verb
from portmm.kernels.cpu.blocking import TASKS_PER_WORKER, WORKERS, M, N
from portmm.kernels.cpu.convolution_blocks import FIRST, IMAGE, LAST, LOW, entry, finished, rows_of_task, share, slices
from portmm.kernels.cpu.microkernel import Shape, acc_of, spare, stored
from portmm.kernels.cpu.packing import keep
from portmm.schedule.grouped_convolution import TAPS
from portmm.spec.epilogue import operand_types

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.grouped_convolution import Grouped
    from portmm.spec.epilogue import Fused
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(isa: Isa, atom: Atom, sizes: Grouped, types: tuple[str, str], fused: Fused | None) -> Kernel:
    """Kernel of a convolution of groups.

    Args:
        isa: the instruction set.
        atom: its multiply-adds.
        sizes: of blocks.
        types: of images and of the result; sums and filters are of the atom's.
        fused: the epilogue.
    """
    g = _Loops(isa, atom, sizes, types, fused)
    tasks = M // sizes.pixels * g.blocks * g.chunks
    items = entry(g.block(), tasks, "Rows of the result of some groups")
    kinds = (("a", types[0]), ("b", atom.right), ("c", types[1]))
    name = f"portmm_groups_{atom.name}"
    return Kernel(name, isa, atom, items, WORKERS * g.own_size + 64, types=kinds, operands=operand_types(fused))


@dataclass(frozen=True, slots=True)
class _Loops:
    """Loops of one kernel."""

    isa: Isa
    atom: Atom
    x: Grouped
    types: tuple[str, str]
    fused: Fused | None

    @property
    def nr(self) -> int:
        """Columns of a register tile."""
        return self.x.vectors * self.atom.n

    @property
    def in_place(self) -> bool:
        """Whether register tiles are written to C."""
        return not self.fused and self.types[1] == self.atom.acc

    @property
    def whole(self) -> bool:
        """Whether all panels are of whole vectors."""
        y = self.x.panels
        lanes = y.outputs if y.together == 1 else y.together * y.outputs
        return lanes % self.atom.n == 0 and y.groups % y.together == 0

    @property
    def blocks(self) -> int:
        """Blocks of rows of the result, of one image."""
        return -(-self.x.out[0] // self.x.rows)

    @property
    def chunks(self) -> Index:
        """Shares of the groups: as many as strips need, and so that every thread has work."""
        blocks = M // self.x.pixels * self.blocks
        windows = self.x.panels.windows
        needed = ceil_div((WORKERS - 1) * TASKS_PER_WORKER + 1, blocks)
        return minimum(windows, maximum(-(-windows // self.x.most), needed))

    @property
    def of_tile(self) -> int:
        """Elements of the sums of a register tile, where an epilogue takes them from memory."""
        return 0 if self.in_place else -(-self.x.height * self.nr // 64) * 64

    @property
    def own_size(self) -> int:
        """Elements of a worker's scratch: a strip, and sums."""
        return self.x.most * self.x.of_window + self.of_tile

    def block(self) -> tuple[Stmt, ...]:
        """Statements for one block."""
        x, (first, last) = self.x, share(const(self.x.panels.windows))
        own = Ptr("work", var("worker") * self.own_size)
        panels = For("j", const(0), const(x.panels.of_window), const(x.vectors), self.panel())
        top, end = FIRST * x.stride[0] - x.before[0], (LAST - 1) * x.stride[0] - x.before[0] + x.reach[0]
        return (
            *rows_of_task(self.chunks, self.blocks, x.out),
            Let("low", top if x.fill else maximum(0, top)),
            Let("high", end if x.fill else minimum(x.spatial[0], end)),
            Let("first", first),
            Let("last", last),
            LetPtr("strip", own, self.atom.acc),
            LetPtr("source", Ptr("a", var("item") * var("a_batch") + IMAGE * x.image), self.types[0], readonly=True),
            *(() if self.in_place else (LetPtr("sums", own + x.most * x.of_window, self.atom.acc),)),
            For("y", LOW, var("high"), const(1), self.line()),
            For("window", var("first"), var("last"), const(1), (panels,)),
        )

    # -- strip -----------------------------------------------------------------

    def line(self) -> tuple[Stmt, ...]:
        """Copy of a row of an image to the strips of all groups of a block, with padding at its ends."""
        x, z, channels = self.x, var("z"), self.x.panels.together * self.x.panels.channels
        left = min(x.before[1], x.width)
        pixels = max(0, min(x.spatial[1], x.width - left))
        row = Ptr("strip", (var("window") - var("first")) * x.of_window + (var("y") - LOW) * (x.width * x.pixel))
        ends = (
            *self.filled(row, left * x.pixel),
            *self.filled(row + (left + pixels) * x.pixel, (x.width - left - pixels) * x.pixel),
        )
        one = (
            LetPtr("to", row + (left + z) * x.pixel, self.atom.acc),
            LetPtr("pixel", Ptr("line", z * x.steps[1] + var("window") * channels), self.read, readonly=True),
            *self.channels(),
        )
        groups = (For("window", var("first"), var("last"), const(1), one),)
        copy = (
            LetPtr("line", Ptr("source", var("y") * x.steps[0]), self.types[0], readonly=True),
            *((For("window", var("first"), var("last"), const(1), ends),) if ends else ()),
            For("z", const(0), const(pixels), const(1), groups),
        )
        if not x.fill:
            return copy
        outside = For("window", var("first"), var("last"), const(1), self.filled(row, x.width * x.pixel))
        return (If((1 - var("y").lt(0)) * var("y").lt(x.spatial[0]), copy, (outside,)),)

    @property
    def read(self) -> str:
        """Type that channels are read as: units of several are words, which are copied as they are."""
        return self.types[0] if self.atom.k_pack == 1 else self.atom.acc

    def channels(self) -> tuple[Stmt, ...]:
        """Copy of the channels of some groups; behind fewer last ones is what was there, which reaches no result."""
        y = self.x.panels
        few, whole = y.groups % y.together, self.copied(y.together * y.depth)
        if not few:
            return whole
        return (If(var("window").eq(y.windows - 1), self.copied(few * y.depth), whole),)

    def filled(self, row: Ptr, count: int) -> tuple[Stmt, ...]:
        """Padding in a row of the strip: units of a byte are words."""
        word = int.from_bytes(bytes([self.x.fill & 255] * 4), "little", signed=True)
        one = Move(row + var("e"), None, word)
        return (For("e", const(0), const(count), const(1), (one,)),) if count else ()

    def copied(self, count: int) -> tuple[Stmt, ...]:
        """Copy of contiguous words, by vectors."""
        real = self.isa.vector(self.atom.acc, self.atom.n)
        assert real is not None  # noqa: S101 - the sums have such vectors
        few, copies = count % real.n, []
        for e in range(0, count - few, real.n):
            for verb, place in (("load_b", "pixel"), ("store", "to")):
                copies.append(Verb(verb, "x", p=Ptr(place, const(e)), of=real.name))
        if not few:
            return tuple(copies)
        begin = const(count - few)
        if real.mask_free and self.isa.spelling(real, "load_mask", self.read, real.right):
            places = (("load_mask", "pixel"), ("store_mask", "to"))
            moves = (Verb(verb, "x", p=Ptr(at, begin), mask="kept", of=real.name) for verb, at in places)
            return (*copies, keep(real, "kept", const(few), of=real.name), *moves)
        one = Move(Ptr("to", var("e")), Ptr("pixel", var("e")))
        return (*copies, For("e", begin, const(count), const(1), (one,)))

    # -- products --------------------------------------------------------------

    def panel(self) -> tuple[Stmt, ...]:
        """Rows of the result of a panel."""
        x, y, window, j = self.x, self.x.panels, var("window"), var("j")
        outputs = y.together * y.outputs
        filters = Ptr("b", var("item") * var("b_batch") + (window * y.of_window + j) * y.panel)
        last = N - var("column") if y.together > 1 else const(outputs) - j * self.atom.n
        return (
            Let("column", window * outputs + j * self.atom.n),
            Let("columns", minimum(min(self.nr, outputs), last)),
            LetPtr("bp", filters, self.atom.right, readonly=True),
            LetPtr("channels", Ptr("strip", (window - var("first")) * x.of_window), self.atom.left, readonly=True),
            For("y", FIRST, LAST, const(1), self.row()),
        )

    def row(self) -> tuple[Stmt, ...]:
        """Register tiles of one row of the result, with the taps that lie within the image: of nearly equal heights."""
        x = self.x
        top = var("y") * x.stride[0] - x.before[0]
        body: list[Stmt] = [
            Let("tap", maximum(0, ceil_div(const(x.before[0]) - var("y") * x.stride[0], x.dilation[0]))),
            Let("end", minimum(x.panels.kernel[0], ceil_div(const(x.spatial[0]) - top, x.dilation[0]))),
        ]
        if x.fill:
            body = [Let("tap", const(0)), Let("end", const(x.panels.kernel[0]))]
        return (*body, *slices(x, x.height, lambda rows: self.tile(rows, top)))

    def tile(self, rows: int, top: Index) -> tuple[Stmt, ...]:
        """Micro-kernel, and epilogue, of some pixels."""
        x, columns = self.x, var("columns")
        a = Ptr("channels", (top - LOW) * (x.width * x.pixel) + var("z") * (x.stride[1] * x.pixel))
        into = (Ptr("c", var("item") * var("c_batch") + var("row") * var("c_m") + var("column")), var("c_m"))
        args = (var("tap"), var("end"), a, Ptr("bp"))
        if self.in_place:
            return (Call(self.micro_kernel(rows), (*args, *into, columns)),)
        sums = (Ptr("sums"), const(self.nr))
        return (
            Call(self.micro_kernel(rows), (*args, *sums, columns)),
            finished(self.isa, self.atom, self.types[1], self.fused, const(rows), sums, into),
        )

    def micro_kernel(self, rows: int) -> Function:
        """Function for the sums of some pixels."""
        x, y, atom = self.x, self.x.panels, self.atom
        s = Shape(rows, self.nr)
        wide, q = y.kernel[1], var("q")
        steps: list[Stmt] = []
        for tap in range(0, wide, TAPS):
            taps = range(tap, min(wide, tap + TAPS))
            if y.together > 1:
                steps += [z for c in range(y.depth) for z in self.step(rows, taps, const(c), c)]
            else:
                steps.append(For("p", const(0), const(y.depth), const(1), self.step(rows, taps, var("p"))))
        of_row = (
            LetPtr("pixels", Ptr("a", q * (x.dilation[0] * x.width * x.pixel)), atom.left, readonly=True),
            LetPtr("filters", Ptr("b", q * (y.depth * wide * atom.n)), atom.right, readonly=True),
            *steps,
        )
        body: tuple[Stmt, ...] = (
            *(Verb("zero", acc_of(i, v)) for i in range(rows) for v in range(x.vectors)),
            For("q", var("first"), var("last"), const(1), of_row),
        )
        if self.whole or not self.in_place:
            body += stored(atom, s, "c", edge=False)
        elif atom.mask_free:
            body += (*spare(atom, s), *stored(atom, s, "c", edge=True))
        else:
            edge = (*spare(atom, s), *stored(atom, s, "c", edge=True))
            body += (If(var("columns").lt(self.nr), edge, stored(atom, s, "c", edge=False)),)
        params = (
            Param("first"), Param("last"), Param("a", atom.left, readonly=True), Param("b", atom.right, readonly=True),
            Param("c", atom.acc), Param("c_m"), Param("columns"),
        )  # fmt: skip
        comment = f"C[{rows}][columns] = sums over rows of taps and channels of groups"
        return Function(f"ukr_{rows}x{self.nr}", "inner", params, body, comment)

    def step(self, rows: int, taps: range, channel: Index, shuffled: int = 0) -> tuple[Stmt, ...]:
        """Products of one channel of each group with some taps of a row: each pixel is loaded once."""
        x, y, atom = self.x, self.x.panels, self.atom
        stmts: list[Stmt] = []
        for v in range(x.vectors):
            for i in taps:
                at = (channel * y.kernel[1] + i) * atom.n + v * y.panel
                stmts.append(Verb("load_b", f"b{i - taps[0]}_{v}", p=Ptr("filters", at)))
        uses: dict[int, list[tuple[int, int]]] = {}
        for r in range(rows):
            for i in taps:
                uses.setdefault(r * x.stride[1] + i * x.dilation[1], []).append((r, i - taps[0]))
        for pixel, users in sorted(uses.items()):
            if y.together > 1:
                pick = [lane // y.outputs * y.depth + shuffled for lane in range(y.together * y.outputs)]
                pick += [0] * (atom.n - len(pick))
                stmts.append(Verb("load_b", "x", p=Ptr("pixels", const(pixel * x.pixel)), to=atom.left))
                stmts.append(Shuffle("t", "x", "x", tuple(pick)))
            else:
                stmts.append(Verb("load_a", "t", p=Ptr("pixels", channel + pixel * x.pixel)))
            stmts += [Verb("mac", acc_of(r, v), "t", f"b{i}_{v}") for r, i in users for v in range(x.vectors)]
        return tuple(stmts)
