"""Picture of where the time of a model goes, as SVG.

Owns `drawn`: a bar for each step of a report that was timed, as long as its time, with its operators; the dark part of
the bar of a product or convolution is what its multiply-adds would take at the machine's best rate in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from portmm.util import text
from portmm.util.svg import document

if TYPE_CHECKING:
    from portmm.onnx.report import Report, Row

LINE, LEFT, WIDE, TOP, WORDS = 17, 96, 420, 58, 78
LEAST = 0.002
"""Share of the time from which a step has a bar of its own."""
HIGHEST = 1.1
"""Share of the float32 rate above which a step's types must be others: clocks change between two measurements."""
COLORS = {"product": "#7aa6cf", "conv": "#7fbf8e", "attention": "#b79bd1", "numpy": "#d98a7b"}
OTHER, DARK = "#c9b98a", "#24476b"
STYLE = ".l{font:11px sans-serif}.t{font:bold 13px sans-serif}.n{font:11px sans-serif;text-anchor:end}"


def drawn(report: Report, title: str, peak: float = 0.0) -> str:
    """The picture of a report.

    Args:
        report: one with times.
        title: above it, as the name of the model.
        peak: float32 operations of a second, the best of the machine; 0 if it is unknown.
    """
    total = sum(x.seconds for x in report.rows) or 1.0
    shown = [x for x in report.rows if x.seconds >= LEAST * total]
    rest, most = total - sum(x.seconds for x in shown), max((x.seconds for x in shown), default=1.0) or 1.0
    parts = [f'<text x="8" y="20" class="t">{escape(f"{title}: {_summary(report, total, peak)}")}</text>']
    parts.append(f'<text x="8" y="40" class="l">{escape(_kinds(report, total))}</text>')
    for i, x in enumerate(shown):
        parts += _bar(x, TOP + i * LINE, most, peak)
    y = TOP + len(shown) * LINE
    if len(shown) < len(report.rows):
        others = f"{text.number(len(report.rows) - len(shown), 'shorter step')}, {text.time(rest)}"
        parts.append(f'<text x="{LEFT}" y="{y + 12}" class="l">{escape(others)}</text>')
    return document(LEFT + WIDE + 470, y + 26, STYLE, parts)


def _bar(x: Row, y: int, most: float, peak: float) -> list[str]:
    """A step: its time, its bar, and its operators."""
    width = WIDE * x.seconds / most
    parts = [
        f'<text x="{LEFT - 6}" y="{y + 12}" class="n">{text.time(x.seconds)}</text>',
        f'<rect x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{LINE - 4}" fill="{COLORS.get(x.kind, OTHER)}"/>',
    ]
    share = _share([x], peak)
    if share:
        parts.append(
            f'<rect x="{LEFT}" y="{y + 7}" width="{width * min(share, 1.0):.1f}" height="{LINE - 14}" fill="{DARK}"/>'
        )
    of = f" {100 * share:.0f}%" if share else ""
    label = f"{x.kind}{of}: {x.what or x.detail}"
    label = label if len(label) <= WORDS else f"{label[: WORDS - 1]}…"
    parts.append(f'<text x="{LEFT + WIDE + 8}" y="{y + 12}" class="l">{escape(label)}</text>')
    return parts


def _share(rows: list[Row], peak: float) -> float:
    """The share of the float32 rate that steps with multiply-adds reach; 0 for none, and for types of a higher rate."""
    of = [x for x in rows if x.flop]
    seconds = sum(x.seconds for x in of)
    share = sum(x.flop for x in of) / (peak * seconds) if peak and seconds else 0.0
    return share if share <= HIGHEST else 0.0


def _summary(report: Report, total: float, peak: float) -> str:
    """The time of a run, and the share of the float32 rate that its products and convolutions reach."""
    share = _share(list(report.rows), peak)
    of = f", products and convolutions at {100 * share:.0f}% of the float32 rate" if share else ""
    return f"{text.time(report.seconds or total)} in {text.number(len(report.rows), 'step')}{of}"


def _kinds(report: Report, total: float) -> str:
    """Shares of the time by kinds of steps."""
    kinds: dict[str, float] = {}
    for x in report.rows:
        kinds[x.kind] = kinds.get(x.kind, 0.0) + x.seconds
    return ", ".join(f"{x} {100 * y / total:.1f}%" for x, y in sorted(kinds.items(), key=lambda item: -item[1]))
