"""Convolutions of groups of few channels: several groups in a vector, or vectors of the outputs of a group."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from convolved import convolved
from machines import EVERY_ISA, HERE, TINY, runs_here, small
from operands import case
from runs import check_built, interpret, load

from portmm.codegen.lower import lower_grouped
from portmm.dispatch.cpu_kernels import group_unit, vector_unit
from portmm.ops.convolution_groups import pack_groups
from portmm.schedule.grouped_convolution import grouped, panels_of
from portmm.spec.convolution import Convolution
from portmm.spec.problem import Problem

TYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
CASES = {
    "padded": (5, 4, 4, (7, 6), (3, 3), {"padding": 1}, 0),
    "strided": (7, 3, 2, (9, 8), (3, 2), {"padding": ((1, 0), (1, 1)), "stride": 2}, 0),
    "dilated": (3, 2, 3, (8, 9), (2, 3), {"padding": ((2, 1), (0, 3)), "dilation": (3, 2)}, 0),
    "many taps": (5, 1, 2, (6, 9), (3, 5), {"padding": 2}, 0),
    "pixels": (9, 2, 2, (4, 5), (1, 1), {"stride": (1, 2)}, 0),
    "gaps": (5, 4, 4, (5, 6), (3, 3), {"padding": 1}, 7),
    "one dimension": (6, 2, 2, (13,), (3,), {"padding": 1, "stride": 2}, 0),
    "beyond the image": (3, 2, 2, (2, 5), (2, 2), {"padding": ((6, 5), (0, 3)), "dilation": (3, 1)}, 0),
    "vectors": (3, 5, 16, (5, 6), (3, 3), {"padding": 1}, 0),
    "uneven vectors": (2, 3, 13, (4, 9), (2, 3), {"padding": (1, 0)}, 3),
}
UNITS = {
    "units": (3, 6, 16, (5, 6), (3, 3), {"padding": 1}, 0),
    "uneven units": (7, 6, 4, (5, 6), (2, 3), {"padding": 1}, 4),
}
"""Groups, channels and outputs of a group, extents of images and filters, options, and a gap after pixels."""


OTHER = ("sse2", "strided")
"""A case that another program computes: a vector has channels of one group, and half as many outputs."""


def posed(name, target, dtype="f32", unit="f32", images=2):
    """A product of windows with its operands, the instruction set with its multiply-adds, and the sizes."""
    groups, channels, outputs, spatial, kernel, how, gap = (CASES | UNITS)[name]
    isa, atom = vector_unit(unit, target, channels)
    panels = panels_of(groups, channels, outputs, kernel, isa, atom)
    rng, count = np.random.default_rng(5), len(spatial)
    x = rng.integers(-4, 5, (images, *spatial, groups * channels + gap)).astype(TYPES[dtype])
    w = rng.integers(-4, 5, (groups * outputs, channels, *kernel)).astype(np.float32)
    want = convolved(x[..., : groups * channels], w, groups=groups, layout={1: "NWC", 2: "NHWC"}[count], **how)
    every = {k: (v,) * count if isinstance(v, int) else v for k, v in how.items()}
    pads = [(y, y) if isinstance(y, int) else y for y in every.get("padding", (0,) * count)]
    ones = (1,) * count
    size = Convolution(
        groups, channels, outputs, spatial, kernel, every.get("stride", ones), every.get("dilation", ones),
        *zip(*pads, strict=True),
    )  # fmt: skip
    words = f"{dtype}-{unit}-{dtype}"
    p = Problem(images * size.pixels, groups * outputs, size.depth, words, a="any", b="packed", family=panels.family)
    one = case(p, seed=3)
    strides = tuple(y // x.itemsize for y in x.strides)
    filters = pack_groups(w.reshape(groups, outputs, channels, *kernel), panels).owner
    fields = one.fields | dict.fromkeys(("a_m", "a_k", "a_batch", "b_k", "b_n", "b_batch"), 0)
    one = replace(
        one, a=x.ravel()[: x.size - gap].copy(), a_offset=0, b=filters, b_offset=0, fields=fields,
        want=want.reshape(1, p.m, p.n),
    )  # fmt: skip
    return one, (isa, atom), grouped(size, strides, panels, isa, target)


def kernel_of(unit, sizes, dtype="f32"):
    """The kernel of a convolution."""
    return lower_grouped(*unit, sizes, (dtype, dtype), "")


@pytest.mark.parametrize(
    ("isa", "name"),
    [*((x, y) for x in ("sse2", "avx2") for y in CASES if (x, y) != OTHER), ("", "strided"), ("", "one dimension")],
)
def test_lanes_have_the_channels_of_their_groups(isa, name):
    k, unit, sizes = posed(name, small(isa) if isa else TINY)
    for i, workers in enumerate((1, 3)):
        k.check(interpret(kernel_of(unit, sizes), k, workers, shuffle=i), sizes)


@pytest.mark.parametrize("name", ["padded", "many taps", "one dimension", "vectors", "uneven vectors"])
@pytest.mark.parametrize("isa", [x for x in HERE if x in ("sse2", "avx2", "avx512", "neon")])
def test_built_kernels_are_right(isa, name):
    k, unit, sizes = posed(name, small(isa))
    check_built(kernel_of(unit, sizes), k, 2, sizes, code=load)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["gaps", "uneven vectors"])
@pytest.mark.parametrize("isa", [x for x in HERE if x in ("avx2", "avx512")])
def test_narrow_images_are_widened_in_the_strip(isa, name, dtype):
    k, unit, sizes = posed(name, small(isa), dtype)
    check_built(kernel_of(unit, sizes, dtype), k, 1, sizes, code=load)


@pytest.mark.parametrize("name", ["padded", *UNITS])
@pytest.mark.parametrize("isa", [x for x in ("avx512bf16", "neon_bf16") if x in EVERY_ISA])
def test_units_of_channels_are_words(isa, name):
    """Dot products of neighbouring channels, where they divide those of a group."""
    target = small(isa)
    target = replace(target, isas=(*target.isas, target.isas[0].base))
    k, unit, sizes = posed(name, target, "bf16", "bf16")
    assert unit[1].k_pack == 2
    kernel = kernel_of(unit, sizes, "bf16")
    k.check(interpret(kernel, k, 2), sizes)
    if runs_here(isa):
        check_built(kernel, k, 2, sizes, code=load)


def test_vectors_are_of_whole_groups():
    isa, atom = vector_unit("f32", small("avx512"))
    panels = panels_of(32, 4, 4, (3, 3), isa, atom)
    assert (panels.together, panels.windows, panels.of_window) == (4, 8, 1)
    panels = panels_of(3, 24, 24, (3, 3), isa, atom)
    assert (panels.together, panels.windows, panels.of_window) == (1, 3, 2)
    short = Convolution(3, 24, 24, (7, 7), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    assert grouped(short, (3528, 504, 72, 1), panels, isa, small("avx512")).vectors == 2  # rows of few pixels
    for shape in ((1, 4, 4), (8, 4, 1), (8, 16, 4), (2, 128, 128)):
        assert panels_of(*shape, (3, 3), isa, atom) is None
    assert panels_of(2, 32, 20, (1, 1), isa, atom) is None
    assert panels_of(9, 4, 4, (3, 3, 3), isa, atom) is None
    assert panels_of(9, 8, 8, (3, 31), isa, atom) is None


BYTES = {
    "words": (5, 4, 4, (7, 6), (3, 3), {"padding": 1}, 0),
    "word vectors": (3, 8, 20, (4, 7), (2, 3), {"padding": ((1, 0), (2, 1)), "stride": 2}, 4),
}


@pytest.mark.parametrize("fill", [0, 9, 200])
@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("isa", ["avx512vnni", "avxvnni"])
def test_bytes_are_units_and_padding_a_zero_point(isa, name, fill):
    groups, channels, outputs, spatial, kernel, how, gap = BYTES[name]
    target = small(isa)
    unit = group_unit("u8", "s8", target, channels)
    panels = panels_of(groups, channels, outputs, kernel, *unit)
    rng, pads = np.random.default_rng(5), [(y, y) if isinstance(y, int) else y for y in (how["padding"],) * 2]
    pads = list(how["padding"]) if isinstance(how["padding"], tuple) else pads
    x = rng.integers(0, 256, (2, *spatial, groups * channels + gap), np.uint8)
    w = rng.integers(-128, 128, (groups * outputs, channels, *kernel), np.int8)
    seen = np.pad(x[..., : groups * channels], ((0, 0), *pads, (0, 0)), constant_values=fill).astype(np.float64)
    want = convolved(seen, w.astype(np.float64), groups=groups, stride=how.get("stride", 1))
    stride = (how.get("stride", 1),) * 2
    size = Convolution(groups, channels, outputs, spatial, kernel, stride, (1, 1), *zip(*pads, strict=True), fill)
    p = Problem(2 * size.pixels, groups * outputs, size.depth, "u8-s8-s32", a="any", b="packed", family=panels.family)
    one = case(p, seed=3)
    filters = pack_groups(w.reshape(groups, outputs, channels, *kernel), panels).owner
    fields = one.fields | dict.fromkeys(("a_m", "a_k", "a_batch", "b_k", "b_n", "b_batch"), 0)
    memory = x.ravel()[: x.size - gap].copy()
    one = replace(one, a=memory, a_offset=0, b=filters, b_offset=0, fields=fields, want=want.reshape(1, p.m, p.n))
    sizes = grouped(size, x.strides, panels, unit[0], target)
    code = lower_grouped(*unit, sizes, ("u8", "s32"), "")
    one.check(interpret(code, one, 3), sizes)
    if runs_here(isa):
        check_built(code, one, 2, sizes, code=load)
