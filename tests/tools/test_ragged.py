"""bench/ragged.py: what counts as a step of time against M, and a small run of all of it."""

from __future__ import annotations

import importlib
import json
import sys
import xml.etree.ElementTree as ET

import pytest
from places import BENCH

pytestmark = pytest.mark.rest("scripts of bench/")


@pytest.fixture
def bench(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PORTMM_RACE", "off")
    monkeypatch.delitem(sys.modules, "ragged", raising=False)
    return importlib.import_module("ragged")


def test_a_time_in_proportion_has_no_steps(bench):
    assert bench.suspects([3.0 + m for m in range(1, 60)]) == []
    assert bench.suspects([float(m) for m in range(1, 60)]) == []


def test_steps_and_humps_are_found(bench):
    """From M = 4 to 5, time grows by half, and M = 7 takes longer than M = 8."""
    assert bench.suspects([10.0, 10.0, 10.0, 10.0, 15.0, 15.0, 18.0, 15.0]) == [(4, 5), (8, 7)]


def test_rows_of_an_atom_are_padded(bench):
    """An atom of 16 rows takes twice as long from 17 rows on, and that is its share."""
    assert bench.suspects([1.0] * 16 + [2.0] * 16, 16) == []
    assert bench.suspects([1.0] * 16 + [2.0] * 16, 1) == [(16, 17)]
    assert bench.excess(16, 17, 2.0, 16) == 1.0
    assert bench.excess(16, 17, 2.0, 1) == pytest.approx(2.0 * 16 / 17)
    assert bench.excess(9, 8, 1.2) == 1.2


def test_a_small_run_is_kept_and_drawn(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "SIZES", ((40, 24),))
    monkeypatch.setattr(bench, "SECONDS", 1e-5)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    for folder in ("bench/results", "docs/images"):
        (tmp_path / folder).mkdir(parents=True)
    status = bench.main(["--most", "5", "--rounds", "1", "--save"])
    (path,) = (tmp_path / "bench" / "results").iterdir()
    (plot,) = (tmp_path / "docs" / "images").iterdir()
    found = json.loads(path.read_text())["ragged"]
    assert [(x["k"], x["n"], x["packed"], len(x["seconds"])) for x in found] == [(40, 24, False, 5), (40, 24, True, 5)]
    assert status == any(x["steps"] for x in found)
    assert all({"m", "beside", "excess", "schedules"} == set(step) for x in found for step in x["steps"])
    root = ET.fromstring(plot.read_text())  # noqa: S314 - it was written here
    lines = [x for x in root.iter() if x.tag.endswith("polyline")]
    assert [len(x.get("points").split()) for x in lines] == [5, 5]
    assert "K = 40, N = 24, B packed" in capsys.readouterr().out
