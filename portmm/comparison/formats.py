"""File formats of a report.

Owns flat records, CSV, and the selection of a format by a file's suffix.
"""

from __future__ import annotations

import csv
import io
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portmm.comparison.figures import spread
from portmm.comparison.text import markdown

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.comparison.report import Report, Result

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
    common = {
        "chip": report.chip,
        "machine": report.machine,
        "threads": report.threads,
        "isa": report.isa,
        "device": report.device,
        "cold": bool(report.cold),
        "date": report.date,
    }
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
