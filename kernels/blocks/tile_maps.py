"""Element-wise operations on a tile, as a function of its rows and columns.

Owns `map_function`: the values that it reads are other tiles, parts of operands and vectors, each with strides of its
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import const, var
from portmm.ir.nodes import For, Function, Param
from portmm.kernels.cpu.elementwise import Elements, parameters, vectors

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def map_function(name: str, isa: Isa, real: Atom, fused: Fused) -> Function:
    """Function that computes the results of expressions on each element of a tile, along m and n."""
    at = Elements(isa, real, fused, inner=var("i"), row=var("i"))
    wanted = [x for _, x in fused.results]
    fixed_steps = at.once(wanted, "m")
    fixed = dict(at.names)

    def step(j: Index, few: str = "") -> tuple[Stmt, ...]:
        at.names = dict(fixed)
        return (*at.compute(wanted, j, few), *(s for i, x in fused.results for s in at.store(x, i, j, few)))

    row = (*fixed_steps, *vectors(at, const(0), var("columns"), step))
    body = (*at.scratch(), For("i", const(0), var("rows"), const(1), row))
    params = (Param("rows"), Param("columns"), *parameters(fused))
    return Function(name, "inner", params, body, "Element-wise operations on a tile")
