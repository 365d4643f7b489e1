"""Captured values keep their identity, and what is asked of them, from call to call."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import NamedTuple

import numpy as np
import pytest
from traced_products import PRODUCT, W, X, rand

import portmm as pm

QUICKLY = True
pytestmark = pytest.mark.calls


ONE, OTHER = rand(24), rand(24) + 1
ACT = PAIR = None
WAYS = [lambda f: pm.matmul(X, W, epilogue=f), lambda f: fused_of(f)(PRODUCT)]
_fused = {}


def fused_of(function):
    return _fused.setdefault(function, pm.fuse(function))


class Fields(NamedTuple):
    bias: object


class Pair(Fields):
    _gain = 2.0


class Layer:
    def __init__(self, bias, scale):
        self.bias, self.scale = bias, scale

    def act(self, x):
        return x * self.scale + self.bias


def check(run, function):
    for _ in range(3):
        np.testing.assert_allclose(run(function), np.asarray(function(PRODUCT)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", WAYS)
def test_two_names_of_one_array_are_the_same(run, monkeypatch):
    def function(x):
        a, b = PAIR
        return x * (2.0 if a is b else 3.0) + a - b * 0.5

    for pair in ((ONE, ONE), (ONE, OTHER), (OTHER, OTHER), (ONE, ONE.copy())):
        monkeypatch.setattr(sys.modules[__name__], "PAIR", pair)
        check(run, function)


def test_arrays_of_closures_are_the_same_where_python_says_so():
    def epilogue(a, b):
        return lambda x: x * (2.0 if a is b else 3.0) + a + b

    for a, b in ((ONE, OTHER), (ONE, ONE), (OTHER, ONE), (OTHER, OTHER)):
        check(WAYS[0], epilogue(a, b))


def test_an_array_that_is_captured_twice_can_become_two():
    def epilogue(a, b):
        return lambda x: x + a - b

    for a, b in ((ONE, ONE), (ONE, OTHER), (OTHER, OTHER), (OTHER, ONE)):
        check(WAYS[0], epilogue(a, b))


@pytest.mark.parametrize("run", WAYS)
def test_a_private_attribute_of_the_class_of_a_named_tuple_is_seen(run, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PAIR", Pair(ONE))

    def function(x):
        return x * PAIR._gain + PAIR.bias

    for gain in (2.0, 3.0):
        monkeypatch.setattr(Pair, "_gain", gain)
        check(run, function)


def test_an_epilogue_of_an_object_is_traced_once_and_sees_its_changes():
    layer, calls = Layer(ONE, 0.5), []

    def forward(layer):
        def epilogue(x):
            calls.append(layer)
            return layer.act(x)

        return pm.matmul(X, W, epilogue=epilogue)

    for scale, bias in ((0.5, ONE), (0.25, OTHER), (0.25, ONE)):
        layer.scale, layer.bias = scale, bias
        np.testing.assert_allclose(forward(layer), PRODUCT * scale + bias, rtol=1e-5)
    layer.act = lambda x: x - layer.bias
    np.testing.assert_allclose(forward(layer), PRODUCT - ONE, rtol=1e-5)
    np.testing.assert_allclose(forward(Layer(OTHER, 3.0)), PRODUCT * 3 + OTHER, rtol=1e-5)


class Called:
    def __init__(self):
        self.scale = 2.0

    def __call__(self, x):
        return x * self.scale

    def run(self, x):
        return x + 1.0


class Deeper(Called):
    def run(self, x):
        return super().run(x) * 2.0


CALLED = Deeper()


@pytest.mark.parametrize("run", WAYS)
def test_special_methods_and_those_of_base_classes_are_seen(run, monkeypatch):
    def function(x):
        return CALLED(x) + CALLED.run(x)

    check(run, function)
    monkeypatch.setattr(Called, "__call__", lambda self, x: x * self.scale * 3.0)
    check(run, function)
    monkeypatch.setattr(Deeper, "__call__", lambda self, x: x - self.scale, raising=False)
    check(run, function)
    monkeypatch.setattr(Called, "run", lambda self, x: x - self.scale)
    check(run, function)
    monkeypatch.setattr(CALLED, "scale", 5.0)
    check(run, function)


def test_the_cache_keeps_no_object_alive():
    layer = Layer(rand(24), 0.5)
    refs = [weakref.ref(layer), weakref.ref(layer.bias)]
    for _ in range(3):
        pm.matmul(X, W, epilogue=lambda x, held=layer: held.act(x))
        pm.matmul(X, W, epilogue=layer.act)
    del layer
    gc.collect()
    assert not any(x() for x in refs)


@pytest.mark.parametrize("run", WAYS)
def test_the_order_of_a_dict_is_seen(run, monkeypatch):
    def function(x):
        for key in PAIR:
            x = x * 2.0 if key == "double" else x + PAIR[key]
        return x

    for keys in (("double", "add"), ("add", "double")):
        monkeypatch.setattr(sys.modules[__name__], "PAIR", dict.fromkeys(keys, ONE))
        check(run, function)


@pytest.mark.parametrize("run", WAYS)
def test_a_global_that_hides_a_builtin_is_seen(run, monkeypatch):
    def function(x):
        return x * max(2.0, 3.0)

    check(run, function)
    monkeypatch.setattr(sys.modules[__name__], "max", min, raising=False)
    check(run, function)


@pytest.mark.parametrize("run", WAYS)
def test_functions_with_the_same_code_are_told_apart(run, monkeypatch):
    def scaled(factor):
        return lambda x: x * factor

    def function(x):
        first, second = PAIR
        return first(x) + second(x) * (2.0 if first is second else 3.0)

    two, three = scaled(2.0), scaled(3.0)
    for pair in ((two, three), (two, two), (three, scaled(2.0)), (scaled(3.0), scaled(3.0))):
        monkeypatch.setattr(sys.modules[__name__], "PAIR", pair)
        check(run, function)


@pytest.mark.parametrize("run", WAYS)
def test_annotations_are_not_evaluated(run):
    def annotate(_format):
        raise NameError("an annotation was evaluated")

    def function(x):
        return x * 2.0

    function.__annotate__ = annotate  # as Python 3.14 has it
    check(run, function)


@pytest.mark.parametrize("run", WAYS)
def test_more_kinds_of_closures_than_are_kept(run, monkeypatch):
    def function(x):
        return x * PAIR + ONE

    for _ in range(2):
        for n in range(20):
            monkeypatch.setattr(sys.modules[__name__], "PAIR", n)
            check(run, function)


def test_the_cache_keeps_no_class_of_a_function_alive():
    def layer_of(bias):
        class Local:
            def __call__(self, x):
                return x + bias

            def act(self, x):
                return self(x) * 2.0

        return Local()

    bias = rand(24)
    layer, held = layer_of(bias), weakref.ref(bias)
    for _ in range(3):
        np.testing.assert_allclose(pm.matmul(X, W, epilogue=layer.act), (PRODUCT + bias) * 2, rtol=1e-5)
    del layer, bias
    gc.collect()
    assert held() is None


def test_attributes_that_the_compiler_would_spell_otherwise():
    class Scales:
        pass

    scales, x, name = Scales(), np.ones((4, 4), np.float32), "\ufb01"
    scales.fi = 5.0

    def ending(acc):
        return acc * getattr(scales, name)

    for value in (2.0, 3.0):
        setattr(scales, name, value)
        np.testing.assert_array_equal(pm.matmul(x, x, epilogue=ending), 4 * value)


def test_a_nan_that_decides_is_equal_to_itself():
    nan, x, traced = float("nan"), np.ones((4, 4), np.float32), []

    def ending(acc):
        traced.append(acc)
        return acc + 1 if nan > 0 else acc - 1

    for _ in range(10):
        np.testing.assert_array_equal(pm.matmul(x, x, epilogue=ending), 3)
    assert len(traced) < 5
