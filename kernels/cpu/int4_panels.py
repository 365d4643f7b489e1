"""int4 weights in panels: dequantized into panels of floats, or within the micro-kernel.

An int4 panel is, for each quantization group, a row of NR scales and, unless they are -8 times these, one of NR
offsets, both f32, or of scales alone as f16, then the group's words [word][NR]: eight int4 values of one column,
at the bits of `dtype.CODES_AT`. A weight is scale * q + offset, one
multiply-add in f32, rounded once more where the target panel holds a
narrower type. A last word that k does not fill is padded with zeros.

Few rows of floats, and any number of quantised ones, are multiplied by int4 panels in
place: the sum over a group is scale * sum_k a (q - 8) + (offset + 8 scale) * sum_k a,
so that only q is converted for each element, and scales are applied once a group.
For weights around 0, q is around 8: of q itself both sums would be large, and cancel.
Where q - 8 would take more instructions, q of even k are 16 less, and others unchanged:
sums grow as slowly, and start at 8 times the difference of sums of A that compensates
for it. With an A of int8, sums of q start at -8 * sum_k a; they are exact, in s32: 1920
a step at most, which reaches 2**31 at a group of a million rows. Sums over groups, and
those of floats within a group that is longer than a run, are added up in runs (`summation`).

Panels may have floats of four bits, e2m1, in the place of int4 values, with half the scales and without offsets: twice
these floats are whole numbers, around 0 where they are converted to floats, and 12 more for an A of int8. Their bits
are complemented, so that what pads a word, of bits 0, is an integer 0 as well.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import Add, For, Function, If, Let, LetPtr, Move, Param, Prefetch, Scratch, Verb
from portmm.kernels.cpu.microkernel import Shape, acc_of, element_of_a, params_of_a, spare, write_back
from portmm.spec.dtype import BY_NAME, CODES_AT, CODES_KR, ZERO_CODE, ZERO_E2M1, base
from portmm.target.summation import RUN, STEP, BlockOfK, chained

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.problem import Family
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


WORDS = STEP // CODES_KR
"""Words after which sums of floats by alternating q (see above) are corrected to those of q - 8."""


def dequantize(isa: Isa, atom: Atom, kept: Family) -> Function:
    """Function that dequantizes words `first` <= u < `last` of an int4 panel, eight rows each, to to[p][j].

    Where the panel holds units, rows are rounded to its elements in scratch, and interleaved.
    """
    words, real = isa.vector("s32", atom.n), isa.vector("f32", atom.n)
    assert words is not None  # noqa: S101 - else the atom would not support int4
    assert real is not None  # noqa: S101 - the same
    nr, kr, u = kept.nr, atom.k_pack, var("u")
    vectors = [(v, v * atom.n) for v in range(nr // atom.n)]
    # Words of a group, after its scales and offsets.
    long = kept.group // CODES_KR
    group = u // long if long else const(0)
    row = Ptr("to", (u - var("first")) * (CODES_KR // kr * nr))
    units = var("head") + (u - group * long + kept.heads) * nr - kept.saved
    body: list[Stmt] = [
        Let("head", group * ((kept.heads + long) * nr - kept.saved)),
        LetPtr("scales", Ptr("b", var("head")), kept.head_type, readonly=True),
        LetPtr("words", Ptr("b", units), "s32", readonly=True),
        Scratch("rows", CODES_KR * nr, base(atom.right)) if kr > 1 else LetPtr("rows", row, atom.right),
    ]
    for v, at in vectors:
        body += [
            Verb("load_b", f"s{v}", p=Ptr("scales", const(at))),
            Verb("load_b", f"w{v}", p=Ptr("words", const(at)), of=words.name),
        ]
    eight = Map("literal", "minus_eight", (float(-ZERO_CODE),), "f32", "f32", real.name)
    body += [eight] if kept.symmetric else []
    for e in range(CODES_KR):
        for v, at in vectors:
            offset = Verb("load_c", f"x{v}", p=Ptr("scales", const(nr + at)))
            by_eight = Map("mul", f"x{v}", (f"s{v}", "minus_eight"), "f32", "f32", real.name)
            number = Verb("e2m1" if kept.e2m1 else "code", f"q{v}", f"w{v}", count=const(CODES_AT[e]))
            scaled = Map("mul", f"x{v}", (f"s{v}", f"q{v}"), "f32", "f32", real.name)
            added = [by_eight if kept.symmetric else offset, number, Verb("mac", f"x{v}", f"s{v}", f"q{v}")]
            steps = [number, scaled] if kept.e2m1 else added
            body += [*steps, Verb("store", f"x{v}", p=Ptr("rows", const(e * nr + at)))]
    for e, (v, at) in product(range(0, CODES_KR, kr), vectors) if kr > 1 else ():
        body += [
            Verb("load_rows", f"u{v}", p=Ptr("rows", const(e * nr + at)), step=const(nr), of=atom.name),
            Verb("store", f"u{v}", p=row + (e // kr * nr + at), to=atom.right, of=atom.name),
        ]
    params = (Param("first"), Param("last"), Param("b", "s32", readonly=True), Param("to", atom.right))
    loop = For("u", var("first"), var("last"), const(1), tuple(body))
    return Function("unfold", "inner", params, (loop,), f"to[8 rows][{nr}] = scale * code + offset", of=real.name)


def _many(atom: Atom, kept: Family) -> bool:
    """Whether a group has several runs."""
    return not chained(atom) and not 0 < kept.group <= RUN


def centred(atom: Atom, kept: Family) -> bool:
    """Whether numbers are around 0 as they are converted, so that their sums need no correction."""
    return bool(atom.centred) or (kept.e2m1 and atom.acc == "f32")


def starts_of_group(atom: Atom, kept: Family) -> Index:
    """Number of corrections that turn sums over a group into those of q - 8: one for each `STEP` floats."""
    if centred(atom, kept):
        return const(0)
    if atom.acc == "s32":
        return const(1)
    return const(-(-kept.group // STEP)) if kept.group else ceil_div(var("k"), STEP)


def group_sums(atom: Atom, real: Atom, kept: Family, s: Shape) -> Function:
    """Function that sums A: totals[row][g] over group g, starts[row][g][...] = corrections to q - 8 of its parts."""
    k, g, first = ceil_div(var("k"), atom.k_pack), var("g"), var("p_run")
    long = const(kept.group // atom.k_pack) if kept.group else k
    run = long if atom.acc == "s32" else const(STEP // atom.k_pack)
    rows, ways = range(s.rows), 2 if _alternates(atom, kept) else 1
    zero = ZERO_E2M1 if kept.e2m1 else ZERO_CODE
    begin, end = g * long, minimum(k, (g + 1) * long)
    limit = minimum(end, first + run)

    def step(p: Index, sign: str) -> list[Stmt]:
        stmts: list[Stmt] = []
        for i in rows:
            a = f"a{i % 2}"
            stmts += [Verb("load_a", a, p=element_of_a(s, i, p)), Verb("mac", f"t{i}", a, "one")]
            stmts += [Verb("mac", f"d{i}", a, sign)] if ways > 1 else []
        return stmts

    each = [*step(var("p"), "eight"), *(step(var("p") + 1, "minus_eight") if ways > 1 else ())]
    runs: list[Stmt] = [Verb("zero", f"{x}{i}") for i in rows for x in "td"[:ways]]
    runs.append(For("p", first, limit - (ways - 1), const(ways), tuple(each)))
    runs += [If((limit % 2).eq(1), tuple(step(limit - 1, "eight")))] if ways > 1 else []
    # An error of a total affects every column, by as much as its zero point differs from 8.
    place, lanes = [const(i) * var("groups") + g for i in rows], Ptr("lanes")
    whole = [Ptr("whole", const(i)) for i in rows]
    for i in rows:
        runs += [Verb("store", f"t{i}", p=lanes), Add(whole[i], lanes)]
        if not centred(atom, kept):
            less = Map("mul", f"d{i}", (f"t{i}", "minus_eight"), atom.acc, atom.acc, real.name)
            start = Ptr("starts", place[i] * starts_of_group(atom, kept) + (first - begin) // run)
            runs += [*([less] if ways == 1 else []), Verb("store", f"d{i}", p=lanes), Move(start, lanes)]
    group: list[Stmt] = [Move(x, None) for x in whole]
    group.append(For("p_run", begin, end, run, tuple(runs)))
    group += [Move(Ptr("totals", place[i]), whole[i]) for i in rows]
    signs = {"minus_eight": -zero, "eight": zero} if not centred(atom, kept) else {}
    body: list[Stmt] = [Scratch("lanes", atom.n, atom.acc), Scratch("whole", s.rows, "f64"), Verb("ones", "one")]
    body += [Map("literal", x, (signs[x],), atom.acc, atom.acc, real.name) for x in list(signs)[:ways]]
    body.append(For("g", const(0), var("groups"), const(1), tuple(group)))
    params = (*params_of_a(s), Param("totals", "f32"), *_starts(atom, kept), Param("groups"))
    comment = f"totals[{s.rows}][groups] = sums of A over groups of k"
    return Function(f"totals_{s.rows}", "inner", params, tuple(body), comment)


def _alternates(atom: Atom, kept: Family) -> bool:
    """Whether int4 values of even k are 16 less, so that sums of floats do not grow."""
    return bool(atom.below) and not kept.e2m1


def _starts(atom: Atom, kept: Family) -> tuple[Param, ...]:
    """Parameter of the corrections to q - 8, if there are any."""
    return () if centred(atom, kept) else (Param("starts", atom.acc),)


def int4_micro_kernel(isa: Isa, atom: Atom, kept: Family, s: Shape) -> Function:
    """Micro-kernel C[rows][columns] = A[rows][k] . B, B an int4 panel."""
    real = isa.vector("f32", atom.n)
    assert real is not None  # noqa: S101 - else the atom would not support int4
    nr, k, g, here = kept.nr, var("k"), var("g"), var("here")
    tile = _Tile(isa, atom, real, kept, s)
    words = ceil_div(k, CODES_KR)
    long = const(kept.group // CODES_KR) if kept.group else words
    full: Index = here
    rest: tuple[Stmt, ...] = ()
    start: tuple[Stmt, ...] = (Let("start", g * long), Let("here", minimum(long, words - var("start"))))
    if atom.acc == "f32":  # past k, an A of floats need not be finite
        full = var("full")
        start += (Let("full", minimum(here, k // CODES_KR - var("start"))),)
        rest = (If(full.lt(here), tile.last(full, ceil_div(k % CODES_KR, atom.k_pack))),)
    sums: tuple[Stmt, ...] = (*tile.begun(), *tile.summed(const(0), full, here), *rest, *tile.scaled(g))
    if _many(atom, kept):
        first, run = var("u_run"), RUN // CODES_KR
        once = tile.summed(first, minimum(full, first + run), minimum(here, first + run))
        runs = For("u_run", const(0), here, const(run), (*tile.zero(), *once, *tile.scaled()))
        sums = (runs, *tile.zero(), *rest, *tile.scaled(g))
    units = (g * (long + kept.heads) + kept.heads) * nr - (g + 1) * kept.saved
    group = (
        *start,
        *tile.ahead(),
        LetPtr("scales", Ptr("b", g * ((long + kept.heads) * nr - kept.saved)), kept.head_type, readonly=True),
        LetPtr("words", Ptr("b", units), "s32", readonly=True),
        *sums,
    )
    zero = tuple(Verb("zero", acc_of(i, v)) for i, v in tile.cells)
    s = replace(s, block_of_k=BlockOfK.RUN)
    end: tuple[Stmt, ...] = write_back(real, s, edge=s.panels == 1)  # several panels are whole
    if not real.mask_free and s.panels == 1:
        end = (If(var("columns").lt(nr), end, write_back(real, s, edge=False)),)
    run, first = max(1, RUN // kept.group) if kept.group else 1, var("g_run")
    few = For("g", first, minimum(var("groups"), first + run), const(1), group)
    loop = For("g_run", const(0), var("groups"), const(run), (Let("accumulate", const(0).lt(first)), *zero, few, *end))
    params = [*params_of_a(s), Param("b", "s32", readonly=True), *([Param("b_panel")] if s.panels > 1 else [])]
    params.append(Param("totals", "f32", readonly=True))
    params += [*_starts(atom, kept), Param("groups"), Param("c", "f32"), Param("c_m"), Param("columns")]
    n = s.panels * nr
    comment = f"C[{s.rows}][columns] = A[{s.rows}][k] . B[k][{n}], codes of four bits"
    body = (*(spare(real, s) if s.panels == 1 else ()), loop)
    return Function(f"decode_{s.rows}x{n}", "inner", tuple(params), body, comment, of=real.name)


class _Tile:
    """Statements of a register tile that reads int4 values: sums over a group, and over all of k in f32."""

    def __init__(self, isa: Isa, atom: Atom, real: Atom, kept: Family, s: Shape) -> None:
        words = isa.vector("s32", atom.n)
        assert words is not None  # noqa: S101 - else the atom would not support int4
        self.atom, self.real, self.words, self.nr, self.s = atom, real, words, kept.nr, s
        self.offsets, self.e2m1 = kept.heads > 1, kept.e2m1
        self.each = BY_NAME["s32"].bytes // BY_NAME[kept.head_type].bytes
        self.group = kept.group // CODES_KR * self.nr + kept.head_words if kept.group else 0
        self.jumps = bool(s.along and s.panels > 1 and self.group)
        self.vectors, self.rows = range(s.panels * self.nr // atom.n), range(s.rows)
        self.cells = [(i, v) for i in self.rows for v in self.vectors]
        self.exact = atom.acc == "s32"
        self.starts, self.centred = starts_of_group(atom, kept), centred(atom, kept)
        self.alternates = _alternates(atom, kept)
        self.corrects = self.alternates and not 0 < kept.group <= STEP
        self.verbs = ("below" if self.alternates else "code", "code")

    def zero(self) -> tuple[Stmt, ...]:
        """Zeroed sums of a group."""
        return tuple(Verb("zero", f"part{i}_{v}", of=self.atom.name) for i, v in self.cells)

    def begun(self) -> tuple[Stmt, ...]:
        """Initial values of sums over a group."""
        if self.centred or self.corrects:
            return self.zero()
        return tuple(x for i in self.rows for x in self.start(i, const(0), [f"part{i}_{v}" for v in self.vectors]))

    def start(self, i: int, part: Index, to: list[str]) -> tuple[Stmt, ...]:
        """Loads of the corrections to q - 8 of row i, for a part of the group."""
        at = Ptr("starts", (const(i) * var("groups") + var("g")) * self.starts + part)
        if self.exact:
            return tuple(Verb("load_a", x, p=at, of=self.words.name) for x in to)
        splat = (Map("splat", x, (f"start{i}",), "f32", "f32", self.real.name) for x in to)
        return (Verb("load_a", f"start{i}", p=at), *splat)

    def summed(self, first: Index, full: Index, last: Index) -> tuple[Stmt, ...]:
        """Sums over whole words from `first` to `full`, and corrections for parts that begin before `last`."""
        u, at = var("u"), var("u_part")
        if not self.corrects:
            return (For("u", first, full, const(1), self.word(u)),)
        body: list[Stmt] = []
        for i in self.rows:
            body += self.start(i, at // WORDS, [f"from{i}"])
            parts = [f"part{i}_{v}" for v in self.vectors]
            body += [Map("add", x, (x, f"from{i}"), "f32", "f32", self.real.name) for x in parts]
        body.append(For("u", at, minimum(full, at + WORDS), const(1), self.word(u)))
        return (For("u_part", first, last, const(WORDS), tuple(body)),)

    def at(self, name: str, row: Index, v: int, each: int = 1) -> Ptr:
        """Address of vector v of a row of the group in each panel, `each` elements to a word."""
        panel, column = divmod(v * self.atom.n, self.nr)
        return Ptr(name, (var("b_panel") * (panel * each) if panel else const(0)) + row + column)

    def load(self, u: Index) -> list[Stmt]:
        """Loads of word u of the group, for every column."""
        at = [self.at("words", u * self.nr, v) for v in self.vectors]
        loads = [Verb("load_b", f"w{v}", p=p, of=self.words.name, to="s32") for v, p in enumerate(at)]
        return [*self.prefetch(at), *loads]

    def prefetch(self, at: list[Ptr], each: int = 1) -> list[Stmt]:
        """Prefetches further along the panel of what is at some addresses, `each` elements to a word."""
        distance = var("ahead") if self.jumps else const(self.s.along)
        return [Prefetch(p + distance * each) for p in at] if self.s.along else []

    def ahead(self) -> tuple[Stmt, ...]:
        """Words between a prefetch and its use: past the end of a panel, they are of the next one in its place."""
        if not self.jumps:
            return ()
        last = (var("groups") - var("g")).lt(self.s.along // self.group + 1)
        return (Let("ahead", last * (var("b_panel") * (self.s.panels - 1)) + self.s.along),)

    def step(self, p: Index, bit: Index, verb: str = "code") -> list[Stmt]:
        """Multiply-adds of the int4 values that begin at `bit` by the unit of A at p."""
        of, verb = self.atom.name, "e2m1" if self.e2m1 else "centred" if self.centred else verb
        out: list[Stmt] = [Verb(verb, f"q{v}", f"w{v}", count=bit, of=of) for v in self.vectors]
        for i in self.rows:
            out.append(Verb("load_a", f"a{i}", p=element_of_a(self.s, i, p), of=of))
            out += [Verb("mac", f"part{i}_{v}", f"a{i}", f"q{v}", of=of) for v in self.vectors]
        return out

    def word(self, u: Index) -> tuple[Stmt, ...]:
        """Multiply-adds of a whole word."""
        kr = self.atom.k_pack
        first = (var("start") + u) * (CODES_KR // kr)
        units = range(0, CODES_KR, kr)
        steps = (self.step(first + e // kr, const(CODES_AT[e]), self.verbs[e % 2]) for e in units)
        return (*self.load(u), *(x for step in steps for x in step))

    def last(self, u: Index, count: Index) -> tuple[Stmt, ...]:
        """Multiply-adds of the first units of word u."""
        e, kr = var("e"), self.atom.k_pack
        first, at = (var("start") + u) * (CODES_KR // kr), e * kr
        bit = at % 4 * CODES_AT[1] + at // 4 * CODES_AT[4]
        each = tuple(self.step(first + e, bit))
        if self.alternates:
            each = (If((e % 2).eq(0), tuple(self.step(first + e, bit, "below")), each),)
        return (*self.load(u), For("e", const(0), count, const(1), each))

    def scaled(self, g: Index | None = None) -> tuple[Stmt, ...]:
        """Scaled addition of a group's sums to those over k; after its last run, with the offset of group `g`."""
        out: list[Stmt] = []
        g = g if self.offsets else None
        if g is not None:
            out.append(Map("literal", "zero_code", (float(ZERO_CODE),), "f32", "f32", self.real.name))
            out += [Verb("load_a", f"t{i}", p=Ptr("totals", const(i) * var("groups") + g)) for i in self.rows]
        heads = range(2 if self.offsets else 1)
        lines = self.vectors[:: self.each]  # vectors of words, and as many of scales as are in one
        rows = [self.at("scales", const(x * self.nr), v, self.each) for x in heads for v in lines]
        out += self.prefetch(rows, self.each)
        for v in self.vectors:
            scale, offset = (self.at("scales", const(x * self.nr), v, self.each) for x in (0, 1))
            out.append(Verb("load_b", f"s{v}", p=scale))
            if g is not None:
                centre = Map("fma", f"c{v}", (f"s{v}", "zero_code", f"o{v}"), "f32", "f32", self.real.name)
                out += [Verb("load_b", f"o{v}", p=offset), centre]
            for i in self.rows:
                part = f"part{i}_{v}"
                out += [Verb("real", "x", a=part)] if self.exact else []
                out.append(Verb("mac", acc_of(i, v), f"s{v}", "x" if self.exact else part))
                out += [Verb("mac", acc_of(i, v), f"t{i}", f"c{v}")] * (g is not None)
        return tuple(out)
