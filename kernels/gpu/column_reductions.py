"""Column reductions on a GPU: sums and maxima over the rows of element-wise expressions.

    for each few columns, and each slice of the rows   <- blocks of threads
      each thread reduces a column

Neighbouring threads have neighbouring columns. Where a column is cut in slices, each stores its partial results
in scratch, and a second kernel combines them, always in the same order. Results are
one row for each item of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import For, If, Let, Verb
from portmm.kernels.cpu.column_reductions import combined, reduced, results, start
from portmm.kernels.cpu.elementwise import Elements
from portmm.kernels.gpu import parameters
from portmm.kernels.gpu.epilogue_store import operands

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(isa: Isa, real: Atom, fused: Fused, threads: int, *, sliced: bool) -> tuple[GridKernel, ...]:
    """Kernel that reduces all columns, or the two that do where columns are `sliced`."""
    at = Elements(isa, real, fused, inner=var("i"), row=var("i"))
    column = var("column")
    down = reduced(at, column, "", const(0), var("m"))
    if not sliced:
        return (_kernel("portmm_columns", at, threads, (*down, *results(at, column, "")), const(1)),)
    each = ceil_div(var("m"), var("slices"))
    share = (
        Let("first", minimum(var("m"), var("slice") * each)),
        Let("last", minimum(var("m"), var("first") + each)),
    )
    reductions = at.fused.column_reductions
    leave = (
        Verb("store", f"all{i}", p=_partial(i, len(reductions), var("slice")), of=real.name)
        for i in range(len(reductions))
    )
    parts = (*share, *reduced(at, column, "", var("first"), var("last")), *leave)
    whole: list[Stmt] = [start(at, i, x) for i, x in enumerate(reductions)]
    for i, x in enumerate(reductions):
        other = Verb("load_c", "other", p=_partial(i, len(reductions), var("s")), of=real.name)
        whole.append(For("s", const(0), var("slices"), const(1), (other, combined(at, i, x, "other"))))
    at.names = {x: f"all{i}" for i, x in enumerate(reductions)}
    return (
        _kernel("portmm_columns", at, threads, parts, var("slices"), sliced=True),
        _kernel("portmm_columns_whole", at, threads, (*whole, *results(at, column, "")), const(1), sliced=True),
    )


def _kernel(
    name: str, at: Elements, threads: int, body: tuple[Stmt, ...], slices: Index, *, sliced: bool = False
) -> GridKernel:
    across = ceil_div(var("n"), threads)
    params = parameters.integers("m", "n", "batch")
    params += [Argument("slices", "int"), Argument("work", "pointer", "f32")] if sliced else []
    place = (
        Let("across", across),
        Let("item", var("block") // var("across")),
        Let("column", var("block") % var("across") * threads + var("thread")),
        *operands(at.isa, at.fused),
        If(var("column").lt(var("n")), body),
    )
    grid = (across * var("batch"), slices)
    return GridKernel(name, at.isa, at.real, (*params, *parameters.of_fused(str(at.fused))), threads, grid, place)


def _partial(number: int, count: int, part: Index) -> Ptr:
    """Address of the partial result of a slice of a column."""
    return Ptr("work", ((part * var("batch") + var("item")) * count + number) * var("n") + var("column"))
