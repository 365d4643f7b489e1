"""Records of a comparison, and their JSON form.

Owns both, and values derived from them: verdicts, shares of the limit, means over
groups.

The JSON form is the records below, field by field, plus "schema": `SCHEMA`, and for each result
that has a ratio its "spread" and "verdict", which follow from the samples and are not read back.
Times are seconds per call of the whole case (all matrices of a batch); rates
are GFLOP/s and are derived, never stored, except `limit`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from portmm.comparison.case import Case
from portmm.comparison.figures import decided, grouped, spread

SCHEMA = 1
DERIVED = ("spread", "verdict")
"""Derived keys of the JSON form of a result, in addition to its fields."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender's state and version in a comparison.

    Attributes:
        name: column of the table.
        peer: False for portmm.
        state: "ok", "missing", or "crashed" and "timeout" if it could not be opened.
        version: library, version, kernels it selected.
        reason: why it is missing.
        hint: how to install it.
        approximate: it rounds activations to 8 bits; its times are shown, and part of a ratio
            only where the case allows that.
    """

    name: str
    peer: bool
    state: str
    version: str = ""
    reason: str = ""
    hint: str = ""
    approximate: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """Result of one contender on one case.

    Attributes:
        state: "ok", "unsupported", "wrong", "crashed" or "timeout".
        seconds: median over rounds of the seconds per call; 0 unless ok.
        samples: seconds per call, round by round.
        method: the fastest method of this library.
        reason: why it is not ok, or the methods that were wrong.
        error: largest absolute error found.
        bound: the error that was allowed.
    """

    state: str
    seconds: float = 0.0
    samples: tuple[float, ...] = ()
    method: str = ""
    reason: str = ""
    error: float = 0.0
    bound: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """Results of all contenders on one case.

    Attributes:
        case: the case.
        entries: contender -> its result.
        best: the fastest peer, empty if none.
        ratio: portmm's rate over the best peer's: the median over rounds of the
            ratio within a round; None without either.
        limit: limit of this machine on this case in GFLOP/s, measured in alternation with the
            contenders, None if unknown; see `Report.ceiling`.
        roof: name of the rate that sets the limit, as in `Report.rates`; empty if unknown.
        load: cores that other processes kept busy meanwhile, None if unknown.
    """

    case: Case
    entries: dict[str, Entry]
    best: str = ""
    ratio: float | None = None
    limit: float | None = None
    roof: str = ""
    load: float | None = None

    def gflops(self, name: str) -> float | None:
        """Rate of a contender in GFLOP/s, None if it has none."""
        entry = self.entries.get(name)
        return self.case.flops / entry.seconds / 1e9 if entry and entry.state == "ok" and entry.seconds else None

    def ratios(self, name: str) -> tuple[float, ...]:
        """The rate of a contender over the best peer's, round by round."""
        if not {self.best, name} <= self.entries.keys():
            return ()
        pairs = zip(self.entries[self.best].samples, self.entries[name].samples, strict=False)
        return tuple(peer / own for peer, own in pairs)


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison.

    Attributes:
        chip: name of the processor, for display.
        machine: portmm's name for it.
        threads: threads of each contender.
        isa: the instruction set that all were restricted to, empty for none.
        suite: name of the suite.
        entrants: the contenders.
        results: the measured cases.
        date: ISO date, may be empty.
        skipped: cases for which no time was left.
        removed: environment variables that were not passed to contenders.
        rates: the rates that set the limits: GFLOP/s and GB/s of one core, the highest that were measured, or those
            of a described device.
        cold: bytes whose use evicts all earlier data from the caches, 0 if caches were warm.
        device: device of the arrays, as `compare` takes it; empty for the processor.
        alone: the instruction set that portmm alone could be restricted to, empty for none.
        load: cores that other processes kept busy on average, None if unknown.
        cores: cores that a process could use, 0 if unknown.
    """

    chip: str
    machine: str
    threads: int
    isa: str
    suite: str
    entrants: tuple[Entrant, ...]
    results: tuple[Result, ...]
    date: str = ""
    skipped: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    cold: int = 0
    device: str = ""
    alone: str = ""
    load: float | None = None
    cores: int = 0

    @property
    def ours(self) -> str:
        """Name of the contender that is portmm, empty if it did not run."""
        return next((e.name for e in self.entrants if not e.peer and e.state == "ok"), "")

    @property
    def ran(self) -> tuple[str, ...]:
        """Names of the contenders that could be opened."""
        return tuple(e.name for e in self.entrants if e.state == "ok")

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of the contenders that could be opened and support any of these cases."""
        entries = [r.entries for r in self.results]
        return tuple(n for n in self.ran if any(n in e and e[n].state != "unsupported" for e in entries))

    @property
    def approximate(self) -> frozenset[str]:
        """Names of the contenders that round activations to 8 bits."""
        return frozenset(e.name for e in self.entrants if e.approximate)

    def spread(self, result: Result) -> float | None:
        """The spread of a case's ratio over rounds, None for fewer than two."""
        return spread(result.ratios(self.ours))

    def verdict(self, result: Result) -> str:
        """The word "win" or "loss"; "draw" if the ratio lies within its spread; empty without a ratio."""
        if result.ratio is None:
            return ""
        if not decided(result.ratio, self.spread(result)):
            return "draw"
        return "win" if result.ratio >= 1 else "loss"

    def ceiling(self, result: Result) -> float | None:
        """Upper bound of rates on a case in GFLOP/s: the limit, or the fastest contender's rate if that is higher.

        A contender that rounds activations to 8 bits counts only where the case allows that.
        """
        if result.limit is None:
            return None
        names = [name for name in result.entries if result.case.dynamic or name not in self.approximate]
        rates = [x for name in names if (x := result.gflops(name)) is not None and math.isfinite(x)]
        return max([result.limit, *rates])

    def share(self, result: Result) -> float | None:
        """The rate of portmm over the ceiling of a case, at most 1; None if unknown."""
        rate, ceiling = result.gflops(self.ours), self.ceiling(result)
        return rate / ceiling if rate and ceiling else None

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Names of the cases on which a contender was faster than the limit that was measured."""
        return tuple(r.case.name for r in self.results if r.limit is not None and self.ceiling(r) != r.limit)

    def to_json(self) -> str:
        """The report as JSON text."""
        table = {"schema": SCHEMA, **asdict(self)}
        for row, result in zip(table["results"], self.results, strict=True):
            if result.ratio is not None:
                row |= {"spread": self.spread(result), "verdict": self.verdict(result)}
        # Fields that few reports use are omitted at their default value.
        omitted: tuple[tuple[Any, dict[str, Any]], ...] = (
            (table["entrants"], {"approximate": False}),
            ([r["case"] for r in table["results"]], {"block": 0, "dynamic": False, "fused": "", "count": 1}),
            (table["results"], {"roof": "", "load": None}),
            ([table], {"cold": 0, "device": "", "alone": "", "load": None, "cores": 0}),
        )
        for row, name, value in ((row, *item) for rows, usual in omitted for row in rows for item in usual.items()):
            if row[name] == value:
                del row[name]
        return json.dumps(table, indent=1) + "\n"

    def records(self) -> list[dict[str, Any]]:
        """Flat records, one for each case and contender, as `pandas.DataFrame` takes them."""
        # By name: the module imports this one.
        return import_module("portmm.comparison.text").records(self)

    def _repr_html_(self) -> str:
        """The summary and the table, for notebooks."""
        return import_module("portmm.comparison.html").fragment(self)


def from_json(text: str) -> Report:
    """Report of the text that `Report.to_json` returned.

    Raises:
        ValueError: it is no report, or of another schema.
    """
    table = json.loads(text)
    if not isinstance(table, dict) or "entrants" not in table:
        raise ValueError("this is no report; `portmm compare --save` writes one")
    schema = table.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(f"a report of schema {schema!r}; this portmm reads {SCHEMA}")
    table["entrants"] = tuple(Entrant(**row) for row in table["entrants"])
    table["results"] = tuple(_result(row) for row in table["results"])
    for name in ("skipped", "removed"):
        table[name] = tuple(table[name])
    return Report(**table)


def _result(row: dict[str, Any]) -> Result:
    entries = {name: Entry(**{**e, "samples": tuple(e["samples"])}) for name, e in row["entries"].items()}
    kept = {name: value for name, value in row.items() if name not in DERIVED}
    return Result(**{**kept, "case": Case(**row["case"]), "entries": entries})


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean, None for no values."""
    every = [*values]
    return statistics.geometric_mean(every) if every else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The ratios of a group of cases.

    Attributes:
        group: its name.
        count: cases with a ratio.
        mean: geometric mean of the ratios.
        lowest: the worst ratio.
        lowest_case: the shape of the case with that ratio.
        wins: cases with a ratio above one by more than its spread.
        draws: cases with a ratio within its spread.
    """

    group: str
    count: int
    mean: float
    lowest: float
    lowest_case: str
    wins: int
    draws: int = 0

    @property
    def losses(self) -> int:
        """Cases with a ratio below one by more than its spread."""
        return self.count - self.wins - self.draws


def summaries(report: Report) -> list[Summary]:
    """Summaries of the groups, then one of all cases if there are several groups."""
    groups = grouped((x for x in report.results if x.ratio is not None), lambda x: x.case.group)
    rows_ = [_summary(report, name, rows) for name, rows in groups.items()]
    if len(rows_) > 1:
        rows_.append(_summary(report, "all", [row for rows in groups.values() for row in rows]))
    return rows_


def _summary(report: Report, group: str, rows: Sequence[Result]) -> Summary:
    ratios = [(row.ratio or 0.0, row.case.shape) for row in rows]
    lowest, shape = min(ratios)
    words = [report.verdict(row) for row in rows]
    mean = geomean(ratio for ratio, _ in ratios) or 0.0
    return Summary(group, len(rows), mean, lowest, shape, words.count("win"), words.count("draw"))
