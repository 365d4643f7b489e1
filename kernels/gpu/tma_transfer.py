"""TMA transfer of tiles of A and B to shared memory, in the layout of wgmma.

Owns `TmaTile`, one operand of a block tile. A tile consists of lines of 128 bytes: of a row (of A, or a
column of B) along k, or, where memory is contiguous along rows, of one k along 64 rows; the lines of further rows
follow. TMA swizzles the 16-byte vectors of every eight lines, and fills elements out of bounds
with zeros; `matrix_descriptor` describes the same layout to the tensor cores. Either way 64 rows take as many bytes.

A may be the windows of a convolution (`schedule.gpu_wgmma.boxes`): TMA's im2col mode copies some channels of one tap of
as many windows as a tile has rows, and its zeros are the padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.grid_kernel import Argument, MapOf, PixelBox
from portmm.ir.index import Ptr, const, maximum, var
from portmm.ir.nodes import Let
from portmm.ir.thread_nodes import Do, Get, Shared
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.product import OperandTile
from portmm.schedule.gpu_wgmma import LINE, SWIZZLED, WIDE_ROWS, boxes, padded_rows
from portmm.spec.layouts import swizzled_tile

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.convolution import Convolution
    from portmm.spec.layout import Layout

VECTOR = 16
"""Unit of descriptors, in bytes."""
LINES = 8
"""Lines that are swizzled together."""
ATOM_BYTES = 32
"""Bytes of a row along k that one instruction multiplies."""


@dataclass(frozen=True, slots=True)
class TmaTile(OperandTile):
    """Tile of one operand of a block, in shared memory.

    Attributes:
        cluster: blocks of a cluster, of which each loads a part of the tile for all (multicast).
        rounds: elements of f32 are rounded to tf32 by the copy: the tensor cores ignore the bits that tf32 lacks.
    """

    cluster: int = 1
    rounds: bool = False

    @property
    def memory(self) -> Layout:
        """Layout (row, k) of a tile in shared memory."""
        return swizzled_tile(self.bytes, self.depth, along_k=self.along == "k")

    def step(self, axis: int, count: int) -> int:
        """Number of bytes between lines `count` rows, or elements of k, apart, whose swizzles agree."""
        return int(replace(self.memory, swizzle=None).step(axis, count) or 0) * self.bytes

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile in shared memory."""
        return padded_rows(self.rows, along_k=self.along == "k")

    @property
    def size(self) -> int:
        """Number of elements of a tile in shared memory."""
        return self.tile_rows * self.depth

    @property
    def box(self) -> int:
        """Number of rows of one copy."""
        return self.rows // self.cluster if self.along == "k" else WIDE_ROWS

    @property
    def extent(self) -> str:
        """Name of the number of rows of the operand."""
        return "m" if self.name == "a" else "n"

    @property
    def windows(self) -> tuple[Convolution, tuple[int, ...]] | None:
        """The convolution whose windows the operand is, and the strides of its images.

        Raises:
            ScheduleError: it is a view that TMA does not read.
        """
        if not self.layout.transforms:
            return None
        images = boxes(self.layout, self.dtype) if self.name == "a" and not self.padding else None
        if images is None:
            raise ScheduleError(f"TMA does not read {self.name.upper()} at {self.layout.form}")
        return images

    def shared(self) -> Shared:
        """Shared memory array of the tiles."""
        return Shared(f"{self.name}_tile", self.size * self.stages, self.dtype, SWIZZLED)

    def arguments(self) -> list[Argument]:
        """Tensor map of the operand, and its batch stride. An operand of the whole batch has one item."""
        name = self.name
        if self.windows:
            return [Argument(f"{name}_map", "map", map=self._images(*self.windows)), Argument(f"{name}_batch", "long")]
        step = var(f"{name}_{self.extent if self.along == 'k' else 'k'}")
        items = maximum(var("batch") * const(0).lt(var(f"{name}_batch")), 1)
        ends, lines = (var("k"), var(self.extent)), self.box
        if self.along != "k":
            ends, lines = ends[::-1], self.depth
        box = (int(self.memory.shape[-1]), lines, 1)
        of = MapOf(name, self.dtype, (*ends, items), (step, var(f"{name}_batch")), box, LINE, self.rounds)
        return [Argument(f"{name}_map", "map", map=of), Argument(f"{name}_batch", "long")]

    def _images(self, x: Convolution, strides: tuple[int, ...]) -> MapOf:
        """Tensor map of images whose windows the operand is; those of a batch are the next ones."""
        item, *steps, _ = strides
        sizes = (const(x.channels), *map(const, reversed(x.spatial)), var("m") // x.pixels * var("batch"))
        ends = zip(x.after, x.reach, strict=True)
        (y0, x0), (y1, x1), (dy, dx) = x.before, [n - (reach - 1) for n, reach in ends], x.stride
        of = PixelBox((-x0, -y0), (x1, y1), (dx, dy))
        apart = (*map(const, reversed(steps)), const(item))
        return MapOf(self.name, self.dtype, sizes, apart, (self.depth, self.box), LINE, self.rounds, of)

    # -- to shared memory ------------------------------------------------------

    def place(self) -> list[Stmt]:
        """Index of the operand's item; of windows, coordinates of the first pixel of the first one."""
        name = self.name
        item: list[Stmt] = [Let(f"{name}_item", var("item") * const(0).lt(var(f"{name}_batch")))]
        if not self.windows:
            return item
        x, _ = self.windows
        return [
            *item,
            Let(f"{name}_image", var(f"{name}_item") + self.first // x.pixels),
            Let(f"{name}_pixel", self.first % x.pixels),
            Let(f"{name}_y", var(f"{name}_pixel") // x.out[1] * x.stride[0] - x.before[0]),
            Let(f"{name}_x", var(f"{name}_pixel") % x.out[1] * x.stride[1] - x.before[1]),
        ]

    def _load_windows(self, x: Convolution, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """TMA copy of the channels from k on of one tap."""
        name, tap = self.name, var(f"{self.name}_tap")
        across = x.kernel[1]
        operands: tuple[Ptr | Index, ...] = (
            Ptr(f"{name}_tile", stage * self.size), Ptr(f"{name}_map"), Ptr("full", stage), k - tap * x.channels,
            *(var(f"{name}_{c}") for c in ("x", "y", "image")), tap % across * x.dilation[1],
            tap // across * x.dilation[0],
        )  # fmt: skip
        return (Let(f"{name}_tap", k // x.channels), Do("tma_load_im2col", operands))

    def load(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """TMA copy of this block's part of the tile at k to a stage: `full[stage]` counts bytes that have landed."""
        if self.windows:
            return self._load_windows(self.windows[0], k, stage)
        name, count = self.name, self.tile_rows // self.box // self.cluster
        box = var("box") if count > 1 else const(0)
        row = box * self.box + (var("rank") * (self.tile_rows // self.cluster) if self.cluster > 1 else const(0))
        at = (k, self.first + row) if self.along == "k" else (self.first + row, k)
        operands = (
            Ptr(f"{name}_tile", stage * self.size + row * self.depth), Ptr(f"{name}_map"), Ptr("full", stage), *at,
            var(f"{name}_item"),
        )  # fmt: skip
        if self.cluster > 1:
            call = Do("tma_load_multicast", (*operands, const((1 << self.cluster) - 1)))
        else:
            call = Do("tma_load", operands)
        return (unrolled("box", count, call),) if count > 1 else (call,)

    # -- to the tensor cores ---------------------------------------------------

    def describe(self, row: Index) -> Stmt:
        """Descriptor of the first stage's tile, from a row on."""
        along_k = self.along == "k"
        leading, stride = VECTOR if along_k else self.step(0, WIDE_ROWS), self.step(0 if along_k else 1, LINES)
        at = Ptr(f"{self.name}_tile", row * self.depth)
        return Get(f"{self.name}_matrix", "matrix_descriptor", (at, const(leading), const(stride)), "long")

    def matrix(self, stage: Index, strip: Index, unit: Index) -> Index:
        """Descriptor of 64 rows, and those after, at one step of k of a stage."""
        step, strips = self.step(1, ATOM_BYTES // self.bytes), strip * (self.step(0, WIDE_ROWS) // VECTOR)
        return (
            var(f"{self.name}_matrix") + stage * (self.size * self.bytes // VECTOR) + strips + unit * (step // VECTOR)
        )
