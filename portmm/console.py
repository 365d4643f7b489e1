"""What the commands print on.

Owns the console, the progress bar and what several commands take. Imports nothing
of portmm; rich, when something is printed.
"""

from __future__ import annotations

import json
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
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error, fed with (done, all, what happens now)."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    quiet = not shown.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=shown, transient=True, disable=quiet) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=f"{title}: {text}")
