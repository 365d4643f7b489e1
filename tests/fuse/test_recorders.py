"""Epilogues and fused functions take the same operators and ufuncs, of arguments and of what they capture."""

from __future__ import annotations

import operator
import re

import numpy as np
import pytest
from traced_products import PRODUCT, W, X, rand

import portmm as pm
from portmm.spec.expr import UFUNCS
from portmm.trace.placeholders import COMPARISONS, IN_PLACE

QUICKLY = True
pytestmark = pytest.mark.calls

COLUMNS = rand(PRODUCT.shape[-1]) + np.float32(0.5)
FACTOR = 0.75
OF_MASKS = ("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "invert")
POSITIVE = {"log", "sqrt", "reciprocal", "power"}
SIGNS = {name: sign for name, sign in IN_PLACE.items() if name in ("add", "sub", "mul", "truediv")}


def run(function):
    """The results of an epilogue and of a fused function, and NumPy's."""
    want = np.asarray(function(PRODUCT), np.float32)
    return pm.matmul(X, W, epilogue=function), pm.fuse(function)(PRODUCT), want


def check(function):
    *found, want = run(function)
    for got in found:
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", sorted(UFUNCS))
def test_ufuncs_are_numpys(name):
    ufunc = getattr(np, name)
    if name in OF_MASKS:
        masks = (lambda x: (x > COLUMNS,)) if ufunc.nin == 1 else (lambda x: (x > COLUMNS, x < FACTOR))
        check(lambda x: pm.where(ufunc(*masks(x)), x, 0.0))
        return
    some = (lambda x: abs(x) + COLUMNS) if name in POSITIVE else (lambda x: x - COLUMNS)
    if name == "power":
        check(lambda x: ufunc(some(x), 2))
        return
    more = (COLUMNS,) * (ufunc.nin - 1)
    if ufunc(COLUMNS, *more).dtype == np.bool_:
        check(lambda x: pm.where(ufunc(some(x), *more), x, 0.0))
    else:
        check(lambda x: ufunc(some(x), *more))


@pytest.mark.parametrize("name", [*SIGNS, *COMPARISONS])
def test_operators_take_captured_arrays_and_numbers_on_either_side(name):
    function = getattr(operator, name)
    for left, right in ((0, 1), (1, 0)):
        for other in (lambda: COLUMNS, lambda: FACTOR):

            def way(x, other=other, left=left, right=right):
                pair = x, other()
                return pm.where(x > 0, 0.0, 1.0) + function(pair[left], pair[right])

            check(way)


def test_numbers_and_arrays_that_are_captured_are_computed_with_alone():
    check(lambda x: x * (FACTOR * 2 - 1 / FACTOR) + (COLUMNS * FACTOR + COLUMNS))


def test_a_number_may_be_changed_in_place():
    def scaled(x):
        factor = FACTOR
        factor *= 2
        return x * factor

    check(scaled)


@pytest.mark.parametrize("name", IN_PLACE)
def test_arrays_are_not_changed_in_place(name):
    changed = getattr(operator, f"i{name}")

    def changes(x):
        return x + changed(COLUMNS, COLUMNS)

    for call in (lambda: pm.matmul(X, W, epilogue=changes), lambda: pm.fuse(changes)(PRODUCT)):
        with pytest.raises(
            pm.TraceError, match=re.escape(f"changes an array in place; write x = x {IN_PLACE[name]} ...")
        ):
            call()


EAGER = {
    "reshaped": lambda x, i: x + COLUMNS.reshape(1, -1)[0, i.n],
    "reversed": lambda x, i: x + COLUMNS[::-1][i.n],
    "clipped": lambda x, i: x + np.clip(COLUMNS, 0.6, 0.9)[i.n],
    "summed": lambda x, i: x + np.cumsum(COLUMNS)[i.n],
    "largest": lambda x, i: x + COLUMNS[i.n] * (2 if COLUMNS.max() > 100 else 3),
}


@pytest.mark.parametrize("name", EAGER)
def test_numpy_computes_of_captured_arrays_alone(name):
    function = EAGER[name]

    class Whole:
        n = slice(None)

    want = function(PRODUCT, Whole)
    np.testing.assert_allclose(pm.matmul(X, W, epilogue=function), want, rtol=1e-5)
