"""Attention by tensor cores, emulated, against float64; and what NVIDIA's compiler makes of its kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulated_cuda import install
from test_attention import exact, operands
from test_grid_attention import check

import portmm as pm
from portmm import memory

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


@pytest.fixture
def cupy(monkeypatch):
    memory.forget_all()
    yield install(monkeypatch)
    memory.forget_all()


def ran(cupy):
    """The kernels that ran, without what joins runs."""
    return [name for name, *_ in cupy.launches if "runs" not in name]


SHAPES = [
    ((1, 1, 1, 1, 1, 16, 16), F16, {}),
    ((2, 2, 1, 33, 70, 64, 64), F16, {"causal": True}),
    ((1, 2, 1, 70, 133, 80, 48), BF16, {"window": 20}),
    ((1, 1, 1, 40, 90, 128, 128), BF16, {"causal": True, "window": 25}),
    ((1, 1, 1, 20, 70, 256, 256), F16, {"window": 33}),
    ((1, 1, 1, 130, 65, 32, 64), F16, {"causal": True}),  # the first queries see nothing
    # few queries: in one tile with other heads, keys in runs
    ((1, 6, 3, 2, 1100, 64, 64), F16, {"causal": True}),
    ((1, 20, 1, 1, 600, 128, 64), BF16, {"window": 33}),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_it_is_attention(cupy, case):
    shape, dtype, how = case
    x = operands(shape, dtype)
    check(cupy, x, exact(*x, **how), **how)
    assert all("mma" in name for name in ran(cupy))
    assert len(cupy.launches) == 1 + (shape[4] >= 600)
