"""The page of a comparison in a browser without a network: its layout, its script, its colours."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from itertools import combinations

import pytest
from comparisons import sample

from portmm.comparison.html import page

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
