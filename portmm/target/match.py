"""Identification of a chip by properties of a host.

Owns the record, and its spelling in bundles. What this module imports is quick to import: see `host.chip_match`.
"""

from __future__ import annotations

from portmm.util.records import dataclass

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Identification of a chip by the properties of a host: all fields that are set must agree.

    Attributes:
        vendor: x86 vendor string of cpuid leaf 0.
        family: x86 display family.
        models: inclusive ranges of x86 display models.
        steppings: inclusive ranges of x86 steppings.
        implementer: Arm MIDR implementer.
        parts: Arm MIDR part numbers; of a mixed chip, the fast cores only.
        features: for a generic level, the features that the host must have, as Linux spells them.
        names: of a device, words of its name as its driver spells it, in any case; a word
            that ends in a letter may be a prefix, so that "Mali-G" matches "Mali-G710".
        capability: of a device for CUDA, as in "9.0".
    """

    vendor: str = ""
    family: int = 0
    models: tuple[tuple[int, int], ...] = ()
    steppings: tuple[tuple[int, int], ...] = ()
    implementer: int = 0
    parts: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    capability: str = ""

    @property
    def generic(self) -> bool:
        """Whether it is of no maker: of a level."""
        return not self.vendor and not self.implementer


def start(vendor: str = "", implementer: int = 0) -> str:
    """The beginning of the spelling of identifications of a maker, or with neither of levels."""
    return f"{vendor}:{implementer}:"


def spelled(match: Match) -> str:
    """The spelling of the identification of a processor, without blanks, tabs and semicolons."""
    ranges = [",".join(f"{first}-{last}" for first, last in x) for x in (match.models, match.steppings)]
    lists = [",".join(map(str, x)) for x in (match.parts, match.features)]
    return start(match.vendor, match.implementer) + ":".join((str(match.family), *ranges, *lists))


def parsed(text: str) -> Match:
    """The identification of a spelling.

    Raises:
        ValueError: it is none.
    """
    vendor, implementer, family, models, steppings, parts, features = text.split(":")
    numbers = tuple([int(x) for x in parts.split(",") if x])
    words = tuple([x for x in features.split(",") if x])
    return Match(vendor, int(family), _ranges(models), _ranges(steppings), int(implementer), numbers, words)


def _ranges(text: str) -> Ranges:
    pairs = [x.partition("-") for x in text.split(",") if x]
    return tuple([(int(first), int(last)) for first, _, last in pairs])
