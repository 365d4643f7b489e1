"""Statements for threads of a device.

Owns the nodes of the loop language for blocks of threads that share memory and
synchronise at barriers. Registers of a thread are small arrays (`nodes.Scratch`) whose
subscripts are constants after loops are unrolled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.nodes import Stmt

if TYPE_CHECKING:
    from portmm.ir.index import Index, Ptr

WHOLE = 1 << 16
"""The `unroll` of a loop that is fully unrolled."""


@dataclass(frozen=True, slots=True)
class Shared(Stmt):
    """An array in shared memory, aligned to `align` bytes, not initialised."""

    name: str
    elements: int
    dtype: str
    align: int = 16


@dataclass(frozen=True, slots=True)
class Do(Stmt):
    """Call of a primitive of the instruction set, or of the language, with addresses and integers in order."""

    name: str
    args: tuple[Ptr | Index, ...] = ()


@dataclass(frozen=True, slots=True)
class Get(Stmt):
    """Declaration of `name` as the integer that a primitive returns: an "int", or a "long", 64 bits unsigned."""

    name: str
    primitive: str
    args: tuple[Ptr | Index, ...] = ()
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Leave(Stmt):
    """Return from the kernel if a condition that is uniform in the block is not 0."""

    when: Index


@dataclass(frozen=True, slots=True)
class Barrier(Stmt):
    """Barrier of a block: writes of its threads to shared memory before it are visible to all after it."""


@dataclass(frozen=True, slots=True)
class Vector(Stmt):
    """Copy of a vector of `bytes` bytes, 4, 8 or 16; both addresses are aligned to `bytes`."""

    to: Ptr
    src: Ptr
    bytes: int


@dataclass(frozen=True, slots=True)
class Clear(Stmt):
    """Set the `count` registers of an array to zero."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Interleave(Stmt):
    """Transpose of four bytes of four words: byte j of word `to` + i is byte i of word `src` + j."""

    to: Ptr
    src: Ptr


@dataclass(frozen=True, slots=True)
class Codes(Stmt):
    """Dequantization of the word of eight int4 values at `src`, in the order of `dtype.CODES_AT`, to f32 at `to`."""

    to: Ptr
    src: Ptr


@dataclass(frozen=True, slots=True)
class CopyAsync(Stmt):
    """Start of an asynchronous copy of `bytes` bytes to shared memory; zeros where `there` is 0."""

    to: Ptr
    src: Ptr
    bytes: int
    there: Index


@dataclass(frozen=True, slots=True)
class CopyCommit(Stmt):
    """End of a group of asynchronous copies."""


@dataclass(frozen=True, slots=True)
class CopyWait(Stmt):
    """Wait until all groups of copies of this thread but the last `pending` have completed."""

    pending: int


@dataclass(frozen=True, slots=True)
class Exchange(Stmt):
    """Warp shuffle: register `d` = register `x` of the lane whose index differs by the bit `mask`."""

    d: str
    x: str
    mask: int


@dataclass(frozen=True, slots=True)
class Apply(Stmt):
    """Call of a primitive with elements: *to = primitive(*args...), with its own types."""

    to: Ptr
    primitive: str
    args: tuple[Ptr, ...]
