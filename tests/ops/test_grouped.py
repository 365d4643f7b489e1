"""Products of rows in groups, of arrays in the host's memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from test_grouped_device import groups_of, looped, values

import portmm as pm
from portmm.errors import ScheduleError

pytestmark = pytest.mark.calls

QUICKLY = True

BF16 = np.dtype(ml_dtypes.bfloat16)
ENDS = np.array([10, 10, 47, 64])
M, N, K = 70, 24, 40


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.int8], ids=str)
@pytest.mark.parametrize("ends", [(10, 10, 47, 64), (0, 0, 0, 0), (70, 70, 70, 70), (1, 2, 3, 70)], ids=str)
def test_groups_are_those_of_a_loop(dtype, ends):
    a, b = values((M, K), dtype), values((4, K, N), dtype, 1)
    wanted = looped(a, b, ends)
    found = pm.grouped_matmul(a, b, np.array(ends))
    assert found.dtype == (np.int32 if dtype == np.int8 else dtype)
    np.testing.assert_array_equal(found, wanted.astype(found.dtype))
    if dtype != np.float64:
        np.testing.assert_array_equal(pm.grouped_matmul(a, pm.pack(b), list(ends)), found)
        np.testing.assert_array_equal(pm.grouped_matmul(a, [pm.pack(x) for x in b], list(ends)), found)
    turned = b.swapaxes(1, 2).copy().swapaxes(1, 2)
    np.testing.assert_array_equal(pm.grouped_matmul(a.T.copy().T, turned, ends), found)


@pytest.mark.parametrize("mixed", [False, True])
def test_quantized_weights(mixed):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((M, 64), np.float32), rng.standard_normal((4, 64, 32)).astype(np.float32)
    small = [pm.quantize(x, bits=4, group=32, symmetric=not (mixed and i % 2)) for i, x in enumerate(b)]
    wanted = np.concatenate([a[s:e] @ pm.dequantize(x) for s, e, x in zip((0, 10, 10, 47), ENDS, small, strict=True)])
    for weights in (small, [pm.pack(x) for x in small]):
        found = pm.grouped_matmul(a, weights, ENDS)
        np.testing.assert_allclose(found[:64], wanted, rtol=1e-4, atol=1e-4)
        assert (found[64:] == 0).all()
        half = pm.grouped_matmul(a, weights, ENDS, epilogue=lambda acc, i: acc * 0.5 + i.b)
        group = groups_of(ENDS, 4)(M)
        np.testing.assert_allclose(half[:64], wanted * 0.5 + group[:64, None], rtol=1e-4, atol=1e-4)
        assert (half[64:] == 3).all()
    if mixed:
        other = [*small[:3], pm.quantize(b[3], bits=4, group=64)]
        with pytest.raises(ValueError, match="one family"):
            pm.grouped_matmul(a, other, ENDS, epilogue=lambda acc: acc * 0.5)


@pytest.mark.parametrize(("dtype", "packed"), [(np.float32, False), (BF16, True), (np.int8, False)], ids=str)
def test_an_epilogue_knows_rows_columns_and_groups(dtype, packed):
    a, b = values((M, K), dtype), values((4, K, N), dtype, 1)
    weights = pm.pack(b) if packed else b
    bias, scale, rest = values((4, N), np.float32, 2), values((M,), np.float32, 3), values((M, N), np.float32, 4)
    sums, group = looped(a, b, ENDS), groups_of(ENDS, 4)(M)
    for factor in (2.0, 3.0):
        found, half = pm.grouped_matmul(
            a, weights, ENDS, dtype=np.float32,
            epilogue=lambda acc, i, f=factor: (
                acc * f + bias[i.b, i.n] * scale[i.m], pm.cast(acc + rest[i.m, i.n], np.float16),
            ),
        )  # fmt: skip
        np.testing.assert_array_equal(found, sums * factor + bias[group] * scale[:, None])
        np.testing.assert_array_equal(half, (sums + rest).astype(np.float16))
    found = pm.grouped_matmul(a, weights, ENDS, epilogue=lambda acc, i: acc * 0 + i.m * 100 + i.b, dtype=np.float32)
    np.testing.assert_array_equal(found, np.broadcast_to((np.arange(M) * 100 + group)[:, None], (M, N)))
    narrow = pm.grouped_matmul(a, weights, ENDS, epilogue=lambda acc: acc + rest, dtype=np.float32)
    np.testing.assert_array_equal(narrow, sums + rest)
    again = pm.grouped_matmul(a, weights, ENDS + 2, epilogue=lambda acc, i: acc + bias[i.b, i.n], dtype=np.float32)
    np.testing.assert_array_equal(again, looped(a, b, ENDS + 2) + bias[groups_of(ENDS + 2, 4)(M)])


def test_a_result_goes_where_it_should():
    a, b = values((14, 16), np.float32), values((2, 16, 16), np.float32, 1)
    ends = [5, 12]
    wanted = looped(a, b, ends)
    for epilogue, factor in ((None, 1), (lambda acc: acc * 2, 2)):
        whole = np.full((14, 20), 7, np.float32)
        out = whole[:, 2:18]
        assert pm.grouped_matmul(a, b, ends, out, epilogue=epilogue) is out
        np.testing.assert_array_equal(out, wanted * factor)
        assert (whole[:, [0, 1, 18, 19]] == 7).all()
        dense = np.empty((14, 16), np.float32)
        assert pm.grouped_matmul(a, b, ends, dense, epilogue=epilogue) is dense
        np.testing.assert_array_equal(dense, wanted * factor)
        over = a.copy()
        assert pm.grouped_matmul(over, b, ends, over[::-1], epilogue=epilogue) is not over
        np.testing.assert_array_equal(over[::-1], wanted * factor)
    with_it = np.ones((14, 16), np.float32)
    pm.grouped_matmul(a, b, ends, with_it, epilogue=lambda acc, i: acc + with_it[i.m, i.n])
    np.testing.assert_array_equal(with_it, wanted + 1)


def test_what_does_not_fit_is_said():
    a, b = values((7, 8), np.float32), values((2, 8, 9), np.float32)
    for given, error, said in (
        ((a, b, [3, 8]), ValueError, r"ends\[1\] is 8; it is from 3"),
        ((a, b, [3, 2]), ValueError, r"ends\[1\] is 2; it is from 3"),
        ((a, b, [-1, 2]), ValueError, r"ends\[0\] is -1"),
        ((a, b, [3]), ValueError, "ends has shape"),
        ((a, b, [3.0, 7.0]), TypeError, "ends has dtype float64"),
        ((a, b[0], [3, 7]), ValueError, "groups take"),
        ((a, [b[0], b[1][:, :4]], [3, 7]), ValueError, "groups take"),
        ((a, [], []), ValueError, "groups take"),
        ((a[:, :4], b, [3, 7]), ValueError, "a has 4 columns, b has 8 rows"),
        ((a, b, [3, 7], np.zeros((7, 8), np.float32)), ValueError, "out has shape"),
        ((a, b.astype(np.int64), [3, 7]), TypeError, "int64"),
    ):
        with pytest.raises(error, match=said):
            pm.grouped_matmul(*given)
    with pytest.raises(ScheduleError, match="whole rows"):
        pm.grouped_matmul(a, b, [3, 7], epilogue=pm.softmax)


def test_nothing_to_multiply():
    for m, n, k in ((0, 5, 8), (5, 0, 8), (5, 4, 0)):
        a, b = np.zeros((m, k), np.float32), np.zeros((2, k, n), np.float32)
        for epilogue, wanted in ((None, 0), (lambda acc: acc + 2, 2)):
            found = pm.grouped_matmul(a, b, [0, m], epilogue=epilogue)
            np.testing.assert_array_equal(found, np.full((m, n), wanted))
