"""`portmm probe`: measures the rates of this machine.

Owns the command. Imports `console`, `errors`; `busy` and `calibrate` when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from portmm.console import Json, console, print_json, progress
from portmm.errors import PortmmError


def probe(
    seconds: Annotated[float, typer.Option(min=0.001, help="Of each measurement.")] = 0.12,
    *,
    force: Annotated[bool, typer.Option("--force", help="Measure though the machine is busy.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Forget what was measured, and leave.")] = False,
    as_json: Json = False,
) -> None:
    """Measure every atom and memory level of this machine; of several measurements, the best are remembered."""
    from portmm import busy, calibrate, settings
    from portmm.cache import cache_dir
    from portmm.show import rates_view

    here = settings.target()
    if forget:
        typer.echo(f"the rates of {here.name} are forgotten" if calibrate.forget(here) else "nothing was remembered")
        return
    if not force:
        _refuse_if_busy()
    before = busy.snapshot()
    with progress("probing") as tell:
        rates = calibrate.probe(here, tell, seconds=seconds)
    load = busy.others(before, busy.snapshot())
    kept = calibrate.remember(here, rates)
    if as_json:
        print_json({"target": here.name, "rates": rates})
        return
    console().print(rates_view(rates, here))
    where = f"kept in {cache_dir()} where no higher rate was; choices rest on them from now on"
    said = where if kept else "not kept: this is another's chip"
    console(stderr=True).print(f"[dim]{said}[/dim]")
    if busy.is_busy(load, busy.cores()):
        console(stderr=True).print(f"[yellow]{busy.sentence(load, busy.cores())}[/yellow]")


def _refuse_if_busy() -> None:
    """Look whether other processes would disturb the measurement.

    Raises:
        PortmmError: they would.
    """
    from portmm import busy

    load, cores = busy.now(), busy.cores()
    if load is not None and busy.is_busy(load, cores):
        raise PortmmError(
            f"other processes keep {load:.2g} of {cores} cores busy, so that rates would come out too low; "
            "wait until they end, or measure all the same with --force"
        )
