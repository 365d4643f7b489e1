"""bench/fusion.py: its cases, what is right, ratios, and what is kept and shown of them."""

import importlib
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from bench_scripts import script
from places import BENCH

import portmm as pm
from portmm.comparison.peers import Setup

pytestmark = pytest.mark.rest("scripts of bench/")

MODULES = ("fusion_cases", "fusion_ways", "fusion_worker", "fusion_torch", "fusion")


@pytest.fixture
def bench(monkeypatch):
    """The scripts as modules, which import one another."""
    monkeypatch.syspath_prepend(str(BENCH))
    found = {}
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in MODULES:
        found[name] = importlib.import_module(name)
    yield type("Bench", (), found)
    for name in MODULES:
        sys.modules.pop(name, None)


def test_cases_are_told_apart_and_survive_json(bench):
    every = bench.fusion_cases.cases()
    assert len({case.name for case in every}) == len(every)
    assert {case.group for case in every} == set(bench.fusion_cases.GROUPS)
    assert {case.dtype for case in every} == {"f32", "bf16"}
    assert all(case.k >= 512 for case in every if case.group == "overhead")
    assert {case.m for case in every if "llama-" in case.name} == {1, 16, 128}
    for case in every:
        assert bench.fusion_cases.case_of(json.loads(json.dumps(bench.fusion.asdict(case)))) == case
    kinds = {case.kind for case in every}
    assert kinds == {case.kind for case in bench.fusion_cases.smoke_cases()}
    assert [c.name for c in every if "8192" in c.name] == [c.name for c in every[-8:]]


def test_operations_are_counted(bench):
    case = bench.fusion_cases.Case("x", "blocks", "mlp", "f32", 2, 5, 3)
    assert case.flops == 3 * 2 * 2 * 5 * 3
    assert replace(case, kind="lora", rank=1).flops == 2 * 2 * 5 * 3 + 2 * 2 * (5 + 3)
    assert replace(case, kind="attention", heads=4).flops == 4 * 4 * 2 * 5 * 3


def smoke_names():
    names = ("gelu", "residual", "add2-fastgelu", "requantise", "mlp", "lora", "rmsnorm", "qkv", "attention")
    return [(name, dtype) for name in names for dtype in ("f32", "bf16")]


@pytest.mark.parametrize(("kind", "dtype"), smoke_names())
def test_ways_agree_with_what_is_right(bench, kind, dtype):
    """Everything that portmm and NumPy do, in bounds that one part in thirty exceeds."""
    case = replace(next(c for c in bench.fusion_cases.smoke_cases() if c.kind == kind), dtype=dtype)
    given = bench.fusion_cases.operands(case)
    want, bound, rows = bench.fusion_cases.right(case, given)
    try:
        ways = bench.fusion_ways.open_fused(Setup()).prepare(case, given)
        ways |= {f"un{k}": v for k, v in bench.fusion_ways.open_unfused(Setup()).prepare(case, given).items()}
    except bench.fusion_ways.UnsupportedError as error:
        pytest.skip(str(error))
    finally:
        pm.set_num_threads(0)
    if dtype == "f32" and kind != "gelu":
        ways |= {f"numpy, {k}": v for k, v in bench.fusion_ways.open_numpy(None).prepare(case, given).items()}
    assert len(ways) > 1
    for name, make in ways.items():
        result = bench.fusion_worker.whole(make()())
        share = bench.fusion_cases.worst(result, want, bound, rows)
        assert share <= 1, name
        spoilt = result.astype(np.float64)
        spoilt.flat[spoilt.size // 2] += 20 if kind == "requantise" else 0.2
        assert bench.fusion_cases.worst(spoilt, want, bound, rows) > 1
        spoilt.flat[0] = math.nan
        assert bench.fusion_cases.worst(spoilt, want, bound, rows) == math.inf


def made(bench, group, samples, **more):
    """A result of some seconds per call, by contender or, of an overhead, by variant."""
    case = bench.fusion_cases.Case(f"{group}-case", group, "gelu" if group == "epilogue" else group, "f32", 4, 5, 6)
    entry = bench.fusion.Entry
    if group == "overhead":
        return bench.fusion.Result(case, {"portmm": entry("ok", samples)})
    entries = {name: entry("ok", {"way": list(taken)}) for name, taken in samples.items()}
    return bench.fusion.Result(case, entries | more)


def test_ratios_are_formed_within_a_round(bench):
    samples = {"portmm": (1.0, 2.0, 4.0), "unfused": (0.5, 1.8, 4.4)}
    samples |= {"numpy": (3.0, 3.0, 3.0), "torch": (9.0, 9.0, 8.0)}
    bad = bench.fusion.Entry("wrong", {}, "0 is not 1")
    result = made(bench, "epilogue", samples, onednn=bad)
    assert result.best == "numpy"
    assert result.ratio == 1.5
    assert result.gain == pytest.approx(0.9)
    assert bench.fusion.flags(result) == "slower than not fused; onednn wrong: 0 is not 1"
    alone = made(bench, "epilogue", {"portmm": (1.0,)})
    assert (alone.best, alone.ratio, alone.gain) == ("", None, None)
    text = bench.fusion.summary([result, alone])
    assert "epilogue, f32: 1.50 (1.50) of the best peer, 1 cases" in text
    assert "epilogue, f32: 0.90 (0.90) of not fused, 1 slower" in text
    assert "1.50" in bench.fusion.table([result, alone])


def test_overheads_are_of_the_bare_product(bench):
    result = made(bench, "overhead", {"bare": [1.0, 2.0, 4.0], "bias": [1.01, 2.02, 8.0], "bias+gelu": [2.0, 3.0, 6.0]})
    assert result.overheads == pytest.approx({"bias": 0.01, "bias+gelu": 0.5})
    assert result.ratio is None
    assert bench.fusion.flags(result) == "bias+gelu costs 50.0 %"


def test_results_survive_json_and_are_shown(bench, tmp_path):
    samples = {"portmm": (1e-6,), "unfused": (2e-6,), "numpy": (1.25e-6,)}
    results = [made(bench, "epilogue", samples), made(bench, "overhead", {"bare": [1.0], "bias": [1.02]})]
    for result in results:
        assert bench.fusion.from_json(json.loads(json.dumps(bench.fusion.to_json(result)))) == result
    common = {"chip": "A chip", "date": "2026-01-02", "versions": {"numpy": "numpy 1", "torch": "missing: no torch"}}
    for threads, rows in ((1, results), (2, results[:1])):
        kept = [bench.fusion.to_json(r) for r in rows]
        data = common | {"threads": threads, "skipped": ["late"], "fusion": kept}
        (tmp_path / f"{threads}-fusion.json").write_text(json.dumps(data))
    tables = script("report")
    found = tables.load(tmp_path)
    text, details = tables.summary(found), tables.details(found)
    assert "| epilogue, f32 | 1.25 (1.25) of 1 | 2.00 (2.00) of 1 | 1.25 (1.25) of 1 | 2.00 (2.00) of 1 |" in text
    assert "| bias, f32 | +2.0 % (+2.0 %) |  |" in text
    assert "Took part: numpy 1. Measured on 2026-01-02." in text
    assert "| epilogue-case | 1 | 2 | 1.25 | numpy | 1.25 | 2.00 |  |" in details
    assert "Not run, for want of time: late." in details


def test_a_run_takes_turns_judges_and_keeps(bench, tmp_path, capsys):
    path = tmp_path / "kept.json"
    words = f"--smoke --groups epilogue,overhead --cases small-f32 --contenders unfused,numpy --save {path}"
    assert bench.fusion.main(words.split()) == 0
    data = json.loads(path.read_text())
    assert data["skipped"] == []
    assert set(data["versions"]) == {"portmm", "unfused", "numpy"}
    rows = {row["case"]["kind"]: row for row in data["fusion"]}
    assert rows["gelu"]["entries"]["numpy"]["reason"] == "NumPy has no error function"
    assert rows["residual"]["ratio"] > 0
    assert set(rows["overhead"]["overheads"]) == {"bias", "bias+residual", "bias+gelu"}
    assert "residual-small-f32" in capsys.readouterr().out
    assert bench.fusion.main([*words.split(), "--budget", "0"]) == 0
    assert "not run, for want of time: gelu-small-f32" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no group nothing"):
        bench.fusion.main(["--groups", "nothing"])


def test_what_takes_too_long_or_fails_is_a_fact_about_a_method(bench):
    """Not the end of the others."""
    case = replace(bench.fusion_cases.smoke_cases()[1], group="blocks")
    given = bench.fusion_cases.operands(case)
    worker = bench.fusion_worker.Bench(Setup(), "")
    worker.rights, worker.dtype = {"": bench.fusion_cases.right(case, given)}, np.dtype(np.float32)
    exact = worker.rights[""][0].astype(np.float32)

    def forever():
        while True:
            pass

    def broken():
        raise RuntimeError("line one\nline two")

    errors = {}
    assert worker.attempt("forever", forever, 0.05, errors) == "not ready after 0 s"
    assert worker.attempt("broken", broken, 5, errors) == "RuntimeError: line one"
    assert "a result of float64" in worker.attempt("wide", lambda: lambda: exact.astype(float), 5, errors)
    assert "of the error that is allowed" in worker.attempt("off", lambda: lambda: exact + 1, 5, errors)
    assert worker.attempt("right", lambda: lambda: exact, 5, errors) == ""
    assert errors["off"] > 1 > errors["right"]
