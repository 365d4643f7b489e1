"""w4a16 GEMM on tensor cores (mma): int4 weights, activations of 16 bits.

    for each tile BM x BN of C            <- blocks of threads (times slices of k)
      for each BK of k
        shared <- A[BM, BK], words B[BN, BK / 8], scales    (asynchronously, prefetching all stages but one)
        for each span of k of one group   <- slice-K: warps of the same tile have a part of BK each
          sums, rows = 0
          for each word of a lane
            sums += (16 + q) A            <- an atom's rows are columns of B
            rows += A                     <- times ones, the sums of A's rows
          totals += scale (sums - 16 rows) + offset rows
      C <- totals

int4 values q stay exact: 16 + q fits any float of 16 bits, two of a word take a shift and one operation on bits; scales
and offsets are applied to sums of f32. Only sums are rounded: their terms are up to 31 / 15 times as large as q
times A, with no more additions. One word takes 10 instructions: two to spread its bytes, eight for 8 values.

No fragment is shuffled. Any order of k is valid if both operands have it: lane (g, t) has the t-th of four lanes'
words, 8 neighbours of k; as pairs of values the word is a row of the operands of two atoms, and 16 bytes of a row of
A are the column of both. An atom's rows g and g + 8 are neighbouring columns of B, so that
lanes store pairs. Sums of rows: a fragment of A by ones gives two halves of each, whatever its order of k.

`Tile` is the layout of A and of int4 weights in shared memory, in lines of vectors of 16 bytes; `Scales` is that of
scales.

The lanes of a warp read columns, or rows, g = lane / 4, and of each the part of t = lane % 4: words of 8 int4 values,
4 * w words at once, w neighbours for each t, and of A the vectors of the same k. Reads of 16 bytes are done
by 8 lanes at a time, of 4 bytes by all lanes at once; they have no bank conflicts because

- vectors of A that the four t read at once, for the c-th word of each, are contiguous: vector t * w + c is
  stored at c * 4 + t;
- the position of a vector is xored with the bits of g in reverse order: two g, four or all eight of them are in
  different banks whether they read four vectors each, two or one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import in_column, in_row
from portmm.ir.index import Ptr, ceil_div, const, minimum, var
from portmm.ir.nodes import Add, For, If, Let, Mac, Move, Scratch
from portmm.ir.thread_nodes import WHOLE, Barrier, Clear, CopyAsync, Do, Shared, Vector
from portmm.kernels.gpu.epilogue_store import EpilogueStore, cell_of
from portmm.kernels.gpu.fragments import of
from portmm.kernels.gpu.loops import Pipeline, pieces, unrolled
from portmm.kernels.gpu.mma import warps
from portmm.kernels.gpu.mma_transfer import MmaTile
from portmm.kernels.gpu.product import Product, block_tile, slice_of_k
from portmm.schedule.gpu_w4a16 import warps_along_k
from portmm.spec.dtype import CODES_KR
from portmm.spec.layout import Layout
from portmm.target.fragment import Fragment

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa


LANES = 4
"""Number of lanes that share a row, or a column."""


def reversed_bits(x: Index) -> Index:
    """Three bits of 0 to 7 in reverse order."""
    return x % 2 * 4 + x // 2 % 2 * 2 + x // 4


@dataclass(frozen=True, slots=True)
class Tile(MmaTile):
    """Tile of one operand, in vectors of 16 bytes along k; of int4 values, the elements are words.

    Attributes:
        together: rows that are in consecutive banks, for one g.
        lane_vectors: vectors of a lane that are neighbours in memory; 0 where they stay neighbours in shared memory.
    """

    together: int
    lane_vectors: int

    @property
    def clamped(self) -> bool:
        """Past the last row it is read again: its sums are not stored."""
        return True

    def at(self, line: Index, vector: Index, element: Index | int = 0) -> Index:
        """Offset of an element of a vector of a line, in a tile."""
        if self.lane_vectors:
            unit = vector // (LANES * self.lane_vectors) * (LANES * self.lane_vectors)
            inside = vector % (LANES * self.lane_vectors)
            vector = unit + inside % self.lane_vectors * LANES + inside // self.lane_vectors
        return self.place(line, vector, reversed_bits(line // self.together % 8)) + element

    def place(self, line: Index, position: Index, swizzle: Index) -> Index:
        """Offset of the vector at a position in a line; `swizzle` is the reversed bits of its g."""
        return ((line * (self.width // self.per_vector) + position) ^ swizzle) * self.per_vector


@dataclass(frozen=True, slots=True)
class Scales:
    """Tile of the scales, or offsets, of a block's step: for each span of k those of all columns.

    Attributes:
        name: "scales" or "offsets".
        columns: columns of a block.
        spans: spans of a step.
        span: rows of k of a span, all of one group.
        group: rows of a quantization group, 0 for all.
        threads: threads that copy it.
        stages: number of tiles.
    """

    name: str
    columns: int
    spans: int
    span: int
    group: int
    threads: int
    stages: int

    @property
    def size(self) -> int:
        """Number of elements of a step."""
        return self.columns * self.spans

    def shared(self) -> Shared:
        """Shared memory array of all stages."""
        return Shared(f"{self.name}_tile", self.size * self.stages, "f32")

    def copy(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """Asynchronous copies of the scales of the step at k."""
        n = self.name
        e, column = var(f"{n}_piece"), var(f"{n}_column")
        span = e % self.spans
        number = minimum((k + span * self.span) // self.group, var("groups") - 1) if self.group else const(0)
        at = minimum(var("column_0") + column, var("n") - 1) * var("groups") + number
        body: tuple[Stmt, ...] = (
            Let(f"{n}_column", e // self.spans),
            CopyAsync(Ptr(f"{n}_tile", stage * self.size + span * self.columns + column), Ptr(n, at), 4, const(1)),
        )
        return (pieces(f"{n}_piece", self.size, self.threads, *body),)


PAIR = 2
SUMS = 4
"""Number of sums of a lane in one atom: two columns of B by two rows of A."""
ONES = {"f16": "ones_f16", "bf16": "ones_bf16"}
MANY = 8
"""Number of atoms of a warp from which on loops are not unrolled."""
PER_ROUND = LANES * CODES_KR
"""Number of elements of k of one word of each lane: two atoms."""


@dataclass(frozen=True, slots=True)
class Work(Product):
    """Tiles of one kernel."""

    @property
    def columns(self) -> int:
        """Number of atoms of a warp across the columns of B."""
        return self.s.tiles[1].n // self.atom.m

    @property
    def rows(self) -> int:
        """Number of atoms of a warp down the rows of A."""
        return self.s.tiles[1].m // self.atom.n

    @property
    def lane_words(self) -> int:
        """Number of words of one column that a lane loads at once."""
        return self.s.b.vector // CODES_KR

    @property
    def part(self) -> int:
        """Number of elements of k of a step that a warp has."""
        return self.s.tiles[1].k

    @property
    def span(self) -> int:
        """Number of elements of k that a warp sums before it scales."""
        return gcd(self.s.b.group, self.part)

    @property
    def unroll(self) -> int:
        """Unroll factor of loops over spans, and over words: with many sums no registers remain for prefetches."""
        return WHOLE if self.rows * self.columns < MANY else 1

    @property
    def a(self) -> Tile:
        """Tile of A."""
        return self.tile(Tile, "a", 1, self.lane_words)

    @property
    def b(self) -> Tile:
        """Tile of the words of B."""
        words = self.tile(Tile, "b", PAIR, 0)
        layout = Layout(("n", "words"))
        return replace(words, dtype="s32", vector=LANES, depth=words.depth // CODES_KR, layout=layout)

    def scales(self, name: str) -> Scales:
        """Tile of the scales, or of the offsets."""
        s = self.s
        return Scales(name, s.block.n, s.block.k // self.span, self.span, s.b.group, s.threads, s.stages)


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel of a schedule."""
    work = Work(s, isa, atom)
    sums = work.rows * work.columns * SUMS
    body: list[Stmt] = [work.a.shared(), work.b.shared()]
    body += [work.scales(x).shared() for x in ("scales", "offsets")]
    body += [Shared("left", sums * (s.threads - s.threads // warps_along_k(s)), "f32")] if warps_along_k(s) > 1 else []
    body += [Scratch(x, sums, "f32") for x in ("acc", "sums")]
    body += [Scratch("row_parts", work.rows * SUMS, "f32"), Scratch("row_sums", work.rows * PAIR, "f32")]
    body += [Scratch("words_part", work.columns * PAIR * work.lane_words, "s32"), Scratch("b_part", 8, "b32")]
    body += [Scratch("a_part", work.rows * 4, "b32"), Scratch("ones", 2, "b32")]
    body += [Scratch("scale", PAIR, "f32"), Scratch("offset", PAIR, "f32")]
    body += [
        *block_tile(s),
        *_warps(work),
        *slice_of_k(s, s.block.k),
        Clear("acc", sums),
        Do(ONES[atom.a], (Ptr("ones"),)),
    ]
    body += _loop(work)
    body += _slice_reduction(work, sums) if warps_along_k(s) > 1 else _stored(work)
    return work.kernel(body)


def _warps(work: Work) -> list[Stmt]:
    """Coordinates of this warp's part of its block's tile, and of its lanes."""
    sums, slices = of(work.atom.acc_fragment), warps_along_k(work.s)
    return [
        *warps(work.s, work.isa.warp, slices),
        Let("share", var("warp") % slices),
        Let("g", in_column(sums, var("lane"))),
        Let("t", in_row(sums, var("lane"))),
        Let("reversed", reversed_bits(var("g"))),
    ]


def _loop(work: Work) -> list[Stmt]:
    """Main loop."""

    def copies(k: Index, stage: Index) -> tuple[Stmt, ...]:
        words, end = k // CODES_KR, ceil_div(var("k_end"), CODES_KR)
        scales = (x for name in ("scales", "offsets") for x in work.scales(name).copy(k, stage))
        return (*work.b.copy(words, end, stage), *work.a.copy(k, var("k_end"), stage), *scales)

    spans = For("number", const(0), const(work.part // work.span), const(1), _span(work), work.unroll)
    before, body = Pipeline(work.s.block.k, work.s.stages).copied(copies, (spans,))
    return [*before, For("step", const(0), var("steps"), const(1), body)]


def _span(work: Work) -> tuple[Stmt, ...]:
    """Multiply-adds of a span of the stage, and the scaled addition of its sums."""
    clear: list[Stmt] = [Clear("sums", work.rows * work.columns * SUMS), Clear("row_parts", work.rows * SUMS)]
    unit_k = work.lane_words * PER_ROUND
    units = work.span // unit_k
    first = var("share") * (work.part // unit_k) + var("number") * units + var("unit")
    inside = (*_words(work, first), *(x for c in range(work.lane_words) for x in _multiply(work, first, c)))
    return (*clear, For("unit", const(0), const(units), const(1), inside, work.unroll), *_scaled(work))


def _words(work: Work, unit: Index) -> tuple[Stmt, ...]:
    """Loads of this lane's words of a unit of k."""
    b, i, half = work.b, var("i"), var("half")
    column = var("b_first") + i * work.atom.m + var("g") * PAIR + half
    word = unit * (work.lane_words * LANES) + var("t") * work.lane_words
    at = b.place(column, word // LANES, var("reversed")) + word % LANES
    src = Ptr("b_tile", var("stage") * b.size + at)
    load = Vector(Ptr("words_part", (i * PAIR + half) * work.lane_words), src, 4 * work.lane_words)
    return (unrolled("i", work.columns, unrolled("half", PAIR, load)),)


def _multiply(work: Work, unit: Index, c: int) -> tuple[Stmt, ...]:
    """Multiply-adds of the c-th word of each lane."""
    a, i, j = work.a, var("i"), var("j")
    row = var("a_first") + j * work.atom.n + var("g")
    at = a.place(row, unit * (work.lane_words * LANES) + c * LANES + var("t"), var("reversed"))
    load = Vector(Ptr("a_part", j * 4), Ptr("a_tile", var("stage") * a.size + at), 16)
    name = f"codes_to_{work.atom.a}"
    word = Ptr("words_part", i * (PAIR * work.lane_words) + c)
    dequantize = (Do(name, (Ptr("b_part"), word)), Do(name, (Ptr("b_part", const(1)), word + work.lane_words)))
    sums = Ptr("sums", (i * work.rows + j) * SUMS)
    both = tuple(Mac(sums, Ptr("b_part", const(4 * x)), Ptr("a_part", j * 4 + 2 * x)) for x in (0, 1))
    rows = Mac(Ptr("row_parts", j * SUMS), Ptr("a_part", j * 4), Ptr("ones"))
    return (
        unrolled("j", work.rows, load),
        unrolled("j", work.rows, rows),
        unrolled("i", work.columns, *dequantize, unrolled("j", work.rows, *both)),
    )


def _scaled(work: Work) -> tuple[Stmt, ...]:
    """Scaled addition of a span's sums."""
    i, j = var("i"), var("j")
    scales = work.scales("scales")
    span = var("share") * (work.part // work.span) + var("number")
    column = var("b_first") + i * work.atom.m + var("g") * PAIR
    at = var("stage") * scales.size + span * scales.columns + column
    loads = (Vector(Ptr("scale"), Ptr("scales_tile", at), 8), Vector(Ptr("offset"), Ptr("offsets_tile", at), 8))
    sums = (i * work.rows + j) * SUMS
    operands = (Ptr("acc", sums), Ptr("sums", sums), Ptr("row_sums", j * PAIR), Ptr("scale"), Ptr("offset"))
    rows = Do("sums_of_rows", (Ptr("row_sums", j * PAIR), Ptr("row_parts", j * SUMS), var("lane")))
    return (
        unrolled("j", work.rows, rows),
        unrolled("i", work.columns, *loads, unrolled("j", work.rows, Do("add_scaled", operands))),
    )


def _slice_reduction(work: Work, sums: int) -> list[Stmt]:
    """Slice-K reduction: the sums of warps with other parts of k are added, and stored by the first."""
    s, q, other = work.s, var("q"), var("other")
    alone = s.threads // warps_along_k(s)
    own = var("warp") // warps_along_k(s) * work.isa.warp + var("lane")
    to = Ptr("left", ((var("share") - 1) * sums + q) * alone + own)
    src = Ptr("left", (other * sums + q) * alone + own)
    leave = If(const(0).lt(var("share")), (unrolled("q", sums, Move(to, Ptr("acc", q))),))
    add = unrolled("other", warps_along_k(s) - 1, unrolled("q", sums, Add(Ptr("acc", q), src)))
    return [leave, Barrier(), If(var("share").eq(0), (add, *_stored(work)))]


def _stored(work: Work) -> list[Stmt]:
    """Epilogue: stores of the sums of this lane."""
    sums = of(work.atom.acc_fragment)
    # Rows g and g + 8 of an atom are neighbouring columns of B, and are neighbours in registers: `add_scaled`.
    sums = Fragment(tuple((row * PAIR, column) for row, column in sums.lane), ((1, 0), (0, 1)))
    store = EpilogueStore(work.s, work.isa, work.atom, cell_of(sums, work.s))
    own = (var("b_first"), var("g") * PAIR), (var("a_first"), var("t") * PAIR)
    return [*store.before(), *store.fragments(sums, (work.columns, work.rows), own)]
