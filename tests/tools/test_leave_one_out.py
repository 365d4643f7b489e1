"""bench/leave_one_out.py: stored figures are those of the present model, and say what they are said to."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace

import pytest
from places import BENCH

from portmm.schedule.text import parse
from portmm.target.model import CPU as MODEL

MODULES = ("exhaustive", "fit_cost", "leave_one_out")
WIDE = (
    "gemm:avx512:f32:14x32x1/14x32x178/392x224x267/392x5152x267:7-14:"
    "a=row,b=row,panels=1,over=tiles,lanes=0,prefetch=0,pack_a,pack_b,ahead"
)


@pytest.fixture(scope="module")
def bench():
    """The script as a module, with those that it imports."""
    sys.path.insert(0, str(BENCH))
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield importlib.import_module("leave_one_out")
    sys.path.remove(str(BENCH))
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_stored_figures_are_of_the_present_model(bench):
    kept = bench.stored()
    found = json.loads(json.dumps(bench.computed(bench.fits_of(kept))))
    for was, now in zip(kept["left_out"], found["left_out"], strict=True):
        assert was == now, f"{now['search']}: run bench/leave_one_out.py --write and bench/report.py --write"


def test_a_chip_that_is_left_out_is_unknown(bench):
    files = list(bench.left_out())
    assert {x.chip for x in files} >= {"zen4", "zen5", "sapphire_rapids"}
    assert not any(case.target.searches for x in files for case in x.cases)
    # A shared cache counts as a core's share, as on any chip that was never measured.
    level = files[0].cases[0].target.level("L3")
    assert files[0].cases[0].target.counted("L3") < level.bytes


def test_figures_are_ratios_of_stored_times(bench):
    x = next(bench.left_out())
    fit = {"tile_cycles": 10 * MODEL.tile_cycles}
    before = MODEL.tile_cycles
    made = bench.figures(x, fit)
    assert before == MODEL.tile_cycles
    assert [row["case"] for row in made["cases"]] == [case.name for case in x.cases]
    for case, row in zip(x.cases, made["cases"], strict=True):
        took = bench.seconds(case)
        assert row["of_best"] == round(min(took) / took[bench.choice(case)], bench.DIGITS) <= 1
        assert row["over_constant"] >= row["of_best"]
    assert any(row["of_best"] != row["refitted"] for row in made["cases"])


def test_a_constant_schedule_is_clipped_to_a_case(bench):
    case = next(bench.left_out()).cases[0]
    wide = parse(WIDE)
    few = parse(WIDE.replace("14x32", "4x32").replace("7-14", "4-4"))
    short = parse(WIDE.replace("14x32", "14x16"))
    wider = parse(WIDE.replace("14x32", "6x64").replace("7-14", "3-6"))
    once = parse(WIDE.replace("ahead", "once,ahead"))
    ready = parse(WIDE.replace("b=row", "b=packed").replace("pack_b,", ""))

    def found(*schedules, b="row"):
        tried = tuple(({"seconds": 1.0, "workers": 1}, s, None) for s in schedules)
        return bench.clipped(wide, replace(case, problem=replace(case.problem, b=b), tried=tried))

    assert found(few, wide, short) == 1
    assert found(short, few) == 1
    assert found(wider, once) is None
    assert found(ready, b="packed") == 0


def test_missed_bars_are_said(bench):
    rows = [{"case": "a", "of_best": 0.8, "over_constant": 1.2}, {"case": "b", "of_best": 1.0, "over_constant": 0.9}]
    said = "\n".join(bench.below({"left_out": [{"search": "x", "cases": rows}]}))
    assert "x: 0.894 of the best, lowest 0.800, 2 cases; the bar is 0.95" in said
    assert "    0.800 a" in said
    assert "x: 1.039 over the constant, lowest 0.900, 2 cases; the bar is 1.05" in said
    assert "    0.900 b" in said
