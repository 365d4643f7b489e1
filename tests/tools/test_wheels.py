"""Wheels of tools/build_wheels.py, without compiling one."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from portmm.build.bundle import check, open_bundle, packed
from portmm.target.target import load_target

ROOT = Path(__file__).parents[2]


sys.path.insert(0, str(ROOT / "tools"))
import base_set  # noqa: E402 - a script, beside others that it imports
import build_wheels  # noqa: E402 - as above


def test_headers_of_a_build_without_the_lock_are_those_of_the_other_with_its_definition(tmp_path):
    usual = tmp_path / "include" / "python3.14"
    usual.mkdir(parents=True)
    (usual / "pyconfig.h").write_text("/* #undef Py_GIL_DISABLED */\n")
    (usual / "Python.h").touch()
    assert build_wheels.headers_of(usual, tmp_path) == usual
    made = build_wheels.headers_of(usual.with_name("python3.14t"), tmp_path)
    assert made.name == "python3.14t"
    assert (made / "Python.h").is_file()
    assert "\n#define Py_GIL_DISABLED 1\n" in (made / "pyconfig.h").read_text()
    assert "define Py_GIL_DISABLED" not in (usual / "pyconfig.h").read_text()
    assert build_wheels.headers_of(usual, tmp_path / "macos", build_wheels.MACOS).name == "python3.14"
    assert "HAVE_CRYPT_H" in (tmp_path / "macos" / "headers" / "python3.14" / "pyconfig.h").read_text()
    (there := usual.with_name("python3.13t")).mkdir()
    (there / "Python.h").touch()
    assert build_wheels.headers_of(there, tmp_path) == there


def test_headers_and_kernels_that_are_not_there_are_refused(tmp_path):
    for name in ("python3.12", "python3.14t"):
        with pytest.raises(SystemExit, match=r"no Python\.h in .*python3\.1"):
            build_wheels.headers_of(tmp_path / name, tmp_path)
    with pytest.raises(SystemExit, match=r"has no aarch64\.bundle"):
        build_wheels.build("aarch64", "gnu", tmp_path, "", tmp_path)


def test_kernels_that_were_made_get_the_run_time_of_another_library(tmp_path):
    answers = {"run time": (b"glibc's", ()), "schedule": (None, ("", "k0", "32")), "levels": (None, ("v3=avx2", "v2="))}
    (path := tmp_path / "x86_64.bundle").write_bytes(packed(answers, ("v3=", "avx2")))
    path.write_bytes(base_set.with_object(open_bundle(path), b"that of musl"))
    bundle = open_bundle(path)
    check(bundle)
    assert bundle.load(0)[1] == b"that of musl"
    assert [bundle.answer(x) for x in answers] == [["0"], ["", "k0", "32"], ["v3=avx2", "v2="]]


def test_the_configuration_of_cibuildwheel_runs_the_script_of_the_base_set():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    script, *_ = (x for x in table["before-build"].split() if x.endswith(".py"))
    assert (ROOT / script).is_file()
    options = {table["environment"]["PORTMM_LIBC"], *(x["environment"]["PORTMM_LIBC"] for x in table["overrides"])}
    assert options == set(build_wheels.PLATFORMS)


def test_blocks_are_declared_small_as_kernels_define_them():
    declared = re.search(r"static void block\((.*?)\) __attribute__", base_set.SMALL_BLOCKS)[1]
    kernel = (ROOT / "tests" / "golden" / "fused_avx512.c").read_text()
    defined = re.search(r"static void block\((.*?)\) {", kernel)[1]
    assert [re.sub(r"\w+$", "", x).strip() for x in defined.split(",")] == [x.strip() for x in declared.split(",")]


def test_a_chip_selects_the_level_that_was_made_for_it():
    for platform, levels in base_set.LEVELS.items():
        assert [base_set.level_of(load_target(chip), platform) for chip, _ in levels.values()] == list(levels)


def test_the_levels_of_instances_are_those_of_the_docs():
    rows = [
        f"| `{level}` | {' | '.join(', '.join(x) for x in of.values())} |" for level, of in base_set.families().items()
    ]
    text = (ROOT / "docs" / "deployment.md").read_text()
    assert [x for x in rows if x not in text] == []
