"""Weights laid out ahead of all products: whole kernels around the packers of `packing`.

A weight that runs along n is cut into strips of rows, and tasks take a few panels of
a strip, so that they read long runs of rows that lie on few pages, and there are
enough of them. Where columns are summed, which takes all of k, and where a weight
runs along k, a task takes all rows of its panels. What is not converted is moved as
integers of its size, where an instruction set can.

Panels go to new memory. Before they are written, one element at the end of each
huge page of C is, which has the system clear that page from its start: the fields
`c_m` and `c_n` say where the first of them is, and how many there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.abi import HUGE_PAGE
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, Move, Parallel, Ptr, ceil_div, const, minimum, var
from portmm.kernels.cpu.packing import pack_b, pack_b_rows, sum_columns, sum_units, sums_at
from portmm.schedule.cpu_candidates import PACK_ROWS, RUN_BYTES
from portmm.spec.dtype import BY_NAME, unit
from portmm.spec.kernel_name import KernelName

if TYPE_CHECKING:
    from portmm.ir.nodes import Index, Stmt
    from portmm.target.target import Atom, Isa

PREFETCH = 4
"""Rows of units that are asked for ahead: a miss takes as long as copying some rows."""


def build(isa: Isa, atom: Atom, nr: int, layout: str, held: str) -> Kernel:
    """The kernel that packs each item of a batch of B: C[panel][k][NR] = B[k][n], in units of what B holds."""
    atom = isa.row_atom(atom) or atom
    k, task, kr = var("k"), var("task"), atom.k_pack
    to, sums = unit(held, kr), atom.acc == "s32"
    name = KernelName("pack", atom.acc, atom.a, held, 1, nr, kr, isa.name)
    if kr == 1:
        atom, held = _mover(isa, atom, held)
        to = held
    near = max(1, RUN_BYTES // (nr * BY_NAME[to].bytes)) if layout == "row" else 1
    cut = layout == "row" and not sums
    groups, cuts = ceil_div(ceil_div(var("n"), nr), near), ceil_div(k, PACK_ROWS) if cut else const(1)
    body: tuple[Stmt, ...] = (
        Let("item", task // (groups * cuts)),
        Let("row", task // groups % cuts * PACK_ROWS if cut else const(0)),
        Let("rows", minimum(k - var("row"), PACK_ROWS) if cut else k),
        Let("panel", task % groups * near),
        *_share(isa, atom, nr, near, layout, held, to, sums),
    )
    one = Function("share_of_b", "task", (), body, "Some rows of a few panels of one item")
    entry = entered(one, groups * cuts * var("batch"), to)
    return Kernel(str(name), isa, atom, entry, const(64), types=(("b", held), ("c", to)))


def _mover(isa: Isa, atom: Atom, held: str) -> tuple[Atom, str]:
    """What moves elements that are not converted, and the type that it takes them for: integers, if it can."""
    words = isa.vector("s32", atom.n)
    taken = {1: "s8", 2: "s16"}.get(BY_NAME[held].bytes, "")
    moves = words and taken and all(isa.spelling(words, x, taken, "s32") for x in ("load_b", "store"))
    return (words, taken) if words and moves else (atom, held)


def entered(one: Function, tasks: Index, to: str) -> Function:
    """Every panel, after a touch of every page."""
    touch = Move(Ptr("c", var("c_m") + var("task") * (HUGE_PAGE // BY_NAME[to].bytes)), None)
    page = Function("touch_page", "task", (), (touch,), "The end of a page of C")
    return Function("entry", "entry", (), (Parallel(page, var("c_n")), Parallel(one, tasks)), "Every panel")


def _share(  # noqa: PLR0917 - as a packer's geometry is told everywhere
    isa: Isa, atom: Atom, nr: int, near: int, layout: str, held: str, to: str, sums: bool
) -> tuple[Stmt, ...]:
    """Panels from `panel` on, `near` of them or what there is, in `rows` rows from `row` on."""
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
        packer = pack_b(isa, atom, nr, layout, held, to)
        return Call(packer, (units, *bounds, columns, source(q), var("b_k"), var("b_n"), place(q)))

    last = minimum(panel + near, ceil_div(n, nr))
    alone: tuple[Stmt, ...] = (For("q", panel, last, const(1), (single(const(0)),)),)
    packed = alone
    if near > 1:
        rows = pack_b_rows(atom, nr, near, PREFETCH, held, to)
        together: tuple[Stmt, ...] = (Call(rows, (full, source(panel), var("b_k"), place(panel), step)),)
        if kr > 1:  # what is left of k after whole units
            together += (If(full.lt(units), (For("q", panel, last, const(1), (single(full),)),)),)
        packed = (If(n.lt((panel + near) * nr), alone, together),)
    if sums:
        packed += (For("q", panel, last, const(1), (Call(sum_columns(atom, nr, to), (depth, place(q))),)),)
    return packed
