"""Commands on models.

Owns `portmm run`, with its options. What it runs is imported when it runs.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from portmm.cli.options import Json  # noqa: TC001 - typer reads annotations
from portmm.util import text
from portmm.util.console import console, print_json, progress, table

if TYPE_CHECKING:
    from portmm.onnx import NodeArg, Session
    from portmm.onnx.report import Report

MOST_ROWS = 40
"""Steps that the report shows by default: those that take longest."""
PEAK_SECONDS = 0.1
FEW = 2
"""Values of random integers: indices of any table, and masks."""


def run(
    model: Annotated[Path, typer.Argument(help="A model in ONNX's format.", show_default=False)],
    *,
    inputs: Annotated[
        Path | None, typer.Option(help="Inputs by name in an .npz file.", show_default="random values")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="Size of an open dimension: NAME=SIZE.", show_default="1")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the results to this .npz file.", show_default=False)] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 for every core.")] = 1,
    precision: Annotated[str, typer.Option(help="Type in which float32 products multiply: f32, bf16 or f16.")] = "f32",
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of repeated runs for the times.")] = 1.0,
    picture: Annotated[
        Path | None, typer.Option(help="Write a picture of where the time goes to this .svg file.", show_default=False)
    ] = None,
    all_steps: Annotated[bool, typer.Option("--all", help="Show every step, in order.")] = False,
    as_json: Json = False,
) -> None:
    """Run a model in ONNX's format, and report the time of each of its steps."""
    import time

    from portmm import onnx
    from portmm.dispatch import config

    config.set_num_threads(threads or config.target().cores)
    begin = time.perf_counter()
    session = onnx.load(model, precision=precision)
    loaded = time.perf_counter()
    sizes = _sizes(dim or (), session)
    feeds = dict(np.load(inputs)) if inputs is not None else {x.name: _random(x, sizes) for x in session.get_inputs()}
    with progress("compiling") as step:
        step(0, 1, "the first run")
        results = session.run(None, feeds)
    first = time.perf_counter()
    report = session.profile(feeds, seconds=seconds)
    if save is not None:
        np.savez(save, **{x.name: y for x, y in zip(session.get_outputs(), results, strict=True)})
    if picture is not None:
        from portmm.onnx.picture import drawn

        picture.write_text(drawn(report, model.stem, _peak()), encoding="utf-8")
    times = {"load": loaded - begin, "first_run": first - loaded, "run": report.seconds}
    if as_json:
        print_json({"model": str(model), "seconds": times, "threads": config.get_num_threads(), **asdict(report)})
        return
    _print(session, report, times, all_steps=all_steps)


def _peak() -> float:
    """Float32 operations of a second of this machine's threads, measured; 0 where there is no compiler."""
    from portmm.dispatch import config
    from portmm.errors import BuildError
    from portmm.host import gauge

    units = ((isa, atom) for isa in config.target().isas if (atom := isa.atom("f32")) is not None)
    unit = next(units, None)
    if unit is None:
        return 0.0
    try:
        loop = gauge.peak(*unit)
    except BuildError:
        return 0.0
    repeats = gauge.repetitions(loop.run)
    return 1e9 * loop.work / gauge.least(loop.run, repeats, PEAK_SECONDS) * config.get_num_threads()


def _sizes(texts: Any, session: Session) -> dict[str, int]:
    """Sizes of a model's open dimensions by name."""
    known = {n: None for x in session.get_inputs() for n in x.shape if isinstance(n, str)}
    sizes = {}
    for x in texts:
        name, _, size = x.partition("=")
        if not size.isdecimal():
            raise typer.BadParameter(f"--dim {x!r} is not NAME=SIZE, with a whole number")
        if name not in known:
            names = ", ".join(known) or "none"
            raise typer.BadParameter(f"no open dimension is called {name!r}; the model has {names}")
        sizes[name] = int(size)
    return sizes


def _random(x: NodeArg, sizes: dict[str, int]) -> Any:
    """Random values for an input: normal floats, or integers that are valid indices and masks."""
    rng = np.random.default_rng(0)
    shape = [n if isinstance(n, int) else sizes.get(str(n), 1) for n in x.shape]
    kind = x.type[7:-1]
    if kind in ("float", "float16", "double", "bfloat16"):
        return rng.standard_normal(shape).astype({"float": "float32", "double": "float64"}.get(kind, kind))
    return rng.integers(0, FEW, shape).astype(kind)


def _print(session: Session, report: Report, times: dict[str, float], *, all_steps: bool) -> None:
    """Print times, steps and memory."""
    output = console()
    rows = list(report.rows)
    total = sum(x.seconds for x in rows) or 1.0
    if not all_steps:
        rows = sorted(rows, key=lambda x: -x.seconds)[:MOST_ROWS]
    cells = [
        (text.time(x.seconds), f"{100 * x.seconds / total:.1f}", "NumPy" if x.kind == "numpy" else x.kind,
         _shortened(x.what), x.detail)
        for x in rows
    ]  # fmt: skip
    title = "" if all_steps or len(rows) == len(report.rows) else f"The {len(rows)} longest of {len(report.rows)} steps"
    output.print(
        table(title, ("time", "%", "kernel", "operators", "problem"), cells, words=("kernel", "operators", "problem"))
    )
    output.print(str(report))
    for x in session.model.notes:
        output.print(f"note: {x}")
    output.print(
        f"loaded in {text.time(times['load'])}, first run {text.time(times['first_run'])} (kernels selected, and "
        f"compiled unless cached), then {text.time(times['run'])} a run"
    )


def _shortened(names: str, most: int = 60) -> str:
    """Names of nodes, the middle left out where they are long."""
    return names if len(names) <= most else f"{names[: most // 2 - 1]}…{names[-most // 2 :]}"
