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

import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from portmm.errors import TargetError
from portmm.host.host_probe import (
    CACHE_FILES,
    CPU,
    Snapshot,
    cgroup_folders,
    package_facts,
    parse_list,
    processors,
    snapshot,
)
from portmm.target.cache_levels import MemoryLevel
from portmm.target.target import Target, chips_mentioning, described, load_isa, names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portmm.target.isa import Isa
    from portmm.target.target import Match

__all__ = [
    "Snapshot",
    "cross_check",
    "described",
    "features",
    "host",
    "host_features",
    "identify",
    "missing",
    "resolve",
    "snapshot",
]

# Every x86-64 and every AArch64 Linux has these, whatever /proc hides.
BASELINE = {"x86_64": {"cx8", "cmov", "fxsr", "sse", "sse2"}, "aarch64": {"fp", "asimd"}}

EAX, EBX, ECX, EDX = range(4)
# Intel SDM vol. 2 and AMD APM vol. 3, CPUID: leaf and register -> bits by Linux's names.
CPUID = {
    ("1.0", EDX): {"cx8": 8, "cmov": 15, "fxsr": 24, "sse": 25, "sse2": 26},
    ("1.0", ECX): {
        "pni": 0, "ssse3": 9, "fma": 12, "cx16": 13, "sse4_1": 19, "sse4_2": 20, "movbe": 22, "popcnt": 23, "xsave": 26,
        "avx": 28, "f16c": 29,
    },
    ("7.0", EBX): {
        "bmi1": 3, "avx2": 5, "bmi2": 8, "avx512f": 16, "avx512dq": 17, "avx512cd": 28, "avx512bw": 30, "avx512vl": 31,
    },
    ("7.0", EDX): {"amx_bf16": 22, "amx_tile": 24, "amx_int8": 25},
    ("80000001.0", ECX): {"lahf_lm": 0, "abm": 5},
}  # fmt: skip
# Intel SDM vol. 1, ch. 13: the parts of XCR0 that an instruction's registers need, by the beginning of its name.
XCR0 = {"avx512": 0xE6, "amx": 0x60000, "avx": 0x6, "fma": 0x6, "f16c": 0x6, "": 0}

# Linux, arch/arm64/include/uapi/asm/hwcap.h.
HWCAP = {0: "fp", 1: "asimd", 9: "fphp", 10: "asimdhp", 20: "asimddp", 22: "sve"}
HWCAP2 = {1: "sve2", 13: "i8mm", 14: "bf16"}


def _decoded(shot: Snapshot) -> dict[str, bool]:
    """Features of the table `CPUID` -> whether cpuid and XCR0 enable them."""
    states = {
        name: next(x for start, x in XCR0.items() if name.startswith(start)) for y in CPUID.values() for name in y
    }
    return {
        name: bool(shot.cpuid.get(leaf, (0, 0, 0, 0))[register] >> bit & 1 and shot.xcr0 & states[name] == states[name])
        for (leaf, register), bits in CPUID.items()
        for name, bit in bits.items()
    }


def features(shot: Snapshot) -> frozenset[str]:
    """Features that the processor has and the kernel enables, in Linux's names.

    An Arm host with SVE also has "sve_vl<bits>", its vector length.
    """
    flags: set[str] = set()
    if shot.machine == "aarch64":
        flags |= {name for bit, name in HWCAP.items() if shot.hwcap >> bit & 1}
        flags |= {name for bit, name in HWCAP2.items() if shot.hwcap2 >> bit & 1}
        if shot.sve_bytes:
            flags.add(f"sve_vl{8 * shot.sve_bytes}")
        return frozenset(flags or BASELINE["aarch64"])
    for first in processors(shot.cpuinfo)[:1]:
        flags |= set(first.get("flags", "").split())
        letters, *words = first.get("isa", "").removeprefix("rv64").split("_")  # as in rv64imafdcv_zicsr_zvfh
        flags |= {*letters, *words, *(["zvl128b"] if "v" in letters else [])}
    if shot.cpuid:
        decoded = _decoded(shot)
        enabled = {name for name, is_enabled in decoded.items() if is_enabled}
        flags = flags - (decoded.keys() - enabled) if flags else enabled
    if not shot.tiles:
        flags = {name for name in flags if not name.startswith("amx_")}
    return frozenset(flags | BASELINE.get(shot.machine, set()))


def _signature(shot: Snapshot) -> tuple[str, int, int, int]:
    """Vendor, display family, display model and stepping of an x86 processor."""
    if "1.0" in shot.cpuid and "0.0" in shot.cpuid:
        _, b, c, d = shot.cpuid["0.0"]
        vendor = b"".join(x.to_bytes(4, "little") for x in (b, d, c)).decode("ascii", "replace")
        eax = shot.cpuid["1.0"][0]
        family, model = eax >> 8 & 15, eax >> 4 & 15
        model |= (eax >> 16 & 15) << 4 if family in (6, 15) else 0
        family += eax >> 20 & 255 if family == 15 else 0
        return vendor, family, model, eax & 15
    first = (processors(shot.cpuinfo) or [{}])[0]
    family, model, stepping = (_number(first.get(key, "")) for key in ("cpu family", "model", "stepping"))
    return first.get("vendor_id", ""), family, model, stepping


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return 0


def _cores_by_part(shot: Snapshot) -> dict[tuple[int, int], list[int]]:
    """Processors in the affinity by Arm (implementer, part), in the order of /proc/cpuinfo."""
    cores: dict[tuple[int, int], list[int]] = {}
    for block in processors(shot.cpuinfo):
        names = ("CPU implementer", "CPU part") if "CPU part" in block else ("mvendorid", "marchid")
        part = (_number(block.get(names[0], "")), _number(block.get(names[1], "")))
        if part[0] and _number(block.get("processor", "")) in shot.affinity:
            cores.setdefault(part, []).append(_number(block["processor"]))
    return cores


def _within(value: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return not ranges or any(first <= value <= last for first, last in ranges)


def _generic(match: Match) -> bool:
    return not match.vendor and not match.implementer


def _chip(shot: Snapshot, has: frozenset[str]) -> tuple[Target, tuple[int, ...]]:
    """The chip, and the processors of its kind in the affinity."""
    for (implementer, part), cpus in _cores_by_part(shot).items():
        for chip in chips_mentioning(f"implementer = {implementer:#04x}"):
            if any(m.implementer == implementer and part in m.parts for m in chip.match):
                return chip, tuple(cpus)
    # Under user-mode emulation an Arm process reads the x86 host's cpuinfo.
    vendor, family, model, stepping = _signature(shot) if shot.machine == "x86_64" else ("", 0, 0, 0)
    named = [(m, chip) for chip in (chips_mentioning(f'"{vendor}"') if vendor else ()) for m in chip.match]
    # A listed model is more specific than features, which a chip may share with its successors.
    for m, chip in sorted(named, key=lambda x: not x[0].models):
        same = m.vendor == vendor and m.family == family and has.issuperset(m.features)
        if same and _within(model, m.models) and _within(stepping, m.steppings):
            return chip, shot.affinity
    levels = [
        (len(m.features), chip.name, chip)
        for chip in chips_mentioning("features = [")
        for m in chip.match
        if chip.arch == shot.machine and _generic(m) and has.issuperset(m.features)
    ]
    if levels:
        return max(levels)[2], shot.affinity
    plain = described("scalar")
    return replace(plain, name="unknown", title=f"unknown {shot.machine}", arch=shot.machine), shot.affinity


def _size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return _number(text.rstrip("KMG")) * unit


def _siblings(shot: Snapshot, cpu: int) -> set[int]:
    return parse_list(shot.files.get(f"{CPU}/cpu{cpu}/topology/thread_siblings_list", "")) or {cpu}


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
            _number(row["coherency_line_size"]),
            _number(row["ways_of_associativity"]),
            bool(sharing - _siblings(shot, cpu)),
            len({min(_siblings(shot, x)) for x in sharing}),
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


def _quota(shot: Snapshot) -> float:
    """CPU time per second that the control groups allow, in processors; infinite without a limit."""
    allowed = math.inf
    for folder in cgroup_folders(shot.files.get("/proc/self/cgroup", "")):
        quota, _, period = shot.files.get(f"{folder}/cpu.max", "").partition(" ")
        if not quota:
            quota = shot.files.get(f"{folder}/cpu.cfs_quota_us", "")
            period = shot.files.get(f"{folder}/cpu.cfs_period_us", "")
        if _number(quota) > 0 and _number(period) > 0:
            allowed = min(allowed, _number(quota) / _number(period))
    return allowed


def _cores(shot: Snapshot, cpus: Iterable[int]) -> int:
    """Number of physical cores that may be used; two threads of one core count once."""
    physical = {min(_siblings(shot, cpu)) for cpu in cpus}
    return max(1, min(len(physical), math.ceil(min(_quota(shot), len(physical)))))


def _lacking(isa: Isa, machine: str, has: frozenset[str]) -> tuple[str, ...]:
    if isa.arch not in ("any", machine):
        return (isa.arch,)
    return tuple(name for name in isa.features if name not in has)


def _isas(chip: Target, machine: str, has: frozenset[str]) -> tuple[Isa, ...]:
    """ISAs of the chip that run; on a generic chip also those that it does not list."""
    isas = [isa for isa in chip.isas if not _lacking(isa, machine, has)]
    if not any(_generic(m) for m in chip.match):
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
        cores=_cores(shot, cpus),
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
            f"target {name!r} is of arch {wanted.arch}, this machine is {here.arch}; only `emit` can use it"
        )
    _require(wanted.isas[0], f"target {name!r}")
    return replace(wanted, isas=tuple(isa for isa in wanted.isas if not missing(isa)), cores=here.cores)


def cross_check() -> list[str]:
    """Sentences on differences between py-cpuinfo and the detected vendor, name and features; takes up to a second."""
    facts, shot = package_facts(), snapshot()
    first = (processors(shot.cpuinfo) or [{}])[0]
    detected = {
        "vendor": (_signature(shot)[0] if shot.machine == "x86_64" else "", facts.get("vendor_id_raw", "")),
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
