"""Register tile of a blocked GEMM: calls of its micro-kernel and of its epilogue.

A tile is `h` rows from `r` on of a block that begins at `row`, by `columns` from `column` on.

While it is computed, the operands of the next one are prefetched. A tile's accumulators are in registers for the
whole of its loop over k, and the load and store ports have slack: step p prefetches the line at x_next + p * x_step
of the next operands. Of a slice of A in place whose rows lie along k, every LINE steps prefetch a line of each row:
an address for each step would take a multiplication, and registers of the rows' addresses. C is prefetched into L1,
for writing; A and B into L2, where they do not evict the panel in L1. Where an epilogue writes C, it is the C of the
same tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.ir.address import strides
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Call, If
from portmm.kernels.cpu import int4_in_place
from portmm.kernels.cpu.elementwise import arguments, own
from portmm.kernels.cpu.epilogue import finish as finish_tile
from portmm.kernels.cpu.microkernel import Shape, micro_kernel
from portmm.kernels.cpu.packing import sums_at
from portmm.kernels.cpu.summation_runs import apart, kept
from portmm.kernels.cpu.sweep import sweep
from portmm.kernels.cpu.tile_column import column
from portmm.schedule.schedule import by_columns
from portmm.spec.dtype import BY_NAME
from portmm.spec.layouts import operand
from portmm.target.summation import BlockOfK

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.cpu.operands import Operands
    from portmm.schedule.schedule import Schedule


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
    """Prefetch operands of B: the next panel, or after the last panel the first of the next block of k.

    Of a panel that is contiguous each slice of A prefetches a share, so that few lines are under way at a time.
    Granite Rapids, panels from memory: 0.89 to 0.94 of the time of a half by each of the first two slices.
    """
    s, line = g.s, g.line
    more = (var("j") + 1).lt(var("last"))
    back = var("column") - var("first") * s.nr
    if g.panel_step is not None:
        back = back // s.nr * g.panel_step
        there = more * g.panel_step + (1 - more) * (var("kd") * s.nr - back)
        step = minimum(line, ceil_div(const(s.nr), var("slices")))
        return [Ptr("bp", there + (var("i") * var("kd") + g.before) * step), step]
    part = var("i") % max(1, s.nr // line) * line
    there = more * s.nr + (1 - more) * (var("kd") * var("b_k") - back)
    return [Ptr("bp", there + part + g.before * var("b_k")), var("b_k")]


ROWS_AHEAD = 16
"""Rows of a B in place from a prefetch to its use, where a micro-kernel packs them: 128x768x768 on Granite Rapids takes
1.01 of the time with 8 or 32, 1.04 without."""
MOST_UNROLLED = 128
"""Multiply-adds of a fully unrolled micro-kernel: past that, compiling costs more than the loop."""
NEAR_ITEM = 16 << 10
"""Bytes of an item of a batch that fits every L1 beside the next one. Granite Rapids, 1000 x 16x16x16 from L3: 0.97 of
the time with the next item prefetched into L1, not L2."""
ROW, COLUMN = var("row") + var("r"), var("column")
"""First row and column of C."""


def multiply_column(g: Operands, height: int) -> Stmt:
    """Call of the micro-kernel for `count` slices of so many rows by a packed panel that has all of k."""
    c = (g.result(ROW, COLUMN), g.c_step, var("columns"))
    args = (var("count"), var("kd"), *g.rows_of_a(const(0)), Ptr("bp"), *c)
    return Call(column(g.atom, _shape(g, height, 1), g.s.kc, ahead=g.s.c.prefetch > 0), args)


def multiply(g: Operands, height: int, panels: int, *, packs: bool = False) -> Stmt:
    """Call of the micro-kernel of so many rows, by a number of panels; perhaps of the one that packs the panel."""
    s, shape = g.s, _shape(g, height, panels)
    if packs:
        shape = replace(shape, b_packed=False, packs=True, prefetch=ROWS_AHEAD)
        if shape.grouped:  # of steps that are written out, clang loads rows of B early, and spills vectors of RISC-V
            shape = replace(shape, unroll=1)
    if g.int4_in_place:
        return int4_in_place.multiply(g, shape, ROW, COLUMN)
    runs, part = g.block_of_k is BlockOfK.RUNS, g.block_of_k is BlockOfK.PART
    args: list[Index | Ptr] = [minimum(var("run"), var("kd") - var("p_run")) if runs else var("kd")]
    args += g.rows_of_a(g.before)
    panel = Ptr("bp", g.before * (s.nr if packs or shape.b_packed else var("b_k")))
    if packs:
        args += [g.source(COLUMN, g.pc + g.before), var("b_k"), panel]
    else:
        args += [panel] if shape.b_packed else [panel, var("b_k")]
    if panels > 1:
        args.append(g.panel_step or const(0))
    if shape.unshift:
        args.append(sums_at(var("kd") if shape.unshift == "block" else g.k, s.nr, g.read_types[1]))
    before = (var("run_start") if part else g.start).lt(g.pc + g.before)
    args += [g.result(ROW, COLUMN), g.c_step, var("columns"), before]
    args += kept(g, ROW, COLUMN) if part else ()
    args += apart(g, ROW) if shape.apart else ()
    if g.sweeps and shape.b_packed:
        args.append((g.panel_step or g.of_panels(g.b_near)) // s.nr)
    if shape.ahead is not None:
        args += next_item(g, ROW) if s.parallel.over == "batch" else next_panel(g, height)
    function = sweep(g.atom, shape, s.kc) if g.sweeps else micro_kernel(g.atom, shape)
    return Call(function, tuple(args))


def _shape(g: Operands, height: int, panels: int) -> Shape:
    s = g.s
    return Shape(
        rows=height,
        nr=s.nr,
        panels=panels,
        a_packed=s.a.packed,
        b_packed=s.b.packed or s.b.layout == "packed",
        prefetch=s.b.prefetch,
        along=s.b.along,
        ahead=g.streams if s.c.prefetch and panels == 1 and not by_columns(s, g.atom) else None,
        near=_near(s),
        slice_ahead=s.parallel.over != "batch" and s.a.layout != "col",
        unroll=_unroll(g.atom.strips(height) * (panels * s.nr // g.atom.n), s.static[2] if s.static else 0, g.grouped),
        inline=s.static is not None,
        ragged=s.static is None or s.static[1] % s.nr != 0,
        grouped=g.grouped,
        a=g.read_types[0],
        b=g.read_types[1],
        final=s.types[2] if g.finishes else "",
        unshift=("" if not g.unshifts else "block" if s.b.packed and not s.b.once else "whole"),
        block_of_k=g.block_of_k,
        apart=s.c.packed,
    )


def _near(s: Schedule) -> bool:
    """Whether the next item of a batch, of sizes that are compiled in, fits L1 beside this one."""
    if s.static is None or s.parallel.over != "batch":
        return False
    m, n, k = s.static
    items = (m * k, k * n, m * n)
    return sum(x * BY_NAME[t].bytes for x, t in zip(items, s.types, strict=True)) <= NEAR_ITEM


def _unroll(macs: int, depth: int, grouped: bool) -> int:
    """Unroll factor along k: all steps of a short k, else until loop control is a tenth of the work.

    Of grouped rows, whose addresses take four additions, it is 4.
    """
    if grouped:
        return 4
    if 1 < depth <= MOST_UNROLLED // macs:
        return depth
    return 4 if macs < 8 else 2 if macs < 16 else 1


def finish(g: Operands) -> tuple[Stmt, ...]:
    """Epilogue of the tile, after the last block of k."""
    s = g.s
    if not (g.finishes or g.finishes_in_c):
        return ()
    sums = g.sums(ROW, COLUMN) if g.finishes else g.element(ROW, COLUMN)
    tile = (var("h"), var("columns"), sums, g.c_step)
    into = (g.element(ROW, COLUMN), var("c_m"))
    inner: list[Ptr] = []
    more: tuple[Index | Ptr, ...] = ()
    fused, place = s.fused, (var("item"), ROW, COLUMN + g.slab_first)
    if fused:
        more = (*place, *arguments(fused, *place))
        inner = [_vector(g, name) for name in own(fused)]
    sum_atom = g.isa.sum_row_atom(g.atom) or g.atom  # moves sums a cache line at a time
    call = Call(finish_tile(g.isa, sum_atom, g.acc, s.types[2], fused, g.finishes_in_c), (*tile, *inner, *into, *more))
    return (If((var("pc") + var("kd")).eq(g.k), (call,)),) if s.kc else (call,)


def _vector(g: Operands, name: str) -> Ptr:
    """Address of a vector that the kernel has computed, at the tile's first row or column."""
    if name == "column_sum":  # behind the panel, of which this is the last block of k
        return Ptr("bp", sums_at(g.k, g.s.nr, g.read_types[1]) - g.pc * g.s.nr)
    return Ptr("scales", ROW)
