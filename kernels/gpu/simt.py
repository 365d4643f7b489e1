"""SIMT GEMM: each thread has a tile of C in registers, operands are in shared memory.

    for each tile BM x BN of C            <- blocks of threads (times slices of k)
      for each BK of k                    <- for floats, nested in a loop over runs of k
        shared <- A[BM, BK], B[BK, BN]    (the next tiles, while these are multiplied)
        for k of BK
          registers[MR, NR] += A[MR] B[NR]
      C <- registers

A thread's rows are groups of `cell[0]` neighbours that are BM / (MR / cell[0]) apart, and
its columns likewise: a warp then reads neighbouring words of shared memory, four at once.
Coordinates of blocks: `product`. Where k is split, the last block of a tile adds
the sums of the others, or each slice stores its sums in scratch, in rows of n, and another
kernel adds them (`split_k`): the order of summation, and the result, are always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, maximum, var
from portmm.ir.nodes import For, Let, Mac, Scratch
from portmm.ir.thread_nodes import Clear, Shared, Vector
from portmm.kernels.cpu.blocking import run_of
from portmm.kernels.gpu.epilogue_store import EpilogueStore
from portmm.kernels.gpu.global_to_shared import Transfer
from portmm.kernels.gpu.loops import Pipeline, unrolled
from portmm.kernels.gpu.product import Product, block_tile, blocks, slice_of_k
from portmm.kernels.gpu.split_k import fixup
from portmm.kernels.gpu.summation_runs import accumulators, current, in_runs, in_runs_shared
from portmm.schedule.gpu_simt import sums_in_shared
from portmm.spec.dtype import BY_NAME
from portmm.spec.layouts import PLAIN

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layouts import Views
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


@dataclass(frozen=True, slots=True)
class Work(Product):
    """Tiles of one kernel."""

    def transfer(self, name: str) -> Transfer:
        """Global-to-shared transfer of an operand."""
        group = self.s.b.group if name == "b" and self.s.b.layout == "codes" else -1
        return self.tile(Transfer, name, self.atom.acc, self.atom.k_pack, group)


def build(s: Schedule, isa: Isa, atom: Atom, views: Views = PLAIN) -> GridKernel:
    """Kernel of a schedule, perhaps of views of A or B: see `Product`."""
    work = Work(s, isa, atom, views=views)
    a, b = work.transfer("a"), work.transfer("b")
    sums, acc = s.mr * s.nr, atom.acc
    body: list[Stmt] = [a.shared(), b.shared(), *_sums(s, atom)]
    body += [Scratch("a_part", s.mr, acc), Scratch("b_part", s.nr, acc), *a.registers(), *b.registers()]
    body += [*block_tile(s), *threads(s), *slice_of_k(s, s.block.k * atom.k_pack), Clear("acc", sums)]
    body += _main_loop(work, a, b)
    body += fixup(s, blocks(s), EpilogueStore(s, isa, atom, s.parallel.cell).statements())
    return work.kernel(body)


def threads(s: Schedule) -> list[Stmt]:
    """Coordinates of a thread in the tile: `cell_m`, `cell_n` count groups of rows and columns.

    A warp is a rectangle of threads, of the shape of its tile, so that it reads few words of A and of B.
    """
    warp = s.tiles[1]
    down, across = warp.m // s.mr, warp.n // s.nr
    one = down * across == s.threads
    lane, number, warps = var("thread") if one else var("lane"), const(0) if one else var("warp"), s.block.n // warp.n
    of_m, of_n = (lane // across, lane % across) if down > 1 else (const(0), lane)
    return [
        Let("warp", var("thread") // (down * across)),
        Let("lane", var("thread") % (down * across)),
        Let("cell_m", number // warps * down + of_m),
        Let("cell_n", (number % warps * across if warps > 1 else const(0)) + of_n),
    ]


def _main_loop(work: Work, a: Transfer, b: Transfer) -> list[Stmt]:
    """Loop over tiles of k, which are copied asynchronously, or through registers."""
    pipeline = Pipeline(work.s.block.k * work.atom.k_pack, work.s.stages)
    end, multiply = var("k_end"), _multiply(work, a, b)
    if work.s.a.asynchronous:
        before, body = pipeline.copied(lambda k, at: (*a.copy(k, end, at), *b.copy(k, end, at)), multiply)
    else:
        before, body = pipeline.fetched(
            lambda k: (*a.fetch(k, end), *b.fetch(k, end)), lambda at: (*a.put(at), *b.put(at)), multiply
        )
    return [*before, *_over_k(work, body)]


def _over_k(work: Work, body: tuple[Stmt, ...]) -> list[Stmt]:
    """Loop over tiles of k, nested in one over runs, which are of whole tiles."""
    s, loop = work.s, For("step", const(0), var("steps"), const(1), body)
    run = maximum(1, run_of(var("k_end") - var("k_0"), 1) // s.block.k)
    if sums_in_shared(s):
        own = Ptr("totals", var("i") * s.threads + var("thread"))
        return list(in_runs_shared(work.atom, s.mr * s.nr, loop, run, lambda _: own))
    return list(in_runs(work.atom, s.mr * s.nr, loop, run))


def _sums(s: Schedule, atom: Atom) -> list[Stmt]:
    """Memory of a thread's sums of a run of k, and of all earlier runs."""
    count = s.mr * s.nr
    if sums_in_shared(s):
        return [Shared("totals", count * s.threads, atom.acc), Scratch("acc", count, atom.acc)]
    return accumulators(atom, count)


def _multiply(work: Work, a: Transfer, b: Transfer) -> tuple[Stmt, ...]:
    """Multiply-adds of a stage of shared memory."""
    s = work.s
    stage = const(0) if s.stages == 1 else var("stage")
    parts = [_part(a, s.mr, s.parallel.cell[0], stage), _part(b, s.nr, s.parallel.cell[1], stage)]
    i, j = var("i"), var("j")
    mac = Mac(Ptr("acc" if sums_in_shared(s) else current(work.atom), i * s.nr + j), Ptr("a_part", i), Ptr("b_part", j))
    columns = unrolled("j", s.nr, mac)
    macs = unrolled("i", s.mr, columns)
    return (unrolled("unit", s.block.k, *parts, macs),)


def _part(x: Transfer, count: int, cell: int, stage: Index) -> Stmt:
    """Loads of a thread's rows, or columns, of one unit of k."""
    across, g, unit = x.rows // count, var("g"), var("unit")
    row = var("cell_m" if x.name == "a" else "cell_n") * cell + g * (across * cell)
    src = Ptr(f"{x.name}_tile", stage * x.size + unit * x.rows + (row ^ x.swizzle(unit)))
    load = Vector(Ptr(f"{x.name}_part", g * cell), src, BY_NAME[x.storage].bytes * cell)
    return unrolled("g", count // cell, load)
