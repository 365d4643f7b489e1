"""GEMM on tensor cores by mma, whose fragments are in the registers of a warp: from Turing on.

    for each tile BM x BN of C            <- blocks of threads (times slices of k)
      for each BK of k
        shared <- A[BM, BK], B[BN, BK]    (asynchronously, prefetching all stages but one; or through registers)
        for each k of an atom
          fragments <- shared             (of the next step, while those of this one are multiplied)
          sums of a warp += fragments of A x fragments of B
      C <- sums

Of a block's tile each warp has a part. Which elements of fragments and of sums a lane has, the atom says
(`target.fragment`). With `swap` the columns of B are the atom's rows: of few rows of A, fewer are wasted where atoms
have more rows than columns. Tiles in shared memory: `mma_transfer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import lane_column, lane_row
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, Mac, Scratch
from portmm.ir.thread_nodes import Barrier, Clear, CopyWait
from portmm.kernels.gpu.epilogue_store import EpilogueStore, StagedStore, cell_of
from portmm.kernels.gpu.fragments import LaneFragments, WarpFragments, of
from portmm.kernels.gpu.loops import Pipeline, unrolled
from portmm.kernels.gpu.mma_transfer import MmaTile
from portmm.kernels.gpu.product import Product, block_tile, blocks, slice_of_k
from portmm.kernels.gpu.split_k import fixup
from portmm.schedule.gpu_mma import shared_bytes, staging
from portmm.spec.layouts import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.gpu.loops import Copies
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layouts import Views
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


@dataclass(frozen=True, slots=True)
class Work(Product):
    """Fragments of one kernel."""

    def part(self, name: str) -> LaneFragments:
        """Fragments of a warp's rows of an operand."""
        warp, of_a = self.s.tiles[1], name == "a"
        left, right = of(self.atom.a_fragment), of(self.atom.b_fragment)
        fragment = left if of_a != self.s.atom.swap else right.transposed
        kind = WarpFragments if fragment.load else LaneFragments
        return kind(self.tile(MmaTile, name), warp.m if of_a else warp.n, fragment, var(f"{name}_first"))

    @property
    def names(self) -> tuple[str, str]:
        """Names of the left and the right operand of the atom."""
        return ("b", "a") if self.s.atom.swap else ("a", "b")

    @property
    def words(self) -> int:
        """Number of sums of a lane in one atom."""
        return of(self.atom.acc_fragment).elements


def build(s: Schedule, isa: Isa, atom: Atom, views: Views = PLAIN) -> GridKernel:
    """Kernel of a schedule, perhaps of views of A or B: see `Product`."""
    work = Work(s, isa, atom, views=views)
    a, b = work.part("a"), work.part("b")
    sums = s.mr * s.nr
    ahead = 2 if s.a.asynchronous else 1
    tiles = [a.side.shared(), b.side.shared()]
    # Results may need more shared memory than all tiles.
    more = shared_bytes(s) - a.side.bytes * tiles[0].elements
    tiles[1] = replace(tiles[1], elements=more // b.side.bytes)
    body: list[Stmt] = [*tiles, Scratch("acc", sums, atom.acc)]
    body += [Scratch("a_part", a.count * ahead, a.dtype), Scratch("b_part", b.count * ahead, b.dtype)]
    body += [] if s.a.asynchronous else [a.side.registers(), b.side.registers()]
    body += [*coordinates(work, s), Clear("acc", sums)]
    end = var("k_end")
    if s.a.asynchronous:
        body += copied(work, lambda k, stage: (*a.side.copy(k, end, stage), *b.side.copy(k, end, stage)))
    else:
        body += _fetched(work, a, b)
    body += fixup(s, blocks(s), tuple(stored(work)))
    return work.kernel(body)


def warps(s: Schedule, lanes: int, slices: int = 1) -> list[Stmt]:
    """Coordinates of this warp's part of its block's tile; `slices` of them have parts of k of the same sums."""
    warp, number = s.tiles[1], var("warp") // slices
    across = s.block.n // warp.n
    return [
        Let("warp", var("thread") // lanes),
        Let("lane", var("thread") % lanes),
        Let("a_first", number // across * warp.m),
        Let("b_first", number % across * warp.n),
    ]


def coordinates(work: Work, s: Schedule) -> list[Stmt]:
    """Coordinates of a block of a schedule, of a warp and a lane, and the range of k."""
    offsets = (*work.part("a").lane_offsets(), *work.part("b").lane_offsets())
    return [*block_tile(s), *warps(s, work.isa.warp), *offsets, *slice_of_k(s, s.block.k)]


def multiply(work: Work, at: Index) -> tuple[Stmt, ...]:
    """Multiply-adds of the fragments of one step of k, from register buffer `at` of each operand."""
    left, right = (work.part(x) for x in work.names)
    i, j = var("i"), var("j")
    x, y = (Ptr(f"{p.side.name}_part", at * p.count + q * p.words) for p, q in ((left, i), (right, j)))
    mac = Mac(Ptr("acc", (i * right.fragments + j) * work.words), x, y)
    return (unrolled("i", left.fragments, unrolled("j", right.fragments, mac)),)


def load(work: Work, at: Index, stages: tuple[Index, Index], step: Index) -> tuple[Stmt, ...]:
    """Loads of the fragments of a step of k, to register buffer `at` of each operand, from stages of A and of B."""
    loads = (
        x.load(Ptr(f"{name}_part", at * x.count), stage * x.side.size, step)
        for name, stage in zip("ab", stages, strict=True)
        for x in (work.part(name),)
    )
    return tuple(s for one in loads for s in one)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of the copied tile of B of the next step to fragments' type, while a step is multiplied.

    Attributes:
        stages: tiles of B after conversion.
        first: conversion of the first step's.
        part: conversion after the product of a number.
    """

    stages: int
    first: tuple[Stmt, ...]
    part: Callable[[int], tuple[Stmt, ...]]


def copied(work: Work, copies: Copies, conversion: Conversion | None = None) -> list[Stmt]:
    """Main loop with asynchronous copies, and fragments that are loaded one step ahead."""
    step, stage, stages = var("step"), var("stage"), work.s.stages
    steps, pipeline = work.s.block.k // work.atom.k, Pipeline(work.s.block.k, stages)
    of_b = conversion.stages if conversion else stages
    landed = CopyWait(stages - (3 if conversion else 2))
    inner: list[Stmt] = [Let("stage", step % stages)]
    for i in range(steps):
        more = const((i + 1) % 2)
        if i + 1 < steps:
            inner += load(work, more, (stage, step % of_b if conversion else stage), const(i + 1))
        else:
            # All warps have loaded this stage, and the copies of the next one have landed.
            there = ((step + 1) % stages, (step + 1) % of_b)
            inner += [landed, Barrier(), If((step + 1).lt(var("steps")), load(work, more, there, const(0)))]
        inner += pipeline.start(copies, step + (stages - 1)) if i == 0 else ()
        inner += multiply(work, const(i % 2))
        inner += conversion.part(i) if conversion and i + 1 < steps else ()
    some, first = const(0).lt(var("steps")), load(work, const(0), (const(0), const(0)), const(0))
    before = (If(some, conversion.first),) if conversion else ()
    loop = For("step", const(0), var("steps"), const(1), tuple(inner))
    return [*pipeline.ahead(copies), landed, *before, Barrier(), If(some, first), loop]


def _fetched(work: Work, a: LaneFragments, b: LaneFragments) -> list[Stmt]:
    """Main loop with copies through registers."""
    end, unit = var("k_end"), (*load(work, const(0), (var("stage"),) * 2, var("unit")), *multiply(work, const(0)))
    before, body = Pipeline(work.s.block.k, work.s.stages).fetched(
        lambda k: (*a.side.fetch(k, end), *b.side.fetch(k, end)),
        lambda stage: (*a.side.put(stage), *b.side.put(stage)),
        (unrolled("unit", work.s.block.k // work.atom.k, *unit),),
    )
    return [*before, For("step", const(0), var("steps"), const(1), body)]


def stored(work: Work) -> list[Stmt]:
    """Epilogue: stores of the sums of this lane."""
    left, right = (work.part(x) for x in work.names)
    sums, lane = of(work.atom.acc_fragment), var("lane")
    store = (StagedStore if staging(work.s) else EpilogueStore)(work.s, work.isa, work.atom, cell_of(sums, work.s))
    own = (left.first, lane_row(sums, lane)), (right.first, lane_column(sums, lane))
    return [*store.before(), *store.fragments(sums, (left.fragments, right.fragments), own), *store.after()]
