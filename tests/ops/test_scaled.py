"""Quantised products as a user calls them, against exact integers and float64."""

from __future__ import annotations

import cover
import ml_dtypes
import numpy as np
import pytest
from machines import HERE

import portmm as pm

pytestmark = pytest.mark.calls

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(5, 33, 70), (1, 300, 77), (64, 48, 129)]
QUICKLY = True


def operands(shape, dtype, seed=0):
    """Codes over their whole range, scales, zero points and a bias."""
    rng = np.random.default_rng(seed)
    m, n, k = shape
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max + 1, (m, k)).astype(dtype)
    w = rng.integers(-128, 128, (k, n)).astype(np.int8)
    rows = {"x_scale": rng.random(m).astype(np.float32), "x_zero": rng.integers(-9, 200, m)}
    columns = {"w_scale": rng.random(n).astype(np.float32), "w_zero": rng.integers(-5, 5, n)}
    return x, w, rng.standard_normal(n).astype(np.float32) * 100, rows | columns


def exact(x, w, bias, *, x_scale=1.0, x_zero=0, w_scale=1.0, w_zero=0):
    """The result in float64, from exact integers, and the size that roundings are proportional to."""
    m = len(x)
    zero, scale = np.broadcast_to(x_zero, (m,))[:, None], np.broadcast_to(x_scale, (m,))[:, None].astype(float)
    sums = (x.astype(np.int64) - zero) @ (w.astype(np.int64) - w_zero)
    scaled = sums * scale * np.asarray(w_scale, float)
    return scaled + (0 if bias is None else bias), np.abs(scaled) + (0 if bias is None else np.abs(bias))


CASES = cover.pairs(HERE, [np.int8, np.uint8], SHAPES)


@pytest.mark.thin(2)
@pytest.mark.parametrize(("target", "dtype", "shape"), CASES)
def test_linear(target, dtype, shape):
    x, w, bias, all_ = operands(shape, dtype)
    given = ((), ("x_scale",), ("w_scale",), ("x_zero",), ("w_zero",), tuple(all_))
    with pm.config(target=target):
        packed = pm.pack(w, activations=dtype)
        # Each is a kernel of its own; those that one case leaves out are in another.
        calls = cover.pairs(
            given, ((w, None), (packed, bias)), (np.float32, BF16), turn=CASES.index((target, dtype, shape))
        )
        for names, (weight, b), to in calls:
            want, size = exact(x, w, b, **{name: all_[name] for name in names})
            got = pm.linear(x, weight, b, dtype=to, **{name: all_[name] for name in names})
            assert got.dtype == to
            bound = size * 2.0**-21 if to == np.float32 else size * 2.0**-20 + np.abs(want) * 2.0**-8
            assert (np.abs(got.astype(float) - want) <= bound).all(), names


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_results_are_quantised_again(dtype):
    """Within one code, of a tie that float32 decides otherwise; saturated."""
    x, w, bias, given = operands((40, 50, 60), dtype)
    want, size = exact(x, w, bias, **given)
    for step, zero in ((np.abs(want).max() / 100, 7), (np.abs(want).max() / 1000, -3), (1e9, 0)):
        info = np.iinfo(dtype)
        codes = np.clip(np.rint(want / step) + zero, info.min, info.max)
        got = pm.linear(x, w, bias, out_scale=step, out_zero=zero, **given)
        assert got.dtype == dtype
        off = np.abs(got - codes)
        distance = np.abs(want / step - np.floor(want / step) - 0.5)
        assert (off <= (distance < size / step * 2.0**-20 + 1e-6)).all()


@pytest.mark.parametrize(
    ("target", "dtype", "shape"),
    cover.pairs(HERE, [np.float32, np.float16, BF16], [*SHAPES, (3, 1, 1), (2, 7, 260)]),
)
def test_activations_are_quantised_by_rows(target, dtype, shape):
    m, n, k = shape
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k)).astype(dtype)
    x[-1] = 0
    w, scale = rng.integers(-128, 128, (k, n)).astype(np.int8), rng.random(n).astype(np.float32)
    wide = x.astype(np.float32)
    most = np.abs(wide).max(axis=1)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    codes = np.rint(wide * inverse[:, None]).astype(np.int64)
    want = (codes @ w.astype(np.int64)) * (most / np.float32(127))[:, None].astype(float) * scale
    with pm.config(target=target):
        got = pm.linear(x, pm.pack(w), w_scale=scale, dynamic=True)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6 * np.abs(want).max(initial=1))


def test_rows_that_are_not_finite_stay_apart():
    x = np.ones((3, 40), np.float32)
    x[0, 5], x[2, 7] = np.nan, np.inf
    y = pm.linear(x, pm.pack(np.ones((40, 8), np.int8)), dynamic=True)
    assert not np.isfinite(y[[0, 2]]).any()
    np.testing.assert_allclose(y[1], 40, rtol=1e-6)


def test_float_activations_by_codes_are_exact_in_the_codes():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((6, 50)).astype(np.float32), rng.integers(-128, 128, (50, 20)).astype(np.int8)
    scale = rng.random(20).astype(np.float32)
    got = pm.linear(x, pm.pack(w, activations=np.float32), w_scale=scale)
    np.testing.assert_allclose(got, x.astype(float) @ (w * scale.astype(float)), rtol=1e-5, atol=1e-3)


def test_results_go_where_they_are_asked_for():
    """Other byte order, gaps, an operand's own memory: right, if not written directly."""
    x, w, bias, _ = operands((6, 8, 6), np.int8)
    want = pm.linear(x, w, bias)
    swapped = want.dtype.newbyteorder(">")
    np.testing.assert_array_equal(pm.linear(x, w, bias, dtype=swapped), want)
    misaligned = np.zeros(want.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(want.shape)
    for out in (np.zeros_like(want), np.zeros(want.shape, swapped), np.zeros((6, 16), np.float32)[:, ::2], misaligned):
        assert pm.linear(x, w, bias, out=out) is out
        np.testing.assert_array_equal(out, want)
    floats = np.arange(64, dtype=np.float32).reshape(8, 8)
    want = pm.linear(floats, np.eye(8, dtype=np.int8))
    np.testing.assert_array_equal(pm.linear(floats, np.eye(8, dtype=np.int8), out=floats), want)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_nothing_to_sum(shape):
    m, n, k = shape
    x, w, bias = np.zeros((m, k), np.int8), np.zeros((k, n), np.int8), np.arange(n, dtype=np.float32)
    got = pm.linear(x, w, bias, x_zero=3)
    np.testing.assert_array_equal(got, np.broadcast_to(bias, (m, n)))
    assert pm.linear(x, w, bias, out_scale=0.5).dtype == np.int8


def test_leading_dimensions_are_rows():
    x, w, bias, _ = operands((24, 9, 16), np.int8)
    want = pm.linear(x, w, bias, x_scale=np.arange(24) + 1)
    got = pm.linear(x.reshape(2, 3, 4, 16), w, bias, x_scale=(np.arange(24) + 1).reshape(2, 3, 4))
    np.testing.assert_array_equal(got, want.reshape(2, 3, 4, 9))
    np.testing.assert_array_equal(pm.linear(np.asfortranarray(x)[::2], w, bias), pm.linear(x[::2].copy(), w, bias))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x_scale": -1.0}, ValueError, "x_scale"),
        ({"w_scale": np.nan}, ValueError, "w_scale"),
        ({"x_scale": [1.0, 2.0]}, ValueError, "pass a number, or 4"),
        ({"x_zero": 0.5}, ValueError, "integers"),
        ({"w_zero": 1 << 20}, ValueError, "16 bits"),
        ({"out_scale": 0.0}, ValueError, "positive"),
        ({"out_zero": 3}, ValueError, "no out_scale"),
        ({"out_zero": 1 << 15, "out_scale": 1.0}, ValueError, "fits 16 bits"),
        ({"out_zero": 0.5, "out_scale": 1.0}, TypeError, "integer"),
        ({"dtype": np.int8}, TypeError, "without out_scale"),
        ({"dtype": np.float32, "out_scale": 1.0}, TypeError, "with out_scale"),
        ({"bias": np.zeros(3)}, ValueError, "bias"),
        ({"dynamic": True}, TypeError, "quantized"),
        ({"x": np.zeros((4, 6), np.float32), "dynamic": True, "w_zero": 3}, ValueError, "quantize x first"),
        ({"x": np.zeros((4, 6), np.float32), "w_zero": 3}, ValueError, "w_zero is set, and x has dtype float32"),
        ({"x": np.zeros((4, 6))}, TypeError, "float64"),
        ({"dtype": ["f4"]}, TypeError, "tuples"),
        ({"x": np.zeros((4, 5), np.int8)}, ValueError, "x has 5 columns"),
        ({"x": np.zeros((4, 6), np.float32), "x_zero": 3}, ValueError, "only integers"),
        ({"x": np.zeros((4, 6), BF16), "x_scale": 3.0}, ValueError, "only integers"),
        ({"x": np.zeros((4, 6), np.float32), "x_zero": 3, "dynamic": True}, ValueError, "only integers"),
        ({"x": np.zeros((4, 6), np.float32), "x_scale": 3.0, "dynamic": True}, ValueError, "only integers"),
        ({"out": np.zeros((4, 8))}, TypeError, "set it with dtype"),
        ({"w": np.zeros((6, 8), np.float32)}, TypeError, "int8"),
        ({"w": np.zeros((6, 8), np.uint8)}, TypeError, "u"),
    ],
)
def test_what_is_refused(change, error, words):
    given = {"x": np.zeros((4, 6), np.int8), "w": np.zeros((6, 8), np.int8)} | change
    with pytest.raises(error, match=words):
        pm.linear(**given)


def test_a_weight_for_other_activations_is_refused():
    w = np.ones((6, 8), np.int8)
    with pytest.raises(pm.ScheduleError, match="pack it for int8"):
        pm.linear(np.ones((4, 6), np.int8), pm.pack(w, activations=np.float32))


def test_rows_are_quantised_and_so_is_the_result():
    """The step of the result belongs to sums and bias alike."""
    x, w, bias, _ = operands((6, 70, 6), np.int8)
    floats = x.astype(np.float32)
    w_scale = np.linspace(0.01, 0.02, 70, dtype=np.float32)
    want = pm.linear(floats, w, bias, w_scale=w_scale, dynamic=True)
    step = np.abs(want).max() / 100
    got = pm.linear(floats, w, bias, w_scale=w_scale, dynamic=True, out_scale=step, out_zero=5)
    assert np.abs(got - np.clip(np.rint(want / step + 5), -128, 127)).max() <= 1


def test_a_result_may_lie_where_its_scales_do():
    x, w, _, _ = operands((4, 64, 9), np.int8)
    for name in ("bias", "w_scale"):
        out = np.ones((4, 64), np.float32)
        want = pm.linear(x, w, **{name: out[0].copy()})
        np.testing.assert_array_equal(pm.linear(x, w, out=out, **{name: out[0]}), want)
    out = np.ones((4, 64), np.float32)
    want = pm.linear(x, w, x_scale=np.ones(4))
    np.testing.assert_array_equal(pm.linear(x, w, x_scale=out.ravel()[:4], out=out), want)


def test_subclasses_and_scalars_are_taken_for_what_they_hold(tmp_path):
    x, w, _, _ = operands((4, 64, 9), np.int8)
    want = pm.linear(x, w)
    mapped = np.memmap(tmp_path / "out", np.float32, "w+", shape=want.shape)
    assert pm.linear(x, w, out=mapped) is mapped
    np.testing.assert_array_equal(mapped, want)
    plain = pm.linear(x, w, x_scale=np.float32(1), x_zero=np.int64(0), w_zero=np.int8(0), out_zero=np.int64(0))
    np.testing.assert_array_equal(plain, want)


# -- weights of four bits ----------------------------------------------------------


def of_four_bits(k, n, group, seed=0):
    """A weight that is exact in floats, so that results are too: scales are powers of two."""
    rng = np.random.default_rng(seed)
    codes, groups = rng.integers(0, 16, (k, n)).astype(np.uint8), -(-k // (group or k))
    scales = 2.0 ** rng.integers(-2, 3, (groups, n))
    q = pm.Quantized(codes, scales.astype(np.float32), (-8 * scales).astype(np.float32), 4, group or k)
    return q, pm.dequantize(q).astype(np.float64)


@pytest.mark.thin(4)
@pytest.mark.parametrize("group", [8, 32, 0])
@pytest.mark.parametrize("size", [(1, 40, 33), (3, 1, 1), (5, 100, 70), (17, 9, 64), (300, 64, 40)])
def test_eight_bits_by_four_are_exact(size, group):
    m, k, n = size
    q, w = of_four_bits(k, n, group, seed=k)
    x = np.random.default_rng(m).integers(-128, 128, (m, k)).astype(np.int8)
    want = x.astype(np.float64) @ w
    for weight in (q, pm.pack(q)):
        np.testing.assert_array_equal(pm.linear(x, weight), want)
    spaced = np.zeros((2 * m, 3 * k), np.int8)[::2, ::3]
    spaced[...] = x
    np.testing.assert_array_equal(pm.linear(spaced, q), want)
    np.testing.assert_array_equal(pm.linear(np.asfortranarray(x), q), want)
    bias = np.arange(n, dtype=np.float32)
    np.testing.assert_array_equal(pm.linear(x, q, bias, x_scale=0.5, w_scale=2.0), want + bias)
    coded = pm.linear(x, q, x_scale=2.0**-6, out_scale=0.5, out_zero=-3)
    np.testing.assert_array_equal(coded, np.clip(np.rint(want * 2.0**-6 / 0.5 - 3), -128, 127))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_rows_are_rounded_to_eight_bits(dtype):
    q, w = of_four_bits(72, 19, 24)
    x = np.random.default_rng(1).standard_normal((7, 72)).astype(dtype)
    wide = x.astype(np.float32)
    most = np.abs(wide).max(axis=1, keepdims=True)
    codes, scale = np.rint(wide * (np.float32(127) / most)), most.astype(np.float64) / 127
    got = pm.linear(x, q, np.ones(19), dynamic=True)
    np.testing.assert_allclose(got, codes @ w * scale + 1, rtol=1e-5, atol=1e-4)
    floats = pm.linear(x, q, np.ones(19))  # as they are, without `dynamic`
    np.testing.assert_allclose(floats, x.astype(np.float64) @ w + 1, rtol=1e-5, atol=1e-3)
    alone = np.stack([pm.linear(row, q, np.ones(19), dynamic=True) for row in x[:, None]])[:, 0]
    np.testing.assert_array_equal(alone, got)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": np.zeros((4, 8), np.uint8)}, TypeError, "multiplied by int8 or floats"),
        ({"x_zero": 1}, ValueError, "zero points of its own only"),
        ({"w_zero": 1}, ValueError, "zero points of its own only"),
        ({"x": np.zeros((4, 9), np.int8)}, ValueError, "x has 9 columns"),
    ],
)
def test_what_four_bits_refuse(change, error, words):
    given = {"x": np.zeros((4, 8), np.int8), "w": of_four_bits(8, 3, 0)[0]} | change
    with pytest.raises(error, match=words):
        pm.linear(**given)


def test_a_group_whose_sum_might_not_fit_is_refused():
    k = (2**31 - 1) // (128 * 15) + 8
    ones = np.ones((1, 1), np.float32)
    x = np.full((1, k), -128, np.int8)
    codes = np.full((k, 1), 15, np.uint8)
    with pytest.raises(ValueError, match="quantize in smaller groups"):
        pm.linear(x, pm.Quantized(codes, ones, ones * 0, 4, k))
    most = k // 8 * 8 - 8
    got = pm.linear(x[:, :most], pm.Quantized(codes[:most], ones, ones * 0, 4, most))
    np.testing.assert_array_equal(got, np.float32(-128.0 * 15 * most))


@pytest.mark.parametrize("target", HERE)
def test_rows_of_odd_numbers_are_quantised(target):
    """A NaN is seen wherever it stands; rows too small for a scale are zeros."""
    with pm.config(target=target):
        one = np.ones((2, 1), np.int8)
        assert np.isnan(pm.linear(np.array([[np.nan, 1], [1, np.nan]], np.float32), one, dynamic=True)).all()
        tiny = np.array([[1e-37, 0], [0, 5e-38]], np.float32)
        assert (np.abs(pm.linear(tiny, one, dynamic=True)) < 1e-36).all()


def test_threads_share_no_k_where_sums_are_finished():
    q = pm.quantize(np.random.default_rng(0).random((1000, 8), np.float32), group=32)
    x, codes = np.ones((12, 1000), np.float32), np.ones((1000, 8), np.int8)
    with pm.config(threads=2):
        np.testing.assert_allclose(pm.linear(x, pm.pack(q)), x @ pm.dequantize(q), rtol=1e-4)
        np.testing.assert_allclose(pm.linear(x, pm.pack(codes, activations=np.float32)), x @ codes)


def test_a_scale_is_a_number_or_as_many_as_it_serves():
    """A Python float is not looked at as an array, and means what one does."""
    x, w = np.ones((3, 8), np.int8), pm.pack(np.ones((8, 5), np.int8))
    for scale in (0.0, -0.0, 0.3, 1e-45, 3.4e38):
        for others in (np.float32(scale), np.float64(scale), np.full(3, scale, np.float32)):
            given = {"x_scale": scale}, {"x_scale": others}
            np.testing.assert_array_equal(*(pm.linear(x, w, **more) for more in given))
        given = {"w_scale": scale}, {"w_scale": np.full(5, scale, np.float32)}
        np.testing.assert_array_equal(*(pm.linear(x, w, **more) for more in given))
    for scale in (-1.0, float("nan"), float("inf")):
        for name in ("x_scale", "w_scale"):
            with pytest.raises(ValueError, match=f"{name} must be finite and not negative"):
                pm.linear(x, w, **{name: scale})


def test_a_vector_with_an_epilogue_is_refused_in_words():
    with pytest.raises(ValueError, match="add a dimension of 1"):
        pm.linear(np.ones(40, np.int8), np.ones((40, 24), np.int8), epilogue=lambda acc: acc + 1.5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_batch_with_an_epilogue(dynamic):
    """All items are rows of one kernel, unless the epilogue tells items apart; then a second one reads the products."""
    rng = np.random.default_rng(0)
    x, w, bias, all_ = operands((15, 33, 70), np.int8)
    x, scales = x.reshape(3, 5, 70)[:, ::-1], {} if dynamic else {"x_scale": all_["x_scale"].reshape(3, 5)}
    x = x.astype(np.float32) if dynamic else x
    residual, item = rng.random((3, 5, 33)).astype(np.float32), rng.random(3).astype(np.float32)
    want = pm.linear(x, w, bias, dynamic=dynamic, **scales)
    for epilogue, more in (
        (lambda acc, i: (acc + residual[i.b, i.m, i.n], acc * 2), residual),
        (lambda acc, i: (acc + item[i.b], acc * 2), item[:, None, None]),
    ):
        got = pm.linear(x, w, bias, dynamic=dynamic, epilogue=epilogue, **scales)
        np.testing.assert_array_equal(got[0], want + more)
        np.testing.assert_array_equal(got[1], want * 2)
