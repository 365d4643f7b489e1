"""Tiles of A and B that the copy engine brings to shared memory, as a warpgroup multiplies them.

Owns `Operand`, one operand's side of a block tile. A tile is made of lines of 128 bytes: of a row (of A, or a
column of B) along k, or, where rows are side by side in memory, of one k along 64 rows; the lines of further rows
come after. The copy engine exchanges the 16-byte pieces of every eight lines, and fills what is outside of the
operand with zeros; `matrix_descriptor` says the same to the tensor cores. Either way 64 rows take as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, MapOf
from portmm.ir.index import Ptr, const, maximum, var
from portmm.ir.nodes import For, Let
from portmm.ir.thread_nodes import WHOLE, Do, Get, Shared
from portmm.schedule.gpu_wgmma import LINE, SWIZZLED, WIDE_ROWS, padded_rows
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

PIECE = 16
"""Bytes that descriptors count in."""
EIGHT_LINES = 8 * LINE
ATOM_BYTES = 32
"""Of a row along k that one instruction multiplies."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a block tile.

    Attributes:
        name: "a" or "b".
        dtype: of its elements.
        along: "k" or "row", what is side by side in memory.
        rows: of a tile.
        depth: elements of k of a tile.
        stages: tiles in shared memory.
        first: the block's first row.
        end: "m" or "n", the rows that there are.
        shares: blocks of a cluster, of which each brings a part of the tile for all.
    """

    name: str
    dtype: str
    along: str
    rows: int
    depth: int
    stages: int
    first: Index
    end: str
    shares: int = 1

    @property
    def bytes(self) -> int:
        """Of an element."""
        return BY_NAME[self.dtype].bytes

    @property
    def held(self) -> int:
        """Rows of a tile in shared memory."""
        return padded_rows(self.rows, along_k=self.along == "k")

    @property
    def size(self) -> int:
        """Elements of a tile in shared memory."""
        return self.held * self.depth

    @property
    def box(self) -> int:
        """Rows that one copy brings."""
        return self.rows // self.shares if self.along == "k" else WIDE_ROWS

    def shared(self) -> Shared:
        """The tiles."""
        return Shared(f"{self.name}_tile", self.size * self.stages, self.dtype, SWIZZLED)

    def arguments(self) -> list[Argument]:
        """The operand as the copy engine sees it. One that serves the whole batch has one item."""
        name = self.name
        step = var(f"{name}_{self.end if self.along == 'k' else 'k'}")
        items = maximum(var("batch") * const(0).lt(var(f"{name}_batch")), 1)
        ends, box = (var("k"), var(self.end)), (self.depth, self.box)
        if self.along != "k":
            ends, box = ends[::-1], box[::-1]
        of = MapOf(name, self.dtype, (*ends, items), (step, var(f"{name}_batch")), (*box, 1), LINE)
        return [Argument(f"{name}_map", "map", map=of), Argument(f"{name}_batch", "long")]

    # -- to shared memory ------------------------------------------------------

    def place(self) -> list[Stmt]:
        """Which item of the operand it is."""
        return [Let(f"{self.name}_item", var("item") * const(0).lt(var(f"{self.name}_batch")))]

    def load(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """Begin to copy this block's part of the tile at k to a stage: `full[stage]` counts what has landed."""
        name, count = self.name, self.held // self.box // self.shares
        box = var("box") if count > 1 else const(0)
        row = box * self.box + (var("rank") * (self.held // self.shares) if self.shares > 1 else const(0))
        at = (k, self.first + row) if self.along == "k" else (self.first + row, k)
        given = (
            Ptr(f"{name}_tile", stage * self.size + row * self.depth), Ptr(f"{name}_map"), Ptr("full", stage), *at,
            var(f"{name}_item"),
        )  # fmt: skip
        if self.shares > 1:
            call = Do("tma_load_multicast", (*given, const((1 << self.shares) - 1)))
        else:
            call = Do("tma_load", given)
        return (For("box", const(0), const(count), const(1), (call,), WHOLE),) if count > 1 else (call,)

    # -- to the tensor cores ---------------------------------------------------

    def describe(self, row: Index) -> Stmt:
        """The descriptor of the first stage's tile, from a row on."""
        leading = const(PIECE if self.along == "k" else WIDE_ROWS * self.depth * self.bytes)
        at = Ptr(f"{self.name}_tile", row * self.depth)
        return Get(f"{self.name}_matrix", "matrix_descriptor", (at, leading, const(EIGHT_LINES)), "long")

    def matrix(self, stage: Index, strip: Index, unit: Index) -> Index:
        """The descriptor of 64 rows, and those after, at one step of k of a stage."""
        step = ATOM_BYTES if self.along == "k" else ATOM_BYTES // self.bytes * LINE
        strips = strip * (WIDE_ROWS * self.depth * self.bytes // PIECE)
        return var(f"{self.name}_matrix") + stage * (self.size * self.bytes // PIECE) + strips + unit * (step // PIECE)
