"""bench/lease.sh without a device: its three commands, their plan, what crashes, what time does, tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import bench_scripts
import pytest
from bench_scripts import BENCH, jobs

pytestmark = pytest.mark.rest("scripts of bench/")


@pytest.fixture
def bench(monkeypatch):
    yield from bench_scripts.modules(monkeypatch)


@pytest.fixture
def emulated(bench, monkeypatch):
    return bench_scripts.device(bench, monkeypatch)


# -- the script -------------------------------------------------------------------------------


def test_all_commands_run_without_a_device(tmp_path):
    """Through the shell, with portmm from a checkout: every phase of every command."""
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    environment["PORTMM_LEASE_CACHE"] = str(tmp_path / "cache")
    done = subprocess.run(
        ["bash", str(BENCH / "lease.sh"), "--dry-run"], env=environment, cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, third = (json.loads((tmp_path / f"lease-{i}.json").read_text()) for i in (1, 2, 3))
    assert list(first["notes"]["phases"]) == [
        "checks", "squares", "prefill", "attention", "fp8", "int8", "notes", "surveys"
    ]  # fmt: skip
    assert list(second["notes"]["phases"]) == [
        "decode", "w4a16", "epilogue", "bias", "grouped", "tf32", "f32", "few", "rows", "conv", "notes", "surveys"
    ]  # fmt: skip
    for found in (first, second, third):
        assert all(x > 0 for x in found["notes"]["phases"].values()), found["notes"]
        assert "not run" not in found["notes"]
        assert found["notes"]["compiled"]["failed"] == []
        assert found["surveys"]
        assert {x["state"] for x in [*found["rows"], *found["surveys"]]} == {"ok"}
    assert first["notes"]["copy_gbs"] > 0
    timed = {x["section"] for x in [*first["rows"], *second["rows"]] if x.get("graph")}
    assert timed >= {"squares", "prefill", "attention", "fp8", "int8", "decode", "w4a16", "bias", "rows"}
    assert any("load" in x for x in first["rows"] if x.get("sustained"))
    assert [x["tool"] for x in third["sanitizer"]] == ["memcheck", "racecheck", "synccheck"]
    assert len(third["profiles"]) == 1
    assert all((tmp_path / f"lease-{i}.log").stat().st_size for i in (1, 2, 3))
    back = [x for x in tmp_path.iterdir() if x.is_file()]
    assert len(back) <= 8
    assert sum(x.stat().st_size for x in back) < 1 << 20


def test_no_device_is_no_success(bench, tmp_path):
    nobody = [sys.executable, "-c", "1 / 0"]
    assert bench.lease.main(["2", "--out", str(tmp_path), "--seconds", "20"], nobody) == 1
    notes = json.loads((tmp_path / "lease-2.json").read_text())["notes"]
    assert "ended before its first case" in notes["stopped"]
    assert len(notes["not run"]) > 100


def test_a_word_that_is_no_command_shows_how(tmp_path):
    done = subprocess.run(
        ["bash", str(BENCH / "lease.sh"), "4"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "bash bench/lease.sh 1" in done.stdout


# -- the plan ---------------------------------------------------------------------------------


def test_plans_fit_their_time(bench):
    for plan in (bench.lease_plan.first(), bench.lease_plan.second()):
        assert len({x.name for x in plan}) == len(plan)
        assert all(job["phase"] == phase.name and job["name"] for phase in plan for job in phase.jobs)
        assert sum(x.seconds for x in plan if x.name != "surveys") <= bench.lease.SECONDS
    tools = sum(bench.lease_plan.TOOLS.values()) + sum(x.seconds for x in bench.lease_plan.third())
    assert tools + bench.lease_plan.PROFILE * 3 <= bench.lease.SECONDS
    names = {x.name for x in bench.gpu_cases.cases()}
    assert set(bench.lease_plan.PROFILED) <= names
    assert bench.lease.SECONDS < 590


def test_every_section_is_timed_and_every_family_checked_and_surveyed(bench):
    first, second = bench.lease_plan.first(), bench.lease_plan.second()
    assert all(bench.lease_plan.thinned(x).jobs for x in (*first, *second))
    every = [job for phase in (*first, *second) for job in phase.jobs]
    timed = {job["case"]["section"] for job in every if job["do"] == "measure" and not job.get("check")}
    assert timed == set(bench.gpu_cases.SECTIONS)
    assert {job["case"]["kind"] for job in every if job.get("check")} == set(bench.gpu_families.FAMILIES)
    surveyed = {job["case"]["kind"] for job in every if job["do"] == "survey"}
    assert surveyed == {"dense", "attention", "codes", "epilogue", "bias", "grouped", "tf32"}


# -- the runner -------------------------------------------------------------------------------

STUB = """
import json, os, sys, time
def say(kind, value): print(json.dumps({"kind": kind, "value": value}), flush=True)
say("device", {"title": "stub"})
for line in sys.stdin:
    job = json.loads(line)
    say("begin", job["name"])
    if job["do"] == "survey":
        for x in ("one", "two", "bad", "three"):
            if x in job.get("skip", ()): continue
            say("trying", x)
            if x == "bad": os._exit(9)
            say("part", {"spelt": x, "right": True, "seconds": 1.0})
        say("surveys", {"name": job["name"], "state": "ok", "rows": [], "candidates": 0, "correlation": None})
        continue
    if job["name"].startswith("dies"): os.kill(os.getpid(), 11)
    if job["name"].startswith("hangs"):
        os.fork() or time.sleep(60)
        time.sleep(60)
    if job["name"].startswith("slow"): time.sleep(0.3)
    say("window", "portmm")
    time.sleep(0.05)
    say("rows", {"name": job["name"], "state": "refused", "why": "a stub"})
"""


def ran(bench, every, *, budget=30, **more):
    report = bench.gpu_run.Report()
    more = {"patience": 1.0, "start": 30.0, "told": lambda _: None} | more
    bench.gpu_run.run([sys.executable, "-c", STUB], every, report, budget=budget, **more)
    return report


def test_a_case_that_crashes_loses_nothing_else(bench):
    """Nor does one that hangs with a child that holds its output."""
    began = time.monotonic()
    report = ran(bench, jobs("a", "dies", "b", "hangs", "c"))
    assert [(x["name"], x["state"]) for x in report.rows] == [
        ("a", "refused"), ("dies", "crashed"), ("b", "refused"), ("hangs", "crashed"), ("c", "refused")
    ]  # fmt: skip
    assert "status -11" in report.rows[1]["why"]
    assert time.monotonic() - began < 20


def test_a_survey_goes_on_without_the_schedule_that_crashed(bench):
    report = ran(bench, [{"name": "s", "do": "survey", "case": {"m": 1}}])
    crashed, again = report.surveys
    assert (crashed["state"], crashed["trying"]) == ("crashed", "bad")
    assert [x["spelt"] for x in crashed["rows"]] == ["one", "two"]
    assert again["state"] == "ok"


def test_a_phase_that_takes_too_long_lets_the_next_one_go_first(bench):
    every = jobs("slow1", "slow2", "slow3", phase="first") + jobs("a", phase="second")
    report = ran(bench, every, caps={"first": 0.2, "second": 5.0})
    assert [x["name"] for x in report.rows] == ["slow1", "a", "slow2", "slow3"]
    assert report.notes["phases"]["first"] >= 0.8


def test_time_that_is_over_is_over(bench, tmp_path):
    save = tmp_path / "x.json"
    began = time.monotonic()
    report = ran(bench, jobs(*(f"slow{i}" for i in range(60))), budget=2.0, save=save)
    assert time.monotonic() - began < 12
    assert len(report.rows) + len(report.notes["not run"]) == 60
    assert json.loads(save.read_text())["rows"] == report.rows


def test_clocks_are_those_of_a_contenders_time(bench):
    class Source:
        def sample(self):
            return {"sm_mhz": 1980, "watts": 650.5, "reasons": 4}

    load = bench.gpu_load.Load(Source(), every=0.005)
    (row,) = ran(bench, jobs("a"), load=load).rows
    load.stop()
    assert row["load"]["portmm"]["sm_mhz"] == 1980
    assert (row["load"]["portmm"]["watts"], row["load"]["portmm"]["reasons"]) == (650.5, ["power cap"])
    assert load.between(0, 1) == {}


def test_no_library_of_clocks_is_no_failure(bench, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(bench.gpu_load.Nvml.__init__, "__defaults__", (("libnowhere.so",),))
    load = bench.gpu_load.Load()
    assert load.source is None
    assert "libnowhere" in load.why
    assert load.between(0, time.monotonic()) == {}


# -- one case, and tools ----------------------------------------------------------------------


def test_one_case_is_run_by_name(bench, emulated, capsys):
    assert bench.profile_one.main(["f32 4x48x96", "--tiny", "--count", "2"], emulated) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["name"] == "f32 4x48x96 f32 row" or said["error"] <= 1
    assert len(said["seconds"]) == 2
    assert bench.profile_one.main(["9x24x40:f32:row", "--quick", "--count", "1"], emulated) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == []
    assert bench.profile_one.main(["--list"]) == 0
    assert set(bench.lease_plan.PROFILED) <= set(capsys.readouterr().out.splitlines())
    with pytest.raises(SystemExit, match="--list"):
        bench.profile_one.case_of("nothing like it")


NCU = """#!/bin/sh
echo '==PROF== Connected to process 1'
echo '{"name": 1}'
echo '"ID","Kernel Name","Grid Size","Block Size","gpu__time_duration.sum","smsp__average_warps_issue_stalled_w"'
echo '"","","","","us","inst"'
echo '"0","portmm_gemm","(132, 1, 1)","(384, 1, 1)","1,405.2","0.4"'
"""


def test_counters_of_kernels_are_read(bench, tmp_path):
    stub = tmp_path / "ncu"
    stub.write_text(NCU)
    stub.chmod(0o755)
    keep = tmp_path / "kept.csv"
    found = bench.gpu_tools.profiled("a case", ["x"], ncus=(str(stub),), keep=keep)
    assert found["state"] == "ok"
    assert found["kernels"] == [
        {"kernel": "portmm_gemm", "grid": "(132, 1, 1)", "block": "(384, 1, 1)",
         "gpu__time_duration.sum": "1,405.2 us", "smsp__average_warps_issue_stalled_w": "0.4 inst"}
    ]  # fmt: skip
    assert keep.read_text().count("portmm_gemm") == 1
    stub.write_text("#!/bin/sh\necho no driver >&2\nexit 3\n")
    found = bench.gpu_tools.profiled("a case", ["x"], ncus=(str(stub),))
    assert (found["state"], found["why"]) == ("failed", "status 3")
    stub.write_text("#!/bin/sh\nsleep 60 & exec sleep 60\n")
    assert bench.gpu_tools.profiled("a case", ["x"], seconds=0.3, ncus=(str(stub),))["why"] == "after 0 s"
    assert bench.gpu_tools.profiled("a case", ["x"], ncus=())["state"] == "missing"
