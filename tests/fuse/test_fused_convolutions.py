"""Convolutions inside functions that `fuse` runs."""

from __future__ import annotations

import numpy as np
import pytest
from convolved import convolved

import portmm as pm
from portmm.errors import TraceError

QUICKLY = True


def values(shape, seed=0):
    """Small integers, whose sums are exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


X, W, BIAS = values((2, 5, 6, 16)), values((16, 16, 3, 3), 1), values(16, 2)
WANT = convolved(X, W, padding=1)


def test_what_follows_a_convolution_is_part_of_its_kernel():
    packed = pm.pack_conv(W)
    block = pm.fuse(lambda x, bias: pm.relu(pm.conv(x, packed, padding=1) + bias + x))
    np.testing.assert_array_equal(block(X, BIAS), np.maximum(WANT + BIAS + X, 0))
    assert str(block.explain(X, BIAS)).count("conv  ") == 1
    assert "1 kernel\n" in str(block.explain(X, BIAS))


def test_an_epilogue_counts_pixels_of_an_image():
    packed = pm.pack_conv(W)

    def function(x, bias):
        return pm.conv(x, packed, padding=1, epilogue=lambda acc, i: pm.relu(acc + bias[i.n]) + i.m)

    fused = pm.fuse(function)
    np.testing.assert_array_equal(fused(X, BIAS), np.maximum(WANT + BIAS, 0) + np.arange(30.0).reshape(5, 6, 1))
    assert "1 kernel\n" in str(fused.explain(X, BIAS))


def test_other_convolutions_are_a_step():
    fused = pm.fuse(lambda x, w: pm.relu(pm.conv(x, w, padding=1)))
    np.testing.assert_array_equal(fused(X, W), np.maximum(WANT, 0))
    first = pm.fuse(lambda x, w: pm.conv(x, w, padding=1, layout="NCHW", epilogue=lambda acc, i: acc + BIAS[i.n]))
    planes = np.ascontiguousarray(np.moveaxis(X, -1, 1))
    np.testing.assert_array_equal(first(planes, W), np.moveaxis(WANT + BIAS, -1, 1))
    with pytest.raises(TraceError, match="use what conv returns"):
        pm.fuse(lambda x, w: pm.conv(x, w, np.empty(WANT.shape, np.float32), padding=1))(X, W)
