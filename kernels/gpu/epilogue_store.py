"""Sums of a device's threads, on their way to memory.

Owns `Storing`: a thread stores its cells of C, `vectors[2]` columns at once where
all of them are inside, what is fused in being computed for one element after the other. Where k is
split, sums go to scratch as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, LetPtr, Move, Scratch, Verb
from portmm.ir.thread_nodes import WHOLE, Vector
from portmm.kernels.cpu.elementwise import Elements
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import C, operand_types, parse

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.target.isa import Atom, Isa


def bottom(s: Schedule) -> Index:
    """The row after the last that this block may store."""
    return var("row_end" if s.grouped else "m")


@dataclass(frozen=True, slots=True)
class Storing:
    """How sums are stored.

    Attributes:
        s: the schedule.
        isa: the instruction set.
        atom: what summed.
        cell: rows and columns side by side.
    """

    s: Schedule
    isa: Isa
    atom: Atom
    cell: tuple[int, int]

    @property
    def split(self) -> bool:
        """Sums are left in scratch."""
        return self.s.slices

    @property
    def vector(self) -> int:
        """Columns stored at once."""
        return min(4 if self.split else self.s.vectors[2], self.cell[1])

    def statements(self) -> tuple[Stmt, ...]:
        """Store all cells."""
        s, (high, wide) = self.s, self.cell
        down, across = s.block.m // s.mr, s.block.n // s.nr
        g, i = var("g"), var("i")
        row = var("row_0") + i // high * (down * high) + var("cell_m") * high + i % high
        column = var("column_0") + g * (across * wide) + var("cell_n") * wide
        # A cell may be wider than what is stored at once.
        pieces = wide // self.vector
        h = var("h")
        piece = self.piece(i * s.nr + g * wide + h * self.vector)
        columns = For("h", const(0), const(pieces), const(1), (Let("column", column + h * self.vector), *piece), WHOLE)
        cells = For("g", const(0), const(s.nr // wide), const(1), (columns,), WHOLE)
        rows = (Let("row", row), If(var("row").lt(bottom(s)), (cells,)))
        return (*self.before(), For("i", const(0), const(s.mr), const(1), rows, WHOLE))

    @property
    def fused(self) -> Fused | None:
        """What is computed of the sums."""
        return parse(self.s.fused) if self.s.fused and not self.split else None

    @property
    def type(self) -> str:
        """What is stored."""
        return self.atom.acc if self.split else self.s.types[2]

    def before(self) -> tuple[Stmt, ...]:
        """Addresses, and what elements pass through."""
        if self.split:
            at = (var("slice") * var("batch") + var("item")) * var("c_batch")
            return (LetPtr("c_item", Ptr("work", at), self.type),)
        found: list[Stmt] = [LetPtr("c_item", Ptr("c", var("item") * var("c_batch")), self.type)]
        found.append(Scratch("c_out", self.vector, self.type))
        if self.fused:
            found += operands(self.isa, self.fused)
        return tuple(found)

    def piece(self, at: Index) -> tuple[Stmt, ...]:
        """Store a few neighbouring columns of one row, whose sums are at some place among all."""
        n, column = var("n"), var("column")
        dense = self.split or self.s.c == "row"
        step = const(1) if dense else var("c_n")
        to = Ptr("c_item", var("row") * var("c_m") + column * step)
        j = var("j")
        if self.vector == 1:
            return (If(column.lt(n), (*self.value(at, column, const(0)), Move(to, self.made(at, const(0))))),)
        whole = Vector(to, self.made(at, const(0)), self.vector * BY_NAME[self.type].bytes)
        one = If((column + j).lt(n), (Move(to + j * step, self.made(at, j)),))
        rest = For("j", const(0), const(self.vector), const(1), (one,), WHOLE)
        aligned = (n % self.vector).eq(0) if self.split else const(1)
        fits = (column + (self.vector - 1)).lt(n)
        inside = fits if aligned == const(1) else fits * aligned
        plain = self.fused is None and self.type == self.atom.acc
        return (*(() if plain else self.values(at)), If(inside, (whole,), (rest,)))

    def values(self, at: Index) -> tuple[Stmt, ...]:
        """Compute the results of neighbouring columns, of those that there are."""
        j, column = var("j"), var("column")
        each = If((column + j).lt(var("n")), self.value(at + j, column + j, j))
        return (For("j", const(0), const(self.vector), const(1), (each,), WHOLE),)

    def made(self, at: Index, j: Index) -> Ptr:
        """Where a result waits."""
        plain = self.fused is None and self.type == self.atom.acc
        return Ptr("acc", at + j) if plain else Ptr("c_out", j)

    def value(self, at: Index, column: Index, j: Index) -> tuple[Stmt, ...]:
        """Compute the results of one element; C's goes where it waits, others are stored."""
        if self.fused is None:
            return () if self.type == self.atom.acc else (Move(Ptr("c_out", j), Ptr("acc", at)),)
        return element(self.isa, self.fused, Ptr("acc", at), Ptr("c_out", j), column)


def fused_arguments(text: str) -> list[Argument]:
    """The parameters for the operands and the numbers of fused expressions."""
    fused, found = parse(text), []
    for i, (dtype, written) in enumerate(operand_types(text)):
        found.append(Argument(f"x{i}_all", "pointer", dtype, readonly=not written))
        found += [Argument(f"x{i}_{axis}", "long") for axis in fused.operands[i].axes if axis != "n"]
        found += [] if fused.operands[i].dense else [Argument(f"x{i}_n", "long")]
    return [*found, *(Argument(f"number_{i}", "float") for i in range(fused.numbers))]


def operands(isa: Isa, fused: Fused) -> list[Stmt]:
    """The operands of this item, the numbers of a call, and what elements pass through."""
    at = _elements(isa, fused)
    found: list[Stmt] = list(at.scratch())
    found += [Scratch("numbers", fused.numbers, "f32")] if fused.numbers else []
    found += [Verb("store", f"number_{i}", p=Ptr("numbers", const(i)), of=at.real.name) for i in range(fused.numbers)]
    written = dict(fused.results)
    for i, x in enumerate(fused.operands):
        item = var("item") * var(f"x{i}_b") if "b" in x.axes else const(0)
        found.append(LetPtr(f"x{i}", Ptr(f"x{i}_all", item), x.dtype, readonly=i not in written))
    return found


def _elements(isa: Isa, fused: Fused) -> Elements:
    real = isa.vector("f32", 1)
    assert real is not None  # noqa: S101 - every device has it
    return Elements(isa, real, fused, inner=var("row"), row=var("row"))


def element(isa: Isa, fused: Fused, total: Ptr, to: Ptr, column: Index) -> tuple[Stmt, ...]:
    """All results of the element whose sum is at an address: C's is put to another, the rest to its operands."""
    at = _elements(isa, fused)
    found: list[Stmt] = []
    real = at.real
    for x in fused.steps:
        if x.op == "acc":
            found.append(Verb("load_c", at.name(x), p=total, of=real.name))
            at.names[x] = at.name(x)
    wanted = [x for _, x in fused.results]
    found += at.compute(wanted, column, "")
    for i, x in fused.results:
        if i != C and "n" not in fused.operands[i].axes:
            # One value for a row is written with its first element.
            found.append(If(column.eq(0), at.single(x, i)))
            continue
        value, before = at.value(x)
        found += before
        if i == C:
            of = isa.vector("s32", 1) if fused.results and x.dtype == "s32" else real
            assert of is not None  # noqa: S101
            found.append(Verb("store", value, p=to, of=of.name))
        else:
            found += at.store(x, i, column, "")
    return tuple(found)
