"""Terminal output of tuning.

Owns the progress bar and the tables.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from portmm.build.cache import tuned_database
from portmm.comparison.table import Table
from portmm.tuning.records import summary, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from portmm.tuning.records import Trial, Tuning


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
