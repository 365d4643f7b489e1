"""Statistics of several measurements, and tables of them.

Owns the spread of samples, the time of all products of a model, the sentences about unusual conditions of a
measurement, and `Table`: text cells as Markdown, for a terminal and as HTML, which escape what the form would take for
its own marks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from portmm.util import console
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


@dataclass(frozen=True, slots=True)
class Counted:
    """A product of a model.

    Attributes:
        count: number of times that a run computes it.
        seconds: contender -> seconds of one product.
        best: the fastest peer, empty if none.
    """

    count: int
    seconds: Mapping[str, float]
    best: str


def totals(products: Sequence[Counted], ours: str) -> tuple[dict[str, float], float | None]:
    """Seconds of all products of a run, for each contender that computes all of them.

    Args:
        products: the products of a run.
        ours: portmm's name.

    Returns:
        Contender -> seconds, portmm first, then the fastest first; and the seconds of the best
        peer of each product, None if one has none.
    """
    names = dict.fromkeys(name for x in products for name in x.seconds)
    sums = {name: sum(x.count * x.seconds[name] for x in products) for name in names if _all_have(products, name)}
    best = sum(x.count * x.seconds[x.best] for x in products) if all(x.best for x in products) else None
    order = sorted(sums, key=lambda name: (name != ours, sums[name]))
    return {name: sums[name] for name in order}, best


def total_lines(report: Any) -> list[str]:
    """Sentence with the totals of a report, if its products are a user's own; none otherwise.

    Args:
        report: a `Report`, whose module imports this one.
    """
    products = [
        Counted(r.case.count, {n: e.seconds for n, e in r.entries.items() if e.state == "ok"}, r.best)
        for r in report.results
    ]
    own = report.suite == "custom" or any(x.count > 1 for x in products)
    return [_total_line(products, report.ours)] if own and products else []


def _total_line(products: Sequence[Counted], ours: str) -> str:
    sums, best = totals(products, ours)
    times = [f"{name} {duration(seconds)}" for name, seconds in sums.items()]
    if best is not None:
        ratio = f" ({best / sums[ours]:.2f})" if ours in sums else ""
        times.insert(int(ours in sums), f"best peer of each {duration(best)}{ratio}")
    calls = sum(x.count for x in products)
    return f"time in the {calls} products of one run: {', '.join(times) or 'no contender computed all of them'}"


def _all_have(products: Sequence[Counted], name: str) -> bool:
    return all(name in x.seconds for x in products)


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

    def html(self) -> str:
        """The table without a style, for notebooks."""
        head = "".join(f"<th>{escape(x)}</th>" for x in self.head)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(x)}</td>' for x in row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
