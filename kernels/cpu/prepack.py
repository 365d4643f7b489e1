"""Prepacking of weights, before all products: kernels around the packers of `packing`.

A weight that is contiguous along n is cut into strips of rows, and tasks take a few panels of
a strip, so that they read long runs of rows on few pages, and there are
enough tasks. Where columns are summed, which takes all of k, and where a weight
is contiguous along k, a task takes all rows of its panels. Elements that are not converted
are moved as integers of their size, where an instruction set supports it.

Panels go to new memory. Before they are written, one element at the end of each
huge page of C is, so that the system clears that page from its start: the fields
`c_m` and `c_n` are the offset of the first of them and their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.abi import HUGE_PAGE
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, Move, Parallel
from portmm.kernels.cpu.packing import pack_b, pack_b_rows, sum_columns, sum_units, sums_at
from portmm.spec.dtype import BY_NAME, unit
from portmm.spec.kernel_name import KernelName
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

PREFETCH = 4
"""Prefetch distance in rows of units: a miss takes as long as copying some rows."""


def build(isa: Isa, atom: Atom, nr: int, layout: str, storage: str) -> Kernel:
    """Kernel that packs each item of a batch of B: C[panel][k][NR] = B[k][n], in units of B's elements."""
    atom = isa.row_atom(atom) or atom
    k, task, kr = var("k"), var("task"), atom.k_pack
    to, sums = unit(storage, kr), atom.acc == "s32"
    name = KernelName("pack", atom.acc, atom.a, storage, 1, nr, kr, isa.name)
    if kr == 1:
        atom, storage = _mover(isa, atom, storage)
        to = storage
    near = max(1, MODEL.run_bytes // (nr * BY_NAME[to].bytes)) if layout == "row" else 1
    cut = layout == "row" and not sums
    groups, cuts = ceil_div(ceil_div(var("n"), nr), near), ceil_div(k, MODEL.pack_rows) if cut else const(1)
    body: tuple[Stmt, ...] = (
        Let("item", task // (groups * cuts)),
        Let("row", task // groups % cuts * MODEL.pack_rows if cut else const(0)),
        Let("rows", minimum(k - var("row"), MODEL.pack_rows) if cut else k),
        Let("panel", task % groups * near),
        *_panels(isa, atom, nr, near, layout, storage, to, sums),
    )
    one = Function("share_of_b", "task", (), body, "Some rows of a few panels of one item")
    entry = entry_of(one, groups * cuts * var("batch"), to)
    return Kernel(str(name), isa, atom, entry, const(64), types=(("b", storage), ("c", to)))


def _mover(isa: Isa, atom: Atom, storage: str) -> tuple[Atom, str]:
    """Atom that moves elements without conversion, and the type it moves them as: integers, if supported."""
    words = isa.vector("s32", atom.n)
    taken = {1: "s8", 2: "s16"}.get(BY_NAME[storage].bytes, "")
    moves = words and taken and all(isa.spelling(words, x, taken, "s32") for x in ("load_b", "store"))
    return (words, taken) if words and moves else (atom, storage)


def entry_of(one: Function, tasks: Index, to: str) -> Function:
    """Entry function: every panel, after one store to every page."""
    touch = Move(Ptr("c", var("c_m") + var("task") * (HUGE_PAGE // BY_NAME[to].bytes)), None)
    page = Function("touch_page", "task", (), (touch,), "The end of a page of C")
    return Function("entry", "entry", (), (Parallel(page, var("c_n")), Parallel(one, tasks)), "Every panel")


def _panels(  # noqa: PLR0917 - the order of a packer's geometry is the same everywhere
    isa: Isa, atom: Atom, nr: int, near: int, layout: str, storage: str, to: str, sums: bool
) -> tuple[Stmt, ...]:
    """Statements that pack up to `near` panels from `panel` on, in `rows` rows from `row` on."""
    n, row, panel, q, kr = var("n"), var("row"), var("panel"), var("q"), atom.k_pack
    depth = ceil_div(var("k"), kr)
    step = sums_at(depth, nr, to) + sum_units(atom, nr, to) if sums else depth * nr
    units, full = ceil_div(var("rows"), kr), var("rows") // kr
    b, c = (Ptr(x, var("item") * var(f"{x}_batch")) for x in "bc")

    def source(j: Index) -> Ptr:
        return b + row * var("b_k") + j * nr * var("b_n")

    def place(j: Index) -> Ptr:
        return c + j * step + row // kr * nr

    def single(first: Index) -> Call:
        bounds = (var("rows"), first) if kr > 1 else ()
        columns = minimum(n - q * nr, nr)
        packer = pack_b(isa, atom, nr, layout, storage, to)
        return Call(packer, (units, *bounds, columns, source(q), var("b_k"), var("b_n"), place(q)))

    last = minimum(panel + near, ceil_div(n, nr))
    alone: tuple[Stmt, ...] = (For("q", panel, last, const(1), (single(const(0)),)),)
    packed = alone
    if near > 1:
        rows = pack_b_rows(atom, nr, near, PREFETCH, storage, to)
        together: tuple[Stmt, ...] = (Call(rows, (full, source(panel), var("b_k"), place(panel), step)),)
        if kr > 1:  # the remainder of k after whole units
            together += (If(full.lt(units), (For("q", panel, last, const(1), (single(full),)),)),)
        packed = (If(n.lt((panel + near) * nr), alone, together),)
    if sums:
        packed += (For("q", panel, last, const(1), (Call(sum_columns(atom, nr, to), (depth, place(q))),)),)
    return packed
