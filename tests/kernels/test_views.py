"""Products whose A is a view of memory with transforms: windows of convolutions, which packing reads."""

from __future__ import annotations

from dataclasses import replace

import grid_cases
import numpy as np
import pytest
from machines import HERE, SEVEN, TINY, small
from operands import case
from places import MACHINES
from runs import check_built, interpret, load

from portmm.codegen.lower import atom_of, grid_atom
from portmm.errors import ScheduleError
from portmm.ir.interpreter import numpy_type
from portmm.kernels.cpu import gemm, tile_int4
from portmm.kernels.gpu import mma, simt
from portmm.schedule.candidates import candidates
from portmm.spec.layouts import Views, row_major
from portmm.spec.problem import Problem
from portmm.target.target import load_target


def windows(images, kernel, *, stride=1, padding=0, dilation=1):
    """Matrix (n y x, r s c) of the windows of images (n, h, w, c)."""
    return windows_of(row_major(*images), kernel, stride=stride, padding=padding, dilation=dilation)


def windows_of(view, kernel, *, stride=1, padding=0, dilation=1):
    """Matrix (n y x, r s c) of the windows of images, a layout (n, h, w, c)."""
    for axis, size in ((2, kernel[1]), (1, kernel[0])):
        view = view.pad(axis, padding, padding) if padding else view
        count = (int(view.extents[axis]) - (size - 1) * dilation - 1) // stride + 1
        view = view.embed(axis, (count, size), (stride, dilation))
    return view.permute(0, 1, 3, 2, 4, 5).merge(0, 3).merge(1, 3)


VIEWS = {
    "1d": windows((2, 1, 13, 3), (1, 4)),
    "1d strided": windows((2, 1, 21, 16), (1, 3), stride=2),
    "2d": windows((2, 6, 5, 3), (3, 2)),
    "2d padded": windows((2, 6, 5, 16), (3, 3), padding=1),
    "2d long": windows((1, 3, 4, 32), (3, 3), padding=1),
    "2d dilated": windows((1, 7, 9, 5), (2, 3), stride=2, padding=2, dilation=2),
    "planes": windows_of(row_major(2, 3, 6, 9).permute(0, 2, 3, 1), (3, 2), padding=1),
    "transposed": row_major(20, 14).permute(1, 0),
}


def built(s, target, view, build=gemm.build):
    isa = target.isa(s.isa)
    return build(s, isa, atom_of(isa, s.dtype, s.atom.lanes), view=view)


def posed(view, target, dtype="f32", program="gemm"):
    """A product with a view, its operands, and the schedules that pack it."""
    m, k = (int(x) for x in view.extents)
    n = 19
    p = Problem(m, n, k, dtype, a="any")
    one = case(p, seed=3)
    image = np.random.default_rng(5).integers(-4, 5, int(np.prod([int(x) for x in view.shape])))
    a = view.gather(image.astype(numpy_type(p.types[0])))
    rows = one.b[one.b_offset :].astype(np.float64)
    b = np.lib.stride_tricks.as_strided(rows, (k, n), [one.fields[f"b_{x}"] * 8 for x in "kn"])
    memory = image.astype(numpy_type(p.types[0]))
    fields = one.fields | {"a_m": 0, "a_k": 0, "a_batch": 0}
    one = replace(one, a=memory, a_offset=0, fields=fields, want=(a.astype(np.float64) @ b)[None])
    found = [s for s in candidates(p, target) if s.program == program and s.a.packed and not s.atom.swap]
    assert found
    return one, found


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_views_are_read_by_packing(view):
    for target in (TINY, SEVEN):
        k, schedules = posed(view, target)
        for i, s in enumerate({(s.kc, s.mc > 0, s.parallel.over, s.b.packed): s for s in schedules}.values()):
            k.check(interpret(built(s, target, view), k, 1 + i % 3, shuffle=i), s)


@pytest.mark.parametrize(("view", "dtype"), [("2d padded", "f32"), ("2d dilated", "bf16-bf16-f32")])
@pytest.mark.parametrize("name", [x for x in HERE if x in ("scalar", "avx2", "avx512", "neon")])
def test_built_kernels_read_views(name, view, dtype):
    target = small(name)
    k, schedules = posed(VIEWS[view], target, dtype)
    check_built(built(schedules[0], target, VIEWS[view]), k, 2, schedules[0], code=load)


def test_channels_are_read_in_vectors():
    def shuffles(view):
        target = small("avx2")
        return "Shuffle" in repr(built(posed(VIEWS[view], target)[1][0], target, VIEWS[view]))

    assert [shuffles(x) for x in ("2d padded", "2d")] == [True, False]


@pytest.mark.parametrize("name", ["2d padded", "1d", "2d long", "2d dilated", "transposed"])
def test_tiles_are_filled_from_views(name):
    target, view = small("amx_bf16"), VIEWS[name]
    k, schedules = posed(view, target, "bf16-bf16-f32", "tiles")
    k.check(interpret(built(schedules[0], target, view, tile_int4.build), k), schedules[0])


def planes(images, kernel, **how):
    """Matrix (r s c, y x) of the windows of one of the images (c, h, w), of which there are as many as items."""
    channels, high, wide = images
    view = row_major(1, channels, high, wide).permute(0, 2, 3, 1)
    return windows_of(view, kernel, **how).permute(1, 0)


IMAGES = {
    "planes": planes((3, 6, 11), (3, 2)),
    "planes padded": planes((3, 5, 9), (3, 3), padding=1),
    "planes strided": planes((3, 9, 12), (2, 3), stride=2, padding=1),
    "pixels padded": windows((1, 3, 4, 16), (3, 3), padding=1).permute(1, 0),
    "pixels of bytes": windows((1, 5, 6, 3), (3, 3), padding=1).permute(1, 0),
}


def drawn(view, target, dtype="f32"):
    """A product of weights by the windows of two images, into rows of an item, and the schedules that pack these."""
    k, n = (int(x) for x in view.extents)
    p = Problem(5, n, k, dtype, b="any", batch=2)
    one = case(p, seed=3)
    size = int(np.prod([int(x) for x in view.shape]))
    images = np.random.default_rng(5).integers(-4, 5, (2, size)).astype(numpy_type(p.types[1]))
    b = np.stack([view.gather(x) for x in images]).astype(np.float64)
    a = one.a[one.a_offset :].astype(np.float64)
    steps = [8 * one.fields[f"a_{x}"] for x in ("batch", "m", "k")]
    want = np.lib.stride_tricks.as_strided(a, (2, 5, k), steps) @ b
    fields = one.fields | {"b_k": 0, "b_n": 0, "b_batch": size}
    schedules = [s for s in candidates(p, target) if s.program == "gemm" and s.b.packed and not s.atom.swap]
    return replace(one, b=images.ravel(), b_offset=0, fields=fields, want=want), schedules


def built_b(s, target, view):
    isa = target.isa(s.isa)
    return gemm.build(s, isa, atom_of(isa, s.dtype, s.atom.lanes), view_b=view)


@pytest.mark.parametrize("view", IMAGES.values(), ids=list(IMAGES))
def test_views_of_b_are_read_by_packing(view):
    k, schedules = drawn(view, TINY)
    for i, s in enumerate({(s.b.once, s.kc > 0): s for s in schedules}.values()):
        k.check(interpret(built_b(s, TINY, view), k, 1 + i % 3, shuffle=i), s)


@pytest.mark.parametrize(
    ("view", "dtype"),
    [
        ("planes padded", "f32"),
        ("planes strided", "bf16-bf16-f32"),
        ("pixels padded", "f32"),
        ("pixels padded", "u8-s8-s32"),
    ],
)
@pytest.mark.parametrize("name", [x for x in HERE if x in ("avx2", "avx512", "neon")])
def test_built_kernels_read_views_of_b(name, dtype, view):
    target = small(name)
    k, schedules = drawn(IMAGES[view], target, dtype)
    check_built(built_b(schedules[0], target, IMAGES[view]), k, 2, schedules[0], code=load)


def test_views_must_be_packed():
    view = VIEWS["2d"]
    p = Problem(*(int(x) for x in (view.extents[0], 19, view.extents[1])), a="row")
    s = next(s for s in candidates(p, TINY) if s.program == "gemm" and not s.a.packed)
    with pytest.raises(ScheduleError, match="which only packing reads"):
        built(s, TINY, view)


DEVICES = [
    (simt, grid_cases.MACHINE, "f32", (4, 4, 4), "2d padded", "cuda"),
    (simt, grid_cases.MACHINE, "f32", (1, 1, 1), "2d dilated", "opencl"),
    (simt, grid_cases.MACHINE, "bf16-bf16-f32", (8, 8, 4), "1d strided", "opencl"),
    (simt, grid_cases.MACHINE, "f32", (4, 4, 4), "2d long", "cuda"),
    (simt, grid_cases.MACHINE, "s8-s8-s32", (1, 1, 1), "2d padded", "cuda"),
    (mma, load_target(str(MACHINES / "tiny_matrix.toml")), "f16-f16-f32", (8, 8, 4), "2d long", "cuda"),
    (mma, load_target(str(MACHINES / "tiny_matrix.toml")), "f16-f16-f32", (8, 8, 4), "2d padded", "cuda"),
]


@pytest.mark.parametrize(("program", "target", "dtype", "vectors", "name", "language"), DEVICES)
def test_devices_read_views(program, target, dtype, vectors, name, language):  # noqa: PLR0917 - one case
    view = VIEWS[name]
    m, k = (int(x) for x in view.extents)
    p = Problem(m, 24, k, dtype)
    found = candidates(p, target, vectors)
    name = program.__name__.rpartition(".")[2]
    kind = [s for s in found if s.program == name and s.parallel.split == 1 and s.mr * s.nr <= 40]
    rng = np.random.default_rng(7)
    image = grid_cases.drawn(rng, p.types[0], [int(np.prod([int(x) for x in view.shape]))])
    y = grid_cases.drawn(rng, p.types[1], (1, k, 24))
    one = grid_cases.case_of(p, vectors, view.gather(image)[None], y)
    one = replace(one, a=image, a_offset=0, fields=one.fields | {"a_batch": 0})
    for s in [x for x in kind if language == "cuda" or not x.a.asynchronous][:2]:
        isa = target.isa(s.isa)
        kernel = program.build(s, isa, grid_atom(isa, s), Views(view))
        grid_cases.check_run(s, (kernel,), language, one, (p, s))


def test_devices_refuse_views_of_shorter_vectors():
    s = next(s for s in candidates(Problem(64, 24, 18), grid_cases.MACHINE, (4, 4, 4)) if s.program == "simt")
    isa = grid_cases.MACHINE.isa(s.isa)
    with pytest.raises(ScheduleError, match="which its view does not allow"):
        simt.build(s, isa, grid_atom(isa, s), Views(VIEWS["2d"]))
