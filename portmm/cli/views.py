"""Output of the command line.

Owns the tables and the JSON forms of targets, rates, cache entries and
findings. rich is imported only when a table is printed.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from portmm.host.calibrate import ALL_CORES
from portmm.target.target import load_target, names
from portmm.util.text import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import RenderableType
    from rich.table import Table

    from portmm.build.cache import Entry
    from portmm.cli.doctor import Check
    from portmm.target.clouds import CloudFamily
    from portmm.target.device import Device
    from portmm.target.target import Target

STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def _table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _number(value: float) -> str:
    return f"{value:.4g}" if value else ""


def target_data(target: Target) -> dict[str, Any]:
    """Target in types of JSON."""
    return {
        "name": target.name,
        "title": target.title,
        "arch": target.arch,
        "vendor": target.vendor,
        "cores": target.cores,
        "frequency_ghz": target.frequency_ghz,
        "isas": [isa.name for isa in target.isas],
        "atoms": [
            {
                "name": atom.name,
                "isa": isa.name,
                "m": atom.m,
                "n": atom.n,
                "k": atom.k,
                "per_cycle": target.rates.get(atom.name),
                "gflops": target.measured.get(atom.name),
            }
            for isa in target.isas
            for atom in isa.atoms
        ],
        "levels": [
            {
                "name": level.name,
                "bytes": level.bytes,
                "line": level.line,
                "ways": level.ways,
                "shared": level.shared,
                "bytes_per_cycle": level.load_bytes_per_cycle or None,
                "gbytes_per_s": target.measured.get(level.name),
                "source": level.source,
            }
            for level in target.levels
        ],
        "device": asdict(target.device) if target.device else None,
        "memory_gbytes_per_s": target.measured.get("memory"),
        "memory_gbytes_per_s_all_cores": target.measured.get(ALL_CORES),
        "source": target.source,
    }


def target_view(target: Target) -> RenderableType:
    """Target for a terminal: description, atoms, memory levels."""
    from rich.console import Group
    from rich.markup import escape

    about = [f"[bold]{escape(target.name)}[/bold]  {escape(target.title)}"]
    cores = f"{target.cores} cores, " if target.cores else ""
    clock = f"{target.frequency_ghz:.3g} GHz, " if target.frequency_ghz else ""
    about.append(f"{target.arch}, {cores}{clock}{', '.join(isa.name for isa in target.isas)}")
    if target.device:
        about += _limits(target.device)
    levels = _table(
        "memory",
        "level",
        "size",
        "line",
        "ways",
        "shared",
        "bytes a cycle",
        "GB/s measured",
        right=("size", "line", "ways", "bytes a cycle", "GB/s measured"),
    )
    for level in target.levels:
        cells = (size(level.bytes), str(level.line), str(level.ways), "yes" if level.shared else "")
        levels.add_row(
            level.name, *cells, _number(level.load_bytes_per_cycle), _number(target.measured.get(level.name, 0))
        )
    for name in ("memory", ALL_CORES):
        if name in target.measured:
            levels.add_row(name, "", "", "", "", "", _number(target.measured[name]))
    atoms = _table("atoms", "atom", "m x n x k", "a cycle", "GFLOP/s measured", right=("a cycle", "GFLOP/s measured"))
    for atom in (atom for isa in target.isas for atom in isa.atoms):
        rate, reached = target.rates.get(atom.name, 0), target.measured.get(atom.name, 0)
        atoms.add_row(atom.name, f"{atom.m} x {atom.n} x {atom.k}", _number(rate), _number(reached))
    return Group(*about, atoms, levels)


def _limits(device: Device) -> list[str]:
    """Limits of a device as one line; unknown ones are left out."""
    compiled = f" for {device.architecture}" if device.architecture else ""
    limits = {
        f"{device.language}{compiled}": True,
        f"{device.processors} processors": True,
        f"warps of {device.warp}": True,
        f"blocks of {device.block_threads} threads": True,
        f"{device.threads} threads a processor": device.threads,
        f"{device.thread_registers} registers a thread": device.thread_registers,
        f"{size(device.shared_bytes)} shared by a block": True,
        f"{device.memory_bytes / 1e9:.4g} GB of memory": device.memory_bytes,
        f"{device.memory_gbs:.4g} GB/s": device.memory_gbs,
    }
    return [", ".join(text for text, known in limits.items() if known)]


def chips(clouds: Iterable[CloudFamily]) -> list[dict[str, Any]]:
    """Rows of all described chips, with the cloud families that may run on each."""
    families = list(clouds)
    rows = []
    for chip in map(load_target, names("chip")):
        on = [f for f in families if chip.name in f.chips]
        rows.append(
            {
                "name": chip.name,
                "title": chip.title,
                "arch": chip.arch,
                "isas": [isa.name for isa in chip.isas],
                "clouds": {cloud: [f.name for f in on if f.cloud == cloud] for cloud in {f.cloud: None for f in on}},
            }
        )
    return rows


def chips_view(rows: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Table of chips for a terminal."""
    from rich.markup import escape

    table = _table("", "target", "description", "best ISA", "cloud families that may run on it")
    for row in rows:
        clouds = "; ".join(f"{cloud} {', '.join(families)}" for cloud, families in row["clouds"].items())
        table.add_row(f"[bold]{escape(row['name'])}[/bold]", escape(row["title"]), row["isas"][0], escape(clouds))
    return table


def rates_view(rates: Mapping[str, float], target: Target) -> RenderableType:
    """Table of measured rates for a terminal."""
    atoms = {atom.name for isa in target.isas for atom in isa.atoms}
    table = _table(f"measured on {target.name}, one core", "measurement", "rate", "unit", right=("rate",))
    for name, value in rates.items():
        table.add_row(name, _number(value), "GFLOP/s" if name in atoms else "GB/s")
    return table


def entry_data(entry: Entry) -> dict[str, Any]:
    """Cache entry in types of JSON."""
    return {
        "key": entry.key,
        "name": entry.name,
        "bytes": entry.bytes,
        "seconds": entry.seconds,
        "compiler": entry.compiler,
        "command": entry.command,
    }


def cache_view(entries: Iterable[Entry], directory: str, total: int, limit: int | None) -> RenderableType:
    """Table of cache entries for a terminal."""
    from rich.console import Group
    from rich.markup import escape

    table = _table("", "kernel", "key", "size", "compiled in", right=("size", "compiled in"))
    count = 0
    for entry in entries:
        count += 1
        table.add_row(escape(entry.name), entry.key[:12], size(entry.bytes), f"{entry.seconds * 1e3:.0f} ms")
    parts: list[RenderableType] = [table] if count else []
    most = "no limit" if limit is None else f"the limit is {size(limit)}"
    return Group(*parts, f"{escape(directory)}: {count} kernels, {size(total)} with notes and logs; {most}")


def check_view(check: Check) -> RenderableType:
    """Finding of `doctor` for a terminal."""
    from rich.text import Text

    text = Text.assemble((f"{check.state:<5}", STYLES[check.state]), f"{check.name}: {check.text}")
    if check.remedy:
        text.append(f"\n     -> {check.remedy}", style="bold" if check.state == "fail" else "dim")
    return text
