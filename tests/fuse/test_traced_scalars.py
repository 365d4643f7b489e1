"""Numbers, scalars of NumPy's and arrays that are made while a function is traced."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest

import portmm as pm

QUICKLY = True
RNG = np.random.default_rng(3)
X, W = RNG.random((8, 16), np.float32) + 0.5, RNG.random((16, 8), np.float32)
BIAS = RNG.random(8, np.float32)
SCALE, NARROW, ZERO_D = 2.5, np.float32(1.5), np.array(3.0, np.float32)
HELD = {"scale": 0.75}


def expected(function):
    """The epilogue applied to the product in NumPy."""
    return function(X @ W)


CONVERTED = {
    "float32 of a float": lambda acc: np.float32(SCALE) * acc,
    "float64 of a float": lambda acc: acc / np.float64(SCALE),
    "int32 of a float": lambda acc: np.int32(SCALE) * acc, "asarray": lambda acc: np.asarray(SCALE, np.float32) + acc,
    "array": lambda acc: np.array(SCALE) * acc, "float32 of a product": lambda acc: np.float32(SCALE * SCALE) * acc,
    "float32 of float32": lambda acc: np.float32(NARROW) * acc, "float32 of 0-d": lambda acc: np.float32(ZERO_D) * acc,
    "float32 of an entry": lambda acc: np.float32(HELD["scale"]) * acc, "float": lambda acc: float(SCALE) * acc,
    "root": lambda acc: np.float32(1 / np.sqrt(SCALE)) * acc, "two": lambda acc: np.float32(2) * acc,
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERTED)
def test_captured_numbers_may_be_converted(name):
    function = CONVERTED[name]
    want = expected(function)
    np.testing.assert_allclose(pm.matmul(X, W, epilogue=function), want, rtol=1e-5)
    np.testing.assert_allclose(pm.fuse(lambda x, w: function(x @ w))(X, W), want, rtol=1e-5)
    np.testing.assert_allclose(pm.matmul(X, W, prologue_a=lambda a: np.float32(SCALE) * a), (SCALE * X) @ W, rtol=1e-5)


def test_a_converted_number_may_change_from_call_to_call():
    def run(scale):
        one = pm.matmul(X, W, epilogue=lambda acc: np.float32(scale) * acc)
        return one, pm.fuse(lambda x, w: np.float32(scale) * (x @ w))(X, W)

    fused = pm.fuse(lambda x, w, scale: np.float32(scale) * (x @ w))
    for scale in (2.0, 3.5, np.float64(0.25)):
        for got in (*run(scale), fused(X, W, scale)):
            np.testing.assert_allclose(got, np.float32(scale) * (X @ W), rtol=1e-5)
    number = np.array(2.0, np.float32)
    again = pm.fuse(lambda x: np.float32(number) * x)
    for value in (2, 5):
        number[...] = value
        np.testing.assert_allclose(again(X), value * X)


SCALARS = (np.float32(2), np.float64(2), np.float16(2), np.int32(2), np.int64(2), np.uint8(2),
           np.array(2.0, np.float32), np.array(2.0), np.array(2))  # fmt: skip


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne"])
def test_scalars_stand_on_either_side_of_operators(name):
    function = getattr(operator, name)
    for c in SCALARS:
        for way in (lambda acc, c=c: function(c, acc), lambda acc, c=c: function(acc, c)):
            want = expected(way)
            np.testing.assert_allclose(
                pm.matmul(X, W, epilogue=lambda acc, way=way: pm.cast(way(acc), np.float32)), want, rtol=1e-5
            )
            np.testing.assert_allclose(pm.fuse(lambda x, w, way=way: way(x @ w))(X, W), want, rtol=1e-5)


@pytest.mark.parametrize(
    "power", [2.0, np.float32(3), np.float64(2), np.int64(2), np.array(2.0), -1, -2.0, 0.5, np.float32(-0.5), 1]
)
def test_powers_of_values_in_a_tile(power):
    for way in (lambda acc: acc**power, lambda acc: np.power(acc, power)):
        want = (X @ W).astype(np.float64) ** float(power)
        np.testing.assert_allclose(pm.matmul(X, W, epilogue=way), want, rtol=1e-5)
        np.testing.assert_allclose(pm.fuse(lambda x, w, way=way: way(x @ w))(X, W), want, rtol=1e-5)


REFUSED = {
    "arange": (lambda acc, i: acc + np.arange(8)[i.n], "create the array before"),
    "eye": (lambda acc, i: acc + np.eye(8)[i.m, i.n], "create the array before"),
    "take": (lambda acc, i: acc + np.take(np.arange(8), i.n), "create the array before"),
    "captured, take": (lambda acc, i: acc + np.take(BIAS, i.n), r"create the array before"),
    "array of values": (lambda acc: np.array([acc, acc]), "cannot be converted to an array"),
    "float32 of a value": (lambda acc: np.float32(acc) * 2, "cannot be converted to an array"),
    "zeros": (lambda acc: acc + np.zeros(8, np.float32), "create it before"),
    "where": (lambda acc: np.where(np.arange(8) > 3, acc, 0), "create it before"),
    "pm.where": (lambda acc: pm.where(np.arange(8) > 3, acc, 0), "create it before"),
    "result": (lambda acc: (acc, np.zeros(8)), "create it before"),
    "if": (lambda acc: acc * 2 if acc > 0 else acc, r"pm\.where"),
    "len": (lambda acc: acc * len(acc), "one element"),
    "float": (lambda acc: float(acc) * acc, "portmm's functions"),
    "iteration": (lambda acc: [x for x in acc], "one element"),  # noqa: C416 - as users write it
    "list": (lambda acc, i: [1, 2, 3][i.n] * acc, "portmm's functions"),
    "power": (lambda acc: 2**acc, r"pm\.exp\(x \* math\.log\(2\)\)"),
    "np.power": (lambda acc: np.power(np.float32(2), acc), r"pm\.exp"),
    "power of powers": (lambda acc: acc**acc, r"pm\.exp\(power \* pm\.log\(x\)\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_told_with_the_line(name):
    function, said = REFUSED[name]
    line = f"{__file__}, line {function.__code__.co_firstlineno}: "
    for call in (
        lambda: pm.matmul(X, W, epilogue=function),
        lambda: pm.grouped_matmul(X, W[None], np.array([8]), epilogue=function),
        lambda: pm.linear(X.astype(np.int8), W.astype(np.int8), epilogue=function),
    ):
        with pytest.raises(pm.TraceError, match=said) as caught:
            call()
        assert str(caught.value).startswith(line)


def test_arrays_that_scores_and_prologues_make():
    q = RNG.random((2, 8, 16), np.float32)
    for call in (
        lambda: pm.attention(q, q, q, score=lambda s, i: s + np.arange(8)[i.kv]),
        lambda: pm.attention(q, q, q, mask=lambda i: np.arange(8)[i.kv] > 2),
        lambda: pm.attention(q, q, q, mask=lambda _: np.ones((8, 8), bool)),
        lambda: pm.matmul(X, W, prologue_a=lambda a, i: a + np.arange(16)[i.k]),
    ):
        with pytest.raises(pm.TraceError, match=r"create (it|the array) before") as caught:
            call()
        assert str(caught.value).startswith(f"{__file__}, line ")


def test_arrays_of_traced_arrays_are_told_what_to_write():
    for function in (
        lambda x, w: np.float32(x) @ w,
        lambda x, w: np.asarray(x) @ w,
        lambda x, w: np.array([x @ w, x @ w]),
    ):
        with pytest.raises(pm.TraceError, match=r"x\.astype\(np\.float32\) in place of np\.float32\(x\)"):
            pm.fuse(function)(X, W)
    assert math.isclose(float(pm.fuse(lambda x: x.astype(np.float64).sum())(X)), X.sum(dtype=float), rel_tol=1e-6)
