"""The page of a comparison in a browser without a network: its layout, its script, its colours."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import combinations

import pytest
from comparisons import noisy, sample
from places import BENCH

from portmm.comparison.html import page
from portmm.comparison.report import from_json
from portmm.comparison.roofline import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH

pytestmark = pytest.mark.rest("a browser")

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
PROBE = """<script>
const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
const boxes = (query) => [...document.querySelectorAll(query)].map((e) => [e.textContent, ...box(e)]);
const seen = {
  wide: [document.documentElement.scrollWidth, innerWidth],
  texts: boxes("figure text:not([transform]), .legend li"),
  slanted: [...document.querySelectorAll("figure text[transform]")].map((e) => {
    const b = e.getBBox();
    const turn = e.transform.baseVal[0].angle;
    return [e.textContent, turn, +e.getAttribute("x"), +e.getAttribute("y"), b.x, b.y, b.width, b.height];
  }),
  figure: box(document.querySelector("figure")),
  words: boxes("article h4, article p, article li b, article li span").slice(0, 200),
  bars: boxes("article i").slice(0, 40),
  cut: [...document.querySelectorAll("article b, article h4")].filter((e) => e.scrollWidth > e.clientWidth)
    .map((e) => e.textContent),
  tools: !document.getElementById("tools").hidden,
  saved: document.getElementById("save").href.slice(0, 5),
};
const visible = () => document.querySelectorAll("article:not([hidden])").length;
const counts = {};
for (const kind of ["loss", "win", "bad", ""]) {
  document.getElementById("kind").value = kind;
  document.getElementById("kind").dispatchEvent(new Event("change"));
  counts[kind] = visible();
}
seen.counts = counts;
const table = document.querySelector("table.all");
const at = [...table.tHead.rows[0].cells].findIndex((x) => x.textContent === "ratio");
table.tHead.rows[0].cells[at].querySelector("button").click();
seen.sorted = [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
const out = document.createElement("pre");
out.id = "seen";
out.textContent = JSON.stringify(seen);
document.body.append(out);
</script></body>"""
LABELS = """<script>
const plot = document.querySelector("figure svg[role=img]");
const back = plot.getScreenCTM().inverse();
const labels = [...plot.querySelectorAll("text")].map((e) => {
  const b = e.getBBox();
  const to = back.multiply(e.getScreenCTM());
  const corners = [[b.x, b.y], [b.x + b.width, b.y], [b.x + b.width, b.y + b.height], [b.x, b.y + b.height]];
  const placed = corners.map(([x, y]) => new DOMPoint(x, y).matrixTransform(to)).map((p) => [p.x, p.y]);
  return [e.textContent, e.getAttribute("class"), placed];
});
const out = document.createElement("pre");
out.id = "seen";
out.textContent = JSON.stringify(labels);
document.body.append(out);
</script></body>"""
PHONE = """<script>
const wide = (e) => e.getBoundingClientRect().width > document.documentElement.clientWidth;
const scrolls = (e) => e && (getComputedStyle(e).overflowX === "auto" || scrolls(e.parentElement));
const loose = [...document.querySelectorAll("main *, header *, footer *")]
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e));
const out = document.createElement("pre");
out.id = "seen";
out.textContent = JSON.stringify({
  body: [document.documentElement.scrollWidth, innerWidth],
  loose: loose.map((e) => e.outerHTML.slice(0, 80)),
  wide: [...document.querySelectorAll("table")].filter(wide).map((e) => e.caption.textContent),
  small: [...document.querySelectorAll("main *, header *")]
    .filter((e) => e.childNodes.length && e.childNodes[0].nodeType === 3 && e.childNodes[0].data.trim())
    .filter((e) => e.getBoundingClientRect().height && !e.closest("script,style,option,.all caption"))
    .filter((e) => {
      const to = e.closest("svg") ? e.getScreenCTM() : { a: 1, b: 0 };
      return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(to.a, to.b) < 10;
    }).map((e) => e.outerHTML.slice(0, 80)),
});
document.body.append(out);
</script></body>"""
STORED = BENCH / "results"
LIGHT, DARK = (
    {"us": 0x0067A5, "best": 0xC24E00, "paper": 0xFFFFFF},
    {"us": 0x58B4EE, "best": 0xFF9147, "paper": 0x14171A},
)


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Runs a browser without a network on a page: browse(text, width, height, *options) -> its output."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no browser is installed, of {', '.join(BROWSERS)}")
    place = tmp_path_factory.mktemp("pages")

    def run(text, width, height, *options):
        (place / "page.html").write_text(text, encoding="utf-8")
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        words += [f"--user-data-dir={place / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        words += [f"--window-size={width},{height}", *options, (place / "page.html").as_uri()]
        return subprocess.run([found, *words], capture_output=True, text=True, check=True, timeout=120).stdout

    return run


def overlaps(boxes):
    """Pairs of boxes (text, left, top, right, bottom) that share more than a touch."""
    return [
        (a[0], b[0])
        for a, b in combinations(boxes, 2)
        if min(a[3], b[3]) - max(a[1], b[1]) > 1 and min(a[4], b[4]) - max(a[2], b[2]) > 3
    ]


def upright(row):
    """The box of a turned label in axes that are turned alike."""
    text, turn, ax, ay, x, y, width, height = row
    c, s = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    left, top = ax * c + ay * s + x - ax, ay * c - ax * s + y - ay
    return text, left, top, left + width, top + height


@pytest.mark.parametrize("width", [1200, 800])
def test_a_browser_lays_it_out(browse, width):
    report = sample(40)
    shown = browse(page(report).replace("</body>", PROBE), width, 2000, "--dump-dom")
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', shown)[1].replace("&amp;", "&"))
    assert seen["wide"] == [width, width]
    assert [text for text, *_ in seen["slanted"]] == ["L1 212 GB/s", "L2 111, L3 100 GB/s", "memory 30 GB/s"]
    assert len({turn for _, turn, *_ in seen["slanted"]}) == 1
    assert overlaps([upright(row) for row in seen["slanted"]]) == []
    assert overlaps(seen["texts"]) == []
    left, _, right, bottom = seen["figure"]
    for text, a, _, b, low in seen["texts"]:
        assert left - 1 <= a <= b <= right + 1, text
        assert low <= bottom + 1, text
    assert overlaps(seen["words"]) == []
    assert all(right - left > 60 for _, left, _, right, _ in seen["bars"])
    assert seen["cut"] == []
    assert seen["tools"]
    assert seen["saved"] == "blob:"
    wins = sum(r.ratio >= 1 for r in report.results)
    assert seen["counts"] == {"loss": 40 - wins, "win": wins, "bad": 1, "": 40}
    ratios = [float(text.split()[-1]) for text in seen["sorted"]]
    assert ratios == sorted(ratios, reverse=True)


def seen_by(browse, report, script, width):
    shown = browse(page(report).replace("</body>", script), width, 2000, "--dump-dom")
    return json.loads(re.search(r'<pre id="seen">(.*?)</pre>', shown)[1].replace("&lt;", "<").replace("&amp;", "&"))


@pytest.mark.parametrize("rounds", [1, 5])
def test_a_phone_shows_it(browse, rounds):
    """Wide tables and the plot scroll by themselves, and nothing is too small to be read."""
    report = noisy(sample(40), rounds)
    seen = seen_by(browse, report, PHONE, 380)
    assert seen["body"] == [380, 380]
    assert seen["loose"] == []
    assert seen["small"] == []
    assert "Rates in GFLOP/s" in seen["wide"]


def apart(a, b):
    """Whether an edge of one convex polygon separates it from the other, but for a touch."""
    for polygon in (a, b):
        for (x, y), (u, v) in zip(polygon, (*polygon[1:], polygon[0]), strict=True):
            across = [[(px * (v - y) - py * (u - x)) / math.hypot(u - x, v - y) for px, py in c] for c in (a, b)]
            if min(map(max, across)) - max(map(min, across)) <= 1:
                return True
    return False


def stored(name, group="", threads=0):
    """A stored report: all of it, or cases of a group or name, as if for more threads."""
    report = from_json((STORED / f"{name}.json").read_text())
    own = tuple(r for r in report.results if group in ("", r.case.group, r.case.name))
    return replace(report, results=own, threads=threads or report.threads)


@pytest.mark.parametrize("width", [1200, 800, 380])
@pytest.mark.parametrize(
    "part",
    [
        ("zen5-1t-f32",),
        ("zen4-1t-narrow-quantised",),
        ("sapphire_rapids-1t-narrow-packed",),
        ("sapphire_rapids-1t-f32-quick", "bert"),
        ("sapphire_rapids-1t-narrow-packed", "bf16-llama-down-m16-packed"),
        ("zen4-1t-narrow-quantised", "w4a8-llama-down-m1"),
        ("zen4-avx2-1t-narrow-packed", "int4-dynamic"),
        ("zen4-avx2-1t-narrow-packed", "", 8),
        ("zen5-1t-f32", "llama-m1-kv"),
    ],
    ids=lambda part: "-".join(map(str, part)),
)
def test_labels_of_the_roofline_keep_clear(browse, part, width):
    """Rotated ones too: of one another, of the numbers at the axes, and of the frame."""
    labels = seen_by(browse, stored(*part), LABELS, width)
    assert [(a[0], b[0]) for a, b in combinations(labels, 2) if not apart(a[2], b[2])] == []
    for text, kind, corners in labels:
        edges = (LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM) if kind == "label" else (0, 0, WIDTH, HEIGHT)
        for x, y in corners:
            assert edges[0] <= x <= edges[2], text
            assert edges[1] <= y <= edges[3], text


@pytest.mark.parametrize(("palette", "options"), [(LIGHT, ()), (DARK, ("--blink-settings=preferredColorScheme=0",))])
def test_a_screenshot_shows_the_plot_and_the_bars(browse, tmp_path, palette, options):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    text, shot = page(sample(40)), tmp_path / "shot.png"
    browse(text, 1200, 2000, f"--screenshot={shot}", *options)
    picture = (255 * pyplot.imread(shot)[..., :3]).round()
    assert picture.shape == (2000, 1200, 3)
    shown = browse(text.replace("</body>", PROBE), 1200, 2000, "--dump-dom")
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', shown)[1].replace("&amp;", "&"))

    def share(name, left, top, right, bottom):
        colour = [palette[name] >> shift & 255 for shift in (16, 8, 0)]
        part = picture[round(top) : round(bottom), round(left) : round(right)]
        return (abs(part - colour).max(axis=-1) <= 8).mean()

    plot = seen["figure"]
    assert plot[3] < 2000
    assert 0.6 < share("paper", *plot) < 0.99
    assert share("us", *plot) > 0.001
    assert share("best", *plot) > 0.0005
    own = [row for row in seen["bars"] if row[4] < 2000]
    assert own
    for name, least in (("us", 0.4), ("best", 0.2)):
        assert max(share(name, *row[1:]) for row in own) > least
