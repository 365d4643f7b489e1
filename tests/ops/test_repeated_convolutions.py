"""Further calls of a convolution of one kind, which the run time makes without Python, with an epilogue and without."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from convolved import convolved

import portmm as pm
from portmm.ops import convolution, host_matmul
from portmm.runtime import cpu

pytestmark = pytest.mark.calls

QUICKLY = True
CASES = {
    "last": ((2, 7, 6, 8), (5, 8, 3, 3), {"padding": 1}),
    "first": ((2, 8, 7, 6), (5, 8, 3, 3), {"padding": 1, "layout": "NCHW"}),
    "pointwise": ((1, 7, 6, 8), (5, 8, 1, 1), {}),
    "groups": ((2, 7, 6, 8), (12, 2, 3, 3), {"groups": 4}),
    "line": ((2, 9, 8), (5, 8, 3), {"layout": "NWC", "stride": 2}),
}


def values(shape, seed):
    """Small integers: their sums are exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def rectified(factor, bias, flat, *, last):
    """An epilogue with a number, a value for each channel and one for each element."""

    def last_one(acc, i):
        return pm.relu(acc * factor + bias[i.n] + flat[i.b, i.m, i.n])

    def first_one(acc, i):
        return pm.relu(acc * factor + bias[i.n] + flat[i.b, i.n, i.m])

    return last_one if last else first_one


@pytest.fixture
def by_runtime(monkeypatch):
    """Whether each call was made by the run time alone."""
    pm.conv(values((1, 1, 1, 1), 0), pm.pack_conv(values((1, 1, 1, 1), 0)))
    if type(cpu.runtime()).__name__ == "CffiRuntime":
        pytest.skip("a run time without Python's headers repeats no call")
    made, again = [], host_matmul.again

    def seen(*call):
        result = again(*call)
        made.append(result is not NotImplemented)
        return result

    monkeypatch.setattr(host_matmul, "again", seen)
    return made


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("given", [False, True])
def test_a_second_call_is_made_by_the_runtime(case, given, by_runtime):
    shape, filters, how = CASES[case]
    last = not how.get("layout", "").startswith("NC")
    w = values(filters, 1)
    packed = pm.pack_conv(w, groups=how.get("groups", 1), layout=how.get("layout", "NHWC"))
    outputs = len(w)
    for seed in range(3):
        x, bias, factor = values(shape, seed), values(outputs, seed), float(seed + 1)
        sums = convolved(x, w, **how)
        residual = values(sums.shape, seed)
        flat = residual.reshape((len(x), -1, outputs) if last else (len(x), outputs, -1))

        want = sums * factor + (bias if last else bias.reshape(-1, *(1,) * (x.ndim - 2))) + residual
        epilogue = rectified(factor, bias, flat, last=last)
        for function, expected in ((epilogue, np.maximum(want, 0)), (None, sums)):
            out = np.empty(sums.shape, np.float32) if given else None
            result = pm.conv(x, packed, out, **how, epilogue=function)
            assert result is out or not given
            np.testing.assert_array_equal(result, expected)
    assert by_runtime == [False, False, True, True, True, True]


def test_options_tell_calls_apart(by_runtime):
    """All results have one shape, and filters one size of their matrix."""
    x = values((1, 6, 6, 4), 0)
    options = [{"padding": ((a, 2 - a), (b, 2 - b))} for a, b in itertools.product(range(3), repeat=2)]
    options += [{"padding": 2, "dilation": 2}, {"padding": "same"}]
    w = values((4, 4, 3, 3), 1)
    packed = pm.pack_conv(w)
    for _, how in itertools.product(range(2), options):
        same = how | ({"padding": 1} if how["padding"] == "same" else {})
        np.testing.assert_array_equal(pm.conv(x, packed, **how), convolved(x, w, **same))
    tall, wide = values((4, 4, 9, 1), 2), values((4, 4, 1, 9), 3)
    for _, (y, padding) in itertools.product(range(2), ((tall, (4, 0)), (wide, (0, 4)))):
        np.testing.assert_array_equal(pm.conv(x, pm.pack_conv(y), padding=padding), convolved(x, y, padding=padding))
    assert by_runtime[-4:] == [False, False, True, True]
    assert all(by_runtime[len(options) : 2 * len(options)])


def test_types_of_results_tell_calls_apart(by_runtime):
    x, packed = values((1, 6, 6, 4), 0).astype(np.int8), pm.pack_conv(values((4, 4, 3, 3), 1).astype(np.int8))
    for dtype in (None, np.float32, np.float64, np.int64) * 2:
        assert pm.conv(x, packed, dtype=dtype).dtype == (dtype or np.int32)

    def halved(acc, i):
        del i
        return acc * 0.5

    for dtype in (np.float32, np.float16) * 2:
        assert pm.conv(x, packed, dtype=dtype, epilogue=halved).dtype == dtype
    assert by_runtime[-2:] == [True, True]


def test_settings_tell_calls_apart(by_runtime):
    x, packed = values((1, 6, 6, 4), 0), pm.pack_conv(values((4, 4, 3, 3), 1))
    want = pm.conv(x, packed)
    with pm.config(threads=1, deterministic=True):
        np.testing.assert_array_equal(pm.conv(x, packed), want)
        np.testing.assert_array_equal(pm.conv(x, packed), want)
    np.testing.assert_array_equal(pm.conv(x, packed), want)
    assert by_runtime == [False, False, True, True]


def plus(residual):
    """An epilogue that adds an array."""

    def added(acc, i):
        return acc + residual[i.b, i.m, i.n]

    return added


def test_results_over_operands_are_made_apart(by_runtime):
    """A residual that is the result itself, images that are overwritten, and several results."""
    w, bias = values((4, 4, 3, 3), 1), values(4, 2)
    packed = pm.pack_conv(w)
    for seed in range(2):
        x = values((1, 6, 6, 4), seed)
        want, to = convolved(x, w, padding=1), values((1, 6, 6, 4), seed + 5)
        residual = to.reshape(1, -1, 4)
        expected = want + to

        assert pm.conv(x, packed, to, padding=1, epilogue=plus(residual)) is to
        np.testing.assert_array_equal(to, expected)
        both = pm.conv(x, packed, padding=1, epilogue=lambda acc, i: (acc + bias[i.n], acc))
        np.testing.assert_array_equal(both[0], want + bias)
        np.testing.assert_array_equal(both[1], want)
        assert pm.conv(x, packed, x, padding=1) is x
        np.testing.assert_array_equal(x, want)
    assert by_runtime == [False, False, False, False, True, False]


def test_a_repeated_call_checks_its_result(by_runtime):
    x, packed = values((1, 6, 6, 4), 0), pm.pack_conv(values((4, 4, 3, 3), 1))
    to = np.empty((1, 4, 4, 4), np.float32)
    for _ in range(2):
        pm.conv(x, packed, to)
    assert by_runtime == [False, True]
    to.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pm.conv(x, packed, to)
    with pytest.raises(ValueError, match="shape"):
        pm.conv(x, packed, np.empty((1, 4, 4, 5), np.float32))
    with pytest.raises(TypeError):
        pm.conv(x, packed, [[1.0]])


OF_PYTHON = {
    "products": ((2, 7, 6, 24), (9, 8, 1, 1), {"groups": 3}),
    "first": ((2, 24, 7, 6), (9, 8, 3, 3), {"groups": 3, "layout": "NCHW"}),
    "single channels": ((2, 7, 6, 8), (8, 1, 3, 3), {"groups": 8, "padding": 1}),
}


@pytest.mark.parametrize("case", OF_PYTHON)
@pytest.mark.parametrize("given", [False, True])
def test_further_calls_of_several_products(case, given, monkeypatch):
    """Python repeats these, with an epilogue and without, unless the result is read by the epilogue."""
    made, first = [], convolution.convolved
    monkeypatch.setattr(convolution, "convolved", lambda *call: made.append(call) or first(*call))
    shape, filters, how = OF_PYTHON[case]
    last, w = not how.get("layout", "").startswith("NC"), values(filters, 1)
    packed = pm.pack_conv(w, groups=how["groups"], layout=how.get("layout", "NHWC"))
    for seed in range(3):
        x, bias = values(shape, seed), values(len(w), seed)
        sums = convolved(x, w, **how)
        residual = values(sums.shape, seed)
        flat = residual.reshape((len(x), -1, len(w)) if last else (len(x), len(w), -1))
        want = np.maximum(sums * 2 + (bias if last else bias.reshape(-1, 1, 1)) + residual, 0)
        for function, expected in ((rectified(2.0, bias, flat, last=last), want), (None, sums)):
            out = np.empty(sums.shape, np.float32) if given else None
            result = pm.conv(x, packed, out, **how, epilogue=function)
            assert result is out or not given
            np.testing.assert_array_equal(result, expected)
    assert len(made) <= 2
    twice = np.concatenate([residual, residual])[: len(residual)]
    over = rectified(2.0, bias, twice.reshape(flat.shape), last=last)
    np.testing.assert_array_equal(pm.conv(x, packed, twice, **how, epilogue=over), want)
    both = pm.conv(x, packed, **how, epilogue=lambda acc, _: (acc, acc * 2))
    np.testing.assert_array_equal(both[1], 2 * both[0])
