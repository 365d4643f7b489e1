"""Tables of plain products, of the search over schedules, of packing and of overheads.

Owns the sentences and tables of the reports of `portmm compare`, and of the results of
`bench/exhaustive.py`, `bench/cliff.py`, `bench/packing.py` and
`bench/test_overhead.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.comparison.report import geomean, summaries
from portmm.comparison.tables_cells import mean, table, threads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from portmm.comparison.report import Report

USUAL = ("full", "quick", "narrow")
"""Suites that a table does not name."""


def setting(report: Report) -> str:
    """Setting of a report: threads and forced ISA, or the device, and whether caches were cold."""
    where = report.device or threads(report.threads) + (f", {report.isa} for all" if report.isa else "")
    return where + (", cold caches" if report.cold else "")


def _setting(report: Report) -> str:
    """Setting of a report with its suite, which distinguishes reports of one chip."""
    return setting(report) + (f", {report.suite}" if report.suite not in USUAL else "")


def _is_narrow(report: Report) -> bool:
    return any(result.case.narrow for result in report.results)


def ratios(reports: Iterable[Report]) -> Iterator[str]:
    """Tables of the chips, for float32 and for narrow types: a row per group, a column per setting."""
    chips: dict[tuple[str, bool], list[Report]] = {}
    for report in reports:
        chips.setdefault((report.chip, _is_narrow(report)), []).append(report)
    for (chip, narrow), mine in chips.items():
        kind = "narrow types" if narrow else "float32"
        peers = dict.fromkeys(e.version for report in mine for e in report.entrants if e.peer and e.state == "ok")
        dates = dict.fromkeys(report.date for report in mine)
        yield (
            f"**{chip}**, {kind}: rate of portmm over that of the best peer of each case, geometric mean of each "
            f"group, and in brackets its lowest.\n\n"
            f"{table(['group', *map(_setting, mine)], _groups(mine))}\n\n"
            f"Peers: {'; '.join(peers)}. Measured on {', '.join(dates)}."
        )


def _groups(reports: Sequence[Report]) -> list[list[str]]:
    """Rows of the groups of cases, that of all cases last."""
    groups: dict[str, list[str]] = {}
    for i, report in enumerate(reports):
        for s in summaries(report):
            row = groups.setdefault(s.group, [""] * len(reports))
            row[i] = f"{s.mean:.2f} ({s.lowest:.2f}) of {s.count}"
    every = groups.pop("all", None)
    rows = [[name, *cells] for name, cells in groups.items()]
    return [*rows, ["**all**", *every]] if every else rows


def search(rows: Iterable[dict[str, Any]]) -> str:
    """Sentence about the rate of the analytical choice over that of the best candidate."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    rates: list[float] = []
    for tried in cases.values():
        selected = [row["seconds"] for row in tried if row["chosen"]]
        rates += [min(row["seconds"] for row in tried) / selected[0]] if selected else []
    if not rates:
        return ""
    return (
        f"The analytical choice runs at {geomean(rates):.2f} of the rate of the best of an exhaustive search "
        f"({sum(map(len, cases.values()))} kernels over {len(rates)} cases, geometric mean; lowest {min(rates):.2f})."
    )


def overhead(data: dict[str, Any]) -> str:
    """Table of the times of calls, imports and first calls."""
    rows = [[name, unit, f"{value:.3g}"] for name, kept in data["overhead"].items() for unit, value in kept.items()]
    return f"**{data['chip']}**\n\n{table(['overhead', 'measured', 'value'], rows)}"


def cliff(data: dict[str, Any]) -> str:
    """Sentence about the rates of narrow types over that of float32, on every instruction set."""
    rows = data["cliff"]
    short = [row for row in rows if row["share"] < 1]
    worst = min(rows, key=lambda row: float(row["share"]))
    where = f"{worst['isa']}, {worst['dtype']}, B {worst['layout']}, M = {worst['m']}"
    return (
        f"**{data['chip']}**: {len(rows) - len(short)} of {len(rows)} products of narrow types, of all instruction "
        f"sets, layouts and classes of M, reach half of float32's rate or 80 % of what memory allows; the lowest runs "
        f"at {worst['share']:.2f} of that ({where})."
    )


def packing(data: dict[str, Any]) -> str:
    """Table of the rates of packing over those of a copy of as many bytes, with a row for each kind of weight."""
    kinds: dict[str, dict[int, list[float]]] = {}
    counts = sorted({row["threads"] for row in data["packing"]})
    for row in data["packing"]:
        group = f", groups of {row['group'] or 'all'} rows" if row["dtype"] == "u4" else ""
        mixed = f" for {row['activations']}" if row["activations"] != row["dtype"] and not group else ""
        kind = f"{row['dtype']}{mixed}{group}, by {'rows' if row['layout'] == 'row' else 'columns'}"
        kinds.setdefault(kind, {}).setdefault(row["threads"], []).append(row["share"])
    rows = [[kind, *(mean(x.get(t, ()), count=False) for t in counts)] for kind, x in kinds.items()]
    return (
        f"**{data['chip']}**: bytes read and written per second by `pack`, over those of a copy into a new array, "
        f"geometric mean over sizes, and in brackets the lowest.\n\n"
        f"{table(['weight', *map(threads, counts)], sorted(rows))}"
    )
