"""Attention into an array of the caller: dense, strided, of another type, over an operand."""

from __future__ import annotations

import numpy as np
import pytest
from test_attention import BF16, operands

import portmm as pm

pytestmark = pytest.mark.calls

QUICKLY = "fast"


def test_out():
    q, k, v = operands((1, 2, 2, 33, 41, 16, 16))
    want = pm.attention(q, k, v)
    out = np.empty_like(want)
    assert pm.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, want)
    wide = np.empty((1, 2, 33, 32), np.float32)
    pm.attention(q, k, v, out=wide[..., ::2])
    np.testing.assert_array_equal(wide[..., ::2], want)
    double = np.empty(want.shape)
    pm.attention(q, k, v, out=double)
    np.testing.assert_array_equal(double, want)
    pm.attention(q, k, v, out=q)
    np.testing.assert_array_equal(q, want)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_out_of_one_query_in_any_strides_of_its_axis(dtype):
    x = operands((2, 8, 2, 1, 45, 17, 17), dtype)
    want = pm.attention(*x)
    for axis in (1, 3):  # as of (items, queries, heads, columns), and of a last axis
        out = np.moveaxis(np.zeros(np.moveaxis(want, 2, axis).shape, dtype), axis, 2)
        assert out.flags.c_contiguous
        assert pm.attention(*x, out=out) is out
        np.testing.assert_array_equal(out, want)
