"""HTML elements, the formats of their figures, bar charts of the cases, and strip plots of the ratios of each group.

Owns `Markup` and `tag`, which escape all text that is not markup; the values of a report that several parts of a page
show: rates with their spread, numbers as text; and both kinds of charts, drawn by style sheet and SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from portmm.comparison.report import Entry, Report, Result, geomean

NONE = "\N{EN DASH}"
"""Text in place of a missing figure."""
# Self-closing elements, in a form that both XML and HTML accept.
LEAVES = frozenset(("circle", "line", "path", "rect", "meta", "link", "input"))


class Markup(str):
    """Text that is markup already; any other text is escaped before it is concatenated with markup."""

    __slots__ = ()


Content = str | float | None


def tag(name: str, /, *content: Content, **attributes: Content) -> Markup:
    """An element with its content and attributes, both escaped.

    Args:
        name: name of the element.
        content: its parts; None is left out.
        attributes: by name, underscores for hyphens, with one at the end for names that are
            words of Python; those that are None are left out.
    """
    head = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{head}/>" if name in LEAVES else f"<{name}{head}>{concatenated(content)}</{name}>")


def concatenated(parts: Iterable[Content]) -> Markup:
    """Concatenation of parts, escaped unless they are markup."""
    return Markup("".join(x if isinstance(x, Markup) else escape(_text(x), quote=False) for x in parts))


def _text(value: Content) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return "" if value is None else str(value)


def percent(share: float | None) -> str:
    """A fraction in whole percents; `NONE` for None."""
    return NONE if share is None else f"{100 * share:.0f}%"


def figure(value: float | None) -> str:
    """A rate with three digits, empty for None."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """A time with three digits and a suitable unit."""
    scale, unit = next((x for x in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= x[0]), (1e-9, "ns"))
    return f"{seconds / scale:.3g} {unit}"


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 case`, `2 cases`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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


def outcome(report: Report, result: Result, name: str) -> str:
    """Cell of a contender on a case: its rate, or its state."""
    entry = result.entries.get(name)
    if entry is None or entry.state == "unsupported":
        return NONE
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


MARKS = {"win": "▲", "draw": "=", "loss": "▼"}
"""Marks of verdicts, which are distinguished by them and by words, not by colour alone."""
IN_SIGHT = 1.6
"""Largest ratio of the limit to the fastest rate at which it is drawn: a farther one would only shorten the bars."""
STRIP_WIDTH, STRIP_HEIGHT = 300.0, 22.0
FARTHEST = 8.0
"""Ratios beyond this, or its inverse, are drawn at the edge of a strip."""


def badge(report: Report, result: Result) -> Markup:
    """Badge of a case: its ratio with the verdict."""
    kind = report.verdict(result)
    if result.ratio is None:
        return tag("span", "no ratio: portmm or a peer is missing", class_="verdict")
    return tag("span", f"{MARKS[kind]} {kind} {result.ratio:.2f}", class_=f"verdict {kind}")


def state(report: Report, result: Result) -> str:
    """Filter words of a case: its verdict, and "bad" if any contender failed on it."""
    bad = "bad" if any(fault(e) for e in result.entries.values()) else ""
    return f"{report.verdict(result)} {bad}".strip()


def bars(report: Report) -> Markup:
    """Bar charts of all cases by group, with a bar for every contender, fastest first."""
    groups: dict[str, list[Result]] = {}
    for result in report.results:
        groups.setdefault(result.case.group, []).append(result)
    return concatenated(_group(report, name, rows) for name, rows in groups.items())


def _group(report: Report, name: str, rows: Sequence[Result]) -> Markup:
    ratios = [r.ratio for r in rows if r.ratio is not None]
    mean = geomean(ratios)
    text = counted(len(rows), "case")
    if mean is not None:
        words = [report.verdict(r) for r in rows]
        won, drawn, lost = (words.count(x) for x in MARKS)
        text += f", geometric mean {mean:.2f}: {won} won, {drawn} drawn, {lost} lost"
    head = tag("summary", tag("h3", name), " ", tag("span", text))
    return tag("details", head, tag("div", *(_card(report, r) for r in rows), class_="cards"), open="open")


def _card(report: Report, result: Result) -> Markup:
    rates = {name: x for name in report.ran if (x := rate(result, name))}
    others = [name for name in report.ran if name not in rates and name in result.entries]
    absent = [name for name in others if result.entries[name].state == "unsupported"]
    failed = [name for name in others if name not in absent]
    fastest = max((x.high for x in rates.values()), default=1.0)
    limit = report.ceiling(result)
    near = limit is not None and limit < IN_SIGHT * fastest
    top = max(fastest, limit) if near and limit else fastest
    ranked = sorted(rates, key=lambda name: -rates[name].middle)
    notes = [f"limit {figure(limit)}" + (f" by {result.roof}" if result.roof else "")] if limit else []
    notes += [f"spread of the ratio {percent(report.spread(result))}"] if report.verdict(result) == "draw" else []
    notes += [f"does not offer it: {', '.join(absent)}"] if absent else []
    return tag(
        "article",
        tag("h4", result.case.name, " ", tag("small", result.case.shape)),
        tag("p", badge(report, result), f" of {result.best}" if result.best and result.ratio is not None else None),
        tag(
            "ul",
            *(_bar(report, result, name, rates[name], top) for name in ranked),
            *(_failure(report, result, name) for name in failed),
            style=f"--limit:{100 * limit / top:.1f}" if near and limit else None,
        ),
        tag("p", "; ".join(notes), class_="notes") if notes else None,
        class_="case",
        data_name=f"{result.case.name} {result.case.shape} {result.case.group}",
        data_state=state(report, result),
    )


def _bar(report: Report, result: Result, name: str, speed: Rate, top: float) -> Markup:
    entry = result.entries[name]
    low, middle, high = (100 * x / top for x in (speed.low, speed.middle, speed.high))
    title = f"{speed.words} {unit(report)}, {duration(speed.seconds)}, {entry.method}"
    return tag(
        "li",
        tag("b", name),
        tag("i", style=f"--v:{middle:.1f};--l:{low:.1f};--h:{high:.1f}"),
        tag("span", outcome(report, result, name) + ("*" if entry.reason else "")),
        class_=role(report, result, name) or None,
        title=title + (f"; a method was wrong: {entry.reason}" if entry.reason else ""),
    )


def _failure(report: Report, result: Result, name: str) -> Markup:
    return tag("li", tag("b", name), tag("strong", "✕ ", outcome(report, result, name)), class_="bad")


def role(report: Report, result: Result, name: str) -> str:
    """CSS class of a contender on a case: "us", "best", or empty."""
    return "us" if name == report.ours else "best" if name == result.best else ""


def strip(report: Report, rows: Sequence[Result], farthest: float) -> Markup:
    """Strip plot of the ratios of a group on a logarithmic axis, with equality in the middle.

    Args:
        report: the report of the cases.
        rows: cases, some with a ratio.
        farthest: the ratio at the right edge, its inverse at the left one.
    """
    half, middle = STRIP_WIDTH / 2, STRIP_HEIGHT / 2
    dots = []
    for r in rows:
        if r.ratio is None:
            continue
        x = half + (half - 7) * max(-1.0, min(1.0, math.log(r.ratio) / math.log(farthest)))
        y = middle
        shape = {
            "win": tag("circle", class_="us", cx=x, cy=y, r=4),
            "draw": tag("line", class_="drawn", x1=x, y1=y - 5, x2=x, y2=y + 5),
            "loss": tag("path", class_="best", d=f"M{x - 4.5:.1f} {y - 4:.1f}h9l-4.5 8z"),
        }[report.verdict(r)]
        dots.append(tag("g", tag("title", f"{r.case.name}: {r.ratio:.2f} of {r.best}, a {report.verdict(r)}"), shape))
    lost = sum(report.verdict(r) == "loss" for r in rows)
    return tag(
        "svg",
        tag("line", class_="axis", x1=0, y1=middle, x2=STRIP_WIDTH, y2=middle),
        tag("line", class_="even", x1=half, y1=0, x2=half, y2=STRIP_HEIGHT),
        *dots,
        class_="strip",
        viewBox=f"0 0 {STRIP_WIDTH:.0f} {STRIP_HEIGHT:.0f}",
        role="img",
        aria_label=f"{counted(len(dots), 'ratio')}, {lost} lost",
        xmlns="http://www.w3.org/2000/svg",
    )


def reach(report: Report) -> float:
    """Ratio at the edge of all strips: the farthest from one, between 1.5 and `FARTHEST`."""
    away = [math.exp(abs(math.log(r.ratio))) for r in report.results if r.ratio is not None]
    return min(FARTHEST, max([1.5, *away]))
