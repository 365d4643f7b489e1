"""Traced functions take the branches that they take without tracing, whatever they ask of what they capture."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import numbers
from typing import NamedTuple

import numpy as np
import pytest
from traced_products import PRODUCT, W, X, rand

import portmm as pm
from portmm.errors import TraceError

QUICKLY = True
pytestmark = pytest.mark.calls


LIKE = rand(24)


class Mode(enum.Enum):
    RELU = "relu"
    NONE = "none"


class Spoken(enum.Enum):
    """An enumeration whose members have a method."""

    LOUD = 2.0

    def volume(self):
        return self.value * FACTOR


class Bits(enum.Flag):
    A = 1
    B = 2


class Layer:
    shared = 2.0

    def __init__(self, scale=0.5, mode=Mode.RELU):
        self.scale, self.mode, self.bias, self.names, self.table = scale, mode, LIKE, ["a"], {0.5: 3.0, "k": 0.25}

    def run(self, x):
        return x * self.scale

    @property
    def twice(self):
        return self.scale * 2

    @staticmethod
    def static(x):
        return x * FACTOR

    @classmethod
    def of_class(cls, x):
        return x * cls.shared + FACTOR


class Deeper(Layer):
    def run(self, x):
        return super().run(x) + self.shared


class Sized:
    def __init__(self, items=()):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)

    def __contains__(self, x):
        return x in self.items

    def __eq__(self, other):
        return isinstance(other, Sized) and self.items == other.items

    __hash__ = None


class Switch:
    def __init__(self, on):
        self.on = on

    def __bool__(self):
        return self.on


@dataclasses.dataclass
class Record:
    scale: float = 0.5
    act: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 0.5


class Pair(NamedTuple):
    scale: float
    bias: object


@functools.lru_cache
def cached(x):
    return x + 1.0


def matched(v):
    match v:
        case float():
            return 5.0
        case Mode.RELU:
            return 4.0
        case {"s": s}:
            return s
        case (a, b):
            return a + b
        case _:
            return 1.0


S = V = 0.5
S32, S64, FACTOR, TABLE, VALUES, BIAS = np.float32(0.5), np.float64(0.5), 2.0, {0.5: 3.0}, [1.0, 2.0], LIKE
LAYER, DEEPER, RECORD, FROZEN, PAIR = Layer(), Deeper(), Record(), Frozen(), Pair(0.5, LIKE)
MODE, BITS, OFF, EMPTY, ONE, SAME_ONE = Mode.RELU, Bits.A, Switch(on=False), Sized(), Sized([1.0]), Sized([1.0])

# Each returns x times a small number on the right branch, and x times 100 on the wrong one.
CASES = {
    "isinstance": lambda x: x * (S if isinstance(S, float) else 100),
    "type": lambda x: x * (S if type(S) is float else 100),
    "type of float32": lambda x: x * (S32 if type(S32) is np.float32 else 100),
    "isinstance of float64": lambda x: x * (2 if isinstance(S64, np.float64) else 100),
    "class": lambda x: x * (2 if S.__class__ is float else 100),
    "abstract class": lambda x: x * (2 if isinstance(S, numbers.Real) else 100),
    "isscalar": lambda x: x * (2 if np.isscalar(S) else 100),
    "str": lambda x: x * (2 if str(S) == "0.5" else 100),
    "repr": lambda x: x * (2 if repr(S) == "0.5" else 100),
    "format": lambda x: x * (2 if f"{S}{S!r}{S:.1f}" == "0.50.50.5" else 100),
    "percent": lambda x: x * (2 if "%g" % S == "0.5" else 100),  # noqa: UP031
    "get": lambda x: x * TABLE.get(S, 100.0),
    "key": lambda x: x * TABLE[S],
    "in a set": lambda x: x * (2 if S in {0.5, 3.0} else 100),
    "hash": lambda x: x * (2 if hash(S) == hash(0.5) else 100),
    "is_integer": lambda x: x * (100 if S.is_integer() else 2),
    "hasattr": lambda x: x * (2 if hasattr(S, "hex") and not hasattr(S, "shape") else 100),
    "derived": lambda x: x * (2 if type(S * 2) is float and type(S32 * S32) is np.float32 else 100),
    "rounded": lambda x: x * (round(S, 1) + S // 0.25 + S % 0.3),
    "matched": lambda x: x * matched(S),
    "compared": lambda x: x * (2 if S < 1 else 100) * -S + abs(S),
    "where": lambda x: np.where(x > S, x, S),
    "cached": lambda x: x * cached(S),
    "item": lambda x: x * (VALUES[S] if isinstance(S, int) else 2),
    "array": lambda x: x + (BIAS if isinstance(BIAS, np.ndarray) else 100),
    "type of array": lambda x: x + (BIAS if type(BIAS) is np.ndarray else 100),
    "isscalar of array": lambda x: x * (100 if np.isscalar(BIAS) else 2),
    "attributes of array": lambda x: x * (2 if hasattr(BIAS, "dtype") and not hasattr(BIAS, "foo") else 100),
    "argument": lambda x: x * (2 if isinstance(x, np.ndarray) and not isinstance(x, float) else 100),
    "type of argument": lambda x: x * (2 if type(x) is np.ndarray else 100),
    "member is": lambda x: x * (2 if MODE is Mode.RELU else 100),
    "member ==": lambda x: x * (2 if MODE == Mode.RELU and MODE.value == "relu" else 100),
    "member of object": lambda x: x * (2 if LAYER.mode is Mode.RELU else 100),
    "member as key": lambda x: x * {Mode.RELU: 2.0, Mode.NONE: 100.0}[MODE],
    "member by name": lambda x: x * (2 if MODE is Mode["RELU"] and len(Mode) == 2 and MODE in Mode else 100),
    "member with a method": lambda x: x * Spoken.LOUD.volume() if isinstance(Spoken.LOUD, Spoken) else x * 100,
    "flag": lambda x: x * (2 if BITS & Bits.A and BITS in (Bits.A | Bits.B) else 100),
    "bool of object": lambda x: x * (100 if OFF else 2),
    "len": lambda x: x * (2 if not EMPTY and len(ONE) == 1 else 100),
    "equal objects": lambda x: x * (2 if ONE == SAME_ONE and EMPTY != ONE else 100),
    "iterated": lambda x: x * sum(v for v in ONE),
    "contained": lambda x: x * (2 if 1.0 in ONE and "a" in LAYER.names else 100),
    "instance": lambda x: x * (2 if isinstance(LAYER, Layer) and not isinstance(LAYER, (Deeper, Sized)) else 100),
    "union": lambda x: x * (2 if isinstance(LAYER, Layer | Sized) else 100),
    "subclass": lambda x: x * (2 if issubclass(Deeper, Layer) and issubclass(Mode, enum.Enum) else 100),
    "type of object": lambda x: x * (2 if type(LAYER) is Layer and type(LAYER).__name__ == "Layer" else 100),
    "callable": lambda x: x * (2 if callable(matched) and not callable(LAYER) else 100),
    "super": lambda x: DEEPER.run(x),  # noqa: PLW0108 - the object is captured
    "property": lambda x: x * LAYER.twice,
    "static": lambda x: Layer.static(x) + LAYER.static(x),
    "class method": lambda x: Layer.of_class(x) + LAYER.of_class(x),
    "attribute": lambda x: x * getattr(LAYER, "scale", 100.0) * getattr(LAYER, "nope", 2.0) * vars(LAYER)["scale"],
    "dataclass": lambda x: x * (RECORD.scale if dataclasses.is_dataclass(RECORD) and RECORD.act is None else 100),
    "equal dataclasses": lambda x: x * (2 if Frozen(0.5) == FROZEN else 100),
    "named tuple": lambda x: x * PAIR.scale + PAIR.bias if isinstance(PAIR, Pair) else x * 100,
    "identical objects": lambda x: x * (2 if [LAYER][0] is LAYER else 100),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", CASES)
def test_a_traced_function_takes_the_branch_that_it_takes_untraced(name):
    function = CASES[name]
    want = np.asarray(function(PRODUCT), np.float32)
    for _ in range(2):
        np.testing.assert_allclose(pm.matmul(X, W, epilogue=function), want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(pm.fuse(function)(PRODUCT), want, rtol=1e-4, atol=1e-4)


class Held:
    def __init__(self, v):
        self.v = v


CHANGING = {
    "class of a number": (
        lambda x: x * {np.float32: 2, float: 3, np.float64: 5, int: 7}[type(V)],
        [0.5, np.float32(0.5), np.float64(0.5), 0.5, 1],
    ),
    "member": (lambda x: x * (2 if V is Mode.RELU else 3), [Mode.RELU, Mode.NONE, Mode.RELU, 1]),
    "containers": (
        lambda x: x * (2 if "a" in V else 3),
        [{"a"}, {"b"}, frozenset("a"), ["a"], ["b"], Sized(["a"]), Sized(["b"]), "a", "b"],
    ),
    "methods": (lambda x: V.run(x) + 1, [LAYER, DEEPER, Layer(3.0), LAYER]),
    "truth": (
        lambda x: x * 2 if V else x * 3,
        [Switch(on=True), Switch(on=False), Sized(), Sized([1]), 1.5, 0.0, None, (), "x"],
    ),
    "iteration": (
        lambda x: x * sum(V) + len(V),
        [[1.0, 2.0], [1.0, 2.0, 3.0], Sized([1.0, 2.0]), Sized([2.0]), (1.0,)],
    ),
    "key": (lambda x: x * {0.5: 2.0, 1.5: 3.0}.get(V, 4.0), [0.5, 1.5, 2.5, 0.5]),
    "text": (lambda x: x * float(f"{V:.1f}"), [0.5, 1.5, np.float32(2.5)]),
    "type of object": (
        lambda x: x * (2 if type(V) is Layer else 3 if type(V) is Deeper else 4),
        [LAYER, DEEPER, ONE, LAYER],
    ),
    "patterns": (lambda x: x * matched(V), [0.5, 1, Mode.RELU, (2.0, 3.0), {"s": 2.0}, {"s": 4.0}, "q", Mode.NONE]),
    "class of a dict": (
        lambda x: x * V["k"] * (1 if isinstance(V, collections.OrderedDict) else 2),
        [collections.OrderedDict(k=2.0), {"k": 2.0}, collections.OrderedDict(k=3.0)],
    ),
    "default": (lambda x: x * V["z"], [collections.defaultdict(lambda: FACTOR), collections.Counter("zz"), {"z": 3.0}]),
    "named tuple": (lambda x: x * V.scale + V.bias, [Pair(2.0, 1.0), Pair(3.0, LIKE), Pair(4.0, 2 * LIKE)]),
    "class of an attribute": (
        lambda x: x * (2 if isinstance(V.v, np.floating) else 3 if isinstance(V.v, float) else 4),
        [Held(np.float32(1)), Held(1.0), Held(np.float64(1)), Held(1)],
    ),
    "class": (lambda x: V.static(x) + V.of_class(x), [Layer, LAYER, Deeper]),
}  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", CHANGING)
def test_a_later_call_sees_what_has_changed(name, monkeypatch):
    function, values = CHANGING[name]
    fused = pm.fuse(function)
    for factor in (2.0, 7.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        monkeypatch.setattr(Layer, "shared", factor + 1)
        for value in values:
            monkeypatch.setitem(globals(), "V", value)
            want = np.asarray(function(PRODUCT), np.float32)
            for _ in range(2):
                np.testing.assert_allclose(pm.matmul(X, W, epilogue=function), want, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(fused(PRODUCT), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("argument", [0.5, np.float64(0.5)])
def test_numbers_that_are_arguments_keep_their_class(argument):
    fused = pm.fuse(lambda x, s: x * (s if type(s) is float else s + 1))
    for s in (argument, 0.25, np.float64(0.25), argument):
        np.testing.assert_allclose(fused(PRODUCT, s), PRODUCT * (s if type(s) is float else s + 1), rtol=1e-5)


def test_a_new_value_of_a_number_that_is_only_computed_with_compiles_nothing():
    seen = []

    def scaled(s):
        def function(acc):
            seen.append(s)
            return acc * s if isinstance(s, float) else acc

        return function

    for s in (0.5, 0.25, 3.0):
        np.testing.assert_allclose(pm.matmul(X, W, epilogue=scaled(s)), PRODUCT * s, rtol=1e-5)
    assert len(seen) <= 2


REFUSED = {
    "x.__class__ beside": lambda x: x * (2 if LAYER.__class__ is Layer else 100),
    "differs from call to call": lambda x: x * (2 if id(BIAS) else 100),
}


@pytest.mark.parametrize("message", REFUSED)
def test_questions_that_cannot_be_answered_are_refused(message):
    for run in (lambda: pm.matmul(X, W, epilogue=REFUSED[message]), lambda: pm.fuse(REFUSED[message])(PRODUCT)):
        with pytest.raises(TraceError, match=message):
            run()


def test_captured_objects_are_not_changed():
    def changes(x):
        LAYER.scale = 3.0
        return x

    for run in (lambda: pm.matmul(X, W, epilogue=changes), lambda: pm.fuse(changes)(PRODUCT)):
        with pytest.raises(TraceError, match="setting"):
            run()
    assert LAYER.scale == 0.5
