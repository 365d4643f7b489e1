"""Products of the same rows are one: with what follows each of them, and with the reasons where they are not."""

import numpy as np
import pytest

import portmm as pm
from portmm.arrays.pages import adjoining
from portmm.ops.prepack import join, unpack
from portmm.spec import elementwise as v

pytestmark = pytest.mark.calls

QUICKLY = True

rng = np.random.default_rng(11)
WIDTH = 192  # columns of all panels are its divisors


def some(*shape):
    return (rng.random(shape) - 0.5).astype(np.float32)


def dense(x, w, b=0.0):
    return x.astype(np.float64) @ w.astype(np.float64) + b


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def products(explained):
    return [k for k in explained.kernels if k.kind == "product"]


@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24)])
def test_queries_keys_and_values_with_biases_are_one_product(shape):
    plain, biases = [some(24, WIDTH) for _ in range(3)], [some(WIDTH) for _ in range(3)]
    q, k, u = map(pm.pack, plain)

    @pm.fuse
    def qkv(x):
        return x @ q + biases[0], (x @ k + biases[1]).reshape(*x.shape[:-1], 2, -1), x @ u + biases[2]

    for changed in (False, True):
        if changed:
            biases[1][:] = 3.0  # what is captured is read in each call
        x = some(*shape)
        for got, w, b in zip(qkv(x), plain, biases, strict=True):
            close(got.reshape(*shape[:-1], WIDTH), dense(x, w, b))
    told = qkv.explain(x)
    (one,) = products(told)
    assert one.fused == ("add",)
    assert one.problem.n == 3 * WIDTH
    assert "3 products of the same rows" in str(told)


def test_weights_that_adjoin_are_joined_in_place():
    plain = [some(24, WIDTH) for _ in range(3)]
    with adjoining():
        packed = [pm.pack(w) for w in plain]
    apart = pm.pack(plain[0])
    for chosen, shared in (((0, 1, 2), True), ((1, 0), False), ((0, 2), False)):
        weights = tuple(packed[i] for i in chosen)
        one = join(weights)
        assert np.shares_memory(one.owner, weights[0].owner) == shared
        assert not one.owner.flags.writeable
        close(unpack(one), np.concatenate([plain[i] for i in chosen], 1))
    assert not np.shares_memory(join((apart, packed[1])).owner, packed[1].owner)


def test_functions_of_biases_and_numbers_follow_the_joined_product():
    plain = [some(24, WIDTH) for _ in range(2)]
    a, b = map(pm.pack, plain)
    shifts, rows, factor = [some(1, WIDTH) for _ in range(2)], some(7, 1), np.float32(0.5)

    @pm.fuse
    def both(x):
        return [v.gelu((x @ w + s) * factor + rows) for w, s in zip((a, b), shifts, strict=True)]

    x = some(7, 24)
    for got, w, s in zip(both(x), plain, shifts, strict=True):
        close(got, v.gelu(dense(x, w, s) * 0.5 + rows))
    assert len(products(both.explain(x))) == 1


def test_a_gated_layer_is_two_products_and_nothing_is_computed_twice():
    plain = [some(24, WIDTH) for _ in range(2)]
    last = some(WIDTH, 24)
    gate, up, down = map(pm.pack, [*plain, last])

    @pm.fuse
    def gated(x):
        return (v.silu(x @ gate) * (x @ up)) @ down

    x = some(6, 24)
    close(gated(x), dense(v.silu(dense(x, plain[0])) * dense(x, plain[1]), last))
    told = gated.explain(x)
    assert [k.kind for k in told.kernels] == ["product"] * 3
    assert sorted(x for k in told.kernels for x in k.fused) == ["mul", "silu"]


def test_reasons_why_products_are_not_joined():
    a, b = pm.pack(some(24, WIDTH)), pm.pack(some(24, WIDTH))
    matrix, other = some(5, WIDTH), some(24, WIDTH)
    x = some(5, 24)
    for function, why in (
        (lambda x: (x @ a, x @ other), "its weight may change; pack it"),
        (lambda x: (x @ a + matrix, x @ b + matrix), "its epilogue reads a matrix"),
        (lambda x: (x @ a + 1.0, x @ b * 2.0), "no other has the same epilogue"),
        (lambda x: ((y := x @ a), y + 1.0, (z := x @ b), z + 1.0), "several of its results are read"),
    ):
        fused = pm.fuse(function)
        for got, want in zip(fused(x), function(x), strict=True):
            close(got, want)
        assert why in str(fused.explain(x))
        assert len(products(fused.explain(x))) == 2
