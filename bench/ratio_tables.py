"""Tables of ratios by chip and type, of all stored results: short ones for the README, whole ones for the page.

A ratio is the rate of portmm over that of the best peer of a case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from result_tables import device_ratio, mean, rows_of, setting, short, table, threads

if TYPE_CHECKING:
    from portmm.comparison.case import Case
    from portmm.comparison.report import Report

INTEGERS = {"s8": "int8", "u8": "int8", "u4": "int4"}

MARKS = {"fused": "fused", "random": "random shapes"}
"""Beginning of a group's name -> what its cases are besides their type: rows of their own."""

Ratios = dict[str, dict[str, float]]
"""Type -> case -> ratio."""
MEANING = "Rate of portmm over that of the best peer of each case: geometric mean, lowest in brackets, cases."


def kind(case: Case) -> str:
    """Type of a product as a row's name: that of its weight, where activations are floats or are rounded."""
    a, b, _ = case.types
    weight = INTEGERS.get(b, b)
    if weight != b and a not in INTEGERS:
        weight += " weights, A in 8 bits" if case.dynamic else " weights"
    mark = next((text for prefix, text in MARKS.items() if case.group.startswith(prefix)), "")
    return ", ".join(filter(None, (weight, mark)))


def ratios_by_setting(reports: Iterable[Report], fusions: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Ratios]:
    """Rates of portmm over those of the best peer, by processor and setting.

    Args:
        reports: of `portmm compare`.
        fusions: runs of fused products.
    """
    measured: dict[tuple[str, str], Ratios] = {}
    # Of a case that was measured again, the latest ratio counts.
    for report in sorted(reports, key=lambda x: x.date):
        mine = measured.setdefault((short(report.chip), setting(report)), {})
        for result in report.results:
            if result.ratio is not None:
                mine.setdefault(kind(result.case), {})[result.case.name] = result.ratio
    for data in sorted(fusions, key=lambda x: str(x["date"])):
        mine = measured.setdefault((short(data["chip"]), threads(data["threads"])), {})
        for row in rows_of([data]):
            if row["ratio"] is not None:
                group = "attention" if row["case"]["group"] == "attention" else "fused"
                mine.setdefault(f"{row['case']['dtype']}, {group}", {})[row["case"]["name"]] = row["ratio"]
    return {key: mine for key, mine in measured.items() if mine}


SECTIONS = {
    "squares": "bf16", "prefill": "bf16", "decode": "bf16, 1 to 64 rows", "w4a16": "int4 weights", "int8": "int8",
    "fp8": "fp8", "tf32": "f32 as tf32", "f32": "f32", "attention": "bf16, attention", "few": "bf16, attention",
    "epilogue": "bf16, fused", "bias": "bf16, fused", "conv": "bf16, convolution", "grouped": "bf16, grouped",
    "rows": "softmax, layer norm",
}  # fmt: skip
"""Section of cases on devices -> a row's name."""


def device_ratios(runs: dict[str, dict[str, Any]]) -> dict[str, Ratios]:
    """Rates of portmm over those of the best peer, by device."""
    measured: dict[str, Ratios] = {}
    for name, data in runs.items():
        found = {x["name"]: x for x in data["rows"] if x["state"] == "ok" and x["seconds"]}
        for section, row in SECTIONS.items():
            mine = [x for x in found.values() if x["section"] == section and device_ratio(x) is not None]
            if mine:
                measured.setdefault(name, {}).setdefault(row, {}).update({x["name"]: device_ratio(x) for x in mine})
    return measured


def by_chip(measured: dict[tuple[str, str], Ratios]) -> str:
    """A table for each processor: a row for each type, a column for each setting."""
    parts = [MEANING] if measured else []
    for machine in dict.fromkeys(machine for machine, _ in measured):
        settings = {name: mine for (of, name), mine in measured.items() if of == machine}
        parts.append(_by_type(machine, settings))
    return "\n\n".join(parts)


def by_device(measured: dict[str, Ratios]) -> str:
    """A table with a column for each device; empty for none."""
    return _by_type("device", measured) if measured else ""


def _by_type(head: str, columns: dict[str, Ratios], cell: Callable[..., str] = mean) -> str:
    """A table with a row for each type: there are more of them than of chips."""
    kinds = dict.fromkeys(name for mine in sorted(columns.values(), key=len, reverse=True) for name in mine)
    rows = ([name, *(cell(mine.get(name, {}).values()) for mine in columns.values())] for name in kinds)
    return table([head, *columns], rows)


FEW = 3
"""Cases of which a mean says something."""


def glance(cpus: dict[tuple[str, str], Ratios], devices: dict[str, Ratios]) -> tuple[dict[str, Ratios], ...]:
    """The README's ratios: of CPUs by one thread, float32 also by two, and of devices.

    Columns are chips; of fewer cases than `FEW` nothing is shown.
    """
    by_one: dict[str, Ratios] = {machine: mine for (machine, name), mine in cpus.items() if name == threads(1)}
    for (machine, name), mine in cpus.items():
        if name == threads(2) and "f32" in mine:
            by_one.setdefault(machine, {})
            by_one[machine] = by_one[machine] | {f"f32, {name}": mine["f32"]}
    return tuple(_said(x) for x in (by_one, devices))


def _said(columns: dict[str, Ratios]) -> dict[str, Ratios]:
    kept = {name: {kind: x for kind, x in mine.items() if len(x) >= FEW} for name, mine in columns.items()}
    return {name: mine for name, mine in kept.items() if mine}


def at_a_glance(cpus: dict[str, Ratios], devices: dict[str, Ratios]) -> str:
    """The README's tables: one for processors, one for devices."""
    parts = [
        _by_type(head, columns, lambda x: mean(x, count=False))
        for head, columns in (("CPU, one thread", cpus), ("GPU", devices))
        if columns
    ]
    return "\n\n".join(parts)
