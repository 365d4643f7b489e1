"""w4a16 GEMM of many rows: a block dequantizes int4 weights to shared memory once, for all its warps.

    for each tile BM x BN of C            <- blocks of threads (times slices of k)
      for each BK of k
        shared <- A[BM, BK], words B[BN, BK / 8]                  (asynchronously, two stages ahead)
        shared <- scale * q + offset, of the next step            (while this one's fragments are multiplied)
        sums of a warp += fragments of A x fragments of B
      C <- sums

Products are those of `mma`, with a tile of B of the same layout. A weight is rounded once, to A's type, as
for tiles of AMX; `w4a16`, for few rows, does not round weights. A thread dequantizes the words that it copied
itself, 16 bytes of one column at once, so that no barrier is needed for them; it stores vectors of 16 bytes, which
eight neighbours write to different banks, by the swizzle of `mma_transfer`. The next scales
are loaded a whole step before their use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import For, If, Let, Move, Scratch
from portmm.ir.thread_nodes import WHOLE, Clear, CopyAsync, Do, Shared, Vector
from portmm.kernels.gpu.mma import Conversion, Work, coordinates, copied, stored
from portmm.kernels.gpu.mma_transfer import MmaTile
from portmm.schedule.gpu_w4a16 import plain
from portmm.spec.dtype import CODES_KR

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

WORDS = 4
"""Number of words that a thread copies at once."""
CODES = WORDS * CODES_KR
TILES = 2
"""Number of tiles of floats: one is multiplied while the next one is dequantized."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words of a block's tile of int4 weights.

    Attributes:
        s: the schedule.
    """

    s: Schedule

    @property
    def count(self) -> int:
        """Number of vectors of a tile."""
        return self.s.block.n * self.s.block.k // CODES

    @property
    def turns(self) -> int:
        """Number of vectors of a thread."""
        return -(-self.count // self.s.threads)

    def each(self, *body: Stmt) -> tuple[Stmt, ...]:
        """Loop over the vectors of this thread."""
        return self.some(0, self.turns, *body)

    def some(self, begin: int, end: int, *body: Stmt) -> tuple[Stmt, ...]:
        """Loop over vectors `begin` to `end` of this thread, with each one's column and first k in the tile."""
        e, across = var("vector"), self.s.block.k // CODES
        inside: tuple[Stmt, ...] = (Let("line", e // across), Let("deep", e % across * CODES), *body)
        inside = (If(e.lt(self.count), inside),) if self.count % self.s.threads else inside
        own = (Let("vector", var("thread") + var("part") * self.s.threads), *inside)
        return (For("part", const(begin), const(end), const(1), own, WHOLE),)

    def copy(self, k: Index, stage: Index) -> tuple[Stmt, ...]:
        """Asynchronous copies of this thread's words of the tile at k, zeros from the last k on."""
        to = Ptr("words_tile", (stage * self.count + var("vector")) * WORDS)
        at = (k + var("deep")) // CODES_KR
        src = Ptr("b_item", _column() * var("words") + at)
        return self.each(CopyAsync(to, src, 16, (k + var("deep")).lt(var("k_end"))))

    def scales(self, k: Index) -> tuple[Stmt, ...]:
        """Loads of the scale and the offset of a vector of the tile at k."""
        s, part = self.s, var("part")
        number = minimum((k + var("deep")) // s.b.group, var("groups") - 1) if s.b.group else const(0)
        at = _column() * var("groups") + number
        return (Move(Ptr("scale", part), Ptr("scales", at)), Move(Ptr("offset", part), Ptr("offsets", at)))

    def dequantize(self, work: Work, at: Index, number: int) -> tuple[Stmt, ...]:
        """Dequantization of one of this thread's words of a step; a vector's last also loads the next step's scales."""
        side, part, q = work.tile(MmaTile, "b"), number // WORDS, number % WORDS
        src = Ptr("words_tile", (at % self.s.stages * self.count + var("vector")) * WORDS)
        operands = (Ptr("made"), Ptr("word", const(q)), Ptr("scale", const(part)), Ptr("offset", const(part)))
        to = Ptr("b_tile", at % TILES * side.size + side.at(var("line"), var("deep") // CODES_KR + q))
        body: list[Stmt] = [Vector(Ptr("word", const(q)), src + q, 8)] if q % 2 == 0 else []
        body += [Do(f"unfold_codes_{work.atom.a}", operands), Vector(to, Ptr("made"), 16)]
        body += self.scales(var("k_0") + (at + 1) * self.s.block.k) if q + 1 == WORDS else ()
        return self.some(part, part + 1, *body)


def _column() -> Index:
    return minimum(var("column_0") + var("line"), var("n") - 1)


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel of a schedule."""
    work, words = Work(plain(s), isa, atom), Words(s)
    a, b = work.part("a"), work.part("b")
    sums = s.mr * s.nr
    body: list[Stmt] = [a.side.shared(), replace(b.side, stages=TILES).shared()]
    body += [Shared("words_tile", words.count * WORDS * s.stages, "s32"), Scratch("acc", sums, atom.acc)]
    body += [Scratch("a_part", a.count * 2, "b32"), Scratch("b_part", b.count * 2, "b32")]
    body += [Scratch("scale", words.turns, "f32"), Scratch("offset", words.turns, "f32")]
    body += [Scratch("word", WORDS, "s32"), Scratch("made", WORDS, "b32")]
    body += [*coordinates(work, s), Clear("acc", sums)]
    body += _loop(work, words)
    body += stored(work)
    return replace(work, s=s).kernel(body)


def _loop(work: Work, words: Words) -> list[Stmt]:
    """Main loop."""
    a, count = work.part("a").side, work.s.block.k // work.atom.k - 1
    many = words.turns * WORDS

    def copies(k: Index, stage: Index) -> tuple[Stmt, ...]:
        return (*a.copy(k, var("k_end"), stage), *words.copy(k, stage))

    def dequantized(at: Index, part: int) -> tuple[Stmt, ...]:
        """Dequantization of a part of a step, whose words have landed; past the last step, of unused values."""
        numbers = range(part * many // count, (part + 1) * many // count)
        return tuple(x for number in numbers for x in words.dequantize(work, at, number))

    first = (*words.each(*words.scales(var("k_0"))), *(x for i in range(count) for x in dequantized(const(0), i)))
    return copied(work, copies, Conversion(TILES, first, lambda i: dequantized(var("step") + 1, i)))
