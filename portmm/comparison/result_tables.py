"""Tables of stored results, by kind of result file.

Owns the sentences and Markdown tables of reports of `portmm compare` and `portmm tune`, and of the results of
`bench/exhaustive.py`, `bench/cliff.py`, `bench/packing.py`, `bench/test_overhead.py`, `bench/fusion.py` and
`bench/gpu.py`; and the table of all of them by chip and type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

from portmm.comparison.case import Case
from portmm.comparison.figures import Table
from portmm.comparison.report import Report, geomean, summaries


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table whose first column is aligned left."""
    return Table([*map(str, head)], [[*map(str, row)] for row in rows]).markdown()


class _Cells:
    """Values by row and column."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[Any, list[float]]] = {}

    def add(self, row: str, column: Any, value: float) -> None:
        self.rows.setdefault(row, {}).setdefault(column, []).append(value)

    def shown(self, columns: Iterable[Any], cell: Callable[[list[float]], str]) -> list[list[str]]:
        """Rows of a table, with a cell for each column."""
        order = [*columns]
        return [[name, *(cell(values.get(x, [])) for x in order)] for name, values in self.rows.items()]


def mean(values: Collection[float], *, count: bool = True) -> str:
    """Cell with the geometric mean, the lowest value in brackets, and their number; empty for no values."""
    of = f" of {len(values)}" if count else ""
    return f"{geomean(values):.2f} ({min(values):.2f}){of}" if values else ""


def threads(number: int) -> str:
    """A number of threads in words: `1 thread`, `2 threads`."""
    return f"{number} thread{'s' if number > 1 else ''}"


def device(stem: str, data: dict[str, Any]) -> str:
    """Tables of a run on a device: the bars, each case with the best of its peers, candidates of products."""
    rows = [x for x in data["rows"] if x["state"] == "ok"]
    judged = [x for x in rows if "right" in x]
    parts = [f"**{stem}**: {sum(x['right'] for x in judged)} of {len(judged)} products checked are right."]
    bars = [x for x in data["bars"] if x["reached"] is not None]
    if bars:
        shown = [[x["bar"], x["least"], f"{x['reached']:.3g}", f"{x['measured']}/{x['of']}", x["state"]] for x in bars]
        parts.append(table(["bar", "at least", "reached", "cases", ""], shown))
    timed = [_timed(x) for x in rows if x["seconds"]]
    head = ["m x n x k", "types", "B by", "", "us", "TFLOP/s", "best peer", "of its speed"]
    parts += [table(head, timed)] if timed else []
    surveys = [x for x in data["surveys"] if x.get("correlation") is not None]
    if surveys:
        shown = [[x["name"], x["candidates"], f"{x['correlation']:.2f}", f"{x['chosen']:.2f}"] for x in surveys]
        parts.append(table(["candidates of", "", "rank correlation", "chosen, of the best"], shown))
    parts += [", ".join(f"{x['tool']}: {x['state']}" for x in data["sanitizer"])]
    left = [x["name"] for x in data["rows"] if x["state"] != "ok"] + data["notes"].get("not run", [])
    parts += [f"Not measured: {', '.join(left)}."] if left else []
    return "\n\n".join(filter(None, parts))


def device_ratio(x: dict[str, Any]) -> float | None:
    """Rate of a case over that of its best peer; of decode layers as graphs, where they have graphs."""
    times, suffix = _times(x)
    ratio: float | None = x[f"ratio{suffix}"] if len(times) > 1 else None
    return ratio


def _times(x: dict[str, Any]) -> tuple[dict[str, float], str]:
    return (x["graph"], "_graph") if x.get("graph") else (x["seconds"], "")


def _timed(x: dict[str, Any]) -> list[str]:
    """Cells of a case."""
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
    chips: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for data in runs:
        chips.setdefault(data["chip"], {}).setdefault(data["threads"], []).append(data)
    return [_fusion(chip, dict(sorted(mine.items()))) for chip, mine in chips.items()]


def _fusion(chip: str, mine: dict[int, list[dict[str, Any]]]) -> str:
    """Tables of one chip, whose runs are given by threads."""
    groups, costs = _Cells(), _Cells()
    for count, runs in mine.items():
        for row in rows_of(runs):
            for name in COLUMNS:
                if row[name] is not None:
                    groups.add(f"{row['case']['group']}, {row['case']['dtype']}", (count, name), row[name])
            for name, cost in row["overheads"].items():
                costs.add(f"{name}, {row['case']['dtype']}", count, cost)
    parts: list[str] = []
    if groups.rows:
        head = ["group", *(f"{threads(t)}, {word}" for t in mine for word in COLUMNS.values())]
        parts.append(
            f"**{chip}**, fused: rate of portmm over that of the best peer of each case, and over its own where "
            f"nothing is fused, geometric mean of each group, and in brackets its lowest."
        )
        parts.append(table(head, groups.shown([(t, name) for t in mine for name in COLUMNS], mean)))
    if costs.rows:
        parts.append(f"**{chip}**: what an epilogue costs, of the bare product's time, median and in brackets most.")
        parts.append(table(["epilogue", *map(threads, mine)], costs.shown(mine, _cost)))
    every = [run for runs in mine.values() for run in runs]
    versions: dict[str, str] = {}
    for data in every:
        versions |= {name: text for name, text in data["versions"].items() if not text.startswith("missing")}
    dates = dict.fromkeys(data["date"] for data in every)
    took_part = "; ".join(dict.fromkeys(versions.values()))
    return "\n\n".join([*parts, f"Took part: {took_part}. Measured on {', '.join(dates)}."])


def _cost(values: Iterable[float]) -> str:
    percents = [100 * x for x in values]
    return f"{median(percents):+.1f} % ({max(percents):+.1f} %)" if percents else ""


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


HEAD = (
    "setting", "cases", "analytical, of the tuned rate", "lowest", "where", "trials", "failed", "rank correlation",
    "of the choices",
)  # fmt: skip


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


def _tuning_setting(data: dict[str, Any]) -> str:
    return threads(data["threads"]) + (", cold caches" if data["cold"] else "")


def _row(data: dict[str, Any]) -> list[str]:
    done = [x for x in data["cases"] if x["seconds"]]
    tried = [y for x in data["cases"] for y in x["trials"]]
    failed = sum(y["state"] != "ok" for y in tried)
    correlations = [_number(data[x]) for x in ("rank_correlation", "choices_correlation")]
    if not done:
        return [_tuning_setting(data), "0", "", "", "", str(len(tried)), str(failed), *correlations]
    ratios = [x["seconds"] / x["analytical_seconds"] for x in done]
    worst = done[ratios.index(min(ratios))]["case"]["name"]
    means = [_number(geomean(ratios)), _number(min(ratios)), worst]
    return [_tuning_setting(data), str(len(done)), *means, str(len(tried)), str(failed), *correlations]


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
    parts = [f"**{data['chip']}**, tuning, {_tuning_setting(data)}: microseconds per call.", table(head, rows)]
    parts += [f"Not tuned: {', '.join(left)}."] if left else []
    return "\n\n".join(parts)


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
    groups: dict[str, dict[int, str]] = {}
    for i, report in enumerate(reports):
        for s in summaries(report):
            groups.setdefault(s.group, {})[i] = f"{s.mean:.2f} ({s.lowest:.2f}) of {s.count}"
    every = {"**all**": groups.pop("all")} if "all" in groups else {}
    return [[name, *(cells.get(i, "") for i in range(len(reports)))] for name, cells in (groups | every).items()]


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
    kinds = _Cells()
    counts = sorted({row["threads"] for row in data["packing"]})
    for row in data["packing"]:
        group = f", groups of {row['group'] or 'all'} rows" if row["dtype"] == "u4" else ""
        mixed = f" for {row['activations']}" if row["activations"] != row["dtype"] and not group else ""
        kind = f"{row['dtype']}{mixed}{group}, by {'rows' if row['layout'] == 'row' else 'columns'}"
        kinds.add(kind, row["threads"], row["share"])
    rows = kinds.shown(counts, partial(mean, count=False))
    return (
        f"**{data['chip']}**: bytes read and written per second by `pack`, over those of a copy into a new array, "
        f"geometric mean over sizes, and in brackets the lowest.\n\n"
        f"{table(['weight', *map(threads, counts)], sorted(rows))}"
    )


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
