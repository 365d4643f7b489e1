"""Kernels over a grid of blocks of threads.

Owns `GridKernel`, and what it is called with. Imports `ir.nodes`, `ir.thread_nodes`. Threads of a block share
memory and meet at barriers; those of different blocks know nothing of each other. A
kernel reads where it is from the names in `PLACES`. CUDA calls these grid, block, thread and
shared memory; OpenCL global range, work-group, work-item and local memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.nodes import walk
from portmm.ir.thread_nodes import Shared
from portmm.spec.dtype import BY_NAME
from portmm.target.device import STATIC_SHARED

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.target.isa import Atom, Isa

WORDS = 16
"""Bytes that shared arrays are aligned to by all languages."""
PLACES = ("thread", "block", "slice")
"""Where a thread is: in its block, its block along the grid's first axis, and along the second."""


@dataclass(frozen=True, slots=True)
class MapOf:
    """A tensor in global memory as copies of boxes see it: PTX ISA, "Tensors".

    Attributes:
        pointer: the name of the address that each call gives.
        dtype: of its elements.
        sizes: elements along three axes, the dense one first.
        strides: elements from one line to the next, and from one item to the next.
        box: elements along each axis that one copy moves.
        swizzle: bytes of a line of a box in shared memory whose 16-byte pieces are exchanged: 0, 32, 64 or 128.
    """

    pointer: str
    dtype: str
    sizes: tuple[Index, Index, Index]
    strides: tuple[Index, Index]
    box: tuple[int, int, int]
    swizzle: int


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter of a kernel.

    Attributes:
        name: as the body calls it.
        kind: "int" (32 bits), "long" (64), "float", "pointer" to global memory, or "map", a tensor map.
        dtype: what a pointer points at.
        readonly: a pointer's memory is not written by this kernel.
        alone: nothing else that the kernel reads or writes overlaps it.
        map: of a "map", what it describes.
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
        isa: what the words of its atom need around them.
        atom: the vocabulary.
        arguments: its parameters, in order.
        threads: of a block.
        grid: blocks along both axes, over arguments.
        body: what each thread does.
        header: lines for the top of the source.
        resident: blocks that a processor is to hold at once, 0 if that does not matter.
        cluster: blocks that read each other's shared memory.
    """

    name: str
    isa: Isa
    atom: Atom
    arguments: tuple[Argument, ...]
    threads: int
    grid: tuple[Index, Index]
    body: tuple[Stmt, ...]
    header: tuple[str, ...] = ()
    resident: int = 0
    cluster: int = 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return max((at + _bytes(s) for s, at in self.layout.items()), default=0)

    @property
    def layout(self) -> dict[Shared, int]:
        """Shared arrays, and where they begin."""
        found: dict[Shared, int] = {}
        end = 0
        for s in walk(self.body):
            if isinstance(s, Shared):
                found[s] = -(-end // s.align) * s.align
                end = found[s] + _bytes(s)
        return found

    @property
    def dynamic(self) -> bool:
        """Shared memory is asked for at launch: more than a kernel may have unasked, or aligned to more than words."""
        return self.shared_bytes > STATIC_SHARED or any(s.align > WORDS for s in self.layout)


def _bytes(s: Shared) -> int:
    return s.elements * BY_NAME[s.dtype].bytes
