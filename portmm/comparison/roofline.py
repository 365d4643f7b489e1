"""Roofline plot of a comparison as SVG.

Owns the plot of rates against arithmetic intensity under the roofs of the machine's
measured rates.

The roofs are those of `comparison.limit`: a horizontal one for each multiply-add that bounds
a case of the report, a slanted one for each level of memory. A case may be above the roof of a level
if its operands stay in a nearer one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from portmm.comparison.bars import Markup, Rate, figure, rate, tag, unit
from portmm.comparison.report import Report, Result

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


def roofline(report: Report) -> Markup:
    """The plot, empty if no case has a rate."""
    drawn = points(report)
    if not drawn:
        return Markup()
    tops, slopes = peaks(report), levels(report)
    rates = [x for p in drawn for r in (p.ours, p.best) if r for x in (r.low, r.high)]
    xs = [p.intensity for p in drawn]
    high = max(*rates, *tops.values()) * 1.7
    top = max(tops.values(), default=high)
    # The slanted roofs are labelled left of all points.
    x, y = _axes((min(xs) / 5, max(xs) * 2), (min(rates) / 2, high), slopes, top)
    title = f"Rate against arithmetic intensity of {len(drawn)} cases, on logarithmic axes"
    return tag(
        "svg",
        _frame(report, x, y),
        tag("g", *_slanted(slopes, top, x, y), class_="roof"),
        tag("g", *_level(tops, max(slopes.values(), default=0.0), x, y), class_="roof"),
        *(_case(report, p, x, y) for p in drawn),
        class_="roofline",
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        role="img",
        aria_label=title,
        xmlns="http://www.w3.org/2000/svg",
    )


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


def _frame(report: Report, x: Axis, y: Axis) -> Markup:
    ops = "flop" if unit(report) == "GFLOP/s" else "operations"
    lines = [_line("grid", x.at(t), y.start, x.at(t), y.end) for t in x.ticks()]
    lines += [_line("grid", x.start, y.at(t), x.end, y.at(t)) for t in y.ticks()]
    lines += [_line("axis", x.start, y.start, x.end, y.start), _line("axis", x.start, y.start, x.start, y.end)]
    words = [_words("x tick", (x.at(t), y.start + 19), f"{t:g}", "middle") for t in x.ticks()]
    words += [_words("y tick", (x.start - 8, y.at(t) + 4), f"{t:g}", "end") for t in y.ticks()]
    words.append(_words("name", ((x.start + x.end) / 2, HEIGHT - 8), f"arithmetic intensity, {ops} per byte", "middle"))
    words.append(_words("name", (2.0, 16.0), unit(report), "start"))
    return tag("g", *lines, *words, class_="frame")


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return tag("line", class_=kind, x1=x1, y1=y1, x2=x2, y2=y2)


def _words(kind: str, at: tuple[float, float], text: str, anchor: str, turn: float = 0.0) -> Markup:
    transform = f"rotate({turn:.2f} {at[0]:.1f} {at[1]:.1f})" if turn else None
    return tag("text", text, class_=kind, x=at[0], y=at[1], text_anchor=anchor, transform=transform)


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


def _slanted(slopes: dict[str, float], top: float, x: Axis, y: Axis) -> Iterable[Markup]:
    """Roofs of bandwidths: each from the left or the bottom edge up to the highest level roof."""
    for value, (begin, end) in _spans(slopes, top, x, y).items():
        yield _line("slope", x.at(begin), y.at(begin * value), x.at(end), y.at(end * value))
    for label in _labels(slopes, top, x, y):
        yield _words("label", (label.x, label.y), label.text, "start", math.degrees(label.turn))


def _level(tops: dict[str, float], slope: float, x: Axis, y: Axis) -> Iterable[Markup]:
    """Roofs of multiply-adds: each from the steepest slanted one to the right."""
    for value in tops.values():
        begin = max(x.low, value / slope) if slope else x.low
        if begin < x.high:
            yield _line("level", x.at(begin), y.at(value), x.end, y.at(value))
    for label, value in _shared(tops, abs(y.decade)):
        yield _words("label", (x.end - 4, y.at(value) - 6), label, "end")


def _case(report: Report, p: Point, x: Axis, y: Axis) -> Markup:
    px = x.at(p.intensity)
    parts: list[Markup] = []
    both = [r for r in (p.ours, p.best) if r]
    if p.ours and p.best:
        parts.append(_line("tie", px, y.at(p.ours.middle), px, y.at(p.best.middle)))
    parts += [_line("spread", px, y.at(r.low), px, y.at(r.high)) for r in both]
    if p.best:
        parts.append(tag("path", class_="best", d=diamond(px, y.at(p.best.middle))))
    if p.ours:
        parts.append(tag("circle", class_="us", cx=px, cy=y.at(p.ours.middle), r=4))
    return tag("g", tag("title", _title(report, p)), *parts, class_=f"case {report.verdict(p.result)}".strip())


def diamond(x: float, y: float, size: float = 5.0) -> str:
    """Path of a diamond around a point."""
    return f"M{x:.1f} {y - size:.1f}l{size:g} {size:g}-{size:g} {size:g}-{size:g}-{size:g}z"


def _title(report: Report, p: Point) -> str:
    r = p.result
    lines = [f"{r.case.name}: {r.case.shape}", f"{figure(p.intensity)} operations per byte"]
    named: Sequence[tuple[str, Rate | None]] = ((report.ours, p.ours), (r.best, p.best))
    lines += [f"{name}: {speed.words} {unit(report)}" for name, speed in named if speed]
    if r.ratio is not None:
        lines.append(f"{report.verdict(r)}: ratio {r.ratio:.2f}")
    if limit := report.ceiling(r):
        lines.append(f"limit {figure(limit)}" + (f" by {r.roof}" if r.roof else ""))
    return "\n".join(lines)


def legend(report: Report) -> Markup:
    """Legend of the plot's marks."""
    keys = (
        (tag("circle", class_="us", cx=12, cy=7, r=4), report.ours or "portmm (did not run)"),
        (tag("path", class_="best", d=diamond(12, 7)), "best peer of the case"),
        (tag("g", _line("tie", 0, 7, 24, 7), class_="win"), "portmm ahead"),
        (tag("g", _line("tie", 0, 7, 24, 7), class_="loss"), "portmm behind"),
        (tag("g", _line("tie", 0, 7, 24, 7), class_="draw"), "a draw"),
        (_line("spread", 12, 0, 12, 14), "range over rounds"),
        (_line("level", 0, 7, 24, 7), "multiply-adds, as measured"),
        (_line("slope", 0, 7, 24, 7), "bandwidths, as measured"),
    )
    items = (
        tag(
            "li",
            tag("svg", mark, class_="roofline", viewBox="0 0 24 14", width=24, height=14, aria_hidden="true"),
            text,
        )
        for mark, text in keys
    )
    return tag("ul", *items, class_="legend")
