"""Explanations of convolutions: transforms, and the program that reads them."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import config


def test_transforms_are_shown_before_and_after_simplification():
    with config.config(target="zen4"):
        text = str(pm.explain_conv((1, 56, 56, 64), (64, 64, 3, 3), padding=1))
    for line in (
        "64 to 64 channels, 56 by 3, padding 1+1 x 56 by 3, padding 1+1",
        "  embed     (images, 56, 56, 3, 64)",
        "  merge     (images * 3136, 576)",
        "offset of (i0, i1): i0 * 64 + i1 / 192 * 3584 + i1 % 192 - 3648",
        "in no padding if 1 <= i0 % 56 + i1 / 64 % 3 < 57",
    ):
        assert line in text.splitlines()
    assert "direct: register tiles of 14 pixels of a row by 32" in text


def test_arrays_stand_for_their_shapes():
    x, w = np.zeros((1, 8, 8, 4), np.float32), np.zeros((6, 4, 3, 3), np.float32)
    assert str(pm.explain_conv(x, w)) == str(pm.explain_conv(x.shape, w.shape))


@pytest.mark.parametrize(("layout", "dtype"), [("NCHW", "f32"), ("NHWC", "bf16"), ("NHWC", "f64")])
def test_every_way_is_named(layout, dtype):
    shape = (2, 14, 14, 8) if layout == "NHWC" else (2, 8, 14, 14)
    with config.config(target="zen4"):
        text = str(pm.explain_conv(shape, (16, 8, 3, 3), layout=layout, dtype=dtype))
    assert ("direct: " if dtype == "f64" else "packed by runs: ") in text


def test_groups_of_few_channels_share_vectors():
    text = pm.explain_conv((1, 56, 56, 128), (128, 4, 3, 3), groups=32, padding=1, target="zen4")
    assert "grouped: 4 groups in a vector of 16 outputs, register tiles of 19 pixels of a row by 1 vector" in text
    text = pm.explain_conv((1, 7, 7, 96), (96, 24, 3, 3), groups=4, padding=1, target="zen4")
    assert "2 vectors of 16 outputs a group, register tiles of 7 pixels of a row by 2 vectors" in text
    assert "grouped: " not in pm.explain_conv((1, 96, 7, 7), (96, 24, 3, 3), groups=4, layout="NCHW", target="zen4")


@pytest.mark.parametrize(("target", "language"), [("h100", "cuda"), ("arc-a770", "opencl"), ("opencl-cpu", "opencl")])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_kernels_of_a_device_read_the_same_view(target, language, layout):
    shape = (2, 14, 14, 16) if layout == "NHWC" else (2, 16, 14, 14)
    why = pm.explain_conv(shape, (16, 16, 3, 3), padding=1, layout=layout, dtype="bf16", target=target)
    here = pm.explain_conv(shape, (16, 16, 3, 3), padding=1, layout=layout, dtype="bf16", target="zen4")
    assert (why.transforms, why.simplified) == (here.transforms, here.simplified)
    assert f"read {'A' if layout == 'NHWC' else 'B'} through the view: {why.product.kernel.name}" in str(why)
    assert why.product.language == language
    assert why.product.kernel.name in why.product.source
    alone = pm.explain_conv(shape, (16, 16, 1, 1), layout=layout, dtype="bf16", target=target)
    assert "a product of matrices" in str(alone)
    groups = pm.explain_conv(shape, (16, 8, 3, 3), groups=2, layout=layout, dtype="bf16", target=target)
    assert "for each of 2 groups" in str(groups)


@pytest.mark.parametrize("target", ["zen4", "h100"])
def test_transforms_are_drawn(target):
    why = pm.explain_conv((1, 9, 9, 8), (8, 8, 3, 3), padding=1, target=target)
    texts = [x.text for x in ET.fromstring(why.svg()).iter() if x.tag.endswith("text")]  # noqa: S314 - our own
    assert [x for x in texts if x in {*why.transforms, *why.simplified, *why.program}] == [
        *why.transforms, *why.simplified, *why.program,
    ]  # fmt: skip


def test_groups_on_tile_units_are_one_kernel():
    sizes = {"groups": 32, "padding": 1, "target": "granite-rapids"}
    text = str(pm.explain_conv((1, 14, 14, 512), (512, 16, 3, 3), dtype="bf16", **sizes))
    assert "32 groups in one kernel, whose panels follow each other" in text
    assert "3 runs of 48" in text


def test_channels_of_zeros_are_named():
    text = str(pm.explain_conv((1, 224, 224, 3), (64, 3, 7, 7), stride=2, dtype="bf16", target="granite-rapids"))
    assert "1 of 4 channels are zeros, in filters and strips of images" in text
    assert "7 runs of 28" in text
