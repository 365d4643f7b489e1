"""Traced functions see changes of what they reach in roundabout ways, and fail if they catch a refusal."""

from __future__ import annotations

import enum
import functools
import math
import sys
import types

import numpy as np
import pytest
from traced_products import PRODUCT, W, X, rand

import portmm as pm
from portmm.errors import TraceError

QUICKLY = True
pytestmark = pytest.mark.calls


S, N, V, BIAS = 0.5, 3, 0.0, rand(24)
MODULE = types.ModuleType("settings_of_tests")
sys.modules["settings_of_tests"] = MODULE


class Config:
    n, s, bias = 3, 0.5, BIAS


class Shared:
    gain = 2

    def __init__(self):
        self.n = N

    def run(self, x):
        return x * self.gain * self.n


class Meta(type):
    def __call__(cls, x):
        return x * N


class Made(metaclass=Meta):
    pass


class Generic:
    def __class_getitem__(cls, key):
        return N * key


class Word(enum.IntEnum):
    ONE = 1

    def times(self):
        return N


class Unit(float):
    unit = 1

    def __mul__(self, other):
        return float(self) * other + self.unit


class Count(int):
    unit = 1


class Float:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value


def attributed(x):
    return x


def wrapping(function):
    @functools.wraps(function)
    def inner(x):
        return function(x) * N

    return inner


@wrapping
def wrapped(x):
    return x * S


def scaled(factor, x):
    return x * factor * N * S


def imports(x):
    from settings_of_tests import n

    return x * n


def reads(owner, x):
    return x * owner.n * owner.s + owner.bias


def reads_less(x):
    return x * MODULE.s


def by_name(x):
    return x * globals()["N"] * eval("S")  # noqa: S307


def with_unit(value, unit):
    value.unit = unit
    return value


PART, TABLE, BYTES, WORD = functools.partial(scaled, 2.0), {attributed: 2.0}, bytearray(b"\2"), Word.ONE
ME = sys.modules[__name__]
# A function, and what changes from call to call: an owner, a name and a value.
CASES = {
    "attribute of a function": (
        lambda x: x * getattr(attributed, "gain", 100),
        [(attributed, "gain", 2.0), (attributed, "gain", 3)],
    ),
    "name of a function": (lambda x: x * (2 if attributed.__qualname__ == "attributed" else 100), []),
    "function as a key": (lambda x: x * TABLE.get(attributed, 100), [(ME, "TABLE", {attributed: 3.0})]),
    "wrapped": (lambda x: wrapped(x) + wrapped.__wrapped__(x), [(ME, "N", 4), (ME, "S", 1.5)]),
    "globals and eval": (by_name, [(ME, "N", 4), (ME, "S", 1.5)]),
    "import": (imports, [(MODULE, "n", 4)]),
    "name of an attribute": (
        lambda x: x * getattr(MODULE, "n") * vars(MODULE)["s"],  # noqa: B009
        [(MODULE, "n", 4), (MODULE, "s", 1.5)],
    ),
    "class in a helper": (
        lambda x: reads(Config, x),
        [(Config, "n", 4), (Config, "s", 1.5), (Config, "bias", BIAS * 2)],
    ),
    "module in two functions": (lambda x: reads_less(x) * MODULE.n, [(MODULE, "n", 4), (MODULE, "s", 1.5)]),
    "function in two places": (lambda x: MODULE.less(reads_less(x)), [(MODULE, "s", 1.5)]),
    "instance": (lambda x: Shared().run(x), [(Shared, "gain", 3), (ME, "N", 5)]),
    "call of a metaclass": (lambda x: Made(x), [(ME, "N", 5)]),  # noqa: PLW0108
    "item of a class": (lambda x: x * Generic[2], [(ME, "N", 5)]),
    "method of an integer": (lambda x: x * WORD.times() * Word.ONE.times(), [(ME, "N", 5)]),
    "partial": (lambda x: PART(x), [(ME, "N", 5), (ME, "S", 1.5), (ME, "PART", functools.partial(scaled, 3.0))]),  # noqa: PLW0108
    "partial itself": (PART, [(ME, "N", 5), (ME, "S", 1.5)]),
    "bytes": (lambda x: x * BYTES[0], [(BYTES, 0, 3)]),
    "sign of zero": (lambda x: x * math.copysign(1.0, V), [(ME, "V", -0.0), (ME, "V", 0.0)]),
    "sign of zero in a set": (lambda x: x * math.copysign(1.0, next(iter(V))), [(ME, "V", {0.0}), (ME, "V", {-0.0})]),
    "float of the user's": (
        lambda x: x * float(V * 2),
        [(ME, "V", with_unit(Unit(2.0), 2)), (ME, "V", with_unit(Unit(2.0), 3))],
    ),
    "integer of the user's": (
        lambda x: x * V.unit,
        [(ME, "V", with_unit(Count(2), 2)), (ME, "V", with_unit(Count(2), 3))],
    ),
    "conversion": (lambda x: x * float(V), [(ME, "V", Float(2.0)), (ME, "V", Float(3.0))]),
    "double precision": (lambda x: x * ((S + 1e8) - 1e8) * (S * 1e30 * 1e30 / 1e60), [(ME, "S", 1.5)]),
    "truth of an array": (lambda x: x * (2 if V else 3), [(ME, "V", np.zeros(1)), (ME, "V", np.ones(1))]),
}
REFUSED = ("truth of an array",)
"""Cases that `fuse` refuses."""


@pytest.fixture
def settings(monkeypatch):
    for name, value in {"n": 3, "s": 0.5, "less": reads_less}.items():
        monkeypatch.setattr(MODULE, name, value, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thin(3)
@pytest.mark.parametrize("way", ["epilogue", "fuse"])
def test_a_later_call_sees_what_has_changed(name, way, settings):
    function, changes = CASES[name]
    fused = pm.fuse(function)
    if name in ("float of the user's", "integer of the user's", "conversion", "sign of zero in a set"):
        settings.setattr(ME, "V", changes[0][2])
    for owner, key, value in [(ME, "X", X), *changes]:
        if isinstance(owner, bytearray):
            owner[key] = value
        else:
            settings.setattr(owner, key, value, raising=False)
        want = np.asarray(function(PRODUCT), np.float32)
        for _ in range(2):
            if way == "fuse" and name in REFUSED and isinstance(V, np.ndarray):
                with pytest.raises(TraceError):
                    fused(PRODUCT)
                continue
            got = pm.matmul(X, W, epilogue=function) if way == "epilogue" else fused(PRODUCT)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def caught(x):
    try:
        return x * 2 if x.max() > 0 else x * 3
    except Exception:  # noqa: BLE001
        return x * 100


def caught_number(x):
    try:
        return x * math.sqrt(S)
    except Exception:  # noqa: BLE001
        return x * 100


@pytest.mark.parametrize("run", [lambda f: pm.matmul(X, W, epilogue=f), lambda f: pm.fuse(f)(PRODUCT)])
def test_a_function_that_catches_a_refusal_takes_no_other_branch(run):
    with pytest.raises(TraceError):
        run(caught)
    np.testing.assert_allclose(run(caught_number), caught_number(PRODUCT), rtol=1e-4)


def test_numbers_that_are_computed_from_captured_ones_compile_nothing_again():
    seen = []

    def blended(s, t):
        def function(acc):
            seen.append(s)
            return acc * (1 - s) + (s * t + 1) * BIAS

        return function

    for s, t in ((0.5, 2.0), (0.25, 3.0), (0.99999999, 1e8), (3.0, 1.0)):
        for _ in range(2):
            want = np.asarray(PRODUCT * (1 - s) + (s * t + 1) * BIAS, np.float32)
            np.testing.assert_allclose(pm.matmul(X, W, epilogue=blended(s, t)), want, rtol=1e-5)
    assert len(seen) <= 2


class Owner:
    def __init__(self, scale):
        self.scale = scale

    def forward(self, x):
        return x * self.scale


def test_a_bound_method_of_another_object_is_seen():
    owners, held = [Owner(2.0), Owner(3.0)], {}
    fused = pm.fuse(lambda x: held["step"](x) + held["object"].act(x))
    held["object"] = Owner(1.0)
    for owner in (*owners, *owners):
        held["step"], held["object"].act = owner.forward, owner.forward
        np.testing.assert_allclose(fused(PRODUCT), 2 * owner.scale * PRODUCT, rtol=1e-5)


@pytest.mark.parametrize("where", [Owner(1.0), type("Space", (), {}), types.ModuleType("space")])
def test_an_attribute_that_comes_later_is_seen(where):
    def function(x):
        return x * getattr(where, "late", 2.0) if not hasattr(where, "later") else x * where.later

    fused = pm.fuse(function)
    for name, value in (("", 0), ("late", 5.0), ("later", 7.0)):
        if name:
            setattr(where, name, value)
        want = np.asarray(function(PRODUCT))
        np.testing.assert_allclose(fused(PRODUCT), want, rtol=1e-5)
        np.testing.assert_allclose(pm.matmul(X, W, epilogue=function), want, rtol=1e-4)
