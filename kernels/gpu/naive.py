"""Naive GEMM: threads read A and B from global memory, without shared memory.

    for each tile BM x BN of C            <- blocks of threads
      for each k
        registers[MR, NR] += A[MR, k] B[k, NR]
      C <- registers

Threads share only caches, and do not synchronize: the program
for small products, where a few steps of k are over before shared memory is filled; and for
CPUs under OpenCL, where neighbouring threads are lanes of a vector, a barrier cuts the loop over
them in two, and registers that live across it go through memory. A thread's columns are
as far apart as there are threads across, so that lanes read neighbours of a row of B; all lanes
of a vector have the same rows, so that A is broadcast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.address import offset
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import For, If, Let, LetPtr, Mac, Move, Scratch
from portmm.ir.thread_nodes import Clear
from portmm.kernels.cpu.blocking import run_of
from portmm.kernels.gpu.epilogue_store import EpilogueStore
from portmm.kernels.gpu.loops import or_zeros, unrolled
from portmm.kernels.gpu.product import OperandTile, Product, block_tile, bottom, depth
from portmm.kernels.gpu.simt import threads
from portmm.kernels.gpu.summation_runs import accumulators, current, in_runs
from portmm.spec.layouts import PLAIN, operand

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layouts import Views
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(s: Schedule, isa: Isa, atom: Atom, views: Views = PLAIN) -> GridKernel:
    """Kernel of a schedule, perhaps of views of A or B: see `Product`."""
    work = Product(s, isa, atom, views=views)
    body = accumulators(atom, s.mr * s.nr)
    body += [Scratch("a_part", s.mr, atom.acc), Scratch("b_part", s.nr, atom.acc)]
    body += [*block_tile(s), *threads(s), Clear("acc", s.mr * s.nr)]
    # In full tiles, addresses are contiguous over lanes.
    inside = (var("row_0") + (s.block.m - 1)).lt(bottom(s)) * (var("column_0") + (s.block.n - 1)).lt(var("n"))
    body.append(If(inside, _summed(work, edge=False), _summed(work, edge=True)))
    body += EpilogueStore(s, isa, atom, s.parallel.cell).statements()
    return work.kernel(body)


def _summed(work: Product, *, edge: bool) -> tuple[Stmt, ...]:
    """Loop over k; past the `edge` the last row and the last column are read again."""
    s, atom, i, j = work.s, work.atom, var("i"), var("j")
    mac = Mac(Ptr(current(atom), i * s.nr + j), Ptr("a_part", i), Ptr("b_part", j))
    (before_a, loads_a), (before_b, loads_b) = (_read(work, x, edge=edge) for x in "ab")
    steps = (*loads_a, *loads_b, unrolled("i", s.mr, unrolled("j", s.nr, mac)))
    loop = For("at", const(0), depth(s), const(1), steps, s.block.k)
    return (*before_a, *before_b, *in_runs(atom, s.mr * s.nr, loop, run_of(depth(s), 1)))


def _read(work: Product, name: str, *, edge: bool) -> tuple[list[Stmt], list[Stmt]]:
    """Addresses of a thread's rows of A, or columns of B, and the loads of a step of k."""
    s, side, k = work.s, "ab".index(name), var("at")
    end = (bottom(s), var("n"))[side]
    (count, rows), first = ((s.mr, s.block.m), (s.nr, s.block.n))[side], ("row_0", "column_0")[side]
    layout = operand(name, (s.a, s.b)[side].layout, ("mk", "nk")[side])
    view = replace(work.tile(OperandTile, name), depth=1) if work.views.rows(name) else None
    before: list[Stmt] = []
    loads: list[Stmt] = list(view.of_tile(k)) if view else []
    for x in range(count):
        at = _at(s.parallel.cell[side], rows // count, x, first, ("cell_m", "cell_n")[side])
        at = minimum(at, end - 1) if edge else at
        to = Ptr(f"{name}_part", const(x))
        if view is not None:
            before.append(Let(f"{name}_{x}", at))
            row = var(f"{name}_{x}")
            element = Ptr(f"{name}_item", view.address(row, k, const(0)))
            loads.append(or_zeros(view.inside(row, k, depth(s)), to, element, 1, view.bytes, view.padding))
            continue
        address = Ptr(f"{name}_item", offset(layout, at, 0))
        before.append(LetPtr(f"{name}_{x}", address, s.types[side], readonly=True))
        loads.append(Move(to, Ptr(f"{name}_{x}", offset(layout, 0, k))))
    return before, loads


def _at(tile: int, across: int, x: int, first: str, tiles: str) -> Index:
    return var(first) + (x // tile * (across * tile) + x % tile) + var(tiles) * tile
