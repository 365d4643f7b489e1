"""Operations of fused functions: views, reductions, types, broadcasting, and random graphs of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuse import agrees, kinds, some

import portmm as pm
from portmm.spec import elementwise as v

pytestmark = pytest.mark.calls

QUICKLY = True


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


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_repeated_elements_are_copied_by_a_kernel(axis):
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)

    @pm.fuse
    def f(x):
        return np.repeat(2 * x, 3, axis) + x.repeat(3, axis=axis)

    np.testing.assert_array_equal(f(x), np.repeat(3 * x, 3, axis))
    assert "NumPy" not in str(f.explain(x))


def test_repetitions_without_an_axis_or_of_different_numbers_are_numpys():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    each = pm.fuse(lambda x: np.repeat(x + 1, 2)), pm.fuse(lambda x: np.repeat(x + 1, [1, 0, 2], 1))
    for f, want in zip(each, (np.repeat(x + 1, 2), np.repeat(x + 1, [1, 0, 2], 1)), strict=True):
        np.testing.assert_array_equal(f(x), want)
        assert "np.repeat: NumPy computes it" in str(f.explain(x))


def test_repetitions_that_numpy_refuses_or_takes_for_others():
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(pm.fuse(lambda x: np.repeat(x * 2, True, 0))(x), x * 2)
    np.testing.assert_array_equal(pm.fuse(lambda x: np.repeat(x * 2, 3, 0))(x[:0]), x[:0])
    np.testing.assert_array_equal(pm.fuse(lambda x: np.repeat(x * 2, 3, 0))(np.array(2, np.float32)), [4, 4, 4])
    for axis, repeats in ((1, 2), (-2, 2), (0, -1)):
        with pytest.raises(ValueError, match=r"axis|negative"):
            pm.fuse(lambda x, r=repeats, y=axis: np.repeat(x + 1, r, y))(x)
