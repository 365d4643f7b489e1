"""The fast path and the general way agree, on a fuzz of shapes, strides and broadcasts."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import portmm as pm
from portmm.ops import host_matmul

QUICKLY = "fast"

EXTENTS = st.integers(1, 6)


@st.composite
def operands(draw):
    """Two operands that multiply, and an output or None: any strides, no overlap."""
    m, n, k = draw(EXTENTS), draw(EXTENTS), draw(EXTENTS)
    batch = draw(st.lists(st.integers(1, 3), max_size=3))

    def own(core):
        mine = batch[draw(st.integers(0, len(batch))) :]
        return tuple(1 if draw(st.booleans()) else x for x in mine) + core

    left = own((m, k)) if draw(st.booleans()) else draw(st.sampled_from([(k,), (m, k)]))
    right = own((k, n)) if draw(st.booleans()) else draw(st.sampled_from([(k,), (k, n)]))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def laid(shape, *, repeat):
        """An array of random numbers with its axes in any order, stepped over, turned round, or repeated."""
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.sampled_from([1, 1, 1, 2, -1, -2, *([0] if repeat else [])])) for _ in shape]
        full = [shape[i] * max(1, abs(steps[i])) for i in order]
        back = rng.standard_normal(full).astype(dtype).transpose(np.argsort(order))
        view = back[(*(slice(None, None, s or 1) for s in steps), ...)]
        return (
            view if not repeat else np.broadcast_to(view[tuple(slice(0, 1 if s == 0 else None) for s in steps)], shape)
        )

    a, b = laid(left, repeat=True), laid(right, repeat=True)
    out = laid(np.matmul(a, b).shape, repeat=False) if draw(st.booleans()) else None
    return a, b, out


@pytest.fixture(scope="module", autouse=True)
def started():
    pm.set_num_threads(1)
    pm.matmul(np.ones((2, 2)), np.ones((2, 2)))
    if "runtime" not in host_matmul._state:
        pytest.skip("no compiler")


# Each new problem may compile a kernel: enough examples only where kernels are kept.
EXAMPLES = 300 if os.environ.get("PORTMM_TEST_CACHE") else 60


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(operands())
def test_fast_and_general_agree(case):
    a, b, out = case
    want = np.matmul(a.astype(np.float64), b.astype(np.float64))
    slow = host_matmul._general(a, b, None)
    for _ in range(2):
        if out is not None:
            out[...] = np.nan
        got = pm.matmul(a, b, out)
        assert got is out or out is None
        assert type(got) is type(slow) or out is not None
        assert got.dtype == a.dtype
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got, slow, rtol=1e-5, atol=1e-6)


def without_general(monkeypatch):
    """Make the general way an error, as the run time would call it."""

    def refuse(*_):
        raise AssertionError("took the general way")

    monkeypatch.setattr(host_matmul, "_general", refuse)
    host_matmul._state["runtime"].set_slow(refuse)


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("into", [False, True])
def test_what_is_planned(monkeypatch, into):
    general = host_matmul._general
    without_general(monkeypatch)
    w, ws = random(5, 6), random(3, 5, 6)
    try:
        for a, b in [
            (random(3, 4, 5), random(3, 5, 6)),
            (random(3, 4, 5), w),
            (w.T, random(2, 5, 3)),
            (random(2, 1, 4, 5), ws),
            (random(4, 5)[::-1, ::-1], w),
            (np.broadcast_to(random(5), (4, 5)), w),
            (random(5), w),
            (w, random(6)),
            (random(5), random(5)),
            (random(20, 4, 4), random(20, 4, 4)),
            (random(5), pm.pack(w)),
            (random(2, 4, 5), pm.pack(w)),
            (random(4, 5), pm.pack(ws)),
            (random(3, 4, 5), pm.pack(ws)),
            (random(2, 1, 4, 5), pm.pack(ws)),
        ]:
            want = np.matmul(a, np.asarray(b))
            for _ in range(2):
                out = np.empty(want.shape, np.float32) if into else None
                np.testing.assert_allclose(pm.matmul(a, b, out), want, rtol=1e-4, atol=1e-4)
    finally:
        host_matmul._state["runtime"].set_slow(general)


def test_what_is_not_planned_is_still_right():
    many = random(600, 1, 2, 2), random(1, 2, 2, 2)
    a, b = random(3, 3), random(3, 3)
    gaps = np.zeros((3, 6), np.float32)[:, ::2]
    for x, y, out in [(*many, None), (a, b, gaps), (a, b, a.copy().T[::-1])]:
        want = np.matmul(x, y)
        for _ in range(2):
            np.testing.assert_allclose(pm.matmul(x, y, out), want, rtol=1e-4, atol=1e-4)
    want = np.matmul(a, b[None])
    np.testing.assert_allclose(pm.matmul(a, b[None], a[None]), want, rtol=1e-4, atol=1e-4)


def test_errors_come_through_the_planner():
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot multiply"):
            pm.matmul(random(2, 3, 4), random(2, 3, 4))
        with pytest.raises(ValueError, match="do not broadcast"):
            pm.matmul(random(2, 3, 4), random(3, 4, 3))
        with pytest.raises(ValueError, match="out has shape"):
            pm.matmul(random(2, 3, 4), random(2, 4, 3), np.empty((3, 3), np.float32))


def test_plans_take_vectors():
    a, b, v = random(3, 4), random(4, 5), random(4)
    for x, y in [(v, b), (a, v), (v, v), (v, pm.pack(b))]:
        plan = pm.plan(x, y)
        got = plan(x) if plan.packed is not None else plan(x, y)
        np.testing.assert_allclose(got, np.matmul(x, np.asarray(y)), rtol=1e-4, atol=1e-4)
        assert np.isscalar(got) == (got.ndim == 0)
    for bad in [(a[:0], b), (a[:, :0], b[:0])]:
        with pytest.raises(ValueError, match="a plan takes"):
            pm.plan(*bad)
    crooked = np.zeros(49, np.uint8)[1:].view(np.float32).reshape(3, 4)
    with pytest.raises(ValueError, match="not aligned"):
        pm.plan(crooked, b)


def test_the_runtime_without_an_extension_knows_bfloat16_by_itself():
    code = """
import ml_dtypes, numpy as np, portmm as pm
from portmm.runtime import cpu
cpu._load = lambda code, path: cpu.load_cffi_runtime()
x = np.ones((3, 40), ml_dtypes.bfloat16)
print(pm.matmul(x, np.ones((40, 24), ml_dtypes.bfloat16), epilogue=lambda acc: acc + 1.5)[0, 0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "41.5", done.stderr
