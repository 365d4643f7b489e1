"""w4a16 tiles: A and int4 weights in shared memory, for `w4a16`.

Owns `Tile`, the layout of lines of vectors of 16 bytes, and `Scales`.

The lanes of a warp read columns, or rows, g = lane / 4, and of each the part of t = lane % 4: words of 8 int4 values,
4 * w words at once, w neighbours for each t, and of A the vectors of the same k. Reads of 16 bytes are done
by 8 lanes at a time, of 4 bytes by all lanes at once; they have no bank conflicts because

- vectors of A that the four t read at once, for the c-th word of each, are contiguous: vector t * w + c is
  stored at c * 4 + t;
- the position of a vector is xored with the bits of g in reverse order: two g, four or all eight of them are in
  different banks whether they read four vectors each, two or one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import Let
from portmm.ir.thread_nodes import CopyAsync, Shared
from portmm.kernels.gpu.loops import pieces
from portmm.kernels.gpu.mma_transfer import MmaTile

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

LANES = 4
"""Number of lanes that share a row, or a column."""


def reversed_bits(x: Index) -> Index:
    """Three bits of 0 to 7 in reverse order."""
    return x % 2 * 4 + x // 2 % 2 * 2 + x // 4


@dataclass(frozen=True, slots=True)
class Tile(MmaTile):
    """Tile of one operand, in vectors of 16 bytes along k; of int4 values, the elements are words.

    Attributes:
        together: rows that are in consecutive banks, for one g.
        lane_vectors: vectors of a lane that are neighbours in memory; 0 where they stay neighbours in shared memory.
    """

    together: int
    lane_vectors: int

    @property
    def clamped(self) -> bool:
        """Past the last row it is read again: its sums are not stored."""
        return True

    def at(self, line: Index, vector: Index, element: Index | int = 0) -> Index:
        """Offset of an element of a vector of a line, in a tile."""
        if self.lane_vectors:
            unit = vector // (LANES * self.lane_vectors) * (LANES * self.lane_vectors)
            inside = vector % (LANES * self.lane_vectors)
            vector = unit + inside % self.lane_vectors * LANES + inside // self.lane_vectors
        return self.place(line, vector, reversed_bits(line // self.together % 8)) + element

    def place(self, line: Index, position: Index, swizzle: Index) -> Index:
        """Offset of the vector at a position in a line; `swizzle` is the reversed bits of its g."""
        return ((line * (self.width // self.per_vector) + position) ^ swizzle) * self.per_vector


@dataclass(frozen=True, slots=True)
class Scales:
    """Tile of the scales, or offsets, of a block's step: for each span of k those of all columns.

    Attributes:
        name: "scales" or "offsets".
        columns: columns of a block.
        spans: spans of a step.
        span: rows of k of a span, all of one group.
        group: rows of a quantization group, 0 for all.
        threads: threads that copy it.
        stages: number of tiles.
    """

    name: str
    columns: int
    spans: int
    span: int
    group: int
    threads: int
    stages: int

    @property
    def size(self) -> int:
        """Number of elements of a step."""
        return self.columns * self.spans

    def shared(self) -> Shared:
        """Shared memory array of all stages."""
        return Shared(f"{self.name}_tile", self.size * self.stages, "f32")

    def copy(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """Asynchronous copies of the scales of the step at k."""
        n = self.name
        e, column = var(f"{n}_piece"), var(f"{n}_column")
        span = e % self.spans
        number = minimum((k + span * self.span) // self.group, var("groups") - 1) if self.group else const(0)
        at = minimum(var("column_0") + column, var("n") - 1) * var("groups") + number
        body: tuple[Stmt, ...] = (
            Let(f"{n}_column", e // self.spans),
            CopyAsync(Ptr(f"{n}_tile", stage * self.size + span * self.columns + column), Ptr(n, at), 4, const(1)),
        )
        return (pieces(f"{n}_piece", self.size, self.threads, *body),)
