"""Scratch of convolutions: at most 16 MiB beside images, packed filters and the result."""

from __future__ import annotations

import pytest

from portmm.codegen.lower import lower_direct, lower_tiled, lower_view
from portmm.dispatch.cpu_kernels import family, isa_of, workspace_bytes
from portmm.dispatch.view_routes import in_place, schedule_of
from portmm.schedule.tile_convolution import Tiled
from portmm.spec.convolution import Convolution, windows
from portmm.spec.layouts import Views
from portmm.spec.problem import Problem
from portmm.target.target import load_target

MOST = 16 << 20
CASES = [
    (224, 3, 64, 7, 2), (56, 64, 64, 3, 1), (56, 256, 512, 1, 2), (14, 1024, 2048, 1, 2), (7, 512, 512, 3, 1),
    (64, 320, 320, 3, 1), (64, 960, 320, 3, 1), (64, 320, 4, 3, 1), (32, 1920, 640, 3, 1), (16, 2560, 1280, 3, 1),
    (8, 2560, 1280, 3, 1),
]  # fmt: skip
"""Images, channels, outputs, taps and strides: small, large and deep convolutions of ResNet-50 and of a U-Net."""


@pytest.mark.parametrize("dtype", ["f32", "bf16", "u8-s8-s32"])
@pytest.mark.parametrize("chip", ["granite-rapids", "zen4"])
def test_scratch_is_small(chip, dtype):
    target = load_target(chip)
    for high, channels, outputs, kernel, stride in CASES:
        pad = kernel // 2
        x = Convolution(1, channels, outputs, *((y, y) for y in (high, kernel, stride, 1, pad, pad)))
        strides = (high * high * channels, high * channels, channels, 1)
        p = Problem(x.pixels, outputs, x.depth, dtype, a="any", b="packed", family=family(dtype, target))
        plan = in_place(p, x, strides, target, 1)
        if plan is not None:
            s, sizes = plan
            kernel_of = (lower_tiled if isinstance(sizes, Tiled) else lower_direct)(s, isa_of(s, target), sizes)
        else:
            views = Views(a=windows(x, strides))
            s, _ = schedule_of(p, views, target, 1)
            kernel_of = lower_view(s, isa_of(s, target), *views)
        assert workspace_bytes(kernel_of, p, 1) <= MOST, (high, channels, outputs, kernel, stride)
