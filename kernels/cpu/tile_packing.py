"""Packing of the operands of tile units (AMX): whole steps of k, padded with zeros.

Memory behind an operand must not be read, and need not be finite.
"""

from __future__ import annotations

from functools import reduce
from math import inf
from operator import mul
from typing import TYPE_CHECKING

from portmm.ir.address import offset, tests, value
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, round_up, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import For, Function, If, Let, LetPtr, Move, Param, Scratch, Verb
from portmm.kernels.cpu.packing import transpose
from portmm.kernels.cpu.tile_microkernel import TALL
from portmm.kernels.cpu.view_packing import moved
from portmm.spec.dtype import BY_NAME, base, parts
from portmm.spec.layout_runs import runs
from portmm.spec.layouts import operand

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.layout import Layout
    from portmm.spec.layout_runs import Runs
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

ROW, STEP, ELEMENT = var("i"), var("t"), var("e")
"""Row of A, step of k, and element of the step."""
ELEMENTS, ROWS = var("elements"), var("rows")
PLACE = var("p")
"""Element of a block of k, in part of a run."""


def rest_of_b(atom: Atom, lines: Atom, nr: int, panels: int) -> Function:
    """Function to[u][j] = B[u][j] for u < count, and zero up to a whole step."""
    u, n = var("u"), nr * panels
    copy: list[Stmt] = []
    clear: list[Stmt] = []
    for j in range(0, n, atom.n):
        q, column = divmod(j, nr)
        at = Ptr("b", (var("b_panel") * q if q else const(0)) + u * nr + column)
        copy += [Verb("load_b", "x", p=at), Verb("store", "x", p=Ptr("to", u * n + j), to=atom.right)]
        clear.append(Verb("store", "z", p=Ptr("zeros", u * n + j)))
    body = (
        For("u", const(0), var("count"), const(1), tuple(copy)),
        LetPtr("zeros", Ptr("to"), atom.acc),
        Verb("zero", "z"),
        For("u", var("count"), const(atom.deep), const(1), tuple(clear)),
    )
    params = (Param("count"), Param("b", atom.right, readonly=True), *((Param("b_panel"),) if panels > 1 else ()))
    comment = f"to[u][{n}] = B[u][{n}] for u < count, then zeros"
    return Function(f"rest_{panels}", "inner", (*params, Param("to", atom.right)), body, comment, of=lines.name)


def pack_lines(  # noqa: PLR0917 - the order of a packer's geometry is the same everywhere
    isa: Isa, atom: Atom, lines: Atom, layout: str, storage: str, view: Layout | None = None
) -> Function:
    """Function to[step][row] = units of A[row] for a step, zeros past the end of k; rows past `rows` are kept.

    A `view` is as that of `view_packing.pack_view`.
    """
    body: tuple[Stmt, ...] = (LetPtr("parts", Ptr("to"), base(atom.left)),)
    if view:
        body += _in_runs(atom, storage, view) or _one_by_one(atom, const(0), const(0), view)
    elif layout == "row":
        body += _copied(atom)
    elif layout == "col" and isa.shuffles:
        body += _transposed(atom)
    else:
        body += _one_by_one(atom, const(0), const(0))
    params = (
        Param("elements"),
        Param("rows"),
        Param("tall"),
        Param("a", storage, readonly=True),
        *(Param(x) for x in (("row", "deep") if view else ("a_m", "a_k"))),
        Param("to", atom.left),
    )
    comment = f"to[step][tall][{BY_NAME[atom.left].bytes * atom.deep} bytes] = A[rows][elements], {layout} layout"
    return Function("pack_lines", "inner", params, body, comment, of=lines.name)


def pack_parts(isa: Isa, atom: Atom, layout: str, storage: str) -> Function:
    """Function to[step][part][row] = parts of A[row] for a step: bits from the first to the last, zeros past k.

    An infinity or a NaN is the first part, and others are 0.
    """
    real, count, line = isa.vector("f32", atom.n), parts(storage, atom.a), atom.k
    assert real is not None  # noqa: S101 - else the atom would not support int4
    whole = ELEMENTS // line
    element = Ptr("a", ROW * var("a_m") + (STEP * line + ELEMENT) * var("a_k"))
    fill = (
        For("e", const(0), minimum(line, ELEMENTS - STEP * line), const(1), (Move(Ptr("line", ELEMENT), element),)),
        For("e", minimum(line, ELEMENTS - STEP * line), const(line), const(1), (Move(Ptr("line", ELEMENT), None),)),
        *_split(real, atom, count, Ptr("line")),
    )
    first = const(0)
    steps: tuple[Stmt, ...] = ()
    if layout == "row":
        first = whole
        at = Ptr("a", ROW * var("a_m") + STEP * line)
        steps = (For("t", const(0), whole, const(1), tuple(_split(real, atom, count, at))),)
    steps += (For("t", first, ceil_div(ELEMENTS, line), const(1), fill),)
    literals = (("upper", -(1 << 16), "s32"), ("infinite", inf, "f32"), ("none", 0.0, "f32"))
    body = (
        LetPtr("to_parts", Ptr("to"), base(atom.left)),
        Scratch("line", line, storage),
        *(Map("literal", name, (value,), kind, kind, real.name) for name, value, kind in literals),
        For("i", const(0), ROWS, const(1), steps),
    )
    params = (
        Param("elements"), Param("rows"), Param("tall"), Param("a", storage, readonly=True), Param("a_m"), Param("a_k"),
        Param("to", atom.left),
    )  # fmt: skip
    comment = f"to[step][{count}][tall][{line}] = A[rows][elements] in {count} parts, {layout} layout"
    return Function("pack_parts", "inner", params, body, comment, of=real.name)


def _split(real: Atom, atom: Atom, count: int, p: Ptr) -> list[Stmt]:
    """Statements that cut the elements of a step at p into parts."""
    out: list[Stmt] = []
    for at in range(0, atom.k, real.n):
        out.append(Verb("load_b", "x0", p=p + at))
        for q in range(count):
            place = ((STEP * count + q) * TALL + ROW) * atom.k + at
            x, rest = f"x{q}", f"x{q + 1}"
            if q < count - 1:
                out += [
                    Map("bits", "number", (x,), "s32", "f32", real.name),
                    Map("and", "number", ("number", "upper"), "s32", "s32", real.name),
                    Map("from_bits", "part", ("number",), "f32", "s32", real.name),
                    Map("sub", rest, (x, "part"), "f32", "f32", real.name),
                ]
            if q == 0:  # what remains is finite
                out += [
                    Map("abs", "size", (x,), "f32", "f32", real.name),
                    Map("lt", "finite", ("size", "infinite"), "mask", "f32", real.name),
                    Map("select", "part", ("finite", "part", x), "f32", "f32", real.name),
                    Map("select", rest, ("finite", rest, "none"), "f32", "f32", real.name),
                ]
            out.append(Verb("store", x if q == count - 1 else "part", p=Ptr("to_parts", place)))
    return out


def _unit(atom: Atom, row: Index) -> Index:
    """Position, in units, of the current step of a row."""
    return (STEP * TALL + row) * atom.deep


def _element(atom: Atom) -> Ptr:
    """Address of the current packed element."""
    return Ptr("parts", _unit(atom, ROW) * atom.k_pack + ELEMENT)


def _copied(atom: Atom) -> tuple[Stmt, ...]:
    """Statements that copy rows of A that are contiguous along k, a step at a time."""
    whole = ELEMENTS // atom.k
    copy = (
        Verb("load_b", "x", p=Ptr("line", STEP * atom.deep), to=atom.left),
        Verb("store", "x", p=Ptr("to", _unit(atom, ROW)), to=atom.left),
    )
    from_ = Ptr("a", ROW * var("a_m") + whole * atom.k + ELEMENT)
    last = (
        Let("t", whole),
        Verb("zero", "z"),
        Verb("store", "z", p=Ptr("zeros", _unit(atom, ROW))),
        For("e", const(0), ELEMENTS - whole * atom.k, const(1), (Move(_element(atom), from_),)),
    )
    each = (
        LetPtr("line", Ptr("a", ROW * var("a_m")), atom.left, readonly=True),
        For("t", const(0), whole, const(1), copy, 4),
        If((whole * atom.k).lt(ELEMENTS), last),
    )
    return (LetPtr("zeros", Ptr("to"), atom.acc), For("i", const(0), ROWS, const(1), each))


def _transposed(atom: Atom) -> tuple[Stmt, ...]:
    """Statements that transpose columns of A in registers; what is not a whole block is moved one by one."""
    shuffles, columns = transpose(atom.deep)
    g, whole = var("g"), ELEMENTS // atom.k
    rows_of_k = [Ptr("a", g + (STEP * atom.k + j * atom.k_pack) * var("a_k")) for j in range(atom.deep)]
    load = tuple(Verb("load_rows", f"t0_{j}", p=p, step=var("a_k"), to=atom.left) for j, p in enumerate(rows_of_k))
    store = tuple(Verb("store", x, p=Ptr("to", _unit(atom, g + j)), to=atom.left) for j, x in enumerate(columns))
    block = For("g", const(0), ROWS - (atom.deep - 1), const(atom.deep), (*load, *shuffles, *store))
    return (
        For("t", const(0), whole, const(1), (block,)),
        *_one_by_one(atom, const(0), ROWS - ROWS % atom.deep),
        *_one_by_one(atom, whole, const(0)),
    )


def _one_by_one(atom: Atom, first: Index, row: Index, view: Layout | None = None) -> tuple[Stmt, ...]:
    """Statements that move elements from a step and a row on, and zeros past the end of k."""
    at = STEP * atom.k + ELEMENT
    to = _element(atom)
    source = (var("row") + ROW, var("deep") + at) if view else (ROW, at)
    fill = If(at.lt(ELEMENTS), (moved(to, view or operand("a", "any"), source),), (Move(to, None),))
    each = For("i", row, ROWS, const(1), (For("e", const(0), const(atom.k), const(1), (fill,)),))
    return (For("t", first, ceil_div(ELEMENTS, atom.k), const(1), (each,)),)


def _in_runs(atom: Atom, storage: str, view: Layout) -> tuple[Stmt, ...]:
    """Statements that pack each row of a view by runs that are in padding or not; none if it has no runs."""
    of = runs(view, 1, still=True)
    if not of:
        return ()
    origin = (var("row") + ROW, const(0))
    at = [Let(f"index_{c}", const(0) + x) for c, x in enumerate(view.indices(origin, var))]
    number, deep, length = var("run"), var("deep"), value(of.length)
    begin, there = var("begin"), const(1)
    for c, (x, own) in enumerate(zip(view.conditions, of.indices_of(number, var), strict=True)):
        there = reduce(mul, tests(x, var(f"index_{c}") + own, var(f"index_{c}") + own), there)
    copied: tuple[Stmt, ...] = _line(atom, storage, of)
    if view.conditions:
        copied = (Let("there", there), If(var("there"), copied, _no_line(atom, of)))
    past = (deep + begin - number * length) * value(of.step)
    each = (
        Let("begin", maximum(0, number * length - deep)),
        Let("end", minimum(ELEMENTS, (number + 1) * length - deep)),
        LetPtr("line", Ptr("a", var("offset") + (past + of.offset_of(number, var))), storage, readonly=True),
        *copied,
    )
    over_k = For("run", deep // length, ceil_div(deep + ELEMENTS, length), const(1), each)
    row: tuple[Stmt, ...] = (Let("offset", offset(view, *origin)), *at, over_k)
    whole = ELEMENTS // atom.k
    last = (
        Let("t", whole),
        For("e", ELEMENTS - whole * atom.k, const(atom.k), const(1), (Move(_element(atom), None),)),
    )
    rest = If((whole * atom.k).lt(ELEMENTS), last)
    return (LetPtr("zeros", Ptr("to"), atom.acc), For("i", const(0), ROWS, const(1), (*row, rest)))


def _steps(atom: Atom, of: Runs, step: tuple[Stmt, ...], element: Stmt) -> tuple[Stmt, ...]:
    """Loops over a part of a row, from `begin` to `end`: whole steps of k, and the elements before and after them."""
    begin, end = var("begin"), var("end")
    single = (Let("t", PLACE // atom.k), Let("e", PLACE % atom.k), element)
    if not step or (not of.length.terms and of.length.constant < atom.k):
        return (For("p", begin, end, const(1), single),)
    first = minimum(end, round_up(begin, atom.k))
    last = maximum(first, end // atom.k * atom.k)
    steps = For("t", first // atom.k, last // atom.k, const(1), step)
    return (For("p", begin, first, const(1), single), steps, For("p", last, end, const(1), single))


def _line(atom: Atom, storage: str, of: Runs) -> tuple[Stmt, ...]:
    """Copy of a part of a row that lies at `line`."""
    element = Move(_element(atom), Ptr("line", (PLACE - var("begin")) * value(of.step)))
    if of.step != 1 or storage != base(atom.left):
        return _steps(atom, of, (), element)
    step = (
        LetPtr("units", Ptr("line", STEP * atom.k - var("begin")), atom.left, readonly=True),
        Verb("load_b", "x", p=Ptr("units"), to=atom.left),
        Verb("store", "x", p=Ptr("to", _unit(atom, ROW)), to=atom.left),
    )
    return _steps(atom, of, step, element)


def _no_line(atom: Atom, of: Runs) -> tuple[Stmt, ...]:
    """Zeros for a part of a row that is in padding."""
    step = (Verb("zero", "z"), Verb("store", "z", p=Ptr("zeros", _unit(atom, ROW))))
    return _steps(atom, of, step, Move(_element(atom), None))
