"""Pictures by matplotlib, from the extra `plot`, which is imported when one is drawn.

Owns the PNG of a comparison, and the README's SVG: speed beside the best peer, by chip and type. That file names a
digest of what it shows, so that it can be checked against results without matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from portmm.comparison.report import Report, Result, geomean
from portmm.comparison.result_tables import Ratios
from portmm.comparison.text import heading

OURS, LOSS = "#c1272d", "#4d4d4d"
# Dark enough on white; markers distinguish contenders without colour.
PEERS = ("#4477aa", "#228833", "#aa7700", "#66ccee", "#aa3377", "#777777", "#332288")
MARKERS = "osD^v<>P"
INCHES_PER_CASE, INCHES_LEAST = 0.24, 3.0


def plot(report: Report, path: str | Path) -> None:
    """Write a PNG: rates of all contenders on the left, ratios to the best peer on the right.

    Raises:
        ImportError: matplotlib is not installed; `pip install "portmm[plot]"` brings it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a plot needs matplotlib: pip install "portmm[plot]"') from error
    results = report.results[::-1]
    height = max(INCHES_LEAST, INCHES_PER_CASE * len(results) + 1.4)
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    rates, ratios = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _rates(rates, report, results)
    _ratios(ratios, report, results)
    figure.suptitle(heading(report))
    figure.savefig(path, format="png", dpi=120)


def _rates(ax: Any, report: Report, results: tuple[Result, ...]) -> None:
    for i, name in enumerate(report.shown):
        points = [(rate, y) for y, r in enumerate(results) if (rate := r.gflops(name)) is not None]
        if not points:
            continue
        ours = name == report.ours
        style = {"color": OURS, "zorder": 3, "s": 42} if ours else {"color": PEERS[i % len(PEERS)], "alpha": 0.8}
        x, y = zip(*points, strict=True)
        ax.scatter(x, y, marker=MARKERS[i % len(MARKERS)], label=name, **style)
    limits = [(limit, y) for y, r in enumerate(results) if (limit := report.ceiling(r))]
    if limits:
        x, y = zip(*limits, strict=True)
        ax.scatter(x, y, marker="|", s=120, color="black", label="limit")
    ax.set_yticks(range(len(results)), [r.case.name for r in results])
    ax.set_xscale("log")
    ax.set_xlabel("GFLOP/s")
    ax.grid(alpha=0.3)
    if report.shown:
        ax.legend(loc="lower left", fontsize="small")


def _ratios(ax: Any, report: Report, results: tuple[Result, ...]) -> None:
    for y, r in enumerate(results):
        if r.ratio is not None:
            ax.barh(y, r.ratio - 1, left=1, color=OURS if r.ratio >= 1 else LOSS)
            draw = "=" if report.verdict(r) == "draw" else ""
            ax.text(max(r.ratio, 1), y, f" {r.ratio:.2f}{draw} {r.best}", va="center", fontsize="x-small")
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xlabel("rate of portmm / rate of the best peer")
    ax.grid(alpha=0.3, axis="x")
    ax.margins(x=0.25)
    ax.set_ylim(-0.7, len(results) - 0.3)


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
