"""A comparison as text: for a terminal, as Markdown, and as flat records in CSV.

Owns all three, the notes of the tables, and the selection of a format by a file's suffix.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.comparison.figures import Table, spread, total_line
from portmm.comparison.rates import outcome
from portmm.comparison.report import Report, Result, summaries
from portmm.host import machine_load
from portmm.util.console import table
from portmm.util.templates import render

if TYPE_CHECKING:
    from rich.console import RenderableType


WIDE = 140
"""Default width of the output in columns."""
GAP = 2
"""Columns of a terminal between two cells, and at the table's edges in all."""
SUMMARY = ("group", "cases", "geometric mean", "wins", "draws", "losses", "lowest", "where")
RATIO = "ratio: portmm's rate over the best peer's; spread: range of the middle half of the rounds' ratios"
LEGEND = f"{RATIO}; a ratio that differs from 1 by no more than its spread is a draw (=)"
MORE_TIME = "give it with --budget SECONDS, in Python budget_s"
EXCEEDED = (
    "the limit is the fastest contender's rate, since less was measured (something disturbed the measurement, or "
    "operands stayed in a nearer cache)"
)
LIMIT = "% limit: portmm's rate over what this machine reached in the same rounds"


def heading(report: Report) -> str:
    """Heading of a report in one line: processor, threads, forced ISA, unit."""
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    forced = f", all held to {report.isa}" if report.isa else ""
    forced += f", portmm alone held to {report.alone}" if report.alone else ""
    narrow = any(result.case.narrow for result in report.results)
    cold = ", cold caches" if report.cold else ""
    where = cold if report.device else f", {threads}{forced}{cold}"
    return f"{report.chip}{where}, {'narrow types, GOP/s' if narrow else 'f32, GFLOP/s'}"


def _columns(report: Report) -> list[str]:
    limit = ["% limit"] if report.ours and any(r.limit for r in report.results) else []
    verdict = ["best peer", "ratio", "verdict", "spread"] if report.ours else ["best peer"]
    return ["case", "MxNxK", *report.shown, *verdict, *limit]


def _row(report: Report, result: Result) -> list[str]:
    row = [
        result.case.name,
        result.case.shape,
        *(outcome(report, result, name, "-") for name in report.shown),
        result.best or "-",
    ]
    if not report.ours:
        return row
    row += ["" if result.ratio is None else f"{result.ratio:.2f}", report.verdict(result)]
    row.append("" if (spread := report.spread(result)) is None else f"{100 * spread:.0f}%")
    if any(r.limit for r in report.results):
        row.append("" if (share := report.share(result)) is None else f"{100 * share:.0f}")
    return row


def explained(report: Report) -> str:
    """Explanation of the columns that are not rates, in one line; empty where there are none."""
    if not any(r.ratio is not None for r in report.results):
        return ""
    limit = "% limit" in _columns(report)
    return f"{LEGEND}; {LIMIT}" if limit else LEGEND


STYLES = {"win": "green", "loss": "red"}


def terminal(report: Report, width: int = WIDE) -> RenderableType:
    """The report for a terminal: the table, the means, and the notes.

    Args:
        report: the report.
        width: columns of the terminal; shapes, which follow from most names, are left out where they do not fit.
    """
    from rich.console import Group
    from rich.text import Text

    rows = [dict(zip(_columns(report), _row(report, result), strict=True)) for result in report.results]
    # Bold marks the best peer, a sign and colours mark the verdict.
    columns = [name for name in _columns(report) if name not in ("best peer", "verdict")]
    for row in rows:
        if row.get("verdict") == "draw":
            row["ratio"] += "="
    taken = sum(GAP + max(map(len, (name, *(row[name] for row in rows)))) for name in columns)
    if taken + GAP > width:
        columns.remove("MxNxK")
    cells = [[Text(row[name], "bold" if name == row["best peer"] else "") for name in columns] for row in rows]
    styles = [STYLES.get(row.get("verdict", ""), "") for row in rows]
    listed = table(heading(report), columns, cells, words=("case", "MxNxK"), styles=styles)
    for column in listed.columns[columns.index("MxNxK") + 1 if "MxNxK" in columns else 1 :]:
        column.no_wrap, column.overflow, column.min_width = True, "ellipsis", len(str(column.header))
    means = Table(SUMMARY, _summary_rows(report), words=("where",), title="ratio to the best peer (bold) of each case")
    parts: list[RenderableType] = [listed, *map(Text, filter(None, [explained(report)]))]
    parts += [means.terminal()] if means.rows else []
    return Group(*parts, *(Text(line, "dim") for line in notes(report)))


def _summary_rows(report: Report) -> list[list[str]]:
    return [
        [s.group, *map(str, (s.count, f"{s.mean:.2f}", s.wins, s.draws, s.losses, f"{s.lowest:.2f}")), s.lowest_case]
        for s in summaries(report)
    ]


def notes(report: Report) -> list[str]:
    """Notes of the tables: versions, absences, failures, skipped cases."""
    load = machine_load.sentence(report.load, report.cores)
    total = total_line(report)
    text = render(__file__, "notes.txt", report=report, load=load, total=total, MORE_TIME=MORE_TIME, EXCEEDED=EXCEEDED)
    return list(filter(None, text.split("\n")))


def markdown(report: Report, *, per_case: bool = True) -> str:
    """The report as Markdown tables."""
    parts = [f"**{heading(report)}**"]
    rows = _summary_rows(report)
    if rows:
        parts.append("Ratio to the best peer of each case:\n\n" + Table(SUMMARY, rows).markdown())
        parts.append(f"{explained(report)}.")
    if per_case:
        parts.append(Table(_columns(report), [_row(report, r) for r in report.results], 2).markdown())
    parts.append("\n".join(f"- {line}" for line in notes(report)))
    return "\n\n".join(parts) + "\n"


SUFFIXES = (".json", ".csv", ".md", ".html")
COLUMNS = (
    "case", "group", "m", "n", "k", "batch", "dtype", "a", "b", "c", "packed", "block", "dynamic", "count",
    "contender", "peer", "state", "method", "seconds", "spread", "fastest", "slowest", "gflops", "best", "ratio",
    "ratio_spread", "verdict", "limit", "load", "error", "bound", "reason",
    "chip", "machine", "threads", "isa", "device", "cold", "date",
)  # fmt: skip
"""Columns of the records; each record has all of them."""
_OF_CASE = COLUMNS[1 : COLUMNS.index("contender")]


def records(report: Report) -> list[dict[str, Any]]:
    """Flat records, one for each case and contender; unknown values are None.

    Seconds are per call, the median over rounds; `fastest` and `slowest` are those of a round;
    `spread` is the range of the middle half over the median. `gflops` and `limit` are in GFLOP/s, `best` is
    the fastest peer of the case, `ratio` is portmm's rate over that one's, with a spread of its own; `verdict` is
    "win", "loss", or "draw" where the ratio lies within its spread. `limit` is no less than the fastest contender's
    rate. `load` is in cores that other processes kept busy. `error` and `bound` are absolute.
    """
    peers = {e.name: e.peer for e in report.entrants}
    common = {x: getattr(report, x) for x in ("chip", "machine", "threads", "isa", "device", "date")}
    common["cold"] = bool(report.cold)
    return [
        {x: row[x] for x in COLUMNS}
        for result in report.results
        for name in result.entries
        for row in ({**common, **_of_case(report, result), **_of_entry(result, name), "peer": peers.get(name, True)},)
    ]


def _of_case(report: Report, result: Result) -> dict[str, Any]:
    case = {name: getattr(result.case, name) for name in _OF_CASE}
    return case | {
        "case": result.case.name,
        "best": result.best or None,
        "ratio": result.ratio,
        "ratio_spread": report.spread(result),
        "verdict": report.verdict(result) or None,
        "limit": report.ceiling(result),
        "load": result.load,
    }


def _of_entry(result: Result, name: str) -> dict[str, Any]:
    entry = result.entries[name]
    right = entry.state == "ok"
    return {
        "contender": name,
        "state": entry.state,
        "method": entry.method or None,
        "seconds": entry.seconds if right else None,
        "spread": spread(entry.samples),
        "fastest": min(entry.samples, default=None),
        "slowest": max(entry.samples, default=None),
        "gflops": result.gflops(name),
        "error": entry.error if right else None,
        "bound": entry.bound if right else None,
        "reason": entry.reason or None,
    }


def csv_text(report: Report) -> str:
    """The records as CSV: a line of column names, then a line for each."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records(report))
    return text.getvalue()


def check(path: Path) -> None:
    """Check that a report can be written to a file of that name.

    Raises:
        ValueError: its suffix is none of `SUFFIXES`, or its folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} says no format; reports are written as {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")


def write(report: Report, path: str | Path) -> None:
    """Write a report to a file, in the format of its suffix.

    Raises:
        ValueError: as `check`.
        OSError: it cannot be written.
    """
    path = Path(path)
    check(path)
    makers: dict[str, Callable[[], str]] = {
        ".json": report.to_json,
        ".csv": lambda: csv_text(report),
        ".md": lambda: markdown(report),
        ".html": lambda: _html(report),
    }
    path.write_text(makers[path.suffix.lower()](), encoding="utf-8")


def _html(report: Report) -> str:
    module: Any = import_module("portmm.comparison.html")
    return str(module.page(report))
