"""Whole functions, fused: each is compared with itself, undecorated."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest

import portmm as pm
from portmm.build import shared_object
from portmm.fusion.compilation import compiled_program
from portmm.fusion.recorder import WholeArrays
from portmm.spec import elementwise as v
from portmm.trace.placeholders import Array

pytestmark = pytest.mark.calls

QUICKLY = True

HERE = Path(__file__).name
rng = np.random.default_rng(7)


def some(*shape, dtype=np.float32):
    return (rng.random(shape) - 0.5).astype(dtype)


def agrees(function, *args, rtol=1e-4, atol=1e-5, **options):
    """The fused function gives what the plain one does, twice; how it ran."""
    wanted = function.__wrapped__(*args, **options)
    for _ in range(2):
        found = function(*args, **options)
        same(found, wanted, rtol, atol)
    return function.explain(*args, **options)


def same(found, wanted, rtol, atol):
    if isinstance(wanted, (tuple, list)):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for x, y in zip(found, wanted, strict=True):
            same(x, y, rtol, atol)
        return
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for k in wanted:
            same(found[k], wanted[k], rtol, atol)
        return
    wide = [np.asarray(x).astype(np.float64) for x in (found, wanted)]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(*wide, rtol=rtol, atol=atol)


def kinds(explained):
    return [k.kind for k in explained.kernels]


def line_of(text, file=__file__):
    """The line of a file that holds a text first."""
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if text in line and "line_of" not in line:
            return number
    raise AssertionError(text)


@pm.fuse
def mlp(x, w1, b1, w2, b2):
    return v.gelu(x @ w1 + b1) @ w2 + b2


@pm.fuse
def gated_mlp(x, wg, wu, wd):
    return (v.silu(x @ wg) * (x @ wu)) @ wd


@pm.fuse
def lora(x, w, a, b):
    return x @ w + (x @ a) @ b


@pm.fuse
def normed(x, g, w):
    return v.rms_norm(x, g) @ w


@pm.fuse
def block(x, w, b, g, c):
    h = x + v.relu(x @ w + b)
    return v.layer_norm(h, g, c), h


@pm.fuse
def attention(x, wq, wk, wv, wo, heads):  # noqa: PLR0917 - its weights
    batch, t, d = x.shape
    q, k, u = ((x @ w).reshape(batch, t, heads, d // heads).transpose(0, 2, 1, 3) for w in (wq, wk, wv))
    scores = v.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(d // heads))
    return (scores @ u).transpose(0, 2, 1, 3).reshape(batch, t, d) @ wo


SIZES = [(0, 8, 8), (1, 1, 1), (1, 64, 96), (5, 1, 7), (7, 13, 33), (16, 64, 96), (3, 8, 1), (4, 0, 5)]


@pytest.mark.thin(3)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_shapes(size):
    m, k, n = size
    agrees(mlp, some(m, k), some(k, n), some(n), some(n, 3), some(3))
    agrees(gated_mlp, some(m, k), some(k, n), some(k, n), some(n, k))
    agrees(lora, some(m, k), some(k, n), some(k, 2), some(2, n))
    if k:
        agrees(normed, some(m, k), some(k), some(k, n))
        agrees(block, some(m, k), some(k, k), some(k), some(k), some(k))


def test_kernels_of_usual_functions():
    x, w = some(9, 16), some(16, 16)
    assert kinds(agrees(mlp, x, w, some(16), w, some(16))) == ["product"] * 2
    told = agrees(gated_mlp, x, w, w.copy(), w)
    assert kinds(told) == ["product"] * 3
    assert told.kernels[1].fused == ("silu", "mul")
    told = agrees(lora, x, w, some(16, 4), some(4, 16))
    assert kinds(told) == ["product"] * 3
    assert [k.fused for k in told.kernels] == [(), (), ("add",)]
    assert kinds(agrees(normed, x, some(16), w)) == ["rows", "product"]
    told = agrees(block, x, w, some(16), some(16), some(16))
    assert kinds(told) == ["product", "rows"]
    assert "reduction" in str(told)
    assert f"{HERE}:{line_of('return v.layer_norm(h, g, c), h')}" in str(told)


@pytest.mark.parametrize("batch", [1, 3])
def test_attention(batch):
    told = agrees(attention, some(batch, 6, 32), *(some(32, 32) for _ in range(4)), 4)
    assert "numpy" not in kinds(told)


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16", np.float64], ids=str)
def test_types(dtype):
    if dtype == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    loose = {"rtol": 0.05, "atol": 0.05} if dtype != np.float64 else {}
    if dtype.name == "bfloat16" if isinstance(dtype, np.dtype) else False:
        x, w = some(6, 16, dtype=dtype), some(16, 24, dtype=dtype)

        @pm.fuse
        def f(x, w):
            return v.relu(pm.matmul(x, w)) * 2

        agrees(f, x, w, **loose)
        return
    found = mlp(*(y := (some(6, 16, dtype=dtype), some(16, 24, dtype=dtype), some(24, dtype=dtype),
                        some(24, 8, dtype=dtype), some(8, dtype=dtype))))  # fmt: skip
    assert found.dtype == dtype
    agrees(mlp, *y, **loose)


def test_packed_weights():
    w1, w2, b = some(32, 64), some(64, 32), some(64)
    x = some(5, 32)
    want = mlp.__wrapped__(x, w1, b, w2, some(32) * 0)
    p1, p2 = pm.pack(w1), pm.pack(w2)

    @pm.fuse
    def captured(x):
        return v.gelu(x @ p1 + b) @ p2

    for _ in range(2):
        np.testing.assert_allclose(mlp(x, p1, b, p2, np.zeros(32, np.float32)), want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(captured(x), want, rtol=1e-4, atol=1e-5)
    assert "packed" in str(captured.explain(x))
    again = pickle.loads(pickle.dumps(p1))  # noqa: S301 - our own
    np.testing.assert_allclose(mlp(x, again, b, p2, np.zeros(32, np.float32)), want, rtol=1e-4, atol=1e-5)


def test_products_of_the_same_rows():
    @pm.fuse
    def scores(x, wq, wk, wv):
        return v.softmax((x @ wq) @ (x @ wk).T) @ (x @ wv)

    x, weights = some(5, 32), [some(32, 64) for _ in range(3)]
    told = agrees(scores, x, *weights)
    assert "pack" in str(told)
    assert len(told.kernels) == 6
    packed = [pm.pack(w) for w in weights]
    wanted = scores.__wrapped__(x, *weights)
    for _ in range(2):
        np.testing.assert_allclose(scores(x, *packed), wanted, rtol=1e-4, atol=1e-5)
    told = scores.explain(x, *packed)
    assert len(told.kernels) == 4
    assert "3 products" in str(told)
    swapped = [packed[2], packed[0], packed[1]]
    wanted = scores.__wrapped__(x, weights[2], weights[0], weights[1])
    np.testing.assert_allclose(scores(x, *swapped), wanted, rtol=1e-4, atol=1e-5)

    @pm.fuse
    def all_(x):
        return [x @ w for w in packed], packed[0].shape, 3

    for m in (1, 4):
        x = some(m, 32)
        for y, w in zip(all_(x)[0], weights, strict=True):
            np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-5)


def test_weights_of_four_bits():
    w = some(64, 48)
    small = pm.pack(pm.quantize(w, bits=4, group=32))
    b = some(48)

    @pm.fuse
    def f(x):
        return v.silu(x @ small + b), x @ small

    x = some(4, 64)
    first, second = f(x)
    np.testing.assert_allclose(second, pm.matmul(x, small), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first, v.silu(second + b), rtol=1e-4, atol=1e-5)


def test_changes_of_captured_arrays_are_seen():
    w, b, scale = some(16, 16), some(16), 2.0

    @pm.fuse
    def f(x):
        return v.relu(x @ w + b) * scale

    x = some(3, 16)
    agrees(f, x)
    w *= 2
    agrees(f, x)
    b = some(16)
    agrees(f, x)
    scale = 3.0
    agrees(f, x)
    w = some(16, 24)
    b = some(24)
    agrees(f, x)
    w = pm.pack(some(16, 24))
    agrees(f, x)
    w = pm.pack(some(16, 24))
    agrees(f, x)


class Layer:
    def __init__(self, n):
        self.w, self.b, self.eps, self.deep = some(n, n), some(n), 1e-5, True
        self.inner = {"w": [some(n, n)]}

    def norm(self, x):
        return v.rms_norm(x, eps=self.eps)

    @pm.fuse
    def __call__(self, x):
        x = v.relu(self.norm(x) @ self.w + self.b)
        return x @ self.inner["w"][0] if self.deep else x


def test_objects():
    layer, other, x = Layer(12), Layer(12), some(5, 12)

    def check(one):
        wanted = Layer.__call__.__wrapped__(one, x)
        for _ in range(2):
            np.testing.assert_allclose(one(x), wanted, rtol=1e-4, atol=1e-5)

    for _ in range(2):
        check(layer)
        check(other)
        layer.w = some(12, 12)
        layer.inner["w"] = [some(12, 12)]
        layer.deep = not layer.deep
        layer.eps *= 2
    assert not Layer.__call__.explain(layer, x).notes


def test_lists_and_dicts():
    @pm.fuse
    def f(layers, x, *, last):
        for w, b in layers:
            x = v.relu(x @ w + b)
        return {"x": x @ last["w"], "all": [x, x]}

    layers = [(some(8, 8), some(8)) for _ in range(3)]
    told = agrees(f, layers, some(4, 8), last={"w": some(8, 5)})
    assert kinds(told) == ["product"] * 4


def compiled(monkeypatch):
    """A list that grows with every source that is looked for among those that are compiled."""
    found = []
    real = shared_object.build
    monkeypatch.setattr(shared_object, "build", lambda source, **more: (found.append(source), real(source, **more))[1])
    return found


def test_other_rows_compile_nothing_new(monkeypatch):
    w, g, wd = some(64, 64), some(64), some(64, 64)

    @pm.fuse
    def f(x):
        return v.silu(v.rms_norm(x, g) @ w) @ wd

    for m in (5, 6, 7, 100):
        agrees(f, some(m, 64))
    seen = compiled(monkeypatch)
    g = some(64)
    f = pm.fuse(f.__wrapped__)
    for m in (5, 6, 7, 100):
        agrees(f, some(m, 64))
    assert len(set(seen)) <= 4
    for m in range(20, 40):  # a schedule may suit some of them much better
        f(some(m, 64))
    assert len(set(seen)) <= 6


def test_numbers_compile_nothing_new(monkeypatch):
    @pm.fuse
    def f(x, w, scale):
        return v.relu(x @ w * scale)

    x, w = some(3, 8), some(8, 8)
    agrees(f, x, w, 0.25)
    seen = compiled(monkeypatch)
    for scale in (0.5, 1.0, 3.25):
        agrees(f, x, w, scale)
    assert not seen


def test_numbers_that_python_looks_at():
    @pm.fuse
    def f(x, scale):
        return x * math.sqrt(scale) if scale > 1 else x + scale

    for scale in (0.5, 4.0, 0.25, 9.0, 4.0):
        agrees(f, some(3, 5), scale)


def test_some_results_of_a_function_of_numpys():
    def halves(x):
        return np.frexp(x * 2)[1] + np.modf(x)[0]

    x = np.random.default_rng(0).random((5, 7), np.float32)
    np.testing.assert_allclose(pm.fuse(halves)(x), halves(x), rtol=1e-6)


def test_arrays_that_are_the_same_in_all_calls():
    """Their addresses are in the tables of a program, those of its arguments are not."""
    rng = np.random.default_rng(0)
    bias, weight, x, y = (rng.random(shape, np.float32) for shape in ((6,), (7, 6), (5, 7), (3, 5, 7)))
    for left in (x, y):
        graph = WholeArrays()
        a = Array(graph, graph.leaf(left, "a"))
        w, b = (Array(graph, graph.fixed_leaf(z, "fixed")) for z in (pm.pack(weight), bias))
        result = (a @ w + b, np.tanh(b), (a @ w).sum(-1))
        run, *_, source, notes = compiled_program(graph, [z.node for z in result], result)
        assert not notes
        assert "L1" not in source
        for step in range(2):
            bias += step
            got = run([left])
            for z, want in zip(got, (left @ weight + bias, np.tanh(bias), (left @ weight).sum(-1)), strict=True):
                np.testing.assert_allclose(z, want, rtol=1e-5, atol=1e-5)
