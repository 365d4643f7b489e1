"""Quantised products on devices: codes by tensor cores, their scales in the same kernel."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulated_cuda import install

import portmm as pm
from portmm.dispatch import schedule_choice
from portmm.util import memo


@pytest.fixture
def cupy(monkeypatch):
    """A device whose kernels are those of tensor cores, in tiles that the shim compiles fast."""
    memo.forget_all()
    every = schedule_choice.candidates

    def some(*given):
        found = every(*given)
        return [s for s in found if s.program == "mma" and s.mr * s.nr <= 16 and s.parallel.split == 1] or found

    monkeypatch.setattr(schedule_choice, "candidates", some)
    yield install(monkeypatch)
    memo.forget_all()


def operands(m=37, n=48, k=64):
    rng = np.random.default_rng(m)
    a, b = rng.integers(-128, 128, (m, k)).astype(np.int8), rng.integers(-128, 128, (n, k)).astype(np.int8)
    scales = rng.uniform(0.5, 2, m).astype(np.float32), rng.uniform(0.5, 2, n).astype(np.float32)
    return a, b, *scales


@pytest.mark.parametrize("dtype", [None, ml_dtypes.bfloat16, np.int8])
def test_scales_by_rows_and_columns(cupy, dtype):
    a, b, rows, columns = operands()
    sa, sb = cupy.array(rows), cupy.array(columns)
    small = np.float32(2**-12)

    def scaled(acc, i):
        value = acc * sa[i.m] * sb[i.n] * small
        return value if dtype is None else pm.cast(value, dtype)

    c = pm.matmul(cupy.array(a), cupy.array(b).T, epilogue=scaled).get()
    assert [x[0].startswith("portmm_mma_s32_s8_s8") for x in cupy.launches] == [True]
    want = (a.astype(np.int64) @ b.T.astype(np.int64)) * rows[:, None] * columns * small
    if dtype is np.int8:
        assert (np.abs(c - np.clip(np.rint(want), -128, 127)) <= 1).all()
        return
    np.testing.assert_allclose(c.astype(np.float64), want, rtol=2**-8 if dtype else 1e-6)


def test_linear(cupy):
    """As on a processor."""
    a, b, rows, columns = operands(20, 24)
    w = np.ascontiguousarray(b.T)
    bias = np.arange(24, dtype=np.float32)
    x, y, sa, sb, plus = (cupy.array(v) for v in (a, w, rows, columns, bias))
    got = pm.linear(x, y, plus, x_scale=sa, w_scale=sb)
    want = pm.linear(a, w, bias, x_scale=rows, w_scale=columns)
    np.testing.assert_allclose(got.get(), want, rtol=1e-5, atol=1e-3)
    for wrong in ({"out_scale": 0.0}, {"out_scale": -1.0}, {"x_scale": float("inf")}, {"w_scale": -0.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            pm.linear(x, y, **({"x_scale": 0.01, "w_scale": 1.0} | wrong))
    got = pm.linear(x, y, x_scale=0.01, w_scale=sb, out_scale=2.0, out_zero=3)
    want = pm.linear(a, w, x_scale=0.01, w_scale=columns, out_scale=2.0, out_zero=3)
    assert got.dtype == want.dtype
    assert np.abs(got.get().astype(int) - want).max() <= 1
    got = pm.linear(x, y, plus, w_scale=sb, dtype=np.float16, epilogue=lambda v, _i: pm.relu(v * 1e-3))
    want = pm.linear(a, w, bias, w_scale=columns, dtype=np.float16, epilogue=lambda v, _i: pm.relu(v * 1e-3))
    np.testing.assert_allclose(got.get(), want, rtol=2e-3)


def test_linear_quantises_rows(cupy):
    _, b, _, columns = operands(20, 24)
    w = np.ascontiguousarray(b.T)
    x = np.random.default_rng(3).standard_normal((20, 64)).astype(np.float32)
    got = pm.linear(cupy.array(x), cupy.array(w), w_scale=cupy.array(columns), dynamic=True).get()
    np.testing.assert_allclose(got, pm.linear(x, w, w_scale=columns, dynamic=True), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_scales_of_rows_are_float32(cupy, dtype):
    """Those of small rows are too small for float16, and bfloat16 has few bits for any."""
    _, b, *_ = operands()
    x = (np.random.default_rng(0).standard_normal((9, 64)) * 3e-6).astype(dtype)
    got = pm.linear(cupy.array(x), cupy.array(b).T, dynamic=True, dtype=np.float32).get()
    np.testing.assert_allclose(got, pm.linear(x, b.T, dynamic=True, dtype=np.float32), rtol=1e-5, atol=1e-8)


def test_rows_of_nothing_are_quantised(cupy):
    x, w = np.zeros((5, 0), np.float32), np.zeros((0, 6), np.int8)
    assert not pm.linear(cupy.array(x), cupy.array(w), dynamic=True).get().any()


def test_linear_refuses(cupy):
    a, b, *_ = operands(4, 8)
    x, w = cupy.array(a), cupy.array(np.ascontiguousarray(b.T))
    with pytest.raises(TypeError, match="x_zero is set: on a device values have no zero points"):
        pm.linear(x, w, x_zero=3)
    with pytest.raises(TypeError, match="w is a ndarray in the host's memory"):
        pm.linear(x, np.ascontiguousarray(b.T))
    with pytest.raises(TypeError, match="x has elements of f32 and w of s8"):
        pm.linear(cupy.array(a.astype(np.float32)), w)


def test_floats_of_eight_bits_with_scales(cupy):
    """On a device with units for them, results of either kind."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(x).astype(ml_dtypes.float8_e4m3fn) for x in ((20, 64), (24, 64)))
    want = a.astype(np.float32) @ b.T.astype(np.float32)
    c = pm.matmul(cupy.array(a), cupy.array(b).T)
    assert c.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(c.get().astype(np.float32), want, rtol=2**-8, atol=1e-4)
    sa = cupy.array(rng.uniform(0.5, 2, 20).astype(np.float32))
    c = pm.matmul(cupy.array(a), cupy.array(b).T, epilogue=lambda acc, i: pm.cast(acc * sa[i.m], ml_dtypes.float8_e5m2))
    assert c.dtype == ml_dtypes.float8_e5m2
    np.testing.assert_allclose(c.get().astype(np.float32), want * sa.get()[:, None], rtol=0.126, atol=1e-4)
    out = cupy.empty((20, 24), ml_dtypes.float8_e4m3fn)
    pm.matmul(cupy.array(a * 16), cupy.array(b * 16).T, out)
    assert np.nanmax(np.abs(out.get().astype(np.float32))) == 448
    assert all(x[0].startswith("portmm_mma_f32_e4m3_e4m3") for x in cupy.launches)


def test_tf32_when_it_is_asked_for(cupy):
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(x).astype(np.float32) for x in ((20, 64), (64, 24)))
    x, y = cupy.array(a), cupy.array(b)
    exact = pm.matmul(x, y).get()
    np.testing.assert_allclose(exact, a @ b, rtol=1e-5, atol=1e-5)
    assert "mma" not in cupy.launches[-1][0]
    with pm.config(tf32=True):
        assert pm.explain(x, y).problem.tf32
        near = pm.matmul(x, y).get()
        assert cupy.launches[-1][0].startswith("portmm_mma_f32_f32_f32")
        with pm.config(deterministic=True):
            pm.matmul(x, y)
            assert "mma" not in cupy.launches[-1][0]
    assert 1e-6 < np.abs(near - exact).max() <= 2**-9 * (np.abs(a) @ np.abs(b)).max()


def test_floats_of_eight_bits_in_the_hosts_memory_are_refused():
    a = np.ones((4, 4), ml_dtypes.float8_e4m3fn)
    with pytest.raises(TypeError, match="floats of eight bits on devices only: convert it with astype"):
        pm.matmul(a, a)
