"""Prepacking of weights, before all products: kernels around those of `panel_packing`.

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
from portmm.ir.nodes import Function, Kernel, Let, Move, Parallel
from portmm.kernels.cpu.panel_packing import Panels
from portmm.spec.dtype import BY_NAME, base, unit
from portmm.spec.kernel_name import KernelName
from portmm.spec.problem import Family
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
    row, n, panel, elements = (var(x) for x in ("row", "n", "panel", "rows"))
    b, c = (Ptr(x, var("item") * var(f"{x}_batch")) for x in "bc")
    step = Family(base(to), nr, kr, sums).panel(k)
    panels = Panels(
        isa, atom, nr, near, layout, storage, to, PREFETCH, panel, minimum(panel + near, ceil_div(n, nr)), n, n,
        ceil_div(elements, kr), elements, lambda column: b + row * var("b_k") + column * var("b_n"),
        lambda q: c + q * step + row // kr * nr, step, sums,
    )  # fmt: skip
    body: tuple[Stmt, ...] = (
        Let("item", task // (groups * cuts)),
        Let("row", task // groups % cuts * MODEL.pack_rows if cut else const(0)),
        Let("rows", minimum(k - var("row"), MODEL.pack_rows) if cut else k),
        Let("panel", task % groups * near),
        panels.packed(),
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
