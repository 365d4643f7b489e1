"""Flash attention by SIMT threads: the matrix of scores stays within a block.

    for each item, each head, each tile of queries       <- blocks of threads
      for each tile of keys
        S = Q K^T                  registers, chunks of the head's elements through shared memory
        S becomes weights, in shared memory; earlier sums are rescaled          kernels/gpu/online_softmax.py
        O += P V                   registers, chunks of the keys through shared memory
      O over the sums of weights

A chunk is in registers while the one before is multiplied. Threads of a row of a block read one row of
Q, or of P, at the same time, and neighbouring rows of K and columns of V; each load is four words along
a head, or along keys, so that nothing is transposed. Sizes: `portmm.schedule.gpu_attention`.

Past the last query and the last key that are seen, rows of Q and K are read again: their scores
are unused. Rows of V there, and elements past the end of a head, are zeros: so a NaN
in memory does not spread. Blocks of keys that no query of a block sees are skipped.

Where there are few queries, those of all heads that share keys form one tile, blocks are distributed over runs of
keys along the grid's second axis, and `joined` combines their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import For, If, Let, LetPtr, Mac, Move, Scratch
from portmm.ir.thread_nodes import WHOLE, Barrier, Clear, Shared, Vector
from portmm.kernels.gpu.attention_blocks import AttentionBlocks, rows_of
from portmm.kernels.gpu.loops import or_zeros, pieces, unrolled
from portmm.kernels.gpu.online_softmax import THREADS, Softmax, joined
from portmm.schedule.gpu_attention import AttentionTiles, Tiling
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

LANES, WORD = 4, 4
LARGE = 256
"""Threads of a block from which a processor must have registers for two: 128 each, of NVIDIA's 65536."""


def build(form: Form, s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel for a kind of attention."""
    t = Tiling(s)
    work = Work(form, t, isa, atom, Softmax(form, t, isa, atom))
    body: list[Stmt] = [*work.memory(), *work.coordinates(), *work.reach(), *work.begin()]
    body += [For("key", var("first"), var("end"), const(t.keys), work.step()), *work.finish()]
    name = f"portmm_attention_{form.dtype}_{t.d}_{t.dv}_{t.queries}x{t.keys}"
    occupancy = 2 if t.threads >= LARGE else 1
    return GridKernel(name, isa, atom, work.arguments(), t.threads, work.grid, tuple(body), occupancy=occupancy)


def join(form: Form, s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel that combines runs of keys."""
    t = AttentionTiles(s)
    params, body = joined(form, t, isa, atom)
    to = (*rows_of("o", form.to, t.loose, readonly=False), *((Argument("lse", "pointer", "f32"),) if form.lse else ()))
    grid = (var("items") * var("heads") * var("m"), const(1))
    return GridKernel(f"portmm_attention_runs_{form.to}_{t.dv}", isa, atom, (*params, *to), THREADS, grid, body)


@dataclass(frozen=True, slots=True)
class Work(AttentionBlocks):
    """Statements of one kernel.

    Attributes:
        softmax: the statements for scores.
    """

    t: Tiling
    softmax: Softmax

    def memory(self) -> tuple[Stmt, ...]:
        """Shared memory, and registers."""
        t, storage = self.t, self.form.dtype
        return (
            Shared("q_tile", t.queries * t.q_pitch, "f32"),
            Shared("chunk", t.buffer, "f32"),
            Shared("weights", t.queries * t.p_pitch, "f32"),
            Shared("part", t.queries * t.across, "f32"),
            Scratch("next", max(t.waiting, t.vectors[0]), storage),
            Scratch("words", LANES, "f32"),
            Scratch("s", t.rows * t.columns, "f32"),
            Scratch("o_sums", t.rows * t.sums, "f32"),
            Scratch("left", t.rows * LANES, "f32"),
            Scratch("right", max(LANES, t.sums), "f32"),
            Scratch("most", t.rows, "f32"),
            Scratch("sums", t.rows, "f32"),
        )

    def lanes(self) -> tuple[Stmt, ...]:
        """Coordinates of a thread: its queries and keys of a tile."""
        return (
            Let("down", var("thread") // self.t.across),
            Let("across", var("thread") % self.t.across),
        )

    # -- chunks, from global to shared memory --------------------------------

    def vectors_of(self, rows: int, width: int, vector: int, *body: Stmt, unroll: int = WHOLE) -> Stmt:
        """Loop over a thread's vectors of a chunk."""
        across, number = width // vector, var("piece")
        place = (Let("line", number // across), Let("column", number % across * vector))
        return pieces("piece", rows * across, self.t.threads, *place, *body, unroll=unroll)

    def load(self, to: Ptr, vector: int, source: Ptr, there: Index) -> tuple[Stmt, ...]:
        """Load of a vector to registers, zeros if it is out of bounds."""
        storage = self.form.dtype
        size, here = BY_NAME[storage].bytes, LetPtr("from", source, storage, readonly=True)
        if there != const(1):
            return (here, or_zeros(there, to, Ptr("from"), vector, size))
        return (here, Move(to, Ptr("from")) if vector == 1 else Vector(to, Ptr("from"), vector * size))

    def store(self, to: Ptr, vector: int, src: Ptr) -> tuple[Stmt, ...]:
        """Store of a vector to shared memory."""
        words = min(vector, LANES)
        body: list[Stmt] = []
        for i in range(0, vector, words):
            here = src + i
            if self.form.dtype != "f32" and words > 1:
                body.append(unrolled("e", words, Move(Ptr("words", var("e")), here + var("e"))))
                here = Ptr("words")
            body.append(Move(to + i, here) if words == 1 else Vector(to + i, here, words * WORD))
        return tuple(body)

    def put(self, rows: int, width: int, vector: int, step: int) -> Stmt:
        """Stores of the vectors in registers to shared memory, with rows `step` words apart."""
        to, src = Ptr("chunk", var("line") * step + var("column")), self.waits(vector)
        return self.vectors_of(rows, width, vector, *self.store(to, vector, src))

    def begin(self) -> tuple[Stmt, ...]:
        """Transfer of Q to shared memory and of the first chunk of K to registers, and zeroed sums."""
        t, line, column = self.t, var("line"), var("column")
        vector, width = t.vectors[0], t.depth * t.chunks
        row = minimum(var("row_0") + line, var("last"))
        there = const(1) if width == t.d else column.lt(t.d)
        source = Ptr("q_item", self.query(row) + column * self.along("q"))
        moved = (
            *self.load(Ptr("next"), vector, source, there),
            *self.store(Ptr("q_tile", line * t.q_pitch + column), vector, Ptr("next")),
        )
        return (
            self.vectors_of(t.queries, width, vector, *moved, unroll=1),
            Clear("o_sums", t.rows * t.sums),
            *self.softmax.begin(),
            If(var("first").lt(var("end")), (self.keys(var("first"), const(0)),)),
        )

    def keys(self, key: Index, chunk: Index) -> Stmt:
        """Loads of a chunk of K to registers."""
        t, vector = self.t, self.t.vectors[1]
        row, at = minimum(key + var("line"), var("end") - 1), chunk * t.depth + var("column")
        there = const(1) if t.depth * t.chunks == t.d else at.lt(t.d)
        source = Ptr("k_item", row * var("k_n") + at * self.along("k"))
        return self.vectors_of(t.keys, t.depth, vector, *self.load(self.waits(vector), vector, source, there))

    def values(self, chunk: Index) -> Stmt:
        """Loads of a chunk of V to registers."""
        t, vector = self.t, self.t.vectors[2]
        row = var("key") + chunk * t.values + var("line")
        there = row.lt(var("end"))
        there = there if t.v_pitch == t.dv else there * var("column").lt(t.dv)
        source = Ptr("v_item", row * var("v_n") + var("column") * self.along("v"))
        return self.vectors_of(t.values, t.v_pitch, vector, *self.load(self.waits(vector), vector, source, there))

    @staticmethod
    def waits(vector: int) -> Ptr:
        """Registers of a thread's vectors in flight."""
        return Ptr("next", var("turn") * vector)

    # -- a tile of keys ------------------------------------------------------

    def step(self) -> tuple[Stmt, ...]:
        """Statements for one tile of keys."""
        t, chunk, after = self.t, var("chunk_of"), var("key") + self.t.keys
        more = If((chunk + 1).lt(t.chunks), (self.keys(var("key"), chunk + 1),), (self.values(const(0)),))
        scores = (
            Barrier(),
            self.put(t.keys, t.depth, t.vectors[1], t.k_pitch),
            Barrier(),
            more if t.chunks > 1 else self.values(const(0)),
            self.scores(chunk),
        )
        parts = t.keys // t.values
        further = If(after.lt(var("end")), (self.keys(after, const(0)),))
        rest = If((chunk + 1).lt(parts), (self.values(chunk + 1),), (further,)) if parts > 1 else further
        sums = (
            Barrier(),
            self.put(t.values, t.v_pitch, t.vectors[2], t.v_pitch),
            Barrier(),
            rest,
            self.weighed(chunk),
        )
        return (
            Clear("s", t.rows * t.columns),
            For("chunk_of", const(0), const(t.chunks), const(1), scores),
            *self.softmax.statements(),
            For("chunk_of", const(0), const(parts), const(1), sums),
        )

    def scores(self, chunk: Index) -> Stmt:
        """First product, S += Q K^T, of a chunk of elements."""
        t, u, i, j = self.t, var("u"), var("i"), var("j")
        row, key = var("down") + i * t.down, var("across") + j * t.across
        mac = Mac(Ptr("s", i * t.columns + j), Ptr("left", i * LANES + var("e")), Ptr("right", var("e")))
        q = Ptr("q_tile", row * t.q_pitch + chunk * t.depth + u * LANES)
        return For(
            "u", const(0), const(t.depth // LANES), const(1),
            (
                unrolled("i", t.rows, Vector(Ptr("left", i * LANES), q, LANES * WORD)),
                unrolled(
                    "j", t.columns,
                    Vector(Ptr("right"), Ptr("chunk", key * t.k_pitch + u * LANES), LANES * WORD),
                    unrolled("e", LANES, unrolled("i", t.rows, mac)),
                ),
            ),
        )  # fmt: skip

    def weighed(self, chunk: Index) -> Stmt:
        """Second product, O += P V, of a chunk of keys."""
        t, u, i, e, g = self.t, var("u"), var("i"), var("e"), var("g")
        row = var("down") + i * t.down
        p = Ptr("weights", row * t.p_pitch + chunk * t.values + u * LANES)
        v = Ptr("chunk", (u * LANES + e) * t.v_pitch + (var("across") + g * t.across) * t.cell)
        mac = Mac(Ptr("o_sums", i * t.sums + var("c")), Ptr("left", i * LANES + e), Ptr("right", var("c")))
        return For(
            "u", const(0), const(t.values // LANES), const(1),
            (
                unrolled("i", t.rows, Vector(Ptr("left", i * LANES), p, LANES * WORD)),
                unrolled(
                    "e", LANES,
                    unrolled("g", t.sums // t.cell, Vector(Ptr("right", g * t.cell), v, t.cell * WORD)),
                    unrolled("i", t.rows, unrolled("c", t.sums, mac)),
                ),
            ),
        )  # fmt: skip

    # -- results -------------------------------------------------------------

    def finish(self) -> tuple[Stmt, ...]:
        """Epilogue: results of the sums, stored."""
        t, i = self.t, var("i")
        row = var("row_0") + var("down") + i * t.down
        inside = If(var("row").lt(self.height), (*self.result(), *self.softmax.ends(), self.stored()))
        out = Scratch("o_out", t.vectors[3], "f32" if t.runs else self.form.to)
        return (out, *self.softmax.totals(), unrolled("i", t.rows, Let("row", row), inside))

    def stored(self) -> Stmt:
        """Stores of a thread's columns of a row of O."""
        t, g, h, e = self.t, var("g"), var("h"), var("e")
        vector = t.vectors[3]
        place = var("i") * t.sums + g * t.cell + h * vector + e
        column = (var("across") + g * t.across) * t.cell + h * vector
        to = Ptr("to", var("column") * (const(1) if t.runs else self.along("o")))
        size = BY_NAME["f32" if t.runs else self.form.to].bytes
        store = Move(to, Ptr("o_out")) if vector == 1 else Vector(to, Ptr("o_out"), vector * size)
        body = (unrolled("e", vector, *self.softmax.divided(Ptr("o_sums", place), Ptr("o_out", e))), store)
        inside = body if t.v_pitch == t.dv else (If(var("column").lt(t.dv), body),)
        return unrolled("g", t.sums // t.cell, unrolled("h", t.cell // vector, Let("column", column), *inside))
