"""Weights of four bits: panels of codes, unfolded into panels of numbers.

A panel of codes is, for each group of rows, a row of NR scales and one of NR
offsets, both f32, then the group's units [unit][NR]: words of eight codes of one
column, the first in the lowest bits. A weight is scale * code + offset, one
multiply-add in f32, rounded once more where the panel that it goes to holds a
narrower type. A last unit that k does not fill has codes of zero, and what they
unfold to is not multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.dtype import CODES_KR
from portmm.ir import For, Function, Let, LetPtr, Param, Ptr, Verb, const, var

if TYPE_CHECKING:
    from portmm.ir import Stmt
    from portmm.problem import Family
    from portmm.target import Atom, Isa

BITS = 4


def unfolding(isa: Isa, atom: Atom, kept: Family) -> Function:
    """to[p][j] = the weights of units `first` <= u < `last` of a panel of codes, eight rows each."""
    words = isa.vector("s32", atom.n)
    assert words is not None  # noqa: S101 - or the atom would not serve codes
    nr, u = kept.nr, var("u")
    vectors = range(nr // atom.n)
    # Units of a group, after its scales and offsets.
    long = kept.group // CODES_KR
    group = u // long if long else const(0)
    head = group * ((2 + long) * nr)
    body: list[Stmt] = [
        Let("head", head),
        LetPtr("scales", Ptr("b", var("head")), "f32", readonly=True),
        LetPtr("units", Ptr("b", var("head") + (u - group * long + 2) * nr), "s32", readonly=True),
        LetPtr("rows", Ptr("to", (u - var("first")) * (CODES_KR * nr)), atom.right),
    ]
    for v in vectors:
        body += [
            Verb("load_b", f"s{v}", p=Ptr("scales", const(v * atom.n)), to="f32"),
            Verb("load_b", f"w{v}", p=Ptr("units", const(v * atom.n)), of=words.name, to="s32"),
        ]
    for e in range(CODES_KR):
        for v in vectors:
            body += [
                Verb("load_c", f"x{v}", p=Ptr("scales", const(nr + v * atom.n))),
                Verb("code", f"q{v}", f"w{v}", count=const(BITS * e)),
                Verb("mac", f"x{v}", f"s{v}", f"q{v}"),
                Verb("store", f"x{v}", p=Ptr("rows", const(e * nr + v * atom.n))),
            ]
    params = (Param("first"), Param("last"), Param("b", "s32", readonly=True), Param("to", atom.right))
    loop = For("u", var("first"), var("last"), const(1), tuple(body))
    return Function("unfold", "inner", params, (loop,), f"to[8 units][{nr}] = scale * code + offset")
