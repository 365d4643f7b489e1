"""GEMM on Hopper's tensor cores: TMA copies, wgmma, and warp specialization.

    persistent blocks compute one tile of C after the other             <- processors
      producer warpgroup, one thread:                      consumer warpgroups, one or two:
        for each tile, for each BK of k                      for each tile
          wait until a stage is empty                          for each BK of k
          full[stage] expects A[BM, BK], B[BN, BK]               wait until a stage is full
          start both copies (TMA)                                sums[64, BN] += A B, asynchronously
                                                                 wait for the multiplication before it
                                                                 its stage is empty
                                                               C <- sums (wgmma_store)

Stages are a ring in shared memory (`tma_transfer`), each with two barriers: `full` counts the bytes that
land, `empty` the warps that have multiplied. A turn, a step of k of any tile, has a number, from which the stage and
the phase of its barriers follow, so the ring goes on from tile to tile.

Two warpgroups either share a block's tile, each with half of its rows, or alternate ("ping-pong"): each has tiles
of its own, and stores one while the other multiplies; barriers `order` keep their loops over k apart. Two blocks
of a cluster, neighbours along m, read the same columns of B: each loads half of them for both (multicast), so a
stage is empty when both have multiplied it. With `swap` the columns of B are the atom's 64 rows, and
rows of A, down to 8, its columns. Where k is split, the last block of a
tile adds the sums of all slices, or another kernel does (`split_k`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Add, For, If, Let, Scratch
from portmm.ir.thread_nodes import Barrier, Clear, Do, Get, Shared
from portmm.kernels.gpu import parameters
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.product import Product, blocks, depth, of_groups, raster
from portmm.kernels.gpu.split_k import fixup, ticket
from portmm.kernels.gpu.tma_transfer import TmaTile
from portmm.kernels.gpu.wgmma_store import WgmmaEpilogue
from portmm.schedule.gpu_wgmma import STRIP, budgets, columns, promoted, sharing, strips
from portmm.schedule.schedule import WARPGROUP
from portmm.spec.layouts import PLAIN

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layouts import Views
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

ALL_GROUPS = 4
"""Barrier of all consumer warpgroups."""


@dataclass(frozen=True, slots=True)
class Work(Product):
    """Operands and epilogue of one kernel."""

    @property
    def operands(self) -> tuple[TmaTile, TmaTile]:
        """Tiles of A and B."""
        rounds = self.atom.rounds
        return self.tile(TmaTile, "a", 1, rounds), self.tile(TmaTile, "b", self.s.parallel.cluster, rounds)

    @property
    def sides(self) -> tuple[TmaTile, TmaTile]:
        """Left and right operand of the atom."""
        a, b = self.operands
        return (b, a) if self.s.atom.swap else (a, b)

    @property
    def epilogue(self) -> WgmmaEpilogue:
        """Epilogue of the sums."""
        return WgmmaEpilogue(self.s, self.isa, self.atom)

    @property
    def arrivals(self) -> int:
        """Arrivals that a stage is full after."""
        return 1

    @property
    def readers(self) -> int:
        """Warpgroups that multiply the same stage."""
        return 1 if self.s.parallel.pingpong else self.s.parallel.warpgroups

    def factors(self) -> tuple[Stmt, ...]:
        """Shared memory for what elements of B are made with."""
        return ()

    @property
    def multiply(self) -> str:
        """Name of the primitive that multiplies."""
        left, right = self.sides
        majors = ("k" if left.along == "k" else "m") + ("k" if right.along == "k" else "n")
        name = self.atom.mac.partition("(")[0]
        return name.replace("<n>", str(columns(self.s))).replace("<majors>", majors)


def build(s: Schedule, isa: Isa, atom: Atom, views: Views = PLAIN) -> GridKernel:
    """Kernel of a schedule, perhaps of windows of a convolution as A: see `TmaTile`."""
    work = Work(s, isa, atom, views=views)
    return assembled(work, _producer(work), _consumer(work))


def assembled(work: Work, producer: tuple[Stmt, ...], consumer: tuple[Stmt, ...]) -> GridKernel:
    """Kernel of the statements of producers and of consumers."""
    s = work.s
    body: list[Stmt] = [*(x.shared() for x in work.operands), *work.epilogue.shared(), *work.factors(), *ticket(s)]
    body += [Shared("full", s.stages, "b64", 8), Shared("empty", s.stages, "b64", 8)]
    body += [Shared("order", 2, "b64", 8)] if s.parallel.pingpong else []
    # Barriers come before all that reads memory: a grid waits for those before it only then.
    body += [*_begin(work), *(of_groups(s) if s.parallel.grouped else ()), *_slice(s), *_tiles(s)]
    down, up = budgets(s)
    one = If(
        var("group").eq(s.parallel.warpgroups), (*_adjusted("down", down), *producer), (*_adjusted("up", up), *consumer)
    )
    body.append(one)
    # The copies from a block of a cluster must land before the other ends.
    body += [Do("cluster_sync")] if sharing(s) > 1 else []
    return GridKernel(
        str(s.name(work.atom)), work.isa, work.atom, _arguments(work), s.threads, _grid(s), tuple(body),
        cluster=s.parallel.cluster,
    )  # fmt: skip


def _arguments(work: Work) -> tuple[Argument, ...]:
    s = work.s
    params = parameters.integers("m", "n", "k", "batch")
    params += [parameters.read("ends", "s32")] if s.parallel.grouped else []
    for x in work.operands:
        params += x.arguments()
    if s.slices:
        return (*params, *parameters.sums(s))
    outputs = parameters.of_results(s)
    if work.epilogue.staged:
        outputs = [work.epilogue.argument(), *(x for x in outputs if x.name not in ("c", "c_m", "c_batch"))]
    return (*params, *parameters.of_fixup(s), *outputs)


def _grid(s: Schedule) -> tuple[Index, Index]:
    if s.parallel.grouped:
        return blocks(s), const(1)
    tiles = ceil_div(var("m"), s.block.m * sharing(s)) * ceil_div(var("n"), s.block.n) * var("batch")
    clusters = minimum(tiles, s.parallel.persistent // s.parallel.cluster) if s.parallel.persistent else tiles
    return clusters * s.parallel.cluster, const(s.parallel.split)


def _begin(work: Work) -> list[Stmt]:
    """Initialization of barriers, and the coordinates of a thread: warpgroup, warp and lane."""
    s, stage = work.s, var("stage")
    # All warps that multiply a stage arrive, at all blocks that loaded it.
    own = WARPGROUP // work.isa.warp
    warps = own * work.readers * sharing(s)
    each = (
        Do("mbarrier_init", (Ptr("full", stage), const(work.arrivals))),
        Do("mbarrier_init", (Ptr("empty", stage), const(warps))),
    )
    first: list[Stmt] = [Do("tma_prefetch", (Ptr(f"{x.name}_map"),)) for x in work.operands]
    first.append(For("stage", const(0), const(s.stages), const(1), each))
    if s.parallel.pingpong:
        first += [Do("mbarrier_init", (Ptr("order", const(i)), const(own))) for i in range(2)]
    first.append(Do("mbarrier_init_fence"))
    sync: list[Stmt] = [Get("rank", "cluster_rank"), Do("cluster_sync")] if s.parallel.cluster > 1 else [Barrier()]
    return [
        If(var("thread").eq(0), tuple(first)),
        *sync,
        # A shuffle tells the compiler that it is the same in all lanes of a warp.
        Get("group", "shuffle_idx_s32", (var("thread") // WARPGROUP, const(0))),
        Let("warp", var("thread") % WARPGROUP // work.isa.warp),
        Let("lane", var("thread") % work.isa.warp),
    ]


def _slice(s: Schedule) -> list[Stmt]:
    """Range of steps of k of this slice, which is never empty."""
    all_steps = ceil_div(depth(s), s.block.k)
    together = s.parallel.cluster // sharing(s)
    count = s.parallel.split * together
    if count == 1:
        return [Let("step_0", const(0)), Let("steps", all_steps)]
    number = var("slice") if together == 1 else var("rank")
    if together > 1 and s.parallel.split > 1:
        number = number + var("slice") * together
    return [
        Let("all_steps", all_steps),
        Let("step_0", number * var("all_steps") // count),
        Let("steps", (number + 1) * var("all_steps") // count - var("step_0")),
    ]


def _adjusted(way: str, registers: int) -> tuple[Stmt, ...]:
    return (Do(f"registers_{way}_{registers}"),) if registers else ()


def _tiles(s: Schedule) -> list[Stmt]:
    """Number of tiles of this block."""
    if s.parallel.grouped:
        return []
    rows = s.block.m * sharing(s)
    stmts: list[Stmt] = [Let("down", ceil_div(var("m"), rows)), Let("across", ceil_div(var("n"), s.block.n))]
    stmts.append(Let("place", var("block") // s.parallel.cluster))
    if s.parallel.persistent:
        tiles, clusters = var("down") * var("across") * var("batch"), s.parallel.persistent // s.parallel.cluster
        stmts.append(Let("tiles", ceil_div(tiles - var("place"), clusters)))
    return stmts


def each_tile(s: Schedule, body: tuple[Stmt, ...], *, mine: bool) -> tuple[Stmt, ...]:
    """Loop over the tiles of this block, or of this warpgroup: `number` counts the block's."""
    rows = s.block.m * sharing(s)
    row_offset = var("rank") * s.block.m if sharing(s) > 1 else const(0)
    if s.parallel.grouped:
        return (Let("number", const(0)), *body)
    if not s.parallel.persistent:
        return (Let("number", const(0)), *raster(s, var("place"), rows, row_offset), *body)
    tile = (
        *raster(s, var("place") + var("number") * (s.parallel.persistent // s.parallel.cluster), rows, row_offset),
        *body,
    )
    apart = mine and s.parallel.pingpong
    begin, step = (var("group"), const(2)) if apart else (const(0), const(1))
    return (For("number", begin, var("tiles"), step, tile),)


def turn_of(s: Schedule) -> tuple[Stmt, ...]:
    """Number of a step of k, of all steps of the block, and its stage."""
    return (Let("turn", var("number") * var("steps") + var("step")), Let("stage", var("turn") % s.stages))


def _producer(work: Work) -> tuple[Stmt, ...]:
    """Statements of the producer thread, which starts TMA copies."""
    s, (a, b) = work.s, work.operands
    step, stage = var("step"), var("stage")
    k = (var("step_0") + step) * s.block.k
    landing = a.size * a.bytes + b.size * b.bytes
    one = (
        *turn_of(s),
        # A barrier's first phase counts as preceded by one that is complete.
        Do("mbarrier_wait", (Ptr("empty", stage), (var("turn") // s.stages + 1) % 2)),
        Do("mbarrier_expect", (Ptr("full", stage), const(landing))),
        *a.load(k, stage),
        *b.load(k, stage),
    )
    loop = For("step", const(0), var("steps"), const(1), one)
    tiles = each_tile(s, (*a.place(), *b.place(), loop), mine=False)
    return (If(var("thread").eq(s.parallel.warpgroups * WARPGROUP), tiles),)


def _consumer(work: Work) -> tuple[Stmt, ...]:
    """Statements of consumer warpgroups, which multiply."""
    s, epilogue = work.s, work.epilogue
    left, right = work.sides
    first = const(0) if s.parallel.pingpong else var("group") * (strips(s) * STRIP)
    sums = strips(s) * columns(s) * STRIP // WARPGROUP
    step = var("step")
    # Numbers of the tiles of this warpgroup, of those of both.
    time = var("number") // 2
    before: list[Stmt] = [*epilogue.ahead(first)]
    if s.parallel.pingpong:
        before.append(Do("mbarrier_wait", (Ptr("order", var("group")), (time + 1 - var("group")) % 2)))
    full = (*turn_of(s), Do("mbarrier_wait", (Ptr("full", var("stage")), var("turn") // s.stages % 2)))
    begun = (*full, Do("wgmma_fence"), *_multiply(work), Do("wgmma_commit"))
    last: tuple[Stmt, ...] = ()
    if promoted(s):
        # A stage's sums are added here, in full precision; another warpgroup multiplies meanwhile.
        add = unrolled("i", sums, Add(Ptr("acc", var("i")), Ptr("part", var("i"))))
        before.append(Clear("acc", sums))
        one = (*begun, *waited(work, "part"), *released(s, var("stage")), add)
    else:
        one = (*begun, Do("wgmma_wait_1"), If(const(0).lt(step), released(s, (var("turn") - 1) % s.stages)))
        release = released(s, ((var("number") + 1) * var("steps") - 1) % s.stages)
        if s.parallel.grouped:
            # Rows past the last group are zero.
            before.append(Clear("acc", sums))
            release = (If(const(0).lt(var("steps")), release),)
        last = (*waited(work, "acc"), *release)
    loop = For("step", const(0), var("steps"), const(1), one)
    after: list[Stmt] = []
    if s.parallel.pingpong:
        after.append(If(var("lane").eq(0), (Do("mbarrier_arrive", (Ptr("order", 1 - var("group")),)),)))
    after += last
    tiles = ceil_div(var("m"), s.block.m) * ceil_div(var("n"), s.block.n) * var("batch")
    stored = fixup(s, tiles, epilogue.statements(first), s.parallel.warpgroups * WARPGROUP, ALL_GROUPS)
    tile = each_tile(s, (*before, loop, *after, *stored), mine=True)
    acc = [Scratch(name, sums, work.atom.acc) for name in ("acc", "part")[: 1 + promoted(s)]]
    setup = (*acc, left.describe(first), right.describe(const(0)))
    return (*setup, *epilogue.before(), *tile, *epilogue.after())


def _multiply(work: Work) -> tuple[Stmt, ...]:
    """Multiply-adds of a stage, started."""
    s, (left, right) = work.s, work.sides
    strip, unit = var("strip") if strips(s) > 1 else const(0), var("unit")
    count = columns(s) * STRIP // WARPGROUP
    # The first product overwrites sums.
    keep = (
        const(1) if s.parallel.grouped and not promoted(s) else const(0).lt(unit if promoted(s) else var("step") + unit)
    )
    x, y = left.matrix(var("stage"), strip, unit), right.matrix(var("stage"), const(0), unit)
    call: Stmt = Do(work.multiply, (Ptr("part" if promoted(s) else "acc", strip * count), x, y, keep))
    if strips(s) > 1:
        call = unrolled("strip", strips(s), call)
    return (unrolled("unit", s.block.k // work.atom.k, call),)


def waited(work: Work, sums: str) -> tuple[Stmt, ...]:
    """Wait for all multiplications: their sums may be read from here on."""
    count = columns(work.s) * STRIP // WARPGROUP
    name = f"wgmma_sums_{columns(work.s)}_{work.atom.acc}"
    return (Do("wgmma_wait_0"), *(Do(name, (Ptr(sums, const(i * count)),)) for i in range(strips(work.s))))


def released(s: Schedule, stage: Index) -> tuple[Stmt, ...]:
    """Arrival of this warp at the `empty` barrier of a stage."""
    if sharing(s) > 1:
        return (If(var("lane").lt(sharing(s)), (Do("mbarrier_arrive_at", (Ptr("empty", stage), var("lane"))),)),)
    return (If(var("lane").eq(0), (Do("mbarrier_arrive", (Ptr("empty", stage),)),)),)
