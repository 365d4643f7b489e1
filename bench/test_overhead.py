"""The costs of a call, an import, a first call and a download.

Each is measured beside what it is compared with, in turns, in one process or
in fresh ones; figures are kept in the benchmark's `extra_info`.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import first_calls
import numpy as np
import pytest

import portmm as pm
from portmm.comparison.peers import Setup, environment

ROOT = Path(__file__).parent.parent
WHEEL_BYTES = 1_500_000
CALLS = 2000
FIRST = "import time, numpy as np, portmm as pm; a = np.ones((64, 64), np.float32); t = time.perf_counter(); pm.matmul(a, a); print(time.perf_counter() - t)"  # noqa: E501
IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def _fresh(code, **variables):
    env = environment(os.environ, Setup(), uses_openblas=False) | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return float(done.stdout)


def _seconds(call, calls):
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _ratio(ours, theirs, rounds, calls):
    """The median over rounds of our time over theirs."""
    ours(), theirs()
    return statistics.median(_seconds(ours, calls) / _seconds(theirs, calls) for _ in range(rounds))


@pytest.mark.parametrize(("kind", "bar"), [("plan", 0.5), ("matmul", 1.3)])
def test_a_call_on_4x4(benchmark, smoke, kind, bar):
    a, b, c = (np.ones((4, 4), np.float32) for _ in range(3))
    plan = pm.plan(a, b)
    ours = {"plan": lambda: plan(a, b, c), "matmul": lambda: pm.matmul(a, b, out=c)}[kind]
    benchmark(ours)
    ratio = _ratio(ours, lambda: np.matmul(a, b, out=c), *((1, 10) if smoke else (31, CALLS)))
    benchmark.extra_info["ratio to np.matmul"] = ratio
    assert smoke or ratio <= bar


def _calls():
    """Calls whose kernels take some ten nanoseconds, by kind; of attention, some hundred."""
    rng = np.random.default_rng(0)
    a, b, bias = (rng.random(x, np.float32) for x in ((4, 4), (4, 4), 4))
    q, k, v = (rng.random((1, 1, x, 4), np.float32) for x in (1, 2, 2))
    block = pm.fuse(lambda x: pm.maximum(x @ b + bias, 0))
    w, codes, scales = pm.pack(rng.integers(-9, 9, (4, 4), np.int8)), rng.integers(-9, 9, (4, 4), np.int8), bias
    return {
        "plain": lambda: pm.matmul(a, b),
        "epilogue": lambda: pm.matmul(a, b, epilogue=lambda x, i: pm.maximum(x + bias[i.n], 0)),
        "fuse": lambda: block(a),
        "attention": lambda: pm.attention(q, k, v),
        "linear": lambda: pm.linear(codes, w, bias, x_scale=0.1, w_scale=scales),
    }


@pytest.mark.parametrize(
    ("kind", "bar"), [("plain", 0.6), ("epilogue", 2), ("fuse", 3), ("attention", 2), ("linear", 8)]
)
def test_microseconds_of_a_call(benchmark, smoke, kind, bar):
    call = _calls()[kind]
    for _ in range(10):
        call()
    benchmark(call)
    took = 1e6 * min(_seconds(call, 10 if smoke else CALLS) for _ in range(1 if smoke else 31))
    benchmark.extra_info["microseconds"] = took
    assert smoke or took <= bar


def test_import(benchmark, smoke):
    rounds = 1 if smoke else 11
    numpy = statistics.median(_fresh(IMPORT.format("numpy")) for _ in range(rounds))
    both = statistics.median(_fresh(IMPORT.format("numpy, portmm")) for _ in range(rounds))
    benchmark.pedantic(_fresh, args=(IMPORT.format("numpy, portmm"),), rounds=1)
    benchmark.extra_info["seconds over NumPy's"] = both - numpy
    assert smoke or both - numpy <= 0.040


def test_first_calls(benchmark, smoke):
    cold, warm = [], []
    for _ in range(1 if smoke else 7):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            cold.append(_fresh(FIRST, PORTMM_CACHE=folder))
            warm.append(_fresh(FIRST, PORTMM_CACHE=folder))
    benchmark.pedantic(_fresh, args=(FIRST,), rounds=1)
    benchmark.extra_info["seconds, cold cache"] = statistics.median(cold)
    benchmark.extra_info["seconds, warm cache"] = statistics.median(warm)
    assert smoke or statistics.median(cold) <= 0.300
    assert smoke or statistics.median(warm) <= 0.005


@pytest.fixture
def one_thread():
    pm.set_num_threads(1)
    yield
    pm.set_num_threads(0)


@pytest.mark.usefixtures("one_thread")
def test_new_shapes(benchmark, smoke):
    took = first_calls.new_shapes()
    benchmark.pedantic(first_calls.new_shapes, rounds=1)
    benchmark.extra_info["microseconds to find a known kernel"] = took
    assert smoke or took <= 150


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["matmul", "packed", "linear", "linear with an epilogue", "epilogue", "batch"])
def test_another_m_of_a_class(benchmark, smoke, kind):
    over = first_calls.second_shapes(kind)
    benchmark.pedantic(first_calls.second_shapes, args=(kind,), rounds=1)
    benchmark.extra_info["microseconds over a repeated shape"] = over
    assert smoke or over <= 5


def test_a_sweep(benchmark, smoke):
    if smoke:
        pytest.skip("compiles for seconds")
    cold, warm = first_calls.sweeps()
    benchmark.pedantic(lambda: None, rounds=1)
    benchmark.extra_info["seconds beyond the products, cold cache"] = cold
    benchmark.extra_info["seconds beyond the products, warm cache"] = warm
    assert warm <= 0.050


def test_wheel(benchmark, tmp_path):
    # A copy, because a build leaves its own directory in the source tree; others may write compiled modules there.
    built, compiled = shutil.ignore_patterns(".*", "build", "*.egg-info"), shutil.ignore_patterns("__pycache__")
    tree = shutil.copytree(
        ROOT,
        tmp_path / "tree",
        symlinks=True,
        ignore=lambda at, names: (built if Path(at) == ROOT else compiled)(at, names),
    )
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    benchmark.pedantic(lambda: subprocess.run([*pip, str(tree)], check=True), rounds=1)
    (wheel,) = tmp_path.glob("*.whl")
    benchmark.extra_info["bytes"] = wheel.stat().st_size
    assert wheel.stat().st_size <= WHEEL_BYTES
