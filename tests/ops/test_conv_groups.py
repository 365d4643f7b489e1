"""Convolutions of groups of few channels: one kernel for all groups."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
from convolved import convolved
from runs import guarded

import portmm as pm
from portmm.dispatch import config
from portmm.ops import convolution_groups, convolution_weights, grouped_convolution
from portmm.ops.convolution_weights import unpack_conv
from portmm.target.target import load_target

pytestmark = pytest.mark.calls

QUICKLY = True

BF16 = np.dtype(ml_dtypes.bfloat16)
HOW = {"padding": 1, "groups": 9}


def values(shape, dtype=np.float32, seed=0):
    """Small integers: their sums are exact in every type."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


@pytest.fixture
def made(monkeypatch):
    """The kernels of several groups in a vector that calls select, where tile units do not multiply these."""
    for module in (convolution_groups, convolution_weights):
        monkeypatch.setattr(module, "groups_in_tiles", lambda *_, **__: 0)
        monkeypatch.setattr(module, "in_tiles", lambda *_, **__: 0)
    kernels, own = [], grouped_convolution.HostGrouped.selected

    def selected(*call):
        kernels.append(own(*call))
        return kernels[-1]

    monkeypatch.setattr(grouped_convolution.HostGrouped, "selected", selected)
    return kernels


@pytest.fixture
def posed():
    """Images, filters and the result: nine groups of four channels."""
    x, w = values((2, 7, 9, 36)), values((36, 4, 3, 3), seed=1)
    return x, w, convolved(x, w, **HOW)


def test_one_kernel_computes_all_groups(made, posed):
    x, w, want = posed
    packed = pm.pack_conv(w, groups=9)
    np.testing.assert_array_equal(unpack_conv(packed), w)
    again = pickle.loads(pickle.dumps(packed))  # noqa: S301 - its own
    for filters in (w, packed, again):
        np.testing.assert_array_equal(pm.conv(x, filters, **HOW), want)
    for end in (True, False):
        image = guarded(x.ravel(), end=end).reshape(x.shape)
        to = guarded(np.zeros(want.size, np.float32), end=end).reshape(want.shape)
        for _ in range(2):
            assert pm.conv(image, packed, to, **HOW) is to
            np.testing.assert_array_equal(to, want)
            to[...] = 7
    assert made


def test_its_epilogue_knows_images_pixels_and_channels(made, posed):
    x, w, want = posed
    rows = want.reshape(2, 63, 36)
    bias, rest, each = values(36, seed=2), values(rows.shape, seed=3), values(2, seed=4)

    def ending(acc, i):
        whole = pm.relu(acc + bias[i.n] + rest[i.b, i.m, i.n]) + i.n + 2 * i.m + 3 * i.b + each[i.b]
        return whole, pm.cast(acc * 2, BF16)

    index = np.arange(36) + 2 * np.arange(63)[:, None] + (3 * np.arange(2) + each)[:, None, None]
    first, second = pm.conv(x, w, **HOW, epilogue=ending)
    np.testing.assert_array_equal(first, (np.maximum(rows + bias + rest, 0) + index).reshape(want.shape))
    np.testing.assert_array_equal(second.astype(np.float64), want * 2)
    assert len(made) == 1
    got = pm.conv(x, w, **HOW, epilogue=lambda acc: acc - pm.max(acc))  # a second kernel over rows
    np.testing.assert_array_equal(got, want - want.max(-1, keepdims=True))


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=str)
def test_narrow_floats_are_summed_in_float32(made, dtype):
    x, w = values((2, 7, 9, 36), dtype), values((36, 4, 3, 3), dtype, 1)
    packed = pm.pack_conv(w, groups=9)
    assert (packed.grouped, unpack_conv(packed).dtype) == (True, dtype)
    got, want = pm.conv(x, packed, **HOW), convolved(x, w, **HOW)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(dtype).astype(np.float64))
    wide = pm.conv(x, packed, **HOW, dtype=np.float32)
    np.testing.assert_array_equal(wide, want)
    assert len(made) == 2
    np.testing.assert_array_equal(pm.conv(x.astype(np.float32), packed, **HOW), want)  # perhaps packed again
    odd = np.zeros((2, 7, 9, 37), dtype)
    odd[..., 1:] = x
    np.testing.assert_array_equal(pm.conv(odd[..., 1:], packed, **HOW, dtype=np.float32), want)


@pytest.mark.parametrize("point", [0, 131])
@pytest.mark.parametrize(("channels", "outputs", "groups"), [(36, 36, 9), (48, 24, 3), (64, 160, 4)])
def test_bytes_are_summed_in_units(made, point, channels, outputs, groups):
    """Of several groups in a vector and of one; padding is a zero point."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 256, (2, 7, 9, channels), np.uint8)
    w = rng.integers(-128, 128, (outputs, channels // groups, 3, 3), np.int8)
    seen = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=point)
    want = convolved(seen.astype(np.float64), w.astype(np.float64), groups=groups)
    how = {"padding": 1, "groups": groups, "padding_value": point}
    packed = pm.pack_conv(w, groups=groups, activations=np.uint8)
    np.testing.assert_array_equal(unpack_conv(packed), w)
    for filters in (w, packed):
        np.testing.assert_array_equal(pm.conv(x, filters, **how), want)
    halves = pm.conv(x, packed, **how, epilogue=lambda acc: pm.relu(acc * 0.5))
    np.testing.assert_array_equal(halves, np.maximum(want * 0.5, 0).astype(np.float32))
    signed = (x.astype(np.int16) - 128).astype(np.int8)  # perhaps packed again
    less = convolved(signed.astype(np.float64), w.astype(np.float64), groups=groups, padding=1)
    np.testing.assert_array_equal(pm.conv(signed, packed, padding=1, groups=groups), less)
    assert bool(made) == packed.grouped


def test_other_types_and_layouts_are_products(made, posed):
    x, w, want = posed
    packed = pm.pack_conv(w, groups=9)
    np.testing.assert_array_equal(pm.conv(x.astype(np.float64), packed, **HOW), want)
    np.testing.assert_array_equal(pm.conv(x.astype(np.int8), w.astype(np.int8), **HOW), want)
    planes = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    np.testing.assert_array_equal(pm.conv(planes, packed, layout="NCHW", **HOW), np.moveaxis(want, -1, 1))
    assert not made


def test_images_and_results_may_have_gaps(made, posed):
    x, w, want = posed
    whole = np.zeros((2, 14, 9, 40), np.float32)
    whole[:, ::2, :, 2:38] = x
    apart = np.ascontiguousarray(np.moveaxis(x, -1, 1)).transpose(0, 2, 3, 1)  # copied: channels are not contiguous
    wide = np.full((*want.shape[:-1], 44), 7, np.float32)
    far = np.full((2, 14, 18, 36), 7, np.float32)
    for image in (whole[:, ::2, :, 2:38], apart, x[:, ::-1][:, ::-1]):
        np.testing.assert_array_equal(pm.conv(image, w, **HOW), want)
        for out in (wide[..., 3:39], far[:, ::2, 1::2]):
            assert pm.conv(image, w, out, **HOW) is out
            np.testing.assert_array_equal(out, want)
            out[...] = 7
    assert (wide == 7).all()
    assert (far == 7).all()
    assert made


@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_rows_and_groups(images, threads):
    x, w = values((images, 5, 6, 36)), values((18, 4, 2, 3), seed=1)
    with config.config(threads=threads):
        got = pm.conv(x, w, groups=9, padding=(0, 1))
    np.testing.assert_array_equal(got, convolved(x, w, groups=9, padding=(0, 1)))


def test_filters_of_another_machine_are_packed_again(made, posed):
    x, w, want = posed
    with config.config(target="scalar"):
        packed = pm.pack_conv(w, groups=9)
        assert packed.weight[0].panels.lanes == 1
        np.testing.assert_array_equal(pm.conv(x, packed, **HOW), want)
    np.testing.assert_array_equal(pm.conv(x, packed, **HOW), want)
    assert made


@pytest.mark.parametrize("kind", ["f32", "bf16", "bytes"])
@pytest.mark.parametrize(
    ("sizes", "together"), [((48, 48, 3), 2), ((64, 32, 8), 4), ((64, 96, 2), 2), ((40, 40, 5), 4)]
)
def test_matrices_of_several_groups(monkeypatch, kind, sizes, together):
    """Where groups are no whole number of matrices, the last has some of the one before."""
    monkeypatch.setattr(convolution_groups, "groups_in_tiles", lambda *_, **__: together)
    monkeypatch.setattr(convolution_weights, "groups_in_tiles", lambda *_, **__: together)
    monkeypatch.setattr(convolution_weights, "in_tiles", lambda *_, **__: 0)
    channels, outputs, groups = sizes
    of = {"f32": (np.float32, np.float32), "bf16": (BF16, BF16), "bytes": (np.uint8, np.int8)}[kind]
    x = np.abs(values((2, 6, 9, channels))).astype(of[0])
    w = values((outputs, channels // groups, 3, 3), of[1], 1)
    how = {"groups": groups, "padding": 1}
    want = convolved(x.astype(np.float64), w.astype(np.float64), **how)
    bias, rest = values(outputs, seed=2), values((2, 54, outputs), seed=3)
    ending = bias + np.arange(outputs) + rest
    packed = pm.pack_conv(w, activations=x.dtype, groups=groups)
    assert packed.together == together
    np.testing.assert_array_equal(unpack_conv(packed), w)

    def added(acc, i):
        return acc + bias[i.n] + rest[i.b, i.m, i.n] + i.n

    for filters in (packed, pickle.loads(pickle.dumps(packed))):  # noqa: S301 - its own
        out = pm.conv(x, filters, **how, dtype=np.float32, epilogue=added)
        np.testing.assert_array_equal(out.reshape(ending.shape), want.reshape(ending.shape) + ending)
        less = pm.conv(x, filters, **how, dtype=np.float32, epilogue=lambda acc: acc - pm.max(acc))
        np.testing.assert_array_equal(less, want - want.max(-1, keepdims=True))
        got = pm.conv(x, filters, **how).astype(np.float64)
        np.testing.assert_array_equal(got, want.astype(BF16).astype(np.float64) if kind == "bf16" else want)


def test_groups_that_tile_units_multiply_together():
    target = load_target("granite-rapids")

    def together(channels, groups, image, filters="", kernel=(3, 3), *, last=True):
        w = (8 * groups, channels, *kernel)
        return convolution_groups.groups_in_tiles(w, groups, (image, filters or image), target, last=last)

    assert [together(x, 32, "bf16") for x in (4, 8, 16, 24, 32, 48, 64)] == [0, 0, 0, 0, 1, 0, 1]
    assert [together(x, 32, "u8", "s8") for x in (4, 8, 16, 24, 32, 64)] == [16, 8, 0, 0, 0, 1]
    assert together(8, 3, "bf16") == together(8, 32, "f32") == together(8, 32, "bf16", kernel=(1, 1)) == 0
    assert together(8, 32, "bf16", last=False) == 0

    def panels(channels, outputs, groups, image, filters=""):
        w = (outputs * groups, channels, 3, 3)
        return convolution_groups.in_tiles(w, groups, (image, filters or image), target, last=True)

    assert [panels(x, 16, 32, "bf16") for x in (4, 8, 9, 10, 64)] == [0, 1, 0, 1, 1]
    assert [panels(x, 16, 32, "u8", "s8") for x in (4, 8, 12, 16)] == [0, 0, 1, 1]
    assert [panels(16, x, 4, "bf16") for x in (16, 17, 32, 48, 64)] == [1, 2, 2, 1, 2]
    assert panels(16, 16, 4, "f32") == panels(16, 1, 4, "bf16") == 0


@pytest.mark.parametrize("kind", [np.float32, BF16], ids=str)
def test_an_infinity_stays_in_its_group(kind):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 6, 10, 64)).astype(kind), rng.standard_normal((64, 8, 3, 3)).astype(kind)
    x[0, 2, 3, 5] = np.inf
    found = np.asarray(pm.conv(x, w, groups=8, padding=1), np.float32)
    assert np.isfinite(found[..., 8:]).all()
    assert not np.isfinite(found[..., :8]).all()


@pytest.mark.parametrize("groups", [5, 8])
def test_a_result_is_an_operand_of_its_epilogue(groups):
    """Where the last matrix of groups has some of the one before, too."""
    rng = np.random.default_rng(groups)
    x = rng.integers(0, 5, (2, 6, 20, groups * 8)).astype(np.uint8)
    w = rng.integers(-4, 5, (groups * 8, 8, 3, 3)).astype(np.int8)
    options = {"groups": groups, "padding": 1, "dtype": np.float32}
    plain = pm.conv(x, w, **options)
    out = np.full(plain.shape, 1000, np.float32)
    flat = out.reshape(2, -1, groups * 8)
    pm.conv(x, w, out, epilogue=lambda acc, _: acc + flat, **options)
    np.testing.assert_array_equal(out, plain + 1000)


OF_TILES = [
    ((1, 14, 14, 64), (64, 16, 3, 3), {"groups": 4, "padding": 1}),
    ((2, 9, 31, 32), (36, 16, 3, 3), {"groups": 2, "padding": 1, "stride": 2}),
    ((1, 7, 7, 72), (72, 24, 3, 2), {"groups": 3, "padding": 2, "dilation": 2}),
    ((1, 6, 40, 96), (96, 48, 3, 3), {"groups": 2}),
    ((2, 11, 9, 240), (60, 80, 1, 1), {"groups": 3}),
    ((1, 15, 23, 64), (24, 32, 1, 1), {"groups": 2, "stride": 2, "padding": 1}),
]
"""Shapes of images and filters that tile units convolve in one kernel, and options."""


@pytest.mark.parametrize(("x", "w", "how"), OF_TILES)
@pytest.mark.parametrize("x_type", [BF16, np.uint8], ids=str)
def test_groups_on_tile_units(x, w, how, x_type):
    filters = values(w, BF16 if x_type == BF16 else np.int8, 1)
    images, value = values(x).astype(x_type), 0 if x_type == BF16 else 77
    pads = how.get("padding", 0)
    padded = np.pad(images, ((0, 0), (pads, pads), (pads, pads), (0, 0)), constant_values=value)
    want = convolved(padded, filters, **how | {"padding": 0})
    packed = pm.pack_conv(filters, groups=how["groups"], activations=x_type)
    np.testing.assert_array_equal(unpack_conv(packed), filters)
    again = pickle.loads(pickle.dumps(packed))  # noqa: S301 - its own
    options = how | {"padding_value": value, "dtype": np.float32}
    for end in (True, False):
        image = guarded(images.ravel(), end=end).reshape(x)
        np.testing.assert_array_equal(pm.conv(image, packed, **options), want)
    bias = values(w[0], np.float32, 2)
    got = pm.conv(images, again, epilogue=lambda acc, i: acc * 0.5 + bias[i.n], **options)
    np.testing.assert_array_equal(got, np.float32(want * 0.5) + bias)
    apart = np.zeros((*x[:-1], x[-1] + 3), x_type)[..., 1:-2]  # pixels that are no whole units apart
    apart[...] = images
    np.testing.assert_array_equal(pm.conv(apart, packed, **options), want)


def test_an_infinity_stays_in_its_group_on_tile_units():
    x, w = values((1, 9, 20, 48), BF16), values((48, 12, 3, 3), BF16, 1)
    x[0, 4, 7, 13] = np.inf
    with np.errstate(invalid="ignore"):
        want = convolved(x, w, groups=4, padding=1)
        got = pm.conv(x, w, groups=4, padding=1, dtype=np.float32)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
