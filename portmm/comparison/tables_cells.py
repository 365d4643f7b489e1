"""Cells and Markdown of tables.

Owns the Markdown table and the texts that cells and headers of several tables
share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.comparison.report import geomean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table whose first column is aligned left."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, rule, *rows))


def mean(values: Collection[float], *, count: bool = True) -> str:
    """Cell with the geometric mean, the lowest value in brackets, and their number; empty for no values."""
    of = f" of {len(values)}" if count else ""
    return f"{geomean(values):.2f} ({min(values):.2f}){of}" if values else ""


def threads(number: int) -> str:
    """A number of threads in words: `1 thread`, `2 threads`."""
    return f"{number} thread{'s' if number > 1 else ''}"
