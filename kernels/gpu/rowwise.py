"""Row-wise kernels on a GPU: element-wise expressions and reductions over rows, without a product.

    for each few rows                    <- blocks of threads
      for each pass over a row           <- a subgroup of threads, contiguous along it
        for each few neighbours
        reduction over the subgroup      (a tree, always the same)

The passes are those of `kernels.cpu.rowwise`: each but the last computes sums and maxima that depend only on
those of earlier ones. For a row that is short enough a thread keeps values that later passes read again in
registers; for a longer one they are read, and computed, again. Without reductions, several blocks may share a row.

All threads of a block synchronize for each reduction, so subgroups past the last row compute that row again, and
store nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import GridKernel
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.lane_nodes import Map
from portmm.ir.nodes import For, If, Let, Scratch, Verb
from portmm.ir.thread_nodes import WHOLE, Barrier, Exchange, Shared, Vector
from portmm.kernels.cpu.elementwise import Elements
from portmm.kernels.cpu.rowwise import Passes, inside
from portmm.kernels.gpu import parameters
from portmm.kernels.gpu.epilogue_store import operands
from portmm.kernels.gpu.loops import unrolled
from portmm.schedule.gpu_rows import RowTiles
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import REDUCTIONS, varies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused, Operand
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

AHEAD = 4
"""Unroll factor of a loop along a long row, so that loads overlap."""


def build(isa: Isa, real: Atom, fused: Fused, s: Schedule) -> GridKernel:
    """Kernel that computes expressions over all rows; if columns are in registers, over rows of at most so many."""
    form = RowTiles(s)
    row = _Row(isa, real, fused, form, spread=not fused.reductions and form.cells > 0)
    params = (*parameters.integers("m", "n", "batch"), *parameters.of_fused(str(fused)))
    blocks = ceil_div(var("m") * var("batch"), row.side) * row.slices
    body = (*row.place(), *row.statements())
    return GridKernel("portmm_rows", isa, real, params, form.threads, (blocks, const(1)), body)


def kept(fused: Fused) -> dict[Expr, int]:
    """Values that a thread keeps of its columns for later passes -> the pass that computes each."""
    passes = Passes(fused)
    along = varies(fused.steps, fused.operands)
    values = {x: i for x, i in passes.kept.items() if "n" in along[x]}
    wanted = [[x.args[1] for x in one] for one in passes.reductions] + [[x for _, x in fused.results]]

    def reads(i: int) -> set[Expr]:
        roots = [*wanted[i], *(x for x, when in values.items() if when == i)]
        return inside(roots, {x: when for x, when in values.items() if when < i})

    every = [reads(i) for i in range(len(wanted))]
    for i, now in enumerate(every):
        later = set().union(*every[i + 1 :])
        loads = [x for x in fused.steps if x.op == "load" and x.dtype == "f32" and "n" in along[x]]
        values |= {x: i for x in loads if x in now & later and x not in values}
    return values


@dataclass(frozen=True, slots=True)
class _Row:
    """Statements of one kernel.

    Attributes:
        isa: the instruction set.
        real: its atom for f32.
        fused: the expressions.
        form: the distribution of rows over threads.
        spread: several blocks share a row.
    """

    isa: Isa
    real: Atom
    fused: Fused
    form: RowTiles
    spread: bool

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

    def statements(self) -> tuple[Stmt, ...]:
        """Statements of all passes."""
        fused, cells = self.fused, self.form.cells
        at = Elements(self.isa, self.real, fused, inner=var("row"), row=var("row"))
        passes = Passes(fused)
        names = {x: f"kept{i}" for i, x in enumerate(kept(fused))} if cells and passes.reductions else {}
        sums = {x: f"r{i}" for i, x in enumerate(fused.reductions)}
        body: list[Stmt] = [*self.shared(sums.values()), *operands(self.isa, fused)]
        body += [Scratch(x, 1, "f32") for x in sums.values()] + [Scratch(x, cells, "f32") for x in names.values()]
        body += [Scratch(f"part_x{i}", self.form.vector, x.dtype) for i, x in self.moved()]
        for i, reductions in enumerate(passes.reductions):
            keeps = {x: names[x] for x, when in kept(fused).items() if when == i and x in names}
            into = {x: sums[x] for x in reductions}
            body += self.reduced(at, into, keeps)
            at.stored |= into | keeps
        last = self.written(at)
        return (*body, *(last if self.alone else (If(var("line").lt(var("m") * var("batch")), last),)))

    def shared(self, names: Iterable[str]) -> list[Stmt]:
        """Shared memory for reductions over a subgroup."""
        form = self.form
        each = form.warp if form.exchange else 1
        return [Shared(f"of_{x}", form.threads // each, "f32") for x in names] if form.subgroup > each else []

    def reduced(self, at: Elements, into: dict[Expr, str], keeps: dict[Expr, str]) -> list[Stmt]:
        """Statements of a pass for sums and maxima."""
        at.names.clear()
        wanted = [*(x.args[1] for x in into), *keeps]
        body: list[Stmt] = list(at.once(wanted, "bm"))
        real = self.real.name
        for x, to in into.items():
            body.append(Map("literal", f"all_{to}", (REDUCTIONS[x.args[0]],), "f32", "f32", real))

        def after() -> list[Stmt]:
            stmts: list[Stmt] = []
            assert at.cell is not None or not keeps  # noqa: S101 - `kept` is for cells
            for x, to in keeps.items():
                stmts.append(Verb("store", at.names[x], p=Ptr(to, at.cell or const(0)), of=real))
            for x, to in into.items():
                register, before = at.value(x.args[1])
                stmts += [*before, Map(x.args[0], f"all_{to}", (f"all_{to}", register), "f32", "f32", real)]
            return stmts

        body += self.along(at, wanted, after, ())
        body += self.together({to: x.args[0] for x, to in into.items()})
        return [*body, *(Verb("store", f"all_{to}", p=Ptr(to), of=real) for to in into.values())]

    def written(self, at: Elements) -> tuple[Stmt, ...]:
        """Statements of the pass for results."""
        at.names.clear()
        results = self.fused.results
        along = [(i, x) for i, x in results if "n" in self.fused.operands[i].axes]
        single = [(i, x) for i, x in results if "n" not in self.fused.operands[i].axes]
        body: list[Stmt] = list(at.once([x for _, x in results], "bm"))
        if single:
            first = var("lane").eq(0) * (var("first").eq(0) if self.spread else const(1))
            body.append(If(first, tuple(s for i, x in single for s in at.single(x, i))))

        def after() -> list[Stmt]:
            return [s for i, x in along for s in at.store(x, i, var("column"), "")]

        if along:
            body += self.along(at, [x for _, x in along], after, tuple(i for i, _ in along))
        at.names.clear()
        return tuple(body)

    def moved(self) -> list[tuple[int, Operand]]:
        """Operands that are moved as vectors."""
        if self.form.vector == 1:
            return []
        return [(i, x) for i, x in enumerate(self.fused.operands) if x.dense and "n" in x.axes]

    def along(
        self, at: Elements, wanted: list[Expr], after: Callable[[], list[Stmt]], written: tuple[int, ...]
    ) -> list[Stmt]:
        """Loop over the columns of a thread: values, and the statements `after` each."""
        form, n, fixed = self.form, var("n"), dict(at.names)
        moved = dict(self.moved())
        read = [x.args[0] for x in at.under(wanted) if x.op == "load" and x not in at.stored and x.args[0] in moved]
        e = var("e")
        at.cell = None if not form.cells else var("c") if form.vector == 1 else var("c") * form.vector + e
        at.parts = {i: Ptr(f"part_x{i}", e) for i in moved}
        one = (*at.compute(wanted, var("column"), ""), *after())
        at.cell, at.parts, at.names = None, {}, fixed
        start = var("at")
        if form.vector == 1:
            group: tuple[Stmt, ...] = (Let("column", start), *one)
        else:
            loads = [Vector(Ptr(f"part_x{i}"), self.spot(i, start), self.bytes(i)) for i in read]
            stores = [Vector(self.spot(i, start), Ptr(f"part_x{i}"), self.bytes(i)) for i in written if i in moved]
            every = unrolled("e", form.vector, Let("column", start + e), *one)
            group = (*loads, every, *stores)
        step = form.subgroup * form.vector
        begin = var("lane") * form.vector
        if not form.cells:
            return [For("at", begin, n, const(step), group, AHEAD)]
        begin = (var("first") + begin if self.spread else begin) + var("c") * step
        turn = (Let("at", begin), If(start.lt(n), group))
        return [unrolled("c", form.cells // form.vector, *turn)]

    def spot(self, i: int, column: Index) -> Ptr:
        """Address of an element of this row, of a dense operand."""
        rows = var("row") * var(f"x{i}_m") if "m" in self.fused.operands[i].axes else const(0)
        return Ptr(f"x{i}", rows + column)

    def bytes(self, i: int) -> int:
        """Number of bytes of a vector of operand i."""
        return self.form.vector * BY_NAME[self.fused.operands[i].dtype].bytes

    def together(self, kinds: dict[str, str]) -> list[Stmt]:
        """Reductions over a subgroup, by name, with the results in each thread."""
        return self.by_warps(kinds) if self.form.exchange else self.by_memory(kinds)

    def combined(self, to: str, kind: str) -> Stmt:
        """Reduction of another thread's value into this thread's."""
        return Map(kind, f"all_{to}", (f"all_{to}", "other"), "f32", "f32", self.real.name)

    def by_warps(self, kinds: dict[str, str]) -> list[Stmt]:
        """Reductions through registers of a warp, then through shared memory."""
        subgroup, lanes = self.form.subgroup, self.form.warp
        stmts: list[Stmt] = []
        mask = min(subgroup, lanes) // 2
        while mask:
            stmts += [
                s for to, kind in kinds.items() for s in (Exchange("other", f"all_{to}", mask), self.combined(to, kind))
            ]
            mask //= 2
        if subgroup <= lanes:
            return stmts
        real, warp, warps = self.real.name, var("thread") // lanes, subgroup // lanes
        put = tuple(Verb("store", f"all_{to}", p=Ptr(f"of_{to}", warp), of=real) for to in kinds)
        stmts += [If((var("lane") % lanes).eq(0), put), Barrier()]
        first = var("thread") // subgroup * warps
        for to, kind in kinds.items():
            stmts.append(Verb("load_c", f"all_{to}", p=Ptr(f"of_{to}", first), of=real))
            other = Verb("load_c", "other", p=Ptr(f"of_{to}", first + var("w")), of=real)
            stmts.append(For("w", const(1), const(warps), const(1), (other, self.combined(to, kind)), WHOLE))
        return stmts

    def by_memory(self, kinds: dict[str, str]) -> list[Stmt]:
        """Reductions through shared memory: a tree of radix four, or two."""
        width = self.form.subgroup
        if width == 1:
            return []
        real, thread = self.real.name, var("thread")
        stmts: list[Stmt] = [Verb("store", f"all_{to}", p=Ptr(f"of_{to}", thread), of=real) for to in kinds]
        stmts.append(Barrier())
        while width > 1:
            radix = 2 if width == 2 else 4
            width //= radix
            few: list[Stmt] = []
            for to, kind in kinds.items():
                for i in range(1, radix):
                    few.append(Verb("load_c", "other", p=Ptr(f"of_{to}", thread + i * width), of=real))
                    few.append(self.combined(to, kind))
                few.append(Verb("store", f"all_{to}", p=Ptr(f"of_{to}", thread), of=real))
            stmts += [If(var("lane").lt(width), tuple(few)), Barrier()]
        first = thread - var("lane")
        return [*stmts, *(Verb("load_c", f"all_{to}", p=Ptr(f"of_{to}", first), of=real) for to in kinds)]
