"""Convolutions on Hopper, whose copy engine reads windows of images: through the shim, and as NVRTC compiles them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import opencl_cpu
import pytest
from convolved import convolved
from test_convolution_device import values
from test_wgmma import H200, FakeDriver, disassembled

import portmm as pm
from portmm.build.nvrtc import compile_cuda, find_nvrtc
from portmm.codegen.lower import lower_grid
from portmm.dispatch import device_routes, schedule_choice
from portmm.dispatch.machine import source
from portmm.errors import NoCompilerError
from portmm.runtime import tensor_map
from portmm.schedule.candidates import candidates
from portmm.schedule.gpu_wgmma import boxes
from portmm.spec.convolution import Convolution, of_windows, planes, windows
from portmm.spec.layouts import Views
from portmm.spec.problem import Problem

QUICKLY = "fast"
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def warpgroups(monkeypatch):
    """Small convolutions, too, by warpgroups, in tiles that the shim compiles fast."""

    def some(*given):
        found = [s for s in candidates(*given) if s.program == "wgmma" and s.parallel.split == 1]
        least = min(s.block.m * s.block.n for s in found)
        return [s for s in found if s.block.m * s.block.n == least]

    monkeypatch.setattr(schedule_choice, "candidates", some)


CASES = {
    "two images": ((2, 7, 6, 64), (24, 64, 3, 3), BF16, {"padding": 1}),
    "steps": (
        (2, 9, 8, 128), (16, 128, 3, 2), np.float16,
        {"stride": (2, 3), "padding": ((2, 1), (0, 1)), "dilation": (1, 2)},
    ),
    "groups": ((1, 6, 5, 128), (32, 64, 2, 2), BF16, {"groups": 2}),
    "bytes": ((1, 6, 5, 128), (16, 128, 3, 3), np.int8, {"padding": 1}),
    "rows": ((1, 20, 9, 64), (8, 64, 1, 5), BF16, {"padding": (0, 2)}),
}  # fmt: skip


@pytest.mark.thin(5)
@pytest.mark.usefixtures("warpgroups")
@pytest.mark.parametrize("name", CASES)
def test_windows_are_copied_by_taps(cupy, name):
    x, w, dtype, how = CASES[name]
    x, w = values(x, dtype), values(w, dtype, 1)
    want = convolved(x, w, **how)
    packed = pm.pack_conv(cupy.array(w), groups=how.get("groups", 1))
    found = pm.conv(cupy.array(x), packed, **how)
    assert "_wgmma_" in cupy.launches[-1][0]
    np.testing.assert_array_equal(found.get(), want.astype(found.dtype))


@pytest.mark.rest("more cases of calls")
@pytest.mark.usefixtures("warpgroups")
def test_images_of_a_batch(cupy):
    """An epilogue that depends on images: each is an item of its own."""
    x, w = values((3, 6, 5, 64), BF16), values((16, 64, 3, 3), BF16, 1)
    found = pm.conv(
        cupy.array(x), cupy.array(w), padding=1, dtype=np.float32, epilogue=lambda acc, i: acc + (i.m + 100 * i.b)
    )
    more = np.arange(30).reshape(6, 5, 1) + 100 * np.arange(3).reshape(3, 1, 1, 1)
    np.testing.assert_array_equal(found.get(), convolved(x, w, padding=1) + more)


@pytest.mark.rest("more cases of calls")
@pytest.mark.usefixtures("warpgroups")
def test_floats_are_rounded_to_tf32(cupy):
    x, w = (values(s, seed=i) * np.float32(1 + 2.0**-12) for i, s in enumerate([(1, 6, 5, 32), (16, 32, 3, 3)]))
    with pm.config(tf32=True):
        found = pm.conv(cupy.array(x), cupy.array(w), padding=1)
    assert "_wgmma_" in cupy.launches[-1][0]
    np.testing.assert_array_equal(found.get(), convolved(*(np.rint(y) for y in (x, w)), padding=1))


def layer(channels=64, kernel=3, *, stride=1, dilation=1, padding=1, spatial=(56, 56)):
    two = [(y,) * len(spatial) for y in (kernel, stride, dilation, padding, padding)]
    return Convolution(1, channels, 1, spatial, *two)


def dense(x, channels=0):
    steps = [channels or x.channels]
    for n in reversed(x.spatial):
        steps.append(steps[-1] * n)
    return (*reversed(steps), 1)


def test_windows_are_recognised():
    for x in (layer(), layer(stride=2, dilation=3, padding=0), layer(spatial=(40,)), layer(3, 7, spatial=(5, 6, 7))):
        assert of_windows(windows(x, dense(x))) == (x, dense(x))
        assert of_windows(planes(x, dense(x)[1:])) is None
    assert of_windows(windows(layer(), dense(layer())).merge(0, 2)) is None


def test_what_the_copy_engine_reads():
    """Whole lines of channels, images of two dimensions, aligned, in corners of eight bits."""
    fits = {"bf16": True, "s8": False, "f32": True}
    assert {t: boxes(windows(layer(), dense(layer())), t) is not None for t in fits} == fits
    for x in (layer(96), layer(spatial=(400,)), layer(stride=9), layer(padding=129), layer(kernel=31, dilation=9)):
        assert boxes(windows(x, dense(x)), "bf16") is None
    assert boxes(windows(layer(), dense(layer(), 68)), "bf16") is None
    assert boxes(windows(layer(), dense(layer(), 72)), "bf16") is not None
    item, row, pixel, _ = dense(layer())
    for strides in ((item, 0, pixel, 1), (pixel, row, 2 * item, 1), (item, row - 8, pixel, 1)):
        assert boxes(windows(layer(), strides), "bf16") is None
    one, flat = (0, row, pixel, 1), layer(spatial=(1, 56))
    assert boxes(windows(flat, (row, 0, pixel, 1)), "bf16") is not None
    for strides in (one, (2 * item, 2 * row, pixel, 1)):
        assert boxes(windows(layer(), strides), "bf16") is not None


def chosen(x, images, word="bf16", **more):
    views = Views(windows(x, dense(x)), **more)
    p = Problem(images * x.pixels, 64, x.depth, word, b="col")
    return device_routes.of_views(p, H200, (8, 8, 8), views).schedule, views


def test_layers_take_warpgroups():
    assert chosen(layer(), 32)[0].program == "wgmma"
    assert chosen(layer(320, spatial=(64, 64)), 2)[0].program == "wgmma"
    assert chosen(layer(24), 32)[0].program == "mma"


def test_maps_of_images_are_the_drivers(monkeypatch):
    tensor_map.tensor_map.cache_clear()
    driver = FakeDriver()
    driver.cuTensorMapEncodeIm2col = driver.cuTensorMapEncodeTiled
    monkeypatch.setattr(tensor_map, "_driver", lambda: driver)
    pixels = ((-1, -2), (-1, 0), (2, 1))
    tensor_map.tensor_map("bf16", 4096, (64, 30, 20, 2), (128, 3840, 76800), (64, 128), 128, False, pixels)
    ((_, kind, rank, at, sizes, strides, lower, upper, channels, count, steps, *rest),) = driver.asked
    assert (kind, rank.value, at.value, channels.value, count.value) == (1, 4, 4096, 64, 128)
    assert [list(y) for y in (sizes, strides)] == [[64, 30, 20, 2], [128, 3840, 76800]]
    assert [list(y) for y in (lower, upper, steps)] == [[-1, -2], [-1, 0], [1, 2, 1, 1]]
    assert rest == [0, 3, 3, 0]
    tensor_map.tensor_map.cache_clear()


@pytest.mark.rest("NVRTC")
@pytest.mark.parametrize(("x", "images"), [(layer(), 32), (layer(320, stride=2, spatial=(64, 64)), 2)], ids=str)
def test_machine_code(x, images, tmp_path):
    try:
        find_nvrtc()
    except NoCompilerError as error:
        opencl_cpu.missing(str(error))
    s, views = chosen(x, images)
    kernel = lower_grid(s, H200.isa("wgmma"), views)[0]
    made = compile_cuda(source(kernel, "cuda"), kernel.name, H200.device.architecture)
    assert made.spills == 0
    text = disassembled(made.code, tmp_path)
    assert not text or {y for y in ("HGMMA", "UTMALDG.4D.IM2COL") if y not in text} == set()
