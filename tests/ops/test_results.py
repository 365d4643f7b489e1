"""Results of epilogues: their shapes and types, whatever the product is computed by, and operands of batches."""

from __future__ import annotations

import numpy as np
import pytest

import portmm as pm

QUICKLY = "fast"

RNG = np.random.default_rng(0)
B, M, N, K = 3, 5, 7, 4
A, W = RNG.standard_normal((B, M, K)).astype(np.float32), RNG.standard_normal((K, N)).astype(np.float32)
PRODUCT = A @ W


def array(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8", ">f4"])
def test_captures_of_a_batch_in_any_order(dtype, packed):
    """Items share W, so that rows of all are alike: where nothing else tells them apart."""
    w = pm.pack(W) if packed else W
    x, z, twice, items = (array(*s, dtype=dtype) for s in ((B, N, M), (M, B), (M, B, M), (B, B, M)))
    bmn = array(B, M, N, dtype=dtype)
    for function, want in [
        (lambda acc, i: acc + x[i.b, i.n, i.m], x.transpose(0, 2, 1)),
        (lambda acc, i: acc + z[i.m, i.b], z.T[:, :, None]),
        (lambda acc, i: acc + twice[i.m, i.b, i.m], np.einsum("mbm->bm", twice)[:, :, None]),
        (lambda acc, i: acc + items[i.b, i.b, i.m], np.einsum("bbm->bm", items)[:, :, None]),
        (lambda acc, i: acc + bmn[i.b, i.m, i.n], bmn),
        (lambda acc: acc + bmn, bmn),
    ]:
        np.testing.assert_allclose(pm.matmul(A, w, epilogue=function), PRODUCT + want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [">f4", ">i4", "<f4"])
def test_casts_to_another_order_of_bytes(dtype):
    ones, w = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    assert (pm.matmul(ones, w, epilogue=lambda acc: pm.cast(acc, dtype)) == 4).all()
    assert (pm.linear(ones.astype(np.int8), w.astype(np.int8), epilogue=lambda acc: pm.cast(acc, dtype)) == 4).all()
    assert (pm.fuse(lambda x: (x @ w + 1).astype(dtype))(ones) == 5).all()


def test_a_result_given_has_a_type_for_itself_only():
    x, w = array(4, 32), array(32, 16)
    codes, scales = pm.matmul(x, w, epilogue=pm.quantize_rows)
    out = np.empty((4, 16), np.int8)
    again = pm.matmul(x, w, out, epilogue=pm.quantize_rows)
    assert again[0] is out
    assert again[1].dtype == np.float32
    np.testing.assert_array_equal(out, codes)
    np.testing.assert_array_equal(again[1], scales)
    half = np.empty((4, 16), np.float16)
    both = pm.matmul(x, w, half, epilogue=lambda acc: (acc, acc + 1))
    assert [y.dtype.name for y in both] == ["float16", "float32"]


def test_batches_of_other_shapes_and_as_many_items_have_their_own_results():
    x = array(2, 3, 4, 5)
    w = array(5, 6)
    for shape in ((2, 3, 4, 5), (3, 2, 4, 5), (6, 4, 5)):
        found = pm.matmul(x.reshape(shape), w, epilogue=pm.softmax)
        assert found.shape == (*shape[:-1], 6)
        np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("shape", [(64, 64, 4096), (300, 200, 500)])
def test_what_is_the_same_along_a_row_has_one_column(shape):
    m, n, k = shape
    y = array(m, n)
    got = pm.matmul(array(m, k), np.asfortranarray(array(k, n)), epilogue=lambda _, i: y[i.m, 0])
    np.testing.assert_array_equal(got, y[:, :1])


def test_halves_round_to_even_up_to_where_there_are_none():
    x = np.float32([[0.5, 1.5, -2.5, 4194304.5, 4194305.5, -4194305.5, 8388607.5, -8388607.5, 8388609, 3e9, -3e9]])
    got = pm.matmul(np.ones((1, 1), np.float32), x, epilogue=lambda acc: pm.cast(acc, np.int32))
    np.testing.assert_array_equal(got, np.clip(np.rint(x.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32))
    np.testing.assert_array_equal(got, pm.cast(x, np.int32))


def test_indices_become_floats():
    got = pm.matmul(A[0], W, epilogue=lambda _, i: pm.cast(i.n + i.m, np.float32))
    np.testing.assert_array_equal(got, np.arange(M)[:, None] + np.arange(N))


def test_a_prologue_that_is_the_same_along_a_row():
    want = np.broadcast_to(A[0].mean(1, keepdims=True), (M, K)) @ W
    np.testing.assert_allclose(pm.matmul(A[0], W, prologue_a=pm.mean), want, rtol=1e-5, atol=1e-5)


def test_reductions_within_reductions_are_refused():
    with pytest.raises(pm.TraceError, match="two steps"):
        pm.matmul(A[0], W, epilogue=lambda acc: pm.sum((acc - pm.mean(acc, axis=-2)) ** 2, axis=-2))
