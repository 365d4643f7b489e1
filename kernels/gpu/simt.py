"""Products by the threads of a device, each with a few rows and columns of C in registers.

    for each tile BM x BN of C            <- blocks of threads (times slices of k)
      for each BK of k                    <- of floats nested in a loop over runs of k
        shared <- A[BM, BK], B[BK, BN]    (the next ones, while these are multiplied)
        for k of BK
          registers[MR, NR] += A[MR] B[NR]
      C <- registers

A thread's rows are cells of `cell[0]` neighbours that lie BM / (MR / cell[0]) apart, and
its columns likewise: a warp then reads neighbouring words of shared memory, four at once.
Blocks are numbered so that those which run at the same time make a patch of C
as square as can be: they share what L2 holds (`place`). Where k is split, the last block of a tile adds
what others have (`kernels.joining`), or each slice leaves its sums in scratch, in rows of n, and
`kernels.slices` adds them: the order of summation, and the result, are always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.ir.grid_kernel import Argument, GridKernel
from portmm.ir.index import Ptr, ceil_div, const, maximum, minimum, var
from portmm.ir.nodes import For, If, Let, LetPtr, Read, Scratch
from portmm.ir.thread_nodes import WHOLE, Barrier, Clear, CopyCommit, CopyWait, Do, Leave, Mac, Shared, Vector
from portmm.kernels.cpu.blocking import run_of
from portmm.kernels.gpu.epilogue_store import Storing, bottom, fused_arguments
from portmm.kernels.gpu.global_to_shared import Feed
from portmm.kernels.gpu.split_k_fixup import given as joining
from portmm.kernels.gpu.split_k_fixup import join
from portmm.kernels.gpu.summation_runs import accumulators, current, in_runs, in_runs_beside
from portmm.schedule.gpu_candidates import sums_in_shared
from portmm.spec.dtype import BY_NAME, accumulator

if TYPE_CHECKING:
    from portmm.ir.index import Index
    from portmm.ir.nodes import Stmt
    from portmm.schedule.schedule import Schedule
    from portmm.target.isa import Atom, Isa

_ALONG = {"a": {"row": "k", "col": "row", "any": "any"}, "b": {"row": "row", "col": "k", "any": "any", "codes": "k"}}
_ONE = (Ptr("b"), "s32")
"""A weight of codes is one for all items."""
_FOUND = ("owner", "row_begin", "row_end", "tile")
"""What the primitive `find_group` finds."""
_STEPS = {"a": ("a_m", "a_k"), "b": ("b_n", "b_k")}


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

    def feed(self, name: str) -> Feed:
        """How an operand is fed."""
        s, row = self.s, name == "a"
        layout = s.a if row else s.b
        along = _ALONG[name][layout]
        of_row, of_k = _STEPS[name]
        return Feed(
            name, s.types[0 if row else 1], self.atom.acc, along, s.vectors[0 if row else 1],
            s.block.m if row else s.block.n, s.block.k, self.atom.k_pack, s.threads,
            const(1) if along == "row" else var(of_row), const(1) if along == "k" else var(of_k),
            var("row_0" if row else "column_0"), bottom(s) if row else var("n"), s.stages,
            s.group if layout == "codes" else -1,
        )  # fmt: skip


def arguments(s: Schedule, *, sums: bool) -> tuple[Argument, ...]:
    """What a kernel by this schedule is called with; `sums` are left in scratch for another kernel."""
    a, b, c = s.types
    found = [Argument(x, "int") for x in ("m", "n", "k")]
    found += [_read("a", a), *_strides("a", s.a, ("m", "k"))]
    found += _codes() if s.b == "codes" else [_read("b", b), *_strides("b", s.b, ("k", "n"))]
    found.append(Argument("batch", "int"))
    found += [_read("ends", "s32")] if s.grouped else []
    if sums:
        held = accumulator(a, b)
        return (*found, Argument("work", "pointer", held), Argument("c_m", "long"), Argument("c_batch", "long"))
    return (*found, *joining(s), *results(s, c))


def _read(name: str, dtype: str) -> Argument:
    return Argument(name, "pointer", dtype, readonly=True, alone=True)


def _codes() -> list[Argument]:
    """A weight of codes: for each column so many `words`, and the scales and offsets of its `groups`."""
    pointers = [_read("b", "s32"), _read("scales", "f32"), _read("offsets", "f32")]
    return [*pointers, Argument("words", "long"), Argument("groups", "long")]


def results(s: Schedule, c: str) -> tuple[Argument, ...]:
    """The parameters for C, and for the operands of fused expressions."""
    found = [Argument("c", "pointer", c), Argument("c_m", "long")]
    found += [] if s.c == "row" else [Argument("c_n", "long")]
    found += [Argument("c_batch", "long")]
    if not s.fused:
        return tuple(found)
    return (*found, *fused_arguments(s.fused))


def _strides(name: str, layout: str, axes: tuple[str, str]) -> list[Argument]:
    one = {"row": axes[1], "col": axes[0]}.get(layout, "")
    return [Argument(f"{name}_{x}", "long") for x in (*axes, "batch") if x != one]


def build(s: Schedule, isa: Isa, atom: Atom) -> GridKernel:
    """The kernel of a schedule."""
    work = Work(s, isa, atom)
    a, b = work.feed("a"), work.feed("b")
    sums, held = s.mr * s.nr, atom.acc
    body: list[Stmt] = [a.shared(), b.shared(), *_sums(s, atom)]
    body += [Scratch("a_part", s.mr, held), Scratch("b_part", s.nr, held), *a.registers(), *b.registers()]
    body += [*place(s), *threads(s), *slice_of_k(s, s.block.k * atom.k_pack), Clear("acc", sums)]
    body += _copied(work, a, b) if s.copies else _fetched(work, a, b)
    body += [*join(s, blocks(s)), *Storing(s, isa, atom, s.cell).statements()]
    grid = (blocks(s), const(s.split))
    return GridKernel(str(s.name(atom)), isa, atom, arguments(s, sums=s.slices), s.threads, grid, tuple(body))


def blocks(s: Schedule) -> Index:
    """Blocks along the grid's first axis: of rows in groups, each group's last tile may be one that is not full."""
    down, across = ceil_div(var("m"), s.block.m), ceil_div(var("n"), s.block.n)
    return (down + var("batch")) * across if s.grouped else down * across * var("batch")


def depth(s: Schedule) -> Index:
    """The extent of k for this block."""
    return var("depth") if s.grouped else var("k")


def place(s: Schedule) -> list[Stmt]:
    """Which tile of which item a block computes, and where its operands begin."""
    return [
        *(of_groups(s) if s.grouped else _item(s)),
        LetPtr("a_item", Ptr("a", var("item") * var("a_batch")), s.types[0], readonly=True),
        LetPtr(
            "b_item", *(_ONE if s.b == "codes" else (Ptr("b", var("item") * var("b_batch")), s.types[1])), readonly=True
        ),
    ]


def _item(s: Schedule) -> list[Stmt]:
    """The item of this block, and its tile there."""
    return [
        Let("down", ceil_div(var("m"), s.block.m)),
        Let("across", ceil_div(var("n"), s.block.n)),
        *raster(s, var("block"), s.block.m),
    ]


def of_groups(s: Schedule) -> list[Stmt]:
    """The group of this block, and its tile there; rows past the last group are sums of nothing."""
    given = (Ptr("ends"), var("batch"), var("m"), const(s.block.m), var("across"), var("block"), Ptr("found"))
    return [
        Let("across", ceil_div(var("n"), s.block.n)),
        Scratch("found", len(_FOUND), "s32"),
        Do("find_group", given),
        *(Read(name, Ptr("found", const(i))) for i, name in enumerate(_FOUND)),
        Let("down", ceil_div(var("row_end") - var("row_begin"), s.block.m)),
        Leave((var("down") * var("across")).lt(var("tile") + 1)),
        Let("item", minimum(var("owner"), var("batch") - 1)),
        Let("depth", var("owner").lt(var("batch")) * var("k")),
        *_swept(s, s.block.m, var("row_begin")),
    ]


def raster(s: Schedule, number: Index, rows: int, below: Index | int = 0) -> list[Stmt]:
    """Which tile of which item has a number, of `down` times `across` tiles of so many rows.

    It begins so many rows `below`. Numbers sweep patches of `group` rows of tiles, column by column.
    """
    return [
        Let("item", number // (var("down") * var("across"))),
        Let("tile", number % (var("down") * var("across"))),
        *_swept(s, rows, below),
    ]


def _swept(s: Schedule, rows: int, below: Index | int) -> list[Stmt]:
    """Where the tile of an item begins."""
    group = s.tiles[3].m // rows
    tile, width = var("tile"), var("across") * group
    inside, first = tile % width, tile // width * group
    return [
        Let("first", first),
        Let("high", minimum(var("down") - var("first"), group)),
        Let("row_0", (var("first") + inside % var("high")) * rows + below),
        Let("column_0", inside // var("high") * s.block.n),
    ]


def threads(s: Schedule) -> list[Stmt]:
    """Which cells of the tile a thread has: `cell_m`, `cell_n` count cells.

    A warp has a patch of threads, as its tile says, so that it reads few words of A and of B.
    """
    warp = s.tiles[1]
    down, across = warp.m // s.mr, warp.n // s.nr
    one = down * across == s.threads
    lane, number, wide = var("thread") if one else var("lane"), const(0) if one else var("warp"), s.block.n // warp.n
    of_m, of_n = (lane // across, lane % across) if down > 1 else (const(0), lane)
    return [
        Let("warp", var("thread") // (down * across)),
        Let("lane", var("thread") % (down * across)),
        Let("cell_m", number // wide * down + of_m),
        Let("cell_n", (number % wide * across if wide > 1 else const(0)) + of_n),
    ]


def slice_of_k(s: Schedule, deep: int) -> list[Stmt]:
    """The part of k that a block sums, in steps of so many elements."""
    steps = ceil_div(depth(s), deep)
    if s.split == 1:
        return [Let("k_0", const(0)), Let("k_end", depth(s)), Let("steps", steps)]
    each = ceil_div(steps, s.split)
    return [
        Let("each", each),
        Let("k_0", var("slice") * var("each") * deep),
        Let("k_end", minimum(depth(s), var("k_0") + var("each") * deep)),
        Let("steps", ceil_div(var("k_end") - var("k_0"), deep)),
    ]


def _fetched(work: Work, a: Feed, b: Feed) -> list[Stmt]:
    """The loop over k, tiles passing through registers: one is multiplied while the next is on its way."""
    deep = work.s.block.k * work.atom.k_pack
    step, end = var("step"), var("k_end")

    def fetch(k: Index) -> tuple[Stmt, ...]:
        return (*a.fetch(k, end), *b.fetch(k, end))

    def put(stage: Index) -> tuple[Stmt, ...]:
        return (*a.put(stage), *b.put(stage))

    if work.s.stages == 1:
        once = (*fetch(var("k_0") + step * deep), Barrier(), *put(const(0)), Barrier(), *_multiply(work, a, b))
        return _over_k(work, once)
    more = (step + 1).lt(var("steps"))
    body = (
        If(more, fetch(var("k_0") + (step + 1) * deep)),
        Let("stage", step % 2),
        *_multiply(work, a, b),
        If(more, put(const(1) - var("stage"))),
        Barrier(),
    )
    return [*fetch(var("k_0")), *put(const(0)), Barrier(), *_over_k(work, body)]


def _copied(work: Work, a: Feed, b: Feed) -> list[Stmt]:
    """The loop over k, tiles being copied asynchronously, all stages but one ahead."""
    deep, stages = work.s.block.k * work.atom.k_pack, work.s.stages
    step, end = var("step"), var("k_end")

    def begin(at: Index) -> tuple[Stmt, ...]:
        k, stage = var("k_0") + at * deep, at % stages
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
    """The loop over tiles of k, nested in one over runs, which are of whole tiles."""
    s, loop = work.s, For("step", const(0), var("steps"), const(1), body)
    run = maximum(1, run_of(var("k_end") - var("k_0"), 1) // s.block.k)
    if sums_in_shared(s):
        own = Ptr("totals", var("i") * s.threads + var("thread"))
        return list(in_runs_beside(work.atom, s.mr * s.nr, loop, run, lambda _: own))
    return list(in_runs(work.atom, s.mr * s.nr, loop, run))


def _sums(s: Schedule, atom: Atom) -> list[Stmt]:
    """A thread's sums of a run of k, and of all runs before."""
    count = s.mr * s.nr
    if sums_in_shared(s):
        return [Shared("totals", count * s.threads, atom.acc), Scratch("acc", count, atom.acc)]
    return accumulators(atom, count)


def _multiply(work: Work, a: Feed, b: Feed) -> tuple[Stmt, ...]:
    """Multiply what a stage of shared memory holds."""
    s = work.s
    stage = const(0) if s.stages == 1 else var("stage")
    parts = [_part(a, s.mr, s.cell[0], stage), _part(b, s.nr, s.cell[1], stage)]
    i, j = var("i"), var("j")
    mac = Mac(Ptr("acc" if sums_in_shared(s) else current(work.atom), i * s.nr + j), Ptr("a_part", i), Ptr("b_part", j))
    columns = For("j", const(0), const(s.nr), const(1), (mac,), WHOLE)
    macs = For("i", const(0), const(s.mr), const(1), (columns,), WHOLE)
    return (For("unit", const(0), const(s.block.k), const(1), (*parts, macs), WHOLE),)


def _part(x: Feed, count: int, cell: int, stage: Index) -> Stmt:
    """Load a thread's rows, or columns, of one unit of k."""
    across, g, unit = x.rows // count, var("g"), var("unit")
    row = var("cell_m" if x.name == "a" else "cell_n") * cell + g * (across * cell)
    src = Ptr(f"{x.name}_tile", stage * x.size + unit * x.rows + (row ^ x.swizzle(unit)))
    load = Vector(Ptr(f"{x.name}_part", g * cell), src, BY_NAME[x.held].bytes * cell)
    return For("g", const(0), const(count // cell), const(1), (load,), WHOLE)
