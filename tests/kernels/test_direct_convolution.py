"""Direct convolutions: micro-kernels that read windows of images in place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from machines import HERE, TINY, small
from operands import case
from problems import packed_families
from runs import check_built, interpret, load

from portmm.codegen.lower import lower_direct
from portmm.errors import ScheduleError
from portmm.schedule.candidates import candidates
from portmm.schedule.direct_convolution import direct
from portmm.spec.convolution import Convolution, windows
from portmm.spec.problem import Problem, family

N = 19


def conv(channels, spatial, kernel, *, stride=1, dilation=1, before=0, after=None):
    """A convolution of one group; numbers are those of all dimensions."""
    every = [
        (y,) * len(spatial) if isinstance(y, int) else y
        for y in (kernel, stride, dilation, before, before if after is None else after)
    ]
    return Convolution(1, channels, N, spatial, *every)


CASES = {
    "padded": (conv(3, (7, 6), 3, before=1), 0, 0),
    "strided": (conv(2, (9, 8), (3, 2), stride=2, before=1), 0, 0),
    "dilated": (conv(3, (8, 9), (2, 3), dilation=2, before=2, after=1), 0, 0),
    "rows of taps": (conv(1, (9, 11), (5, 3), before=2), 0, 0),
    "in place": (conv(4, (6, 7), (3, 1), before=(1, 0)), 0, 0),
    "pixels": (conv(17, (4, 5), 1), 0, 0),
    "few pixels": (conv(5, (5, 9), 1, stride=2), 0, 0),
    "gaps": (conv(3, (6, 7), 3, before=1), 2, 5),
    "gaps of pixels": (conv(3, (6, 7), (2, 2)), 2, 5),
    "one dimension": (conv(4, (13,), 3, stride=2, before=1), 0, 0),
    "deep": (conv(71, (3, 4), 2, before=1), 0, 0),
}
"""A convolution, and gaps after pixels and after rows of the images."""


OF_BYTES = {
    "padded": (conv(8, (7, 6), 3, before=1), 0, 0),
    "strided": (conv(4, (9, 8), (3, 2), stride=2, before=1), 0, 0),
    "in place": (conv(12, (6, 7), (3, 1), before=(1, 0)), 0, 0),
    "pixels": (conv(20, (4, 5), 1), 0, 0),
    "gaps": (conv(8, (6, 7), 3, before=1), 4, 8),
    "three channels": (replace(conv(3, (9, 14), (3, 5), stride=2, before=2), filler=1), 0, 0),
    "five channels": (replace(conv(5, (4, 6), (2, 2)), filler=3), 1, 2),
    "zero points where nothing is padded": (replace(conv(4, (9, 9), 3), padding=7), 0, 0),
}
"""The same of bytes, whose units are four channels."""


def posed(name, target, images=2, *, dtype="f32"):
    """A product of windows, its operands, a schedule and the sizes of the direct convolution."""
    x, of_pixel, of_row = (CASES if dtype == "f32" else OF_BYTES)[name]
    pixel = x.channels + of_pixel
    rows = [pixel * x.spatial[-1] + of_row] if len(x.spatial) > 1 else []
    image = (rows[0] * x.spatial[0] if rows else pixel * x.spatial[0]) + (7 if dtype == "f32" else 8)
    strides = (image, *rows, pixel, 1)
    view = windows(x, strides).bind(images=images)
    m, k = (int(y) for y in view.extents)
    p = Problem(m, N, k, a="any", b="packed", dtype=dtype, family=packed_families(target, dtype)[0])
    one = case(p, seed=3)
    memory = np.random.default_rng(5).integers(*((-4, 5) if dtype == "f32" else (0, 256)), images * image)
    memory = memory.astype(one.a.dtype)
    matrix = family(p.family).layout(k, N).gather(one.b)
    want = view.gather(memory).astype(np.float64) @ matrix.astype(np.float64)
    fields = one.fields | {"a_m": 0, "a_k": 0, "a_batch": 0}
    one = replace(one, a=memory, a_offset=0, fields=fields, want=want[None])
    schedules = [s for s in candidates(p, target) if s.program == "gemm" and not s.atom.swap and not s.static]
    s = max(schedules, key=lambda s: s.mr)
    return one, s, direct(x, strides, s, target)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("k_outer", [False, True])
def test_windows_are_read_in_place(name, k_outer):
    k, s, sizes = posed(name, TINY)
    for i, workers in enumerate((1, 3)):
        kernel = lower_direct(s, TINY.isa(s.isa), replace(sizes, k_outer=k_outer))
        k.check(interpret(kernel, k, workers, shuffle=i), s)


@pytest.mark.parametrize("name", OF_BYTES)
@pytest.mark.parametrize("isa", ["avx512vnni", "avxvnni"])
def test_windows_of_bytes_are_read_in_units(isa, name):
    target = small(isa)
    k, s, sizes = posed(name, target, dtype="u8-s8-s32")
    assert sizes.channels * s.atom.kr == OF_BYTES[name][0].channels + OF_BYTES[name][0].filler
    kernel = lower_direct(s, target.isa(s.isa), sizes)
    k.check(interpret(kernel, k, 3), s)
    if isa in HERE:
        check_built(kernel, k, 2, s, code=load)


@pytest.mark.parametrize("name", ["padded", "strided", "gaps", "rows of taps", "one dimension"])
@pytest.mark.parametrize("isa", [x for x in HERE if x in ("avx2", "avx512", "neon")])
def test_built_kernels_read_windows_in_place(isa, name):
    target = small(isa)
    k, s, sizes = posed(name, target)
    check_built(lower_direct(s, target.isa(s.isa), sizes), k, 2, s, code=load)


def test_blocks_follow_caches():
    _, _, sizes = posed("deep", TINY)
    assert sizes.kc < sizes.run
    assert sizes.k_outer
    assert not sizes.whole
    _, _, sizes = posed("rows of taps", small("avx2"))
    assert (sizes.run, sizes.runs) == (3, 5)
    assert sizes.of_block > 1


def test_what_is_not_direct():
    x, *_ = CASES["padded"]
    _, s, _ = posed("padded", TINY)
    assert direct(x, (126, 18, 3, 2), s, TINY) is None  # channels that are not contiguous
    assert direct(conv(2, (4, 4), 1, before=1), (32, 8, 2, 1), s, TINY) is None  # windows of zeros alone
    target = small("avx512vnni")
    _, s, _ = posed("padded", target, dtype="u8-s8-s32")
    x, *_ = OF_BYTES["padded"]
    assert direct(replace(x, padding=7), (336, 48, 8, 1), s, target) is None  # zero points around the images
    assert direct(conv(6, (4, 4), 1), (96, 24, 6, 1), s, target) is None  # a pixel is no whole number of units
    assert direct(conv(4, (4, 4), 1), (104, 26, 6, 1), s, target) is None
    packed = next(y for y in candidates(Problem(40, N, 24), TINY) if y.program == "gemm" and y.b.packed)
    with pytest.raises(ScheduleError, match="reads A in place"):
        lower_direct(packed, TINY.isa(packed.isa), posed("padded", TINY)[2])
