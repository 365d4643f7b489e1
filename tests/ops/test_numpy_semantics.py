"""`matmul` treats dtype=, out=, subclasses and scalars as NumPy does."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import portmm as pm

QUICKLY = True


class Plain(np.ndarray):
    """A class that adds nothing."""


class First(np.ndarray):
    """One that stands above others."""

    __array_priority__ = 5.0


class Own(np.ndarray):
    """One with arithmetic of its own."""

    def __array_ufunc__(self, *_, **__):
        return NotImplemented


def operands(*shapes, dtype=np.float32):
    rng = np.random.default_rng(7)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return [rng.integers(info.min, info.max, s, dtype, endpoint=True) for s in shapes]
    return [(rng.random(s) + 0.5).astype(dtype) for s in shapes]


# -- dtype= ---------------------------------------------------------------------------


def worst(got, want):
    return float(np.abs(got / want - 1).max())


@pytest.mark.parametrize("held", ["f4", "f2"])
@pytest.mark.parametrize("how", ["arrays", "packed", "out", "batch", "vector", "grouped", "fuse"])
def test_a_wider_dtype_sums_in_it(held, how):
    a, b = operands((3, 3000), (3000, 5), dtype=held)
    want = a.astype(float) @ b.astype(float)
    if how == "packed":
        got = pm.matmul(a, pm.pack(b), dtype=np.float64)
    elif how == "out":
        got = np.empty((3, 5))
        assert pm.matmul(a, b, got, dtype=np.float64) is got
    elif how == "batch":
        got = pm.matmul(np.stack([a, a]), b, dtype=np.float64)[1]
    elif how == "vector":
        got, want = pm.matmul(a[0], b, dtype=np.float64), want[0]
    elif how == "grouped":
        got = pm.grouped_matmul(a, np.stack([b, b]), np.array([1, 3]), dtype=np.float64)
    elif how == "fuse":
        got = pm.fuse(lambda a, b: pm.matmul(a, b, dtype=np.float64) * 1.0)(a, b)
    else:
        got = pm.matmul(a, b, dtype=np.float64)
    assert got.dtype == np.float64
    assert worst(got, want) < 1e-12


def test_dtype_decides_the_sums_and_out_what_becomes_of_them():
    a, b = operands((3, 3000), (3000, 5))
    out, narrow = np.empty((3, 5)), np.empty((3, 5), np.float32)
    assert worst(pm.matmul(a, b, out), a.astype(float) @ b) > 1e-9  # as in NumPy, out= alone widens no sums
    assert worst(pm.matmul(a, b, dtype=complex).real, a.astype(float) @ b) < 1e-12
    assert worst(pm.matmul(a, b, dtype=np.longdouble), a.astype(np.longdouble) @ b.astype(np.longdouble)) < 1e-15
    pm.matmul(a, b, narrow, dtype=np.float64)
    assert (narrow == (a.astype(float) @ b).astype(np.float32)).all()
    with pytest.raises(TypeError, match="dtype is int32, which cannot hold float32"):
        pm.matmul(a, b, dtype=np.int32)
    with pytest.raises(TypeError, match="out has dtype int32, which cannot hold float64"):
        pm.matmul(a, b, np.empty((3, 5), np.int32), dtype=np.float64)


@pytest.mark.parametrize("left", [np.int8, np.uint8])
@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float32])
def test_long_sums_of_integers_do_not_wrap_around_in_a_type_that_holds_them(left, dtype):
    k = {np.int8: 2**17, np.uint8: 65794}[left]  # one more than surely fits
    a, b = np.full((1, k), np.iinfo(left).min or 255, left), np.full((k, 2), -128, np.int8)
    want = a.astype(np.int64) @ b.astype(np.int64)
    assert abs(want[0, 0]) >= 2**31
    for right in (b, pm.pack(b, activations=left)):
        got = pm.matmul(a, right, dtype=dtype)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert (pm.matmul(a, b) == want.astype(np.int32)).all()


def test_a_wider_dtype_beside_four_bits():
    a, w = operands((3, 512), (512, 8))
    q = pm.quantize(w, group=64)
    want = a.astype(float) @ pm.dequantize(q, np.float32).astype(float)
    for b in (q, pm.pack(q)):
        assert worst(pm.matmul(a, b, dtype=np.float64), want) < 1e-12


def test_what_is_too_large_becomes_infinite_without_a_warning(recwarn):
    a, b = operands((3, 4), (4, 5), dtype=np.float64)
    assert np.isinf(pm.matmul(a * 1e5, b, dtype=np.float16)).all()
    assert not recwarn.list


# -- out= -----------------------------------------------------------------------------


SHAPES = (
    ((3, 4), (4, 5), (2, 3, 5)), ((3, 4), (4, 5), (7, 2, 3, 5)), ((3, 4), (4, 5), (1, 3, 5)),
    ((3, 4), (4, 5), (0, 3, 5)),
    ((1, 3, 4), (4, 5), (2, 3, 5)), ((1, 3, 4), (4, 5), (3, 5)), ((2, 1, 3, 4), (4, 5), (2, 6, 3, 5)),
    ((2, 1, 3, 4), (6, 4, 5), (4, 2, 6, 3, 5)), ((4,), (4, 5), (2, 5)), ((3, 4), (4,), (6, 3)), ((4,), (4,), (2, 3)),
    ((1, 3, 4), (1, 4, 5), (3, 5)), ((1, 2, 3, 4), (4, 5), (2, 3, 5)),
)  # fmt: skip
WRONG = (
    ((3, 4), (4, 5), (3, 6)), ((2, 3, 4), (4, 5), (3, 5)), ((2, 3, 4), (4, 5), (1, 3, 5)), ((3, 4), (4, 1), (3, 5)),
    ((2, 3, 4), (4, 5), (3, 3, 5)), ((4,), (4, 5), ()), ((2, 3, 4), (4, 5), (4, 1, 3, 5)), ((3, 4), (4, 5), (15,)),
)  # fmt: skip


@pytest.mark.parametrize(("a", "b", "to"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [None, np.float64])
def test_operands_broadcast_with_out(a, b, to, dtype):
    a, b = operands(a, b)
    out, want = np.zeros(to, np.float32), np.zeros(to, np.float32)
    for _ in range(2):  # and once more, remembered
        assert pm.matmul(a, b, out, dtype=dtype) is out
    np.testing.assert_allclose(out, np.matmul(a, b, want), rtol=1e-5)
    if b.ndim > 1:
        np.testing.assert_allclose(pm.matmul(a, pm.pack(b), np.zeros_like(out)), want, rtol=1e-5)


@pytest.mark.parametrize(("a", "b", "to"), WRONG, ids=str)
@pytest.mark.parametrize("dtype", [None, np.float64])
def test_out_that_is_no_place_for_the_product(a, b, to, dtype):
    a, b = operands(a, b)
    with pytest.raises(ValueError, match=r"operand|output"):
        np.matmul(a, b, np.zeros(to, np.float32))
    with pytest.raises(ValueError, match="out has shape"):
        pm.matmul(a, b, np.zeros(to, np.float32), dtype=dtype)


@pytest.mark.parametrize(
    "way", [{}, {"dtype": np.float32}, {"epilogue": lambda acc: acc}], ids=["", "dtype", "epilogue"]
)
def test_out_as_a_tuple(way):
    a, b = operands((3, 4), (4, 5))
    out = np.zeros((3, 5), np.float32)
    assert pm.matmul(a, b, (out,), **way) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-5)
    np.testing.assert_allclose(pm.matmul(a, b, (None,), **way), a @ b, rtol=1e-5)
    with pytest.raises(ValueError, match="out is a tuple of 2"):
        pm.matmul(a, b, (out, out), **way)


# -- subclasses -----------------------------------------------------------------------


def of_classes(x, folder):
    mapped = np.memmap(folder / f"{x.shape}", x.dtype, "w+", shape=x.shape)
    mapped[:] = x
    yield mapped
    yield x.view(np.matrix)
    yield np.rec.array(x)
    yield x.view(Plain)
    yield x.view(First)
    yield x


def test_a_product_has_the_class_that_numpy_gives_it(tmp_path):
    x, y = operands((3, 4), (4, 5))
    for a in of_classes(x, tmp_path):
        for b in of_classes(y, tmp_path):
            want = np.matmul(a, b)
            for way in ({}, {"dtype": np.float64}, {"epilogue": lambda acc: acc}, {"prologue_a": lambda a: a * 1}):
                got = pm.matmul(a, b, **way)
                assert type(got) is type(want), (type(a), type(b), way)
                np.testing.assert_allclose(got, want, rtol=1e-5)
        packed = pm.matmul(a, pm.pack(y))
        assert type(packed) is type(np.matmul(a, y))


def test_a_matrix_times_a_vector_is_a_matrix():
    x, y = operands((3, 4), (4,))
    got = pm.matmul(x.view(np.matrix), y)
    assert type(got) is np.matrix
    assert got.shape == np.matmul(x.view(np.matrix), y).shape == (1, 3)
    assert type(pm.matmul(x[0].view(Plain), y)) is type(np.matmul(x[0].view(Plain), y))


def test_an_out_of_another_class_is_returned_as_it_is():
    x, y = operands((3, 4), (4, 5))
    out = np.zeros((3, 5), np.float32).view(Plain)
    assert pm.matmul(x, y, out) is out
    np.testing.assert_allclose(out, x @ y, rtol=1e-5)


def test_masked_arrays_and_classes_with_arithmetic_are_refused():
    x, y = operands((4, 4), (4, 4))
    masked, own, matrix = np.ma.masked_array(x, x > 1), x.view(Own), x.view(np.matrix)
    calls = {
        "a": lambda v: pm.matmul(v, y), "b": lambda v: pm.matmul(y, v), "out": lambda v: pm.matmul(x, y, v),
        "dtype": lambda v: pm.matmul(v, y, dtype=np.float64), "pack": pm.pack, "plan": lambda v: pm.plan(v, y),
        "epilogue": lambda v: pm.matmul(v, y, epilogue=lambda acc: acc),
        "prologue": lambda v: pm.matmul(v, y, prologue_a=lambda a: a * 2),
        "captured": lambda v: pm.matmul(x, y, epilogue=lambda acc: acc + v),
        "linear": lambda v: pm.linear(v, y), "weight": lambda v: pm.linear(x.astype(np.int8), v.astype(np.int8)),
        "bias": lambda v: pm.linear(x.astype(np.int8), y.astype(np.int8), v[0]), "quantize": pm.quantize,
        "grouped": lambda v: pm.grouped_matmul(v, y[None], np.array([4])), "fuse": pm.fuse(lambda v: v @ y),
        "fuse, captured": lambda v: pm.fuse(lambda x: x @ v)(x),
        "attention": lambda v: pm.attention(v[None], v[None], v[None]),
    }  # fmt: skip
    for name, call in calls.items():
        for v, said in ((masked, "masked array"), (own, "arithmetic of its own")):
            with pytest.raises(TypeError, match=said):
                call(v)
        if name in ("plan", "linear", "grouped", "fuse", "fuse, captured", "captured"):
            with pytest.raises(TypeError, match=r"np\.matrix"):
                call(matrix)


def test_a_class_is_refused_where_a_plain_array_came_before():
    x, y = operands((4, 4), (4, 4))
    held = [x]
    fused, captured = pm.fuse(lambda v: v @ y), pm.fuse(lambda v: v @ held[0])
    fused(x), captured(x)
    held[0] = x.view(np.matrix)
    for call in (lambda: fused(np.ma.masked_array(x)), lambda: fused(x.view(np.matrix)), lambda: captured(y)):
        with pytest.raises(TypeError, match=r"masked|np\.matrix"):
            call()


# -- packed weights as arrays -----------------------------------------------------------


def test_packed_weights_say_what_arrays_say():
    for dtype in (np.float32, np.float64, np.float16, np.int8):
        (w,) = operands((2, 6, 5), dtype=dtype)
        p = pm.pack(w)
        assert isinstance(p.dtype, np.dtype)
        assert (p.shape, p.ndim, p.dtype, p.size) == (w.shape, w.ndim, w.dtype, w.size)
        assert p.nbytes >= w.nbytes
        again = pickle.loads(pickle.dumps(p))  # noqa: S301 - made here
        assert (again.dtype, again.size, again.element) == (p.dtype, p.size, p.element)
        assert (np.asarray(p) == w).all()
    q = pm.quantize(operands((64, 8))[0], group=32)
    for x in (q, pm.pack(q)):
        assert (x.shape, x.ndim, x.dtype, x.size) == ((64, 8), 2, np.dtype(np.float32), 512)
        assert x.nbytes > 0
    assert pm.dequantize(q).dtype == q.dtype


def test_packed_bfloat16_has_numpys_type():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert pm.pack(np.ones((4, 4), ml_dtypes.bfloat16)).dtype == np.dtype(ml_dtypes.bfloat16)
