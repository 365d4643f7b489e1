"""Kernels over a grid of blocks of threads.

Owns `GridKernel`, and what it is called with. Imports `ir`, `threads`. Threads of a block share
memory and meet at barriers; those of different blocks know nothing of each other. A
kernel reads where it is from the names in `PLACES`. CUDA calls these grid, block, thread and
shared memory; OpenCL global range, work-group, work-item and local memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.dtype import BY_NAME
from portmm.ir import walk
from portmm.threads import Shared

if TYPE_CHECKING:
    from portmm.index import Index
    from portmm.ir import Stmt
    from portmm.isa import Atom, Isa

PLACES = ("thread", "block", "slice")
"""Where a thread is: in its block, its block along the grid's first axis, and along the second."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter of a kernel.

    Attributes:
        name: as the body calls it.
        kind: "int" (32 bits), "long" (64), "float", or "pointer" to global memory.
        dtype: what a pointer points at.
        readonly: a pointer's memory is not written by this kernel.
        alone: nothing else that the kernel reads or writes overlaps it.
    """

    name: str
    kind: str
    dtype: str = ""
    readonly: bool = False
    alone: bool = False


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

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return sum(s.elements * BY_NAME[s.dtype].bytes for s in walk(self.body) if isinstance(s, Shared))
