"""Column reductions: sums and maxima over the rows of element-wise expressions.

    for each group of columns           <- threads
      for each vector of them
        for each row
          a value, added to one register

A group is a few cache lines wide, so that lines of a row are in L2 when the next
vector of columns is reduced. Results are one row for each item of a batch; expressions
of that row and of elements are a second kernel, over rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import ceil_div, const, minimum, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, Parallel, Param
from portmm.kernels.cpu.elementwise import Elements, arguments, parameters
from portmm.spec.epilogue import REDUCTIONS, operand_types

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

GROUP = 128
"""Columns of a group: eight cache lines of f32, a run that prefetchers follow."""


def build(isa: Isa, real: Atom, fused: Fused) -> Kernel:
    """Kernel that reduces all columns."""
    n, groups, task = var("n"), ceil_div(var("n"), GROUP), var("task")
    start = var("column")
    here = arguments(fused, var("item"), const(0), start)
    few = minimum(n - start, GROUP)
    body: tuple[Stmt, ...] = (
        Let("item", task // groups),
        Let("column", task % groups * GROUP),
        Call(group_function(isa, real, fused), (var("m"), n, few, var("item"), start, *here)),
    )
    share = Function("some_columns", "task", (), body, "A group of columns")
    entry = Function("entry", "entry", (), (Parallel(share, groups * var("batch")),), "All columns")
    return Kernel(f"portmm_columns_{real.name}", isa, real, entry, const(64), operands=operand_types(str(fused)))


def group_function(isa: Isa, real: Atom, fused: Fused) -> Function:
    """Function that reduces all rows of a few columns."""
    at = Elements(isa, real, fused, inner=var("i"), row=var("i"), column=var("column"))
    count = var("columns")
    whole = count - count % real.n
    body: list[Stmt] = [*at.scratch(), For("j", const(0), whole, const(real.n), _down(at, var("j"), ""))]
    if real.n > 1:
        rest = (Let("j", whole), Let("left", count - whole), *at.few(count - whole))
        body.append(If(whole.lt(count), (*rest, *_down(at, var("j"), "left"))))
    params = [Param("m"), Param("n"), Param("columns"), Param("item"), Param("column"), *parameters(fused)]
    return Function("down", "inner", tuple(params), tuple(body), "Sums and maxima of a few columns")


def _down(at: Elements, j: Index, few: str) -> tuple[Stmt, ...]:
    """Statements for one vector of columns: a loop over rows, then the results."""
    return (*reduced(at, j, few, const(0), var("m")), *results(at, j, few))


def results(at: Elements, j: Index, few: str) -> tuple[Stmt, ...]:
    """Statements that compute and store the results of the vector of columns at j from its reductions."""
    stmts = at.compute([x for _, x in at.fused.results], j, few)
    return (*stmts, *(s for i, x in at.fused.results for s in at.store(x, i, j, few)))


def reduced(at: Elements, j: Index, few: str, begin: Index, end: Index) -> tuple[Stmt, ...]:
    """Statements that reduce rows `begin` to `end` of the vector of columns at j to registers."""
    reductions = at.fused.column_reductions
    values = [x.args[1] for x in reductions]
    at.names = {}
    stmts = [*at.once(values, "bn", j, few), *(start(at, i, x) for i, x in enumerate(reductions))]
    fixed = dict(at.names)
    rows = list(at.compute(values, j, few))
    for i, x in enumerate(reductions):
        register, before = at.value(x.args[1])
        rows += [*before, combined(at, i, x, register)]
    at.names = fixed | {x: f"all{i}" for i, x in enumerate(reductions)}
    return (*stmts, For("i", begin, end, const(1), tuple(rows)))


def start(at: Elements, i: int, x: Expr) -> Stmt:
    """Initial value of the i-th reduction, in its register."""
    return Map("literal", f"all{i}", (REDUCTIONS[x.args[0]],), "f32", "f32", at.real.name)


def combined(at: Elements, i: int, x: Expr, register: str) -> Stmt:
    """Combination of the i-th reduction with a value in a register."""
    return Map(x.args[0], f"all{i}", (f"all{i}", register), "f32", "f32", at.real.name)
