"""Micro-kernels of tile units (AMX), and the assignment of their tile registers.

A register tile is R by V tiles of C, R of A and V of B loaded in each step; its sums stay in tiles over a block of k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import TILES, Call, For, Function, If, Let, Param, Prefetch, Verb
from portmm.kernels.cpu.epilogue import finish
from portmm.kernels.cpu.packing import line_of

if TYPE_CHECKING:
    from typing import Self

    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

TALL = var("tall")
"""Number of rows of a slice in scratch, and of the R tiles of A together."""


LEAST_PART = 2
"""Rows of a register tile that a step of the next one finishes, at least, so that long epilogues are spread over many
steps. Granite Rapids, bf16: 1024 cubed and 384x1024x1024 with GELU take 0.88 of the time with 2, not 4."""
AWAKE = 8
"""Steps between stores of a vector. Granite Rapids: without any store of 256 bits or more for about 0.7 us, the next
one takes 0.3 us, which a tile's store at the end of 24 or more steps waits for: 32 steps 1.45 -> 1.85 TFLOP/s."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Assignment of tile registers to tiles of A, B and C.

    Attributes:
        rows: tiles of C along m: 1 or 2, or 4 beside one along n, of which A has registers in rotation.
        columns: tiles of C along n, of the widest micro-kernel.
    """

    rows: int
    columns: int

    def c(self, r: int, v: int) -> int:
        """Number of a tile of C."""
        return r * self.columns + v

    def a(self, r: int) -> int:
        """Number of a tile of A."""
        return self.rows * self.columns + r % self.of_a

    @property
    def of_a(self) -> int:
        """Number of tile registers of A: all of a step's, or all but one that B takes."""
        return min(self.rows, TILES - self.rows * self.columns - 1)

    @property
    def free(self) -> int:
        """Number of tile registers that remain for B."""
        return TILES - self.rows * self.columns - self.of_a

    def b(self, v: int) -> int:
        """Number of a tile of B: the remaining registers in rotation."""
        return self.rows * self.columns + self.of_a + v % self.free

    def cut(self, tall: Index) -> tuple[Index, ...]:
        """Numbers of rows of the tiles of A for `tall` rows."""
        parts = (tall + (self.rows - 1 - r) if r + 1 < self.rows else tall for r in range(self.rows))
        return (tall,) if self.rows == 1 else tuple(x // self.rows for x in parts)

    def tile_rows(self, atom: Atom) -> tuple[Index, ...]:
        """Number of rows of each tile, in the order of tile numbers."""
        cut = self.cut(TALL)
        rows = {self.c(r, v): cut[r] for r in range(self.rows) for v in range(self.columns)}
        rows |= {self.a(r): cut[r] for r in range(self.rows)}
        rows |= {self.b(v): const(atom.deep) for v in range(self.columns)}
        return tuple(rows[i] for i in sorted(rows))


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
        a_next: units between the tiles of A, if these are not of neighbouring rows.
    """

    row: Index
    step: Index
    b: int
    c: int
    b_next: Index | None = None
    c_next: Index | None = None
    a_next: Index | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    """Statements for outer products of tiles.

    Attributes:
        atom: the unit.
        grid: its tiles.
        cut: first row of each tile of A.
        columns: tiles of C along n.
        by: the operands' strides.
        passing: tiles of A pass by a panel of B that stays in L1.
        left: the pointer to A.
        flowing: tiles of B pass by rows of A that stay in L1.
    """

    atom: Atom
    grid: Grid
    cut: tuple[Index, ...]
    columns: int
    by: Strides
    passing: bool = False
    left: str = "a"
    flowing: bool = False

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
        left: list[Stmt] = []
        for r in range(self.grid.rows):
            below = self.by.a_next * r if self.by.a_next else self.cut[r] * self.by.row
            at = Ptr(self.left, row * self.by.step + below)
            left.append(Verb("load_a", str(self.grid.a(r)), p=at, step=self.by.row, passing=self.passing))
        rotates = self.grid.of_a < self.grid.rows
        loads += [] if rotates else left
        for v in range(self.columns):
            q, column = divmod(v * self.atom.n, panel)
            at = b + (self.by.b_next * v if self.by.b_next else (var("b_panel") * q if q else 0) + column)
            load = Verb("load_b", str(self.grid.b(v)), p=at, step=const(self.by.b), passing=self.flowing)
            # Loads before all products are faster by a tenth or more; registers in rotation must wait.
            (loads if self.columns <= self.grid.free else macs).append(load)
            for r in range(self.grid.rows):
                macs += left[r : r + rotates]
                macs.append(Verb("mac", str(self.grid.c(r, v)), str(self.grid.a(r)), str(self.grid.b(v))))
        return (*loads, *macs)


@dataclass(frozen=True, slots=True)
class Finishing:
    """The epilogue of the register tile before, a few rows at a time between the steps of the next one.

    Vector units work while the tile unit does, which waits for no sums. Parameters of the micro-kernel are those of
    the epilogue's function, with a suffix.

    Attributes:
        end: the function.
        fused: its expressions.
    """

    end: Function
    fused: Fused | None

    @classmethod
    def of(cls, s: Schedule, isa: Isa, atom: Atom) -> Self:
        """The epilogue of a schedule, by the vectors that sums in tiles are stored in."""
        return cls(finish(isa, isa.sum_row_atom(atom) or atom, atom.acc, s.types[2], s.fused), s.fused)

    @property
    def params(self) -> tuple[Param, ...]:
        """Further parameters of the micro-kernel."""
        return tuple(replace(p, name=f"{p.name}_done") for p in self.end.params)

    def rows(self, first: Index, count: Index) -> Call:
        """The epilogue of `count` rows from `first` on, or of those that there are."""
        args: list[Index | Ptr] = []
        rows = {"sums": "wide_done", "c": "c_m_done"}
        if self.fused:
            rows |= {f"x{i}": f"x{i}_m_done" for i, y in enumerate(self.fused.operands) if "m" in y.axes}
        for p in self.end.params:
            name = f"{p.name}_done"
            if p.dtype:
                args.append(Ptr(name, first * var(rows[p.name])) if p.name in rows else Ptr(name))
            else:
                args.append(var(name) + first if p.name == "row" else var(name))
        args[0] = minimum(count, var("rows_done") - first)
        return Call(self.end, tuple(args))


def micro_kernel(  # noqa: PLR0917 - a geometry, and what is done besides
    atom: Atom, grid: Grid, nr: int, panels: int, ahead: int = 0, vector: Atom | None = None, *, follows: bool = False,
    passing: bool = False, flowing: bool = False, finishing: Finishing | None = None,
) -> Function:  # fmt: skip
    """Micro-kernel C[tall][n] (+)= A . B over k units, of which those of a partial step are in `rest`.

    Where tiles of A are `passing` by, or those of B are `flowing`, they take no room in L1. Lines of B are prefetched
    some steps `ahead`: a tile's loads alone do not saturate memory. Where others `follow`, some lines of the next
    panels are prefetched in each step. Stores of a `vector` of sums every few steps keep the path of such stores
    awake, see `AWAKE`. Rows of the register tile before are finished in each step, and those that are left after few
    steps.
    """
    n, step = nr * panels, atom.deep
    t, whole = var("t"), var("k") // step
    cut = (const(0), *grid.cut(TALL)[:-1])
    by = Strides(const(step), TALL * step, nr, n)
    outer = Outer(atom, grid, cut, n // atom.n, by, passing, flowing=flowing)
    last = replace(outer, by=replace(by, b=n), passing=False, flowing=False)
    one = (
        *_prefetch(atom, nr, panels, ahead),
        *(prefetch_next(atom) if follows else ()),
        *outer.step(t, nr, Ptr("b", t * (step * nr))),
        *(awake(vector) if vector else ()),
    )
    loops: tuple[Stmt, ...] = (For("t", const(0), whole, const(1), one),)
    after: tuple[Stmt, ...] = ()
    if finishing:
        part, busy, left = var("part"), var("busy"), var("busy") * var("part")
        loops = (
            Let("part", rows_of_step(TALL, whole)),
            Let("busy", minimum(whole, ceil_div(var("rows_done"), part))),
            For("t", const(0), busy, const(1), (*one, finishing.rows(t * part, part))),
            For("t", busy, whole, const(1), one),
        )
        after = (If(left.lt(var("rows_done")), (finishing.rows(left, var("rows_done")),)),)
    rest = If((whole * step).lt(var("k")), last.step(whole, n, Ptr("rest")))
    body = (outer.begin(), *loops, rest, *after, *outer.sums("store"))
    params = [Param("k"), Param("a", atom.left, readonly=True), Param("tall"), Param("b", atom.right, readonly=True)]
    params += [Param("b_panel")] if panels > 1 else []
    params += [Param("rest", atom.right, readonly=True), Param("c", atom.acc), Param("accumulate")]
    params += [Param("b_next", atom.right, readonly=True), Param("lines")] if follows else []
    params += finishing.params if finishing else ()
    name = f"ukr_{grid.rows}x{outer.columns}"
    return Function(name, "inner", tuple(params), body, f"C[tall][{n}] (+)= A[tall][k] . B[k][{n}], in tiles")


def rows_of_step(rows: Index, steps: Index) -> Index:
    """Rows of the register tile before that a step finishes: an even number, since epilogues may take pairs of rows."""
    return maximum(LEAST_PART, 2 * ceil_div(rows, 2 * maximum(1, steps)))


def awake(vector: Atom) -> tuple[Stmt, ...]:
    """A store of zeros, once in `AWAKE` steps, to sums that are in tiles and will be stored there."""
    store = Verb("zero", "zeros", of=vector.name), Verb("store", "zeros", p=Ptr("c"), of=vector.name)
    return (If((var("t") % AWAKE).eq(AWAKE - 1), store),)


def _prefetch(atom: Atom, nr: int, panels: int, ahead: int) -> tuple[Stmt, ...]:
    """Prefetches of the lines of B of a later step."""
    if not ahead:
        return ()
    t, i, line = var("t"), var("i"), line_of(atom, atom.right)
    first = (t + ahead) * (atom.deep * nr) + i * line
    lines = tuple(
        Prefetch(Ptr("b", first + (var("b_panel") * q if q else const(0))), near=False) for q in range(panels)
    )
    return (For("i", const(0), const(atom.deep * nr // line), const(1), lines, 16),)


def prefetch_next(atom: Atom) -> tuple[Stmt, ...]:
    """Prefetches into L2 of some lines of the next panels."""
    at = (var("t") * var("lines") + var("i")) * (line_of(atom, atom.right))
    return (For("i", const(0), var("lines"), const(1), (Prefetch(Ptr("b_next", at), near=False),)),)


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
