"""Functions for results of 16 bits: their errors add little to rounding, and replace others only where they may."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from contracted import value

from portmm.spec import expr, vector_math
from portmm.spec.device_math import DEVICE
from portmm.spec.epilogue import C, Fused, Operand, acc, load
from portmm.spec.function_patterns import function_of
from portmm.spec.short_math import SHORT, TYPES
from portmm.spec.shortened import shortened

INF = math.inf
erfc = np.frompyfunc(math.erfc, 1, 1)
EXACT = {
    "gelu": lambda x: 0.5 * x * erfc(-x * math.sqrt(0.5)).astype(float),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
BITS = {"bf16": (8, -125), "f16": (11, -13)}
"""Type -> bits of a number, and the exponent of the least normal one as `frexp` gives it."""
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
TABLES = {"any": SHORT, "device": DEVICE}
CASES = pytest.mark.parametrize(("where", "name", "dtype"), [(w, x, y) for w in TABLES for x in SHORT for y in TYPES])


def call(where, name, dtype, x, world="fma"):
    root = TABLES[where][name](expr.node("load", (0, ()), "f32"), dtype)
    x = np.asarray(x, np.float32)
    return np.broadcast_to(value(root, x, world), x.shape)


@pytest.mark.parametrize("world", ["fma", "none", "all", "addend"])
@CASES
def test_errors_are_small_parts_of_units(where, name, dtype, world):
    rng = np.random.default_rng(0)
    every = np.arange(0, 2**32, 25013, dtype=np.uint32).view(np.float32)
    x = np.concatenate([every, *(rng.uniform(-r, r, 20_000).astype(np.float32) for r in (0.5, 3, 14, 95))])
    x = x[np.isfinite(x)]
    bits, least = BITS[dtype]
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(float))
    x, exact = x[np.abs(exact) < 65504], exact[np.abs(exact) < 65504]
    got = call(where, name, dtype, x, world).astype(float)
    unit = np.ldexp(1.0, np.maximum(np.frexp(exact)[1], least) - bits)
    error = np.abs(got - exact) / unit
    if dtype == "f16":
        error[np.maximum(np.abs(got), np.abs(exact)) < 2.0**-25] = 0  # these round to 0
    else:
        # Where they are subnormal, one unit is 2**-133, and results 0 or not.
        error[np.abs(exact) < 1.001 * 2.0**-126] *= got[np.abs(exact) < 1.001 * 2.0**-126] != 0
        assert where == "device" or ((got == 0) | (np.abs(got) >= 2.0**-126))[x < -1].all()
    far = (name, dtype) == ("gelu", "bf16")
    assert error[x >= (-6 if far else -INF)].max() <= 0.042
    assert error.max() <= (0.13 if far else 0.042)


@CASES
def test_all_numbers_of_16_bits(where, name, dtype):
    """Of all arguments that the type has, the rounded result is the nearest number, or the next one in a close call."""
    x = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    x = x[np.isfinite(x)]
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(float))
        exact[np.abs(exact) < 2.0**-126] = 0
        got = call(where, name, dtype, x).astype(DTYPES[dtype])
        nearest = exact.astype(np.float32).astype(DTYPES[dtype])
    wrong = (got != nearest) & ~(np.abs(exact) < 1.001 * 2.0**-126)
    assert wrong.mean() < 0.04
    steps = np.abs(got.view(np.int16).astype(int) - nearest.view(np.int16).astype(int))
    assert steps[wrong & (exact != 0)].max(initial=0) <= 1


@CASES
def test_ends(where, name, dtype):
    right = 1.0 if name == "sigmoid" else INF
    at_zero = 0.5 if name == "sigmoid" else 0.0
    got = call(where, name, dtype, [INF, -INF, 0.0, -0.0]).astype(DTYPES[dtype])
    np.testing.assert_array_equal(got.astype(float), [right, 0, at_zero, at_zero])
    payload = np.arange(1, 2**23, 4001, dtype=np.int32)
    for sign in (0, -(2**31)):
        assert np.isnan(call(where, name, dtype, (payload | 0x7F800000 | np.int32(sign)).view(np.float32))).all()


@CASES
def test_they_are_shorter_and_known_by_their_names(where, name, dtype):
    x = acc()
    short = TABLES[where][name](x, dtype)
    count = {
        which: sum(
            4 * (e.op == "div") + (e.op not in {"acc", "const", "bits", "from_bits"}) for e in expr.ordered((y,))
        )
        for which, y in (("short", short), ("long", getattr(vector_math, name)(x)))
    }
    assert count["short"] < count["long"]
    assert function_of(short) == (name, x)


def test_only_last_functions_of_16_bits_change():
    x, gate = load(0, "bf16"), load(1, "bf16")
    operands = (Operand("bf16", "mn"), Operand("bf16", "n"), Operand("f32", "mn"))
    long, short = vector_math.silu(x), SHORT["silu"](x, "bf16")

    def changed(*results, to="bf16"):
        return [y for _, y in shortened(Fused(operands, results), to).results]

    assert changed((C, long)) == [short]
    assert changed((C, long * gate)) == [short * gate]
    assert changed((C, long + gate)) == [long + gate]  # what is added may cancel
    assert changed((C, long), to="f32") == [long]
    assert changed((C, long), (2, long * gate)) == [long, long * gate]  # the function is shared with a float32
    assert changed((C, long * gate), to="f16") == [long * gate]  # errors of float16 are absolute
    assert changed((C, long), to="f16") == [SHORT["silu"](x, "f16")]
