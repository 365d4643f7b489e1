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
goes out to L3 and back. Or the micro-kernel of the first slice of rows reads a panel in place, and stores the vectors
that it has loaded (Yang et al., "LibShalom", SC 2021), so that multiply-adds hide the time of packing. Where many
blocks of rows would pack it again, all of it is packed once instead; full panels then stream well at any depth. A
thread keeps
a block of C until it is complete, so that the passes over C stay in L3 and threads
never wait for each other. While one tile is computed, the next is prefetched.

Where the tile of L1 has all columns, a slice of A stays there while a few panels pass, which stay in L2: the loop over
these is in the micro-kernel, inside that over slices (`sweep`). A block of A that is packed passes once per few panels,
from L3 if need be: it has as many rows as its tile of L3. Slices of rows by one panel of few steps of k are one call,
too (`tile_column`).

A tile extent of ALL omits its loop, and either operand may be read in
place, so that small, thin and tall products are the same program with fewer
loops. Slices of A within a block have nearly equal heights: no sliver of one
row is left over. Blocks of C, or whole items of a batch, are distributed over threads;
no two of them write the same element and none splits a chain along k, so that the
result does not depend on the number of threads. Only `over="k"` (split-K), for a C too
small to distribute or a B whose rows are better not cut, gives each thread a run of k
and a C of its own, summed at the end.

Loops are here. Their extents, scratch and addresses are expressions of `blocking` and `operands`, each of which extends
the one before; what is done to a register tile, and to a few panels of B, is in `register_tile` and `panel_packing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import Add, Call, For, Function, If, Kernel, Let, LetPtr, Move, Parallel, Param, Switch
from portmm.kernels.cpu import int4_in_place
from portmm.kernels.cpu.blocking import TASKS_PER_WORKER, WORKERS, M, N, constants
from portmm.kernels.cpu.dynamic_quantization import quantise_rows
from portmm.kernels.cpu.operands import Operands
from portmm.kernels.cpu.packing import pack_a
from portmm.kernels.cpu.panel_packing import pack_once, pack_panels, params_of_tasks
from portmm.kernels.cpu.register_tile import finish, multiply, multiply_column
from portmm.kernels.cpu.summation_runs import extents_of_k, over_k
from portmm.kernels.cpu.view_packing import Viewed
from portmm.schedule.schedule import by_columns
from portmm.spec.epilogue import operand_types
from portmm.target.model import CPU as MODEL
from portmm.target.summation import BlockOfK

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layout import Layout
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(  # noqa: PLR0917 - views are of few kernels
    s: Schedule, isa: Isa, atom: Atom, loops: type[Gemm] | None = None, view: Layout | None = None,
    view_b: Layout | None = None, padding: int = 0,
) -> Kernel:  # fmt: skip
    """Kernel that computes C = A . B by schedule `s`, in the loops of `Gemm` or of a subclass; of views of A or B.

    Elements of a view that are in padding are `padding`.

    Raises:
        ScheduleError: the schedule does not pack the operand of a view.
    """
    for name, x, plan in (("A", view, s.a), ("B", view_b, s.b)):
        if x and not plan.packed:
            raise ScheduleError(f"{name} is a view, which only packing reads; {s.name(atom)} does not pack it")
    g = (loops or Gemm)(s, isa, atom, view, view_b, padding)
    entry = Function("entry", "entry", (), g.entry(), "All products of the batch")
    a, b, c = s.types
    types = (("a", s.a.source or a), ("b", {"packed": g.read_types[1], "codes": "s32"}.get(s.b.layout, b)), ("c", c))
    name, operands = str(s.name(atom)), operand_types(s.fused)
    work = g.workspace()
    sizes = constants(s)
    return Kernel(name, isa, atom, entry, work, swap=s.atom.swap, types=types, constants=sizes, operands=operands)


class Gemm(Operands):
    """Loops of one kernel, as statements."""

    __slots__ = ()

    # -- loops over blocks ---------------------------------------------------

    def entry(self) -> tuple[Stmt, ...]:
        """Loop over the items of the batch."""
        if self.s.parallel.over == "batch":
            items = Function("items", "task", (), self.items(), "A share of the batch, one item after the other")
            return (Parallel(items, self.chunks),)
        body = split_k(self, self.in_order()) if self.s.parallel.over == "k" else self.product()
        if self.s.a.source:
            body = (quantise_rows(self), *body)
        return (For("item", const(0), var("batch"), const(1), body),)

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
        if self.s.parallel.over == "batch":
            return (self.in_order(),)
        comment = "A block of rows by a share of the columns of C"
        params, args = params_of_tasks(self)
        task = Function("block", "task", params, self.block(var("task")), comment)
        blocks = Parallel(task, self.blocks * self.column_chunks, args)
        if not self.s.b.once:
            return (*self.count_blocks(), blocks)
        # Names of a slab take the place of those of all columns.
        n = Let("n", minimum(var("slab"), var("all") - var("across")))
        slab = (n, pack_once(self), *self.count_blocks(), blocks)
        return (Let("all", N), Let("slab", self.slab), For("across", const(0), var("all"), var("slab"), slab))

    def in_order(self) -> Stmt:
        """Loop over the blocks of C of one thread."""
        return For("block", const(0), self.blocks * self.column_chunks, const(1), self.block(var("block")))

    # -- one block of C ------------------------------------------------------

    def block(self, number: Index) -> tuple[Stmt, ...]:
        """Statements for one block of C; `number` counts chunks of columns within blocks of rows."""
        s = self.s
        single = self.column_chunks == const(1)
        index, chunk = (number, const(0)) if single else (number // var("shares"), number % var("shares"))
        blocks, chunks = self.blocks, var("shares")
        panels = ceil_div(N, s.nr)
        rows = M * (index + 1) // blocks - var("row") if self.cuts_rows else M
        inside: tuple[Stmt, ...] = (Let("kd", self.depth), *self.pack_a(), *self.totals(), *self.macro())
        inside = over_k(self, inside)
        if s.parallel.over != "k":
            inside = (*extents_of_k(self), *self.scratch(), *inside)
        return (
            *self.quantised_rows(),
            *self.count_blocks(),
            *(() if single else (Let("shares", self.column_chunks),)),
            Let("row", M * index // blocks if self.cuts_rows else const(0)),
            Let("rows", rows),
            Let("first", const(0) if single else self.chunk_start(chunk, chunks) * s.b.panels),
            Let("last", panels if single else minimum(panels, self.chunk_start(chunk + 1, chunks) * s.b.panels)),
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
            return (place, Let("c_wide", const(s.nr * s.b.panels)))
        width = (var("last") - var("first")) * s.nr
        several = Let("deep", const(1) if self.sweeps else var("kb").lt(self.k))
        return (place, several, Let("c_wide", var("deep") * width + (1 - var("deep")) * (s.nr * s.b.panels)))

    def slices(self, *body: Stmt) -> Stmt:
        """Loop over nearly equal slices of the block's rows: `h` rows from `r` on."""
        return For("i", const(0), var("slices"), const(1), (*slice_of(var("i")), *body))

    def pack_a(self) -> tuple[Stmt, ...]:
        """Packing of the block of A, slice by slice."""
        if not self.s.a.packed:
            return ()
        return (LetPtr("ap", self.private() + self.b_size, self.atom.left), self.slices(self.pack_slice()))

    def pack_slice(self) -> Stmt:
        """Packing of the current slice of A."""
        s = self.s
        types = (s.types[0], self.atom.left)
        end: tuple[Index, ...] = ()
        if self.view:
            viewed = Viewed("a", self.view, *types, s.mr, self.padding)
            pack, end = viewed.pack(self.isa, self.move_atom), (M,) if viewed.open_ended else ()
        else:
            pack = pack_a(self.isa, self.move_atom, s.mr, s.a.layout, *types)
        elements = (self.filled(self.pc, var("kd")),) if s.atom.kr > 1 else ()
        return Call(pack, (var("kd"), *elements, var("h"), *end, *self.unpacked_a(), self.packed_slice))

    def totals(self) -> tuple[Stmt, ...]:
        """Sums of A over quantization groups, computed once for all panels."""
        if not self.int4_in_place:
            return ()
        sums = self.by_height(lambda height: int4_in_place.sum_groups(self, height))
        return (*int4_in_place.buffers(self), self.slices(*sums))

    def macro(self) -> tuple[Stmt, ...]:
        """Macro-kernel: every register tile of the block, while a panel of B stays in L1."""
        s = self.s
        if s.b.panels == 1:
            return (self.visits(1, var("first"), var("last")),)
        # The last panel may be partial, which only visits of one panel handle.
        whole = (N // s.nr - var("first")) // s.b.panels * s.b.panels
        safe = maximum(0, minimum((var("last") - var("first")) // s.b.panels * s.b.panels, whole))
        return (
            Let("wide", var("first") + safe),
            self.visits(s.b.panels, var("first"), var("wide")),
            self.visits(1, var("wide"), var("last")),
        )

    def visits(self, panels: int, begin: Index, end: Index) -> Stmt:
        """Loop over panels, or groups of them, around one over slices of A."""
        s = self.s
        packs, few = s.b.packed and not (s.b.once or s.b.inside), self.sweeps and s.tiles[2].n > s.nr
        if packs or few:
            near = self.near
            inner = self.tiles(1, var("jg"), minimum(end, var("jg") + near))
            return For("jg", begin, end, const(near), (*(pack_panels(self, end) if packs else ()), inner))
        return self.tiles(panels, begin, end)

    def tiles(self, panels: int, begin: Index, end: Index) -> Stmt:
        """Loop over the register tiles of a run of panels."""
        s = self.s
        width = (end - begin) * s.nr if self.sweeps else const(panels * s.nr)
        tiles: tuple[Stmt, ...] = (self.slices(*self.visit(panels), *finish(self)),)
        if by_columns(s, self.atom):
            tiles = (If(self.k.lt(s.kc + 1), self.column(), tiles),)
        body = (*self.at_panels(panels, width), *tiles)
        if self.sweeps:
            return If(begin.lt(end), (Let("j", begin), *body))
        return For("j", begin, end, const(panels), body)

    def at_panels(self, panels: int, width: Index) -> tuple[Stmt, ...]:
        """Statements before the first slice of A of panels from `j` on: their columns, their address, and more."""
        return (
            Let("column", var("j") * self.s.nr),
            Let("columns", minimum(N - var("column"), width)),
            LetPtr("bp", self.panel(), self.read_types[1], readonly=not self.s.b.inside),
            *self.across(panels),
        )

    def across(self, panels: int) -> tuple[Stmt, ...]:  # noqa: ARG002 - for vectors, nothing
        """Statements before the first slice of A of a run of panels."""
        return ()

    def column(self) -> tuple[Stmt, ...]:
        """The register tiles of a panel: perhaps the first, which packs it, and a call for those of each height."""
        first: tuple[Stmt, ...] = ()
        begin = int(self.s.b.inside)
        if begin:
            packs = self.by_height(lambda height: multiply(self, height, 1, packs=True))
            first = (For("i", const(0), minimum(1, var("slices")), const(1), (*slice_of(var("i")), *packs)),)
        part, i, bound = var("part"), var("i"), maximum(begin, var("taller"))
        many = self.by_height(lambda height: multiply_column(self, height))
        same = (
            Let("i", (1 - part) * begin + part * bound),
            Let("count", (1 - part) * bound + part * var("slices") - i),
            *slice_of(i),
            If(const(0).lt(var("count")), many),
        )
        return *first, For("part", const(0), const(2), const(1), same)

    def visit(self, panels: int) -> tuple[Stmt, ...]:
        """Micro-kernel call for the slice's number of rows, for each run of a block of k that has several."""
        visit = self.by_height(lambda height: multiply(self, height, panels))
        if self.s.b.inside:
            first = self.by_height(lambda height: multiply(self, height, panels, packs=True))
            visit = (If(var("r").eq(0), first, visit),)
        several = self.block_of_k is BlockOfK.RUNS
        return (For("p_run", const(0), var("kd"), var("run"), visit),) if several else visit

    def by_height(self, call: Callable[[int], Stmt]) -> tuple[Stmt, ...]:
        """Dispatch of `call` on the slice's number of rows (MR variants)."""
        cases = tuple((h, (call(h),)) for h in self.s.heights)
        return cases[0][1] if len(cases) == 1 else (Switch(var("h"), cases),)


def slice_of(i: Index, s: str = "") -> tuple[Stmt, ...]:
    """Names of the number of rows of a slice of a block, and of its first row, with a suffix."""
    taller = var("taller")
    return (
        Let(f"h{s}", var("height") + i.lt(taller)),
        Let(f"r{s}", i * var("height") + minimum(i, taller)),
    )


def split_k(g: Operands, blocks: Stmt) -> tuple[Stmt, ...]:
    """Products of one item: `blocks` over each thread's run of k, then the sum of the results."""
    task, steps, runs, item = var("task"), var("steps"), var("runs"), var("item")
    counts = (
        *extents_of_k(g),
        Let("steps", ceil_div(g.k, var("kb"))),
        Let("runs", minimum(WORKERS, steps)),
    )
    partial = Ptr("work", g.own_size * WORKERS)
    part = (
        *counts,
        Let("k_first", steps * task // runs * var("kb")),
        Let("k_last", minimum(g.k, steps * (task + 1) // runs * var("kb"))),
        LetPtr("cp", partial + task * (M * N), g.atom.acc),
        blocks,
    )
    segments = ceil_div(N, MODEL.sum_columns)
    total = (
        Let("i", task // segments),
        Let("j_first", task % segments * MODEL.sum_columns),
        Let("j_last", minimum(N, var("j_first") + MODEL.sum_columns)),
        *counts,
        *_sum(g, partial),
    )
    one = Function("run_of_k", "task", (Param("item"),), part, "All of C over a run of k")
    sums = Function("sum_runs", "task", (Param("item"),), total, "A piece of a row of C: the sum over runs")
    return (Parallel(one, g.runs, (item,)), Parallel(sums, M * segments, (item,)))


def _sum(g: Operands, partial: Ptr) -> tuple[Stmt, ...]:
    """Sum over runs of a piece of a row of C.

    Run by run, because the runs of one element are a whole C apart: often in one set of L1.
    """
    i, j, run = var("i"), var("j"), var("run")
    first, last = var("j_first"), var("j_last")
    c = g.operand("c", i * var("c_m") + j)
    row = partial + i * N + j
    add = For("j", first, last, const(1), (Add(c, row + run * (M * N)),))
    return (
        For("j", first, last, const(1), (Move(c, row),)),
        For("run", const(1), var("runs"), const(1), (add,)),
    )
