"""Output of the command line.

Owns the tables and the JSON forms of targets, rates, cache entries and
findings. rich is imported only when a table is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from portmm.host.calibrate import ALL_CORES
from portmm.target.target import Target, load_target, names
from portmm.util.console import table
from portmm.util.text import size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from portmm.build.cache import Entry
    from portmm.cli.doctor import Check
    from portmm.target.clouds import CloudFamily
    from portmm.target.device import Device

STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def _number(value: float) -> str:
    return f"{value:.4g}" if value else ""


def target_data(target: Target) -> dict[str, Any]:
    """Target in types of JSON."""
    atoms = [
        {"name": x.name, "isa": isa.name, "m": x.m, "n": x.n, "k": x.k, "per_cycle": target.rates.get(x.name),
         "gflops": target.measured.get(x.name)}
        for isa in target.isas
        for x in isa.atoms
    ]  # fmt: skip
    levels = [
        {"name": x.name, "bytes": x.bytes, "line": x.line, "ways": x.ways, "shared": x.shared,
         "bytes_per_cycle": x.load_bytes_per_cycle or None, "gbytes_per_s": target.measured.get(x.name),
         "source": x.source}
        for x in target.levels
    ]  # fmt: skip
    return {
        "name": target.name,
        "title": target.title,
        "arch": target.arch,
        "vendor": target.vendor,
        "cores": target.cores,
        "frequency_ghz": target.frequency_ghz,
        "isas": [isa.name for isa in target.isas],
        "atoms": atoms,
        "levels": levels,
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
    levels = [
        (x.name, size(x.bytes), str(x.line), str(x.ways), "yes" if x.shared else "", _number(x.load_bytes_per_cycle),
         _number(target.measured.get(x.name, 0)))
        for x in target.levels
    ]  # fmt: skip
    rates = {name: target.measured.get(name) for name in ("memory", ALL_CORES)}
    levels += [(name, "", "", "", "", "", _number(rate)) for name, rate in rates.items() if rate is not None]
    atoms = [
        (x.name, f"{x.m} x {x.n} x {x.k}", _number(target.rates.get(x.name, 0)),
         _number(target.measured.get(x.name, 0)))
        for isa in target.isas
        for x in isa.atoms
    ]  # fmt: skip
    words = ("atom", "m x n x k", "level", "shared")
    return Group(
        *about,
        table("atoms", ("atom", "m x n x k", "a cycle", "GFLOP/s measured"), atoms, words=words),
        table(
            "memory", ("level", "size", "line", "ways", "shared", "bytes a cycle", "GB/s measured"), levels, words=words
        ),
    )


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
    from rich.text import Text

    head = ("target", "description", "best ISA", "cloud families that may run on it")
    cells = []
    for row in rows:
        clouds = "; ".join(f"{cloud} {', '.join(families)}" for cloud, families in row["clouds"].items())
        cells.append((Text(row["name"], "bold"), row["title"], row["isas"][0], clouds))
    return table("", head, cells, words=head)


def rates_view(rates: Mapping[str, float], target: Target) -> RenderableType:
    """Table of measured rates for a terminal."""
    atoms = {atom.name for isa in target.isas for atom in isa.atoms}
    rows = [(name, _number(value), "GFLOP/s" if name in atoms else "GB/s") for name, value in rates.items()]
    title = f"measured on {target.name}, one core"
    return table(title, ("measurement", "rate", "unit"), rows, words=("measurement", "unit"))


def entry_data(entry: Entry) -> dict[str, Any]:
    """Cache entry in types of JSON."""
    names = ("key", "name", "bytes", "seconds", "compiler", "command")
    return {name: getattr(entry, name) for name in names}


def caches(entries: Iterable[Entry]) -> dict[str, dict[str, Any]]:
    """The three caches: what they have, their entries and bytes on disk, and their bound in a process.

    Args:
        entries: the compiled kernels in the cache directory.
    """
    import portmm.fusion.fuse
    import portmm.ops.grid_attention
    import portmm.ops.grouped_matmul  # noqa: F401 - these have tables
    from portmm.build.cache_contents import notes_size
    from portmm.runtime.route_cache import ROUTES
    from portmm.util import memo

    sizes = [x.bytes for x in entries]
    on_disk = {"kernels": (len(sizes), sum(sizes)), "routes": notes_size(ROUTES)}
    every = {}
    for name, x in memo.sizes().items():
        count, total = on_disk.get(name, (0, 0))
        about = {"what": memo.CACHES[name], "lasts": name in on_disk, "entries": count, "bytes": total}
        every[name] = {**about, "in_process": x.entries, "most": x.most}
    return every


def cache_view(entries: Iterable[Entry], directory: str, total: int, limit: int | None) -> RenderableType:
    """Table of cache entries for a terminal."""
    from rich.console import Group
    from rich.markup import escape

    rows = [(x.name, x.key[:12], size(x.bytes), f"{x.seconds * 1e3:.0f} ms") for x in entries]
    kernels = table("", ("kernel", "key", "size", "compiled in"), rows, words=("kernel", "key"))
    most = "no limit" if limit is None else f"the limit is {size(limit)}"
    text = f"{escape(directory)}: {len(rows)} kernels, {size(total)} with notes and logs; {most}"
    return Group(*([kernels] if rows else []), text)


def check_view(check: Check) -> RenderableType:
    """Finding of `doctor` for a terminal."""
    from rich.text import Text

    text = Text.assemble((f"{check.state:<5}", STYLES[check.state]), f"{check.name}: {check.text}")
    if check.remedy:
        text.append(f"\n     -> {check.remedy}", style="bold" if check.state == "fail" else "dim")
    return text
