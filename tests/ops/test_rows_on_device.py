"""Functions over rows of arrays on devices: OpenCL's on a CPU, and CUDA's, emulated."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import portmm as pm
from portmm.arrays.interop import adopt
from portmm.errors import TraceError
from portmm.ops import kernel_call, rowwise

NAMES = {"b": "b", "m": "m", "n": "n"}
BF16 = ml_dtypes.bfloat16
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 3e-6}


def numbers(shape, dtype=np.float32, seed=0):
    x = np.random.default_rng([seed, *shape]).standard_normal(shape) * 2
    return (x * 20 if np.dtype(dtype).kind in "iu" else x).astype(dtype)


def over_rows(*given, **options):
    """Results on a device, as arrays of their library and as operands."""
    found, several = kernel_call.over_rows(*given, **options)
    return tuple((x.source, x) for x in found), several


def same(function, given, host, dtype=None):
    """Results are as those of the same function of arrays in the host's memory."""
    found, several = over_rows(function, tuple(adopt(x) for x in given), NAMES, dtype=dtype)
    want, as_many = rowwise.over_rows(host, tuple(x.get() for x in given), NAMES, dtype=dtype)
    assert several == as_many
    for (x, _), y in zip(found, want, strict=True):
        got = x.get()
        assert (got.shape, got.dtype) == (y.shape, y.dtype)
        eps = EPS.get(y.dtype.name, 0)
        np.testing.assert_allclose(
            got.astype(np.float64), y.astype(np.float64), rtol=eps, atol=eps or 1, equal_nan=True
        )
    return found


def softmax(x):
    e = pm.exp(x - pm.max(x))
    return e / pm.sum(e)


def layer_norm(x):
    centred = x - pm.mean(x)
    return centred / pm.sqrt(pm.mean(centred * centred) + 1e-5)


@pytest.mark.thin(3)
@pytest.mark.parametrize("function", [softmax, layer_norm])
@pytest.mark.parametrize("n", [1, 3, 16, 100, 300, 1024, 5000])
def test_rows_of_any_length(on, n, function):
    x = on.array(numbers((3, n)))
    same(function, (x,), function)


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.int8, np.uint8, np.int32], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("n", [7, 64])
def test_elements_of_any_type(on, dtype, n):
    x = on.array(numbers((5, n), dtype))

    def function(x):
        return pm.cast(x * 0.5 + pm.max(x * 1.0), np.float32), x > 1, pm.cast(x * 1.0, dtype), pm.sum(x * 1.0)

    same(function, (x,), function, dtype=np.float32 if np.dtype(dtype).kind in "iu" else None)


def test_what_a_function_captures(on):
    weight, bias, matrix, scale = numbers((40,)), numbers((6,), BF16), numbers((40, 6)), 0.75

    def of(weight, bias, matrix):
        def function(x, i):
            normal = x / pm.sqrt(pm.mean(x * x) + 1e-6) * weight
            return normal * scale + bias[i.m], normal + matrix.T, normal + i.n, bias[i.m] * 2 + pm.max(x)

        return function

    x = on.array(numbers((6, 40)))
    there = of(on.array(weight), on.array(bias), on.array(matrix))
    same(there, (x,), of(weight, bias, matrix))
    scale = 3.0  # numbers are given by each call
    same(there, (x,), of(weight, bias, matrix))


def test_a_batch_and_two_arrays(on):
    x, y = on.array(numbers((2, 3, 5, 12))), on.array(numbers((2, 3, 5, 12), np.float16, 1))

    def function(x, y, i):
        return x * y + i.b, pm.max(y, axis=-2), pm.cast(pm.sum(x * y), np.int32)

    same(function, (x, y), function)


def test_strides(on):
    whole = numbers((12, 40))
    x = on.array(whole)
    looks = [np.s_[1::2, 3:], np.s_[:, ::3], np.s_[5:6], np.s_[:, :1], np.s_[2:, 4:16], np.s_[::-1, ::-1]]
    for view, host in [(x.T, whole.T), *((x[look], whole[look]) for look in looks)]:
        (found, _), *_ = over_rows(softmax, (adopt(view),), NAMES)[0]
        (want,), _ = rowwise.over_rows(softmax, (np.ascontiguousarray(host),), NAMES)
        np.testing.assert_allclose(found.get(), want, rtol=3e-6)
        (found, _), *_ = over_rows(lambda x: x * 2 + 1, (adopt(view),), NAMES)[0]
        np.testing.assert_array_equal(found.get(), host * 2 + 1)


def test_a_batch_that_does_not_lie_evenly_is_copied(on):
    host = numbers((3, 4, 5, 6))
    x = on.array(host)
    view, there = x[:, 1:3], host[:, 1:3]
    (found, _), *_ = over_rows(softmax, (adopt(view),), NAMES)[0]
    (want,), _ = rowwise.over_rows(softmax, (there,), NAMES)
    np.testing.assert_allclose(found.get(), want, rtol=3e-6)


def test_nans_stay(on):
    host = numbers((4, 70))
    host[1, 33], host[2, 0], host[3, 5:8] = np.nan, np.inf, -np.inf
    (top, _), (total, _) = over_rows(lambda x: (pm.max(x), pm.sum(x)), (adopt(on.array(host)),), NAMES)[0]
    np.testing.assert_array_equal(top.get(), host.max(1, keepdims=True))
    np.testing.assert_allclose(total.get(), host.sum(1, keepdims=True), rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (1000, 5)], ids=str)
def test_columns(on, shape):
    x = on.array(numbers(shape))

    def function(x):
        scaled = x * 0.5
        return scaled - pm.mean(scaled, axis=-2), pm.max(x, axis=-2) * 2, pm.sum(x - pm.max(x, axis=-2)), x + 1

    found = same(function, (x,), function, dtype=np.float32) if shape[0] < 100 else None
    if found is None:  # sums of many differ by their order
        (mean, _), *_ = over_rows(lambda x: pm.mean(x, axis=-2), (adopt(x),), NAMES)[0]
        np.testing.assert_allclose(mean.get(), x.get().mean(0, keepdims=True), rtol=1e-4, atol=1e-5)


def test_no_elements(on):
    for shape in ((0, 5), (2, 0, 3)):
        x = on.array(np.zeros(shape, np.float32))
        (found, _), (total, _) = over_rows(lambda x: (x * 2, pm.sum(x)), (adopt(x),), NAMES)[0]
        assert (found.shape, total.shape) == (shape, (*shape[:-1], 1))


def test_a_result_goes_where_it_should(on):
    host = numbers((6, 20))
    x, out, narrow = on.array(host), on.array(host * 0), on.array(np.zeros((6, 20), np.float16))
    (want,), _ = rowwise.over_rows(softmax, (host,), NAMES)
    for to, first in ((out, None), (narrow, np.float16), (x, None)):
        (found, _), *_ = over_rows(softmax, (adopt(x),), NAMES, adopt(to), first=first)[0]
        assert found is to
        np.testing.assert_allclose(to.get().astype(np.float32), want, rtol=2e-3 if first else 3e-6, atol=1e-6)
    with pytest.raises(ValueError, match="out has shape"):
        over_rows(softmax, (adopt(out),), NAMES, adopt(on.array(host[:3])))


def test_a_kind_of_call_is_made_once(on, monkeypatch):
    x, y = on.array(numbers((6, 20))), on.array(numbers((6, 20), seed=1))
    over_rows(softmax, (adopt(x),), NAMES)
    monkeypatch.setattr(kernel_call, "launches_over_rows", None)
    (found, _), *_ = over_rows(softmax, (adopt(y),), NAMES)[0]
    (want,), _ = rowwise.over_rows(softmax, (y.get(),), NAMES)
    np.testing.assert_allclose(found.get(), want, rtol=3e-6)


def test_what_is_refused(on):
    x, host = on.array(numbers((6, 20))), numbers((20,))
    with pytest.raises(TypeError, match="captures an array in the host's memory"):
        over_rows(lambda x: x + host, (adopt(x),), NAMES)
    with pytest.raises(TypeError, match="expressions on a device read"):
        over_rows(lambda x: x + 1, (adopt(on.array(host.astype(np.float64)[None])),), NAMES)
    there = on.array(host)
    for bad in (lambda x: x + there.sum(), lambda x: x + float(there[0]), lambda x: x + np.asarray(there)):
        with pytest.raises(TraceError, match="of an array on a device; compute it before"):
            over_rows(bad, (adopt(x),), NAMES)


def test_a_matmul_between_functions_of_rows(on):
    a, b, w = numbers((9, 24)), numbers((24, 40), seed=1), numbers((24,))
    there = on.array(w)

    def norm(x, i):
        return x / pm.sqrt(pm.mean(x * x) + 1e-6) * there[i.k]

    found = pm.matmul(on.array(a), on.array(b), epilogue=softmax, prologue_a=norm).get()
    c = (a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) * w) @ b
    e = np.exp(c - c.max(-1, keepdims=True))
    np.testing.assert_allclose(found, e / e.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
    found = pm.matmul(on.array(a), on.array(b), prologue_b=pm.max).get()
    np.testing.assert_allclose(found, a @ np.broadcast_to(b.max(1, keepdims=True), b.shape), rtol=1e-4, atol=1e-4)
