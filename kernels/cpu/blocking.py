"""Geometry of a blocked GEMM: block sizes, scratch and addresses, as expressions.

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
"""Tasks per thread beyond the first: a late thread then costs at most a quarter of its work."""

M, N = var("m"), var("n")
WORKERS = var("workers")


def run_of(k: Index, kr: int) -> Index:
    """Number of units of k in a run: as few runs as possible, all but the last equal."""
    return round_up(ceil_div(k, maximum(1, ceil_div(k, RUN // kr))), STEP // kr)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes and addresses of one kernel.

    Attributes:
        s: the schedule.
        isa: its instruction set.
        atom: its multiply-add, with the loads and stores around it.
    """

    s: Schedule
    isa: Isa
    atom: Atom

    @property
    def move_atom(self) -> Atom:
        """Atom whose vectors move operands, a cache line at a time."""
        return self.isa.row_atom(self.atom) or self.atom

    @property
    def sum_atom(self) -> Atom:
        """Atom whose vectors move sums, a cache line at a time."""
        return self.isa.sum_row_atom(self.atom) or self.atom

    @property
    def k(self) -> Index:
        """Extent of the reduction, in units of a fragment."""
        return ceil_div(var("k"), self.s.kr)

    @property
    def kb(self) -> Index:
        """Extent of a block of k: some runs, or a part of one; any for chained sums; whole words for int4 values."""
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
        """Whether sums are one chain over all of k, without runs; int4 values used in place have runs of their own."""
        return chained(self.atom) or self.int4_in_place

    @property
    def run(self) -> Index:
        """Number of units of k in a run."""
        return run_of(self.k, self.s.kr)

    @property
    def parts(self) -> bool:
        """Whether blocks of k are parts of runs: sums of runs are then kept apart."""
        return not self.chained and parts(self.s.kc, self.s.kr)

    @property
    def many(self) -> bool:
        """Whether a visit of a register tile may cover several runs."""
        short = self.s.static is not None and self.s.static[2] <= RUN
        several = runs_in(self.s.kc, self.s.kr) > 1 if self.s.kc else not short
        return several and not self.chained

    def whole(self, depth: Index) -> Index:
        """Extent along k of buffers: rounded up to whole words where B has int4 values."""
        return round_up(depth, CODES_KR // self.s.kr) if self.s.b == "codes" else depth

    @property
    def depth(self) -> Index:
        """Extent of the current block of k."""
        last = self.last_of_run if self.parts else self.end
        return minimum(var("kb"), last - var("pc")) if self.s.kc else self.k

    @property
    def before(self) -> Index:
        """Number of units of k that a visit of a register tile has done: those of earlier runs."""
        return var("p_run") if self.many else const(0)

    @property
    def start(self) -> Index:
        """Start of this thread's range of k."""
        return var("k_first") if self.s.over == "k" else const(0)

    @property
    def end(self) -> Index:
        """End of this thread's range of k."""
        return var("k_last") if self.s.over == "k" else self.k

    @property
    def last_of_run(self) -> Index:
        """End of the current run, where blocks of k are parts of runs."""
        return minimum(self.end, var("run_start") + var("run"))

    @property
    def b_near(self) -> Index:
        """Stride in units between panels of B that a worker packs together."""
        return self.whole(var("kd")) * self.s.nr + self.tail

    def filled(self, start: Index, units: Index) -> Index:
        """Number of elements of k in some units, of which the last may not be full."""
        return minimum(var("k") - start * self.s.kr, units * self.s.kr)

    @property
    def read_types(self) -> tuple[str, str]:
        """Types of the elements of A and of B that micro-kernels read."""
        return self.s.element_types(self.atom)

    @property
    def finishes(self) -> bool:
        """Whether sums are kept in scratch until they are complete, for an epilogue that writes C."""
        return self.s.program != "dot" and finishes(self.s, self.atom)

    @property
    def unshifts(self) -> bool:
        """Whether micro-kernels subtract the contribution of a shifted A from sums."""
        return shifts(self.s, self.atom)

    @property
    def tail(self) -> int:
        """Number of units behind each panel of B, for the sums of its columns."""
        storage = self.read_types[1]
        kept = self.unshifts if self.s.pack_b else self.s.b == "packed" and self.atom.acc == "s32"
        return sum_units(self.atom, self.s.nr, storage) if kept else 0

    @property
    def cuts(self) -> Index:
        """Number of tasks along k that pack B, where all of it is packed first; column sums need all of k in one."""
        return const(1) if self.unshifts else ceil_div(self.k, PACK_ROWS)

    def scaled(self, name: str) -> int:
        """Number of elements of scratch per packed unit of "a" or "b"."""
        packed = self.atom.left if name == "a" else self.atom.right
        return max(1, BY_NAME[packed].bytes // self.atom_bytes)

    @property
    def blocks(self) -> Index:
        """Number of blocks of rows."""
        return ceil_div(M, self.s.mc) if self.s.mc else const(1)

    @property
    def groups(self) -> Index:
        """Number of visits across C: panels, or groups of panels."""
        return ceil_div(N, self.s.nr * self.s.panels)

    @property
    def column_chunks(self) -> Index:
        """Number of chunks that the columns of a block are cut into, so that every thread has work."""
        s = self.s
        fewest = ceil_div(N, s.nc) if s.nc else const(1)
        if s.over != "tiles":
            return fewest
        wanted = ceil_div((WORKERS - 1) * TASKS_PER_WORKER, self.blocks)
        return maximum(fewest, minimum(self.groups, wanted))

    def chunk_start(self, chunk: Index, chunks: Index) -> Index:
        """First visit of a chunk; a block's wider chunks are first, so that the last ones even out the threads."""
        return self.groups // chunks * chunk + minimum(chunk, self.groups % chunks)

    @property
    def shared_size(self) -> Index:
        """Number of elements of all of B in panels."""
        if not self.s.once:
            return const(0)
        return round_up(ceil_div(N, self.s.nr) * self.b_step * self.scaled("b"), 64)

    @property
    def b_step(self) -> Index:
        """Stride in units between panels of B where all of B is packed first."""
        return self.whole(self.k) * self.s.nr + self.tail

    @property
    def panel_step(self) -> Index | None:
        """Stride in elements between panels of B, if B is in panels of full depth; else None."""
        if self.s.once:
            return self.b_step
        return var("b_n") if self.s.b == "packed" else None

    @property
    def a_size(self) -> Index:
        """Number of elements of one worker's packed block of A; stores may go one vector beyond."""
        if not self.s.pack_a:
            return const(0)
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up((rows * self.kb + self.atom.n) * self.scaled("a"), 64)

    @property
    def b_size(self) -> Index:
        """Number of elements of one worker's packed panels of B."""
        if not self.s.pack_b or self.s.once:
            return const(0)
        return round_up((self.kb * self.s.nr + self.tail) * (self.near * self.scaled("b")), 64)

    @property
    def c_size(self) -> Index:
        """Number of elements of one worker's sums: a tile, or where k is cut a block by a chunk of the columns."""
        if not self.finishes:
            return const(0)
        tile = self.s.mr * self.s.nr * self.s.panels
        if not self.s.kc:
            return const(-(-tile // 64) * 64)
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up(maximum(tile, self.kb.lt(self.k) * (rows * self.chunk_width)), 64)

    @property
    def own_size(self) -> Index:
        """Number of elements of one worker's scratch."""
        return self.b_size + self.a_size + self.c_size + self.t_size + self.kept_size

    @property
    def chunk_width(self) -> Index:
        """Number of columns of the widest chunk of a block, in whole panels."""
        return ceil_div(self.groups, self.column_chunks) * (self.s.nr * self.s.panels)

    @property
    def kept_size(self) -> Index:
        """Number of elements of one worker's sums of runs, where blocks of k are parts of them."""
        if not self.parts:
            return const(0)
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up(self.run.lt(self.k) * (rows * self.chunk_width), 64)

    @property
    def int4_in_place(self) -> bool:
        """Whether the micro-kernel dequantizes int4 values of B in place."""
        return self.s.b == "codes" and not self.s.pack_b

    @property
    def acc(self) -> str:
        """Type of the sums that micro-kernels write."""
        return "f32" if self.int4_in_place else self.atom.acc

    @property
    def groups_of_k(self) -> Index:
        """Number of quantization groups along k."""
        return ceil_div(var("k"), self.s.group) if self.s.group else const(1)

    @property
    def group_sum_buffers(self) -> dict[str, tuple[str, Index]]:
        """Buffers of sums of A over quantization groups, by name: their type, and the number per row."""
        kept = {"totals": ("f32", self.groups_of_k)}
        if not self.atom.centred:
            kept["starts"] = (self.atom.acc, self.groups_of_k * starts_of_group(self.atom, self.s.group))
        return kept

    def row_buffer_size(self, count: Index) -> Index:
        """Number of elements of one worker's scratch for so many of each row."""
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return round_up(rows * count, 64)

    @property
    def t_size(self) -> Index:
        """Number of elements of one worker's sums of A over groups of k."""
        sizes = (self.row_buffer_size(count) for _, count in self.group_sum_buffers.values())
        return sum(sizes, const(0)) if self.int4_in_place else const(0)

    def workspace(self) -> Index:
        """Number of elements of scratch for all workers."""
        own = self.shared_size + self.own_size * WORKERS + self.quantised_size + 64
        return own + self.runs * M * N if self.s.over == "k" else own

    @property
    def runs(self) -> Index:
        """Number of split-K ranges: whole blocks of k."""
        return minimum(WORKERS, ceil_div(self.k, self.kb))

    @property
    def quantised_step(self) -> Index:
        """Stride in elements between quantised rows of A: whole cache lines."""
        return round_up(var("k"), 64)

    @property
    def quantised_size(self) -> Index:
        """Number of elements of scratch for all rows of A, quantised, and their scales."""
        if not self.s.source:
            return const(0)
        return M * (self.quantised_step // self.atom_bytes) + round_up(M, 64)

    def quantised_rows(self) -> tuple[Stmt, ...]:
        """Local names of the quantised rows of A, and of their scales."""
        if not self.s.source:
            return ()
        start = self.shared_size + self.own_size * WORKERS
        codes = M * (self.quantised_step // self.atom_bytes)
        return (LetPtr("codes", Ptr("work", start), "s8"), LetPtr("scales", Ptr("work", start + codes), "f32"))

    def left(self, row: Index, unit: Index) -> tuple[Ptr, Index, Index]:
        """Address of an element of A in place, and its strides: of the operand, or of its quantised rows."""
        s = self.s
        if s.source:
            return Ptr("codes", row * self.quantised_step + unit * s.kr), self.quantised_step, const(1)
        # One stride is 1 by layout: as a constant it becomes part of an address.
        a_m = const(1) if s.a == "col" else var("a_m")
        a_k = const(1) if s.a == "row" else var("a_k")
        return self.operand("a", row * a_m + unit * (a_k * s.kr)), a_m, a_k

    def unpacked_a(self) -> tuple[Ptr, Index, Index]:
        """Address and strides of the slice of A that is to be packed."""
        row = var("row") + var("r")
        if self.s.source:
            return self.left(row, self.pc)
        a_m, a_k = var("a_m"), var("a_k")
        return self.operand("a", row * a_m + self.pc * (a_k * self.s.kr)), a_m, a_k

    def private(self) -> Ptr:
        """Address of this worker's scratch: a panel of B, then a block of A, then sums."""
        return Ptr("work", self.shared_size + var("worker") * self.own_size)

    def operand(self, name: str, offset: Index) -> Ptr:
        """Address of an element of A, B or C of the current item."""
        return Ptr(name, var("item") * var(f"{name}_batch") + offset)

    @property
    def first_column(self) -> Index:
        """First column of a chunk of a block."""
        return var("first") * self.s.nr

    def result(self, row: Index, column: Index) -> Ptr:
        """Address of an element of C, or of this run's own C, or of the sum that will become it."""
        if self.s.over == "k":
            return Ptr("cp", row * N + column)
        if self.finishes:
            return self.sums(row, column)
        return self.operand("c", row * var("c_m") + column)

    def sums(self, row: Index, column: Index) -> Ptr:
        """Address of a sum that is not yet an element of C: in one tile, or at its position in the block."""
        if not self.s.kc:
            return Ptr("cp")
        place = (row - var("row")) * var("c_wide") + (column - self.first_column)
        return Ptr("cp", var("deep") * place)

    @property
    def c_step(self) -> Index:
        """Stride in elements between rows of results."""
        if self.finishes:
            return var("c_wide")
        return N if self.s.over == "k" else var("c_m")

    @property
    def pc(self) -> Index:
        """Start of the current block of k."""
        return var("pc") if self.s.kc else const(0)

    @property
    def near(self) -> int:
        """Number of panels of B that are packed together: as many as stay in L2, or a long run of each row."""
        n = RUN_BYTES // self.atom_bytes if self.s.once else self.s.tiles[2].n
        return max(1, n // self.s.nr)

    def source(self, column: Index, row: Index) -> Ptr:
        """Address of an element of B in place."""
        b_n = const(1) if self.s.b == "row" else var("b_n")
        return self.operand("b", row * (var("b_k") * self.s.kr) + column * b_n)

    @property
    def streams(self) -> tuple[str, ...]:
        """Operands to prefetch: those not packed here, or all of the next item."""
        s = self.s
        if not s.ahead:
            return ()
        if s.over == "batch":
            return ("a", "b")
        return (() if s.pack_a else ("a",)) + (("b",) if self.panel_step is not None or not s.pack_b else ())

    @property
    def line(self) -> int:
        """Number of elements of a cache line, at least one vector."""
        return line_of(self.atom)

    @property
    def atom_bytes(self) -> int:
        """Number of bytes of an accumulator."""
        return BY_NAME[self.atom.acc].bytes
