"""Primitives that compute with numbers: the shim's dot products of bytes, and narrow floats."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_shim import kernel

from portmm.target.target import load_isa

pytestmark = pytest.mark.rest("of the shim itself")


def test_dot4_wraps_and_takes_bytes_for_what_they_are():
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-128, 128, (64, 4)).astype(np.int8) for _ in range(2))
    a[0], b[0], a[1], b[1] = -128, -128, -1, 127
    c = rng.integers(-(2**31), 2**31, 64).astype(np.int32)
    c[:2] = 2**31 - 1
    both, mixed = np.zeros(64, np.int32), np.zeros(64, np.int32)
    body = "s[t] = dot4_s8s8(a[t], b[t], c[t]); u[t] = dot4_u8s8(a[t], b[t], c[t]);"
    arguments = "const int *a, const int *b, const int *c, int *s, int *u"
    words = [a.view(np.int32).ravel(), b.view(np.int32).ravel()]
    kernel(body, arguments).launch_in_orders((1, 1, 1), 64, [*words, c, both, mixed])
    for got, left in ((both, a), (mixed, a.view(np.uint8))):
        want = (left.astype(np.int64) * b).sum(1) + c
        np.testing.assert_array_equal(got, want.astype(np.uint64).astype(np.uint32).view(np.int32))


def converted(body, to, of, x):
    made = np.zeros(x.size, to)
    arguments = f"int n, const {of} *x, {'float' if to == np.float32 else 'unsigned short'} *y"
    text = f"for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) y[i] = {body}(x[i]);"
    # What is no instruction is its own text, as kernels have it.
    said = {x.name: f"static inline {x.cuda}\n" for x in load_isa("simt").functions if not x.hardware}
    kernel(text, arguments, before=said.get(body, "")).launch((4, 1, 1), 32, [("int", x.size), x, made])
    return made


EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


def floats():
    """Each half, what lies halfway to the next and beside that, numbers of every size, and NaNs."""
    with np.errstate(over="ignore"):
        halves = EVERY_HALF[:0x7C01].view(np.float16).astype(np.float32)
    between = ((halves[:-2].astype(np.float64) + halves[1:-1]) / 2).astype(np.float32)
    bits = np.random.default_rng(3).integers(0, 1 << 32, 20000).astype(np.uint32)
    words = [halves.view(np.uint32), *(between.view(np.uint32) + np.int64(i) for i in (-1, 0, 1)), bits]
    edges = (EVERY_HALF.astype(np.uint32)[::7] << 16) + np.array([[0x7FFF], [0x8000], [0x8001]], np.uint32)
    ends = np.array([65504.0, 65519.99, 65520.0, 3.4e38, np.inf, 1e-45], np.float32).view(np.uint32)
    every = np.concatenate([*words, edges.ravel(), ends]).astype(np.uint32)
    return np.concatenate([every, every ^ 0x80000000]).astype(np.uint32).view(np.float32)


def test_halves_become_floats():
    got = converted("f32_of_f16", np.float32, "unsigned short", EVERY_HALF)
    np.testing.assert_array_equal(got, EVERY_HALF.view(np.float16).astype(np.float32))
    got = converted("f32_of_bf16", np.float32, "unsigned short", EVERY_HALF)
    np.testing.assert_array_equal(got.view(np.uint32), EVERY_HALF.astype(np.uint32) << 16)


def test_floats_become_halves():
    x = floats()
    got = converted("f16_of_f32", np.uint16, "float", x)
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(np.float16)
    np.testing.assert_array_equal(got.view(np.float16), want)
    np.testing.assert_array_equal(got[~np.isnan(x)], want.view(np.uint16)[~np.isnan(x)])  # zeros have signs


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of NaNs that signal
def test_floats_become_bfloats():
    x = floats()
    got = converted("bf16_of_f32", np.uint16, "float", x)
    x, number = x.astype(np.float64), ~np.isnan(x)
    value = (got.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert np.isnan(value[~number]).all()
    low, high = (((got.astype(np.int64) + i) << 16).astype(np.uint32).view(np.float32) for i in (-1, 1))
    # The largest halves round to infinity, whose neighbour is not a number.
    small = number & (np.abs(x) < 3.38e38) & (value != 0)
    for other in (low, high):
        near, far = (np.abs(y[small] - x[small]) for y in (value, other.astype(np.float64)))
        assert ((near < far) | ((near == far) & (got[small] % 2 == 0))).all()
    assert (np.isinf(value) == (np.abs(x) >= 3.3961775292304601e38))[number].all()
