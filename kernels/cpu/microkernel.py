"""Micro-kernel: a register tile of C, updated over a run of k.

MR rows by NV vectors by P panels of accumulators stay in named registers. Per
step of k it loads one row of each B panel and, row by row, broadcasts one
element of A and multiplies: outer products, so that each element is a chain of
multiply-adds in the order of k. An atom of two rows takes rows in pairs: an unpaired
last one is duplicated, in the fragment of A and in the sums,
which are equal and are stored to the same address. Floats are added to C after the
loop, which is one run of k (`summation`): runs do not depend on any blocking, so
neither does the result. Where chains are longer than the loop, those of integers
too, C is loaded before it instead. (Goto & van de Geijn, ACM TOMS 34(3), 2008.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Index, Ptr, const, var
from portmm.ir.nodes import For, Function, If, Let, LetPtr, Move, Param, Prefetch, Scratch, Verb
from portmm.kernels.cpu.packing import keep, line_of
from portmm.target.summation import BlockOfK

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.target.atom import Atom


FEW_ROWS = 4
"""Rows of a tile up to which each has an address of its own in each step that is written out."""
AT_ONCE = 4
"""Vectors of C that are loaded before the first of them is added."""
GROUP = 4
"""Rows of an A in place that are addressed from the first of them: by one, two and three strides."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Geometry and operand access of a micro-kernel.

    Attributes:
        rows: register rows.
        nr: columns of one panel, a multiple of the atom's n.
        panels: panels along n, `b_panel` elements apart.
        a_packed: A is a panel a[k][rows]; else a[row * a_m + k * a_k].
        b_packed: B is a panel b[k][nr]; else b[k * b_k + column].
        packs: of a B in place, store each row to a panel, too, which has all columns.
        prefetch: prefetch distance in rows of a B in place, 0 for none; `along`, in elements of the same row.
        ahead: prefetch the next tile of C, and these operands: at step p, operand s at s_next + p * s_step.
        near: prefetch A and B into L1, not L2.
        slice_ahead: of A, prefetch instead a line of each row of a slice at a_next, every `line` steps.
        unroll: steps of k that a compiler is to write out.
        written: steps of k that are written out here, each at the row of B after the last; k is a multiple of them.
        inline: merge into the caller.
        ragged: the last panel may be partial.
        partial: it is partial in each call.
        a: storage type of A: elements or units of left fragments, or a type that converts to them.
        b: storage type of B.
        unshift: A was shifted, and sums of B's columns are `sums_at` units past b: "whole",
            over all of k, or "block", over the k of this visit; "" for neither.
        final: the type of the C that is prefetched, where sums are in scratch until the epilogue;
            "" where they are C.
        block_of_k: where it continues the block before, C is loaded before the loop, whose chains continue those
            of C; else C is added to after it. Of a part of a run, at the end of the run, `add` the sums `kept`
            of earlier runs, and `keep` the sum there unless the run is the last.
        apart: of a part of a run, sums are in tiles of `part`, and those of earlier runs in tiles of `kept`, until the
            end of the last run, not in C, whose rows may all start in one set of L1.
        a_row: stride between rows of an A in place, contiguous along k, if that is a constant.
        grouped: of an A in place, each GROUP rows have an address, and three strides a name: with a multiple of the
            stride for each row, 14 rows leave no integer registers, and each step takes additions instead.
        steps_of_run: where k is several runs, as taps of a filter: strides in A and in B from one run to the next.
    """

    rows: int
    nr: int
    panels: int = 1
    a_packed: bool = True
    b_packed: bool = True
    packs: bool = False
    prefetch: int = 0
    along: int = 0
    ahead: tuple[str, ...] | None = None
    near: bool = False
    slice_ahead: bool = False
    unroll: int = 1
    written: int = 1
    inline: bool = False
    ragged: bool = True
    partial: bool = False
    a: str = "f32"
    b: str = "f32"
    unshift: str = ""
    final: str = ""
    block_of_k: BlockOfK = BlockOfK.RUN
    apart: bool = False
    a_row: int = 0
    grouped: bool = False
    steps_of_run: tuple[int, int] | None = None


def micro_kernel(atom: Atom, s: Shape) -> Function:
    """Function C[rows][columns] (+)= A . B over k steps; `columns` may be fewer than a panel."""
    n = s.panels * s.nr
    body: tuple[Stmt, ...]
    if s.panels > 1 or n == 1 or not s.ragged:
        body = (*_begin(atom, s, edge=False), *_loop(atom, s, masked=False), *write_back(atom, s, edge=False))
    else:
        short = var("columns").lt(n)
        loop = _loop(atom, s, masked=False)
        if not s.b_packed and atom.mask:
            # An unpacked B must not be read past its last column.
            masked = _loop(atom, s, masked=True)
            loop = masked if s.partial else (If(short, masked, loop),)
        begin, end = _begin(atom, s, edge=True), write_back(atom, s, edge=True)
        if not (atom.mask_free or s.partial):
            begin = (If(short, begin, _begin(atom, s, edge=False)),) if s.block_of_k.continues else begin
            end = (If(short, end, write_back(atom, s, edge=False)),)
        body = (*spare(atom, s), *begin, *loop, *end)
    params = [*params_of_a(s), Param("b", s.b, readonly=True)]
    params += [] if s.b_packed else [Param("b_k")]
    params += [Param("panel", s.b)] if s.packs else []
    params += [Param("b_panel")] if s.panels > 1 else []
    params += [Param("sums_at")] if s.unshift else []
    params += [Param("c", atom.acc), Param("c_m"), Param("columns"), Param("accumulate")]
    if s.block_of_k is BlockOfK.PART:
        stride = [] if s.apart else [Param("kept_m")]
        params += [Param("kept", atom.acc), *stride, Param("add"), Param("keep")]
    params += [Param("part", atom.acc), Param("done")] if s.apart else []
    if s.ahead is not None:
        params.append(Param("c_next", s.final or atom.acc))
        params += [Param("next_m")] if s.final else []
        for x in s.ahead:
            storage = s.a if x == "a" else s.b
            params.append(Param(f"{x}_next", storage, readonly=True))
            params += [] if x == "a" and s.slice_ahead else [Param(f"{x}_step")]
        lines = [(i, j) for i in range(s.rows) for j in range(0, s.nr, line_of(atom, s.final))]
        step = var("next_m" if s.final else "c_m")
        prefetches = (Prefetch(Ptr("c_next", const(i) * step + j), write=True) for i, j in lines)
        body = (*prefetches, *body)
    name = f"ukr_{s.rows}x{n}{'_packs' if s.packs else ''}"
    comment = f"C[{s.rows}][columns] (+)= A[{s.rows}][k] . B[k][{n}]"
    return Function(name, "inner", tuple(params), body, comment, s.inline)


def continued(atom: Atom, s: Shape) -> Function:
    """Function that adds A . B to a full tile of sums, of a block of k that neither begins nor ends a run."""
    tiles = _accumulators(atom, s)
    loads = tuple(_sums("load_c", atom, s, i, v, "part") for i, v in tiles)
    body = (*loads, *_loop(atom, s, masked=False), *stored(atom, s, "part", edge=False))
    params = (*params_of_a(s), Param("b", s.b, readonly=True), Param("b_k"), Param("part", atom.acc))
    comment = f"Sums[{s.rows}][{s.nr}] += A[{s.rows}][k] . B[k][{s.nr}]"
    return Function(f"ukr_{s.rows}x{s.nr}_on", "inner", params, body, comment, s.inline)


def vectors_of(atom: Atom, s: Shape) -> range:
    """Indices of the vectors across a register tile."""
    return range(s.panels * s.nr // atom.n)


def acc_of(i: int, v: int) -> str:
    """Register of the sums of vector v for row i, and for the atom's further rows."""
    return f"c{i}_{v}"


def _accumulators(atom: Atom, s: Shape) -> list[tuple[int, int]]:
    """Row and vector indices of each accumulator."""
    return [(i, v) for i in range(0, s.rows, atom.m) for v in vectors_of(atom, s)]


def _row_stride(atom: Atom, s: Shape, i: int, step: Index) -> Index | None:
    """Stride between the rows of a register whose first is row i; 0 for an unpaired last one, which is duplicated."""
    if atom.m == 1:
        return None
    return step if i + 1 < s.rows else const(0)


def params_of_a(s: Shape) -> tuple[Param, ...]:
    """Parameters for the run of k, and the slice of A with its strides if it is not packed."""
    strides = () if s.a_packed or s.a_row else (Param("a_m"), Param("a_k"))
    runs = (Param("runs"),) if s.steps_of_run else ()
    return (Param("k"), *runs, Param("a", s.a, readonly=True), *strides)


def element_of_a(s: Shape, i: int, p: Index, a: str = "a") -> Ptr:
    """Address of row i of the slice at `a` at step p."""
    if s.a_row:
        return Ptr(a, p + i * s.a_row)
    if s.grouped:
        first, row = divmod(i, GROUP)
        stride = (const(0), var("a_m"), 2 * var("a_m"), var("three_rows"))[row]
        return Ptr(f"rows{first * GROUP}", stride + p * var("a_k"))
    return Ptr(a, p * s.rows + i) if s.a_packed else Ptr(a, const(i) * var("a_m") + p * var("a_k"))


def _at(atom: Atom, s: Shape, c: str, i: int, v: int) -> Ptr:
    return Ptr(c, const(i) * _rows_apart(s, c) + v * atom.n)


def _rows_apart(s: Shape, c: str) -> Index:
    """Stride between rows of sums: of a tile of its own, or of a matrix."""
    own = c == "tile" or (s.apart and c in {"part", "kept"})
    return const(s.nr) if own else var(f"{c}_m")


def spare(atom: Atom, s: Shape) -> tuple[Stmt, ...]:
    """Masks of the valid columns of a partial panel, or a spare tile."""
    if not atom.mask:
        return (Scratch("tile", s.rows * s.nr, atom.acc),)
    return tuple(keep(atom, f"m{v}", var("columns") - v * atom.n) for v in vectors_of(atom, s))


def _begin(atom: Atom, s: Shape, *, edge: bool) -> tuple[Stmt, ...]:
    """Initial values of the accumulators: zero, or those of C where chains go on."""
    tiles = _accumulators(atom, s)
    zero: tuple[Stmt, ...] = tuple(Verb("zero", acc_of(i, v)) for i, v in tiles)
    if not s.block_of_k.continues:
        return zero
    less = _unshift(atom, s)
    if s.unshift == "whole":
        zero, less = (*zero, *less), ()
    load: tuple[Stmt, ...]
    sums = "part" if s.apart else "c"
    if not edge:
        load = tuple(_sums("load_c", atom, s, i, v, sums) for i, v in tiles)
        return (If(var("accumulate"), load, zero), *less)
    if atom.mask:
        load = tuple(
            Verb("load_mask", acc_of(i, v), p=_at(atom, s, sums, i, v), mask=f"m{v}", to=atom.acc) for i, v in tiles
        )
        return (If(var("accumulate"), load, zero), *less)
    load = (
        *_copy(s, Ptr("tile"), Ptr(sums), const(s.nr), _rows_apart(s, sums)),
        *(_sums("load_c", atom, s, i, v, "tile") for i, v in tiles),
    )
    return (If(var("accumulate"), load, zero), *less)


def _unshift(atom: Atom, s: Shape) -> tuple[Stmt, ...]:
    """Subtraction of a shifted A's contribution from the accumulators: sums over columns, which follow each panel."""
    if not s.unshift:
        return ()
    per_panel = s.nr // atom.n
    out: list[Stmt] = []
    for v in vectors_of(atom, s):
        panel = var("b_panel") * (v // per_panel) if s.panels > 1 else const(0)
        if v % per_panel == 0:
            out.append(LetPtr(f"sums{v}", Ptr("b", panel + var("sums_at")), atom.acc, readonly=True))
        at = Ptr(f"sums{v // per_panel * per_panel}", const(v % per_panel * atom.n))
        out.append(Verb("load_c", f"s{v}", p=at))
        out += [Verb("unshift", acc_of(i, v), b=f"s{v}") for i in range(0, s.rows, atom.m)]
    return tuple(out)


def _add(atom: Atom, s: Shape, c: str, *, edge: bool) -> tuple[Stmt, ...]:
    """Addition of the tile at `c` to the accumulators."""
    before: tuple[Stmt, ...] = ()
    spare_tile = edge and not atom.mask
    if spare_tile:
        before = _copy(s, Ptr("tile"), Ptr(c), const(s.nr), _rows_apart(s, c))
    adds: list[Stmt] = []
    for number, (i, v) in enumerate(_accumulators(atom, s)):
        d = f"before{number % AT_ONCE}"
        if edge and atom.mask:
            adds.append(Verb("load_mask", d, p=_at(atom, s, c, i, v), mask=f"m{v}", to=atom.acc))
        else:
            adds.append(_sums("load_c", atom, s, i, v, "tile" if spare_tile else c, d=d))
        adds.append(Verb("add", acc_of(i, v), d))
    return (*before, *adds)


def stored(atom: Atom, s: Shape, c: str, *, edge: bool) -> tuple[Stmt, ...]:
    """Stores of the accumulators to `c`."""
    tiles = _accumulators(atom, s)
    if not edge:
        return tuple(_sums("store", atom, s, i, v, c) for i, v in tiles)
    if atom.mask:
        return tuple(Verb("store_mask", acc_of(i, v), p=_at(atom, s, c, i, v), mask=f"m{v}") for i, v in tiles)
    stores = (_sums("store", atom, s, i, v, "tile") for i, v in tiles)
    return (*stores, *_copy(s, Ptr(c), Ptr("tile"), _rows_apart(s, c), const(s.nr)))


def write_back(atom: Atom, s: Shape, *, edge: bool) -> tuple[Stmt, ...]:
    """Stores of the accumulators to C, or their addition to it."""
    store = stored(atom, s, "c", edge=edge)
    if s.block_of_k is BlockOfK.PART:
        add, keep_ = _add(atom, s, "kept", edge=edge), stored(atom, s, "kept", edge=edge)
        if s.apart:
            store = (If(var("done"), store, stored(atom, s, "part", edge=edge)),)
        return (If(var("add"), add), If(var("keep"), keep_, store))
    if s.block_of_k.continues:
        return store
    return (If(var("accumulate"), _add(atom, s, "c", edge=edge)), *store)


def _sums(verb: str, atom: Atom, s: Shape, i: int, v: int, c: str, *, d: str = "") -> Verb:  # noqa: PLR0917
    """Load or store of an accumulator, or of register `d`: in memory named `c`, or in the spare "tile"."""
    return Verb(verb, d or acc_of(i, v), p=_at(atom, s, c, i, v), step=_row_stride(atom, s, i, _rows_apart(s, c)))


def _copy(s: Shape, to: Ptr, src: Ptr, to_m: Index, src_m: Index) -> tuple[Stmt, ...]:
    """Copy of the valid columns, one element at a time, for ISAs without masks."""
    row, col = var("row"), var("col")
    move = Move(to + (row * to_m + col), src + (row * src_m + col))
    inner = For("col", const(0), var("columns"), const(1), (move,))
    return (For("row", const(0), const(s.rows), const(1), (inner,)),)


def _groups(s: Shape) -> tuple[Stmt, ...]:
    """Addresses of groups of rows of A."""
    if not s.grouped:
        return ()
    a_m = var("a_m")
    rows = (LetPtr(f"rows{i}", Ptr("a", const(i) * a_m), s.a, readonly=True) for i in range(0, s.rows, GROUP))
    return (Let("three_rows", 3 * a_m), *rows)


def _loop(atom: Atom, s: Shape, *, masked: bool) -> tuple[Stmt, ...]:
    """Loop over k: one outer product per step.

    Of steps that are written out, each has B's row by adding a stride to the one before: compilers would keep all
    multiples of it, times vectors of a row, and registers do not suffice.
    """
    p, step = var("p"), s.nr if s.b_packed else var("b_k")
    if s.steps_of_run:
        names = zip("ab", (s.a, s.b), s.steps_of_run, strict=True)
        at: tuple[Stmt, ...] = tuple(
            LetPtr(f"{x}_run", Ptr(x, var("q") * by), kind, readonly=True) for x, kind, by in names
        )
        inner = _step(atom, s, p, Ptr("b_run", p * step), masked=masked, a="a_run")
        each = (*at, For("p", const(0), var("k"), const(1), inner, s.unroll))
        return (For("q", const(0), var("runs"), const(1), each),)
    body = _step(atom, s, p, Ptr("b", p * step), masked=masked)
    if s.written == 1:
        return (*_groups(s), For("p", const(0), var("k"), const(1), body, s.unroll))
    steps: tuple[Stmt, ...] = (LetPtr("row0", Ptr("b", p * step), s.b, readonly=True),)
    for i in range(s.written):
        steps += (LetPtr(f"row{i}", Ptr(f"row{i - 1}", const(0) + step), s.b, readonly=True),) if i else ()
        steps += _step(atom, s, p + i, Ptr(f"row{i}"), masked=masked)
    return (*_groups(s), For("p", const(0), var("k"), const(s.written), steps))


def _step(atom: Atom, s: Shape, p: Index, row: Ptr, *, masked: bool, a: str = "a") -> tuple[Stmt, ...]:
    """Outer product of step p, with the row of B at an address, and a slice of A."""
    per_panel = s.nr // atom.n
    body: list[Stmt] = []
    for v in vectors_of(atom, s):
        panel = var("b_panel") * (v // per_panel) if s.panels > 1 else const(0)
        at = Ptr(row.name, panel + row.offset + (v % per_panel) * atom.n)
        if s.prefetch and not s.b_packed and not (s.packs and v * atom.n % line_of(atom)):
            body.append(Prefetch(at + var("b_k") * s.prefetch))
        if s.along and not masked:
            body.append(Prefetch(at + s.along))
        body.append(Verb("load_mask", f"b{v}", p=at, mask=f"m{v}") if masked else Verb("load_b", f"b{v}", p=at))
        body += [Verb("store", f"b{v}", p=Ptr("panel", p * s.nr + v * atom.n))] if s.packs else []
    if atom.hold and s.written > 1 and 1 < s.rows < FEW_ROWS:
        body += [Verb("hold", f"b{v}") for v in vectors_of(atom, s)]
    for x in s.ahead or ():
        if x == "a" and s.slice_ahead:
            lines = (Prefetch(element_of_a(s, i, p, "a_next"), near=s.near) for i in range(s.rows))
            body.append(If((p % line_of(atom)).eq(0), tuple(lines), rare=True))
        else:
            body.append(Prefetch(Ptr(f"{x}_next", p * var(f"{x}_step")), near=s.near))
    for i in range(0, s.rows, atom.m):
        left = f"a{i // atom.m % 2}"
        body.append(Verb("load_a", left, p=element_of_a(s, i, p, a), step=_row_stride(atom, s, i, const(1))))
        body += [Verb("mac", acc_of(i, v), left, f"b{v}") for v in vectors_of(atom, s)]
    return tuple(body)
