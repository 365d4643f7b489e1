"""Tables of tuning: analytical and tuned schedules, predicted and measured times.

Owns the tables of the JSON of `portmm tune`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.comparison.report import geomean
from portmm.comparison.tables_cells import table, threads

if TYPE_CHECKING:
    from collections.abc import Iterable

HEAD = (
    "setting",
    "cases",
    "analytical, of the tuned rate",
    "lowest",
    "where",
    "trials",
    "failed",
    "rank correlation",
    "of the choices",
)


def is_tuning(data: dict[str, Any]) -> bool:
    """Whether this is a result of `portmm tune`."""
    return {"choices_correlation", "cases"} <= data.keys()


def tuning(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Tables of the chips, with a row for each run."""
    chips: dict[str, list[dict[str, Any]]] = {}
    for data in runs:
        chips.setdefault(data["chip"], []).append(data)
    return [
        f"**{chip}**, tuning: rate of the analytical choice over that of the schedule that was found, geometric mean "
        f"and lowest; rank correlation of predicted and measured time of a case's candidates, mean over cases, and "
        f"of the analytical choices of all cases.\n\n{table(HEAD, map(_row, mine))}\n\n"
        f"Measured on {', '.join(dict.fromkeys(data['date'] for data in mine))}."
        for chip, mine in chips.items()
    ]


def _setting(data: dict[str, Any]) -> str:
    return threads(data["threads"]) + (", cold caches" if data["cold"] else "")


def _row(data: dict[str, Any]) -> list[str]:
    done = [x for x in data["cases"] if x["seconds"]]
    tried = [y for x in data["cases"] for y in x["trials"]]
    failed = sum(y["state"] != "ok" for y in tried)
    correlations = [_number(data[x]) for x in ("rank_correlation", "choices_correlation")]
    if not done:
        return [_setting(data), "0", "", "", "", str(len(tried)), str(failed), *correlations]
    ratios = [x["seconds"] / x["analytical_seconds"] for x in done]
    worst = done[ratios.index(min(ratios))]["case"]["name"]
    means = [_number(geomean(ratios)), _number(min(ratios)), worst]
    return [_setting(data), str(len(done)), *means, str(len(tried)), str(failed), *correlations]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def tuning_cases(data: dict[str, Any]) -> str:
    """Table of every case of a run: microseconds of a call, analytical as predicted and measured, and tuned."""
    rows = [
        [
            x["case"]["name"],
            *(f"{1e6 * x[name]:.4g}" for name in ("predicted", "analytical_seconds", "seconds")),
            f"{x['seconds'] / x['analytical_seconds']:.2f}",
            len(x["trials"]),
            _number(x["rank_correlation"]),
        ]
        for x in data["cases"]
        if x["seconds"]
    ]
    left = [f"{x['case']['name']} ({x['reason']})" for x in data["cases"] if not x["seconds"]]
    head = ["case", "predicted", "analytical", "tuned", "analytical, of the tuned rate", "trials", "rank correlation"]
    parts = [f"**{data['chip']}**, tuning, {_setting(data)}: microseconds per call.", table(head, rows)]
    parts += [f"Not tuned: {', '.join(left)}."] if left else []
    return "\n\n".join(parts)
