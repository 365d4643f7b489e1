"""w4a16 GEMV: int4 weights in the loops of `gemv`.

A thread takes the int4 values q of 16 bytes of one column at once, 32 neighbours along k, all in one group. Over a
group the sum of (scale * q + offset) * A is scale * sum of q * A + offset * sum of A: q is converted to
floats in registers, and multiplied without its scale; the scales of a piece are loaded together with its
words. Past the last k, q is zero in memory, and A is replaced by zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.address import offset
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import Add, LetPtr, Mac, Move, Scratch
from portmm.ir.thread_nodes import Clear, Codes, Vector
from portmm.kernels.gpu.loops import or_zeros
from portmm.kernels.gpu.slice_k import each, of
from portmm.spec.dtype import BY_NAME, CODES_KR

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.gpu.slice_k import Work


def registers(work: Work) -> list[Stmt]:
    """Registers for pieces."""
    s, many = work.s, work.depth * work.s.nr
    floats = {"scale": many, "offset": many, "b_part": s.nr * CODES_KR, "a_part": CODES_KR}
    floats |= {"inner": s.mr * s.nr, "total": s.mr}
    words = Scratch("b_next", many * (work.width // CODES_KR), "s32")
    return [words, Scratch("a_next", CODES_KR, s.types[0]), *(Scratch(x, count, "f32") for x, count in floats.items())]


def addresses(work: Work) -> list[Stmt]:
    """Addresses of a thread's first piece of each of its columns, and of the columns' scales and offsets."""
    stmts: list[Stmt] = []
    for j in range(work.s.nr):
        column = minimum(var("own") + j, var("n") - 1)
        words = Ptr("b_item", column * var("words") + var("mine") // CODES_KR)
        stmts.append(LetPtr(f"b_{j}", words, "s32", readonly=True))
        stmts += [
            LetPtr(f"{x}_{j}", Ptr(x, column * var("groups")), "f32", readonly=True) for x in ("scales", "offsets")
        ]
    return stmts


def pieces(work: Work, u: Index) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """Statements that load piece `turn` + u of B, and those that multiply it."""
    s, words = work.s, work.width // CODES_KR
    at = (var("turn") + u) * work.hop
    group = (var("mine") + at) // s.b.group if s.b.group else const(0)
    loads: list[Stmt] = []
    for j in range(s.nr):
        loads.append(
            Vector(
                Ptr("b_next", (u * s.nr + j) * words),
                Ptr(f"b_{j}", (var("turn") + u) * (work.hop // CODES_KR)),
                words * 4,
            )
        )
        loads.append(Move(Ptr("scale", u * s.nr + j), Ptr(f"scales_{j}", group)))
        loads.append(Move(Ptr("offset", u * s.nr + j), Ptr(f"offsets_{j}", group)))
    q = of("q", words)
    summed = each("q", words, *_word(work, (u * s.nr) * words + q, at + q * CODES_KR))
    return tuple(loads), (Clear("inner", s.mr * s.nr), Clear("total", s.mr), *summed, *_scaled(work, u))


def _word(work: Work, first: Index, at: Index) -> tuple[Stmt, ...]:
    """Multiply-adds of one word of each column."""
    s, f, j = work.s, var("f"), of("j", work.s.nr)
    body: list[Stmt] = list(
        each("j", s.nr, Codes(Ptr("b_part", j * CODES_KR), Ptr("b_next", first + j * (work.width // CODES_KR))))
    )
    size, chunk = BY_NAME[s.types[0]].bytes, work.chunk
    h = of("h", CODES_KR // chunk) * chunk
    for i in range(s.mr):
        there = (var("mine") + at + h).lt(var("k_end"))
        src = Ptr(f"a_{i}", offset(work.operands[0], 0, at + h))
        body += each("h", CODES_KR // chunk, or_zeros(there, Ptr("a_next", h), src, chunk, size))
        body += each(
            "f", CODES_KR, Move(Ptr("a_part", f), Ptr("a_next", f)), Add(Ptr("total", const(i)), Ptr("a_part", f))
        )
        mac = Mac(Ptr("inner", const(i * s.nr) + j), Ptr("a_part", f), Ptr("b_part", j * CODES_KR + f))
        body += each("j", s.nr, *each("f", CODES_KR, mac))
    return tuple(body)


def _scaled(work: Work, u: Index) -> tuple[Stmt, ...]:
    """Scaled addition of a piece's sums."""
    s, i, j = work.s, of("i", work.s.mr), of("j", work.s.nr)
    to = Ptr("acc", i * s.nr + j)
    macs = (
        Mac(to, Ptr("scale", u * s.nr + j), Ptr("inner", i * s.nr + j)),
        Mac(to, Ptr("offset", u * s.nr + j), Ptr("total", i)),
    )
    return each("i", s.mr, *each("j", s.nr, *macs))
