"""The doctor, and the command that shows what it finds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from places import HOSTS
from test_cli import _own_cache, data, run  # noqa: F401 - each test has a cache of its own

from portmm.build import compiler
from portmm.cli import doctor
from portmm.errors import NoCompilerError
from portmm.host import detect


def states(checks):
    return {check["name"]: check["state"] for check in checks}


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler, "_ziglang", lambda: None)
    compiler._find.cache_clear()
    yield
    compiler._find.cache_clear()


def test_a_machine_that_runs_the_tests_is_fit():
    found = data("doctor", "--no-libraries")
    assert found["usable"]
    assert {check["state"] for check in found["checks"]} <= {"ok", "note", "warn"}
    assert states(found["checks"])["kernel"] == "ok"
    assert states(found["checks"])["compiler"] == "ok"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_doctor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor, "_TRIAL", "raise SystemExit('no compiler either')")
    found = data("doctor", "--no-libraries", status=1)
    assert not found["usable"]
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["compiler"]["state"] == "fail"
    assert "ziglang" in checks["compiler"]["text"]
    assert checks["compiler"]["remedy"]
    assert checks["kernel"] == {**checks["kernel"], "state": "fail", "text": "no compiler either"}
    assert checks["emulators"]["state"] == "note"
    text = run("doctor", "--no-libraries", status=1).output
    assert "fail compiler" in text
    assert "cannot make kernels" in text
    with pytest.raises(NoCompilerError):
        run("probe")


def test_a_wrong_result_or_a_dead_process_is_a_failure(monkeypatch):
    for code, words in (("assert False, 'it is wrong'", "it is wrong"), ("import os; os.abort()", "status -6")):
        monkeypatch.setattr(doctor, "_TRIAL", code)
        (check,) = doctor.run(("kernel", doctor._kernel))
        assert check.state == "fail"
        assert words in check.text


def test_the_trial_notices_numpy_in_place_of_kernels():
    env = {**os.environ, "CC": "/nonexistent/cc"}
    done = subprocess.run([sys.executable, "-c", doctor._TRIAL], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "CC='/nonexistent/cc'" in done.stderr.splitlines()[-1]


def test_an_unusable_cache_is_noticed(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / "file" / "cache"))
    (check,) = doctor.run(("cache", doctor._cache))
    assert check.state == "warn"
    assert "PORTMM_CACHE" in check.remedy


def test_a_target_that_cannot_be_is_noticed(monkeypatch):
    monkeypatch.setenv("PORTMM_TARGET", "nosuch")
    (check,) = doctor.run(("target", doctor._target))
    assert check.state == "fail"
    assert "'nosuch'" in check.text
    assert doctor.run(("measured rates", doctor._measured)) == []


@pytest.fixture
def elsewhere(monkeypatch):
    """Pretend to be a recorded host."""

    def pretend(name):
        shot = json.loads((HOSTS / f"{name}.json").read_text())["snapshot"]
        recorded = detect.Snapshot(**{**shot, "affinity": tuple(shot["affinity"])})
        monkeypatch.setattr(detect, "snapshot", lambda: recorded)
        detect.host.cache_clear()
        detect.host_features.cache_clear()

    yield pretend
    detect.host.cache_clear()
    detect.host_features.cache_clear()


def test_masked_instructions_are_noticed(elsewhere):
    elsewhere("avx512_masked")
    found = [check for check in doctor.run(("instruction sets", doctor._isas)) if check.state == "warn"]
    assert "AVX-512" in found[0].text
    assert "avx512f" in found[0].text
    assert "virtual machine" in found[0].remedy


def test_a_chip_without_a_description_is_noticed(elsewhere):
    elsewhere("masked_model")
    (check,) = doctor.run(("machine", doctor._machine))
    assert check.state == ("note" if any(m.features for m in detect.host().match) else "ok")
    elsewhere("unknown_sve512")
    (check,) = doctor.run(("machine", doctor._machine))
    assert check.state == "note"
    assert "portmm probe" in check.remedy


def test_the_second_opinion_is_only_that(monkeypatch):
    monkeypatch.setattr(detect, "cross_check", lambda: ["L2 differs"])
    assert [c.state for c in doctor.run(("py-cpuinfo", doctor._cross_check))] == ["note"]
    monkeypatch.setattr(detect, "cross_check", lambda: 1 / 0)
    assert [c.state for c in doctor.run(("py-cpuinfo", doctor._cross_check))] == ["note"]


def test_libraries_are_opened_in_processes_of_their_own():
    steps = dict(doctor.steps())
    (check,) = steps["numpy"]()
    assert check.state == "ok"
    assert np.__version__ in check.text


def test_an_error_in_a_check_is_its_finding():
    def broken():
        raise OSError("unreadable")

    assert doctor.run(("x", broken)) == [doctor.Check("x", "fail", "unreadable")]
    assert not doctor.usable(doctor.run(("x", broken)))


def test_developers_learn_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _program: None)
    checks = doctor.run(("emulators", doctor._emulators))
    assert {check.state for check in checks} == {"note"}
    assert all("apt install" in check.remedy for check in checks)


def test_missing_headers_are_noticed(monkeypatch):
    monkeypatch.setattr("portmm.runtime.cpu.python_headers", lambda: None)
    (check,) = doctor.run(("Python headers", doctor._headers))
    assert check.state == "warn"
