"""Detection of the host.

Owns the mapping from raw facts about a host to a `Target`. Reading and interpreting
them are separate: `snapshot()` reads, `identify()` is pure, so that tests use
recorded hosts.

Sources, and why they are trusted:

- x86 features: `/proc/cpuinfo`, whose flags the kernel has already masked by the
  register state it saves (XCR0), *and* cpuid with XCR0 themselves where memory
  may be executable. A feature counts if both agree: an emulator or a kernel
  option may change either alone. AMX also requires that Linux has given this process
  permission to use it, and that a trial in another process succeeded.
  Where there is no `/proc/cpuinfo`, py-cpuinfo supplies vendor, name and flags; its
  flags count only where cpuid and XCR0 confirm the register state that they need.
- Arm features: the auxiliary vector, which an emulator sets, where
  `/proc/cpuinfo` would show its host. The length of an SVE vector comes from
  prctl, because a process may be restricted to less than the chip has.
- The name of the chip only supplies rates and facts that the host hides. Virtual
  machines mask model numbers, so no instruction is used because of a name.
- Cache sizes: sysfs, then the description of the chip.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from portmm.errors import TargetError
from portmm.host.chip_match import chip_of, signature
from portmm.host.features import features
from portmm.host.host_probe import (
    CACHE_FILES,
    CPU,
    Snapshot,
    cores,
    number,
    package_facts,
    parse_list,
    processors,
    siblings,
    snapshot,
)
from portmm.target.cache_levels import MemoryLevel
from portmm.target.target import Target, chips_mentioning, described, load_isa, names

if TYPE_CHECKING:
    from portmm.target.isa import Isa

__all__ = [
    "Snapshot", "cross_check", "described", "features", "host", "host_features", "identify", "missing", "resolve",
    "snapshot",
]  # fmt: skip


def _mentioning(vendor: str = "", implementer: int = 0) -> list[Target]:
    """The shipped chips of a maker; with neither those with levels: see `chips_mentioning`."""
    if vendor:
        return chips_mentioning(f'"{vendor}"')
    return chips_mentioning(f"implementer = {implementer:#04x}" if implementer else "features = [")


def _chip(shot: Snapshot, has: frozenset[str]) -> tuple[Target, tuple[int, ...]]:
    """The chip, and the processors of its kind in the affinity."""
    chip, cpus = chip_of(shot, has, _mentioning)
    if chip is None:
        chip = replace(described("scalar"), name="unknown", title=f"unknown {shot.machine}", arch=shot.machine)
    return chip, cpus


def _size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return number(text.rstrip("KMG")) * unit


def _sysfs_levels(shot: Snapshot, cpu: int) -> dict[str, MemoryLevel]:
    levels = {}
    for index in range(8):
        row = {name: shot.files.get(f"{CPU}/cpu{cpu}/cache/index{index}/{name}", "") for name in CACHE_FILES}
        size = _size(row["size"])
        if row["type"] not in ("Data", "Unified") or not size:
            continue
        name = f"L{row['level']}"
        sharing = parse_list(row["shared_cpu_list"])
        levels[name] = MemoryLevel(
            name,
            size,
            number(row["coherency_line_size"]),
            number(row["ways_of_associativity"]),
            bool(sharing - siblings(shot, cpu)),
            len({min(siblings(shot, x)) for x in sharing}),
            source="sysfs of this host",
        )
    return levels


def _levels(shot: Snapshot, chip: Target, cpu: int) -> tuple[MemoryLevel, ...]:
    """Memory levels from sysfs, with the chip's description for facts that sysfs lacks."""
    seen = _sysfs_levels(shot, cpu)
    merged: list[MemoryLevel] = []
    for name in sorted({*seen, *(level.name for level in chip.levels)}):
        described_level = chip.level(name) or MemoryLevel(name, 0)
        level = described_level
        if name in seen:
            level = replace(
                seen[name],
                line=seen[name].line or described_level.line,
                ways=seen[name].ways or described_level.ways,
                # A guest sees only its own processors; other guests use the rest.
                cores=max(seen[name].cores, described_level.cores),
                load_bytes_per_cycle=described_level.load_bytes_per_cycle,
            )
        if not merged or level.bytes > merged[-1].bytes:
            merged.append(level)
    return tuple(merged)


def _lacking(isa: Isa, machine: str, has: frozenset[str]) -> tuple[str, ...]:
    if isa.arch not in ("any", machine):
        return (isa.arch,)
    return tuple(name for name in isa.features if name not in has)


def _isas(chip: Target, machine: str, has: frozenset[str]) -> tuple[Isa, ...]:
    """ISAs of the chip that run; on a generic chip also those that it does not list."""
    isas = [isa for isa in chip.isas if not _lacking(isa, machine, has)]
    if not any(m.generic for m in chip.match):
        return tuple(isas)
    listed = {isa.name for isa in chip.isas}
    others = [load_isa(name) for name in names("isa") if name not in listed]
    for isa in sorted(others, key=lambda x: len(x.below)):
        if not _lacking(isa, machine, has):
            # Before the ISA that it extends, or else after all of its vector width.
            after = [
                i for i, x in enumerate(isas) if (x == isa.base if isa.base else x.vector_bytes < isa.vector_bytes)
            ]
            isas.insert(after[0] if after else len(isas) - 1, isa)
    return tuple(isas)


def identify(shot: Snapshot) -> Target:
    """The target that a snapshot describes; a pure function."""
    has = features(shot)
    chip, cpus = _chip(shot, has)
    isas = _isas(chip, shot.machine, has)
    atoms = {atom.name for isa in isas for atom in isa.atoms}
    return replace(
        chip,
        isas=isas,
        levels=_levels(shot, chip, cpus[0] if cpus else 0),
        rates={name: rate for name, rate in chip.rates.items() if name in atoms},
        cores=cores(shot, cpus),
    )


@cache
def host() -> Target:
    """The target of this machine, cached in the process; under 20 ms at first where /proc/cpuinfo exists.

    The number of cores is that of the processors allowed at the first call.
    """
    return identify(snapshot())


@cache
def host_features() -> frozenset[str]:
    """Features of this machine, in Linux's names, cached in the process."""
    return features(snapshot())


def missing(isa: Isa) -> tuple[str, ...]:
    """Features of `isa` that this machine lacks; empty if the ISA runs."""
    return _lacking(isa, host().arch, host_features())


def _require(isa: Isa, subject: str) -> None:
    lacking = missing(isa)
    if lacking:
        runs = ", ".join(x.name for x in host().isas)
        raise TargetError(
            f"{subject} needs {', '.join(lacking)}, which this machine lacks; it runs {runs}. "
            "Select one of these, or unset the target (PORTMM_TARGET) for the best."
        )


def resolve(name: str | None) -> Target:
    """The target that `name` (for example $PORTMM_TARGET) specifies, if it can run here.

    Args:
        name: None or "" for this machine; an ISA for this machine restricted to it;
            a chip, a `*.toml` file or a cloud instance for its levels and rates with this
            machine's cores.

    Raises:
        TypeError: `name` is not a string.
        TargetError: there is no target `name`, or this machine lacks features
            that its best instruction set needs, which the message names.
    """
    if not name:
        return host()
    if not isinstance(name, str):
        raise TypeError(f"target is {name!r}; pass the name of a chip, an ISA, a .toml file or a cloud instance")
    here = host()
    if name in names("isa"):
        isa = load_isa(name)
        _require(isa, f"ISA {name!r}")
        if here.isa(name):
            return here.limited_to(name)
        return replace(here, isas=(isa, *isa.below, *(x for x in here.isas if x.vector_bytes < isa.vector_bytes)))
    wanted = described(name)
    if wanted.arch not in ("any", here.arch):
        raise TargetError(
            f"target {name!r} is of arch {wanted.arch}, this machine is {here.arch}; only `explain`, `emit` and "
            "`bundle` can use it"
        )
    _require(wanted.isas[0], f"target {name!r}")
    return replace(wanted, isas=tuple(isa for isa in wanted.isas if not missing(isa)), cores=here.cores)


def cross_check() -> list[str]:
    """Sentences on differences between py-cpuinfo and the detected vendor, name and features; takes up to a second."""
    facts, shot = package_facts(), snapshot()
    first = (processors(shot.cpuinfo) or [{}])[0]
    detected = {
        "vendor": (signature(shot)[0] if shot.machine == "x86_64" else "", facts.get("vendor_id_raw", "")),
        "name": (first.get("model name", ""), facts.get("brand_raw", "")),
    }
    differences = [
        f"the processor's {field} is {ours!r}, but py-cpuinfo reports {theirs!r}"
        for field, (ours, theirs) in detected.items()
        if ours and theirs and ours.split() != theirs.split()
    ]
    flags = set(facts["flags"])
    return differences + [
        f"{isa.name} is used, but py-cpuinfo does not report {name}"
        for isa in host().isas
        for name in isa.features
        if flags and not name.startswith("sve_vl") and name not in flags
    ]
