"""Deterministic results: the same bits for every thread count, and for a row on its own."""

from __future__ import annotations

import cover
import ml_dtypes
import numpy as np
import pytest
from machines import HERE

import portmm as pm

pytestmark = pytest.mark.calls

QUICKLY = "fast"

SIZES = [(37, 1, 700), (35, 5, 64), (16, 200, 300), (5, 33, 1500)]
OF_EACH = cover.pairs(HERE, [np.float32, np.float64], SIZES)


def operands(size, dtype):
    m, n, k = size
    rng = np.random.default_rng(sum(size))
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)


def weights(b):
    """B in the ways that it may lie; all must give the same bits as the first."""
    return {
        "row": b,
        "col": np.asfortranarray(b),
        "packed": pm.pack(b),
        "padded": np.pad(b, ((0, 0), (0, 3)))[:, : b.shape[1]],
    }


@pytest.mark.thin(2)
@pytest.mark.parametrize(("target", "dtype", "size"), OF_EACH)
def test_threads_do_not_matter(target, dtype, size):
    a, b = operands(size, dtype)
    with pm.config(target=target, deterministic=True):
        for name, weight in weights(b).items():
            with pm.config(threads=1):
                want = pm.matmul(a, weight)
            for threads in (2, 3, 5):
                with pm.config(threads=threads):
                    np.testing.assert_array_equal(pm.matmul(a, weight), want, err_msg=f"{size} {name} {threads}")


@pytest.mark.thin(2)
@pytest.mark.parametrize(("target", "dtype", "size"), OF_EACH)
def test_other_rows_do_not_matter(target, dtype, size):
    """Row i of a product is the product of row i, however many rows there are beside it."""
    a, b = operands(size, dtype)
    with pm.config(target=target, deterministic=True, threads=2):
        for name, weight in weights(b).items():
            want = pm.matmul(a, weight)
            for first, last in ((0, 1), (3, 4), (1, 5), (0, size[0] // 2), (size[0] - 1, size[0])):
                got = pm.matmul(a[first:last], weight)
                np.testing.assert_array_equal(got, want[first:last], err_msg=f"{size} {name} {first}:{last}")
            np.testing.assert_array_equal(pm.matmul(a[2], weight), want[2], err_msg=f"{size} {name} vector")


@pytest.mark.thin(4)
@pytest.mark.parametrize("target", HERE)
def test_how_operands_lie_does_not_matter(target):
    for size in SIZES:
        a, b = operands(size, np.float32)
        with pm.config(target=target, deterministic=True):
            want = pm.matmul(a, b)
            for name, weight in weights(b).items():
                np.testing.assert_array_equal(pm.matmul(a, weight), want, err_msg=f"{size} {name}")
            np.testing.assert_array_equal(pm.matmul(np.asfortranarray(a), b), want)
            out = np.empty(want.shape[::-1], np.float32).T
            np.testing.assert_array_equal(pm.matmul(a, b, out), want)
            stack = np.stack([a] * 3)
            np.testing.assert_array_equal(pm.matmul(stack, b)[1], want)
            np.testing.assert_array_equal(pm.matmul(stack, np.stack([b] * 3))[2], want)


def test_the_same_call_gives_the_same_bits():
    a, b = operands((65, 33, 257), np.float32)
    want = pm.matmul(a, b)
    for _ in range(5):
        np.testing.assert_array_equal(pm.matmul(a, b), want)


@pytest.mark.thin(5)
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_deterministic_as_well(target, dtype):
    """Whatever units the machine has for them, and whether weights are of their type or of four bits."""
    for size in SIZES[2:]:
        a, b = operands(size, dtype)
        with pm.config(target=target, deterministic=True):
            for weight in (b, pm.pack(b), pm.pack(pm.quantize(b, group=32))):
                with pm.config(threads=1):
                    want = pm.matmul(a, weight)
                with pm.config(threads=3):
                    np.testing.assert_array_equal(pm.matmul(a, weight), want)
                    for first, last in ((0, 1), (1, 5), (0, size[0] // 2)):
                        np.testing.assert_array_equal(pm.matmul(a[first:last], weight), want[first:last])
