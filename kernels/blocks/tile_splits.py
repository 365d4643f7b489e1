"""General block programs whose loop is split: tasks for runs of it, then one for each tile of the grid, which combines.

    for each tile of the grid, each run of the loop          <- threads
      accumulators of the run: maxima, and sums that are relative to them
    for each tile of the grid                                <- threads
      the runs' accumulators become one: sums are multiplied by the decay of their run's maximum from that of all
      the results

So few tiles, as those of attention with few queries, are shared by all threads. Accumulators of a run are in scratch of
its own. The number of runs follows from the schedule and the extent of the loop: results do not depend on threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.block_program import TileGemm, TileReduce
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import For, Function, Kernel, Let, LetPtr, Parallel
from portmm.ir.tile_program import PREFIX
from portmm.kernels.blocks import tiles
from portmm.kernels.cpu.online_softmax import decay
from portmm.spec.epilogue import operand_types
from portmm.spec.expr import apply, node

if TYPE_CHECKING:
    from portmm.ir.block_program import BlockProgram, Pass
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.kernels.blocks.tile_maps import View
    from portmm.schedule.schedule import Schedule
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(s: Schedule, isa: Isa, real: Atom, program: BlockProgram) -> Kernel:
    """Kernel of a block program whose loop is split, see `tiles.build`."""
    return tiles.build(s, isa, real, program, SplitTiles)


class SplitTiles(tiles.Tiles):
    """A lowering of one program whose loop is split."""

    def kernel(self) -> Kernel:
        """The kernel.

        Raises:
            ScheduleError: the program has several passes along its loop.
        """
        one, *more = self.program.passes[:-1]
        if more:
            raise ScheduleError("a loop is split where one pass along it has all accumulators")
        steps = ceil_div(self.last, self.room(self.loop))
        runs, tasks = minimum(self.s.parallel.split, steps), self.tasks()
        accumulators: dict[Expr, View] = {}
        part = self.run_of_loop(one, accumulators, steps)
        buffers = tuple(self.buffers)
        self.known, self.copies = dict(accumulators), {}
        combine = For("run", const(1), var("runs"), const(1), tuple(self.combined(one, accumulators)))
        end = (combine, *self.stores({}))
        sizes = (Let("runs", runs), Let("each", self.size))
        at_run = (*sizes, Let("tile", var("task") // var("runs")), Let("run", var("task") % var("runs")))
        mine = LetPtr("mine", Ptr("work", var("task") * var("each")), "f32")
        body = (*at_run, *self.place(var("tile")), mine, *buffers, *part)
        share = Function("run_of_loop", "task", (), body, "A tile of the results: accumulators over a run of the loop")
        mine = LetPtr("mine", Ptr("work", var("task") * var("runs") * var("each")), "f32")
        body = (*sizes, *self.place(var("task")), mine, *self.buffers, *end)
        join = Function("join_runs", "task", (), body, "A tile of the results, of the accumulators of all runs")
        entry = Function("entry", "entry", (), (Parallel(share, tasks * runs), Parallel(join, tasks)), "All tiles")
        operands, work = operand_types(self.program.fused), self.size * (tasks * runs) + 64
        return Kernel(f"{PREFIX}split_{self.atom.name}", self.isa, self.atom, entry, work, operands=operands)

    def run_of_loop(self, one: Pass, accumulators: dict[Expr, View], steps: Index) -> tuple[Stmt, ...]:
        """The pass along a run of the loop, whose blocks are those of the whole loop."""
        by, run, runs, end = self.room(self.loop), var("run"), var("runs"), self.last
        self.first, self.last = var("loop_first"), var("loop_last")
        first = Let("loop_first", steps * run // runs * by)
        last = Let("loop_last", minimum(end, steps * (run + 1) // runs * by))
        return (first, last, *self.one_pass(one, {}, accumulators))

    def combined(self, one: Pass, accumulators: dict[Expr, View]) -> list[Stmt]:
        """Accumulators of the first run become those of it and another one."""
        a, b, c, d = (node("element", (i,), "f32") for i in range(4))
        stmts: list[Stmt] = []
        for x in one:
            if isinstance(x, TileReduce):
                most, factor = accumulators[x.value], self.factors[x.value]
                other, own = self.of_run(most), self.of_run(factor)
                label = ("", "".join(self.own(x.value)))
                stmts += [
                    self.map_call(a, {a: most}, label, factor),
                    self.map_call(apply("max", a, b), {a: most, b: other}, label, most),
                    self.map_call(decay(b - a), {a: most, b: factor}, label, factor),
                    self.map_call(decay(b - a), {a: most, b: other}, label, own),
                ]
            elif isinstance(x, TileGemm) and self.program.carried(x):
                sums = accumulators[x.value]
                other = self.of_run(sums)
                columns = next((y for y, step in sums.strides.items() if step == const(1)), "")
                label = (next((y for y in sums.strides if y != columns), ""), columns)
                if x.rescaled is None:
                    stmts.append(self.map_call(a + b, {a: sums, b: other}, label, sums))
                else:
                    factor = self.factors[x.rescaled]
                    views = {a: sums, b: other, c: factor, d: self.of_run(factor)}
                    stmts.append(self.map_call(a * c + b * d, views, label, sums))
        return stmts

    def of_run(self, x: View) -> View:
        """An accumulator as it is in the scratch of the run."""
        return x._replace(at=x.at + var("run") * var("each"))
