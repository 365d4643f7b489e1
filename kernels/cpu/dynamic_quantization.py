"""Dynamic quantization of activations, row by row, before the product.

A row of floats becomes int8 values and a scale: the largest magnitude is 127
(symmetric, no zero point). All rows are quantised first, by all threads, into
scratch that the blocks of A are then packed from; the scales are applied by the
epilogue. A row of zeros has scale 0. A row with an infinity or a NaN
has a scale that is not finite, and so are its results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.lane_nodes import RowScale
from portmm.ir.nodes import Call, For, Function, If, Move, Parallel, Param, Scratch, Verb
from portmm.kernels.cpu.blocking import TASKS_PER_WORKER, WORKERS, M

if TYPE_CHECKING:
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.operands import Operands
    from portmm.target.atom import Atom

TOP = 127
"""int8 value of the largest magnitude."""


def quantise_rows(g: Operands) -> Stmt:
    """Quantization of all rows of A by parallel tasks, a few rows each."""
    real = g.isa.quantises(g.atom, g.s.a.source)
    assert real is not None  # noqa: S101 - else the ISA would not have been selected
    i, task, tasks = var("i"), var("task"), minimum(M, WORKERS * TASKS_PER_WORKER)
    args = (var("k"), g.operand("a", i * var("a_m")), Ptr("codes", i * g.quantised_step), Ptr("scales", i))
    row = Call(quantise(real, g.s.a.source), args)
    rows = For("i", M * task // tasks, M * (task + 1) // tasks, const(1), (row,))
    body = (*g.quantised_rows(), rows)
    share = Function("quantise_rows", "task", (Param("item"),), body, "Some rows of A as codes")
    return Parallel(share, tasks, (var("item"),))


def quantise(real: Atom, source: str) -> Function:
    """Function that computes codes[k] = round(x[k] * TOP / max |x|), *scale = max |x| / TOP."""
    lanes, k, p = real.n, var("k"), var("p")
    whole = k - k % lanes
    rest = const(0).lt(k % lanes)
    fill: tuple[Stmt, ...] = (
        For("e", const(0), const(lanes), const(1), (Move(Ptr("tail", var("e")), None),)),
        For("e", const(0), k % lanes, const(1), (Move(Ptr("tail", var("e")), Ptr("x", whole + var("e"))),)),
    )
    look: tuple[Stmt, ...] = (
        Verb("zero", "most", of=real.name),
        For("p", const(0), whole, const(lanes), _magnitudes(real, Ptr("x", p)), 4 if lanes > 1 else 1),
        *((If(rest, (*fill, *_magnitudes(real, Ptr("tail")))),) if lanes > 1 else ()),
        Verb("store", "most", p=Ptr("peaks"), of=real.name),
        RowScale(Ptr("scale"), Ptr("inverse"), Ptr("peaks"), lanes, TOP),
    )
    write: tuple[Stmt, ...] = (
        Verb("load_a", "by", p=Ptr("inverse"), of=real.name),
        For("p", const(0), whole, const(lanes), _quantised(real, Ptr("x", p), Ptr("codes", p)), 2 if lanes > 1 else 1),
    )
    if lanes > 1:
        spread = For("e", const(0), k % lanes, const(1), (Move(Ptr("codes", whole + var("e")), Ptr("last", var("e"))),))
        write += (If(rest, (*_quantised(real, Ptr("tail"), Ptr("last")), spread)),)
    scratch: tuple[Stmt, ...] = (Scratch("peaks", lanes, "f32"), Scratch("inverse", 1, "f32"))
    if lanes > 1:
        scratch += (Scratch("tail", lanes, "f32"), Scratch("last", lanes, "s8"))
    params = (Param("k"), Param("x", source, readonly=True), Param("codes", "s8"), Param("scale", "f32"))
    return Function("quantise_row", "inner", params, (*scratch, *look, *write), "codes[k], *scale = x[k], quantised")


def _magnitudes(real: Atom, at: Ptr) -> tuple[Stmt, ...]:
    return (Verb("load_b", "x0", p=at, of=real.name), Verb("amax", "most", a="x0", of=real.name))


def _quantised(real: Atom, at: Ptr, to: Ptr) -> tuple[Stmt, ...]:
    return (
        Verb("load_b", "x0", p=at, of=real.name),
        Verb("zero", "y0", of=real.name),
        Verb("mac", "y0", "by", "x0", of=real.name),
        Verb("store", "y0", p=to, of=real.name),
    )
