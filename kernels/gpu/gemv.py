"""Products with few rows, at the speed at which memory gives B.

    for each BN columns of C              <- blocks of threads (times slices of k)
      for each step of k                  <- shared out among the threads of a block, too
        registers[MR, NR] += A[MR, k] B[k, NR]
      shared <- registers; C <- what threads with the same columns have, added in their order

B passes once, 16 bytes a thread at a time, several of them asked for before the first is needed:
what is on its way must be bandwidth times latency, for 4.8 TB/s and 700 ns over 132
processors 25 KB each. A is read through caches. Two ways, as B lies:

- rows of n side by side: a thread has the NR columns of one vector; neighbours in a warp have the next
  ones, and other rows of k.
- columns of k side by side: neighbours have the next piece of the same NR columns, so that a
  warp reads long runs of each.

A *unit* is an element, or four bytes that one instruction multiplies; a *piece* is what a thread takes of k
at once: the units of a vector along k, or one. Threads are dealt pieces in turn.

Shared memory holds a word for each sum of each thread, also between runs of k, so laid that neither threads that
write nor those that add meet in a bank. Where many threads have the same columns, their
sums are added in two rounds, square roots of their number long. All of it is in a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import GridKernel
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Add, For, If, Let, LetPtr, Move, Scratch
from portmm.ir.thread_nodes import WHOLE, Barrier, Clear, Mac, Shared, Vector
from portmm.kernels.gpu import w4a16_gemv as coded
from portmm.kernels.gpu.epilogue_store import Storing
from portmm.kernels.gpu.simt import arguments, place
from portmm.kernels.gpu.slice_k import Work, a_step, each, of
from portmm.kernels.gpu.summation_runs import in_runs_beside
from portmm.schedule import gpu_gemv
from portmm.spec.dtype import BY_NAME
from portmm.target.summation import RUN

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.isa import Atom, Isa


TOGETHER = 16
"""Sums that are asked for together."""


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """The kernel of a schedule."""
    work = Work(s, isa, atom)
    body: list[Stmt] = [Shared("sums", gpu_gemv.shared_words(s), atom.acc), Scratch("acc", s.mr * s.nr, atom.acc)]
    body += [*_registers(work), *place(s), *_threads(work), *_slice(work), *_addresses(work)]
    body += [Clear("acc", s.mr * s.nr), *_streamed(work), *_added(work)]
    grid = (ceil_div(var("m"), s.block.m) * ceil_div(var("n"), s.block.n) * var("batch"), const(s.split))
    return GridKernel(str(s.name(atom)), isa, atom, arguments(s, sums=s.split > 1), s.threads, grid, tuple(body))


def _registers(work: Work) -> list[Stmt]:
    """What pieces pass through."""
    a, b = work.units
    if work.codes:
        return coded.registers(work)
    held, chunk = work.atom.acc, work.chunk
    found = [Scratch("b_next", work.deep * work.s.nr * work.width, b), Scratch("a_next", chunk, a)]
    return [*found, Scratch("b_part", work.s.nr * chunk, held), Scratch("a_part", chunk, held)]


def _threads(work: Work) -> list[Stmt]:
    """Which columns a thread has, and which share of k."""
    near, far = ("share", "cell_n") if work.along_k else ("cell_n", "share")
    wide = work.shares if work.along_k else work.across
    return [Let(near, var("thread") % wide), Let(far, var("thread") // wide)]


def _slice(work: Work) -> list[Stmt]:
    """The units that a block sums, from `k_0` to `k_end`, and how many pieces of them a thread has."""
    s, hop = work.s, work.hop
    found: list[Stmt] = [Let("units", var("k") // s.kr)]
    if s.split == 1:
        found += [Let("k_0", const(0)), Let("k_end", var("units"))]
    else:
        found += [
            Let("each", ceil_div(ceil_div(var("units"), hop), s.split) * hop),
            Let("k_0", minimum(var("units"), var("slice") * var("each"))),
            Let("k_end", minimum(var("units"), var("k_0") + var("each"))),
        ]
    left = var("k_end") - var("k_0") + (work.shares - var("share")) * work.width - 1
    return [*found, Let("mine", var("k_0") + var("share") * work.width), Let("turns", left // hop)]


def _addresses(work: Work) -> list[Stmt]:
    """Where a thread's first piece of each row of A and of its columns of B lies; past the edge, of the last one."""
    s = work.s
    a, b = work.units
    found: list[Stmt] = [Let("own", var("column_0") + var("cell_n") * s.nr)]
    mine = var("mine") * s.kr
    for i in range(s.mr):
        row = minimum(var("row_0") + i, var("m") - 1) * (const(1) if s.a == "col" else var("a_m"))
        found.append(LetPtr(f"a_{i}", Ptr("a_item", row + mine * a_step(s)), a, readonly=True))
    if work.codes:
        return [*found, *coded.addresses(work)]
    if not work.along_k:
        column = minimum(var("own"), var("n") - s.nr) * (var("b_n") if s.b == "any" else const(1))
        return [*found, LetPtr("b_0", Ptr("b_item", column + mine * var("b_k")), b, readonly=True)]
    for j in range(s.nr):
        column = minimum(var("own") + j, var("n") - 1) * var("b_n")
        found.append(LetPtr(f"b_{j}", Ptr("b_item", column + mine), b, readonly=True))
    return found


def _streamed(work: Work) -> list[Stmt]:
    """All pieces of a thread, several at a time: those that there are are asked for, then multiplied."""
    turn, turns, deep = var("turn"), var("turns"), work.deep
    u = of("u", deep)
    asked, multiplied = _pieces(work, u)
    if deep > 1:
        there = (turn + u).lt(turns)
        asked, multiplied = (If(there, asked),), (If(there, multiplied),)
    steps = (*each("u", deep, *asked), *each("u", deep, *multiplied))
    loop = For("turn", const(0), turns, const(deep), steps)
    pieces = max(1, RUN // (deep * work.width * work.s.kr)) * deep
    count = work.s.mr * work.s.nr
    return list(in_runs_beside(work.atom, count, loop, const(pieces), lambda i: _own(work, i)))


def _pieces(work: Work, u: Index) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """What asks for piece `turn` + u of B, and what multiplies it."""
    if work.codes:
        return coded.pieces(work, u)
    s, at = work.s, (var("turn") + u) * work.hop
    size = BY_NAME[work.units[1]].bytes
    if work.along_k:
        wide = work.width
        loads = [Vector(Ptr("b_next", (u * s.nr + j) * wide), Ptr(f"b_{j}", at), wide * size) for j in range(s.nr)]
    else:
        loads = [Vector(Ptr("b_next", u * s.nr), Ptr("b_0", at * var("b_k")), s.nr * size)]
    return tuple(loads), _multiplied(work, u, at)


def _multiplied(work: Work, u: Index, at: Index) -> tuple[Stmt, ...]:
    """Add the products of one piece."""
    s, chunk, held = work.s, work.chunk, work.atom.acc
    j, f = of("j", s.nr), of("f", chunk)
    e = var("e") if work.width > chunk else const(0)
    b_part = Ptr("b_next", (u * s.nr + j) * work.width + e + f)
    a_part = Ptr("a_next", f)
    size = BY_NAME[work.units[0]].bytes
    body: list[Stmt] = []
    if work.units[1] != held:
        src, b_part = b_part, Ptr("b_part", j * chunk + f)
        body += each("j", s.nr, *each("f", chunk, Move(b_part, src)))
    for i in range(s.mr):
        body.append(Vector(Ptr("a_next"), Ptr(f"a_{i}", (at + e) * a_step(s)), chunk * size))
        if work.units[0] != held:
            src, a_part = Ptr("a_next", f), Ptr("a_part", f)
            body += each("f", chunk, Move(a_part, src))
        mac = Mac(Ptr("acc", const(i * s.nr) + j), a_part, b_part)
        body += each("j", s.nr, *each("f", chunk, mac))
    if work.width == chunk:
        return tuple(body)
    return (For("e", const(0), const(work.width), const(chunk), tuple(body), WHOLE),)


def _added(work: Work) -> list[Stmt]:
    """What all threads have of each output, added and stored."""
    s, x, i = work.s, var("x"), of("i", work.s.mr * work.s.nr)
    put = Move(_own(work, i), Ptr("acc", i))
    found: list[Stmt] = [*each("i", s.mr * s.nr, put), Barrier()]
    run = work.shares // work.parts
    if work.parts > 1:
        x_0 = var("part") * run
        first = (
            Let("part", x // work.outputs),
            Let("output", x % work.outputs),
            *_total(work, var("output"), x_0, run, 1),
            Move(work.spot(var("output"), x_0), Ptr("acc")),
        )
        found += [For("x", var("thread"), const(work.outputs * work.parts), const(s.threads), first), Barrier()]
    storing = Storing(s, work.isa, work.atom, (1, 1))
    count, step = (work.parts, run) if work.parts > 1 else (work.shares, 1)
    last = (
        *_total(work, x, const(0), count, step),
        Let("row", var("row_0") + x // (work.across * s.nr)),
        Let("column", var("column_0") + x % work.across * s.nr + x // work.across % s.nr),
        If(var("row").lt(var("m")), storing.piece(const(0))),
    )
    return [*found, *storing.before(), For("x", var("thread"), const(work.outputs), const(s.threads), last)]


def _own(work: Work, i: Index) -> Ptr:
    """Where a sum of this thread waits."""
    return work.spot(i * work.across + var("cell_n"), var("share"))


def _total(work: Work, output: Index, first: Index, count: int, step: int) -> tuple[Stmt, ...]:
    """The first register = the sum of what some threads have of an output."""
    other = work.spot(output, first + var("y") * step)
    add = For("y", const(1), const(count), const(1), (Add(Ptr("acc"), other),), WHOLE if count <= TOGETHER else 8)
    return (Move(Ptr("acc"), work.spot(output, first)), add)
