"""Statements that only the threads of a device have.

Owns the nodes of the loop language for blocks of threads that share memory and meet at
barriers. Imports `ir.index`. Registers of a thread are small arrays (`ir.Scratch`) whose
subscripts are known once loops are unrolled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portmm.ir.index import Index, Ptr

WHOLE = 1 << 16
"""As the `unroll` of a loop: all of it."""


@dataclass(frozen=True, slots=True)
class Shared:
    """An array that the threads of a block share, aligned to so many bytes, not initialised."""

    name: str
    elements: int
    dtype: str
    align: int = 16


@dataclass(frozen=True, slots=True)
class Do:
    """Call a primitive of the instruction set, or of the language, with addresses and integers in order."""

    name: str
    given: tuple[Ptr | Index, ...] = ()


@dataclass(frozen=True, slots=True)
class Get:
    """Make `name` the integer that a primitive returns: an "int", or a "long", of 64 bits without a sign."""

    name: str
    primitive: str
    given: tuple[Ptr | Index, ...] = ()
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Leave:
    """The kernel ends here if a condition that is the same for all threads of the block is not 0."""

    when: Index


@dataclass(frozen=True, slots=True)
class Barrier:
    """All threads of a block meet: what they wrote to shared memory before is seen by all after."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Copy `bytes` bytes, 4, 8 or 16, at once; both addresses are aligned to as many."""

    to: Ptr
    src: Ptr
    bytes: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Make the `count` registers of an array zeros."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Mac:
    """The register at `d` += those at `a` times `b`, by the kernel's atom."""

    d: Ptr
    a: Ptr
    b: Ptr


@dataclass(frozen=True, slots=True)
class Weave:
    """Transpose four bytes of four words: byte j of word `to` + i is byte i of word `src` + j."""

    to: Ptr
    src: Ptr


@dataclass(frozen=True, slots=True)
class Codes:
    """Eight f32 from `to` on = the codes of four bits in the word at `src`, as `dtype.CODES_AT` has them."""

    to: Ptr
    src: Ptr


@dataclass(frozen=True, slots=True)
class CopyAsync:
    """Begin to copy `bytes` bytes to shared memory, past the registers; zeros where `there` is 0."""

    to: Ptr
    src: Ptr
    bytes: int
    there: Index


@dataclass(frozen=True, slots=True)
class CopyCommit:
    """Close a group of copies."""


@dataclass(frozen=True, slots=True)
class CopyWait:
    """Wait until all groups of copies of this thread but the last `pending` have landed."""

    pending: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """The register `d` = that called `x` of the thread whose number in the warp differs by the bit `mask`."""

    d: str
    x: str
    mask: int


@dataclass(frozen=True, slots=True)
class Apply:
    """The element at `to` = what a primitive makes of the elements at `given`, as it takes and returns them."""

    to: Ptr
    primitive: str
    given: tuple[Ptr, ...]
