"""Whole functions, fused: each is compared with itself, undecorated."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_views():
    @pm.fuse
    def f(x, w, table):
        gate, up = np.split(x @ w, 2, axis=-1)
        y = v.silu(gate) * up
        z = y[:, ::2] + y[1:2, 1::2]
        return z.T @ table[2:], y.reshape(-1), np.concatenate([gate, up]), z[None, 0]

    told = agrees(f, some(6, 8), some(8, 16), some(8, 5))
    assert kinds(told).count("numpy") == 1


@pytest.mark.parametrize(("m", "n"), [(33, 72), (300, 200)])
def test_what_a_product_reads_is_not_written_over_by_its_result(m, n):
    """The sum has the shape and the type of the residual that it reads last, which is the left operand, too."""
    w, v, u = some(40, n), some(n, n), some(n, 24)

    @pm.fuse
    def residual(a):
        x = np.maximum(a @ w, 0)
        y = x @ v + x
        return y @ u

    found = agrees(residual, some(m, 40))
    assert [x.kind for x in found.kernels] == ["product"] * 3


def test_reductions_of_every_kind():
    @pm.fuse
    def f(x):
        y = x - x.mean(-1)[:, None]
        return y / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5), x.sum(1), np.max(x, -1), x.min(-1), x.std(1), y.sum()

    told = agrees(f, some(6, 40))
    assert kinds(told).count("rows") == 1
    assert kinds(told).count("numpy") == 1


def test_results_beside_a_product():
    @pm.fuse
    def f(x, w):
        h = x @ w
        return h, v.relu(h), h > 0, v.cast(h * 20, np.int8), h @ h.T

    told = agrees(f, some(6, 8), some(8, 12), atol=1.01 * 1e-5)
    assert kinds(told) == ["product", "product"]


def test_narrow_results_are_rounded_before_they_are_read():
    @pm.fuse
    def f(x):
        codes = v.cast(x * 100, np.int8)
        return codes.astype(np.float32) * 0.5, (x.astype(np.float16).astype(np.float32) - x)

    agrees(f, some(5, 19), atol=1e-7)


def test_quantized_rows():
    @pm.fuse
    def f(x, w):
        return v.quantize_rows(v.relu(x @ w))

    x, w = some(5, 16), some(16, 24)
    (codes, scales), (wanted, theirs) = f(x, w), f.__wrapped__(x, w)
    assert codes.dtype == np.int8
    assert abs(codes.astype(int) - wanted).max() <= 1
    np.testing.assert_allclose(scales, theirs, rtol=1e-4)


def test_dropout_is_the_same():
    @pm.fuse
    def f(x, w, rate):
        return v.dropout(x @ w, rate, 3)

    agrees(f, some(2, 5, 16), some(16, 24), 0.3)
    agrees(f, some(5, 16), some(16, 24), 0.3)


def test_broadcasting_batches():
    @pm.fuse
    def f(q, k, mask, bias):
        return v.softmax((q @ k.swapaxes(-1, -2)) * 0.25 + mask + bias)

    for mask in (some(1, 1, 5, 7), some(2, 1, 1, 7), some(5, 7), some(2, 3, 5, 7)):
        agrees(f, some(2, 3, 5, 8), some(2, 3, 7, 8), mask, some(3, 1, 1))
        agrees(f, some(2, 3, 5, 8), some(7, 8), mask, some(3, 1, 7))


def test_vectors_and_strange_memory():
    @pm.fuse
    def f(x, w, u):
        return (x @ w + 1) * u, x.sum()

    x, w, u = some(8), some(8, 6), some(6)
    agrees(f, x, w, u)
    agrees(f, some(16)[::2], some(6, 8).T, some(6)[::-1])
    agrees(f, x.astype(">f4"), w, u)
    odd = np.zeros(8 * 4 + 1, np.uint8)[1:].view(np.float32)
    odd[:] = x
    agrees(f, odd, w, u)


def test_arrays_made_while_tracing():
    @pm.fuse
    def f(q, w):
        mask = np.tril(np.ones((len(q), len(q)), np.float32))
        return v.where(mask > 0, q @ w, -1)

    told = agrees(f, some(4, 8), some(8, 4))
    assert "traced" in " ".join(told.notes) or "each call" in " ".join(told.notes)


UNARY = (v.relu, v.sigmoid, v.tanh, v.silu, np.exp, abs, lambda x: -x, np.square, lambda x: x**3, lambda x: x > 0.1)
BINARY = (
    np.add, np.subtract, np.multiply, np.maximum, v.minimum, lambda a, b: v.where(a > b, a, b * 0.5),
    lambda a, b: a / (b * b + 1), lambda a, b: v.softmax(a) + b, lambda a, b: a - v.mean(b),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_expressions(data):
    """Random graphs of products, expressions and reductions."""
    n = 6
    arrays = [some(5, n), some(n), some(5, 1), some(n, n), some(1, n)]
    step = st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 9))
    plan = data.draw(st.lists(step, min_size=1, max_size=9))
    wanted = data.draw(st.sets(st.integers(0, 9), min_size=1, max_size=3))

    def f(*xs):
        found = [xs[0]]
        for what, i, j in plan:
            a, b = found[-1 - i % len(found)], ([*found, xs[1], xs[2], xs[4]])[-1 - j % (len(found) + 3)]
            if what >= 24:
                found.append(a @ xs[3] if a.dtype != bool else a * 0.5)
            elif what >= 15:
                found.append(BINARY[what - 15](a * 1.0, b * 1.0))
            elif what < len(UNARY):
                found.append(np.clip(UNARY[what](a * 1.0), -3, 3) * 1.0)
            else:
                found.append(a.reshape(-1)[::-1].reshape(a.shape) * 1.0)
        return [found[-1 - i % len(found)] for i in sorted(wanted)]

    fused = pm.fuse(f)
    agrees(fused, *(x.astype(np.float32) for x in arrays), rtol=2e-3, atol=2e-3)


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
