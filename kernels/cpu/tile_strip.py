"""Strips of images on tile units: rows with their padding, and one part for each group of channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import Call, For, Function, If, LetPtr, Move, Param, Scratch, Verb
from portmm.kernels.cpu.convolution_blocks import LAST, LOW, Loops
from portmm.kernels.cpu.packing import keep
from portmm.spec.dtype import base

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.schedule.tile_convolution import Tiled
    from portmm.target.atom import Atom

Y = var("y")
"""Row of an image."""


@dataclass(frozen=True, slots=True)
class TiledStrip(Loops):
    """Loops of a kernel with such a strip."""

    x: Tiled

    @property
    def per(self) -> int:
        """Register tiles along the outputs of a group."""
        return -(-self.x.outputs // (self.s.nr * self.x.panels))

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
