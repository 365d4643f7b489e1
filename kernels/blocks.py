"""The geometry of a blocked product: block sizes, scratch and addresses, as expressions.

Everything here is an index expression or a pointer over the fields of the
argument block and the loop variables of `gemm`; nothing is a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.kernels.packing import line_of

from portmm.candidates import RUN_BYTES
from portmm.dtype import BY_NAME
from portmm.ir import Index, Ptr, ceil_div, const, maximum, minimum, round_up, var

if TYPE_CHECKING:
    from portmm.schedule import Schedule
    from portmm.target import Atom, Isa

TASKS_PER_WORKER = 4
"""Pieces per thread beyond the first: a late thread then costs at most a quarter of its share."""

M, N, K = var("m"), var("n"), var("k")
WORKERS = var("workers")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes and addresses of one kernel.

    Attributes:
        s: the schedule.
        isa: its instruction set.
        atom: its vocabulary.
    """

    s: Schedule
    isa: Isa
    atom: Atom

    @property
    def kb(self) -> Index:
        """Depth of a block of k: equal blocks, none longer than KC."""
        return ceil_div(K, maximum(1, ceil_div(K, self.s.kc))) if self.s.kc else K

    @property
    def depth(self) -> Index:
        """Depth of the current block of k."""
        last = var("k_last") if self.s.over == "k" else K
        return minimum(var("kb"), last - var("pc")) if self.s.kc else K

    @property
    def blocks(self) -> Index:
        """Blocks of rows."""
        return ceil_div(M, self.s.mc) if self.s.mc else const(1)

    @property
    def groups(self) -> Index:
        """Visits across C: panels, or groups of panels."""
        return ceil_div(N, self.s.nr * self.s.panels)

    @property
    def shares(self) -> Index:
        """Pieces that the columns of a block are cut into, so that every thread has work."""
        s = self.s
        fewest = ceil_div(N, s.nc) if s.nc else const(1)
        if s.over != "tiles":
            return fewest
        wanted = ceil_div((WORKERS - 1) * TASKS_PER_WORKER, self.blocks)
        return maximum(fewest, minimum(self.groups, wanted))

    def share_start(self, share: Index, shares: Index) -> Index:
        """First visit of a piece; a block's wider pieces come first, so that the last ones even out the threads."""
        return self.groups // shares * share + minimum(share, self.groups % shares)

    @property
    def shared_size(self) -> Index:
        """Elements of all of B in panels."""
        return round_up(ceil_div(N, self.s.nr) * (K * self.s.nr), 64) if self.s.once else const(0)

    @property
    def panel_step(self) -> Index | None:
        """Elements from one panel of B to the next, if B lies in panels of full depth."""
        if self.s.once:
            return K * self.s.nr
        return var("b_n") if self.s.b == "packed" else None

    @property
    def a_size(self) -> Index:
        """Elements of one worker's packed block of A; stores may spill one vector over."""
        if not self.s.pack_a:
            return const(0)
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up(rows * self.kb + self.atom.n, 64)

    @property
    def b_size(self) -> Index:
        """Elements of one worker's packed panels of B."""
        if not self.s.pack_b or self.s.once:
            return const(0)
        return round_up(self.kb * (self.s.nr * self.near), 64)

    def workspace(self) -> Index:
        """Elements of scratch for all workers."""
        own = self.shared_size + (self.b_size + self.a_size) * WORKERS + 64
        return own + self.runs * M * N if self.s.over == "k" else own

    @property
    def runs(self) -> Index:
        """Runs of k that threads share out: whole blocks."""
        return minimum(WORKERS, ceil_div(K, self.kb))

    def private(self) -> Ptr:
        """This worker's scratch: a panel of B, then a block of A."""
        return Ptr("work", self.shared_size + var("worker") * (self.b_size + self.a_size))

    def operand(self, name: str, offset: Index) -> Ptr:
        """An element of A, B or C of the current item."""
        return Ptr(name, var("item") * var(f"{name}_batch") + offset)

    def result(self, row: Index, column: Index) -> Ptr:
        """An element of C, or of this run's own C."""
        if self.s.over == "k":
            return Ptr("cp", row * N + column)
        return self.operand("c", row * var("c_m") + column)

    @property
    def pc(self) -> Index:
        """Where the current block of k starts."""
        return var("pc") if self.s.kc else const(0)

    @property
    def near(self) -> int:
        """Panels of B that are packed together: what stays in L2, or a long run of each row."""
        wide = RUN_BYTES // self.atom_bytes if self.s.once else self.s.tiles[2].n
        return max(1, wide // self.s.nr)

    def source(self, column: Index, row: Index) -> Ptr:
        """An element of B as it was given."""
        b_n = const(1) if self.s.b == "row" else var("b_n")
        return self.operand("b", row * var("b_k") + column * b_n)

    @property
    def streams(self) -> tuple[str, ...]:
        """Operands asked for ahead: what is not packed here, or all of the next item."""
        s = self.s
        if not s.ahead:
            return ()
        if s.over == "batch":
            return ("a", "b")
        return (() if s.pack_a else ("a",)) + (("b",) if self.panel_step is not None or not s.pack_b else ())

    @property
    def line(self) -> int:
        """Elements of a cache line, at least one vector."""
        return line_of(self.atom)

    @property
    def atom_bytes(self) -> int:
        """Bytes of an element."""
        return BY_NAME[self.atom.acc].bytes
