"""Command `portmm report`, which writes the tables of the README and of docs/performance.md.

Owns the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path("bench/results")


def report(
    path: Annotated[Path, typer.Argument(help="A folder of results, or one file of results.")] = RESULTS,
    *,
    write: Annotated[bool, typer.Option("--write", help="Write the tables into the README and the page.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Status 1 if a table differs from the results.")] = False,
    readme: Annotated[Path, typer.Option(help="The file with markers for tables.")] = Path("README.md"),
    page: Annotated[Path, typer.Option(help="The page with every case.")] = Path("docs/performance.md"),
    picture: Annotated[Path, typer.Option(help="The picture of the README.")] = Path("docs/images/speed.svg"),
    overhead: Annotated[
        Path | None, typer.Option(help="First store the figures of this file of pytest-benchmark.", show_default=False)
    ] = None,
) -> None:
    """Print tables of stored results: for a folder by group, for a file by case."""
    from portmm.comparison import tables

    try:
        if overhead:
            typer.echo(f"wrote {tables.keep_overhead(overhead, path)}", err=True)
        results = tables.load(path)
        expected = tables.pages(results, readme, page) if write or check else {}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not expected:
        parts = [tables.overview(results), tables.summary(results)] if path.is_dir() else [tables.details(results)]
        typer.echo("\n\n".join(filter(None, parts)))
        return
    stale = {at: text for at, text in expected.items() if not at.exists() or at.read_text() != text}
    if not tables.picture_is_current(picture, results):
        stale[picture] = tables.picture(results) if write else ""
    for at, text in stale.items():
        if write:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text)
            typer.echo(f"wrote {at}", err=True)
        else:
            typer.echo(f"{at} differs from {path}: run `portmm report --write`", err=True)
    if stale and not write:
        raise typer.Exit(1)
