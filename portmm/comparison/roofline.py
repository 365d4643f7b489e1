"""Roofline plot of a comparison as SVG.

Owns the plot of rates against arithmetic intensity under the roofs of the machine's
measured rates.

The roofs are those of `comparison.limit`: a horizontal one for each multiply-add that bounds
a case of the report, a slanted one for each level of memory. A case may be above the roof of a level
if its operands stay in a nearer one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from portmm.comparison.rates import Rate, figure, rate, unit
from portmm.comparison.report import Report, Result
from portmm.util.templates import render

WIDTH, HEIGHT = 1080.0, 600.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 18.0, 36.0, 50.0
CLEAR, LETTER = 20.0, 10.0
"""Height of a line of text and width of a letter, at the largest font that the style sheet sets (16 pixels)."""
ABOVE, INSIDE = 5.0, 4.0
"""Distances of a label from its roof, and from the axis."""
STEP, STEPS = 1.25, 40
"""Factor by which a range is extended for a label that lacks room, and how often at most."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis: `low` is drawn at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    @property
    def decade(self) -> float:
        """Length of a factor of ten."""
        return (self.end - self.start) / math.log10(self.high / self.low)

    def at(self, value: float) -> float:
        """Coordinate of a value."""
        return self.start + self.decade * math.log10(value / self.low)

    def ticks(self) -> list[float]:
        """Round values in the range: 1, 2 and 5, or powers of ten where those would crowd."""
        steps = (1, 2, 5) if abs(self.decade) > 150 else (1,)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [x for p in powers for s in steps if self.low <= (x := s * 10.0**p) <= self.high]


@dataclass(frozen=True, slots=True)
class Point:
    """A case: operations per byte, and the rates of portmm and of the best peer."""

    result: Result
    intensity: float
    ours: Rate | None
    best: Rate | None


def points(report: Report) -> list[Point]:
    """Cases that can be drawn."""
    drawn = []
    for r in report.results:
        ours, best = rate(r, report.ours), rate(r, r.best)
        if r.case.bytes and (ours or best):
            drawn.append(Point(r, r.case.flops / r.case.bytes, ours, best))
    return drawn


def peaks(report: Report) -> dict[str, float]:
    """Multiply-add -> GFLOP/s of all threads, for those that bound a case of the report.

    The multiply-add that bounds a type is the roof of one of its cases, in older reports one whose rate is
    the limit of a case; where memory bounds all cases, it is the fastest one of a float's own name.
    """
    atoms = {name: x * report.threads for name, x in report.rates.items() if "_" in name}
    roofs = {r.case.problem.dtype: r.roof for r in report.results if r.roof in atoms}
    limits: dict[str, list[float]] = {}
    for r in report.results:
        limits.setdefault(r.case.problem.dtype, []).extend([r.limit] if r.limit else [])
    highest: dict[str, float] = {}
    for word, known in limits.items():
        hit = {name: x for name, x in atoms.items() if any(math.isclose(x, y, rel_tol=1e-9) for y in known)}
        hit = {roofs[word]: atoms[roofs[word]]} if word in roofs else hit
        own = {name: x for name, x in atoms.items() if name.rpartition("_")[2] == word}
        highest |= hit or dict(sorted(own.items(), key=lambda row: row[1])[-1:])
    return highest


def levels(report: Report) -> dict[str, float]:
    """Level of memory -> GB/s of all threads: that of one core times the threads, at most that of all cores."""
    gbs = {name: x * report.threads for name, x in report.rates.items() if "_" not in name and "@" not in name}
    shared = report.rates.get("memory@all")
    if shared and "memory" in gbs and report.threads > 1:
        gbs["memory"] = min(gbs["memory"], shared)
    return gbs


def roofline(report: Report) -> str:
    """The plot, empty if no case has a rate."""
    drawn = points(report)
    if not drawn:
        return ""
    tops, slopes = peaks(report), levels(report)
    rates = [x for p in drawn for r in (p.ours, p.best) if r for x in (r.low, r.high)]
    xs = [p.intensity for p in drawn]
    high = max(*rates, *tops.values()) * 1.7
    top = max(tops.values(), default=high)
    # The slanted roofs are labelled left of all points.
    x, y = _axes((min(xs) / 5, max(xs) * 2), (min(rates) / 2, high), slopes, top)
    # A level roof begins at the steepest slanted one.
    steepest = max(slopes.values(), default=0.0)
    flat = [(max(x.low, value / steepest) if steepest else x.low, value) for value in tops.values()]
    return render(
        __file__, "roofline.html", report=report, points=drawn, x=x, y=y, width=WIDTH, height=HEIGHT, unit=unit(report),
        figure=figure, slanted=_spans(slopes, top, x, y), labels=list(_labels(slopes, top, x, y)),
        level=[row for row in flat if row[0] < x.high], level_labels=_shared(tops, abs(y.decade)),
    )  # fmt: skip


def _axes(
    intensities: tuple[float, float], rates: tuple[float, float], slopes: dict[str, float], top: float
) -> tuple[Axis, Axis]:
    """Axes over two ranges, extended downwards until the labels of the slanted roofs fit into the frame.

    Args:
        intensities: lowest and highest value of the horizontal axis.
        rates: lowest and highest value of the vertical axis.
        slopes: level of memory -> bandwidth.
        top: rate of the highest level roof.
    """
    left, bottom = intensities[0], rates[0]
    for _ in range(STEPS):
        x, y = Axis(left, intensities[1], LEFT, WIDTH - RIGHT), Axis(bottom, rates[1], HEIGHT - BOTTOM, TOP)
        cut = [label for label in _labels(slopes, top, x, y) if not label.fits]
        if not cut:
            break
        # A roof that begins at the left edge gains room from a wider plot, one that begins at the bottom from a
        # higher one.
        if cut[0].at_left:
            left /= STEP
        else:
            bottom /= STEP
    return x, y


def _shared(roofs: dict[str, float], decade: float) -> list[tuple[str, float]]:
    """Labels from the highest roof down; those that would touch are one label, at the highest of them.

    Args:
        roofs: name -> rate.
        decade: distance of roofs that differ by a factor of ten.
    """
    near = 10 ** (CLEAR / decade)
    rows: list[tuple[str, float]] = []
    for name, value in sorted(roofs.items(), key=lambda row: -row[1]):
        label = f"{name} {figure(value)}"
        if rows and rows[-1][1] < value * near:
            rows[-1] = (f"{rows[-1][0]}, {label}", rows[-1][1])
        else:
            rows.append((label, value))
    return rows


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a slanted roof.

    Attributes:
        text: its words.
        x: of the first letter's lower left corner.
        y: of the same corner.
        turn: angle of the line of text; negative as it rises to the right.
        at_left: its roof begins at the left edge of the plot, not at the bottom.
    """

    text: str
    x: float
    y: float
    turn: float
    at_left: bool

    @property
    def degrees(self) -> float:
        """The angle in degrees."""
        return math.degrees(self.turn)

    @property
    def fits(self) -> bool:
        """Whether the last letter's upper corners lie in the frame."""
        length, height = LETTER * len(self.text), CLEAR
        right = self.x + length * math.cos(self.turn)
        upper = self.y + length * math.sin(self.turn) - height * math.cos(self.turn)
        return right <= WIDTH - RIGHT - INSIDE and upper >= TOP + INSIDE


def _spans(slopes: dict[str, float], top: float, x: Axis, y: Axis) -> dict[float, tuple[float, float]]:
    """Bandwidth -> intensities at which its roof begins and ends, for those that the axes show."""
    spans = {value: (max(x.low, y.low / value), min(x.high, top / value)) for value in slopes.values()}
    return {value: (begin, end) for value, (begin, end) in spans.items() if begin < end}


def _labels(slopes: dict[str, float], top: float, x: Axis, y: Axis) -> Iterable[Label]:
    """Labels of the slanted roofs that the axes show."""
    spans = _spans(slopes, top, x, y)
    turn = math.atan2(y.decade, x.decade)
    for text, value in _shared({k: v for k, v in slopes.items() if v in spans}, abs(y.decade) * math.cos(turn)):
        begin = spans[value][0]
        # As far along its roof as keeps the first letter's upper corner right of the axis and its numbers.
        left = (ABOVE + CLEAR) * abs(math.sin(turn)) + INSIDE - (x.at(begin) - x.start)
        along = max(2 * INSIDE, left / math.cos(turn))
        px = x.at(begin) + along * math.cos(turn) + ABOVE * math.sin(turn)
        py = y.at(begin * value) + along * math.sin(turn) - ABOVE * math.cos(turn)
        yield Label(f"{text} GB/s", px, py, turn, begin == x.low)
