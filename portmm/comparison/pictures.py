"""A comparison as a PNG, by matplotlib of the extra `plot`, which is imported when it is drawn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from portmm.comparison.report import Report, Result
from portmm.comparison.text import heading

OURS, LOSS = "#c1272d", "#4d4d4d"
# Dark enough on white; markers distinguish contenders without colour.
PEERS = ("#4477aa", "#228833", "#aa7700", "#66ccee", "#aa3377", "#777777", "#332288")
MARKERS = "osD^v<>P"
INCHES_PER_CASE, INCHES_LEAST = 0.24, 3.0


def check() -> None:
    """Test that pictures can be drawn, before anything is measured.

    Raises:
        ImportError: matplotlib is not installed; `pip install "portmm[plot]"` brings it.
    """
    if find_spec("matplotlib") is None:
        raise ImportError('a plot needs matplotlib: pip install "portmm[plot]"')


def plot(report: Report, path: str | Path) -> None:
    """Write a PNG: rates of all contenders on the left, ratios to the best peer on the right.

    Raises:
        ImportError: matplotlib is not installed; `pip install "portmm[plot]"` brings it.
    """
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
