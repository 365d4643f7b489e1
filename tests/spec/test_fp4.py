"""MXFP4 and NVFP4 as data: values, scales, rounding, files; and products of them."""

from __future__ import annotations

import importlib.util
import pickle
import random

import ml_dtypes
import numpy as np
import pytest
from machines import HERE

import portmm as pm
from portmm.errors import PackError
from portmm.ops.int4_panels import unpack_int4
from portmm.weights.fp4 import GROUP
from portmm.weights.quantized import load_quantized, save_quantized

QUICKLY = True
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(k, n, rng):
    """Arrays of a file of NVFP4, and its weight by the definition, in float64."""
    packed = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    scales = np.abs(rng.standard_normal((n, k // 16)) * 60).astype(ml_dtypes.float8_e4m3fn)
    whole = np.float32(0.0173)
    w = np.empty((n, k))
    for j in range(n):
        for i in range(k):
            code = packed[j, i // 2] >> 4 * (i % 2) & 15
            w[j, i] = VALUES[code] * np.float64(np.float32(scales[j, i // 16]) * whole)
    return packed, scales, whole, w.T


@pytest.mark.parametrize("target", HERE)
def test_products_of_nvfp4(target):
    rng = np.random.default_rng(0)
    packed, scales, whole, w = nvfp4(96, 37, rng)
    q = pm.from_fp4(packed, scales, whole)
    np.testing.assert_array_equal(pm.dequantize(q, np.float64), w)
    assert (q.group, q.values, q.nbytes) == (16, "e2m1", 96 * 37 // 2 + 4 * 6 * 37)
    with pm.config(target=target):
        panels = pm.pack(q)
        back = unpack_int4(panels)
        np.testing.assert_array_equal(pm.dequantize(back), pm.dequantize(q))
        for m in (1, 7, 40):
            x = rng.standard_normal((m, 96)).astype(np.float32)
            want, size = x.astype(float) @ w, np.abs(x).astype(float) @ np.abs(w)
            assert (np.abs(pm.matmul(x, panels) - want) <= 2.0**-22 * 100 * size).all()
            rough = pm.linear(x, panels, dynamic=True)
            assert np.linalg.norm(rough - want) < 0.02 * np.linalg.norm(want)
            # Rows of at most 127, the scale of which is 1, are multiplied exactly; powers of two are scales.
            whole_rows = rng.integers(-127, 128, (m, 96)).astype(np.float32)
            whole_rows[:, 0] = 127
            even = pm.from_fp4(packed, rng.integers(120, 132, (37, 6)).astype(np.uint8))
            exact = whole_rows.astype(float) @ pm.dequantize(even, np.float64)
            for got in (pm.matmul(whole_rows, even), pm.linear(whole_rows, pm.pack(even), dynamic=True)):
                np.testing.assert_array_equal(got, exact.astype(np.float32))


def test_the_largest_value_decides_whether_weights_are_finite():
    packed, most = np.full((1, 16), 0xF7, np.uint8), 2.0**125
    q = pm.from_fp4(packed, np.full((1, 1), most, np.float32))
    np.testing.assert_array_equal(pm.dequantize(q)[:, 0], np.tile(np.float32([6 * most, -6 * most]), 16))
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 0.5
    np.testing.assert_array_equal(pm.matmul(x, pm.pack(q)), [[3 * most]])
    with pytest.raises(ValueError, match="yield no finite float32 weights for values up to 6"):
        pm.from_fp4(packed, np.full((1, 1), 2 * most, np.float32))
    scales = np.full((1, 1), most, np.float32)
    with pytest.raises(ValueError, match="values up to 15"):
        pm.Quantized(np.zeros((32, 1), np.uint8), scales, scales, 4, 32)


@pytest.mark.parametrize("kind", GROUP)
@pytest.mark.parametrize("shape", [(4, 0), (0, 3), (0, 0)])
def test_empty_weights(kind, shape):
    assert pm.quantize_fp4(np.zeros(shape, np.float32), kind).shape == shape


def test_mxfp4_of_gguf():
    k, n = 96, 21
    data = random.Random(0).randbytes(n * k // 32 * 17)  # noqa: S311 - the same bytes with any NumPy
    raw = np.frombuffer(data, np.uint8).reshape(n, -1, 17).copy()
    raw[..., 0] = raw[..., 0] % 40 + 100
    q = pm.from_gguf(raw.tobytes(), (k, n), kind="MXFP4")
    want = pm.dequantize_gguf(raw.tobytes(), (k, n), kind="MXFP4")
    np.testing.assert_array_equal(pm.dequantize(q), want)
    if importlib.util.find_spec("gguf"):
        import gguf

        theirs = gguf.quants.dequantize(raw.reshape(n, -1), gguf.GGMLQuantizationType.MXFP4)
        np.testing.assert_array_equal(pm.dequantize(q).T, theirs)
    x = np.random.default_rng(0).integers(-4, 5, (3, k)).astype(np.float32)
    np.testing.assert_allclose(pm.matmul(x, pm.pack(q)), x.astype(float) @ want.astype(float), rtol=1e-5)
    raw[0, 0, 0] = 255
    with pytest.raises(ValueError, match="finite"):
        pm.from_gguf(raw.tobytes(), (k, n), kind="MXFP4")


@pytest.mark.parametrize("kind", GROUP)
def test_quantization(kind, tmp_path):
    rng = np.random.default_rng(1)
    w = rng.standard_normal((75, 9)) * np.exp(rng.standard_normal(9))
    w[:40, 3] = 0
    q = pm.quantize_fp4(w, kind)
    assert (q.shape, q.group, q.values) == ((75, 9), GROUP[kind], "e2m1")
    scales = q.scales.repeat(q.group, 0)[:75].astype(float)
    if kind == "mxfp4":
        assert (np.frexp(q.scales[q.scales > 0])[0] == 0.5).all(), "powers of two"
    else:
        most = np.float32(np.abs(w).max() / (6 * 448))
        steps = q.scales / most
        np.testing.assert_allclose(steps, steps.astype(ml_dtypes.float8_e4m3fn).astype(float), rtol=1e-6)
    got = pm.dequantize(q, np.float64)
    nearest = VALUES[np.abs(VALUES[:, None, None] * scales - w).argmin(0)] * scales
    np.testing.assert_allclose(np.abs(got - w), np.abs(nearest - w), atol=1e-12)
    assert not got[:32, 3].any()
    save_quantized(q, tmp_path / "w.safetensors")
    for other in (load_quantized(tmp_path / "w.safetensors"), pickle.loads(pickle.dumps(q))):  # noqa: S301 - its own
        assert other.values == "e2m1"
        np.testing.assert_array_equal(pm.dequantize(other), pm.dequantize(q))
    packed = pm.pack(q)
    pm.save_packed(packed, tmp_path / "p.safetensors")
    np.testing.assert_array_equal(
        pm.dequantize(unpack_int4(pm.load_packed(tmp_path / "p.safetensors"))), pm.dequantize(q)
    )


def test_ties_go_to_even_and_small_ones_to_zero():
    w = np.zeros((32, 1))
    w[:8, 0] = [4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 7]
    w[8:12, 0] = [-5, 0.2, -0.25, -0.3]
    got = pm.dequantize(pm.quantize_fp4(w))[:12, 0]
    assert got.tolist() == [4, 0, 1, 1, 2, 2, 4, 6, -4, 0, 0, -0.5]


def test_what_does_not_fit_is_named():
    ones = np.ones((2, 4), np.float32)
    codes = np.zeros((32, 2), np.uint8)
    for wrong, match in (
        ((codes, ones[:1, :2], ones[:1, :2], 4, 32, "e2m1"), "without offsets"),
        ((codes, ones[:1, :2], 0 * ones[:1, :2], 8, 32, "e2m1"), "with 8 bits"),
        ((codes, ones[:1, :2], 0 * ones[:1, :2], 4, 32, "e3m0"), "'e3m0'"),
    ):
        with pytest.raises(ValueError, match=match):
            pm.Quantized(*wrong)
    for call, error, match in (
        (lambda: pm.from_fp4(ones, ones), TypeError, "packed has dtype float32"),
        (lambda: pm.from_fp4(codes, codes.astype(np.int32)), TypeError, "scales has dtype int32"),
        (lambda: pm.from_fp4(codes, ones), ValueError, "both are matrices"),
        (lambda: pm.from_fp4(codes.T, np.ones((2, 3), np.uint8)), ValueError, "64 inputs do not divide into 3 groups"),
        (lambda: pm.from_fp4(codes.T, np.full((2, 2), 255, np.uint8)), ValueError, "finite"),
        (lambda: pm.quantize_fp4(ones, "fp4"), ValueError, "'fp4'"),
        (lambda: pm.quantize_fp4(ones * np.inf), ValueError, "finite matrix"),
        (lambda: pm.quantize_fp4(codes), TypeError, "dtype uint8"),
        (lambda: pm.pack(pm.Quantized(codes, ones[:, :2].repeat(4, 0), np.zeros((8, 2), np.float32), 4, 4, "e2m1")),
         PackError, "groups of 4 rows"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()
