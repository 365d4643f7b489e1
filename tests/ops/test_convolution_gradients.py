"""Transposed convolutions, gradients of convolutions, and padding with a zero point."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from convolved import convolved

import portmm as pm
from portmm.errors import ConvolutionError

pytestmark = pytest.mark.calls

QUICKLY = True


def values(shape, dtype=np.float32, seed=0):
    """Small integers: their sums are exact."""
    rng = np.random.default_rng(seed)
    return rng.integers(0 if dtype == np.uint8 else -4, 5, shape).astype(dtype)


def scattered(dy, w, spatial, *, stride, before, dilation, groups):
    """The gradient in images, channels last: every product is added where it belongs."""
    kernel, outputs, channels = w.shape[2:], len(w) // groups, w.shape[1]
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(dy.shape[1:-1], stride, kernel, dilation, strict=True)]
    wide = [max(r, b + n) for r, b, n in zip(reach, before, spatial, strict=True)]
    total = np.zeros((len(dy), *wide, channels * groups))
    for tap in itertools.product(*map(range, kernel)):
        at = tuple(slice(t * d, t * d + (n - 1) * s + 1, s)
                   for t, d, n, s in zip(tap, dilation, dy.shape[1:-1], stride, strict=True))  # fmt: skip
        for g in range(groups):
            to, of = slice(g * channels, (g + 1) * channels), slice(g * outputs, (g + 1) * outputs)
            total[(slice(None), *at, to)] += dy[..., of].astype(np.float64) @ w[(of, slice(None), *tap)]
    return total[(slice(None), *(slice(b, b + n) for b, n in zip(before, spatial, strict=True)))]


CASES = {
    "plain": ((7, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided": ((9, 8), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "phases without taps": ((9, 8), (2, 1), (3, 2), (0, 0), (1, 1), 1),
    "dilated": ((11, 9), (3, 2), (2, 1), (2, 0), (2, 2), 1),
    "groups": ((6, 7), (3, 3), (2, 2), (1, 1), (1, 1), 2),
    "one dimension": ((13,), (4,), (2,), (1,), (1,), 1),
    "three": ((5, 4, 6), (2, 2, 2), (2, 1, 2), (0, 1, 1), (1, 1, 1), 1),
}
"""Images, filters, stride, padding, dilation and groups."""


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_sums_of_products(name):
    spatial, kernel, stride, padding, dilation, groups = CASES[name]
    x, w = values((2, *spatial, 4 * groups)), values((5 * groups, 4, *kernel), seed=1)
    layout = "N" + "DHW"[-len(spatial) :] + "C"
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y = convolved(x, w, **how, layout=layout)
    dy = values(y.shape, seed=2)
    want = scattered(dy, w, spatial, stride=stride, before=padding, dilation=dilation, groups=groups)
    np.testing.assert_array_equal(pm.conv_input_gradient(dy, w, spatial, **how, layout=layout), want)
    dw = pm.conv_filter_gradient(x, dy, kernel, **how, layout=layout)
    assert dw.shape == w.shape
    # y is linear in w: the product of dw with any filters is that of dy with their results.
    for seed in range(3, 6):
        other = values(w.shape, seed=seed)
        assert (dw.astype(np.float64) * other).sum() == (
            dy.astype(np.float64) * convolved(x, other, **how, layout=layout)
        ).sum()
    first = layout.replace("C", "").replace("N", "NC")
    planes = [np.ascontiguousarray(np.moveaxis(z, -1, 1)) for z in (x, dy)]
    np.testing.assert_array_equal(pm.conv_filter_gradient(*planes, kernel, **how, layout=first), dw)
    got = pm.conv_input_gradient(planes[1], w, spatial, **how, layout=first)
    np.testing.assert_array_equal(got, np.moveaxis(want, -1, 1))


def test_a_transposed_convolution_has_the_pixels_of_pytorch():
    x, w = values((2, 5, 6, 4)), values((4, 3, 3, 3), seed=1)
    got = pm.conv_transpose(x, w, stride=2, padding=1, output_padding=1)
    assert got.shape == (2, 10, 12, 3)
    np.testing.assert_array_equal(
        got, scattered(x, w, (10, 12), stride=(2, 2), before=(1, 1), dilation=(1, 1), groups=1)
    )
    with pytest.raises(ConvolutionError, match="channels"):
        pm.conv_transpose(x, w[:3])
    with pytest.raises(ConvolutionError, match="at least 1"):
        pm.conv_transpose(x[:, :1, :1], w, padding=2)
    for wrong, text in (
        ({"stride": 0}, "positive"),
        ({"dilation": (1, 0)}, "positive"),
        ({"padding": -1}, "not negative"),
        ({"padding": ((0, 1), (-2, 0))}, "not negative"),
        ({"padding": "same"}, "transposed"),
        ({"padding": 1.5}, "pass an integer"),
        ({"output_padding": -1}, "not negative"),
        ({"output_padding": (0, 1, 2)}, "or 2 of them"),
    ):
        with pytest.raises(ConvolutionError, match=text):
            pm.conv_transpose(x, w, **wrong)
    np.testing.assert_array_equal(pm.conv_transpose(x, w, padding="valid"), pm.conv_transpose(x, w))
    with pytest.raises(ConvolutionError, match="results of images of"):
        pm.conv_input_gradient(x, w, (9, 9))
    with pytest.raises(ConvolutionError, match="gradients are floats"):
        pm.conv_filter_gradient(x.astype(np.int8), x.astype(np.int8), (1, 1))


@pytest.mark.parametrize("stride", [1, 2])
def test_results_of_a_transposed_convolution_have_the_type_of_a_product(stride):
    x, w = np.full((1, 3, 3, 16), 100, np.int8), np.full((16, 4, 2, 2), 100, np.int8)
    got = pm.conv_transpose(x, w, stride=stride)
    assert (got.dtype, got.max()) == (np.int32, 160000 * (4 if stride == 1 else 1))


@pytest.mark.parametrize("x_type", [np.uint8, np.int8], ids=str)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("channels", [3, 16])
def test_padding_may_be_a_zero_point(x_type, layout, channels):
    zero = 7 if x_type == np.uint8 else -5
    last = layout == "NHWC"
    x = values((2, 6, 7, channels) if last else (2, channels, 6, 7), x_type)
    w = values((20, channels, 3, 3), np.int8, 1)
    want = convolved(x.astype(np.int64) - zero, w, padding=1, layout=layout)
    sums = w.astype(np.int64).sum((1, 2, 3))
    got = pm.conv(x, w, padding=1, layout=layout, padding_value=zero)
    np.testing.assert_array_equal(got - zero * (sums if last else sums[:, None, None]), want)
    with pytest.raises(ConvolutionError, match="do not have"):
        pm.conv(x, w, padding=1, layout=layout, padding_value=300)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("name", "last"),
    [("phases without taps", True), ("groups", True), ("strided", False), ("groups", False), ("one dimension", True)],
)
def test_gradients_on_a_device(on, name, last):
    spatial, kernel, stride, padding, dilation, groups = CASES[name]
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    how["layout"] = "N" + "DHW"[-len(spatial) :] + "C" if last else "NC" + "DHW"[-len(spatial) :]
    shape = (2, *spatial, 4 * groups) if last else (2, 4 * groups, *spatial)
    x, w = values(shape), values((5 * groups, 4, *kernel), seed=1)
    dy = values(pm.conv(x, w, **how).shape, seed=2)
    images, filters, gradient = map(on.array, (x, w, dy))
    for found, want in (
        (pm.conv_input_gradient(gradient, filters, spatial, **how), pm.conv_input_gradient(dy, w, spatial, **how)),
        (pm.conv_filter_gradient(images, gradient, kernel, **how), pm.conv_filter_gradient(x, dy, kernel, **how)),
        (pm.conv_transpose(gradient, filters, **how), pm.conv_transpose(dy, w, **how)),
    ):
        np.testing.assert_array_equal(found.get(), want)


def test_gradients_that_a_device_refuses(on):
    x, w, dy = (on.array(values(shape)) for shape in ((1, 5, 5, 4), (6, 4, 3, 3), (1, 3, 3, 6)))
    with pytest.raises(ConvolutionError, match=r"dy has elements of f32 and w of f16; .* convert one"):
        pm.conv_input_gradient(dy, on.array(values((6, 4, 3, 3), np.float16)), (5, 5))
    with pytest.raises(ConvolutionError, match="dy has shape"):
        pm.conv_filter_gradient(x, dy, (3, 3), stride=2)
    with pytest.raises(ConvolutionError, match="dy has shape"):
        pm.conv_input_gradient(dy, w, (6, 5))
    with pytest.raises(TypeError, match="w is a ndarray in the host's memory"):
        pm.conv_transpose(dy, w.get())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_tensors_are_tensors(dtype):
    torch = pytest.importorskip("torch")
    x, w, dy = (values(shape) for shape in ((2, 7, 6, 4), (5, 4, 3, 3), (2, 7, 6, 5)))
    images, filters, gradient = (torch.from_numpy(y).to(getattr(torch, dtype)) for y in (x, w, dy))
    for found, want in (
        (
            pm.conv_input_gradient(gradient, filters, (7, 6), padding=1),
            pm.conv_input_gradient(dy, w, (7, 6), padding=1),
        ),
        (
            pm.conv_filter_gradient(images, gradient, (3, 3), padding=1),
            pm.conv_filter_gradient(x, dy, (3, 3), padding=1),
        ),
        (pm.conv_transpose(x=gradient, w=filters), pm.conv_transpose(dy, w)),
    ):
        assert isinstance(found, torch.Tensor)
        assert found.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(found.float().numpy(), torch.from_numpy(want).to(found.dtype).float().numpy())
