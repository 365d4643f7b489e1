"""Many threads of Python, settings in each of them, and fork in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from arrays_of import close

import portmm as pm
from portmm.dispatch import config
from portmm.ops import host_matmul, routes
from portmm.runtime import cpu as cpu_runtime
from portmm.spec.problem import Problem

QUICKLY = "fast"


def operands(seed):
    rng = np.random.default_rng(seed)
    m, n, k = rng.integers(1, 90, 3)
    dtype = (np.float32, np.float64)[seed % 2]
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)


def test_many_threads_get_right_results():
    def one(seed):
        a, b = operands(seed % 40)
        weight = pm.pack(b) if seed % 3 == 0 else b
        with pm.config(threads=1 + seed % 3):
            close(pm.matmul(a, weight), a, b, seed)
        close(pm.matmul(a, weight), a, b, seed)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))


def test_threads_share_a_plan_and_a_weight():
    a, b = operands(7)
    packed = pm.pack(b)
    plan, bound = pm.plan(a, b), pm.plan(a, packed)
    want = pm.matmul(a, b)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda i: plan(a, b) if i % 2 else bound(a), range(200)):
            close(got, a, b)
    close(want, a, b)


def test_config_belongs_to_its_thread():
    inside, leave, seen = threading.Event(), threading.Event(), {}

    def other():
        with pm.config(threads=7, deterministic=True):
            seen["within"] = pm.get_num_threads()
            inside.set()
            leave.wait(30)

    before = pm.get_num_threads()
    worker = threading.Thread(target=other)
    worker.start()
    assert inside.wait(30)
    seen["beside"] = pm.get_num_threads()
    a, b = operands(3)
    close(pm.matmul(a, b), a, b)
    leave.set()
    worker.join()
    assert seen == {"within": 7, "beside": before}


def test_config_nests():
    before = pm.get_num_threads()
    with pm.config(threads=3):
        with pm.config(deterministic=True):
            assert pm.get_num_threads() == 3
            with pm.config(threads=1):
                assert pm.get_num_threads() == 1
        assert pm.get_num_threads() == 3
        with pytest.raises(pm.TargetError), pm.config(target="no such machine"):
            pass
        assert pm.get_num_threads() == 3
    assert pm.get_num_threads() == before


def test_the_number_of_threads_can_be_set():
    before = pm.get_num_threads()
    try:
        for threads in (1, 2, 5):
            pm.set_num_threads(threads)
            assert pm.get_num_threads() == threads
            for seed in range(6):
                a, b = operands(seed)
                close(pm.matmul(a, b), a, b)
        with pytest.raises(ValueError, match="-1"):
            pm.set_num_threads(-1)
    finally:
        pm.set_num_threads(0)
    assert pm.get_num_threads() == before


def test_routes_of_one_number_of_threads_are_not_those_of_another():
    host_matmul.begin()
    p, workers = Problem(1030, 1030, 1030), {}
    for threads in (3, 2, 1):
        with pm.config(threads=threads):
            workers[threads] = routes.route(p).workers
    assert workers == {1: 1, 2: 2, 3: 3}


# In a process of its own: the run of the tests has threads that a fork would lose.
FORKS = """
import os, sys
import numpy as np
import portmm as pm
pm.set_num_threads(3)
a = np.random.default_rng(0).standard_normal((400, 300)).astype(np.float32)
want = pm.matmul(a, a.T)
for _ in range(3):
    child = os.fork()
    if not child:
        same = all(np.array_equal(pm.matmul(a, a.T), want) for _ in range(5))
        other = pm.matmul(a[:33], a.T)
        os._exit(0 if same and np.allclose(other, want[:33], atol=1e-3) else 1)
    got = pm.matmul(a, a.T)
    _, status = os.waitpid(child, 0)
    if status or not np.array_equal(got, want):
        sys.exit(f"child {status}")
print("done")
"""


def test_fork_in_the_middle():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "done"


@pytest.mark.parametrize(
    ("threads", "error"), [(1.5, TypeError), ("2", TypeError), (-1, ValueError), (2**40, ValueError)]
)
def test_impossible_numbers_of_threads(threads, error):
    with pytest.raises(error, match="thread"):
        pm.set_num_threads(threads)
    with pytest.raises(error, match="thread"), pm.config(threads=threads):
        pass


@pytest.mark.parametrize("text", ["abc", "-3", "1e3", "100000"])
def test_a_wrong_variable_warns_and_takes_every_core(monkeypatch, text):
    monkeypatch.setenv("PORTMM_NUM_THREADS", text)
    config._environment_threads.cache_clear()
    with pytest.warns(RuntimeWarning, match="PORTMM_NUM_THREADS"):
        assert config.limit() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.limit() == 0


def test_the_variable_of_openmp_counts_without_its_own(monkeypatch):
    monkeypatch.delenv("PORTMM_NUM_THREADS", raising=False)
    for text, threads in (("3", 3), ("2,4", 2), ("", 0)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert config.limit() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PORTMM_NUM_THREADS", "2")
    assert config.limit() == 2
    with pm.config(threads=1):
        assert config.limit() == 1
    monkeypatch.delenv("PORTMM_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    config._environment_threads.cache_clear()
    with pytest.warns(RuntimeWarning, match="OMP_NUM_THREADS"):
        assert config.limit() == 0


def test_a_target_is_a_string():
    with pytest.raises(TypeError, match="target"), pm.config(target=3):
        pass


def test_the_most_threads_are_what_the_pool_has_room_for():
    assert f"POOL_MAX = {config.MOST_THREADS}," in cpu_runtime.source(python=False)


WORKERS = """
import os, time, numpy as np, portmm as pm
before = os.sched_getaffinity(0)
a = np.ones((256, 256), np.float32)
known = set(os.listdir("/proc/self/task"))
pm.set_num_threads(2)
assert (pm.matmul(a, a) == 256).all()
(worker,) = set(os.listdir("/proc/self/task")) - known
assert os.sched_getaffinity(0) == before
allowed = os.sched_getaffinity(int(worker))
assert allowed < before and len(allowed) == len(before) - 1, (before, allowed)
time.sleep(0.002)
os.sched_setaffinity(0, allowed)  # the caller moves to where the worker was
assert (pm.matmul(a, a) == 256).all()
if len(allowed) == 1:
    assert os.sched_getaffinity(int(worker)) == before - allowed
os.sched_setaffinity(int(worker), allowed)  # somebody else binds the worker: it is not widened
for own in (before - allowed, allowed):
    time.sleep(0.002)
    os.sched_setaffinity(0, own)
    assert (pm.matmul(a, a) == 256).all()
    assert os.sched_getaffinity(int(worker)) <= allowed
"""


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="takes Linux and two processors"
)
def test_workers_are_kept_off_the_processor_of_the_caller():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PORTMM_RACE": "off"}
    subprocess.run([sys.executable, "-c", WORKERS], env=environment, check=True, timeout=120)


def test_products_in_a_block_of_settings_have_plans_of_their_own(monkeypatch):
    from portmm.ops import settings_plans

    rng, made = np.random.default_rng(0), []
    monkeypatch.setattr(host_matmul, "_planner", lambda *x, of=host_matmul._planner: made.append(x) or of(*x))
    settings_plans._plans.clear()
    a, b = rng.standard_normal((5, 7)).astype(np.float32), rng.standard_normal((7, 3)).astype(np.float32)
    packed, out = pm.pack(b), np.empty((5, 3), np.float32)
    for threads in (1, 2):
        with pm.config(threads=threads):
            for _ in range(3):
                close(pm.matmul(a, b), a, b)
                assert pm.matmul(a, packed, out=out) is out
                close(out, a, b)
            assert len(made) == 2 * threads
    square = rng.standard_normal((4, 4)).astype(np.float32)
    want = square @ square
    with pm.config(threads=1):
        np.testing.assert_allclose(pm.matmul(square, square, out=square), want, rtol=1e-5)
        assert len(made) == 4, "out overlaps its operands: no plan"


THREADPOOLS = """
import numpy as np, portmm as pm
{first}
a = np.ones((64, 64), np.float32)
pm.matmul(a, a)
import threadpoolctl
{then}
every = pm.get_num_threads()
own = [x for x in threadpoolctl.threadpool_info() if x["internal_api"] == "portmm"]
assert [(x["user_api"], x["num_threads"], x["version"]) for x in own] == [("blas", every, pm.__version__)], own
for limits in ({{"limits": 3}}, {{"limits": 3, "user_api": "blas"}}, {{"limits": {{"portmm": 3}}}}):
    with threadpoolctl.threadpool_limits(**limits):
        assert pm.get_num_threads() == 3
        assert (pm.matmul(a, a) == 64).all()
        with threadpoolctl.threadpool_limits(1):
            assert pm.get_num_threads() == 1
        assert pm.get_num_threads() == 3
    assert pm.get_num_threads() == every
from portmm.dispatch import config
assert config.current().threads == 0, "no number stays"
"""


@pytest.mark.parametrize(("first", "then"), [("import threadpoolctl", ""), ("", "pm.register_threadpoolctl()")])
def test_limits_of_threadpoolctl_hold(first, then):
    pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed: its limits are not tested")
    code = THREADPOOLS.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("old", [False, True])
def test_threadpoolctl_that_is_missing_or_old(monkeypatch, old):
    from types import ModuleType

    from portmm.dispatch import threadpools

    monkeypatch.setitem(sys.modules, "threadpoolctl", ModuleType("threadpoolctl") if old else None)
    with pytest.raises(pm.PortmmError, match=r"pip install 'threadpoolctl>=3\.2'"):
        threadpools.register_threadpoolctl.__wrapped__()
