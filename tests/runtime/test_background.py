"""Kernels that are built in the background, while others with the same results serve the calls."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import config, cpu_background, cpu_kernels, cpu_routes, missing, schedule_choice
from portmm.errors import BuildError, NoCompilerError
from portmm.ops import routes
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import UNCONVERTED
from portmm.spec.problem import Problem
from portmm.spec.row_classes import rows
from portmm.util.memo import forget_all

N, K = 160, 200


@pytest.fixture
def two(monkeypatch):
    """Two sizes of M whose kernels differ, where the first one's may serve the second; that is not loaded yet."""
    target = config.target()
    pm.set_num_threads(1)
    pm.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    cpu_background.wait()
    forget_all()
    runtime().clear_memo()
    monkeypatch.setattr(route_cache, "of_target", lambda _target: None)
    best = {m: schedule_choice.select_for_class(Problem(m, N, K), target, 1) for m in range(5, 300)}
    for m, first in best.items():
        for other in range(m + 1, 300):
            second = best[other]
            differ = second.schedule != first.schedule and first.schedule in second.listed.schedules
            if differ and cpu_background.same_results(first.schedule, second.schedule):
                return m, other, first.schedule, second.schedule
    pytest.skip("one kernel serves all rows here")


def product(m):
    """A product of M rows, and of the same rows the reference."""
    rng = np.random.default_rng(m)
    a, b = (rng.standard_normal(x).astype(np.float32) for x in ((m, K), (K, N)))
    return pm.matmul(a, b), a.astype(np.float64) @ b.astype(np.float64)


@pytest.fixture
def held(monkeypatch):
    """Events: a kernel is about to be built in the background, and may be."""
    started, free = threading.Event(), threading.Event()
    build = cpu_kernels._built

    def built(*args):
        if threading.current_thread() is not threading.main_thread():
            started.set()
            assert free.wait(30)
        return build(*args)

    monkeypatch.setattr(cpu_kernels, "_built", built)
    yield started, free
    free.set()


def test_the_route_is_in_the_cache_when_its_kernel_is(two, held, monkeypatch):
    m, other, *_ = two
    _, free = held
    kept = route_cache.RouteCache(route_cache.ROUTES + "background")
    product(m)
    monkeypatch.setattr(route_cache, "of_target", lambda _target: kept)
    product(other)
    p = Problem(other, N, K)
    questions = [route_cache.question(p, x, 1) for x in (rows(p), (other, other))]
    assert not any(q in kept.lines for q in questions)
    free.set()
    cpu_background.wait()
    assert any(q in kept.lines for q in questions), "the next process finds it"


def test_calls_are_served_while_a_kernel_is_built(two, held):
    m, other, _, wanted = two
    started, free = held
    target = config.target()
    product(m)
    before, reference = product(other)
    assert started.wait(30)
    assert not cpu_kernels.is_loaded(wanted, target)
    again, _ = product(other)
    free.set()
    cpu_background.wait()
    assert cpu_kernels.is_loaded(wanted, target)
    size = runtime().memo_size()
    after, _ = product(other)
    assert runtime().memo_size() == size + 1, "what served meanwhile is not remembered"
    np.testing.assert_allclose(before, reference, atol=1e-3)
    assert before.tobytes() == again.tobytes() == after.tobytes()


def test_a_failure_in_the_background_is_that_of_the_next_call(two, monkeypatch):
    m, other, *_ = two
    product(m)

    def failing(*_args):
        raise BuildError("no room")

    monkeypatch.setattr(cpu_kernels, "_built", failing)
    p = Problem(other, N, K)
    assert routes.routed_for_call(p)[1] is None
    cpu_background.wait()
    with pytest.raises(BuildError, match="no room"):
        routes.routed_for_call(p)


def test_without_a_compiler_what_serves_is_told_at_once(two, monkeypatch):
    """Also by a program that ends after the call: no thread outlives it."""
    m, other, _, wanted = two
    product(m)
    missing.forget()
    without = NoCompilerError("no C compiler was found")

    def failing(*_args):
        raise without

    monkeypatch.setattr(cpu_kernels, "_built", failing)
    monkeypatch.setattr("portmm.build.compiler.find_compiler", failing)
    monkeypatch.setattr(cpu_routes, "stored_code", cpu_kernels.known_code)  # tests before have filled the cache
    monkeypatch.setattr(cpu_background, "begin", lambda *_args: pytest.fail("nothing can be built"))
    with pytest.warns(
        RuntimeWarning, match=f"for {other} x {N} x {K} f32 .* is not there, and another .* no C compiler"
    ):
        result, reference = product(other)
    np.testing.assert_allclose(result, reference, atol=1e-3)
    assert not cpu_kernels.is_loaded(wanted, config.target())
    forget_all()
    runtime().clear_memo()
    monkeypatch.setenv("PORTMM_MISSING", "error")
    with pytest.raises(NoCompilerError):
        product(other)


def test_routes_that_are_kept_wait_for_their_kernel(two, held):
    m, other, _, wanted = two
    held[1].set()
    product(m)
    routes.routed(Problem(other, N, K))
    assert cpu_kernels.is_loaded(wanted, config.target())


def test_a_slow_kernel_takes_no_place(two, monkeypatch):
    m, other, first, wanted = two
    product(m)
    listed = (wanted, first)
    assert cpu_background.stand_in(Problem(other, N, K), wanted, listed, lambda: [1.0, 1.001], first.__eq__) is first
    assert cpu_background.stand_in(Problem(other, N, K), wanted, listed, lambda: [1.0, 1.1], first.__eq__) is None
    del monkeypatch


@pytest.mark.parametrize("dtype", UNCONVERTED)
def test_schedules_in_the_place_of_others_give_the_same_bits(dtype):
    """Each candidate that may serve for the selected one."""
    target, rng = config.target(), np.random.default_rng(0)
    p = Problem(37, 83, 1000, dtype)
    best = schedule_choice.select_for_class(p, target, 1)
    alike = [s for s in best.listed.schedules if cpu_background.same_results(s, best.schedule)]
    assert "k" in best.schedule.parallel.over or best.schedule in alike
    kind = np.dtype(np.float64 if dtype == "f64" else np.float32)
    a, b = (rng.standard_normal(x).astype(kind) for x in ((p.m, p.k), (p.k, p.n)))
    pm.matmul(a, b)
    results = set()
    for s in alike[:: max(1, len(alike) // 6)]:
        c = np.empty((p.m, p.n), kind)
        route = cpu_routes.route_by(s, replace(p), target, 1)
        runtime().execute(route, p.m, p.n, p.k, 1, a, p.k, 1, 0, b, p.n, 1, 0, c, p.n, 1, 0, None)
        results.add(c.tobytes())
    assert len(results) <= 1
