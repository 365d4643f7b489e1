"""Sums and maxima down columns, alone and among other expressions, on every instruction set of this machine."""

import numpy as np
import pytest

import portmm as pm
from portmm.dispatch import config
from portmm.ops.rowwise import over_rows

QUICKLY = "fast"

NAMES = {"b": "b", "m": "m", "n": "n"}
SIZES = [(5, 37), (300, 129), (1, 16), (64, 1), (3, 260)]


def targets():
    return [isa.name for isa in config.target().isas if isa.atom("f32")]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_columns_are_reduced(target, size):
    m, n = size
    rng = np.random.default_rng(m)
    x, b, c = rng.random((m, n), np.float32) - 0.5, rng.random(n, np.float32), rng.random(m, np.float32)

    def function(x, i):
        scaled = x * c[i.m]
        return scaled - pm.mean(scaled, axis=-2), pm.max(x, axis=-2) * 2 + b, pm.sum(x - pm.max(x, axis=-2)), x + 1

    with pm.config(target=target):
        found, several = over_rows(function, (x,), NAMES)
    scaled = x * c[:, None]
    want = (
        scaled - scaled.mean(0),
        x.max(0, keepdims=True) * 2 + b,
        (x - x.max(0)).sum(1, keepdims=True),
        x + 1,
    )
    assert several
    assert [y.shape for y in found] == [y.shape for y in want]
    for y, w in zip(found, want, strict=True):
        np.testing.assert_allclose(y, w, rtol=1e-5, atol=1e-5 * m)


def test_of_a_product():
    rng = np.random.default_rng(1)
    a, w = rng.random((33, 19), np.float32), rng.random((19, 70), np.float32)
    y, total = pm.matmul(a, w, epilogue=lambda acc: (acc * 2, pm.sum(acc, axis=-2)))
    np.testing.assert_allclose(y, a @ w * 2, rtol=1e-5)
    assert total.shape == (1, 70)
    np.testing.assert_allclose(total, (a @ w).sum(0, keepdims=True), rtol=1e-5)


def test_of_a_batch_and_as_another_type():
    x = np.random.default_rng(2).random((3, 5, 7), np.float32)
    (found,), _ = over_rows(lambda x: pm.cast(pm.sum(x, axis=-2) * 10, np.int8), (x,), NAMES)
    assert (found == np.rint(x.sum(1, keepdims=True) * 10)).all()


def test_no_rows():
    (total, most), _ = over_rows(
        lambda x: (pm.sum(x, axis=-2), pm.max(x, axis=-2)), (np.empty((0, 4), np.float32),), NAMES
    )
    assert (total == 0).all()
    assert (most == -np.inf).all()


def test_columns_of_rows_take_two_steps():
    with pytest.raises(pm.TraceError, match="two steps"):
        over_rows(lambda x: pm.sum(pm.softmax(x), axis=-2), (np.ones((3, 4), np.float32),), NAMES)
    with pytest.raises(pm.TraceError, match="axis 0"):
        over_rows(lambda x: pm.sum(x, axis=0), (np.ones((3, 4), np.float32),), NAMES)
