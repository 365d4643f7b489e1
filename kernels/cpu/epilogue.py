"""Epilogue: sums of a tile become elements of C, while the tile is in cache.

A product whose C is not of the accumulator's type computes sums in scratch, over
all of k; the epilogue then converts them to elements of C, tile by tile, right
after each was computed.

Integer sums are those of a quantised product. With quantized values a, b of
a_scale[i] (a - za[i]) and b_scale[j] (b - zb[j]), and sums A[i] = sum_k a and
B[j] = sum_k b, the exact integer is (Jacob et al., CVPR 2018, section 2.3)

    t = sum_k a b  -  za[i] B[j]  -  zb[j] (A[i] - k za[i])

and C = a_scale[i] (b_scale[j] t) + bias[j], in f32, rounded to C's type. The
caller passes a_zero = -za, a_sum = -(A - k za) and b_zero = zb; B follows each
packed panel. The scale and zero point of a quantised output are
folded into a_scale, b_scale and bias.

Fused expressions take these values from registers, and write C and their other
results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import VECTORS, For, Function, If, Let, Move, Param, Scratch, Verb
from portmm.kernels.cpu.elementwise import Elements, parameters
from portmm.kernels.cpu.packing import keep
from portmm.spec.epilogue import C, acc, parse

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

ROWS = ("a_scale", "a_zero", "a_sum")
"""Vectors by rows of a tile, in the order of the parameters."""
COLUMNS = ("b_scale", "bias", "b_zero", "b_sum")
"""Vectors by columns of a tile; the sums follow the panel of B."""
_NEEDED = {
    "scale": ("a_scale", "b_scale"),
    "azero": ("a_zero", "b_sum"),
    "bzero": ("a_sum", "b_zero"),
    "bias": ("bias",),
}


def needed(post: str) -> tuple[str, ...]:
    """Names of the vectors that the epilogue `post` reads."""
    wanted = {x for word in post.split("+") if word for x in _NEEDED[word]}
    return tuple(x for x in (*ROWS, *COLUMNS) if x in wanted)


def finish(  # noqa: PLR0917 - types of the sums and of the results
    isa: Isa, atom: Atom, acc: str, to: str, post: str, text: str = ""
) -> Function:
    """Function that writes C[rows][columns]: sums of type `acc`, scaled by `post`, in expressions `text`, as `to`."""
    i, j, columns = var("i"), var("j"), var("columns")
    real = isa.vector("f32", atom.n) if post or text else None
    at = (_Fused if text else _Tile)(isa, atom, real or atom, to, post, text)
    vectors = tuple(Param(x, VECTORS.get(x, atom.acc), readonly=True) for x in needed(post))
    params = (
        Param("rows"),
        Param("columns"),
        Param("sums", acc),
        Param("wide"),
        *vectors,
        Param("c", to),
        Param("c_m"),
        *at.params(),
    )
    whole = columns - columns % atom.n
    body: tuple[Stmt, ...] = (*at.row(i), For("j", const(0), whole, const(atom.n), at.vector(i, j)))
    if atom.n > 1:
        # The scratch and the operands by columns have whole vectors.
        body += (If(whole.lt(columns), (Let("j", whole), *at.short(i, j, columns - j))),)
    rows = For("i", const(0), var("rows"), const(1), body)
    comment = f"C[rows][columns] = {'expressions of ' if text else ''}sums, {post.replace('+', ', ')} as {to}"
    return Function("finish", "inner", params, (*at.scratch(), rows), comment, of=atom.name)


class _Tile:
    """Statements for a vector of sums, which are stored to C unchanged or scaled."""

    def __init__(self, isa: Isa, atom: Atom, out: Atom, to: str, post: str, text: str) -> None:  # noqa: ARG002, PLR0917
        self.isa, self.atom, self.out, self.to = isa, atom, out, to
        self.words = set(post.split("+")) - {""}
        whole = isa.vector("s32", atom.n) if post else None
        self.of, self.integers = (out.name if post else ""), (whole.name if whole else "")
        self.there = Ptr("c", var("i") * var("c_m"))

    def params(self) -> tuple[Param, ...]:
        return ()

    def scratch(self) -> tuple[Stmt, ...]:
        return ()

    def row(self, i: Index) -> tuple[Stmt, ...]:
        """Loads that a row needs once."""
        loads: list[Stmt] = []
        for word, name in (("azero", "a_zero"), ("bzero", "a_sum")):
            if word in self.words:
                loads.append(Verb("load_a", name.replace("_", ""), p=Ptr(name, i), of=self.integers))
        if "scale" in self.words:
            loads.append(Verb("load_a", "row_scale", p=Ptr("a_scale", i), of=self.of))
        return tuple(loads)

    def vector(self, i: Index, j: Index) -> tuple[Stmt, ...]:
        """Statements for a whole vector of C."""
        return (*self.value(i, j), Verb("store", "x", p=self.there + j, of=self.of))

    def short(self, i: Index, j: Index, count: Index) -> tuple[Stmt, ...]:
        """Statements for the last `count` columns."""
        if self.out.mask and self.isa.spelling(self.out, "store_mask", self.to):
            store = Verb("store_mask", "x", p=self.there + j, mask="m", of=self.of)
            return (keep(self.atom, "m", count, self.of), *self.value(i, j), store)
        e = var("e")  # a short vector without masks: through memory
        one = Move(self.there + j + e, Ptr("last", e))
        return (
            *self.value(i, j),
            Scratch("last", self.atom.n, self.to),
            Verb("store", "x", p=Ptr("last"), of=self.of),
            For("e", const(0), count, const(1), (one,)),
        )

    def value(self, i: Index, j: Index) -> tuple[Stmt, ...]:
        """Statements that compute elements of C in register x."""
        here = Ptr("sums", i * var("wide") + j)
        if not self.words:
            return (Verb("load_c", "x", p=here, of=self.of),)
        stmts: list[Stmt] = []
        if {"azero", "bzero"} & self.words:
            stmts.append(Verb("load_c", "t", p=here, of=self.integers))
            for word, row, column in (("azero", "azero", "b_sum"), ("bzero", "asum", "b_zero")):
                if word in self.words:
                    stmts.append(Verb("load_b", "u", p=Ptr(column, j), of=self.integers))
                    stmts.append(Verb("mac", "t", row, "u", of=self.integers))
            stmts.append(Verb("store", "t", p=here, of=self.integers))
        stmts += [
            Verb("load_c", "y", p=here, of=self.of),
            Verb("load_b", "column_scale", p=Ptr("b_scale", j), of=self.of),
            Verb("zero", "z", of=self.of),
            Verb("mac", "z", "y", "column_scale", of=self.of),
            Verb("load_c", "x", p=Ptr("bias", j), of=self.of)
            if "bias" in self.words
            else Verb("zero", "x", of=self.of),
            Verb("mac", "x", "row_scale", "z", of=self.of),
        ]
        return tuple(stmts)


class _Fused(_Tile):
    """Statements for a vector of sums with fused expressions."""

    def __init__(self, isa: Isa, atom: Atom, out: Atom, to: str, post: str, text: str) -> None:  # noqa: PLR0917
        super().__init__(isa, atom, out, to, post, text)
        self.of = out.name
        fused = parse(text)
        self.at = Elements(isa, out, fused, var("i"), var("row") + var("i"), var("column"))
        self.wanted = [x for _, x in fused.results]
        self.fixed: dict[Expr, str] = {}

    def params(self) -> tuple[Param, ...]:
        return (Param("item"), Param("row"), Param("column"), *parameters(self.at.fused))

    def scratch(self) -> tuple[Stmt, ...]:
        own = Scratch(f"few_{self.to}", self.atom.n, self.to)
        return tuple(dict.fromkeys((own, *self.at.scratch())))

    def row(self, i: Index) -> tuple[Stmt, ...]:
        self.at.names = {}
        stmts = (*super().row(i), *self.at.once(self.wanted, "bm"))
        self.fixed = dict(self.at.names)
        # A result of one value for a row is written with the row's first columns.
        single = [s for to, x in self.at.fused.results if self.one(to) for s in self.at.single(x, to)]
        return (*stmts, If(var("column").eq(const(0)), tuple(single))) if single else stmts

    def one(self, to: int) -> bool:
        """Whether a result is one value for a row."""
        return to != C and "n" not in self.at.fused.operands[to].axes

    def vector(self, i: Index, j: Index) -> tuple[Stmt, ...]:
        return self.results(i, j, "")

    def short(self, i: Index, j: Index, count: Index) -> tuple[Stmt, ...]:
        return (Let("left", count), *self.at.few(count), *self.results(i, j, "left"))

    def results(self, i: Index, j: Index, few: str) -> tuple[Stmt, ...]:
        """Statements that compute and write every result of a vector of sums."""
        self.at.names = self.fixed | {acc(): "x"}
        stmts = [*self.value(i, j), *self.at.compute(self.wanted, j, few)]
        for to, x in self.at.fused.results:
            if to == C:
                stmts += self.at.write(x, self.to, self.there, j, few, const(1))
            elif not self.one(to):
                stmts += self.at.store(x, to, j, few)
        return tuple(stmts)
