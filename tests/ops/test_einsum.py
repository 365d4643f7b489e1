"""Einsums against NumPy's: notation, views without copies, types, out."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import portmm as pm
from portmm.ops import einsum as module

QUICKLY = True

BF16 = np.dtype(ml_dtypes.bfloat16)
EXTENTS = (1, 2, 3, 5)
TYPES = ((np.float32,), (np.float32,), (np.int8,), (np.float64, np.float32), (np.int64, np.float32), (np.complex64,))


def values(shape, dtype=np.float32, seed=0):
    """Small integers: their sums are exact in every type."""
    return np.random.default_rng(seed).integers(0 if dtype == np.uint8 else -2, 3, shape).astype(dtype)


def moved(x, draw):
    """The same array by other strides: axes in another order, or elements further apart."""
    if x.ndim and draw.random() < 0.4:
        order = draw.sample(range(x.ndim), x.ndim)
        x = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    if x.ndim and draw.random() < 0.2:
        wide = np.zeros([2 * n + 1 for n in x.shape], x.dtype)
        view = wide[tuple(slice(0, 2 * n, 2) for n in x.shape)]
        view[...] = x
        return view
    return x


def drawn(seed, types):
    """Subscripts and operands that a seed draws."""
    draw = random.Random(seed)  # noqa: S311
    extents = {name: draw.choice(EXTENTS) for name in "abXdef"[: draw.randint(1, 6)]}
    if seed % 31 == 0:
        extents["a"] = 0
    dots, terms, operands = draw.random() < 0.25, [], []
    for i in range(draw.randint(1, 4)):
        names = [draw.choice(list(extents)) for _ in range(draw.randint(0, 4))]
        names = list(dict.fromkeys(names)) if draw.random() < 0.7 else names
        shape = [1 if names.count(x) == 1 and draw.random() < 0.1 else extents[x] for x in names]
        if dots and draw.random() < 0.8:
            at, more = draw.randint(0, len(names)), draw.choice([[], [3], [1], [2, 3], [1, 3], [2, 1]])
            names.insert(at, "...")
            shape[at:at] = more
        terms.append("".join(names))
        operands.append(moved(values(shape, types[i % len(types)], seed + i), draw))
    subscripts = ",".join(terms)
    if draw.random() < 0.8:
        every = sorted(set(subscripts) - set(",."))
        output = draw.sample(every, draw.randint(0, len(every)))
        if "..." in subscripts:
            output.insert(draw.randint(0, len(output)), "...")
        subscripts += "->" + "".join(output)
    return subscripts, operands, draw


@pytest.mark.parametrize("seed", range(96))
def test_einsums_are_those_of_numpy(seed):
    types = [
        (np.float32,),
        (np.float32,),
        (np.int8,),
        (np.float64, np.float32),
        (np.int64, np.float32),
        (np.complex64,),
    ]
    types = types[seed % len(types)]
    subscripts, operands, draw = drawn(seed, types)
    exact = [x.astype(complex if x.dtype.kind == "c" else float) for x in operands]
    want = np.einsum(subscripts, *exact)
    if len(operands) == 1 and types == (np.int8,):
        want = np.einsum(subscripts, *operands)
    got = pm.einsum(subscripts, *operands)
    np.testing.assert_array_equal(got, want)
    several = len(operands) > 1
    assert got.dtype == (np.int32 if several and types == (np.int8,) else np.einsum(subscripts, *operands).dtype)
    out = moved(np.full(want.shape, 7, got.dtype), draw)
    assert pm.einsum(subscripts, *operands, out=out) is out
    np.testing.assert_array_equal(out, want)
    how = draw.choice([False, "optimal"])
    np.testing.assert_array_equal(pm.einsum(subscripts, *operands, optimize=how), want)


CALLS = (
    ("ij,jk->ik", (40, 9), (9, 50)),
    ("ij,jk->ki", (40, 9), (9, 50)),
    ("bqhd,bkhd->bhqk", (2, 6, 3, 8), (2, 7, 3, 8)),
    ("bhqk,bkhd->bqhd", (2, 3, 6, 7), (2, 7, 3, 8)),
    ("...td,dhe->...the", (2, 5, 12), (12, 3, 8)),
    ("abcd,dcef->abef", (2, 3, 4, 5), (5, 4, 2, 3)),
    ("i,j->ij", (40,), (50,)),
    ("ij,ij->", (8, 9), (8, 9)),
    ("bij,bj->bi", (3, 8, 9), (3, 9)),
    ("ab,bc,cd->ad", (5, 6), (6, 7), (7, 8)),
)


@pytest.mark.parametrize(("subscripts", "shapes"), [(x[0], x[1:]) for x in CALLS], ids=[x[0] for x in CALLS])
def test_products_are_of_views(subscripts, shapes, monkeypatch):
    multiplied = []

    def spied(a, b, out=None, dtype=None):
        multiplied.append((a, b, out))
        return pm.matmul(a, b, out=out, dtype=dtype)

    monkeypatch.setattr(module, "matmul", spied)
    operands = [values(shape, seed=i) for i, shape in enumerate(shapes)]
    got = pm.einsum(subscripts, *operands)
    np.testing.assert_array_equal(got, np.einsum(subscripts, *operands))
    assert got.flags.c_contiguous
    a, b, out = multiplied[-1]
    assert got.ndim == 0 or np.shares_memory(out, got)
    assert len(multiplied) == len(operands) - 1
    copied = [x for x in (a, b) if not any(np.shares_memory(x, y) for y in operands)]
    # The sums of "abcd,dcef" are in another order in either operand; of three, one is a product.
    assert len(copied) == (subscripts in ("abcd,dcef->abef", "ab,bc,cd->ad"))


def test_rows_apart_are_items_not_copies(monkeypatch):
    seen = []
    monkeypatch.setattr(module, "matmul", lambda a, b, **how: seen.append(a) or pm.matmul(a, b, **how))
    x, w = values((3, 80, 8))[:, :64], values((8, 20))
    np.testing.assert_array_equal(pm.einsum("btd,de->bte", x, w), x @ w)
    assert np.shares_memory(seen[0], x)
    assert seen[0].shape == (3, 64, 8)


def test_lists_of_labels_are_subscripts():
    x, y = values((2, 4, 5)), values((2, 5, 3))
    want = x @ y
    np.testing.assert_array_equal(pm.einsum(x, [Ellipsis, 0, 1], y, [Ellipsis, 1, 2], [Ellipsis, 0, 2]), want)
    np.testing.assert_array_equal(pm.einsum(x, [0, 1, 2], y, [0, 2, 3]), np.einsum(x, [0, 1, 2], y, [0, 2, 3]))
    with pytest.raises(TypeError, match="list of integers"):
        pm.einsum(x, "ij")


def test_the_order_is_a_choice():
    operands = [values(shape, seed=i) for i, shape in enumerate(((4, 30), (30, 2), (2, 50)))]
    for path in (["einsum_path", (0, 1), (0, 1)], [(1, 2), (0, 1)], [(0, 1, 2)], True, False, "greedy"):
        got = pm.einsum("ab,bc,cd->ad", *operands, optimize=path)
        np.testing.assert_array_equal(got, np.linalg.multi_dot(operands))
    for path, message in (([(0, 1)], "leaves 2"), ([(0, 5)], r"\(0, 5\)")):
        with pytest.raises(ValueError, match=message):
            pm.einsum("ab,bc,cd->ad", *operands, optimize=path)


def test_opt_einsum_finds_orders_where_it_is_installed(monkeypatch):
    asked = []

    def contract_path(subscripts, *shapes, optimize, **_):
        asked.append((subscripts, shapes, optimize))
        return [(1, 2), (0, 1)], None

    monkeypatch.setitem(sys.modules, "opt_einsum", SimpleNamespace(contract_path=contract_path))
    operands = [values(shape, seed=i) for i, shape in enumerate(((3, 30), (30, 2), (2, 51)))]
    np.testing.assert_array_equal(pm.einsum("xb,b...,...d->xd...", *operands), np.einsum("xb,bc,cd->xdc", *operands))
    assert [x[1:] for x in asked] == [(((3, 30), (30, 2), (2, 51)), "auto")]


def test_narrow_floats_are_rounded_once_for_each_product():
    x, y = (np.random.default_rng(i).random((20, 30), np.float32).astype(BF16) for i in (0, 1))
    exact = x.astype(np.float32) @ y.astype(np.float32).T
    assert (pm.einsum("ik,jk->ij", x, y) == pm.matmul(x, y.T)).all()
    got = pm.einsum("ik,jk->ij", x, y, dtype=np.float32)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, exact, rtol=1e-5)
    assert pm.einsum("ik,ik->i", x, y).dtype == BF16
    assert pm.einsum("ik,jl->", x, y).dtype == BF16
    assert pm.einsum("ik->", x, dtype=np.float32, out=np.empty((), np.float32)).dtype == np.float32
    np.testing.assert_array_equal(pm.einsum("ik->k", x), x.astype(np.float32).sum(0).astype(BF16))
    assert pm.einsum("ik,jk->ij", x.astype(np.float16), y).dtype == np.float32


def test_integers_of_eight_bits_are_summed_in_int32():
    x, y = np.full((4, 300), 100, np.int8), np.full((300, 5), 100, np.int8)
    for subscripts, want in (("ik,kj->ij", 3e6), ("ik,kj->ji", 3e6), ("ik,kj->j", 1.2e7), ("ik,kj->", 6e7)):
        got = pm.einsum(subscripts, x, y)
        assert got.dtype == np.int32
        assert (got == want).all()
    for a, b in ((x.astype(np.uint8), y), (x, y.astype(np.uint8)), (x.astype(np.uint8), y.astype(np.uint8))):
        assert (pm.einsum("ik,kj->ij", a, b) == 3000000).all()
    assert pm.einsum("ik,kj->ij", x, y, dtype=np.int64).dtype == np.int64


def test_an_operand_may_be_the_place_of_the_result():
    x = values((32, 32))
    want = x.T @ x
    assert pm.einsum("ki,kj->ij", x, x, out=x) is x
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "message"),
    [
        ("ij,jk->ik", ((2, 3), (4, 5)), "'j' .* has 3 elements, and 4 in operand 1"),
        ("ii,ij", ((2, 3), (2, 2)), "axes in operand 0"),
        ("ij,jk", ((2, 3),), "2 operands, and there are 1"),
        ("ij,jk->il", ((2, 3), (3, 4)), "'l' and no operand has it"),
        ("ij,jk->ii", ((2, 3), (3, 4)), "'i' twice"),
        ("i1,jk", ((2, 3), (3, 4)), "'1'"),
        ("...i..,jk", ((2, 3), (3, 4)), "'.'"),
        ("i,jk", ((2, 3), (3, 4)), "of an operand of 2 axes"),
        ("...i,j->ij", ((2, 3), (4,)), "has no '...'"),
    ],
)
def test_wrong_subscripts_are_named(subscripts, shapes, message):
    operands = [values(x) for x in shapes]
    if len(operands) > 1:
        with pytest.raises(ValueError, match=r"."):
            np.einsum(subscripts, *operands)
        with pytest.raises(ValueError, match=message):
            pm.einsum(subscripts, *operands)
    else:
        with pytest.raises(ValueError, match=r"."):
            pm.einsum(subscripts, *operands)


def test_what_it_does_not_take_is_an_error_that_says_so():
    x = values((4, 4))
    with pytest.raises(TypeError, match="matmul and linear"):
        pm.einsum("ij,jk", x, pm.pack(x))
    with pytest.raises(ValueError, match=r"out has shape \(3, 3\)"):
        pm.einsum("ij,jk", x, x, out=np.empty((3, 3), np.float32))
    with pytest.raises(TypeError, match="cannot hold float32"):
        pm.einsum("ij,jk", x, x, out=np.empty((4, 4), np.int32))
    with pytest.raises(TypeError, match="cannot hold float32"):
        pm.einsum("ij,jk", x, x, dtype=np.int32)
    with pytest.raises(TypeError, match="masked"):
        pm.einsum("ij,jk", x, np.ma.array(x))


def test_a_function_that_fuse_runs_may_call_it():
    x = values((6, 8))
    fused = pm.fuse(lambda a, b: pm.relu(pm.einsum("ij,kj->ik", a, b)) + 1)
    np.testing.assert_array_equal(fused(x, x), np.maximum(x @ x.T, 0) + 1)
