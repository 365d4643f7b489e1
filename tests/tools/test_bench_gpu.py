"""bench/gpu.py without a GPU: every section at small sizes through the shim, its process, its bars, cublasLt."""

from __future__ import annotations

import importlib
import json
import sys

import bench_arrays
import cuda_fakes
import emulated_cuda
import pytest
from bench_scripts import script
from places import BENCH

from portmm.comparison import cublaslt

pytestmark = pytest.mark.rest("scripts of bench/")

MODULES = (
    "gpu_arrays", "gpu_cases", "gpu_run", "gpu_peers", "gpu_families", "gpu_measure", "gpu_schedules", "gpu_compile",
    "gpu_tools", "gpu_load", "gpu", "lease_plan", "lease", "profile_one",
)  # fmt: skip
CHIPS = {
    "v100": (b"Tesla V100-SXM2-16GB", 7, 0), "a100": (b"NVIDIA A100-SXM4-40GB", 8, 0),
    "h100": (b"NVIDIA H100 80GB HBM3", 9, 0),
}  # fmt: skip
SECTIONS = (
    "squares", "prefill", "decode", "epilogue", "attention", "int8", "w4a16", "fp8", "tf32", "grouped", "f32",
    "bias", "few", "rows",
)  # fmt: skip
LATER = {"fp8", "tf32"}
"""Sections that chips before Ampere may refuse."""


@pytest.fixture
def bench(monkeypatch):
    """The scripts as modules, which import one another."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield type("Bench", (), {name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def known_as(monkeypatch, chip):
    """The driver's facts about the device, with a small cache so that few operands rotate."""
    name, major, minor = CHIPS[chip]
    more = {"name": name, "major": major, "minor": minor, "l2CacheSize": 1 << 12}
    monkeypatch.setattr(cuda_fakes, "PROPERTIES", cuda_fakes.PROPERTIES | more)


@pytest.fixture(autouse=True)
def _usual(monkeypatch):
    known_as(monkeypatch, "a100")


@pytest.fixture(params=CHIPS)
def chip(request, monkeypatch):
    """A device that is emulated."""
    known_as(monkeypatch, request.param)
    return request.param


@pytest.fixture
def quick(bench, monkeypatch):
    """One call for each turn and each graph, and none to warm up."""
    for name, value in {"MOST_CALLS": 1, "WARM": 0, "FIRST_GRAPH": 1, "MOST_GRAPH": 1, "SUSTAINED": 0.01}.items():
        monkeypatch.setattr(bench.gpu_measure, name, value)
    for name in ("ROUNDS", "MANY"):
        monkeypatch.setattr(bench.gpu_schedules, name, 1)
    monkeypatch.setattr(bench.gpu, "clocks", dict)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.usefixtures("quick", "chip")
def test_every_section_runs(bench, section, monkeypatch):
    on = bench_arrays.Emulated(emulated_cuda.install(monkeypatch))
    peers = bench_arrays.HostPeers(on)
    monkeypatch.setattr(bench.gpu_measure, "SHORT", 60.0)  # an emulated call takes as long as this machine is busy
    for case in bench.gpu_cases.tiny((section,)):
        row = bench.gpu_measure.measure(on, peers, case, l2=1 << 12, turns=1)
        print(bench.gpu_run.spelt(row))
        assert row["state"] == "ok" or (section in LATER and row["state"] == "refused"), row
        if row["state"] == "refused":
            assert row["why"]
            continue
        assert row["right"], row
        assert row["error"] > 0 or row["dtype"] == "s8"
        assert set(row["seconds"]) == {"portmm", "host"}
        assert row["ratio"] == row["seconds"]["host"] / row["seconds"]["portmm"]
        assert "graph" in row
        json.dumps(row)


@pytest.mark.usefixtures("quick")
def test_what_is_not_there_is_refused_in_words(bench, monkeypatch):
    on = bench_arrays.Emulated(emulated_cuda.install(monkeypatch))
    peers = bench_arrays.HostPeers(on)
    case = bench.gpu_cases.Case("fp8", "dense", 4, 4, 4, "f9")
    assert "no elements of f9" in bench.gpu_measure.measure(on, peers, case, l2=1, turns=1)["why"]


@pytest.mark.usefixtures("quick")
def test_a_wrong_result_is_seen(bench, monkeypatch):
    """Errors that a bound of the whole sum would let pass: one product of k left out, a NaN."""
    on = bench_arrays.Emulated(emulated_cuda.install(monkeypatch))
    for dtype in ("f32", "bf16", "f16"):
        a, b = on.random((5, 96), dtype, 1), on.random((96, 7), dtype, 2)
        x, y = on.wide(a), on.wide(b)
        share = bench.gpu_families.share_of
        assert share(on, on.array(x @ y, dtype), a, b) <= 1
        assert share(on, on.array(x[:, :95] @ y[:95], dtype), a, b) > 1
        assert share(on, on.array(x @ y * float("nan"), dtype), a, b) == float("inf")
    real = bench.gpu_families.pm.matmul
    monkeypatch.setattr(bench.gpu_families.pm, "matmul", lambda a, b, **more: real(a, b, **more)[::-1])
    row = bench.gpu_measure.measure(on, bench_arrays.HostPeers(on), bench.gpu_cases.tiny(("f32",))[0], l2=1, turns=1)
    assert row["right"] is False
    assert "WRONG" in bench.gpu_run.spelt(row)


@pytest.mark.usefixtures("quick", "chip")
def test_candidates_are_surveyed(bench, monkeypatch):
    on = bench_arrays.Emulated(emulated_cuda.install(monkeypatch))
    for case in (bench.gpu.product("33x48x96:bf16:col"), bench.gpu.product("40x1x64:f32:row")):
        found = bench.gpu_schedules.survey(on, case, l2=1, most=5, turns=1, threads=2)
        assert found["candidates"] >= len(found["rows"]) == 5
        assert all(row["right"] and row["seconds"] > 0 and row["predicted"] > 0 for row in found["rows"])
        assert -1 <= found["correlation"] <= 1
        assert 0 < found["chosen"] <= 1
        assert "rank correlation" in bench.gpu_run.spelt({"name": case.name, **found})


def test_every_kind_of_kernel_is_checked(bench, chip, monkeypatch):
    """One of each program, unit and way to feed it, as --checks and --sanitize do."""
    on = bench_arrays.Emulated(emulated_cuda.install(monkeypatch))
    found = bench.gpu_schedules.survey(on, bench.gpu.product("40x48x392:f16:col"), l2=1, turns=0, threads=1)
    assert all(row["right"] and row["seconds"] is None for row in found["rows"])
    programs = {row["schedule"].split()[0] for row in found["rows"]}
    assert {"simt", "direct"} <= programs
    assert ("mma" in programs) == (chip != "v100")


def test_order_is_correlated(bench):
    rows = [{"predicted": p, "seconds": s} for p, s in ((1, 4), (2, 2), (3, 3), (4, None))]
    found = bench.gpu_schedules._summary(rows)
    assert found == {"correlation": pytest.approx(-0.5), "chosen": 0.5}
    assert bench.gpu_schedules._summary(rows[:1]) == {"correlation": None, "chosen": None}
    assert bench.gpu_schedules.picked(list(range(100)), 6) == [0, 1, 2, 3, 4, 52]


# -- the process ---------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_worker_says_all_that_it_finds(bench, monkeypatch, capsys):
    on = bench_arrays.Emulated(emulated_cuda.install(monkeypatch))
    monkeypatch.setattr(bench.gpu_measure, "bandwidth", lambda _on, _size: 1e9)
    given = bench.gpu.arguments(["--smoke", "--turns", "1", "--threads", "1"])
    every = bench.gpu.jobs_of(given)
    assert {job["do"] for job in every} == {"measure", "check", "note"}
    names = ("squares", "f32", "fp8", "notes", "check schedules 200x264x328 e4m3")
    few = [job for job in every if job["name"].startswith(names)]
    bench.gpu.work(on, bench_arrays.HostPeers(on), few, given)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [x["kind"] for x in said]
    assert kinds[0] == "device"
    assert {"portmm", "cupy", "nvrtc"} <= set(said[0]["value"]["versions"])
    assert kinds.count("begin") == len(few) == kinds.count("rows") + kinds.count("surveys") + 1
    note = next(x["value"] for x in said if x["kind"] == "note")
    assert note["copy_gbs"] == 1.0
    assert note["call_seconds"]["portmm.plan"] > 0


STUB = """
import json, os, sys, time
def say(kind, value): print(json.dumps({"kind": kind, "value": value}), flush=True)
say("device", {"title": "stub"})
print("a library says something")
for line in sys.stdin:
    job = json.loads(line)
    say("begin", job["name"])
    if job["name"] == "dies": os._exit(3)
    if job["name"] == "hangs": time.sleep(60)
    if job["name"] == "slow": time.sleep(0.4)
    say("rows", {"name": job["name"], "state": "refused", "why": "a stub"})
say("note", {"done": True})
"""


def jobs(*names):
    return [{"name": name, "do": "measure", "case": {"m": 1}} for name in names]


def test_what_dies_or_hangs_ends_one_case(bench, tmp_path):
    report, told = bench.gpu_run.Report(), []
    save = tmp_path / "x.json"
    bench.gpu_run.run(
        [sys.executable, "-c", STUB], jobs("first", "dies", "second", "hangs", "third"), report,
        budget=60, save=save, patience=1.0, start=30.0, told=told.append,
    )  # fmt: skip
    assert [(x["name"], x["state"]) for x in report.rows] == [
        ("first", "refused"), ("dies", "crashed"), ("second", "refused"), ("hangs", "crashed"), ("third", "refused"),
    ]  # fmt: skip
    assert "status 3" in report.rows[1]["why"]
    assert "nothing was heard" in report.rows[3]["why"]
    assert report.notes == {"done": True}
    assert json.loads(save.read_text())["rows"] == report.rows
    assert any("CRASHED dies" in x for x in told)


def test_the_budget_ends_a_run(bench):
    report = bench.gpu_run.Report()
    names = [f"slow{i}" for i in range(3)]
    stub = STUB.replace('== "slow"', '[:4] == "slow"')
    bench.gpu_run.run([sys.executable, "-c", stub], jobs(*names), report, budget=0.7, told=lambda _: None)
    assert 1 <= len(report.notes["not run"]) <= 3
    assert len(report.rows) + len(report.notes["not run"]) == 3


def test_a_worker_that_does_not_begin_stops_a_run(bench):
    report = bench.gpu_run.Report()
    bench.gpu_run.run([sys.executable, "-c", "1 / 0"], jobs("x"), report, budget=20, told=lambda _: None)
    assert report.notes == {"stopped": "a worker ended before its first case", "not run": ["x"]}


SANITIZER = """#!/bin/sh
echo '{"kind": "rows", "value": {}}'
echo "========= ERROR SUMMARY: $ERRORS errors"
exit $STATUS
"""


def test_sanitizers_are_run(bench, tmp_path, monkeypatch):
    stub = tmp_path / "compute-sanitizer"
    stub.write_text(SANITIZER)
    stub.chmod(0o755)
    run = bench.gpu_tools.sanitized
    assert run("memcheck", ["x"], sanitizers=(str(tmp_path / "none"),))["state"] == "missing"
    for errors, status, state in ((0, 0, "clean"), (2, bench.gpu_tools.FOUND, "errors"), (0, 1, "failed")):
        monkeypatch.setenv("ERRORS", str(errors))
        monkeypatch.setenv("STATUS", str(status))
        found = run("racecheck", ["x"], sanitizers=(str(stub),))
        assert found["state"] == state
        assert found["summary"] == f"========= ERROR SUMMARY: {errors} errors"
    stub.write_text("#!/bin/sh\nexit 0\n")
    assert run("memcheck", ["x"], sanitizers=(str(stub),))["state"] == "failed"  # nothing was checked
    stub.write_text("#!/bin/sh\nexec sleep 30\n")
    assert run("synccheck", ["x"], seconds=0.3, sanitizers=(str(stub),))["state"] == "late"


def test_a_run_is_judged(bench, tmp_path, monkeypatch, capsys):
    """The whole of main, but for the worker."""
    monkeypatch.setattr(bench.gpu, "command", lambda *_: [sys.executable, "-c", STUB])
    save = tmp_path / "x.json"
    assert bench.gpu.main(["--section", "squares", "--save", str(save)]) == 0
    kept = json.loads(save.read_text())
    assert len(kept["rows"]) == 5
    assert {bar["state"] for bar in kept["bars"]} == {"not measured"}
    assert "not measured: attention, each" in capsys.readouterr().out
    monkeypatch.setattr(bench.gpu_tools, "TOOLS", ("memcheck",))
    monkeypatch.setattr(bench.gpu_tools, "SANITIZERS", ())
    assert bench.gpu.main(["--sanitize", "--save", str(save)]) == 1
    assert json.loads(save.read_text())["sanitizer"][0]["tool"] == "memcheck"


def test_a_worker_command_reads_as_it_was_written(bench):
    given = bench.gpu.arguments(["--checks", "--turns", "3", "--schedules", "1x2x3:bf16:col"])
    again = bench.gpu.arguments(bench.gpu.command(given)[2:])
    assert (again.worker, again.checks, again.turns, again.device) == (True, True, 3, "cuda")
    (job,) = bench.gpu.jobs_of(given)
    assert (job["do"], job["case"]["m"], job["case"]["b"]) == ("survey", 1, "col")
    every = bench.gpu.jobs_of(bench.gpu.arguments([]))
    assert len({job["name"] for job in every}) == len(every)
    assert [job["name"] for job in every].index("notes") == 4
    assert every[0]["name"].startswith("squares 4096x4096x4096")


# -- bars ------------------------------------------------------------------------------------


def rows_of(bench, section, ratio, **more):
    return [{"name": x.name, "ratio": ratio, "tflops": 700.0, **more} for x in bench.gpu_cases.SECTIONS[section]()]


def test_bars_say_what_is_met(bench):
    def state(rows, what):
        return next(x for x in bench.gpu_cases.judged(rows) if x["bar"].startswith(what))

    rows = rows_of(bench, "squares", 1.1) + rows_of(bench, "prefill", 0.96)
    each = state(rows, "bf16 squares and prefill layers, each")
    assert (each["state"], each["measured"], each["of"]) == ("met", 20, 20)
    mean = state(rows, "bf16 squares and prefill layers, geometric mean")
    assert (mean["state"], mean["reached"]) == ("missed", pytest.approx(1.1**0.2 * 0.96**0.8))
    best = state(rows, "bf16 8192 cubed")
    assert (best["state"], best["reached"], best["of"]) == ("missed", 700.0, 2)
    assert state(rows[:5], "bf16 squares and prefill layers, each")["state"] == "met so far"
    spoilt = [rows[0] | {"right": False}, *rows[1:]]
    assert state(spoilt, "bf16 squares and prefill layers, each")["state"] == "met so far"
    assert state([], "attention")["state"] == "not measured"
    decode = rows_of(bench, "decode", 0.5, ratio_graph=1.2)
    assert state(decode, "decode")["reached"] == pytest.approx(1.2)
    four = rows_of(bench, "w4a16", 2.0)
    assert state(four, "weights of four bits, up to 16")["state"] == "missed"
    assert state(four, "weights of four bits, up to 512")["state"] == "met"


# -- PyTorch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.usefixtures("quick")
def test_pytorchs_half_runs(bench, section, monkeypatch):
    """Its own products, on tensors in the host's memory, beside kernels through the shim and a false cublasLt."""
    torch = pytest.importorskip("torch")
    emulated_cuda.install(monkeypatch)
    bench_arrays.tensors_there(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(cublaslt, "WORKSPACE", 64)
    on = bench.gpu_arrays.Torch("cpu")
    peers = bench.gpu_peers.TorchPeers(on, cuda_fakes.FakeLt())
    assert peers.versions()["cublaslt"] == 130100
    for case in bench.gpu_cases.tiny((section,)):
        row = bench.gpu_measure.measure(on, peers, case, l2=1 << 12, turns=1)
        print(row)
        assert row["state"] == "ok", row
        assert row["right"], row
        assert len(row["seconds"]) > 1, row
        assert "cublaslt" in row["seconds"] or section in ("attention", "grouped", "few", "rows"), row
    assert bench.gpu_measure.overhead(on, 2)["torch.matmul"] > 0
    assert bench.gpu_measure.bandwidth(on, 1 << 10) > 0


# -- tables ----------------------------------------------------------------------------------


def test_results_become_tables(bench):
    case = bench.gpu_cases.SECTIONS["decode"]()[0]
    row = case.record() | {
        "state": "ok", "right": True, "error": 0.5, "seconds": {"portmm": 3e-5, "torch": 2e-5}, "ratio": 0.7,
        "graph": {"portmm": 1e-5, "torch": 3e-5, "cublaslt": 2e-5}, "ratio_graph": 2.0, "tflops": 1.0,
        "tflops_graph": 3.0,
    }  # fmt: skip
    data = {
        "rows": [row, {"name": "fp8 x", "state": "refused", "why": "no"}], "bars": bench.gpu_cases.judged([row]),
        "surveys": [{"name": "p", "candidates": 9, "correlation": 0.9, "chosen": 0.98, "rows": []}],
        "sanitizer": [{"tool": "memcheck", "state": "clean"}], "notes": {"not run": ["f32 y"]},
    }  # fmt: skip
    text = script("result_tables").device("h200-gpu", data)
    assert "**h200-gpu**: 1 of 1 products checked are right." in text
    assert "| 1 x 6144 x 4096 | bf16 | col | decode, 8B QKV | 10.0 | 3 | cublaslt | 2.00 |" in text
    assert "| decode layers of 1 to 64 rows, geometric mean | 1.1 | 2 | 1/32 | met so far |" in text
    assert "| p | 9 | 0.90 | 0.98 |" in text
    assert text.endswith("memcheck: clean\n\nNot measured: fp8 x, f32 y.")
