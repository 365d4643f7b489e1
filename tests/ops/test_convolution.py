"""Convolutions of arrays in the host's memory."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
from convolved import LAYOUTS, convolved
from runs import guarded

import portmm as pm
from portmm.errors import ConvolutionError, NoCompilerError, PortmmError
from portmm.ops.convolution_kernel import HostConvolution
from portmm.ops.convolution_weights import unpack_conv
from portmm.spec.convolution import Convolution

pytestmark = pytest.mark.calls

QUICKLY = True

BF16 = np.dtype(ml_dtypes.bfloat16)


def values(shape, dtype=np.float32, seed=0):
    """Small integers: their sums are exact in every type."""
    rng = np.random.default_rng(seed)
    least = 0 if dtype == np.uint8 else -4
    return rng.integers(least, 5, shape).astype(dtype)


def drawn(seed):
    """Operands and options of a convolution that a seed draws."""
    rng = np.random.default_rng(seed)
    count, last, groups = int(rng.choice([1, 2, 2, 3])), bool(rng.integers(2)), int(rng.choice([1, 1, 2, 3]))
    channels, outputs, n = (int(rng.choice(x)) for x in ((1, 3, 16, 17), (1, 5, 16, 33), (1, 2, 3)))
    kernel, stride, dilation = (tuple(map(int, rng.integers(1, most, count))) for most in (4, 3, 3))
    padding = tuple(tuple(map(int, x)) for x in rng.integers(0, 3, (count, 2)))
    if seed % 5 == 0:
        kernel, stride, padding = (1,) * count, (1,) * count, ((0, 0),) * count
    least = [max(1, (k - 1) * d + 1 - sum(p)) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    spatial = [int(rng.integers(x, 12)) for x in least]
    shape = (n, *spatial, channels * groups) if last else (n, channels * groups, *spatial)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "layout": LAYOUTS[count][last]}
    return values(shape, seed=seed), values((outputs * groups, channels, *kernel), seed=seed + 1), how


@pytest.mark.parametrize("seed", range(24))
def test_convolutions_are_sums_over_taps(seed):
    x, w, how = drawn(seed)
    want = convolved(x, w, **how)
    packed = pm.pack_conv(w, groups=how["groups"], layout=how["layout"])
    for end in (True, False):
        image = guarded(x.ravel(), end=end).reshape(x.shape)
        to = guarded(np.zeros(want.size, np.float32), end=end).reshape(want.shape)
        assert pm.conv(image, packed, to, **how) is to
        np.testing.assert_array_equal(to, want)
    np.testing.assert_array_equal(pm.conv(x, w, **how), want)


@pytest.mark.parametrize(
    ("width", "kernel", "stride", "padding"), [(31, 3, 1, 1), (61, 7, 2, 0), (30, 1, 1, 0), (59, 1, 2, 0)]
)
@pytest.mark.parametrize("x_type", [np.uint8, np.int8])
def test_long_rows_of_bytes(x_type, width, kernel, stride, padding):
    rng = np.random.default_rng(width)
    x = rng.integers(*((0, 256) if x_type is np.uint8 else (-128, 128)), (2, 9, width, 8)).astype(x_type)
    w, how = rng.integers(-128, 128, (37, 8, kernel, kernel)).astype(np.int8), {"stride": stride, "padding": padding}
    want = convolved(x, w, **how, layout="NHWC")
    packed = pm.pack_conv(w, layout="NHWC", activations=x_type)
    for end in (True, False):
        image = guarded(x.ravel(), end=end).reshape(x.shape)
        np.testing.assert_array_equal(pm.conv(image, packed, **how, layout="NHWC"), want)
    scaled = pm.conv(x, packed, **how, layout="NHWC", epilogue=lambda acc, _: acc * 0.5)
    np.testing.assert_array_equal(scaled, np.float32(want * 0.5))


@pytest.mark.parametrize("value", [0, 131])
@pytest.mark.parametrize("x_type", [np.uint8, BF16], ids=str)
@pytest.mark.parametrize(("channels", "kernel", "how"), [
    (3, (7, 7), {"stride": 2, "padding": 3}), (3, (3, 3), {"padding": 1, "dilation": 2}), (5, (3, 2), {"padding": 1}),
    (1, (5, 3), {}), (42, (3, 3), {"padding": 1, "groups": 2}),
])  # fmt: skip
def test_channels_that_are_no_whole_units(channels, kernel, how, x_type, value):
    if x_type is BF16 and value:
        pytest.skip("padding of floats is zero")
    x = values((2, 21, 33, channels), x_type)
    w = values((40, channels // how.get("groups", 1), *kernel), np.int8 if x_type is np.uint8 else x_type, 1)
    pads = how.get("padding", 0)
    padded = np.pad(x, ((0, 0), (pads, pads), (pads, pads), (0, 0)), constant_values=value)
    want = convolved(padded, w, **how | {"padding": 0})
    packed = pm.pack_conv(w, groups=how.get("groups", 1), activations=x_type)
    np.testing.assert_array_equal(unpack_conv(packed), w)
    for end in (True, False):
        image = guarded(x.ravel(), end=end).reshape(x.shape)
        got = pm.conv(image, packed, dtype=np.float32, padding_value=value, epilogue=lambda acc: acc * 0.5, **how)
        np.testing.assert_array_equal(got, (want * 0.5).astype(np.float32))
    other = values((1, 9, 12, 2 * channels), x_type)[..., ::2]
    np.testing.assert_array_equal(pm.conv(other, packed, **how), pm.conv(np.ascontiguousarray(other), packed, **how))


def test_an_infinity_stays_in_its_windows():
    x, w = values((1, 12, 40, 3), BF16), values((16, 3, 3, 7), BF16, 1)
    x[0, 5, 17, 2] = np.inf
    with np.errstate(invalid="ignore"):
        want, got = convolved(x, w, padding=1), pm.conv(x, w, padding=1, dtype=np.float32)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))


@pytest.mark.parametrize("seed", range(30, 42))
def test_an_epilogue_knows_images_pixels_and_channels(seed):
    x, w, how = drawn(seed)
    want = convolved(x, w, **how)
    last = how["layout"].endswith("C")
    channels = len(w)
    rows = (want if last else np.moveaxis(want, 1, -1)).reshape(len(x), -1, channels)
    bias, rest = values(channels, seed=2), values(rows.shape, seed=3)
    other = rest if last else np.ascontiguousarray(rest.swapaxes(1, 2))
    each = values(len(x), seed=4)

    def ending(acc, i):
        added = other[i.b, i.m, i.n] if last else other[i.b, i.n, i.m]
        return pm.relu(acc + bias[i.n] + added) + i.n + 2 * i.m + each[i.b]

    index = np.arange(channels) + 2 * np.arange(rows.shape[1])[:, None] + each[:, None, None]
    ended = np.maximum(rows + bias + rest, 0) + index
    back = ended.reshape(len(x), *(want.shape[1:-1] if last else want.shape[2:]), channels)
    back = back if last else np.moveaxis(back, -1, 1)
    np.testing.assert_array_equal(pm.conv(x, w, **how, epilogue=ending), back)
    simple, half = pm.conv(x, w, **how, epilogue=lambda acc, i: (acc + bias[i.n], pm.cast(acc * 0.5, np.float16)))
    shape = (1,) * (want.ndim - 2)
    np.testing.assert_array_equal(simple, want + (bias if last else bias.reshape(-1, *shape)))
    np.testing.assert_array_equal(half, (want * 0.5).astype(np.float16))


@pytest.mark.parametrize(
    ("x_type", "w_type"), [(BF16, BF16), (np.float16, np.float16), (np.float64, np.float64), (np.uint8, np.int8),
                           (np.int8, np.int8), (np.float32, BF16)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_types_are_summed_as_in_products(x_type, w_type, layout):
    last = layout == "NHWC"
    x = values((2, 7, 6, 32) if last else (2, 32, 7, 6), x_type)  # whole vectors of units of two, in padding, too
    w = values((20, 32, 3, 3), w_type, 1)
    want = convolved(x, w, padding=1, layout=layout)
    got = pm.conv(x, w, padding=1, layout=layout)
    assert got.dtype == pm.matmul(np.ones((2, 2), x_type), np.ones((2, 2), w_type)).dtype
    np.testing.assert_array_equal(got, want.astype(got.dtype))
    if x_type != np.float64:
        scaled = pm.conv(x, w, padding=1, layout=layout, dtype=np.float32, epilogue=lambda acc: acc * 0.5)
        np.testing.assert_array_equal(scaled, (want * 0.5).astype(np.float32))


@pytest.mark.parametrize("x_type", [np.float32, np.int8], ids=str)
@pytest.mark.parametrize(
    ("spatial", "kernel", "how"),
    [
        ((2, 2), (2, 2), {"padding": ((5, 3), (1, 1)), "dilation": (7, 1)}),  # taps above and below the image
        ((3, 1), (1, 1), {"padding": ((0, 0), (1, 0)), "stride": (1, 3)}),  # all windows in padding
        ((1, 8), (2, 2), {"padding": ((4, 4), (0, 0)), "dilation": (8, 1)}),
    ],
)  # fmt: skip
def test_windows_may_miss_the_image(x_type, spatial, kernel, how):
    x, w = values((3, *spatial, 9), x_type), values((40, 9, *kernel), x_type, 1)
    want = convolved(x, w, **how)
    to = np.full(want.shape, 7, np.int32 if x_type == np.int8 else x_type)
    np.testing.assert_array_equal(pm.conv(guarded(x.ravel(), end=False).reshape(x.shape), w, to, **how), want)


def test_filters_of_four_bits():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 6, 5, 16)).astype(np.float32), rng.standard_normal((24, 16, 3, 3)).astype(np.float32)
    packed = pm.pack_conv(w, bits=4, group=48)
    assert packed.nbytes < w.nbytes / 4
    matrix = w.transpose(2, 3, 1, 0).reshape(144, 24)
    near = pm.dequantize(pm.quantize(matrix, bits=4, group=48)).reshape(3, 3, 16, 24).transpose(3, 2, 0, 1)
    got = pm.conv(x, packed, padding=1)
    np.testing.assert_allclose(got, convolved(x, near, padding=1), rtol=1e-4, atol=1e-4)
    small = values(x.shape, np.int8)
    got = pm.conv(small, packed, padding=1)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, convolved(small.astype(np.float32), near, padding=1), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(pm.conv(small, packed, padding=1, epilogue=lambda acc: acc + 1), got + 1, rtol=1e-6)
    with pytest.raises(TypeError, match="of four bits"):
        pm.conv(x.astype(np.float64), packed, padding=1)
    with pytest.raises(TypeError, match="cannot hold"):
        pm.conv(x, packed, padding=1, dtype=np.int8)


def test_images_and_results_may_have_gaps():
    whole = values((3, 8, 10, 24))
    w = values((20, 16, 3, 3), seed=1)
    for x in (whole[..., 4:20], whole[:, 1:7, ::2, :16], whole[::2, ..., :16], whole[:, ::-1, :, :16]):
        want = convolved(x, w, padding=1)
        np.testing.assert_array_equal(pm.conv(x, w, padding=1), want)
        for out in (np.full((*want.shape[:-1], 32), 7, np.float32)[..., 5:25], np.zeros(want.shape, np.float64),
                    np.full((*want.shape[:2], 20, 20), 7, np.float32)[:, :, : want.shape[2]]):  # fmt: skip
            before = out.base.copy() if out.base is not None else None
            assert pm.conv(x, w, out, padding=1) is out
            np.testing.assert_array_equal(out, want)
            if before is not None:
                out[...] = 7
                np.testing.assert_array_equal(out.base, before)
    swapped = np.ascontiguousarray(whole.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(pm.conv(swapped.transpose(0, 2, 3, 1)[..., :16], w), convolved(whole[..., :16], w))


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_a_result_may_be_every_other_pixel(images, dtype):
    x, w, bias = values((images, 8, 9, 16), dtype), values((20, 16, 3, 3), dtype, 1), values(20, seed=2)
    want = convolved(x, w, padding=1)
    whole = np.full((images, 16, 27, 23), 7, dtype)
    out = whole[:, ::2, 1::3, 2:22]
    assert pm.conv(x, w, out, padding=1) is out
    np.testing.assert_array_equal(out, want.astype(dtype))
    pm.conv(x, w, out, padding=1, epilogue=lambda acc, i: pm.relu(acc + bias[i.n]) + i.m)
    ended = np.maximum(want + bias, 0) + np.arange(72).reshape(8, 9, 1)
    np.testing.assert_array_equal(out, ended.astype(dtype))
    out[...] = 7
    assert (whole == 7).all()


def test_a_result_may_be_an_operand():
    x, w = values((2, 5, 5, 8)), values((8, 8, 3, 3), seed=1)
    want = convolved(x, w, padding=1)
    rest = values(want.shape, seed=2)
    ended = want + rest
    rows = rest.reshape(2, 25, 8)
    pm.conv(x, w, rest, padding=1, epilogue=lambda acc, i: acc + rows[i.b, i.m, i.n])
    np.testing.assert_array_equal(rest, ended)
    pm.conv(x, w, x, padding=1)
    np.testing.assert_array_equal(x, want)


def test_padding_is_of_zeros_after_a_prologue():
    x, w = values((2, 5, 6, 8)), values((4, 8, 3, 3), seed=1)
    scale = values(8, seed=2)
    got = pm.conv(x, w, padding=1, prologue_a=lambda a, i: a * scale[i.k] + 1)
    np.testing.assert_array_equal(got, convolved(x * scale + 1, w, padding=1))
    planes = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    got = pm.conv(planes, w, padding=1, layout="NCHW", prologue_a=lambda a, i: a * scale[i.k] + 1)
    np.testing.assert_array_equal(got, convolved(x * scale + 1, w, padding=1).transpose(0, 3, 1, 2))


def test_an_epilogue_may_reduce_channels():
    x, w = values((2, 5, 6, 8)), values((4, 8, 3, 3), seed=1)
    want = convolved(x, w)
    got = pm.conv(x, w, epilogue=lambda acc: acc - pm.max(acc))
    np.testing.assert_array_equal(got, want - want.max(-1, keepdims=True))


@pytest.mark.parametrize("images", [0, 1, 5])
def test_a_kernel_serves_any_number_of_images(images):
    x, w = values((images, 6, 6, 16)), pm.pack_conv(values((8, 16, 3, 3), seed=1))
    got = pm.conv(x, w, padding="same", stride=2)
    assert got.shape == (images, 3, 3, 8)
    if images:
        want = convolved(x, values((8, 16, 3, 3), seed=1), padding=((0, 1), (0, 1)), stride=2)
        np.testing.assert_array_equal(got, want)
    ended = pm.conv(x, w, epilogue=lambda acc: acc + 1)
    assert ended.shape == (images, 4, 4, 8)


def test_empty_sums_are_zero():
    x, w = np.zeros((1, 4, 4, 0), np.float32), np.zeros((3, 0, 2, 2), np.float32)
    assert pm.conv(x, w).shape == (1, 3, 3, 3)
    assert (pm.conv(x, w, epilogue=lambda acc: acc + 2) == 2).all()


ONES, FILTERS = np.ones((1, 5, 5, 4), np.float32), np.ones((6, 4, 3, 3), np.float32)
WRONG = {
    "layout": ({"layout": "HWC"}, "use one of"),
    "dimensions": ({"layout": "NWC"}, "3 dimensions"),
    "groups": ({"groups": 3}, "in 3 groups"),
    "channels": ({"layout": "NCHW"}, "5 channels"),
    "stride": ({"stride": 0}, "stride is 0"),
    "strides": ({"stride": (1, 2, 3)}, "or 2 of them"),
    "dilation": ({"dilation": (1, -1)}, "positive"),
    "padding": ({"padding": -1}, "not negative"),
    "pairs": ({"padding": ((1, 1, 1), (1, 1))}, "pairs"),
    "words": ({"padding": "all"}, "same"),
    "pixels": ({"padding": 1 << 31}, "no memory holds"),
    "reach": ({"dilation": 3}, "a window of 7 does not fit 5"),
    "an object": ({"stride": None}, "pass an integer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_which_value_is_wrong(name):
    options, text = WRONG[name]
    with pytest.raises(ConvolutionError, match=text) as caught:
        pm.conv(ONES, FILTERS, **options)
    assert isinstance(caught.value, PortmmError)
    assert isinstance(caught.value, ValueError)


def test_results_are_checked():
    with pytest.raises(ValueError, match="out has shape"):
        pm.conv(ONES, FILTERS, np.zeros((1, 3, 3, 5), np.float32))
    with pytest.raises(TypeError, match="cannot hold"):
        pm.conv(ONES, FILTERS, np.zeros((1, 3, 3, 6), np.int32))
    with pytest.raises(TypeError, match="cannot hold"):
        pm.conv(ONES, FILTERS, dtype=np.int32)
    with pytest.raises(ConvolutionError, match="4 bits"):
        pm.pack_conv(FILTERS, bits=3)


def test_packed_filters_say_what_they_are():
    packed = pm.pack_conv(FILTERS, groups=2)
    assert (packed.shape, packed.groups, packed.dtype, packed.ndim) == (FILTERS.shape, 2, np.float32, 4)
    assert repr(packed) == "<portmm.PackedConv (6, 4, 3, 3) float32, 2 groups, NHWC>"
    x = values((1, 5, 5, 8))
    again = pickle.loads(pickle.dumps(packed))  # noqa: S301 - its own
    np.testing.assert_array_equal(pm.conv(x, again), pm.conv(x, FILTERS, groups=2))
    planes = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(
        pm.conv(planes, packed, layout="NCHW"), convolved(planes, FILTERS, groups=2, layout="NCHW")
    )
    size = Convolution(1, 4, 6, (5,), (3,), (2,), (2,), (1,), (0,))
    assert str(size) == "4 to 6 channels, 5 by 3 / 2, dilation 2, padding 1+0"


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_packed_filters_are_packed_again_for_other_types_and_layouts(layout):
    x, w = values((2, 5, 6, 8)), values((6, 4, 3, 3), seed=1)
    want = convolved(x, w, groups=2)
    packed, last = pm.pack_conv(w, groups=2, layout=layout), layout == "NHWC"
    other = "NCHW" if last else "NHWC"
    for image, of in ((x.astype(np.float64), layout), (x, other), (x.astype(np.float64), other)):
        planes = of == "NCHW"
        these = np.ascontiguousarray(np.moveaxis(image, -1, 1)) if planes else image
        for _ in range(3):  # what was packed again is not read by a call that repeats this one
            got = pm.conv(these, packed, groups=2, layout=of)
            assert got.dtype == image.dtype
            np.testing.assert_array_equal(np.moveaxis(got, 1, -1) if planes else got, want)
    image = x.astype(np.float64) if last else np.moveaxis(x.astype(np.float64), -1, 1)
    got = pm.conv(image, w, groups=2, layout=layout)
    np.testing.assert_array_equal(got if last else np.moveaxis(got, 1, -1), want)


def test_numpy_computes_without_a_compiler(monkeypatch):
    def refused(*_):
        raise NoCompilerError("there is none")

    monkeypatch.setattr(HostConvolution, "ready", refused)
    x, w = values((2, 5, 6, 6)), values((4, 3, 3, 2), seed=1)
    want = convolved(x, w, groups=2, padding=1)
    with pytest.warns(RuntimeWarning, match="there is none"):
        np.testing.assert_array_equal(pm.conv(x, w, groups=2, padding=1), want)
    got = pm.conv(x, w, groups=2, padding=1, epilogue=lambda acc, i: acc + i.n)
    np.testing.assert_array_equal(got, want + np.arange(4))
    planes = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    got = pm.conv(planes, w, groups=2, padding=1, layout="NCHW")
    np.testing.assert_array_equal(got, want.transpose(0, 3, 1, 2))
