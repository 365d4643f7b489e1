"""Epilogue of a GPU kernel: stores of the threads' sums.

Owns `EpilogueStore` and `StagedStore`: a thread stores its tiles of C, `vectors[2]` columns at once where
all of them are in bounds; fused expressions are computed for one element after the other. Where k is
split, sums go to scratch unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import Registers, coordinate
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import If, Let, LetPtr, Move, Scratch, Verb
from portmm.ir.thread_nodes import Barrier, Vector
from portmm.kernels.cpu.elementwise import Elements
from portmm.kernels.gpu.loops import pieces, unrolled
from portmm.kernels.gpu.product import Product, bottom
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import C
from portmm.spec.layouts import VECTOR

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.target.fragment import Fragment
    from portmm.target.isa import Isa


@dataclass(frozen=True, slots=True)
class EpilogueStore(Product):
    """Epilogue that stores sums from registers.

    Attributes:
        cell: contiguous rows and columns of a thread tile.
    """

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
        columns = unrolled("h", vectors, Let("column", column + h * self.vector), *store)
        tiles = unrolled("g", s.nr // tile_n, columns)
        rows = (Let("row", row), If(var("row").lt(bottom(s)), (tiles,)))
        return (*self.before(), unrolled("i", s.mr, *rows))

    def fragments(
        self,
        sums: Fragment,
        atoms: tuple[int, int],
        own: tuple[tuple[Index, Index], tuple[Index, Index]],
        *,
        columns_first: bool = False,
    ) -> tuple[Stmt, ...]:
        """Statements that store a lane's sums of fragments.

        Args:
            sums: rows and columns of an atom's sums, which `swap` makes columns and rows of C.
            atoms: number of them along the rows, and the columns.
            own: the warp's first row in the block's tile, and the lane's of an atom; the same of columns.
            columns_first: with `swap`, loop over the few columns of a lane outside of its rows.
        """
        s, n, registers = self.s, self.vector, Registers(sums)
        swap, (tile_m, lane_m), (tile_n, lane_n) = s.atom.swap, *own
        along_c = registers.rows if swap else registers.columns
        whole = n == along_c > 1
        # Fragments and registers along the rows and the columns of the atom.
        of_m, of_n = var("half") * (n if swap else 1), var("pair") * (1 if swap else n)
        if whole:
            of_m, of_n = (const(0), of_n) if swap else (of_m, const(0))
        at = registers.number(var("below") * atoms[1] + var("beside"), of_m, of_n)
        down = tile_m + var("below") * sums.rows + coordinate(of_m, registers.row_weights) + lane_m
        across, further = tile_n + var("beside") * sums.columns + lane_n, coordinate(of_n, registers.column_weights)
        m_loops, n_loops = (
            (("below", atoms[0]), ("half", registers.rows)),
            (("beside", atoms[1]), ("pair", registers.columns)),
        )
        if swap:
            row, column = var("row_0") + across + further, var("column_0") + down
        else:
            row, column = var("row_0") + down, var("column_0") + across + further
        stored = self.store_vector(at)
        if swap and columns_first:
            row_of = (Let("row", row), If(var("row").lt(bottom(s)), stored))
            rows = unrolled(*n_loops[0], unrolled(*n_loops[1], *row_of))
            return (unrolled(*m_loops[0], unrolled(*m_loops[1], Let("column", column), rows)),)
        outer, (inner, (name, count)) = (n_loops, m_loops) if swap else (m_loops, n_loops)
        store: tuple[Stmt, ...] = (Let("column", column), *stored)
        store = store if whole else (unrolled(name, count // n, *store),)
        row_of = (Let("row", row), If(var("row").lt(bottom(s)), (unrolled(*inner, *store),)))
        return (unrolled(*outer[0], unrolled(*outer[1], *row_of)),)

    def after(self) -> tuple[Stmt, ...]:
        """Statements after all sums of this thread."""
        return ()

    @property
    def fused(self) -> Fused | None:
        """Fused expressions of the sums, or None."""
        return None if self.split else self.s.fused

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
        rest = unrolled("j", self.vector, one)
        aligned = (n % self.vector).eq(0) if self.split else const(1)
        fits = (column + (self.vector - 1)).lt(n)
        inside = fits if aligned == const(1) else fits * aligned
        plain = self.fused is None and self.type == self.atom.acc
        return (*(() if plain else self.values(at)), If(inside, (whole,), (rest,)))

    def values(self, at: Index) -> tuple[Stmt, ...]:
        """Statements that compute the results of neighbouring columns that are in bounds."""
        j, column = var("j"), var("column")
        each = If((column + j).lt(var("n")), self.value(at + j, column + j, j))
        return (unrolled("j", self.vector, each),)

    def result(self, at: Index, j: Index) -> Ptr:
        """Address of a result before its store."""
        plain = self.fused is None and self.type == self.atom.acc
        return Ptr("acc", at + j) if plain else Ptr("c_out", j)

    def value(self, at: Index, column: Index, j: Index) -> tuple[Stmt, ...]:
        """Statements that compute the results of one element: C's for a later store, others stored."""
        if self.fused is None:
            return () if self.type == self.atom.acc else (Move(Ptr("c_out", j), Ptr("acc", at)),)
        return element(self.isa, self.fused, Ptr("acc", at), Ptr("c_out", j), column)


@dataclass(frozen=True, slots=True)
class StagedStore(EpilogueStore):
    """Epilogue through shared memory, for results of fragments.

    A lane has two neighbouring results of a row, so that the stores of four lanes would fill half of a memory
    transaction where elements have 16 bits or fewer. So a block stores its results in the shared memory of its
    tiles, in rows of C, and threads move `move` neighbours each. Rows are a vector longer than C's, which puts the
    eight rows that a warp writes at once into different banks.
    """

    @property
    def move(self) -> int:
        """Number of elements that a thread moves at once."""
        return min(self.s.c.vector, VECTOR // BY_NAME[self.type].bytes)

    @property
    def step(self) -> int:
        """Stride in elements between rows."""
        return self.s.block.n + VECTOR // BY_NAME[self.type].bytes

    def before(self) -> tuple[Stmt, ...]:
        """Addresses, and registers for elements."""
        return (*EpilogueStore.before(self), LetPtr("c_tile", Ptr("a_tile"), self.type))

    def store_vector(self, at: Index) -> tuple[Stmt, ...]:
        """Store of a few neighbouring columns of one row to shared memory."""
        to = Ptr("c_tile", (var("row") - var("row_0")) * self.step + (var("column") - var("column_0")))
        if self.vector == 1:
            element = (*self.value(at, var("column"), const(0)), Move(to, Ptr("c_out")))
            return (If(var("column").lt(var("n")), element),)
        return (*self.values(at), Vector(to, Ptr("c_out"), self.vector * BY_NAME[self.type].bytes))

    def after(self) -> tuple[Stmt, ...]:
        """Transfer of the block's results to global memory."""
        s, e = self.s, var("piece")
        across = s.block.n // self.move
        vectors = s.block.m * across
        src = Ptr("c_tile", (var("row") - var("row_0")) * self.step + (var("column") - var("column_0")))
        to = Ptr("c_item", var("row") * var("c_m") + var("column"))
        j = var("j")
        one = If((var("column") + j).lt(var("n")), (Move(to + j, src + j),))
        inside = (var("column") + (self.move - 1)).lt(var("n"))
        moved = If(
            inside,
            (Vector(to, src, self.move * BY_NAME[self.type].bytes),),
            (unrolled("j", self.move, one),),
        )
        body: tuple[Stmt, ...] = (
            Let("row", var("row_0") + e // across),
            Let("column", var("column_0") + e % across * self.move),
            If(var("row").lt(bottom(s)), (moved,)),
        )
        return (Barrier(), pieces("piece", vectors, s.threads, *body, unroll=1))


def cell_of(sums: Fragment, s: Schedule) -> tuple[int, int]:
    """Contiguous rows and columns of C in neighbouring registers of sums."""
    return 1, Registers(sums.transposed if s.atom.swap else sums).neighbours


def operands(isa: Isa, fused: Fused) -> list[Stmt]:
    """Addresses of the operands of this item, the numbers of a call, and registers for elements."""
    return [*numbers(_elements(isa, fused)), *addresses(fused)]


def numbers(at: Elements) -> list[Stmt]:
    """Registers for elements, and for the numbers of a call."""
    count, real = at.fused.numbers, at.real.name
    stores = [Verb("store", f"number_{i}", p=Ptr("numbers", const(i)), of=real) for i in range(count)]
    return [*at.scratch(), *([Scratch("numbers", count, "f32")] if count else []), *stores]


def addresses(fused: Fused) -> list[Stmt]:
    """Addresses of the operands of this item, and of this head."""
    stmts: list[Stmt] = []
    for i, x in enumerate(fused.operands):
        at = var("item") * var(f"x{i}_b") if "b" in x.axes else const(0)
        at += var("head") * var(f"x{i}_h") if "h" in x.axes else const(0)
        stmts.append(LetPtr(f"x{i}", Ptr(f"x{i}_all", at), x.dtype, readonly=i not in dict(fused.results)))
    return stmts


def _elements(isa: Isa, fused: Fused) -> Elements:
    real = isa.vector("f32", 1)
    assert real is not None  # noqa: S101 - every device has it
    return Elements(isa, real, fused, inner=var("row"), row=var("row"))


def element(  # noqa: PLR0917 - an element has its sum, its place and its operands
    isa: Isa, fused: Fused, total: Ptr, to: Ptr, column: Index, parts: dict[int, Ptr] | None = None
) -> tuple[Stmt, ...]:  # fmt: skip
    """Statements for all results of the element whose sum is at `total`: C's to `to`, the rest to their operands.

    Elements of operands that have been loaded are at `parts`.
    """
    at = _elements(isa, fused)
    at.parts.update(parts or {})
    stmts: list[Stmt] = []
    for x in fused.steps:
        if x.op == "acc":
            stmts.append(Verb("load_c", at.name(x), p=total, of=at.real.name))
            at.names[x] = at.name(x)
    stmts += at.compute([x for _, x in fused.results], column, "")
    for i, x in fused.results:
        if i == C:
            stmts += at.write(x, x.dtype, to, const(0), "", const(1))
        elif "n" in fused.operands[i].axes:
            stmts += at.store(x, i, column, "")
        else:
            # One value for a row is written with its first element.
            stmts.append(If(column.eq(0), at.single(x, i)))
    return tuple(stmts)
