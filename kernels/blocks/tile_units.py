"""General block programs of bfloat16 on cores whose units multiply tiles (AMX): the loops of `tiles`, other products.

Operands and results are bfloat16, and products have one of an operand as its right factor, contiguous along columns.
Its rows are interleaved in pairs, 32 rows by 32 columns at a time, into scratch that stays in L1, while what follows
in the same rows is prefetched. The left factor is packed for a block of k; a tile that was computed in float32 is
rounded to bfloat16 first, as NumPy rounds the result of an operation. Sums are float32, in scratch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.block_program import TileReduce
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, round_up, var
from portmm.ir.nodes import TILES, Call, Configure, For, Function, If, Let, LetPtr, Param, Prefetch, Verb
from portmm.kernels.blocks.tile_maps import View
from portmm.kernels.blocks.tiles import PAD, Tiles
from portmm.kernels.cpu.packing import pack_b
from portmm.kernels.cpu.tile_packing import pack_lines

if TYPE_CHECKING:
    from portmm.ir.block_program import BlockProgram
    from portmm.ir.index import Index
    from portmm.ir.nodes import Kernel, Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.expr import Expr
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

ACROSS = 2
"""Tiles of columns of a product."""


def build(s: Schedule, isa: Isa, unit: Atom, program: BlockProgram) -> Kernel:
    """Kernel of a block program of bfloat16, with products by `unit`.

    Raises:
        ScheduleError: the program has a maximum, other types, or a product of other operands.
    """
    real = isa.vector("f32", unit.n)
    if real is None or not real.mask:
        raise ScheduleError(f"{isa.name} has no masked vectors of f32, which tiles of any extents need")
    return UnitTiles(s, isa, real, real, program, unit).kernel()


class UnitTiles(Tiles):
    """A lowering of one program.

    Attributes:
        multiplier, lines: the unit, and the vectors that move its operands.
        kinds: types of tiles in scratch that are not float32.
        part: whether statements are of a part of the columns of a tile.
        packers: scratch of packed operands, in the order A, B.
    """

    def __init__(self, s: Schedule, isa: Isa, atom: Atom, real: Atom, program: BlockProgram, unit: Atom) -> None:  # noqa: PLR0917
        self.multiplier, self.lines = unit, isa.row_atom(unit) or unit
        self.kinds: dict[str, str] = {}
        self.part = False
        super().__init__(s, isa, atom, real, program)
        self.packers: tuple[Ptr, ...] = ()

    def check(self) -> None:
        """Check that there are loops for all operations.

        Raises:
            ScheduleError: there are not.
        """
        if any(isinstance(x, TileReduce) for one in self.program.passes for x in one):
            raise ScheduleError("loops over tiles of bf16 have sums of products only")
        super().check()

    @property
    def unit(self) -> Atom:
        """The unit of products."""
        return self.multiplier

    @property
    def dtype(self) -> str:
        """The type of operands."""
        return self.unit.a

    def kind(self, view: View) -> str:
        """The type of a value in memory."""
        name = view.at.name
        return self.dtype if name.startswith("x") else self.kinds.get(name, "f32")

    def buffer(self, rows: str, columns: str, dtype: str = "f32") -> View:
        """A new tile in a worker's scratch, of whole tiles of rows."""
        name, at = f"tile{len(self.buffers)}", Ptr("mine", self.size)
        wide = round_up(self.room(columns), PAD) + PAD
        self.size += (round_up(self.room(rows), self.unit.m) if rows else const(self.unit.m)) * wide
        self.buffers.append(LetPtr(name, at, dtype))
        self.kinds[name] = dtype
        strides = {rows: wide, columns: const(1)}
        return View(Ptr(name), {x: y for x, y in strides.items() if x})

    def map_call(self, x: Expr, leaves: dict[Expr, View], labels: tuple[str, str], target: View) -> Call:
        """A call that stores an expression of leaves in memory, in vectors of floats."""
        call = super().map_call(x, leaves, labels, target)
        return replace(call, function=replace(call.function, of=self.real.name))

    def direct(self) -> dict[Expr, int]:
        """No sums are accumulated where results of bfloat16 are stored."""
        return {}

    def room(self, label: str) -> Index:
        """The largest extent of a tile along a label, or of a part of it."""
        most = super().room(label)
        return minimum(self.s.nc, most) if self.part and label == self.columns else most

    def count(self, label: str) -> Index:
        """The extent of the current tile along a label, or of its current part."""
        return var("part_count") if self.part and label == self.columns else super().count(label)

    def start(self, label: str) -> Index:
        """The first element of the current tile along a label, or of its current part."""
        return var("part_start") if self.part and label == self.columns else super().start(label)

    def stores(self, direct: dict[Expr, int]) -> list[Stmt]:
        """The results: a product that is one is stored in parts of its columns, whose sums stay in L1."""
        (i, x), *others = self.program.fused.results
        if others or x.op != "contract" or x in self.known or self.columns in self.axes[x.inner[0]]:
            return super().stores(direct)
        self.before = []
        self.value(x.inner[0])
        self.part = True
        self.mapped(x, (self.rows, self.columns), self.operand(i))
        self.part = False
        *once, product, stored = self.before
        whole, at = var("column_count"), var("part_at")
        part = (Let("part_start", var("column_start") + at), Let("part_count", minimum(self.s.nc, whole - at)))
        return [*once, For("part_at", const(0), whole, const(self.s.nc), (*part, product, stored))]

    def multiplied(
        self, left: Expr, labels: tuple[str, str, str], views: tuple[View, View, View], accumulate: Index
    ) -> Call:
        """A product of tiles.

        Raises:
            ScheduleError: its right factor is no operand, or its left one has other rows than the program.
        """
        (along, p, q), (a, b, to) = labels, views
        if not b.at.name.startswith("x") or not q:
            raise ScheduleError("products of bf16 have an operand with columns as their right factor")
        if p not in {"", self.rows}:
            raise ScheduleError(f"products of bf16 have rows of a tile of {self.rows} on their left, not of {p}")
        if self.kind(a) != self.dtype:
            narrow = self.buffer(p, along, self.dtype)
            self.emit(left, self.map_call(left, {left: a}, (p, along), narrow))
            a = narrow
        if not self.packers:
            self.packers = self.packed()
        layout = "row" if a.contiguous(along) else "any"
        function = product(self.isa, self.unit, self.lines, layout, self.s)
        after = self.last - var("loop_start") - var("loop_count") if along == self.loop else const(0)
        apart = to.along(p) if p else round_up(self.room(q), PAD) + PAD  # rows of a tile that has one value of them
        return Call(function, (
            self.count(along), self.count(p), self.count(q), a.at, a.along(p), a.along(along), b.at, b.along(along),
            to.at, apart, accumulate, *self.packers, after,
        ))  # fmt: skip

    def packed(self) -> tuple[Ptr, ...]:
        """Scratch of packed operands: a block of k of all rows, and of the columns of a product."""
        deep, rows = self.s.kc // self.unit.k_pack, -(-self.s.tile("L1").m // self.unit.m) * self.unit.m
        places = []
        for name, units in (("left", deep * rows), ("right", deep * ACROSS * self.unit.n)):
            self.buffers.append(LetPtr(name, Ptr("mine", self.size), self.unit.left))
            self.size += units
            places.append(Ptr(name))
        return tuple(places)

    def task_body(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """A task with its tiles configured."""
        return (Configure((const(self.unit.m),) * TILES), *body, Configure(()))


def product(isa: Isa, unit: Atom, lines: Atom, layout: str, s: Schedule) -> Function:
    """Function C[rows][columns] (+)= A[rows][k] . B[k][columns]; C has whole tiles, A has a layout.

    Rows of B of fewer columns than a tile are read past their ends, as far as rows follow, `after` these k too: columns
    of a tile do not depend on each other.
    """
    k, rows, columns, p, j, r, t = map(var, ("k", "rows", "columns", "p", "j", "r", "t"))
    deep, wide, tall = unit.k, ACROSS * unit.n, unit.m
    steps, step = var("steps"), unit.deep
    lines_of_a = pack_lines(isa, unit, lines, layout, unit.a)
    of_slice = Ptr("left", r * (steps * step))
    pack_left = Call(replace(lines_of_a, name=f"pack_left_{layout}"), (
        var("kd"), minimum(tall, rows - r), const(tall), Ptr("a", r * var("a_m") + p * var("a_k")), var("a_m"),
        var("a_k"), of_slice,
    ))  # fmt: skip
    right = Ptr("right", t * (step * wide))
    pair = (
        Let("some", minimum(deep, var("kd") - t * deep)),
        Let("few", minimum(wide, columns - j)),
        _pack_right(isa, unit, lines, s, (k + var("after") - p - (t + 1) * deep) * var("b_k"), right),
    )
    sums = Call(_tiles(unit), (
        steps, of_slice, Ptr("right"), Ptr("c", r * var("c_m") + j), var("c_m"),
        maximum(var("accumulate"), const(0).lt(p)),
    ))  # fmt: skip
    block = (
        Let("kd", minimum(s.kc, k - p)),
        Let("steps", ceil_div(var("kd"), deep)),
        For("r", const(0), rows, const(tall), (pack_left,)),
        For("j", const(0), columns, const(wide), (
            For("t", const(0), steps, const(1), pair),
            For("r", const(0), rows, const(tall), (sums,)),
        )),
    )  # fmt: skip
    params = (
        Param("k"), Param("rows"), Param("columns"), Param("a", unit.a, readonly=True), Param("a_m"), Param("a_k"),
        Param("b", unit.b, readonly=True), Param("b_k"), Param("c", unit.acc), Param("c_m"), Param("accumulate"),
        Param("left", unit.left), Param("right", unit.right), Param("after"),
    )  # fmt: skip
    body = (For("p", const(0), k, const(s.kc), block),)
    return Function(f"product_{layout}", "inner", params, body, "C[rows][columns] (+)= A[rows][k] . B[k][columns]")


def _pack_right(isa: Isa, unit: Atom, lines: Atom, s: Schedule, below: Index, to: Ptr) -> Stmt:  # noqa: PLR0917
    """Packing of `some` rows of a step of B, of `few` columns of a panel; `below` elements follow its rows."""
    wide, kr, deep = ACROSS * unit.n, unit.k_pack, unit.k
    some, few, step = var("some"), var("few"), var("b_k")
    rows_of_b = Ptr("b", (var("p") + var("t") * deep) * step + var("j"))
    pack = replace(pack_b(isa, lines, wide, "row", unit.b, unit.right), name="pack_right")
    edge = (
        Call(pack, (ceil_div(some, kr), some, const(0), few, rows_of_b, step, const(1), to)),
        If(some.lt(deep), (Call(_cleared(unit, lines), (ceil_div(some, kr), to)),)),
    )
    in_a_tile = few.lt(unit.n + 1) * const(unit.n - 1).lt(few + below)  # the last row ends within what follows
    one = Call(_interleaved(unit, lines, 0, ACROSS - 1), (rows_of_b, step, to))
    both = Call(_interleaved(unit, lines, s.b.along), (rows_of_b, step, to))
    return If(some.eq(deep) * few.eq(wide), (both,), (If(some.eq(deep) * in_a_tile, (one,), edge),))


def _interleaved(unit: Atom, lines: Atom, along: int, tiles: int = ACROSS) -> Function:
    """Function to[unit][columns] = a step of rows of B in units; what follows in the same rows is prefetched.

    Of `tiles` of columns: what is in others of the panel stays there, in columns that nothing reads.
    """
    wide, u, kr = ACROSS * unit.n, var("u"), unit.k_pack
    row = Ptr("b", u * (var("b_k") * kr))
    body: list[Stmt] = []
    for v in range(0, tiles * unit.n, unit.n):
        body.append(Verb("load_rows", f"v{v}", p=row + v, step=var("b_k")))
        body.append(Verb("store", f"v{v}", p=Ptr("to", u * wide + v), to=unit.right))
    ahead = [Prefetch(row + (var("b_k") * e + along), near=False) for e in range(kr)] if along else []
    loop = For("u", const(0), const(unit.deep), const(1), (*ahead, *body), 2)
    params = (Param("b", unit.b, readonly=True), Param("b_k"), Param("to", unit.right))
    name = "interleaved" if tiles == ACROSS else "interleaved_few"
    return Function(name, "inner", params, (loop,), f"to[{unit.deep}][{wide}] = B in units", of=lines.name)


def _cleared(unit: Atom, lines: Atom) -> Function:
    """Function that stores zeros in the last rows of units of a step, from `first` on."""
    wide, u = ACROSS * unit.n, var("u")
    stores = tuple(Verb("store", "z", p=Ptr("zeros", u * wide + j)) for j in range(0, wide, unit.n))
    loop = For("u", var("first"), const(unit.deep), const(1), stores)
    body = (LetPtr("zeros", Ptr("to"), unit.acc), Verb("zero", "z"), loop)
    params = (Param("first"), Param("to", unit.right))
    return Function("cleared", "inner", params, body, "Zeros up to a whole step", of=lines.name)


def _tiles(unit: Atom) -> Function:
    """Function C[16][columns] (+)= packed A . packed B, over whole steps of k."""
    t, wide, step = var("t"), ACROSS * unit.n, unit.deep
    sums = [(str(v), Ptr("c", const(v * unit.n))) for v in range(ACROSS)]
    a = str(ACROSS)
    loads = [Verb("load_a", a, p=Ptr("a", t * (unit.m * step)), step=const(step))]
    macs = []
    for v in range(ACROSS):
        b = str(ACROSS + 1 + v)
        loads.append(Verb("load_b", b, p=Ptr("b", t * (step * wide) + v * unit.n), step=const(wide)))
        macs.append(Verb("mac", str(v), a, b))
    body = (
        If(
            var("accumulate"),
            tuple(Verb("load_c", d, p=p, step=var("c_m")) for d, p in sums),
            tuple(Verb("zero", d) for d, _ in sums),
        ),
        For("t", const(0), var("steps"), const(1), (*loads, *macs)),
        *(Verb("store", d, p=p, step=var("c_m")) for d, p in sums),
    )
    params = (
        Param("steps"), Param("a", unit.left, readonly=True), Param("b", unit.right, readonly=True),
        Param("c", unit.acc), Param("c_m"), Param("accumulate"),
    )  # fmt: skip
    return Function("tiles", "inner", params, body, f"C[{unit.m}][{wide}] (+)= A . B, in tiles")
