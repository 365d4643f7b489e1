"""Products of narrow types as a user calls them: any layout, batch, vector, output and target."""

from __future__ import annotations

import cover
import ml_dtypes
import numpy as np
import pytest
from machines import HERE

import portmm as pm

pytestmark = pytest.mark.calls

QUICKLY = True

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), BF16]
EPS = {BF16: 2.0**-8, np.dtype(np.float16): 2.0**-11}
EXTENTS = [1, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 48, 65, 100]
PAIRS = [
    *((x, y) for x in FLOATS for y in FLOATS if (x, y) != (FLOATS[0], FLOATS[0])),
    *((x, np.dtype(np.int8)) for x in (*FLOATS, np.dtype(np.int8), np.dtype(np.uint8))),
]


def laid(x, how):
    """The values of an array in some other order of memory."""
    ways = [
        lambda: x,
        lambda: np.asfortranarray(x),
        lambda: np.repeat(x, 2, axis=-1)[..., ::2],
        lambda: x[..., ::-1].copy()[..., ::-1],
        lambda: np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    ]
    return ways[how]()


def drawn(rng, shape, dtype):
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return laid(rng.integers(low, high + 1, shape).astype(dtype), rng.integers(5))
    return laid(rng.standard_normal(shape).astype(dtype), rng.integers(5))


def check(got, a, b):
    """Integers exactly; floats within the roundings of sums in float32 and of the result."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    want, size = np.matmul(x, y), np.matmul(np.abs(x), np.abs(y))
    if a.dtype.kind in "iu":
        assert np.asarray(got).dtype == np.int32
        np.testing.assert_array_equal(got, want)
        return
    dtype = np.asarray(got).dtype
    # A result that is asked for in a wide type may be that of the operands' own, if kernels do not write it.
    last = EPS.get(dtype, 0.0) or (EPS.get(a.dtype, 0.0) if dtype == np.float64 and a.dtype == b.dtype else 0.0)
    bound = 2.0**-23 * (a.shape[-1] + 2) * size + 2.02 * last * np.abs(want) + 2.0**-24 * (last == 2.0**-11)
    off = np.abs(np.asarray(got).astype(np.float64) - want) > bound
    assert not off.any(), np.argwhere(off)[0]


@pytest.mark.thin(5)
@pytest.mark.parametrize(
    ("target", "left", "right"),
    [
        (target, *pair)
        for i, pair in enumerate(PAIRS)
        for j, target in enumerate((None, *HERE))
        if target is None or (i + j) % 4 == 0
    ],
    ids=str,
)
def test_products(target, left, right):
    """All on this machine's own target, some on each lesser one."""
    turn = PAIRS.index((left, right))
    rng = np.random.default_rng(turn)
    with pm.config(target=target):
        for i in range(5) if target is None else cover.some(range(5), turn, 2):
            m, n, k = (int(rng.choice(EXTENTS)) for _ in range(3))
            n = 1 if i == 2 else n
            batch = (2, 3)[: int(rng.integers(3))]
            a, b = drawn(rng, (*batch, m, k), left), drawn(rng, (*(batch if i % 2 else ()), k, n), right)
            a = a[..., 0, :] if i == 4 and not batch else a
            got = pm.matmul(a, b)
            check(got, a, b)
            check(pm.matmul(a, pm.pack(b, activations=left)), a, b)
            outs = [np.dtype(np.int32)] if left.kind in "iu" else [*FLOATS, np.dtype(np.float64)]
            for dtype in cover.some(
                outs, i, len(outs)
            ):  # a kernel of its own each, and there are more products than types
                out = laid(np.zeros(got.shape, dtype), i % 2)
                assert pm.matmul(a, b, out) is out
                check(out, a, b)
            if left.kind == "f":
                assert pm.matmul(a, b, dtype=np.float32).dtype == np.float32


def test_types_of_results():
    ones = {x: np.ones((2, 2), x) for x in map(np.dtype, (*FLOATS, np.float64, np.int8, np.uint8))}
    for a, b, want in (
        (BF16, BF16, BF16), (np.float16, np.float16, np.float16), (BF16, np.float16, np.float32),
        (np.float32, BF16, np.float32), (BF16, np.float64, np.float64), (BF16, np.int8, np.float32),
        (np.int8, np.int8, np.int32), (np.uint8, np.int8, np.int32),
    ):  # fmt: skip
        assert pm.matmul(ones[np.dtype(a)], ones[np.dtype(b)]).dtype == want, (a, b)


@pytest.mark.parametrize(("a", "b"), [(np.int8, np.uint8), (np.uint8, np.uint8), (np.int16, np.int8), (bool, np.int8)])
def test_integers_that_do_not_multiply_are_refused(a, b):
    with pytest.raises(TypeError, match=r"uint8|int8"):
        pm.matmul(np.ones((2, 2), a), np.ones((2, 2), b))


def test_rows_of_one_weight_agree_between_layouts():
    """A weight packed for other activations is unpacked, and says nothing wrong."""
    rng = np.random.default_rng(0)
    b = rng.standard_normal((40, 24)).astype(BF16)
    for packed in (pm.pack(b), pm.pack(b, activations=np.float32)):
        for dtype in FLOATS:
            a = rng.standard_normal((5, 40)).astype(dtype)
            check(pm.matmul(a, packed), a, b)
        np.testing.assert_array_equal(np.asarray(packed), b)
