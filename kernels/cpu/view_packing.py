"""Packing of views of A into panels: windows of convolutions, and whatever else a `Layout` describes.

k is cut into runs, in which elements are a constant step apart, and rows into groups of as many as a vector has lanes.
A group has the address of each row, found from that of the row before with additions and comparisons; a run adds one
offset to all of them. Where no row of a group is in padding anywhere in a run, which two comparisons for each padded
axis of the memory say, the run is copied as that of a matrix in place, by transposed blocks where it is contiguous. At
the edges runs are cut so that each row of one is in padding as a whole or not at all: a test for each vector.

Stores are whole vectors, so each overwrites elements that follow: see `packing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING

from portmm.ir.address import offset, tests, value
from portmm.ir.index import Index, Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import For, Function, If, Let, LetPtr, Move, Param, Verb
from portmm.kernels.cpu.packing import transpose
from portmm.spec.dtype import BY_NAME, base, unit
from portmm.spec.layout import Position
from portmm.spec.layout_runs import runs

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.spec.layout import Layout
    from portmm.spec.layout_runs import Runs
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

LONG = 32
"""Elements of a run from which on the instructions that each run takes are some percent of those that copy it."""
ROW, ROWS, DEEP, K, UNIT = (var(x) for x in ("row", "rows", "deep", "k", "p"))
"""First row and rows of a slice, first element and units of a block of k, and unit of a part of a run."""


def pack_view(  # noqa: PLR0917 - the order of a packer's geometry is the same everywhere
    isa: Isa, atom: Atom, mr: int, storage: str, to: str, view: Layout
) -> Function:
    """Function to[p][i] = A[row + i][deep + p] for p < k, i < rows; up to a vector past the end is overwritten."""
    kr = BY_NAME[to].pack
    params = (*(Param(x) for x in ("k", "elements")[: 1 + (kr > 1)]), Param("rows"), Param("a", storage, readonly=True))
    body = _in_runs(isa, atom, mr, storage, to, view) or one_by_one(view, kr, to)
    params += (Param("row"), Param("deep"), Param("to", to))
    return Function("pack_a", "inner", params, body, "to[k][rows] = A[rows][k], a view", of=atom.name)


def moved(to: Ptr, view: Layout, at: tuple[Index, Index]) -> Stmt:
    """Copy of an element of A, or in padding of zero."""
    there, copy = view.valid(at, var), Move(to, Ptr("a", offset(view, *at)))
    return copy if isinstance(there, int) else If(const(0).lt(there), (copy,), (Move(to, None),))


def one_by_one(view: Layout, kr: int, to: str) -> tuple[Stmt, ...]:
    """Loop that copies a slice element by element, with an address and a test for each."""
    j, e = var("j"), var("e")
    place, at = Ptr("parts", (UNIT * ROWS + j) * kr + e), UNIT * kr + e
    copy = moved(place, view, (ROW + j, DEEP + at))
    fill = If(at.lt(var("elements")), (copy,), (Move(place, None),)) if kr > 1 else copy
    each = For("e", const(0), const(kr), const(1), (fill,))
    across = For("j", const(0), ROWS, const(1), (each,))
    return (LetPtr("parts", Ptr("to"), base(to)), For("p", const(0), K, const(1), (across,)))


def _in_runs(  # noqa: PLR0917 - as all packers
    isa: Isa, atom: Atom, mr: int, storage: str, to: str, view: Layout
) -> tuple[Stmt, ...]:
    """Statements that pack a slice of a view by runs; none if it has none of whole units."""
    still, long = runs(view, 1, still=True), runs(view, 1)
    if not still or not long or still.length % BY_NAME[to].pack != 0:
        return ()
    long = still if not still.length.terms and still.length.constant >= LONG else long

    def group(first: int) -> tuple[Stmt, ...]:
        rows = range(first, min(first + atom.n, mr))
        return _Group(isa, atom, view, storage, to, long, still, rows).packed()

    # Later rows are packed first, since stores overwrite what follows.
    later = [If(const(x).lt(ROWS), group(x)) for x in reversed(range(atom.n, mr, atom.n))]
    return (Let("unit", DEEP // BY_NAME[to].pack), *later, *group(0))


@dataclass(frozen=True, slots=True)
class _Group:
    """Some rows of a slice, as many as a vector has lanes or fewer.

    Attributes:
        isa: the instruction set.
        atom: its instructions that move elements.
        view: the layout (m, k).
        storage: type of the elements in memory.
        to: type of elements or units in panels.
        long: runs of k whose rows may be partly in padding.
        still: runs of k each row of which is in padding or not.
        rows: the rows in the slice.
    """

    isa: Isa
    atom: Atom
    view: Layout
    storage: str
    to: str
    long: Runs
    still: Runs
    rows: range

    @property
    def kr(self) -> int:
        """Number of elements of k in a unit."""
        return BY_NAME[self.to].pack

    def packed(self) -> tuple[Stmt, ...]:
        """Loop over the runs of a block of k."""
        if self.long is self.still:
            edges = self._edges("run")
        else:
            edges = (self._each(self.still, "edge", var("run_begin"), var("run_end"), self._edges("edge")),)
        inside = If(var("inside"), self._copied(self.long, "run", tested=False), edges)
        body = (Let("inside", self._inside()), inside)
        return (*self._addresses(), self._each(self.long, "run", const(0), K, body))

    # -- rows ----------------------------------------------------------------

    def _addresses(self) -> tuple[Stmt, ...]:
        """Offset of each row, its index of each condition, and the least and the greatest of these."""
        body: list[Stmt] = []
        position = self.view.start((ROW + self.rows[0], const(0)), var)
        for j in self.rows:
            position = position if j == self.rows[0] else self.view.move(position, 0, 1, var)
            position, names = _named(position, j)
            body += (*names, Let(f"offset{j}", const(0) + position.linear))
            body += [Let(f"index{j}_{c}", const(0) + x) for c, x in enumerate(self.view.padded(position))]
        for c in range(len(self.view.conditions)):
            each = [var(f"index{j}_{c}") for j in self.rows]
            body += [Let(f"least_{c}", reduce(minimum, each)), Let(f"most_{c}", reduce(maximum, each))]
        return tuple(body)

    def _there(self, row: int) -> Index:
        """1 for a row that the view has."""
        return (ROW + row).lt(value(self.view.extents[0]))

    def _inside(self) -> Index:
        """1 if no row is in padding anywhere in a run."""
        checks = [self._there(self.rows[-1])]
        for c, (x, reach) in enumerate(zip(self.view.conditions, self.long.reach, strict=True)):
            least, most = (var(f"{name}_{c}") + var(f"run_{c}") for name in ("least", "most"))
            checks += tests(x, least + value(reach[0]), most + value(reach[1]))
        return reduce(mul, checks)

    def _edges(self, name: str) -> tuple[Stmt, ...]:
        """Copy of a run of rows that may be in padding."""
        body: list[Stmt] = []
        for j in self.rows:
            checks = [self._there(j)]
            for c, x in enumerate(self.view.conditions):
                at = var(f"index{j}_{c}") + var(f"{name}_{c}")
                checks += tests(x, at, at)
            body.append(Let(f"there{j}", reduce(mul, checks)))
        return (*body, *self._copied(self.still, name, tested=True))

    # -- runs ----------------------------------------------------------------

    def _each(self, of: Runs, name: str, begin: Index, end: Index, body: tuple[Stmt, ...]) -> Stmt:
        """Loop over the runs of some units of a block, the first and last of which may be cut."""
        number, length, unit_0 = var(name), value(of.length // self.kr), var("unit")
        first, last = (unit_0 + begin) // length, ceil_div(unit_0 + end, length)
        past = (unit_0 + var(f"{name}_begin") - number * length) * (value(of.step) * self.kr)
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
            LetPtr(f"a{j}", Ptr("a", var(f"offset{j}") + var(f"{name}_offset")), self.storage, readonly=True)
            for j in self.rows
        )
        count = (Let("count", var(f"{name}_end") - begin), LetPtr("out", Ptr("to", begin * ROWS), self.to))
        short = not of.length.terms and of.length.constant < lanes * self.kr
        if short or of.step != 1 or not self.isa.shuffles or lanes == 1:
            return (*lines, *count, self._elements(of, const(0), tested=tested))
        rest = var("count") - var("count") % lanes
        return (*lines, *count, *self._blocks(tested=tested), self._elements(of, rest, tested=tested))

    def _blocks(self, *, tested: bool) -> tuple[Stmt, ...]:
        """Loop that transposes whole blocks of a run."""
        lanes, of_unit = self.atom.n, unit(self.storage, self.kr)
        lines = tuple(LetPtr(f"line{j}", Ptr(f"a{j}"), of_unit, readonly=True) for j in self.rows)
        load: list[Stmt] = []
        for i, j in enumerate(self.rows):
            one = Verb("load_b", f"t0_{i}", p=Ptr(f"line{j}", UNIT), to=self.to)
            load.append(If(var(f"there{j}"), (one,), (Verb("zero", f"t0_{i}"),)) if tested else one)
        shuffles, columns = transpose(lanes, len(self.rows))
        store = tuple(
            Verb("store", x, p=Ptr("out", (UNIT + i) * ROWS + self.rows[0]), to=self.to) for i, x in enumerate(columns)
        )
        blocks = For("p", const(0), var("count") - (lanes - 1), const(lanes), (*load, *shuffles, *store))
        return (*lines, blocks)

    def _elements(self, of: Runs, begin: Index, *, tested: bool) -> Stmt:
        """Loop that copies units of a run from one on, element by element."""
        body: list[Stmt] = [LetPtr("parts", Ptr("out", UNIT * ROWS), base(self.to))]
        for j in self.rows:
            copies: list[Stmt] = []
            for e in range(self.kr):
                to = Ptr("parts", const(j * self.kr + e))
                copy = Move(to, Ptr(f"a{j}", (UNIT * self.kr + e) * value(of.step)))
                copies.append(If(var(f"there{j}"), (copy,), (Move(to, None),)) if tested else copy)
            body += [If(const(j).lt(ROWS), tuple(copies))] if j else copies
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
