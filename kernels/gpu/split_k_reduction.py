"""Split-K reduction: a second kernel that adds the sums of slices of k.

Each slice of a product has stored its sums in scratch, row after row of n; a thread adds those
of one element in the order of k and stores the epilogue's result: `epilogue_store.element`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, var
from portmm.ir.nodes import Add, For, If, Let, Move, Scratch
from portmm.kernels.gpu.epilogue_store import element, operands
from portmm.kernels.gpu.simt import results
from portmm.spec.epilogue import parse

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

THREADS = 128


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel that adds the slices of a schedule."""
    c = s.types[2]
    each = ceil_div(var("n"), THREADS)
    column, row = var("column"), var("row")
    step = const(1) if s.c.layout == "row" else var("c_n")
    work = Ptr("work", var("item") * var("work_batch") + row * var("n") + column)
    to = Ptr("c", var("item") * var("c_batch") + row * var("c_m") + column * step)
    more = For(
        "i", const(1), const(s.parallel.split), const(1),
        (Add(Ptr("sum"), work + var("i") * (var("batch") * var("work_batch"))),),
    )  # fmt: skip
    total: list[Stmt] = [Scratch("sum", 1, atom.acc), Move(Ptr("sum"), work), more]
    if s.epilogue:
        fused = parse(s.epilogue)
        total += [*operands(isa, fused), Scratch("c_out", 1, c)]
        total += [*element(isa, fused, Ptr("sum"), Ptr("c_out"), column), Move(to, Ptr("c_out"))]
    else:
        total.append(Move(to, Ptr("sum")))
    body: tuple[Stmt, ...] = (
        Let("item", var("block") // (var("m") * each)),
        Let("row", var("block") % (var("m") * each) // each),
        Let("column", var("block") % each * THREADS + var("thread")),
        If(column.lt(var("n")), tuple(total)),
    )
    params = (
        *(Argument(x, "int") for x in ("m", "n", "batch")), Argument("work_batch", "long"),
        Argument("work", "pointer", atom.acc, readonly=True, alone=True), *results(s, c),
    )  # fmt: skip
    grid = (var("batch") * var("m") * each, const(1))
    name = str(replace(s.name(atom), op="slices"))
    return GridKernel(name, isa, atom, params, THREADS, grid, body)
