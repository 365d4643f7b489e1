"""GEMV and skinny GEMM, bound by the bandwidth of reading B.

    for each BN columns of C              <- blocks of threads (times slices of k)
      for each step of k                  <- slice-K: distributed over the threads of a block, too
        registers[MR, NR] += A[MR, k] B[k, NR]
      shared <- registers; C <- sums of threads with the same columns, added in their order

B is read once, 16 bytes a thread at a time, with several loads in flight before the first is used:
bytes in flight must be bandwidth times latency, for 4.8 TB/s and 700 ns over 132
processors 25 KB each. A is read through caches. Two variants, by the layout of B:

- contiguous along n: a thread has the NR columns of one vector; neighbours in a warp have the next
  ones, and other rows of k.
- contiguous along k: neighbours have the next piece of the same NR columns, so that a
  warp reads long runs of each.

A *unit* is an element, or four bytes that one instruction multiplies; a *piece* is the part of k that a thread
takes at once: the units of a vector along k, or one. Pieces are assigned to threads cyclically.

Shared memory holds a word for each sum of each thread, also between runs of k, in a layout where neither threads
that write nor those that add have bank conflicts. Where many threads have the same columns, their
sums are added in two rounds, each of about the square root of their number. The order is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.address import offset
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Add, For, If, Let, LetPtr, Mac, Move, Scratch
from portmm.ir.thread_nodes import WHOLE, Barrier, Clear, Shared, Vector
from portmm.kernels.gpu import w4a16_gemv
from portmm.kernels.gpu.epilogue_store import EpilogueStore
from portmm.kernels.gpu.product import block_tile
from portmm.kernels.gpu.slice_k import Work, each, of
from portmm.kernels.gpu.summation_runs import in_runs_shared
from portmm.schedule import gpu_gemv
from portmm.spec.dtype import BY_NAME
from portmm.target.summation import RUN

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


TOGETHER = 16
"""Number of sums that are loaded together."""


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel of a schedule."""
    work = Work(s, isa, atom)
    body: list[Stmt] = [Shared("sums", gpu_gemv.shared_words(s), atom.acc), Scratch("acc", s.mr * s.nr, atom.acc)]
    body += [*_registers(work), *block_tile(s), *_threads(work), *_slice(work), *_addresses(work)]
    body += [Clear("acc", s.mr * s.nr), *_main_loop(work), *_reduced(work)]
    return work.kernel(body)


def _registers(work: Work) -> list[Stmt]:
    """Registers for pieces."""
    a, b = work.units
    if work.codes:
        return w4a16_gemv.registers(work)
    acc, chunk = work.atom.acc, work.chunk
    registers = [Scratch("b_next", work.depth * work.s.nr * work.width, b), Scratch("a_next", chunk, a)]
    return [*registers, Scratch("b_part", work.s.nr * chunk, acc), Scratch("a_part", chunk, acc)]


def _threads(work: Work) -> list[Stmt]:
    """Columns of a thread, and its index along k."""
    near, far = ("share", "cell_n") if work.along_k else ("cell_n", "share")
    count = work.slice_threads if work.along_k else work.across
    return [Let(near, var("thread") % count), Let(far, var("thread") // count)]


def _slice(work: Work) -> list[Stmt]:
    """Range of units that a block sums, from `k_0` to `k_end`, and the number of a thread's pieces."""
    s, hop = work.s, work.hop
    stmts: list[Stmt] = [Let("units", var("k") // s.atom.kr)]
    if s.parallel.split == 1:
        stmts += [Let("k_0", const(0)), Let("k_end", var("units"))]
    else:
        stmts += [
            Let("each", ceil_div(ceil_div(var("units"), hop), s.parallel.split) * hop),
            Let("k_0", minimum(var("units"), var("slice") * var("each"))),
            Let("k_end", minimum(var("units"), var("k_0") + var("each"))),
        ]
    left = var("k_end") - var("k_0") + (work.slice_threads - var("share")) * work.width - 1
    return [*stmts, Let("mine", var("k_0") + var("share") * work.width), Let("turns", left // hop)]


def _addresses(work: Work) -> list[Stmt]:
    """Addresses of a thread's first piece of each row of A and of its columns of B; past the edge, of the last one."""
    s = work.s
    a, b = work.units
    stmts: list[Stmt] = [Let("own", var("column_0") + var("cell_n") * s.nr)]
    mine = var("mine") * s.atom.kr
    of_a, of_b = work.operands
    for i in range(s.mr):
        row = minimum(var("row_0") + i, var("m") - 1)
        stmts.append(LetPtr(f"a_{i}", Ptr("a_item", offset(of_a, row, mine)), a, readonly=True))
    if work.codes:
        return [*stmts, *w4a16_gemv.addresses(work)]
    if not work.along_k:
        first = Ptr("b_item", offset(of_b, minimum(var("own"), var("n") - s.nr), mine))
        return [*stmts, LetPtr("b_0", first, b, readonly=True)]
    for j in range(s.nr):
        column = minimum(var("own") + j, var("n") - 1)
        stmts.append(LetPtr(f"b_{j}", Ptr("b_item", offset(of_b, column, mine)), b, readonly=True))
    return stmts


def _main_loop(work: Work) -> list[Stmt]:
    """Loop over all pieces of a thread, several at a time: those in bounds are loaded, then multiplied."""
    turn, turns, depth = var("turn"), var("turns"), work.depth
    u = of("u", depth)
    loads, macs = _pieces(work, u)
    if depth > 1:
        there = (turn + u).lt(turns)
        loads, macs = (If(there, loads),), (If(there, macs),)
    steps = (*each("u", depth, *loads), *each("u", depth, *macs))
    loop = For("turn", const(0), turns, const(depth), steps)
    pieces = max(1, RUN // (depth * work.width * work.s.atom.kr)) * depth
    count = work.s.mr * work.s.nr
    return list(in_runs_shared(work.atom, count, loop, const(pieces), lambda i: _own(work, i)))


def _pieces(work: Work, u: Index) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """Statements that load piece `turn` + u of B, and those that multiply it."""
    if work.codes:
        return w4a16_gemv.pieces(work, u)
    s, at = work.s, (var("turn") + u) * work.hop
    size = BY_NAME[work.units[1]].bytes
    if work.along_k:
        n = work.width
        loads = [Vector(Ptr("b_next", (u * s.nr + j) * n), Ptr(f"b_{j}", at), n * size) for j in range(s.nr)]
    else:
        loads = [Vector(Ptr("b_next", u * s.nr), Ptr("b_0", offset(work.operands[1], 0, at)), s.nr * size)]
    return tuple(loads), _multiplied(work, u, at)


def _multiplied(work: Work, u: Index, at: Index) -> tuple[Stmt, ...]:
    """Multiply-adds of one piece."""
    s, chunk, acc = work.s, work.chunk, work.atom.acc
    j, f = of("j", s.nr), of("f", chunk)
    e = var("e") if work.width > chunk else const(0)
    b_part = Ptr("b_next", (u * s.nr + j) * work.width + e + f)
    a_part = Ptr("a_next", f)
    size = BY_NAME[work.units[0]].bytes
    body: list[Stmt] = []
    if work.units[1] != acc:
        src, b_part = b_part, Ptr("b_part", j * chunk + f)
        body += each("j", s.nr, *each("f", chunk, Move(b_part, src)))
    for i in range(s.mr):
        body.append(Vector(Ptr("a_next"), Ptr(f"a_{i}", offset(work.operands[0], 0, at + e)), chunk * size))
        if work.units[0] != acc:
            src, a_part = Ptr("a_next", f), Ptr("a_part", f)
            body += each("f", chunk, Move(a_part, src))
        mac = Mac(Ptr("acc", const(i * s.nr) + j), a_part, b_part)
        body += each("j", s.nr, *each("f", chunk, mac))
    if work.width == chunk:
        return tuple(body)
    return (For("e", const(0), const(work.width), const(chunk), tuple(body), WHOLE),)


def _reduced(work: Work) -> list[Stmt]:
    """Slice-K reduction: the sums of all threads of each output, added and stored."""
    s, x, i = work.s, var("x"), of("i", work.s.mr * work.s.nr)
    store = Move(_own(work, i), Ptr("acc", i))
    stmts: list[Stmt] = [*each("i", s.mr * s.nr, store), Barrier()]
    run = work.slice_threads // work.parts
    if work.parts > 1:
        x_0 = var("part") * run
        first = (
            Let("part", x // work.outputs),
            Let("output", x % work.outputs),
            *_total(work, var("output"), x_0, run, 1),
            Move(work.spot(var("output"), x_0), Ptr("acc")),
        )
        stmts += [For("x", var("thread"), const(work.outputs * work.parts), const(s.threads), first), Barrier()]
    epilogue = EpilogueStore(s, work.isa, work.atom, (1, 1))
    count, step = (work.parts, run) if work.parts > 1 else (work.slice_threads, 1)
    last = (
        *_total(work, x, const(0), count, step),
        Let("row", var("row_0") + x // (work.across * s.nr)),
        Let("column", var("column_0") + x % work.across * s.nr + x // work.across % s.nr),
        If(var("row").lt(var("m")), epilogue.store_vector(const(0))),
    )
    return [*stmts, *epilogue.before(), For("x", var("thread"), const(work.outputs), const(s.threads), last)]


def _own(work: Work, i: Index) -> Ptr:
    """Address in shared memory of a sum of this thread."""
    return work.spot(i * work.across + var("cell_n"), var("share"))


def _total(work: Work, output: Index, first: Index, count: int, step: int) -> tuple[Stmt, ...]:
    """Statements that add the sums of some threads of an output into the first register."""
    other = work.spot(output, first + var("y") * step)
    add = For("y", const(1), const(count), const(1), (Add(Ptr("acc"), other),), WHOLE if count <= TOGETHER else 8)
    return (Move(Ptr("acc"), work.spot(output, first)), add)
