"""Schedules of kernels over rows on a device: how threads share rows, and what they keep in registers."""

from __future__ import annotations

from dataclasses import dataclass

from portmm.schedule.parts import ALL, LOAD, REGISTERS, SHARED, SHUFFLE, OperandPlan, Parallel, Staging, Tile
from portmm.schedule.schedule import Schedule
from portmm.target.device import CUDA_WARP


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
    tiles = (Tile(REGISTERS, 1, 1, ALL), Tile("warp", 1, CUDA_WARP, ALL), Tile(SHARED, 1, threads, ALL))
    return Schedule("columns", "", "f32", tiles, parallel=Parallel(split=ALL if sliced else 1))


def kept_in(s: Schedule) -> str:
    """The level where threads keep values of their columns for later passes, or an empty string."""
    return REGISTERS if s.program == "rows" and RowTiles(s).cells else ""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The numbers of a schedule over rows, by their names there: see `rows_schedule`.

    Attributes:
        s: the schedule.
    """

    s: Schedule

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.s.threads

    @property
    def subgroup(self) -> int:
        """Threads of one row."""
        return self.s.block.n // self.s.nr

    @property
    def cells(self) -> int:
        """Maximum number of columns of a thread, 0 for any number."""
        return self.width // self.subgroup

    @property
    def vector(self) -> int:
        """Neighbouring columns that are moved at once."""
        return self.s.nr

    @property
    def exchange(self) -> bool:
        """Whether threads of a warp exchange registers."""
        return self.s.c.by(SHUFFLE) is not None

    @property
    def warp(self) -> int:
        """Threads of a warp."""
        return self.s.warp_lanes

    @property
    def width(self) -> int:
        """Number of columns of a subgroup in registers."""
        return self.s.tiles[3].n
