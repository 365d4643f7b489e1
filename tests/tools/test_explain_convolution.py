"""Explanations of convolutions: transforms, and the program that reads them."""

from __future__ import annotations

import pytest

import portmm as pm
from portmm.dispatch import config


def test_transforms_are_shown_before_and_after_simplification():
    with config.config(target="zen4"):
        text = pm.explain_conv((1, 56, 56, 64), (64, 64, 3, 3), padding=1)
    for line in (
        "64 to 64 channels, 56 by 3, padding 1+1 x 56 by 3, padding 1+1",
        "  embed     (images, 56, 56, 3, 64)",
        "  merge     (images * 3136, 576)",
        "offset of (i0, i1): i0 * 64 + i1 / 192 * 3584 + i1 % 192 - 3648",
        "in no padding if 1 <= i0 % 56 + i1 / 64 % 3 < 57",
    ):
        assert line in text.splitlines()
    assert "direct: register tiles of 14 pixels of a row by 32" in text


@pytest.mark.parametrize(("layout", "dtype"), [("NCHW", "f32"), ("NHWC", "bf16"), ("NHWC", "f64")])
def test_every_way_is_named(layout, dtype):
    shape = (2, 14, 14, 8) if layout == "NHWC" else (2, 8, 14, 14)
    with config.config(target="zen4"):
        text = pm.explain_conv(shape, (16, 8, 3, 3), layout=layout, dtype=dtype)
    assert ("direct: " if dtype == "f64" else "packed by runs: ") in text
