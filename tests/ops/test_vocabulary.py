"""Each function of the vocabulary: traced into a kernel, it is what it is of arrays."""

from __future__ import annotations

import numpy as np
import pytest
from machines import HERE

import portmm as pm
from portmm.ops.rowwise import over_rows
from portmm.spec import elementwise as v

QUICKLY = "fast"

NAMES = {"m": "m", "n": "n", "b": "b"}
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1e-39,
        1.2e-38,
        3e38,
        -3e38,
        1.0,
        -1.0,
        0.5,
        88.7,
        89.0,
        -87.4,
        -104.0,
        20.0,
        9.1,
        -9.1,
    ],
    np.float32,
)
GRID = np.concatenate(
    [SPECIAL, np.linspace(-12, 12, 400, dtype=np.float32), np.geomspace(1e-30, 1e30, 300).astype(np.float32)]
)
X = np.stack([GRID, -GRID])
FUNCTIONS = {
    name: getattr(v, name)
    for name in (
        "exp",
        "log",
        "tanh",
        "erf",
        "sigmoid",
        "sqrt",
        "rsqrt",
        "silu",
        "gelu",
        "gelu_tanh",
        "fast_gelu",
        "relu",
        "relu6",
        "leaky_relu",
        "hard_sigmoid",
        "hard_swish",
        "square",
        "softplus",
    )
}
ROWS = {
    "sum": v.sum,
    "max": v.max,
    "mean": v.mean,
    "softmax": v.softmax,
    "logsumexp": v.logsumexp,
    "log_softmax": v.log_softmax,
    "rms_norm": v.rms_norm,
    "layer_norm": v.layer_norm,
}


def traced(function, *given):
    return over_rows(function, given, NAMES)[0]


@pytest.mark.parametrize("name", HERE)
def test_functions_of_elements(name):
    """Within a few units in the last place of float64, and the same where that is no number."""
    with pm.config(target=name), np.errstate(all="ignore"):
        results = traced(lambda x: tuple(f(x) for f in FUNCTIONS.values()), X)
        for (function, f), got in zip(FUNCTIONS.items(), results, strict=True):
            exact = f(X.astype(np.float64))
            want = exact.astype(np.float32)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=function)
            np.testing.assert_array_equal(np.isinf(got), np.isinf(want), err_msg=function)
            fine = np.isfinite(want)
            lost = np.abs(X[fine]) * 2.0**-50  # of float64, where the plain formula cancels
            off = np.maximum(np.abs(got[fine].astype(float) - exact[fine]) - lost, 0) / np.maximum(
                np.spacing(np.abs(want[fine])), 2.0**-149
            )
            # A plain formula loses what cancels; vecmath has bounds of its own: see test_vecmath.py.
            least = {"gelu": 40, "gelu_tanh": 64, "fast_gelu": 64, "hard_swish": 64, "hard_sigmoid": 64}.get(
                function, 8
            )
            assert off.max() <= least, (function, X[fine][off.argmax()], off.max())
            if function.startswith(("relu", "hard", "leaky")):
                continue  # of two zeros, either is the larger
            zero = (want == 0) & (X == 0)
            np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]), err_msg=function)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("n", [1, 7, 37, 200])
def test_functions_of_rows(name, n):
    x = np.random.default_rng(n).standard_normal((5, n)).astype(np.float32) * 3
    with pm.config(target=name):
        for function, f in ROWS.items():
            (got,) = traced(f, x)
            want = f(x.astype(np.float64))
            assert got.shape == want.shape, function
            np.testing.assert_allclose(
                got, want, rtol=1e-5, atol=1e-5 * (n if function == "sum" else 4), err_msg=function
            )


def test_values_without_rows_are_refused():
    for f in (pm.softmax, pm.log_softmax, pm.logsumexp, pm.max):
        for x in ("a", 3.0):
            with pytest.raises(pm.PortmmError, match="has no axis"):
                f(x)


def test_rows_of_infinities():
    x = np.array([[-np.inf, 1, 2], [-np.inf] * 3, [np.inf, 0, 1], [np.nan, 0, 1], [3e38] * 3], np.float32)
    with np.errstate(all="ignore"):
        for f in (v.softmax, v.logsumexp, v.log_softmax, v.max):
            np.testing.assert_allclose(
                traced(f, x)[0], f(x.astype(np.float64)).astype(np.float32), rtol=1e-5, err_msg=f.__name__
            )


@pytest.mark.parametrize("name", HERE)
def test_choices(name):
    y = X[:, ::-1].copy()
    cases = {
        "minimum": (lambda a, b: v.minimum(a, b) * 1.0, np.minimum),
        "maximum": (lambda a, b: v.maximum(a, b) * 1.0, np.maximum),
        "clip": (lambda a, _: v.clip(a, -1.5, 2), lambda a, _: np.clip(a, np.float32(-1.5), np.float32(2))),
        "low": (lambda a, _: v.clip(a, None, 2), lambda a, _: np.minimum(a, np.float32(2))),
        "where": (lambda a, b: v.where(a < b, a, b), lambda a, b: np.where(a < b, a, b)),
        "logic": (
            lambda a, b: v.where((a < b) & ~(a == 1.0) | (b > 5), a, 1.0),
            lambda a, b: np.where((a < b) & ~(a == 1) | (b > 5), a, 1),
        ),
        "ufuncs": (
            lambda a, b: np.where(np.isnan(a), 0.0, np.absolute(a) - np.negative(b)),
            lambda a, b: np.where(np.isnan(a), 0, abs(a) + b),
        ),
    }
    with pm.config(target=name), np.errstate(all="ignore"):
        results = traced(lambda a, b: tuple(f(a, b) for f, _ in cases.values()), X, y)
    with np.errstate(all="ignore"):
        for (case, (_, plain)), got in zip(cases.items(), results, strict=True):
            np.testing.assert_array_equal(got, plain(X, y), err_msg=case)


@pytest.mark.parametrize("name", HERE)
def test_rows_are_quantised(name):
    x = np.random.default_rng(3).standard_normal((6, 45)).astype(np.float32)
    x[0], x[1] = 0, 1e-37
    with pm.config(target=name):
        codes, scales = traced(v.quantize_rows, x)
    assert codes.dtype == np.int8
    assert scales.shape == (6, 1)
    assert (np.abs(codes[2:] * scales[2:] - x[2:]) <= scales[2:] * 0.5001).all()
    assert (np.abs(codes[2:]).max(1) == 127).all()
    assert not codes[:2].any()


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9])
def test_dropout(name, rate):
    """The same elements, to the bit, traced or not; as many as the rate says, rows and seeds apart."""
    x = np.random.default_rng(0).standard_normal((2, 60, 150)).astype(np.float32) + 10
    with pm.config(target=name):
        (got,) = traced(lambda e: v.dropout(e, rate, 12345), x)
    np.testing.assert_array_equal(got, v.dropout(x, rate, 12345))
    np.testing.assert_array_equal(got[0] == 0, got[1] == 0)


def test_dropout_is_random():
    ones = np.ones((400, 500), np.float32)
    seen = []
    for seed in (0, 1, 2, 2**31, -5):
        for rate in (0.1, 0.5, 0.8):
            gone = v.dropout(ones, rate, seed) == 0
            # Five standard deviations, of all, of each row, of each column.
            spread = (rate * (1 - rate)) ** 0.5
            assert abs(gone.mean() - rate) <= 5 * spread / ones.size**0.5
            assert abs(gone.mean(1) - rate).max() <= 5.5 * spread / 500**0.5
            assert abs(gone.mean(0) - rate).max() <= 5.5 * spread / 400**0.5
            if rate == 0.5:
                flips = gone.astype(float) - 0.5
                for x, y in ((flips[1:], flips[:-1]), (flips[:, 1:], flips[:, :-1])):  # neighbours
                    assert abs((x * y).mean()) * 4 <= 5 / x.size**0.5
                seen.append(flips)
    for i, x in enumerate(seen):
        for y in seen[:i]:
            assert abs((x * y).mean()) * 4 <= 5 / ones.size**0.5
