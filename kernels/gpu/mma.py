"""Products by units that multiply fragments which the lanes of a warp hold: tensor cores from Turing on.

    for each tile BM x BN of C            <- blocks of threads (times slices of k)
      for each BK of k
        shared <- A[BM, BK], B[BN, BK]    (asynchronously, all stages but one ahead; or through registers)
        for each k of an atom
          fragments <- shared             (of the next step, while those of this one are multiplied)
          sums of a warp += fragments of A x fragments of B
      C <- sums

Of a block's tile each warp has a part; of a warp's sums, lane l has those of rows l / 4 and columns l % 4 * 2 and the
next, of every eight rows and columns. With `swap` the columns of B take the place of the atom's rows: of few rows of
A, fewer are wasted, as atoms have sixteen rows but eight columns. Tiles in shared memory: `kernels.matrix_feed`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import GridKernel
from portmm.ir.index import Ptr, const, var
from portmm.ir.nodes import For, If, Let, Scratch
from portmm.ir.thread_nodes import WHOLE, Barrier, Clear, CopyCommit, CopyWait, Mac
from portmm.kernels.gpu.epilogue_staging import Staging
from portmm.kernels.gpu.epilogue_store import Storing, bottom
from portmm.kernels.gpu.fragments import HIGH, Part
from portmm.kernels.gpu.mma_transfer import Side
from portmm.kernels.gpu.simt import arguments, blocks, place, slice_of_k
from portmm.kernels.gpu.split_k_fixup import join
from portmm.schedule.gpu_mma import shared_bytes, staging

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.isa import Atom, Isa

LANES = 32
PAIR = 2
"""Neighbouring columns of a lane."""


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

    def side(self, name: str) -> Side:
        """An operand of a block's tile."""
        s, of_a = self.s, name == "a"
        along = "k" if s.along_k(0 if of_a else 1) else "row"
        step = const(1) if along == "row" else var("a_m" if of_a else "b_n")
        return Side(
            name, s.types[0 if of_a else 1], along, s.vectors[0 if of_a else 1], s.block.m if of_a else s.block.n,
            s.block.k, s.threads, step, const(1) if along == "k" else var("a_k" if of_a else "b_k"),
            var("row_0" if of_a else "column_0"), bottom(s) if of_a else var("n"), s.stages,
        )  # fmt: skip

    def part(self, name: str) -> Part:
        """A warp's rows of an operand."""
        warp, of_a = self.s.tiles[1], name == "a"
        high = self.atom.m if of_a != self.s.swap else self.atom.n
        rows = warp.m if of_a else warp.n
        return Part(self.side(name), rows, high, self.atom.k, var(f"{name}_first"))

    @property
    def names(self) -> tuple[str, str]:
        """The operands on the left and on the right of the atom."""
        return ("b", "a") if self.s.swap else ("a", "b")

    @property
    def words(self) -> int:
        """Sums of a lane in one atom."""
        return self.atom.m * self.atom.n // LANES


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """The kernel of a schedule."""
    work = Work(s, isa, atom)
    a, b = work.part("a"), work.part("b")
    sums = s.mr * s.nr
    ahead = 2 if s.copies else 1
    tiles = [a.side.shared(), b.side.shared()]
    # Results may need more than all tiles.
    more = shared_bytes(s) - a.side.bytes * tiles[0].elements
    tiles[1] = replace(tiles[1], elements=more // b.side.bytes)
    body: list[Stmt] = [*tiles, Scratch("acc", sums, atom.acc)]
    body += [Scratch("a_part", a.count * ahead, "b32"), Scratch("b_part", b.count * ahead, "b32")]
    body += [] if s.copies else [a.side.registers(), b.side.registers()]
    body += [*place(s), *warps(s), *a.places(), *b.places(), *slice_of_k(s, s.block.k), Clear("acc", sums)]
    body += _copied(work, a, b) if s.copies else _fetched(work, a, b)
    body += [*join(s, blocks(s)), *stored(work)]
    grid = (blocks(s), const(s.split))
    return GridKernel(str(s.name(atom)), isa, atom, arguments(s, sums=s.slices), s.threads, grid, tuple(body))


def warps(s: Schedule) -> list[Stmt]:
    """Where the part of this warp begins, in the tile of its block."""
    warp, across = s.tiles[1], s.block.n // s.tiles[1].n
    number = var("warp")
    return [
        Let("warp", var("thread") // LANES),
        Let("lane", var("thread") % LANES),
        Let("a_first", number // across * warp.m),
        Let("b_first", number % across * warp.n),
    ]


def multiply(work: Work, at: Index) -> tuple[Stmt, ...]:
    """Multiply the fragments of one step of k: those which begin `at` times as far as all of one operand."""
    left, right = (work.part(x) for x in work.names)
    i, j = var("i"), var("j")
    x, y = (Ptr(f"{p.side.name}_part", at * p.count + q * p.words) for p, q in ((left, i), (right, j)))
    mac = Mac(Ptr("acc", (i * right.fragments + j) * work.words), x, y)
    return _each("i", left.fragments, _each("j", right.fragments, (mac,)))


def load(a: Part, b: Part, at: Index, stage: Index, step: Index) -> tuple[Stmt, ...]:
    """Load the fragments of a step of k of a stage."""
    return tuple(s for p in (a, b) for s in p.load(Ptr(f"{p.side.name}_part", at * p.count), stage * p.side.size, step))


def _copied(work: Work, a: Part, b: Part) -> list[Stmt]:
    """The loop over k with asynchronous copies, and fragments that are loaded one step ahead."""
    s, step = work.s, var("step")
    steps, stages = s.block.k // work.atom.k, s.stages

    def begin(at: Index) -> tuple[Stmt, ...]:
        k, stage = var("k_0") + at * s.block.k, at % stages
        copies = (*a.side.copy(k, var("k_end"), stage), *b.side.copy(k, var("k_end"), stage))
        return (If(at.lt(var("steps")), copies), CopyCommit())

    ahead = [x for i in range(stages - 1) for x in begin(const(i))]
    first = load(a, b, const(0), const(0), const(0))
    inner: list[Stmt] = []
    for i in range(steps):
        more = const((i + 1) % 2)
        if i + 1 < steps:
            inner += load(a, b, more, var("stage"), const(i + 1))
        else:
            # All warps have loaded what this stage has, and what the next one holds has landed.
            inner += [CopyWait(stages - 2), Barrier()]
            inner.append(If((step + 1).lt(var("steps")), load(a, b, more, (step + 1) % stages, const(0))))
        inner += begin(step + (stages - 1)) if i == 0 else ()
        inner += multiply(work, const(i % 2))
    loop = For("step", const(0), var("steps"), const(1), (Let("stage", step % stages), *inner))
    return [*ahead, CopyWait(stages - 2), Barrier(), If(const(0).lt(var("steps")), first), loop]


def _fetched(work: Work, a: Part, b: Part) -> list[Stmt]:
    """The loop over k, tiles passing through registers: one is multiplied while the next is on its way."""
    s, step, end = work.s, var("step"), var("k_end")
    steps = s.block.k // work.atom.k

    def fetch(k: Index) -> tuple[Stmt, ...]:
        return (*a.side.fetch(k, end), *b.side.fetch(k, end))

    def put(stage: Index) -> tuple[Stmt, ...]:
        return (*a.side.put(stage), *b.side.put(stage))

    inside = (*load(a, b, const(0), var("stage"), var("unit")), *multiply(work, const(0)))
    more = (step + 1).lt(var("steps"))
    body = (
        If(more, fetch(var("k_0") + (step + 1) * s.block.k)),
        Let("stage", step % 2),
        *_each("unit", steps, inside),
        If(more, put(const(1) - var("stage"))),
        Barrier(),
    )
    return [*fetch(var("k_0")), *put(const(0)), Barrier(), For("step", const(0), var("steps"), const(1), body)]


def stored(work: Work) -> list[Stmt]:
    """Store the sums of this lane where they belong."""
    s, atom = work.s, work.atom
    left, right = (work.part(x) for x in work.names)
    cell = (1, 1 if s.swap else PAIR)
    storing = Staging(s, work.isa, atom, cell) if staging(s) else Storing(s, work.isa, atom, cell)
    after = storing.after() if isinstance(storing, Staging) else ()
    i, j, half, e = var("below"), var("beside"), var("half"), var("pair")
    halves = atom.m // HIGH
    down = left.first + i * atom.m + half * HIGH + var("lane") // 4
    across = right.first + j * HIGH + var("lane") % 4 * PAIR
    at = ((i * right.fragments + j) * halves + half) * PAIR
    if s.swap:
        # A lane's two sums are of neighbouring rows of C.
        column = (Let("column", var("column_0") + down), *storing.piece(at + e))
        columns = _each("below", left.fragments, _each("half", halves, column))
        row = (Let("row", var("row_0") + across + e), If(var("row").lt(bottom(s)), columns))
        return [*storing.before(), *_each("beside", right.fragments, _each("pair", PAIR, row)), *after]
    wide = storing.vector
    here = e * wide if wide < PAIR else const(0)
    piece: tuple[Stmt, ...] = (Let("column", var("column_0") + across + here), *storing.piece(at + here))
    piece = _each("pair", PAIR // wide, piece) if wide < PAIR else piece
    row = (Let("row", var("row_0") + down), If(var("row").lt(bottom(s)), _each("beside", right.fragments, piece)))
    return [*storing.before(), *_each("below", left.fragments, _each("half", halves, row)), *after]


def _each(name: str, count: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """A loop that is unrolled."""
    return (For(name, const(0), const(count), const(1), body, WHOLE),)
