"""What a comparison found, and how it is shown.

Owns the records of a comparison, their JSON form, and the terminal and
Markdown tables. Imports `comparison.case` and `comparison.figures`.

The JSON form is the records below, field by field, plus "schema": `SCHEMA`.
Times are seconds per call of the whole case (all matrices of a batch); rates
are GFLOP/s and are derived, never stored, except `limit`.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from portmm.comparison.case import Case
from portmm.comparison.figures import conditions, spread, total_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender as it turned up.

    Attributes:
        name: column of the table.
        peer: False for portmm.
        state: "ok", "missing", or "crashed" and "timeout" if it could not be opened.
        version: library, version, kernels it chose.
        reason: why it is not there.
        hint: what to do about it.
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
    """One contender on one case.

    Attributes:
        state: "ok", "unsupported", "wrong", "crashed" or "timeout".
        seconds: median over rounds of the seconds per call; 0 unless ok.
        samples: seconds per call, round by round.
        method: the way that was fastest for this library.
        reason: why it is not ok, or which of its methods were wrong.
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
    """All contenders on one case.

    Attributes:
        case: what was computed.
        entries: contender -> how it did.
        best: the fastest peer, empty if none.
        ratio: portmm's rate over the best peer's: the median over rounds of the
            ratio within a round; None without either.
        limit: GFLOP/s that this machine could reach on this case, None if unknown.
    """

    case: Case
    entries: dict[str, Entry]
    best: str = ""
    ratio: float | None = None
    limit: float | None = None

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
        chip: the processor, for people.
        machine: portmm's name for it.
        threads: threads of each contender.
        isa: the instruction set that all were held to, empty for none.
        suite: name of the suite.
        entrants: who took part.
        results: what was measured.
        date: ISO date, may be empty.
        skipped: cases for which no time was left.
        removed: environment variables that contenders did not get to see.
        rates: the rates behind the limits: measured GFLOP/s and GB/s of one core, or those of a described device.
        cold: bytes after which no cache holds what was used before, 0 if caches were warm.
        device: where the arrays were, as `compare` was told; empty for the processor.
        alone: the instruction set that portmm was held to and the others could not be, empty for none.
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
        """Names of the contenders that could be opened and do any of these cases."""
        entries = [r.entries for r in self.results]
        return tuple(n for n in self.ran if any(n in e and e[n].state != "unsupported" for e in entries))

    @property
    def approximate(self) -> frozenset[str]:
        """Names of the contenders that round activations to 8 bits."""
        return frozenset(e.name for e in self.entrants if e.approximate)

    def to_json(self) -> str:
        """The report as JSON text."""
        table = {"schema": SCHEMA, **asdict(self)}
        # What few reports have is written where it says something.
        unsaid: tuple[tuple[Any, dict[str, Any]], ...] = (
            (table["entrants"], {"approximate": False}),
            ([r["case"] for r in table["results"]], {"block": 0, "dynamic": False, "fused": "", "count": 1}),
            ([table], {"cold": 0, "device": "", "alone": ""}),
        )
        for row, name, value in ((row, *item) for rows, usual in unsaid for row in rows for item in usual.items()):
            if row[name] == value:
                del row[name]
        return json.dumps(table, indent=1) + "\n"

    def records(self) -> list[dict[str, Any]]:
        """A flat record for each case and contender, as `pandas.DataFrame` takes them."""
        # By name: the module imports this one.
        return import_module("portmm.comparison.formats").records(self)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        """The summary and the table, for notebooks."""
        shown: str = import_module("portmm.comparison.html").fragment(self)
        return shown


def from_json(text: str) -> Report:
    """Read what `Report.to_json` wrote.

    Raises:
        ValueError: it is of another schema.
    """
    table: dict[str, Any] = json.loads(text)
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
    return Result(**{**row, "case": Case(**row["case"]), "entries": entries})


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean, None of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The ratios of a group of cases.

    Attributes:
        group: its name.
        count: cases with a ratio.
        mean: geometric mean of the ratios.
        lowest: the worst ratio.
        lowest_case: the shape it belongs to.
        wins: cases with a ratio of at least one.
    """

    group: str
    count: int
    mean: float
    lowest: float
    lowest_case: str
    wins: int


def summaries(report: Report) -> list[Summary]:
    """One summary per group, then one of all if there are several."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for result in report.results:
        if result.ratio is not None:
            groups.setdefault(result.case.group, []).append((result.ratio, result.case.shape))
    made = [_summary(name, rows) for name, rows in groups.items()]
    if len(made) > 1:
        made.append(_summary("all", [row for rows in groups.values() for row in rows]))
    return made


def _summary(group: str, rows: Sequence[tuple[float, str]]) -> Summary:
    ratios = [ratio for ratio, _ in rows]
    lowest, shape = min(rows)
    return Summary(group, len(rows), geomean(ratios) or 0.0, lowest, shape, sum(ratio >= 1 for ratio in ratios))


def failures(report: Report) -> list[str]:
    """A sentence for each contender and case that went wrong."""
    said = []
    for result in report.results:
        for name, entry in result.entries.items():
            if entry.state in ("wrong", "crashed", "timeout"):
                said.append(f"{name} on {result.case.name}: {entry.state}: {entry.reason}")
            elif entry.state == "unsupported" and name == report.ours:
                said.append(f"{name} on {result.case.name}: not done: {entry.reason}")
            elif entry.reason and entry.state == "ok":
                said.append(f"{name} on {result.case.name}: a method was wrong: {entry.reason}")
    return said


def absences(report: Report) -> list[str]:
    """A sentence for each contender that could not be opened."""
    said = []
    for e in report.entrants:
        if e.state == "missing":
            said.append(f"{e.name}: not found ({e.reason})" + (f": {e.hint}" if e.hint else ""))
        elif e.state != "ok":
            said.append(f"{e.name}: {e.state} when opened: {e.reason}")
    return said


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _cell(report: Report, result: Result, name: str) -> str:
    entry = result.entries.get(name)
    if entry is None or entry.state == "unsupported":
        return "-"
    mark = "~" if name in report.approximate else ""
    return mark + _rate(result.gflops(name)) if entry.state == "ok" else entry.state


def heading(report: Report) -> str:
    """One line: processor, threads, what was forced, unit."""
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    forced = f", all held to {report.isa}" if report.isa else ""
    forced += f", portmm alone held to {report.alone}" if report.alone else ""
    narrow = any(result.case.narrow for result in report.results)
    cold = ", cold caches" if report.cold else ""
    where = cold if report.device else f", {threads}{forced}{cold}"
    return f"{report.chip}{where}, {'narrow types, GOP/s' if narrow else 'f32, GFLOP/s'}"


def _columns(report: Report) -> list[str]:
    limit = ["% limit"] if report.ours and any(r.limit for r in report.results) else []
    verdict = ["best peer", "ratio", "spread"] if report.ours else ["best peer"]
    return ["case", "MxNxK", *report.shown, *verdict, *limit]


def _row(report: Report, result: Result) -> list[str]:
    row = [
        result.case.name,
        result.case.shape,
        *(_cell(report, result, name) for name in report.shown),
        result.best or "-",
    ]
    if not report.ours:
        return row
    row.append("" if result.ratio is None else f"{result.ratio:.2f}")
    row.append("" if (wide := spread(result.ratios(report.ours))) is None else f"{100 * wide:.0f}%")
    if any(r.limit for r in report.results):
        rate = result.gflops(report.ours)
        row.append(f"{100 * rate / result.limit:.0f}" if rate and result.limit else "")
    return row


def terminal(report: Report) -> RenderableType:
    """The report for a terminal: the table, the means, and all that went wrong."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(heading(report)), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # The shape says what a case's name says, and bold who is the best peer: a terminal is narrow.
    columns = _columns(report)
    kept = [i for i, name in enumerate(columns) if name not in ("case", "best peer")]
    for i in kept:
        numbers = columns[i] != "MxNxK"
        table.add_column(
            columns[i],
            justify="right" if numbers else "left",
            no_wrap=numbers,
            min_width=len(columns[i]) if numbers else None,
        )
    for result in report.results:
        style = "" if result.ratio is None else "green" if result.ratio >= 1 else "red"
        row = [escape(x) for x in _row(report, result)]
        table.add_row(*(f"[bold]{row[i]}[/bold]" if columns[i] == result.best else row[i] for i in kept), style=style)
    means = Table(title="ratio to the best peer (bold) of each case", title_justify="left", box=SIMPLE_HEAD)
    for name in ("group", "cases", "geometric mean", "wins", "lowest", "where"):
        means.add_column(name, justify="left" if name in ("group", "where") else "right")
    for s in summaries(report):
        means.add_row(s.group, str(s.count), f"{s.mean:.2f}", str(s.wins), f"{s.lowest:.2f}", escape(s.lowest_case))
    parts: list[RenderableType] = [table, *([means] if means.row_count else [])]
    return Group(*parts, *(f"[dim]{escape(line)}[/dim]" for line in notes(report)))


def notes(report: Report) -> list[str]:
    """What a reader must know besides the tables: versions, absences, failures, cases left out."""
    lines = [f"{e.name}: {e.version}" for e in report.entrants if e.state == "ok"]
    lines += [
        f"{name}: rounds activations to 8 bits: its rates (~) enter ratios only where a case allows that"
        for name in sorted(report.approximate)
    ]
    lines += [*conditions(report), *total_lines(report)]
    lines += absences(report) + failures(report)
    if report.skipped:
        lines.append(f"no time was left for: {', '.join(report.skipped)}")
    if report.removed:
        lines.append(f"not passed on to any contender: {', '.join(report.removed)}")
    return lines


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    rule = ["---" if i < left else "--:" for i in range(len(head))]
    # Names come from users' files.
    lines = ([" ".join(x.replace("|", "\\|").split()) for x in row] for row in (head, rule, *rows))
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def markdown(report: Report, *, per_case: bool = True) -> str:
    """The report as Markdown tables, losses as plainly as wins."""
    parts = [f"**{heading(report)}**"]
    rows = [
        [s.group, str(s.count), f"{s.mean:.2f}", f"{s.wins}", f"{s.lowest:.2f}", s.lowest_case]
        for s in summaries(report)
    ]
    if rows:
        head = ("group", "cases", "geometric mean", "wins", "lowest", "where")
        parts.append("Ratio to the best peer of each case:\n\n" + _markdown_table(head, rows, 1))
    if per_case:
        parts.append(_markdown_table(_columns(report), (_row(report, r) for r in report.results), 2))
    parts.append("\n".join(f"- {line}" for line in notes(report)))
    return "\n\n".join(parts) + "\n"
