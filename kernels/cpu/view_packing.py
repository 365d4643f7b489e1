"""Packing of views of A or B into panels: windows of convolutions, and whatever else a `Layout` describes.

Rows are those of A, or the columns of B. k is cut into runs, in which elements are a constant step apart, and rows into
groups of as many as a vector has lanes. A group has the address of each row, computed from that of the row before with
additions and comparisons; a run adds one offset to all of them. Where no row of a group is in padding anywhere in a
run, which two comparisons for each padded axis of the memory say, the run is copied as that of a matrix in place, by
transposed blocks where it is contiguous. At the edges runs are cut so that each row of one is in padding as a whole or
not at all: a test for each vector.

Where rows are contiguous instead, as the windows of images in planes, vectors are copied wherever memory goes on, and
rows in padding are cleared afterwards.

Stores are whole vectors, so each overwrites elements that follow: see `packing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING

from portmm.ir.address import offset, tests, value
from portmm.ir.index import Index, Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import For, Function, If, Let, LetPtr, Move, Param, Scratch, Verb
from portmm.kernels.cpu.packing import transpose
from portmm.spec.dtype import BY_NAME, base, unit
from portmm.spec.layout import Position
from portmm.spec.layout_index import ZERO
from portmm.spec.layout_runs import runs

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.spec.layout import Layout
    from portmm.spec.layout_runs import Runs
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

LONG = 32
"""Elements of a run from which on the instructions that each run takes are some percent of those that copy it."""
SHIFT = {("s8", "u8"): 128, ("u8", "s8"): -128}
"""Types in memory and in panels -> difference of their values."""
ROW, ROWS, DEEP, K, UNIT = (var(x) for x in ("row", "rows", "deep", "k", "p"))
"""First row and rows of a slice, first element and units of a block of k, and unit of a part of a run."""


@dataclass(frozen=True, slots=True)
class Viewed:
    """An operand that is packed from a view.

    Attributes:
        name: "a" or "b".
        view: the layout, of m, or n, and k.
        storage: type of the elements in memory.
        to: type of elements or units in panels.
        most: rows of a slice of A, at most, or of a panel of B.
        padding: value of elements in padding, an integer.
    """

    name: str
    view: Layout
    storage: str
    to: str
    most: int
    padding: int = 0

    @property
    def fill(self) -> int:
        """Value of padding in panels, of integers that are shifted there from signed to unsigned or back."""
        return self.padding + SHIFT.get((self.storage, base(self.to)), 0)

    @property
    def kr(self) -> int:
        """Number of elements of k in a unit."""
        return BY_NAME[self.to].pack

    @property
    def open_ended(self) -> bool:
        """Whether the number of rows of the view is only known by a call, as that of images."""
        return bool(self.view.extents[0].terms)

    @property
    def end(self) -> Index:
        """Number of rows of the view."""
        return var("end") if self.open_ended else value(self.view.extents[0])

    @property
    def width(self) -> Index:
        """Rows of a panel: as many as a slice of A has, or all of B."""
        return ROWS if self.name == "a" else const(self.most)

    def where(self, row: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Statements for a row that a panel has."""
        return (If(const(row).lt(ROWS), body),) if row and self.name == "a" else body

    def pack(self, isa: Isa, atom: Atom) -> Function:
        """Function to[p][i] = A[row + i][deep + p], p < k, i < rows; up to a vector past the end is overwritten."""
        counts = ("k", *(("elements",) if self.kr > 1 else ()), *(("rows",) if self.name == "a" else ()))
        counts += ("end",) if self.open_ended else ()
        params = (*map(Param, counts), Param(self.name, self.storage, readonly=True))
        params += (Param("row"), Param("deep"), Param("to", self.to))
        body = _in_runs(self, isa, atom) or _one_by_one(self)
        name = f"pack_{self.name}"
        return Function(name, "inner", params, body, f"to[k][rows] = {self.name.upper()}, a view", of=atom.name)


def moved(to: Ptr, view: Layout, at: tuple[Index, Index], name: str = "a", fill: int = 0) -> Stmt:
    """Copy of an element of an operand, or in padding of a number, zero by default."""
    there, copy, filled = view.valid(at, var), Move(to, Ptr(name, offset(view, *at))), Move(to, None, fill)
    if isinstance(there, int):  # for all elements: of a view that is nothing but padding, 0
        return copy if there else filled
    return If(const(0).lt(there), (copy,), (filled,))


def _one_by_one(x: Viewed) -> tuple[Stmt, ...]:
    """Loop that copies a slice element by element, with an address and a test for each."""
    j, e = var("j"), var("e")
    place, at = Ptr("parts", (UNIT * x.width + j) * x.kr + e), UNIT * x.kr + e
    copy = moved(place, x.view, (ROW + j, DEEP + at), x.name, x.fill)
    fill = If(at.lt(var("elements")), (copy,), (Move(place, None),)) if x.kr > 1 else copy
    each: tuple[Stmt, ...] = (For("e", const(0), const(x.kr), const(1), (fill,)),)
    if x.name == "b":
        each = (If((ROW + j).lt(x.end), each),)
    across = For("j", const(0), x.width, const(1), each)
    return (LetPtr("parts", Ptr("to"), base(x.to)), For("p", const(0), K, const(1), (across,)))


def _in_runs(x: Viewed, isa: Isa, atom: Atom) -> tuple[Stmt, ...]:
    """Statements that pack a slice of a view by runs; none if it has none of whole units."""
    still, long = runs(x.view, 1, still=True), runs(x.view, 1)
    if not still or not long or still.length % x.kr != 0:
        return ()
    lines = _lines(x, atom, still)
    long = still if lines or (not still.length.terms and still.length.constant >= LONG) else long

    def group(first: int) -> tuple[Stmt, ...]:
        return _Group(x, isa, atom, long, still, lines, range(first, min(first + atom.n, x.most))).packed()

    # Later rows are packed first, since stores overwrite what follows.
    groups = [y for i in reversed(range(0, x.most, atom.n)) for y in x.where(i, group(i))]
    return (Let("unit", DEEP // x.kr), *groups)


def _lines(x: Viewed, atom: Atom, along: Runs) -> Runs | None:
    """Runs of contiguous rows, where memory has known bounds and vectors along them can be copied; else None."""
    bounded = not x.view.swizzle and not any(y.terms for y in x.view.shape)
    of = runs(x.view, 0) if x.kr == 1 < atom.n and bounded else None
    forward = all(y.terms or y.constant >= 0 for y in (*x.view.stride, along.step))
    return of if of and of.step == 1 and along.step != 1 and forward else None


@dataclass(frozen=True, slots=True)
class _Group:
    """Some rows of a slice, as many as a vector has lanes or fewer.

    Attributes:
        x: the operand.
        isa: the instruction set.
        atom: its instructions that move elements.
        long: runs of k whose rows may be partly in padding.
        still: runs of k each row of which is in padding or not.
        lines: runs of contiguous rows, if vectors along these are copied.
        rows: the rows in the slice.
    """

    x: Viewed
    isa: Isa
    atom: Atom
    long: Runs
    still: Runs
    lines: Runs | None
    rows: range

    def packed(self) -> tuple[Stmt, ...]:
        """Loop over the runs of a block of k."""
        inside: tuple[Stmt, ...] = (Let("inside", self._inside()),)
        if self.lines:
            edges = (*self._rows_there("run"), *self._copied(self.long, "run", tested=True))
            body = (Let("near", self._near(self.lines)), If(var("near"), self._swept(), edges))
            return (*self._addresses(), self._each(self.long, "run", const(0), K, (*inside, *body)))
        if self.long is self.still:
            edges = (*self._rows_there("run"), *self._copied(self.still, "run", tested=True))
        else:
            edges = (*self._rows_there("edge"), *self._copied(self.still, "edge", tested=True))
            edges = (self._each(self.still, "edge", var("run_begin"), var("run_end"), edges),)
        one = If(var("inside"), self._copied(self.long, "run", tested=False), edges)
        return (*self._addresses(), self._each(self.long, "run", const(0), K, (*inside, one)))

    # -- rows ----------------------------------------------------------------

    def _addresses(self) -> tuple[Stmt, ...]:
        """Offset of each row, its index of each condition, and the least and the greatest of these."""
        body: list[Stmt] = []
        position = self.x.view.start((ROW + self.rows[0], const(0)), var)
        for j in self.rows:
            position = position if j == self.rows[0] else self.x.view.move(position, 0, 1, var)
            position, names = _named(position, j)
            body += (*names, Let(f"offset{j}", const(0) + position.linear))
            body += [Let(f"index{j}_{c}", const(0) + x) for c, x in enumerate(self.x.view.padded(position))]
        for c in range(len(self.x.view.conditions)):
            each, first = [var(f"index{j}_{c}") for j in self.rows], self.rows[0]
            body += [Let(f"least{first}_{c}", reduce(minimum, each)), Let(f"most{first}_{c}", reduce(maximum, each))]
        return tuple(body)

    def _there(self, row: int) -> Index:
        """1 for a row that the view has."""
        return (ROW + row).lt(self.x.end)

    def _inside(self) -> Index:
        """1 if no row is in padding anywhere in a run."""
        checks = [self._there(self.rows[-1])]
        for c, (x, reach) in enumerate(zip(self.x.view.conditions, self.long.reach, strict=True)):
            least, most = (var(f"{name}{self.rows[0]}_{c}") + var(f"run_{c}") for name in ("least", "most"))
            checks += tests(x, least + value(reach[0]), most + value(reach[1]))
        return reduce(mul, checks)

    def _near(self, lines: Runs) -> Index:
        """1 if a vector of rows is contiguous, and in the memory of the view, throughout a run."""
        first, lanes = self.rows[0], self.atom.n
        begin = var(f"offset{first}") + var("run_offset")
        end = begin + (var("run_end") - var("run_begin") - 1) * value(self.long.step) + (lanes - 1)
        last = sum(((x - 1) * y for x, y in zip(self.x.view.shape, self.x.view.stride, strict=True)), ZERO)
        checks = [1 - begin.lt(0), end.lt(value(last + 1))]
        if lines.length != self.x.view.extents[0]:
            length = value(lines.length)
            checks.append(((ROW + first) % length + (lanes - 1)).lt(length))
        return reduce(mul, checks)

    def _rows_there(self, name: str) -> tuple[Stmt, ...]:
        """For each row, whether it is in no padding in a run."""
        body: list[Stmt] = []
        for j in self.rows:
            checks = [self._there(j)]
            for c, x in enumerate(self.x.view.conditions):
                at = var(f"index{j}_{c}") + var(f"{name}_{c}")
                checks += tests(x, at, at)
            body.append(Let(f"there{j}", reduce(mul, checks)))
        return tuple(body)

    # -- runs ----------------------------------------------------------------

    def _each(self, of: Runs, name: str, begin: Index, end: Index, body: tuple[Stmt, ...]) -> Stmt:
        """Loop over the runs of some units of a block, the first and last of which may be cut."""
        number, length, unit_0 = var(name), value(of.length // self.x.kr), var("unit")
        first, last = (unit_0 + begin) // length, ceil_div(unit_0 + end, length)
        past = (unit_0 + var(f"{name}_begin") - number * length) * (value(of.step) * self.x.kr)
        bounds = (
            Let(f"{name}_begin", maximum(number * length - unit_0, begin)),
            Let(f"{name}_end", minimum((number + 1) * length - unit_0, end)),
            Let(f"{name}_offset", past + of.offset_of(number, var)),
        )
        indices = tuple(Let(f"{name}_{c}", const(0) + x) for c, x in enumerate(of.indices_of(number, var)))
        return For(name, first, last, const(1), (*bounds, *indices, *body))

    def _copied(self, of: Runs, name: str, *, tested: bool) -> tuple[Stmt, ...]:
        """Copy of a run, or of what is in no padding."""
        lanes, begin = self.atom.n, var(f"{name}_begin")
        lines = tuple(
            LetPtr(f"a{j}", Ptr(self.x.name, var(f"offset{j}") + var(f"{name}_offset")), self.x.storage, readonly=True)
            for j in self.rows
        )
        count = (Let("count", var(f"{name}_end") - begin), LetPtr("out", Ptr("to", begin * self.x.width), self.x.to))
        short = not of.length.terms and of.length.constant < lanes * self.x.kr
        if short or of.step != 1 or not self.isa.shuffles or lanes == 1:
            return (*lines, *count, self._elements(of, const(0), tested=tested))
        rest = var("count") - var("count") % lanes
        return (*lines, *count, *self._blocks(tested=tested), self._elements(of, rest, tested=tested))

    def _swept(self) -> tuple[Stmt, ...]:
        """Copy of vectors of rows in a run; rows in padding are cleared."""
        begin, step, first = var("run_begin"), value(self.long.step), self.rows[0]
        line = Ptr(self.x.name, var(f"offset{first}") + var("run_offset"))
        out = Ptr("out", UNIT * self.x.width + first)
        copy = (
            Verb("load_b", "t0_0", p=Ptr("line", UNIT * step), to=self.x.to),
            Verb("store", "t0_0", p=out, to=self.x.to),
        )
        clear: list[Stmt] = []
        for j in self.rows:
            one = Move(Ptr("out", UNIT * self.x.width + j), None, self.x.fill)
            zeros = For("p", const(0), var("count"), const(1), (one,))
            clear += self.x.where(j, (If(1 - var(f"there{j}"), (zeros,)),))
        return (
            Let("count", var("run_end") - begin),
            LetPtr("line", line, self.x.storage, readonly=True),
            LetPtr("out", Ptr("to", begin * self.x.width), self.x.to),
            For("p", const(0), var("count"), const(1), copy, 2),
            If(1 - var("inside"), (*self._rows_there("run"), *clear)),
        )

    def _blocks(self, *, tested: bool) -> tuple[Stmt, ...]:
        """Loop that transposes whole blocks of a run."""
        lanes, of_unit = self.atom.n, unit(self.x.storage, self.x.kr)
        lines = tuple(LetPtr(f"line{j}", Ptr(f"a{j}"), of_unit, readonly=True) for j in self.rows)
        load: list[Stmt] = []
        for i, j in enumerate(self.rows):
            one = Verb("load_b", f"t0_{i}", p=Ptr(f"line{j}", UNIT), to=self.x.to)
            load.append(If(var(f"there{j}"), (one,), (self._padding(f"t0_{i}"),)) if tested else one)
        shuffles, columns = transpose(lanes, len(self.rows))
        store = tuple(
            Verb("store", x, p=Ptr("out", (UNIT + i) * self.x.width + self.rows[0]), to=self.x.to)
            for i, x in enumerate(columns)
        )
        blocks = For("p", const(0), var("count") - (lanes - 1), const(lanes), (*load, *shuffles, *store))
        return (*lines, *self._fill(lanes * self.x.kr, tested=tested), blocks)

    @property
    def _loads_padding(self) -> bool:
        """Whether vectors of padding are loaded: zeros that the atom makes are of the C type of sums."""
        return self.x.fill != 0 or self.atom.acc_type != self.atom.b_type

    def _padding(self, name: str) -> Stmt:
        """A vector of padding."""
        return Verb("load_b", name, p=Ptr("padding"), to=self.x.to) if self._loads_padding else Verb("zero", name)

    def _fill(self, elements: int, *, tested: bool) -> tuple[Stmt, ...]:
        """An array of padding, where vectors of it are loaded."""
        if not tested or not self._loads_padding:
            return ()
        kind = base(self.x.to)
        filled = For("e", const(0), const(elements), const(1), (Move(Ptr("fill", var("e")), None, self.x.fill),))
        return (Scratch("fill", elements, kind), filled, LetPtr("padding", Ptr("fill"), self.x.to, readonly=True))

    def _elements(self, of: Runs, begin: Index, *, tested: bool) -> Stmt:
        """Loop that copies units of a run from one on, element by element."""
        body: list[Stmt] = [LetPtr("parts", Ptr("out", UNIT * self.x.width), base(self.x.to))]
        for j in self.rows:
            copies: list[Stmt] = []
            for e in range(self.x.kr):
                to = Ptr("parts", const(j * self.x.kr + e))
                copy = Move(to, Ptr(f"a{j}", (UNIT * self.x.kr + e) * value(of.step)))
                copies.append(If(var(f"there{j}"), (copy,), (Move(to, None, self.x.fill),)) if tested else copy)
            body += self.x.where(j, tuple(copies))
        return For("p", begin, var("count"), const(1), tuple(body))


def _named(position: Position, row: int) -> tuple[Position, list[Stmt]]:
    """A position whose values are variables, and their declarations."""
    body: list[Stmt] = []

    def named(x: Index | int, name: str) -> Index | int:
        if isinstance(x, int) or x.op == "const":
            return x
        body.append(Let(name, x))
        return var(name)

    levels = tuple(
        tuple(named(x, f"at{row}_{i}_{axis}") for axis, x in enumerate(level))
        for i, level in enumerate(position.levels)
    )
    linear = named(position.linear, f"at{row}")
    return Position(levels, linear, linear), body
