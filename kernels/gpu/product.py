"""Products on a device: what their kernels have in common, but the loop over k.

Owns `Product`, the base of the records of programs, with its `OperandTile`s; the raster of blocks, which covers a
nearly square part of C with those that run at the same time, so that they share operands in L2; and slices of k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING, Any, TypeVar

from portmm.errors import ScheduleError
from portmm.ir.address import offset, tests, value
from portmm.ir.grid_kernel import GridKernel
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Let, LetPtr, Read, Scratch
from portmm.ir.thread_nodes import Do, Leave
from portmm.kernels.gpu import parameters
from portmm.spec.dtype import BY_NAME
from portmm.spec.layout_runs import runs
from portmm.spec.layouts import PLAIN, operand

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layout import Layout
    from portmm.spec.layout_runs import Runs
    from portmm.spec.layouts import Views
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

_ONE = (Ptr("b"), "s32")
"""Pointer of int4 weights, which are the same for all items."""
_GROUP = ("owner", "row_begin", "row_end", "tile")
"""Results of the primitive `find_group`."""


@dataclass(frozen=True, slots=True)
class OperandTile:
    """Tile of A or B that a block of threads copies to shared memory.

    Attributes:
        name: "a" or "b".
        dtype: type of its elements in memory.
        layout: of the operand in memory: of its row (of A, or its column of B) and k.
        vector: elements that a thread moves at once.
        rows: rows of A, or columns of B.
        depth: elements of k, or units of several that one instruction multiplies.
        threads: threads that move it.
        stages: tiles in shared memory.
        first: the block's first row.
        end: number of rows of the operand.
        padding: value of elements in padding, an integer.
    """

    name: str
    dtype: str
    layout: Layout
    vector: int
    rows: int
    depth: int
    threads: int
    stages: int
    first: Index
    end: Index
    padding: int = field(default=0, kw_only=True)

    @property
    def along(self) -> str:
        """The contiguous axis in memory, "k" or "row"; "any" if there is none.

        Views of A have vectors along k, channels; neighbours along the rows of those of B are pixels.
        """
        if self.layout.transforms:
            return "k" if self.name == "a" else "row"
        row, k = self.layout.stride
        return "k" if k == 1 else "row" if row == 1 else "any"

    @property
    def bytes(self) -> int:
        """Number of bytes of an element."""
        return BY_NAME[self.dtype].bytes

    @property
    def size(self) -> int:
        """Number of elements, or units, of one tile in shared memory."""
        return self.rows * self.depth

    @property
    def elements_of_k(self) -> int:
        """Number of elements of k of a tile."""
        return self.depth

    @property
    def runs(self) -> Runs | None:
        """Runs of k of a view that tiles do not cross, each row of which is in padding or not; else None."""
        of = runs(self.layout, 1, still=True) if self.layout.transforms else None
        return of if of and of.length % self.elements_of_k == 0 else None

    def of_tile(self, k: Index) -> tuple[Stmt, ...]:
        """Terms of the tile at k, which all of its elements have, in their offsets and their indices of conditions."""
        of, n = self.runs, self.name
        if not of:
            return ()
        number = var(f"{n}_run")
        return (
            Let(f"{n}_run", k // value(of.length)),
            Let(f"{n}_start", (k - number * value(of.length)) * value(of.step) + of.offset_of(number, var)),
            *(Let(f"{n}_run_{c}", const(0) + x) for c, x in enumerate(of.indices_of(number, var))),
        )

    def address(self, row: Index, k: Index, within: Index) -> Index:
        """Offset of an element at k, which is `within` elements into the current tile."""
        of = self.runs
        if not of:
            return offset(self.layout, row, k)
        return offset(self.layout, row, 0) + var(f"{self.name}_start") + within * value(of.step)

    def inside(self, row: Index, k: Index, end: Index) -> Index:
        """1 if an element of the current tile is before `end` and in no padding, else 0."""
        there = k.lt(end)
        if not self.runs:
            valid: Index | int = self.layout.valid((row, k), var)
            return there * valid
        for c, (x, at) in enumerate(zip(self.layout.conditions, self.layout.indices((row, 0), var), strict=True)):
            index = at + var(f"{self.name}_run_{c}")
            there = reduce(mul, tests(x, index, index), there)
        return there


Tile = TypeVar("Tile", bound=OperandTile)


@dataclass(frozen=True, slots=True)
class Product:
    """A product by a schedule.

    Attributes:
        s: the schedule.
        isa: the instruction set.
        atom: the multiply-add.
        views: layouts of an A, or a B, that is more than an array with strides, as windows of a convolution.
    """

    s: Schedule
    isa: Isa
    atom: Atom
    views: Views = field(default=PLAIN, kw_only=True)

    def tile(self, kind: type[Tile], name: str, *more: Any) -> Tile:
        """Tile of an operand of a block; a kind of tile may take `more`."""
        s, i = self.s, "ab".index(name)
        plan, rows, end = ((s.a, s.block.m, bottom(s)), (s.b, s.block.n, var("n")))[i]
        layout, first = operand(name, plan.layout, ("mk", "nk")[i]), var(("row_0", "column_0")[i])
        view, padding = self.views.rows(name), 0
        if view is not None:
            layout, padding = view, self.views.padding
            if plan.vector > (1 if i else layout.vector(1, plan.vector)) or (padding and plan.asynchronous):
                raise ScheduleError(
                    f"{plan.vector} elements of {name.upper()} are moved at once, which its view does not allow"
                )
        return kind(
            name, s.types[i], layout, plan.vector, rows, s.block.k, s.threads, s.stages, first, end, *more,
            padding=padding,
        )  # fmt: skip

    def kernel(self, body: Iterable[Stmt]) -> GridKernel:
        """Kernel of blocks of C, times slices of k."""
        s, grid = self.s, (blocks(self.s), const(self.s.parallel.split))
        name = str(s.name(self.atom))
        return GridKernel(name, self.isa, self.atom, parameters.of_product(s), s.threads, grid, tuple(body))


def bottom(s: Schedule) -> Index:
    """End of the rows that a block may store."""
    return var("row_end" if s.parallel.grouped else "m")


def blocks(s: Schedule) -> Index:
    """Number of blocks along the grid's first axis; of grouped rows, each group's last tile may be partial."""
    down, across = ceil_div(var("m"), s.block.m), ceil_div(var("n"), s.block.n)
    return (down + var("batch")) * across if s.parallel.grouped else down * across * var("batch")


def depth(s: Schedule) -> Index:
    """Extent of k for this block."""
    return var("depth") if s.parallel.grouped else var("k")


def block_tile(s: Schedule) -> list[Stmt]:
    """Coordinates of a block: its item and tile, and the addresses of its operands."""
    return [
        *(of_groups(s) if s.parallel.grouped else _item(s)),
        LetPtr("a_item", Ptr("a", var("item") * var("a_batch")), s.types[0], readonly=True),
        LetPtr(
            "b_item",
            *(_ONE if s.b.layout == "codes" else (Ptr("b", var("item") * var("b_batch")), s.types[1])),
            readonly=True,
        ),
    ]


def _item(s: Schedule) -> list[Stmt]:
    """Coordinates of a block: its item, and its tile there."""
    return [
        Let("down", ceil_div(var("m"), s.block.m)),
        Let("across", ceil_div(var("n"), s.block.n)),
        *raster(s, var("block"), s.block.m),
    ]


def of_groups(s: Schedule) -> list[Stmt]:
    """Coordinates of a block of a grouped product: its group, and its tile there; rows past the last group are zero."""
    operands = (Ptr("ends"), var("batch"), var("m"), const(s.block.m), var("across"), var("block"), Ptr("found"))
    return [
        Let("across", ceil_div(var("n"), s.block.n)),
        Scratch("found", len(_GROUP), "s32"),
        Do("find_group", operands),
        *(Read(name, Ptr("found", const(i))) for i, name in enumerate(_GROUP)),
        Let("down", ceil_div(var("row_end") - var("row_begin"), s.block.m)),
        Leave((var("down") * var("across")).lt(var("tile") + 1)),
        Let("item", minimum(var("owner"), var("batch") - 1)),
        Let("depth", var("owner").lt(var("batch")) * var("k")),
        *_swept(s, s.block.m, var("row_begin")),
    ]


def raster(s: Schedule, number: Index, rows: int, row_offset: Index | int = 0) -> list[Stmt]:
    """Item and tile of a number, in a raster of `down` times `across` tiles of so many rows.

    `row_offset` is added to its first row. Numbers sweep groups of `group` rows of tiles, column by column.
    """
    return [
        Let("item", number // (var("down") * var("across"))),
        Let("tile", number % (var("down") * var("across"))),
        *_swept(s, rows, row_offset),
    ]


def _swept(s: Schedule, rows: int, row_offset: Index | int) -> list[Stmt]:
    """First row and column of a tile."""
    group = s.tiles[3].m // rows
    tile, count = var("tile"), var("across") * group
    inside, first = tile % count, tile // count * group
    return [
        Let("first", first),
        Let("high", minimum(var("down") - var("first"), group)),
        Let("row_0", (var("first") + inside % var("high")) * rows + row_offset),
        Let("column_0", inside // var("high") * s.block.n),
    ]


def slice_of_k(s: Schedule, step: int) -> list[Stmt]:
    """Range of k that a block sums, in steps of `step` elements."""
    steps = ceil_div(depth(s), step)
    if s.parallel.split == 1:
        return [Let("k_0", const(0)), Let("k_end", depth(s)), Let("steps", steps)]
    each = ceil_div(steps, s.parallel.split)
    return [
        Let("each", each),
        Let("k_0", var("slice") * var("each") * step),
        Let("k_end", minimum(depth(s), var("k_0") + var("each") * step)),
        Let("steps", ceil_div(var("k_end") - var("k_0"), step)),
    ]
