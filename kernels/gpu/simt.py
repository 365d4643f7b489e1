"""SIMT GEMM: each thread has a tile of C in registers, operands are in shared memory.

    for each tile BM x BN of C            <- blocks of threads (times slices of k)
      for each BK of k                    <- for floats, nested in a loop over runs of k
        shared <- A[BM, BK], B[BK, BN]    (the next tiles, while these are multiplied)
        for k of BK
          registers[MR, NR] += A[MR] B[NR]
      C <- registers

A thread's rows are groups of `cell[0]` neighbours that are BM / (MR / cell[0]) apart, and
its columns likewise: a warp then reads neighbouring words of shared memory, four at once.
Blocks are numbered so that those which run at the same time cover a nearly square part of C
and share operands in L2 (`block_tile`). Where k is split, the last block of a tile adds
the sums of the others (`split_k_fixup`), or each slice stores its sums in scratch, in rows of n, and
`split_k_reduction` adds them: the order of summation, and the result, are always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import For, If, Let, LetPtr, Mac, Read, Scratch
from portmm.ir.thread_nodes import WHOLE, Barrier, Clear, CopyCommit, CopyWait, Do, Leave, Shared, Vector
from portmm.kernels.cpu.blocking import run_of
from portmm.kernels.gpu.epilogue_store import EpilogueStore, bottom, fused_arguments
from portmm.kernels.gpu.global_to_shared import Transfer
from portmm.kernels.gpu.split_k_fixup import fixup_params, join
from portmm.kernels.gpu.summation_runs import accumulators, current, in_runs, in_runs_shared
from portmm.schedule.gpu_simt import sums_in_shared
from portmm.spec.dtype import BY_NAME, accumulator

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa

_ALONG = {"a": {"row": "k", "col": "row", "any": "any"}, "b": {"row": "row", "col": "k", "any": "any", "codes": "k"}}
_ONE = (Ptr("b"), "s32")
"""Pointer of int4 weights, which are the same for all items."""
_GROUP = ("owner", "row_begin", "row_end", "tile")
"""Results of the primitive `find_group`."""
_STEPS = {"a": ("a_m", "a_k"), "b": ("b_n", "b_k")}


@dataclass(frozen=True, slots=True)
class Work:
    """Operand transfers of one kernel.

    Attributes:
        s: its schedule.
        isa: the instruction set.
        atom: the multiply-add.
    """

    s: Schedule
    isa: Isa
    atom: Atom

    def transfer(self, name: str) -> Transfer:
        """Global-to-shared transfer of an operand."""
        s, row = self.s, name == "a"
        layout = (s.a if row else s.b).layout
        along = _ALONG[name][layout]
        of_row, of_k = _STEPS[name]
        return Transfer(
            name, s.types[0 if row else 1], self.atom.acc, along, (s.a if row else s.b).vector,
            s.block.m if row else s.block.n, s.block.k, self.atom.k_pack, s.threads,
            const(1) if along == "row" else var(of_row), const(1) if along == "k" else var(of_k),
            var("row_0" if row else "column_0"), bottom(s) if row else var("n"), s.stages,
            s.b.group if layout == "codes" else -1,
        )  # fmt: skip


def arguments(s: Schedule, *, sums: bool) -> tuple[Argument, ...]:
    """Parameters of a kernel by this schedule; `sums` are stored to scratch for another kernel."""
    a, b, c = s.types
    params = [Argument(x, "int") for x in ("m", "n", "k")]
    params += [_read("a", a), *_strides("a", s.a.layout, ("m", "k"))]
    params += _codes() if s.b.layout == "codes" else [_read("b", b), *_strides("b", s.b.layout, ("k", "n"))]
    params.append(Argument("batch", "int"))
    params += [_read("ends", "s32")] if s.parallel.grouped else []
    if sums:
        acc = accumulator(a, b)
        return (*params, Argument("work", "pointer", acc), Argument("c_m", "long"), Argument("c_batch", "long"))
    return (*params, *fixup_params(s), *results(s, c))


def _read(name: str, dtype: str) -> Argument:
    return Argument(name, "pointer", dtype, readonly=True, alone=True)


def _codes() -> list[Argument]:
    """Parameters of int4 weights: `words` of each column, and the scales and offsets of its `groups`."""
    pointers = [_read("b", "s32"), _read("scales", "f32"), _read("offsets", "f32")]
    return [*pointers, Argument("words", "long"), Argument("groups", "long")]


def results(s: Schedule, c: str) -> tuple[Argument, ...]:
    """Parameters for C, and for the operands of fused expressions."""
    params = [Argument("c", "pointer", c), Argument("c_m", "long")]
    params += [] if s.c.layout == "row" else [Argument("c_n", "long")]
    params += [Argument("c_batch", "long")]
    if not s.epilogue:
        return tuple(params)
    return (*params, *fused_arguments(s.epilogue))


def _strides(name: str, layout: str, axes: tuple[str, str]) -> list[Argument]:
    one = {"row": axes[1], "col": axes[0]}.get(layout, "")
    return [Argument(f"{name}_{x}", "long") for x in (*axes, "batch") if x != one]


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """Kernel of a schedule."""
    work = Work(s, isa, atom)
    a, b = work.transfer("a"), work.transfer("b")
    sums, acc = s.mr * s.nr, atom.acc
    body: list[Stmt] = [a.shared(), b.shared(), *_sums(s, atom)]
    body += [Scratch("a_part", s.mr, acc), Scratch("b_part", s.nr, acc), *a.registers(), *b.registers()]
    body += [*block_tile(s), *threads(s), *slice_of_k(s, s.block.k * atom.k_pack), Clear("acc", sums)]
    body += _copied(work, a, b) if s.a.asynchronous else _fetched(work, a, b)
    body += [*join(s, blocks(s)), *EpilogueStore(s, isa, atom, s.parallel.cell).statements()]
    grid = (blocks(s), const(s.parallel.split))
    return GridKernel(str(s.name(atom)), isa, atom, arguments(s, sums=s.slices), s.threads, grid, tuple(body))


def blocks(s: Schedule) -> Index:
    """Number of blocks along the grid's first axis; of grouped rows, each group's last tile may be partial."""
    down, across = ceil_div(var("m"), s.block.m), ceil_div(var("n"), s.block.n)
    return (down + var("batch")) * across if s.parallel.grouped else down * across * var("batch")


def depth(s: Schedule) -> Index:
    """Extent of k for this block."""
    return var("depth") if s.parallel.grouped else var("k")


def block_tile(s: Schedule) -> list[Stmt]:
    """Coordinates of a block: its item and tile, and the addresses of its operands."""
    return [
        *(of_groups(s) if s.parallel.grouped else _item(s)),
        LetPtr("a_item", Ptr("a", var("item") * var("a_batch")), s.types[0], readonly=True),
        LetPtr(
            "b_item",
            *(_ONE if s.b.layout == "codes" else (Ptr("b", var("item") * var("b_batch")), s.types[1])),
            readonly=True,
        ),
    ]


def _item(s: Schedule) -> list[Stmt]:
    """Coordinates of a block: its item, and its tile there."""
    return [
        Let("down", ceil_div(var("m"), s.block.m)),
        Let("across", ceil_div(var("n"), s.block.n)),
        *raster(s, var("block"), s.block.m),
    ]


def of_groups(s: Schedule) -> list[Stmt]:
    """Coordinates of a block of a grouped product: its group, and its tile there; rows past the last group are zero."""
    operands = (Ptr("ends"), var("batch"), var("m"), const(s.block.m), var("across"), var("block"), Ptr("found"))
    return [
        Let("across", ceil_div(var("n"), s.block.n)),
        Scratch("found", len(_GROUP), "s32"),
        Do("find_group", operands),
        *(Read(name, Ptr("found", const(i))) for i, name in enumerate(_GROUP)),
        Let("down", ceil_div(var("row_end") - var("row_begin"), s.block.m)),
        Leave((var("down") * var("across")).lt(var("tile") + 1)),
        Let("item", minimum(var("owner"), var("batch") - 1)),
        Let("depth", var("owner").lt(var("batch")) * var("k")),
        *_swept(s, s.block.m, var("row_begin")),
    ]


def raster(s: Schedule, number: Index, rows: int, row_offset: Index | int = 0) -> list[Stmt]:
    """Item and tile of a number, in a raster of `down` times `across` tiles of so many rows.

    `row_offset` is added to its first row. Numbers sweep groups of `group` rows of tiles, column by column.
    """
    return [
        Let("item", number // (var("down") * var("across"))),
        Let("tile", number % (var("down") * var("across"))),
        *_swept(s, rows, row_offset),
    ]


def _swept(s: Schedule, rows: int, row_offset: Index | int) -> list[Stmt]:
    """First row and column of a tile."""
    group = s.tiles[3].m // rows
    tile, count = var("tile"), var("across") * group
    inside, first = tile % count, tile // count * group
    return [
        Let("first", first),
        Let("high", minimum(var("down") - var("first"), group)),
        Let("row_0", (var("first") + inside % var("high")) * rows + row_offset),
        Let("column_0", inside // var("high") * s.block.n),
    ]


def threads(s: Schedule) -> list[Stmt]:
    """Coordinates of a thread in the tile: `cell_m`, `cell_n` count groups of rows and columns.

    A warp is a rectangle of threads, of the shape of its tile, so that it reads few words of A and of B.
    """
    warp = s.tiles[1]
    down, across = warp.m // s.mr, warp.n // s.nr
    one = down * across == s.threads
    lane, number, warps = var("thread") if one else var("lane"), const(0) if one else var("warp"), s.block.n // warp.n
    of_m, of_n = (lane // across, lane % across) if down > 1 else (const(0), lane)
    return [
        Let("warp", var("thread") // (down * across)),
        Let("lane", var("thread") % (down * across)),
        Let("cell_m", number // warps * down + of_m),
        Let("cell_n", (number % warps * across if warps > 1 else const(0)) + of_n),
    ]


def slice_of_k(s: Schedule, step: int) -> list[Stmt]:
    """Range of k that a block sums, in steps of `step` elements."""
    steps = ceil_div(depth(s), step)
    if s.parallel.split == 1:
        return [Let("k_0", const(0)), Let("k_end", depth(s)), Let("steps", steps)]
    each = ceil_div(steps, s.parallel.split)
    return [
        Let("each", each),
        Let("k_0", var("slice") * var("each") * step),
        Let("k_end", minimum(depth(s), var("k_0") + var("each") * step)),
        Let("steps", ceil_div(var("k_end") - var("k_0"), step)),
    ]


def _fetched(work: Work, a: Transfer, b: Transfer) -> list[Stmt]:
    """Main loop with copies through registers: one tile is multiplied while the next is loaded."""
    block_k = work.s.block.k * work.atom.k_pack
    step, end = var("step"), var("k_end")

    def fetch(k: Index) -> tuple[Stmt, ...]:
        return (*a.fetch(k, end), *b.fetch(k, end))

    def put(stage: Index) -> tuple[Stmt, ...]:
        return (*a.put(stage), *b.put(stage))

    if work.s.stages == 1:
        once = (*fetch(var("k_0") + step * block_k), Barrier(), *put(const(0)), Barrier(), *_multiply(work, a, b))
        return _over_k(work, once)
    more = (step + 1).lt(var("steps"))
    body = (
        If(more, fetch(var("k_0") + (step + 1) * block_k)),
        Let("stage", step % 2),
        *_multiply(work, a, b),
        If(more, put(const(1) - var("stage"))),
        Barrier(),
    )
    return [*fetch(var("k_0")), *put(const(0)), Barrier(), *_over_k(work, body)]


def _copied(work: Work, a: Transfer, b: Transfer) -> list[Stmt]:
    """Main loop with asynchronous copies, prefetching all stages but one."""
    block_k, stages = work.s.block.k * work.atom.k_pack, work.s.stages
    step, end = var("step"), var("k_end")

    def begin(at: Index) -> tuple[Stmt, ...]:
        k, stage = var("k_0") + at * block_k, at % stages
        copies = (*a.copy(k, end, stage), *b.copy(k, end, stage))
        return (If(at.lt(var("steps")), copies), CopyCommit())

    ahead = [s for i in range(stages - 1) for s in begin(const(i))]
    body = (
        CopyWait(stages - 2),
        Barrier(),
        *begin(step + (stages - 1)),
        Let("stage", step % stages),
        *_multiply(work, a, b),
    )
    return [*ahead, *_over_k(work, body)]


def _over_k(work: Work, body: tuple[Stmt, ...]) -> list[Stmt]:
    """Loop over tiles of k, nested in one over runs, which are of whole tiles."""
    s, loop = work.s, For("step", const(0), var("steps"), const(1), body)
    run = maximum(1, run_of(var("k_end") - var("k_0"), 1) // s.block.k)
    if sums_in_shared(s):
        own = Ptr("totals", var("i") * s.threads + var("thread"))
        return list(in_runs_shared(work.atom, s.mr * s.nr, loop, run, lambda _: own))
    return list(in_runs(work.atom, s.mr * s.nr, loop, run))


def _sums(s: Schedule, atom: Atom) -> list[Stmt]:
    """Memory of a thread's sums of a run of k, and of all earlier runs."""
    count = s.mr * s.nr
    if sums_in_shared(s):
        return [Shared("totals", count * s.threads, atom.acc), Scratch("acc", count, atom.acc)]
    return accumulators(atom, count)


def _multiply(work: Work, a: Transfer, b: Transfer) -> tuple[Stmt, ...]:
    """Multiply-adds of a stage of shared memory."""
    s = work.s
    stage = const(0) if s.stages == 1 else var("stage")
    parts = [_part(a, s.mr, s.parallel.cell[0], stage), _part(b, s.nr, s.parallel.cell[1], stage)]
    i, j = var("i"), var("j")
    mac = Mac(Ptr("acc" if sums_in_shared(s) else current(work.atom), i * s.nr + j), Ptr("a_part", i), Ptr("b_part", j))
    columns = For("j", const(0), const(s.nr), const(1), (mac,), WHOLE)
    macs = For("i", const(0), const(s.mr), const(1), (columns,), WHOLE)
    return (For("unit", const(0), const(s.block.k), const(1), (*parts, macs), WHOLE),)


def _part(x: Transfer, count: int, cell: int, stage: Index) -> Stmt:
    """Loads of a thread's rows, or columns, of one unit of k."""
    across, g, unit = x.rows // count, var("g"), var("unit")
    row = var("cell_m" if x.name == "a" else "cell_n") * cell + g * (across * cell)
    src = Ptr(f"{x.name}_tile", stage * x.size + unit * x.rows + (row ^ x.swizzle(unit)))
    load = Vector(Ptr(f"{x.name}_part", g * cell), src, BY_NAME[x.storage].bytes * cell)
    return For("g", const(0), const(count // cell), const(1), (load,), WHOLE)
