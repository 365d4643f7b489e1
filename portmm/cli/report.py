"""`portmm report`: the tables of the README and of docs/performance.md.

Owns that command. On the top floor: imports `comparison.tables` when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path("bench/results")


def report(
    path: Annotated[Path, typer.Argument(help="A folder of results, or one file of them.")] = RESULTS,
    *,
    write: Annotated[bool, typer.Option("--write", help="Write the tables into the README and the page.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Status 1 if a table is not what the results say.")] = False,
    readme: Annotated[Path, typer.Option(help="The text with a place for tables.")] = Path("README.md"),
    page: Annotated[Path, typer.Option(help="The page with every case.")] = Path("docs/performance.md"),
    picture: Annotated[Path, typer.Option(help="The picture of the text.")] = Path("docs/images/speed.svg"),
    overhead: Annotated[
        Path | None, typer.Option(help="Keep the figures of this file of pytest-benchmark first.", show_default=False)
    ] = None,
) -> None:
    """Make tables of stored results; of a folder those of every group, of a file those of every case."""
    from portmm.comparison import tables

    try:
        if overhead:
            typer.echo(f"wrote {tables.keep_overhead(overhead, path)}", err=True)
        found = tables.load(path)
        due = tables.pages(found, readme, page) if write or check else {}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not due:
        parts = [tables.overview(found), tables.summary(found)] if path.is_dir() else [tables.details(found)]
        typer.echo("\n\n".join(filter(None, parts)))
        return
    stale = {at: text for at, text in due.items() if not at.exists() or at.read_text() != text}
    if not tables.picture_is_current(picture, found):
        stale[picture] = tables.picture(found) if write else ""
    for at, text in stale.items():
        if write:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text)
            typer.echo(f"wrote {at}", err=True)
        else:
            typer.echo(f"{at} is not what {path} says: run `portmm report --write`", err=True)
    if stale and not write:
        raise typer.Exit(1)
