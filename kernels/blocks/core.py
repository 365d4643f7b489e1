"""Block programs on cores of a host: tasks of rows, or of columns, in vectors.

    for each share of the rows, or group of columns     <- threads
      for each pass along a row, or down each vector of columns

A row stays in L1 or L2 from one pass to the next; values that are kept for a later one are in a task's scratch. A group
of columns is a few cache lines wide, so that lines of a row are in L2 when the next vector of columns is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, minimum, round_up, var
from portmm.ir.lane_nodes import Map, Total
from portmm.ir.nodes import Call, For, Function, If, Kernel, Let, LetPtr, Parallel, Param, Scratch, Verb
from portmm.kernels.blocks.statements import Lowering
from portmm.kernels.cpu.elementwise import Elements, arguments, parameters, vectors
from portmm.spec.epilogue import REDUCTIONS, operand_types

if TYPE_CHECKING:
    from portmm.ir.block_program import BlockProgram
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.blocks.statements import Step
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

TASKS_PER_WORKER = 4


def build(s: Schedule, isa: Isa, real: Atom, program: BlockProgram) -> Kernel:
    """Kernel of a block program, computed in lanes of `real`."""
    fused, group = program.fused, s.tile("L2").n
    m, n, task, item = var("m"), var("n"), var("task"), var("item")
    if program.loop == "m":
        groups, start = ceil_div(n, group), var("column")
        here = arguments(fused, item, const(0), start)
        body: tuple[Stmt, ...] = (
            Let("item", task // groups),
            Let("column", task % groups * group),
            Call(_columns(isa, real, program), (m, n, minimum(n - start, group), item, start, *here)),
        )
        share = Function("some_columns", "task", (), body, "A group of columns")
        return kernel_of("columns", isa, real, fused, share, (groups * var("batch"), const(0)))
    total = m * var("batch")
    tasks, width, kept = minimum(total, var("workers") * TASKS_PER_WORKER), round_up(n, 64), len(program.tiles)
    own = [LetPtr(f"kept{i}", Ptr("work", (var("worker") * kept + i) * width), "f32") for i in range(kept)]
    here = [*arguments(fused, item, var("row"), const(0)), *(Ptr(x.name) for x in own)]
    line = Call(row_function(s, isa, real, program), (m, n, item, var("row"), *here))
    one = (Let("item", var("r") // m), Let("row", var("r") % m), line)
    rows = For("r", total * task // tasks, total * (task + 1) // tasks, const(1), one)
    share = Function("some_rows", "task", (), (*own, rows), "A share of the rows")
    return kernel_of("rows", isa, real, fused, share, (tasks, width * (var("workers") * kept)))


def kernel_of(  # noqa: PLR0917 - three callers
    name: str, isa: Isa, real: Atom, fused: Fused, share: Function, sizes: tuple[Index, Index]
) -> Kernel:
    """The kernel of tasks of a function, of expressions: their number, and elements of scratch of all workers."""
    tasks, work = sizes
    entry = Function("entry", "entry", (), (Parallel(share, tasks),), f"All {name}")
    return Kernel(f"portmm_{name}_{real.name}", isa, real, entry, work + 64, operands=operand_types(fused))


def row_function(s: Schedule, isa: Isa, real: Atom, program: BlockProgram) -> Function:
    """Function for all passes over one row."""
    at = Elements(isa, real, program.fused, row=var("row"), ahead=s.b.along)
    each = _Core(program, at, chains=s.nr // real.n, run=s.tile("L1").n)
    lane = [Scratch("lane", real.n, "f32")] if each.totals else []
    body = (*each.at.scratch(), *each.scratch(), *lane, *each.passes())
    params = [Param("m"), Param("n"), Param("item"), Param("row"), *parameters(each.at.fused)]
    params += [Param(x, "f32") for x in each.tiles.values()]
    return Function("one_row", "inner", tuple(params), body, "Expressions over one row")


def _columns(isa: Isa, real: Atom, program: BlockProgram) -> Function:
    """Function that reduces all rows of a few columns."""
    each = _Core(program, Elements(isa, real, program.fused, inner=var("i"), row=var("i"), column=var("column")))
    body = (*each.at.scratch(), *vectors(each.at, const(0), var("columns"), each.passes))
    params = [Param("m"), Param("n"), Param("columns"), Param("item"), Param("column"), *parameters(each.at.fused)]
    return Function("down", "inner", tuple(params), body, "Sums and maxima of a few columns")


@dataclass
class _Core(Lowering):
    """Statements on vectors of a core.

    Attributes:
        run: columns after which sums along a row restart; sums of runs do so after as many runs as these are vectors
            of a chain.
    """

    run: int = 0

    def along(self, step: Step, wanted: list[Expr], reduced: list[Expr], written: tuple[int, ...]) -> list[Stmt]:
        """Loop along a row."""
        del wanted, written
        n, lanes = var("n"), self.at.real.n
        if not reduced:
            each = vectors(self.at, const(0), n, step)
            self.at.ahead = 0  # in later passes a row is in a cache
            return each
        several = n - n % (self.chains * lanes)
        side = tuple(s for e in range(self.chains) for s in step(var("j") + e * lanes, "", e))
        self.at.ahead = 0
        sums = [f"{self.totals[x]}_{e}" for x in reduced if x.args[0] == "add" for e in range(self.chains)]
        return [*_runs(self, sums, several, side), *vectors(self.at, several, n, step)]

    def reduced(self, x: Expr, into: str, few: str) -> list[Stmt]:
        """Reduction of a vector of values into an accumulator; along a row, of a last one only the valid lanes."""
        if not few or self.down:
            return super().reduced(x, into, few)
        register, before = self.at.value(x.args[1])
        lanes, count, there, kept = (f"{into}_{y}" for y in ("at", "count", "there", "kept"))
        real = self.at.real.name
        return [
            *before,
            Map("lanes", lanes, (), "s32", "s32", real, const(0)),
            Map("whole", count, (), "s32", "s32", real, var(few)),
            Map("lt", there, (lanes, count), "mask", "s32", real),
            Map("select", kept, (there, register, REDUCTIONS[x.args[0]]), "f32", "f32", real),
            self.taken(x, into, kept),
        ]

    def combined(self, reduced: list[Expr]) -> list[Stmt]:
        """Reduction of all chains of accumulators, then of their lanes."""
        stmts: list[Stmt] = []
        for x in reduced:
            first = self.register(x)
            stmts += [self.taken(x, first, self.register(x, e)) for e in range(1, self.chains)]
            stmts.append(Verb("store", first, p=Ptr("lane"), of=self.at.real.name))
            stmts.append(Total(x.args[0], Ptr(self.totals[x]), Ptr("lane"), self.at.real.n))
        return stmts


def _runs(each: _Core, sums: list[str], end: Index, side: tuple[Stmt, ...]) -> list[Stmt]:
    """Loop over a row; the registers all_* of `sums` restart with each run, those of runs with each block."""
    real, step, run = each.at.real.name, each.chains * each.at.real.n, each.run
    if not sums:
        return [For("j", const(0), end, const(step), side)]
    block = run * (run // step)
    j_run, j_block = var("j_run"), var("j_block")

    def none(level: str) -> list[Stmt]:
        return [Map("literal", f"{level}_{x}", (0.0,), "f32", "f32", real) for x in sums]

    def added(to: str, level: str, more: str) -> list[Stmt]:
        return [Map("add", f"{to}_{x}", (f"{level}_{x}", f"{more}_{x}"), "f32", "f32", real) for x in sums]

    once = For("j", j_run, minimum(end, j_run + run), const(step), side)
    after_run = If((j_run + run).lt(end), (*added("runs", "runs", "all"), *none("all")))
    runs = For("j_run", j_block, minimum(end, j_block + block), const(run), (once, after_run))
    after_block = If((j_block + block).lt(end), (*added("blocks", "blocks", "runs"), *none("runs")))
    return [
        *none("runs"),
        *none("blocks"),
        For("j_block", const(0), end, const(block), (runs, after_block)),
        *added("all", "runs", "all"),
        *added("all", "blocks", "all"),
    ]
