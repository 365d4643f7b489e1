"""A cache that was filled with a compiler serves processes without one, and on other machines of the architecture."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from portmm.build import stored_objects
from portmm.build.compiler import common_options, find_compiler
from portmm.build.shared_object import build
from portmm.errors import NoCompilerError

CALLS = """
import json, sys, warnings
import numpy as np
{before}
import portmm as pm
from portmm.runtime import cpu

r = np.random.default_rng(0)
a, b = r.random((40, 64), np.float32), r.random((64, 48), np.float32)
x = r.integers(-9, 9, (40, 64), dtype=np.int8)
w = r.integers(-9, 9, (64, 48), dtype=np.int8)
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    weight = pm.pack(b)
    results = [pm.matmul(a, b), pm.matmul(a, weight), pm.linear(x, pm.pack(w), x_scale=0.5, w_scale=0.25)]
    results.append(pm.matmul(a, pm.pack(pm.quantize(b, bits=4, group=32))))
    results.append(pm.attention(a[None, None], a[None, None], a[None, None])[0, 0])
    exec({after!r})
print(json.dumps([type(cpu.runtime()).__name__, [str(x.message) for x in heard], [y.tolist() for y in results]]))
"""

NO_ZIG = "sys.modules['ziglang'] = None"
"""The package of a compiler is none for `find_spec` if it is None."""


def run(folder, before="", after="", **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("CC", "PORTMM_CC")}
    code = CALLS.format(before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=kept | {"PORTMM_CACHE": str(folder)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache with the kernels of all calls, and their results."""
    try:
        find_compiler()
    except NoCompilerError:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("filled")
    return folder, run(folder)


@pytest.fixture
def moved(filled, tmp_path):
    """A copy of it, as in another image: without what belongs to this machine."""
    folder = tmp_path / "moved"
    shutil.copytree(filled[0], folder)
    for note in (*folder.glob("book-*"), *folder.glob("compiler-*"), *folder.glob("rates-*")):
        note.unlink()
    return folder


def test_the_run_time_and_all_kernels_come_from_the_cache(filled, moved, tmp_path):
    (tmp_path / "empty").mkdir()
    headerless = "cpu.python_headers = lambda: None"
    before = f"import sys; {NO_ZIG}\nfrom portmm.runtime import cpu; {headerless}"
    kind, heard, results = run(moved, before, PATH=str(tmp_path / "empty"))
    assert kind == filled[1][0]
    assert heard == []
    for result, expected in zip(results, filled[1][2], strict=True):
        np.testing.assert_array_equal(result, expected)
    again = run(moved, before, PATH=str(tmp_path / "empty"))
    assert again == [kind, heard, results]


def test_another_kernel_takes_the_place_of_one_that_is_missing(moved, tmp_path):
    (tmp_path / "empty").mkdir()
    bare = {"before": f"import sys; {NO_ZIG}", "PATH": str(tmp_path / "empty")}
    build_second = """
from portmm.dispatch import config, cpu_kernels, schedule_choice
from portmm.spec.problem import Problem
target = config.target()
choice = schedule_choice.choose(Problem(200, 400, 500), target, config.get_num_threads())
cpu_kernels.code_of(choice.runners_up[0][0], target)
results = []
"""
    run(moved, after=build_second)
    call = "pm.matmul(np.ones((200, 500), np.float32), np.ones((500, 400), np.float32))"
    failing = f"""
try:
    {call}
    results = [np.array("")]
except pm.BuildError as error:
    results = [np.array(str(error))]
"""
    _, _, (message,) = run(moved, **bare, after=failing, PORTMM_MISSING="error")
    assert "no C compiler" in message
    _, heard, (result,) = run(moved, **bare, after=f"results = [{call}, {call}][:1]")
    np.testing.assert_array_equal(result, np.full((200, 400), 500))
    (message,) = heard
    assert "takes its place" in message


def test_a_compiler_that_changed_compiles_again(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "programs"
    folder.mkdir()
    program = folder / "gcc"
    shutil.copy(fake.path, program)
    monkeypatch.delenv("CC", raising=False)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{folder}:{path}")
    source = "int answer(void) { return 42; }\n"
    assert not build(source, flags=()).cached
    assert build(source, flags=()).cached
    runs, name = len(fake.runs()), stored_objects.identity(source, common_options(), os.uname().machine)
    os.utime(program, ns=(1, 1))  # another one in its place
    find_compiler.__globals__["_find"].cache_clear()
    found = stored_objects.find(name)
    assert found is not None
    assert not found.current
    program.unlink()  # or none: its kernels serve
    found = stored_objects.find(name)
    assert found is not None
    assert found.current
    assert build(source, flags=()).cached
    assert len(fake.runs()) == runs


def test_a_compiler_that_the_user_names_builds_its_own(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / "cache"))
    source = "int answer(void) { return 43; }\n"
    monkeypatch.setenv("CC", f"{fake.path} -DFIRST")
    first = build(source, flags=())
    monkeypatch.setenv("CC", str(fake.path))
    second = build(source, flags=())
    assert first.key != second.key
