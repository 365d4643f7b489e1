"""The watch over regressions: what is stored, what is a miss, and what is not judged. Nothing is timed."""

import importlib
import json
import sys
from dataclasses import replace

import driver
import machines
import pytest
from places import BENCH

from portmm.comparison.report import Entrant, Entry, Report, Result
from portmm.comparison.shapes import cases

pytestmark = pytest.mark.rest("scripts of bench/")

MODULES = ("regression", "instructions")
(CASE,) = cases("cube-64")


@pytest.fixture
def bench(monkeypatch):
    """The scripts as modules."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield type("Bench", (), {name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def again(bench, *measurements, version="numpy 2"):
    """Answers to `judge`, one after another, and how long each was to take."""
    asked = []

    def measure(longer):
        asked.append(longer)
        return {peer: bench.regression.Ratio(x, version) for peer, x in measurements[len(asked) - 1].items()}

    return measure, asked


# -- ratios ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "first", "second", "missed"),
    [
        (0.0, 0.96, None, False),  # within five percent
        (0.0, 0.94, 0.96, False),  # a miss that is none for longer
        (0.0, 0.94, 0.94, True),
        (0.03, 0.92, None, False),  # within three times the spread
        (0.03, 0.90, 0.90, True),
        (0.0, 2.0, None, False),
    ],
)
def test_a_ratio_is_missed_twice_or_not_at_all(bench, spread, first, second, missed):
    measure, asked = again(bench, {"numpy": first}, {"numpy": second})
    verdict = bench.regression.judge({"numpy": bench.regression.Row(1.0, spread, "numpy 2")}, measure)
    assert bool(verdict.misses) is missed
    assert asked == ([1] if second is None else [1, bench.regression.LONGER])
    assert verdict.ratios["numpy"].ratio == (first if second is None else second)
    if missed:
        assert verdict.misses[0].startswith(f"numpy: {first:.3f}, then {second:.3f} of its rate; stored 1.000")


def test_peers_are_judged_one_by_one(bench):
    rows = {name: bench.regression.Row(1.0, 0.0, "numpy 2") for name in ("numpy", "mkl", "onednn")}
    measure, _ = again(bench, {"numpy": 0.5, "mkl": 0.5, "onednn": 1.0}, {"numpy": 1.0, "mkl": 0.5, "onednn": 0.5})
    verdict = bench.regression.judge(rows, measure)
    assert [x.partition(":")[0] for x in verdict.misses] == ["mkl"]
    assert verdict.notes == ()


def test_absent_and_other_peers_are_not_judged(bench):
    rows = {name: bench.regression.Row(1.0, 0.0, "numpy 1") for name in ("numpy", "mkl")}
    measure, asked = again(bench, {"numpy": 0.1})
    verdict = bench.regression.judge(rows, measure)
    assert verdict.misses == ()
    assert verdict.notes[0].startswith("numpy was numpy 1 and is numpy 2")
    assert verdict.notes[1].startswith("mkl is not here")
    assert asked == [1]


def test_a_baseline_rests_on_several_runs(bench):
    runs = [
        {"numpy": bench.regression.Ratio(x, "numpy 2"), "mkl": bench.regression.Ratio(y, "mkl 3")}
        for x, y in ((1.00, 1.0), (1.02, 2.0), (0.97, 3.0))
    ]
    rows, noisy = bench.regression.rows_of(runs)
    assert rows == {"numpy": bench.regression.Row(1.0, 0.03, "numpy 2")}
    assert noisy == ["mkl: 1.000 to 3.000"]


def test_baselines_are_kept_case_by_case(bench, tmp_path):
    path = bench.regression.path_of("zen4", 2, tmp_path / "baselines")
    assert path.name == "zen4-2t.json"
    assert bench.regression.load(path) is None
    row = bench.regression.Row(1.25, 0.01, "numpy 2")
    bench.regression.store(path, {"b": {"numpy": row}, "a": {}}, machine="zen4")
    bench.regression.store(path, {"c": {"mkl": row}, "b": {"numpy": replace(row, ratio=2.0)}}, machine="zen4")
    assert bench.regression.load(path) == {"a": {}, "b": {"numpy": replace(row, ratio=2.0)}, "c": {"mkl": row}}
    assert json.loads(path.read_text())["machine"] == "zen4"


def report(*entries):
    """A comparison of one case; entries are (name, state, samples)."""
    entrants = [Entrant(name, name != "portmm", "ok", f"{name} 1") for name, *_ in entries]
    found = {name: Entry(state, 1.0, samples) for name, state, samples in entries}
    return Report("a chip", "tiny", 1, "", "x", tuple(entrants), (Result(CASE, found),))


def test_ratios_are_formed_within_rounds(bench, monkeypatch):
    made = report(
        ("portmm", "ok", (1.0, 2.0, 4.0)), ("numpy", "ok", (2.0, 2.0, 20.0)), ("mkl", "unsupported", ()),
        ("torch", "ok", (9.0, 9.0, 9.0)),
    )  # fmt: skip
    monkeypatch.setattr(bench.regression, "compare", lambda *_, **__: made)
    assert bench.regression.measure(CASE, 1) == {"numpy": bench.regression.Ratio(2.0, "numpy 1")}
    made = report(("portmm", "wrong", ()), ("numpy", "ok", (1.0,)))
    with pytest.raises(RuntimeError, match="portmm on cube-64"):
        bench.regression.measure(CASE, 1)


# -- instructions ----------------------------------------------------------------------------


def test_instructions_agree_within_a_percent(bench):
    row = bench.instructions.Row(1000, 500, 2.0, "a")
    for count, words in ((1010, ""), (990, ""), (1011, "1.1% more than the 1000 stored"), (500, "50.0% fewer")):
        said = bench.instructions.difference(row, replace(row, instructions=count))
        assert bool(said) is bool(words)
        assert words in said
    said = bench.instructions.difference(row, replace(row, instructions=2000, schedule="b"))
    assert "the schedule was a and is b" in said
    assert bench.instructions.difference(row, replace(row, operations=499))


def test_counts_are_kept_by_compiler(bench, tmp_path):
    path, row = tmp_path / "x" / "instructions.json", bench.instructions.Row(1000, 500, 2.0, "a")
    assert bench.instructions.load(path) == {}
    bench.instructions.store("gcc 12", {"a": row, "b": row}, path)
    bench.instructions.store("clang 14", {"a": row}, path)
    bench.instructions.store("gcc 12", {"b": replace(row, instructions=1)}, path)
    assert bench.instructions.load(path) == {
        "clang 14": {"a": row}, "gcc 12": {"a": row, "b": replace(row, instructions=1)}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "version", "name"),
    [
        ("gcc", "gcc (Debian 12.2.0-14+deb12u1) 12.2.0", "gcc 12"),
        ("clang", "Debian clang version 14.0.6", "clang 14"),
        ("zig", "zig 0.13.0", "zig 0.13"),
    ],
)
def test_compilers_are_told_by_what_code_depends_on(bench, monkeypatch, kind, version, name):
    found = type("Found", (), {"kind": kind, "version": version})
    monkeypatch.setattr(bench.instructions, "find_compiler", lambda _: found)
    assert bench.instructions.compiler() == name


def test_what_is_stored_is_what_is_counted(bench):
    stored = bench.instructions.load()
    assert stored
    for rows in stored.values():
        assert set(rows) <= set(bench.instructions.SUBJECTS)
        assert all(row.each == pytest.approx(row.instructions / row.operations, abs=1e-5) for row in rows.values())


def test_counting_repeats_itself_and_sees_more_work(bench, tmp_path):
    if not machines.runs_here("sse2"):
        pytest.skip("instructions are counted on x86-64")
    valgrind, program = machines.require("valgrind"), driver.compile_driver(tmp_path, ["gcc"])
    subject = bench.instructions.product("sse2", (8, 16, 16))
    one, two = (bench.instructions.count(subject, tmp_path, valgrind, program) for _ in range(2))
    assert one == two
    assert one.operations == 2 * 8 * 16 * 16
    more = bench.instructions.count(bench.instructions.product("sse2", (8, 16, 32)), tmp_path, valgrind, program)
    assert 1.5 * one.instructions < more.instructions < 2.5 * one.instructions
