"""Verdicts on ratios, shares of the limit, and the load: in records, as text, in every format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT
from rich.console import Console

from portmm.comparison import Case, Entrant, Entry, Report, Result
from portmm.comparison.figures import decided
from portmm.comparison.report import from_json, summaries
from portmm.comparison.text import explained, markdown, notes, records, terminal

SIZE = 64


def case(name):
    return Case(name, "cube", SIZE, SIZE, SIZE)


def result(name, peer, own=(1e-6,) * 5, limit=None, **more):
    """portmm takes `own` seconds, round by round, and its peer `peer`."""
    entries = {n: Entry("ok", sorted(x)[2], tuple(x), "gemm") for n, x in (("portmm", own), ("numpy", peer))}
    ratio = sorted(p / o for p, o in zip(peer, own, strict=True))[2]
    return Result(case(name), entries, "numpy", ratio, limit, **more)


RATE = 2 * SIZE**3 / 1e-6 / 1e9
"""GFLOP/s of portmm in these cases."""
WIN = result("won", (1.2e-6, 1.2e-6, 1.21e-6, 1.22e-6, 1.22e-6), limit=2 * RATE)
LOSS = result("lost", (0.8e-6, 0.8e-6, 0.8e-6, 0.81e-6, 0.82e-6))
NOISY = result("noisy", (0.5e-6, 0.8e-6, 1.3e-6, 2e-6, 4e-6))
EVEN = result("even", (1e-6,) * 5)
LOW = result("low", (0.5e-6,) * 5, limit=0.4 * RATE, roof="L2", load=1.75)
EVERY = (WIN, LOSS, NOISY, EVEN, LOW)
ENTRANTS = (Entrant("portmm", False, "ok", "portmm 1"), Entrant("numpy", True, "ok", "numpy 2"))


def report(*results, **more):
    return Report("A chip", "zen5", 1, "", "custom", ENTRANTS, results or EVERY, "2026-01-01", **more)


def shown(found, width=140):
    with Path("/dev/null").open("w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(terminal(found, width))
    return console.export_text()


def line(text, name):
    return next(x for x in text.splitlines() if x.lstrip("| ").startswith(name))


@pytest.mark.parametrize(
    ("ratio", "spread", "expect"),
    [(1.019, 0.02, False), (1.03, 0.02, True), (0.97, 0.02, True), (1.0, 0.0, False), (0.5, 0.9, True),
     (2.9, 1.93, False), (0.35, 1.93, False), (1.01, None, True)],
)  # fmt: skip
def test_a_ratio_counts_if_it_is_farther_from_one_than_it_spreads(ratio, spread, expect):
    assert decided(ratio, spread) == expect


def test_a_ratio_within_its_spread_is_a_draw_in_every_format():
    found = report()
    expect = dict(zip((r.case.name for r in EVERY), ("win", "loss", "draw", "draw", "loss"), strict=True))
    assert {r.case.name: found.verdict(r) for r in found.results} == expect
    assert {x["case"]["name"]: x["verdict"] for x in json.loads(found.to_json())["results"]} == expect
    assert {x["case"]: x["verdict"] for x in records(found)} == expect
    text, page = shown(found), markdown(found)
    for name, verdict in expect.items():
        assert f"| {verdict} |" in line(page, name)
        assert ("= " in line(text, name)) == (verdict == "draw")
    (summary,) = summaries(found)
    assert (summary.count, summary.wins, summary.draws, summary.losses) == (5, 1, 2, 2)
    assert "| cube | 5 | " in page
    assert "| 1 | 2 | 2 |" in line(page, "cube")
    assert line(text, "cube").split()[3:6] == ["1", "2", "2"]


def test_no_share_is_above_the_whole():
    found = report()
    assert found.share(WIN) == pytest.approx(0.5)
    assert found.ceiling(LOW) == pytest.approx(2 * RATE)  # the peer's rate, twice that of portmm
    assert found.share(LOW) == pytest.approx(0.5)
    assert found.share(EVEN) is None
    assert found.exceeded == ("low",)
    (said,) = [x for x in notes(found) if x.startswith("the limit is the fastest contender's rate")]
    assert said.endswith(": low")
    assert line(shown(found), "low").split()[-1] == "50"
    assert line(markdown(found), "low").endswith("| 50 |")
    assert all(x["gflops"] <= x["limit"] for x in records(found) if x["limit"])
    # One that rounds activations computes something else.
    rough = replace(found, entrants=(ENTRANTS[0], replace(ENTRANTS[1], approximate=True)))
    assert rough.ceiling(LOW) == pytest.approx(RATE)


def test_stored_results_keep_their_meaning():
    """Fields that older files lack say so; verdicts and spreads follow from the samples."""
    found = report(load=0.25, cores=8)
    assert from_json(found.to_json()) == found
    table = json.loads(found.to_json())
    assert (table["load"], table["cores"], table["results"][4]["roof"]) == (0.25, 8, "L2")
    table["results"][0]["verdict"] = "loss"
    assert from_json(json.dumps(table)) == found
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and "entrants" in data:
            old = from_json(path.read_text())
            assert (old.load, old.cores) == (data.get("load"), data.get("cores", 0))
            assert all(x is None or x <= 1 for x in map(old.share, old.results))
            assert json.loads(old.to_json()).keys() == data.keys()


def test_one_line_explains_ratio_spread_and_limit():
    said = explained(report())
    assert "\n" not in said
    for word in ("ratio", "spread", "draw (=)", "% limit"):
        assert word in said
    assert "% limit" not in explained(report(EVEN))
    assert explained(report(replace(EVEN, ratio=None))) == ""
    assert said in " ".join(shown(report()).split())
    assert said in markdown(report())


@pytest.mark.parametrize(("load", "busy"), [(0.02, False), (1.5, True)])
def test_the_load_is_told_at_the_end(load, busy):
    found = report(load=load, cores=2)
    assert f"{load} of 2 cores" in notes(found)[-1]
    assert ("the machine was busy" in notes(found)[-1]) == busy
    assert notes(found)[-1] in " ".join(shown(found).split())
    assert not any("machine" in x for x in notes(report()))


def test_cases_are_named_and_their_shapes_go_first_where_there_is_no_room():
    wide, narrow = shown(report(), 140), shown(report(), 56)
    assert "MxNxK" in wide
    assert "MxNxK" not in narrow
    for text in (wide, narrow):
        for r in EVERY:
            assert f"{RATE:.0f}" in line(text, r.case.name)
    assert max(map(len, narrow.splitlines())) <= 56
