"""Wheels of tools/build_wheels.py, without compiling one."""

import importlib.util
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("build_wheels", ROOT / "tools" / "build_wheels.py")
build_wheels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_wheels)


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
    (there := usual.with_name("python3.13t")).mkdir()
    assert build_wheels.headers_of(there, tmp_path) == there


def test_the_configuration_of_cibuildwheel_runs_the_script_of_the_base_set():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    script, *_ = (x for x in table["before-build"].split() if x.endswith(".py"))
    assert (ROOT / script).is_file()
    options = {table["environment"]["PORTMM_LIBC"], *(x["environment"]["PORTMM_LIBC"] for x in table["overrides"])}
    assert options == set(build_wheels.PLATFORMS)
