"""Weights of four bits: panels of codes, unfolded into panels of numbers.

A panel of codes is, for each group of rows, a row of NR scales and one of NR
offsets, both f32, then the group's units [unit][NR]: words of eight codes of one
column, the first in the lowest bits. A weight is scale * code + offset, one
multiply-add in f32, rounded once more where the panel that it goes to holds a
narrower type. A last unit that k does not fill has codes of zero, and what they
unfold to is not multiplied.

Few rows are multiplied by codes as they lie: the sum over a group is
scale * sum_k a code + offset * sum_k a, so that only the codes become numbers
for each element, and scales are applied once a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.kernels.microkernel import Shape, acc_of, element_of_a, params_of_a, spare, write_back

from portmm.dtype import CODE_BITS, CODES_KR
from portmm.ir import For, Function, If, Let, LetPtr, Move, Param, Ptr, Scratch, Verb, ceil_div, const, minimum, var

if TYPE_CHECKING:
    from portmm.ir import Index, Stmt
    from portmm.problem import Family
    from portmm.target import Atom, Isa


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
                Verb("code", f"q{v}", f"w{v}", count=const(CODE_BITS * e)),
                Verb("mac", f"x{v}", f"s{v}", f"q{v}"),
                Verb("store", f"x{v}", p=Ptr("rows", const(e * nr + v * atom.n))),
            ]
    params = (Param("first"), Param("last"), Param("b", "s32", readonly=True), Param("to", atom.right))
    loop = For("u", var("first"), var("last"), const(1), tuple(body))
    return Function("unfold", "inner", params, (loop,), f"to[8 units][{nr}] = scale * code + offset")


def totalling(atom: Atom, kept: Family, s: Shape) -> Function:
    """totals[row][g] = the sum of A over group g."""
    p, k = var("p"), var("k")
    long = const(kept.group) if kept.group else k
    rows = range(s.rows)
    step = [
        x
        for i in rows
        for x in (Verb("load_a", f"a{i % 2}", p=element_of_a(s, i, p)), Verb("mac", f"t{i}", f"a{i % 2}", "one"))
    ]
    keep = [
        x
        for i in rows
        for x in (
            Verb("store", f"t{i}", p=Ptr("lanes")),
            Move(Ptr("totals", const(i) * var("groups") + var("g")), Ptr("lanes")),
        )
    ]
    group = (
        *(Verb("zero", f"t{i}") for i in rows),
        For("p", var("g") * long, minimum(k, (var("g") + 1) * long), const(1), tuple(step)),
        *keep,
    )
    params = (*params_of_a(s), Param("totals", "f32"), Param("groups"))
    loop = For("g", const(0), var("groups"), const(1), group)
    body = (Scratch("lanes", atom.n, "f32"), Verb("ones", "one"), loop)
    return Function(f"totals_{s.rows}", "inner", params, body, f"totals[{s.rows}][groups] = sums of A over groups of k")


def decoding(isa: Isa, atom: Atom, kept: Family, s: Shape) -> Function:
    """C[rows][columns] = A[rows][k] . B, B a panel of codes."""
    words = isa.vector("s32", atom.n)
    assert words is not None  # noqa: S101 - or the atom would not serve codes
    nr, u, k = s.nr, var("u"), var("k")
    vectors, rows = range(nr // atom.n), range(s.rows)
    cells = [(i, v) for i in rows for v in vectors]
    units = ceil_div(k, CODES_KR)
    long = const(kept.group // CODES_KR) if kept.group else units

    def step(p: Index, bit: Index) -> list[Stmt]:
        out: list[Stmt] = [Verb("code", f"q{v}", f"w{v}", count=bit) for v in vectors]
        for i in rows:
            out.append(Verb("load_a", f"a{i}", p=element_of_a(s, i, p)))
            out += [Verb("mac", f"part{i}_{v}", f"a{i}", f"q{v}") for v in vectors]
        return out

    load = [Verb("load_b", f"w{v}", p=Ptr("units", u * nr + v * atom.n), of=words.name, to="s32") for v in vectors]
    whole = [x for e in range(CODES_KR) for x in step((var("start") + u) * CODES_KR + e, const(CODE_BITS * e))]
    left = var("full").lt(var("here"))
    e = var("e")
    last = step((var("start") + u) * CODES_KR + e, e * CODE_BITS)
    rest = For("e", const(0), k % CODES_KR, const(1), tuple(last))
    group: tuple[Stmt, ...] = (
        Let("start", var("g") * long),
        Let("here", minimum(long, units - var("start"))),
        Let("full", minimum(var("here"), k // CODES_KR - var("start"))),
        LetPtr("scales", Ptr("b", var("g") * ((long + 2) * nr)), "f32", readonly=True),
        LetPtr("units", Ptr("b", (var("g") * (long + 2) + 2) * nr), "s32", readonly=True),
        *(Verb("zero", f"part{i}_{v}") for i, v in cells),
        For("u", const(0), var("full"), const(1), (*load, *whole)),
        If(left, (Let("u", var("full")), *load, rest)),
    )
    group += tuple(Verb("load_a", f"t{i}", p=Ptr("totals", const(i) * var("groups") + var("g"))) for i in rows)
    for v in vectors:
        scale, offset = (Ptr("scales", const(x * nr + v * atom.n)) for x in (0, 1))
        group += (Verb("load_b", f"s{v}", p=scale, to="f32"), Verb("load_b", f"o{v}", p=offset, to="f32"))
        for i in rows:
            group += (
                Verb("mac", acc_of(i, v), f"s{v}", f"part{i}_{v}"),
                Verb("mac", acc_of(i, v), f"t{i}", f"o{v}"),
            )
    loop = For("g", const(0), var("groups"), const(1), group)
    start: tuple[Stmt, ...] = (*(Verb("zero", acc_of(i, v)) for i, v in cells), loop)
    end: tuple[Stmt, ...] = write_back(atom, s, edge=True)
    if not atom.mask_free:
        end = (If(var("columns").lt(nr), end, write_back(atom, s, edge=False)),)
    params = [*params_of_a(s), Param("b", "s32", readonly=True), Param("totals", "f32", readonly=True)]
    params += [Param("groups"), Param("c", atom.acc), Param("c_m"), Param("columns")]
    comment = f"C[{s.rows}][columns] = A[{s.rows}][k] . B[k][{nr}], codes of four bits"
    return Function(f"decode_{s.rows}x{nr}", "inner", tuple(params), (*spare(atom, s), *start, *end), comment)
