"""Floats of an int4 weight, in lines of k: what matrix units that read shared memory multiply where rows are many.

    for each column of B, for each word of eight values      <- threads
      to <- scale * q + offset, rounded once

A thread reads a word and writes 16 bytes, and neighbours have neighbours, so that a warp reads and writes whole lines.
The weight is written to memory once for a whole product, which takes the time of a few hundred rows of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, var
from portmm.ir.nodes import If, Let, Mac, Move, Scratch
from portmm.ir.thread_nodes import Codes, Vector
from portmm.kernels.gpu.loops import unrolled
from portmm.spec.dtype import BY_NAME, CODES_KR

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

THREADS = 256


def build(isa: Isa, atom: Atom, dtype: str, group: int) -> GridKernel:
    """Kernel that makes floats of a type of 16 bits; `group` rows of k share a scale, or all if it is 0."""
    at, e, number, column, piece = var("at"), var("e"), Ptr("number"), var("column"), var("piece")
    place = column * var("groups") + (at // group if group else const(0))
    weight = (Move(number, Ptr("offset")), Mac(number, Ptr("scale"), Ptr("code", e)), Move(Ptr("made", e), number))
    each = unrolled("e", CODES_KR, If((at + e).lt(var("k")), weight, (Move(Ptr("made", e), None),)))
    of_word = (
        Move(Ptr("next"), Ptr("x", piece)),
        Move(Ptr("scale"), Ptr("scales", place)),
        Move(Ptr("offset"), Ptr("offsets", place)),
        Codes(Ptr("code"), Ptr("next")),
        each,
        Vector(Ptr("to", column * var("line") + at), Ptr("made"), CODES_KR * BY_NAME[dtype].bytes),
    )
    registers = (("next", 1, "s32"), ("code", CODES_KR, "f32"), ("made", CODES_KR, dtype))
    body = (
        *(Scratch(*x) for x in registers),
        *(Scratch(x, 1, "f32") for x in ("scale", "offset", "number")),
        Let("piece", var("block") * THREADS + var("thread")),
        Let("column", piece // var("words")),
        Let("at", piece % var("words") * CODES_KR),
        If(column.lt(var("n")) * at.lt(var("line")), of_word),
    )
    params = (
        *(Argument(x, "int") for x in ("n", "k", "words", "groups")),
        Argument("line", "long"),
        Argument("x", "pointer", "s32", readonly=True, alone=True),
        *(Argument(x, "pointer", "f32", readonly=True, alone=True) for x in ("scales", "offsets")),
        Argument("to", "pointer", dtype),
    )
    grid = (ceil_div(var("n") * var("words"), THREADS), const(1))
    return GridKernel(f"portmm_int4_floats_{dtype}_{group}", isa, atom, params, THREADS, grid, body)
