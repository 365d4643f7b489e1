"""A softmax between two products of a fused function becomes one kernel, which gives what the function does."""

import numpy as np
import pytest

import portmm as pm

QUICKLY = "fast"

QUERIES, KEYS = 600, 601
RNG = np.random.default_rng(1)
BIAS = RNG.standard_normal((QUERIES, KEYS)).astype(np.float32)
SEEN = RNG.random((QUERIES, KEYS)) > 0.2


def heads(*lead):
    rng = np.random.default_rng(0)
    shapes = (QUERIES, 24), (KEYS, 24), (KEYS, 20)
    return tuple(rng.standard_normal((*lead, *x)).astype(np.float32) for x in shapes)


def divides_after(q, k, v):
    s = q @ k.swapaxes(-1, -2) * np.float32(0.2)
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e @ v) / e.sum(-1, keepdims=True)


def divides_before(q, k, v):
    return pm.softmax(np.tanh(q @ k.swapaxes(-1, -2) * np.float32(0.2))) @ v


def with_arrays(q, k, v):
    s = np.where(SEEN, np.float32(0.2) * (q @ k.swapaxes(-1, -2)) + BIAS, np.float32(-1e9))
    e = np.exp(s - s.max(-1, keepdims=True))
    return np.maximum(e / e.sum(-1, keepdims=True) @ v, 0) + 1


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("function", [divides_after, divides_before, with_arrays])
def test_a_softmax_between_products_is_attention(function, lead):
    x = heads(*lead)
    fused = pm.fuse(function)
    kinds = [k.kind for k in fused.explain(*x).kernels]
    assert kinds[0] == "attention"
    assert len(kinds) == 1 + (function is with_arrays)
    for seed in (1, 2):
        x = tuple(np.roll(y, seed, axis=-2) for y in x)
        np.testing.assert_allclose(fused(*x), function(*x), rtol=2e-4, atol=2e-5)


def test_a_number_of_a_score_may_change():
    @pm.fuse
    def scaled(q, k, v, scale):
        return pm.softmax(q @ k.swapaxes(-1, -2) * scale) @ v

    x = heads(3)
    for scale in (0.1, 0.3):
        np.testing.assert_allclose(scaled(*x, scale), scaled.__wrapped__(*x, scale), rtol=2e-4, atol=2e-5)
    assert len(scaled.explain(*x, 0.1).kernels) == 1


def test_what_needs_all_scores_keeps_them():
    @pm.fuse
    def weights_too(q, k, v):
        p = pm.softmax(q @ k.swapaxes(-1, -2))
        return p @ v, p

    @pm.fuse
    def not_a_softmax(q, k, v):
        s = q @ k.swapaxes(-1, -2)
        return np.exp(s - s.max(-1, keepdims=True)) @ v

    x = heads(3)
    for function in (weights_too, not_a_softmax):
        told = function.explain(*x)
        assert "attention" not in [k.kind for k in told.kernels]
        for got, want in zip(function(*x), function.__wrapped__(*x), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
    assert "read elsewhere" in str(weights_too.explain(*x))


def test_attention_and_linear_are_called_inside():
    w8, s = np.random.default_rng(0).integers(-127, 128, (20, 40)).astype(np.int8), np.float32(0.01)

    @pm.fuse
    def block(q, k, v):
        return pm.gelu(pm.linear(pm.attention(q, k, v, causal=True) + 1, w8, w_scale=s))

    x = heads(3)
    told = block.explain(*x)
    assert [k.kind for k in told.kernels] == ["attention", "rows", "linear", "rows"]
    np.testing.assert_allclose(block(*x), block.__wrapped__(*x), rtol=2e-4, atol=2e-5)


def test_groups_are_multiplied_inside():
    a, b = (np.random.default_rng(0).random(x, np.float32) for x in ((8, 4), (2, 4, 5)))
    experts = pm.fuse(lambda x: pm.relu(pm.grouped_matmul(x, b, [3, 8]) - 1))
    assert [k.kind for k in experts.explain(a).kernels] == ["grouped_matmul", "rows"]
    np.testing.assert_allclose(experts(a), experts.__wrapped__(a), rtol=2e-4, atol=2e-5)


def without_a_maximum(q, k, v):
    e = np.exp(q @ k.swapaxes(-1, -2) * np.float32(0.1))
    return e / e.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("function", [without_a_maximum, divides_before])
@pytest.mark.parametrize(
    ("queries", "keys"), [((), ()), ((3,), ()), ((4,), (1,)), ((2, 3), (2, 1)), ((2, 2, 3), (2, 2, 1))], ids=str
)
def test_keys_and_values_may_be_shared_by_heads(function, queries, keys):
    x = heads(*queries)[0], *heads(*keys)[1:]
    fused = pm.fuse(function)
    assert [k.kind for k in fused.explain(*x).kernels] == ["attention"]
    np.testing.assert_allclose(fused(*x), function(*x), rtol=2e-4, atol=2e-5)


def test_keys_that_are_shared_by_items_are_not():
    x = heads(2, 3)[0], *heads(1, 3)[1:]
    fused = pm.fuse(divides_before)
    told = fused.explain(*x)
    assert "attention" not in [k.kind for k in told.kernels]
    assert "broadcast otherwise than over heads" in str(told)
    np.testing.assert_allclose(fused(*x), divides_before(*x), rtol=2e-4, atol=2e-5)


def test_a_scale_of_a_narrow_type():
    """A scalar of bfloat16 is a number of the scores, whose traced expressions know no such type."""
    scalar = pytest.importorskip("ml_dtypes").bfloat16(0.25)
    q, k, v = (x.astype(type(scalar)) for x in heads(3))

    def attend(q, k, v):
        s = (q @ k.swapaxes(-1, -2)) * scalar
        e = np.exp(s - s.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)) @ v

    fused = pm.fuse(attend)
    got, want = fused(q, k, v), attend(*(x.astype(np.float32) for x in (q, k, v)))
    assert [x.kind for x in fused.explain(q, k, v).kernels] == ["attention"]
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("first", ["xxx", "xax", "views"])
def test_arguments_that_overlap_in_the_first_call_need_not_in_the_next(first):
    """Operands of the recorded launch are told apart by their places in the function, not by their addresses."""
    rng = np.random.default_rng(0)
    x, a, b, c = (rng.standard_normal((96, 64)).astype(np.float32) for _ in range(4))
    joined = rng.standard_normal((96, 192)).astype(np.float32)
    views = tuple(joined[:, i : i + 64] for i in (0, 64, 128))
    fused = pm.fuse(divides_before)
    for q, k, v in ({"xxx": (x, x, x), "xax": (x, a, x), "views": views}[first], (a, b, c), (x, x, x), views):
        np.testing.assert_allclose(fused(q, k, v), divides_before(q, k, v), rtol=2e-4, atol=2e-5)
