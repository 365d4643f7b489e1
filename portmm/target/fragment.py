"""Fragments of matrix instructions: the elements of an operand, or of sums, that each lane of a warp holds.

Owns `Fragment`, its parsing from the rows of an instruction set, and its checks. Pure.

A lane's number is a sum of bits, and so is the number of an element among those of a lane: elements of one register
are counted first, the lowest bits first, then registers. Each bit adds a power of two to the row or to the column,
so that two short lists of pairs say where every element is, whatever the vendor. For 16 x 8 sums of `mma.sync`,
lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]] means row lane / 4 and column lane % 4 * 2, and
register = [[0, 1], [8, 0]] that a lane has the column after it, too, and both again eight rows further down. A bit
that adds nothing, [0, 0], is a broadcast: lanes, or registers, that differ in it alone hold the same element.

Rows and columns are those of the matrix as it is multiplied: m x k of a left operand, k x n of a right one, m x n of
sums. A fragment of fewer columns than its atom has is repeated along them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from portmm.target.toml_schema import record, require
from portmm.util.records import dataclass

ROLES = ("a_fragment", "b_fragment", "acc_fragment")
"""Fields of an atom that name a fragment."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Rows and columns that the bits of a lane's and of an element's number add.

    Attributes:
        lane: (row, column) of each bit of the lane's number, lowest first.
        register: likewise of an element's number among those of a lane.
        load: prefix of the primitives that load it from shared memory, matrix by matrix, whose own fragments the
            instruction set has, too; empty: lanes read their elements.
    """

    lane: tuple[tuple[int, int], ...]
    register: tuple[tuple[int, int], ...]
    load: str = ""

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return 1 << len(self.lane)

    @property
    def elements(self) -> int:
        """Number of elements of a lane."""
        return 1 << len(self.register)

    @property
    def rows(self) -> int:
        """Number of rows of the matrix."""
        return 1 + sum(row for row, _ in (*self.lane, *self.register))

    @property
    def columns(self) -> int:
        """Number of columns of the matrix."""
        return 1 + sum(column for _, column in (*self.lane, *self.register))

    @property
    def copies(self) -> int:
        """Number of places that hold the same element."""
        return 1 << (*self.lane, *self.register).count((0, 0))

    @property
    def lane_rows(self) -> int:
        """Number of lanes with elements of one column, in different rows."""
        return 1 << sum(row > 0 for row, _ in self.lane)

    @property
    def lane_columns(self) -> int:
        """Number of lanes with elements of one row, in different columns."""
        return 1 << sum(column > 0 for _, column in self.lane)

    @property
    def transposed(self) -> Fragment:
        """The fragment of the transposed matrix."""
        lane, register = (tuple((c, r) for r, c in bits) for bits in (self.lane, self.register))
        return Fragment(lane, register, self.load)

    def place(self, lane: int, element: int) -> tuple[int, int]:
        """Row and column of an element of a lane."""
        bits = [b for number, bits in ((lane, self.lane), (element, self.register)) for b in _of(number, bits)]
        return sum(row for row, _ in bits), sum(column for _, column in bits)


def _of(number: int, bits: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of the bits that are set in a number."""
    return [bit for i, bit in enumerate(bits) if number >> i & 1]


def fragments_of(table: Any, where: str) -> dict[str, Fragment]:
    """The fragments of the `[fragment.NAME]` tables of an instruction set.

    Raises:
        TargetError: a table is malformed, or no bijection; `where` names the file.
    """
    require(isinstance(table, dict), where, f"fragment must be tables [fragment.NAME], got {table!r}")
    fragments = {}
    for name, row in table.items():
        here = f"{where}: fragment {name}"
        fragments[name] = check_fragment(record(Fragment, row, here), here)
    return fragments


def check_fragment(fragment: Fragment, where: str) -> Fragment:
    """The fragment itself, after its checks: every element of a matrix is somewhere, and only broadcasts repeat it.

    Raises:
        TargetError: it is no such map.
    """
    for name in ("lane", "register"):
        for i, bit in enumerate(getattr(fragment, name)):
            ok = all(x >= 0 and x & (x - 1) == 0 for x in bit) and 0 in bit
            require(ok, where, f"bit {i} of {name} adds {list(bit)}; one of both is a power of two, the other 0")
    for at, axis in enumerate(("row", "column")):
        added = sorted(bit[at] for bit in (*fragment.lane, *fragment.register) if bit[at])
        due = [1 << i for i in range(len(added))]
        require(added == due, where, f"bits add {added} to the {axis}; each of {due} is added once")
    return fragment


def resolved(row: dict[str, Any], fragments: Mapping[str, Fragment], where: str) -> dict[str, Any]:
    """The row of an atom with fragments in place of their names.

    Raises:
        TargetError: a name is unknown.
    """
    if not isinstance(row, dict):
        return row
    named = {role: row[role] for role in ROLES if row.get(role) is not None}
    known = ", ".join(sorted(fragments)) or "none"
    for role, name in named.items():
        require(name in fragments, where, f"{role} {name!r} is no fragment; there are {known}")
    others = {key: value for key, value in row.items() if key not in ROLES}
    return {**others, **{role: fragments[name] for role, name in named.items()}}


def check_shapes(
    operands: tuple[Fragment | None, ...], shape: tuple[int, int, int], warp: int, where: str, *, alone: bool
) -> None:
    """Check the shapes and lanes of the fragments of an atom.

    Args:
        operands: those of A, B and the sums.
        shape: m, n and k of the atom.
        warp: lanes of a warp of its instruction set, 0 if it has none.
        where: the file and the atom, for errors.
        alone: a single warp multiplies, from registers.

    Raises:
        TargetError: a fragment is missing, or of another shape than the atom.
    """
    require(not alone or None not in operands, where, f'a unit of a "warp" has {", ".join(ROLES)}')
    m, n, k = shape
    for role, fragment, due in zip(ROLES, operands, ((m, k), (k, n), (m, n)), strict=True):
        if fragment is None:
            continue
        own = (fragment.rows, fragment.columns)
        fits = own == due or (role == "acc_fragment" and own[0] == m and n % own[1] == 0)
        require(fits, where, f"{role} has {own[0]} x {own[1]} elements, of {due[0]} x {due[1]}")
        whole = warp > 0 and (fragment.lanes == warp if alone else fragment.lanes % warp == 0)
        require(whole, where, f"{role} has {fragment.lanes} lanes, a warp {warp}")
