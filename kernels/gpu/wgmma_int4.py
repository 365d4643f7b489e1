"""w4a16 GEMM on Hopper's tensor cores: int4 values become fragments in registers, rows of A are in shared memory.

    persistent blocks compute one tile of C after the other             <- processors
      producer warpgroup:                                    consumer warpgroups, up to four:
        for each tile, for each BK of k                        for each tile
          one thread: A[BM, BK], words B[BN, BK / 8] (TMA)       for each BK of k, or each second, third, fourth
          others: scales and offsets, one by one (cp.async)        wait until a stage is full
                                                                   for each 32 of k
                                                                     read the lane's words of the next 32
                                                                     fragments = scale * q + offset
                                                                     sums[64, BM] += fragments A, asynchronously
                                                                     wait for the multiplication before it
                                                                 C <- sums (wgmma_store)

Pipeline and epilogue are those of `wgmma` with exchanged operands: columns of B are the atom's 64 rows. Only they may
come from registers, and there a lane has two neighbours of each eight of k, of rows g = lane / 4 and g + 8. A word is
eight neighbours, so the four lanes of a row read the same vector of four words, and each takes its two values of each:
`unfold_pairs`. Eight rows of a line's vectors are in different banks, by the copy engine's swizzle.

Fragments of one multiplication are made while those of the one before are multiplied: there are two sets of them. A
warpgroup is often in between, so several may take turns at the steps of one tile; the first adds the sums of all, and
those of the other block of a cluster, which has the other half of k and stores them in the first one's shared memory.
Scales and offsets are rounded to A's type, and a weight once more, as for weights that are stored in that type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, MapOf
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Add, For, If, Let, LetPtr, Move, Scratch
from portmm.ir.thread_nodes import Clear, CopyAsync, Do, Shared, Vector
from portmm.kernels.gpu import parameters, wgmma
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.split_k import fixup
from portmm.kernels.gpu.tma_transfer import TmaTile
from portmm.kernels.gpu.wgmma import ALL_GROUPS, each_tile, released, turn_of, waited
from portmm.schedule.gpu_wgmma import LINE, STRIP, SWIZZLED, columns, far_sums, k_groups, near_sums, spans, strips, sums
from portmm.schedule.schedule import WARPGROUP
from portmm.spec.dtype import BY_NAME, CODES_KR

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

WORDS = 4
"""Words of a vector, of a column."""
UNIT = WORDS * CODES_KR
"""Elements of k of a vector: those of two multiplications."""
FRAGMENTS = 8
"""Registers of a lane for the fragments of two multiplications."""
SETS, AHEAD = 2, 1
"""Sets of fragments, and multiplications in flight while more fragments are made."""
SUMS_BARRIER = 5
"""Barrier of the warpgroups that have sums of the same tile."""
HELPERS = 64
"""Threads of the producer warpgroup that copy scales and offsets."""
FACTORS = ("scales", "offsets")


@dataclass(frozen=True, slots=True)
class Rows(TmaTile):
    """Tile of A: planes of lines of a swizzled row."""

    planes: int = 1

    def load(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """TMA copies of the planes at k to a stage."""
        plane = var("plane")
        to = Ptr("a_tile", (stage * self.planes + plane) * self.size)
        at = (k + plane * self.depth, self.first, var("a_item"))
        return (unrolled("plane", self.planes, Do("tma_load", (to, Ptr("a_map"), Ptr("full", stage), *at))),)


@dataclass(frozen=True, slots=True)
class Words(TmaTile):
    """Tile of the words of B: a line of each column."""

    @property
    def line(self) -> int:
        """Bytes of a line, which are swizzled."""
        return self.depth * self.bytes

    def shared(self) -> Shared:
        """Shared memory array of the tiles."""
        return Shared("b_tile", self.size * self.stages, self.dtype, SWIZZLED)

    def arguments(self) -> list[Argument]:
        """Tensor map of the words, and the scales and offsets of all groups."""
        sizes, box = (var("words"), var("n"), const(1)), (self.depth, self.rows, 1)
        words = MapOf("b", self.dtype, sizes, (var("words"), var("words")), box, self.line)
        factors = (parameters.read(x, "f32") for x in FACTORS)
        return [Argument("b_map", "map", map=words), *factors, *parameters.longs("words", "groups")]

    def place(self) -> list[Stmt]:
        """The weight is the same for all items."""
        return []

    def load(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """TMA copy of the tile at k to a stage."""
        to, at = Ptr("b_tile", stage * self.size), (k // CODES_KR, self.first, const(0))
        return (Do("tma_load", (to, Ptr("b_map"), Ptr("full", stage), *at)),)

    def swizzle_of(self, row: Index) -> Index:
        """Bits by which the numbers of the vectors of a row are exchanged."""
        return row * self.line // LINE % (self.line // 16)

    def at(self, stage: Index, row: Index, number: Index) -> Ptr:
        """A vector of a row whose `swizzle_of` is known."""
        return Ptr("b_tile", stage * self.size + row * self.depth + (number ^ var("swizzle")) * WORDS)


@dataclass(frozen=True, slots=True)
class Work(wgmma.Work):
    """Operands and statements of one kernel."""

    @property
    def planes(self) -> int:
        """Lines of a row of A in a stage."""
        return self.s.block.k * BY_NAME[self.s.types[0]].bytes // LINE

    @property
    def operands(self) -> tuple[TmaTile, TmaTile]:
        """Tiles of A and of the words of B."""
        s = self.s
        a = self.tile(TmaTile, "a", 1, False)
        rows = Rows(
            "a", a.dtype, a.layout, a.vector, a.rows, a.depth // self.planes, a.threads, a.stages * self.planes,
            a.first, a.end, 1, False, self.planes,
        )  # fmt: skip
        depth = s.block.k // CODES_KR
        words = Words("b", "s32", a.layout, WORDS, s.block.n, depth, s.threads, s.stages, var("column_0"), var("n"))
        return rows, words

    @property
    def arrivals(self) -> int:
        """Arrivals that a stage is full after: that of the thread that counts bytes, and those of copies."""
        return 1 + HELPERS

    @property
    def factor_size(self) -> int:
        """Scales of a stage."""
        return self.s.block.n * spans(self.s)

    def factors(self) -> tuple[Stmt, ...]:
        """Shared memory of scales and offsets, of each span of k those of all columns; and of sums of others."""
        s = self.s
        sizes = {f"{x}_tile": self.factor_size * s.stages for x in FACTORS}
        sizes |= {"near_sums": near_sums(s), "far_sums": far_sums(s)}
        return tuple(Shared(name, size, "f32") for name, size in sizes.items() if size)

    @property
    def readers(self) -> int:
        """Warpgroups that multiply the same stage."""
        return self.s.parallel.warpgroups // k_groups(self.s)

    @property
    def slices(self) -> int:
        """Slices of k that the blocks of a cluster have."""
        return self.s.parallel.cluster

    # -- the producer warpgroup --------------------------------------------------

    def producer(self) -> tuple[Stmt, ...]:
        """Statements of the threads that start copies."""
        s, (a, b) = self.s, self.operands
        own, first = var("thread") - s.parallel.warpgroups * WARPGROUP, const(32)
        stage = var("stage")
        # A barrier's first phase counts as preceded by one that is complete.
        empty = (*turn_of(s), Do("mbarrier_wait", (Ptr("empty", stage), (var("turn") // s.stages + 1) % 2)))
        k = (var("step_0") + var("step")) * s.block.k
        landing = a.size * a.bytes * self.planes + b.size * b.bytes
        expect = Do("mbarrier_expect", (Ptr("full", stage), const(landing)))
        loop = For("step", const(0), var("steps"), const(1), (*empty, expect, *a.load(k, stage), *b.load(k, stage)))
        tiles = each_tile(s, (*a.place(), loop), mine=False)
        copied = (*empty, *self._copies(k, stage), Do("mbarrier_arrive_copied", (Ptr("full", stage),)))
        helped = each_tile(s, (*self._columns(), For("step", const(0), var("steps"), const(1), copied)), mine=False)
        helpers = (Let("helper", own - first), If(var("helper").lt(HELPERS), helped))
        met = (Do("cluster_sync"),) if self.slices > 1 else ()
        return (If(own.lt(first), (If(own.eq(0), tiles),), helpers), *met)

    def _columns(self) -> tuple[Stmt, ...]:
        """Addresses of the scales and offsets of a thread's columns."""
        stmts: list[Stmt] = []
        for i in range(self.s.block.n // HELPERS):
            column = minimum(var("column_0") + i * HELPERS + var("helper"), var("n") - 1)
            stmts += [LetPtr(f"{x}_{i}", Ptr(x, column * var("groups")), "f32", readonly=True) for x in FACTORS]
        return tuple(stmts)

    def _copies(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """Copies of this thread's scales and offsets of the step at k."""
        s, count = self.s, spans(self.s)
        stmts: list[Stmt] = []
        for span in range(count):
            at = k + span * (s.block.k // count)
            stmts.append(Let(f"group_{span}", minimum(at // s.b.group, var("groups") - 1) if s.b.group else const(0)))
            for i in range(s.block.n // HELPERS):
                to = stage * self.factor_size + span * s.block.n + i * HELPERS + var("helper")
                stmts += [
                    CopyAsync(Ptr(f"{x}_tile", to), Ptr(f"{x}_{i}", var(f"group_{span}")), 4, const(1)) for x in FACTORS
                ]
        return tuple(stmts)

    # -- consumers -----------------------------------------------------------------

    def consumer(self) -> tuple[Stmt, ...]:
        """Statements of warpgroups that multiply."""
        s, epilogue, (a, _) = self.s, self.epilogue, self.operands
        turns = k_groups(s)
        mine = var("group") if turns > 1 else const(0)
        first = const(0) if turns > 1 else var("group") * (strips(s) * STRIP)
        step, units = var("step"), s.block.k // UNIT
        body: list[Stmt] = [*turn_of(s)]
        for unit in range(units):
            body += self._unit(unit, units)
            if unit == AHEAD:
                before = released(s, (var("turn") - turns) % s.stages)
                body.append(If((mine + (turns - 1)).lt(step) if turns > 1 else const(0).lt(step), before))
        loop = For("step", mine, var("steps"), const(turns), tuple(body))
        begun: tuple[Stmt, ...] = self._opened(var("number") * var("steps") + mine)
        last = (var("number") + 1) * var("steps") - 1
        ended: tuple[Stmt, ...] = released(s, last % s.stages)
        if turns > 1:
            there = mine.lt(var("steps"))
            last -= (var("steps") - 1 - mine) % turns
            begun = (Clear("acc", sums(s)), If(there, begun))
            ended = (If(there, released(s, last % s.stages)),)
        tiles = ceil_div(var("m"), s.block.m) * ceil_div(var("n"), s.block.n) * var("batch")
        stored = fixup(s, tiles, epilogue.statements(first), self.readers * WARPGROUP, ALL_GROUPS)
        finished = self._added(self._joined(stored))
        each = each_tile(s, (*begun, loop, *waited(self, "acc"), *ended, *finished), mine=True)
        return (*self._registers(first), a.describe(const(0)), *epilogue.before(), *each, *epilogue.after())

    def _opened(self, turn: Index) -> tuple[Stmt, ...]:
        """Wait for a stage, and the loads with which its multiplications begin."""
        s = self.s
        return (
            Let("next", turn),
            Let("next_stage", var("next") % s.stages),
            Do("mbarrier_wait", (Ptr("full", var("next_stage")), var("next") // s.stages % 2)),
            *self._words(var("next_stage"), 0),
            *self._factors(var("next_stage"), 0),
        )

    def _added(self, stored: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Sum of the warpgroups of a tile by the first one, and `stored`, which only that one runs."""
        turns, count, i, other = k_groups(self.s), sums(self.s), var("i"), var("other")
        if turns == 1:
            return stored

        def place(group: Index) -> Ptr:
            return Ptr("near_sums", (group * count + i) * WARPGROUP + var("thread") % WARPGROUP)

        leave = unrolled("i", count, Move(place(var("group") - 1), Ptr("acc", i)))
        add = unrolled("other", turns - 1, unrolled("i", count, Add(Ptr("acc", i), place(other))))
        met = Do("block_barrier_sync", (const(SUMS_BARRIER), const(turns * WARPGROUP)))
        # Sums of the next tile are left when these have been read.
        again = (met,) if self.s.parallel.persistent else ()
        return (
            If(const(0).lt(var("group")), (leave,)),
            met,
            If(var("group").eq(0), (add, *(() if self.slices > 1 else stored))),
            *(stored if self.slices > 1 else ()),
            *again,
        )

    def _joined(self, stored: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Sum of the slices of a cluster by its first block, and `stored`, which only that block runs."""
        if self.slices == 1:
            return stored
        count, i, other = sums(self.s), var("i"), var("other")
        of_block = self.readers * WARPGROUP

        def place(slice_: Index) -> Ptr:
            return Ptr("far_sums", (slice_ * count + i) * of_block + var("thread"))

        send = unrolled("i", count, Do("store_far_f32", (place(var("rank") - 1), Ptr("acc", i), const(0))))
        add = unrolled("other", self.slices - 1, unrolled("i", count, Add(Ptr("acc", i), place(other))))
        whole = k_groups(self.s) == 1
        one = const(1) if whole else var("group").eq(0)
        return (
            If(const(0).lt(var("rank")) if whole else const(0).lt(var("rank")) * one, (send,)),
            Do("cluster_sync"),
            If(var("rank").eq(0) if whole else var("rank").eq(0) * one, (add, *stored)),
        )

    def _registers(self, first: Index) -> tuple[Stmt, ...]:
        """Registers of a consumer, and its rows of the tile of words."""
        count, t = strips(self.s), var("lane") % 4
        return (
            Scratch("acc", sums(self.s), self.atom.acc),
            Scratch("words_part", 2 * count * 2 * WORDS, "s32"),
            Scratch("b_part", SETS * count * FRAGMENTS, "b32"),
            Scratch("factors_part", count * 4, "b32"),
            Let("own_row", first + var("warp") * 16 + var("lane") // 4),
            Let("swizzle", self.operands[1].swizzle_of(var("lane") // 4)),  # type: ignore[attr-defined]
            Let("selector", (t % 2) * (0x7362 - 0x5140) + 0x5140),
            Let("shift", t // 2 * 4),
        )

    def _rows(self, strip: int, half: int) -> Index:
        return var("own_row") + (strip * STRIP + half * 8)

    def _words(self, stage: Index, unit: int) -> tuple[Stmt, ...]:
        """Loads of this lane's words of 32 elements of k."""
        _, b = self.operands
        assert isinstance(b, Words)  # noqa: S101 - that is what it is
        to = unit % 2 * strips(self.s)
        return tuple(
            Vector(
                Ptr("words_part", const(((to + strip) * 2 + half) * WORDS)),
                b.at(stage, self._rows(strip, half), const(unit)), 16,
            )
            for strip in range(strips(self.s)) for half in (0, 1)
        )  # fmt: skip

    def _factors(self, stage: Index, unit: int) -> tuple[Stmt, ...]:
        """Scales and offsets of this lane's columns, where a span begins."""
        s = self.s
        each = s.block.k // spans(s)
        if unit * UNIT % each:
            return ()
        base = stage * self.factor_size + unit * UNIT // each * s.block.n
        name = f"code_factors_{self.atom.a}"
        return tuple(
            Do(
                name,
                (
                    Ptr("factors_part", const((strip * 2 + half) * 2)),
                    *(Ptr(f"{x}_tile", base + self._rows(strip, half)) for x in FACTORS),
                ),
            )
            for strip in range(strips(s))
            for half in (0, 1)
        )

    def _unit(self, unit: int, units: int) -> list[Stmt]:
        """Multiply-adds of 32 elements of k, started, and a wait for those some units before.

        What the next unit begins with is loaded before, also that of the next step.
        """
        s, count, stage = self.s, strips(self.s), var("stage")
        which = unit % SETS * count
        more: tuple[Stmt, ...] = ()
        fragments: list[Stmt] = []
        for strip in range(count):
            operands = (
                Ptr("b_part", const((which + strip) * FRAGMENTS)),
                Ptr("words_part", const((unit % 2 * count + strip) * 2 * WORDS)),
                Ptr("factors_part", const(strip * 4)), var("selector"), var("shift"),
            )  # fmt: skip
            fragments.append(Do(f"unfold_pairs_{self.atom.a}", operands))
        if unit + 1 < units:
            body = [*self._words(stage, unit + 1), *fragments, *self._factors(stage, unit + 1)]
        else:
            turns = k_groups(s)
            more = self._opened(var("turn") + turns)
            body = [*fragments, If((var("step") + turns).lt(var("steps")), more)]
        return [
            *body, Do("wgmma_fence"), *self._multiplied(unit, which), Do("wgmma_commit"), Do(f"wgmma_wait_{AHEAD}"),
        ]  # fmt: skip

    def _multiplied(self, unit: int, which: int) -> list[Stmt]:
        """Multiply-adds of a set of fragments."""
        s, a = self.s, self.operands[0]
        name = f"wgmma_rs_m64n{columns(s)}k16_{self.atom.a}_k"
        of_line = LINE // (16 * BY_NAME[s.types[0]].bytes)
        calls: list[Stmt] = []
        for strip in range(strips(s)):
            for half in (0, 1):
                number = 2 * unit + half
                matrix = a.matrix(var("stage") * self.planes + number // of_line, const(0), const(number % of_line))
                fragment = Ptr("b_part", const((which + strip) * FRAGMENTS + half * 4))
                # The first product overwrites sums, unless they have been cleared.
                keep = const(1) if number or k_groups(s) > 1 else const(0).lt(var("step"))
                sums_of = Ptr("acc", const(strip * columns(s) * STRIP // WARPGROUP))
                calls.append(Do(name, (sums_of, fragment, matrix, keep)))
        return calls


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel of a schedule."""
    work = Work(s, isa, atom)
    return wgmma.assembled(work, work.producer(), work.consumer())
