"""Commands that search equivalent programs, and verify what was found.

Owns `portmm superoptimize` and `verify`, with their options. What they run is imported when they run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import Annotated

import typer

from portmm.cli.options import Json, Threads  # noqa: TC001 - typer reads annotations
from portmm.errors import PortmmError, TraceError
from portmm.util.console import print_json

_LEAST = 0.1
"""Seconds of a search, at least, whatever its start took."""


def superoptimize(
    function: Annotated[str, typer.Argument(help="FILE.py:NAME or MODULE:NAME, a function of arrays.")],
    shapes: Annotated[list[str], typer.Argument(help="Shape of each argument, as in 16x1024.")],
    budget: Annotated[float, typer.Option(min=1, help="Seconds of the command.")] = 60.0,
    threads: Threads = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the certificate of what is found, as JSON, or its picture: graph.svg.")
    ] = None,
) -> None:
    """Search an equivalent program of a function that is faster: verified, measured and kept for later calls."""
    began = time.monotonic()
    from portmm.cli.functions import arrays_of, function_named
    from portmm.dispatch import config as settings
    from portmm.fusion.fuse import fuse

    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise PortmmError(f"{save} cannot be written: its folder must exist, and it be a file; nothing was searched")
    if threads is not None:
        settings.set_num_threads(threads)
    called = function_named(function)
    try:
        arrays = arrays_of(shapes)
        fused = fuse(called, search=max(_LEAST, budget - (time.monotonic() - began)))
        explained = fused.explain(*arrays)
    except (TypeError, ValueError) as error:  # of the function, on arrays of other shapes than it takes
        raise TraceError(f"{function} cannot be called with arrays of shapes {' '.join(shapes)}: {error}") from error
    typer.echo(str(explained))
    certificate = explained.finding.certificate if explained.finding else None
    if save is not None and save.suffix == ".svg":
        save.write_text(explained.graph(), encoding="utf-8")
        return
    if save is not None:
        if certificate is None:
            why = explained.finding or "the function is not searched"
            raise PortmmError(f"there is no certificate to write to {save}: {why}")
        save.write_text(json.dumps(certificate), encoding="utf-8")


def verify(
    certificate: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A certificate, as JSON.")],
    device: Annotated[str, typer.Option(help="A device whose texts of the kernels are checked, too.")] = "",
    as_json: Json = False,
) -> None:
    """Repeat the checks of a certificate: that a program found by search computes what was asked; status 0 if so."""
    from portmm.verification.certificate import CertificateError, on_device, repeat

    try:
        data = json.loads(certificate.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CertificateError(f"{certificate} is no JSON: {error}") from error
    outcomes = repeat(data) + (on_device(data, device) if device else [])
    if as_json:
        print_json([x._asdict() for x in outcomes])
    else:
        for x in outcomes:
            verdict = "  -- " if x.what.startswith("not checked") else "holds" if x.holds else "FAILS"
            typer.echo(f"{verdict}  {x.what}: {x.detail}")
    if not all(x.holds for x in outcomes):
        raise typer.Exit(1)
