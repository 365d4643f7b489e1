"""Identification of a host as one of some described chips.

Owns the comparison of a snapshot with identifications; pure. Nothing that is imported here is slow to import: the first
call of a process by a bundle identifies the machine so, without a description of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from portmm.host.host_probe import Snapshot, number, processors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol, TypeVar

    from portmm.target.match import Match, Ranges

    class Chip(Protocol):
        """The facts about a chip."""

        @property
        def name(self) -> str:
            """Its name."""

        @property
        def arch(self) -> str:
            """Its architecture."""

        @property
        def match(self) -> tuple[Match, ...]:
            """Its identifications."""

    C = TypeVar("C", bound=Chip)
    C_co = TypeVar("C_co", bound=Chip, covariant=True)

    class Chips(Protocol[C_co]):
        """Looks chips up."""

        def __call__(self, vendor: str = "", implementer: int = 0) -> Iterable[C_co]:
            """The chips of a vendor of x86 or an implementer of Arm, with neither those of levels; perhaps others."""


def chip_of(shot: Snapshot, has: Collection[str], chips: Chips[C]) -> tuple[C | None, tuple[int, ...]]:
    """The chip that a host is, None if it is none of them, and the processors of its kind in the affinity.

    Args:
        shot: of the host.
        has: its features: see `features.features`.
        chips: the chips of a maker.
    """
    own = frozenset(has)
    for (implementer, part), cpus in _cores_by_part(shot).items():
        for chip in chips(implementer=implementer):
            if any(m.implementer == implementer and part in m.parts for m in chip.match):
                return chip, tuple(cpus)
    # Under user-mode emulation an Arm process reads the x86 host's cpuinfo.
    vendor, family, model, stepping = signature(shot) if shot.machine == "x86_64" else ("", 0, 0, 0)
    named = [(m, chip) for chip in (chips(vendor=vendor) if vendor else ()) for m in chip.match]
    # A listed model is more specific than features, which a chip may share with its successors, that have more.
    for m, chip in sorted(named, key=lambda x: (not x[0].models, -len(x[0].features))):
        same = m.vendor == vendor and m.family == family and own.issuperset(m.features)
        if same and _within(model, m.models) and _within(stepping, m.steppings):
            return chip, shot.affinity
    levels = [
        (len(m.features), chip.name, chip)
        for chip in chips()
        for m in chip.match
        if chip.arch == shot.machine and m.generic and own.issuperset(m.features)
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
