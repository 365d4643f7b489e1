"""The README's picture: speed beside the best peer, by type and chip. Its file names a digest of what it shows."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING

from portmm.comparison.report import geomean
from portmm.util.templates import render

if TYPE_CHECKING:
    from ratio_tables import Ratios

COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#666666")
"""Of the chips, in turn: Okabe and Ito's, which people of all kinds of sight tell apart."""
WIDTH, ROW, GAP, LETTER = 768.0, 21.0, 10.0, 6.2
"""Pixels of the picture's width, of the height of a row, around what is drawn, and of a letter."""
LEAST, MOST = 0.5, 6.0
"""Ratios at the ends of the axis; the points of greater ones are at its end."""


def points(*tables: dict[str, Ratios]) -> dict[str, dict[str, float]]:
    """Type -> chip -> geometric mean of its ratios.

    Args:
        tables: chips, with their ratios by type.
    """
    rows: dict[str, dict[str, float]] = {}
    for columns in tables:
        kinds = dict.fromkeys(kind for mine in sorted(columns.values(), key=len, reverse=True) for kind in mine)
        for kind in kinds:
            for chip, mine in columns.items():
                if kind in mine and (mean := geomean(mine[kind].values())) is not None:
                    rows.setdefault(kind, {})[chip] = mean
    return rows


def digest(*tables: dict[str, Ratios]) -> str:
    """A digest of what the picture shows, as its file has it."""
    shown = [(kind, [(chip, f"{x:.3f}") for chip, x in mine.items()]) for kind, mine in points(*tables).items()]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def shows(text: str, *tables: dict[str, Ratios]) -> bool:
    """Whether a picture shows these results."""
    return f"data:{digest(*tables)}" in text


def svg(*tables: dict[str, Ratios]) -> str:
    """The picture's file."""
    rows, chips = points(*tables), [chip for columns in tables for chip in columns]
    left = 2 * GAP + LETTER * max(map(len, rows), default=0)

    def place(ratio: float) -> float:
        """Pixels from the left edge."""
        share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return left + (WIDTH - left - 2 * GAP) * share

    colours = {chip: COLOURS[i % len(COLOURS)] for i, chip in enumerate(chips)}
    step = (WIDTH - GAP) / max(1, len(colours))
    sizes = {"left": left, "width": WIDTH, "row": ROW, "gap": GAP, "step": step}
    return render(__file__, "speed.svg", rows=rows, digest=digest(*tables), place=place, colours=colours, **sizes)
