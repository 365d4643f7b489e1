"""Elements of a page, and the figures that stand in them.

Owns `Markup` and `tag`, which escape whatever is not markup, and what the parts of a
page ask of a report: rates with their spread, numbers as text. Imports
`comparison.report`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portmm.comparison.report import Entry, Report, Result

NONE = "\N{EN DASH}"
"""What stands where there is no figure."""
# Closed in place, which both XML and HTML understand.
LEAVES = frozenset(("circle", "line", "path", "rect", "meta", "link", "input"))


class Markup(str):
    """Text that is markup already; any other text is escaped before it is put beside it."""

    __slots__ = ()


Content = str | float | None


def tag(name: str, /, *content: Content, **attributes: Content) -> Markup:
    """An element with its content and attributes, both escaped.

    Args:
        name: of the element.
        content: its parts; None is left out.
        attributes: by name, underscores for hyphens, with one at the end for names that are
            words of Python; those that are None are left out.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{said}/>" if name in LEAVES else f"<{name}{said}>{joined(content)}</{name}>")


def joined(parts: Iterable[Content]) -> Markup:
    """Parts one after another, escaped unless they are markup."""
    return Markup("".join(x if isinstance(x, Markup) else escape(_text(x), quote=False) for x in parts))


def _text(value: Content) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return "" if value is None else str(value)


def percent(share: float | None) -> str:
    """A share of one, in whole percents; `NONE` for None."""
    return NONE if share is None else f"{100 * share:.0f}%"


def figure(value: float | None) -> str:
    """A rate with three digits, empty for None."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """A time with three digits and a unit that suits it."""
    scale, unit = next((x for x in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= x[0]), (1e-9, "ns"))
    return f"{seconds / scale:.3g} {unit}"


def counted(count: int, noun: str) -> str:
    """`1 case`, `2 cases`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def unit(report: Report) -> str:
    """What rates are in: integers have no flops."""
    return "GOP/s" if any(r.case.narrow for r in report.results) else "GFLOP/s"


@dataclass(frozen=True, slots=True)
class Rate:
    """A contender's rate on a case, in GFLOP/s.

    Attributes:
        middle: of the median time.
        low: of the slowest round.
        high: of the fastest round.
        seconds: the median time.
    """

    middle: float
    low: float
    high: float
    seconds: float

    @property
    def words(self) -> str:
        """The rate and, if there is one, the range over rounds."""
        low, middle, high = (figure(x) for x in (self.low, self.middle, self.high))
        return middle if low == high else f"{middle} ({low} to {high})"


def rate(result: Result, name: str) -> Rate | None:
    """The rate of a contender, None where it has none."""
    entry = result.entries.get(name)
    if entry is None or entry.state != "ok" or not _real(entry.seconds) or not result.case.flops:
        return None
    times = [x for x in entry.samples if _real(x)] or [entry.seconds]
    work = result.case.flops / 1e9
    return Rate(work / entry.seconds, work / max(times), work / min(times), entry.seconds)


def fault(entry: Entry) -> str:
    """What went wrong with a result, in words; empty if nothing did, or if none was promised."""
    if entry.state == "unsupported":
        return ""
    if entry.state != "ok":
        return entry.state
    return "a method was wrong" if entry.reason else "" if _real(entry.seconds) else "not timed"


def outcome(report: Report, result: Result, name: str) -> str:
    """What a contender came to on a case: a rate, or the word for what became of it."""
    entry = result.entries.get(name)
    if entry is None or entry.state == "unsupported":
        return NONE
    if entry.state != "ok":
        return entry.state
    found = rate(result, name)
    return ("~" if name in report.approximate else "") + figure(found.middle) if found else "not timed"


def tidy(report: Report) -> Report:
    """The report without ratios and limits that are no positive numbers, which nothing can be drawn from."""
    results = tuple(replace(r, ratio=_kept(r.ratio), limit=_kept(r.limit)) for r in report.results)
    return replace(report, results=results, rates={k: v for k, v in report.rates.items() if _real(v)})


def _kept(value: float | None) -> float | None:
    return value if value is not None and _real(value) else None


def _real(value: float) -> bool:
    return math.isfinite(value) and value > 0
