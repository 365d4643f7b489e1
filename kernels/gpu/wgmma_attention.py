"""Flash attention on Hopper's tensor cores: TMA copies, wgmma, and warp specialization.

    persistent blocks compute one tile of queries after the other: attention_queue
      producer warpgroup, one thread:              consumer warpgroups, two or three, 64 queries each:
        for each tile of keys                        S = Q K[0]^T, and its weights P
          wait until a stage is empty                for each further tile of keys
          start the copy of K, then of V               start S = Q K^T, then O += P V of the tile before
          after the first K, start those of Q          wait for S; its weights and the rescaling of earlier sums
                                                       wait for O, and rescale it; P becomes fragments
                                                     O += P V of the last tile; O over the sums of weights, stored

So scores of a tile become weights while the product of the tile before is computed (Shah et al., "FlashAttention-3",
2024). With `pingpong` barriers keep the warpgroups apart: one starts products when the one before has started its own,
so that one has scores while others multiply. P is a left operand in registers, in the layout that sums have.

A tile in shared memory is planes of 64 elements of a head, each of lines of 128 bytes, one for each row, that TMA
swizzles. Rows past the last query or key are zeros. Keys that no query of a block sees may lie in its last tile:
their scores are masked, and their rows of V are made zeros, so that a NaN in memory does not spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.fragment_index import lane_row
from portmm.ir.grid_kernel import Argument, GridKernel, MapOf
from portmm.ir.index import Ptr, const, maximum, minimum, var
from portmm.ir.nodes import For, If, Let, Scratch
from portmm.ir.thread_nodes import Barrier, Clear, Do, Get, Shared, Vector
from portmm.kernels.gpu.attention_blocks import rows_of
from portmm.kernels.gpu.attention_queue import TileQueue
from portmm.kernels.gpu.loops import unrolled
from portmm.kernels.gpu.mma_attention import UNIT, WORDS
from portmm.kernels.gpu.online_softmax import FragmentSoftmax
from portmm.kernels.gpu.parameters import integers, longs, of_fused
from portmm.schedule.gpu_mma_attention import SIZE
from portmm.schedule.gpu_wgmma import LINE, STRIP, SWIZZLED
from portmm.schedule.gpu_wgmma_attention import WarpgroupTiling
from portmm.schedule.schedule import WARPGROUP

if TYPE_CHECKING:
    from portmm.ir.attention_program import Form
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

PLANE = LINE // SIZE
"""Elements of a line."""
VECTOR = 16
"""Unit of descriptors, in bytes."""
LINES = 8
"""Lines that are swizzled together."""
ORDER, ALL_GROUPS = 2, 5
"""Named barriers: of the turns of up to three warpgroups, and of all consumers."""


def build(form: Form, s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel for a kind of attention."""
    t = WarpgroupTiling(s)
    work = Work(form, t, isa, atom, FragmentSoftmax(form, t, isa, atom))
    down, up = t.budgets
    producer = (Do(f"registers_down_{down}"), If(var("thread").eq(work.consumers), work.producer()))
    consumer = (Do(f"registers_up_{up}"), *work.consumer())
    body = (
        *work.shared(), *work.threads(), *work.barriers(), If(var("warpgroup").eq(t.groups), producer, consumer),
    )  # fmt: skip
    name = f"portmm_wgmma_attention_{form.dtype}_{t.d}_{t.queries}x{t.keys}"
    return GridKernel(name, isa, atom, work.arguments(), t.threads, work.grid, body, occupancy=1)


@dataclass(frozen=True, slots=True)
class Work(TileQueue):
    """Statements of one kernel."""

    # -- operands ------------------------------------------------------------

    def arguments(self) -> tuple[Argument, ...]:
        """Parameters of the kernel: Q, K and V as tensor maps."""
        form, t = self.form, self.t
        counters = [Argument("counters", "pointer", "s32")] if self.counted else []
        params = [*integers("m", "n", "keys", "heads", "group", "window", "offset", "items"), *map(self.map_of, "qkv")]
        params += longs(*(f"{x}_{axis}" for x in "qkv" for axis in "bh"))
        params += rows_of("o", form.to, t.loose, readonly=False)
        params += [Argument("lse", "pointer", "f32")] if form.lse else []
        optional = (("lengths", form.lengths), ("starts", form.starts))
        params += [Argument(name, "pointer", "s32", readonly=True) for name, there in optional if there]
        return (*params, *counters, *of_fused(form.score))

    def map_of(self, name: str) -> Argument:
        """Tensor map of an operand: elements, rows, heads, items. Heads, or items, of stride 0 are one."""
        t = self.t
        rows, box, heads = ("m", STRIP, var("heads")) if name == "q" else ("keys", t.keys, var("heads") // var("group"))
        steps = [var(f"{name}_{'m' if name == 'q' else 'n'}"), var(f"{name}_h"), var(f"{name}_b")]
        ends = [maximum(x * const(0).lt(step), 1) for x, step in zip((heads, var("items")), steps[1:], strict=True)]
        of = MapOf(name, self.form.dtype, (const(t.d), var(rows), *ends), tuple(steps), (PLANE, box, 1, 1), LINE)
        return Argument(f"{name}_map", "map", map=of)

    def items(self) -> tuple[Stmt, ...]:
        """Coordinates of a block's head in the maps of Q and of K and V."""
        own = {"q": var("head"), "k": var("other"), "v": var("other")}
        return tuple(
            Let(f"{x}_{name}", value * const(0).lt(var(f"{x}_{axis}")))
            for x in "qkv"
            for name, axis, value in (("head", "h", own[x]), ("item", "b", var("item")))
        )

    def shared(self) -> tuple[Stmt, ...]:
        """Shared memory."""
        t, storage = self.t, self.form.dtype
        tiles = (("q_tile", t.queries), ("k_tile", t.slots * t.keys), ("v_tile", t.slots * t.keys))
        barriers = ("k_full", "k_empty", "v_full", "v_empty")
        return (
            *(Shared(name, rows * t.d, storage, SWIZZLED) for name, rows in tiles),
            *(Shared(name, t.groups, "b64", 8) for name in ("q_full", "q_empty")),
            *(Shared(name, t.slots, "b64", 8) for name in barriers),
            *((Shared("given", t.groups, "s32", 8),) if self.counted else ()),
        )

    def barriers(self) -> tuple[Stmt, ...]:
        """Initialization of barriers."""
        t, stage, own = self.t, var("stage"), WARPGROUP // self.t.warp
        each = [
            Do("mbarrier_init", (Ptr(f"{x}_{name}", stage), const(count)))
            for x in "kv"
            for name, count in (("full", 1), ("empty", t.groups * own))
        ]
        queries = [
            Do("mbarrier_init", (Ptr(f"q_{name}", var("strip")), const(count)))
            for name, count in (("full", 1), ("empty", WARPGROUP))
        ]
        first = (
            *(Do("tma_prefetch", (Ptr(f"{x}_map"),)) for x in "qkv"),
            For("strip", const(0), const(t.groups), const(1), tuple(queries)),
            For("stage", const(0), const(t.slots), const(1), tuple(each)),
            Do("mbarrier_init_fence"),
        )
        return (If(var("thread").eq(0), first), Barrier())

    def threads(self) -> tuple[Stmt, ...]:
        """Warpgroup, warp and lane of a thread, and its rows in the tile."""
        return (
            # A shuffle tells the compiler that it is the same in all lanes of a warp.
            Get("warpgroup", "shuffle_idx_s32", (var("thread") // WARPGROUP, const(0))),
            Let("lane", var("thread") % self.t.warp),
            Let("warp_row", var("thread") // self.t.warp * UNIT),
            Let("first_row", var("warp_row") + lane_row(self.softmax.sums, var("lane"))),
        )

    # -- the producer --------------------------------------------------------

    @property
    def planes(self) -> int:
        """Planes of a tile."""
        return self.t.d // PLANE

    def copies(self, name: str, to: Index, lines: int, row: Index, full: Ptr) -> Stmt:
        """Copies of the planes of so many rows, from a row of the operand on, started."""
        at = (var("plane") * PLANE, row, var(f"{name}_head"), var(f"{name}_item"))
        box = Ptr(f"{name}_tile", to + var("plane") * (lines * PLANE))
        return unrolled("plane", self.planes, Do("tma_load_4d", (box, Ptr(f"{name}_map"), full, *at)))

    def turn(self) -> tuple[Stmt, ...]:
        """Number of a tile of keys, of all that the block has multiplied, and its stage."""
        turn = var("done") + (var("key") - var("first")) // self.t.keys
        return (Let("turn", turn), Let("stage", var("turn") % self.t.slots))

    # -- the producer --------------------------------------------------------

    def producer(self) -> tuple[Stmt, ...]:
        """Statements of the thread that starts copies."""
        t, strip = self.t, var("strip")
        full = Ptr("q_full", strip)
        begin = unrolled(
            "strip", t.groups,
            *self.handed_over(),
            Do("mbarrier_expect", (full, const(STRIP * t.d * SIZE))),
            self.copies("q", strip * (STRIP * t.d), STRIP, var("row_0") + strip * STRIP, full),
        )  # fmt: skip
        # The first K is wanted first, and has room before Q.
        k, v = self.copied("k"), self.copied("v")
        loop = For(
            "key", var("first"), var("end"), const(t.keys),
            (*self.turn(), *k, If(var("key").eq(var("first")), (begin,)), *v),
        )  # fmt: skip
        return self.each(self.drawn(), (If(var("first").lt(var("end")), (loop,), (begin,)),))

    def copied(self, x: str) -> tuple[Stmt, ...]:
        """Copy of a tile of K or V, started when its stage is empty."""
        t, stage = self.t, var("stage")
        full = Ptr(f"{x}_full", stage)
        return (
            # A barrier's first phase counts as preceded by one that is complete.
            Do("mbarrier_wait", (Ptr(f"{x}_empty", stage), (var("turn") // t.slots + 1) % 2)),
            Do("mbarrier_expect", (full, const(t.keys * t.d * SIZE))),
            self.copies(x, stage * (t.keys * t.d), t.keys, var("key"), full),
        )

    # -- consumers -----------------------------------------------------------

    def registers(self) -> tuple[Stmt, ...]:
        """Registers of a consumer: scores, weights as fragments, sums, and numbers of rows."""
        t = self.t
        return (
            Scratch("s", t.strips * WORDS, "f32"),
            Scratch("p_part", t.keys // UNIT * WORDS, "b32"),
            Scratch("o_sums", t.columns * WORDS, "f32"),
            *(Scratch(name, t.rows, "f32") for name in ("most", "sums", "bigs", "factors")),
            Scratch("one", 1, "f32"),
        )

    def matrices(self) -> tuple[Stmt, ...]:
        """Descriptors: Q of a warpgroup and K along heads, V with columns side by side."""
        t, stride = self.t, const(LINES * LINE)
        along = const(VECTOR), stride
        own = Ptr("q_tile", var("warpgroup") * (STRIP * t.d))
        return (
            Get("q_matrix", "matrix_descriptor", (own, *along), "long"),
            Get("k_matrix", "matrix_descriptor", (Ptr("k_tile"), *along), "long"),
            Get("v_matrix", "matrix_descriptor", (Ptr("v_tile"), const(t.keys * LINE), stride), "long"),
        )

    def consumer(self) -> tuple[Stmt, ...]:
        """Statements of the warpgroups that multiply."""
        t = self.t
        tile = (
            Clear("o_sums", t.columns * WORDS),
            *self.softmax.begin(),
            *(() if self.counted else self.landed_q()),
            If(var("first").lt(var("end")), self.multiplied(), (self.unused(),)),
            *self.finish(),
        )
        return (*self.registers(), *self.matrices(), *self.each(self.taken(), tile))

    def multiplied(self) -> tuple[Stmt, ...]:
        """Products of a tile of queries with all tiles of keys."""
        t, both, ordered = self.t, const(2 * WARPGROUP), self.t.s.parallel.pingpong
        # The last warpgroup lets the first begin a tile that follows; its last arrival would be one too many.
        follows, final = (var("first") + t.keys).lt(var("end")), var("warpgroup").eq(t.groups - 1)
        opened = If(final * follows, (Do("block_barrier_arrive", (const(ORDER), both)),))
        again = var("warpgroup").lt(t.groups - 1) + (var("key") + t.keys).lt(var("end"))
        mine = Do("block_barrier_sync", (var("warpgroup") + ORDER, both))
        next_one = (var("warpgroup") + 1) * (1 - final) + ORDER
        theirs = If(const(0).lt(again), (Do("block_barrier_arrive", (next_one, both)),))
        begun = (
            *self.scores_begun(var("stage")),
            self.landed("v", var("turn") - 1),
            *self.sums_begun((var("turn") - 1) % t.slots),
        )
        step = (
            *self.turn(),
            self.landed("k", var("turn")),
            *((mine, *begun, theirs) if ordered else begun),
            *self.done("wgmma_wait_1", "s", t.keys),
            self.released("k", var("stage")),
            *self.weights(),
            *self.done("wgmma_wait_0", "o_sums", t.dv),
            self.released("v", (var("turn") - 1) % t.slots),
            self.softmax.rescaled(),
            self.fragments(),
        )
        stage = var("done") % t.slots
        first = (
            Let("key", var("first")),
            self.landed("k", var("done")),
            *self.scores_begun(stage),
            *self.done("wgmma_wait_0", "s", t.keys),
            self.released("k", stage),
            *self.weights(),
            self.fragments(),
        )
        loop = For("key", var("first") + t.keys, var("end"), const(t.keys), step)
        return (*((opened,) if ordered else ()), *first, loop, self.unused(), *self.last())

    def last(self) -> tuple[Stmt, ...]:
        """Product of the last tile's weights and V, whose rows past the end are made zeros."""
        t = self.t
        local, turn = (var("end") - 1 - var("first")) // t.keys, var("done") + var("local")
        stage, line = var("final") % t.slots, var("line")
        row, vectors = line // (PLANE * SIZE // VECTOR), PLANE * SIZE // VECTOR
        # Threads of both warpgroups store vectors of lines of each plane.
        at = stage * (t.keys * t.d) + var("plane") * (t.keys * PLANE) + row * PLANE + line % vectors * (VECTOR // SIZE)
        zero = unrolled("plane", self.planes, Vector(Ptr("v_tile", at), Ptr("zeros"), VECTOR))
        begin, count = (var("end") - var("first") - var("local") * t.keys) * vectors, t.keys * vectors
        own = begin + var("thread")
        cleaned = (
            Scratch("zeros", VECTOR // 4, "b32"),
            Clear("zeros", VECTOR // 4),
            For("line", own, const(count), const(self.consumers), (zero,)),
            Do("fence_async_shared"),
            Do("block_barrier_sync", (const(ALL_GROUPS), const(self.consumers))),
        )
        past = minimum(var("keys"), var("first") + (var("local") + 1) * t.keys)
        return (
            Let("local", local),
            Let("final", turn),
            self.landed("v", var("final")),
            If(var("end").lt(past), cleaned),
            *self.sums_begun(stage),
            *self.done("wgmma_wait_0", "o_sums", t.dv),
            self.released("v", stage),
        )

    def landed(self, name: str, turn: Index) -> Stmt:
        """Wait for a tile of K or V."""
        return Do("mbarrier_wait", (Ptr(f"{name}_full", turn % self.t.slots), turn // self.t.slots % 2))

    def released(self, name: str, stage: Index) -> Stmt:
        """Arrival of this warp at the `empty` barrier of a stage."""
        return If(var("lane").eq(0), (Do("mbarrier_arrive", (Ptr(f"{name}_empty", stage),)),))

    @staticmethod
    def done(wait: str, sums: str, columns: int) -> tuple[Stmt, ...]:
        """Wait for products: their sums may be read from here on."""
        return (Do(wait), Do(f"wgmma_sums_{columns}_f32", (Ptr(sums),)))

    def scores_begun(self, stage: Index) -> tuple[Stmt, ...]:
        """First product, started: S = Q K^T."""
        t, step, units = self.t, var("step"), PLANE // UNIT
        inside = step % units * (UNIT * SIZE // VECTOR)
        q = var("q_matrix") + step // units * (STRIP * LINE // VECTOR) + inside
        k = (
            var("k_matrix")
            + stage * (t.keys * t.d * SIZE // VECTOR)
            + step // units * (t.keys * LINE // VECTOR)
            + inside
        )
        name = f"wgmma_m64n{t.keys}k16_{self.form.dtype}_kk"
        call = Do(name, (Ptr("s"), q, k, const(0).lt(step)))
        return (Do("wgmma_fence"), unrolled("step", t.d // UNIT, call), Do("wgmma_commit"))

    def sums_begun(self, stage: Index) -> tuple[Stmt, ...]:
        """Second product, started: O += P V."""
        t, step = self.t, var("step")
        v = var("v_matrix") + stage * (t.keys * t.d * SIZE // VECTOR) + step * (UNIT * LINE // VECTOR)
        name = f"wgmma_rs_m64n{t.dv}k16_{self.form.dtype}_n"
        call = Do(name, (Ptr("o_sums"), Ptr("p_part", step * WORDS), v, const(1)))
        return (Do("wgmma_fence"), unrolled("step", t.keys // UNIT, call), Do("wgmma_commit"))

    def weights(self) -> tuple[Stmt, ...]:
        """Weights of the scores of a tile; earlier sums are rescaled later."""
        at = self.softmax.at
        names = dict(at.names)  # of what is the same for all tiles
        stmts = (Let("first_key", var("key") + self.own_column), *self.softmax.statements(later=True))
        at.names = names
        return stmts

    def fragments(self) -> Stmt:
        """Conversion of a tile's weights to fragments of the left operand."""
        return unrolled("step", self.t.keys // UNIT, self.packed(var("step"), var("step")))

    @property
    def staged(self) -> bool:
        """Lanes store their columns of O: the shared memory of Q has that of the next tile by then."""
        return False
