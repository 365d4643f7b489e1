"""Without a compiler that works, every public operation computes the same, with one warning."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import without_compiler

FAILING = {
    "fails": 'echo run >> {log}; echo "cc1: internal error"; exit 1',
    "hangs": "echo run >> {log}; sleep 600",
    "lies": "echo run >> {log}; exit 0",
    "has no space": "echo run >> {log}; echo 'cc1: No space left on device'; exit 1",
}
ENDS_AT_ONCE = ("--version", 'if [ "$1" = --version ]; then echo gcc 1; exit; fi')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


def run(folder, how, cc=None, cache=None):
    """Results, warnings and seconds of all operations in a new process."""
    to = folder / f"results {how}"
    env = {**os.environ, **({"CC": str(cc), "PORTMM_CACHE": str(cache)} if cc else {})}
    command = [sys.executable, without_compiler.__file__, str(to), how, str(folder)]
    subprocess.run(command, check=True, env=env, timeout=500)
    return pickle.loads(to.read_bytes())  # noqa: S301 - its own


@pytest.fixture(scope="module")
def usual(folder):
    found, said, _ = run(folder, "usual")
    assert not [x for x in said if "NumPy" in x]
    return found


@pytest.fixture(scope="module", params=[*FAILING, "missing"])
def failing(request, folder, usual, tmp_path_factory):  # noqa: ARG001 - the weights come from there
    """The outcome with a compiler that fails in one of these ways; how often it was run."""
    here = tmp_path_factory.mktemp("cc")
    program, log = here / "cc", here / "log"
    if request.param != "missing":
        program.write_text(f"#!/bin/sh\n{ENDS_AT_ONCE[1]}\n{FAILING[request.param].format(log=log)}\n")
        program.chmod(0o700)
    results, said, seconds = run(folder, request.param, program, here / "cache")
    runs = len(log.read_text().splitlines()) if log.exists() else 0
    return request.param, results, said, seconds, runs


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", without_compiler.OPERATIONS)
def test_an_operation(failing, usual, name):
    found, wanted = failing[1][name], usual[name]
    assert not isinstance(wanted, str), wanted
    assert not isinstance(found, str), found
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        if isinstance(y, str):
            assert x == y
        else:
            assert_alike(np.asarray(x), np.asarray(y), exact=name == "pack")


def assert_alike(x, y, *, exact):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    if exact or y.dtype.kind == "u":
        np.testing.assert_array_equal(x, y)
        return
    x, y, narrow = x.astype(np.float64), y.astype(np.float64), y.dtype.itemsize < 4
    np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
    sound = np.isfinite(y)
    np.testing.assert_allclose(
        x[sound], y[sound], rtol=8e-3 if narrow else 2e-5, atol=2e-4 * max(1, np.abs(y[sound]).max(initial=0))
    )


def test_one_warning(failing):
    said = [x for x in failing[2] if "NumPy" in x]
    assert len(said) == 1, failing[2]


def test_few_compilations(failing):
    """Of each source once, at most; of none but the first if nothing comes back, and of a few if it may pass."""
    how, *_, runs = failing
    assert runs <= {"hangs": 2, "missing": 0}.get(how, 40)


def test_the_second_call_is_quick(failing):
    """All together; one compilation that hangs is part of it."""
    assert sum(failing[3].values()) < 120


RECOVERY = """
import sys, time, warnings
import numpy as np, portmm as pm
from portmm.ops import host_matmul as api; from portmm.build import failed_builds as failures
from portmm.ops.prepack import packed_class
now = [time.monotonic()]
real = time.monotonic
failures.time = api.time = type("clock", (), {"monotonic": staticmethod(lambda: now[0]), "time": time.time})
from portmm.dispatch import cpu_routes as dispatch
from portmm.runtime import cpu as host
dispatch.time = failures.time
time.monotonic = lambda: now[0]
warnings.simplefilter("ignore")
a, b = np.ones((5, 64), np.float32), np.ones((64, 40), np.float32)
w = pm.pack(b)
layer = pm.fuse(lambda a, b: np.maximum(a @ b, 0))
relu = lambda s, i: pm.maximum(s, 0)
assert (pm.matmul(a, b) == 64).all() and (pm.matmul(a, w) == 64).all() and (layer(a, b) == 64).all()
assert (pm.matmul(a, b, epilogue=relu) == 64).all()
assert not host._loaded
open(sys.argv[1], "w").close()  # there is space again
now[0] += 61
assert (pm.matmul(a, b) == 64).all()
assert host._loaded and api.fast is host.runtime().matmul
assert (pm.matmul(a, w) == 64).all() and (layer(a, b) == 64).all()
assert (pm.matmul(a, b, epilogue=relu) == 64).all()
assert (pm.linear(np.ones((2, 64), np.int8), np.ones((64, 40), np.int8)) == 64).all()
assert "NumPy" not in str(layer.explain(a, b)), layer.explain(a, b)
assert isinstance(pm.pack(b), packed_class())
assert (pm.plan(a, w)(a) == 64).all()
"""


def test_a_passing_failure_does_not_end_compiling(tmp_path, real):
    """No space at first; then there is, and kernels are built, without a new process."""
    import shlex

    program, space = tmp_path / "cc", tmp_path / "space"
    program.write_text(
        f"#!/bin/sh\n{ENDS_AT_ONCE[1]}\n"
        f'if [ -e {space} ]; then exec {shlex.join(real)} "$@"; fi\n'
        "echo 'cc1: No space left on device'; exit 1\n"
    )
    program.chmod(0o700)
    env = {**os.environ, "CC": str(program), "PORTMM_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RECOVERY, str(space)], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert Path(space).exists()
