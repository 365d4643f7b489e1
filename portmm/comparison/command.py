"""`portmm compare`.

Owns the command and what it takes; `cli` registers it. Imports `console`; the
comparison itself when it runs.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it from the annotations
from typing import Annotated

import typer

from portmm.console import Json, console, progress


def compare(
    suite: Annotated[
        str, typer.Argument(help="smoke, quick, full, narrow, or groups and cases, joined with commas.")
    ] = "quick",
    *,
    threads: Annotated[int, typer.Option(min=0, help="Threads of each library; 0 for every core.")] = 1,
    target: Annotated[str | None, typer.Option(help="Hold every library to what this ISA or chip has.")] = None,
    peers: Annotated[str, typer.Option(help="Libraries, joined with commas.", show_default="all that are found")] = "",
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1 or opencl; nothing for the processor.", show_default=False)
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each library on each case.")] = 7,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds for all of it.")] = 100.0,
    as_json: Json = False,
    save: Annotated[Path | None, typer.Option(help="Write the report to this JSON file.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report to this PNG file.", show_default=False)] = None,
) -> None:
    """Time portmm beside every library that is found, checked and in turns."""
    from portmm import settings
    from portmm.comparison import compare as contest
    from portmm.comparison.report import terminal

    ours = ("portmm", *filter(None, (x.strip() for x in peers.split(",")))) if peers else None
    try:
        with progress("comparing") as tell:
            report = contest(
                suite,
                threads=threads or settings.target().cores,
                contenders=ours and dict.fromkeys(ours),
                rounds=rounds,
                budget_s=budget,
                target=target,
                device=device,
                progress=tell,
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if save:
        save.write_text(report.to_json())
    if as_json:
        typer.echo(report.to_json(), nl=False)
    else:
        console().print(terminal(report))
    if plot:
        from portmm.comparison.plot import plot as draw

        draw(report, plot)
