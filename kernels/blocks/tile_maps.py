"""Element-wise operations on a tile, as a function of its rows and columns.

Owns `View`, a value in memory, and `map_function`: the values that it reads are other tiles, parts of operands and
vectors, each with strides of its own. And `largest_function`, the maxima of columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from portmm.ir.index import Ptr, const, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import For, Function, Param, Verb
from portmm.kernels.cpu.elementwise import Elements, parameters, vectors

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.spec.epilogue import Fused
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


class View(NamedTuple):
    """A value in memory.

    Attributes:
        at: its first element.
        strides: of the labels along which it varies.
    """

    at: Ptr
    strides: dict[str, Index]

    def along(self, label: str) -> Index:
        """The stride of a label, 0 where it does not vary."""
        return self.strides.get(label, const(0))

    def contiguous(self, label: str) -> bool:
        """Whether neighbours along a label are neighbours in memory."""
        return not label or self.along(label) == const(1)


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


CHAINS = 4
"""Maxima of every fourth row, which do not wait for each other."""


def largest_function(name: str, real: Atom, op: str) -> Function:
    """Function that adds the rows of a tile of scratch, whose rows are whole vectors, to a vector of maxima."""
    i, rows, of = var("i"), var("rows"), real.name
    most = [f"most{e}" for e in range(CHAINS)]

    def row(at: Index, e: int) -> tuple[Stmt, ...]:
        load = Verb("load_c", f"x{e}", p=Ptr("tile", at * var("step") + var("j")), of=of)
        return (load, Map(op, most[e], (f"x{e}", most[e]), "f32", "f32", of))

    whole = rows - rows % CHAINS
    several = tuple(s for e in range(CHAINS) for s in row(i + e, e))
    column = (
        *(Verb("load_c", x, p=Ptr("most", var("j")), of=of) for x in most),
        For("i", const(0), whole, const(CHAINS), several),
        For("i", whole, rows, const(1), row(i, 0)),
        *(Map(op, most[0], (x, most[0]), "f32", "f32", of) for x in most[1:]),
        Verb("store", most[0], p=Ptr("most", var("j")), of=of),
    )
    params = (Param("rows"), Param("columns"), Param("tile", "f32", readonly=True), Param("step"), Param("most", "f32"))
    body = (For("j", const(0), var("columns"), const(real.n), column),)
    return Function(name, "inner", params, body, "Maxima of the columns of a tile")
