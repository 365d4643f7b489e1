"""Weights of four bits, and packed weights in files, as a user meets them."""

from __future__ import annotations

import json
import mmap as memory_map
import pickle

import cover
import ml_dtypes
import numpy as np
import pytest
from machines import HERE

import portmm as pm
from portmm.ops.int4_panels import pack_int4, unpack_int4
from portmm.spec.problem import family
from portmm.weights.safetensors import read, write

pytestmark = pytest.mark.calls

QUICKLY = True

BF16 = np.dtype(ml_dtypes.bfloat16)


def rounded(q):
    """A symmetric weight whose scales fit 16 bits."""
    scales = q.scales.astype(np.float16).astype(np.float32)
    return pm.Quantized(q.codes, scales, -8 * scales, q.bits, q.group)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("target", "group", "kind"),
    cover.pairs(HERE, [32, 64, 128, None], ["symmetric", "with offsets", "scales of 16 bits"]),
)
def test_products_are_those_of_the_weight(target, group, kind):
    """Odd sizes, groups that do not divide k, a last unit that is not full."""
    rng = np.random.default_rng(0)
    with pm.config(target=target):
        for m, n, k in ((1, 33, 70), (3, 64, 256), (21, 5, 300), (2, 3, 1), (4, 40, 8), (70, 31, 129)):
            q = pm.quantize(rng.standard_normal((k, n)), group=group, symmetric=kind != "with offsets")
            q = rounded(q) if kind == "scales of 16 bits" else q
            w, packed = pm.dequantize(q, np.float64), pm.pack(q)
            back = unpack_int4(packed)
            layout = family(packed.family)
            assert (layout.heads, layout.half) == (1 + (kind == "with offsets"), kind == "scales of 16 bits")
            for name in ("codes", "scales", "offsets"):
                np.testing.assert_array_equal(getattr(back, name), getattr(q, name))
            for dtype, eps in ((np.float32, 2.0**-24), (BF16, 2.0**-8), (np.float16, 2.0**-11)):
                x = rng.standard_normal((m, k)).astype(dtype)
                want, size = x.astype(float) @ w, np.abs(x.astype(float)) @ np.abs(w)
                # Scale and offset cancel, so that sums are of the size of both.
                loose = (
                    2.0**-23 * (k + 4) * (size + np.abs(x.astype(float)).sum(1, keepdims=True) * 16 * q.scales.max())
                )
                for _ in range(2):
                    got = pm.matmul(x, packed)
                    assert got.dtype == dtype
                    assert (np.abs(got - want) <= loose + 1.01 * eps * np.abs(want)).all()
                assert (np.abs(pm.matmul(x, packed, dtype=np.float32) - want) <= loose).all()


def test_other_ways_to_ask():
    rng = np.random.default_rng(1)
    q = pm.quantize(rng.standard_normal((40, 12)), group=32)
    packed, x = pm.pack(q), rng.standard_normal((2, 5, 40)).astype(np.float32)
    want = pm.matmul(x, packed)
    assert want.shape == (2, 5, 12)
    np.testing.assert_array_equal(pm.matmul(x, q), want)
    np.testing.assert_allclose(pm.matmul(x[0, 0], packed), want[0, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pm.matmul(np.asfortranarray(x[0]), packed), want[0], rtol=1e-5, atol=1e-5)
    out = np.empty((2, 5, 12), np.float32)
    assert pm.matmul(x, packed, out) is out
    np.testing.assert_array_equal(out, want)
    first = pm.matmul(x[0], packed)  # of other rows, perhaps by another unit
    misaligned = np.zeros(want.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(want.shape)
    for other in (np.empty(want.shape, ">f4"), np.empty((2, 5, 24), np.float32)[..., ::2], misaligned):
        for _ in range(2):
            assert pm.matmul(x, packed, other) is other
            np.testing.assert_array_equal(other, want)
            np.testing.assert_array_equal(pm.matmul(x[0], packed, other[0]), first)
    wide = np.empty((2, 5, 12))
    np.testing.assert_array_equal(pm.matmul(x, packed, wide), want)
    np.testing.assert_array_equal(pm.matmul(x, pickle.loads(pickle.dumps(packed))), want)  # noqa: S301 - our own
    assert pm.matmul(np.empty((0, 40), np.float32), packed).shape == (0, 12)


@pytest.mark.parametrize("group", [8, 32, None])
def test_panels_of_a_symmetric_weight_may_have_offsets(group):
    """As files have them that were written before there were others."""
    rng = np.random.default_rng(2)
    q = pm.quantize(rng.standard_normal((70, 33)), group=group)
    without, having = pack_int4(q), pack_int4(q, symmetric=False)
    assert without.nbytes < having.nbytes
    np.testing.assert_array_equal(unpack_int4(having).offsets, q.offsets)
    for m in (1, 9):
        x = rng.standard_normal((m, 70)).astype(np.float32)
        np.testing.assert_array_equal(pm.matmul(x, without), pm.matmul(x, having))
        exact = pm.linear(x, having, dynamic=True)
        np.testing.assert_allclose(pm.linear(x, without, dynamic=True), exact, rtol=1e-5, atol=1e-5)


def test_what_is_refused():
    q = pm.quantize(np.ones((40, 12)), group=32)
    with pytest.raises(ValueError, match="40 rows"):
        pm.matmul(np.ones((2, 41), np.float32), pm.pack(q))
    with pytest.raises(TypeError, match="float64"):
        pm.matmul(np.ones((2, 40)), pm.pack(q))
    with pytest.raises(TypeError, match="use matmul"):
        pm.plan(np.ones((2, 40), np.float32), pm.pack(q))
    with pytest.raises(pm.PackError, match="8 bits"):
        pm.pack(pm.quantize(np.ones((40, 12)), bits=8))
    with pytest.raises(pm.PackError, match="multiples of 8"):
        pm.pack(pm.quantize(np.ones((40, 12)), group=12))


def test_a_product_is_explained():
    packed = pm.pack(pm.quantize(np.ones((256, 64)), group=64))
    why = pm.explain(np.ones((1, 256), BF16), packed)
    assert (why.problem.dtype, why.problem.b, why.schedule.family) == ("bf16-u4-bf16", "codes", packed.family)
    assert "decode" in why.source
    assert pm.explain((64, 256), packed).problem.dtype == "f32-u4-f32"
    with pytest.raises(ValueError, match="255 columns"):
        pm.explain((64, 255), packed)


def weights():
    rng = np.random.default_rng(0)
    made = {x.name: pm.pack(rng.standard_normal((70, 33)).astype(x)) for x in map(np.dtype, ("f4", "f8", "f2", BF16))}
    whole = rng.integers(-128, 128, (70, 33)).astype(np.int8)
    made |= {"int8": pm.pack(whole), "int8 for floats": pm.pack(whole, activations=np.float32)}
    every = (("int4", True), ("int4 with offsets", False))
    return made | {
        name: pm.pack(pm.quantize(rng.standard_normal((70, 33)), group=32, symmetric=x)) for name, x in every
    }


def root(array):
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("mmap", [True, False])
def test_weights_come_back_from_a_file(tmp_path, mmap, target):
    """Panels of every width, also those that are no multiple of a cache line, are used where the file has them."""
    with pm.config(target=target):
        check_stored(tmp_path, mmap=mmap)


def check_stored(tmp_path, *, mmap):
    made = weights()
    pm.save_packed(made, tmp_path / "all")
    found = pm.load_packed(tmp_path / "all", mmap=mmap)
    assert list(found) == list(made)
    for name, w in made.items():
        assert (found[name].family, found[name].shape) == (w.family, w.shape)
        assert np.asarray(found[name].owner).tobytes() == np.asarray(w.owner).tobytes()
        assert not found[name].owner.flags.writeable
        assert found[name].owner.ctypes.data % 64 == 0
        assert isinstance(root(found[name].owner), memory_map.mmap if mmap else np.ndarray)
        copied = pickle.loads(pickle.dumps(w))  # noqa: S301 - our own
        assert not copied.owner.flags.writeable
        x = np.ones((4, 70), np.int8 if name == "int8" else np.float32)
        np.testing.assert_array_equal(pm.matmul(x, found[name]), pm.matmul(x, w))
    pm.save_packed(made["int4"], tmp_path / "one")
    assert repr(pm.load_packed(tmp_path / "one")) == repr(made["int4"])
    with pytest.raises(TypeError, match="results of pack"):
        pm.save_packed(np.ones(3), tmp_path / "no")


def test_files_that_lie_are_refused(tmp_path):
    path = tmp_path / "w"
    pm.save_packed(weights()["int8"], path)
    tensors, words = read(path, mmap=False)
    about = json.loads(words["weights"])["weight"]
    lies = [
        {"family": "s8x32k4"}, {"family": "u4x32k8g128"}, {"family": "f32x32"}, {"family": "x"}, {"family": 3},
        {"shape": [7000, 33]}, {"shape": [70, 33000]}, {"shape": [70, -1]}, {"shape": [70]}, {"shape": "70"},
        {"shape": [70, 1.5]}, {"family": "s8x0k4s"}, {"family": "s8x32k3s"},
    ]  # fmt: skip
    for lie in lies:
        write(path, tensors, words | {"weights": json.dumps({"weight": about | lie})})
        try:
            w = pm.load_packed(path)
        except pm.PackError:
            continue
        # Less than is there, or another order of it: wrong numbers, but no harm.
        assert w.shape == (70, 33), lie
        pm.matmul(np.ones((2, 70), np.int8), w)
    for change in (
        {"format": "other"},
        {"version": "1"},
        {"weights": "{"},
        {"weights": "[]"},
        {"one": "False", "weights": "3"},
    ):
        write(path, tensors, words | change)
        with pytest.raises(pm.PackError):
            pm.load_packed(path)
