"""Command `portmm compare`.

Owns the command and its options; `cli` registers it. The comparison itself is imported
when it runs.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it from the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from portmm.util.console import Json, console, progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from portmm.comparison.case import Case


def compare(
    suite: Annotated[
        str,
        typer.Argument(
            help="smoke, quick, full, narrow, or groups and cases, joined with commas.",
            show_default="quick, or nothing beside shapes of your own",
        ),
    ] = "",
    *,
    shapes: Annotated[
        Path | None, typer.Option(help="Shapes of your own: a CSV file, or lines of MxNxK.", show_default=False)
    ] = None,
    from_onnx: Annotated[Path | None, typer.Option(help="The products of this model.", show_default=False)] = None,
    from_torch: Annotated[
        str, typer.Option(help="The products of a PyTorch program: module:function.", show_default=False)
    ] = "",
    dim: Annotated[
        list[str] | None, typer.Option(help="Size of an open dimension of the model: NAME=SIZE.", show_default=False)
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Each call finds its operands in memory.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads of each library; 0 for every core.")] = 1,
    target: Annotated[str | None, typer.Option(help="Hold every library to what this ISA or chip has.")] = None,
    peers: Annotated[str, typer.Option(help="Libraries, joined with commas.", show_default="all that are found")] = "",
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1 or opencl; nothing for the processor.", show_default=False)
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each library on each case.")] = 7,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds for all of it.")] = 100.0,
    as_json: Json = False,
    save: Annotated[
        list[Path] | None,
        typer.Option(help="Write the report to this file: .json, .csv, .md or .html.", show_default=False),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report to this PNG file.", show_default=False)] = None,
) -> None:
    """Time portmm and every other installed library, alternating, with checked results."""
    from portmm.comparison import compare as contest
    from portmm.comparison.formats import check, write
    from portmm.comparison.text import terminal
    from portmm.dispatch import config

    ours = ("portmm", *filter(None, (x.strip() for x in peers.split(",")))) if peers else None
    try:
        for path in save or ():
            check(path)
        own = own_shapes(shapes, from_onnx, from_torch, dim or ())
        with progress("comparing", budget) as tell:
            report = contest(
                _with(own, suite) if own else suite or "quick",
                threads=threads or config.target().cores,
                contenders=ours and dict.fromkeys(ours),
                rounds=rounds,
                budget_s=budget,
                target=target,
                device=device,
                cold=cold,
                progress=tell,
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for path in save or ():
        write(report, path)
    if as_json:
        typer.echo(report.to_json(), nl=False)
    else:
        shown = console()
        shown.print(terminal(report, shown.width))
    if plot:
        from portmm.comparison.pictures import plot as draw

        draw(report, plot)


def own_shapes(shapes: Path | None, model: Path | None, program: str, dims: Iterable[str] = ()) -> tuple[Case, ...]:
    """The user's shapes, from a file, a model or a program.

    Raises:
        ValueError: an option or a shape is invalid.
    """
    if dims and not model:
        raise ValueError("--dim gives sizes of dimensions that an ONNX model leaves open: give --from-onnx too")
    if not (shapes or model or program):
        return ()
    from portmm.comparison.shapes import from_csv, from_onnx, from_torch, merged

    own = from_csv(shapes) if shapes else ()
    own += from_onnx(model, _sizes(dims)) if model else ()
    own += from_torch(program) if program else ()
    return merged(own)


def _sizes(dims: Iterable[str]) -> dict[str, int]:
    sizes = {}
    for text in dims:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--dim {text!r} is not NAME=SIZE, with a positive whole number")
        sizes[name] = int(size)
    return sizes


def _with(own: Sequence[Case], suite: str) -> tuple[Case, ...]:
    """The user's shapes, then those of a suite if one is named."""
    from portmm.comparison.shapes import merged
    from portmm.comparison.suite import cases

    return merged([*own, *(cases(suite) if suite else ())])
