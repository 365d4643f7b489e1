"""The machine of a bundle, before anything is known of this one: a first call reads no description of a chip.

Owns what a bundle says of chips and instruction sets, for which `host.detect` would read a dozen files: how chips are
identified, and which features instruction sets need. Nothing that is imported here is slow to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from portmm.host import host_probe
from portmm.host.chip_match import chip_of
from portmm.host.features import features
from portmm.target import match
from portmm.util import system
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.build.bundle import Bundle
    from portmm.target.isa import Isa
    from portmm.target.match import Match
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


def here(bundle: Bundle) -> Here | None:
    """This machine, by what a bundle says of chips; None if it says nothing of this one."""
    key = bundle.signature
    if key not in _known:
        _known[key] = _identified(bundle)
    return _known[key]


_known: dict[str, Here | None] = {}


@cache
def _host() -> tuple[host_probe.Snapshot, frozenset[str]]:
    shot = host_probe.snapshot()
    return shot, features(shot)


def _identified(bundle: Bundle) -> Here | None:
    arch = system.machine()
    rows, sets = bundle.answer(CHIPS + arch), bundle.answer(SETS + arch)
    if rows is None or sets is None:
        return None
    shot, has = _host()

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
    return Here(chip.name, frozenset(own), host_probe.cores(shot, cpus))


def forget() -> None:
    """Drop what is known of this machine."""
    _host.cache_clear()
    _known.clear()
