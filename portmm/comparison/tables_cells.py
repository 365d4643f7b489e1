"""What tables are made of.

Owns the Markdown table and the words that cells and heads of several tables
share. Imports `comparison.report`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.comparison.report import geomean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, its first column to the left."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, rule, *rows))


def mean(values: Collection[float], *, count: bool = True) -> str:
    """The geometric mean, the lowest in brackets, and of how many; empty of nothing."""
    of = f" of {len(values)}" if count else ""
    return f"{geomean(values):.2f} ({min(values):.2f}){of}" if values else ""


def threads(number: int) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} thread{'s' if number > 1 else ''}"
