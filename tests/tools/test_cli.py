"""The command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from machines import TINY, require
from places import MACHINES
from typer.testing import CliRunner

from portmm.build import cache, cache_contents
from portmm.cli import main
from portmm.comparison import Entrant, Report
from portmm.comparison.report import from_json
from portmm.dispatch import config
from portmm.errors import PortmmError, TargetError
from portmm.explanation.product import explain
from portmm.host import calibrate, detect, machine_load
from portmm.spec.problem import Problem
from portmm.target.target import clouds, names

SCRIPT = Path(sysconfig.get_path("scripts"), "portmm")
HOST = detect.host()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "_targets", {})
    monkeypatch.setattr(machine_load, "now", lambda: 0.0)


@pytest.fixture
def quick(monkeypatch):
    """Measurements that take no time."""
    monkeypatch.setattr(calibrate, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate, "MEMORY_CACHES", 0)
    monkeypatch.setattr(config, "_targets", {"": HOST.limited_to(HOST.isas[-1].name)})


def run(*words, status=0):
    done = CliRunner().invoke(main.app, [str(w) for w in words], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done


def data(*words, status=0):
    return json.loads(run(*words, "--json", status=status).stdout)


# --- as a program ------------------------------------------------------------


def program(*words, **env):
    return subprocess.run(
        [SCRIPT, *words], capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1", **env}
    )


def test_the_installed_program():
    done = program("--help")
    assert done.returncode == 0
    for name in ("target", "targets", "probe", "explain", "emit", "compare", "cache", "doctor"):
        assert f" {name} " in done.stdout
    assert done.stderr == ""


def test_an_error_is_one_line_without_a_traceback():
    done = program("explain", "3", "4", "5", "--target", "nosuch")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("portmm: no target called 'nosuch'")


def test_a_target_that_cannot_run_here_is_refused_by_name():
    other = "haswell" if HOST.arch == "aarch64" else "neoverse-n1"
    done = program("target", PORTMM_TARGET=other)
    assert done.returncode == 1
    assert other in done.stderr
    assert "Traceback" not in done.stderr


def test_help_loads_nothing_slow():
    code = (
        "import sys\nfrom portmm.cli import main as cli\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(cli.app, ['--help']).exit_code == 0\n"
        "slow = {'cffi', 'cpuinfo', 'torch', 'matplotlib', 'portmm.codegen.c_kernel', 'portmm.comparison.contest'}\n"
        "slow &= set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version():
    from portmm.version import VERSION

    assert run("--version").stdout == f"portmm {VERSION}\n"


# --- targets -----------------------------------------------------------------


def test_this_machine_is_shown():
    shown = data("target")
    assert shown["name"] == HOST.name
    assert shown["isas"] == [isa.name for isa in HOST.isas]
    assert [(x["name"], x["bytes"]) for x in shown["levels"]] == [(x.name, x.bytes) for x in HOST.levels]
    text = run("target").output
    assert HOST.title in text
    assert all(atom.name in text for isa in HOST.isas for atom in isa.atoms)
    assert "portmm probe" in text


def test_another_machine_is_shown():
    assert data("target", "neoverse-n1")["arch"] == "aarch64"
    assert "Graviton2" in run("target", "neoverse-n1").stdout
    assert data("target", MACHINES / "tiny.toml")["name"] == TINY.name


def test_a_device_is_shown_with_its_limits():
    shown = data("target", "h200")
    assert shown["device"]["processors"] == 132
    assert shown["device"]["architecture"] == "90a"
    text = run("target", "h200").stdout
    assert all(part in text for part in ("cuda for 90a", "132 processors", "warps of 32", "4800 GB/s"))
    assert "GB/s" not in run("target", "mali-g710").stdout.split("atoms")[0]


def test_all_chips_are_listed_with_their_clouds():
    rows = {row["name"]: row for row in data("targets")}
    assert set(rows) == set(names("chip"))
    for family in clouds():
        for chip in family.chips:
            assert family.name in rows[chip]["clouds"][family.cloud]
    text = run("targets").stdout
    assert all(name in text for name in names("chip"))


# --- probe -------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_probe_is_remembered():
    found = data("probe", "--seconds", "0.001")
    atoms = {atom.name for atom in HOST.isas[-1].atoms}
    levels = {level.name for level in HOST.levels}
    assert atoms | levels | {"memory"} <= set(found["rates"])
    config._targets.clear()
    with_rates = calibrate.measured(HOST.limited_to(HOST.isas[-1].name))
    assert with_rates.measured == found["rates"]


@pytest.mark.usefixtures("quick")
def test_a_probe_is_shown():
    text = run("probe", "--seconds", "0.001").output
    assert all(atom.name in text for atom in HOST.isas[-1].atoms)
    assert "GB/s" in text
    assert "kept in" in text


@pytest.mark.usefixtures("quick")
def test_a_busy_machine_is_not_probed_unless_it_is_forced(monkeypatch):
    monkeypatch.setattr(machine_load, "now", lambda: 0.9 * machine_load.cores())
    with pytest.raises(PortmmError, match=r"keep .* cores busy.*--force"):
        run("probe", "--seconds", "0.001")
    here = HOST.limited_to(HOST.isas[-1].name)
    assert not calibrate.measured(here).measured
    assert data("probe", "--seconds", "0.001", "--force")["rates"] == calibrate.measured(here).measured
    monkeypatch.setattr(machine_load, "others", lambda *_: 0.9 * machine_load.cores())
    assert "the machine was busy" in run("probe", "--seconds", "0.001", "--force").output


@pytest.mark.usefixtures("quick")
def test_a_probe_is_forgotten():
    here = HOST.limited_to(HOST.isas[-1].name)
    calibrate.remember(here, {"L1": 5.0})
    assert "are removed" in run("probe", "--forget").stdout
    assert not calibrate.measured(here).measured
    assert "there are no measured rates" in run("probe", "--forget").stdout


# --- explain and emit --------------------------------------------------------


def test_explain():
    found = explain(Problem(300, 200, 100, "f64", a="col", b="col"), target="zen3", threads=2)
    words = ("explain", 300, 200, 100, "--dtype", "f64", "--a", "col", "--b", "col", "--target", "zen3", "--threads", 2)
    assert run(*words).stdout == found.summary() + "\n"
    assert run(*words, "--source").stdout == f"{found}"
    assert data(*words) == json.loads(json.dumps(found.as_dict()))


def test_explain_a_packed_weight_and_a_batch():
    assert data("explain", 4, 768, 768, "--b", "packed", "--target", "zen4")["problem"]["family"].startswith("f32x")
    found = data("explain", 8, 8, 8, "--batch", 1000, "--static", "--deterministic", "--c", "col")["problem"]
    assert (found["batch"], found["static"], found["deterministic"], found["c"]) == (1000, True, True, "col")


def test_explain_can_build():
    found = data("explain", 30, 30, 30, "--build")
    assert Path(found["artifact"]).is_file()
    assert "gcc" in found["command"][0] or found["command"]
    assert found["artifact"] in run("explain", 30, 30, 30, "--build").stdout


def test_emit_is_the_source_of_the_choice():
    source = run("emit", 100, 100, 100, "--target", "neoverse-n1").stdout
    assert source == explain((100, 100), (100, 100), target="neoverse-n1").source
    assert "neon" in source.splitlines()[0]


def test_an_emitted_kernel_is_made_again_by_what_its_head_says():
    source = run("emit", 20, 30, 40, "--target", "zen4", "--a", "col").stdout
    command = next(line for line in source.splitlines() if "made again by: portmm emit" in line)
    words = command.partition("portmm ")[2].removesuffix(" */").split()
    assert run(*words).stdout == source


def test_what_is_emitted_for_another_machine_compiles(tmp_path):
    cc = require("aarch64-linux-gnu-gcc")
    path = tmp_path / "kernel.c"
    path.write_text(run("emit", 512, 512, 512, "--target", "neoverse-n1").stdout)
    flags = ("-O2", "-ffp-contract=fast", "-Wall", "-Werror", "-Wno-unused-function", "-fPIC", "-shared", "-nostdlib")
    subprocess.run([cc, *flags, path, "-o", tmp_path / "kernel.so"], check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("emit",), "pass M, N and K"),
        (("emit", 3, 4), "pass M, N and K"),
        (("emit", "--schedule", "nonsense"), "is not a schedule"),
        (("warmup", "8xax8"), "'8xax8'"),
        (("bundle", "x.bundle", "--shapes", "nosuch.txt"), "nosuch.txt"),
        (("bundle", "x.bundle", "--from-cache", "--threads", "two"), "'two'"),
        (("bundle", "x.bundle", "--check", "--c", "lib"), "--shapes FILE"),
        (("explain", 3, 4, 5, "--a", "diagonal"), "'diagonal'"),
        (("explain", 3, 4, 5, "--dtype", "f8"), "'f8'"),
        (("explain", 0, 4, 5), "equal to 1"),
        (("compare", "nosuch"), "nosuch"),
        (("compare", "smoke", "--peers", "nosuch"), "nosuch"),
    ],
)
def test_a_slip_of_the_user_is_explained(words, said):
    assert said in run(*words, status=2).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("report", "nosuch"), "no file nosuch"),
        (("superoptimize", "nofunction", "3x3"), "write FILE.py:NAME"),
        (("superoptimize", "operator:matmul", "3x3", "--save", "no/folder/x.json"), "its folder must exist"),
        (("superoptimize", "operator:matmul", "3x3"), "cannot be called with arrays of shapes 3x3"),
        (("superoptimize", "operator:matmul", "3x3", "4x4"), "cannot multiply"),
    ],
)
def test_a_wrong_argument_is_an_error_of_portmm(words, message):
    with pytest.raises(PortmmError, match=message):
        run(*words)


def test_a_file_that_is_no_certificate_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[1]")
    with pytest.raises(PortmmError, match="no certificate"):
        run("verify", path)


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(contest, monkeypatch, tmp_path):
    monkeypatch.setattr("portmm.comparison.pictures.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"portmm\[plot\]"):
        run("compare", "--plot", tmp_path / "x.png")
    assert not contest


def test_errors_pass_through_to_main(monkeypatch, capsys):
    with pytest.raises(TargetError):
        run("emit", 3, 4, 5, "--target", "nosuch")
    for error in (PortmmError("several\nlines [red]"), ImportError("a plot needs x"), OSError("no space")):
        monkeypatch.setattr(main, "app", lambda error=error: (_ for _ in ()).throw(error))
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 1
        assert capsys.readouterr().err == f"portmm: {error}\n"


# --- compare -----------------------------------------------------------------


@pytest.fixture
def contest(monkeypatch):
    """A comparison that only writes down what it was asked."""
    asked = {}

    def fake(suite, **options):
        asked.update(options, suite=suite)
        options["progress"](0, 1, "starting")
        return Report("a chip", "machine", options["threads"], "", suite, (Entrant("portmm", False, "ok", "1"),), ())

    monkeypatch.setattr("portmm.comparison.compare", fake)
    return asked


def test_compare_passes_on_what_was_asked(contest, tmp_path):
    path, picture = tmp_path / "report.json", tmp_path / "report.png"
    words = ["smoke", "--threads", 0, "--peers", "numpy, mkl", "--target", "avx2", "--budget", 5, "--rounds", 3]
    shown = run("compare", *words, "--save", path, "--json").stdout
    assert from_json(shown) == from_json(path.read_text())
    assert contest["suite"] == "smoke"
    assert contest["threads"] == HOST.cores
    assert list(contest["contenders"]) == ["portmm", "numpy", "mkl"]
    assert (contest["target"], contest["budget_s"], contest["rounds"]) == ("avx2", 5.0, 3)
    pytest.importorskip("matplotlib")
    run("compare", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert contest["contenders"] is None


def test_compare_shows_a_table(contest):
    assert "a chip" in run("compare").stdout
    assert contest["suite"] == "quick"
    assert contest["threads"] == 1


# --- cache -------------------------------------------------------------------


def test_the_cache_is_listed_and_cleared():
    assert data("cache")["kernels"] == []
    artifact = explain((9, 9), (9, 9)).artifact
    found = data("cache")
    assert [entry["key"] for entry in found["kernels"]] == [artifact.key]
    assert found["bytes"] == cache_contents.cache_size()
    text = run("cache").stdout
    assert artifact.key[:12] in text
    assert run("cache", "--where").stdout == f"{cache.cache_dir()}\n"
    assert "removed" in run("cache", "--clear").stdout
    assert data("cache")["kernels"] == []
    assert not artifact.path.exists()
