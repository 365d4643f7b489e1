"""The namespace of the array API: products by portmm where the standard has the same, and else NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import portmm.array_api as xp
from portmm.array_api import products

QUICKLY = True
RNG = np.random.default_rng(2)
pytestmark = pytest.mark.skipif(not hasattr(np, "__array_api_version__"), reason="NumPy's namespace is that of NumPy 1")


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions of portmm that were called."""
    seen = []
    for name in ("product", "einsum"):
        own = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *x, own=own, name=name: seen.append(name) or own(*x))
    return seen


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_floats_are_portmms(calls, dtype):
    a, b = RNG.random((3, 5, 7)).astype(dtype), RNG.random((7, 4)).astype(dtype)
    np.testing.assert_allclose(xp.matmul(a, b), a @ b, rtol=1e-5)
    np.testing.assert_allclose(xp.linalg.matmul(a, b), a @ b, rtol=1e-5)
    assert calls == ["product"] * 2
    assert xp.matmul(a, b).dtype == dtype


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((5, 3), 1), ((2,), 0), ((6, 5, 2), 2), ((5, 6, 3), ([2, 1], [0, 1])), ((3, 4), ([0], [-1])), ((4, 6, 5), 3)],
    ids=str,
)
def test_tensordot_sums_over_axes(calls, shape, axes):
    a, b = RNG.random((4, 6, 5)), RNG.random(shape)
    np.testing.assert_allclose(xp.tensordot(a, b, axes=axes), np.tensordot(a, b, axes=axes), rtol=1e-12)
    assert calls == ["einsum"]


def test_axes_that_differ_are_refused():
    with pytest.raises(ValueError, match="extents"):
        xp.tensordot(np.ones((2, 3)), np.ones((1, 3)), axes=1)


def test_types_that_differ_from_the_standard_are_numpys(calls):
    codes = RNG.integers(-3, 3, (4, 4), np.int8)
    assert xp.matmul(codes, codes).dtype == np.int8
    assert xp.matmul(np.ones((2, 2), np.float32), np.ones((2, 2))).dtype == np.float64
    assert xp.tensordot(codes, codes).dtype == np.int8
    assert calls == []


def test_everything_else_is_numpys():
    assert xp.float32 is np.float32
    assert xp.linalg.svd is np.linalg.svd
    assert xp.__array_api_version__ == np.__array_api_version__
    assert {"matmul", "concat", "linalg"} <= set(dir(xp))
    with pytest.raises(AttributeError):
        _ = xp.no_such_function


def layer(x, w, xp):
    """A function for any library of the standard."""
    y = xp.matmul(x, w)
    return y / xp.sum(xp.abs(y), axis=-1, keepdims=True)


def test_a_function_of_a_namespace(calls):
    x, w = RNG.random((4, 8), np.float32), RNG.random((8, 6), np.float32)
    np.testing.assert_allclose(layer(x, w, xp), layer(x, w, np), rtol=1e-5)
    assert calls == ["product"]
