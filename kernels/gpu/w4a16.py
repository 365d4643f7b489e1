"""Weights of four bits by units that multiply fragments which the lanes of a warp hold, beside floats of 16 bits.

    for each tile BM x BN of C            <- blocks of threads (times slices of k)
      for each BK of k
        shared <- A[BM, BK], words B[BN, BK / 8], scales    (asynchronously, all stages but one ahead)
        for each span of k of one group   <- warps that share a tile have a part of BK each
          sums, rows = 0
          for each word of a lane
            sums += (16 + codes) A        <- an atom's rows are columns of B
            rows += A                     <- times ones, the sums of A's rows
          totals += scale (sums - 16 rows) + offset rows
      C <- totals

Codes stay exact: 16 + code fits any float of 16 bits, two of a word come from a shift and one operation on bits; scales
and offsets are applied to sums of f32. What rounds is the sum: its terms are up to 31 / 15 times as large as codes
times A, with no more additions. One word takes 10 instructions: two to spread its bytes, eight for 8 codes.

No fragment is shuffled. Any order of k will do if both operands have it: lane (g, t) has of four lanes' words
the t-th, 8 neighbours of k; as pairs of codes the word is what two atoms take of a row, and 16 bytes of a row of
A what both take of a column. An atom's rows g and g + 8 are neighbouring columns of B, so that
lanes store pairs. Sums of rows: a fragment of A by ones gives two halves of each, whatever its order of k.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import GridKernel
from portmm.ir.index import Ptr, ceil_div, const, var
from portmm.ir.nodes import Add, For, If, Let, Move, Scratch
from portmm.ir.thread_nodes import WHOLE, Barrier, Clear, CopyCommit, CopyWait, Do, Mac, Shared, Vector
from portmm.kernels.gpu.epilogue_store import Storing
from portmm.kernels.gpu.simt import arguments, place, slice_of_k
from portmm.kernels.gpu.w4a16_tiles import LANES, Scales, Tile, reversed_bits
from portmm.spec.dtype import CODES_KR

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.isa import Atom, Isa

WARP = 32
PAIR = 2
SUMS = 4
"""Of a lane in one atom: two columns of B, two rows of A."""
ONES = {"f16": "ones_f16", "bf16": "ones_bf16"}
MANY = 8
"""Atoms of a warp from which on loops are not unrolled."""
PER_ROUND = LANES * CODES_KR
"""Elements of k of one word of each lane: two atoms."""


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel in the making.

    Attributes:
        s: its schedule.
        isa: the instruction set.
        atom: multiplies.
    """

    s: Schedule
    isa: Isa
    atom: Atom

    @property
    def columns(self) -> int:
        """Atoms of a warp across the columns of B."""
        return self.s.tiles[1].n // self.atom.m

    @property
    def rows(self) -> int:
        """Atoms of a warp down the rows of A."""
        return self.s.tiles[1].m // self.atom.n

    @property
    def wide(self) -> int:
        """Words of one column that a lane has at once."""
        return self.s.vectors[1] // CODES_KR

    @property
    def part(self) -> int:
        """Elements of k of a step that a warp has."""
        return self.s.tiles[1].k

    @property
    def span(self) -> int:
        """Elements of k that a warp sums before it scales."""
        return gcd(self.s.group, self.part)

    @property
    def unrolled(self) -> int:
        """Of loops over spans, and over words: those of many sums leave compilers no registers to look ahead."""
        return WHOLE if self.rows * self.columns < MANY else 1

    @property
    def a(self) -> Tile:
        """The rows of A."""
        s = self.s
        ends = (var("a_m"), var("row_0"), var("m"))
        return Tile("a", s.types[0], s.block.m, s.block.k, s.vectors[0], s.threads, *ends, 1, self.wide, s.stages)

    @property
    def b(self) -> Tile:
        """The words of B."""
        s, words = self.s, self.s.block.k // CODES_KR
        ends = (var("words"), var("column_0"), var("n"))
        return Tile("b", "s32", s.block.n, words, LANES, s.threads, *ends, PAIR, 0, s.stages)

    def scales(self, name: str) -> Scales:
        """The scales, or the offsets."""
        s = self.s
        return Scales(name, s.block.n, s.block.k // self.span, self.span, s.group, s.threads, s.stages)


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """The kernel of a schedule."""
    work = Work(s, isa, atom)
    sums = work.rows * work.columns * SUMS
    body: list[Stmt] = [work.a.shared(), work.b.shared()]
    body += [work.scales(x).shared() for x in ("scales", "offsets")]
    body += [Shared("left", sums * (s.threads - s.threads // shares(s)), "f32")] if shares(s) > 1 else []
    body += [Scratch(x, sums, "f32") for x in ("acc", "sums")]
    body += [Scratch("row_parts", work.rows * SUMS, "f32"), Scratch("row_sums", work.rows * PAIR, "f32")]
    body += [Scratch("words_part", work.columns * PAIR * work.wide, "s32"), Scratch("b_part", 8, "b32")]
    body += [Scratch("a_part", work.rows * 4, "b32"), Scratch("ones", 2, "b32")]
    body += [Scratch("scale", PAIR, "f32"), Scratch("offset", PAIR, "f32")]
    body += [*place(s), *_warps(work), *slice_of_k(s, s.block.k), Clear("acc", sums), Do(ONES[atom.a], (Ptr("ones"),))]
    body += _loop(work)
    body += _joined(work, sums) if shares(s) > 1 else _stored(work)
    grid = (ceil_div(var("m"), s.block.m) * ceil_div(var("n"), s.block.n) * var("batch"), const(s.split))
    return GridKernel(str(s.name(atom)), isa, atom, arguments(s, sums=s.split > 1), s.threads, grid, tuple(body))


def shares(s: Schedule) -> int:
    """Warps that have parts of k of the same sums."""
    return s.block.k // s.tiles[1].k


def _warps(work: Work) -> list[Stmt]:
    """Where the part of this warp begins, in the tile of its block, and what its lanes have."""
    s = work.s
    warp, across, number = s.tiles[1], s.block.n // s.tiles[1].n, var("warp") // shares(s)
    return [
        Let("warp", var("thread") // WARP),
        Let("lane", var("thread") % WARP),
        Let("share", var("warp") % shares(s)),
        Let("a_first", number // across * warp.m),
        Let("b_first", number % across * warp.n),
        Let("g", var("lane") // LANES),
        Let("t", var("lane") % LANES),
        Let("turned", reversed_bits(var("g"))),
    ]


def _loop(work: Work) -> list[Stmt]:
    """The loop over k."""
    s, stages, step = work.s, work.s.stages, var("step")

    def begin(at: Index) -> tuple[Stmt, ...]:
        k, stage = var("k_0") + at * s.block.k, at % stages
        copies = (
            *work.b.copy(k // CODES_KR, ceil_div(var("k_end"), CODES_KR), stage),
            *work.a.copy(k, var("k_end"), stage),
            *work.scales("scales").copy(k, stage), *work.scales("offsets").copy(k, stage),
        )  # fmt: skip
        return (If(at.lt(var("steps")), copies), CopyCommit())

    ahead = [x for i in range(stages - 1) for x in begin(const(i))]
    each = For("number", const(0), const(work.part // work.span), const(1), _span(work), work.unrolled)
    body = (
        CopyWait(stages - 2),
        Barrier(),
        *begin(step + (stages - 1)),
        Let("stage", step % stages),
        each,
    )
    return [*ahead, For("step", const(0), var("steps"), const(1), body)]


def _span(work: Work) -> tuple[Stmt, ...]:
    """Multiply a span of the stage, and add what it comes to, scaled."""
    found: list[Stmt] = [Clear("sums", work.rows * work.columns * SUMS), Clear("row_parts", work.rows * SUMS)]
    deep = work.wide * PER_ROUND
    units = work.span // deep
    first = var("share") * (work.part // deep) + var("number") * units + var("unit")
    inside = (*_words(work, first), *(x for c in range(work.wide) for x in _multiply(work, first, c)))
    return (*found, For("unit", const(0), const(units), const(1), inside, work.unrolled), *_scaled(work))


def _words(work: Work, unit: Index) -> tuple[Stmt, ...]:
    """Load this lane's words of a unit of k."""
    b, i, half = work.b, var("i"), var("half")
    column = var("b_first") + i * work.atom.m + var("g") * PAIR + half
    word = unit * (work.wide * LANES) + var("t") * work.wide
    at = b.at(column, word // LANES, var("turned")) + word % LANES
    src = Ptr("b_tile", var("stage") * b.size + at)
    load = Vector(Ptr("words_part", (i * PAIR + half) * work.wide), src, 4 * work.wide)
    return _for("i", work.columns, *_for("half", PAIR, load))


def _multiply(work: Work, unit: Index, c: int) -> tuple[Stmt, ...]:
    """Multiply the c-th word of each lane."""
    a, i, j = work.a, var("i"), var("j")
    row = var("a_first") + j * work.atom.n + var("g")
    at = a.at(row, unit * (work.wide * LANES) + c * LANES + var("t"), var("turned"))
    load = Vector(Ptr("a_part", j * 4), Ptr("a_tile", var("stage") * a.size + at), 16)
    name = f"codes_to_{work.atom.a}"
    word = Ptr("words_part", i * (PAIR * work.wide) + c)
    decode = (Do(name, (Ptr("b_part"), word)), Do(name, (Ptr("b_part", const(1)), word + work.wide)))
    sums = Ptr("sums", (i * work.rows + j) * SUMS)
    both = tuple(Mac(sums, Ptr("b_part", const(4 * x)), Ptr("a_part", j * 4 + 2 * x)) for x in (0, 1))
    rows = Mac(Ptr("row_parts", j * SUMS), Ptr("a_part", j * 4), Ptr("ones"))
    return (
        *_for("j", work.rows, load),
        *_for("j", work.rows, rows),
        *_for("i", work.columns, *decode, *_for("j", work.rows, *both)),
    )


def _scaled(work: Work) -> tuple[Stmt, ...]:
    """Add what a span came to, scaled."""
    i, j = var("i"), var("j")
    scales = work.scales("scales")
    span = var("share") * (work.part // work.span) + var("number")
    column = var("b_first") + i * work.atom.m + var("g") * PAIR
    at = var("stage") * scales.size + span * scales.columns + column
    loads = (Vector(Ptr("scale"), Ptr("scales_tile", at), 8), Vector(Ptr("offset"), Ptr("offsets_tile", at), 8))
    sums = (i * work.rows + j) * SUMS
    given = (Ptr("acc", sums), Ptr("sums", sums), Ptr("row_sums", j * PAIR), Ptr("scale"), Ptr("offset"))
    rows = Do("sums_of_rows", (Ptr("row_sums", j * PAIR), Ptr("row_parts", j * SUMS), var("lane")))
    return (
        *_for("j", work.rows, rows),
        *_for("i", work.columns, *loads, *_for("j", work.rows, Do("add_scaled", given))),
    )


def _joined(work: Work, sums: int) -> list[Stmt]:
    """Add what warps with other parts of k have summed; the first stores it."""
    s, q, other = work.s, var("q"), var("other")
    alone = s.threads // shares(s)
    own = var("warp") // shares(s) * WARP + var("lane")
    to = Ptr("left", ((var("share") - 1) * sums + q) * alone + own)
    src = Ptr("left", (other * sums + q) * alone + own)
    leave = If(const(0).lt(var("share")), _for("q", sums, Move(to, Ptr("acc", q))))
    add = _for("other", shares(s) - 1, *_for("q", sums, Add(Ptr("acc", q), src)))
    return [leave, Barrier(), If(var("share").eq(0), (*add, *_stored(work)))]


def _stored(work: Work) -> list[Stmt]:
    """Store the sums of this lane where they belong."""
    i, j, e = var("strip"), var("row_of"), var("e")
    storing = Storing(work.s, work.isa, work.atom, (1, PAIR))
    each = var("h") * storing.vector
    column = var("column_0") + var("b_first") + i * work.atom.m + var("g") * PAIR + each
    stored = storing.piece((i * work.rows + j) * SUMS + e * PAIR + each)
    piece = _for("h", PAIR // storing.vector, Let("column", column), *stored)
    row = (
        Let("row", var("row_0") + var("a_first") + j * work.atom.n + var("t") * PAIR + e),
        If(var("row").lt(var("m")), _for("strip", work.columns, *piece)),
    )
    return [*storing.before(), *_for("row_of", work.rows, *_for("e", PAIR, *row))]


def _for(name: str, count: int, *body: Stmt) -> tuple[Stmt, ...]:
    """A loop that is unrolled whole."""
    return (For(name, const(0), const(count), const(1), body, WHOLE),)
