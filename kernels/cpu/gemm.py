"""Blocked GEMM: loops around a micro-kernel.

    for each MC rows by NC columns   (C block, L3)   <- threads
      for each KC of k               (A block, L2; packed or in place)
        for each few panels          (B, L2; packed just before use, or in place)
          for each NR columns        (B panel, L1)
            for each MR rows
              micro-kernel

(Goto & van de Geijn 2008; Van Zee & van de Geijn, ACM TOMS 41(3), 2015.) B is
packed by the thread that uses it, right before it does, a few panels at a time:
it is read from memory once per MC rows, in long runs, and no packed copy of it
goes out to L3 and back. Where many blocks of rows would pack it again, all of it
is packed once instead; full panels then stream well at any depth. A thread keeps
a block of C until it is complete, so that the passes over C stay in L3 and threads
never wait for each other. While one tile is computed, the next is prefetched.

A tile extent of ALL omits its loop, and either operand may be read in
place, so that small, thin and tall products are the same program with fewer
loops. Slices of A within a block have nearly equal heights: no sliver of one
row is left over. Blocks of C, or whole items of a batch, are distributed over threads;
no two of them write the same element and none splits a chain along k, so that the
result does not depend on the number of threads. Only `over="k"` (split-K), for a C too
small to distribute or a B whose rows are better not cut, gives each thread a run of k
and a C of its own, summed at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.nodes import (
    Add,
    Call,
    For,
    Function,
    If,
    Index,
    Kernel,
    Let,
    LetPtr,
    Move,
    Parallel,
    Param,
    Ptr,
    Switch,
    ceil_div,
    const,
    maximum,
    minimum,
    var,
)
from portmm.kernels.cpu import packing
from portmm.kernels.cpu.blocking import TASKS_PER_WORKER, WORKERS, Blocks, M, N
from portmm.kernels.cpu.dynamic_quantization import quantise
from portmm.kernels.cpu.elementwise import arguments
from portmm.kernels.cpu.epilogue import ROWS, finish, needed
from portmm.kernels.cpu.int4_panels import dequantize, group_sums, int4_micro_kernel
from portmm.kernels.cpu.microkernel import Shape, micro_kernel
from portmm.kernels.cpu.prefetch import next_item, next_panel
from portmm.kernels.cpu.summation_runs import kept, over_k
from portmm.schedule.cpu_candidates import PACK_ROWS, SUM_COLUMNS
from portmm.spec.dtype import CODES_KR
from portmm.spec.epilogue import operand_types, parse
from portmm.spec.problem import family

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.target import Atom, Isa


MOST_UNROLLED = 128
"""Multiply-adds of a fully unrolled micro-kernel: past that, compiling costs more than the loop."""

PACK_PREFETCH = 8
"""Prefetch distance of packing, in rows of B: a miss takes as long as copying some rows."""


def build(s: Schedule, isa: Isa, atom: Atom, loops: type[Gemm] | None = None) -> Kernel:
    """Kernel that computes C = A . B by schedule `s`, in the loops of `Gemm` or of a subclass."""
    g = (loops or Gemm)(s, isa, atom)
    entry = Function("entry", "entry", (), g.entry(), "All products of the batch")
    constants: tuple[tuple[str, int], ...] = ()
    if s.static:
        m, n, k = s.static
        constants = (("m", m), ("n", n), ("k", k), ("c_m", n), ("c_n", 1))
        constants += (("a_m", k), ("a_k", 1)) if s.a == "row" else (("a_m", 1), ("a_k", m))
        constants += (("b_k", n), ("b_n", 1)) if s.b == "row" else (("b_k", 1), ("b_n", k))
    a, b, c = s.types
    types = (("a", s.source or a), ("b", {"packed": g.read_types[1], "codes": "s32"}.get(s.b, b)), ("c", c))
    name, operands = str(s.name(atom)), operand_types(s.fused)
    work = g.workspace()
    return Kernel(name, isa, atom, entry, work, swap=s.swap, types=types, constants=constants, operands=operands)


class Gemm(Blocks):
    """Loops of one kernel, as statements."""

    __slots__ = ()

    # -- loops over blocks ---------------------------------------------------

    def entry(self) -> tuple[Stmt, ...]:
        """Loop over the items of the batch."""
        if self.s.over == "batch":
            items = Function("items", "task", (), self.items(), "A share of the batch, one item after the other")
            return (Parallel(items, self.chunks),)
        body = self.summed() if self.s.over == "k" else self.product()
        if self.s.source:
            body = (*self.quantised(), *body)
        return (For("item", const(0), var("batch"), const(1), body),)

    def quantised(self) -> tuple[Stmt, ...]:
        """Quantization of the rows of A to int8, a few rows for each task."""
        real = self.isa.quantises(self.atom, self.s.source)
        assert real is not None  # noqa: S101 - else the ISA would not have been selected
        i, tasks = var("i"), minimum(M, WORKERS * TASKS_PER_WORKER)
        row = self.operand("a", i * var("a_m"))
        args = (var("k"), row, Ptr("codes", i * self.quantised_step), Ptr("scales", i))
        rows = For(
            "i",
            M * var("task") // tasks,
            M * (var("task") + 1) // tasks,
            const(1),
            (Call(quantise(real, self.s.source), args),),
        )
        share = Function(
            "quantise_rows", "task", (Param("item"),), (*self.quantised_rows(), rows), "Some rows of A as codes"
        )
        return (Parallel(share, tasks, (var("item"),)),)

    def summed(self) -> tuple[Stmt, ...]:
        """Split-K for one item: a C per run of k, then their sum, in the order of k."""
        j, run, item = var("j"), var("run"), var("item")
        steps, runs, segments = var("steps"), var("runs"), ceil_div(N, SUM_COLUMNS)
        counts = (
            Let("kb", self.kb),
            Let("steps", ceil_div(self.k, var("kb"))),
            Let("runs", minimum(WORKERS, steps)),
        )
        partial = Ptr("work", self.own_size * WORKERS)
        blocks = For("block", const(0), self.blocks * self.column_chunks, const(1), self.block(var("block")))
        part = (
            *counts,
            Let("k_first", steps * var("task") // runs * var("kb")),
            Let("k_last", minimum(self.k, steps * (var("task") + 1) // runs * var("kb"))),
            LetPtr("cp", partial + var("task") * (M * N), self.atom.acc),
            blocks,
        )
        c = self.operand("c", var("i") * var("c_m") + j)
        row = partial + var("i") * N + j
        first, last = var("j_first"), var("j_last")
        # Run by run, because the runs of one element are a whole C apart: often in one set of L1.
        total = (
            Let("i", var("task") // segments),
            Let("j_first", var("task") % segments * SUM_COLUMNS),
            Let("j_last", minimum(N, first + SUM_COLUMNS)),
            *counts,
            For("j", first, last, const(1), (Move(c, row),)),
            For("run", const(1), runs, const(1), (For("j", first, last, const(1), (Add(c, row + run * (M * N)),)),)),
        )
        one = Function("run_of_k", "task", (Param("item"),), part, "All of C over a run of k")
        sums = Function("sum_runs", "task", (Param("item"),), total, "A piece of a row of C: the sum over runs")
        return (Parallel(one, self.runs, (item,)), Parallel(sums, M * segments, (item,)))

    @property
    def chunks(self) -> Index:
        """Number of tasks that the batch is divided into."""
        return minimum(var("batch"), WORKERS * TASKS_PER_WORKER)

    def items(self) -> tuple[Stmt, ...]:
        """Loop over one task's items of the batch."""
        task, batch = var("task"), var("batch")
        first, last = batch * task // self.chunks, batch * (task + 1) // self.chunks
        return (For("item", first, last, const(1), self.product()),)

    def product(self) -> tuple[Stmt, ...]:
        """Loop over the blocks of C of one item: parallel tasks, or in order when the batch is parallel."""
        if self.s.over == "batch":
            return (For("block", const(0), self.blocks * self.column_chunks, const(1), self.block(var("block"))),)
        pack: tuple[Stmt, ...] = ()
        if self.s.once:
            groups, cuts = ceil_div(ceil_div(N, self.s.nr), self.near), self.cuts
            body = (
                Let("jg", var("task") // cuts * self.near),
                Let("p_first", var("task") % cuts * PACK_ROWS),
                *self.pack_b(ceil_div(N, self.s.nr)),
            )
            packer = Function("pack_share", "task", (Param("item"),), body, "Some rows of a few panels of B")
            # Items with the same B use the same panels.
            fresh_b = const(0).lt(var("item").eq(0) + (1 - var("b_batch").eq(0)))
            pack = (If(fresh_b, (Parallel(packer, groups * cuts, (var("item"),)),)),)
        comment = "A block of rows by a share of the columns of C"
        task = Function("block", "task", (Param("item"),), self.block(var("task")), comment)
        return (*pack, Parallel(task, self.blocks * self.column_chunks, (var("item"),)))

    # -- one block of C ------------------------------------------------------

    def block(self, number: Index) -> tuple[Stmt, ...]:
        """Statements for one block of C; `number` counts chunks of columns within blocks of rows."""
        s = self.s
        single = self.column_chunks == const(1)
        index, chunk = (number, const(0)) if single else (number // var("shares"), number % var("shares"))
        blocks, chunks = self.blocks, var("shares")
        panels = ceil_div(N, s.nr)
        rows = M * (index + 1) // blocks - var("row") if s.mc else M
        inside: tuple[Stmt, ...] = (Let("kd", self.depth), *self.pack_a(), *self.totals(), *self.macro())
        inside = over_k(self, inside)
        if s.over != "k":
            inside = (*((Let("kb", self.kb),) if s.kc else ()), *self.scratch(), *inside)
        return (
            *self.quantised_rows(),
            *(() if single else (Let("shares", self.column_chunks),)),
            Let("row", M * index // blocks if s.mc else const(0)),
            Let("rows", rows),
            Let("first", const(0) if single else self.chunk_start(chunk, chunks) * s.panels),
            Let("last", panels if single else minimum(panels, self.chunk_start(chunk + 1, chunks) * s.panels)),
            Let("slices", ceil_div(var("rows"), s.mr)),
            Let("height", var("rows") // var("slices")),
            Let("taller", var("rows") % var("slices")),
            *self.ready(),
            *inside,
            *self.done(),
        )

    def ready(self) -> tuple[Stmt, ...]:
        """Statements before the first tile of a block."""
        return ()

    def done(self) -> tuple[Stmt, ...]:
        """Statements after the last tile of a block."""
        return ()

    def scratch(self) -> tuple[Stmt, ...]:
        """Scratch for sums until the epilogue, in place of C."""
        s = self.s
        if not self.finishes:
            return ()
        place = LetPtr("cp", self.private() + (self.b_size + self.a_size), self.acc)
        if not s.kc:
            return (place, Let("c_wide", const(s.nr * s.panels)))
        width = (var("last") - var("first")) * s.nr
        several = Let("deep", var("kb").lt(self.k))
        return (place, several, Let("c_wide", var("deep") * width + (1 - var("deep")) * (s.nr * s.panels)))

    def slice_(self) -> tuple[Stmt, ...]:
        """Bounds of the i-th of nearly equal slices of the block's rows."""
        i, taller = var("i"), var("taller")
        return (
            Let("h", var("height") + i.lt(taller)),
            Let("r", i * var("height") + minimum(i, taller)),
        )

    def pack_a(self) -> tuple[Stmt, ...]:
        """Packing of the block of A, slice by slice."""
        s = self.s
        if not s.pack_a:
            return ()
        pack = packing.pack_a(self.isa, self.move_atom, s.mr, s.a, s.types[0], self.atom.left)
        elements = (self.filled(self.pc, var("kd")),) if s.kr > 1 else ()
        args = (var("kd"), *elements, var("h"), *self.unpacked_a(), Ptr("ap", var("r") * var("kd")))
        loop = For("i", const(0), var("slices"), const(1), (*self.slice_(), Call(pack, args)))
        return (LetPtr("ap", self.private() + self.b_size, self.atom.left), loop)

    def macro(self) -> tuple[Stmt, ...]:
        """Macro-kernel: every register tile of the block, while a panel of B stays in L1."""
        s = self.s
        if s.panels == 1:
            return (self.visits(1, var("first"), var("last")),)
        # The last panel may be partial, which only visits of one panel handle.
        whole = (N // s.nr - var("first")) // s.panels * s.panels
        safe = maximum(0, minimum((var("last") - var("first")) // s.panels * s.panels, whole))
        return (
            Let("wide", var("first") + safe),
            self.visits(s.panels, var("first"), var("wide")),
            self.visits(1, var("wide"), var("last")),
        )

    def visits(self, panels: int, begin: Index, end: Index) -> Stmt:
        """Loop over panels, or groups of them, around one over slices of A."""
        s = self.s
        if s.pack_b and not s.once:
            near = self.near
            inner = self.tiles(1, var("jg"), minimum(end, var("jg") + near))
            return For("jg", begin, end, const(near), (*self.pack_b(end), inner))
        return self.tiles(panels, begin, end)

    def tiles(self, panels: int, begin: Index, end: Index) -> Stmt:
        """Loop over the register tiles of a run of panels."""
        s = self.s
        body = (
            Let("column", var("j") * s.nr),
            Let("columns", minimum(N - var("column"), panels * s.nr)),
            LetPtr("bp", self.panel(), self.read_types[1], readonly=True),
            *self.across(panels),
            For("i", const(0), var("slices"), const(1), (*self.slice_(), *self.visit(panels), *self.finish())),
        )
        return For("j", begin, end, const(panels), body)

    def across(self, panels: int) -> tuple[Stmt, ...]:  # noqa: ARG002 - for vectors, nothing
        """Statements before the first slice of A of a run of panels."""
        return ()

    def visit(self, panels: int) -> tuple[Stmt, ...]:
        """Micro-kernel call for the slice's number of rows, for each run of a block of k that has several."""
        visit = self.by_height(lambda height: self.call(height, panels))
        return (For("p_run", const(0), var("kd"), var("run"), visit),) if self.many else visit

    def by_height(self, call: Callable[[int], Stmt]) -> tuple[Stmt, ...]:
        """Dispatch of `call` on the slice's number of rows (MR variants)."""
        cases = tuple((h, (call(h),)) for h in self.s.heights)
        return cases[0][1] if len(cases) == 1 else (Switch(var("h"), cases),)

    def panel(self) -> Ptr:
        """Address of the current panel of B."""
        s = self.s
        if s.once:
            return Ptr("work", (var("j") * self.b_step + self.pc * s.nr) * self.scaled("b"))
        if s.pack_b:
            return self.private() + (var("j") - var("jg")) * (self.b_near * self.scaled("b"))
        if s.b in ("packed", "codes"):
            return self.operand("b", var("j") * var("b_n") + self.pc * s.nr)
        return self.source(var("column"), self.pc)

    def pack_b(self, end: Index) -> tuple[Stmt, ...]:
        """Packing of a few panels from `jg` on: all together, or one by one where the last is partial."""
        s, near, atom = self.s, self.near, self.move_atom
        q, jg, storage, to = var("q"), var("jg"), s.types[1], atom.right
        if s.once:  # at its position among all panels
            row, step = var("p_first"), self.b_step
            depth, base = minimum(self.k - row, self.k if self.unshifts else PACK_ROWS), Ptr("work")
            first, place = row * s.nr, q * step
            start = jg * step
        else:  # first in this worker's scratch
            row, step = self.pc, self.b_near
            depth, base = var("kd"), self.private()
            first, place, start = const(0), (q - jg) * step, const(0)
        if s.b == "codes":
            words = (row * s.kr // CODES_KR, ceil_div((row + depth) * s.kr, CODES_KR))
            args = (*words, self.operand("b", q * var("b_n")), Ptr("panels", first + place))
            repack = Call(dequantize(self.isa, atom, family(s.family)), args)
            return (LetPtr("panels", base, to), For("q", jg, minimum(end, jg + near), const(1), (repack,)))
        one = packing.pack_b(self.isa, atom, s.nr, s.b, storage, to)
        column = q * s.nr
        panels = LetPtr("panels", base, to)
        elements = self.filled(row, depth)
        filled = (elements, const(0)) if s.kr > 1 else ()
        source = (minimum(N - column, s.nr), self.source(column, row), var("b_k"), var("b_n"))
        here, group = Ptr("panels", first + place), Ptr("panels", first + start)
        sums: tuple[Stmt, ...] = ()
        if self.unshifts:
            sums = (Call(packing.sum_columns(atom, s.nr, to), (depth, here)),)
        single = (Call(one, (depth, *filled, *source, here)), *sums)
        singly = (For("q", jg, minimum(end, jg + near), const(1), single),)
        if near == 1 or s.b != "row":
            return (panels, *singly)
        rows = packing.pack_b_rows(atom, s.nr, near, PACK_PREFETCH, storage, to)
        full = elements // s.kr if s.kr > 1 else depth
        together: tuple[Stmt, ...] = (Call(rows, (full, self.source(jg * s.nr, row), var("b_k"), group, step)),)
        if s.kr > 1:  # the remainder of k after whole units
            rest = For("q", jg, jg + near, const(1), (Call(one, (depth, elements, full, *source, here)),))
            together += (If(full.lt(depth), (rest,)),)
        together += (For("q", jg, jg + near, const(1), sums),) if sums else ()
        whole = minimum(end * s.nr, N)
        return (panels, If(whole.lt((jg + near) * s.nr), singly, together))

    def call(self, height: int, panels: int) -> Stmt:
        """Call of the micro-kernel of so many rows on one register tile."""
        s = self.s
        shape = Shape(
            rows=height,
            nr=s.nr,
            panels=panels,
            a_packed=s.pack_a,
            b_packed=s.pack_b or s.b == "packed",
            prefetch=s.prefetch,
            ahead=self.streams if s.ahead and panels == 1 else None,
            unroll=_unroll(self.atom.strips(height) * (panels * s.nr // self.atom.n), s.static[2] if s.static else 0),
            inline=s.static is not None,
            ragged=s.static is None or s.static[1] % s.nr != 0,
            a=self.read_types[0],
            b=self.read_types[1],
            final=s.types[2] if self.finishes else "",
            unshift=("" if not self.unshifts else "block" if s.pack_b and not s.once else "whole"),
            chained=self.chained or self.parts,
            parts=self.parts,
        )
        if self.int4_in_place:
            return Call(int4_micro_kernel(self.isa, self.atom, family(s.family), shape), self.decoded())
        row = var("row") + var("r")
        args: list[Index | Ptr] = [minimum(var("run"), var("kd") - var("p_run")) if self.many else var("kd")]
        args += self.rows_of_a(self.before)
        args.append(Ptr("bp", self.before * (s.nr if shape.b_packed else var("b_k"))))
        if not shape.b_packed:
            args.append(var("b_k"))
        if panels > 1:
            args.append(self.panel_step or const(0))
        if shape.unshift:
            args.append(packing.sums_at(var("kd") if shape.unshift == "block" else self.k, s.nr, self.read_types[1]))
        before = (var("run_start") if self.parts else self.start).lt(self.pc + self.before)
        args += [self.result(row, var("column")), self.c_step, var("columns"), before]
        args += kept(self, row, var("column")) if self.parts else ()
        if shape.ahead is not None:
            args += next_item(self, row) if s.over == "batch" else next_panel(self, height)
        return Call(micro_kernel(self.atom, shape), tuple(args))

    def decoded(self) -> tuple[Index | Ptr, ...]:
        """Arguments of the micro-kernel that reads int4 values."""
        row, groups = var("row") + var("r"), self.groups_of_k
        sums = [Ptr(x, var("r") * count) for x, (_, count) in self.group_sum_buffers.items()]
        rest = (groups, self.result(row, var("column")), self.c_step, var("columns"))
        return (var("k"), *self.rows_of_a(const(0)), Ptr("bp"), *sums, *rest)

    def rows_of_a(self, before: Index) -> tuple[Index | Ptr, ...]:
        """Address and strides of the slice of A, from so many units on: packed, or in place."""
        if self.s.pack_a:
            return (Ptr("ap", var("r") * var("kd") + before * var("h")),)
        return self.left(var("row") + var("r"), self.pc + before)

    def totals(self) -> tuple[Stmt, ...]:
        """Sums of A over quantization groups, computed once for all panels."""
        s = self.s
        if not self.int4_in_place:
            return ()
        place = self.private() + (self.b_size + self.a_size + self.c_size)

        def call(height: int) -> Stmt:
            shape = Shape(rows=height, nr=s.nr, a_packed=s.pack_a, a=self.read_types[0])
            to = [Ptr(x, var("r") * count) for x, (_, count) in self.group_sum_buffers.items()]
            real = self.isa.vector("f32", self.atom.n)
            assert real is not None  # noqa: S101 - else the atom would not support int4 values
            return Call(
                group_sums(self.atom, real, family(s.family), shape),
                (var("k"), *self.rows_of_a(const(0)), *to, self.groups_of_k),
            )

        loop = For("i", const(0), var("slices"), const(1), (*self.slice_(), *self.by_height(call)))
        names = []
        for name, (dtype, count) in self.group_sum_buffers.items():
            names.append(LetPtr(name, place, dtype))
            place += self.row_buffer_size(count)
        return (*names, loop)

    def finish(self) -> tuple[Stmt, ...]:
        """Epilogue of the tile, after the last block of k."""
        if not self.finishes:
            return ()
        row = var("row") + var("r")
        into = self.operand("c", row * var("c_m") + var("column"))
        vectors = []
        for name in needed(self.s.post):
            if name == "b_sum":  # behind the panel, of which this is the last block of k
                vectors.append(Ptr("bp", packing.sums_at(self.k, self.s.nr, self.read_types[1]) - self.pc * self.s.nr))
            elif name == "a_scale" and self.s.source:
                vectors.append(Ptr("scales", row))
            else:
                vectors.append(Ptr(name, row if name in ROWS else var("column")))
        tile = (var("h"), var("columns"), self.sums(row, var("column")), var("c_wide"))
        more: tuple[Index | Ptr, ...] = ()
        if self.s.fused:
            place = (var("item"), row, var("column"))
            more = (*place, *arguments(parse(self.s.fused), *place))
        call = Call(
            finish(self.isa, self.sum_atom, self.acc, self.s.types[2], self.s.post, self.s.fused),
            (*tile, *vectors, into, var("c_m"), *more),
        )
        return (If((var("pc") + var("kd")).eq(self.k), (call,)),) if self.s.kc else (call,)


def _unroll(macs: int, depth: int) -> int:
    """Unroll factor along k: all steps of a short k, else until loop control is a tenth of the work."""
    if 1 < depth <= MOST_UNROLLED // macs:
        return depth
    return 4 if macs < 8 else 2 if macs < 16 else 1
