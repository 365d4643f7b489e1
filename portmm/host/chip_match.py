"""Identification of a host as one of some described chips.

Owns the comparison of a snapshot with identifications, and what a bundle says of chips and instruction sets, for which
`detect` would read a dozen files: the first call of a process by a bundle reads no description of a chip. Nothing that
is imported here is slow to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from portmm.host import host_probe
from portmm.host.features import CPUID, UNLISTED, features
from portmm.host.host_probe import Snapshot, cores, number, processors, sharing, snapshot
from portmm.target import match
from portmm.util import system
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.build.bundle import Bundle
    from portmm.target.isa import Isa
    from portmm.target.match import Match, Ranges
    from portmm.target.target import Target

CHIPS, SETS = "chips ", "features "
"""Beginnings of questions, before an architecture: its chips, as "zen4;avx512,avx2;" and identifications with
semicolons between, and its instruction sets, as "avx2=avx2,fma"."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip that this may be.

    Attributes:
        name: its name.
        arch: its architecture.
        isas: names of its instruction sets.
        match: its identifications.
    """

    name: str
    arch: str
    isas: tuple[str, ...]
    match: tuple[Match, ...]


@dataclass(frozen=True, slots=True)
class Here:
    """This machine.

    Attributes:
        name: of its chip.
        isas: names of the instruction sets that run.
        cores: cores that may be used.
    """

    name: str
    isas: frozenset[str]
    cores: int


def facts(arch: str, chips: Iterable[Target], isas: Iterable[Isa]) -> dict[str, tuple[str, ...]]:
    """The facts of a bundle about the chips and instruction sets of an architecture, by question."""
    rows = [x for x in chips if x.arch == arch and x.match]
    return {
        CHIPS + arch: tuple(
            ";".join((x.name, ",".join(isa.name for isa in x.isas), *map(match.spelled, x.match))) for x in rows
        ),
        SETS + arch: tuple(f"{x.name}={','.join(x.features)}" for x in isas if x.arch in (arch, "any")),
    }


def here(bundle: Bundle, words: Callable[[], frozenset[str]] = frozenset) -> Here | None:
    """This machine, by what a bundle says of chips; None if it says nothing of this one.

    Args:
        bundle: the bundle.
        words: returns the features of this processor and who made it, as `features.c` writes them, or none.
    """
    key = bundle.signature
    if key not in _known:
        _known[key] = _identified(bundle, words)
    return _known[key]


_known: dict[str, Here | None] = {}


@cache
def _host(words: Callable[[], frozenset[str]]) -> tuple[Snapshot, frozenset[str]]:
    machine = system.machine()
    if machine == "x86_64" and (has := words()):
        affinity = system.processors()
        shot = Snapshot(machine, host_probe.first_processor(), sharing(affinity), affinity)
        vendor, family, *_ = signature(shot)
        named, listed = {f"vendor={vendor}", f"family={family}"}, set(shot.cpuinfo.split())
        if named <= has and has - named - UNLISTED <= listed:  # what the kernel disables, it does not list
            listed.difference_update(*CPUID.values())
            return shot, has.union(listed if "amx_tile" in has else [x for x in listed if not x.startswith("amx_")])
    shot = snapshot(caches=False)
    return shot, features(shot)


def _identified(bundle: Bundle, words: Callable[[], frozenset[str]]) -> Here | None:
    arch = system.machine()
    rows, sets = bundle.answer(CHIPS + arch), bundle.answer(SETS + arch)
    if rows is None or sets is None:
        return None
    shot, has = _host(words)

    def chips(vendor: str = "", implementer: int = 0) -> Iterator[Chip]:
        start = ";" + match.start(vendor, implementer)
        for row in rows:
            if start in row:
                name, isas, *texts = row.split(";")
                yield Chip(name, arch, tuple(isas.split(",")), tuple([match.parsed(x) for x in texts]))

    chip, cpus = chip_of(shot, has, chips)
    if chip is None:
        return None
    pairs = [x.partition("=") for x in sets]
    run = {name for name, _, words in pairs if not words or has.issuperset(words.split(","))}
    # A chip of a level may have instruction sets that its description does not list.
    own = run if any(m.generic for m in chip.match) else run.intersection(chip.isas)
    return Here(chip.name, frozenset(own), cores(shot, cpus))


def forget() -> None:
    """Drop what is known of this machine."""
    _host.cache_clear()
    _known.clear()


def chip_of(shot: Snapshot, has: frozenset[str], chips: Callable[..., Iterable[Any]]) -> tuple[Any, tuple[int, ...]]:
    """The chip that a host is, None if it is none of them, and the processors of its kind in the affinity.

    Args:
        shot: of the host.
        has: its features: see `features.features`.
        chips: chips with a name, an architecture and identifications, as `Chip` or `Target`: those of a `vendor` or of
            an `implementer`, with neither those of levels.
    """
    for (implementer, part), cpus in _cores_by_part(shot).items():
        for chip in chips(implementer=implementer):
            if any(m.implementer == implementer and part in m.parts for m in chip.match):
                return chip, tuple(cpus)
    # Under user-mode emulation an Arm process reads the x86 host's cpuinfo.
    vendor, family, model, stepping = signature(shot) if shot.machine == "x86_64" else ("", 0, 0, 0)
    named = [(m, chip) for chip in (chips(vendor=vendor) if vendor else ()) for m in chip.match]
    # A listed model is more specific than features, which a chip may share with its successors, that have more.
    for m, chip in sorted(named, key=lambda x: (not x[0].models, -len(x[0].features))):
        same = m.vendor == vendor and m.family == family and has.issuperset(m.features)
        if same and _within(model, m.models) and _within(stepping, m.steppings):
            return chip, shot.affinity
    levels = [
        (len(m.features), chip.name, chip)
        for chip in chips()
        for m in chip.match
        if chip.arch == shot.machine and m.generic and has.issuperset(m.features)
    ]
    return (max(levels)[2] if levels else None), shot.affinity


def signature(shot: Snapshot) -> tuple[str, int, int, int]:
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
    family, model, stepping = (number(first.get(key, "")) for key in ("cpu family", "model", "stepping"))
    return first.get("vendor_id", ""), family, model, stepping


def _cores_by_part(shot: Snapshot) -> dict[tuple[int, int], list[int]]:
    """Processors in the affinity by Arm (implementer, part), in the order of /proc/cpuinfo."""
    cores: dict[tuple[int, int], list[int]] = {}
    for block in processors(shot.cpuinfo):
        names = ("CPU implementer", "CPU part") if "CPU part" in block else ("mvendorid", "marchid")
        part = (number(block.get(names[0], "")), number(block.get(names[1], "")))
        if part[0] and number(block.get("processor", "")) in shot.affinity:
            cores.setdefault(part, []).append(number(block["processor"]))
    return cores


def _within(value: int, ranges: Ranges) -> bool:
    return not ranges or any(first <= value <= last for first, last in ranges)
