"""Functions of arrays of 16-bit floats, called directly: sums in float32, rounded once, as in kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import portmm as pm

FUNCTIONS = {
    "softmax": pm.softmax, "log_softmax": pm.log_softmax, "logsumexp": pm.logsumexp, "sum": pm.sum, "mean": pm.mean,
    "rms_norm": lambda x: pm.rms_norm(x, x[0]), "layer_norm": lambda x: pm.layer_norm(x, x[0], bias=x[1]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sums_are_wide(name, dtype):
    x = np.random.default_rng(0).standard_normal((5, 1023)).astype(dtype)
    got, want = FUNCTIONS[name](x), FUNCTIONS[name](x.astype(np.float64))
    assert got.dtype == x.dtype
    eps = 2.0 ** (-8 if dtype is ml_dtypes.bfloat16 else -11)
    # Of sums around 0 the terms count, and the smallest float16 numbers have fewer bits.
    close = (
        1.01 * eps * np.abs(want) + 1e-5 * np.abs(x.astype(np.float64)).sum(-1, keepdims=True) * (name == "sum") + 5e-6
    )
    assert (np.abs(got.astype(np.float64) - want) <= close).all()


def test_wide_arguments_keep_their_type():
    x, w = np.ones((2, 8), ml_dtypes.bfloat16), np.ones(8, np.float32)
    assert pm.rms_norm(x, w).dtype == np.float32
    assert pm.softmax(np.ones(8, np.float64)).dtype == np.float64
    assert pm.sum([1, 2]).dtype == np.int64
