"""Convolutions inside functions that `fuse` runs."""

from __future__ import annotations

from contextlib import nullcontext

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


def to_space(y, order):
    """The image of 2 x 2 blocks that channels of images become."""
    n, h, w, c = y.shape
    if order == "DCR":
        y = y.reshape(n, h, w, 2, 2, c // 4).transpose(0, 1, 3, 2, 4, 5)
    else:
        y = np.moveaxis(y.reshape(n, h, w, c // 4, 2, 2), 3, 5).swapaxes(2, 3)
    return y.reshape(n, 2 * h, 2 * w, c // 4)


@pytest.mark.parametrize("order", ["DCR", "CRD"])
def test_a_depth_to_space_is_a_part_of_the_store(order):
    packed = pm.pack_conv(W)
    function = lambda x, s: pm.relu(to_space(pm.conv(x, packed, padding=1) + BIAS, order) * s)  # noqa: E731
    fused, want = pm.fuse(function), np.maximum(to_space(WANT + BIAS, order) * 2, 0)
    np.testing.assert_array_equal(fused(X, 2.0), want)
    kinds = [k.kind for k in fused.explain(X, 2.0).kernels]
    assert kinds == (["conv"] if order == "DCR" else ["copy", "conv"])  # a copy of the bias
    assert "depth to space" in fused.explain(X, 2.0).kernels[-1].fused
    both = pm.fuse(lambda x: to_space(pm.conv(x, packed, padding=1, epilogue=lambda acc, i: acc + BIAS[i.n]), order))
    np.testing.assert_array_equal(both(X), to_space(WANT + BIAS, order))
    assert [k.kind for k in both.explain(X).kernels][-1] == "conv"


def test_blocks_are_kept_apart_where_something_else_reads_the_convolution():
    packed = pm.pack_conv(W)

    def function(x):
        y = pm.conv(x, packed, padding=1)
        return to_space(y, "DCR"), y

    fused = pm.fuse(function)
    for got, want in zip(fused(X), (to_space(WANT, "DCR"), WANT), strict=True):
        np.testing.assert_array_equal(got, want)
    residual = pm.fuse(lambda x: to_space(pm.conv(x, packed, padding=1) + x, "DCR") + 1)
    np.testing.assert_array_equal(residual(X), to_space(WANT + X, "DCR") + 1)

    def twice(x):
        y = to_space(pm.conv(x, packed, padding=1), "CRD")
        return y * y + y[:, :1]

    want = to_space(WANT, "CRD")
    np.testing.assert_array_equal(pm.fuse(twice)(X), want * want + want[:, :1])
    other = pm.fuse(lambda x: to_space(pm.conv(x, packed, padding=1), "DCR").transpose(0, 2, 1, 3).reshape(-1, 4) + 1)
    np.testing.assert_array_equal(other(X), to_space(WANT, "DCR").transpose(0, 2, 1, 3).reshape(-1, 4) + 1)


def normalized(y, groups, form):
    """Groups of channels less their means, over their deviations, in one of the usual forms."""
    g = y.reshape(y.shape[0], -1, groups, y.shape[-1] // groups) if form else y.reshape(*y.shape[:3], groups, -1)
    axes = (*range(1, g.ndim - 2), -1)
    mean = g.mean(axes, keepdims=True)
    variance = g.var(axes, keepdims=True) if form == 1 else ((g - mean) ** 2).mean(axes, keepdims=True)
    g = (g - mean) * (1 / np.sqrt(variance + 1e-5)) if form == 2 else (g - mean) / np.sqrt(variance + 1e-5)
    return g.reshape(y.shape)


@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("isa", ["", "avx2", "sse2"])
def test_a_group_norm_is_one_kernel_with_what_follows(form, isa):
    w, scale, shift = values((24, 16, 3, 3), 4), values(24, 5), values(24, 6)
    with pm.config(target=isa) if isa else nullcontext():
        packed = pm.pack_conv(w)

    def function(x, scale, rest):
        y = normalized(pm.conv(x, packed, padding=1), 4, form) * scale + shift
        return y * pm.sigmoid(y) + rest

    rest = values((2, 5, 6, 24), 7)
    y = normalized(convolved(X, w, padding=1).astype(np.float64), 4, form) * scale + shift
    want = y / (1 + np.exp(-y)) + rest
    with pm.config(target=isa) if isa else nullcontext():
        fused = pm.fuse(function)
        np.testing.assert_allclose(fused(X, scale, rest), want, rtol=2e-5, atol=2e-5)
        explained = fused.explain(X, scale, rest)
    assert [k.kind for k in explained.kernels] == ["conv", "norm"]
    assert not explained.blocked


def test_a_norm_of_many_channels_keeps_tasks_apart():
    x = values((3, 7, 9, 330), 8)
    fused = pm.fuse(lambda x: normalized(x, 33, 1))
    with pm.config(threads=2):
        np.testing.assert_allclose(fused(x), normalized(x.astype(np.float64), 33, 1), rtol=2e-5, atol=2e-5)
    assert [k.kind for k in fused.explain(x).kernels] == ["norm"]
    other = pm.fuse(lambda x: x - x.mean((1, 2), keepdims=True))
    np.testing.assert_allclose(other(x), x - x.mean((1, 2), keepdims=True), rtol=1e-5, atol=1e-5)
    assert "mean: NumPy computes it" in str(other.explain(x))


EPS = 1e-5


def scaled_back(x, eps):
    """A group norm with a number that is added to variances."""
    g = x.reshape(x.shape[0], -1, 4, 4)
    g = (g - g.mean((1, 3), keepdims=True)) / np.sqrt(g.var((1, 3), keepdims=True) + eps)
    return pm.relu(g.reshape(x.shape))


def test_a_captured_constant_of_a_group_norm_is_seen_when_it_changes(monkeypatch):
    constant = 1e-5

    def by_default(x, eps=1e-5):
        return scaled_back(x, eps)

    of_global, of_cell = pm.fuse(lambda x: scaled_back(x, EPS)), pm.fuse(lambda x: scaled_back(x, constant))
    of_default = pm.fuse(by_default)
    for value in (1e-5, 0.5, 64.0, 0.5):
        monkeypatch.setitem(globals(), "EPS", value)
        constant, by_default.__defaults__ = value, (value,)
        for fused in (of_global, of_cell, of_default):
            for _ in range(2):
                np.testing.assert_allclose(fused(X), scaled_back(X.astype(np.float64), value), rtol=2e-5, atol=2e-5)
            assert [k.kind for k in fused.explain(X).kernels] == ["norm"]
    both = pm.fuse(lambda x: scaled_back(scaled_back(x, 0.25), EPS))
    assert [k.kind for k in both.explain(X).kernels] == ["norm", "norm"]


def test_numbers_that_vary_keep_a_group_norm_in_steps():
    eps = 0.5
    fused = pm.fuse(lambda x, scale: scaled_back(x, eps) * scale)
    passed = pm.fuse(scaled_back)
    for value in (1.5, 2.5):
        want = scaled_back(X.astype(np.float64), eps) * value
        np.testing.assert_allclose(fused(X, value), want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(passed(X, value), scaled_back(X.astype(np.float64), value), rtol=2e-5, atol=2e-5)
    assert sum(map(len, fused.memo.values())) == sum(map(len, passed.memo.values())) == 1


def test_images_whose_pixels_are_at_no_equal_distances_keep_parallel_steps():
    fused = pm.fuse(lambda x: scaled_back(x, 0.5))
    inside = pm.fuse(lambda x: scaled_back(x[:, :, 1:], 0.5))
    for x in (X[:, :, 1:], np.asfortranarray(X), X[:, ::2, ::2]):
        np.testing.assert_allclose(fused(x), scaled_back(x.astype(np.float64), 0.5), rtol=2e-5, atol=2e-5)
        assert "norm" not in [k.kind for k in fused.explain(x).kernels]
        assert "rows" in [k.kind for k in fused.explain(x).kernels]
    np.testing.assert_allclose(inside(X), fused(X[:, :, 1:]), rtol=2e-5, atol=2e-5)
    assert "norm" not in [k.kind for k in inside.explain(X).kernels]
    assert [k.kind for k in fused.explain(X[:, 1:]).kernels] == ["norm"]
