"""Flash attention on tensor cores by mma, whose fragments are in the registers of a warp: from Turing on.

    for each item, each head, each tile of queries       <- blocks of warps
      for each tile of keys
        S = Q K^T                  fragments of Q from registers, of K from shared memory
        S becomes weights P        in registers; earlier sums are rescaled: online_softmax
        O += P V                   P is a fragment already, of 16 bits; of V from shared memory, transposed
      O over the sums of weights

A warp has 16 or 32 queries, and all keys. A lane's sums of rows l / 4 and eight further down, of two columns, have the
layout of a left operand's fragment: so P needs nothing but a conversion (Dao 2023). Tiles of K and V use
slots of shared memory cyclically, and are copied there while earlier ones are multiplied; all warps synchronize before
a slot is filled again. Sizes: `portmm.schedule.gpu_mma_attention`; shared memory: `attention_tiles`.

Past the last query, rows of Q are read again: their scores are unused. Past the last key that is seen, rows of
K and V are zeros: so a NaN in memory does not spread. Blocks of keys that no query of a block sees
are skipped, and only blocks that some query does not see entirely are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import lane_column, lane_row
from portmm.ir.grid_kernel import GridKernel
from portmm.ir.index import Ptr, const, minimum, var
from portmm.ir.nodes import For, If, Let, Mac, Move, Scratch
from portmm.ir.thread_nodes import WHOLE, Apply, Barrier, Clear, CopyCommit, CopyWait, Vector
from portmm.kernels.gpu.attention_blocks import AttentionBlocks
from portmm.kernels.gpu.attention_tiles import PER_VECTOR, SIZE, HeadTile, rows_of, shared
from portmm.kernels.gpu.fragments import of
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.online_softmax import PAIR, FragmentSoftmax
from portmm.schedule.gpu_mma_attention import MatrixTiling, pitch
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

UNIT = 16
"""Elements of a head, or keys, of one product: one atom, or two of half the size."""
WORDS = 4
"""Number of registers of a lane for 16 x 16 elements of 16 bits, and for 16 x 8 sums."""
STRIP = 8
"""Columns of one atom's sums."""
PACKED = {"f16": "pack_f16", "bf16": "pack_bf16"}


def build(form: Form, s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel for a kind of attention."""
    t = MatrixTiling(s)
    work = Work(form, t, isa, atom, FragmentSoftmax(form, t, isa, atom))
    body: list[Stmt] = [*work.memory(), *work.coordinates(), *work.reach(), *work.begin()]
    body += [For("key", var("first"), var("end"), const(t.keys), work.step()), *work.finish()]
    name = f"portmm_mma_attention_{form.dtype}_{t.d}_{t.dv}_{t.queries}x{t.keys}"
    return GridKernel(name, isa, atom, work.arguments(), t.threads, work.grid, tuple(body), occupancy=1)


@dataclass(frozen=True, slots=True)
class Work(AttentionBlocks):
    """Statements of one kernel.

    Attributes:
        softmax: the statements for scores.
    """

    t: MatrixTiling
    softmax: FragmentSoftmax

    @property
    def own_column(self) -> Index:
        """First column of a lane, of every strip of keys or of V."""
        return lane_column(self.softmax.sums, var("lane"))

    def tile(self, name: str) -> HeadTile:
        """Tile of an operand."""
        t, i = self.t, "qkvo".index(name)
        rows, width = t.queries if name in "qo" else t.keys, t.dv if name in "vo" else t.d
        none = const(0)  # of first rows: transfers say which
        return HeadTile(
            name, self.form.dtype, rows_of(name), t.vectors[i], rows, width, t.threads, 1, none, none
        )  # fmt: skip

    @property
    def slot(self) -> int:
        """Number of elements of a slot."""
        return max(self.tile("k").size, self.tile("v").size)

    def memory(self) -> tuple[Stmt, ...]:
        """Shared memory, and registers."""
        t, storage = self.t, self.form.dtype
        return (
            shared("q_tile", self.tile("q").size, storage),
            shared("slots", t.slots * self.slot, storage),
            Scratch("q_part", t.high * WORDS * (t.d // UNIT if t.q_in_registers else 1), "b32"),
            Scratch("part", WORDS, "b32"),
            Scratch("p_part", t.high * WORDS, "b32"),
            Scratch("s", t.high * t.strips * WORDS, "f32"),
            Scratch("o_sums", t.high * t.columns * WORDS, "f32"),
            Scratch("most", t.rows, "f32"),
            Scratch("sums", t.rows, "f32"),
            Scratch("bigs", t.rows, "f32"),
            Scratch("one", 1, "f32"),
            *(self.tile(x).registers() for x in "qkv"),
        )

    def lanes(self) -> tuple[Stmt, ...]:
        """Rows of a lane in the tile, and offsets of its part of fragments."""
        warp, left, right = var("warp") * (self.t.high * UNIT), of(self.atom.a_fragment), of(self.atom.b_fragment)
        return (
            Let("warp", var("thread") // self.t.warp),
            Let("lane", var("thread") % self.t.warp),
            Let("warp_row", warp),
            Let("first_row", var("warp_row") + lane_row(self.softmax.sums, var("lane"))),
            # Two fragments of a right operand, or of one of half the depth, are repeated along k first.
            *self.tile("q").lane(left, rows_first=False),
            *self.tile("k").lane(right.transposed, rows_first=False),
            *self.tile("v").lane(right, rows_first=True),
        )

    # -- copies --------------------------------------------------------------

    def queries(self) -> tuple[Stmt, ...]:
        """Copies of Q, started."""
        row = minimum(var("row_0") + var("line"), var("last"))
        return self.tile("q").tile("copy" if self.t.copies else "move", Ptr("q_tile"), self.query(row), const(1))

    def fill(self, how: str, name: str, key: Index, slot: Index) -> tuple[Stmt, ...]:
        """Transfer of the tile of K or V at a key, if it is in bounds, to a slot."""
        moved = self.tile(name).rows_from(how, Ptr("slots", slot * self.slot), key, var("end"))
        transfer = If(key.lt(var("end")), moved)
        return (transfer, CopyCommit()) if how == "copy" else (transfer,)

    def slot_of(self, half: int) -> Index:
        """Slot of the tile `half` half steps after K's of this step: tiles of K and V use slots cyclically."""
        slots = self.t.slots
        if slots == 2:
            return const(half % 2)
        return (var("turn_0") + half // 2) % (slots // 2) * 2 + half % 2

    def ahead(self, half: int, *work: Stmt) -> tuple[Stmt, ...]:
        """Prefetch of the tile `half` half steps after K's of this step, overlapped with some work.

        The slot's last tile has landed before, and all warps are done with it.
        """
        tile = ("kv"[half % 2], var("key") + half // 2 * self.t.keys, self.slot_of(half))
        if self.t.copies:
            return (*self.met(), *self.fill("copy", *tile), *work)
        return (*self.met(), *self.fill("fetch", *tile), *work, *self.fill("put", *tile))

    def met(self) -> tuple[Stmt, ...]:
        """Synchronization: the next tile has landed, and all warps are done with the one before."""
        return (CopyWait(self.t.slots - 2), Barrier()) if self.t.copies else (Barrier(),)

    def begin(self) -> tuple[Stmt, ...]:
        """Transfers of Q and the first tiles, started, and zeroed sums."""
        t = self.t
        stmts: list[Stmt] = [*self.tile("k").mover(), *self.tile("v").mover()]
        stmts += [If(var("first").lt(var("end")), self.queries())]
        how = "copy" if t.copies else "move"
        for half in range(t.slots - 1):
            stmts += self.fill(how, "kv"[half % 2], var("first") + half // 2 * t.keys, const(half))
        stmts += [Clear("o_sums", t.high * t.columns * WORDS), *self.softmax.begin()]
        if t.q_in_registers:
            loads = unrolled("step", t.d // UNIT, self.fragments_of_q(var("step") * t.high, var("step")))
            stmts += [*self.met(), If(var("first").lt(var("end")), (loads,))]
        return tuple(stmts)

    # -- a tile of keys ------------------------------------------------------

    def fragments_of_q(self, at: Index, step: Index) -> Stmt:
        """Loads of a warp's fragments of sixteen elements of its rows of Q."""
        r, tile = var("r"), self.tile("q")
        to = Ptr("q_part", (at + r) * WORDS)
        return unrolled("r", self.t.high, tile.matrices(to, Ptr("q_tile"), var("warp_row") + r * UNIT, step * 2))

    def step(self) -> tuple[Stmt, ...]:
        """Statements for one tile of keys."""
        t, slots = self.t, self.t.slots
        turn = (Let("turn_0", (var("key") - var("first")) // t.keys),) if slots > 2 else ()
        return (
            *turn,
            *self.ahead(slots - 1, Clear("s", t.high * t.strips * WORDS), self.scores()),
            Let("first_key", var("key") + self.own_column),
            *self.ahead(slots, *self.softmax.statements(), self.weighed()),
        )

    def scores(self) -> Stmt:
        """First product: S += Q K^T."""
        t, step, j = self.t, var("step"), var("j")
        tile = self.tile("k")
        load = tile.matrices(Ptr("part"), Ptr("slots", self.slot_of(0) * self.slot), j * UNIT, step * 2)
        left = step * (t.high * WORDS) if t.q_in_registers else const(0)
        product = self.product("s", t.strips, j, Ptr("q_part", left))
        before = () if t.q_in_registers else (self.fragments_of_q(const(0), step),)
        body = (*before, unrolled("j", t.keys // UNIT, load, product))
        unroll = WHOLE if t.q_in_registers else 4
        return For("step", const(0), const(t.d // UNIT), const(1), body, unroll)

    def product(self, sums: str, strips: int, j: Index, left: Ptr) -> Stmt:
        """Multiply-adds of 16 x 16 elements of all rows of a warp and 16 x 16 of the right operand, in `part`."""
        u, w, r = var("u"), var("w"), var("r")
        atoms = UNIT // self.atom.k
        at = ((r * strips + j * 2 + u) * WORDS,)
        mac = Mac(
            Ptr(sums, at[0]),
            left + (r * WORDS + w * (WORDS // atoms)),
            Ptr("part", u * 2 + w * (2 // atoms)),
        )
        return unrolled("u", 2, unrolled("w", atoms, unrolled("r", self.t.high, mac)))

    def weighed(self) -> Stmt:
        """Second product: O += P V."""
        t, step, j = self.t, var("step"), var("j")
        tile = self.tile("v")
        load = tile.matrices(Ptr("part"), Ptr("slots", self.slot_of(1) * self.slot), step * UNIT, j * 2, trans=True)
        return unrolled(
            "step", t.keys // UNIT, self.packed(step),
            unrolled("j", t.dv // UNIT, load, self.product("o_sums", t.columns, j, Ptr("p_part"))),
        )  # fmt: skip

    def packed(self, step: Index, to: Index | int = 0) -> Stmt:
        """Conversion of the weights of sixteen keys to a fragment of the left operand, the one numbered `to`."""
        r, u, h = var("r"), var("u"), var("h")
        src = Ptr("s", (((r * self.t.strips) + step * 2 + u) * 2 + h) * PAIR)
        word = Apply(Ptr("p_part", (to + r) * WORDS + u * 2 + h), PACKED[self.form.dtype], (src, src + 1))
        return unrolled("r", self.t.high, unrolled("u", 2, unrolled("h", 2, word)))

    # -- results -------------------------------------------------------------

    @property
    def staged(self) -> bool:
        """Whether rows of the result are staged in Q's shared memory, to be stored 16 bytes at once."""
        t = self.t
        fits = pitch(t.dv) <= pitch(t.d) and self.form.to in PACKED
        return fits and t.vectors[3] == PER_VECTOR and not t.runs

    def finish(self) -> tuple[Stmt, ...]:
        """Epilogue: results of the sums, stored."""
        rows, there = self.softmax.row(), var("row").lt(self.height)
        stmts: list[Stmt] = [Scratch("values", PAIR, "f32"), Scratch("words", 1, "b32"), self.softmax.totals()]
        if self.staged:
            one: tuple[Stmt, ...] = (*self.softmax.ends(there), self.put(rows))
            stmts += self.emptied()
            after: tuple[Stmt, ...] = (self.joined(), self.whole())
        else:
            one = (If(there, (*self.result(), *self.softmax.ends(const(1)), self.stored())),)
            after = ()
        return (*stmts, unrolled("i", self.t.rows, Let("row", var("row_0") + rows), *one), *after)

    def emptied(self) -> tuple[Stmt, ...]:
        """Wait until Q's shared memory may hold results: here all warps have passed the last tile's barrier."""
        return ()

    def joined(self) -> Stmt:
        """Barrier of the threads whose rows are staged together."""
        return Barrier()

    def pair(self, *, packed: bool) -> tuple[Stmt, ...]:
        """Results of a row's two columns of strip c, in their stored type."""
        e = var("e")
        values = unrolled("e", PAIR, *self.softmax.divided(self.softmax.sum(var("c"), e), Ptr("values", e)))
        if not packed:
            return (values,)
        return (values, Apply(Ptr("words"), PACKED[self.form.to], (Ptr("values"), Ptr("values", const(1)))))

    def stored(self) -> Stmt:
        """Stores of a lane's columns of a row of O: two of every eight."""
        t, e = self.t, var("e")
        kind = "f32" if t.runs else self.form.to
        step = const(1) if t.runs else self.along("o")
        to = Ptr("to", var("column") * step)
        apart = not t.runs and t.vectors[3] == 1
        packed = kind != "f32" and not apart
        if apart:
            store: Stmt = unrolled("e", PAIR, Move(to + e * step, Ptr("values", e)))
        else:
            store = Vector(to, Ptr("words" if packed else "values"), PAIR * BY_NAME[kind].bytes)
        column = Let("column", var("c") * STRIP + self.own_column)
        return unrolled("c", t.columns, column, *self.pair(packed=packed), store)

    def put(self, row: Index) -> Stmt:
        """Stores of a lane's columns of a row of O to shared memory."""
        t, tile = self.t, self.tile("o")
        at = tile.at(row, var("c"), self.own_column)
        store = Vector(Ptr("q_tile", at), Ptr("words"), PAIR * SIZE)
        return unrolled("c", t.columns, *self.pair(packed=True), store)

    def whole(self) -> Stmt:
        """Transfer of the rows of a warp from shared to global memory."""
        t, tile, vector, line = self.t, self.tile("o"), var("piece"), var("line")
        column = vector % t.columns
        src = Ptr("q_tile", tile.at(line, column))
        store = If(
            var("row").lt(self.height),
            (*self.result(), Vector(Ptr("to", column * PER_VECTOR), src, PER_VECTOR * SIZE)),
        )
        return unrolled(
            "turn", t.high * t.columns * UNIT // t.warp,
            Let("piece", var("lane") + var("turn") * t.warp),
            Let("line", var("warp_row") + vector // t.columns),
            Let("row", var("row_0") + line),
            store,
        )  # fmt: skip
