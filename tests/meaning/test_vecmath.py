"""Functions of vectors: within their bounds whatever becomes of products, and right where there is no bound."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
from contracted import value

from portmm.spec import expr, vector_math

INF = math.inf
TINY = 2.0**-149
GREATEST = float(np.finfo(np.float32).max)
ROOT = math.sqrt(2)

erf = np.frompyfunc(math.erf, 1, 1)
erfc = np.frompyfunc(math.erfc, 1, 1)


def gelu_tanh(x):
    return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# In float64, for finite arguments.
EXACT = {
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "tanh": np.tanh,
    "erf": lambda x: erf(x).astype(float),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "gelu": lambda x: 0.5 * x * erfc(-x / ROOT).astype(float),
    "gelu_tanh": gelu_tanh,
    "fast_gelu": gelu_tanh,
}

# Operations; those that only look at the same bits otherwise are free.
COST = {
    "exp": 19,
    "expm1": 20,
    "log": 26,
    "tanh": 22,
    "erf": 24,
    "sigmoid": 20,
    "silu": 22,
    "softplus": 33,
    "gelu": 31,
    "gelu_tanh": 25,
    "fast_gelu": 25,
}

# Where an expansion changes over: clamps, other formulas, halves of a turn, the ends of what is normal and finite.
BREAKS = (
    [9.1, 18.0, 89.0, 104.0, 1.0, 4.0, 20.0, 10.100637, 6.0, 13.1, 91.85677, 88.722839, 103.97208, 87.33654, 0.0]
    + [math.sqrt(0.5), ROOT, 2.0**-126, 2.0**127, 2.0**-127, GREATEST]
    + [(n + 0.5) * math.log(2) / rate for n in range(150) for rate in (0.5, 1, 2) if n < 150 * rate]
)

FLUSHED = ("exp", "sigmoid", "silu", "softplus", "gelu", "gelu_tanh", "fast_gelu")
"""Functions that are 0 where their result would be subnormal."""
LEAST = 2.0**-126

FUNCTIONS = pytest.mark.parametrize("name", EXACT)


def traced(name):
    return getattr(vector_math, name)(expr.node("load", (0, ()), "f32"))


def call(name, x, world="fma"):
    return np.broadcast_to(value(traced(name), np.asarray(x, np.float32), world), np.shape(x))


def bound(name, world):
    """The error bounds that the docstring promises."""
    numbers = re.search(r"Bound: ([\d.]+)(?:, ([\d.]+))? ulp", getattr(vector_math, name).__doc__).groups()
    return float(numbers[1] or numbers[0]) if world == "none" else float(numbers[0])


def samples():
    """All exponents alike, the middle more densely, and both sides of every change."""
    every = np.arange(0, 2**32, 7919, dtype=np.uint32).view(np.float32)
    rng = np.random.default_rng(0)
    middle = [rng.uniform(-r, r, 100_000).astype(np.float32) for r in (0.5, 2, 10, 120)]
    near = np.float32(BREAKS)[:, None].view(np.int32) + np.arange(-40, 41, dtype=np.int32)
    near = near[near >= 0].view(np.float32)
    x = np.concatenate([every, *middle, near, -near])
    return x[np.isfinite(x)]


@pytest.fixture(scope="module")
def arguments():
    return samples()


def unit(exact):
    """One in the last place."""
    return np.ldexp(1.0, np.clip(np.frexp(exact)[1] - 1, -126, 127) - 23)


def ulps(got, exact):
    """Errors in units of the last place; what is beyond float32 counts as 2**128."""
    far = 2.0**128
    error = np.abs(np.clip(got.astype(float), -far, far) - np.clip(exact, -far, far)) / unit(exact)
    assert (np.isnan(got) == np.isnan(exact)).all()
    return np.where(np.isnan(exact), 0, error)


@pytest.mark.thin(2)
@FUNCTIONS
@pytest.mark.parametrize("world", ["fma", "none", "all", "addend"])
def test_within_its_bound(name, world, arguments):
    x = arguments
    if name in ("gelu", "gelu_tanh", "fast_gelu"):
        x = x[x >= (-6 if name == "gelu" else -INF)]
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(float))
        allowed = np.maximum(1, np.where(x < 0, x.astype(float) ** 2, 1)) if "gelu" in name else 1
    got = call(name, x, world)
    error = ulps(got, exact) / allowed
    if name in FLUSHED:
        assert ((got == 0) | (np.abs(got) >= LEAST))[x < -1].all()
        error[(x < -1) & (got == 0) & (np.abs(exact) < 1.001 * LEAST)] = 0
    worst = np.argmax(error)
    assert error[worst] <= bound(name, world), f"{error[worst]:.3f} at {x[worst]!r}"


@pytest.mark.parametrize(("x", "part"), [(-7, 2e-5), (-9, 1e-4), (-11, 1e-3), (-13, 1e-2)])
def test_the_far_left_of_gelu(x, part):
    x = np.linspace(x, x + 1, 1000, dtype=np.float32)
    exact = EXACT["gelu"](x.astype(float))
    assert (np.abs(call("gelu", x) - exact) <= part * np.abs(exact) + TINY).all()


ODD = [(0.0, 0.0), (-0.0, -0.0), (TINY, TINY), (-TINY, -TINY), (GREATEST, 1.0), (INF, 1.0), (-INF, -1.0)]
GATED = [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -0.0), (GREATEST, GREATEST), (-GREATEST, -0.0), (20.0, 20.0)]
SPECIAL = {
    "exp": [(0.0, 1.0), (-0.0, 1.0), (INF, INF), (-INF, 0.0), (88.72284, INF), (-87.34, 0.0), (-104.0, 0.0)],
    "expm1": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -1.0), (-30.0, -1.0), (88.72284, INF)],
    "log": [(1.0, 0.0), (0.0, -INF), (-0.0, -INF), (INF, INF), (-INF, math.nan), (-1.0, math.nan), (-TINY, math.nan)],
    "tanh": ODD,
    "erf": ODD,
    "sigmoid": [(0.0, 0.5), (-0.0, 0.5), (INF, 1.0), (-INF, 0.0), (-87.34, 0.0), (-105.0, 0.0), (18.0, 1.0)],
    "silu": [*GATED, (-109.0, -0.0)],
    "softplus": [(INF, INF), (-INF, 0.0), (GREATEST, GREATEST), (-105.0, 0.0), (-87.34, 0.0), (30.0, 30.0)],
    "gelu": GATED,
    "gelu_tanh": GATED,
    "fast_gelu": GATED,
}


@FUNCTIONS
@pytest.mark.parametrize("world", ["fma", "none", "all", "addend"])
def test_special_values(name, world):
    x, expected = np.array(SPECIAL[name], np.float32).T
    got = call(name, x, world)
    np.testing.assert_array_equal(got, expected)
    signed = ~np.isnan(expected) & ((name != "gelu") | (expected != 0))  # a product that vanishes may be added to 0
    np.testing.assert_array_equal(np.signbit(got)[signed], np.signbit(expected)[signed])


@FUNCTIONS
def test_nan_of_any_payload(name):
    rng = np.random.default_rng(1)
    payload = np.concatenate([rng.integers(1, 2**23, 100_000), 1 << np.arange(23), 2**23 - 1 - np.arange(600)])
    for sign in (0, -(2**31)):
        x = (payload.astype(np.int32) | np.int32(0x7F800000) | np.int32(sign)).view(np.float32)
        assert np.isnan(call(name, x)).all()


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["exp", "expm1", "log", "tanh", "erf", "sigmoid", "softplus"])
def test_no_step_back(name):
    """These only grow, but for two units in the last place, on both sides of every change."""
    for at in (s * b for b in BREAKS for s in (1, -1) if name != "log" or s * b > 0):
        x = np.sort((np.float32(at).view(np.int32) + np.arange(-40, 41, dtype=np.int32)).view(np.float32))
        y = call(name, x[np.isfinite(x)]).astype(float)
        y = y[np.isfinite(y)]
        assert (y[1:] >= np.maximum.accumulate(y)[:-1] - 2 * unit(y[1:])).all(), at


@FUNCTIONS
def test_operations(name):
    """Each is one of C's on vectors; the dear ones are few."""
    found = Counter(e.op for e in expr.ordered((traced(name),)) if e.op not in ("const", "load"))
    simple = "add sub mul div neg abs fma lt le eq ne and or not shl shr select bits from_bits float"
    assert set(found) <= set(simple.split())
    assert found["div"] == (name in ("tanh", "sigmoid", "silu", "gelu_tanh", "fast_gelu"))
    assert sum(found.values()) - found["bits"] - found["from_bits"] == COST[name]
