"""Builds ahead: what a block needs is made in threads once the block has to run a compiler, and only then."""

import threading
import time

import numpy as np
import pytest

import portmm as pm
from portmm.build import builds_ahead, child_process, shared_object
from portmm.util import system

EMPTY = "void empty(void) {}\n"


@pytest.fixture
def two_processors(monkeypatch):
    monkeypatch.setattr(system, "processors", lambda: (0, 1))


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTMM_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("two_processors", "own_cache")
def test_builds_begin_when_a_compiler_is_needed():
    begun, both = [], threading.Barrier(2, timeout=30)

    def build():
        begun.append(threading.current_thread())
        both.wait()  # two threads are there at once

    with builds_ahead.announced(lambda: [build, build]):
        assert begun == []
        shared_object.build(EMPTY, flags=(), name="empty", symbols=("empty",))
        _wait_for(lambda: len(begun) == 2)
        shared_object.build(EMPTY + "\n", flags=(), name="empty", symbols=("empty",))
    assert len(begun) == 2
    assert threading.main_thread() not in begun


@pytest.mark.usefixtures("two_processors")
def test_a_build_that_fails_ahead_stops_no_other_and_no_block():
    done = []

    def fails():
        raise RuntimeError

    builds_ahead.begin([fails, lambda: done.append(1)])
    _wait_for(lambda: done)
    with builds_ahead.announced(fails):
        builds_ahead.compiling()


@pytest.mark.usefixtures("two_processors")
def test_what_was_not_begun_is_dropped_at_the_end_of_the_block():
    release, done = threading.Event(), []
    builds = [release.wait, release.wait, *[lambda: done.append(1)] * 8]
    with builds_ahead.announced(lambda: builds):
        builds_ahead.compiling()
    release.set()
    _wait_for(lambda: not any(t.name == "portmm-build" for t in threading.enumerate()))
    assert done == []


def test_one_processor_builds_nothing_ahead(monkeypatch):
    monkeypatch.setattr(system, "processors", lambda: (0,))
    listed = []
    with builds_ahead.announced(lambda: listed.append(1) or []):
        builds_ahead.compiling()
    assert listed == []


@pytest.mark.usefixtures("two_processors", "own_cache")
def test_kernels_of_a_program_are_built_in_several_threads(monkeypatch):
    pm.forget()
    threads, run = set(), child_process.run

    def noted(*args, **options):
        threads.add(threading.current_thread().name)
        return run(*args, **options)

    monkeypatch.setattr(child_process, "run", noted)

    @pm.fuse
    def layer(x, w, v):
        y = np.maximum(x @ w, 0)
        y = y - y.mean(-1, keepdims=True)
        return np.tanh(y @ v) + 1

    rng = np.random.default_rng(0)
    x, w, v = (rng.standard_normal(s, np.float32) for s in ((37, 48), (48, 80), (80, 33)))
    want = np.maximum(x @ w, 0)
    want = np.tanh((want - want.mean(-1, keepdims=True)) @ v) + 1
    np.testing.assert_allclose(layer(x, w, v), want, rtol=1e-4, atol=1e-4)
    assert "portmm-build" in threads
    pm.forget()


def _wait_for(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
