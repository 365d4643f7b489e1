"""Attention with factors of scores and of values: against float64, and its record against its meaning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import test_amx
from runs import guarded

import portmm as pm
from portmm.dispatch import config, cpu_kernels
from portmm.errors import TraceError
from portmm.ops.attention_factors import attention_by_factors
from portmm.target.target import load_isa, load_target

pytestmark = pytest.mark.calls

QUICKLY = "fast"
SHAPES = [(2, 20, 70, 64, 64), (3, 33, 130, 40, 72), (1, 17, 37, 32, 5), (1, 70, 33, 96, 33)]
"""Heads, queries, keys, and elements of rows."""
WHICH = [(True, True, True), (True, False, True), (False, False, True), (False, True, False)]


def checked(shape, which, dtype):
    """Check a call beside guard pages, with hard ranges: weights of all sizes, sums of both signs."""
    rng = np.random.default_rng(sum(shape))
    h, m, n, d, dv = shape
    q, k, v = ((2 * rng.standard_normal(s)).astype(dtype) for s in ((h, m, d), (h, n, d), (h, n, dv)))
    factors = [
        rng.uniform(-2, 2, (h, x)).astype(np.float32) if y else None for x, y in zip((m, n, n), which, strict=True)
    ]
    q, k, v = (guarded(x.reshape(-1)).reshape(x.shape) for x in (q, k, v))
    got = attention_by_factors(q, k, v, tuple(factors), scale=0.125)
    ones = [np.ones((h, x)) if y is None else y.astype(np.float64) for x, y in zip((m, n, n), factors, strict=True)]
    a, b, c = (x.astype(np.float64) for x in (q, k, v))
    s = a @ b.swapaxes(-1, -2) * 0.125 * ones[0][:, :, None] * ones[1][:, None, :]
    e = np.exp(s - s.max(-1, keepdims=True))
    want = e / e.sum(-1, keepdims=True) @ (c * ones[2][:, :, None])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("which", WHICH, ids=str)
def test_in_float32(which):
    for shape in SHAPES:
        checked(shape, which, np.float32)


@pytest.mark.parametrize("which", WHICH[:2], ids=str)
def test_tiles_have_exact_weights(which, monkeypatch):
    """Operands of bfloat16, by tiles in C: errors are those of float32."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    amx = [load_isa(x) for x in ("amx_bf16", "avx512")]
    if not test_amx.LINES_RUN:
        pytest.skip("lines are moved by AVX-512")
    machine = replace(load_target("sapphire_rapids"), isas=(amx[0], *(x for x in amx[0].below)))
    monkeypatch.setattr(cpu_kernels, "loaded", test_amx.shimmed)
    monkeypatch.setattr(config, "target", lambda: machine)
    cpu_kernels.forget()
    for shape in SHAPES:
        checked(shape, which, ml_dtypes.bfloat16)
    cpu_kernels.forget()


def test_a_score_of_users_is_one_value():
    x = np.ones((1, 1, 32, 16), np.float32)
    with pytest.raises(TraceError, match="one value"):
        pm.attention(x, x, x, score=lambda s, i: (s, s * i.q))
