"""Sums over the lanes of several vectors at once, which leave them side by side in one vector.

Owns `summed`. Vectors are added in pairs, halves of both in one: (x0 + x1, x2 + x3, y0 + y1, y2 + y3) of x and y, the
same of two of these, and then of whole blocks of 16 bytes, which is the order of additions of `Reduce`, too. Sixteen
vectors of sixteen lanes take 15 additions and 30 shuffles; one after the other they take 64 of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.lane_nodes import Shuffle
from portmm.ir.nodes import Verb
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.target.atom import Atom

BLOCK = 16
"""Bytes of the parts of a vector inside which shuffles are cheap."""


def summed(atom: Atom, registers: list[str], spare: str) -> tuple[Stmt, ...]:
    """Statements after which lane i of the first register is the sum of the lanes of register i.

    Args:
        atom: the vectors, of a power of two of lanes.
        registers: at most as many as a vector has lanes. All are overwritten.
        spare: a register.
    """
    body: list[Stmt] = []
    left, inner = list(registers), min(atom.n, BLOCK // BY_NAME[atom.acc].bytes)
    for parts, size in ((inner, 1), (atom.n // inner, inner)):
        for level in range(parts.bit_length() - 1):
            if len(registers) <= size:  # one vector, whose parts of `size` lanes are in the order of the registers
                body += _butterfly(atom.n, left[0], spare, size << level)
                continue
            pairs = [(x, (left[i : i + 2] or [x])[-1]) for i, x in enumerate(left)][::2]
            picks = [_every_other(atom.n, parts, size, first) for first in (0, 1)]
            for x, y in pairs:
                body += (Shuffle(spare, x, y, picks[0]), Shuffle(x, x, y, picks[1]), Verb("add", x, spare))
            left = [x for x, _ in pairs]
    return tuple(body)


def _butterfly(lanes: int, x: str, spare: str, apart: int) -> tuple[Stmt, ...]:
    """X plus itself with lanes exchanged that are `apart`."""
    return Shuffle(spare, x, x, tuple(i ^ apart for i in range(lanes))), Verb("add", x, spare)


def _every_other(lanes: int, parts: int, size: int, first: int) -> tuple[int, ...]:
    """Lanes of two vectors: of each run of `parts` parts of `size` lanes every other part of one, then of the other."""
    halves = [(of, part) for of in (0, lanes) for part in range(first, parts, 2)]
    runs = range(0, lanes, parts * size)
    return tuple(of + run + part * size + i for run in runs for of, part in halves for i in range(size))
