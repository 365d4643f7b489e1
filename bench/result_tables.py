"""Tables of stored results, by kind of result file.

Owns the values of the tables of reports of `portmm compare` and `portmm tune`, and of the results of
`bench/exhaustive.py`, `bench/leave_one_out.py`, `bench/cliff.py`, `bench/ragged.py`, `bench/packing.py`,
`bench/test_overhead.py`, `bench/fusion.py` and `bench/gpu.py`; and the ratios of all of them by chip and type. Their
sentences and columns are in `result_tables.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, Any

from portmm.comparison.figures import Table, grouped
from portmm.comparison.report import Report, geomean, summaries
from portmm.util import templates

if TYPE_CHECKING:
    from portmm.comparison.case import Case

Rows = list[list[str]]


def part(macro: str, *values: Any) -> str:
    """Markdown of a macro of `result_tables.md`."""
    return re.sub(r"\n{3,}", "\n\n", getattr(_macros(), macro)(*values).strip())


@cache
def _macros() -> Any:
    rows = (fused_row, left_out_row, timed, tuning_row)
    functions: tuple[Callable[..., Any], ...] = (*rows, geomean, row, table, threads, two)
    return templates.macros(__file__, "result_tables.md", **{x.__name__: x for x in functions})


def table(head: Sequence[object], rows: Iterable[Sequence[object]] = ()) -> str:
    """A Markdown table whose first column is aligned left."""
    return Table([*map(str, head)], [[*map(str, row)] for row in rows]).markdown()


def row(*cells: object) -> str:
    """A row of a Markdown table."""
    return table(cells).partition("\n")[0]


def cells(values: Iterable[tuple[str, Any, float]], columns: Sequence[Any], cell: Callable[..., str]) -> Rows:
    """Rows of a table, with a cell for the values of each column.

    Args:
        values: name of a row, column, value.
        columns: in their order.
        cell: function of the values of a cell, which may be none.
    """
    rows: dict[str, dict[Any, list[float]]] = {}
    for name, column, value in values:
        rows.setdefault(name, {}).setdefault(column, []).append(value)
    return [[name, *(cell(mine.get(x, [])) for x in columns)] for name, mine in rows.items()]


def two(value: float | None) -> str:
    """A number with two decimals, empty for None."""
    return "" if value is None else f"{value:.2f}"


def mean(values: Collection[float], *, count: bool = True) -> str:
    """Cell with the geometric mean, the lowest value in brackets, and their number; empty for no values."""
    of = f" of {len(values)}" if count else ""
    return f"{geomean(values):.2f} ({min(values):.2f}){of}" if values else ""


def threads(number: int) -> str:
    """A number of threads in words: `1 thread`, `2 threads`."""
    return f"{number} thread{'s' if number > 1 else ''}"


def device(stem: str, data: dict[str, Any]) -> str:
    """Tables of a run on a device: the bars, each case with the best of its peers, candidates of products."""
    return part("device", stem, data)


def device_ratio(x: dict[str, Any]) -> float | None:
    """Rate of a case over that of its best peer; of decode layers as graphs, where they have graphs."""
    times, suffix = _times(x)
    return x[f"ratio{suffix}"] if len(times) > 1 else None


def _times(x: dict[str, Any]) -> tuple[dict[str, float], str]:
    return (x["graph"], "_graph") if x.get("graph") else (x["seconds"], "")


def timed(x: dict[str, Any]) -> list[str]:
    """Cells of a case on a device."""
    times, suffix = _times(x)
    peers = {name: seconds for name, seconds in times.items() if name != "portmm"}
    best = min(peers, key=lambda name: peers[name], default="")
    rate = f"{x[f'tflops{suffix}']:.3g}"
    label = ", ".join(filter(None, (x["section"], x["more"])))
    size, us = f"{x['m']} x {x['n']} x {x['k']}", f"{1e6 * times['portmm']:.1f}"
    return [size, x["dtype"], x["b"], label, us, rate, best, f"{x[f'ratio{suffix}']:.2f}" if peers else ""]


COLUMNS = {"ratio": "best peer", "gain": "not fused"}
"""Ratios of a case -> the rate in the denominator."""


def rows_of(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases of several runs; the last result of a case counts."""
    return list({row["case"]["name"]: row for data in runs for row in data["fusion"]}.values())


def fusion(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Two tables for each chip: fused products by group and type, and the cost of epilogues."""
    return [_fusion(chip, mine) for chip, mine in grouped(runs, itemgetter("chip")).items()]


def _fusion(chip: str, runs: list[dict[str, Any]]) -> str:
    by_threads = dict(sorted(grouped(runs, itemgetter("threads")).items()))
    rows = [(count, x, x["case"]["dtype"]) for count, mine in by_threads.items() for x in rows_of(mine)]
    ratios = [
        (f"{x['case']['group']}, {dtype}", (count, name), x[name])
        for count, x, dtype in rows
        for name in COLUMNS
        if x[name] is not None
    ]
    costs = [(f"{name}, {dtype}", count, cost) for count, x, dtype in rows for name, cost in x["overheads"].items()]
    every = [data for mine in by_threads.values() for data in mine]
    versions = {name: text for x in every for name, text in x["versions"].items() if not text.startswith("missing")}
    heads = {(count, x): f"{threads(count)}, {word}" for count in by_threads for x, word in COLUMNS.items()}
    by_ratio, by_cost = cells(ratios, [*heads], mean), cells(costs, [*by_threads], _cost)
    return part("fusion", chip, [*heads.values()], by_ratio, [*map(threads, by_threads)], by_cost, versions, every)


def _cost(values: Iterable[float]) -> str:
    percents = [100 * x for x in values]
    return f"{median(percents):+.1f} % ({max(percents):+.1f} %)" if percents else ""


def fused_row(x: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Cells of a case of fused products; `names` are the contenders."""
    entries = [x["entries"].get(name, {"state": ""}) for name in names]
    times = [f"{1e6 * e['seconds']:.4g}" if e["state"] == "ok" else e["state"] for e in entries]
    cost = ", ".join(f"{name} {100 * cost:+.1f} %" for name, cost in x["overheads"].items())
    return [x["case"]["name"], *times, x["best"], *(two(x[name]) for name in COLUMNS), cost]


def is_tuning(data: dict[str, Any]) -> bool:
    """Whether this is a result of `portmm tune`."""
    return {"choices_correlation", "cases"} <= data.keys()


def tuning_row(data: dict[str, Any]) -> list[object]:
    """Cells of a run of `portmm tune`."""
    done = [x for x in data["cases"] if x["seconds"]]
    tried = [y for x in data["cases"] for y in x["trials"]]
    ratios = {x["case"]["name"]: x["seconds"] / x["analytical_seconds"] for x in reversed(done)}
    worst = min(reversed(ratios), key=lambda name: ratios[name], default="")
    means = [two(geomean(ratios.values())), two(ratios.get(worst)), worst]
    failed = sum(y["state"] != "ok" for y in tried)
    return [len(done), *means, len(tried), failed, *(two(data[f"{x}_correlation"]) for x in ("rank", "choices"))]


USUAL = ("full", "quick", "narrow")
"""Suites that a table does not name."""


def setting(report: Report) -> str:
    """Setting of a report: threads and forced ISA, or the device, and whether caches were cold."""
    where = report.device or threads(report.threads) + (f", {report.isa} for all" if report.isa else "")
    return where + (", cold caches" if report.cold else "")


def _setting(report: Report) -> str:
    """Setting of a report with its suite, which distinguishes reports of one chip."""
    return setting(report) + (f", {report.suite}" if report.suite not in USUAL else "")


def ratios(reports: Iterable[Report]) -> list[str]:
    """Tables of the chips, for float32 and for narrow types: a row per group, a column per setting."""
    chips = grouped(reports, lambda report: (report.chip, any(result.case.narrow for result in report.results)))
    return [part("ratios", *kind, mine, [*map(_setting, mine)], _groups(mine)) for kind, mine in chips.items()]


def _groups(reports: Sequence[Report]) -> Rows:
    """Rows of the groups of cases, that of all cases last."""
    groups: dict[str, dict[int, str]] = {}
    for i, report in enumerate(reports):
        for s in summaries(report):
            groups.setdefault(s.group, {})[i] = f"{s.mean:.2f} ({s.lowest:.2f}) of {s.count}"
    every = {"**all**": groups.pop("all")} if "all" in groups else {}
    return [[name, *(cells.get(i, "") for i in range(len(reports)))] for name, cells in (groups | every).items()]


def search(rows: Iterable[dict[str, Any]]) -> str:
    """Sentence about the rate of the analytical choice over that of the best candidate."""
    cases = grouped(rows, itemgetter("case"))
    rates = [
        min(row["seconds"] for row in tried) / selected[0]
        for tried in cases.values()
        if (selected := [row["seconds"] for row in tried if row["chosen"]])
    ]
    return part("search", sum(map(len, cases.values())), rates) if rates else ""


def left_out_row(data: dict[str, Any]) -> list[str]:
    """Cells of a file of searches, of a chip that is left out."""
    columns = [[x[name] for x in data["cases"] if name in x] for name in LEFT_OUT]
    return [data["search"], data["isa"], str(len(data["cases"])), *(mean(x, count=False) for x in columns)]


LEFT_OUT = ("of_best", "refitted", "over_constant", "refitted_over_constant")
"""Rates of choices over others' in a row of `bench/leave_one_out.py`: with the constants of `targets/model/`, and with
constants that were fitted without the chip."""


def packing(data: dict[str, Any]) -> str:
    """Table of the rates of packing over those of a copy of as many bytes, with a row for each kind of weight."""
    counts = sorted({row["threads"] for row in data["packing"]})
    fractions = [(_weight(row), row["threads"], row["share"]) for row in data["packing"]]
    rows = cells(fractions, counts, lambda x: mean(x, count=False))
    return part("packing", data, [*map(threads, counts)], sorted(rows))


def _weight(row: dict[str, Any]) -> str:
    group = f", groups of {row['group'] or 'all'} rows" if row["dtype"] == "u4" else ""
    mixed = f" for {row['activations']}" if row["activations"] != row["dtype"] and not group else ""
    return f"{row['dtype']}{mixed}{group}, by {'rows' if row['layout'] == 'row' else 'columns'}"


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
    columns = [", ".join(filter(None, key)) for key in measured]
    return f"{MEANING}\n\n{_by_type('type', columns, list(measured.values()))}" if measured else ""


def by_chip(measured: dict[tuple[str, str], Ratios]) -> str:
    """A small table for each machine: a row for each type, a column for each setting."""
    parts = [MEANING] if measured else []
    for machine in dict.fromkeys(machine for machine, _ in measured):
        settings = {name: mine for (of, name), mine in measured.items() if of == machine}
        parts.append(_by_type(machine, [name or "ratio" for name in settings], list(settings.values())))
    return "\n\n".join(parts)


def _by_type(head: str, columns: list[str], ratios: list[Ratios]) -> str:
    """A table with a row for each type: there are more of them than of chips."""
    kinds = dict.fromkeys(name for mine in ratios for name in mine)
    return table([head, *columns], ([name, *(mean(mine.get(name, {}).values()) for mine in ratios)] for name in kinds))
