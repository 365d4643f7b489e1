"""Fused functions under options of `matmul`, settings and threads."""

import threading

import numpy as np
import pytest
from test_fuse import agrees, gated_mlp, kinds, rng, some

import portmm as pm
from portmm.spec import elementwise as v

pytestmark = pytest.mark.calls

QUICKLY = True


def test_epilogues_and_prologues():
    bias, beside = some(9), some(7, 12)

    @pm.fuse
    def f(q, k):
        def masked(acc, i):
            return v.where(i.n <= i.m, acc + bias[i.n] * beside[i.m, i.n], -np.inf)

        s = pm.matmul(q, k, epilogue=masked, prologue_a=lambda a, i: a * 2 + i.k)
        return v.softmax(s)

    def plain(q, k):
        s = (q * 2 + np.arange(8)) @ k
        m, n = s.shape[-2:]
        masked = np.where(np.arange(n) <= np.arange(m)[:, None], s + bias[:n] * beside[:m, :n], -np.inf)
        return v.softmax(masked)

    for q, k in ((some(5, 8), some(8, 9)), (some(3, 5, 8), some(3, 8, 9)), (some(3, 5, 8), some(8, 9))):
        for _ in range(2):
            np.testing.assert_allclose(f(q, k), plain(q, k), rtol=1e-3, atol=1e-5)
        assert kinds(f.explain(q, k)) == ["rows", "product", "rows"]


def test_matmul_with_options():
    b = some(6)

    @pm.fuse
    def f(x, w):
        h = pm.matmul(x, w, dtype=np.float32)
        return v.relu(h) + pm.matmul(x, w, epilogue=lambda acc, i: acc + b[i.n], dtype=np.float32)

    x, w = some(5, 8, dtype=np.float16), some(8, 6, dtype=np.float16)
    np.testing.assert_allclose(f(x, w), f.__wrapped__(x, w), rtol=1e-3, atol=1e-4)


def test_integers():
    @pm.fuse
    def f(a, b):
        return pm.matmul(a, b) + 1, a @ b, (a.astype(np.int32) << 2) & 12

    agrees(f, rng.integers(-9, 9, (4, 8), np.int8), rng.integers(-9, 9, (8, 5), np.int8))


def test_settings():
    args = (some(5, 16), some(16, 16), some(16, 16), some(16, 16))
    with pm.config(target="scalar"):
        agrees(gated_mlp, *args)
    with pm.config(deterministic=True, threads=1):
        together = gated_mlp(*args)
        alone = gated_mlp(args[0][2:3], *args[1:])
    assert (together[2] == alone[0]).all()


def test_threads_share_a_function():
    args = (some(64, 64), some(64, 64), some(64, 64), some(64, 64))
    wanted = gated_mlp.__wrapped__(*args)
    wrong = []

    def work():
        for _ in range(20):
            wrong.extend([1] * (not np.allclose(gated_mlp(*args), wanted, rtol=1e-3, atol=1e-4)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_results_are_the_callers():
    """Memory between kernels is used again; results are not in it."""

    @pm.fuse
    def f(x):
        y = x * 2
        return y.T, np.flip(np.sort(y)), y.reshape(-1)[1:]

    x = some(4, 4)
    first = f(x)
    copies = [y.copy() for y in first]
    f(x + 1)
    for y, z in zip(first, copies, strict=True):
        np.testing.assert_array_equal(y, z)
