"""The README's picture: speed beside the best peer, by chip and type.

Owns the SVG. matplotlib, from the extra `plot`, is imported when a picture is made. The file names a digest of what it
shows, so that a picture can be checked against results without matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import json
from typing import TYPE_CHECKING, Any

from portmm.comparison.report import geomean

if TYPE_CHECKING:
    from portmm.comparison.tables_chips import Ratios

AHEAD, BEHIND, LOWEST = "#2a7f62", "#b5532d", "#333333"
WIDTH, ROW, MARGIN = 8.0, 0.24, 1.1  # inches
LEAST, MOST = 0.25, 4.0
"""Ratios at the ends of the axis; longer bars are cut, and their labels have the value."""


def bars(measured: dict[tuple[str, str], Ratios]) -> list[tuple[str, float, float]]:
    """Label, geometric mean of ratios, and lowest ratio of each bar: a type on a machine by one thread."""
    return [
        (f"{machine}: {kind}", mean, min(ratios.values()))
        for (machine, setting), kinds in measured.items()
        if setting == "1 thread"
        for kind, ratios in kinds.items()
        if (mean := geomean(ratios.values())) is not None
    ]


def digest(measured: dict[tuple[str, str], Ratios]) -> str:
    """A digest of what the picture shows, as its file has it."""
    shown = [(label, f"{mean:.3f}", f"{lowest:.3f}") for label, mean, lowest in bars(measured)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def shows(text: str, measured: dict[tuple[str, str], Ratios]) -> bool:
    """Whether a picture shows these results."""
    return f"data:{digest(measured)}" in text


def svg(measured: dict[tuple[str, str], Ratios]) -> str:
    """The picture's file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "portmm[plot]"') from error
    rows = bars(measured)[::-1]
    with mpl.rc_context({"svg.hashsalt": "portmm", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(WIDTH, MARGIN + ROW * len(rows)), layout="constrained")
        FigureCanvasSVG(figure)
        _draw(figure.subplots(), rows)
        text = io.StringIO()
        about = {"Date": None, "Creator": None, "Description": f"data:{digest(measured)}"}
        figure.savefig(text, format="svg", metadata=about)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _draw(ax: Any, rows: list[tuple[str, float, float]]) -> None:
    for y, (_, mean, lowest) in enumerate(rows):
        end = min(max(mean, LEAST), MOST)
        ax.barh(y, end - 1, left=1, height=0.7, color=AHEAD if mean >= 1 else BEHIND)
        ax.plot([max(lowest, LEAST)], [y], marker="|", color=LOWEST, markersize=7)
        right = mean >= 1
        ax.text(end, y, f" {mean:.2f} ", va="center", ha="left" if right else "right", fontsize=7)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_xlim(LEAST, MOST * 1.25)
    ticks = (0.25, 0.5, 1, 2, 4)
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    ax.set_yticks(range(len(rows)), [label for label, *_ in rows])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.set_xlabel("rate of portmm over that of the best library of each case, one thread; tick: lowest case")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)
