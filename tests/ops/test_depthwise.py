"""Convolutions of each channel by itself: kernels over rows, in place of a product for each channel."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from convolved import LAYOUTS, convolved
from runs import guarded

import portmm as pm
from portmm.ops import depthwise
from portmm.spec.convolution import Convolution, Windows

pytestmark = pytest.mark.calls

QUICKLY = True

BF16 = np.dtype(ml_dtypes.bfloat16)
CASES = {
    "padded": ((7, 9), (3, 3), {"padding": 1}),
    "strided": ((9, 8), (3, 2), {"padding": ((2, 1), (0, 1)), "stride": (2, 3)}),
    "dilated": ((11, 9), (2, 3), {"padding": (0, 2), "dilation": (3, 2)}),
    "larger than the image": ((3, 4), (7, 7), {"padding": 3}),
    "beyond the image": ((2, 5), (2, 1), {"padding": ((6, 5), (0, 3)), "dilation": (3, 1)}),
    "one dimension": ((13,), (4,), {"padding": 1, "stride": 2}),
    "three": ((4, 5, 6), (2, 3, 1), {"padding": ((1, 0), (1, 1), (0, 0)), "stride": (1, 2, 1)}),
}
"""Images, filters and options."""


def values(shape, dtype=np.float32, seed=0):
    """Small integers: their sums are exact in every type."""
    rng = np.random.default_rng(seed)
    return rng.integers(0 if dtype == np.uint8 else -4, 5, shape).astype(dtype)


@pytest.fixture
def made(monkeypatch):
    """The kernels over rows that calls select."""
    kernels, own = [], depthwise.HostDepthwise.selected

    def selected(*call):
        kernels.append(own(*call))
        return kernels[-1]

    monkeypatch.setattr(depthwise.HostDepthwise, "selected", selected)
    return kernels


def posed(name, last, channels=19, dtype=np.float32):
    """Images beside a guard page, filters, options and the result."""
    spatial, kernel, options = CASES[name]
    how = options | {"groups": channels, "layout": LAYOUTS[len(spatial)][last]}
    x = values((2, *spatial, channels) if last else (2, channels, *spatial), dtype)
    w = values((channels, 1, *kernel), np.int8 if np.dtype(dtype).kind in "iu" else dtype, 1)
    return x, w, how, convolved(x, w, **how)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_over_rows_computes_all_channels(made, name, last):
    x, w, how, want = posed(name, last)
    packed = pm.pack_conv(w, groups=how["groups"], layout=how["layout"])
    for end in (True, False):
        image = guarded(x.ravel(), end=end).reshape(x.shape)
        to = guarded(np.zeros(want.size, np.float32), end=end).reshape(want.shape)
        assert pm.conv(image, packed, to, **how) is to
        np.testing.assert_array_equal(to, want)
        np.testing.assert_array_equal(pm.conv(image, packed, **how), want)
    assert made


@pytest.mark.parametrize("last", [True, False])
def test_its_epilogue_knows_images_pixels_and_channels(made, last):
    x, w, how, want = posed("padded", last)
    rows = (want if last else np.moveaxis(want, 1, -1)).reshape(2, -1, len(w))
    bias, rest, each = values(len(w), seed=2), values(rows.shape, seed=3), values(2, seed=4)
    other = rest if last else np.ascontiguousarray(rest.swapaxes(1, 2))

    def ending(acc, i):
        added = other[i.b, i.m, i.n] if last else other[i.b, i.n, i.m]
        return pm.relu(acc + bias[i.n] + added) + i.n + 2 * i.m + 3 * i.b + each[i.b], pm.cast(acc * 2, BF16)

    index = np.arange(len(w)) + 2 * np.arange(rows.shape[1])[:, None] + (3 * np.arange(2) + each)[:, None, None]
    ended = np.maximum(rows + bias + rest, 0) + index
    first, second = pm.conv(x, w, **how, epilogue=ending)
    back = ended.reshape(2, 7, 9, len(w))
    np.testing.assert_array_equal(first, back if last else np.moveaxis(back, -1, 1))
    np.testing.assert_array_equal(second.astype(np.float64), want * 2)
    assert len(made) == 1
    out = other.reshape(want.shape).copy()  # read at the same elements
    added = out.reshape(other.shape)
    pm.conv(x, w, out, **how, epilogue=lambda acc, i: acc + (added[i.b, i.m, i.n] if last else added[i.b, i.n, i.m]))
    np.testing.assert_array_equal(out, want + other.reshape(want.shape))
    if last:
        got = pm.conv(x, w, **how, epilogue=lambda acc: acc - pm.max(acc))
        np.testing.assert_array_equal(got, want - want.max(-1, keepdims=True))


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.uint8, np.int8, np.float64], ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_types_are_summed_in_float32(made, dtype, last):
    x, w, how, want = posed("padded", last, 5, dtype)
    got = pm.conv(x, w, **how)
    assert got.dtype == pm.matmul(np.ones((2, 2), x.dtype), np.ones((2, 2), w.dtype)).dtype
    np.testing.assert_array_equal(got.astype(np.float64), want)
    assert bool(made) == (dtype != np.float64)
    if np.dtype(dtype).kind in "iu":
        shifted = pm.conv(x, w, **how, padding_value=2)
        sums = w.astype(np.int64).sum((1, 2, 3))
        around = convolved(x.astype(np.int64) - 2, w, **how)
        np.testing.assert_array_equal(shifted - 2 * (sums if last else sums[:, None, None]), around)


def test_images_may_have_gaps_and_a_prologue():
    x, w, how, _ = posed("padded", last=True)
    scale = values(19, seed=5)
    whole = np.zeros((2, 14, 9, 24), np.float32)
    whole[:, ::2, :, 3:22] = x
    for image in (whole[:, ::2, :, 3:22], np.ascontiguousarray(np.moveaxis(x, -1, 1)).transpose(0, 2, 3, 1)):
        np.testing.assert_array_equal(pm.conv(image, w, **how), convolved(x, w, **how))
        got = pm.conv(image, w, **how, prologue_a=lambda a, i: a * scale[i.k] + 1)
        np.testing.assert_array_equal(got, convolved(x * scale + 1, w, **how))


def test_parts_cover_a_result_once():
    for name, (spatial, kernel, _) in CASES.items():
        count = len(spatial)
        for before, stride in ((0, 1), (2, 2), (5, 3)):
            x = Convolution(
                9, 1, 1, spatial, kernel, (stride,) * count, (1,) * count, (before,) * count, (kernel[0] + 4,) * count
            )
            seen = np.zeros(Windows.of(x, 3).out, int)
            for part in depthwise.parts(x):
                seen[tuple(slice(a, a + n) for a, n in zip(part.first, part.extents, strict=True))] += 1
            assert (seen == 1).all(), name


def test_its_explanation_names_parts():
    text = pm.explain_conv((1, 56, 56, 64), (64, 1, 3, 3), groups=64, padding=1)
    assert "depthwise: a kernel over rows of channels, the sum of 9 taps" in text
    assert "4 parts of the result: from strips" in text
    assert "all of the result" in pm.explain_conv((1, 64, 9, 9), (64, 1, 3, 3), groups=64, layout="NCHW")
