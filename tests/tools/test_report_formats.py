"""Reports as records, CSV and files."""

from __future__ import annotations

import csv
import io
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from portmm.cli import main
from portmm.comparison import Case, Entrant, Entry, Report, Result
from portmm.comparison.figures import duration, spread
from portmm.comparison.report import from_json
from portmm.comparison.text import COLUMNS, csv_text, markdown, records, write


@pytest.fixture
def report():
    samples = (1e-6, 2e-6, 3e-6, 4e-6, 5e-6)
    entries = {
        "portmm": Entry("ok", 3e-6, samples, "packed", "", 1e-6, 1e-5),
        "numpy": Entry("ok", 6e-6, tuple(2 * x for x in samples), "matmul", "", 2e-6, 1e-5),
        "bad": Entry("wrong", reason="error 1, exceeds 0.1"),
    }
    case = Case("llama", "layers", 4, 8, 16, b="col", packed=True, dtype="bf16", count=3)
    entrants = (Entrant("portmm", False, "ok"), Entrant("numpy", True, "ok"), Entrant("bad", True, "ok"))
    return Report("A chip", "zen5", 2, "avx2", "quick", entrants, (Result(case, entries, "numpy", 2.0, 600.0),), "2026")


def test_a_record_for_each_case_and_contender(report):
    ours, peer, bad = records(report)
    assert report.records() == [ours, peer, bad]
    assert all(tuple(row) == COLUMNS for row in (ours, peer, bad))
    assert (ours["case"], ours["group"], ours["m"], ours["n"], ours["k"]) == ("llama", "layers", 4, 8, 16)
    assert (ours["a"], ours["b"], ours["packed"], ours["dtype"], ours["count"]) == ("row", "col", True, "bf16", 3)
    assert (ours["contender"], ours["peer"], ours["method"]) == ("portmm", False, "packed")
    assert (ours["seconds"], ours["fastest"], ours["slowest"]) == (3e-6, 1e-6, 5e-6)
    assert ours["spread"] == pytest.approx(2 / 3)
    assert ours["gflops"] == pytest.approx(2 * 4 * 8 * 16 / 3e-6 / 1e9)
    assert (ours["best"], ours["ratio"], ours["ratio_spread"], ours["limit"]) == ("numpy", 2.0, 0.0, 600.0)
    assert (ours["chip"], ours["threads"], ours["isa"], ours["cold"]) == ("A chip", 2, "avx2", False)
    assert peer["peer"]
    assert (bad["state"], bad["reason"]) == ("wrong", "error 1, exceeds 0.1")
    assert bad["seconds"] is bad["gflops"] is bad["spread"] is bad["error"] is None


def test_csv_reads_back(report):
    rows = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert [row["contender"] for row in rows] == ["portmm", "numpy", "bad"]
    for row, record in zip(rows, records(report), strict=True):
        assert row == {name: "" if value is None else str(value) for name, value in record.items()}


def test_a_file_says_its_format(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "portmm.comparison.html", SimpleNamespace(page=lambda _: "<html></html>"))
    for suffix in ("json", "csv", "md", "HTML"):
        write(report, tmp_path / f"r.{suffix}")
    assert from_json((tmp_path / "r.json").read_text()) == report
    assert (tmp_path / "r.csv").read_text() == csv_text(report)
    assert (tmp_path / "r.md").read_text() == markdown(report)
    assert (tmp_path / "r.HTML").read_text() == "<html></html>"
    with pytest.raises(ValueError, match=r"r\.txt says no format; reports are written as \.json, \.csv"):
        write(report, tmp_path / "r.txt")
    with pytest.raises(ValueError, match="there is no folder"):
        write(report, tmp_path / "nowhere" / "r.json")


def test_the_command_saves_several(report, tmp_path, monkeypatch):
    monkeypatch.setattr("portmm.comparison.compare", lambda *_, **__: report)
    words = ["--save", str(tmp_path / "r.json"), "--save", str(tmp_path / "r.csv")]
    assert CliRunner().invoke(main.app, ["compare", *words], catch_exceptions=False).exit_code == 0
    assert sorted(x.name for x in tmp_path.iterdir()) == ["r.csv", "r.json"]


def test_tables_show_how_far_ratios_spread(report):
    head, _, row = next(x for x in markdown(report).split("\n\n") if x.startswith("| case")).splitlines()
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert (cells["spread"], cells["verdict"]) == ("0%", "win")


def test_spread_is_of_the_middle_half():
    assert spread([]) is spread([1.0]) is None
    assert spread([1.0, 1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(2 / 3)


def test_durations_are_for_people():
    assert [duration(x) for x in (2.5, 0.0123, 4.567e-5, 8e-9)] == ["2.5 s", "12.3 ms", "45.7 us", "8 ns"]
