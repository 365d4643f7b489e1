"""Blocked GEMM on tile units (AMX) by int4 weights in place: the loops of `tile_loops`, sums of groups in tiles.

Values of four bits are small whole numbers, which bf16 has without an error. So they are converted without their
scales, a permutation for each unit of k, into a tile of B that stays in L1, and a group's sums are scaled as they leave
their tiles: 16 multiply-adds for each tile of C and group, where scales of single weights take 32 for each step of k.
The panels are those of `int4_panels`.

An A of more bits than the unit's operands have is cut into parts, each of as many bits as these have: three bf16 for
f32, two for f16. Their sum is the element, so that the products are those of the element, without an error, and are
added in f32: the unit multiplies each tile of B by all parts (Henry, Tang & Heinecke, "Leveraging the bfloat16
Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019). The unit takes subnormal parts for
zero: what an element has below 2**-126 is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.lane_nodes import Map, Total
from portmm.ir.nodes import Add, Call, For, Function, If, Let, LetPtr, Move, Param, Scratch, Verb
from portmm.kernels.cpu import int4_in_place
from portmm.kernels.cpu.gemm import build as build_loops
from portmm.kernels.cpu.tile_loops import Tiles
from portmm.kernels.cpu.tile_microkernel import TALL, Outer, Strides
from portmm.kernels.cpu.tile_packing import pack_parts
from portmm.spec.dtype import BY_NAME, CODES_AT, CODES_KR, ZERO_CODE, ZERO_E2M1, parts
from portmm.spec.problem import family

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Kernel, Stmt
    from portmm.kernels.cpu.tile_microkernel import Grid
    from portmm.schedule.schedule import Schedule
    from portmm.spec.layout import Layout
    from portmm.spec.problem import Family
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


def build(s: Schedule, isa: Isa, atom: Atom, view: Layout | None = None) -> Kernel:
    """Kernel that computes C = A . B by schedule `s`, perhaps of a view of A: see `Blocks`."""
    in_place = s.b.layout == "codes" and not s.b.packed
    return build_loops(s, isa, atom, Int4Tiles if in_place else Tiles, view)


class Int4Tiles(Tiles):
    """Loops of one kernel, where they differ from those by panels of floats."""

    __slots__ = ()

    @property
    def overlaps(self) -> bool:
        """No tile is finished while the next one is multiplied."""
        return False

    @property
    def parts(self) -> int:
        """Number of parts of an element of A."""
        return parts(self.s.types[0], self.atom.a)

    @property
    def a_size(self) -> Index:
        """Number of elements of one worker's packed block of A."""
        return super().a_size * self.parts

    @property
    def group_sum_buffers(self) -> dict[str, tuple[str, Index]]:
        """Buffers of sums of A over quantization groups, where weights have offsets or numbers are not around 0."""
        return {name: (dtype, self.groups_of_k) for name, dtype in sums_of_a(self.atom, family(self.s.family)).items()}

    def slice_of_a(self) -> Ptr:
        """Address of the current packed slice."""
        whole = super().slice_of_a()
        return Ptr(whole.name, whole.offset * self.parts)

    def pack_slice(self) -> Stmt:
        """Packing of the current slice of A."""
        if self.parts == 1:
            return super().pack_slice()
        if self.view:
            raise ScheduleError(f"A is a view; {self.s.name(self.atom)} cuts elements of arrays alone into parts")
        pack = pack_parts(self.isa, self.atom, self.s.a.layout, self.s.types[0])
        return Call(pack, (var("k"), var("h"), TALL, *self.unpacked_a(), self.slice_of_a()))

    def totals(self) -> tuple[Stmt, ...]:
        """Sums of A over quantization groups, computed once for all panels."""
        if not self.group_sum_buffers:
            return ()
        function = line_sums(self.isa, self.atom, family(self.s.family), self.parts)
        call = Call(function, (var("k"), var("h"), TALL, self.slice_of_a(), *self._sums, self.groups_of_k))
        return (*int4_in_place.buffers(self), self.slices(call))

    @property
    def _sums(self) -> list[Ptr]:
        """Addresses of the sums of the current slice of A."""
        return [Ptr(name, var("r") * self.groups_of_k) for name in self.group_sum_buffers]

    def across(self, panels: int) -> tuple[Stmt, ...]:
        """Width of the sums of a run of panels."""
        return (Let("c_wide", const(self.s.nr * panels)),)

    def visit(self, panels: int) -> tuple[Stmt, ...]:
        """Micro-kernel call, for slices of any number of rows."""
        kernel = micro_kernel(Int4Tile(self.isa, self.atom, family(self.s.family), self.grid, self.parts, panels))
        args: list[Index | Ptr] = [var("k"), self.slice_of_a(), TALL, var("h"), Ptr("bp")]
        args += [var("b_n")] if panels > 1 else []
        return (Call(kernel, (*args, *self._sums, self.groups_of_k, Ptr("cp"))),)


def sums_of_a(atom: Atom, kept: Family) -> dict[str, str]:
    """Sums of A over a group that its scaling takes, and their types: totals, and corrections of integers' sums."""
    totals = {"totals": "f32"} if kept.heads > 1 else {}
    return totals | ({"starts": "s32"} if atom.acc == "s32" else {})


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """A register tile by int4 panels.

    Attributes:
        isa: the instruction set.
        atom: its tile unit.
        kept: layout of the panels.
        grid: tiles of A, B and C of the widest call.
        parts: parts of an element of A.
        panels: panels that one call covers.
    """

    isa: Isa
    atom: Atom
    kept: Family
    grid: Grid
    parts: int
    panels: int

    @property
    def real(self) -> Atom:
        """Atom of vectors of f32 as wide as a tile."""
        vectors = self.isa.vector("f32", self.atom.n)
        assert vectors is not None  # noqa: S101 - else the atom would not support int4
        return vectors

    @property
    def words(self) -> Atom:
        """Atom of vectors of words as wide as a tile."""
        vectors = self.isa.vector("s32", self.atom.n)
        assert vectors is not None  # noqa: S101 - the same
        return vectors

    @property
    def rows(self) -> Atom:
        """Atom of vectors that converts values to rows of a tile of B."""
        vectors = self.isa.code_atom(self.atom)
        assert vectors is not None  # noqa: S101 - the same
        return vectors

    @property
    def exact(self) -> bool:
        """Whether sums of a group are integers, of numbers that are not around 0."""
        return self.atom.acc == "s32"

    @property
    def tile(self) -> int:
        """Number of units of a tile of B."""
        return self.atom.deep * self.atom.n

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.kept.nr * self.panels

    @property
    def columns(self) -> list[tuple[int, int]]:
        """The panel of each tile along n, and its first column there."""
        return [divmod(at, self.kept.nr) for at in range(0, self.width, self.atom.n)]

    def at(self, name: str, row: Index, panel: int, column: int, each: int = 1) -> Ptr:
        """Address of a column of a panel, `row` elements into the group, `each` elements to a word."""
        return Ptr(name, row + column + (var("b_panel") * (panel * each) if panel else const(0)))

    def word(self, u: Index, at: Index, count: Index) -> Stmt:
        """Conversion of `count` words from u on, of all columns, to rows of tiles at `at` in scratch."""
        w, kr, body = var("w"), self.atom.k_pack, []
        verb = "e2m1" if self.kept.e2m1 else "code" if self.exact else "centred"
        for v, (q, column) in enumerate(self.columns):
            place = self.at("words", (u + w) * self.kept.nr, q, column)
            body.append(Verb("load_b", "word", p=place, of=self.words.name, to="s32"))
            for e in range(0, CODES_KR, kr):
                row = at + (w * (CODES_KR // kr) + e // kr) * self.atom.n + v * self.tile
                body.append(Verb(verb, "unit", "word", count=const(CODES_AT[e]), of=self.rows.name))
                body.append(Verb("store", "unit", p=Ptr("values", row), to=self.rows.right, of=self.rows.name))
        return For("w", const(0), count, const(1), tuple(body), 4)

    def numbers(self) -> tuple[Stmt, ...]:
        """Conversion of a row of a group's sums to f32, corrected to those of numbers around 0."""
        add = Map("add", "part", ("part", "start"), "s32", "s32", self.real.name)
        return (add, Verb("real", "number", "part", of=self.real.name))

    def scaled(self) -> tuple[Stmt, ...]:
        """Scaled addition of a group's sums, and of its offsets times sums of A, to those over k."""
        real, i = self.real, var("i")
        heads: list[Stmt] = []
        body: list[Stmt] = []
        offsets, at_group = self.kept.heads > 1, i * var("groups") + var("g")
        each = BY_NAME["s32"].bytes // BY_NAME[self.kept.head_type].bytes
        if self.exact:
            body.append(Verb("load_a", "start", p=Ptr("starts", at_group), of=self.words.name))
        if offsets:
            heads.append(Map("literal", "zero_code", (float(ZERO_CODE),), "f32", "f32", real.name))
            body.append(Verb("load_a", "total", p=Ptr("totals", at_group), of=real.name))
        for v, (q, column) in enumerate(self.columns):
            scale = self.at("scales", const(0), q, column, each)
            heads.append(Verb("load_b", f"s{v}", p=scale, of=real.name))
            if offsets:
                offset = scale + self.kept.nr
                centre = Map("fma", f"o{v}", (f"s{v}", "zero_code", f"o{v}"), "f32", "f32", real.name)
                heads += [Verb("load_b", f"o{v}", p=offset, of=real.name), centre]
            sums, group = (Ptr(x, i * self.width + v * self.atom.n) for x in ("sums", "c"))
            body += [
                Verb("load_c", "all", p=sums, of=real.name),
                Verb("load_c", "part", p=group, of=(self.words if self.exact else real).name),
                *(self.numbers() if self.exact else ()),
                Verb("mac", "all", f"s{v}", "number" if self.exact else "part", of=real.name),
                *([Verb("mac", "all", "total", f"o{v}", of=real.name)] if offsets else []),
                Verb("store", "all", p=sums, of=real.name),
            ]
        return (*heads, For("i", const(0), var("rows"), const(1), tuple(body), 4))


def micro_kernel(x: Int4Tile) -> Function:
    """Micro-kernel sums[rows][n] = A . B over all of k, an A in lines of `parts`, B in int4 panels.

    Tiles of two steps are converted in turns, so that those of a step are stored while others are read.
    """
    atom, kept, wide, nr = x.atom, x.kept, x.width, x.kept.nr
    step, t, g, here = atom.k // CODES_KR, var("t"), var("g"), var("here")
    cut = (const(0), *x.grid.cut(TALL)[:-1])
    by = Strides(const(atom.deep), TALL * atom.deep, atom.n, wide, b_next=const(x.tile))
    columns = len(x.columns)
    outer = Outer(atom, x.grid, cut, columns, by)
    cells = [(r, v) for r in range(x.grid.rows) for v in range(columns)]
    every, words = columns * x.tile, ceil_div(var("k"), CODES_KR)
    long = const(kept.group // CODES_KR) if kept.group else words

    def one(at: Index, count: Index) -> tuple[Stmt, ...]:
        place = at % 2 * every
        first = (g * (long // step) + at) * x.parts if kept.group else at * x.parts
        macs = [y for q in range(x.parts) for y in outer.step(first + q, atom.n, Ptr("decoded", place))]
        return (x.word(at * step, place, count), *macs)

    zeros = Verb("zero", "zeros", of=x.real.name)
    clear = Verb("store", "zeros", p=Ptr("cleared", var("i") * x.real.n), of=x.real.name)
    units = (g * (long + kept.heads) + kept.heads) * nr - (g + 1) * kept.saved
    group = (
        Let("here", minimum(long, words - g * long)),
        LetPtr("scales", Ptr("b", g * ((long + kept.heads) * nr - kept.saved)), kept.head_type, readonly=True),
        LetPtr("words", Ptr("b", units), "s32", readonly=True),
        *(Verb("zero", str(x.grid.c(*at))) for at in cells),
        For("t", const(0), here // step, const(1), one(t, const(step))),
        If((here // step * step).lt(here), one(here // step, here % step)),
        *outer.sums("store"),
        *x.scaled(),
    )
    sum_zeros = tuple(
        Verb("store", "zeros", p=Ptr("sums", var("i") * wide + v * atom.n), of=x.real.name)
        for v in range(wide // atom.n)
    )
    body = (
        Scratch("decoded", 2 * every, atom.right),
        Scratch("c", x.grid.rows * atom.m * wide, atom.acc),
        LetPtr("cleared", Ptr("decoded"), "f32"),
        LetPtr("values", Ptr("decoded"), x.rows.right),
        zeros,
        # Rows of the last tile that no word fills are multiplied by zeros of A, and so have to be finite.
        For("i", const(0), const(2 * every // x.real.n), const(1), (clear,)),
        For("i", const(0), var("rows"), const(1), sum_zeros),
        For("g", const(0), var("groups"), const(1), group),
    )
    params = [Param("k"), Param("a", atom.left, readonly=True), Param("tall"), Param("rows")]
    params += [Param("b", "s32", readonly=True)] + ([Param("b_panel")] if x.panels > 1 else [])
    params += [Param(name, dtype, readonly=True) for name, dtype in sums_of_a(atom, kept).items()]
    params += [Param("groups"), Param("sums", "f32")]
    comment = f"sums[rows][{wide}] = A[tall][k] . B[k][{wide}], codes of four bits, in tiles"
    return Function(f"decode_{x.grid.rows}x{columns}", "inner", tuple(params), body, comment)


def line_sums(isa: Isa, atom: Atom, kept: Family, count: int) -> Function:
    """Function totals[row][g] = sums of a packed slice of A over group g, of elements in `count` parts.

    Corrections of integers' sums are these, times the number that stands for 0, negated.
    """
    rows, real, sums = isa.row_atom(atom), isa.vector("f32", atom.n), sums_of_a(atom, kept)
    assert rows is not None  # noqa: S101 - else the atom would not support int4
    assert real is not None  # noqa: S101 - the same
    i, t, g, e = var("i"), var("t"), var("g"), var("e")
    steps = ceil_div(var("k"), atom.k)
    long = const(kept.group // atom.k) if kept.group else steps
    line = Ptr("a", (t * TALL + i) * atom.deep)
    each = (Verb("load_b", "x", p=line, to=atom.right), Verb("mac", "sum", "one", "x"))
    last = minimum(steps, (g + 1) * long) * count
    group: list[Stmt] = [Verb("zero", "sum"), For("t", g * long * count, last, const(1), each)]
    place, zero = i * var("groups") + g, -(ZERO_E2M1 if kept.e2m1 else ZERO_CODE)
    for name in sums:
        lanes: list[Stmt] = [Verb("store", "sum", p=Ptr("lanes"))]
        if name == "starts":
            less = Map("mul", "less", ("sum", "zero_point"), "s32", "s32", real.name)
            lanes = [less, Verb("store", "less", p=Ptr("lanes"))]
        if atom.acc == "f32":
            group += [*lanes, Total("add", Ptr(name, place), Ptr("lanes"), rows.n)]
        else:
            add = For("e", const(0), const(rows.n), const(1), (Add(Ptr("whole"), Ptr("lanes", e)),))
            group += [*lanes, Move(Ptr("whole"), None), add, Move(Ptr(name, place), Ptr("whole"))]
    body = (
        Scratch("lanes", rows.n, atom.acc),
        Scratch("whole", 1, atom.acc),
        Verb("ones", "one"),
        *([Map("literal", "zero_point", (zero,), "s32", "s32", real.name)] if "starts" in sums else []),
        For("i", const(0), var("rows"), const(1), (For("g", const(0), var("groups"), const(1), tuple(group)),)),
    )
    params = (
        Param("k"), Param("rows"), Param("tall"), Param("a", atom.left, readonly=True),
        *(Param(name, dtype) for name, dtype in sums.items()), Param("groups"),
    )  # fmt: skip
    return Function("line_sums", "inner", params, body, "totals[rows][groups] = sums of A over groups", of=rows.name)
