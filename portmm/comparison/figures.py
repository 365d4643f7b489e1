"""Figures made of several measurements.

Owns how far samples spread, the time of all products of a model, and the conditions that a
reader must know. Imports nothing of portmm.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def spread(values: Sequence[float]) -> float | None:
    """The range of the middle half, over the median; None of fewer than two values."""
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else None


def decided(ratio: float, spread: float | None) -> bool:
    """Whether a ratio differs from one by more than its spread, the faster over the slower; so if that is unknown."""
    return spread is None or ratio <= 0 or max(ratio, 1 / ratio) - 1 > spread


@dataclass(frozen=True, slots=True)
class Counted:
    """A product of a model.

    Attributes:
        count: how often a run computes it.
        seconds: contender -> seconds of one.
        best: the fastest peer, empty if none.
    """

    count: int
    seconds: Mapping[str, float]
    best: str


def totals(products: Sequence[Counted], ours: str) -> tuple[dict[str, float], float | None]:
    """Seconds of all products of a run, for each contender that computes all of them.

    Args:
        products: what a run computes.
        ours: portmm's name.

    Returns:
        Contender -> seconds, portmm first, then the fastest first; and the seconds of the best
        peer of each product, None if one has none.
    """
    names = dict.fromkeys(name for x in products for name in x.seconds)
    whole = {name: sum(x.count * x.seconds[name] for x in products) for name in names if _all_have(products, name)}
    best = sum(x.count * x.seconds[x.best] for x in products) if all(x.best for x in products) else None
    order = sorted(whole, key=lambda name: (name != ours, whole[name]))
    return {name: whole[name] for name in order}, best


def conditions(report: Any) -> list[str]:
    """Sentences about how a `Report` was measured, where that is not as usual."""
    said = []
    if report.cold:
        said.append(f"cold caches: at least {report.cold >> 20} MiB pass between two uses of an operand")
    if report.alone:
        said.append(f"portmm alone is held to {report.alone}: no other library can be, and ratios say little")
    return said


def total_lines(report: Any) -> list[str]:
    """The totals of a report in a sentence, if its products are a user's own; none otherwise.

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
    whole, best = totals(products, ours)
    said = [f"{name} {duration(seconds)}" for name, seconds in whole.items()]
    if best is not None:
        ratio = f" ({best / whole[ours]:.2f})" if ours in whole else ""
        said.insert(int(ours in whole), f"best peer of each {duration(best)}{ratio}")
    calls = sum(x.count for x in products)
    return f"time in the {calls} products of one run: {', '.join(said) or 'nobody computed all of them'}"


def _all_have(products: Sequence[Counted], name: str) -> bool:
    return all(name in x.seconds for x in products)


def duration(seconds: float) -> str:
    """Seconds for people: three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
