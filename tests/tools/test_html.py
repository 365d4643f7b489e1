"""The page of a comparison: whole, self-contained and true to the numbers."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from comparisons import PEERS, RATES, noisy, ran, sample

from portmm.comparison import Case, Entrant, Entry, Report, Result
from portmm.comparison.html import fragment, page
from portmm.comparison.report import from_json
from portmm.comparison.roofline import levels, peaks, roofline

HOSTILE = "</script><script>alert('1')</script><img src=x onerror=\"alert(2)\"> & ]]>"


def altered(**changes):
    """A small report with fields of all its entries replaced."""
    small = sample(4)
    kept = [{n: replace(e, **changes) if e.state == "ok" else e for n, e in r.entries.items()} for r in small.results]
    return replace(
        small, results=tuple(replace(r, entries=e, ratio=None) for r, e in zip(small.results, kept, strict=True))
    )


def with_results(**changes):
    small = sample(4)
    return replace(small, results=tuple(replace(r, **changes) for r in small.results))


class Reader(HTMLParser):
    """Elements, attributes and text of a page; fails where elements do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words, self.scripts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] in ("script", "style") else self.words).append(data)


def parsed(svg):
    return ET.fromstring(svg)  # noqa: S314


def drawings(text):
    return [parsed(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def rows(text):
    return re.findall(r"<tr data-name=.*?</tr>", text)


# -- what it says -----------------------------------------------------------------


def test_everything_is_there():
    report = sample()
    text = page(report)
    read, drawn = Reader(text), drawings(text)
    words = "\n".join(read.words)
    assert len(text.encode()) <= 1_000_000
    assert len(drawn) > len({r.case.group for r in report.results})
    assert len(rows(text)) == read.tags.count("article") == len(report.results)
    for r in report.results:
        assert words.count(r.case.name) >= 2
    for piece in ("A chip", "1 thread", "2026-01-01", "no liblost.so", "pip install lost", "left-out", "OMP_X"):
        assert piece in words
    for i in range(7, 200, 50):
        assert f"off by much in case {i}\n" in words
        assert f"signal {i}\n" in words
    assert all(f"{name} 1.2.3" in words for name in PEERS)


def test_losses_show_as_wins_do():
    report = sample(40)
    text = page(report)
    for kind, won in (("win", True), ("loss", False)):
        own = [r for r in report.results if (r.ratio >= 1) == won]
        assert own
        assert text.count(f'<tr data-name="{own[0].case.name} ') == 1
        assert sum(f'class="verdict {kind}"' in row for row in rows(text)) == len(own)
        assert len(re.findall(rf'<g class="case {kind}">', text)) == len(own)
    wins = sum(r.ratio >= 1 for r in report.results)
    assert f"▲ {wins} win" in text
    assert f"▼ {40 - wins} loss" in text


def test_draws_are_marked_and_counted():
    report = noisy(sample(40))
    text = page(report)
    words = [report.verdict(r) for r in report.results]
    assert min(map(words.count, ("win", "draw", "loss"))) > 1
    for kind, mark in (("win", "▲"), ("draw", "="), ("loss", "▼")):
        count = words.count(kind)
        assert sum(f'class="verdict {kind}"' in row for row in rows(text)) == count
        assert sum(f'data_state="{kind}'.replace("_", "-") in row for row in rows(text)) == count
        assert len(re.findall(rf'<g class="case {kind}">', text)) == count
        assert f"{mark} {count} {kind}" in text
    assert text.count('class="drawn"') >= words.count("draw")
    assert f'<td class="n">{words.count("draw")}</td>' in fragment(report)


def test_the_summary_comes_first_and_contenders_below():
    text = page(noisy(sample(8)))
    order = [text.index(f'<h2 id="{x}"') for x in ("summary", "roofline", "every-case", "all-figures", "contenders")]
    assert order == sorted(order)
    assert "numpy 1.2.3" not in text[: order[0]]
    assert text.index("numpy 1.2.3") > order[-1]
    assert "The machine was busy (others kept 0.88 of 2 cores busy)" in text[: order[1]]


def test_the_table_has_spread_and_load_and_no_share_above_the_whole():
    report = noisy(sample(40))
    low = replace(report, results=tuple(replace(r, limit=1.0) for r in report.results))
    text = page(low)
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)</th>", text[text.index('class="all"') :])
    at = {name: heads.index(name) for name in ("ratio", "spread", "% of limit", "load", "portmm")}
    for row, r in zip(rows(text), low.results, strict=True):
        cells = [re.sub("<[^>]*>", "", x) for x in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        assert cells[at["spread"]] == f"{100 * low.spread(r):.0f}%"
        assert cells[at["load"]] == f"{r.load:.2f}"
        assert 0 < float(cells[at["% of limit"]]) <= 100
    assert "Load is the number of cores" in text
    assert "Load is the number of cores" not in page(sample(4))
    assert f"{low.results[0].case.name}, " in text[text.index("The limit is the fastest contender") :]


def test_the_roof_of_a_type_is_the_one_that_its_cases_name():
    report = noisy(sample(4))
    report = replace(report, rates={**report.rates, "avx512_f32x4": 300.0})
    assert peaks(report) == {"avx512_f32": 116.0}
    assert "limit 116 by avx512_f32" in page(report)


def test_it_is_its_own_data():
    report = altered(method=HOSTILE)
    held = re.search(r'<script type="application/json" id="report">(.*?)</script>', page(report), re.DOTALL)[1]
    assert from_json(held) == report


def test_it_fetches_nothing():
    read = Reader(page(sample(8)))
    linked = ("src", "href", "action", "data", "poster", "srcset", "xlink:href")
    assert {value for _, name, value in read.attributes if name in linked} == {"data:,"}
    assert {value for _, name, value in read.attributes if "://" in value} == {"http://www.w3.org/2000/svg"}
    code = "".join(read.scripts)
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttpRequest|import\(", code)
    assert any("default-src 'none'" in value for _, _, value in read.attributes)
    assert "prefers-color-scheme: dark" in code
    assert "@media print" in code


def test_foreign_text_stays_text():
    small = sample(3)
    entries = {HOSTILE: Entry("crashed", reason=HOSTILE), "portmm": ran(small.results[0].case, 1.0)}
    case = replace(small.results[0].case, name=HOSTILE, group=HOSTILE)
    bad = Result(case, entries, HOSTILE, 0.5, None)
    entrants = (
        *small.entrants,
        Entrant(HOSTILE, True, "ok", HOSTILE),
        Entrant("x", True, "missing", "", HOSTILE, HOSTILE),
    )
    report = replace(
        small, chip=HOSTILE, suite=HOSTILE, entrants=entrants, results=(bad, *small.results), skipped=(HOSTILE,),
        removed=(HOSTILE,), rates=RATES | {HOSTILE: 5.0},
    )  # fmt: skip
    text = page(report)
    read = Reader(text)
    assert read.tags.count("script") == 2
    assert "img" not in read.tags
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert HOSTILE in "".join(read.words)
    assert drawings(text)
    assert "script" not in Reader(fragment(report)).tags


BARE = Report("", "", 1, "", "", (), ())
WITHOUT = {
    "anything": BARE,
    "results": replace(sample(4), results=()),
    "portmm": replace(with_results(ratio=None), entrants=sample(0).entrants[1:]),
    "peers": replace(with_results(best="", ratio=None), entrants=sample(0).entrants[:1]),
    "rates": replace(sample(4), rates={}),
    "bandwidths": replace(sample(4), rates={"avx512_f32": 116.0}),
    "atoms": replace(sample(4), rates={"memory": 30.0}),
    "limits": with_results(limit=None),
    "samples": altered(samples=()),
    "time": altered(seconds=0.0),
    "a number for a time": altered(seconds=math.nan, samples=(math.nan,)),
    "a number for a ratio": with_results(ratio=math.nan, limit=math.nan),
    "a positive ratio": with_results(ratio=0.0, limit=-1.0),
    "a finite ratio": with_results(ratio=math.inf, limit=math.inf),
    "number in its rates": replace(sample(4), rates={"avx512_f32": math.nan, "memory": math.inf, "L1": 0.0}),
}


@pytest.mark.parametrize("report", WITHOUT.values(), ids=WITHOUT)
def test_it_does_without(report):
    text = page(report)
    read = Reader(text)
    drawings(text)
    assert not [x for _, name, x in read.attributes if name != "content" and re.search(r"\b(nan|inf)\b", x)]
    assert "nan" not in "".join(read.words).split()
    assert read.tags.count("article") == len(report.results)
    Reader(fragment(report))


def test_what_was_not_timed_is_named():
    assert page(WITHOUT["time"]).count("not timed") >= 4


def test_a_notebook_shows_a_fragment():
    report = sample(8)
    text = report._repr_html_()
    read = Reader(text)
    assert not {"html", "body", "script", "article"} & set(read.tags)
    assert len(rows(text)) == 8
    assert all(line.startswith(".portmm-compare") for line in "".join(read.scripts).splitlines())
    assert "off by much in case 7" in text


# -- the roofline -----------------------------------------------------------------


def scale(svg, axis):
    """Reads a coordinate of the plot as a value, by two of its ticks."""
    # Words beside the vertical axis stand a little below their lines.
    drop = 4 if axis == "y" else 0
    marks = [
        (float(t.get(axis)) - drop, math.log10(float(t.text))) for t in svg.iter() if t.get("class") == f"{axis} tick"
    ]
    (p, u), (q, v) = min(marks), max(marks)
    return lambda place: 10 ** (u + (float(place) - p) * (v - u) / (q - p))


@pytest.fixture(scope="module")
def plotted():
    report = replace(sample(12), threads=2)
    svg = parsed(roofline(report).replace(' xmlns="http://www.w3.org/2000/svg"', ""))
    return report, svg, scale(svg, "x"), scale(svg, "y")


def test_points_lie_where_the_numbers_say(plotted):
    report, svg, x, y = plotted
    cases = [g for g in svg.findall("g") if (g.get("class") or "").startswith("case")]
    assert len(cases) == len(report.results)
    for r, g in zip(report.results, cases, strict=True):
        ours, best = g.find("circle"), g.find("path")
        px, py = re.match(r"M([\d.]+) ([\d.]+)", best.get("d")).groups()
        assert x(ours.get("cx")) == pytest.approx(r.case.flops / r.case.bytes, rel=0.01)
        assert x(px) == pytest.approx(x(ours.get("cx")), rel=0.01)
        assert y(ours.get("cy")) == pytest.approx(r.gflops("portmm"), rel=0.01)
        assert y(float(py) + 5) == pytest.approx(r.gflops(r.best), rel=0.01)
        assert r.case.name in g.find("title").text
        assert f"{r.ratio:.2f}" in g.find("title").text


def test_roofs_are_the_measured_rates(plotted):
    report, svg, x, y = plotted
    assert levels(report) == {"L1": 424.0, "L2": 222.0, "L3": 200.0, "memory": 34.0}
    flat = [line for line in svg.iter("line") if line.get("class") == "level"]
    assert sorted(y(line.get("y1")) for line in flat) == pytest.approx(sorted(peaks(report).values()), 0.01)
    slanted = [line for line in svg.iter("line") if line.get("class") == "slope"]
    for line, bandwidth in zip(slanted, levels(report).values(), strict=True):
        for end in "12":
            found = y(line.get(f"y{end}")) / x(line.get(f"x{end}"))
            assert found == pytest.approx(bandwidth, rel=0.015)


def test_the_roof_of_a_type_is_the_one_its_limits_name():
    case = Case("w8", "int8", 64, 64, 64, dtype="u8-s8-s32")
    rates = {"avx512vnni_u8s8": 465.0, "avx512_f32": 116.0, "avx512_s16": 196.0}
    report = replace(BARE, threads=2, rates=rates, results=(Result(case, {}, limit=930.0),))
    assert peaks(report) == {"avx512vnni_u8s8": 930.0}
    assert peaks(replace(report, results=(Result(replace(case, dtype="f32"), {}, limit=3.0),))) == {"avx512_f32": 232.0}
