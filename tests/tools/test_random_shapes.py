"""Random suites: the same seed is the same suite, within its bounds, with every kind of case; other seeds differ."""

from __future__ import annotations

from itertools import product

import pytest
from bench_scripts import script
from typer.testing import CliRunner

from portmm.cli import main
from portmm.comparison import cases
from portmm.comparison.case import LAYOUTS
from portmm.comparison.random_shapes import COUNT, MOST, MOST_BYTES, MOST_FLOPS, NARROW, SUITES, drawn, seeded
from portmm.comparison.report import from_json

SEEDS = range(40)


@pytest.mark.parametrize("suite", SUITES)
def test_a_seed_is_a_suite(suite):
    once = [cases(suite, seed) for seed in SEEDS]
    assert once == [cases(suite, seed) for seed in SEEDS]
    assert len({tuple((c.m, c.n, c.k) for c in some) for some in once}) == len(SEEDS)
    assert len({c.name for some in once for c in some}) == COUNT * len(SEEDS)


@pytest.mark.parametrize("suite", SUITES)
def test_cases_are_within_bounds(suite):
    for case in (c for seed in SEEDS for c in drawn(suite, seed)):
        assert min(case.m, case.n, case.k) >= 1, case
        assert max(case.m, case.n, case.k) <= MOST, case
        assert case.flops <= MOST_FLOPS, case
        assert case.bytes <= MOST_BYTES, case
        assert case.batch == 1 or not case.packed, case
        assert not case.block or case.k % case.block == 0, case
        assert case.problem.flops == case.flops


def test_all_kinds_of_sizes_and_layouts_occur():
    some = [c for seed in SEEDS for c in drawn("random", seed)]
    sizes = [x for c in some for x in (c.m, c.n, c.k)]
    # As many below the geometric middle as above it, but for those that the bounds leave out.
    assert 0.4 < sum(x <= 64 for x in sizes) / len(sizes) < 0.7
    assert 0.25 < sum(x % 8 == 0 for x in sizes) / len(sizes) < 0.6
    assert {(c.a, c.b, c.c) for c in some} == set(product(LAYOUTS, repeat=3))
    for share in (sum(c.packed for c in some), sum(c.batch > 1 for c in some)):
        assert 0.1 < share / len(some) < 0.35
    narrow = drawn("random-narrow", 3)
    assert {c.group for c in narrow} == {f"random-{group}" for group, _ in NARROW}
    assert {c.dtype for c in narrow} == {more["dtype"] for _, more in NARROW}


def test_reports_and_tables_name_them(tmp_path):
    path = tmp_path / "report.json"
    words = ["compare", "tiny-4,random", "--seed", "5", "--budget", "1", "--rounds", "1", "--peers", "numpy"]
    done = CliRunner().invoke(main.app, [*words, "--save", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = from_json(path.read_text())
    assert report.suite == "tiny-4,random (seed 5)"
    named = {*report.skipped, *(r.case.name for r in report.results)}
    assert named == {"tiny-4", *(c.name for c in drawn("random", 5))}
    assert seeded("quick", 5) == "quick"
    assert {script("ratio_tables").kind(c) for c in drawn("random", 5)} == {"f32, random shapes"}


def test_a_seed_is_not_negative():
    with pytest.raises(ValueError, match="seed is -1"):
        cases("random", -1)
