"""`portmm probe`: measures the rates of this machine.

Owns the command. Imports `util.console`, `errors`; `busy` and `calibrate` when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from portmm.errors import PortmmError
from portmm.util.console import Json, console, print_json, progress


def probe(
    seconds: Annotated[float, typer.Option(min=0.001, help="Of each measurement.")] = 0.12,
    *,
    force: Annotated[bool, typer.Option("--force", help="Measure though the machine is busy.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Forget what was measured, and leave.")] = False,
    as_json: Json = False,
) -> None:
    """Measure every atom and memory level of this machine; of several measurements, the best are remembered."""
    from portmm.build.cache import cache_dir
    from portmm.cli.views import rates_view
    from portmm.dispatch import config
    from portmm.host import calibrate, machine_load

    here = config.target()
    if forget:
        typer.echo(f"the rates of {here.name} are forgotten" if calibrate.forget(here) else "nothing was remembered")
        return
    if not force:
        _refuse_if_busy()
    before = machine_load.snapshot()
    with progress("probing") as tell:
        rates = calibrate.probe(here, tell, seconds=seconds)
    load = machine_load.others(before, machine_load.snapshot())
    kept = calibrate.remember(here, rates)
    if as_json:
        print_json({"target": here.name, "rates": rates})
        return
    console().print(rates_view(rates, here))
    where = f"kept in {cache_dir()} where no higher rate was; choices rest on them from now on"
    said = where if kept else "not kept: this is another's chip"
    console(stderr=True).print(f"[dim]{said}[/dim]")
    if machine_load.is_busy(load, machine_load.cores()):
        console(stderr=True).print(f"[yellow]{machine_load.sentence(load, machine_load.cores())}[/yellow]")


def _refuse_if_busy() -> None:
    """Look whether other processes would disturb the measurement.

    Raises:
        PortmmError: they would.
    """
    from portmm.host import machine_load

    load, cores = machine_load.now(), machine_load.cores()
    if load is not None and machine_load.is_busy(load, cores):
        raise PortmmError(
            f"other processes keep {load:.2g} of {cores} cores busy, so that rates would come out too low; "
            "wait until they end, or measure all the same with --force"
        )
