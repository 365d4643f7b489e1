"""The parts of bench/lease.sh: compiling beforehand, surveys, graphs, what a device's faults do, fits."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import bench_arrays
import bench_scripts
import cuda_fakes
import pytest
from bench_scripts import BENCH, jobs

from portmm.build import nvrtc
from portmm.dispatch import schedule_choice, tuned_schedule, tuning_database
from portmm.schedule.text import spell
from portmm.spec.problem import Problem
from portmm.target.target import load_target

pytestmark = pytest.mark.rest("scripts of bench/")


@pytest.fixture
def bench(monkeypatch):
    yield from bench_scripts.modules(monkeypatch)


@pytest.fixture
def emulated(bench, monkeypatch):
    return bench_scripts.device(bench, monkeypatch)


# -- compiling beforehand ---------------------------------------------------------------------

COMPILE = """
import json, sys
sys.path.insert(0, {bench!r})
import gpu, gpu_compile, gpu_run
from portmm.build import nvrtc
from portmm.build.nvrtc import Cubin
def compiled(source, name, architecture):
    gpu_run.say("source", [name, architecture, source])
    return Cubin(b"", "", 0, 0, 0, 0.0, False, (13, 0), architecture, name)
nvrtc.compile_cuda = compiled
gpu_compile.work(json.loads(sys.stdin.readline()), gpu_run.given_jobs(), gpu.arguments(["--most", "3"]))
"""


COMPILER = """
import json, sys, time
sys.stdin.readline()
for line in sys.stdin:
    name = json.loads(line)["name"]
    if name.startswith("dies"): raise SystemExit(1)
    if name.startswith("hangs"): time.sleep(60)
    print(json.dumps({"kind": "compiled", "value": {"name": name, "seconds": 0.1}}), flush=True)
"""


def compiled(facts, every):
    """The compiled jobs: sources by name of the job."""
    text = "\n".join(json.dumps(x) for x in (facts, *every))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(bench=str(BENCH))], input=text, capture_output=True, text=True,
        check=True, timeout=200,
    )  # fmt: skip
    said, sources = [], {}
    for line in map(json.loads, done.stdout.splitlines()):
        if line["kind"] == "source":
            said.append(tuple(line["value"]))
        else:
            assert "failed" not in line["value"], line
            sources[line["value"]["name"]], said = set(said), []
    return sources


def test_compilers_make_the_kernels_that_calls_launch(bench, emulated, monkeypatch):
    """For every family, of a device whose driver is not there: the very sources, as they are in the cache's key."""
    device = {"name": b"NVIDIA H100 80GB HBM3", "totalGlobalMem": 85 << 30}
    monkeypatch.setattr(cuda_fakes, "PROPERTIES", cuda_fakes.PROPERTIES | device)
    tiny = bench.gpu_cases.tiny(("squares", "w4a16", "few", "int8"))
    every = [bench.lease_plan._job("measure", x) for x in {x.section: x for x in tiny}.values()]
    survey = bench.lease_plan._job("check", bench.gpu.product("33x48x96:bf16:col"))
    made = compiled(bench.gpu_compile.H100, [*every, survey])
    real, seen = nvrtc.compile_cuda, set()

    def spied(source, name, architecture):
        seen.add((name, architecture, source))
        return real(source, name, architecture)

    monkeypatch.setattr(nvrtc, "compile_cuda", spied)
    for job in every:
        seen.clear()
        row = bench.gpu_measure.measure(
            emulated, bench_arrays.HostPeers(emulated), bench.gpu_cases.Case(**job["case"]), l2=1, check_only=True
        )
        assert row["state"] == "ok", row
        assert seen, job
        assert seen <= made[job["name"]], job["name"]
    assert len(made[survey["name"]]) > 3


def test_compilers_share_jobs_and_end_in_time(bench):
    stub = [sys.executable, "-c", COMPILER]
    every = [*jobs("a", "dies", "b"), {"name": "s", "do": "survey", "case": {}}, *jobs("hangs")]
    began = time.monotonic()
    compilers = bench.gpu_compile.Compilers(stub, {}, every, count=2, seconds=3.0)
    compilers.early(0.1)
    assert time.monotonic() - began < 2
    found = compilers.wait()
    assert time.monotonic() - began < 15
    names = {x["name"] for x in bench.gpu_compile.split(every)}
    assert {"a", "b", "s part 0", "s part 3"} <= names
    assert {x["name"] for x in found["failed"]} == {"dies", "hangs"}
    assert found["jobs"] == len(names)


# -- surveys ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        ("epilogue", 9, 24, 40, "bf16", "row"), ("bias", 9, 24, 40, "bf16", "col", "gelu"),
        ("codes", 5, 24, 256, "bf16", "row"), ("grouped", 20, 24, 32, "bf16", "row", "3"),
        ("attention", 40, 2, 64, "bf16", "row", "causal"), ("int8", 9, 24, 32, "s8", "col"),
    ],
    ids=lambda x: x[0],
)  # fmt: skip
def test_candidates_of_every_family_are_surveyed(bench, emulated, given, capsys):
    case = bench.gpu_cases.Case("schedules", *given)
    found = bench.gpu_schedules.survey(emulated, case, l2=1, most=3, turns=1, threads=1, said=True)
    assert len(found["rows"]) == min(3, found["candidates"])
    assert len({x["spelt"] for x in found["rows"]}) == len(found["rows"])
    assert all(x["right"] and x["seconds"] > 0 for x in found["rows"]), found["rows"]
    said = [json.loads(x)["kind"] for x in capsys.readouterr().out.splitlines()]
    assert said == ["built"] * len(found["rows"]) + ["trying", "part"] * len(found["rows"])
    # The candidates differ in what was launched, and calls are as before afterwards.
    again = bench.gpu_schedules.survey(
        emulated, case, l2=1, most=3, turns=1, threads=1, skip=[found["rows"][0]["spelt"]]
    )
    assert found["rows"][0]["spelt"] not in [x["spelt"] for x in again["rows"]]
    json.dumps(found)


def test_a_forced_schedule_is_what_runs(bench, emulated):
    case = bench.gpu.product("33x48x96:bf16:col")
    work = bench.gpu_families.made(emulated, bench.gpu_peers.NoPeers(), case, 1)
    seen = bench.gpu_schedules.opened(work.ours, work.sets[0])
    launched = set()
    for x in bench.gpu_schedules.of_each_kind(seen.found)[:4]:
        built = x.build()
        emulated.cupy.launches.clear()
        with seen.forced(built):
            work.ours(work.sets[0])
        names = {name for name, *_ in emulated.cupy.launches}
        assert names == {x.name for x, _ in built.kernels}
        launched |= names
    assert len(launched) >= 2


def test_a_candidate_that_fails_is_a_row(bench, emulated, monkeypatch):
    real = bench.gpu_schedules._measured
    tried = []

    def failing(*given):
        tried.append(given)
        if len(tried) == 2:
            raise MemoryError("none left")
        return real(*given)

    monkeypatch.setattr(bench.gpu_schedules, "_measured", failing)
    found = bench.gpu_schedules.survey(emulated, bench.gpu.product("9x24x40:f32:row"), l2=1, most=3, turns=1, threads=1)
    assert [x["right"] for x in found["rows"]] == [True, None, True]
    assert "none left" in found["rows"][1]["why"]


# -- measuring --------------------------------------------------------------------------------


def test_short_calls_are_timed_as_graphs_of_many(bench, emulated, monkeypatch):
    """Peers too; the graph is as long as it takes to fill its time, and no call is timed without one."""
    monkeypatch.setattr(bench.gpu_measure, "FIRST_GRAPH", 2)
    monkeypatch.setattr(bench.gpu_measure, "MOST_GRAPH", 5)
    counts = []

    class Clocked(type(emulated)):
        def seconds(self, calls):
            super().seconds(calls[:1])
            return 1e-5

        def replayed(self, calls):
            counts.append(len(calls))
            return lambda: 1e-5

    on = Clocked(emulated.cupy)
    case = bench.gpu_cases.tiny(("squares",))[-1]
    row = bench.gpu_measure.measure(on, bench_arrays.HostPeers(on), case, l2=1, turns=1)
    assert set(row["graph"]) == {"portmm", "host"}
    assert counts == [2, 5, 2, 5]
    Clocked.seconds = lambda self, calls: bench_arrays.Emulated.seconds(self, calls[:1]) * 0 + 1e-2
    row = bench.gpu_measure.measure(on, bench_arrays.HostPeers(on), case, l2=1, turns=1)
    assert ("graph" in row) == (case.m <= bench.gpu_cases.GRAPHED)


def test_a_peer_that_fails_is_left_out(bench, emulated):
    class Peers(bench_arrays.HostPeers):
        def bias(self, *_):
            raise AttributeError("this version has no such function")

        def epilogue(self, *_):
            def fails(_):
                raise RuntimeError("out of luck")

            return {"host": lambda _: 1, "other": fails}

    peers = Peers(emulated)
    bias, epilogue = (bench.gpu_cases.tiny((name,))[0] for name in ("bias", "epilogue"))
    row = bench.gpu_measure.measure(emulated, peers, bias, l2=1, turns=1)
    assert (row["state"], row["right"], set(row["seconds"])) == ("ok", True, {"portmm"})
    assert "no such function" in row["missing"]["bias"]
    row = bench.gpu_measure.measure(emulated, peers, epilogue, l2=1, turns=1)
    assert (row["state"], set(row["seconds"])) == ("ok", {"portmm", "host"})
    assert "out of luck" in row["not timed"]["other"]


def test_a_broken_device_ends_the_worker(bench, emulated, monkeypatch, capsys):
    """The context that a fault leaves behind would fail all cases that follow."""

    def fault(*_, **__):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(bench.gpu_families.pm, "matmul", fault)
    every = [bench.lease_plan._job("measure", x) for x in bench.gpu_cases.tiny(("squares",))]
    given = bench.gpu.arguments(["--turns", "1"])
    bench.gpu.work(emulated, bench.gpu_peers.NoPeers(), every, given)
    assert capsys.readouterr().out.count('"state": "failed"') == len(every)  # the device is well
    monkeypatch.setattr(emulated, "wait", fault)
    with pytest.raises(SystemExit, match=str(bench.gpu_run.UNWELL)):
        bench.gpu.work(emulated, bench.gpu_peers.NoPeers(), every, given)
    assert capsys.readouterr().out.count('"state": "failed"') == 1


# -- what surveys teach -----------------------------------------------------------------------


def surveyed(bench, device="h100"):
    """A survey of which the second best prediction was fastest, as a file has it."""
    target, p = load_target(device), bench.gpu_cases.Case("x", "dense", 512, 512, 512)
    problem = Problem(p.m, p.n, p.k, "bf16", b="col")
    ranked = bench.gpu_schedules.ranked(problem, target, (8, 8, 8))
    rows = [
        {"spelt": spell(s), "predicted": c.seconds, "right": True,
         "terms": {"overlapped": c.overlapped, "added": c.added}, "seconds": c.seconds * (0.5 if i == 1 else 1.0)}
        for i, (c, s) in enumerate(ranked[:12])
    ]  # fmt: skip
    survey = {"name": "s", "problem": tuned_schedule.problem_text(problem), "rows": rows}
    return {"device": {"target": device}, "surveys": [survey]}, problem, ranked


def test_the_fastest_schedules_can_be_read_as_tuned_ones(bench, tmp_path, monkeypatch, capsys):
    data, problem, ranked = surveyed(bench)
    file, toml = tmp_path / "lease-1.json", tmp_path / "h100.toml"
    file.write_text(json.dumps(data))
    assert bench.gpu_fit.main([str(file), "--toml", str(toml)]) == 0
    assert "rank correlation" in capsys.readouterr().out
    (found,) = tuned_schedule.from_toml(toml.read_text())
    assert (found.schedule, found.problem, found.chip) == (ranked[1][1], problem, "h100")
    assert found.gain == pytest.approx(ranked[0][0].seconds / ranked[1][0].seconds / 0.5, rel=1e-3)
    database = tmp_path / "tuned.sqlite"
    tuning_database.merge(database, [toml])
    monkeypatch.setenv("PORTMM_TUNED", str(database))
    choice = schedule_choice.choose(problem, load_target("h100"), vectors=(8, 8, 8))
    assert choice.schedule == ranked[1][1]
    assert "tuned on" in choice.origin


def test_a_fit_finds_the_factor_of_a_term(bench):
    data, *_ = surveyed(bench)
    for row in data["surveys"][0]["rows"]:
        wrong = {**row["terms"]["added"], "launch": 4 * row["terms"]["added"]["launch"]}
        one = bench.gpu_fit.Row("s", "x", row["terms"]["overlapped"], wrong, 1.0)
        row["seconds"] = one.predicted({})
    rows = bench.gpu_fit.measured(data["surveys"])
    factors, left = bench.gpu_fit.fitted(rows)
    assert left < bench.gpu_fit.error(rows, {}) / 2
    assert factors["launch"] > 1.5
