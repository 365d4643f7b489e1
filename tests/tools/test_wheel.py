"""The installed package is the wheel: whole, small, and what the tests import."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import import_module, metadata
from pathlib import Path

import pytest
from places import ROOT

import portmm
from portmm.version import VERSION

pytestmark = pytest.mark.rest("what is installed")

BYTES = 1_500_000
# Where the checkout has what the wheel carries, and where it lies in the wheel.
CARRIED = {"portmm": "portmm", "kernels": "portmm/kernels", "targets": "portmm/targets"}
MODULES = {"py-cpuinfo": "cpuinfo"}


def editable():
    text = metadata.distribution("portmm").read_text("direct_url.json")
    return bool(text) and json.loads(text).get("dir_info", {}).get("editable", False)


@pytest.fixture(scope="module")
def wheel():
    """Files of the installed wheel, by their path in it."""
    if editable():
        message = "portmm is installed in editable mode: there is no wheel to look at"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(message)
    files = metadata.distribution("portmm").files
    kept = [f for f in files if ".." not in f.parts and "__pycache__" not in f.parts]
    return {f.as_posix(): f.locate() for f in kept}


@pytest.mark.parametrize("name", ["portmm", "portmm.kernels", "portmm.targets", "portmm.comparison.worker"])
def test_the_tests_import_what_was_installed(wheel, name):
    assert wheel
    places = {Path(sysconfig.get_path(x)).resolve() for x in ("purelib", "platlib")}
    assert places & set(Path(import_module(name).__file__).resolve().parents)


def test_the_wheel_carries_all_of_the_source_and_nothing_else(wheel):
    expected = {
        f"{inside}/{path.relative_to(ROOT / outside).as_posix()}"
        for outside, inside in CARRIED.items()
        for path in (ROOT / outside).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    carried = {name for name in wheel if not name.partition("/")[0].endswith(".dist-info")}
    assert carried == expected
    assert {"portmm/py.typed", "portmm/targets/isa/avx512.toml", "portmm/kernels/cpu/gemm.py"} <= carried
    assert any(name.endswith("LICENSE") for name in wheel)


def test_the_wheel_is_small(wheel):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in wheel.items():
            archive.write(path, name)
    assert len(packed.getvalue()) <= BYTES


def test_public_names_keep_their_docstrings(wheel):
    """A wheel has no docstrings of internal modules, except of what `portmm` exports."""
    assert wheel
    public = {x: getattr(portmm, x) for x in portmm.__all__ if not x.startswith("__")}
    assert [x for x, y in public.items() if callable(y) and not y.__doc__] == []


def test_metadata(wheel):
    assert wheel
    found = metadata.metadata("portmm")
    assert metadata.version("portmm") == portmm.__version__ == VERSION
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert {"compiler", "peers", "plot", "all", "test"} <= set(found.get_all("Provides-Extra"))


def imported():
    """Top-level names that portmm imports, wherever in a module."""
    for path in (ROOT / "portmm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
                yield from (x.value.partition(".")[0] for x in node.args if isinstance(x, ast.Constant))


def test_dependencies_are_those_that_are_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", text)[0] for text in project["dependencies"]]
    needed = {MODULES.get(name, name) for name in names}
    foreign = set(imported()) - set(sys.stdlib_module_names) - {"portmm"}
    assert needed <= foreign, "declared and never imported"
    optional = {"cupy", "matplotlib", "ml_dtypes", "onnx", "onnxoptimizer", "onnxruntime", "pyopencl", "torch"}
    optional |= {"array_api_compat", "dask", "distributed", "jax", "joblib", "openvino", "opt_einsum", "optuna"}
    optional |= {"ray", "scipy", "threadpoolctl"}
    assert foreign - needed <= optional, "imported and not declared"


@pytest.mark.parametrize(
    "words",
    [["doctor", "--no-libraries"], ["compare", "cube-64", "--peers", "numpy", "--rounds", "1", "--json"]],
    ids=lambda words: words[0],
)
def test_commands_work_in_the_checkout(words):
    """There the source tree lies in the way of the package, which keeps kernels and targets inside."""
    program = Path(sys.executable).with_name("portmm")
    done = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    if words[0] == "compare":
        report = json.loads(done.stdout)
        assert [e["state"] for e in report["entrants"]] == ["ok", "ok"], report["entrants"]
