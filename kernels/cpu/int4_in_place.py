"""Int4 values of B multiplied in place: the calls of their micro-kernel, and of the function that sums A for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import Call, LetPtr
from portmm.kernels.cpu.int4_panels import group_sums, int4_micro_kernel
from portmm.kernels.cpu.microkernel import Shape
from portmm.spec.problem import family

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.operands import Operands


def multiply(g: Operands, shape: Shape, row: Index, column: Index) -> Stmt:
    """Call of the micro-kernel on the register tile at a row and a column of C."""
    result = (g.result(row, column), g.c_step, var("columns"))
    step = (var("b_n"),) if shape.panels > 1 else ()
    args = (var("k"), *g.rows_of_a(const(0)), Ptr("bp"), *step, *_sums(g), g.groups_of_k, *result)
    return Call(int4_micro_kernel(g.isa, g.atom, family(g.s.family), shape), args)


def sum_groups(g: Operands, height: int) -> Stmt:
    """Call that sums so many rows of A over quantization groups."""
    real = g.isa.vector("f32", g.atom.n)
    assert real is not None  # noqa: S101 - else the atom would not support int4 values
    shape = Shape(rows=height, nr=g.s.nr, a_packed=g.s.a.packed, a=g.read_types[0])
    function = group_sums(g.atom, real, family(g.s.family), shape)
    return Call(function, (var("k"), *g.rows_of_a(const(0)), *_sums(g), g.groups_of_k))


def buffers(g: Operands) -> tuple[Stmt, ...]:
    """Names of the buffers of these sums."""
    place = g.private() + (g.b_size + g.a_size + g.c_size)
    names = []
    for name, (dtype, count) in g.group_sum_buffers.items():
        names.append(LetPtr(name, place, dtype))
        place += g.row_buffer_size(count)
    return tuple(names)


def _sums(g: Operands) -> list[Ptr]:
    """Addresses of the sums of the current slice of A."""
    return [Ptr(name, var("r") * count) for name, (_, count) in g.group_sum_buffers.items()]
