"""Convolutions of arrays on devices: OpenCL's on a CPU, and CUDA's, emulated."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from convolved import convolved

import portmm as pm
from portmm.errors import ConvolutionError

BF16 = np.dtype(ml_dtypes.bfloat16)


def values(shape, dtype=np.float32, seed=0):
    """Small integers: their sums are exact in every type."""
    least = 0 if dtype == np.uint8 else -4
    return np.random.default_rng(seed).integers(least, 5, shape).astype(dtype)


CASES = [
    ((2, 7, 6, 16), (5, 16, 3, 3), np.float32, {"padding": 1}),
    ((1, 9, 8, 3), (4, 3, 3, 2), np.float32, {"stride": 2, "padding": ((2, 1), (0, 1)), "dilation": (1, 2)}),
    ((2, 5, 6, 8), (6, 8, 1, 1), np.float16, {}),
    ((2, 5, 6, 32), (16, 32, 3, 3), BF16, {"padding": "same"}),
    ((1, 6, 5, 8), (8, 4, 3, 3), np.int8, {"padding": 1, "groups": 2, "padding_value": 3}),
    ((2, 11, 4), (3, 4, 3), np.float64, {"layout": "NWC", "padding": 2}),
    ((2, 4, 6, 7), (5, 4, 3, 3), np.float32, {"layout": "NCHW", "padding": 1}),
    ((2, 8, 4, 5), (6, 4, 2, 2), np.int8, {"layout": "NCHW", "groups": 2, "stride": 2}),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("x", "w", "dtype", "how"), CASES, ids=str)
def test_convolutions_are_sums_over_taps(on, x, w, dtype, how):
    x, w, value = values(x, dtype), values(w, dtype, 1), how.get("padding_value", 0)
    oracle = {y: z for y, z in how.items() if y != "padding_value"}
    oracle["padding"] = 1 if how.get("padding") == "same" else how.get("padding", 0)
    if value:  # sums of what differs from the padding, and of the filters
        rest = convolved(np.full_like(x, value), w, **(oracle | {"padding": 0}))[:, :1, :1]
        want = convolved(x.astype(np.int64) - value, w, **oracle) + rest
    else:
        want = convolved(x, w, **oracle)
    there, filters = on.array(x), on.array(w)
    groups, layout = how.get("groups", 1), how.get("layout", "NHWC")
    packed = pm.pack_conv(filters, groups=groups, layout=layout)
    natural = np.int32 if dtype == np.int8 else dtype
    to = on.array(np.full((*want.shape[:-1], want.shape[-1] + 2), 7, natural))
    axis = (..., slice(1, -1)) if layout.endswith("C") else (..., slice(0, -2))
    assert pm.conv(there, packed, to[axis], **how).shape == want.shape
    found = to.get()
    np.testing.assert_array_equal(found[axis], want.astype(natural))
    assert (np.delete(found, np.arange(want.shape[-1]) + axis[-1].start, -1) == 7).all()
    if dtype == np.float64:
        return
    bias = values(len(w), np.float32, 2)
    at_device = on.array(bias)
    ended = pm.conv(there, filters, **how, dtype=np.float32, epilogue=lambda acc, i: acc + at_device[i.n] * (i.m + i.b))
    pixels = want if layout.endswith("C") else np.moveaxis(want, 1, -1)
    rows = pixels.reshape(len(x), -1, len(w))
    added = rows + bias * (np.arange(rows.shape[1])[:, None] + np.arange(len(x))[:, None, None])
    added = added.reshape(pixels.shape)
    np.testing.assert_array_equal(ended.get(), added if layout.endswith("C") else np.moveaxis(added, -1, 1))


def test_what_follows_and_precedes_a_convolution(on):
    x, w, rest = values((2, 4, 5, 8)), values((6, 8, 3, 3), seed=1), values((2, 20, 6), seed=2)
    there, filters, more = on.array(x), on.array(w), on.array(rest)
    want = convolved(x, w, padding=1)
    first, row = pm.conv(there, filters, padding=1, epilogue=lambda acc: (acc + more, pm.max(acc)))
    np.testing.assert_array_equal(first.get(), want + rest.reshape(want.shape))
    np.testing.assert_array_equal(row.get(), want.max(-1, keepdims=True))
    doubled = pm.conv(there, filters, padding=1, prologue_a=lambda a, i: a * 2 + i.k)
    np.testing.assert_array_equal(doubled.get(), convolved(x * 2 + np.arange(8, dtype=np.float32), w, padding=1))
    out = on.array(np.zeros((2, 4, 10, 6), np.float32))
    pm.conv(there, filters, out[:, :, ::2], padding=1)
    np.testing.assert_array_equal(out.get()[:, :, ::2], want)
    assert not out.get()[:, :, 1::2].any()


def test_what_does_not_fit_is_said(on):
    x, w = on.array(values((1, 4, 4, 8))), on.array(values((6, 8, 3, 3)))
    with pytest.raises(TypeError, match="copy it there first"):
        pm.conv(x, values((6, 8, 3, 3)))
    with pytest.raises(ConvolutionError, match="packed for NHWC"):
        pm.conv(on.array(values((1, 8, 4, 4))), pm.pack_conv(w), layout="NCHW")
    with pytest.raises(ConvolutionError, match="without bits"):
        pm.pack_conv(w, bits=4)
    with pytest.raises(ConvolutionError, match="in 1 groups"):
        pm.conv(x, on.array(values((6, 4, 3, 3))))
    with pytest.raises(ValueError, match="out has shape"):
        pm.conv(x, w, on.array(np.zeros((1, 2, 2, 5), np.float32)))
