"""`matmul` and `plan` against NumPy: shapes, strides, dtypes, batches, outputs, errors."""

from __future__ import annotations

import numpy as np
import pytest
from arrays_of import INPUTS, LAYOUTS, close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import HERE

import portmm as pm

pytestmark = pytest.mark.calls

QUICKLY = True

EXTENTS = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 8, 13, 16, 17, 33, 64, 100])
# Compiling takes longer than hypothesis expects of an example, and nothing here is timed.
fuzz = settings(
    derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=list(HealthCheck)
)


def values(shape, dtype, seed, special=False):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(dtype)
    if special and x.size:
        flat = x.reshape(-1)
        flat[rng.integers(x.size, size=1 + x.size // 40)] = rng.choice([np.nan, np.inf, -np.inf, 0.0])
    return x


@st.composite
def products(draw):
    """Two operands in some layouts, and what they look like."""
    m, n, k = draw(EXTENTS), draw(EXTENTS), draw(EXTENTS)
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    batch = draw(st.sampled_from([(), (), (), (1,), (3,), (2, 3), (17,)]))
    kept = [draw(st.sampled_from(range(len(batch) + 1))) for _ in range(2)]
    ones = [draw(st.booleans()) for _ in range(2)]
    shapes = []
    for keep, one, core in zip(kept, ones, ((m, k), (k, n)), strict=True):
        own = batch[len(batch) - keep :]
        shapes.append(((1, *own[1:]) if one and own else own) + core)
    vector = draw(st.sampled_from(["", "", "", "a", "b", "ab"]))
    shapes = [(k,) if name in vector else s for name, s in zip("ab", shapes, strict=True)]
    seed, special = draw(st.integers(0, 99)), draw(st.integers(0, 4)) == 0
    how = draw(st.sampled_from(list(INPUTS))), draw(st.sampled_from(list(INPUTS)))
    a, b = (INPUTS[h](values(s, dtype, seed + i, special)) for i, (h, s) in enumerate(zip(how, shapes, strict=True)))
    return a, b, how


@pytest.mark.thin(4)
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_product(target, deterministic):
    @fuzz
    @given(products(), st.sampled_from([None, *LAYOUTS]))
    def check(product, place):
        a, b, how = product
        shape = np.matmul(np.zeros(a.shape, bool), np.zeros(b.shape, bool)).shape
        dtype = np.result_type(a, b).newbyteorder("=")
        what = f"{a.shape} {how[0]} @ {b.shape} {how[1]} {dtype} -> {place}"
        before = a.copy(), b.copy()
        if place is None:
            got = pm.matmul(a, b)
        else:
            out = LAYOUTS[place](np.full(shape or (1,), np.nan, dtype)).reshape(shape)
            got = pm.matmul(a, b, out)
            assert got is out, what
        assert got.dtype == dtype, what
        close(np.asarray(got), a, b, what)
        np.testing.assert_array_equal(a, before[0])
        np.testing.assert_array_equal(b, before[1])

    with pm.config(target=target, deterministic=deterministic):
        check()


@fuzz
@given(products(), st.sampled_from([None, *LAYOUTS]))
def test_any_product_by_default(product, place):
    """Without a `config` block calls go from C to C, by way of the memo."""
    a, b, how = product
    for _ in range(2):
        if place is None:
            got = pm.matmul(a, b)
        else:
            shape = np.matmul(np.zeros(a.shape, bool), np.zeros(b.shape, bool)).shape
            out = LAYOUTS[place](np.full(shape or (1,), np.nan, np.result_type(a, b).newbyteorder("="))).reshape(shape)
            got = pm.matmul(a, b, out)
        close(np.asarray(got), a, b, how)


@fuzz
@given(products(), st.sampled_from([None, "C", "F", "C padded", "before a guard"]))
def test_any_plan(product, place):
    """A plan computes what matmul does, or says why it cannot be made."""
    a, b, how = product
    if a.ndim == 1 or b.ndim == 1 or not {"misaligned", "other byte order"}.isdisjoint(how):
        return  # refused, or not, in test_run_plan.py
    shape = np.matmul(np.zeros(a.shape, bool), np.zeros(b.shape, bool)).shape
    out = None if place is None else LAYOUTS[place](np.full(shape, np.nan, a.dtype))
    if 0 in (*a.shape, *b.shape):
        with pytest.raises(ValueError, match="is empty"):
            pm.plan(a, b, out)
        return
    call = pm.plan(a, b, out)
    for _ in range(2):
        got = call(a, b, out) if out is not None else call(a, b)
        close(got, a, b, how)


# -- outputs ----------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 5, 30, 63])
@pytest.mark.parametrize("over", ["a", "b"])
def test_out_may_overlap_an_input(start, over):
    for order in "CF":
        memory = values(200, np.float32, 1)
        x = memory[:64].reshape(8, 8)
        y = values((8, 8), np.float32, 2)
        out = memory[start : start + 64].reshape(8, 8, order=order)
        a, b = (x, y) if over == "a" else (y, x)
        kept = a.copy(), b.copy()
        assert pm.matmul(a, b, out) is out
        close(out, *kept)


def test_out_may_be_an_input():
    x = values((9, 9), np.float32, 3)
    kept = x.copy()
    close(pm.matmul(x, x, x), kept, kept)
    y = values((9, 9), np.float32, 4)
    kept = y.copy()
    close(pm.matmul(y.T, y, y.T), kept.T, kept)


@pytest.mark.parametrize("kind", [np.float64, ">f4", np.complex64])
def test_out_of_another_type_is_converted_to(kind):
    a, b = values((5, 6), np.float32, 1), values((6, 7), np.float32, 2)
    out = np.empty((5, 7), kind)
    assert pm.matmul(a, b, out=out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)


def test_nothing_is_written_beside_out():
    for dtype in (np.float32, np.float64):
        for m, n, k in [(5, 7, 3), (33, 17, 40), (1, 65, 9)]:
            wide = np.full((m + 2, 3 * n + 5), 7, dtype)
            a, b = values((m, k), dtype, 1), values((k, n), dtype, 2)
            for out in (wide[1:-1, 2 : 2 + n], wide[1:-1, 2 : 2 + 3 * n : 3], wide[m:0:-1, 2 : 2 + n]):
                wide[...] = 7
                pm.matmul(a, b, out)
                close(out, a, b)
                out[...] = 7
                assert (wide == 7).all()


def test_a_sum_over_nothing_is_zero():
    for dtype in (np.float32, np.float64):
        out = np.full((3, 4), np.nan, dtype)
        a, b = np.empty((3, 0), dtype), np.empty((0, 4), dtype)
        assert (pm.matmul(a, b) == np.zeros((3, 4))).all()
        assert (pm.matmul(a, b, out) == 0).all()
        assert (pm.matmul(np.empty((2, 3, 0), dtype), b) == np.zeros((2, 3, 4))).all()
        assert pm.matmul(np.empty(0, dtype), np.empty(0, dtype)) == 0
        assert pm.matmul(np.empty((0, 3), dtype), np.empty((3, 4), dtype)).shape == (0, 4)


# -- inputs -----------------------------------------------------------------------


def test_lists_and_mixed_types():
    got = pm.matmul([[1.0, 2.0], [3.0, 4.0]], [[1.0], [1.0]])
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [[3.0], [7.0]])
    mixed = pm.matmul(values((3, 4), np.float32, 1), values((4, 5), np.float64, 2))
    assert mixed.dtype == np.float64
    assert isinstance(pm.matmul([1.0, 2.0], [3.0, 4.0]), np.floating)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4), (5, 6)),
        ((3,), (4,)),
        ((2, 3, 4), (3, 4, 5)),
        ((3, 4), (3,)),
        ((), (3, 3)),
        ((3, 3), ()),
        ((0,), (1, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shapes_are_refused_as_numpy_refuses_them(a, b, dtype):
    x, y = np.zeros(a, dtype), np.zeros(b, dtype)
    with pytest.raises(ValueError, match=r"."):
        np.matmul(x, y)
    with pytest.raises(ValueError, match=r"."):
        pm.matmul(x, y)


@pytest.mark.parametrize("kind", [int, complex, bool, object, np.int16, "U3"])
def test_other_types_are_named_and_refused(kind):
    x, good = np.zeros((2, 2), kind), np.zeros((2, 2), np.float32)
    for a, b in ((x, good), (good, x)):
        with pytest.raises(TypeError, match="float32, float64, bfloat16, float16, int8, uint8"):
            pm.matmul(a, b)


def test_wrong_outputs_are_refused_as_numpy_refuses_them():
    a, b = values((3, 4), np.float32, 1), values((4, 5), np.float32, 2)
    frozen = np.zeros((3, 5), np.float32)
    frozen.flags.writeable = False
    for out, error in [
        (np.zeros((3, 4), np.float32), ValueError),
        (np.zeros((2, 3, 5), np.float32)[0, 0], ValueError),
        (frozen, ValueError),
        ([[0.0] * 5] * 3, TypeError),
        (np.zeros((3, 5), np.int32), TypeError),
    ]:
        with pytest.raises(error):
            np.matmul(a, b, out=out)
        with pytest.raises(error):
            pm.matmul(a, b, out)


def test_arguments_are_checked():
    with pytest.raises(TypeError):
        pm.matmul()
    with pytest.raises(TypeError):
        pm.matmul(np.zeros((2, 2)), np.zeros((2, 2)), None, None)
