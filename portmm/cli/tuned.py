"""`portmm tuned`: what has been found to be fastest, and how it travels.

Owns the command. Imports `dispatch.tuning_database` and what the command line shares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from portmm.errors import DatabaseError
from portmm.util.console import console, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from portmm.dispatch.tuning_database import Tuned

Paths = Annotated[list[Path] | None, typer.Option(help="Take findings over from this database or TOML file.")]


def tuned(
    *,
    database: Annotated[
        Path | None, typer.Option(help="Another file than the usual one.", show_default="the user's")
    ] = None,
    merge: Paths = None,
    export: Annotated[Path | None, typer.Option(help="Write all findings to this TOML file.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Forget all findings and trials, to tune anew.")] = False,
    where: Annotated[bool, typer.Option("--where", help="Print only where it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the schedules that `portmm tune` found; merge, export or forget them."""
    from portmm.build.cache import tuned_database
    from portmm.dispatch import tuning_database as base

    path = database or tuned_database()
    if path is None:
        raise DatabaseError("PORTMM_TUNED is off, so there is no database; unset it, or give --database")
    if where:
        typer.echo(str(path))
        return
    if clear:
        typer.echo(f"{base.clear(path) if path.exists() else 0} findings forgotten in {path}")
        return
    if merge:
        typer.echo(f"{base.merge(path, merge)} findings taken over into {path}")
    found = base.rows(path) if path.exists() else []
    if export:
        export.write_text(base.to_toml(found))
        typer.echo(f"{len(found)} findings written to {export}")
    elif as_json:
        print_json([x.row() for x in found])
    elif not merge:
        console().print(_view(found, path))


def _view(found: list[Tuned], path: Path) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    from portmm.util.text import time

    table = Table(box=SIMPLE_HEAD)
    for name in ("chip", "problem", "threads", "time", "gain", "schedule"):
        table.add_column(name, justify="right" if name in ("threads", "time", "gain") else "left")
    for x in found:
        cold = " (cold)" if x.cold else ""
        row = (x.chip, str(x.problem) + cold, str(x.threads), time(x.seconds), f"{x.gain:.2f}", str(x.schedule))
        table.add_row(*map(escape, row))
    return Group(*([table] if found else []), f"{escape(str(path))}: {len(found)} findings")
