"""The geometry of a blocked product: block sizes, scratch and addresses, as expressions.

Everything here is an index expression or a pointer over the fields of the
argument block and the loop variables of `gemm`; nothing is a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.nodes import Index, LetPtr, Ptr, ceil_div, const, maximum, minimum, round_up, var
from portmm.kernels.cpu.int4_panels import starts_of_group
from portmm.kernels.cpu.packing import line_of, sum_units
from portmm.schedule.cpu_candidates import PACK_ROWS, RUN_BYTES
from portmm.schedule.schedule import finishes, shifts
from portmm.spec.dtype import BY_NAME, CODES_KR
from portmm.target.summation import RUN, STEP, chained, parts, runs_in

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.target import Atom, Isa

TASKS_PER_WORKER = 4
"""Pieces per thread beyond the first: a late thread then costs at most a quarter of its share."""

M, N = var("m"), var("n")
WORKERS = var("workers")


def run_of(k: Index, kr: int) -> Index:
    """Units of k in a run: as few runs as can be, all but the last equal."""
    return round_up(ceil_div(k, maximum(1, ceil_div(k, RUN // kr))), STEP // kr)


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
    def lines(self) -> Atom:
        """The vocabulary of what moves operands, a line at a time."""
        return self.isa.row_atom(self.atom) or self.atom

    @property
    def sum_lines(self) -> Atom:
        """The vocabulary of what moves sums, a line at a time."""
        return self.isa.sum_row_atom(self.atom) or self.atom

    @property
    def k(self) -> Index:
        """The summed dimension, in the units that fragments hold."""
        return ceil_div(var("k"), self.s.kr)

    @property
    def kb(self) -> Index:
        """Depth of a block of k: of some runs, or a part of one; of chained sums, any; of codes, whole units."""
        if not self.s.kc:
            return self.whole(self.k)
        if self.chained:
            return self.whole(ceil_div(self.k, maximum(1, ceil_div(self.k, self.s.kc))))
        if not self.parts:
            most = runs_in(self.s.kc, self.s.kr)
            if most == 1:
                return self.run
            count = ceil_div(self.k, maximum(1, self.run))
            return self.run * ceil_div(count, maximum(1, ceil_div(count, most)))
        run = minimum(self.run, self.k)
        return self.whole(ceil_div(run, maximum(1, ceil_div(run, self.s.kc))))

    @property
    def chained(self) -> bool:
        """Sums are one chain over all of k, and have no runs; codes that are multiplied as they lie see to theirs."""
        return chained(self.atom) or self.decodes

    @property
    def run(self) -> Index:
        """Units of k in a run."""
        return run_of(self.k, self.s.kr)

    @property
    def parts(self) -> bool:
        """Blocks of k are parts of runs: what runs sum is kept apart."""
        return not self.chained and parts(self.s.kc, self.s.kr)

    @property
    def many(self) -> bool:
        """A visit of a register tile may be of many runs."""
        short = self.s.static is not None and self.s.static[2] <= RUN
        deep = runs_in(self.s.kc, self.s.kr) > 1 if self.s.kc else not short
        return deep and not self.chained

    def whole(self, depth: Index) -> Index:
        """Steps of k that there is room for: those of whole words, where B is of codes."""
        return round_up(depth, CODES_KR // self.s.kr) if self.s.b == "codes" else depth

    @property
    def depth(self) -> Index:
        """Depth of the current block of k."""
        last = self.last_of_run if self.parts else self.end
        return minimum(var("kb"), last - var("pc")) if self.s.kc else self.k

    @property
    def before(self) -> Index:
        """Units of k that a visit of a register tile has done: those of the runs before."""
        return var("p_run") if self.many else const(0)

    @property
    def start(self) -> Index:
        """Where the k of this thread starts."""
        return var("k_first") if self.s.over == "k" else const(0)

    @property
    def end(self) -> Index:
        """Where it ends."""
        return var("k_last") if self.s.over == "k" else self.k

    @property
    def last_of_run(self) -> Index:
        """Where the current run ends, of runs that blocks of k are parts of."""
        return minimum(self.end, var("run_start") + var("run"))

    @property
    def b_near(self) -> Index:
        """Units from one panel of B to the next among those that a worker packs together."""
        return self.whole(var("kd")) * self.s.nr + self.tail

    def filled(self, start: Index, units: Index) -> Index:
        """Elements of k in a run of units, of which the last may not be full."""
        return minimum(var("k") - start * self.s.kr, units * self.s.kr)

    @property
    def given(self) -> tuple[str, str]:
        """What micro-kernels read of A and of B."""
        return self.s.element_types(self.atom)

    @property
    def finishes(self) -> bool:
        """Sums are kept in scratch until they are whole, and become elements of C then."""
        return self.s.program != "dot" and finishes(self.s, self.atom)

    @property
    def unshifts(self) -> bool:
        """Micro-kernels take off what a shifted A adds to sums."""
        return shifts(self.s, self.atom)

    @property
    def tail(self) -> int:
        """Units behind each panel of B, for the sums of its columns."""
        held = self.given[1]
        kept = self.unshifts if self.s.pack_b else self.s.b == "packed" and self.atom.acc == "s32"
        return sum_units(self.atom, self.s.nr, held) if kept else 0

    @property
    def cuts(self) -> Index:
        """Pieces of k that B is packed in, where all of it is packed first; sums take all of k."""
        return const(1) if self.unshifts else ceil_div(self.k, PACK_ROWS)

    def scaled(self, name: str) -> int:
        """Elements of scratch in a unit that is packed there, of "a" or "b"."""
        held = self.atom.left if name == "a" else self.atom.right
        return max(1, BY_NAME[held].bytes // self.atom_bytes)

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
        if not self.s.once:
            return const(0)
        return round_up(ceil_div(N, self.s.nr) * self.b_step * self.scaled("b"), 64)

    @property
    def b_step(self) -> Index:
        """Units from one panel of B to the next where all of B is packed first."""
        return self.whole(self.k) * self.s.nr + self.tail

    @property
    def panel_step(self) -> Index | None:
        """Elements from one panel of B to the next, if B lies in panels of full depth."""
        if self.s.once:
            return self.b_step
        return var("b_n") if self.s.b == "packed" else None

    @property
    def a_size(self) -> Index:
        """Elements of one worker's packed block of A; stores may spill one vector over."""
        if not self.s.pack_a:
            return const(0)
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up((rows * self.kb + self.atom.n) * self.scaled("a"), 64)

    @property
    def b_size(self) -> Index:
        """Elements of one worker's packed panels of B."""
        if not self.s.pack_b or self.s.once:
            return const(0)
        return round_up((self.kb * self.s.nr + self.tail) * (self.near * self.scaled("b")), 64)

    @property
    def c_size(self) -> Index:
        """Elements of one worker's sums: a tile, or where k is cut a block by a share of the columns."""
        if not self.finishes:
            return const(0)
        tile = self.s.mr * self.s.nr * self.s.panels
        if not self.s.kc:
            return const(-(-tile // 64) * 64)
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up(maximum(tile, self.kb.lt(self.k) * (rows * self.share_width)), 64)

    @property
    def own_size(self) -> Index:
        """Elements of one worker's scratch."""
        return self.b_size + self.a_size + self.c_size + self.t_size + self.kept_size

    @property
    def share_width(self) -> Index:
        """Columns of the widest share of a block, whole panels."""
        return ceil_div(self.groups, self.shares) * (self.s.nr * self.s.panels)

    @property
    def kept_size(self) -> Index:
        """Elements of one worker's sums of runs, where blocks of k are parts of them."""
        if not self.parts:
            return const(0)
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up(self.run.lt(self.k) * (rows * self.share_width), 64)

    @property
    def decodes(self) -> bool:
        """Codes are multiplied as they lie."""
        return self.s.b == "codes" and not self.s.pack_b

    @property
    def acc(self) -> str:
        """The type of the sums that micro-kernels give."""
        return "f32" if self.decodes else self.atom.acc

    @property
    def groups_of_k(self) -> Index:
        """Groups of codes along k."""
        return ceil_div(var("k"), self.s.group) if self.s.group else const(1)

    @property
    def totalled(self) -> dict[str, tuple[str, Index]]:
        """Sums of A over groups of codes that are kept, by name: their type, and how many a row has."""
        kept = {"totals": ("f32", self.groups_of_k)}
        if not self.atom.centred:
            kept["starts"] = (self.atom.acc, self.groups_of_k * starts_of_group(self.atom, self.s.group))
        return kept

    def kept_of_rows(self, count: Index) -> Index:
        """Elements of one worker's scratch for so many of each row."""
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up(rows * count, 64)

    @property
    def t_size(self) -> Index:
        """Elements of one worker's sums of A over groups of k."""
        sizes = (self.kept_of_rows(count) for _, count in self.totalled.values())
        return sum(sizes, const(0)) if self.decodes else const(0)

    def workspace(self) -> Index:
        """Elements of scratch for all workers."""
        own = self.shared_size + self.own_size * WORKERS + self.quantised_size + 64
        return own + self.runs * M * N if self.s.over == "k" else own

    @property
    def runs(self) -> Index:
        """Runs of k that threads share out: whole blocks."""
        return minimum(WORKERS, ceil_div(self.k, self.kb))

    @property
    def quantised_step(self) -> Index:
        """Codes from one quantised row of A to the next: whole lines."""
        return round_up(var("k"), 64)

    @property
    def quantised_size(self) -> Index:
        """Elements of scratch for all rows of A, quantised, and their scales."""
        if not self.s.source:
            return const(0)
        return M * (self.quantised_step // self.atom_bytes) + round_up(M, 64)

    def quantised_rows(self) -> tuple[Stmt, ...]:
        """Names for the quantised rows of A, and for their scales."""
        if not self.s.source:
            return ()
        start = self.shared_size + self.own_size * WORKERS
        codes = M * (self.quantised_step // self.atom_bytes)
        return (LetPtr("codes", Ptr("work", start), "s8"), LetPtr("scales", Ptr("work", start + codes), "f32"))

    def left(self, row: Index, unit: Index) -> tuple[Ptr, Index, Index]:
        """An element of A in place, its strides: of A as it was given, or of its codes."""
        s = self.s
        if s.source:
            return Ptr("codes", row * self.quantised_step + unit * s.kr), self.quantised_step, const(1)
        # One stride is 1 by layout: as a constant it becomes part of an address.
        a_m = const(1) if s.a == "col" else var("a_m")
        a_k = const(1) if s.a == "row" else var("a_k")
        return self.operand("a", row * a_m + unit * (a_k * s.kr)), a_m, a_k

    def unpacked_a(self) -> tuple[Ptr, Index, Index]:
        """The slice of A that is to be packed, and its strides."""
        row = var("row") + var("r")
        if self.s.source:
            return self.left(row, self.pc)
        a_m, a_k = var("a_m"), var("a_k")
        return self.operand("a", row * a_m + self.pc * (a_k * self.s.kr)), a_m, a_k

    def private(self) -> Ptr:
        """This worker's scratch: a panel of B, then a block of A, then sums."""
        return Ptr("work", self.shared_size + var("worker") * self.own_size)

    def operand(self, name: str, offset: Index) -> Ptr:
        """An element of A, B or C of the current item."""
        return Ptr(name, var("item") * var(f"{name}_batch") + offset)

    @property
    def first_column(self) -> Index:
        """The first column of a share of a block."""
        return var("first") * self.s.nr

    def result(self, row: Index, column: Index) -> Ptr:
        """An element of C, or of this run's own C, or of the sums that will become it."""
        if self.s.over == "k":
            return Ptr("cp", row * N + column)
        if self.finishes:
            return self.sums(row, column)
        return self.operand("c", row * var("c_m") + column)

    def sums(self, row: Index, column: Index) -> Ptr:
        """A sum that is not yet an element of C: in one tile, or at its place in the block."""
        if not self.s.kc:
            return Ptr("cp")
        place = (row - var("row")) * var("c_wide") + (column - self.first_column)
        return Ptr("cp", var("deep") * place)

    @property
    def c_step(self) -> Index:
        """Elements from one row of results to the next."""
        if self.finishes:
            return var("c_wide")
        return N if self.s.over == "k" else var("c_m")

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
        return self.operand("b", row * (var("b_k") * self.s.kr) + column * b_n)

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
