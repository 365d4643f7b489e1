"""Block programs on a grid of blocks of threads: subgroups of threads share rows, or threads have columns.

    for each few rows, or columns          <- blocks of threads
      for each pass along a row            <- a subgroup of threads, contiguous along it
        for each few neighbours
        reduction over the subgroup        (a tree, always the same)

For a row that is short enough a thread keeps values that later passes read again in registers; for a longer one they
are read, and computed, again. Without reductions, several blocks may share a row. All threads of a block synchronize
for each reduction, so subgroups past the last row compute that row again, and store nothing.

Down columns, neighbouring threads have neighbouring columns. Where columns are cut in slices, each slice leaves its
partial results in scratch, and a second kernel combines them, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import For, If, Let, Scratch, Verb
from portmm.ir.thread_nodes import WHOLE, Barrier, Exchange, Shared, Vector
from portmm.kernels.blocks.statements import Lowering
from portmm.kernels.cpu.elementwise import Elements
from portmm.kernels.gpu import parameters
from portmm.kernels.gpu.epilogue_store import operands
from portmm.kernels.gpu.loops import unrolled
from portmm.schedule.rows import RowTiles
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portmm.ir.block_program import BlockProgram
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.blocks.statements import Step
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Operand
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

AHEAD = 4
"""Unroll factor of a loop along a long row, so that loads overlap."""


def build(s: Schedule, isa: Isa, real: Atom, program: BlockProgram) -> tuple[GridKernel, ...]:
    """Kernels of a block program, in order; if columns are in registers, over rows of at most so many."""
    if program.loop == "m":
        return _columns(isa, real, program, s)
    fused, form = program.fused, RowTiles(s)
    row = _Row(program, Elements(isa, real, fused, inner=var("row"), row=var("row")), form=form)
    params = (*parameters.integers("m", "n", "batch"), *parameters.of_fused(fused))
    blocks = ceil_div(var("m") * var("batch"), row.side) * row.slices
    return (GridKernel("portmm_rows", isa, real, params, form.threads, (blocks, const(1)), tuple(row.statements())),)


@dataclass
class _Row(Lowering):
    """Statements of a thread along rows.

    Attributes:
        form: the distribution of rows over threads.
    """

    form: RowTiles = field(kw_only=True)

    @property
    def spread(self) -> bool:
        """Whether several blocks share a row."""
        return not self.totals and self.form.cells > 0

    @property
    def side(self) -> int:
        """Number of rows of a block."""
        return self.form.threads // self.form.subgroup

    @property
    def slices(self) -> Index:
        """Number of blocks that share a row."""
        return ceil_div(maximum(var("n"), 1), self.form.width) if self.spread else const(1)

    @property
    def alone(self) -> bool:
        """Whether no subgroup is past the last row."""
        return self.side == 1

    def place(self) -> tuple[Stmt, ...]:
        """Coordinates of a thread: its row, and its first column."""
        line, subgroup, total = var("block") // self.slices, self.form.subgroup, var("m") * var("batch")
        line = line if self.alone else line * self.side + var("thread") // subgroup
        here = var("line") if self.alone else minimum(var("line"), total - 1)
        return (
            Let("line", line),
            Let("lane", var("thread") if self.alone else var("thread") % subgroup),
            Let("item", here // var("m")),
            Let("row", here % var("m")),
            *((Let("first", var("block") % self.slices * self.form.width),) if self.spread else ()),
        )

    def statements(self) -> list[Stmt]:
        """Statements of all passes."""
        body: list[Stmt] = [*self.place(), *self.shared(self.totals.values()), *operands(self.at.isa, self.at.fused)]
        body += [*self.scratch(), *(Scratch(x, self.form.cells, "f32") for x in self.tiles.values())]
        body += [Scratch(f"part_x{i}", self.form.vector, x.dtype) for i, x in self.moved()]
        *first, last = self.program.passes
        body += [s for one in first for s in self.one_pass(one, const(0))]
        stores = tuple(self.one_pass(last, const(0)))
        return [*body, *(stores if self.alone else (If(var("line").lt(var("m") * var("batch")), stores),))]

    def shared(self, names: Iterable[str]) -> list[Stmt]:
        """Shared memory for reductions over a subgroup."""
        form = self.form
        each = form.warp if form.exchange else 1
        return [Shared(f"of_{x}", form.threads // each, "f32") for x in names] if form.subgroup > each else []

    def singles(self, results: list[tuple[int, Expr]], j: Index, few: str) -> list[Stmt]:
        """Stores of results of a whole row, by its first thread."""
        first = var("lane").eq(0) * (var("first").eq(0) if self.spread else const(1))
        return [If(first, tuple(super().singles(results, j, few)))] if results else []

    def moved(self) -> list[tuple[int, Operand]]:
        """Operands that are moved as vectors."""
        if self.form.vector == 1:
            return []
        return [(i, x) for i, x in enumerate(self.at.fused.operands) if x.dense and "n" in x.axes]

    def tile(self, x: Expr, j: Index) -> Ptr:
        """Address of the current column of a tile in registers."""
        return Ptr(self.tiles[x], j if self.at.cell is None else self.at.cell)

    def along(self, step: Step, wanted: list[Expr], reduced: list[Expr], written: tuple[int, ...]) -> list[Stmt]:
        """Loop over the columns of a thread."""
        del reduced
        form, n, at, fixed = self.form, var("n"), self.at, dict(self.at.names)
        moved = dict(self.moved())
        read = [x.args[0] for x in at.under(wanted) if x.op == "load" and x not in at.stored and x.args[0] in moved]
        e = var("e")
        at.cell = None if not form.cells else var("c") if form.vector == 1 else var("c") * form.vector + e
        at.parts = {i: Ptr(f"part_x{i}", e) for i in moved}
        one = step(var("column"))
        at.cell, at.parts, at.names = None, {}, fixed
        start = var("at")
        if form.vector == 1:
            group: tuple[Stmt, ...] = (Let("column", start), *one)
        else:
            loads = [Vector(Ptr(f"part_x{i}"), self.spot(i, start), self.bytes(i)) for i in read]
            stores = [Vector(self.spot(i, start), Ptr(f"part_x{i}"), self.bytes(i)) for i in written if i in moved]
            every = unrolled("e", form.vector, Let("column", start + e), *one)
            group = (*loads, every, *stores)
        width = form.subgroup * form.vector
        begin = var("lane") * form.vector
        if not form.cells:
            return [For("at", begin, n, const(width), group, AHEAD)]
        begin = (var("first") + begin if self.spread else begin) + var("c") * width
        turn = (Let("at", begin), If(start.lt(n), group))
        return [unrolled("c", form.cells // form.vector, *turn)]

    def spot(self, i: int, column: Index) -> Ptr:
        """Address of an element of this row, of a dense operand."""
        rows = var("row") * var(f"x{i}_m") if "m" in self.at.fused.operands[i].axes else const(0)
        return Ptr(f"x{i}", rows + column)

    def bytes(self, i: int) -> int:
        """Number of bytes of a vector of operand i."""
        return self.form.vector * BY_NAME[self.at.fused.operands[i].dtype].bytes

    def combined(self, reduced: list[Expr]) -> list[Stmt]:
        """Reductions over a subgroup, in the scratch of each thread."""
        stmts = self.by_warps(reduced) if self.form.exchange else self.by_memory(reduced)
        return [*stmts, *(self.put(x, Ptr(self.totals[x])) for x in reduced)]

    def put(self, x: Expr, to: Ptr) -> Stmt:
        """Store of a thread's accumulator."""
        return Verb("store", self.register(x), p=to, of=self.at.real.name)

    def get(self, x: Expr, at: Index, into: str = "") -> Stmt:
        """Load of an accumulator from shared memory, the thread's own where no register is named."""
        return Verb("load_c", into or self.register(x), p=Ptr(f"of_{self.totals[x]}", at), of=self.at.real.name)

    def with_other(self, x: Expr) -> Stmt:
        """Reduction of another thread's value into this thread's."""
        return self.taken(x, self.register(x), "other")

    def by_warps(self, reduced: list[Expr]) -> list[Stmt]:
        """Reductions through registers of a warp, then through shared memory."""
        subgroup, lanes, stmts = self.form.subgroup, self.form.warp, []
        mask = min(subgroup, lanes) // 2
        while mask:
            stmts += [s for x in reduced for s in (Exchange("other", self.register(x), mask), self.with_other(x))]
            mask //= 2
        if subgroup <= lanes:
            return stmts
        warps, first = subgroup // lanes, var("thread") // subgroup * (subgroup // lanes)
        put = tuple(self.put(x, Ptr(f"of_{self.totals[x]}", var("thread") // lanes)) for x in reduced)
        stmts += [If((var("lane") % lanes).eq(0), put), Barrier()]
        for x in reduced:
            each = (self.get(x, first + var("w"), "other"), self.with_other(x))
            stmts += [self.get(x, first), For("w", const(1), const(warps), const(1), each, WHOLE)]
        return stmts

    def by_memory(self, reduced: list[Expr]) -> list[Stmt]:
        """Reductions through shared memory: a tree of radix four, or two."""
        width, thread = self.form.subgroup, var("thread")
        if width == 1:
            return []
        put = [self.put(x, Ptr(f"of_{self.totals[x]}", thread)) for x in reduced]
        stmts: list[Stmt] = [*put, Barrier()]
        while width > 1:
            radix = 2 if width == 2 else 4
            width //= radix
            few: list[Stmt] = []
            for x, store in zip(reduced, put, strict=True):
                for i in range(1, radix):
                    few += [self.get(x, thread + i * width, "other"), self.with_other(x)]
                few.append(store)
            stmts += [If(var("lane").lt(width), tuple(few)), Barrier()]
        return [*stmts, *(self.get(x, thread - var("lane")) for x in reduced)]


def _columns(isa: Isa, real: Atom, program: BlockProgram, s: Schedule) -> tuple[GridKernel, ...]:
    """Kernel that reduces all columns, or the two that do where columns are cut in slices."""
    rows = (const(0), var("m")) if s.parallel.split == 1 else (var("first"), var("last"))
    each = Lowering(program, Elements(isa, real, program.fused, inner=var("i"), row=var("i")), rows)
    reduced, column = program.accumulators, var("column")
    *first, last = program.passes
    down = [x for one in first for x in each.one_pass(one, column)]
    if s.parallel.split == 1:
        return (_column_kernel("portmm_columns", each, s, [*down, *each.one_pass(last, column)]),)
    share = ceil_div(var("m"), var("slices"))
    mine = [
        Let("first", minimum(var("m"), var("slice") * share)), Let("last", minimum(var("m"), var("first") + share)),
    ]  # fmt: skip

    def partial(i: int, part: Index) -> Ptr:
        """Address of the partial result of a slice of a column."""
        return Ptr("work", ((part * var("batch") + var("item")) * len(reduced) + i) * var("n") + column)

    leave = [Verb("store", each.register(x), p=partial(i, var("slice")), of=real.name) for i, x in enumerate(reduced)]
    whole = each.begun(reduced)
    for i, x in enumerate(reduced):
        other = Verb("load_c", "other", p=partial(i, var("s")), of=real.name)
        taken = (other, each.taken(x, each.register(x), "other"))
        whole.append(For("s", const(0), var("slices"), const(1), taken))
    each.live = {x: each.register(x) for x in reduced}
    return (
        _column_kernel("portmm_columns", each, s, [*mine, *down, *leave]),
        _column_kernel("portmm_columns_whole", each, s, [*whole, *each.one_pass(last, column)]),
    )


def _column_kernel(name: str, each: Lowering, s: Schedule, body: list[Stmt]) -> GridKernel:
    """Kernel whose threads have a column each."""
    at, sliced, across = each.at, s.parallel.split != 1, ceil_div(var("n"), s.threads)
    params = parameters.integers("m", "n", "batch")
    params += [Argument("slices", "int"), Argument("work", "pointer", "f32")] if sliced else []
    place = (
        Let("across", across),
        Let("item", var("block") // var("across")),
        Let("column", var("block") % var("across") * s.threads + var("thread")),
        *operands(at.isa, at.fused),
        If(var("column").lt(var("n")), tuple(body)),
    )
    grid = (across * var("batch"), var("slices") if name == "portmm_columns" and sliced else const(1))
    return GridKernel(name, at.isa, at.real, (*params, *parameters.of_fused(at.fused)), s.threads, grid, place)
