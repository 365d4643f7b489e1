"""Command `portmm probe`, which measures the rates of this machine.

Owns the command.
"""

from __future__ import annotations

from typing import Annotated

import typer

from portmm.errors import PortmmError
from portmm.util.console import Json, console, print_json, progress


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
