"""w4a16 transfer: int4 words in global memory to floats in shared memory (see `global_to_shared`).

A thread moves a word at once, eight int4 values of one column, with the scale and the offset of their group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import If, Let, Mac, Move, Scratch
from portmm.ir.thread_nodes import Codes
from portmm.kernels.gpu.loops import unrolled
from portmm.spec.dtype import CODES_KR

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt

_SCALES = {"scale": "scales", "offset": "offsets"}


def registers(turns: int) -> tuple[Stmt, ...]:
    """Registers for words and scales in flight."""
    scales = (Scratch(name, turns, "f32") for name in _SCALES)
    return (Scratch("b_next", turns, "s32"), *scales, Scratch("code", CODES_KR, "f32"), Scratch("number", 1, "f32"))


def fetch(column: Index, group: int, k: Index, end: Index) -> tuple[Stmt, ...]:
    """Load of a word of the tile at k, zeros from `end` on; `group` rows share a scale, or all if it is 0."""
    turn, at = var("turn"), var("b_at")
    number = at // group if group else const(0)
    word = Move(Ptr("b_next", turn), Ptr("b_item", var("b_column") * var("words") + at // CODES_KR))
    scales = [Move(Ptr(to, turn), Ptr(src, var("b_column") * var("groups") + number)) for to, src in _SCALES.items()]
    zeros = tuple(Move(Ptr(to, turn), None) for to in ("b_next", *_SCALES))
    return (Let("b_at", k + var("b_unit")), Let("b_column", column), If(at.lt(end), (word, *scales), zeros))


def put(to: Ptr, rows: int) -> tuple[Stmt, ...]:
    """Stores of the eight weights of a word, `rows` words apart."""
    turn, e, number = var("turn"), var("e"), Ptr("number")
    weight = (Move(number, Ptr("offset", turn)), Mac(number, Ptr("scale", turn), Ptr("code", e)))
    each = (*weight, Move(to + e * rows, number))
    return (Codes(Ptr("code"), Ptr("b_next", turn)), unrolled("e", CODES_KR, *each))
