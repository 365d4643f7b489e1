"""portmm beside the best peer, by chip and type: the one table over all that was measured.

Owns that table. Imports `comparison.tables_cells` and the tables of products,
fused products and devices for what distinguishes their rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.comparison.tables_cells import mean, table, threads
from portmm.comparison.tables_device import device_ratio
from portmm.comparison.tables_fusion import rows_of
from portmm.comparison.tables_products import held

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from portmm.comparison.case import Case
    from portmm.comparison.report import Report

INTEGERS = {"s8": "int8", "u8": "int8", "u4": "int4"}

Ratios = dict[str, dict[str, float]]
"""Type -> case -> ratio."""


def kind(case: Case) -> str:
    """The type of a product as a column's name: its weight's, where activations are floats or become so."""
    a, b, _ = case.types
    weight = INTEGERS.get(b, b)
    if weight != b and a not in INTEGERS:
        weight += " weights, A in 8 bits" if case.dynamic else " weights"
    return f"{weight}, fused" if case.group.startswith("fused") else weight


def chips(
    reports: Iterable[Report], fusions: Sequence[dict[str, Any]], devices: Iterable[tuple[str, dict[str, Any]]]
) -> str:
    """A row for each chip and setting, a column for each type; empty of nothing.

    Args:
        reports: of `portmm compare`.
        fusions: runs of fused products.
        devices: name of a device's run, and the run.
    """
    found: dict[str, Ratios] = {}
    # A case that was measured again counts as it was found last.
    for report in sorted(reports, key=lambda x: x.date):
        mine = found.setdefault(f"{report.machine}, {held(report)}", {})
        for result in report.results:
            if result.ratio is not None:
                mine.setdefault(kind(result.case), {})[result.case.name] = result.ratio
    for data in sorted(fusions, key=lambda x: str(x["date"])):
        mine = found.setdefault(f"{data['machine']}, {threads(data['threads'])}", {})
        for row in rows_of([data]):
            if row["ratio"] is not None:
                what = "attention" if row["case"]["group"] == "attention" else "fused"
                mine.setdefault(f"{row['case']['dtype']}, {what}", {})[row["case"]["name"]] = row["ratio"]
    for stem, data in devices:
        for x in data["rows"]:
            ratio = device_ratio(x) if x["state"] == "ok" and x["seconds"] else None
            if ratio is not None:
                found.setdefault(stem, {}).setdefault(x["dtype"], {})[x["name"]] = ratio
    return _overview({name: mine for name, mine in found.items() if mine})


def _overview(found: dict[str, Ratios]) -> str:
    kinds = dict.fromkeys(name for mine in found.values() for name in mine)
    if not kinds:
        return ""
    # Types stand below one another: there are more of them than of chips.
    rows = [[name, *(mean(mine.get(name, {}).values()) for mine in found.values())] for name in kinds]
    said = "Rate of portmm over that of the best peer of each case: geometric mean, lowest in brackets, cases."
    return f"{said}\n\n{table(['type', *found], rows)}"
