"""Whole functions of arrays on devices, fused: OpenCL's on a CPU, and CUDA's, emulated."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import portmm as pm
from portmm.errors import ScheduleError, TraceError
from portmm.fusion import plan_grid

BF16 = ml_dtypes.bfloat16


def numbers(*shape, dtype=np.float32, seed=0):
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) / 2).astype(dtype)


def close(found, want, tolerance=1e-4):
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    got = found.get().astype(np.float64)
    np.testing.assert_allclose(got, want.astype(np.float64), rtol=tolerance, atol=tolerance)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x, weight, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * weight + bias


def kinds(fused, *args):
    return [k.kind for k in fused.explain(*args).kernels]


@pytest.mark.thin(2)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 64), (1, 1)], ids=str)
def test_functions_of_rows(on, shape):
    x, w, b = numbers(*shape), numbers(shape[-1], seed=1), numbers(shape[-1], seed=2)
    for function, given in ((softmax, (x,)), (rms_norm, (x, w)), (layer_norm, (x, w, b))):
        fused, there = pm.fuse(function), [on.array(y) for y in given]
        close(fused(*there), function(*given))
        assert kinds(fused, *there) == ["rows"]


def test_a_gated_mlp(on):
    def mlp(x, gate, up, down):
        g = x @ gate
        return (g / (1 + np.exp(-g)) * (x @ up)) @ down

    given = numbers(9, 32), numbers(32, 48, seed=1), numbers(32, 48, seed=2), numbers(48, 20, seed=3)
    fused, there = pm.fuse(mlp), [on.array(x) for x in given]
    close(fused(*there), mlp(*given))
    assert kinds(fused, *there) == ["product"] * 3


def test_a_transformer_block(on):
    weights = {"qkv": numbers(32, 96, seed=1), "out": numbers(32, 32, seed=2), "norm": numbers(32, seed=3)}

    def block(x, w, scale):
        q, k, v = np.split(rms_norm(x, w["norm"]) @ w["qkv"], 3, -1)
        q, k, v = (t.reshape(*t.shape[:-1], 4, 8).swapaxes(-2, -3) for t in (q, k, v))
        p = softmax(q @ k.swapaxes(-1, -2) * scale)
        y = (p @ v).swapaxes(-2, -3).reshape(x.shape)
        return x + y @ w["out"], p > 0.1, {"p": p}

    x, fused = numbers(2, 5, 32), pm.fuse(block)
    there = {name: on.array(w) for name, w in weights.items()}
    for scale in (0.5, 0.25):
        found, want = fused(on.array(x), there, scale), block(x, weights, scale)
        close(found[0], want[0])
        close(found[2]["p"], want[2]["p"])
        assert found[1].dtype == np.bool_ or found[1].dtype == bool
        assert found[1].shape == want[1].shape


def test_what_a_function_captures(on):
    weight, bias = numbers(24, 16), numbers(16, seed=1)

    class Layer:
        def __init__(self, w, b):
            self.weight, self.bias = w, b

        def __call__(self, x):
            return np.maximum(x @ self.weight + self.bias, 0)

    layer, host = Layer(on.array(weight), on.array(bias)), Layer(weight, bias)
    fused, x = pm.fuse(lambda x: layer(x) * 2), numbers(7, 24, seed=2)
    close(fused(on.array(x)), host(x) * 2)
    layer.bias = on.array(bias + 1)  # found anew at each call
    host.bias = bias + 1
    close(fused(on.array(x)), host(x) * 2)
    other = numbers(3, 24, seed=3)
    close(fused(on.array(other)), host(other) * 2)


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=["float16", "bfloat16"])
def test_narrow_types(on, dtype):
    def function(x, w, b):
        return pm.matmul(x, w) + b, (x * 2).astype(np.float32), (x @ w).max(-1)

    given = numbers(6, 32, dtype=dtype), numbers(32, 24, dtype=dtype, seed=1), numbers(24, dtype=dtype, seed=2)
    found, want = pm.fuse(function)(*(on.array(x) for x in given)), pm.fuse(function)(*given)
    for x, y in zip(found, want, strict=True):
        close(x, y, 2.0**-6)


def test_views_and_strides(on):
    x, y = numbers(6, 20), numbers(20, 6, seed=1)

    def function(a, b):
        half = a[::2, 3:11]
        return half + b.T[::2, 3:11], a.reshape(3, 40) * 2, (b * 3).T, a[1], b.T.reshape(-1) + 1, a

    there = on.array(x), on.array(y)
    found = pm.fuse(function)(*there)
    for got, want in zip(found, function(x, y), strict=True):
        close(got, want)
    assert found[-1] is there[0]
    close(pm.fuse(lambda a, b: a @ b)(there[0][::2], there[1][:, 1:]), x[::2] @ y[:, 1:])
    close(pm.fuse(lambda a: (a @ a.T)[:, ::2] + 1)(there[0]), (x @ x.T)[:, ::2] + 1)


def test_integers_are_products_of_their_own(on):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 9, (5, 16)).astype(np.int8), rng.integers(-9, 9, (16, 8)).astype(np.int8)
    found = pm.fuse(lambda a, b: pm.matmul(a, b) * 2 + 1)(on.array(a), on.array(b))
    np.testing.assert_array_equal(found.get(), a.astype(np.int32) @ b * 2 + 1)


def test_no_elements(on):
    close(pm.fuse(softmax)(on.array(np.zeros((0, 5), np.float32))), np.zeros((0, 5), np.float32))
    a, b = np.zeros((3, 0), np.float32), np.zeros((0, 4), np.float32)
    close(pm.fuse(lambda a, b: a @ b + 1)(on.array(a), on.array(b)), np.ones((3, 4), np.float32))


def test_a_kind_of_call_is_made_once(on, monkeypatch):
    fused = pm.fuse(softmax)
    fused(on.array(numbers(4, 9)))
    monkeypatch.setattr(plan_grid, "GridBuilder", None)
    close(fused(on.array(numbers(4, 9, seed=1))), softmax(numbers(4, 9, seed=1)))


def test_what_is_remembered_keeps_no_arrays(on):
    x = on.array(numbers(4, 9))
    fused, seen = pm.fuse(lambda x: (softmax(x), x)), weakref.ref(x)
    fused(x)
    del x
    gc.collect()
    assert seen() is None


def test_what_is_refused(on):
    x, host = on.array(numbers(4, 9)), numbers(9)
    with pytest.raises(TypeError, match="in the host's memory, others are on a device"):
        pm.fuse(lambda x: x + host)(x)
    with pytest.raises(TypeError, match="packed weight, others are on a device"):
        pm.fuse(lambda x, w: x @ w)(x, pm.pack(numbers(9, 4)))
    with pytest.raises(TraceError, match=r"np\.sort has no kernel, and NumPy does not compute on a device"):
        pm.fuse(np.sort)(x)
    with pytest.raises(TraceError, match="sum has no kernel"):
        pm.fuse(lambda x: x.sum(0))(x)
    with pytest.raises((ScheduleError, TraceError), match="float64"):
        pm.fuse(lambda x: x * 2.0)(on.array(numbers(4, 9, dtype=np.float64)))
