"""Command `portmm tune`, which measures the fastest schedules.

Owns the command.
"""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads it from the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from portmm.util.console import Json, console

if TYPE_CHECKING:
    from portmm.comparison import Case

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def tune(
    suite: Annotated[
        str,
        typer.Argument(
            help="smoke, quick, full, narrow, groups and cases, or MxNxK, joined with commas.", show_default="quick"
        ),
    ] = "",
    *,
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds for all of it.")] = 120.0,
    threads: Annotated[
        int | None, typer.Option(min=0, help="Most threads of a call; 0 for every core.", show_default="as calls")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the caches before each call.")] = False,
    database: Annotated[Path | None, typer.Option(help="Path of another database.", show_default="the user's")] = None,
    search: Annotated[str, typer.Option(help="auto, or candidates: only the candidates of the cost model.")] = "auto",
    most: Annotated[int | None, typer.Option(min=1, help="Most candidates of each case.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of the search.")] = 0,
    shapes: Annotated[Path | None, typer.Option(help="Shapes from this CSV file.", show_default=False)] = None,
    from_onnx: Annotated[Path | None, typer.Option(help="Products in this model.", show_default=False)] = None,
    from_torch: Annotated[
        str | None, typer.Option(help="Products of this function, as module:function.", show_default=False)
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Show predicted and measured time of each trial.")] = False,
    as_json: Json = False,
    save: Annotated[Path | None, typer.Option(help="Write all trials to this JSON file.", show_default=False)] = None,
) -> None:
    """Find and store the fastest schedules of products; Ctrl-C stops it, and the same command resumes."""
    from portmm.comparison.command import own_shapes
    from portmm.tuning import tune as run
    from portmm.tuning.terminal import bar, predictions, view

    try:
        cases = [*_named(suite), *own_shapes(shapes, from_onnx, from_torch or "")] or _named("quick")
        with bar(console(stderr=True), budget) as report_step:
            result = run(
                cases,
                threads=threads,
                budget_s=budget,
                cold=cold,
                database=database,
                search=search,
                most=most,
                seed=seed,
                progress=report_step,
            )
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong
    if save:
        save.write_text(result.to_json())
    if as_json:
        typer.echo(result.to_json(), nl=False)
    else:
        console().print(view(result))
        if report:
            console().print(predictions(result))
    if result.interrupted:
        sys.exit(INTERRUPTED)


def _named(words: str) -> list[Case | tuple[int, ...]]:
    """Cases of suites, groups and case names, and shapes as MxNxK, from a list with commas."""
    from portmm.comparison import cases

    selected: list[Case | tuple[int, ...]] = []
    for word in filter(None, words.split(",")):
        sizes = word.split("x")
        is_shape = len(sizes) > 1 and all(x.isdigit() for x in sizes)
        selected += [tuple(map(int, sizes))] if is_shape else cases(word)
    return list(dict.fromkeys(selected))
