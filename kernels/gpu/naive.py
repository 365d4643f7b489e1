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

from typing import TYPE_CHECKING

from portmm.ir.address import offset
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import For, If, LetPtr, Mac, Move, Scratch
from portmm.ir.thread_nodes import Clear
from portmm.kernels.cpu.blocking import run_of
from portmm.kernels.gpu.epilogue_store import EpilogueStore
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.product import Product, block_tile, bottom, depth
from portmm.kernels.gpu.simt import threads
from portmm.kernels.gpu.summation_runs import accumulators, current, in_runs
from portmm.spec.layouts import operand

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel of a schedule."""
    body = accumulators(atom, s.mr * s.nr)
    body += [Scratch("a_part", s.mr, atom.acc), Scratch("b_part", s.nr, atom.acc)]
    body += [*block_tile(s), *threads(s), Clear("acc", s.mr * s.nr)]
    # In full tiles, addresses are contiguous over lanes.
    inside = (var("row_0") + (s.block.m - 1)).lt(bottom(s)) * (var("column_0") + (s.block.n - 1)).lt(var("n"))
    body.append(If(inside, _summed(s, atom, edge=False), _summed(s, atom, edge=True)))
    body += EpilogueStore(s, isa, atom, s.parallel.cell).statements()
    return Product(s, isa, atom).kernel(body)


def _summed(s: Schedule, atom: Atom, *, edge: bool) -> tuple[Stmt, ...]:
    """Loop over k; past the `edge` the last row and the last column are read again."""
    i, j = var("i"), var("j")
    mac = Mac(Ptr(current(atom), i * s.nr + j), Ptr("a_part", i), Ptr("b_part", j))
    a, b = operand("a", s.a.layout), operand("b", s.b.layout)
    steps: tuple[Stmt, ...] = (
        *(Move(Ptr("a_part", const(x)), Ptr(f"a_{x}", offset(a, 0, var("at")))) for x in range(s.mr)),
        *(Move(Ptr("b_part", const(x)), Ptr(f"b_{x}", offset(b, var("at"), 0))) for x in range(s.nr)),
        unrolled("i", s.mr, unrolled("j", s.nr, mac)),
    )
    loop = For("at", const(0), depth(s), const(1), steps, s.block.k)
    return (*_addresses(s, edge=edge), *in_runs(atom, s.mr * s.nr, loop, run_of(depth(s), 1)))


def _addresses(s: Schedule, *, edge: bool) -> list[Stmt]:
    """Addresses of a thread's rows of A and columns of B."""
    a, b = operand("a", s.a.layout), operand("b", s.b.layout)
    addresses: list[Stmt] = []
    for x in range(s.mr):
        at = _at(s.parallel.cell[0], s.block.m // s.mr, x, "row_0", "cell_m")
        at = minimum(at, bottom(s) - 1) if edge else at
        addresses.append(LetPtr(f"a_{x}", Ptr("a_item", offset(a, at, 0)), s.types[0], readonly=True))
    for x in range(s.nr):
        at = _at(s.parallel.cell[1], s.block.n // s.nr, x, "column_0", "cell_n")
        at = minimum(at, var("n") - 1) if edge else at
        addresses.append(LetPtr(f"b_{x}", Ptr("b_item", offset(b, 0, at)), s.types[1], readonly=True))
    return addresses


def _at(tile: int, across: int, x: int, first: str, tiles: str) -> Index:
    return var(first) + (x // tile * (across * tile) + x % tile) + var(tiles) * tile
