"""Attention of numbers of queries and keys that share a kernel."""

from __future__ import annotations

import numpy as np
import pytest
from test_attention import BF16, check, exact, operands

import portmm as pm
from portmm.ops import attention_kernel, attention_launch
from portmm.runtime import cpu as cpu_runtime
from portmm.util import memo

pytestmark = pytest.mark.calls

QUICKLY = "fast"


@pytest.fixture
def made(monkeypatch):
    """The sizes of calls that a kernel is sought for; nothing is remembered before."""
    memo.forget_all()
    cpu_runtime.clear_memo()
    found, make = [], attention_kernel.make_kernel

    def counted(traced, shape, flags, result, **more):
        found.append((shape.m, shape.n))
        return make(traced, shape, flags, result, **more)

    monkeypatch.setattr(attention_kernel, "make_kernel", counted)
    return found


SIZES = {
    "prefill": ((200, 200), (193, 199), (199, 193), (196, 200)),
    "largest last": ((193, 193), (196, 193), (200, 200)),
    "decode": ((1, 1344), (1, 1281), (1, 1300)),
    "few": ((7, 47), (7, 48)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("how", [{}, {"causal": True, "window": 33}], ids=str)
@pytest.mark.parametrize("heads", [(2, 4, 2, 10, 12), (1, 1, 1, 64, 64)], ids=str)
def test_a_class_of_queries_and_keys_has_one_kernel(made, dtype, sizes, how, heads):
    items, h, few, d, dv = heads
    for seed, (m, n) in enumerate(sizes):
        x = operands((items, h, few, m, n, d, dv), BF16 if dtype == "bfloat16" else dtype, seed)
        check(*x, exact(*x, **how), **how)
        if items == 1:
            want = exact(*x, **how)
            check(*(y[0] for y in x), tuple(y[0] for y in want), **how)
    assert len(made) == 2  # with logarithms and without


def test_rows_beyond_a_class_are_another(made):
    for m, n in ((200, 200), (201, 200), (200, 201), (192, 200)):
        x = operands((1, 2, 1, m, n, 16, 16))
        check(*x, exact(*x))
    assert sorted(set(made)) == [(192, 200), (200, 200), (200, 201), (201, 200)]


def test_what_is_not_dense_is_of_no_class(made):
    x = operands((2, 2, 2, 200, 200, 16, 16))
    check(*x, exact(*x))
    for m in (199, 198):
        y = tuple(z[:, :, :m] for z in x)
        check(*y, exact(*y))
    assert len(made) == 6
    y = tuple(np.ascontiguousarray(z[:, :, :198]) for z in x)
    check(*y, exact(*y))
    assert len(made) == 6


@pytest.mark.parametrize("m", [1, 40])
def test_keys_of_a_cache_are_of_classes(made, m):
    """A cache that fills has one kernel for all numbers of keys of a class, though it is not dense."""
    q, k, v = operands((2, 2, 2, m, 300, 16, 12))
    for n in (193, 200, 196):
        x = (q, k[:, :, :n], v[:, :, :n])
        check(*x, exact(*x))
    assert len(made) == 2
    with pytest.raises(ValueError, match="fit"):
        pm.attention(q, k[:, :, :199], v[:, :, :200])
    x = (q, k[:, :, :201], v[:, :, :201])
    check(*x, exact(*x))
    assert len(made) == 4


@pytest.mark.parametrize(("d", "wide"), [(33, 33), (64, 65)])
def test_keys_that_are_copied_have_strides_of_their_number(d, wide):
    """Units of k need whole steps of aligned columns: other keys of a cache are copied."""
    rng = np.random.default_rng(d)
    q, cache, values = (rng.standard_normal((2, 3, n, x)).astype(BF16) for n, x in ((40, d), (200, wide), (200, 16)))
    for n in (104, 101, 103):
        k, v = cache[:, :, :n, :d], values[:, :, :n]
        wide_q, wide_k, wide_v = (x.astype(np.float64) for x in (q, k, v))
        scores = np.exp(wide_q @ wide_k.swapaxes(-1, -2) / np.sqrt(d))
        want = scores / scores.sum(-1, keepdims=True) @ wide_v
        assert np.abs(pm.attention(q, k, v).astype(np.float64) - want).max() < 0.02


@pytest.mark.usefixtures("made")
def test_a_known_class_refuses_what_it_did():
    q, k, v = operands((1, 2, 1, 200, 200, 16, 16))
    pm.attention(q, k, v)
    for wrong in ((q, k, v[:, :, :199]), (q, k[..., :8].copy(), v), (q, k[0], v[0]), (q[:, :, :, :8].copy(), k, v)):
        with pytest.raises(ValueError, match=r"fit|columns"):
            pm.attention(*wrong)
    with pytest.raises(TypeError, match="dtypes"):
        pm.attention(q, k, v.astype(np.float16))
    with pytest.raises(TypeError, match="masked"):
        pm.attention(np.ma.asarray(q), k, v)
    assert pm.attention(q[:, :, :0], k, v).shape == (1, 2, 0, 16)
    assert not pm.attention(q, k[:, :, :0], v[:, :, :0]).any()


def test_threads_of_small_and_of_large_calls_of_a_class(made):
    """Calls of a class may lie on both sides of where work is shared out."""
    pm.set_num_threads(2)
    try:
        for n in (1056, 1025, 1040):
            x = operands((1, 1, 1, 60, n, 8, 8))
            check(*x, exact(*x))
        assert len({60 * n * 16 > attention_launch.FORK for n in (1056, 1025)}) == 2
        assert len(made) == 4
    finally:
        pm.set_num_threads(0)
