"""Tables of stored results, by kind of result file.

Owns the values of the tables of reports of `portmm compare` and `portmm tune`, and of the results of
`bench/exhaustive.py`, `bench/leave_one_out.py`, `bench/cliff.py`, `bench/ragged.py`, `bench/packing.py`,
`bench/test_overhead.py`, `bench/fusion.py`, `bench/convolutions.py`, `bench/models.py` and `bench/gpu.py`. Their
sentences and columns are in `result_tables.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from operator import itemgetter
from statistics import median
from typing import Any

from portmm.comparison.figures import Table, grouped
from portmm.comparison.report import Report, geomean, summaries
from portmm.util import templates

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


def short(title: str) -> str:
    """A chip's name without its vendor, and without what follows a bracket, a comma or `and`: a column's head."""
    return re.split(r" \(|,| and ", title)[0].partition(" ")[2] or title


def devices(runs: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The newest results of each device: its name -> a run with the newest of each row, survey and bar.

    Args:
        runs: names of runs, and the runs. A name ends in a number that grows with each run on a device.
    """
    found: dict[str, dict[str, Any]] = {}
    for _, data in sorted(runs, key=lambda run: _numbered(run[0])):
        about = data["device"]
        mine = found.setdefault(short(about.get("title", "")) or about["target"], {key: {} for key in PARTS})
        for key, name in PARTS.items():
            mine[key] |= {x[name]: x for x in data[key] if x.get("state") != "not measured"}
        mine |= {"device": about, "notes": data["notes"]}
    return {name: mine | {key: [*mine[key].values()] for key in PARTS} for name, mine in found.items()}


PARTS = {"rows": "name", "surveys": "name", "bars": "bar", "sanitizer": "tool"}
"""Lists of a device's run -> what tells their items apart."""


def _numbered(name: str) -> list[int | str]:
    """A key that sorts names as people do: a-9 before a-10."""
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def device(name: str, data: dict[str, Any]) -> str:
    """Tables of the runs on a device: the bars, each case with the best of its peers, candidates of products."""
    return part("device", name, data)


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


def heading(kind: str, value: Any) -> dict[str, Any]:
    """A new file of results of one kind: of this chip, on one day."""
    from portmm.comparison.limit import chip

    return {"chip": chip(), "date": datetime.now(UTC).date().isoformat(), kind: value}


def convolutions(data: dict[str, Any]) -> str:
    """Table of convolutions by network and type, one thread."""
    every = data["convolutions"]
    ratios = [(name.split("-")[0], kind, x["ratio"]) for kind, rows in every.items() for name, x in rows.items()]
    return part("convolutions", data, [*every], cells(ratios, [*every], mean))


def convolution_cases(data: dict[str, Any]) -> str:
    """Table of every convolution: its rate, and that over the best peer's, of each type."""
    every = data["convolutions"]
    names = dict.fromkeys(name for rows in every.values() for name in rows)
    found = [[rows.get(name) for rows in every.values()] for name in names]
    texts = [[f"{x['gflops']:.0f}, {x['ratio']:.2f} of {x['best']}" if x else "" for x in row] for row in found]
    return part("convolution_cases", data, [*every], [[name, *row] for name, row in zip(names, texts, strict=True)])


def models(data: dict[str, Any]) -> str:
    """Table of whole models: milliseconds of each runtime, and the best peer's time over portmm's."""
    runtimes = [*dict.fromkeys(name for x in data["models"] for name in x["milliseconds"])]
    return part("models", data, runtimes, [_model_row(x, runtimes) for x in data["models"]])


def _model_row(x: dict[str, Any], runtimes: Sequence[str]) -> list[str]:
    times = [f"{x['milliseconds'][name]:.4g}" if name in x["milliseconds"] else "" for name in runtimes]
    kind = "int8" if x["model"].endswith("int8") else x["precision"]
    return [x["model"].removesuffix("-int8"), kind, str(x["threads"]), *times, two(x["ratio"])]


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
