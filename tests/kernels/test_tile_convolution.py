"""Convolutions on tile units: tiles of A are loaded from images in place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from machines import runs_here, small
from operands import case
from problems import packed_families
from runs import check_built, interpret, load

from portmm.codegen.lower import atom_of, lower_tiled
from portmm.errors import ScheduleError
from portmm.schedule.candidates import candidates
from portmm.schedule.tile_convolution import tiled
from portmm.spec.convolution import Convolution, windows
from portmm.spec.problem import Problem, family

N = 53


def conv(channels, spatial, kernel, *, stride=1, dilation=1, before=0, after=None, fill=0):
    """A convolution of one group; numbers are those of all dimensions."""
    every = [
        (y,) * len(spatial) if isinstance(y, int) else y
        for y in (kernel, stride, dilation, before, before if after is None else after)
    ]
    return Convolution(1, channels, N, spatial, *every, fill)


CASES = {
    "padded": (conv(32, (5, 20), 3, before=1), 0, 0),
    "two rows": (conv(32, (5, 11), 3, before=1), 0, 0),
    "strided": (conv(32, (9, 23), (3, 2), stride=2, before=1), 0, 0),
    "dilated": (conv(32, (6, 13), (2, 3), dilation=2, before=2, after=1), 0, 0),
    "slices that overlap": (conv(32, (3, 35), (3, 1), before=(1, 0)), 0, 0),
    "in place": (conv(32, (4, 19), (2, 3)), 0, 0),
    "few channels": (conv(4, (5, 41), (3, 8), stride=2), 0, 0),
    "shorter steps": (conv(12, (4, 19), 3, before=1), 0, 0),
    "pixels": (conv(32, (3, 20), 1), 0, 0),
    "every other pixel": (conv(64, (7, 25), 1, stride=2), 32, 64),
    "three channels": (replace(conv(3, (9, 31), (4, 7), stride=2, before=(2, 3), after=(1, 4)), filler=1), 0, 0),
    "three channels in place": (replace(conv(3, (4, 12), 3), filler=1), 1, 5),
    "gaps": (conv(32, (4, 10), 3, before=1), 2, 6),
    "gaps in place": (conv(32, (4, 12), (2, 2)), 2, 6),
    "one dimension": (conv(32, (23,), 3, stride=2, before=1), 0, 0),
    "three tiles of columns": (replace(conv(32, (5, 20), 3, before=1), outputs=37), 0, 0),
    "three tiles of columns in place": (replace(conv(32, (4, 13), (2, 2)), outputs=48), 2, 6),
}
"""A convolution, and gaps after pixels and after rows of the images."""


OF_BYTES = {
    "zero points": (conv(64, (4, 10), 3, before=1, fill=131), 0, 0),
    "rows of few pixels": (conv(64, (3, 4), 3, before=1, fill=7), 0, 0),
    "gaps of bytes": (conv(64, (3, 17), (2, 2), before=1, fill=9), 4, 12),
}


def posed(name, target, dtype, images=2, *, wide=False):
    """A product of windows, its operands, a schedule (of the narrowest or widest panels), and the sizes."""
    x, of_pixel, of_row = CASES.get(name) or OF_BYTES[name]
    pixel = x.channels + of_pixel
    rows = [pixel * x.spatial[-1] + of_row] if len(x.spatial) > 1 else []
    image = (rows[0] * x.spatial[0] if rows else pixel * x.spatial[0]) + 8
    strides = (image, *rows, pixel, 1)
    view = windows(x, strides).bind(images=images)
    m, k = (int(y) for y in view.extents)
    of = (max if wide else min)(packed_families(target, dtype), key=lambda x: family(x).nr)
    p = Problem(m, x.outputs, k, a="any", b="packed", dtype=dtype, family=of)
    one = case(p, seed=3)
    limits = {"bf16": (-4, 5), "u8": (0, 256), "s8": (-128, 128)}[p.types[0]]
    memory = np.random.default_rng(5).integers(*limits, images * image).astype(one.a.dtype)
    matrix = family(p.family).layout(k, x.outputs).gather(one.b)
    seen = view.gather(memory.astype(np.float64) - x.padding) + x.padding
    fields = one.fields | {"a_m": 0, "a_k": 0, "a_batch": 0}
    one = replace(one, a=memory, a_offset=0, fields=fields, want=(seen @ matrix.astype(np.float64))[None])
    schedules = [s for s in candidates(p, target) if s.program == "tiles" and s.b.panels == 1]
    s = min(schedules, key=lambda s: (s.nr, s.mr))
    return one, s, tiled(x, strides, s, atom_of(target.isa(s.isa), s.dtype, s.atom.lanes), target)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_tiles_are_loaded_from_images(name, by_rows):
    target = small("amx_bf16")
    k, s, sizes = posed(name, target, "bf16-bf16-f32", wide=by_rows)
    for i, workers in enumerate((1, 3)):
        order = {"by_rows": by_rows, "by_slices": by_rows and i > 0, "near": not by_rows}
        kernel = lower_tiled(s, target.isa(s.isa), replace(sizes, **order))
        k.check(interpret(kernel, k, workers, shuffle=i), s)


@pytest.mark.parametrize("dtype", ["u8-s8-s32", "s8-s8-s32"])
@pytest.mark.parametrize("name", OF_BYTES)
def test_padding_of_bytes_is_a_zero_point(name, dtype):
    target = small("amx_int8")
    if dtype[0] == "s" and OF_BYTES[name][0].padding > 127:
        pytest.skip("the zero point is none of signed bytes")
    k, s, sizes = posed(name, target, dtype)
    kernel = lower_tiled(s, target.isa(s.isa), sizes)
    k.check(interpret(kernel, k, 3), s)
    if runs_here("amx_int8"):
        check_built(kernel, k, 2, s, code=load)


@pytest.mark.parametrize("name", CASES)
def test_built_kernels_load_tiles_from_images(name):
    target = small("amx_bf16")
    k, s, sizes = posed(name, target, "bf16-bf16-f32")
    if not runs_here("amx_bf16"):
        pytest.skip("this host has no AMX")
    check_built(lower_tiled(s, target.isa(s.isa), sizes), k, 2, s, code=load)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "x",
    [Convolution(3, 12, 32, (6, 11), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
     Convolution(3, 40, 32, (5, 37), (3, 2), (2, 2), (1, 1), (1, 0), (0, 2)),
     Convolution(2, 12, 32, (3, 19), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0)),
     Convolution(3, 12, 48, (4, 18), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1))], ids=str,
)  # fmt: skip
def test_panels_of_groups_follow_each_other(x, workers):
    target, images, n = small("amx_bf16"), 2, x.groups * x.outputs
    pixel = x.groups * x.channels
    strides = (pixel * x.spatial[0] * x.spatial[1], pixel * x.spatial[1], pixel, 1)
    view = windows(x, strides).bind(images=images)
    m, k = (int(y) for y in view.extents)
    families = [y for y in packed_families(target, "bf16-bf16-f32") if x.outputs % family(y).nr == 0]
    p = Problem(m, n, k, a="any", b="packed", dtype="bf16-bf16-f32", family=families[0])
    one = case(p, seed=3)
    memory = np.random.default_rng(5).integers(-4, 5, images * strides[0]).astype(one.a.dtype)
    matrix = family(p.family).layout(k, n).gather(one.b).astype(np.float64)
    shifted = [np.concatenate([memory[g * x.channels :], memory[: g * x.channels]]) for g in range(x.groups)]
    seen = [view.gather(y.astype(np.float64)) for y in shifted]
    want = np.concatenate([y @ matrix[:, g * x.outputs :][:, : x.outputs] for g, y in enumerate(seen)], 1)
    one = replace(one, a=memory, a_offset=0, fields=one.fields | {"a_m": 0, "a_k": 0, "a_batch": 0}, want=want[None])
    s = next(y for y in candidates(p, target) if y.program == "tiles" and y.b.panels == 1)
    sizes = tiled(x, strides, s, atom_of(target.isa(s.isa), s.dtype, s.atom.lanes), target, x.groups)
    one.check(interpret(lower_tiled(s, target.isa(s.isa), sizes), one, workers, shuffle=workers), s)


def test_rows_of_a_register_tile():
    target = small("amx_bf16")
    sizes = {name: posed(name, target, "bf16-bf16-f32", wide=True)[2] for name in CASES}
    narrow = posed("slices that overlap", target, "bf16-bf16-f32")[2]
    assert (narrow.across, narrow.tall, narrow.slices) == (4, 35, 1)
    assert (sizes["two rows"].paired, sizes["two rows"].tall) == (True, 11)
    assert (sizes["slices that overlap"].tall, sizes["slices that overlap"].slices) == (18, 2)
    assert (sizes["few channels"].run, sizes["few channels"].near) == (16, False)
    assert not sizes["in place"].copies
    three = sizes["three tiles of columns"], sizes["three tiles of columns in place"]
    assert [(y.across, y.panels, y.paired, y.tall) for y in three] == [(1, 2, False, 10), (1, 2, False, 12)]
    assert (sizes["pixels"].by_rows, sizes["pixels"].by_slices, sizes["pixels"].near) == (True, False, False)
    assert (sizes["shorter steps"].run, sizes["shorter steps"].deep) == (18, 9)
    assert (sizes["three channels"].run, sizes["three channels"].deep, sizes["three channels"].copies) == (14, 14, True)


def test_what_is_packed_instead():
    target = small("amx_bf16")
    _, s, _ = posed("padded", target, "bf16-bf16-f32")
    atom = atom_of(target.isa(s.isa), s.dtype, s.atom.lanes)

    def none(x, *strides):
        return tiled(x, strides, s, atom, target) is None

    deep = 32 * 2**11  # single taps by filters that fill L2
    assert none(conv(deep, (20, 20), 1, stride=2), 400 * deep, 20 * deep, deep, 1)
    assert none(conv(32, (4, 4), 3, before=1), 512, 128, 32, 1)  # short rows
    assert none(conv(34, (20, 20), 3, dilation=2), 13600, 680, 34, 1)  # runs that are no equal steps
    assert none(conv(32, (20, 20), 3), 12800, 640, 32, 2)  # channels that are not contiguous
    assert none(conv(32, (20, 20), 3), 13860, 693, 33, 1)  # pixels that are no whole number of units apart


def test_other_schedules_are_refused():
    target = small("avx512")
    s = next(y for y in candidates(Problem(40, N, 24), target) if y.program == "gemm" and y.b.packed)
    with pytest.raises(ScheduleError, match="reads A in place"):
        lower_tiled(s, target.isa(s.isa), posed("padded", small("amx_bf16"), "bf16-bf16-f32")[2])
