"""Schedules of block programs over rows and down columns: what cores, or threads of a device, share and keep.

Owns their candidates, footprint and work, on every kind of machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.block_program import BlockProgram, of_rows
from portmm.schedule.parts import ALL, LOAD, REGISTERS, SHARED, SHUFFLE, OperandPlan, Parallel, Staging, Tile
from portmm.schedule.program import Footprint, Program, capacities_of, device_of, exceeded, footprint_of, on_gpu
from portmm.schedule.roofline import Work
from portmm.schedule.schedule import Schedule
from portmm.spec.dtype import BY_NAME
from portmm.target.device import CUDA_WARP
from portmm.target.model import CPU, DEVICE

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

Size = tuple[int, int, int]
"""Rows, columns, items of a batch."""
LANES = 16
"""Threads of a row under OpenCL on a CPU: a vector of 512 bits."""
MOST_SLICES = 65535
"""CUDA C++ Programming Guide: blocks along the second axis of a grid."""


def core_schedule(program: BlockProgram, isa: Isa, real: Atom, *, far: bool = False) -> Schedule:
    """The schedule of cores: chains of vectors along a row, in runs; or vectors of columns, in groups.

    The first pass over rows of operands that are `far`, beyond L2, prefetches them.
    """
    if program.loop == "m":
        near = (Tile(REGISTERS, 1, real.n, 1), Tile("L1", ALL, real.n, ALL), Tile("L2", ALL, CPU.column_group, ALL))
    else:
        width = CPU.chains * real.n
        run = Tile("L1", 1, CPU.run_vectors * width, ALL)
        near = (Tile(REGISTERS, 1, width, 1), run, Tile("L2", 1, ALL, ALL))
    tiles, name = (*near, Tile("L3", ALL, ALL, ALL)), "columns" if program.loop == "m" else "rows"
    b = OperandPlan().prefetched(0, CPU.rows_ahead // BY_NAME["f32"].bytes if far and program.loop == "n" else 0)
    return Schedule(name, isa.name, "f32", tiles, b=b, parallel=Parallel("batch"))


def rows_schedule(  # noqa: PLR0917 - parts of one record
    threads: int, subgroup: int, cells: int = 0, vector: int = 1, exchange: bool = False, warp: int = CUDA_WARP
) -> Schedule:
    """A schedule of expressions over rows.

    Args:
        threads: threads of a block.
        subgroup: threads of one row, a power of two that divides `threads`.
        cells: maximum number of columns of a thread, in registers; 0 for any number, in a loop.
        vector: neighbouring columns that are moved at once.
        exchange: threads of a warp exchange registers (shuffles).
        warp: number of these.
    """
    step = subgroup * vector
    tiles = (
        Tile(REGISTERS, 1, vector, 1), Tile("warp", max(1, warp // subgroup), min(subgroup, warp) * vector, 1),
        Tile(SHARED, threads // subgroup, step, 1), Tile("L2", ALL, subgroup * cells, ALL),
    )  # fmt: skip
    a, b, c = (
        OperandPlan("row", (Staging(REGISTERS, *x),))
        for x in ((LOAD, 1, vector), (LOAD,), (SHUFFLE if exchange else LOAD,))
    )
    return Schedule("rows", "", "f32", tiles, a=a, b=b, c=c)


def columns_schedule(threads: int, *, sliced: bool) -> Schedule:
    """A schedule of reductions down columns: a column for each thread, or for each of any number of slices of rows."""
    blocks = (Tile("warp", 1, CUDA_WARP, ALL), Tile(SHARED, 1, threads, ALL), Tile("L2", ALL, ALL, ALL))
    tiles, plan = (Tile(REGISTERS, 1, 1, ALL), *blocks), OperandPlan("row", (Staging(REGISTERS, LOAD),))
    return Schedule("columns", "", "f32", tiles, a=plan, b=plan, c=plan, parallel=Parallel(split=ALL if sliced else 1))


def kept_in(s: Schedule) -> str:
    """The level where threads keep values of their columns for later passes, or an empty string."""
    return REGISTERS if s.program == "rows" and RowTiles(s).cells else ""


class RowTiles:
    """The numbers of a schedule over rows, by their names there: see `rows_schedule`.

    Attributes:
        threads, subgroup, vector, exchange, warp: as there.
        cells: maximum number of columns of a thread, 0 for any number.
        width: number of columns of a subgroup in registers.
    """

    __slots__ = ("cells", "exchange", "subgroup", "threads", "vector", "warp", "width")

    def __init__(self, s: Schedule) -> None:
        self.threads, self.vector, self.warp = s.threads, s.nr, s.warp_lanes
        self.subgroup, self.width = s.block.n // s.nr, s.tiles[3].n
        self.cells, self.exchange = self.width // self.subgroup, s.c.by(SHUFFLE) is not None


def candidates(
    program: BlockProgram, size: Size, target: Target, neighbours: int = 1, *, exchange: bool = False
) -> tuple[Schedule, ...]:
    """The schedule of a device for rows, columns and items, or none where there are none of these.

    Args:
        program: the block program.
        size: rows, columns, items.
        target: the device.
        neighbours: columns that a vector access may cover.
        exchange: whether threads of a warp can exchange registers.
    """
    device, (m, n, batch) = device_of(target), size
    if program.loop == "m":
        threads = 64 if on_gpu(target) else LANES
        return (columns_schedule(threads, sliced=slices(size, threads, target) > 1),) if n * batch else ()
    if not m * batch:
        return ()
    n, reduces = max(n, 1), bool(program.accumulators)
    if not on_gpu(target):
        # OpenCL compilers for CPUs vectorize over neighbouring columns.
        return (rows_schedule(LANES, LANES) if reduces else rows_schedule(4 * LANES, min(4 * LANES, _power(n)), 4),)
    threads = min(DEVICE.row_threads, device.block_threads)
    if not reduces:
        return (rows_schedule(threads, min(threads, _power(-(-n // neighbours))), max(neighbours, 4), neighbours),)
    return (_reducing(program, n, neighbours, target, exchange=exchange),)


def slices(size: Size, threads: int, target: Target) -> int:
    """Slices of each column for blocks of `threads`."""
    m, n, batch = size
    blocks, wanted = -(-n // threads) * batch, int(DEVICE.column_waves) * device_of(target).processors
    return min(m // int(DEVICE.least_rows), -(-wanted // blocks), MOST_SLICES)


def _reducing(program: BlockProgram, n: int, neighbours: int, target: Target, *, exchange: bool) -> Schedule:
    """The distribution over threads of rows that are reduced."""
    device, has = device_of(target), capacities_of(target, dynamic=True)
    most, vectors = 1 << min(device.block_threads, 1024).bit_length() - 1, -(-n // neighbours)
    kept = len(of_rows(program.fused, REGISTERS).tiles)
    room = max(1, DEVICE.row_registers // max(1, kept) // neighbours)
    subgroup = min(_power(-(-vectors // max(1, 4 // neighbours))), DEVICE.row_threads, most)
    while subgroup < most and _power(-(-vectors // subgroup)) > room:
        subgroup *= 2
    threads = max(subgroup, min(DEVICE.least_row_threads, most))
    while True:
        columns = _power(-(-vectors // subgroup))
        s = rows_schedule(
            threads, subgroup, columns * neighbours if columns <= room else 0, neighbours,
            exchange and threads >= device.warp, device.warp,
        )  # fmt: skip
        if exchange or threads == 1 or not exceeded(footprint(s, program), has):
            return s
        threads, subgroup = threads // 2, min(subgroup, threads // 2)


def _power(x: int) -> int:
    """The least power of two not below x."""
    return 1 << max(x - 1, 0).bit_length()


def footprint(s: Schedule, program: BlockProgram) -> Footprint:
    """Shared memory of a block of a device: a word of each thread, or warp, for each reduction."""
    form = RowTiles(s)
    return footprint_of(s, 0, 4 * len(program.accumulators) * (s.threads // (form.warp if form.exchange else 1)))


def work(program: BlockProgram, size: Size) -> Work:
    """Bytes of all operands, once each."""
    m, n, batch = size
    return Work({"memory": float(m * n * batch * 4 * len(program.operands))}, 0.0)


def workers(program: BlockProgram, size: Size, threads: int) -> int:
    """Threads of the host for rows, columns and items: one where there is little work."""
    return threads if work(program, size).counts["memory"] > CPU.fork_rows * CPU.least_bandwidth else 1


def task_channels(size: Size, group: int, threads: int) -> int:
    """Channels of a task of a group norm: whole groups, as many as leave a task for each thread, or a few lines."""
    _, n, batch = size
    parts = -(-threads // max(batch, 1))
    wanted = max(int(CPU.column_group), -(-n // parts))
    return min(n, -(-wanted // group) * group)


PROGRAM = Program("blocks", candidates, footprint, work)
