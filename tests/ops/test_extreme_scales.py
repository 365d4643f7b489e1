"""Scales whose products with a sum, or with each other, leave float32, while results do not."""

from __future__ import annotations

import ml_dtypes  # noqa: F401 - names bfloat16
import numpy as np
import pytest
from emulated_cuda import install
from machines import HERE, runs_here

import portmm as pm
from portmm.errors import BuildError
from portmm.ops import routes
from portmm.util import memo

pytestmark = pytest.mark.calls

QUICKLY = True
PAIRS = [
    (0.0, 3e38),
    (3e38, 0.0),
    (1e-38, 3e38),
    (3e38, 1e-38),
    (1e-45, 3e38),
    (3e38, 1e-45),
    (1e-30, 1e29),
    (1e29, 1e-30),
]
"""Scales of x and of w."""
M, N, K = 5, 20, 64


def operands():
    rng = np.random.default_rng(0)
    x, w = rng.integers(-128, 128, (M, K)).astype(np.int8), rng.integers(-128, 128, (K, N)).astype(np.int8)
    return x, w, x.astype(np.int64) @ w.astype(np.int64)


def both_ways():
    """All pairs of scales at once, by rows and by columns; those of results that are finite are compared."""
    rows = np.array([0.0, 1e-40, 1.0, 1e30, 3e38], np.float32)
    columns = np.resize(np.array([0.0, 1e-45, 1e-30, 1.0, 1e30, 3e38], np.float32), N)
    return rows, columns


def check(got, want):
    """Within four roundings, or half a subnormal."""
    with np.errstate(over="ignore"):
        finite = np.isfinite(want.astype(np.float32))
    assert finite.any()
    got = np.asarray(got, np.float64)
    assert np.isfinite(got[finite]).all()
    assert (np.abs(got - want)[finite] <= np.abs(want[finite]) * 2.0**-22 + 2.0**-149).all()
    assert (np.abs(got[~finite]) == np.inf).all()


@pytest.mark.parametrize("target", HERE)
def test_scales_of_all_sizes(target):
    x, w, sums = operands()
    with pm.config(target=target):
        packed = pm.pack(w)
        for x_scale, w_scale in PAIRS:
            given = {"x_scale": x_scale, "w_scale": w_scale}
            x_exact, w_exact = (np.float64(np.float32(s)) for s in given.values())
            check(pm.linear(x, packed, **given), sums * x_exact * w_exact)
        rows, columns = both_ways()
        want = sums * rows.astype(float)[:, None] * columns.astype(float)
        check(pm.linear(x, packed, x_scale=rows, w_scale=columns), want)
        check(pm.linear(x, packed, x_scale=rows, w_scale=columns, epilogue=lambda v, _i: v * 0.5), want * 0.5)


def test_zero_points_bias_and_types():
    x, w, _ = operands()
    rows, columns = both_ways()
    zeros = {"x_zero": np.arange(M), "w_zero": np.arange(N) - 4}
    sums = (x.astype(np.int64) - zeros["x_zero"][:, None]) @ (w.astype(np.int64) - zeros["w_zero"])
    bias = np.arange(N, dtype=np.float32)
    want = sums * rows.astype(float)[:, None] * columns.astype(float)
    check(pm.linear(x, w, bias, x_scale=rows, w_scale=columns, **zeros), want + bias)
    out = np.empty((M, N), np.float16)
    assert pm.linear(x, w, bias, x_scale=0, w_scale=3e38, out=out, dtype=np.float16) is out
    np.testing.assert_array_equal(out, np.broadcast_to(bias, (M, N)))
    np.testing.assert_array_equal(
        pm.linear(x.reshape(1, M, K), w, bias, x_scale=0, w_scale=3e38), np.broadcast_to(bias, (1, M, N))
    )
    np.testing.assert_array_equal(pm.linear(x[:, :0], w[:0], bias, w_scale=3e38), np.broadcast_to(bias, (M, N)))


def test_rows_are_quantised():
    """Rows whose scales are large, by columns whose scales are small, and the other way round."""
    _, w, _ = operands()
    x = np.random.default_rng(1).standard_normal((M, K)).astype(np.float32)
    x *= np.array([[0], [1e-34], [1], [1e30], [1e37]], np.float32)
    most = np.abs(x).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    scale = (most / np.float32(127)).astype(float)
    sums = np.rint(x * inverse).astype(np.int64) @ w.astype(np.int64)
    _, columns = both_ways()
    check(pm.linear(x, pm.pack(w), w_scale=columns, dynamic=True), sums * scale * columns.astype(float))


@pytest.mark.parametrize("step", [1e-40, 1e-30, 1.0, 1e30, 3e38])
def test_results_are_quantised_again(step):
    """Scales whose quotients by that of the result leave float32, too."""
    x, w, sums = operands()
    bias = np.float32(step) * np.linspace(-1, 1, N, dtype=np.float32)
    for x_scale, w_scale in [*PAIRS, (1e30, 1e-38), (1e-20, 3e38), (1e-38, 1e-3), (1e38, 1e30)]:
        scales = [np.float64(np.float32(s)) for s in (x_scale, w_scale, step)]
        exact = (sums * scales[0] * scales[1] + bias) / scales[2] + 3
        got = pm.linear(x, w, bias, x_scale=x_scale, w_scale=w_scale, out_scale=step, out_zero=3)
        off = np.abs(got - np.clip(np.rint(exact), -128, 127))
        tie = np.abs(exact - np.floor(exact) - 0.5) < np.abs(exact) * 2.0**-20 + 1e-6
        assert (off <= tie).all(), (x_scale, w_scale)
    quotient = pm.linear(x * 0, w, x_scale=1e30, w_scale=1e-38, out_scale=1e-10, out_zero=5)
    np.testing.assert_array_equal(quotient, np.full((M, N), 5))
    floats = x.astype(np.float32)
    codes = pm.linear(floats, pm.pack(w), bias * 0, w_scale=0.5 * step, dynamic=True, out_scale=step, out_zero=3)
    usual = pm.linear(floats, pm.pack(w), w_scale=0.5, dynamic=True, out_scale=1, out_zero=3)
    assert (codes == usual).mean() > 0.9


def test_an_int4_weight_of_large_scales():
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (K, N)).astype(np.uint8)
    scales = np.resize(np.array([1e-30, 1.0, 1e37], np.float32), (2, N))
    q = pm.Quantized(codes, scales, -8 * scales, 4, 32)
    x = rng.integers(-128, 128, (M, K)).astype(np.int8)
    rows = np.array([0.0, 1e-38, 1e-30, 1.0, 1e-7], np.float32)
    sums = x.astype(float) @ ((codes.astype(float) - 8) * np.repeat(scales.astype(float), 32, axis=0))
    for weight in (q, pm.pack(q)):
        got = pm.linear(x, weight, x_scale=rows)
        want = sums * rows.astype(float)[:, None]
        with np.errstate(over="ignore"):
            finite = np.isfinite(want.astype(np.float32))
        np.testing.assert_allclose(got[finite], want[finite], rtol=1e-5, atol=2.0**-149)
        assert (np.abs(got[~finite]) == np.inf).all()


def test_numpy_in_the_place_of_a_kernel(monkeypatch):
    def no_route(*_):
        raise BuildError("no compiler")

    x, w, sums = operands()
    packed = pm.pack(w)
    memo.forget_all()
    monkeypatch.setattr(routes, "routed", no_route)
    rows, columns = both_ways()
    with pytest.warns(match="no compiler"):
        got = pm.linear(x, packed, x_scale=rows, w_scale=columns)
    check(got, sums * rows.astype(float)[:, None] * columns.astype(float))
    memo.forget_all()


def test_on_a_device(monkeypatch):
    memo.forget_all()
    cupy = install(monkeypatch)
    x, w, sums = operands()
    rows, columns = both_ways()
    a, b, by_row, by_column = (cupy.array(v) for v in (x, w, rows, columns))
    want = sums * rows.astype(float)[:, None] * columns.astype(float)
    check(pm.linear(a, b, x_scale=by_row, w_scale=by_column).get(), want)
    for i in (0, 1, 4):
        one = float(rows[i])
        check(pm.linear(a, b, x_scale=one, w_scale=by_column).get(), sums * one * columns.astype(float))
    for j in (0, 1, 5):
        one = float(columns[j])
        check(pm.linear(a, b, x_scale=by_row, w_scale=one).get(), sums * rows.astype(float)[:, None] * one)
    for step in (1e-30, 1e30, 3e38):
        bias = np.linspace(-step, step, N, dtype=np.float32)
        got = pm.linear(a, b, cupy.array(bias), x_scale=by_row, w_scale=by_column, out_scale=step).get()
        exact = (want + bias) / np.float64(np.float32(step))
        assert (np.abs(got - np.clip(np.rint(exact), -128, 127)) <= (np.abs(exact % 1 - 0.5) < 1e-4)).all()
    memo.forget_all()


def test_an_int4_weight_without_columns():
    weight = pm.pack(pm.quantize(np.zeros((32, 0), np.float32), bits=4, group=32))
    assert pm.linear(np.ones((3, 32), np.int8), weight, x_scale=0.5).shape == (3, 0)


@pytest.mark.parametrize("target", [*HERE, *(x for x in ("amx_bf16",) if runs_here(x))])
def test_bfloat16_results_of_subnormal_sums_are_the_nearest_or_zero(target):
    """An instruction takes them for zero, also where they would round to the smallest normal number."""
    a, sums = np.zeros((16, 64), "bfloat16"), np.full((16, 32), -1.1710435e-38, np.float32)
    with pm.config(target=target):
        y = pm.matmul(a, np.zeros((64, 32), "bfloat16"), dtype=a.dtype, epilogue=lambda acc, i: acc + sums[i.m, i.n])
    (found,) = set(y.view(np.uint16).ravel().tolist())
    assert found == 0x8000 if target == "amx_bf16" else found in (0x8000, 0x8080)
