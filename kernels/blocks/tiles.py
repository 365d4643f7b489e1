"""General block programs on cores of a host: products, reductions and element-wise operations on tiles.

    for each point of the grid: a tile of rows, a tile of columns, one of each other label   <- threads
      for each pass: what does not vary along the loop, then blocks of the loop
        products into accumulators and tiles, element-wise operations on tiles
      the results

Accumulators and tiles are in a worker's scratch, rows of a tile one after the other. Lanes are columns of a tile: a
product has its right operand contiguous along them, so that it is computed transposed where that saves a copy. A result
that is a sum of products is accumulated where it is stored. Where a maximum along the loop grows, accumulators that are
sums of exponentials less it are rescaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.block_program import TileGemm, TileReduce, accumulated
from portmm.ir.index import Ptr, ceil_div, const, minimum, round_up, var
from portmm.ir.nodes import Call, For, Function, Kernel, Let, LetPtr, Parallel
from portmm.ir.tile_program import PREFIX, extent_fields, row_label, stride_field
from portmm.kernels.blocks import tile_maxima
from portmm.kernels.blocks.tile_maps import View, map_function
from portmm.kernels.blocks.tile_products import product
from portmm.kernels.cpu.online_softmax import decay
from portmm.spec.epilogue import Fused, Operand, load, operand_types, summed, varies
from portmm.spec.expr import Expr, node, ordered
from portmm.spec.expr import const as literal
from portmm.spec.expr_ops import OPS

if TYPE_CHECKING:
    from portmm.ir.block_program import BlockProgram, Pass
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

NO = const(0)
PAD = 16
"""Elements between rows of a tile besides their own: rows a power of two apart would share sets of L1."""


def build(s: Schedule, isa: Isa, real: Atom, program: BlockProgram, lowering: type[Tiles] | None = None) -> Kernel:
    """Kernel of a block program whose results have rows and columns, computed in lanes of `real`.

    Raises:
        ScheduleError: the program has a maximum, an index, or values of more than two labels in a tile.
    """
    atom = isa.vector("f32", real.n)
    if atom is None or not real.mask or real.acc != "f32":
        raise ScheduleError(f"{isa.name} has no masked vectors of f32, which tiles of any extents need")
    return (lowering or Tiles)(s, isa, real, atom, program).kernel()


class Tiles:
    """A lowering of one program.

    Attributes:
        first, last: the first element of the loop, and its end.
        factors: the factor of sums that are rescaled by each maximum.
    """

    def __init__(self, s: Schedule, isa: Isa, atom: Atom, real: Atom, program: BlockProgram) -> None:
        self.s, self.isa, self.atom, self.real, self.program = s, isa, atom, real, program
        self.steps, self.loop = program.fused.steps, program.loop
        self.axes = varies(self.steps, program.operands)
        self.extents = {x: var(field) for x, field in extent_fields(program).items()}
        operators = [x for one in program.passes for x in one if isinstance(x, TileGemm) and x.rescaled is not None]
        self.rescaling = {x.rescaled for x in operators}
        self.check()
        result = program.operands[program.fused.results[0][0]].axes
        self.columns = result[-1]
        self.rows = row_label(program)
        self.outer = [x for x in result if x not in (self.rows, self.columns)]
        self.product, self.maps = product(s, atom), 0
        self.known: dict[Expr, View] = {}
        self.copies: dict[tuple[Expr, str], View] = {}
        self.before: list[Stmt] = []
        self.inside: list[Stmt] = []
        self.buffers: list[Stmt] = []
        self.size: Index = const(0)
        self.looping = False
        self.first, self.last = const(0), self.extents[self.loop]
        self.factors: dict[Expr, View] = {}

    def check(self) -> None:
        """Check that there are loops for all operations.

        Raises:
            ScheduleError: there are not.
        """
        every = [x for one in self.program.passes for x in one]
        reduced = [x.value for x in every if isinstance(x, TileReduce)]
        if any(x.args[0] != "max" or summed(x) != self.loop for x in reduced):
            raise ScheduleError(f"loops over tiles have sums of products, and maxima along {self.loop!r} only")
        leaves = ("load", "const", "contract", "reduce")
        if bad := next((x for x in self.steps if x.op not in leaves and x.op not in OPS), None):
            raise ScheduleError(f"loops over tiles have no {bad.op}")
        results = [self.program.operands[i].axes for i, _ in self.program.fused.results]
        if any(self.loop in x or {*x} != {*results[0]} or x[-1] != results[0][-1] for x in results):
            raise ScheduleError(f"loops over tiles store results along the same labels, and not along {self.loop!r}")
        if self.rescaling & accumulated([x for _, x in self.program.fused.results]):
            raise ScheduleError("loops over tiles do not store a maximum that sums are relative to: it may be -inf")
        if any(x.dtype != self.dtype or not x.dense for x in self.program.operands):
            raise ScheduleError(f"loops over tiles have dense operands of {self.dtype}")

    @property
    def unit(self) -> Atom:
        """The unit of products."""
        return self.atom

    @property
    def dtype(self) -> str:
        """The type of operands."""
        return "f32"

    def kind(self, view: View) -> str:  # noqa: ARG002 - all are of one type here
        """The type of a value in memory."""
        return "f32"

    def task_body(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """A task with what it needs before and after."""
        return body

    # Places.

    def whole(self, label: str) -> bool:
        """Whether tiles have all of a label: it is summed, not along the loop."""
        return label != self.loop and any(summed(x) == label for x in self.steps if x.op == "contract")

    def room(self, label: str) -> Index:
        """The largest extent of a tile along a label."""
        if not label:
            return const(1)
        by = {self.rows: self.s.tile("L1").m, self.columns: self.s.tile("L2").n, self.loop: self.s.tile("L1").k}
        most = 0 if self.whole(label) else by.get(label, 0)
        return minimum(most, self.extents[label]) if most else self.extents[label]

    def count(self, label: str) -> Index:
        """The extent of the current tile along a label."""
        if not label:
            return const(1)
        names = {self.rows: "row_count", self.columns: "column_count", self.loop: "loop_count"}
        return var(names[label]) if label in names else self.extents[label]

    def start(self, label: str) -> Index:
        """The first element of the current tile along a label."""
        names = {self.rows: "row_start", self.columns: "column_start", self.loop: "loop_start"}
        return var(names[label]) if label in names else var(f"at_{label}") if label in self.outer else const(0)

    def own(self, x: Expr) -> list[str]:
        """The labels of a tile of a value.

        Raises:
            ScheduleError: there are more than two.
        """
        labels = [y for y in self.extents if y in self.axes[x] and y not in self.outer]
        if len(labels) > 2:
            raise ScheduleError(f"a value varies along {''.join(labels)} in a tile; loops over tiles have two labels")
        return labels

    def operand(self, i: int) -> View:
        """The current tile of an operand."""
        axes = self.program.operands[i].axes
        at, strides = const(0), {}
        for y in axes:
            field = stride_field(axes, y)
            step = var(f"x{i}_{field}") if field else const(1)
            at += self.start(y) * step
            if y not in self.outer:
                strides[y] = step
        return View(Ptr(f"x{i}", at), strides)

    def buffer(self, rows: str, columns: str) -> View:
        """A new tile in a worker's scratch, contiguous along its columns, or along the only label that it has."""
        name, n = f"tile{len(self.buffers)}", self.size
        if not rows or not columns:
            wide, strides = round_up(self.room(rows or columns), PAD), {rows or columns: const(1)}
            self.size += wide
        else:
            step = round_up(self.room(columns), PAD) + PAD
            strides = {rows: step, columns: const(1)}
            self.size += self.room(rows) * step
        self.buffers.append(LetPtr(name, Ptr("mine", n), "f32"))
        return View(Ptr(name), {x: y for x, y in strides.items() if x})

    # Values.

    def emit(self, x: Expr, call: Stmt) -> None:
        """Add a statement: before the loop of a pass, unless it is of a value that varies along it."""
        (self.inside if self.looping and self.loop in self.axes[x] else self.before).append(call)

    def value(self, x: Expr) -> View:
        """A value in memory: where it lies, or in a tile that is computed."""
        if x.op == "load":
            return self.operand(x.args[0])
        if x not in self.known:
            if x.op == "contract":
                self.known[x] = self.contracted(x)
            else:
                self.known[x] = self.mapped(x, self.orientation(x))
        return self.known[x]

    def orientation(self, x: Expr) -> tuple[str, str]:
        """Labels of rows and columns of a value's tile: as those lie that it is computed of."""
        labels = self.own(x)
        if len(labels) < 2:
            return "", labels[0] if labels else ""
        views = [self.value(y) for y in self.leaves(x)]
        for label in labels[::-1]:
            if any(len(v.strides) == 2 and v.contiguous(label) for v in views):
                return next(y for y in labels if y != label), label
        return labels[0], labels[1]

    def leaves(self, x: Expr) -> list[Expr]:
        """The values in memory that an element-wise expression reads, those with most labels first."""
        seen: dict[Expr, None] = {}
        stack = [x]
        while stack:
            y = stack.pop()
            if y.op in ("load", "contract", "reduce") or (y is not x and y in self.known):
                seen[y] = None
            else:
                stack += y.inner
        return sorted(seen, key=lambda y: -len(self.own(y)))

    def mapped(self, x: Expr, labels: tuple[str, str], to: View | None = None) -> View:
        """An element-wise expression on a tile, stored there or to a new one."""
        rows, columns = labels
        leaves = [x] if x.op in ("load", "contract") or (to is None and x in self.known) else self.leaves(x)
        views = [self.value(y) for y in leaves]
        target = self.buffer(rows, columns) if to is None else to
        self.emit(x, self.map_call(x, dict(zip(leaves, views, strict=True)), labels, target))
        return target

    def map_call(self, x: Expr, leaves: dict[Expr, View], labels: tuple[str, str], target: View) -> Call:
        """A call that stores an expression of leaves in memory, row by row: a leaf may lie where it is stored."""
        (rows, columns), views = labels, list(leaves.values())
        operands = []
        for view in (*views, target):
            axes = "m" * (rows in view.strides) + "n" * (columns in view.strides)
            operands.append(Operand(self.kind(view), axes, view.contiguous(columns) or columns not in view.strides))
        swapped: dict[Expr, Expr] = {y: load(i, "f32") for i, y in enumerate(leaves)}
        decays = tile_maxima.decays(x, self.rescaling)
        for y in ordered((x,)):
            if y in decays:
                swapped.setdefault(y, decay(swapped[decays[y]]))
            elif y not in swapped and y.op != "const":
                inner = tuple(swapped.get(z, z) if isinstance(z, Expr) else z for z in y.args)
                swapped[y] = node(y.op, inner, y.dtype) if y.op in OPS else y
        fused = Fused(tuple(operands), ((len(leaves), swapped.get(x, x)),))
        function = map_function(f"map_{self.maps}", self.isa, self.real, fused)
        self.maps += 1
        args: list[Index | Ptr] = [self.count(rows), self.vectors(columns, *views, target)]
        for operand, view in zip(operands, (*views, target), strict=True):
            args.append(view.at)
            args += [view.along(rows)] if "m" in operand.axes else []
            args += [] if operand.dense else [view.along(columns)]
        return Call(function, tuple(args))

    def vectors(self, columns: str, *views: View) -> Index:
        """The columns of a tile: whole vectors where all values along them are in scratch, which has room for these."""
        along = [x for x in views if columns in x.strides]
        scratch = all(x.at.name.startswith("tile") and x.contiguous(columns) for x in along)
        whole = bool(columns) and scratch and self.real.n <= PAD
        return round_up(self.count(columns), self.real.n) if whole else self.count(columns)

    def contracted(self, x: Expr, to: View | None = None, accumulate: Index = NO) -> View:
        """A sum of products, stored there or to a new tile, or added to it; statements of its operands come first."""
        along, (left, right) = summed(x), x.inner
        if set(self.own(left)) & set(self.own(right)) - {along}:
            left, right = left * right, literal(1.0)
            self.axes |= {left: self.axes[x] | {along}, right: frozenset()}
        a, b = self.value(left), self.value(right)
        p, q = (next((y for y in self.own(z) if y != along), "") for z in (left, right))
        wanted = next((y for y, n in to.strides.items() if n == const(1)), "") if to is not None else ""
        if (wanted and wanted == p) or (not wanted and self.transposes(a, b, p, q)):
            left, right, a, b, p, q = right, left, b, a, q, p
        if not b.contiguous(q):
            b = self.copied(right, along, q)
        target = self.buffer(p, q) if to is None else to
        carried = summed(x) == self.loop and self.looping
        call = self.multiplied(left, (along, p, q), (a, b, target), accumulate)
        if carried:
            self.inside.append(call)
        else:
            self.emit(x, call)
        return target

    def multiplied(
        self,
        left: Expr,  # noqa: ARG002 - of other products
        labels: tuple[str, str, str],
        views: tuple[View, View, View],
        accumulate: Index,
    ) -> Call:
        """A product of tiles, of the value of A; of labels of the sum, rows and columns; and of views of A, B and C."""
        (along, p, q), (a, b, to) = labels, views
        return Call(self.product, (
            self.count(along), self.count(p), self.count(q), a.at, a.along(p), a.along(along), b.at, b.along(along),
            to.at, to.along(p), accumulate,
        ))  # fmt: skip

    def transposes(self, a: View, b: View, p: str, q: str) -> bool:
        """Whether a product is computed transposed: its right operand is not contiguous along columns, or has none."""
        if not q or not p:
            return not q and bool(p) and a.contiguous(p)
        if a.contiguous(p) != b.contiguous(q):
            return a.contiguous(p)
        return p == self.columns if a.contiguous(p) else self.loop == q

    def copied(self, x: Expr, rows: str, columns: str) -> View:
        """A copy of a value that is contiguous along its columns."""
        key = (x, columns)
        if key not in self.copies:
            self.copies[key] = self.mapped(x, (rows, columns))
        return self.copies[key]

    # Passes.

    def kernel(self) -> Kernel:
        """The kernel."""
        stmts, direct = [], self.direct()
        accumulators: dict[Expr, View] = {}
        for one in self.program.passes[:-1]:
            stmts += self.one_pass(one, direct, accumulators)
        stmts += self.stores(direct)
        mine = LetPtr("mine", Ptr("work", var("worker") * self.size), "f32")
        body = (*self.place(var("task")), mine, *self.buffers, *stmts)
        share = Function("some_tiles", "task", (), self.task_body(body), "A tile of the results")
        entry = Function("entry", "entry", (), (Parallel(share, self.tasks()),), "All tiles")
        work = self.size * var("workers") + 64
        operands = operand_types(self.program.fused)
        return Kernel(f"{PREFIX}{self.unit.name}", self.isa, self.unit, entry, work, operands=operands)

    def tasks(self) -> Index:
        """The number of tiles of the grid."""
        tasks = const(1)
        for label in (self.columns, self.rows):
            tasks *= ceil_div(self.extents[label], self.room(label)) if label else 1
        for label in reversed(self.outer):
            tasks *= self.extents[label]
        return tasks

    def place(self, at: Index) -> tuple[Stmt, ...]:
        """The statements that find the place of a tile, by its number."""
        place: list[Stmt] = []
        for label, name in ((self.columns, "column"), (self.rows, "row")):
            if label:
                by, n = self.room(label), self.extents[label]
                place += [Let(f"{name}_start", at % ceil_div(n, by) * by)]
                place += [Let(f"{name}_count", minimum(by, n - var(f"{name}_start")))]
                at //= ceil_div(n, by)
        for label in reversed(self.outer):
            place.append(Let(f"at_{label}", at % self.extents[label]))
            at //= self.extents[label]
        return tuple(place)

    def direct(self) -> dict[Expr, int]:
        """Sums that are accumulated where a result is stored -> the number of its operand: all terms of a result."""
        sums: dict[Expr, int] = {}
        uses: dict[Expr, int] = {}
        for x in self.steps:
            for y in x.inner:
                uses[y] = uses.get(y, 0) + 1
        for i, value in self.program.fused.results:
            terms, stack, once = [], [value], True
            while stack:
                x = stack.pop()
                once = once and uses.get(x, 0) == int(x is not value)
                if x.op == "add":
                    stack += x.inner
                else:
                    terms.append(x)
            tile = {y for y in (self.rows, self.columns) if y}
            fits = all(x.op == "contract" and {*self.own(x)} == tile for x in terms)
            if fits and once and sum(value is y for _, y in self.program.fused.results) == 1:
                sums |= dict.fromkeys(terms, i)
        return sums

    def one_pass(self, one: Pass, direct: dict[Expr, int], started: dict[Expr, View]) -> list[Stmt]:
        """The loop of a pass, after what it reads that does not vary along it."""
        self.before, self.inside, self.looping = [], [], True
        done: dict[Expr, View] = {}
        for x in one:
            if isinstance(x, TileReduce):
                self.known[x.value], self.factors[x.value] = tile_maxima.maximum(self, x.value)
                done[x.value] = self.known[x.value]
            elif isinstance(x, TileGemm) and self.program.carried(x):
                to = self.operand(direct[x.value]) if x.value in direct else None
                again = to is not None and any(direct.get(y) == direct[x.value] for y in (*started, *done))
                more = const(1) if again else self.first.lt(var("loop_start"))
                done[x.value] = self.contracted(x.value, to, more)
                if x.rescaled is not None:
                    tile_maxima.rescale(self, done[x.value], self.factors[x.rescaled])
        self.known = {x: y for x, y in self.known.items() if self.loop not in self.axes[x]} | done
        self.copies = {x: y for x, y in self.copies.items() if self.loop not in self.axes[x[0]]}
        started |= done
        by = self.room(self.loop)
        count = Let("loop_count", minimum(by, self.last - var("loop_start")))
        self.looping = False
        return [*self.before, For("loop_start", self.first, self.last, by, (count, *self.inside))]

    def stores(self, direct: dict[Expr, int]) -> list[Stmt]:
        """The results."""
        self.before = []
        rows, columns = self.rows, self.columns
        for i, value in self.program.fused.results:
            to = self.operand(i)
            terms = [x for x, at in direct.items() if at == i]
            for x in terms:
                if x not in self.known:
                    first = not any(y in self.known for y in terms)
                    self.known[x] = self.contracted(x, to, const(int(not first)))
            if not terms:
                self.mapped(value, (rows, columns), to)
        return self.before
