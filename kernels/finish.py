"""Sums become elements of C: the last step of a tile, while it is near.

A product whose C is not of the type that sums are kept in computes them in
scratch, in the accumulator's type, over all of k; what is here then makes
elements of C of them, one tile after the other, each just computed.

Integer sums are those of a quantised product. With codes a, b of values
a_scale[i] (a - za[i]) and b_scale[j] (b - zb[j]), and sums A[i] = sum_k a and
B[j] = sum_k b, the exact integer is (Jacob et al., CVPR 2018, section 2.3)

    t = sum_k a b  -  za[i] B[j]  -  zb[j] (A[i] - k za[i])

and C = a_scale[i] (b_scale[j] t) + bias[j], in f32, rounded to C's type. The
caller gives a_zero = -za, a_sum = -(A - k za) and b_zero = zb; B follows each
packed panel. An output that is quantised again has its scale and zero point
folded into a_scale, b_scale and bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.kernels.packing import keep

from portmm.ir import VECTORS, For, Function, If, Let, Move, Param, Ptr, Scratch, Verb, const, var

if TYPE_CHECKING:
    from portmm.ir import Index, Stmt
    from portmm.target import Atom, Isa

ROWS = ("a_scale", "a_zero", "a_sum")
"""What a tile needs of its rows, in the order of the parameters."""
COLUMNS = ("b_scale", "bias", "b_zero", "b_sum")
"""What it needs of its columns; the sums lie behind the panel of B."""
_NEEDED = {
    "scale": ("a_scale", "b_scale"),
    "azero": ("a_zero", "b_sum"),
    "bzero": ("a_sum", "b_zero"),
    "bias": ("bias",),
}


def needed(post: str) -> tuple[str, ...]:
    """The vectors that a way of finishing reads."""
    wanted = {x for word in post.split("+") if word for x in _NEEDED[word]}
    return tuple(x for x in (*ROWS, *COLUMNS) if x in wanted)


def finish(isa: Isa, atom: Atom, acc: str, to: str, post: str) -> Function:
    """C[rows][columns] = the sums, of type `acc`, scaled by `post`, converted to `to`."""
    i, j, columns = var("i"), var("j"), var("columns")
    real = isa.vector("f32", atom.n) if post else None
    at = _Tile(isa, atom, real or atom, post)
    vectors = tuple(Param(x, VECTORS.get(x, atom.acc), readonly=True) for x in needed(post))
    params = (
        Param("rows"),
        Param("columns"),
        Param("sums", acc),
        Param("wide"),
        *vectors,
        Param("c", to),
        Param("c_m"),
    )
    there = Ptr("c", i * var("c_m") + j)
    whole = columns - columns % atom.n
    body: tuple[Stmt, ...] = (
        *at.row(i),
        For("j", const(0), whole, const(atom.n), (*at.value(i, j), at.store(there, ""))),
    )
    if at.out.mask and isa.spelling(at.out, "store_mask", to):
        mask = keep(atom, "m", columns - j, at.of)
        # The scratch and the vectors by columns have whole vectors.
        body += (If(whole.lt(columns), (Let("j", whole), mask, *at.value(i, j), at.store(there, "m"))),)
    elif atom.n > 1:
        body += (If(whole.lt(columns), (Let("j", whole), *at.value(i, j), *at.spread(there, columns - whole, to))),)
    rows = For("i", const(0), var("rows"), const(1), body)
    comment = f"C[rows][columns] = sums, {post.replace('+', ', ')} as {to}"
    return Function("finish", "inner", params, (rows,), comment, of=atom.name)


class _Tile:
    """The statements for a vector of sums."""

    def __init__(self, isa: Isa, atom: Atom, out: Atom, post: str) -> None:
        self.atom, self.out = atom, out
        self.words = set(post.split("+")) - {""}
        whole = isa.vector("s32", atom.n) if post else None
        self.of, self.integers = (out.name if post else ""), (whole.name if whole else "")

    def row(self, i: Index) -> tuple[Stmt, ...]:
        """What a row needs once."""
        found: list[Stmt] = []
        for word, name in (("azero", "a_zero"), ("bzero", "a_sum")):
            if word in self.words:
                found.append(Verb("load_a", name.replace("_", ""), p=Ptr(name, i), of=self.integers))
        if "scale" in self.words:
            found.append(Verb("load_a", "row_scale", p=Ptr("a_scale", i), of=self.of))
        return tuple(found)

    def value(self, i: Index, j: Index) -> tuple[Stmt, ...]:
        """Leave the elements of C in register x."""
        here = Ptr("sums", i * var("wide") + j)
        if not self.words:
            return (Verb("load_c", "x", p=here),)
        found: list[Stmt] = []
        if {"azero", "bzero"} & self.words:
            found.append(Verb("load_c", "t", p=here, of=self.integers))
            for word, row, column in (("azero", "azero", "b_sum"), ("bzero", "asum", "b_zero")):
                if word in self.words:
                    found.append(Verb("load_b", "u", p=Ptr(column, j), of=self.integers))
                    found.append(Verb("mac", "t", row, "u", of=self.integers))
            found.append(Verb("store", "t", p=here, of=self.integers))
        found += [
            Verb("load_c", "y", p=here, of=self.of),
            Verb("load_b", "column_scale", p=Ptr("b_scale", j), of=self.of),
            Verb("zero", "z", of=self.of),
            Verb("mac", "z", "y", "column_scale", of=self.of),
            Verb("load_c", "x", p=Ptr("bias", j), of=self.of)
            if "bias" in self.words
            else Verb("zero", "x", of=self.of),
            Verb("mac", "x", "row_scale", "z", of=self.of),
        ]
        return tuple(found)

    def store(self, there: Ptr, mask: str) -> Stmt:
        return Verb("store_mask" if mask else "store", "x", p=there, mask=mask, of=self.of)

    def spread(self, there: Ptr, count: Index, to: str) -> tuple[Stmt, ...]:
        """A short vector without masks: through memory."""
        e = var("e")
        one = Move(there + e, Ptr("last", e))
        return (
            Scratch("last", self.atom.n, to),
            self.store(Ptr("last"), ""),
            For("e", const(0), count, const(1), (one,)),
        )
