"""Epilogue: sums of a tile become elements of C, while the tile is in cache.

A product whose C is not of the accumulator's type computes sums in scratch, over
all of k; the epilogue then converts them to elements of C, tile by tile, right
after each was computed. Expressions take these sums from registers, and write C and
their other results. Those of a quantized product are in `portmm.spec.dequantization`.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, Function, If, Let, Move, Param, Scratch, Verb
from portmm.kernels.cpu.elementwise import OWN, Elements, own, parameters
from portmm.kernels.cpu.packing import keep
from portmm.spec.epilogue import C, acc
from portmm.spec.expr_ops import OPS
from portmm.spec.shortened import shortened

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

LONG = 12
"""Operations from which two rows are computed together: those of one vector are a chain, and wait for each other."""


def finish(  # noqa: PLR0917 - types, and expressions with where they find sums
    isa: Isa, atom: Atom, acc: str, to: str, fused: Fused | None = None, in_c: bool = False
) -> Function:
    """Function that writes C[rows][columns]: sums of type `acc`, in expressions if there are any, as `to`.

    Sums of expressions may be `in_c`, where a row has no whole vectors.
    """
    i, j, columns = var("i"), var("j"), var("columns")
    fused = fused and shortened(fused, to)
    at = _Tile(isa, atom, to) if fused is None else _Fused(isa, atom, to, fused, in_c)
    params = (
        Param("rows"),
        Param("columns"),
        Param("sums", acc),
        Param("wide"),
        *at.own(),
        Param("c", to),
        Param("c_m"),
        *at.params(),
    )
    whole, pairs = columns - columns % atom.n, at.pairs(columns)
    begin, first = const(0), const(0)
    if pairs:
        # The remainder of the loop over pairs of rows: the last of an odd number, and the last columns of all.
        paired = var("rows") - var("rows") % 2
        begin, first = paired * (1 - whole.lt(columns)) if atom.n > 1 else paired, whole * i.lt(paired)
    body: tuple[Stmt, ...] = (*at.row(i), For("j", first, whole, const(atom.n), at.vector(i, j)))
    if atom.n > 1:
        # Scratch and the sums of columns have whole vectors.
        body += (If(whole.lt(columns), (Let("j", whole), *at.short(i, j, columns - j))),)
    rows = For("i", begin, var("rows"), const(1), body)
    comment = f"C[rows][columns] = {'expressions of ' if fused else ''}sums,  as {to}"
    return Function("finish", "inner", params, (*at.scratch(), *pairs, rows), comment, of=atom.name)


class _Tile:
    """Statements for a vector of sums, which are stored to C unchanged."""

    def __init__(self, isa: Isa, atom: Atom, to: str, row: str = "i") -> None:
        self.isa, self.atom, self.to = isa, atom, to
        self.there = Ptr("c", var(row) * var("c_m"))

    def own(self) -> tuple[Param, ...]:
        """Parameters for the vectors that the kernel computes."""
        return ()

    def params(self) -> tuple[Param, ...]:
        return ()

    def scratch(self) -> tuple[Stmt, ...]:
        return ()

    def row(self, i: Index) -> tuple[Stmt, ...]:  # noqa: ARG002
        """Loads that a row needs once."""
        return ()

    def pairs(self, columns: Index) -> tuple[Stmt, ...]:  # noqa: ARG002
        """Loop over pairs of rows and whole vectors, where these are computed together."""
        return ()

    def sums(self, i: Index, j: Index) -> Ptr:
        """Address of a vector of sums."""
        return Ptr("sums", i * var("wide") + j)

    def vector(self, i: Index, j: Index) -> tuple[Stmt, ...]:
        """Statements for a whole vector of C."""
        return (Verb("load_c", "x", p=self.sums(i, j)), Verb("store", "x", p=self.there + j))

    def short(self, i: Index, j: Index, count: Index) -> tuple[Stmt, ...]:
        """Statements for the last `count` columns."""
        load = Verb("load_c", "x", p=self.sums(i, j))
        if self.atom.mask and self.isa.spelling(self.atom, "store_mask", self.to):
            return (keep(self.atom, "m", count), load, Verb("store_mask", "x", p=self.there + j, mask="m"))
        e = var("e")  # a short vector without masks: through memory
        one = Move(self.there + j + e, Ptr("last", e))
        return (
            load,
            Scratch("last", self.atom.n, self.to),
            Verb("store", "x", p=Ptr("last")),
            For("e", const(0), count, const(1), (one,)),
        )


class _Fused(_Tile):
    """Statements for a vector of sums with fused expressions.

    Args:
        in_c: sums are in C.
        row: name of the row, in the tile.
        suffix: end of the names of its registers.
    """

    def __init__(  # noqa: PLR0917 - a row has a name and a suffix
        self, isa: Isa, atom: Atom, to: str, fused: Fused, in_c: bool, row: str = "i", suffix: str = ""
    ) -> None:
        super().__init__(isa, atom, to, row)
        real = isa.vector("f32", atom.n)
        assert real is not None  # noqa: S101 - else the atom would not be a candidate
        self.real, self.suffix, self.in_c = real, suffix, in_c
        self.at = Elements(isa, real, fused, var(row), var("row") + var(row), var("column"), suffix=suffix)
        self.wanted = [x for _, x in fused.results]
        self.fixed: dict[Expr, str] = {}

    def own(self) -> tuple[Param, ...]:
        return tuple([Param(*OWN[name], readonly=True) for name in own(self.at.fused)])

    def params(self) -> tuple[Param, ...]:
        return (Param("item"), Param("row"), Param("column"), *parameters(self.at.fused))

    def scratch(self) -> tuple[Stmt, ...]:
        mine = Scratch(f"few_{self.to}", self.atom.n, self.to)  # of the type of sums as well, where these are in C
        return tuple(dict.fromkeys((mine, *self.at.scratch())))

    def row(self, i: Index) -> tuple[Stmt, ...]:  # noqa: ARG002
        self.at.names = {}
        stmts = self.at.once(self.wanted, "bm")
        self.fixed = dict(self.at.names)
        # A result of one value for a row is written with the row's first columns.
        single = [s for to, x in self.at.fused.results if self.one(to) for s in self.at.single(x, to)]
        return (*stmts, If(var("column").eq(const(0)), tuple(single))) if single else stmts

    def pairs(self, columns: Index) -> tuple[Stmt, ...]:
        """Loop over pairs of rows, whose chains of operations hide each other's latencies."""
        operations = sum(x.op in OPS for x in self.at.fused.steps)
        if operations < LONG or not all(x.dense for x in self.at.fused.operands):
            return ()
        other = _Fused(self.isa, self.atom, self.to, self.at.fused, self.in_c, "below", "b")
        rows = self.row(var("i")), other.row(var("below"))
        vectors = self.results(var("i"), var("j"), ""), other.results(var("below"), var("j"), "")
        both = [x for pair in zip_longest(*vectors) for x in pair if x is not None]
        whole = For("j", const(0), columns - columns % self.atom.n, const(self.atom.n), tuple(both))
        body = (Let("below", var("i") + 1), *rows[0], *rows[1], whole)
        return (For("i", const(0), var("rows") - var("rows") % 2, const(2), body),)

    def one(self, to: int) -> bool:
        """Whether a result is one value for a row."""
        return to != C and "n" not in self.at.fused.operands[to].axes

    def vector(self, i: Index, j: Index) -> tuple[Stmt, ...]:
        return self.results(i, j, "")

    def short(self, i: Index, j: Index, count: Index) -> tuple[Stmt, ...]:
        return (Let("left", count), *self.at.few(count), *self.results(i, j, "left"))

    def value(self, i: Index, j: Index, few: str) -> tuple[Stmt, ...]:
        """Loads of a vector of sums, as f32 in register x, and as integers in register t where expressions read them.

        Sums that no expression reads are loaded as f32.
        """
        if self.in_c and few:
            return self.at.few_of(f"x{self.suffix}", self.sums(i, j), few, "f32", self.real)
        stmts, read = [], [x.dtype for x in self.at.fused.steps if x.op == "acc"]
        if "s32" in read:
            whole = self.isa.vector("s32", self.real.n)
            assert whole is not None  # noqa: S101 - the sums have such vectors
            stmts.append(Verb("load_c", f"t{self.suffix}", p=self.sums(i, j), of=whole.name))
        if "s32" not in read or "f32" in read:
            stmts.append(Verb("load_c", f"x{self.suffix}", p=self.sums(i, j), of=self.real.name))
        return tuple(stmts)

    def results(self, i: Index, j: Index, few: str) -> tuple[Stmt, ...]:
        """Statements that compute and write every result of a vector of sums."""
        self.at.names = self.fixed | {acc(): f"x{self.suffix}", acc("s32"): f"t{self.suffix}"}
        stmts = [*self.value(i, j, few), *self.at.compute(self.wanted, j, few)]
        for to, x in self.at.fused.results:
            if to == C:
                stmts += self.at.write(x, self.to, self.there, j, few, const(1))
            elif not self.one(to):
                stmts += self.at.store(x, to, j, few)
        return tuple(stmts)
