"""Records of tuning, and what is shown of them.

Owns `Trial`, `TunedCase` and `Tuning`, their JSON, their rows for data frames, their tables for terminals and
notebooks, and the progress bar.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.build.cache import tuned_database
from portmm.comparison.case import Case
from portmm.comparison.figures import Table
from portmm.util.templates import render

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


OK, WRONG, CRASHED, TIMEOUT, UNBUILDABLE = STATES = ("ok", "wrong", "crashed", "timeout", "unbuildable")
"""States of a measured candidate."""
SCHEMA = 1
FEWEST = 3
"""Fewest trials whose rank correlation is meaningful."""
MOST_FAILED = 10
"""Most failed candidates that the summary lists."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurement of one candidate.

    Attributes:
        schedule: as `schedule.text.spell` writes it.
        workers: threads that share the work.
        state: one of `STATES`.
        predicted: seconds of a call, by the cost model.
        seconds: of a call: those of the analytical choice, times the ratio measured in alternation with it; 0 if it
            failed.
        reason: why it failed.
    """

    schedule: str
    workers: int
    state: str
    predicted: float
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TunedCase:
    """Result of tuning one case.

    Attributes:
        case: the case that was called.
        problem: the problem of that call, as text; empty if nothing can be tuned.
        analytical: the cost model's selection.
        analytical_workers: threads that share it.
        tuned: the fastest schedule; the analytical one unless another is surely faster.
        tuned_workers: threads that share it.
        analytical_seconds: of a call by the first, measured.
        seconds: of a call by the second, measured in alternation with the first.
        predicted: of a call by the first, in seconds.
        trials: trials in the order in which they were measured; the first is the analytical choice.
        finished: the search was complete: neither out of time nor interrupted.
        reason: why nothing was tuned.
    """

    case: Case
    problem: str = ""
    analytical: str = ""
    analytical_workers: int = 1
    tuned: str = ""
    tuned_workers: int = 1
    analytical_seconds: float = 0.0
    seconds: float = 0.0
    predicted: float = 0.0
    trials: tuple[Trial, ...] = ()
    finished: bool = False
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Rate of the tuned schedule over that of the analytical one, at least 1; 0 where nothing was tuned."""
        return self.analytical_seconds / self.seconds if self.seconds else 0.0

    @property
    def measured(self) -> tuple[Trial, ...]:
        """The trials that computed the right result."""
        return tuple(x for x in self.trials if x.state == OK)

    @property
    def failed(self) -> tuple[Trial, ...]:
        """The trials that failed."""
        return tuple(x for x in self.trials if x.state != OK)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's coefficient of predicted and measured seconds over the trials; None for too few trials."""
        return spearman([x.predicted for x in self.measured], [x.seconds for x in self.measured])


@dataclass(frozen=True, slots=True)
class Tuning:
    """Result of one call of `tune`.

    Attributes:
        machine: name of the target.
        chip: model name of the processor.
        threads: the most threads of a call.
        cold: caches were emptied before each call.
        cases: results by case.
        spent: seconds that the call took.
        date: date of the call, ISO.
        database: the file that schedules were written to; empty if to none.
        interrupted: Ctrl-C ended it; cases that were not reached are left out.
        notes: remarks for the reader.
    """

    machine: str
    chip: str
    threads: int
    cold: bool
    cases: tuple[TunedCase, ...]
    spent: float
    date: str
    database: str = ""
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def tuned(self) -> tuple[TunedCase, ...]:
        """The cases that were measured."""
        return tuple(x for x in self.cases if x.seconds)

    @property
    def geomean(self) -> float | None:
        """Geometric mean of the rates of the analytical choices over those of the tuned schedules, at most 1."""
        logs = [math.log(x.ratio) for x in self.tuned]
        return math.exp(-sum(logs) / len(logs)) if logs else None

    @property
    def rank_correlation(self) -> float | None:
        """Mean over the cases of the rank correlation of predicted and measured seconds."""
        known = [y for x in self.tuned if (y := x.rank_correlation) is not None]
        return sum(known) / len(known) if known else None

    @property
    def choices_correlation(self) -> float | None:
        """Rank correlation of predicted and measured seconds of the analytical choices of all cases."""
        return spearman([x.predicted for x in self.tuned], [x.analytical_seconds for x in self.tuned])

    def records(self) -> list[dict[str, Any]]:
        """A flat dict for each trial, for a data frame."""
        return [
            {
                "case": x.case.name,
                "shape": x.case.shape,
                "threads": self.threads,
                "cold": self.cold,
                **asdict(trial),
                "analytical": (trial.schedule, trial.workers) == (x.analytical, x.analytical_workers),
                "tuned": (trial.schedule, trial.workers) == (x.tuned, x.tuned_workers),
            }
            for x in self.cases
            for trial in x.trials
        ]

    def to_json(self) -> str:
        """The whole record as JSON text."""
        data = {"schema": SCHEMA, **asdict(self)}
        del data["database"]  # a path on one machine, and results are shared
        data |= {"geomean": self.geomean, "rank_correlation": self.rank_correlation}
        data["choices_correlation"] = self.choices_correlation
        for row, case in zip(data["cases"], self.cases, strict=True):
            row |= {"ratio": case.ratio, "rank_correlation": case.rank_correlation}
        return json.dumps(data, indent=1) + "\n"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return render(__file__, "tuning.html", columns=COLUMNS, rows=map(_cells, self.cases), summary=summary(self))


COLUMNS = ("case", "shape", "analytical us", "tuned us", "times", "trials", "failed", "rank corr.", "tuned schedule")


def table(tuning: Tuning) -> Table:
    """The table of cases."""
    caches = ", cold caches" if tuning.cold else ""
    title = f"{tuning.chip}, {tuning.threads} thread{'s' * (tuning.threads != 1)}{caches}"
    return Table(COLUMNS, [_cells(x) for x in tuning.cases], 2, COLUMNS[-1:], title)


def _cells(x: TunedCase) -> tuple[str, ...]:
    if not x.seconds:
        return (x.case.name, x.case.shape, *[""] * 6, x.reason)
    order = x.rank_correlation
    name = "analytical" if (x.tuned, x.tuned_workers) == (x.analytical, x.analytical_workers) else x.tuned
    return (
        *(x.case.name, x.case.shape, f"{x.analytical_seconds * 1e6:.1f}", f"{x.seconds * 1e6:.1f}", f"{x.ratio:.2f}"),
        *(str(len(x.trials)), str(len(x.failed)), "" if order is None else f"{order:.2f}"),
        name if name == "analytical" or x.tuned_workers == 1 else f"{name} [{x.tuned_workers}]",
    )


def summary(tuning: Tuning) -> list[str]:
    """Summary lines of a table of cases: mean rate, rank correlation, failures and notes."""
    failed = [(x.case.name, y) for x in tuning.cases for y in x.failed]
    text = render(__file__, "summary.txt", tuning=tuning, failed=failed, most=MOST_FAILED)
    return [*text.splitlines(), *tuning.notes]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None for fewer than three pairs, or where all of one are equal."""
    if len(one) < FEWEST:
        return None
    ranks = [_ranks(np.asarray(x, float)) for x in (one, other)]
    if not all(x.std() for x in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: Any) -> Any:
    """Ranks of values; ties share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


@contextmanager
def bar(console: Console, budget: float) -> Iterator[Callable[[float, str], None]]:
    """Progress bar of the budget; yields a function of the seconds that are left and a text."""
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("tuning"),
        BarColumn(),
        TextColumn("{task.fields[left]} left"),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=budget, left=_clock(budget), now="")
        yield lambda left, now: progress.update(task, completed=budget - left, left=_clock(left), now=now)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def view(tuning: Tuning) -> RenderableType:
    """Table of a tuning with its summary."""
    from rich.console import Group
    from rich.text import Text

    ended = (
        [f"Interrupted after {tuning.spent:.0f} s; the same command goes on from here."] if tuning.interrupted else []
    )
    return Group(table(tuning).terminal(), *map(Text, [*summary(tuning), *ended, *_kept(tuning)]))


def _kept(tuning: Tuning) -> list[str]:
    """Line that names the database of the schedules, and the setting with which calls use it."""
    if not tuning.database or not tuning.tuned:
        return []
    usual = str(tuned_database() or "") == tuning.database
    return [f"Kept in {tuning.database}; calls use it{'' if usual else ' with PORTMM_TUNED set to that'}."]


def predictions(tuning: Tuning) -> RenderableType:
    """Table of the predicted and the measured time of each trial, the fastest of a case first."""
    head, rows = ("case", "predicted us", "measured us", "share", "schedule"), []
    for case in tuning.tuned:
        trials = sorted(case.measured, key=lambda x: x.seconds)
        for i, x in enumerate(trials):
            times = (f"{x.predicted * 1e6:.1f}", f"{x.seconds * 1e6:.1f}", f"{trials[0].seconds / x.seconds:.2f}")
            rows.append(("" if i else case.case.name, *times, _schedule(x)))
    return Table(head, rows, words=("schedule",), title="Predicted and measured time").terminal()


def _schedule(x: Trial) -> str:
    return x.schedule if x.workers == 1 else f"{x.schedule} [{x.workers}]"
