"""Kernels over a grid of blocks of threads.

Owns `GridKernel`, and its arguments. Threads of a block share memory and synchronise at barriers; those of
different blocks are independent. A kernel reads its indices from the names in `PLACES`. CUDA calls these
grid, block, thread and shared memory; OpenCL global range, work-group, work-item and local memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from portmm.ir.nodes import Stmt, walk
from portmm.ir.thread_nodes import Shared
from portmm.spec.dtype import BY_NAME
from portmm.target.device import STATIC_SHARED

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

WORDS = 16
"""Alignment of shared arrays in all languages, in bytes."""
PLACES = ("thread", "block", "slice")
"""Indices of a thread: in its block, of its block along the grid's first axis, and along the second."""


class PixelBox(NamedTuple):
    """Pixels of images (channel, x, y, image) at which windows begin: PTX ISA, "Im2col mode".

    Attributes:
        lower: the first along x and y, from that of an image.
        upper: the last, from that of an image.
        step: distance of neighbours.
    """

    lower: tuple[int, int]
    upper: tuple[int, int]
    step: tuple[int, int]


@dataclass(frozen=True, slots=True)
class MapOf:
    """Tensor map of a matrix in global memory, for copies of boxes: PTX ISA, "Tensors".

    Attributes:
        pointer: the name of the address argument.
        dtype: of its elements.
        sizes: elements along three or four axes, the dense one first.
        strides: elements from one row to the next, and from one item to the next, along each further axis.
        box: elements along each axis that one copy moves; of images, channels and pixels.
        swizzle: bytes of a row of a box in shared memory whose 16-byte vectors are swizzled: 0, 32, 64 or 128.
        rounds: copies round elements, which are f32, to the nearest of tf32.
        pixels: of images of whose windows copies move one tap, where these begin; else None.
    """

    pointer: str
    dtype: str
    sizes: tuple[Index, ...]
    strides: tuple[Index, ...]
    box: tuple[int, ...]
    swizzle: int
    rounds: bool = False
    pixels: PixelBox | None = None


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter of a kernel.

    Attributes:
        name: its name in the body.
        kind: "int" (32 bits), "long" (64), "float", "pointer" to global memory, or "map", a tensor map.
        dtype: element type of a pointer.
        readonly: a pointer's memory is not written by this kernel.
        alone: no other memory that the kernel reads or writes overlaps it.
        map: the tensor of a "map".
    """

    name: str
    kind: str
    dtype: str = ""
    readonly: bool = False
    alone: bool = False
    map: MapOf | None = None


@dataclass(frozen=True, slots=True)
class GridKernel:
    """A complete kernel for a device.

    Attributes:
        name: its name in the source.
        isa: the instruction set, with the declarations that the atom's verbs use.
        atom: the atom, whose verbs the statements use.
        arguments: its parameters, in order.
        threads: of a block.
        grid: blocks along both axes, as expressions of arguments.
        body: statements of each thread.
        header: lines for the top of the source.
        occupancy: blocks per processor that a compiler must leave registers for; 0 for no bound.
        cluster: blocks that read each other's shared memory.
        overlaps: it may begin while the grid before it ends.
    """

    name: str
    isa: Isa
    atom: Atom
    arguments: tuple[Argument, ...]
    threads: int
    grid: tuple[Index, Index]
    body: tuple[Stmt, ...]
    header: tuple[str, ...] = ()
    occupancy: int = 0
    cluster: int = 1
    overlaps: bool = True

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return max((at + _bytes(s) for s, at in self.layout.items()), default=0)

    @property
    def layout(self) -> dict[Shared, int]:
        """Shared arrays, and their offsets in bytes."""
        offsets: dict[Shared, int] = {}
        end = 0
        for s in walk(self.body):
            if isinstance(s, Shared):
                offsets[s] = -(-end // s.align) * s.align
                end = offsets[s] + _bytes(s)
        return offsets

    @property
    def dynamic(self) -> bool:
        """Whether shared memory is allocated at launch: it exceeds the static limit, or the alignment of words."""
        return self.shared_bytes > STATIC_SHARED or any(s.align > WORDS for s in self.layout)


def _bytes(s: Shared) -> int:
    return s.elements * BY_NAME[s.dtype].bytes
