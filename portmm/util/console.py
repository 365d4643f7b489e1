"""Console of the command line.

Owns the console and the progress bar. rich and typer are imported only when something is printed:
functions that are fused, and layers of bundles, load this module as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPE_WIDTH = 140
"""Columns of a table where the output is no terminal."""


def console(*, stderr: bool = False) -> Console:
    """The console of the terminal, or one of `PIPE_WIDTH` columns where the output is no terminal."""
    from rich.console import Console

    terminal = Console(stderr=stderr, highlight=False)
    return terminal if terminal.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def print_json(data: Any) -> None:
    """Print `data` as JSON."""
    from typer import echo

    echo(json.dumps(data, indent=1))


def table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    words: Collection[str] = (),
    styles: Sequence[str] = (),
) -> Table:
    """A table for a terminal.

    Args:
        title: what it shows, may be empty.
        head: names of the columns.
        rows: cells, whose marks are escaped unless they are rich's texts.
        words: names of the columns that are aligned left; all others are numbers.
        styles: of each row.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    result = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in head:
        result.add_column(name, justify="left" if name in words else "right", overflow="fold")
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        result.add_row(*(escape(x) if isinstance(x, str) else x for x in row), style=style)
    return result


@contextmanager
def progress(title: str, budget: float | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error; yields its update function of (steps done, steps in all, current step).

    Args:
        title: description of the work.
        budget: seconds for all of it; the bar shows those that are left. Without a terminal, a command with a
            budget prints a line for each step, and a command without one prints nothing.
    """
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    output = console(stderr=True)
    end = time.monotonic() + (budget or 0.0)

    def left() -> str:
        return "" if budget is None else f"{max(0.0, end - time.monotonic()):.0f} s left"

    if not output.is_terminal:

        def line(done: int, total: int, text: str) -> None:
            if budget is not None and done < total:
                from typer import echo

                echo(f"{title} {done + 1}/{total}: {text}, {left()}", err=True)

        yield line
        return

    class Left(ProgressColumn):
        """Seconds of the budget that are left, at each refresh: a step may take many."""

        def render(self, task: Task) -> Text:  # noqa: ARG002 - all tasks have one budget
            return Text(left())

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    times = (TimeElapsedColumn(), Left())
    with Progress(*columns, *times, console=output, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=f"{title}: {text}")
