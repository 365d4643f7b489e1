"""`portmm tune`: measures which schedules are fastest.

Owns the command. Imports `util.console`; `tuning` when it runs.
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
"""Status of a command that Ctrl-C ended."""


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
        int | None, typer.Option(min=0, help="The most threads of a call; 0 for every core.", show_default="as calls")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the caches before each call.")] = False,
    database: Annotated[
        Path | None, typer.Option(help="Another file than the usual one.", show_default="the user's")
    ] = None,
    search: Annotated[
        str, typer.Option(help="auto, or candidates: every one of the model's, and nothing beyond.")
    ] = "auto",
    most: Annotated[
        int | None, typer.Option(min=1, help="Candidates of each case, at most.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs and of the search.")] = 0,
    shapes: Annotated[Path | None, typer.Option(help="Shapes of this file, CSV.", show_default=False)] = None,
    from_onnx: Annotated[Path | None, typer.Option(help="Products of this model.", show_default=False)] = None,
    from_torch: Annotated[
        str | None, typer.Option(help="Products that this function runs, as module:function.", show_default=False)
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Show predicted beside measured time, by trial.")] = False,
    as_json: Json = False,
    save: Annotated[Path | None, typer.Option(help="Write all trials to this JSON file.", show_default=False)] = None,
) -> None:
    """Find the fastest schedules for some products, and remember them; Ctrl-C ends it, and the same command goes on."""
    from portmm.comparison.command import own_shapes
    from portmm.tuning import tune as run
    from portmm.tuning.terminal import bar, predictions, view

    try:
        chosen = [*_named(suite), *own_shapes(shapes, from_onnx, from_torch or "")] or _named("quick")
        with bar(console(stderr=True), budget) as tell:
            found = run(
                chosen,
                threads=threads,
                budget_s=budget,
                cold=cold,
                database=database,
                search=search,
                most=most,
                seed=seed,
                progress=tell,
            )
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong
    if save:
        save.write_text(found.to_json())
    if as_json:
        typer.echo(found.to_json(), nl=False)
    else:
        console().print(view(found))
        if report:
            console().print(predictions(found))
    if found.interrupted:
        sys.exit(INTERRUPTED)


def _named(words: str) -> list[Case | tuple[int, ...]]:
    """Suites, groups and cases by name, and shapes."""
    from portmm.comparison import cases

    found: list[Case | tuple[int, ...]] = []
    for word in filter(None, words.split(",")):
        sizes = word.split("x")
        is_shape = len(sizes) > 1 and all(x.isdigit() for x in sizes)
        found += [tuple(map(int, sizes))] if is_shape else cases(word)
    return list(dict.fromkeys(found))
