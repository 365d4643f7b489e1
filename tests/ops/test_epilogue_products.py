"""Epilogues and prologues of products of all types, sizes and layouts, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from arrays_of import LAYOUTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import HERE
from test_epilogue import BF16, BIAS, A, B, K, M, N, close, floats, rng

import portmm as pm
from portmm.spec import elementwise

pytestmark = pytest.mark.calls

QUICKLY = True


def ends_of(product):
    bias = floats(product.shape[-1])
    top = product.max(-1, keepdims=True)
    return (
        (lambda acc: elementwise.relu(acc) * 0.5 + bias, np.maximum(product, 0) * 0.5 + bias),
        (lambda acc: (acc - elementwise.max(acc)) * 0.5, (product - top) * 0.5),
    )


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize(
    ("left", "right"),
    [(np.float32,) * 2, (BF16, BF16), (np.float16,) * 2, (np.float32, BF16), (np.float32, np.int8), (np.int8,) * 2,
     (np.uint8, np.int8)],
    ids=lambda x: np.dtype(x).name,
)  # fmt: skip
def test_types(left, right, name):
    m = 9 if name == HERE[-1] else 1 + 4 * HERE.index(name)
    x = (rng.integers(-4, 5, (m, 40)) + 4 * (left == np.uint8)).astype(left)
    y = rng.integers(-4, 5, (40, 41)).astype(right)
    alike = left == right or np.dtype(left).kind in "iu"
    with pm.config(target=name):
        packed = pm.pack(y) if alike else pm.pack(y, activations=left)
        fused, split = ends_of(x.astype(float) @ y.astype(float))
        close(pm.matmul(x, packed, dtype=np.float32, epilogue=fused[0]), fused[1], 5)
        if name == HERE[-1]:
            close(pm.matmul(x, y, dtype=np.float32, epilogue=fused[0]), fused[1], 5)
            close(pm.matmul(x, packed, dtype=np.float32, epilogue=split[0]), split[1], 5)
            usual = pm.matmul(x, packed, epilogue=lambda acc: acc)
            assert usual.dtype == (np.float32 if np.dtype(left).kind in "iu" or left != right else left)


def test_weights_of_four_bits():
    weight = pm.quantize(floats(64, 48), bits=4, group=32)
    packed = pm.pack(weight)
    for m in (1, 5, 40):
        x = floats(m, 64)
        for epilogue, want in ends_of(pm.matmul(x, packed).astype(float)):
            for b in (packed, weight):
                close(pm.matmul(x, b, epilogue=epilogue), want, 20)


def test_batches():
    a, b, shared = floats(3, M, K), floats(3, K, N), floats(K, N)
    all_, row, column, item = floats(3, M, N), floats(M, 1), floats(3, 1, N), floats(3)
    wide = all_.astype(np.float64)
    for right in (b, shared, pm.pack(shared)):
        product = a.astype(float) @ (shared if right is not b else b)
        for epilogue, want in (
            (lambda acc: acc + all_, product + all_),
            (lambda acc: acc + row * 2.0, product + row * 2),
            (lambda acc: acc + column, product + column),
            (lambda acc, i: acc * item[i.b], product * item[:, None, None]),
            (lambda acc, i: acc + all_[0, i.m, i.n], product + all_[0]),
            (lambda acc, i: acc + i.b, product + np.arange(3)[:, None, None]),
            (lambda acc: acc + wide, product + all_),
            (
                lambda acc, i: acc - elementwise.max(acc) + all_[i.b, i.m, 0],
                product - product.max(-1, keepdims=True) + all_[..., :1],
            ),
        )[:: 1 if right is b else 2]:
            close(pm.matmul(a, right, epilogue=epilogue), want, 3)
    many = floats(2, 3, M, K)
    close(pm.matmul(many, b, epilogue=lambda acc: acc + BIAS), many.astype(float) @ b + BIAS, 3)
    got = pm.matmul(many, shared, epilogue=lambda acc, i: (acc * 2.0, row[i.m, 0] + 0.0, elementwise.sum(acc)))
    assert [x.shape for x in got] == [(2, 3, M, N), (2, 3, M, 1), (2, 3, M, 1)]
    close(got[2][..., 0], (many.astype(float) @ shared).sum(-1), 30)


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_nothing_to_multiply(size):
    m, n, k = size
    a, b = floats(m, k), floats(k, n)
    np.testing.assert_array_equal(pm.matmul(a, b, epilogue=lambda acc: acc + 1.0), np.ones((m, n)))
    total, top = pm.matmul(a, b, epilogue=lambda acc: (elementwise.sum(acc + 1.0), elementwise.max(acc)))
    np.testing.assert_array_equal(total, np.full((m, 1), n))
    np.testing.assert_array_equal(top, np.full((m, 1), 0 if n else -np.inf))


def test_prologues():
    scale, shift = floats(M, 1), floats(K)
    a = A * scale + shift
    b = np.maximum(B, 0) + np.arange(K)[:, None] * 0.1
    got = pm.matmul(
        A, B,
        prologue_a=lambda x, i: x * scale[i.m, 0] + shift[i.k],
        prologue_b=lambda x, i: elementwise.relu(x) + i.k * 0.1,
        epilogue=lambda acc: acc + BIAS,
    )  # fmt: skip
    close(got, a.astype(float) @ b + BIAS, 10)
    normal = pm.matmul(A, pm.pack(B), prologue_a=lambda x: elementwise.rms_norm(x) * 1.0)
    close(normal, elementwise.rms_norm(A).astype(float) @ B, 3)
    batch = floats(2, 3, M, K)
    close(pm.matmul(batch, B, prologue_a=lambda x: x * 2.0), 2 * batch.astype(float) @ B, 5)
    with pytest.raises(TypeError, match="packed"):
        pm.matmul(A, pm.pack(B), prologue_b=lambda x: x)
    with pytest.raises(ValueError, match="matrices"):
        pm.matmul(A[0], B, epilogue=lambda acc: acc)


EXTENTS = st.sampled_from([1, 1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 100])


@settings(derandomize=True, deadline=None, max_examples=25, database=None, suppress_health_check=list(HealthCheck))
@given(
    m=EXTENTS,
    n=EXTENTS,
    k=EXTENTS,
    batch=st.sampled_from([(), (), (3,), (2, 2)]),
    lays=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3),
    packed=st.booleans(),
    kind=st.integers(0, 3),
    name=st.sampled_from(HERE),
    threads=st.integers(1, 3),
)
def test_any_product(  # noqa: PLR0917 - a product's geometry
    m, n, k, batch, lays, packed, kind, name, threads
):
    a, b, x = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((*batch, m, k), (k, n), (m, n)))
    product = a.astype(float) @ b
    with pm.config(target=name, threads=threads):
        a, b, x = (LAYOUTS[lay](y) for lay, y in zip(lays, (a, b, x), strict=True))
        row, column = x[:, :1], x[0]
        epilogue, want = (
            (lambda acc: (acc + x, acc * row), (product + x, product * row)),
            (
                lambda acc, i: (acc - x[i.m, 0] + i.n, elementwise.cast(acc, np.int8)),
                (product - row + np.arange(n), np.clip(product, -128, 127)),
            ),
            (
                lambda acc: (elementwise.maximum(acc, column) * 0.5, acc > x),
                (np.maximum(product, column) * 0.5, product > x),
            ),
            (
                lambda acc: (acc - elementwise.max(acc * row), elementwise.sum(acc)),
                (product - (product * row).max(-1, keepdims=True), product.sum(-1, keepdims=True)),
            ),
        )[kind]
        got = pm.matmul(a, pm.pack(b) if packed else b, epilogue=epilogue)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x.astype(float), y)
