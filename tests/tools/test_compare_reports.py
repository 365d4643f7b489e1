"""Comparisons: adapters of libraries, limits of rates, and reports."""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from portmm.comparison import CONTENDERS, Case, Entrant, Entry, Report, Result, compare
from portmm.comparison import data as inputs
from portmm.comparison.limit import Limits
from portmm.comparison.native import flags
from portmm.comparison.peers import Setup, open_adapter
from portmm.comparison.pictures import plot
from portmm.comparison.report import from_json, geomean, summaries
from portmm.comparison.text import markdown, terminal
from portmm.target.cache_levels import MemoryLevel

SMALL = Case("small", "cube", 8, 12, 16)


# --- adapters ----------------------------------------------------------------

SHAPES = [
    Case("plain", "x", 7, 9, 11),
    Case("vector", "x", 1, 33, 65),
    Case("thin", "x", 33, 1, 65),
    Case("batch", "x", 5, 6, 7, batch=4),
    Case("packed", "x", 4, 64, 48, packed=True),
    Case("packed one", "x", 1, 64, 48, packed=True),
    *(
        Case(f"{a}-{b}-{c}", "x", 7, 9, 11, a=a, b=b, c=c)
        for a in ("row", "col")
        for b in ("row", "col")
        for c in ("row", "col")
    ),
    Case("vector-t", "x", 1, 33, 65, b="col"),
    Case("thin-t", "x", 33, 1, 65, a="col"),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", [c.name for c in CONTENDERS if c.peer])
def test_every_adapter_is_right_in_all_its_methods(name):
    report = compare(SHAPES, contenders=[name], rounds=1, turn_s=0.0005, limits=False)
    if report.entrants[0].state == "missing":
        pytest.skip(report.entrants[0].reason)
    assert report.entrants[0].state == "ok", report.entrants[0].reason
    for result in report.results:
        entry = result.entries[name]
        assert entry.state in ("ok", "unsupported"), (result.case, entry.reason)
        assert entry.state != "ok" or not entry.reason, (result.case, entry.reason)


def test_numpy_does_everything():
    report = compare(SHAPES, contenders=["numpy"], rounds=1, turn_s=0.0005, limits=False)
    assert {r.entries["numpy"].state for r in report.results} == {"ok"}


def test_numpy_in_process():
    library = open_adapter("portmm.comparison.peers:open_numpy", Setup())
    data = inputs.arrays(SMALL)
    library.prepare(SMALL, data)["matmul"](1)
    assert np.allclose(data.c, data.a.astype(float) @ data.b, atol=1e-4)


def test_an_adapter_must_return_a_library():
    with pytest.raises(TypeError, match="not a Library"):
        open_adapter("builtins:type", Setup())


def test_cblas_flags():
    assert flags(SMALL) == (101, 111, 111, 16, 12, 12)
    assert flags(replace(SMALL, a="col", b="col")) == (101, 112, 112, 8, 16, 12)
    assert flags(replace(SMALL, c="col")) == (102, 112, 112, 16, 12, 8)


# --- limits ------------------------------------------------------------------


def test_the_limit_is_the_roofline():
    limits = Limits({"atom": 100.0, "L1": 50.0, "memory": 2.0}, (MemoryLevel("L1", 4096),), {"f32": "atom"})
    small = Case("x", "x", 16, 16, 16)
    assert limits.of(small, 1) == 100.0
    large = Case("x", "x", 1, 4096, 4096)
    assert limits.of(large, 1) == pytest.approx(2.0 * large.flops / large.problem.bytes)
    assert limits.of(large, 2) is None
    assert limits.of(small, 2) == 200.0
    assert Limits().of(small, 1) is None


# --- the report --------------------------------------------------------------


def sample():
    def entry(seconds):
        return Entry("ok", seconds, (seconds, seconds), "gemm", "", 1e-6, 1e-5)

    one = Case("cube-64", "cube", 64, 64, 64)
    two = Case("tiny-4", "tiny", 4, 4, 4, batch=1000)
    no = Entry("unsupported", reason="no")
    entrants = (
        Entrant("portmm", False, "ok", "portmm 0.1.0"),
        Entrant("numpy", True, "ok", "numpy 2"),
        Entrant("mkl", True, "missing", "", "no libmkl_rt.so*", "pip install mkl"),
        Entrant("picky", True, "ok", "picky 1"),
    )
    results = (
        Result(one, {"portmm": entry(1e-6), "numpy": entry(2e-6), "picky": no}, "numpy", 2.0, 600.0),
        Result(two, {"portmm": entry(4e-6), "numpy": entry(2e-6), "picky": no}, "numpy", 0.5, None),
    )
    left_out = ("cube-128",)
    return Report(
        "A chip [x]", "zen5", 1, "", "custom", entrants, results, "2026-01-01", left_out, ("OMP_X",), {"atom": 1.0}
    )


def test_json_goes_round():
    report = sample()
    assert from_json(report.to_json()) == report
    other = json.loads(report.to_json())
    with pytest.raises(ValueError, match="schema 99"):
        from_json(json.dumps({**other, "schema": 99}))


def test_summaries_show_losses():
    by_group = {s.group: s for s in summaries(sample())}
    assert by_group["cube"].mean == pytest.approx(2.0)
    assert by_group["tiny"].wins == 0
    assert by_group["all"].mean == pytest.approx(1.0)
    assert by_group["all"].lowest_case == "1000 x 4x4x4"
    assert geomean([]) is None


def test_tables_say_everything():
    report = sample()
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(terminal(report))
    shown, written = console.export_text(), markdown(report)
    for text in (shown, written):
        for piece in ("A chip [x]", "64x64x64", "524", "2.00", "0.50", "mkl: not found", "pip install mkl", "87"):
            assert piece in text
        assert "no time was left for: cube-128" in text
        assert "picky: picky 1" in text
    assert "| picky |" not in written
    assert "| cube-64 | 64x64x64 | 524 | 262 | numpy | 2.00 | win | 0% | 87 |" in written


def test_a_report_without_portmm_has_no_ratio():
    report = sample()
    alone = replace(report, entrants=report.entrants[1:], results=tuple(replace(r, ratio=None) for r in report.results))
    assert "ratio" not in markdown(alone).splitlines()[2]
    assert summaries(alone) == []


def test_plot_writes_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    plot(sample(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_importing_compare_loads_no_library():
    code = "import portmm.comparison, sys; print(sorted({'torch', 'matplotlib', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert ctypes.sizeof(ctypes.c_long) == 8  # the driver's strides are long
