"""Tables say what stored results say, and those of the repository are up to date; a saved comparison is printed."""

from __future__ import annotations

import json

import pytest
from bench_scripts import script
from places import ROOT
from typer.testing import CliRunner

from portmm.cli import main
from portmm.comparison.case import Case
from portmm.comparison.report import from_json
from portmm.comparison.shapes import cases
from portmm.comparison.text import markdown
from portmm.host.detect import host

tables = script("report")
kind = script("ratio_tables").kind

REPORT = {
    "schema": 1, "chip": "A chip", "machine": "tiny", "threads": 1, "isa": "", "suite": "full", "date": "2026-01-02",
    "entrants": [
        {"name": "portmm", "peer": False, "state": "ok", "version": "portmm 0"},
        {"name": "peer", "peer": True, "state": "ok", "version": "peer 1"},
    ],
    "results": [
        {
            "case": {"name": name, "group": group, "m": 2, "n": 2, "k": 2},
            "entries": {who: {"state": "ok", "seconds": 1.0, "samples": []} for who in ("portmm", "peer")},
            "best": "peer", "ratio": ratio, "limit": None,
        }
        for name, group, ratio in (("cube-2", "cube", 2.0), ("cube-3", "cube", 0.5), ("odd-2", "odd", 1.5))
    ],
    "skipped": [], "removed": [], "rates": {},
}  # fmt: skip
NARROW_REPORT = json.loads(json.dumps(REPORT).replace('"k": 2', '"k": 2, "dtype": "bf16"'))
SEARCH = [
    {"case": "x", "schedule": "s", "workers": 1, "seconds": 2.0, "chosen": True},
    {"case": "x", "schedule": "t", "workers": 1, "seconds": 1.0, "chosen": False},
]
CLIFF_ROWS = [
    {"isa": "sse2", "dtype": "f16", "layout": "col", "m": 1, "share": 0.25},
    {"isa": "avx2", "dtype": "bf16", "layout": "row", "m": 8, "share": 1.5},
]
PACKING_ROWS = [
    {"dtype": "u4", "activations": "f32", "layout": "row", "group": 32, "threads": t, "share": 0.5 * t} for t in (1, 2)
]
OVERHEAD = {"chip": "A chip", "overhead": {"import": {"seconds over NumPy's": 0.0312}}}
FUSION = {
    "chip": "A chip", "machine": "tiny", "threads": 1, "date": "2026-01-03", "versions": {"numpy": "numpy 1"},
    "skipped": [], "fusion": [
        {"case": {"name": f"{group}-x", "group": group, "dtype": "bf16"}, "entries": {}, "best": "numpy", "ratio": r,
         "gain": None, "overheads": {}} for group, r in (("attention", 3.0), ("epilogue", 0.75), ("blocks", None))
    ],
}  # fmt: skip
DEVICE = {
    "device": {"target": "h200", "title": "NVIDIA H200 SXM (Hopper)", "facts": {"kind": "gpu"}},
    "bars": [], "surveys": [], "sanitizer": [], "notes": {},
    "rows": [
        *({"section": "f32", "m": 8, "n": 8, "k": 8, "dtype": "f32", "b": "row", "more": "", "name": x, "state": "ok",
           "right": True, "seconds": {"portmm": 1e-6, "torch": 2e-6}, "ratio": 2.0, "tflops": 1.0} for x in "ade"),
        {"section": "f32", "m": 8, "n": 8, "k": 8, "dtype": "f32", "b": "row", "more": "", "name": "b", "state": "ok",
         "right": True, "seconds": {"portmm": 1e-6}, "ratio": None, "tflops": 1.0},
        {"name": "c", "state": "refused"},
    ],
}  # fmt: skip
TUNING = {
    "schema": 1, "machine": "tiny", "chip": "A chip", "threads": 2, "cold": True, "spent": 9.0, "date": "2026-01-04",
    "geomean": 0.9, "rank_correlation": 0.95, "choices_correlation": None,
    "cases": [
        {"case": {"name": "cube-2"}, "predicted": 1e-6, "analytical_seconds": 2e-6, "seconds": 1e-6, "reason": "",
         "rank_correlation": 0.9, "trials": [{"state": "ok"}, {"state": "crashed"}]},
        {"case": {"name": "cube-3"}, "predicted": 1e-6, "analytical_seconds": 2e-6, "seconds": 2e-6, "reason": "",
         "rank_correlation": None, "trials": [{"state": "ok"}]},
        {"case": {"name": "cube-4"}, "seconds": 0.0, "reason": "no time", "trials": []},
    ],
}  # fmt: skip
LEFT_OUT = {
    "left_out": [
        {"search": "tiny-search", "chip": "tiny", "isa": "avx2", "constant": "a schedule", "fit": {}, "cases": [
            {"case": "x", "of_best": 0.5, "refitted": 0.25, "over_constant": 2.0, "refitted_over_constant": 1.0},
            {"case": "y", "of_best": 1.0, "refitted": 1.0},
        ]},
    ],
}  # fmt: skip
RAGGED = {
    "chip": "A chip", "machine": "tiny", "ragged": [
        {"k": 8, "n": 9, "packed": packed, "seconds": [1.0, 2.0], "steps": steps} for packed, steps in
        ((False, [{"m": 3, "beside": 2, "excess": 1.2}, {"m": 5, "beside": 4, "excess": 1.5}]), (True, []))
    ],
}  # fmt: skip
STORED = {
    "a": REPORT,
    "b": {**REPORT, "threads": 2, "suite": "cube,odd"},
    "c": SEARCH,
    "d": OVERHEAD,
    "e": {"chip": "A chip", "cliff": CLIFF_ROWS},
    "f": NARROW_REPORT,
    "g": {"chip": "A chip", "packing": PACKING_ROWS},
    "h": FUSION,
    "i": DEVICE,
    "j": TUNING,
    "l": LEFT_OUT,
    "m": RAGGED,
    "k": {**TUNING, "cases": TUNING["cases"][2:], "cold": False, "rank_correlation": None},
}


@pytest.fixture
def stored(tmp_path):
    """A folder with a result of every kind, beside a README with a place for tables."""
    folder = tmp_path / "results"
    folder.mkdir()
    for name, data in STORED.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    (tmp_path / "README.md").write_text(f"before\n{tables.BEGIN}\nstale words\n{tables.END}\nafter\n")
    return folder


@pytest.fixture
def run(capsys):
    """Runs bench/report.py, and returns what it writes."""

    def command(*words, status=0):
        assert tables.main([*map(str, words)]) == status
        return capsys.readouterr()

    return command


def test_the_repository_has_the_tables_of_its_results():
    found = tables.load(ROOT / "bench" / "results")
    for path, text in tables.pages(found, ROOT / "README.md", ROOT / "docs" / "performance.md").items():
        assert path.read_text() == text, f"{path.name}: run `bench/report.py --write`"
    assert tables.picture_is_current(ROOT / "docs" / "images" / "speed.svg", found), "run `bench/report.py --write`"


def test_tables_say_what_results_say(stored):
    found = tables.load(stored)
    text = tables.readme((stored.parent / "README.md").read_text(), found)
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale words" not in text
    assert "| CPU, one thread | chip |" in text
    assert "| f32 | 1.14 (0.50) |\n| bf16 | 1.14 (0.50) |\n| f32, 2 threads | 1.14 (0.50) |" in text
    assert "attention" not in text, "a mean of one case says nothing"
    assert "| GPU | H200 SXM |\n| --- | --: |\n| f32 | 2.00 (2.00) |" in text
    text = tables.page(found)
    assert "| chip | 1 thread | 2 threads |" in text
    assert "| f32 | 1.14 (0.50) of 3 | 1.14 (0.50) of 3 |" in text
    assert "| group | 1 thread | 2 threads, cube,odd |" in text
    assert "| cube | 1.00 (0.50) of 2 | 1.00 (0.50) of 2 |" in text
    assert "| **all** | 1.14 (0.50) of 3 |" in text
    assert "at 0.50 of the rate of the best" in text
    assert "| import | seconds over NumPy's | 0.0312 |" in text
    assert "1 of 2 products of narrow types" in text
    assert "at 0.25 of that (sse2, f16, B col, M = 1)" in text
    assert "| cube | 1.00 (0.50) of 2 | 1.00 (0.50) of 2 | 1.00" not in text
    assert "narrow types: rate of portmm" in text
    assert "| weight | 1 thread | 2 threads |" in text
    assert "| u4, groups of 32 rows, by rows | 0.50 (0.50) | 1.00 (1.00) |" in text
    assert "| attention, bf16 | 3.00 (3.00) of 1 |  |" in text
    assert "**H200 SXM**: 4 of 4 products checked are right." in text
    assert "| 2 threads, cold caches | 2 | 0.71 | 0.50 | cube-2 | 3 | 1 | 0.95 |  |" in text
    assert "| 2 threads | 0 |  |  |  | 0 | 0 |  |  |" in text
    assert "| tiny-search | avx2 | 2 | 0.71 (0.50) | 0.50 (0.25) | 2.00 (2.00) | 1.00 (1.00) |" in text
    assert "- tiny-search: a schedule" in text
    assert "[time against M](images/ragged-tiny.svg) from 1 to 2" in text
    assert "| 8 | 9 | by rows | 2 | 1.50 | 5 |" in text
    assert "| 8 | 9 | packed | 0 |  |  |" in text
    assert "odd-2" in text
    assert "| cube-2 | 1 | 2 | 1 | 0.50 | 2 | 0.90 |" in text
    assert "Not tuned: cube-4 (no time)." in text


def test_a_table_of_each_chip_has_all_types(stored):
    lines = tables.overview(tables.load(stored)).splitlines()
    assert lines[2] == "| chip | 1 thread | 2 threads |"
    assert lines[4:] == [
        "| f32 | 1.14 (0.50) of 3 | 1.14 (0.50) of 3 |",
        "| bf16 | 1.14 (0.50) of 3 |  |",
        "| bf16, attention | 3.00 (3.00) of 1 |  |",
        "| bf16, fused | 0.75 (0.75) of 1 |  |",
        "",
        "| device | H200 SXM |",
        "| --- | --: |",
        "| f32 | 2.00 (2.00) of 3 |",
    ]


def test_of_runs_on_a_device_the_newest_result_of_a_case_counts(stored):
    row = {**DEVICE["rows"][0], "ratio": 0.25}
    bars = [{"bar": "x", "least": 1, "reached": 2.0, "measured": 1, "of": 1, "state": "met"}]
    (stored / "i-9.json").write_text(json.dumps({**DEVICE, "bars": bars}))
    unmeasured = [{**bars[0], "reached": None, "state": "not measured"}]
    (stored / "i-10.json").write_text(json.dumps({**DEVICE, "rows": [row], "bars": unmeasured}))
    found = tables.load(stored)
    assert "| f32 | 1.00 (0.25) of 3 |" in tables.overview(found)
    assert "| x | 1 | 2 | 1/1 | met |" in tables.page(found)
    assert tables.page(found).count("**H200 SXM**") == 1


def test_a_case_measured_again_counts_as_it_was_found_last(stored):
    later = json.loads(json.dumps(REPORT))
    later["date"], later["results"] = "2026-01-09", [{**later["results"][0], "ratio": 1.0}]
    (stored / "0.json").write_text(json.dumps(later))
    assert "| f32 | 0.91 (0.50) of 3 |" in tables.overview(tables.load(stored))


def test_settings_are_told_apart(tmp_path):
    for i, more in enumerate(({}, {"threads": 2, "isa": "avx2"}, {"cold": 1}, {"device": "cuda", "cold": 1})):
        (tmp_path / f"{i}.json").write_text(json.dumps({**REPORT, **more}))
    settings = "1 thread | 2 threads, avx2 for all | 1 thread, cold caches | cuda, cold caches"
    found = tables.load(tmp_path)
    assert f"| group | {settings} |" in tables.summary(found)
    assert tables.overview(found).splitlines()[2] == f"| chip | {settings} |"


def test_types_are_told_apart():
    kinds = {kind(case) for case in cases("full,narrow")}
    weights = {f"{x} weights{more}" for x in ("int8", "int4") for more in ("", ", A in 8 bits")}
    assert kinds == {"f32", "bf16", "f16", "int8", *weights}
    assert kind(Case("x", "fused-bf16", 2, 2, 2, dtype="bf16")) == "bf16, fused"


def test_nothing_measured_is_said(tmp_path):
    found = tables.load(tmp_path)
    assert tables.NOTHING in tables.readme(f"{tables.BEGIN}\n{tables.END}", found)
    assert tables.NOTHING in tables.page(found)
    assert "by chip and type" not in tables.page(found)


def test_the_command_prints_writes_and_checks(stored, run):
    picture = stored.parent / "images" / "speed.svg"
    places = ("--readme", stored.parent / "README.md", "--page", stored.parent / "page.md", "--picture", picture)
    assert "| chip | 1 thread | 2 threads |" in run(stored).out
    assert "stale words" in (stored.parent / "README.md").read_text()
    done = run(stored, "--check", *places, status=1)
    assert "README.md differs from" in done.err
    assert "page.md differs from" in done.err
    assert not (stored.parent / "page.md").exists()
    run(stored, "--write", *places)
    shown = picture.read_text()
    assert "chip: f32" in shown
    assert "H200 SXM: f32" in shown
    assert "chip: f32 1.14<" in shown
    picture.write_text(shown.replace("data:", "data:0"))
    assert "speed.svg differs from" in run(stored, "--check", *places, status=1).err
    picture.write_text(shown)
    assert run(stored, "--check", *places) == ("", "")
    (stored / "a.json").unlink()
    run(stored, "--check", *places, status=1)


def test_one_file_is_shown_case_by_case(stored, run):
    assert run(stored / "a.json").out == markdown(from_json(json.dumps(REPORT)))
    assert "at 0.50 of the rate" in run(stored / "c.json").out


def printed(path, status):
    done = CliRunner().invoke(main.app, ["report", str(path)], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done


def test_the_package_prints_a_saved_comparison(stored):
    assert printed(stored / "a.json", 0).stdout == markdown(from_json(json.dumps(REPORT)))
    for other in (SEARCH, CLIFF_ROWS[0]):
        (stored / "z.json").write_text(json.dumps(other))
        assert "this is no report" in " ".join(printed(stored / "z.json", 2).stderr.replace("│", " ").split())


def test_what_is_no_result_is_named(stored):
    (stored / "z.json").write_text('{"speed": 3}')
    with pytest.raises(ValueError, match=r"z\.json: these are no results: the keys are speed"):
        tables.load(stored)
    (stored / "z.json").write_text("{")
    with pytest.raises(ValueError, match=r"z\.json: Expecting"):
        tables.load(stored)
    (stored / "z.json").write_text(json.dumps({**REPORT, "schema": 99}))
    with pytest.raises(ValueError, match=r"z\.json: a report of schema 99"):
        tables.load(stored)
    (stored / "z.json").write_text(json.dumps({"schema": 1, "entrants": [{}]}))
    with pytest.raises(ValueError, match="its fields are not those"):
        tables.load(stored)


def test_a_readme_without_a_place_is_refused(stored):
    readme = stored.parent / "README.md"
    readme.write_text("no place")
    with pytest.raises(ValueError, match=r"README\.md: tables have no place in it"):
        tables.pages(tables.load(stored), readme, stored.parent / "page.md")


def test_figures_of_a_benchmark_are_kept(stored, run):
    raw = stored.parent / "raw.json"
    rows = [("test_a_call[x]", {"ratio": 0.5, "note": "text"}), ("test_nothing", {})]
    raw.write_text(json.dumps({"benchmarks": [{"name": n, "extra_info": x} for n, x in rows]}))
    run(stored, "--overhead", raw)
    kept = json.loads((stored / f"overhead-{host().name}.json").read_text())
    assert kept["overhead"] == {"a call[x]": {"ratio": 0.5}}
    raw.write_text("[]")
    with pytest.raises(ValueError, match="is not what"):
        tables.keep_overhead(raw, stored)
