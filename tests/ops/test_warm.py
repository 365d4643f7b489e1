"""Kernels made before they are needed."""

from __future__ import annotations

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import machine

QUICKLY = "fast"


@pytest.mark.rest("takes long for what it finds")
def test_calls_compile_nothing_more_on_a_device(cupy, monkeypatch):
    found = pm.warmup([(9, 40, 24), (8, 40, 24), (3, 9, 16, 32)], device="cuda")
    assert found.where == "cuda:0"
    assert found.shapes == 3
    assert len(found.kernels) >= 1
    assert f"{len(found.kernels)} kernels" in str(found)

    def refuse(*_):
        raise AssertionError("a kernel is loaded in a call")

    monkeypatch.setattr(machine.Machine, "load", refuse)
    rng = np.random.default_rng(0)
    for shape in (((9, 24), (24, 40)), ((8, 24), (24, 40)), ((3, 9, 32), (3, 32, 16))):
        a, b = (rng.standard_normal(x).astype(np.float32) for x in shape)
        np.testing.assert_allclose(pm.matmul(cupy.array(a), cupy.array(b)).get(), a @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("cupy")
def test_large_products_share_kernels(monkeypatch):
    """M is no part of a kernel; operands that are copied first are part of what is made ready."""
    monkeypatch.setattr(machine.Machine, "load", lambda *_: None)
    shapes = [(m, 4096, 4096) for m in (2048, 4096, 4095, 8192)]
    found = pm.warmup(shapes, "s8", device="cuda")
    assert len(found.kernels) < 2 * len(shapes)
    assert any(x.startswith("portmm_lines_u8_row") for x in found.kernels)
    assert not any(x.startswith("portmm_lines") for x in pm.warmup(shapes, "s8", b="col", device="cuda").kernels)
    eight = pm.warmup((4096, 4096, 4096), "float8_e4m3fn", b="col", device="cuda:0")
    assert [x.startswith("portmm_wgmma_f32_e4m3_e4m3") for x in eight.kernels] == [True]


def test_the_processor_is_ready():
    found = pm.warmup([(32, 48, 16), (33, 48, 16)], np.float32)
    assert found.where == "host"
    assert all(x.startswith("portmm_") for x in found.kernels)
    assert pm.warmup((32, 48, 16), b="col").shapes == 1


@pytest.mark.usefixtures("cupy")
def test_what_is_no_shape_is_refused():
    with pytest.raises(ValueError, match="shape \\(3, 4\\) is invalid; pass"):
        pm.warmup([(3, 4)])
    with pytest.raises(ValueError, match="all of them positive"):
        pm.warmup((0, 4, 4))
    with pytest.raises(TypeError, match="dtype 'f33' is not supported"):
        pm.warmup((4, 4, 4), "f33")
    with pytest.raises(ValueError, match="device 'tpu' is unknown"):
        pm.warmup((4, 4, 4), device="tpu")
    with pytest.raises(pm.PortmmError, match="there is no CUDA device 7"):
        pm.warmup((4, 4, 4), device="cuda:7")
    with pytest.raises(ValueError, match="b is 'any'"):
        pm.warmup((4, 4, 4), b="any")
