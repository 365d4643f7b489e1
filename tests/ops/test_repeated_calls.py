"""Calls that the run time repeats without Python: they see what changed since the first, and compute the same."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import config
from portmm.ops import host_matmul
from portmm.runtime.cpu import python_headers, runtime

QUICKLY = True
RNG = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(python_headers() is None, reason="only the extension repeats calls")


def floats(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def repeated(epilogue, a, b, out=None, dtype=None):
    """The result of the run time alone."""
    return host_matmul.again(epilogue, a, b, out, dtype, config.current())


def check(epilogue, a, b, **options):
    """A call, and what the run time makes of the next."""
    first = pm.matmul(a, b, epilogue=epilogue, **options)
    again = repeated(epilogue, a, b, **options)
    assert again is not NotImplemented
    np.testing.assert_array_equal(np.asarray(again), np.asarray(first))
    return again


A, B, BIAS = floats(9, 20), floats(20, 33), floats(33)
FACTOR = 2.0


def test_captured_arrays_and_numbers_are_read_in_each_call():
    bias, factor = floats(33), 0.5

    def epilogue(x, i):
        return x * factor + bias[i.n]

    check(epilogue, A, B)
    bias += 1
    factor = 3.0
    np.testing.assert_allclose(repeated(epilogue, A, B), A @ B * 3 + bias, rtol=1e-4, atol=1e-4)
    bias = floats(66)[::2]  # other strides
    assert repeated(epilogue, A, B) is NotImplemented
    np.testing.assert_allclose(pm.matmul(A, B, epilogue=epilogue), A @ B * 3 + bias, rtol=1e-4, atol=1e-4)
    bias = [1.0]
    assert repeated(epilogue, A, B) is NotImplemented


def test_globals_may_change_appear_and_go(monkeypatch):
    def epilogue(x, i):
        return max(x * FACTOR, BIAS[i.n])

    with pytest.raises(pm.TraceError):
        pm.matmul(A, B, epilogue=epilogue)

    def other(x, i):
        return pm.maximum(x * FACTOR, BIAS[i.n])

    check(other, A, B)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    monkeypatch.setitem(globals(), "BIAS", floats(33))
    np.testing.assert_allclose(repeated(other, A, B), np.maximum(A @ B * 4, BIAS), rtol=1e-4, atol=1e-4)
    monkeypatch.setitem(globals(), "FACTOR", 4)
    assert repeated(other, A, B) is NotImplemented, "an integer is part of the kernel"
    monkeypatch.delitem(globals(), "FACTOR")
    assert repeated(other, A, B) is NotImplemented


def test_plain_values_select_kernels():
    for double in (False, True, False):

        def epilogue(x, _i):
            return x * 2 if double else x  # noqa: B023 - called at once

        np.testing.assert_allclose(check(epilogue, A, B), A @ B * (1 + double), rtol=1e-4, atol=1e-4)


def test_all_rows_of_a_class_are_one_kind():
    residual = floats(48, 33)

    def epilogue(x, i):
        return x + residual[i.m, i.n]

    def alone(x, i):
        return x + BIAS[i.n]

    whole = floats(48, 20)
    pm.matmul(whole, B, epilogue=alone)
    for m in (47, 48):
        np.testing.assert_array_equal(repeated(alone, whole[:m], B), pm.matmul(whole[:m], B, epilogue=alone))
    for m in (47, 48):
        want = whole[:m] @ B + residual[:m]
        np.testing.assert_allclose(pm.matmul(whole[:m], B, epilogue=epilogue), want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(pm.matmul(whole[:m], B, epilogue=epilogue), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [None, np.float32, np.float16, np.dtype(np.float16)])
def test_types_of_results(dtype):
    got = check(lambda x, i: x + BIAS[i.n], A, B, dtype=dtype)
    assert got.dtype == (dtype or np.float32)


def test_several_results():
    def epilogue(x, i):
        return pm.maximum(x, 0), x + BIAS[i.n]

    pm.matmul(A, B, epilogue=epilogue)
    for got, want in zip(repeated(epilogue, A, B), pm.matmul(A, B, epilogue=epilogue), strict=True):
        np.testing.assert_array_equal(got, want)


def test_packed_weights_and_other_layouts():
    packed = pm.pack(B)

    def epilogue(x, i):
        return x + BIAS[i.n]

    check(epilogue, A, packed)
    check(epilogue, A, np.asfortranarray(B))
    check(epilogue, np.asfortranarray(A), B)
    check(epilogue, floats(3, 9, 20), floats(3, 20, 33))
    assert repeated(epilogue, A, pm.pack(floats(20, 65))) is NotImplemented
    np.testing.assert_array_equal(repeated(epilogue, A, pm.pack(2 * B)), pm.matmul(A, 2 * B, epilogue=epilogue))


def test_results_are_written_only_where_nothing_is_read():
    out = np.empty((9, 33), np.float32)

    def epilogue(x, i):
        return x + BIAS[i.n]

    assert check(epilogue, A, B, out=out) is out
    memory = floats(9, 60)
    a, over = memory[:, :20], memory.ravel()[: 9 * 33].reshape(9, 33)
    want = a @ B + BIAS
    pm.matmul(a.copy(), B, out=np.empty_like(over), epilogue=epilogue)
    np.testing.assert_allclose(pm.matmul(a, B, out=over, epilogue=epilogue), want, rtol=1e-4, atol=1e-4)
    out.flags.writeable = False
    assert repeated(epilogue, A, B, out) is NotImplemented
    with pytest.raises(ValueError, match="read-only"):
        pm.matmul(A, B, out=out, epilogue=epilogue)


def test_settings_are_part_of_the_kind():
    def epilogue(x, i):
        return x + BIAS[i.n]

    check(epilogue, A, B)
    with pm.config(deterministic=True):
        assert repeated(epilogue, A, B) is NotImplemented
        pm.matmul(A, B, epilogue=epilogue)
    runtime().clear_memo()
    assert repeated(epilogue, A, B) is NotImplemented


def test_what_is_remembered_keeps_no_array_alive():
    bias = floats(33)

    def epilogue(x, i):
        return x + bias[i.n]

    check(epilogue, A, B)
    gone = weakref.ref(bias)
    del epilogue
    bias = None
    gc.collect()
    assert gone() is None


def test_what_needs_python_goes_there():
    class Holder:
        bias = BIAS

    holder = Holder()
    for epilogue in (lambda x, i: x + holder.bias[i.n], lambda x, i, b=BIAS: x + b[i.n]):
        pm.matmul(A, B, epilogue=epilogue)
        assert repeated(epilogue, A, B) is NotImplemented
        np.testing.assert_allclose(pm.matmul(A, B, epilogue=epilogue), A @ B + BIAS, rtol=1e-4, atol=1e-4)
    assert repeated(None, A, B) is NotImplemented
    assert repeated(lambda x, _i: x, A, B) is NotImplemented
    with pytest.raises(TypeError, match="6 arguments"):
        runtime().repeat(1)


def attended(q, k, v, scale=None, *, causal=False, window=None, return_lse=False):
    return host_matmul.attend(q, k, v, scale, causal, window, return_lse, config.current(), config.limit())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": 5}, {"scale": 0.3, "return_lse": True}, {"causal": True, "window": 9}]
)
@pytest.mark.parametrize("queries", [1, 40])
def test_attention_of_other_numbers_of_queries_and_keys(dtype, options, queries):
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    d = 32  # whole steps of tiles, whose operands would be copied
    k, v = floats(2, 2, 64, d, dtype=kind), floats(2, 2, 64, 24, dtype=kind)
    pm.attention(floats(2, 4, queries, d, dtype=kind), k, v, **options)
    for keys in (64, 63):
        q = floats(2, 4, queries, d, dtype=kind)
        keys_of, values = (np.ascontiguousarray(x[:, :, :keys]) for x in (k, v))
        got = attended(q, keys_of, values, **options)
        assert got is not NotImplemented
        pm.forget()
        runtime().clear_memo()
        want = pm.attention(q, keys_of, values, **options)
        for x, y in zip(*(r if options.get("return_lse") else (r,) for r in (got, want)), strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
        pm.attention(q, keys_of, values, **options)


def test_attention_of_strided_operands_and_other_options():
    q, k, v = floats(2, 40, 4, 16), floats(2, 64, 2, 16), floats(2, 64, 2, 16)
    views = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    want = pm.attention(*map(np.ascontiguousarray, views))
    np.testing.assert_allclose(pm.attention(*views), want, rtol=1e-5, atol=1e-6)
    got = attended(*views)
    assert got is not NotImplemented
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert attended(*views, causal=True) is NotImplemented
    assert attended(*[x[:, :1] for x in views]) is NotImplemented
    with pm.config(threads=1):
        assert attended(*views) is NotImplemented
