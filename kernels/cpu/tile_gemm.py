"""Blocked GEMM on tile units (AMX): the loops of `gemm` around another micro-kernel.

One instruction multiplies 16 rows of A, of 64 bytes each, by as many rows of B,
which are units of k, into 16 x 16 sums. A register tile is R by V of these, R of A
and V of B loaded in each step; its sums stay in tiles over a block of k, and in
scratch between blocks, contiguous for each register tile: rows of C may be a
multiple of 4096 bytes apart, all in one set of L1, and are written once, when
the epilogue converts sums to elements of C.

B is in the panels of the vector units, [k][NR] units, so that one packed weight
serves both: rows of a tile are NR units apart. A is packed here, slice by slice,
[step][row][16] units, a tile's rows contiguous. Where k is not whole steps, A has
zeros, and the last units of a panel of B are copied to scratch and padded with zeros:
memory behind a panel must not be read, and need not be finite.

The time of an instruction is proportional to the rows of A's tile. So tiles have just the rows
of the tallest slice of a block, halved for R = 2; a slice that is one row shorter has an
undefined row, whose sums are unused.
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
"""Number of rows of a slice in scratch, and of the R tiles of A together."""


def build(s: Schedule, isa: Isa, atom: Atom) -> Kernel:
    """Kernel that computes C = A . B by schedule `s`."""
    return build_loops(s, isa, atom, _Tiles)


@dataclass(frozen=True, slots=True)
class Grid:
    """Assignment of tile registers to tiles of A, B and C.

    Attributes:
        rows: tiles of C along m: 1 or 2.
        columns: tiles of C along n, of the widest micro-kernel.
    """

    rows: int
    columns: int

    def c(self, r: int, v: int) -> int:
        """Number of a tile of C."""
        return r * self.columns + v

    def a(self, r: int) -> int:
        """Number of a tile of A."""
        return self.rows * self.columns + r

    @property
    def free(self) -> int:
        """Number of tile registers that remain for B."""
        return TILES - self.a(self.rows)

    def b(self, v: int) -> int:
        """Number of a tile of B: the remaining registers in rotation."""
        return self.a(self.rows) + v % self.free

    def cut(self, tall: Index) -> tuple[Index, ...]:
        """Numbers of rows of the tiles of A for `tall` rows."""
        return (tall,) if self.rows == 1 else ((tall + 1) // 2, tall // 2)

    def tile_rows(self, atom: Atom) -> tuple[Index, ...]:
        """Number of rows of each tile, in the order of tile numbers."""
        cut = self.cut(TALL)
        rows = {self.c(r, v): cut[r] for r in range(self.rows) for v in range(self.columns)}
        rows |= {self.a(r): cut[r] for r in range(self.rows)}
        rows |= {self.b(v): const(atom.deep) for v in range(self.columns)}
        return tuple(rows[i] for i in sorted(rows))


class _Tiles(Gemm):
    """Loops of one kernel, where they differ from those around vectors."""

    __slots__ = ()

    @property
    def grid(self) -> Grid:
        return Grid(-(-self.s.mr // self.atom.m), self.s.nr // self.atom.n * self.s.panels)

    @property
    def kb(self) -> Index:
        """Extent of a block of k: equal blocks of whole steps, none longer than KC."""
        if not self.s.kc:
            return self.whole(self.k)
        return round_up(ceil_div(self.k, maximum(1, ceil_div(self.k, self.s.kc))), self.atom.deep)

    @property
    def scratch_rows(self) -> Index:
        """Maximum number of rows of all slices of a block in scratch, where each may have one more."""
        rows = minimum(M, self.s.mc) if self.s.mc else M
        return rows + ceil_div(rows, self.s.mr) + self.grid.rows

    @property
    def a_size(self) -> Index:
        """Number of elements of one worker's packed block of A."""
        return round_up(self.scratch_rows * round_up(self.kb, self.atom.deep) * self.scaled("a"), 64)

    @property
    def c_size(self) -> Index:
        """Number of elements of one worker's sums: a register tile, or where k is cut a block by a chunk of columns."""
        tile = const(self.grid.rows * self.atom.m * self.s.nr * self.s.panels)
        if not self.s.kc:
            return tile
        width = ceil_div(self.groups, self.column_chunks) * (self.s.nr * self.s.panels)
        return round_up(maximum(tile, self.kb.lt(self.k) * (self.scratch_rows * width)), 64)

    def sums(self, row: Index, column: Index) -> Ptr:  # noqa: ARG002 - addressed by tile
        """Address of the sums of the current register tile, `c_wide` of each row."""
        if not self.s.kc:
            return Ptr("cp")
        place = var("i") * (var("last") - var("first")) + (var("j") - var("first"))
        return Ptr("cp", var("deep") * (place * (TALL * self.s.nr)))

    def scratch(self) -> tuple[Stmt, ...]:
        """Scratch for sums until the epilogue."""
        place = LetPtr("cp", self.private() + (self.b_size + self.a_size), self.atom.acc)
        return (place, Let("deep", var("kb").lt(self.k))) if self.s.kc else (place,)

    def ready(self) -> tuple[Stmt, ...]:
        """Configuration of this thread's tiles."""
        tall = maximum(self.grid.rows, var("height") + const(0).lt(var("taller")))
        return (Let("tall", tall), Configure(self.grid.tile_rows(self.atom)))

    def done(self) -> tuple[Stmt, ...]:
        """Release of the tiles: unused ones need not be saved at a context switch."""
        return (Configure(()),)

    def pack_a(self) -> tuple[Stmt, ...]:
        """Packing of the block of A, slice by slice."""
        s = self.s
        pack = pack_lines(self.isa, self.atom, self.move_atom, s.a, s.types[0])
        args = (self.filled(self.pc, var("kd")), var("h"), TALL, *self.unpacked_a(), self.slice_of_a())
        loop = For("i", const(0), var("slices"), const(1), (*self.slice_(), Call(pack, args)))
        return (LetPtr("ap", self.private() + self.b_size, self.atom.left), loop)

    def slice_of_a(self) -> Ptr:
        """Address of the current packed slice."""
        return Ptr("ap", var("i") * (TALL * round_up(var("kd"), self.atom.deep)))

    def across(self, panels: int) -> tuple[Stmt, ...]:
        """Copy of the panels' last units, where k is not whole steps."""
        atom, n = self.atom, self.s.nr * panels
        rest = var("kd") % atom.deep
        args: tuple[Index | Ptr, ...] = (rest, Ptr("bp", (var("kd") - rest) * self.s.nr))
        args += (self.panel_step or const(0),) if panels > 1 else ()
        fill = Call(rest_of_b(atom, self.move_atom, self.s.nr, panels), (*args, Ptr("rest")))
        return (
            Let("c_wide", const(n)),
            Scratch("rest", atom.deep * n, atom.right),
            If(const(0).lt(rest), (fill,)),
        )

    def visit(self, panels: int) -> tuple[Stmt, ...]:
        """Micro-kernel call, for slices of any number of rows."""
        args: list[Index | Ptr] = [var("kd"), self.slice_of_a(), TALL, Ptr("bp")]
        args += [self.panel_step or const(0)] if panels > 1 else []
        args += [Ptr("rest"), self.sums(const(0), const(0)), const(0).lt(self.pc) if self.s.kc else const(0)]
        return (Call(micro_kernel(self.atom, self.grid, self.s.nr, panels, self.s.prefetch), tuple(args)),)


@dataclass(frozen=True, slots=True)
class Strides:
    """Strides of the operands of a micro-kernel.

    Attributes:
        row: units between rows of A.
        step: units between steps of A.
        b: units between rows of B.
        c: sums between rows of C.
        b_next: units between tiles of B along n, if they are not contiguous in rows.
        c_next: sums between tiles of C along n, likewise.
    """

    row: Index
    step: Index
    b: int
    c: int
    b_next: Index | None = None
    c_next: Index | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    """Statements for outer products of tiles.

    Attributes:
        atom: the unit.
        grid: its tiles.
        cut: first row of each tile of A.
        columns: tiles of C along n.
        by: the operands' strides.
    """

    atom: Atom
    grid: Grid
    cut: tuple[Index, ...]
    columns: int
    by: Strides

    def sums(self, verb: str) -> tuple[Stmt, ...]:
        """Loads or stores of all tiles of C."""
        at = [(r, v) for r in range(self.grid.rows) for v in range(self.columns)]
        n_stride = self.by.c_next or const(self.atom.n)
        where = {(r, v): Ptr("c", self.cut[r] * self.by.c + n_stride * v) for r, v in at}
        return tuple(Verb(verb, str(self.grid.c(*x)), p=p, step=const(self.by.c)) for x, p in where.items())

    def begin(self) -> Stmt:
        """Initial values of the sums: those of C, or zero."""
        zero = tuple(Verb("zero", str(self.grid.c(r, v))) for r in range(self.grid.rows) for v in range(self.columns))
        return If(var("accumulate"), self.sums("load_c"), zero)

    def step(self, row: Index, panel: int, b: Ptr) -> tuple[Stmt, ...]:
        """Statements for one step of k; `panel` is the width of a panel of B."""
        loads: list[Stmt] = []
        macs: list[Stmt] = []
        for r in range(self.grid.rows):
            at = Ptr("a", row * self.by.step + self.cut[r] * self.by.row)
            loads.append(Verb("load_a", str(self.grid.a(r)), p=at, step=self.by.row))
        for v in range(self.columns):
            q, column = divmod(v * self.atom.n, panel)
            at = b + (self.by.b_next * v if self.by.b_next else (var("b_panel") * q if q else 0) + column)
            load = Verb("load_b", str(self.grid.b(v)), p=at, step=const(self.by.b))
            # Loads before all products are faster by a tenth or more; registers in rotation must wait.
            (loads if self.columns <= self.grid.free else macs).append(load)
            macs += [
                Verb("mac", str(self.grid.c(r, v)), str(self.grid.a(r)), str(self.grid.b(v)))
                for r in range(self.grid.rows)
            ]
        return (*loads, *macs)


def micro_kernel(atom: Atom, grid: Grid, nr: int, panels: int, ahead: int = 0) -> Function:
    """Micro-kernel C[tall][n] (+)= A . B over k units, of which those of a partial step are in `rest`.

    Lines of B are prefetched some steps `ahead`: a tile's loads alone do not saturate memory.
    """
    n, step = nr * panels, atom.deep
    t, whole = var("t"), var("k") // step
    cut = (const(0), *grid.cut(TALL)[:-1])
    outer = Outer(atom, grid, cut, n // atom.n, Strides(const(step), TALL * step, nr, n))
    last = replace(outer, by=replace(outer.by, b=n))
    body = (
        outer.begin(),
        For(
            "t",
            const(0),
            whole,
            const(1),
            (*_prefetch(atom, nr, panels, ahead), *outer.step(t, nr, Ptr("b", t * (step * nr)))),
        ),
        If((whole * step).lt(var("k")), last.step(whole, n, Ptr("rest"))),
        *outer.sums("store"),
    )
    params = [Param("k"), Param("a", atom.left, readonly=True), Param("tall"), Param("b", atom.right, readonly=True)]
    params += [Param("b_panel")] if panels > 1 else []
    params += [Param("rest", atom.right, readonly=True), Param("c", atom.acc), Param("accumulate")]
    name = f"ukr_{grid.rows}x{outer.columns}"
    return Function(name, "inner", tuple(params), body, f"C[tall][{n}] (+)= A[tall][k] . B[k][{n}], in tiles")


def _prefetch(atom: Atom, nr: int, panels: int, ahead: int) -> tuple[Stmt, ...]:
    """Prefetches of the lines of B of a later step."""
    if not ahead:
        return ()
    t, i, line = var("t"), var("i"), 64 // BY_NAME[atom.right].bytes
    first = (t + ahead) * (atom.deep * nr) + i * line
    lines = tuple(
        Prefetch(Ptr("b", first + (var("b_panel") * q if q else const(0))), near=False) for q in range(panels)
    )
    return (For("i", const(0), const(atom.deep * nr // line), const(1), lines, 16),)


def strip_kernel(name: str, atom: Atom, grid: Grid) -> Function:
    """Micro-kernel C (+)= A . B over whole steps of k and whole tiles: A with any strides, B and C in strips."""
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
    """Function to[u][j] = B[u][j] for u < count, and zero up to a whole step."""
    u, n = var("u"), nr * panels
    copy: list[Stmt] = []
    clear: list[Stmt] = []
    for j in range(0, n, atom.n):
        q, column = divmod(j, nr)
        at = Ptr("b", (var("b_panel") * q if q else const(0)) + u * nr + column)
        copy += [Verb("load_b", "x", p=at), Verb("store", "x", p=Ptr("to", u * n + j), to=atom.right)]
        clear.append(Verb("store", "z", p=Ptr("zeros", u * n + j)))
    body = (
        For("u", const(0), var("count"), const(1), tuple(copy)),
        LetPtr("zeros", Ptr("to"), atom.acc),
        Verb("zero", "z"),
        For("u", var("count"), const(atom.deep), const(1), tuple(clear)),
    )
    params = (Param("count"), Param("b", atom.right, readonly=True), *((Param("b_panel"),) if panels > 1 else ()))
    comment = f"to[u][{n}] = B[u][{n}] for u < count, then zeros"
    return Function(f"rest_{panels}", "inner", (*params, Param("to", atom.right)), body, comment, of=lines.name)


def pack_lines(isa: Isa, atom: Atom, lines: Atom, layout: str, storage: str) -> Function:
    """Function to[step][row] = units of A[row] for a step, zeros past the end of k; rows past `rows` are kept."""
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
        shuffles, columns = transpose(atom.deep)
        g = var("g")
        rows_of_k = [Ptr("a", g + (t * step + j * atom.k_pack) * var("a_k")) for j in range(atom.deep)]
        load = tuple(Verb("load_rows", f"t0_{j}", p=p, step=var("a_k"), to=atom.left) for j, p in enumerate(rows_of_k))
        store = tuple(Verb("store", x, p=Ptr("to", place(g + j)), to=atom.left) for j, x in enumerate(columns))
        block = For("g", const(0), rows - (atom.deep - 1), const(atom.deep), (*load, *shuffles, *store))
        body = (parts, For("t", const(0), whole, const(1), (block,)))
        body += (*one_by_one(const(0), rows - rows % atom.deep), *one_by_one(whole, const(0)))
    else:
        body = (parts, *one_by_one(const(0), const(0)))
    params = (
        Param("elements"),
        Param("rows"),
        Param("tall"),
        Param("a", storage, readonly=True),
        Param("a_m"),
        Param("a_k"),
        Param("to", atom.left),
    )
    comment = f"to[step][tall][{BY_NAME[atom.left].bytes * atom.deep} bytes] = A[rows][elements], {layout} layout"
    return Function("pack_lines", "inner", params, body, comment, of=lines.name)
