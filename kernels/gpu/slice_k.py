"""How the threads of a block share out k and columns: see `kernels.stream`.

Owns `Work`, a kernel that streams in the making, and loops that vanish where they have one round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For
from portmm.ir.thread_nodes import WHOLE
from portmm.schedule import gpu_gemv

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.isa import Atom, Isa

ONE_ROUND = 8
"""Threads with the same columns whose sums are added in one round."""


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel in the making.

    Attributes:
        s: its schedule.
        isa: the instruction set.
        atom: multiplies.
    """

    s: Schedule
    isa: Isa
    atom: Atom

    @property
    def along_k(self) -> bool:
        """B's columns are side by side in memory."""
        return gpu_gemv.along_k(self.s)

    @property
    def codes(self) -> bool:
        """B is a weight of codes."""
        return self.s.b == "codes"

    @property
    def units(self) -> tuple[str, str]:
        """What is read of A and of B."""
        a, b, _ = self.s.types
        return (self.atom.acc, self.atom.acc) if self.s.kr > 1 else (a, "s32" if self.codes else b)

    @property
    def width(self) -> int:
        """Units of a piece."""
        return gpu_gemv.width(self.s)

    @property
    def deep(self) -> int:
        """Pieces that a thread asks for before it needs the first."""
        return self.s.tiles[0].k // self.width

    @property
    def shares(self) -> int:
        """Threads of a block with the same columns."""
        return gpu_gemv.k_threads(self.s)

    @property
    def across(self) -> int:
        """Threads of a block with different columns."""
        return self.s.block.n // self.s.nr

    @property
    def hop(self) -> int:
        """Units from one piece of a thread to its next."""
        return self.shares * self.width

    @property
    def chunk(self) -> int:
        """Units of A that a thread loads at once."""
        return min(self.s.vectors[0] // self.s.kr, self.width) if self.s.a == "row" else 1

    @property
    def outputs(self) -> int:
        """Elements of C of a block."""
        return self.s.mr * self.s.block.n

    @property
    def parts(self) -> int:
        """Sums that a first round leaves of each output."""
        return 1 if self.shares <= ONE_ROUND else 1 << (self.shares.bit_length() // 2)

    def spot(self, output: Index, share: Index) -> Ptr:
        """Where the sum of an output, as one thread has it, lies."""
        far, near = gpu_gemv.partial_sum_strides(self.s)
        return Ptr("sums", output * far + share * near)


def each(name: str, count: int, *body: Stmt) -> tuple[Stmt, ...]:
    """All rounds of a loop; one round is no loop: see `of`."""
    return body if count == 1 else (For(name, const(0), const(count), const(1), body, WHOLE),)


def of(name: str, count: int) -> Index:
    """What such a loop counts."""
    return const(0) if count == 1 else var(name)


def a_step(s: Schedule) -> Index:
    """From one k of A to the next."""
    return const(1) if s.a == "row" else var("a_k")
