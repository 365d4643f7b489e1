"""What tuning shows on a terminal.

Owns the bar and the table. Imports `build.cache`, `tuning.records`; rich.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from portmm.build.cache import tuned_database
from portmm.tuning.records import COLUMNS, cells, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from portmm.tuning.records import Trial, Tuning

LEFT = 2
"""Columns whose text begins at the left: names and shapes; so does the last."""


@contextmanager
def bar(console: Console, budget: float) -> Iterator[Callable[[float, str], None]]:
    """A bar of the budget, fed with the seconds that are left and what happens now."""
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


def view(found: Tuning) -> RenderableType:
    """The table of a tuning and what it adds up to."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    caches = ", cold caches" if found.cold else ""
    title = f"{found.chip}, {found.threads} thread{'s' * (found.threads != 1)}{caches}"
    table = Table(title=Text(title), title_justify="left")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i < LEFT or i == len(COLUMNS) - 1 else "right", overflow="fold")
    for x in found.cases:
        table.add_row(*map(Text, cells(x)))
    ended = [f"Interrupted after {found.spent:.0f} s; the same command goes on from here."] if found.interrupted else []
    return Group(table, *map(Text, [*summary(found), *ended, *_kept(found)]))


def _kept(found: Tuning) -> list[str]:
    """Where the schedules are, and who uses them."""
    if not found.database or not found.tuned:
        return []
    usual = str(tuned_database() or "") == found.database
    return [f"Kept in {found.database}; calls use it{'' if usual else ' with PORTMM_TUNED set to that'}."]


def predictions(found: Tuning) -> RenderableType:
    """Predicted beside measured time of each trial, the fastest of a case first."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Predicted and measured time", title_justify="left")
    table.add_column("case")
    for name in ("predicted us", "measured us", "share"):
        table.add_column(name, justify="right")
    table.add_column("schedule", overflow="fold")
    for case in found.tuned:
        trials = sorted(case.measured, key=lambda x: x.seconds)
        for i, x in enumerate(trials):
            first = Text(case.case.name if i == 0 else "")
            share = f"{trials[0].seconds / x.seconds:.2f}"
            table.add_row(first, f"{x.predicted * 1e6:.1f}", f"{x.seconds * 1e6:.1f}", share, Text(_told(x)))
        table.add_section()
    return table


def _told(x: Trial) -> str:
    return x.schedule if x.workers == 1 else f"{x.schedule} [{x.workers}]"
