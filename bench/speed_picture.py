"""The README's picture: speed beside the best peer, by chip and type. Its file names a digest of what it shows."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING

from portmm.comparison.report import geomean
from portmm.util.templates import render

if TYPE_CHECKING:
    from ratio_tables import Ratios

AHEAD, BEHIND = "#2a7f62", "#b5532d"
WIDTH, ROW, GAP, LETTER = 768.0, 23.0, 8.0, 6.0
"""Pixels of the picture's width, of the height of a bar, around the bars, and of a letter."""
LEAST, MOST, SPARE = 0.25, 4.0, 1.25
"""Ratios at the ends of the axis, and the room beyond; longer bars are cut, and their labels have the value."""


def bars(*tables: dict[str, Ratios]) -> list[tuple[str, float, float]]:
    """Label, geometric mean of ratios, and lowest ratio of each bar: a type on a chip.

    Args:
        tables: chips, with their ratios by type.
    """
    return [
        (f"{chip}: {kind}", mean, min(ratios.values()))
        for columns in tables
        for chip, kinds in columns.items()
        for kind, ratios in kinds.items()
        if (mean := geomean(ratios.values())) is not None
    ]


def digest(*tables: dict[str, Ratios]) -> str:
    """A digest of what the picture shows, as its file has it."""
    shown = [(label, f"{mean:.3f}", f"{lowest:.3f}") for label, mean, lowest in bars(*tables)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def shows(text: str, *tables: dict[str, Ratios]) -> bool:
    """Whether a picture shows these results."""
    return f"data:{digest(*tables)}" in text


def svg(*tables: dict[str, Ratios]) -> str:
    """The picture's file."""
    rows = bars(*tables)
    left = GAP + LETTER * max((len(label) for label, *_ in rows), default=0)

    def place(ratio: float) -> float:
        """Pixels from the left edge."""
        share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST * SPARE / LEAST)
        return left + (WIDTH - left - GAP) * share

    numbers = {"left": left, "width": WIDTH, "row": ROW, "most": MOST}
    colours = {"ahead": AHEAD, "behind": BEHIND}
    return render(__file__, "speed.svg", rows=rows, digest=digest(*tables), place=place, **numbers, **colours)
