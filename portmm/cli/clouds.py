"""The command `portmm clouds`: what is predicted for the processors of cloud instances."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from portmm.cli.options import Json  # noqa: TC001 - typer reads annotations
from portmm.errors import PortmmError, ScheduleError
from portmm.util.console import console, print_json, progress, table

if TYPE_CHECKING:
    from portmm.target.target import Target

TYPES = ("f32", "bf16", "f16", "s8-s8-s32", "f32-u4-f32")
SIZE = (1024, 1024, 1024)
"""M, N and K of the product that rates are predicted for, with B packed: it is bound by arithmetic."""


class Row(NamedTuple):
    """Families of instances with the same chips.

    Attributes:
        cloud: its name.
        families: names of the families.
        chips: that an instance may be.
        chip: that it is taken for.
        rates: predicted GFLOP/s of one core by type; 0 where the chip does not multiply it.
    """

    cloud: str
    families: tuple[str, ...]
    chips: tuple[str, ...]
    chip: str
    rates: dict[str, float]


def clouds(
    names: Annotated[
        list[str] | None, typer.Argument(help="Instances or families.", show_default="every family")
    ] = None,
    to_csv: Annotated[Path | None, typer.Option("--csv", help="Also write a CSV file.", show_default=False)] = None,
    picture: Annotated[Path | None, typer.Option(help="Also write a picture, an SVG file.", show_default=False)] = None,
    reference: Annotated[str, typer.Option(help="The family whose rates are 1 in the ratios.")] = "c5",
    as_json: Json = False,
) -> None:
    """Show the rates that are predicted for one core of cloud instances, by element type, and their ratios."""
    from portmm.target.target import instance

    if instance(reference) is None:
        raise typer.BadParameter(f"--reference {reference} is no cloud instance or family")
    with progress("predicting") as report:
        rows = rows_of(names or [], report)
        base = rows_of([reference], lambda *_: None)[0].rates
    try:
        if to_csv:
            to_csv.write_text(csv_of(rows, base), encoding="utf-8")
        if picture:
            picture.write_text(svg_of(rows, base, reference), encoding="utf-8")
    except OSError as error:
        raise PortmmError(f"the file cannot be written: {error}") from error
    if as_json:
        print_json([x._asdict() for x in rows])
        return
    title = f"predicted GFLOP/s of one core, {SIZE[0]} cubed, B packed; in brackets the ratio to {reference}"
    cells = [[x.cloud, " ".join(x.families), x.chip, *(_cell(x.rates[t], base[t]) for t in TYPES)] for x in rows]
    console().print(
        table(title, ("cloud", "families", "taken for", *TYPES), cells, words=("cloud", "families", "taken for"))
    )


def _cell(rate: float, base: float) -> str:
    if not rate:
        return ""
    return f"{rate:.0f} ({rate / base:.2f})" if base else f"{rate:.0f}"


def rows_of(names: list[str], report: Callable[[int, int, str], None]) -> list[Row]:
    """Rows of the families of some instances, or of all processors.

    Raises:
        PortmmError: a name is no instance.
    """
    from portmm.target.target import clouds as families_of
    from portmm.target.target import instance, load_target

    if names:
        wanted = [(name, instance(name)) for name in names]
        for name, family in wanted:
            if family is None:
                raise PortmmError(f"{name} is no cloud instance or family: `portmm targets` lists families")
    else:
        wanted = [(x.name, x) for x in families_of()]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, family in wanted:
        if family is not None and load_target(family.likeliest).device is None:
            groups.setdefault((family.cloud, family.chips), []).append(name)
    rates: dict[str, dict[str, float]] = {}
    chips = list(dict.fromkeys(chips[-1] for _, chips in groups))
    for i, chip in enumerate(chips):
        report(i, len(chips), chip)
        rates[chip] = {dtype: rate(load_target(chip), dtype) for dtype in TYPES}
    report(len(chips), len(chips), "done")
    return [Row(cloud, tuple(x), chips, chips[-1], rates[chips[-1]]) for (cloud, chips), x in groups.items()]


def rate(target: Target, dtype: str) -> float:
    """Predicted GFLOP/s of one core; 0 where the chip does not multiply these types."""
    from portmm.dispatch.cpu_kernels import family
    from portmm.dispatch.schedule_choice import choose
    from portmm.spec.problem import Problem

    try:
        packed = family(dtype, target)
        p = Problem(*SIZE, dtype, b="codes" if packed.startswith("u4") else "packed", family=packed)
        seconds = float(choose(p, target, 1, tuned=False).cost.seconds)
    except ScheduleError:
        return 0.0
    return p.flops / seconds / 1e9


def csv_of(rows: list[Row], base: dict[str, float]) -> str:
    """The rows as CSV, a line for each family."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cloud", "family", "chips", "taken_for", *TYPES, *(f"{t} ratio" for t in TYPES)])
    for x in rows:
        ratios = [f"{x.rates[t] / base[t]:.3f}" if base[t] else "" for t in TYPES]
        for family in x.families:
            writer.writerow(
                [x.cloud, family, "|".join(x.chips), x.chip, *(f"{x.rates[t]:.1f}" for t in TYPES), *ratios]
            )
    return text.getvalue()


def svg_of(rows: list[Row], base: dict[str, float], reference: str) -> str:
    """A picture: a row for each group of families, a cell for each type, darker where the ratio is larger."""
    from portmm.util.templates import render

    cells: list[dict[str, Any]] = []
    for x in rows:
        ratios = [x.rates[t] / base[t] if base[t] else 0.0 for t in TYPES]
        label = f"{x.cloud} {' '.join(x.families[:4])}{' ...' if len(x.families) > 4 else ''}: {x.chip}"
        cells.append({"label": label, "rates": [x.rates[t] for t in TYPES], "ratios": ratios})
    return render(__file__, "clouds.svg", rows=cells, types=TYPES, reference=reference)
