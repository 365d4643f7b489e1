"""Epilogue of a GPU kernel: stores of the threads' sums.

Owns `EpilogueStore`: a thread stores its tiles of C, `vectors[2]` columns at once where
all of them are in bounds; fused expressions are computed for one element after the other. Where k is
split, sums go to scratch unchanged.
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
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def bottom(s: Schedule) -> Index:
    """End of the rows that this block may store."""
    return var("row_end" if s.parallel.grouped else "m")


@dataclass(frozen=True, slots=True)
class EpilogueStore:
    """Epilogue that stores sums from registers.

    Attributes:
        s: the schedule.
        isa: the instruction set.
        atom: the multiply-add.
        cell: contiguous rows and columns of a thread tile.
    """

    s: Schedule
    isa: Isa
    atom: Atom
    cell: tuple[int, int]

    @property
    def split(self) -> bool:
        """Whether sums are stored to scratch."""
        return self.s.slices

    @property
    def vector(self) -> int:
        """Number of columns stored at once."""
        return min(4 if self.split else self.s.c.vector, self.cell[1])

    def statements(self) -> tuple[Stmt, ...]:
        """Statements that store all thread tiles."""
        s, (tile_m, tile_n) = self.s, self.cell
        down, across = s.block.m // s.mr, s.block.n // s.nr
        g, i = var("g"), var("i")
        row = var("row_0") + i // tile_m * (down * tile_m) + var("cell_m") * tile_m + i % tile_m
        column = var("column_0") + g * (across * tile_n) + var("cell_n") * tile_n
        # A thread tile may be wider than one store.
        vectors = tile_n // self.vector
        h = var("h")
        store = self.store_vector(i * s.nr + g * tile_n + h * self.vector)
        columns = For("h", const(0), const(vectors), const(1), (Let("column", column + h * self.vector), *store), WHOLE)
        tiles = For("g", const(0), const(s.nr // tile_n), const(1), (columns,), WHOLE)
        rows = (Let("row", row), If(var("row").lt(bottom(s)), (tiles,)))
        return (*self.before(), For("i", const(0), const(s.mr), const(1), rows, WHOLE))

    @property
    def fused(self) -> Fused | None:
        """Fused expressions of the sums, or None."""
        return parse(self.s.epilogue) if self.s.epilogue and not self.split else None

    @property
    def type(self) -> str:
        """Type of the stored elements."""
        return self.atom.acc if self.split else self.s.types[2]

    def before(self) -> tuple[Stmt, ...]:
        """Addresses, and registers for elements."""
        if self.split:
            at = (var("slice") * var("batch") + var("item")) * var("c_batch")
            return (LetPtr("c_item", Ptr("work", at), self.type),)
        stmts: list[Stmt] = [LetPtr("c_item", Ptr("c", var("item") * var("c_batch")), self.type)]
        stmts.append(Scratch("c_out", self.vector, self.type))
        if self.fused:
            stmts += operands(self.isa, self.fused)
        return tuple(stmts)

    def store_vector(self, at: Index) -> tuple[Stmt, ...]:
        """Store of a few neighbouring columns of one row, whose sums are from index `at` on."""
        n, column = var("n"), var("column")
        dense = self.split or self.s.c.layout == "row"
        step = const(1) if dense else var("c_n")
        to = Ptr("c_item", var("row") * var("c_m") + column * step)
        j = var("j")
        if self.vector == 1:
            return (If(column.lt(n), (*self.value(at, column, const(0)), Move(to, self.result(at, const(0))))),)
        whole = Vector(to, self.result(at, const(0)), self.vector * BY_NAME[self.type].bytes)
        one = If((column + j).lt(n), (Move(to + j * step, self.result(at, j)),))
        rest = For("j", const(0), const(self.vector), const(1), (one,), WHOLE)
        aligned = (n % self.vector).eq(0) if self.split else const(1)
        fits = (column + (self.vector - 1)).lt(n)
        inside = fits if aligned == const(1) else fits * aligned
        plain = self.fused is None and self.type == self.atom.acc
        return (*(() if plain else self.values(at)), If(inside, (whole,), (rest,)))

    def values(self, at: Index) -> tuple[Stmt, ...]:
        """Statements that compute the results of neighbouring columns that are in bounds."""
        j, column = var("j"), var("column")
        each = If((column + j).lt(var("n")), self.value(at + j, column + j, j))
        return (For("j", const(0), const(self.vector), const(1), (each,), WHOLE),)

    def result(self, at: Index, j: Index) -> Ptr:
        """Address of a result before its store."""
        plain = self.fused is None and self.type == self.atom.acc
        return Ptr("acc", at + j) if plain else Ptr("c_out", j)

    def value(self, at: Index, column: Index, j: Index) -> tuple[Stmt, ...]:
        """Statements that compute the results of one element: C's for a later store, others stored."""
        if self.fused is None:
            return () if self.type == self.atom.acc else (Move(Ptr("c_out", j), Ptr("acc", at)),)
        return element(self.isa, self.fused, Ptr("acc", at), Ptr("c_out", j), column)


def fused_arguments(text: str) -> list[Argument]:
    """Parameters for the operands and the numbers of fused expressions."""
    fused, params = parse(text), []
    for i, (dtype, written) in enumerate(operand_types(text)):
        params.append(Argument(f"x{i}_all", "pointer", dtype, readonly=not written))
        params += [Argument(f"x{i}_{axis}", "long") for axis in fused.operands[i].axes if axis != "n"]
        params += [] if fused.operands[i].dense else [Argument(f"x{i}_n", "long")]
    return [*params, *(Argument(f"number_{i}", "float") for i in range(fused.numbers))]


def operands(isa: Isa, fused: Fused) -> list[Stmt]:
    """Addresses of the operands of this item, the numbers of a call, and registers for elements."""
    at = _elements(isa, fused)
    stmts: list[Stmt] = list(at.scratch())
    stmts += [Scratch("numbers", fused.numbers, "f32")] if fused.numbers else []
    stmts += [Verb("store", f"number_{i}", p=Ptr("numbers", const(i)), of=at.real.name) for i in range(fused.numbers)]
    written = dict(fused.results)
    for i, x in enumerate(fused.operands):
        item = var("item") * var(f"x{i}_b") if "b" in x.axes else const(0)
        stmts.append(LetPtr(f"x{i}", Ptr(f"x{i}_all", item), x.dtype, readonly=i not in written))
    return stmts


def _elements(isa: Isa, fused: Fused) -> Elements:
    real = isa.vector("f32", 1)
    assert real is not None  # noqa: S101 - every device has it
    return Elements(isa, real, fused, inner=var("row"), row=var("row"))


def element(isa: Isa, fused: Fused, total: Ptr, to: Ptr, column: Index) -> tuple[Stmt, ...]:
    """Statements for all results of the element whose sum is at `total`: C's to `to`, the rest to their operands."""
    at = _elements(isa, fused)
    stmts: list[Stmt] = []
    real = at.real
    for x in fused.steps:
        if x.op == "acc":
            stmts.append(Verb("load_c", at.name(x), p=total, of=real.name))
            at.names[x] = at.name(x)
    wanted = [x for _, x in fused.results]
    stmts += at.compute(wanted, column, "")
    for i, x in fused.results:
        if i != C and "n" not in fused.operands[i].axes:
            # One value for a row is written with its first element.
            stmts.append(If(column.eq(0), at.single(x, i)))
            continue
        value, before = at.value(x)
        stmts += before
        if i == C:
            of = isa.vector("s32", 1) if fused.results and x.dtype == "s32" else real
            assert of is not None  # noqa: S101
            stmts.append(Verb("store", value, p=to, of=of.name))
        else:
            stmts += at.store(x, i, column, "")
    return tuple(stmts)
