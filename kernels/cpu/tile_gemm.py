"""The blocked product on units that multiply tiles: the loops of `gemm` around another micro-kernel.

One instruction multiplies 16 rows of A, of 64 bytes each, by as many rows of B,
which are units of k, into 16 x 16 sums. A register tile is R by V of these, R of A
and V of B loaded in each step; its sums stay in tiles over a block of k, and in
scratch between blocks, each register tile's by themselves: rows of C may lie a
multiple of 4096 bytes apart, all in one set of L1, and are written once, when
`finish` makes elements of C of the sums.

B lies in the panels of the vector units, [k][NR] units, so that one packed weight
serves both: rows of a tile are NR units apart. A is packed here, slice by slice,
[step][row][16] units, a tile's rows side by side. Where k fills no whole step, A has
zeros, and the last units of a panel of B are copied to scratch and zeros put after
them: what lies behind a panel is not for us to read, and need not be a number.

An instruction takes as long as A's tile has rows. So tiles have just the rows of the
tallest slice of a block, halved for R = 2; a slice that is one lower has a row of
something or other, whose sums nobody looks at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.ir.nodes import (
    TILES,
    Call,
    Configure,
    For,
    Function,
    If,
    Index,
    Let,
    LetPtr,
    Move,
    Param,
    Prefetch,
    Ptr,
    Scratch,
    Verb,
    ceil_div,
    const,
    maximum,
    minimum,
    round_up,
    var,
)
from portmm.kernels.cpu.blocking import M
from portmm.kernels.cpu.gemm import Gemm
from portmm.kernels.cpu.gemm import build as build_loops
from portmm.kernels.cpu.packing import transpose
from portmm.spec.dtype import BY_NAME, base

if TYPE_CHECKING:
    from portmm.ir.nodes import Kernel, Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.target import Atom, Isa

TALL = var("tall")
"""Rows of a slice in scratch, and of the R tiles of A together."""


def build(s: Schedule, isa: Isa, atom: Atom) -> Kernel:
    """The kernel that computes C = A . B by schedule `s`."""
    return build_loops(s, isa, atom, _Tiles)


@dataclass(frozen=True, slots=True)
class Grid:
    """Which tile is which.

    Attributes:
        rows: tiles of C one below the other: 1 or 2.
        columns: tiles of C side by side, of the widest micro-kernel.
    """

    rows: int
    columns: int

    def c(self, r: int, v: int) -> int:
        """A tile of C."""
        return r * self.columns + v

    def a(self, r: int) -> int:
        """A tile of A."""
        return self.rows * self.columns + r

    @property
    def turns(self) -> int:
        """Tiles that are left for B."""
        return TILES - self.a(self.rows)

    def b(self, v: int) -> int:
        """A tile of B: those that are left take turns."""
        return self.a(self.rows) + v % self.turns

    def cut(self, tall: Index) -> tuple[Index, ...]:
        """Rows of the tiles of A that make up `tall`."""
        return (tall,) if self.rows == 1 else ((tall + 1) // 2, tall // 2)

    def heights(self, atom: Atom) -> tuple[Index, ...]:
        """Rows of each tile, in the order of their numbers."""
        cut = self.cut(TALL)
        found = {self.c(r, v): cut[r] for r in range(self.rows) for v in range(self.columns)}
        found |= {self.a(r): cut[r] for r in range(self.rows)}
        found |= {self.b(v): const(atom.deep) for v in range(self.columns)}
        return tuple(found[i] for i in sorted(found))


class _Tiles(Gemm):
    """The loops of one kernel, where they differ from those around vectors."""

    __slots__ = ()

    @property
    def grid(self) -> Grid:
        return Grid(-(-self.s.mr // self.atom.m), self.s.nr // self.atom.n * self.s.panels)

    @property
    def kb(self) -> Index:
        """Depth of a block of k: equal blocks of whole steps, none longer than KC."""
        if not self.s.kc:
            return self.whole(self.k)
        return round_up(ceil_div(self.k, maximum(1, ceil_div(self.k, self.s.kc))), self.atom.deep)

    @property
    def scratch_rows(self) -> Index:
        """Rows of all slices of a block, at most: each may be one lower than it is in scratch."""
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return rows + ceil_div(rows, self.s.mr) + self.grid.rows

    @property
    def a_size(self) -> Index:
        """Elements of one worker's packed block of A."""
        return round_up(self.scratch_rows * round_up(self.kb, self.atom.deep) * self.scaled("a"), 64)

    @property
    def c_size(self) -> Index:
        """Elements of one worker's sums: a register tile, or where k is cut a block by a share of the columns."""
        tile = const(self.grid.rows * self.atom.m * self.s.nr * self.s.panels)
        if not self.s.kc:
            return tile
        width = ceil_div(self.groups, self.shares) * (self.s.nr * self.s.panels)
        return round_up(maximum(tile, self.kb.lt(self.k) * (self.scratch_rows * width)), 64)

    def sums(self, row: Index, column: Index) -> Ptr:  # noqa: ARG002 - known by their numbers
        """The sums of the current register tile, a line of `c_wide` for each of its rows."""
        if not self.s.kc:
            return Ptr("cp")
        place = var("i") * (var("last") - var("first")) + (var("j") - var("first"))
        return Ptr("cp", var("deep") * (place * (TALL * self.s.nr)))

    def scratch(self) -> tuple[Stmt, ...]:
        """Where sums are kept until they are finished."""
        place = LetPtr("cp", self.private() + (self.b_size + self.a_size), self.atom.acc)
        return (place, Let("deep", var("kb").lt(self.k))) if self.s.kc else (place,)

    def ready(self) -> tuple[Stmt, ...]:
        """Every thread has tiles of its own."""
        tall = maximum(self.grid.rows, var("height") + const(0).lt(var("taller")))
        return (Let("tall", tall), Configure(self.grid.heights(self.atom)))

    def done(self) -> tuple[Stmt, ...]:
        """Tiles that nobody uses need not be saved when threads change."""
        return (Configure(()),)

    def pack_a(self) -> tuple[Stmt, ...]:
        """Pack the block of A, slice by slice."""
        s = self.s
        pack = pack_lines(self.isa, self.atom, self.lines, s.a, s.types[0])
        args = (self.filled(self.pc, var("kd")), var("h"), TALL, *self.unpacked_a(), self.slice_of_a())
        loop = For("i", const(0), var("slices"), const(1), (*self.slice_(), Call(pack, args)))
        return (LetPtr("ap", self.private() + self.b_size, self.atom.left), loop)

    def slice_of_a(self) -> Ptr:
        """The current slice, packed."""
        return Ptr("ap", var("i") * (TALL * round_up(var("kd"), self.atom.deep)))

    def across(self, panels: int) -> tuple[Stmt, ...]:
        """The last units of the panels, if k leaves some."""
        atom, wide = self.atom, self.s.nr * panels
        rest = var("kd") % atom.deep
        args: tuple[Index | Ptr, ...] = (rest, Ptr("bp", (var("kd") - rest) * self.s.nr))
        args += (self.panel_step or const(0),) if panels > 1 else ()
        fill = Call(rest_of_b(atom, self.lines, self.s.nr, panels), (*args, Ptr("rest")))
        return (
            Let("c_wide", const(wide)),
            Scratch("rest", atom.deep * wide, atom.right),
            If(const(0).lt(rest), (fill,)),
        )

    def visit(self, panels: int) -> tuple[Stmt, ...]:
        """One visit of the micro-kernel, for slices of any height."""
        args: list[Index | Ptr] = [var("kd"), self.slice_of_a(), TALL, Ptr("bp")]
        args += [self.panel_step or const(0)] if panels > 1 else []
        args += [Ptr("rest"), self.sums(const(0), const(0)), const(0).lt(self.pc) if self.s.kc else const(0)]
        return (Call(micro_kernel(self.atom, self.grid, self.s.nr, panels, self.s.prefetch), tuple(args)),)


@dataclass(frozen=True, slots=True)
class Strides:
    """How operands of a micro-kernel lie.

    Attributes:
        row: units from one row of A to the next.
        step: units from one step of A to the next.
        b: units from one row of B to the next.
        c: sums from one row of C to the next.
        b_next: units from one tile of B to the one beside it, if they are not neighbours in rows.
        c_next: sums from one tile of C to the one beside it, likewise.
    """

    row: Index
    step: Index
    b: int
    c: int
    b_next: Index | None = None
    c_next: Index | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    """Outer products of tiles.

    Attributes:
        atom: the unit.
        grid: its tiles.
        cut: first row of each tile of A.
        columns: tiles of C side by side.
        by: how operands lie.
    """

    atom: Atom
    grid: Grid
    cut: tuple[Index, ...]
    columns: int
    by: Strides

    def sums(self, verb: str) -> tuple[Stmt, ...]:
        """Load or store all tiles of C."""
        at = [(r, v) for r in range(self.grid.rows) for v in range(self.columns)]
        beside = self.by.c_next or const(self.atom.n)
        where = {(r, v): Ptr("c", self.cut[r] * self.by.c + beside * v) for r, v in at}
        return tuple(Verb(verb, str(self.grid.c(*x)), p=p, step=const(self.by.c)) for x, p in where.items())

    def begin(self) -> Stmt:
        """C is continued, or zero."""
        zero = tuple(Verb("zero", str(self.grid.c(r, v))) for r in range(self.grid.rows) for v in range(self.columns))
        return If(var("accumulate"), self.sums("load_c"), zero)

    def step(self, row: Index, panel: int, b: Ptr) -> tuple[Stmt, ...]:
        """One step of k; `panel` is the width of a panel of B."""
        loads: list[Stmt] = []
        macs: list[Stmt] = []
        for r in range(self.grid.rows):
            at = Ptr("a", row * self.by.step + self.cut[r] * self.by.row)
            loads.append(Verb("load_a", str(self.grid.a(r)), p=at, step=self.by.row))
        for v in range(self.columns):
            q, column = divmod(v * self.atom.n, panel)
            at = b + (self.by.b_next * v if self.by.b_next else (var("b_panel") * q if q else 0) + column)
            load = Verb("load_b", str(self.grid.b(v)), p=at, step=const(self.by.b))
            # Loads that come before all products are faster by a tenth or more; tiles that take turns must wait.
            (loads if self.columns <= self.grid.turns else macs).append(load)
            macs += [
                Verb("mac", str(self.grid.c(r, v)), str(self.grid.a(r)), str(self.grid.b(v)))
                for r in range(self.grid.rows)
            ]
        return (*loads, *macs)


def micro_kernel(atom: Atom, grid: Grid, nr: int, panels: int, ahead: int = 0) -> Function:
    """C[tall][wide] (+)= A . B over k units, of which those that fill no step are in `rest`.

    Lines of B are asked for some steps `ahead`: a tile's loads are too few to keep a memory busy.
    """
    wide, deep = nr * panels, atom.deep
    t, whole = var("t"), var("k") // deep
    cut = (const(0), *grid.cut(TALL)[:-1])
    outer = Outer(atom, grid, cut, wide // atom.n, Strides(const(deep), TALL * deep, nr, wide))
    last = replace(outer, by=replace(outer.by, b=wide))
    body = (
        outer.begin(),
        For(
            "t",
            const(0),
            whole,
            const(1),
            (*_asked(atom, nr, panels, ahead), *outer.step(t, nr, Ptr("b", t * (deep * nr)))),
        ),
        If((whole * deep).lt(var("k")), last.step(whole, wide, Ptr("rest"))),
        *outer.sums("store"),
    )
    params = [Param("k"), Param("a", atom.left, readonly=True), Param("tall"), Param("b", atom.right, readonly=True)]
    params += [Param("b_panel")] if panels > 1 else []
    params += [Param("rest", atom.right, readonly=True), Param("c", atom.acc), Param("accumulate")]
    name = f"ukr_{grid.rows}x{outer.columns}"
    return Function(name, "inner", tuple(params), body, f"C[tall][{wide}] (+)= A[tall][k] . B[k][{wide}], in tiles")


def _asked(atom: Atom, nr: int, panels: int, ahead: int) -> tuple[Stmt, ...]:
    """Ask for the lines of B that a later step multiplies."""
    if not ahead:
        return ()
    t, i, line = var("t"), var("i"), 64 // BY_NAME[atom.right].bytes
    first = (t + ahead) * (atom.deep * nr) + i * line
    lines = tuple(
        Prefetch(Ptr("b", first + (var("b_panel") * q if q else const(0))), near=False) for q in range(panels)
    )
    return (For("i", const(0), const(atom.deep * nr // line), const(1), lines, 16),)


def strip_kernel(name: str, atom: Atom, grid: Grid) -> Function:
    """C (+)= A . B over whole steps of k and whole tiles: A lies anyhow, B and C in strips as wide as a tile."""
    t, cut = var("t"), tuple(const(r * atom.m) for r in range(grid.rows))
    by = Strides(var("a_row"), var("a_step"), atom.n, atom.n, var("b_next"), var("c_next"))
    outer = Outer(atom, grid, cut, grid.columns, by)
    step = outer.step(t, atom.n, Ptr("b", t * (atom.deep * atom.n)))
    body = (outer.begin(), For("t", const(0), var("k") // atom.deep, const(1), step), *outer.sums("store"))
    params = (
        Param("k"), Param("a", atom.left, readonly=True), Param("a_row"), Param("a_step"),
        Param("b", atom.right, readonly=True), Param("b_next"), Param("c", atom.acc), Param("c_next"),
        Param("accumulate"),
    )  # fmt: skip
    tall = grid.rows * atom.m
    comment = f"C[{grid.columns}][{tall}][{atom.n}] (+)= A[{tall}][k] . B[{grid.columns}][k][{atom.n}], in tiles"
    return Function(name, "inner", params, body, comment)


def rest_of_b(atom: Atom, lines: Atom, nr: int, panels: int) -> Function:
    """to[u][j] = B[u][j] for u < count, and zero up to a whole step."""
    u, wide = var("u"), nr * panels
    copy: list[Stmt] = []
    clear: list[Stmt] = []
    for j in range(0, wide, atom.n):
        q, column = divmod(j, nr)
        at = Ptr("b", (var("b_panel") * q if q else const(0)) + u * nr + column)
        copy += [Verb("load_b", "x", p=at), Verb("store", "x", p=Ptr("to", u * wide + j), to=atom.right)]
        clear.append(Verb("store", "z", p=Ptr("zeros", u * wide + j)))
    body = (
        For("u", const(0), var("count"), const(1), tuple(copy)),
        LetPtr("zeros", Ptr("to"), atom.acc),
        Verb("zero", "z"),
        For("u", var("count"), const(atom.deep), const(1), tuple(clear)),
    )
    params = (Param("count"), Param("b", atom.right, readonly=True), *((Param("b_panel"),) if panels > 1 else ()))
    comment = f"to[u][{wide}] = B[u][{wide}] for u < count, then zeros"
    return Function(f"rest_{panels}", "inner", (*params, Param("to", atom.right)), body, comment, of=lines.name)


def pack_lines(isa: Isa, atom: Atom, lines: Atom, layout: str, held: str) -> Function:
    """to[step][row] = the units of A[row] for a step, zeros where k ends; rows past `rows` are left alone."""
    i, t, e, elements, rows = (var(x) for x in ("i", "t", "e", "elements", "rows"))
    step = atom.k
    whole = elements // step

    def place(row: Index) -> Index:
        return (t * TALL + row) * atom.deep

    def one_by_one(first: Index, row: Index) -> tuple[Stmt, ...]:
        to = Ptr("parts", place(i) * atom.k_pack + e)
        from_ = Ptr("a", i * var("a_m") + (t * step + e) * var("a_k"))
        fill = If((t * step + e).lt(elements), (Move(to, from_),), (Move(to, None),))
        each = For("i", row, rows, const(1), (For("e", const(0), const(step), const(1), (fill,)),))
        return (For("t", first, ceil_div(elements, step), const(1), (each,)),)

    parts = LetPtr("parts", Ptr("to"), base(atom.left))
    body: tuple[Stmt, ...]
    if layout == "row":
        copy = (
            Verb("load_b", "x", p=Ptr("line", t * atom.deep), to=atom.left),
            Verb("store", "x", p=Ptr("to", place(i)), to=atom.left),
        )
        last = (
            Let("t", whole),
            Verb("zero", "z"),
            Verb("store", "z", p=Ptr("zeros", place(i))),
            For(
                "e",
                const(0),
                elements - whole * step,
                const(1),
                (Move(Ptr("parts", place(i) * atom.k_pack + e), Ptr("a", i * var("a_m") + whole * step + e)),),
            ),
        )
        each = (
            LetPtr("line", Ptr("a", i * var("a_m")), atom.left, readonly=True),
            For("t", const(0), whole, const(1), copy, 4),
            If((whole * step).lt(elements), last),
        )
        body = (parts, LetPtr("zeros", Ptr("to"), atom.acc), For("i", const(0), rows, const(1), each))
    elif layout == "col" and isa.shuffles:
        turn, turned = transpose(atom.deep)
        g = var("g")
        rows_of_k = [Ptr("a", g + (t * step + j * atom.k_pack) * var("a_k")) for j in range(atom.deep)]
        load = tuple(Verb("load_rows", f"t0_{j}", p=p, step=var("a_k"), to=atom.left) for j, p in enumerate(rows_of_k))
        store = tuple(Verb("store", x, p=Ptr("to", place(g + j)), to=atom.left) for j, x in enumerate(turned))
        block = For("g", const(0), rows - (atom.deep - 1), const(atom.deep), (*load, *turn, *store))
        body = (parts, For("t", const(0), whole, const(1), (block,)))
        body += (*one_by_one(const(0), rows - rows % atom.deep), *one_by_one(whole, const(0)))
    else:
        body = (parts, *one_by_one(const(0), const(0)))
    params = (
        Param("elements"),
        Param("rows"),
        Param("tall"),
        Param("a", held, readonly=True),
        Param("a_m"),
        Param("a_k"),
        Param("to", atom.left),
    )
    comment = f"to[step][tall][{BY_NAME[atom.left].bytes * atom.deep} bytes] = A[rows][elements], {layout} layout"
    return Function("pack_lines", "inner", params, body, comment, of=lines.name)
