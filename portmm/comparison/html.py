"""A comparison as one self-contained HTML page.

Owns the page, the fragment that notebooks show, and their template, style and script, which are
files of this folder.

The page fetches nothing. It contains the report as JSON: `comparison.report.from_json`
reads the text of `<script id="report">`. All output of libraries is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from string import Template

from portmm.comparison.bars import (
    FARTHEST,
    MARKS,
    NONE,
    Content,
    Markup,
    badge,
    bars,
    concatenated,
    counted,
    fault,
    outcome,
    percent,
    reach,
    role,
    state,
    strip,
    tag,
    tidy,
    unit,
)
from portmm.comparison.report import Report, Result, Summary, summaries
from portmm.comparison.roofline import legend, roofline
from portmm.comparison.text import EXCEEDED, MORE_TIME, SUMMARY, explained, heading
from portmm.host import machine_load

FACTS = {"isa": "all held to", "machine": "taken for", "chip": "", "threads": "", "load": "", "cores": "cores to use"}
"""Fields of a report -> their names on the page, empty for those of the heading; others keep their name."""

Cell = str | tuple[Content, str | None]
"""Cell of a table: its text, or that with its CSS class."""


def page(report: Report) -> str:
    """Page of a report: UTF-8 text of an HTML file.

    Args:
        report: of any suite; it may lack portmm, peers, limits, or all results.
    """
    known = tidy(report)
    rounds = max((len(e.samples) for r in known.results for e in r.entries.values()), default=0)
    # As JSON in a script element, with `<` escaped, since it could end the element.
    data = json.dumps(json.loads(report.to_json()), separators=(",", ":")).replace("<", "\\u003c")
    texts = {
        "chip": known.chip,
        "title": "portmm and its peers" if any(e.peer for e in known.entrants) else "portmm without peers",
        "heading": heading(known),
        "rounds": counted(rounds, "round"),
    }
    parts = {
        "style": _resource("page.css"),
        "script": _resource("page.js"),
        "summary": summary(known),
        "roofline": _roofline(known),
        "cases": _cases(known),
        "figures": _figures(known),
        "wrong": wrong(known),
        "contenders": _contenders(known),
        "remarks": concatenated(tag("li", text) for text in _remarks(known)),
        "data": data,
    }
    template = Template(_resource("page.html"))
    return template.substitute(parts, **{name: concatenated([text]) for name, text in texts.items()})


def fragment(report: Report) -> str:
    """Summary, table and failures of a report for a notebook, without a script and with a style of its own only."""
    known = tidy(report)
    parts = [tag("style", _resource("fragment.css")), tag("p", tag("b", heading(known))), summary(known)]
    if known.results:
        parts.append(tag("div", table(known), class_="scroll"))
    return tag("div", *parts, tag("p", tag("b", "What went wrong")), wrong(known), class_="portmm-compare")


@cache
def _resource(name: str) -> Markup:
    return Markup(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _contenders(report: Report) -> Markup:
    """Facts of the report and the table of contenders."""
    facts = tag("dl", *(tag("div", tag("dt", name), tag("dd", text)) for name, text in _facts(report)))
    contenders = [
        (e.name, e.version if e.state == "ok" else f"{e.state}: {e.reason}", "rounds to 8 bits (~)" * e.approximate)
        for e in report.entrants
    ]
    return concatenated([facts, _words("Contenders", ("contender", "version", ""), contenders)])


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


def _table(caption: str, head: Iterable[Cell], rows: Iterable[Markup], kind: str | None = None) -> Markup:
    """A table of rows."""
    heads = (
        tag("th", x[0], scope="col", class_=x[1]) if isinstance(x, tuple) else tag("th", x, scope="col") for x in head
    )
    thead, tbody = tag("thead", tag("tr", *heads)), tag("tbody", *rows)
    return tag("table", tag("caption", caption), thead, tbody, class_=kind)


def _row(cells: Iterable[Cell], **attributes: Content) -> Markup:
    """A row, whose first cell is its header."""
    (first, _), *others = (x if isinstance(x, tuple) else (x, None) for x in cells)
    return tag("tr", tag("th", first, scope="row"), *(tag("td", x, class_=kind) for x, kind in others), **attributes)


def _words(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup | None:
    """A table of words; None without rows."""
    return _scrolled(_table(caption, head, map(_row, rows))) if rows else None


def _scrolled(content: Markup) -> Markup:
    return tag("div", content, class_="scroll", tabindex=0)


def summary(report: Report) -> Markup:
    """Geometric means with wins, draws, losses and the lowest ratio, and the load of the machine."""
    rows = summaries(report)
    if not rows:
        why = "no case has both portmm and a peer" if report.results else "nothing was measured"
        return tag("p", f"There is no ratio to show: {why}.")
    last = rows[-1]
    lead = tag(
        "p",
        "Over ",
        counted(last.count, "case"),
        " portmm runs at ",
        tag("strong", f"{last.mean:.2f}"),
        " of the rate of the best peer of each case (geometric mean): ",
        tag("strong", f"{MARKS['win']} {counted(last.wins, 'win')}", class_="win"),
        ", ",
        tag("strong", f"{MARKS['draw']} {counted(last.draws, 'draw')}"),
        ", ",
        tag("strong", f"{MARKS['loss']} {last.losses} {'loss' if last.losses == 1 else 'losses'}", class_="loss"),
        f", the lowest {last.lowest:.2f} at {last.lowest_case}.",
        class_="lead",
    )
    loaded = machine_load.sentence(report.load, report.cores)
    edge = reach(report)
    beyond = ("\u2264 ", "\u2265 ") if edge == FARTHEST else ("", "")
    bounds = tag("span", f"{beyond[0]}{1 / edge:.2g}"), tag("span", "1"), tag("span", f"{beyond[1]}{edge:.2g}")
    numbers: list[Cell] = [(x, "n") for x in SUMMARY[1:-1]]
    head = (SUMMARY[0], *numbers, SUMMARY[-1], (tag("span", *bounds, class_="bounds"), "ratios"))
    caption = "Rate of portmm over that of the best peer of each case"
    means = _table(caption, head, (_summary_row(report, s, edge) for s in rows), "summary")
    notes = [
        tag("p", f"{loaded[0].upper()}{loaded[1:]}.") if loaded else None,
        tag("p", f"{explained(report)}."),
    ]
    return concatenated([lead, *notes, tag("div", means, class_="scroll")])


def _summary_row(report: Report, s: Summary, edge: float) -> Markup:
    own = [r for r in report.results if r.case.group == s.group]
    counts: list[Cell] = [(str(x), "n") for x in (s.wins, s.draws, s.losses)]
    mean = f"{s.mean:.2f}", "n win" if s.mean >= 1 else "n loss"
    ratios = strip(report, own or report.results, edge), "ratios"
    cells: list[Cell] = [s.group, (str(s.count), "n"), mean, *counts, (f"{s.lowest:.2f}", "n"), s.lowest_case, ratios]
    return _row(cells, class_=None if own else "total")


def _roofline(report: Report) -> Markup:
    drawn = roofline(report)
    if not drawn:
        return tag("p", "No case has a rate that could be drawn.")
    text = "Each case is a line between portmm and the best peer of that case; point at one to read its figures."
    if report.threads > 1:
        text += f" Roofs are of one core times {report.threads}; caches that cores share give less."
    return concatenated([tag("p", text), tag("figure", legend(report), _scrolled(drawn))])


def _cases(report: Report) -> Markup:
    if not report.results:
        return tag("p", "No case was measured.")
    text = f"{unit(report)} of each contender, fastest first. The thin bar spans the rounds, slowest to fastest; the "
    text += "dashed line is the limit that this machine's own rates set, where it is near. * a method was wrong."
    return concatenated([tag("p", text), bars(report)])


def _figures(report: Report) -> Markup:
    if not report.results:
        return tag("p", "No case was measured.")
    text = f"{unit(report)}; the best peer is underlined; {NONE} a contender that does not offer the case."
    if _loads(report):
        text += " Load is the number of cores that other processes kept busy."
    return concatenated([tag("p", text), _scrolled(table(report))])


def table(report: Report) -> Markup:
    """Table of all cases and contenders."""
    ours = ["ratio", "spread"] if report.ours else []
    share = ["% of limit"] if report.ours and any(r.limit for r in report.results) else []
    loads = ["load"] if _loads(report) else []
    numbers: list[Cell] = [(x, "n") for x in (*report.shown, *ours, *share, *loads)]
    rows = (_case_row(report, r, share=bool(share)) for r in report.results)
    return _table(f"Rates in {unit(report)}", ["case", "MxNxK", "group", *numbers, "best peer"], rows, "all")


def _loads(report: Report) -> bool:
    return any(r.load is not None for r in report.results)


def _case_row(report: Report, result: Result, *, share: bool) -> Markup:
    case = result.case
    cells: list[Cell] = [case.name, case.shape, case.group]
    for name in report.shown:
        entry = result.entries.get(name)
        bad = "bad" if entry is not None and fault(entry) else ""
        cells.append((outcome(report, result, name), " ".join(f"n {role(report, result, name)} {bad}".split())))
    if report.ours:
        cells.append((badge(report, result) if result.ratio is not None else NONE, "n"))
        cells.append((percent(report.spread(result)), "n"))
    if share:
        cells.append((percent(report.share(result)).rstrip("%"), "n"))
    if _loads(report):
        cells.append((NONE if result.load is None else f"{result.load:.2f}", "n"))
    about = f"{case.name} {case.shape} {case.group}"
    return _row([*cells, result.best or NONE], data_name=about, data_state=state(report, result))


def wrong(report: Report) -> Markup:
    """Missing contenders, failed results and skipped cases."""
    away = [(e.name, e.state, e.reason, e.hint) for e in report.entrants if e.state != "ok"]
    failed = [
        (r.case.name, name, failure, e.reason)
        for r in report.results
        for name, e in r.entries.items()
        if (failure := fault(e))
    ]
    parts = [
        _words("Contenders that did not take part", ("contender", "state", "reason", "what to do"), away),
        _words("Results that do not count", ("case", "contender", "state", "reason"), failed),
    ]
    if report.skipped:
        text = f"No time was left for {counted(len(report.skipped), 'case')}: {', '.join(report.skipped)}; {MORE_TIME}."
        parts.append(tag("p", text))
    nothing = "Nothing: every contender was found, every result was right, no case was left out."
    return concatenated(filter(None, parts)) or tag("p", nothing)


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
