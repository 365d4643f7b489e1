"""Packing: the panel layouts that micro-kernels read, and the functions that pack operands into them.

A panel of B is to[k][NR]: NR contiguous columns for each k, padded at the
right edge (padding is computed with and never stored). A panel of A is
to[k][rows] with the true number of rows. Both depend on the micro-kernel's NR and MR
only, never on a blocking, so a packed B serves every M, and a block of k is a
contiguous part of each panel. Where an atom multiplies units of KR elements of
k, "k" counts units; a last unit that k does not fill is padded with zeros.
Elements are converted to the panel's type.

Operands that are contiguous along k are transposed in registers: log2(L) rounds of perfect
shuffles transpose an L x L block, of elements or of units. Units of an operand
that is contiguous across k are interleaved from KR rows by the atom's own loads (VNNI).

A panel of integers may be followed by the sum of each of its columns, which
corrects for an A that was shifted from signed to unsigned, or has a zero point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.address import offset, strides
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, round_up, var
from portmm.ir.lane_nodes import Shuffle
from portmm.ir.nodes import For, Function, If, LetPtr, Move, Param, Prefetch, Verb
from portmm.spec.dtype import BY_NAME, base, unit
from portmm.spec.layouts import operand

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.layout import Layout
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def line_of(atom: Atom, storage: str = "") -> int:
    """Number of elements of a cache line, of sums or of type `storage`, at least one vector."""
    return max(atom.n, 64 // BY_NAME[storage or atom.acc].bytes)


def keep(atom: Atom, register: str, count: Index, of: str = "") -> Verb:
    """Mask of the first `count` lanes; `count` may be out of range on either side."""
    return Verb("mask", register, count=maximum(0, minimum(count, atom.n)), of=of)


def sum_units(atom: Atom, nr: int, storage: str) -> int:
    """Number of units of a panel of type `storage` that the sums of its columns take."""
    return nr * BY_NAME[atom.acc].bytes // BY_NAME[storage].bytes


def sums_at(units: Index, nr: int, storage: str) -> Index:
    """Offset of the column sums of a panel of type `storage`, in units: behind it, aligned to themselves."""
    return round_up(units * nr, max(1, BY_NAME["s32"].bytes // BY_NAME[storage].bytes))


@dataclass(frozen=True, slots=True)
class _Lines:
    """Operand as lines along k, which a panel interleaves.

    Attributes:
        name: pointer to the operand.
        storage: the type of the operand in memory.
        to: the type of the panel: elements or units.
        register: the type in registers.
        source: layout of the operand: of the line, and k.
        valid: number of lines; past that, the last one is repeated.
        width: lines in a panel.
        begin: the first unit of k.
    """

    name: str
    storage: str
    to: str
    register: str
    source: Layout
    valid: str
    width: Index
    begin: Index

    @property
    def kr(self) -> int:
        """Number of elements of k in a unit of the panel."""
        return BY_NAME[self.to].pack

    @property
    def whole(self) -> Index:
        """Number of units that the operand fills."""
        return var("elements") // self.kr if self.kr > 1 else var("k")

    @property
    def along(self) -> Index:
        """Stride within a line."""
        return strides(self.source)[1]

    @property
    def panel(self) -> bool:
        """Whether the destination is a panel of B, of whole vectors."""
        return self.width.op == "const"

    def at(self, j: Index | int, p: Index | int) -> Ptr:
        """Address of element p of line j, or of the last one."""
        return Ptr(self.name, offset(self.source, minimum(j, var(self.valid) - 1), const(0) + p))


def pack_b_rows(  # noqa: PLR0917 - the order of a packer's geometry is the same everywhere
    atom: Atom, nr: int, panels: int, prefetch: int, storage: str, to: str
) -> Function:
    """Function to[q][p][j] = B[p][q * NR + j]: whole panels together, from long runs of each row.

    A row at a stride of pages is a miss in cache and address translation each
    time; the longer the run that is read there, the smaller the cost, and rows
    further down are prefetched meanwhile. Units that k does not fill are omitted.
    """
    p, kr = var("p"), BY_NAME[to].pack
    lanes, line = atom.n, max(atom.n, 64 // BY_NAME[storage].bytes)
    row = Ptr("b", p * (var("b_k") * kr))
    down = [var("b_k") * (kr * prefetch + e) for e in range(kr)]
    prefetches = tuple(Prefetch(row + (d + j)) for d in down for j in range(0, panels * nr, line))
    copy: list[Stmt] = []
    for v in range(0, panels * nr, lanes):
        register, at = f"v{v // lanes % 4}", Ptr("to", var("panel_step") * (v // nr) + p * nr + v % nr)
        step = var("b_k") if kr > 1 else None
        copy.append(Verb("load_rows" if kr > 1 else "load_b", register, p=row + v, step=step))
        copy.append(Verb("store", register, p=at, to=atom.right))
    params = (Param("k"), Param("b", storage, readonly=True), Param("b_k"), Param("to", to), Param("panel_step"))
    loop = For("p", const(0), var("k"), const(1), (*prefetches, *copy))
    comment = f"to[{panels}][k][{nr}] = B[k][{panels * nr}], row layout"
    return Function("pack_b_rows", "inner", params, (loop,), comment, of=atom.name)


def pack_b(  # noqa: PLR0917 - as above
    isa: Isa, atom: Atom, nr: int, layout: str, storage: str, to: str
) -> Function:
    """Function to[p][j] = B[p][j] for `first` <= p < k, j < NR; columns past `columns` are undefined."""
    units = BY_NAME[to].pack > 1
    params = (
        Param("k"),
        *((Param("elements"), Param("first")) if units else ()),
        Param("columns"),
        Param("b", storage, readonly=True),
        Param("b_k"),
        Param("b_n"),
        Param("to", to),
    )
    source = operand("b", "any", "nk")
    lines = _Lines("b", storage, to, atom.right, source, "columns", const(nr), var("first") if units else const(0))
    body = _packed(isa, atom, lines, {"row": "lines", "col": "k"}.get(layout, ""), nr)
    comment = f"to[k][{nr}] = B[k][columns], {layout} layout, padded"
    return Function("pack_b", "inner", params, body, comment, of=atom.name)


def sum_columns(atom: Atom, nr: int, storage: str) -> Function:
    """Function that stores the column sums of a panel behind it: products with ones."""
    p, vectors = var("p"), range(nr // atom.n)
    zero = tuple(Verb("zero", f"s{v}") for v in vectors)
    step = tuple(
        x
        for v in vectors
        for x in (Verb("load_b", f"v{v}", p=Ptr("panel", p * nr + v * atom.n)), Verb("mac", f"s{v}", "one", f"v{v}"))
    )
    store = tuple(Verb("store", f"s{v}", p=Ptr("sums", const(v * atom.n))) for v in vectors)
    loop = For("p", const(0), var("k"), const(1), step)
    body: tuple[Stmt, ...] = (
        LetPtr("sums", Ptr("panel", sums_at(var("k"), nr, storage)), atom.acc),
        Verb("ones", "one"),
        *zero,
        loop,
        *store,
    )
    params = (Param("k"), Param("panel", storage))
    comment = f"panel[k][j] = the sum of panel[0..k-1][j], j < {nr}"
    return Function("sum_columns", "inner", params, body, comment, of=atom.name)


def pack_a(  # noqa: PLR0917 - as above
    isa: Isa, atom: Atom, mr: int, layout: str, storage: str, to: str
) -> Function:
    """Function to[p][i] = A[i][p] for p < k, i < rows; up to a vector past the end is overwritten."""
    units = atom.k_pack > 1
    params = (
        Param("k"),
        *((Param("elements"),) if units else ()),
        Param("rows"),
        Param("a", storage, readonly=True),
        Param("a_m"),
        Param("a_k"),
        Param("to", to),
    )
    lines = _Lines("a", storage, to, to, operand("a", "any"), "rows", var("rows"), const(0))
    body = _packed(isa, atom, lines, {"row": "k", "col": "lines"}.get(layout, ""), mr)
    return Function("pack_a", "inner", params, body, f"to[k][rows] = A[rows][k], {layout} layout", of=atom.name)


def _packed(isa: Isa, atom: Atom, lines: _Lines, contiguous: str, most: int) -> tuple[Stmt, ...]:
    """Statements that pack up to `most` lines that are contiguous along "k", or across them, or neither."""
    groups = range(0, most, atom.n)
    if contiguous == "k" and isa.shuffles and atom.n > 1:
        return _transposed(atom, lines, groups)
    if contiguous == "lines" and lines.kr > 1:
        return _interleave(atom, lines, groups)
    if contiguous == "lines" and lines.panel:
        return _rows(atom, most, lines)
    if contiguous == "lines" and atom.mask:
        return _columns(atom, most)
    return _gather(lines, lines.begin)


def _interleave(atom: Atom, lines: _Lines, groups: range) -> tuple[Stmt, ...]:
    """Loops that interleave rows of the operand into units, as many lines at once as a vector has lanes.

    Whole vectors are read, past the last valid line into the row that follows;
    the last rows, behind which nothing may be read, are gathered. Whole vectors are
    written as well, overwriting elements that follow: see `pack_a`.
    """
    p, along, kr, first = var("p"), lines.along, lines.kr, lines.begin

    def loop(some: tuple[int, ...]) -> tuple[Stmt, ...]:
        # A row that starts `lost` rows before the end may be read that far.
        lost = ceil_div(maximum(0, some[-1] + atom.n - var(lines.valid)), maximum(1, along))
        safe = maximum(first, (var("elements") - lost) // kr)
        copy = tuple(
            x
            for g in some
            for x in (
                Verb("load_rows", f"v{g}", p=Ptr(lines.name, p * (along * kr) + g), step=along, to=lines.register),
                Verb("store", f"v{g}", p=Ptr("to", p * lines.width + g), to=lines.register),
            )
        )
        return (For("p", first, safe, const(1), copy, 2),)

    last = groups[-1] + atom.n
    lost = ceil_div(maximum(0, last - var(lines.valid)), maximum(1, along))
    rest = _gather(lines, maximum(first, (var("elements") - lost) // kr))
    if lines.panel:
        return (*loop(tuple(groups)), *rest)
    return (*(If(const(g).lt(lines.width), loop((g,))) for g in reversed(groups)), *rest)


def _gather(lines: _Lines, begin: Index) -> tuple[Stmt, ...]:
    """Loop that copies element by element, from `begin` on."""
    p, j, e, kr = var("p"), var("j"), var("e"), lines.kr
    place = p * lines.width + j
    if kr == 1:
        inner: tuple[Stmt, ...] = (Move(Ptr("to", place), lines.at(j, p)),)
        before: tuple[Stmt, ...] = ()
    else:
        to = Ptr("parts", place * kr + e)
        fill = If(
            (p * kr + e).lt(var("elements")),
            (Move(to, lines.at(j, p * kr + e)),),
            (Move(to, None),),
        )
        inner = (For("e", const(0), const(kr), const(1), (fill,)),)
        before = (LetPtr("parts", Ptr("to"), base(lines.to)),)
    across = For("j", const(0), lines.width, const(1), inner)
    return (*before, For("p", begin, var("k"), const(1), (across,)))


def _rows(atom: Atom, nr: int, lines: _Lines) -> tuple[Stmt, ...]:
    """Loop that copies rows of a B that is contiguous along n."""
    p, vectors = var("p"), range(nr // atom.n)
    copy = tuple(
        x
        for v in vectors
        for x in (
            Verb("load_b", f"v{v}", p=Ptr("b", p * var("b_k") + v * atom.n)),
            Verb("store", f"v{v}", p=Ptr("to", p * nr + v * atom.n), to=atom.right),
        )
    )
    full = (For("p", const(0), var("k"), const(1), copy, 4),)
    if nr == 1:
        return full
    edge: tuple[Stmt, ...]
    if atom.mask:
        masks = tuple(keep(atom, f"m{v}", var("columns") - v * atom.n) for v in vectors)
        kept = tuple(
            x
            for v in vectors
            for x in (
                Verb("load_mask", f"v{v}", p=Ptr("b", p * var("b_k") + v * atom.n), mask=f"m{v}"),
                Verb("store", f"v{v}", p=Ptr("to", p * nr + v * atom.n), to=atom.right),
            )
        )
        edge = (*masks, For("p", const(0), var("k"), const(1), kept))
    else:
        edge = _gather(lines, lines.begin)
    return (If(var("columns").lt(nr), edge, full),)


def _columns(atom: Atom, mr: int) -> tuple[Stmt, ...]:
    """Loop that copies columns of an A that is contiguous along m, each store overwriting elements of the next."""
    p, rows = var("p"), var("rows")
    groups = range(0, mr, atom.n)
    masks = tuple(keep(atom, f"m{g}", rows - g) for g in groups)
    copy = tuple(
        x
        for g in groups
        for x in (
            Verb("load_mask", f"v{g}", p=Ptr("a", p * var("a_k") + g), mask=f"m{g}"),
            Verb("store_mask", f"v{g}", p=Ptr("to", p * rows + g), mask=f"m{g}", to=atom.right),
        )
    )
    return (*masks, For("p", const(0), var("k"), const(1), copy, 2))


def _transposed(atom: Atom, lines: _Lines, groups: range) -> tuple[Stmt, ...]:
    """Statements that transpose lines that are contiguous along k, L lines by L units at a time.

    The last block ends with the last whole unit, and repeats some of the block before it. Of less than one block,
    vectors are loaded under a mask.
    """
    lanes, begin, k = atom.n, lines.begin, var("k")
    masked = atom.mask and lines.kr == 1
    p = minimum(var("q"), lines.whole - lanes)
    many: list[Stmt] = []
    few: list[Stmt] = [keep(atom, "few", k - begin)] if masked else list(_gather(lines, begin))
    # Stores are whole vectors, so each overwrites elements that follow, unless panels are as wide: later
    # groups of lines go first, and a smaller k goes before a larger one.
    for g in groups if lines.panel else reversed(groups):
        starts, load, move, stores = _transpose_block(atom, lines, g, p)
        block: tuple[Stmt, ...] = (*starts, For("q", begin, lines.whole, const(lanes), (*load, *move, *stores)))
        many += block if lines.panel else (If(const(g).lt(lines.width), block),)
        if masked:
            starts, load, move, stores = _transpose_block(atom, lines, g, begin, "few")
            some = (If((begin + i).lt(k), (store,)) for i, store in enumerate(stores[:-1]))
            block = (*starts, *load, *move, *some)
            few += block if lines.panel else (If(const(g).lt(lines.width), block),)
    if lines.kr > 1:
        many += _gather(lines, lines.whole)
    return (If((begin + (lanes - 1)).lt(lines.whole), tuple(many), tuple(few)),)


def _transpose_block(
    atom: Atom, lines: _Lines, group: int, p: Index, mask: str = ""
) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...], tuple[Stmt, ...], list[Stmt]]:
    """Pointers, loads, shuffles and stores of an L x L block: units from p on of the L lines from `group` on."""
    names = [f"{lines.name}{group + j}" for j in range(atom.n)]
    storage = unit(lines.storage, lines.kr)
    starts = tuple(LetPtr(x, lines.at(group + j, 0), storage, readonly=True) for j, x in enumerate(names))
    verb = "load_mask" if mask else "load_b"
    load = tuple(Verb(verb, f"t0_{j}", p=Ptr(x, p), mask=mask, to=lines.register) for j, x in enumerate(names))
    shuffles, last = transpose(atom.n)
    place = [Ptr("to", (p + i) * lines.width + group) for i in range(atom.n)]
    stores: list[Stmt] = [Verb("store", r, p=to, to=lines.register) for r, to in zip(last, place, strict=True)]
    return starts, load, shuffles, stores


def transpose(lanes: int, rows: int = 0) -> tuple[tuple[Stmt, ...], list[str]]:
    """Shuffles that transpose registers t0_0 ... t0_{lanes-1}, and the names of the results.

    Of fewer `rows` the last is taken again.

    One round pairs register i with i + lanes/2 and interleaves their lanes; after
    log2(lanes) rounds, lane j of register i has become lane i of register j.
    """
    half = lanes // 2
    low = tuple(x for i in range(half) for x in (i, lanes + i))
    high = tuple(x for i in range(half, lanes) for x in (i, lanes + i))
    body: list[Stmt] = []
    now = [f"t0_{min(j, (rows or lanes) - 1)}" for j in range(lanes)]
    for rnd in range(1, lanes.bit_length()):
        then = [f"t{rnd}_{j}" for j in range(lanes)]
        for i in range(half):
            body.append(Shuffle(then[2 * i], now[i], now[i + half], low))
            body.append(Shuffle(then[2 * i + 1], now[i], now[i + half], high))
        now = then
    return tuple(body), now
