"""Statistics of several measurements, and tables of them.

Owns the spread of samples, the time of all products of a model, the sentences about unusual conditions of a
measurement, and `Table`: text cells as Markdown and for a terminal, without what the form would take for its own marks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from portmm.util import console
from portmm.util.text import number
from portmm.util.text import time as duration

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by the value of a function, in the order of the first of each."""
    groups: dict[Key, list[Item]] = {}
    for x in items:
        groups.setdefault(key(x), []).append(x)
    return groups


def spread(values: Sequence[float]) -> float | None:
    """Interquartile range over the median; None for fewer than two values."""
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else None


def decided(ratio: float, spread: float | None) -> bool:
    """Whether a ratio, the faster over the slower, differs from one by more than its spread; true without a spread."""
    return spread is None or ratio <= 0 or max(ratio, 1 / ratio) - 1 > spread


def total_line(report: Any) -> str:
    """Sentence with the time of all products of a run, if they are a user's own; empty otherwise.

    Args:
        report: a `Report`, whose module imports this one.
    """
    results = report.results
    if not results or not (report.suite == "custom" or any(r.case.count > 1 for r in results)):
        return ""
    names = dict.fromkeys(name for r in results for name in r.entries)
    all_of_them = [name for name in names if all(name in r.entries and r.entries[name].state == "ok" for r in results)]
    sums = {name: sum(r.case.count * r.entries[name].seconds for r in results) for name in all_of_them}
    order = sorted(sums, key=lambda name: (name != report.ours, sums[name]))
    times = [f"{name} {duration(sums[name])}" for name in order]
    if all(r.best for r in results):
        best = sum(r.case.count * r.entries[r.best].seconds for r in results)
        ratio = f" ({best / sums[report.ours]:.2f})" if report.ours in sums else ""
        times.insert(int(report.ours in sums), f"best peer of each {duration(best)}{ratio}")
    calls = number(sum(r.case.count for r in results), "product")
    return f"time in the {calls} of one run: {', '.join(times) or 'no contender computed all of them'}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        head: names of the columns.
        rows: the cells of each row.
        left: number of leading columns that are words, aligned left.
        words: further columns that are aligned left, by name.
        title: what it shows; Markdown has none.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    words: Sequence[str] = ()
    title: str = ""

    def markdown(self) -> str:
        """The table in Markdown."""
        rule = ["---" if i < self.left or x in self.words else "--:" for i, x in enumerate(self.head)]
        # Names come from users' files.
        lines = ([" ".join(x.replace("|", "\\|").split()) for x in row] for row in (self.head, rule, *self.rows))
        return "\n".join("| " + " | ".join(row) + " |" for row in lines)

    def terminal(self) -> RichTable:
        """The table for a terminal."""
        return console.table(self.title, self.head, self.rows, words=(*self.head[: self.left], *self.words))
