"""A comparison as one self-contained HTML page.

Owns the page, the fragment that notebooks show, and their style and script, which are
files of this folder.

The page fetches nothing. It contains the report as JSON: `comparison.report.from_json`
reads the text of `<script id="report">`. All output of libraries is escaped.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from portmm.comparison.bars import (
    FARTHEST,
    MARKS,
    NONE,
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
from portmm.comparison.text import EXCEEDED, MORE_TIME, explained, heading
from portmm.host import machine_load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The browser must fetch nothing, whatever the content of the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
FACTS = {"isa": "all held to", "machine": "taken for", "chip": "", "threads": "", "load": "", "cores": "cores to use"}
"""Fields of a report -> their names on the page, empty for those of the heading; others keep their name."""

METHOD = (
    "A ratio is formed within a round and its median shown: it may differ a little from the quotient of two medians.",
    "A ratio that differs from 1 by no more than its spread, the middle half of the rounds' ratios, is a draw.",
    "Each contender has a process of its own, and only one runs at a time; variables that tune libraries are removed.",
    "Contenders alternate within each round, so that a drift of the clock affects all of them.",
    "Every contender computes a case by each method of its library, and the fastest method counts.",
    "Results are checked against a wider type before and after the timing; wrong ones are listed, never counted.",
    "The limit is measured in the same rounds: multiply-adds from registers, or the bandwidth of the operands' level.",
)


def page(report: Report) -> str:
    """Page of a report: UTF-8 text of an HTML file.

    Args:
        report: of any suite; it may lack portmm, peers, limits, or all results.
    """
    known = tidy(report)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"portmm compared: {known.chip}"),
        tag("style", _resource("page.css")),
    )
    body = tag(
        "body",
        _header(known),
        tag(
            "main",
            _section("Summary", summary(known)),
            _section("Roofline", *_roofline(known)),
            _section("Every case", _tools(), *_cases(known)),
            _section("All figures", *_figures(known)),
            _section("What went wrong", wrong(known)),
            _section("Contenders", *_contenders(known)),
            _section("How it was measured", *_method(known)),
        ),
        _data(report),
        tag("script", _resource("page.js")),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, "\n", body, lang="en") + "\n"


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


def _section(title: str, *content: Markup | str) -> Markup:
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title, id=name), *content, aria_labelledby=name)


def _header(report: Report) -> Markup:
    return tag(
        "header",
        tag("h1", "portmm and its peers" if any(e.peer for e in report.entrants) else "portmm without peers"),
        tag("p", heading(report), class_="lead"),
    )


def _contenders(report: Report) -> list[Markup | str]:
    """Facts of the report and the table of contenders."""
    rows = [tag("div", tag("dt", name), tag("dd", text)) for name, text in _facts(report)]
    contenders = [
        (e.name, e.version if e.state == "ok" else f"{e.state}: {e.reason}", "rounds to 8 bits (~)" * e.approximate)
        for e in report.entrants
    ]
    listed = [_table("Contenders", ("contender", "version", ""), contenders, left=3)] if contenders else []
    return [tag("dl", *rows), *listed]


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


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> Markup:
    """A table whose first `left` columns are text; the first one is the row's header."""
    heads = (tag("th", name, scope="col", class_=None if i < left else "n") for i, name in enumerate(head))
    lines = (
        tag(
            "tr",
            *(
                tag("td", x, class_=None if i < left else "n") if i else tag("th", x, scope="row")
                for i, x in enumerate(row)
            ),
        )
        for row in rows
    )
    table = tag("table", tag("caption", caption), tag("thead", tag("tr", *heads)), tag("tbody", *lines))
    return tag("div", table, class_="scroll", tabindex=0)


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
    head = ("group", "cases", "geometric mean", "wins", "draws", "losses", "lowest", "where")
    beyond = ("≤ ", "≥ ") if edge == FARTHEST else ("", "")
    bounds = tag("span", f"{beyond[0]}{1 / edge:.2g}"), tag("span", "1"), tag("span", f"{beyond[1]}{edge:.2g}")
    heads = [tag("th", x, scope="col", class_="n" if 0 < i < 7 else None) for i, x in enumerate(head)]
    heads.append(tag("th", tag("span", *bounds, class_="bounds"), scope="col", class_="ratios"))
    return concatenated(
        [
            lead,
            tag("p", f"{loaded[0].upper()}{loaded[1:]}.") if loaded else None,
            tag("p", f"{explained(report)}."),
            tag(
                "div",
                tag(
                    "table",
                    tag("caption", "Rate of portmm over that of the best peer of each case"),
                    tag("thead", tag("tr", *heads)),
                    tag("tbody", *(_summary_row(report, s, edge) for s in rows)),
                    class_="summary",
                ),
                class_="scroll",
            ),
        ]
    )


def _summary_row(report: Report, s: Summary, edge: float) -> Markup:
    own = [r for r in report.results if r.case.group == s.group]
    cells = (
        (str(s.count), "n"),
        (f"{s.mean:.2f}", "n win" if s.mean >= 1 else "n loss"),
        (str(s.wins), "n"),
        (str(s.draws), "n"),
        (str(s.losses), "n"),
        (f"{s.lowest:.2f}", "n"),
        (s.lowest_case, None),
    )
    row = [tag("th", s.group, scope="row"), *(tag("td", x, class_=kind) for x, kind in cells)]
    row.append(tag("td", strip(report, own or report.results, edge), class_="ratios"))
    return tag("tr", *row, class_=None if own else "total")


def _roofline(report: Report) -> list[Markup | str]:
    drawn = roofline(report)
    if not drawn:
        return [tag("p", "No case has a rate that could be drawn.")]
    text = "Each case is a line between portmm and the best peer of that case; point at one to read its figures."
    if report.threads > 1:
        text += f" Roofs are of one core times {report.threads}; caches that cores share give less."
    return [tag("p", text), tag("figure", legend(report), tag("div", drawn, class_="scroll", tabindex=0))]


def _tools() -> Markup:
    kinds = {"": "all cases", "loss": "losses", "draw": "draws", "win": "wins", "bad": "with failures"}
    options = [tag("option", text, value=value) for value, text in kinds.items()]
    return tag(
        "form",
        tag("label", "show ", tag("select", *options, id="kind")),
        tag("label", "named ", tag("input", id="named", type="search", placeholder="cube, 4096x1")),
        tag("output", id="count"),
        id="tools",
        hidden="hidden",
    )


def _cases(report: Report) -> list[Markup | str]:
    if not report.results:
        return [tag("p", "No case was measured.")]
    text = f"{unit(report)} of each contender, fastest first. The thin bar spans the rounds, slowest to fastest; the "
    text += "dashed line is the limit that this machine's own rates set, where it is near. * a method was wrong."
    return [tag("p", text), bars(report)]


def _figures(report: Report) -> list[Markup | str]:
    if not report.results:
        return [tag("p", "No case was measured.")]
    text = f"{unit(report)}; the best peer is underlined; {NONE} a contender that does not offer the case."
    if _loads(report):
        text += " Load is the number of cores that other processes kept busy."
    return [tag("p", text), tag("div", table(report), class_="scroll", tabindex=0)]


def table(report: Report) -> Markup:
    """Table of all cases and contenders."""
    names = report.shown
    ours = ["ratio", "spread"] if report.ours else []
    share = ["% of limit"] if report.ours and any(r.limit for r in report.results) else []
    loads = ["load"] if _loads(report) else []
    words = ["case", "MxNxK", "group"]
    heads = [tag("th", x, scope="col") for x in words]
    heads += [tag("th", x, scope="col", class_="n") for x in (*names, *ours, *share, *loads)]
    heads.append(tag("th", "best peer", scope="col"))
    rows = (_row(report, r, names, share=bool(share)) for r in report.results)
    caption = tag("caption", f"Rates in {unit(report)}")
    return tag("table", caption, tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="all")


def _loads(report: Report) -> bool:
    return any(r.load is not None for r in report.results)


def _row(report: Report, result: Result, names: Sequence[str], *, share: bool) -> Markup:
    case = result.case
    cells = [tag("th", case.name, scope="row"), tag("td", case.shape), tag("td", case.group)]
    for name in names:
        entry = result.entries.get(name)
        bad = "bad" if entry is not None and fault(entry) else ""
        kind = f"n {role(report, result, name)} {bad}".split()
        cells.append(tag("td", outcome(report, result, name), class_=" ".join(kind)))
    if report.ours:
        cells.append(tag("td", badge(report, result) if result.ratio is not None else NONE, class_="n"))
        cells.append(tag("td", percent(report.spread(result)), class_="n"))
    if share:
        cells.append(tag("td", percent(report.share(result)).rstrip("%"), class_="n"))
    if _loads(report):
        cells.append(tag("td", NONE if result.load is None else f"{result.load:.2f}", class_="n"))
    cells.append(tag("td", result.best or NONE))
    return tag("tr", *cells, data_name=f"{case.name} {case.shape} {case.group}", data_state=state(report, result))


def wrong(report: Report) -> Markup:
    """Missing contenders, failed results and skipped cases."""
    parts: list[Markup] = []
    away = [(e.name, e.state, e.reason, e.hint) for e in report.entrants if e.state != "ok"]
    if away:
        parts.append(
            _table("Contenders that did not take part", ("contender", "state", "reason", "what to do"), away, 4)
        )
    failed = [
        (r.case.name, name, failure, e.reason)
        for r in report.results
        for name, e in r.entries.items()
        if (failure := fault(e))
    ]
    if failed:
        parts.append(_table("Results that do not count", ("case", "contender", "state", "reason"), failed, 4))
    if report.skipped:
        text = f"No time was left for {counted(len(report.skipped), 'case')}: "
        parts.append(tag("p", text, ", ".join(report.skipped), f"; {MORE_TIME}."))
    return concatenated(parts) or tag(
        "p", "Nothing: every contender was found, every result was right, no case was left out."
    )


def _method(report: Report) -> list[Markup | str]:
    rounds = max((len(e.samples) for r in report.results for e in r.entries.values()), default=0)
    items = [f"Times are medians over {counted(rounds, 'round')}.", *METHOD]
    if report.approximate:
        items.append(
            "A contender marked ~ rounds activations to 8 bits; it enters ratios only where a case allows that."
        )
    if report.exceeded:
        items.append(f"{EXCEEDED[0].upper()}{EXCEEDED[1:]}: {', '.join(report.exceeded)}.")
    if report.removed:
        items.append(f"Not passed on to any contender: {', '.join(report.removed)}.")
    return [tag("ul", *(tag("li", text) for text in items), class_="said")]


def _data(report: Report) -> Markup:
    """The report as JSON in a script element, with `<` escaped, since it could end the element."""
    text = json.dumps(json.loads(report.to_json()), separators=(",", ":")).replace("<", "\\u003c")
    return tag(
        "footer",
        tag(
            "p", "This page holds all that it shows as JSON. ", tag("a", "Save report.json", id="save", hidden="hidden")
        ),
        tag("script", Markup(text), type="application/json", id="report"),
    )
