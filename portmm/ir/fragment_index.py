"""Index expressions of fragments: the row and the column of an element, from the numbers of a lane and of a register.

Owns `coordinate`, which turns rows of a `Fragment` into quotients and remainders, and its uses. Adjacent bits whose
weights double are one term, so that lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]] becomes row `lane // 4` and column
`lane % 4 * 2`, as one would write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.ir.index import Index, const

if TYPE_CHECKING:
    from portmm.target.fragment import Fragment


def coordinate(number: Index, weights: Sequence[int]) -> Index:
    """Sum of the weights of the bits that are set in a number.

    Args:
        number: a number below 1 << len(weights).
        weights: of each bit, lowest first: powers of two, or 0.
    """
    total = const(0)
    end = len(weights)
    while end:
        begin = end - 1
        while begin and weights[begin] and 2 * weights[begin - 1] == weights[begin]:
            begin -= 1
        if weights[begin]:
            bits = number // (1 << begin)
            bits = bits if end == len(weights) else bits % (1 << (end - begin))
            total += bits * weights[begin]
        end = begin
    return total


def lane_row(fragment: Fragment, lane: Index, lanes: int = 0) -> Index:
    """Row of a lane's first element; of a unit of several warps, among the first `lanes`."""
    return coordinate(lane, [row for row, _ in _bits(fragment, lanes)])


def lane_column(fragment: Fragment, lane: Index, lanes: int = 0) -> Index:
    """Column of a lane's first element, likewise."""
    return coordinate(lane, [column for _, column in _bits(fragment, lanes)])


def _bits(fragment: Fragment, lanes: int) -> tuple[tuple[int, int], ...]:
    return fragment.lane[: (lanes or fragment.lanes).bit_length() - 1]


def in_row(fragment: Fragment, lane: Index) -> Index:
    """Number of a lane among those with elements of the same row."""
    return coordinate(lane, _numbered([column for _, column in fragment.lane]))


def in_column(fragment: Fragment, lane: Index) -> Index:
    """Number of a lane among those with elements of the same column."""
    return coordinate(lane, _numbered([row for row, _ in fragment.lane]))


def _numbered(weights: Sequence[int]) -> list[int]:
    """Weights with their ranks as powers of two in their place."""
    ranks = sorted(x for x in weights if x)
    return [1 << ranks.index(x) if x else 0 for x in weights]


def row_masks(fragment: Fragment) -> tuple[int, ...]:
    """Bits of a lane's number in which the lanes of one row differ."""
    return tuple(1 << i for i, (_, column) in enumerate(fragment.lane) if column)


@dataclass(frozen=True, slots=True)
class Registers:
    """Rows and columns of the elements of a lane.

    Attributes:
        fragment: the fragment, of sums.
    """

    fragment: Fragment

    @property
    def row_weights(self) -> list[int]:
        """Weights of the bits that add rows."""
        return [row for row, _ in self.fragment.register if row]

    @property
    def column_weights(self) -> list[int]:
        """Weights of the bits that add columns."""
        return [column for _, column in self.fragment.register if column]

    @property
    def rows(self) -> int:
        """Number of rows of a lane."""
        return 1 << len(self.row_weights)

    @property
    def columns(self) -> int:
        """Number of columns of a lane."""
        return 1 << len(self.column_weights)

    @property
    def neighbours(self) -> int:
        """Number of neighbouring columns in neighbouring registers."""
        count = 1
        for bit in self.fragment.register:
            if bit != (0, count):
                break
            count *= 2
        return count

    def number(self, tile: Index, row: Index, column: Index) -> Index:
        """Number of a register of the tile-th fragment: of a row and a column among those of a lane.

        Raises:
            ScheduleError: bits of rows and columns are mixed, for which no program has a use.
        """
        axes = ["row" if row else "column" for row, _ in self.fragment.register]
        if axes == sorted(axes):
            return (tile * self.rows + row) * self.columns + column
        if axes == sorted(axes, reverse=True):
            return (tile * self.columns + column) * self.rows + row
        raise ScheduleError(f"registers of sums {self.fragment.register} count neither rows nor columns first")
