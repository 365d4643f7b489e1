"""Kernels of a record for its verification: a schedule with small blocks, and a shape with a ragged tail everywhere.

Owns `lowered`. Register tiles, packing and order are those of a schedule; blocks of k are a few elements, so that a
shape of some hundred elements has several.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from portmm.codegen.lower import atom_of, lower_program
from portmm.errors import ScheduleError
from portmm.ir.attention_program import attention_of
from portmm.ir.block_program import BlockProgram, TileGemm, TileReduce
from portmm.ir.product_program import product_of
from portmm.schedule.block_tiles import split_loop, tiled
from portmm.schedule.candidates import candidates
from portmm.schedule.cpu_attention import attention_schedule, packs_values
from portmm.schedule.gpu_attention import schedule_of
from portmm.schedule.gpu_mma_attention import UNIT, unit
from portmm.schedule.gpu_mma_attention import schedule_of as matrix_schedule
from portmm.schedule.legality import inconsistent
from portmm.schedule.parts import ALL
from portmm.schedule.program import asynchronous
from portmm.schedule.rows import candidates as candidates_of_rows
from portmm.schedule.rows import core_schedule
from portmm.spec.epilogue import summed
from portmm.spec.problem import Problem
from portmm.target.summation import RUN
from portmm.target.target import Target, load_isa
from portmm.verification.calls import Shape
from portmm.verification.kernels import check_kernel

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel
    from portmm.ir.nodes import Kernel
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.verification.equivalence import Verdict

DEPTH = 4
"""Block of k."""
SHORT = 2
"""Block of k, and of the loop, where a kernel has several products."""
TOGETHER = 8
"""Panels of B that are packed at once: see `kernels.cpu.panel_packing`."""
COLUMNS = 2
"""Elements of a head of V."""
THREADS = ("simt", "stream", "direct")
"""Programs of products on devices without matrix units; the first one has shared memory."""
QUERIES_BY_KEYS, WARP, VECTOR = (8, 16), (4, 8), 4
"""Of attention on a device: queries and keys of a block, threads along both, and elements that are moved at once."""
VECTORS, PRODUCTS = "vectors", "products"
"""Units of attention kernels of a narrow type: for few queries, and for many."""
SPLITS = 2
"""Of its keys, where they are split; both have two tiles."""
MOST_RUNS = 3
"""Runs of a loop that is split; the last one has two blocks."""


class Lowered(NamedTuple):
    """A kernel to be verified.

    Attributes:
        kernel: the kernel.
        schedule: its schedule.
        extents: of the record's labels.
        more: further shapes: for register tiles of other heights, and vectors that the first one is too small for.
    """

    kernel: Kernel
    schedule: Schedule
    extents: dict[str, int]
    more: tuple[Shape, ...] = ()

    def check(
        self, program: BlockProgram, *, seed: int | None = None, text: str = "", until: float = math.inf
    ) -> Verdict:
        """Check the kernel, or a text of it, at all shapes: see `check_kernel`."""
        return check_kernel(program, self.kernel, self.extents, seed=seed, text=text, until=until, more=self.more)


class OnDevice(NamedTuple):
    """A kernel of a device to be verified.

    Attributes:
        kernel: the kernel.
        text: in the device's language.
        extents: of the record's labels.
        further: kernels that are launched after it, and their texts.
        runs: into which keys are split.
        what: the kernel has of its own, for messages.
        more: further extents: whole tiles, and sums or groups that the first ones are too small for.
    """

    kernel: GridKernel
    text: str
    extents: dict[str, int]
    further: tuple[tuple[GridKernel, str], ...] = ()
    runs: int = 1
    what: str = ""
    more: tuple[dict[str, int], ...] = ()

    def check(self, program: BlockProgram, *, seed: int | None = None) -> Verdict:
        """Check the texts at all extents: the first verdict that they are wrong, or that of the first extents."""
        verdicts = []
        for extents in (self.extents, *self.more):
            of = program, self.kernel, extents
            verdicts.append(check_kernel(*of, seed=seed, text=self.text, further=self.further, runs=self.runs))
            if not verdicts[-1]:
                return verdicts[-1]
        return verdicts[0]


def every_on_device(program: BlockProgram, target: Target) -> list[OnDevice]:
    """The kernels that a record has on a device: those of attention have threads or matrix units, and keys in runs."""
    if sum(isinstance(x, TileGemm) for one in program.passes for x in one) < 2:
        return [lowered_on_device(program, target)]
    try:
        dtype = attention_of(program).form.dtype
    except ScheduleError as error:
        raise ScheduleError("devices have no loops of a whole function as one kernel, but for attention") from error
    pair = unit(dtype, target)
    which = ("", "runs") if pair is None else ("mma", "mma, runs")
    return [attention_on_device(program, target, x) for x in which]


def lowered_on_device(program: BlockProgram, target: Target) -> OnDevice:
    """The kernel of a record over rows, of a product or of attention on a device: by threads, without matrix units.

    Raises:
        ScheduleError: there is no such kernel.
    """
    gemms = sum(isinstance(x, TileGemm) for one in program.passes for x in one)
    language = target.device.language if target.device is not None else "opencl"
    every: tuple[dict[str, int], ...]
    if gemms > 1:
        return attention_on_device(program, target)
    if any(isinstance(x, TileReduce) and summed(x.value) != "n" for one in program.passes for x in one):
        raise ScheduleError("texts of devices are checked of products, of attention, and of expressions over rows")
    if gemms:
        s = _of_threads(program, target)
        (rows, columns, depth), first = (s.block.m, s.block.n, max(1, s.block.k) * s.atom.kr), {"b": 2}
        first |= {"m": rows + 1, "n": columns + 5, "k": depth * SHORT + 1}
        groups = {"b": 1, "m": s.tile("L2").m + rows, "n": 2 * columns, "k": 1}
        runs = {"b": 1, "m": rows, "n": columns, "k": RUN + 9}
        every = first, groups, runs, {"b": 1, "m": 1, "n": 3, "k": -(-(RUN + 1) // depth) * depth}
    else:
        listed = candidates_of_rows(program, (3, 37, 2), target, exchange=language == "cuda")
        if not listed:
            raise ScheduleError("a device has no rows of a record without them")
        s = listed[0]
        most = s.tile("L2").n or 2 * s.block.n
        every = (
            {"b": 2, "m": 3, "n": 37},
            {"b": 1, "m": s.block.m + 1, "n": most - 3},
            {"b": 1, "m": s.block.m, "n": most},
        )
    isa = next(x for x in target.isas if x.name == s.isa) if s.isa else load_isa("simt")
    if s.program != "rows":
        s = replace(s, epilogue="", static=None)
    (kernel,) = lower_program(program, s, isa)
    text = import_module(f"portmm.codegen.{language}").source(kernel)
    extents, *more = (_labelled(program, x) for x in every)
    return OnDevice(kernel, text, extents, more=tuple(more))


def attention_on_device(program: BlockProgram, target: Target, which: str = "") -> OnDevice:
    """Attention on a device: two tiles of queries and two of keys, heads in groups, the last tiles and vectors ragged.

    Args:
        program: the record.
        target: the device.
        which: "mma" for matrix units in the place of threads, "runs" for keys that are split, or both.

    Raises:
        ScheduleError: the record is none of attention, or it has operands besides queries, keys and values.
    """
    of, language = attention_of(program), target.device.language if target.device is not None else "opencl"
    if not {*"bhde"} <= {x for y in program.operands for x in y.axes}:
        raise ScheduleError("kernels of attention have items and heads")
    if of.form.bounds or of.form.lengths or of.form.starts or of.form.score.operands:
        raise ScheduleError("texts of devices are checked of attention without masks and further operands")
    queries, split, pair = "nm"["nm".index(program.loop) - 1], "runs" in which, None
    if "mma" in which:
        pair = unit(of.form.dtype, target)
        if pair is None:
            raise ScheduleError(f"{target.name} multiplies no fragments of {of.form.dtype}")
        (rows, columns), ragged, head = (UNIT, UNIT), 1, 2 * UNIT
        s = matrix_schedule(of.form.dtype, (head, head), (rows, 1, columns), runs=split, copies=asynchronous(target))
    else:
        (rows, columns), ragged, head = QUERIES_BY_KEYS, VECTOR - 1, VECTOR + 1
        s = schedule_of("f32", (head, head), QUERIES_BY_KEYS, WARP, runs=split)
    isa, atom = pair or (load_isa("simt"), atom_of(load_isa("simt"), "f32"))
    many = rows // 2 + 1 if split else rows + 1  # rows of both heads share tiles where keys are split
    runs = SPLITS if split else 1
    keys = columns * runs + ragged
    extents = {queries: many, program.loop: keys, "d": head, "e": head, "b": 2, "h": 2, "H": 1}
    whole = extents | {queries: rows, program.loop: 2 * columns * runs, "b": 1, "h": 1, "H": 1}
    groups = extents | {queries: 2, "b": 1, "h": 4, "H": 2}
    write = import_module(f"portmm.codegen.{language}").source
    kernels = lower_program(program, s, isa, atom)
    further = tuple((x, write(x)) for x in kernels[1:])
    more = tuple(_labelled(program, x) for x in (whole, groups))
    return OnDevice(kernels[0], write(kernels[0]), _labelled(program, extents), further, runs, which, more)


def _of_threads(program: BlockProgram, target: Target) -> Schedule:
    """The schedule of a product with the smallest blocks of threads, with shared memory if there is one."""
    parts = product_of(program)
    places = (parts.a, "mk"), (parts.b, "kn"), (parts.results[0][0], "mn")
    a, b, c = ("row" if program.operands[i].axes[-2:] == axes else "col" for i, axes in places)
    p = Problem(64, 250, 256, parts.dtype, a=a, b=b, c=c, fused=parts.epilogue)
    listed = [x for x in candidates(p, target, (1, 1, 1)) if x.program in THREADS and x.parallel.split == 1]
    if not listed:
        raise ScheduleError(f"{target.name} has no product of {p.dtype} by threads alone")
    return min(listed, key=lambda x: (THREADS.index(x.program), x.block.m * x.block.n))


def lowered(
    program: BlockProgram, target: Target, schedule: Schedule | None = None, rows: int = 0, unit_of: str = ""
) -> Lowered:
    """The kernel of a record on a host.

    Args:
        program: over rows, of a product or of attention.
        target: the host.
        schedule: of a product, or of attention, in the place of the first candidate.
        rows: number of rows of A that the schedule is for, if it is for no other.
        unit_of: what multiplies in attention: `VECTORS` of f32, or the ISA's unit for `PRODUCTS` of the type.

    Raises:
        ScheduleError: there is no such kernel.
    """
    gemms = sum(isinstance(x, TileGemm) for one in program.passes for x in one)
    if schedule is not None and schedule.program == "block":
        return _block(program, target, schedule)
    if gemms == 1:
        return _product(program, target, schedule, rows)
    return _other(program, target, gemms, (schedule, unit_of) if schedule is not None and unit_of else None)


def _block(program: BlockProgram, target: Target, schedule: Schedule) -> Lowered:
    isa = next(x for x in target.isas if x.name == schedule.isa)
    atom, (mr, nr) = atom_of(isa, schedule.dtype), (schedule.mr, schedule.nr)
    short, tall, deep = SHORT, mr, SHORT
    if (
        atom.tiled
    ):  # whole steps of a unit: two of them, in one block of k or in two; and a slice of rows and one row more
        tall, deep = mr + 1, 2 * atom.k
        short = min(schedule.kc, deep)
    columns = nr + atom.n if schedule.tile("L2").n else ALL
    runs, swept = min(schedule.parallel.split, MOST_RUNS), (nr, short, short)
    s = split_loop(tiled(isa, (mr, nr), (tall, deep), columns, swept, schedule.b.along, schedule.dtype), runs)
    (kernel,) = lower_program(program, s, isa, atom)
    result = program.operands[program.fused.results[0][0]].axes
    inner = sorted({x for y in program.operands for x in y.axes} - {*result, program.loop})
    extents = {x: SHORT + 1 + i + (i > 1) for i, x in enumerate(inner)}  # no two labels are alike, nor like the loop
    extents |= {x: 2 + i for i, x in enumerate(result[:-2])} | dict.fromkeys(result[-2:-1], tall + 1)
    extents[program.loop] = deep * (1 if atom.tiled else max(2, runs)) + 1
    extents[result[-1]] = (columns or nr) + atom.n // 2
    lower = [] if atom.tiled or tall < 3 else [extents | dict.fromkeys(result[-2:-1], tall - 1)]
    return Lowered(kernel, s, extents, tuple(map(Shape, lower)))


def _product(program: BlockProgram, target: Target, schedule: Schedule | None, rows: int) -> Lowered:
    parts = product_of(program)
    if schedule is None:
        p = Problem(64, 250, 256, parts.dtype, fused=parts.epilogue)
        schedule = next(x for x in candidates(p, target) if not x.on_device)
    isa = next(x for x in target.isas if x.name == schedule.isa)
    atom = atom_of(isa, schedule.dtype, schedule.atom.lanes)
    depth, step = (2 * atom.k, atom.k) if atom.tiled else (max(DEPTH, atom.n + 2), 0)
    s = small(schedule, depth)
    (kernel,) = lower_program(program, s, isa)
    in_panels = s.b.packed or s.b.layout == "packed" or atom.mask
    columns = s.nr + s.nr // 2 + 1 if in_panels else 2 * s.nr  # without masks B in place has whole register tiles
    left = 1 if atom.tiled else 2  # steps of k behind the last block: a loop for these carries sums, too
    extents = {"m": rows or s.mr + 1, "n": columns, "k": depth + step + left, "b": 2}
    whole = (s.mr + 1) // 2, s.mr // 2 + 1  # rows of the first shape are in two slices, nearly equal ones
    more = [] if atom.tiled or rows else [{"m": x, "n": s.nr + 1} for x in s.heights if x not in whole]
    if s.b.packed and not atom.tiled and not rows:
        more.append({"m": s.heights[0], "n": TOGETHER * s.nr + 1})
    shapes = tuple(Shape(_labelled(program, extents | {"b": 1} | x)) for x in more)
    return Lowered(kernel, s, _labelled(program, extents), shapes)


def _other(program: BlockProgram, target: Target, gemms: int, by: tuple[Schedule, str] | None) -> Lowered:
    isa, atom = next((x, y) for x in target.isas if (y := x.atom("f32")) is not None)
    if by is not None:
        isa = next(x for x in target.isas if x.name == by[0].isa)
        dtype = attention_of(program).form.dtype
        atom = atom_of(isa, f"{dtype}-{dtype}-f32")
        atom = isa.vector("f32", atom.n) or atom if by[1] == VECTORS else atom
    if gemms > 1:
        s = attention_schedule(isa, atom) if by is None else by[0]
        if atom.tiled:  # blocks of queries as low as a kernel in registers
            s = replace(s, tiles=tuple(x._replace(n=min(x.n, s.mr)) for x in s.tiles))
        if by is None and program.loop == "m" and packs_values(isa, atom, "f32", COLUMNS, s.parallel.cell[1]):
            s = attention_schedule(isa, atom, packs=True)
        queries = "nm"["nm".index(program.loop) - 1]
        many = 5 if program.loop == "n" else s.tile("L2").n + (1 if atom.tiled else 5)
        head = atom.k if atom.tiled else 2 * atom.k + (atom.k_pack == 1)  # callers pad heads to whole units
        keys = atom.k + 3 if atom.tiled else 2 * atom.n + 3 if program.loop == "n" else 9
        extents = {queries: many, program.loop: keys, "d": head, "e": COLUMNS}
        extents |= {"b": 1, "h": 2, "H": 1}
    else:
        s = core_schedule(program, isa, atom)
        extents = {"b": 2, "m": 7 if program.loop == "m" else 3, "n": 2 * s.nr + 3}
    (kernel,) = lower_program(program, s, isa, atom)
    more = () if gemms < 2 else _heads(program, s, atom, extents)
    return Lowered(kernel, s, _labelled(program, extents), more)


def _heads(program: BlockProgram, s: Schedule, atom: Atom, extents: dict[str, int]) -> tuple[Shape, ...]:
    """Shapes of attention with heads of several vectors, and as many queries and keys as there are kinds of tiles."""
    queries, n = "nm"["nm".index(program.loop) - 1], atom.n

    def shape(keys: int, block: int, **others: int) -> Shape:
        return Shape(_labelled(program, extents | {"d": n + 2, "h": 1, program.loop: keys} | others), block)

    if atom.tiled:  # of one task for each head, which packs V itself
        return (shape(atom.k + 2, atom.k, d=2 * atom.k, e=s.parallel.cell[1] + 2, **{queries: 4}),)
    wide = s.parallel.cell[1] + n + 2
    if program.loop == "m":
        # Blocks have whole units of keys, and what is left of a register tile behind one, or behind all of them.
        even, odd = range(s.mr % 2, s.mr, 2), range(1 - s.mr % 2, s.mr, 2)
        pairs = zip_longest(even, odd, fillvalue=s.mr % 2)
        return tuple(shape(s.mr + x + y, s.mr + x, e=wide, **{queries: 2}) for x, y in pairs)
    few = tuple(shape(n // 2 + 3, n // 2, e=wide + s.parallel.cell[1], m=x) for x in (1, 3))
    return (*few, shape(n + 3, n, e=wide, m=24))


def _labelled(program: BlockProgram, extents: dict[str, int]) -> dict[str, int]:
    """The extents of the labels of a record.

    Raises:
        ScheduleError: it has others.
    """
    labels = {x for y in program.operands for x in y.axes}
    if more := labels - extents.keys():
        raise ScheduleError(f"the record has labels {''.join(sorted(more))}, which kernels of its kind do not have")
    return {x: n for x, n in extents.items() if x in labels}


def small(s: Schedule, depth: int = DEPTH) -> Schedule:
    """A schedule with blocks of `depth` elements of k, or the same one where it has none."""
    tiles = tuple(x._replace(k=min(x.k, depth) if x.k > 1 else x.k) for x in s.tiles)
    less = replace(s, tiles=tiles)
    return s if inconsistent(less) else less
