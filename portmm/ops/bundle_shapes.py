"""Shapes and machines of a bundle, as a file and a command line name them.

Owns `Shape`, the files that list shapes, and the problems of calls with dense arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.arrays.call import problem
from portmm.errors import BundleError
from portmm.spec.dtype import BY_NUMPY, natural, types
from portmm.spec.dtype import spell as spell_types
from portmm.spec.row_classes import rows as rows_of
from portmm.target.target import described, instance, load_target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portmm.spec.problem import Problem
    from portmm.target.target import Target

LAYOUTS = ("row", "col", "packed")
MOST_ROWS = 1 << 16
"""Largest M of a range."""
EXAMPLE = "1-512 768 3072 f32 packed"
"""A line of a file."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of products.

    Attributes:
        rows: the values of M, one for each class.
        n, k: columns of B, and its rows.
        dtype: element types of A, B and C, as in a `Problem`.
        b: layout of B: "row", "col" or "packed".
    """

    rows: tuple[int, ...]
    n: int
    k: int
    dtype: str
    b: str

    def __str__(self) -> str:
        m = str(self.rows[0]) if len(self.rows) == 1 else f"{self.rows[0]}..{self.rows[-1]}"
        return f"{m}x{self.n}x{self.k} {self.dtype} {self.b}"


def shapes_of(text: str, where: str = "shapes") -> list[Shape]:
    """The shapes of a file: a line each, `M N K [types] [layout of B]`; M may be a range as 1-512, or a list as 1,16.

    Raises:
        BundleError: a line is none.
    """
    shapes = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            shapes.append(_shape(*words))
        except (KeyError, ValueError) as error:
            raise BundleError(
                f"{where}, line {number}: {line.strip()!r} is no shape ({error}); write as: {EXAMPLE}"
            ) from error
    if not shapes:
        raise BundleError(f"{where} has no shapes; write lines as: {EXAMPLE}")
    return shapes


def _shape(*words: str) -> Shape:
    if not 3 <= len(words) <= 5:
        raise ValueError(f"a line has 3 to 5 words, this one {len(words)}")
    m, columns, rows, *rest = words
    if not (columns.isdecimal() and rows.isdecimal()):
        raise ValueError(f"N and K are {columns!r} and {rows!r}, not numbers")
    n, k = int(columns), int(rows)
    dtype, b = (*rest, *("f32", "row")[len(rest) :])
    if b not in LAYOUTS:
        raise ValueError(f"the layout of B is {b!r}, not {', '.join(LAYOUTS)}")
    short = BY_NUMPY[dtype].name if dtype in BY_NUMPY else dtype
    of = types(short)
    word = spell_types(*of) if "-" in short else spell_types(short, short, natural(short, short))
    values: dict[int, None] = {}
    for part in m.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"M is {m!r}, not as 7, 1-512 or 1,16")
        at, end = int(first), int(last or first)
        if not 0 < at <= end <= MOST_ROWS or min(n, k) < 1:
            raise ValueError(f"sizes are positive, and M is at most {MOST_ROWS}")
        while at <= end:
            top = rows_of(problem_of((at, n, k), word, "row", ""))[1]
            values[min(top, end)] = None
            at = top + 1
    return Shape(tuple(values), n, k, word, b)


def machines_of(words: Iterable[str]) -> list[Target]:
    """The described processors that words name: chips, levels, instruction sets, and all chips of cloud instances.

    Raises:
        TargetError: a word names no target.
        BundleError: it names a device.
    """
    targets: dict[str, Target] = {}
    for word in words:
        family = instance(word)
        for chip in (load_target(x) for x in family.chips) if family else (described(word),):
            if chip.device is not None:
                raise BundleError(f"{word} is {chip.name}, a device; bundles have kernels for processors")
            targets.setdefault(chip.name, chip)
    return list(targets.values())


def problem_of(size: tuple[int, int, int], dtype: str, b: str, family: str, a: str = "row") -> Problem:
    """The problem that a call with dense arrays has."""
    layout = "codes" if family.startswith("u4") else b
    p = problem(dtype, size, (a, layout, "row"), family, dense=True)
    return replace(p, deterministic=False)
