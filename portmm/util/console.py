"""What the commands print on.

Owns the console, the progress bar and what several commands take. Imports nothing
of portmm; rich, when something is printed.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

PIPE_WIDTH = 140
"""Columns of a table that no terminal is there to show."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def console(*, stderr: bool = False) -> Console:
    """The terminal, or a wide page where there is none."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def print_json(data: Any) -> None:
    """Print `data` as JSON."""
    typer.echo(json.dumps(data, indent=1))


@contextmanager
def progress(title: str, budget: float | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error, fed with (done, all, what happens now).

    Args:
        title: what goes on.
        budget: seconds for all of it, of which the bar shows those that are left; without a terminal
            there is a line instead for whatever happens, where a command without a budget says nothing.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = console(stderr=True)
    end = time.monotonic() + (budget or 0.0)

    def left() -> str:
        return "" if budget is None else f"{max(0.0, end - time.monotonic()):.0f} s left"

    if not shown.is_terminal:

        def line(done: int, total: int, text: str) -> None:
            if budget is not None and done < total:
                typer.echo(f"{title} {done + 1}/{total}: {text}, {left()}", err=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    times = (TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, *times, console=shown, transient=True) as bar:
        task = bar.add_task(title, total=None, left=left())
        yield lambda done, total, text: bar.update(
            task, completed=done, total=total, description=f"{title}: {text}", left=left()
        )
