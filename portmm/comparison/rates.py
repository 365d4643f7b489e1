"""Rates of contenders as pages show them.

Owns the rates of a report with their range over rounds, their text, and the words for results without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from portmm.comparison.report import Entry, Report, Result

NONE = "\N{EN DASH}"
"""Text in place of a missing figure."""


def percent(share: float | None) -> str:
    """A fraction in whole percents; `NONE` for None."""
    return NONE if share is None else f"{100 * share:.0f}%"


def figure(value: float | None) -> str:
    """A rate with three digits, empty for None."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def unit(report: Report) -> str:
    """Unit of a report's rates: GOP/s with narrow types, since integers have no flops."""
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
        """The rate and, if it has one, the range over rounds."""
        low, middle, high = (figure(x) for x in (self.low, self.middle, self.high))
        return middle if low == high else f"{middle} ({low} to {high})"


def rate(result: Result, name: str) -> Rate | None:
    """Rate of a contender, None where it has none."""
    entry = result.entries.get(name)
    if entry is None or entry.state != "ok" or not _real(entry.seconds) or not result.case.flops:
        return None
    times = [x for x in entry.samples if _real(x)] or [entry.seconds]
    work = result.case.flops / 1e9
    return Rate(work / entry.seconds, work / max(times), work / min(times), entry.seconds)


def fault(entry: Entry) -> str:
    """Failure of a result, in words; empty if it is right or unsupported."""
    if entry.state == "unsupported":
        return ""
    if entry.state != "ok":
        return entry.state
    return "a method was wrong" if entry.reason else "" if _real(entry.seconds) else "not timed"


def outcome(report: Report, result: Result, name: str, none: str = NONE) -> str:
    """Cell of a contender on a case: its rate, or its state; `none` where it does not support the case."""
    entry = result.entries.get(name)
    if entry is None or entry.state == "unsupported":
        return none
    if entry.state != "ok":
        return entry.state
    speed = rate(result, name)
    return ("~" if name in report.approximate else "") + figure(speed.middle) if speed else "not timed"


def tidy(report: Report) -> Report:
    """The report without ratios and limits that are not positive finite numbers, which cannot be drawn."""
    results = tuple(replace(r, ratio=_kept(r.ratio), limit=_kept(r.limit)) for r in report.results)
    return replace(report, results=results, rates={k: v for k, v in report.rates.items() if _real(v)})


def _kept(value: float | None) -> float | None:
    return value if value is not None and _real(value) else None


def _real(value: float) -> bool:
    return math.isfinite(value) and value > 0
