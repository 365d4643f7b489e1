"""A comparison as one self-contained HTML page.

Owns the page, the fragment that notebooks show, and the values in both; their markup is in the templates, style sheets
and the script of this folder.

The page fetches nothing. It contains the report as JSON: `comparison.report.from_json`
reads the text of `<script id="report">`. All output of libraries is escaped.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

from portmm.comparison.figures import grouped
from portmm.comparison.rates import NONE, Rate, fault, figure, outcome, percent, rate, tidy, unit
from portmm.comparison.report import Report, Result, geomean, summaries
from portmm.comparison.roofline import roofline
from portmm.comparison.text import EXCEEDED, MORE_TIME, SUMMARY, explained, heading
from portmm.host import machine_load
from portmm.util.templates import render, resource
from portmm.util.text import time

FACTS = {"isa": "all held to", "machine": "taken for", "chip": "", "threads": "", "load": "", "cores": "cores to use"}
"""Fields of a report -> their names on the page, empty for those of the heading; others keep their name."""
MARKS = {"win": "▲", "draw": "=", "loss": "▼"}
"""Marks of verdicts, which are distinguished by them and by words, not by colour alone."""
IN_SIGHT = 1.6
"""Largest ratio of the limit to the fastest rate at which it is drawn: a farther one would only shorten the bars."""
FARTHEST = 8.0
"""Ratios beyond this, or its inverse, are drawn at the edge of a strip."""


def page(report: Report) -> str:
    """Page of a report: UTF-8 text of an HTML file.

    Args:
        report: of any suite; it may lack portmm, peers, limits, or all results.
    """
    known = tidy(report)
    # As JSON in a script element, with `<` escaped, since it could end the element.
    data = json.dumps(json.loads(report.to_json()), separators=(",", ":")).replace("<", "\\u003c")
    return render(
        __file__,
        "page.html",
        **_values(known),
        style=resource(__file__, "page.css"),
        script=resource(__file__, "page.js"),
        data=data,
        rounds=max((len(e.samples) for r in known.results for e in r.entries.values()), default=0),
        roofline=roofline(known),
        facts=_facts(known),
        remarks=_remarks(known),
        contenders=[
            (e.name, e.version if e.state == "ok" else f"{e.state}: {e.reason}", "rounds to 8 bits (~)" * e.approximate)
            for e in known.entrants
        ],
    )


def fragment(report: Report) -> str:
    """Summary, table and failures of a report for a notebook, without a script and with a style of its own only."""
    return render(__file__, "fragment.html", **_values(tidy(report)), style=resource(__file__, "fragment.css"))


def _values(report: Report) -> dict[str, Any]:
    """Values of the parts that the page and the fragment share, and functions of cases."""
    reach = _reach(report)
    load = machine_load.sentence(report.load, report.cores)
    functions = (counted, state, role, outcome, percent, figure, fault, geomean, card, duration)
    return {x.__name__: x for x in functions} | {
        "report": report,
        "heading": heading(report),
        "load": load and load[0].upper() + load[1:],
        "explained": explained(report),
        "summaries": summaries(report),
        "summary_head": SUMMARY,
        "groups": grouped(report.results, lambda x: x.case.group),
        "unit": unit(report),
        "loads": any(r.load is not None for r in report.results),
        "shares": bool(report.ours) and any(r.limit for r in report.results),
        "more_time": MORE_TIME,
        "verdicts": lambda results: [report.verdict(r) for r in results],
        "absent": [(e.name, e.state, e.reason, e.hint) for e in report.entrants if e.state != "ok"],
        "failed": [
            (r.case.name, name, failure, e.reason)
            for r in report.results
            for name, e in r.entries.items()
            if (failure := fault(e))
        ],
        "reach": reach,
        "edges": ("\u2264 ", "\u2265 ") if reach == FARTHEST else ("", ""),
        # From the left to the right edge of a strip, equality in the middle: -1 to 1.
        "place": lambda ratio: max(-1.0, min(1.0, math.log(ratio) / math.log(reach))),
        "NONE": NONE,
        "MARKS": MARKS,
    }


def counted(count: int, noun: str, many: str = "") -> str:
    """A number with its noun: `1 case`, `2 cases`."""
    return f"{count} {noun}" if count == 1 else f"{count} {many or noun + 's'}"


def duration(seconds: float) -> str:
    """A time with three digits and a suitable unit."""
    return time(seconds).replace("us", "µs")


def state(report: Report, result: Result) -> str:
    """Filter words of a case: its verdict, and "bad" if any contender failed on it."""
    bad = "bad" if any(fault(e) for e in result.entries.values()) else ""
    return f"{report.verdict(result)} {bad}".strip()


def role(report: Report, result: Result, name: str) -> str:
    """CSS class of a contender on a case: "us", "best", or empty."""
    return "us" if name == report.ours else "best" if name == result.best else ""


@dataclass(frozen=True, slots=True)
class Card:
    """A case with a bar for every contender.

    Attributes:
        bars: contenders with a rate, fastest first.
        failed: contenders that failed.
        top: the rate of a whole bar.
        limit: the limit in percent of that, None if it is out of sight.
        notes: remarks.
    """

    bars: list[tuple[str, Rate]]
    failed: list[str]
    top: float
    limit: float | None
    notes: str


def card(report: Report, result: Result) -> Card:
    """Bars of a case."""
    bars = [(name, x) for name in report.ran if (x := rate(result, name))]
    ranked = sorted(bars, key=lambda row: -row[1].middle)
    others = [name for name in report.ran if name in result.entries and name not in dict(bars)]
    absent = [name for name in others if result.entries[name].state == "unsupported"]
    fastest = max((x.high for _, x in bars), default=1.0)
    limit = report.ceiling(result)
    near = limit if limit and limit < IN_SIGHT * fastest else None
    top = max(fastest, near or 0.0)
    notes = [f"limit {figure(limit)}" + (f" by {result.roof}" if result.roof else "")] if limit else []
    notes += [f"spread of the ratio {percent(report.spread(result))}"] if report.verdict(result) == "draw" else []
    notes += [f"does not offer it: {', '.join(absent)}"] if absent else []
    failed = [name for name in others if name not in absent]
    return Card(ranked, failed, top, near and 100 * near / top, "; ".join(notes))


def _reach(report: Report) -> float:
    """Ratio at the edge of all strips: the farthest from one, between 1.5 and `FARTHEST`."""
    away = [math.exp(abs(math.log(r.ratio))) for r in report.results if r.ratio is not None]
    return min(FARTHEST, max([1.5, *away]))


def _facts(report: Report) -> list[tuple[str, str]]:
    """Names and values of the report's fields that are words or numbers."""
    rows = []
    for field in fields(report):
        value = getattr(report, field.name)
        name = FACTS.get(field.name, field.name)
        if name and isinstance(value, str | int | float) and value not in ("", False):
            rows.append((name, "yes" if value is True else str(value)))
    if not report.isa:
        rows.append((FACTS["isa"], "nothing: each contender chose for itself"))
    return [*rows, ("cases", str(len(report.results)))]


def _remarks(report: Report) -> list[str]:
    remarks = []
    if report.approximate:
        text = "A contender marked ~ rounds activations to 8 bits; it enters ratios only where a case allows that."
        remarks.append(text)
    if report.exceeded:
        remarks.append(f"{EXCEEDED[0].upper()}{EXCEEDED[1:]}: {', '.join(report.exceeded)}.")
    if report.removed:
        remarks.append(f"Not passed on to any contender: {', '.join(report.removed)}.")
    return remarks
