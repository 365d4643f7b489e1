"""Table of portmm's rate over the best peer's, by chip and type, over all results.

Owns that table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portmm.comparison.tables_cells import mean, table, threads
from portmm.comparison.tables_device import device_ratio
from portmm.comparison.tables_fusion import rows_of
from portmm.comparison.tables_products import setting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from portmm.comparison.case import Case
    from portmm.comparison.report import Report

INTEGERS = {"s8": "int8", "u8": "int8", "u4": "int4"}

Ratios = dict[str, dict[str, float]]
"""Type -> case -> ratio."""
MEANING = "Rate of portmm over that of the best peer of each case: geometric mean, lowest in brackets, cases."


def kind(case: Case) -> str:
    """Type of a product as a row's name: that of its weight, where activations are floats or are rounded."""
    a, b, _ = case.types
    weight = INTEGERS.get(b, b)
    if weight != b and a not in INTEGERS:
        weight += " weights, A in 8 bits" if case.dynamic else " weights"
    return f"{weight}, fused" if case.group.startswith("fused") else weight


def ratios_by_setting(
    reports: Iterable[Report], fusions: Sequence[dict[str, Any]], devices: Iterable[tuple[str, dict[str, Any]]]
) -> dict[tuple[str, str], Ratios]:
    """Rates of portmm over those of the best peer, by machine and setting.

    Args:
        reports: of `portmm compare`.
        fusions: runs of fused products.
        devices: name of a device's run, and the run.
    """
    measured: dict[tuple[str, str], Ratios] = {}
    # Of a case that was measured again, the latest ratio counts.
    for report in sorted(reports, key=lambda x: x.date):
        mine = measured.setdefault((report.machine, setting(report)), {})
        for result in report.results:
            if result.ratio is not None:
                mine.setdefault(kind(result.case), {})[result.case.name] = result.ratio
    for data in sorted(fusions, key=lambda x: str(x["date"])):
        mine = measured.setdefault((data["machine"], threads(data["threads"])), {})
        for row in rows_of([data]):
            if row["ratio"] is not None:
                group = "attention" if row["case"]["group"] == "attention" else "fused"
                mine.setdefault(f"{row['case']['dtype']}, {group}", {})[row["case"]["name"]] = row["ratio"]
    for stem, data in devices:
        for x in data["rows"]:
            ratio = device_ratio(x) if x["state"] == "ok" and x["seconds"] else None
            if ratio is not None:
                measured.setdefault((stem, ""), {}).setdefault(x["dtype"], {})[x["name"]] = ratio
    return {key: mine for key, mine in measured.items() if mine}


def chips(measured: dict[tuple[str, str], Ratios]) -> str:
    """One table with a row for each type and a column for each machine and setting; empty if nothing was measured."""
    if not measured:
        return ""
    columns = [", ".join(filter(None, key)) for key in measured]
    return f"{MEANING}\n\n{_by_type('type', columns, list(measured.values()))}"


def by_chip(measured: dict[tuple[str, str], Ratios]) -> str:
    """A small table for each machine: a row for each type, a column for each setting."""
    parts = []
    for machine in dict.fromkeys(machine for machine, _ in measured):
        settings = {name: mine for (of, name), mine in measured.items() if of == machine}
        parts.append(_by_type(machine, [name or "ratio" for name in settings], list(settings.values())))
    return "\n\n".join([MEANING, *parts]) if parts else ""


def _by_type(head: str, columns: list[str], ratios: list[Ratios]) -> str:
    """A table with a row for each type: there are more of them than of chips."""
    kinds = dict.fromkeys(name for mine in ratios for name in mine)
    return table([head, *columns], ([name, *(mean(mine.get(name, {}).values()) for mine in ratios)] for name in kinds))
