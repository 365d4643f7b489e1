"""Schedules of general block programs on CPUs: register tiles of products, tiles of the grid, blocks of the loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.block_program import BlockProgram, TileGemm
from portmm.ir.tile_program import row_label
from portmm.schedule.parts import ALL, REGISTERS, Parallel, Tile
from portmm.schedule.program import Footprint, Program
from portmm.schedule.roofline import Work
from portmm.schedule.schedule import Schedule
from portmm.spec.epilogue import summed, varies
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portmm.target.isa import Isa
    from portmm.target.target import Target

ROWS, BLOCK = 64, 256
"""Rows of a tile, and elements of a block of the loop."""
NEAR = 64
"""Elements of a block of the loop, where a product of tiles feeds another from L2: `block_near_rows` are those of a
tile."""
VECTORS = 3
"""Vectors across a register tile, but where products of `NEAR` columns would waste a quarter of them or more."""
PANEL, DEPTH = 8, 256
"""Register tiles of a panel of many columns, and a block of k."""
UNIT_PART = 512
"""Columns of a part of a result, whose sums stay in L1 until they are stored."""
EVEN = 4
"""Tiles for each thread from which they are shared out evenly enough."""
LEAST = 512
"""Least columns of a tile, where threads share them out."""


def candidates(
    program: BlockProgram, target: Target, extents: Mapping[str, int], threads: int = 1
) -> tuple[Schedule, ...]:
    """The schedules of a program for extents of its labels: by deep blocks of k, and by streams of rows of B.

    Where the tiles of the grid are too few for threads, first one whose loop is split.

    Raises:
        ScheduleError: no unit of the target has masked vectors of f32, or the result is one element.
    """
    if any(x.dtype != "f32" for x in program.operands):
        return _of_units(program, target, extents, threads)
    isa = unit_of(target)
    atom = isa.atom("f32")
    assert atom is not None  # noqa: S101 - `unit_of` finds it
    result = program.operands[program.fused.results[0][0]].axes
    if not result:
        raise ScheduleError("a result of one element has no tiles")
    columns = extents[result[-1]]
    near = any(isinstance(x, TileGemm) and summed(x.value) != program.loop for x in program.passes[0])
    # Zen 5, attention by its record, heads of 32 to 128: tiles of 8 x 32 are 1.04 to 1.14 times as fast as of 8 x 48.
    vectors = VECTORS - 1 if near and -(-NEAR // (VECTORS * atom.n)) * (VECTORS * atom.n) >= 5 * NEAR // 4 else VECTORS
    tall, nr = (isa.registers - vectors - 1) // vectors, vectors * atom.n
    share = max(LEAST, -(-columns // threads // atom.n) * atom.n)
    register, tile = (1 << tall.bit_length() - 1, nr), (MODEL.block_near_rows, NEAR) if near else (ROWS, BLOCK)
    wide = ALL if share >= columns else share
    streams = MODEL.block_streams[:1] if near else MODEL.block_streams
    every = tuple(
        tiled(isa, register, tile, wide, (panel * nr, x, DEPTH), along) for panel, x, along in
        ((PANEL, DEPTH, 0), *((panel, x, MODEL.block_ahead * nr) for panel, x in streams))
    )  # fmt: skip
    rows = row_label(program)
    grid = math.prod(-(-extents[x] // {rows: tile[0], result[-1]: wide or columns}.get(x, 1)) for x in result)
    runs = min(_runs(grid, threads), -(-extents[program.loop] // tile[1]))
    alone = len(program.passes) == 2  # one pass along the loop has all accumulators
    return (split_loop(every[0], runs), *every) if runs > 1 and alone else every


def _of_units(program: BlockProgram, target: Target, extents: Mapping[str, int], threads: int) -> tuple[Schedule, ...]:
    """The schedules of a program of bfloat16 on units of tiles.

    Raises:
        ScheduleError: the target has none, or the program other types.
    """
    isa = next((x for x in target.isas if (y := x.atom("bf16")) is not None and y.tiled), None)
    if isa is None or {x.dtype for x in program.operands} != {"bf16"}:
        raise ScheduleError(f"{target.name}: one kernel of other types than f32 is of bf16, on units of tiles")
    atom, labels = isa.atom("bf16"), program.operands[program.fused.results[0][0]].axes
    if not labels:
        raise ScheduleError("a result of one element has no tiles")
    assert atom is not None  # noqa: S101 - found above
    wide, columns = 2 * atom.n, extents[labels[-1]]
    share = max(LEAST, -(-columns // threads // wide) * wide)
    across = ALL if share >= columns else share
    return tuple(
        tiled(isa, (atom.m, wide), (ROWS, x), across, (UNIT_PART, x, x), MODEL.block_unit_ahead * wide, "bf16-bf16-f32")
        for x in MODEL.block_unit_depths
    )


def _runs(tiles: int, threads: int) -> int:
    """Runs of the loop, by which the tiles of a grid are shared out evenly."""
    return threads // math.gcd(tiles, threads) if tiles < EVEN * threads else 1


def split_loop(s: Schedule, runs: int) -> Schedule:
    """A schedule whose loop is split into some runs."""
    return replace(s, parallel=Parallel("tiles", split=runs))


def tiled(  # noqa: PLR0917 - tiles from the least to the largest
    isa: Isa, register: tuple[int, int], tile: tuple[int, int], columns: int, swept: tuple[int, int, int],
    along: int = 0, dtype: str = "f32",
) -> Schedule:  # fmt: skip
    """A schedule.

    Args:
        isa: the instruction set.
        register: rows and columns of a register tile; rows are a power of two.
        tile: rows of a tile, and elements of a block of the loop.
        columns: of a tile.
        swept: columns of a panel, rows of B of a block of k of it, and those of a product of fewer columns; these are
            even.
        along: elements of a row of B between those that are multiplied and those that are prefetched, or 0.
        dtype: of products.
    """
    panel, streams, depth = swept
    tiles = (
        Tile(REGISTERS, *register, 1), Tile("L1", tile[0], register[1], tile[1]), Tile("L2", tile[0], columns, streams),
        Tile("L3", tile[0], panel, depth),
    )  # fmt: skip
    s = Schedule("block", isa.name, dtype, tiles, parallel=Parallel("tiles"))
    return replace(s, b=s.b.prefetched(0, along)) if along else s


def unit_of(target: Target) -> Isa:
    """The first instruction set with masked vectors of f32.

    Raises:
        ScheduleError: there is none.
    """
    for isa in target.isas:
        atom = isa.atom("f32")
        if atom is not None and atom.mask and atom.m == 1 and isa.vector("f32", atom.n) is not None:
            return isa
    raise ScheduleError(f"{target.name} has no masked vectors of f32")


def footprint(s: Schedule, program: BlockProgram) -> Footprint:
    """Bytes of a block of each operand of products in L1."""
    return {"L1": 4 * s.kc * (s.mr + s.nr) * len(program.passes)}


def work(program: BlockProgram, extents: Mapping[str, int]) -> Work:
    """Bytes of all operands, once each, and multiply-adds of all sums."""
    along = varies(program.fused.steps, program.operands)
    sums = [{*axes, summed(x)} for x, axes in along.items() if x.op == "contract"]
    macs = sum(math.prod(extents[y] for y in x) for x in sums)
    moved = sum(4 * math.prod(extents[y] for y in x.axes) for x in program.operands)
    return Work({"memory": float(moved), "macs": float(macs)}, 0.0)


PROGRAM = Program("blocks", candidates, footprint, work)
