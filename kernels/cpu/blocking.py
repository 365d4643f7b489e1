"""Blocks of a GEMM along m, n and k, as expressions over the argument block and loop variables of `gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import ceil_div, const, maximum, minimum, round_up, var
from portmm.ir.nodes import Let
from portmm.kernels.cpu.packing import line_of
from portmm.schedule.schedule import finishes, finishes_in_c, shifts, sweeps, sweeps_panels
from portmm.spec.dtype import BY_NAME, CODES_KR
from portmm.target.model import CPU as MODEL
from portmm.target.summation import RUN, STEP, BlockOfK, block_of_k, chained, runs_in

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layout import Layout
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


TASKS_PER_WORKER = 4
"""Tasks per thread beyond the first: a late thread then costs at most a quarter of its work."""

M, N = var("m"), var("n")
WORKERS = var("workers")


def run_count(k: Index, kr: int) -> Index:
    """Number of runs of `k` units: as few as possible."""
    return maximum(1, ceil_div(k, RUN // kr))


def run_of(k: Index, kr: int, count: Index | None = None) -> Index:
    """Number of units of k in a run, of `count` runs: all but the last equal."""
    return round_up(ceil_div(k, run_count(k, kr) if count is None else count), STEP // kr)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one kernel.

    Attributes:
        s: the schedule.
        isa: its instruction set.
        atom: its multiply-add, with the loads and stores around it.
        view: layout (m, k) of an A that is packed from more than an array with strides, as windows of a convolution.
        view_b: layout (k, n) of such a B.
        padding: value of elements of these that are in padding, an integer.
    """

    s: Schedule
    isa: Isa
    atom: Atom
    view: Layout | None = None
    view_b: Layout | None = None
    padding: int = 0

    @property
    def move_atom(self) -> Atom:
        """Atom whose vectors move operands, a cache line at a time."""
        return self.isa.row_atom(self.atom) or self.atom

    @property
    def k(self) -> Index:
        """Extent of the reduction, in units of a fragment."""
        return ceil_div(var("k"), self.s.atom.kr)

    @property
    def kb(self) -> Index:
        """Extent of a block of k: some runs, or a part of one; any for chained sums; whole words for int4 values.

        Sweeps have their number of steps written out.
        """
        k, kc = self.k, self.s.kc
        if not kc:
            return self.whole(k)
        match self.block_of_k:
            case BlockOfK.CHAIN:
                return self.whole(ceil_div(k, maximum(1, ceil_div(k, kc))))
            case BlockOfK.PART if self.sweeps:
                return const(kc)
            case BlockOfK.PART:
                run = minimum(self.run, k)
                return self.whole(ceil_div(run, maximum(1, ceil_div(run, kc))))
            case BlockOfK.RUN:
                return self.run
            case BlockOfK.RUNS:
                return self.run * self.runs_of_block(self.run_count)

    @property
    def block_of_k(self) -> BlockOfK:
        """Relation of a block of k to summation runs; int4 values used in place have runs of their own."""
        if chained(self.atom) or self.int4_in_place:
            return BlockOfK.CHAIN
        return block_of_k(self.s.kc, self.s.atom.kr, self.s.static[2] if self.s.static else None)

    @property
    def run_count(self) -> Index:
        """Number of runs of k: as few as possible."""
        return run_count(self.k, self.s.atom.kr)

    @property
    def run(self) -> Index:
        """Number of units of k in a run."""
        return run_of(self.k, self.s.atom.kr)

    def runs_of_block(self, count: Index) -> Index:
        """Number of runs in a block of k, of `count` in all: about as many in each."""
        return ceil_div(count, ceil_div(count, runs_in(self.s.kc, self.s.atom.kr)))

    def whole(self, depth: Index) -> Index:
        """Extent along k of buffers: rounded up to whole words where B has int4 values."""
        return round_up(depth, CODES_KR // self.s.atom.kr) if self.s.b.layout == "codes" else depth

    @property
    def depth(self) -> Index:
        """Extent of the current block of k."""
        last = self.last_of_run if self.block_of_k is BlockOfK.PART else self.end
        return minimum(var("kb"), last - var("pc")) if self.s.kc else self.k

    @property
    def before(self) -> Index:
        """Number of units of k that a visit of a register tile has done: those of earlier runs."""
        return var("p_run") if self.block_of_k is BlockOfK.RUNS else const(0)

    @property
    def start(self) -> Index:
        """Start of this thread's range of k."""
        return var("k_first") if self.s.parallel.over == "k" else const(0)

    @property
    def end(self) -> Index:
        """End of this thread's range of k."""
        return var("k_last") if self.s.parallel.over == "k" else self.k

    @property
    def last_of_run(self) -> Index:
        """End of the current run, where blocks of k are parts of runs."""
        return minimum(self.end, var("run_start") + var("run"))

    @property
    def pc(self) -> Index:
        """Start of the current block of k."""
        return var("pc") if self.s.kc else const(0)

    def filled(self, start: Index, units: Index) -> Index:
        """Number of elements of k in some units, of which the last may not be full."""
        return minimum(var("k") - start * self.s.atom.kr, units * self.s.atom.kr)

    @property
    def runs(self) -> Index:
        """Number of split-K ranges: whole blocks of k."""
        return minimum(WORKERS, ceil_div(self.k, self.kb))

    @property
    def cuts_rows(self) -> bool:
        """Whether blocks of rows are tasks of their own: where MC is less than M, or panels are swept by threads."""
        return bool(self.s.mc) or (self.s.parallel.over == "tiles" and sweeps_panels(self.s))

    @property
    def fewest_blocks(self) -> Index:
        """Number of blocks of rows that MC allows; where panels are swept, one per thread if each has many rows."""
        if self.s.mc:
            return ceil_div(M, self.s.mc)
        many = MODEL.thread_rows if self.s.b.packed else MODEL.thread_rows_ready
        return maximum(1, minimum(WORKERS, M // many)) if self.cuts_rows else const(1)

    @property
    def evens_out(self) -> bool:
        """Whether blocks of rows are tasks, of which every thread takes as many if each is one."""
        return bool(self.s.mc) and self.s.parallel.over == "tiles"

    @property
    def blocks(self) -> Index:
        """Number of blocks of rows, after `count_blocks`."""
        return var("blocks") if self.evens_out else self.fewest_blocks

    def count_blocks(self) -> tuple[Stmt, ...]:
        """Statements that count blocks of rows: a multiple of the threads where columns are not cut into tasks, too."""
        if not self.evens_out:
            return ()
        fewest, cut, even = self.fewest_blocks, self.chunks_wanted, var("even")
        return (
            Let("even", maximum(1, WORKERS * cut.lt(2))),
            Let("blocks", minimum(M, ceil_div(fewest, even) * even)),
        )

    @property
    def block_rows(self) -> Index:
        """Number of rows of the tallest block."""
        return minimum(M, self.s.mc) if self.s.mc else M

    @property
    def groups(self) -> Index:
        """Number of visits across C: panels, or groups of panels."""
        return ceil_div(N, self.s.nr * self.s.b.panels)

    @property
    def column_chunks(self) -> Index:
        """Number of chunks that the columns of a block are cut into, so that every thread has work."""
        s = self.s
        fewest = ceil_div(N, s.nc) if s.nc else const(1)
        if s.parallel.over != "tiles":
            return fewest
        return maximum(fewest, minimum(self.groups, self.chunks_wanted))

    @property
    def chunks_wanted(self) -> Index:
        """Number of chunks of the columns of a block for which every thread has work."""
        return ceil_div((WORKERS - 1) * TASKS_PER_WORKER, self.fewest_blocks)

    def chunk_start(self, chunk: Index, chunks: Index) -> Index:
        """First visit of a chunk; neighbouring chunks, which a thread has, are together as wide as those of others."""
        return self.groups * chunk // chunks

    @property
    def slab(self) -> Index:
        """Number of columns that are packed at once where all of B is packed: slabs of about the same width."""
        panels = ceil_div(N, self.s.nr)
        return round_up(ceil_div(panels, ceil_div(panels, self.slab_panels)), self.near) * self.s.nr

    @property
    def slab_panels(self) -> Index:
        """Maximum number of panels of a slab: a multiple of those that are packed together."""
        bytes_ = self.whole(self.k) * (self.near * self.s.nr * BY_NAME[self.atom.right].bytes)
        return maximum(1, WORKERS * MODEL.slab_bytes // bytes_) * self.near

    @property
    def slab_first(self) -> Index:
        """First column of the current slab of B."""
        return var("across") if self.s.b.once else const(0)

    @property
    def chunk_width(self) -> Index:
        """Number of columns of the widest chunk of a block, in whole panels."""
        if self.s.b.once:  # of a slab of any width
            few = ceil_div(self.groups, maximum(1, minimum(self.groups, self.chunks_wanted)))
            return (minimum(few, self.s.nc // self.s.nr) if self.s.nc else few) * self.s.nr
        return ceil_div(self.groups, self.column_chunks) * (self.s.nr * self.s.b.panels)

    @property
    def first_column(self) -> Index:
        """First column of a chunk of a block."""
        return var("first") * self.s.nr

    @property
    def near(self) -> int:
        """Number of panels of B that are packed together: as many as stay in L2, or a long run of each row."""
        n = MODEL.run_bytes // self.atom_bytes if self.s.b.once else self.s.tiles[2].n
        return max(1, n // self.s.nr)

    @property
    def cuts(self) -> Index:
        """Number of tasks along k that pack B, where all of it is packed first; column sums need all of k in one."""
        return const(1) if self.unshifts else ceil_div(self.k, MODEL.pack_rows)

    @property
    def read_types(self) -> tuple[str, str]:
        """Types of the elements of A and of B that micro-kernels read."""
        return self.s.element_types(self.atom)

    @property
    def acc(self) -> str:
        """Type of the sums that micro-kernels write."""
        return "f32" if self.int4_in_place else self.atom.acc

    @property
    def sweeps(self) -> bool:
        """Whether one call of a micro-kernel covers all columns of a task."""
        return sweeps(self.s, self.atom)

    @property
    def finishes(self) -> bool:
        """Whether sums are kept in scratch until they are complete, for an epilogue that writes C."""
        return self.s.program != "dot" and finishes(self.s, self.atom) and not self.finishes_in_c

    @property
    def finishes_in_c(self) -> bool:
        """Whether sums are kept in C until they are complete, for an epilogue that overwrites them."""
        return bool(self.s.epilogue) and finishes_in_c(self.s, self.atom)

    @property
    def unshifts(self) -> bool:
        """Whether micro-kernels subtract the contribution of a shifted A from sums."""
        return shifts(self.s, self.atom)

    @property
    def int4_in_place(self) -> bool:
        """Whether the micro-kernel dequantizes int4 values of B in place."""
        return self.s.b.layout == "codes" and not self.s.b.packed

    @property
    def groups_of_k(self) -> Index:
        """Number of quantization groups along k."""
        return ceil_div(var("k"), self.s.b.group) if self.s.b.group else const(1)

    @property
    def line(self) -> int:
        """Number of elements of a cache line, at least one vector."""
        return line_of(self.atom)

    @property
    def atom_bytes(self) -> int:
        """Number of bytes of an accumulator."""
        return BY_NAME[self.atom.acc].bytes


def constants(s: Schedule) -> tuple[tuple[str, int], ...]:
    """m, n, k and the strides of dense operands of a static schedule; nothing of another."""
    if s.static is None:
        return ()
    m, n, k = s.static
    a = (("a_m", k), ("a_k", 1)) if s.a.layout == "row" else (("a_m", 1), ("a_k", m))
    b = (("b_k", n), ("b_n", 1)) if s.b.layout == "row" else (("b_k", 1), ("b_n", k))
    return (("m", m), ("n", n), ("k", k), ("c_m", n), ("c_n", 1), *a, *b)
