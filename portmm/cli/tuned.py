"""Command `portmm tuned`, which lists, merges and exports tuned schedules.

Owns the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from portmm.errors import DatabaseError
from portmm.util.console import console, print_json, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from portmm.dispatch.tuned_schedule import Tuned

Paths = Annotated[list[Path] | None, typer.Option(help="Merge the findings of this database or TOML file.")]


def tuned(
    *,
    database: Annotated[Path | None, typer.Option(help="Path of another database.", show_default="the user's")] = None,
    merge: Paths = None,
    export: Annotated[Path | None, typer.Option(help="Write all findings to this TOML file.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all findings and trials.")] = False,
    where: Annotated[bool, typer.Option("--where", help="Print only its path.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the schedules that `portmm tune` found; merge, export or remove them."""
    from portmm.build.cache import tuned_database
    from portmm.dispatch import tuned_schedule, tuning_database

    path = database or tuned_database()
    if path is None:
        raise DatabaseError("PORTMM_TUNED is off, so there is no database; unset it, or pass --database")
    if where:
        typer.echo(str(path))
        return
    if clear:
        typer.echo(f"{tuning_database.clear(path) if path.exists() else 0} findings removed from {path}")
        return
    if merge:
        typer.echo(f"{tuning_database.merge(path, merge)} findings merged into {path}")
    findings = tuning_database.rows(path) if path.exists() else []
    if export:
        export.write_text(tuned_schedule.to_toml(findings))
        typer.echo(f"{len(findings)} findings written to {export}")
    elif as_json:
        print_json([x.row() for x in findings])
    elif not merge:
        console().print(_view(findings, path))


def _view(findings: list[Tuned], path: Path) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape

    from portmm.util.text import time

    rows = [
        (x.chip, f"{x.problem}{' (cold)' if x.cold else ''}", str(x.threads), time(x.seconds), f"{x.gain:.2f}",
         str(x.schedule))
        for x in findings
    ]  # fmt: skip
    head = ("chip", "problem", "threads", "time", "gain", "schedule")
    listed = [table("", head, rows, words=("chip", "problem", "schedule"))] if findings else []
    return Group(*listed, f"{escape(str(path))}: {len(findings)} findings")
