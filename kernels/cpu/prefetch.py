"""Prefetch operands of the blocked GEMM's micro-kernel.

A tile's accumulators are in registers for the whole of its loop over k, and the
load and store ports have slack: step p prefetches the line at x_next + p * x_step of
the next operands. Of a slice of A in place whose rows lie along k, every LINE steps
prefetch a line of each row: an address for each step would take a multiplication, and
registers of the rows' addresses. C is prefetched into L1, for writing;
A and B into L2, where they do not evict the panel in L1. Where an epilogue
writes C, it is the C of the same tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.address import strides
from portmm.ir.index import Ptr, const, var
from portmm.spec.layouts import operand

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.kernels.cpu.operands import Operands


def next_item(g: Operands, row: Index) -> list[Index | Ptr]:
    """Prefetch operands of the same tile of C in the next item, and of the next line of its A and B at each step."""
    line, done = g.line, (var("i") + (var("j") * var("slices"))) * var("kd")
    if g.finishes:
        out: list[Index | Ptr] = [g.operand("c", row * var("c_m") + var("column")), var("c_m")]
    else:
        out = [g.result(row, var("column")) + var("c_batch")]
    for x in g.streams:
        out += [g.operand(x, var(f"{x}_batch") + (done + g.before) * line), const(line)]
    return out


def next_panel(g: Operands, height: int) -> list[Index | Ptr]:
    """Prefetch operands of the next tile of C, the next slice of A, and a part of the next panel of B."""
    more = (var("i") + 1).lt(var("slices"))
    next_row = var("row") + more * (var("r") + height)
    next_column = var("column") + (1 - more) * g.s.nr
    if g.finishes:  # of this tile: its epilogue is next
        out: list[Index | Ptr] = [g.element(var("row") + var("r"), var("column")), var("c_m")]
    else:
        out = [g.result(next_row, next_column)]
    out += _next_a(g, height) if "a" in g.streams else []
    return out + (_next_b(g) if "b" in g.streams else [])


def _deeper(g: Operands) -> Index:
    """Expression that is 1 if another block of k follows this one."""
    return (g.pc + var("kd")).lt(g.end) if g.s.kc else const(0)


def _next_a(g: Operands, height: int) -> list[Index | Ptr]:
    """Prefetch operands of A: the same slice in the next block of k, or after the last block the next slice."""
    s, deeper = g.s, _deeper(g)
    a_m, a_k = strides(operand("a", s.a.layout))
    here = (var("row") + var("r")) * a_m + g.pc * a_k
    there = deeper * (var("kd") * a_k) + (1 - deeper) * (a_m * height)
    if s.a.layout == "col":
        return [g.operand("a", here + there + g.before * a_k), a_k]
    return [g.operand("a", here + there + g.before)]


def _next_b(g: Operands) -> list[Index | Ptr]:
    """Prefetch operands of B: the next panel, or after the last panel the first of the next block of k."""
    s, line = g.s, g.line
    part = var("i") % max(1, s.nr // line) * line
    more = (var("j") + 1).lt(var("last"))
    back = var("column") - var("first") * s.nr
    if g.panel_step is not None:
        back = back // s.nr * g.panel_step
        there = more * g.panel_step + (1 - more) * (var("kd") * s.nr - back)
        return [Ptr("bp", there + part * var("kd") + g.before * line), const(line)]
    there = more * s.nr + (1 - more) * (var("kd") * var("b_k") - back)
    return [Ptr("bp", there + part + g.before * var("b_k")), var("b_k")]
