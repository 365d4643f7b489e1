"""Weights of four bits: panels of codes, unfolded into panels of numbers.

A panel of codes is, for each group of rows, a row of NR scales and one of NR
offsets, both f32, then the group's words [word][NR]: eight codes of one column,
at the bits that `dtype.CODES_AT` says. A weight is scale * code + offset, one
multiply-add in f32, rounded once more where the panel that it goes to holds a
narrower type. In a last word that k does not fill the codes are zero.

Few rows of floats, and any number of quantised ones, are multiplied by codes as
they lie: the sum over a group is scale * sum_k a code + offset * sum_k a, so that
only the codes become numbers for each element, and scales are applied once a
group. With an A of s8 both sums are exact, in s32: 1920 a step at most, which
reaches 2**31 at a group of a million rows. Sums over groups, and those of floats within a group that is longer,
are added up in runs (`summation`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from portmm.kernels.microkernel import Shape, acc_of, element_of_a, params_of_a, spare, write_back

from portmm.dtype import CODES_AT, CODES_KR, base
from portmm.ir import (
    Add,
    For,
    Function,
    If,
    Let,
    LetPtr,
    Move,
    Param,
    Ptr,
    Scratch,
    Verb,
    ceil_div,
    const,
    minimum,
    var,
)
from portmm.summation import RUN, chained

if TYPE_CHECKING:
    from portmm.ir import Index, Stmt
    from portmm.problem import Family
    from portmm.target import Atom, Isa


def unfolding(isa: Isa, atom: Atom, kept: Family) -> Function:
    """to[p][j] = the weights of words `first` <= u < `last` of a panel of codes, eight rows each.

    Where the panel holds units, rows are rounded to its elements in scratch, and woven.
    """
    words, real = isa.vector("s32", atom.n), isa.vector("f32", atom.n)
    assert words is not None  # noqa: S101 - or the atom would not serve codes
    assert real is not None  # noqa: S101 - the same
    nr, kr, u = kept.nr, atom.k_pack, var("u")
    vectors = [(v, v * atom.n) for v in range(nr // atom.n)]
    # Words of a group, after its scales and offsets.
    long = kept.group // CODES_KR
    group = u // long if long else const(0)
    row = Ptr("to", (u - var("first")) * (CODES_KR // kr * nr))
    body: list[Stmt] = [
        Let("head", group * ((2 + long) * nr)),
        LetPtr("scales", Ptr("b", var("head")), "f32", readonly=True),
        LetPtr("words", Ptr("b", var("head") + (u - group * long + 2) * nr), "s32", readonly=True),
        Scratch("rows", CODES_KR * nr, base(atom.right)) if kr > 1 else LetPtr("rows", row, atom.right),
    ]
    for v, at in vectors:
        body += [
            Verb("load_b", f"s{v}", p=Ptr("scales", const(at))),
            Verb("load_b", f"w{v}", p=Ptr("words", const(at)), of=words.name),
        ]
    for e in range(CODES_KR):
        for v, at in vectors:
            body += [
                Verb("load_c", f"x{v}", p=Ptr("scales", const(nr + at))),
                Verb("code", f"q{v}", f"w{v}", count=const(CODES_AT[e])),
                Verb("mac", f"x{v}", f"s{v}", f"q{v}"),
                Verb("store", f"x{v}", p=Ptr("rows", const(e * nr + at))),
            ]
    for e, (v, at) in product(range(0, CODES_KR, kr), vectors) if kr > 1 else ():
        body += [
            Verb("load_rows", f"u{v}", p=Ptr("rows", const(e * nr + at)), step=const(nr), of=atom.name),
            Verb("store", f"u{v}", p=row + (e // kr * nr + at), to=atom.right, of=atom.name),
        ]
    params = (Param("first"), Param("last"), Param("b", "s32", readonly=True), Param("to", atom.right))
    loop = For("u", var("first"), var("last"), const(1), tuple(body))
    return Function("unfold", "inner", params, (loop,), f"to[8 rows][{nr}] = scale * code + offset", of=real.name)


def _many(atom: Atom, kept: Family) -> bool:
    """Whether a group has many runs."""
    return not chained(atom) and not 0 < kept.group <= RUN


def totalling(atom: Atom, kept: Family, s: Shape) -> Function:
    """totals[row][g] = the sum of A over group g."""
    p, k = var("p"), ceil_div(var("k"), atom.k_pack)
    long = const(kept.group // atom.k_pack) if kept.group else k
    rows = range(s.rows)
    step: list[Stmt] = []
    keep: list[Stmt] = []
    more: list[Stmt] = []
    for i in rows:
        step += [Verb("load_a", f"a{i % 2}", p=element_of_a(s, i, p)), Verb("mac", f"t{i}", f"a{i % 2}", "one")]
        store, to = Verb("store", f"t{i}", p=Ptr("lanes")), Ptr("totals", const(i) * var("groups") + var("g"))
        keep += [store, Move(to, Ptr("lanes"))]
        more += [store, If(var("begin").lt(var("p_run")), (Add(to, Ptr("lanes")),), (Move(to, Ptr("lanes")),))]
    zero = tuple(Verb("zero", f"t{i}") for i in rows)
    begin, end = var("g") * long, minimum(k, (var("g") + 1) * long)
    group: tuple[Stmt, ...] = (*zero, For("p", begin, end, const(1), tuple(step)), *keep)
    if _many(atom, kept):
        run = RUN // atom.k_pack
        once = For("p", var("p_run"), minimum(end, var("p_run") + run), const(1), tuple(step))
        group = (Let("begin", begin), For("p_run", var("begin"), end, const(run), (*zero, once, *more)))
    params = (*params_of_a(s), Param("totals", "f32"), Param("groups"))
    loop = For("g", const(0), var("groups"), const(1), group)
    body = (Scratch("lanes", atom.n, atom.acc), Verb("ones", "one"), loop)
    comment = f"totals[{s.rows}][groups] = sums of A over groups of k"
    return Function(f"totals_{s.rows}", "inner", params, body, comment)


def decoding(isa: Isa, atom: Atom, kept: Family, s: Shape) -> Function:
    """C[rows][columns] = A[rows][k] . B, B a panel of codes."""
    real = isa.vector("f32", atom.n)
    assert real is not None  # noqa: S101 - or the atom would not serve codes
    nr, k, g, here = kept.nr, var("k"), var("g"), var("here")
    tile = _Tile(isa, atom, real, nr, s)
    words = ceil_div(k, CODES_KR)
    long = const(kept.group // CODES_KR) if kept.group else words
    full: Index = here
    rest: tuple[Stmt, ...] = ()
    start: tuple[Stmt, ...] = (Let("start", g * long), Let("here", minimum(long, words - var("start"))))
    if atom.acc == "f32":  # past k, an A of floats need not be finite
        full = var("full")
        start += (Let("full", minimum(here, k // CODES_KR - var("start"))),)
        rest = (If(full.lt(here), tile.last(full, ceil_div(k % CODES_KR, atom.k_pack))),)
    none = tuple(Verb("zero", f"part{i}_{v}", of=atom.name) for i, v in tile.cells)
    sums: tuple[Stmt, ...] = (*none, For("u", const(0), full, const(1), tile.word(var("u"))), *rest, *tile.scaled(g))
    if _many(atom, kept):
        run = RUN // CODES_KR
        once = For("u", var("u_run"), minimum(full, var("u_run") + run), const(1), tile.word(var("u")))
        sums = (For("u_run", const(0), full, const(run), (*none, once, *tile.scaled())), *none, *rest, *tile.scaled(g))
    group = (
        *start,
        LetPtr("scales", Ptr("b", g * ((long + 2) * nr)), "f32", readonly=True),
        LetPtr("words", Ptr("b", (g * (long + 2) + 2) * nr), "s32", readonly=True),
        *sums,
    )
    zero = tuple(Verb("zero", acc_of(i, v)) for i, v in tile.cells)
    s = replace(s, chained=False)
    end: tuple[Stmt, ...] = write_back(real, s, edge=True)
    if not real.mask_free:
        end = (If(var("columns").lt(nr), end, write_back(real, s, edge=False)),)
    run, first = max(1, RUN // kept.group) if kept.group else 1, var("g_run")
    few = For("g", first, minimum(var("groups"), first + run), const(1), group)
    loop = For("g_run", const(0), var("groups"), const(run), (Let("accumulate", const(0).lt(first)), *zero, few, *end))
    params = [*params_of_a(s), Param("b", "s32", readonly=True), Param("totals", "f32", readonly=True)]
    params += [Param("groups"), Param("c", "f32"), Param("c_m"), Param("columns")]
    comment = f"C[{s.rows}][columns] = A[{s.rows}][k] . B[k][{nr}], codes of four bits"
    body = (*spare(real, s), loop)
    return Function(f"decode_{s.rows}x{nr}", "inner", tuple(params), body, comment, of=real.name)


class _Tile:
    """The statements of a register tile that reads codes: sums over a group, and over all of k in f32."""

    def __init__(self, isa: Isa, atom: Atom, real: Atom, nr: int, s: Shape) -> None:
        words = isa.vector("s32", atom.n)
        assert words is not None  # noqa: S101 - or the atom would not serve codes
        self.atom, self.real, self.words, self.nr, self.s = atom, real, words, nr, s
        self.vectors, self.rows = range(nr // atom.n), range(s.rows)
        self.cells = [(i, v) for i in self.rows for v in self.vectors]

    def load(self, u: Index) -> list[Stmt]:
        """Word u of the group, of every column."""
        at = [Ptr("words", u * self.nr + v * self.atom.n) for v in self.vectors]
        return [Verb("load_b", f"w{v}", p=p, of=self.words.name, to="s32") for v, p in enumerate(at)]

    def step(self, p: Index, bit: Index) -> list[Stmt]:
        """The codes that begin at `bit`, by the unit of A at p."""
        of = self.atom.name
        out: list[Stmt] = [Verb("code", f"q{v}", f"w{v}", count=bit, of=of) for v in self.vectors]
        for i in self.rows:
            out.append(Verb("load_a", f"a{i}", p=element_of_a(self.s, i, p), of=of))
            out += [Verb("mac", f"part{i}_{v}", f"a{i}", f"q{v}", of=of) for v in self.vectors]
        return out

    def word(self, u: Index) -> tuple[Stmt, ...]:
        """A whole word."""
        kr = self.atom.k_pack
        first = (var("start") + u) * (CODES_KR // kr)
        steps = (self.step(first + e // kr, const(CODES_AT[e])) for e in range(0, CODES_KR, kr))
        return (*self.load(u), *(x for step in steps for x in step))

    def last(self, u: Index, count: Index) -> tuple[Stmt, ...]:
        """The first units of word u."""
        e, kr = var("e"), self.atom.k_pack
        first, at = (var("start") + u) * (CODES_KR // kr), e * kr
        bit = at % 4 * CODES_AT[1] + at // 4 * CODES_AT[4]
        return (*self.load(u), For("e", const(0), count, const(1), tuple(self.step(first + e, bit))))

    def scaled(self, g: Index | None = None) -> tuple[Stmt, ...]:
        """Add sums over a group to those of all groups, scaled: of its last run, with the offset of group `g`."""
        out: list[Stmt] = []
        if g is not None:
            out += [Verb("load_a", f"t{i}", p=Ptr("totals", const(i) * var("groups") + g)) for i in self.rows]
        exact = self.atom.acc == "s32"
        for v in self.vectors:
            scale, offset = (Ptr("scales", const(x * self.nr + v * self.atom.n)) for x in (0, 1))
            out += [Verb("load_b", f"s{v}", p=scale)] + [Verb("load_b", f"o{v}", p=offset)] * (g is not None)
            for i in self.rows:
                part = f"part{i}_{v}"
                out += [Verb("real", "x", a=part)] if exact else []
                out.append(Verb("mac", acc_of(i, v), f"s{v}", "x" if exact else part))
                out += [Verb("mac", acc_of(i, v), f"t{i}", f"o{v}")] * (g is not None)
        return tuple(out)
