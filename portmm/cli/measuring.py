"""Commands that measure, and those that show and keep what was measured.

Owns `portmm compare`, `tune`, `tuned`, `probe` and `report`, with their options. What they run is imported when they
run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from portmm.cli.options import Json  # noqa: TC001 - typer reads annotations
from portmm.errors import DatabaseError, PortmmError
from portmm.util.console import console, print_json, progress, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from portmm.comparison.case import Case
    from portmm.dispatch.tuned_schedule import Tuned
    from portmm.tuning import Tuning

Dims = Annotated[
    list[str] | None, typer.Option(help="Size of an open dimension of the model: NAME=SIZE.", show_default=False)
]


def compare(
    suite: Annotated[
        str,
        typer.Argument(
            help="smoke, quick, full, narrow, random, random-narrow, or groups and cases, joined with commas.",
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
    dim: Dims = None,
    cold: Annotated[bool, typer.Option("--cold", help="Each call finds its operands in memory.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads of each library; 0 for every core.")] = 1,
    target: Annotated[str | None, typer.Option(help="Hold every library to what this ISA or chip has.")] = None,
    peers: Annotated[str, typer.Option(help="Libraries, joined with commas.", show_default="all that are found")] = "",
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1 or opencl; nothing for the processor.", show_default=False)
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each library on each case.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs, and of the shapes of random suites.")] = 0,
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
    from portmm.comparison.text import check, terminal, write
    from portmm.dispatch import config

    ours = ("portmm", *filter(None, (x.strip() for x in peers.split(",")))) if peers else None
    try:
        for path in save or ():
            check(path)
        if plot:
            from portmm.comparison import pictures

            pictures.check()
        own = own_shapes(shapes, from_onnx, from_torch, dim or ())
        with progress("comparing", budget) as tell:
            report = contest(
                _with(own, suite, seed) if own else suite or "quick",
                threads=threads or config.target().cores,
                contenders=ours and dict.fromkeys(ours),
                rounds=rounds,
                budget_s=budget,
                target=target,
                device=device,
                cold=cold,
                seed=seed,
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
        pictures.plot(report, plot)


def own_shapes(shapes: Path | None, model: Path | None, program: str, dims: Iterable[str] = ()) -> tuple[Case, ...]:
    """The user's shapes, from a file, a model or a program.

    Raises:
        ValueError: an option or a shape is invalid.
    """
    if dims and not model:
        raise ValueError("--dim gives sizes of dimensions that an ONNX model leaves open: give --from-onnx too")
    if not (shapes or model or program):
        return ()
    from portmm.comparison.onnx_shapes import from_onnx
    from portmm.comparison.shapes import from_csv, merged
    from portmm.comparison.torch_shapes import from_torch

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


def _with(own: Sequence[Case], suite: str, seed: int) -> tuple[Case, ...]:
    """The user's shapes, then those of a suite if one is named."""
    from portmm.comparison.shapes import cases, merged

    return merged([*own, *(cases(suite, seed) if suite else ())])


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
    dim: Dims = None,
    executor: Annotated[
        str, typer.Option(help="Workers: dask://HOST:PORT, ray, or joblib:N.", show_default="this process")
    ] = "",
    report: Annotated[bool, typer.Option("--report", help="Show predicted and measured time of each trial.")] = False,
    as_json: Json = False,
    save: Annotated[Path | None, typer.Option(help="Write all trials to this JSON file.", show_default=False)] = None,
) -> None:
    """Find and store the fastest schedules of products; Ctrl-C stops it, and the same command resumes."""
    from portmm.tuning.records import bar, predictions, view

    try:
        own = own_shapes(shapes, from_onnx, from_torch or "", dim or ())
        cases = [*_named(suite, seed), *own] or _named("quick", seed)
        options: dict[str, Any] = {"threads": threads, "budget_s": budget, "cold": cold, "database": database}
        options |= {"search": search, "most": most, "seed": seed}
        with bar(console(stderr=True), budget) as report_step:
            results = _tuned(executor, cases, {**options, "progress": report_step})
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong
    text = results[0].to_json() if not executor else f"[{','.join(x.to_json() for x in results)}]\n"
    if save:
        save.write_text(text)
    if as_json:
        typer.echo(text, nl=False)
    else:
        for result in results:
            console().print(view(result))
            if report:
                console().print(predictions(result))
    if any(x.interrupted for x in results):
        sys.exit(INTERRUPTED)


def _tuned(executor: str, cases: list[Case | tuple[int, ...]], options: dict[str, Any]) -> tuple[Tuning, ...]:
    """The result of tuning here, or of each kind of machine of an executor."""
    if not executor:
        from portmm.tuning import tune as run

        return (run(cases, **options),)
    from portmm.tuning.executors import connect
    from portmm.tuning.farm import tune_on

    with connect(executor) as workers:
        return tune_on(workers, cases, **options)


def _named(words: str, seed: int) -> list[Case | tuple[int, ...]]:
    """Cases of suites, groups and case names, and shapes as MxNxK, from a list with commas."""
    from portmm.comparison import cases

    selected: list[Case | tuple[int, ...]] = []
    for word in filter(None, words.split(",")):
        sizes = word.split("x")
        is_shape = len(sizes) > 1 and all(x.isdigit() for x in sizes)
        selected += [tuple(map(int, sizes))] if is_shape else cases(word, seed)
    return list(dict.fromkeys(selected))


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
    from portmm.dispatch import program_database, tuned_schedule, tuning_database

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
        console().print(_view(findings, program_database.count(path) if path.exists() else 0, path))


def _view(findings: list[Tuned], programs: int, path: Path) -> RenderableType:
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
    searched = f", {programs} programs of `portmm superoptimize`" if programs else ""
    return Group(*listed, f"{escape(str(path))}: {len(findings)} findings{searched}")


def probe(
    seconds: Annotated[float, typer.Option(min=0.001, help="Duration of each measurement.")] = 0.12,
    *,
    force: Annotated[bool, typer.Option("--force", help="Measure even if the machine is busy.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Remove the measured rates, and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Measure every atom and memory level of this machine; of several measurements, the best are kept."""
    from portmm.build.cache import cache_dir
    from portmm.cli.views import rates_view
    from portmm.dispatch import config
    from portmm.host import calibrate, machine_load

    here = config.target()
    if forget:
        typer.echo(f"the rates of {here.name} are removed" if calibrate.forget(here) else "there are no measured rates")
        return
    if not force:
        _refuse_if_busy()
    before = machine_load.snapshot()
    with progress("probing") as report_step:
        rates = calibrate.probe(here, report_step, seconds=seconds)
    load = machine_load.others(before, machine_load.snapshot())
    kept = calibrate.remember(here, rates)
    if as_json:
        print_json({"target": here.name, "rates": rates})
        return
    console().print(rates_view(rates, here))
    where = f"kept in {cache_dir()} unless a higher rate was there; selection uses them from now on"
    result = where if kept else "not kept: the target is not this machine"
    console(stderr=True).print(f"[dim]{result}[/dim]")
    if machine_load.is_busy(load, machine_load.cores()):
        console(stderr=True).print(f"[yellow]{machine_load.sentence(load, machine_load.cores())}[/yellow]")


def _refuse_if_busy() -> None:
    """Refuse a measurement that other processes would disturb.

    Raises:
        PortmmError: the machine is busy.
    """
    from portmm.host import machine_load

    load, cores = machine_load.now(), machine_load.cores()
    if load is not None and machine_load.is_busy(load, cores):
        raise PortmmError(
            f"other processes keep {load:.2g} of {cores} cores busy, so that measured rates would be too low; "
            "wait until they end, or measure with --force"
        )


def report(
    path: Annotated[Path, typer.Argument(help="A file of `portmm compare --save`.")],
) -> None:
    """Print a saved comparison as Markdown."""
    from portmm.comparison.report import from_json
    from portmm.comparison.text import markdown

    if not path.is_file():
        raise PortmmError(f"there is no file {path}; pass one of `portmm compare --save`")
    try:
        typer.echo(markdown(from_json(path.read_text())), nl=False)
    except ValueError as error:
        raise typer.BadParameter(f"{path}: {error}") from error
