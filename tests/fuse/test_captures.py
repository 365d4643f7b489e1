"""Captures of traced functions: told apart from call to call, and refused where they cannot be."""

from __future__ import annotations

import math
import time
import types

import numpy as np
import pytest
from traced_products import rand

import portmm as pm
from portmm.errors import TraceError

QUICKLY = "fast"


def shifted(s, t):
    return lambda acc: acc * s + t


@pytest.mark.parametrize("second", ["array", "float", "int"])
@pytest.mark.parametrize("first", ["array", "float", "int"])
def test_each_capture_is_told_from_the_others(first, second):
    x, w = rand(8, 16), rand(16, 32)
    kinds = {"array": rand(8, 32), "float": 2.5, "int": 3}
    product = pm.matmul(x, w)
    for a, b in ((first, second), (second, first)) * 2:
        s, t = kinds[a], kinds[b]
        np.testing.assert_allclose(pm.matmul(x, w, epilogue=shifted(s, t)), product * s + t, rtol=1e-5, atol=1e-5)


def test_modules_and_classes_may_change():
    space, x, w = types.ModuleType("space"), rand(8, 16), rand(16, 32)
    product = pm.matmul(x, w)

    class Held:
        scale = 2.0

    space.scale, space.bias = 2.0, rand(32)
    whole = pm.fuse(lambda x: (x @ w) * space.scale + space.bias * Held.scale)

    def function(acc):
        return acc * space.scale + space.bias * Held.scale

    for scale in (2.0, 3.0, 5.0):
        space.scale, Held.scale, space.bias = scale, 1 / scale, rand(32)
        want = product * space.scale + space.bias * Held.scale
        np.testing.assert_allclose(pm.matmul(x, w, epilogue=function), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(whole(x), want, rtol=1e-5, atol=1e-5)


def test_objects_that_come_and_go_are_not_confused():
    class Value:
        def __init__(self, v):
            self.v = v

    class Values:
        def __getitem__(self, i):
            return Value(float(i))

    values, x, w = Values(), rand(8, 16), rand(16, 32)
    got = pm.matmul(x, w, epilogue=lambda acc: acc * values[2].v + values[5].v)
    np.testing.assert_allclose(got, pm.matmul(x, w) * 2 + 5, rtol=1e-5, atol=1e-5)


def test_a_result_that_is_read_only_is_not_written():
    x, w, out = rand(8, 16), rand(16, 32), np.zeros((8, 32), np.float32)
    for _ in range(3):
        pm.matmul(x, w, out, epilogue=lambda acc: acc + 1.0)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pm.matmul(x, w, out, epilogue=lambda acc: acc + 1.0)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_numbers_by_value_are_told_by_their_bits(zero):
    x, w = rand(8, 16), rand(16, 32)
    got = pm.matmul(x, w, epilogue=lambda acc: acc * 0 + math.copysign(1.0, zero))
    assert (got == math.copysign(1.0, zero)).all()


# -- long lists and dicts of numbers -----------------------------------------------------


SIGN = lambda v: math.copysign(1.0, v) if v == v else 7.0  # noqa: E731, PLR0124 - a NaN equals nothing


@pytest.mark.parametrize("kind", [list, lambda x: dict(enumerate(x))], ids=["list", "dict"])
@pytest.mark.parametrize("others", [[0.5], [3], [0.5, 3, True, None]], ids=["floats", "integers", "mixed"])
def test_items_of_long_containers_are_told_by_type_and_value(others, kind):
    values, x, w = kind(others * 50), rand(8, 16), rand(16, 32)
    by_type = {int: 2.0, float: 3.0, bool: 5.0, np.float64: 7.0, np.int64: 11.0}

    def scaled(acc):
        return acc * by_type[type(values[7])] + values[7]

    def signed(acc):
        return acc * 0 + SIGN(values[7])

    product, whole, sign = pm.matmul(x, w), pm.fuse(lambda x: scaled(x @ w)), pm.fuse(lambda x: signed(x @ w))
    for value in (1, 1.0, True, np.float64(1), np.int64(1), 0.0, -0.0, 4, 4.5, math.nan, math.nan, 1, 1.0):
        values[7] = value
        want = product * by_type[type(value)] + value
        for _ in range(2):
            np.testing.assert_allclose(pm.matmul(x, w, epilogue=scaled), want, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(whole(x), want, rtol=1e-5, atol=1e-5)
            assert (pm.matmul(x, w, epilogue=signed) == SIGN(value)).all()
            assert (sign(x) == SIGN(value)).all()


def test_a_list_of_a_hundred_thousand_numbers_is_guarded_at_once():
    values, x, w = [0.5 * i for i in range(100_000)], rand(8, 16), rand(16, 32)
    want, whole = pm.matmul(x, w) * 1.5, pm.fuse(lambda x: (x @ w) * values[3])
    start = time.process_time()
    for _ in range(3):
        np.testing.assert_allclose(pm.matmul(x, w, epilogue=lambda acc: acc * values[3]), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(whole(x), want, rtol=1e-5, atol=1e-5)
    assert time.process_time() - start < 3


# -- what cannot be traced ---------------------------------------------------------------


BIAS = rand(32)


def writes(acc):
    BIAS[0] = 5
    return acc


def fills(acc):
    BIAS.fill(0)
    return acc


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda acc: acc[0], r"\[\]"), (lambda acc: acc % 2, "% 2"), (lambda acc, i: acc + i.n // 3, "power of two"),
        (lambda acc: 2.0**acc, r"\*\*"), (lambda acc: acc @ BIAS, "@"), (lambda acc: acc * len(acc), "len"),
        (lambda acc: acc.T, r"\.T"), (lambda acc: acc.sum(), r"\.sum"), (lambda acc: acc.astype(np.int8), "astype"),
        (writes, "in place"), (fills, "in place"), (lambda _: (), "empty"), (lambda _: None, "NoneType"),
        (lambda acc: acc + np.arange(32), "made while"), (lambda acc: acc if acc > 0 else -acc, "an if"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_errors_name_the_line(function, said):
    before = BIAS.copy()
    with pytest.raises(TraceError, match=f"test_captures.py, line .*{said}"):
        pm.matmul(rand(8, 16), rand(16, 32), epilogue=function)
    np.testing.assert_array_equal(BIAS, before)


def test_a_list_that_contains_itself_is_refused():
    values, x, w = [2.0], rand(8, 16), rand(16, 32)
    values.append({"all": values})
    whole = pm.fuse(lambda x: x * values[0])
    for call in (lambda: pm.matmul(x, w, epilogue=lambda acc: acc * values[0]), lambda: whole(x)):
        with pytest.raises(TraceError, match=r"values\[1\]\['all'\] is a list that contains itself"):
            call()


def test_what_is_no_function_of_one_value_is_refused():
    x, w = rand(8, 16), rand(16, 32)
    with pytest.raises(TypeError, match="'relu' is no function"):
        pm.matmul(x, w, epilogue="relu")
    with pytest.raises(TraceError, match="one value"):
        pm.matmul(x, w, prologue_a=lambda a: (a, a))
    with pytest.raises(ValueError, match="from 0 to 1"):
        pm.matmul(x, w, epilogue=lambda acc: pm.dropout(acc, 1.5, 3))


# -- what can ------------------------------------------------------------------------------


def test_numpys_functions_and_methods_of_captured_arrays():
    x, w = rand(8, 16), rand(16, 32)
    product, n, m = pm.matmul(x, w), np.arange(32), np.arange(8)[:, None]
    for function, want in [
        (np.tanh, np.tanh(product)), (lambda acc: acc + BIAS.reshape(1, -1), product + BIAS),
        (lambda acc: acc * BIAS.mean(), product * BIAS.mean()), (lambda acc: +acc, product),
        (lambda acc, i: acc + i.n // 4 + i.m % 8, product + n // 4 + m % 8),
    ]:  # fmt: skip
        np.testing.assert_allclose(pm.matmul(x, w, epilogue=function), want, rtol=1e-5, atol=1e-5)


def test_the_seed_of_dropout_may_be_an_array():
    x, w, seed = rand(8, 16), rand(16, 32), np.zeros(1, np.int32)
    for value in (3, -7):
        seed[0] = value
        got = pm.matmul(x, w, epilogue=lambda acc: pm.dropout(acc, 0.3, seed))
        np.testing.assert_allclose(got, pm.dropout(pm.matmul(x, w), 0.3, value), rtol=1e-5)


def test_a_number_that_decides_may_become_an_integer_and_back():
    limit = 1.0

    @pm.fuse
    def stepped(x, w):
        return (x @ w) * (2.0 if limit > 3 else 1.0)

    x, w = np.ones((4, 16), np.float32), np.ones((16, 8), np.float32)
    for limit in (1.0, 3, 4.0, 3, 5, 1.0):
        assert (stepped(x, w) == (32 if limit > 3 else 16)).all()
