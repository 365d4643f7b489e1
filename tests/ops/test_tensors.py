"""Tensors of PyTorch in the host's memory: operands like NumPy's arrays, and results that are tensors.

Where PyTorch is not installed, a stand-in over NumPy's arrays takes its place: it has what portmm asks of tensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

import portmm as pm
from portmm.arrays import libraries

BF16 = np.dtype(ml_dtypes.bfloat16)


class _Type:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"torch.{self.name}"


_Type.__name__ = _Type.__qualname__ = "dtype"
_Type.__module__ = "torch"


class _Tensor:
    is_cuda, layout = False, "strided"

    def __init__(self, array, name="", *, grad=False):
        self.array, self.requires_grad = np.asarray(array), grad
        self.dtype = getattr(sys.modules["torch"], name or self.array.dtype.name)
        self.shape = self.array.shape

    def is_neg(self):
        return False

    def detach(self):
        return _Tensor(self.array, self.dtype.name)

    def numpy(self):
        if self.requires_grad or self.dtype.name == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array

    def view(self, dtype):
        return _Tensor(self.array.view(BF16 if dtype.name == "bfloat16" else dtype.name), dtype.name)


_Tensor.__module__ = "torch"


class _Torch(ModuleType):
    def __init__(self):
        super().__init__("torch")
        self.Tensor, self.strided, self.grad = _Tensor, "strided", True
        for name in ("float32", "float64", "bfloat16", "int8", "int16", "int32", "int64"):
            setattr(self, name, _Type(name))

    def is_grad_enabled(self):
        return self.grad

    def from_numpy(self, array):
        assert array.flags.writeable
        return _Tensor(array)

    @contextlib.contextmanager
    def no_grad(self):
        self.grad = False
        yield
        self.grad = True


QUICKLY = True
KINDS = ["stand-in", "real"] if importlib.util.find_spec("torch") else ["stand-in"]


@pytest.fixture(params=KINDS)
def torch(request, monkeypatch):
    if request.param == "real":
        yield importlib.import_module("torch")
        return
    module = _Torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    libraries._library_of.cache_clear()
    yield module
    libraries._library_of.cache_clear()


def tensor(torch, x):
    """A tensor over an array, which may be of bfloat16."""
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def values(shape, dtype=np.float32, seed=0):
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (x * 10 if np.dtype(dtype).kind == "i" else x).astype(dtype)


def read(torch, x):
    assert isinstance(x, torch.Tensor)
    return x.view(torch.int16).numpy().view(BF16) if str(x.dtype) == "torch.bfloat16" else x.numpy()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.int8], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("shapes", [((5, 6), (6, 7)), ((3, 5, 6), (6, 7)), ((6,), (6, 7)), ((6,), (6,))], ids=str)
def test_products_are_tensors(torch, dtype, shapes):
    a, b = values(shapes[0], dtype), values(shapes[1], dtype, 1)
    want = pm.matmul(a, b)
    for x, y in ((tensor(torch, a), tensor(torch, b)), (tensor(torch, a), b), (a, tensor(torch, b))):
        np.testing.assert_array_equal(read(torch, pm.matmul(x, y)), want)


def test_results_go_to_tensors(torch):
    for dtype in (np.float32, BF16):
        a, b = values((5, 6), dtype), values((6, 7), dtype, 1)
        out, want = np.zeros((5, 7), dtype), pm.matmul(a, b)
        to = tensor(torch, out)
        assert pm.matmul(tensor(torch, a), tensor(torch, b), to) is to
        np.testing.assert_array_equal(out, want)
        out[...] = 0
        assert pm.matmul(a, b, to, dtype=np.float32) is to
        np.testing.assert_array_equal(out, want)
    wide = pm.matmul(tensor(torch, values((5, 6))), tensor(torch, values((6, 7))), dtype=torch.float64)
    assert read(torch, wide).dtype == np.float64


def test_tensors_with_gradients_are_refused_unless_none_are_computed(torch):
    a, b = values((5, 6)), values((6, 7), seed=1)
    weight = torch.nn.Parameter(tensor(torch, b)) if hasattr(torch, "nn") else _Tensor(b, grad=True)
    with pytest.raises(TypeError, match="requires gradients"):
        pm.matmul(tensor(torch, a), weight)
    with torch.no_grad():
        np.testing.assert_array_equal(read(torch, pm.matmul(tensor(torch, a), weight)), pm.matmul(a, b))
        packed = pm.pack(weight)
    np.testing.assert_array_equal(read(torch, pm.matmul(tensor(torch, a), packed)), pm.matmul(a, pm.pack(b)))


def test_plans_take_tensors(torch):
    for dtype in (np.float32, BF16):
        a, b = values((5, 6), dtype), values((6, 7), dtype, 1)
        x, y, to = tensor(torch, a), tensor(torch, b), tensor(torch, np.zeros((5, 7), dtype))
        plan = pm.plan(x, y)
        np.testing.assert_array_equal(read(torch, plan(x, y)), pm.matmul(a, b))
        assert plan(x, y, out=to) is to
        np.testing.assert_array_equal(read(torch, to), pm.matmul(a, b))
        with pytest.raises(ValueError, match="shape"):
            plan(x, x)


def test_functions_of_several_operands(torch):
    a, b, bias = values((5, 6)), values((6, 7), seed=1), values((7,), seed=2)
    x, y = tensor(torch, a), tensor(torch, b)
    several = pm.matmul(x, y, epilogue=lambda acc, i: (acc + bias[i.n], pm.sum(acc)))
    for got, want in zip(several, pm.matmul(a, b, epilogue=lambda acc, i: (acc + bias[i.n], pm.sum(acc))), strict=True):
        np.testing.assert_array_equal(read(torch, got), want)
    codes, w = values((5, 6), np.int8), values((6, 7), np.int8, 1)
    got = pm.linear(tensor(torch, codes), tensor(torch, w), tensor(torch, bias), w_scale=0.5)
    np.testing.assert_array_equal(read(torch, got), pm.linear(codes, w, bias, w_scale=0.5))
    q, k, v = (values((2, 9, 8), BF16, i) for i in range(3))
    got, lse = pm.attention(*(tensor(torch, x) for x in (q, k, v)), causal=True, return_lse=True)
    want, sums = pm.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(read(torch, got), want)
    np.testing.assert_array_equal(read(torch, lse), sums)
    ends, matrices = np.array([2, 5]), [b, b * 2]
    got = pm.grouped_matmul(x, [tensor(torch, m) for m in matrices], tensor(torch, ends))
    np.testing.assert_array_equal(read(torch, got), pm.grouped_matmul(a, matrices, ends))


def test_functions_capture_tensors(torch):
    a, b, bias, lifted = values((5, 6)), values((6, 7), seed=1), values((7,), seed=2), values((7,), BF16, 3)
    x, captured, narrow = tensor(torch, a), tensor(torch, bias), tensor(torch, lifted)
    for step in range(3):  # later calls read other values
        bias[0] = step
        got = pm.matmul(x, b, epilogue=lambda acc, i: pm.relu(acc + captured[i.n]) + narrow[i.n])
        want = pm.matmul(a, b, epilogue=lambda acc, i: pm.relu(acc + bias[i.n]) + lifted[i.n])
        np.testing.assert_array_equal(read(torch, got), want)
    q, extra = values((2, 9, 8)), values((9, 9))
    shift = tensor(torch, extra)
    got = pm.attention(q, q, q, score=lambda s, i: s + shift[i.q, i.kv])
    np.testing.assert_array_equal(got, pm.attention(q, q, q, score=lambda s, i: s + extra[i.q, i.kv]))


def test_fused_functions_take_tensors(torch):
    def layer(x, weights, bias):
        y = pm.silu(x @ weights["first"]) @ weights["second"] + bias
        return {"y": y, "parts": [pm.softmax(y), y.sum(-1, keepdims=True)]}

    for dtype in (np.float32, BF16):
        a, bias = values((5, 6), dtype), values((4,), dtype, 3)
        weights = {"first": values((6, 7), dtype, 1), "second": values((7, 4), dtype, 2)}
        fused = pm.fuse(layer)
        want = fused(a, weights, bias)
        ours = {name: tensor(torch, w) for name, w in weights.items()}
        for _ in range(2):
            got = fused(tensor(torch, a), ours, tensor(torch, bias))
            np.testing.assert_array_equal(read(torch, got["y"]), want["y"])
            for x, y in zip(got["parts"], want["parts"], strict=True):
                np.testing.assert_array_equal(read(torch, x), y)
        packed = pm.fuse(lambda x, w: pm.relu(x @ w))
        w = pm.pack(ours["first"])
        np.testing.assert_array_equal(read(torch, packed(tensor(torch, a), w)), packed(a, w))
        assert str(fused.explain(tensor(torch, a), ours, bias)) == str(fused.explain(a, weights, bias))
