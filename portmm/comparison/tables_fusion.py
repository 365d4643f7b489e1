"""Tables of fused products.

Owns the tables of the results of `bench/fusion.py --save`.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from portmm.comparison.tables_cells import mean, table, threads

if TYPE_CHECKING:
    from collections.abc import Iterable

COLUMNS = {"ratio": "best peer", "gain": "not fused"}
"""Ratios of a case -> the rate in the denominator."""


def _settings(runs: Iterable[dict[str, Any]]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Runs by chip and threads."""
    chips: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for data in runs:
        chips.setdefault(data["chip"], {}).setdefault(data["threads"], []).append(data)
    return chips


def rows_of(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases of several runs; the last result of a case counts."""
    return list({row["case"]["name"]: row for data in runs for row in data["fusion"]}.values())


def fusion(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Two tables for each chip: fused products by group and type, and the cost of epilogues."""
    return [_fusion(chip, dict(sorted(mine.items()))) for chip, mine in _settings(runs).items()]


def _fusion(chip: str, mine: dict[int, list[dict[str, Any]]]) -> str:
    """Tables of one chip, whose runs are given by threads."""
    groups: dict[str, dict[tuple[int, str], list[float]]] = {}
    costs: dict[str, dict[int, list[float]]] = {}
    for count, runs in mine.items():
        for row in rows_of(runs):
            kind = f"{row['case']['group']}, {row['case']['dtype']}"
            for name in COLUMNS:
                if row[name] is not None:
                    groups.setdefault(kind, {}).setdefault((count, name), []).append(row[name])
            for name, cost in row["overheads"].items():
                costs.setdefault(f"{name}, {row['case']['dtype']}", {}).setdefault(count, []).append(cost)
    parts: list[str] = []
    if groups:
        head = ["group", *(f"{threads(t)}, {word}" for t in mine for word in COLUMNS.values())]
        cells = [(t, name) for t in mine for name in COLUMNS]
        parts.append(
            f"**{chip}**, fused: rate of portmm over that of the best peer of each case, and over its own where "
            f"nothing is fused, geometric mean of each group, and in brackets its lowest."
        )
        parts.append(table(head, [[kind, *(mean(x.get(c, ())) for c in cells)] for kind, x in groups.items()]))
    if costs:
        rows = [[kind, *(_cost(x.get(t, ())) for t in mine)] for kind, x in costs.items()]
        parts.append(f"**{chip}**: what an epilogue costs, of the bare product's time, median and in brackets most.")
        parts.append(table(["epilogue", *map(threads, mine)], rows))
    return "\n\n".join([*parts, _origin([run for runs in mine.values() for run in runs])])


def _cost(values: Iterable[float]) -> str:
    percents = [100 * x for x in values]
    return f"{median(percents):+.1f} % ({max(percents):+.1f} %)" if percents else ""


def _origin(runs: Iterable[dict[str, Any]]) -> str:
    """Versions of the contenders, and dates of the runs."""
    versions: dict[str, str] = {}
    dates: dict[str, None] = {}
    for data in runs:
        versions |= {name: text for name, text in data["versions"].items() if not text.startswith("missing")}
        dates[data["date"]] = None
    return f"Took part: {'; '.join(dict.fromkeys(versions.values()))}. Measured on {', '.join(dates)}."


def fusion_cases(data: dict[str, Any]) -> str:
    """Table of every case of fused products: microseconds per call, and ratios."""
    names = list(dict.fromkeys(name for row in data["fusion"] for name in row["entries"]))
    rows = []
    for row in data["fusion"]:
        entries = [row["entries"].get(name, {"state": ""}) for name in names]
        times = [f"{1e6 * e['seconds']:.4g}" if e["state"] == "ok" else e["state"] for e in entries]
        shown = [f"{row[x]:.2f}" if row[x] is not None else "" for x in COLUMNS]
        cost = ", ".join(f"{name} {100 * x:+.1f} %" for name, x in row["overheads"].items())
        rows.append([row["case"]["name"], *times, row["best"], *shown, cost])
    missed = f"\n\nNot run, for want of time: {', '.join(data['skipped'])}." if data["skipped"] else ""
    head = ["case", *names, "best", "ratio", "over not fused", "epilogues cost"]
    title = f"**{data['chip']}**, fused, {threads(data['threads'])}: microseconds per call."
    return f"{title}\n\n{table(head, rows)}{missed}"
