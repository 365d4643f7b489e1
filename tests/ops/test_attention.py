"""Attention against float64, in kernels built for this machine and in the interpreter."""

from __future__ import annotations

import cover
import numpy as np
import pytest
from machines import HERE
from runs import guarded

import portmm as pm
from portmm.arrays import numpy_fallback
from portmm.dispatch import cpu_routes
from portmm.errors import NoCompilerError, TraceError
from portmm.ops import attention_fastpath
from portmm.runtime import cpu as cpu_runtime
from portmm.trace import bind

pytestmark = pytest.mark.calls

QUICKLY = "fast"

ml_dtypes = pytest.importorskip("ml_dtypes")
BF16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
INF = np.inf


def exact(q, k, v, *, scale=None, score=None, mask=None, causal=False, window=None, lengths=None, offset=None):
    """The result and the logarithms in float64; score and mask are of whole arrays here."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, group, -3), np.repeat(v, group, -3)
    m, n = q.shape[-2], k.shape[-2]
    s = q @ np.swapaxes(k, -1, -2)
    s *= (1 if score is not None else q.shape[-1] ** -0.5) if scale is None else scale
    s = s if score is None else score(s)
    offset = n - m if offset is None else np.reshape(offset, (*np.shape(offset), *[1] * (3 * bool(np.shape(offset)))))
    at, to = np.arange(m)[:, None] + offset, np.arange(n)
    seen = np.ones((m, n), bool) if mask is None else mask
    if causal:
        seen = seen & (to <= at)
    if window is not None:
        seen = seen & (to > at - window) & (causal | (to < at + window))
    if lengths is not None:
        seen = seen & (to < np.reshape(lengths, (*np.shape(lengths), 1, 1, 1)))
    s = np.where(seen, s, -INF)
    most = s.max(-1, keepdims=True, initial=-1e30)
    w = np.exp(s - most)
    total = w.sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        return np.where(total > 0, w @ v / np.where(total > 0, total, 1), 0), (most + np.log(total))[..., 0]


def check(q, k, v, want, **how):
    """The result, and the logarithms."""
    got, lse = pm.attention(q, k, v, return_lse=True, **how)
    assert got.dtype == q.dtype
    assert got.shape == want[0].shape
    tolerance = TOLERANCE[q.dtype.name]
    np.testing.assert_allclose(got.astype(np.float64), want[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want[1], rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(pm.attention(q, k, v, **how), got)


def operands(shape, dtype=np.float32, seed=0):
    """Q, K and V of a shape (items, heads, heads of keys, queries, keys, d, dv)."""
    b, h, few, m, n, d, dv = shape
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(x).astype(dtype) for x in ((b, h, m, d), (b, few, n, d), (b, few, n, dv)))


SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 5, 7, 8, 8),
    (2, 4, 2, 33, 70, 64, 64),
    (1, 2, 1, 130, 517, 40, 72),
    (1, 2, 2, 129, 128, 64, 96),
    (1, 8, 2, 1, 333, 64, 64),
    (1, 6, 1, 2, 1100, 32, 32),
    (2, 1, 1, 17, 5, 7, 5),
    (1, 1, 1, 70, 600, 256, 256),
]
HOW = [
    {},
    {"causal": True},
    {"window": 20},
    {"window": 2**40},
    {"causal": True, "window": 33},
    {"scale": 0.3},
    {"lengths": True},
]


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("shape", "dtype", "how"), cover.pairs(SHAPES, ["float32", "bfloat16", "float16"], HOW), ids=str
)
def test_it_is_attention(shape, dtype, how):
    x = operands(shape, BF16 if dtype == "bfloat16" else dtype)
    if "lengths" in how:
        how = {"lengths": np.random.default_rng(3).integers(0, shape[4] + 1, shape[0])}
    check(*x, exact(*x, **how), **how)


@pytest.mark.thin(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", HERE)
def test_every_instruction_set(target, dtype):
    turn = HERE.index(target) + (dtype == "bfloat16")
    for i, shape in enumerate(SHAPES[1:4] + SHAPES[5:8]):
        x = operands(shape, BF16 if dtype == "bfloat16" else dtype)
        for how in cover.some(({}, {"causal": True, "window": 9}), i + turn, 2):
            with pm.config(target=target):
                check(*x, exact(*x, **how), **how)


CACHES = {
    "filled": lambda filled, m: {"lengths": filled, "offset": filled - m},
    "shifted": lambda *_: {"offset": 3},
    "apart": lambda *_: {"offset": np.array([0, 90, -1])},
}
SEEN = [{"causal": True}, {"causal": True, "window": 8}, {"window": 9}]


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("dtype", "m", "how", "cache"), cover.pairs([np.float32, BF16], [1, 5, 40], SEEN, CACHES), ids=str
)
def test_queries_at_positions_of_their_own(dtype, m, how, cache):
    """A cache filled up to other lengths for each item."""
    x = operands((3, 4, 2, m, 130, 32, 32), dtype)
    more = CACHES[cache](np.array([130, 47, m]), m)
    check(*x, exact(*x, **how, **more), **how, **more)


def test_positions_are_whole_and_near():
    x = operands((3, 4, 2, 5, 130, 32, 32))
    with pytest.raises(ValueError, match="offsets go"):
        pm.attention(*x, causal=True, offset=131)
    with pytest.raises(TypeError, match="integers"):
        pm.attention(*x, causal=True, offset=0.5)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("m", [1, 70])
def test_large_scores(m, dtype):
    """A scale that is no power of two rounds them: the same way whenever they are computed."""
    for far in (1e3, 1e5, 1e6):
        q, k, v = operands((1, 2, 2, m, 70, 60, 32), dtype)
        q, k = ((x.astype(np.float32) * np.float32(far)).astype(dtype) for x in (q, k))
        got = pm.attention(q, k, v)
        np.testing.assert_allclose(got.astype(np.float64), exact(q, k, v)[0], rtol=2e-2, atol=2e-2)


def test_a_result_over_what_scores_read():
    q, k, v = operands((1, 3, 3, 100, 100, 100, 100))
    held = np.random.default_rng(1).standard_normal((1, 3, 100, 100)).astype(np.float32)
    bias = held[0, 0]
    want = pm.attention(q, k, v, score=lambda s, i: s / 10 + bias[i.q, i.kv])
    got = pm.attention(q, k, v, score=lambda s, i: s / 10 + bias[i.q, i.kv], out=held)
    assert got is held
    np.testing.assert_array_equal(got, want)


def test_what_is_no_score():
    q, k, v = operands((1, 1, 1, 5, 7, 8, 8))
    with pytest.raises(TypeError, match="mask is no function"):
        pm.attention(q, k, v, mask=np.ones((5, 7), bool))
    with pytest.raises(TraceError, match="one value"):
        pm.attention(q, k, v, score=lambda s, _: (s, s))


# -- functions ---------------------------------------------------------------------


def test_a_score_reads_arrays_and_numbers():
    q, k, v = operands((2, 4, 2, 37, 90, 32, 32))
    slopes = np.float32([0.5, 0.25, 0.125, 0.0625])
    queries, keys = np.arange(37)[:, None], np.arange(90)

    def with_scale(scale):
        want = exact(q, k, v, score=lambda s: s * scale - slopes[:, None, None] * abs(queries - keys))
        check(q, k, v, want, score=lambda s, i: s * scale - slopes[i.h] * abs(i.q - i.kv))

    for scale in (0.2, 0.1):
        with_scale(scale)


def test_a_mask_reads_positions_and_arrays():
    q, k, v = operands((2, 2, 2, 70, 65, 16, 24))
    queries, keys = np.arange(70)[:, None], np.arange(65)
    check(q, k, v, exact(q, k, v, mask=queries >= keys), mask=lambda i: i.q >= i.kv)
    seen = np.random.default_rng(1).random((2, 70, 65)) < 0.3
    check(q, k, v, exact(q, k, v, mask=seen[:, None]), mask=lambda i: seen[i.b, i.q, i.kv])
    kinds = np.random.default_rng(2).integers(0, 3, 70)
    want = exact(q, k, v, mask=kinds[:, None] == kinds[:65])
    check(q, k, v, want, mask=lambda i: kinds[i.q] == kinds[i.kv])
    bias = np.random.default_rng(3).standard_normal((2, 70, 65)).astype(np.float32)
    want = exact(q, k, v, score=lambda s: s * 0.5 + bias, causal=True)
    check(q, k, v, want, score=lambda s, i: s * 0.5 + bias[i.h, i.q, i.kv], causal=True)
    check(q, k, v, want, score=lambda s, i: s * 0.5 + bias, causal=True)  # noqa: ARG005 - as functions have it


def test_a_score_is_any_function():
    q, k, v = operands((1, 2, 1, 20, 40, 16, 16))
    check(q, k, v, exact(q, k, v, score=lambda s: 5 * np.tanh(s / 5)), score=lambda s, i: 5 * pm_tanh(s / 5))  # noqa: ARG005
    want = exact(q, k, v, score=lambda s: s * 0.25, scale=0.5)
    check(q, k, v, want, score=lambda s, i: s * 0.25, scale=0.5)  # noqa: ARG005


def pm_tanh(x):
    return np.tanh(x)


def test_a_query_that_sees_nothing():
    q, k, v = operands((1, 2, 2, 50, 30, 8, 8))
    got, lse = pm.attention(q, k, v, mask=lambda i: i.q > 9 + i.kv, return_lse=True)
    assert (got[:, :, :10] == 0).all()
    assert (lse[:, :, :10] == -INF).all()
    assert np.isfinite(lse[:, :, 10:]).all()
    got, lse = pm.attention(q, k, v, causal=True, return_lse=True)  # 50 queries, 30 keys
    assert (got[:, :, :20] == 0).all()
    assert (lse[:, :, :20] == -INF).all()
    got, lse = pm.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (got == 0).all()
    assert (lse == -INF).all()


def test_a_nan_stays_in_its_row():
    q, k, v = operands((1, 1, 1, 40, 50, 8, 8))
    q[0, 0, 3, 2] = np.nan
    got = pm.attention(q, k, v)
    assert np.isnan(got[0, 0, 3]).all()
    assert np.isfinite(np.delete(got, 3, 2)).all()


def test_large_scores_do_not_overflow():
    q, k, v = operands((1, 1, 1, 33, 700, 16, 16))
    check(q * 60, k, v, exact(q * 60, k, v))


def test_without_a_compiler(monkeypatch):
    def none(*_):
        raise NoCompilerError("there is none")

    q, k, v = operands((2, 4, 2, 21, 33, 8, 8))
    slopes = np.float32([0.5, 0.25, 0.125, 0.0625])
    calls = [{}, {"causal": True}, {"window": 7}, {"lengths": [5, 0]}, {"mask": lambda i: i.q != i.kv}]
    calls += [{"score": lambda s, i: s * 0.1 - slopes[i.h] * abs(i.q - i.kv), "causal": True, "window": 9}]
    want = [pm.attention(q, k, v, return_lse=True, **how) for how in calls]
    monkeypatch.setattr(cpu_routes, "program_route", none)
    monkeypatch.setattr(bind, "_ready", {})
    monkeypatch.setattr(attention_fastpath, "kinds", {})
    cpu_runtime.clear_memo()
    monkeypatch.setattr(numpy_fallback, "_warned", ["once"])
    for how, (result, lse) in zip(calls, want, strict=True):
        got = pm.attention(q, k, v, return_lse=True, **how)
        np.testing.assert_allclose(got[0], result, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(got[1], lse, rtol=1e-5, atol=2e-5)


# -- arrays ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_strides(dtype):
    q, k, v = operands((2, 4, 2, 33, 41, 10, 12), BF16 if dtype == "bfloat16" else dtype)
    want = exact(q, k, v)
    for turn in ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)):
        back = np.argsort(turn)
        check(*(np.ascontiguousarray(x.transpose(turn)).transpose(back) for x in (q, k, v)), want)
    wide = [np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype) for x in (q, k, v)]
    for x, y in zip(wide, (q, k, v), strict=True):
        x[..., 1:-2] = y
    check(*(x[..., 1:-2] for x in wide), want)
    check(*(x[:, :, ::-1] for x in (q, k, v)), tuple(np.flip(x, 2) for x in want))
    joined = [x.reshape(2, 1, *x.shape[1:]) for x in (q, k, v)]
    check(*joined, tuple(x.reshape(2, 1, *x.shape[1:]) for x in want))
    check(*(x[0] for x in (q, k, v)), tuple(x[0] for x in want))


@pytest.mark.thin(4)
@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_beside_the_operands_is_touched(dtype, end):
    for shape in ((1, 2, 1, 33, 41, 7, 5), (1, 1, 1, 1, 63, 64, 64), (1, 1, 1, 130, 65, 32, 40)):
        x = operands(shape, BF16 if dtype == "bfloat16" else dtype)
        want = exact(*x, causal=True)
        given = [guarded(y.ravel(), end=end).reshape(y.shape) for y in x]
        out = guarded(np.zeros(want[0].size, x[0].dtype), end=end).reshape(want[0].shape)
        for target in HERE:
            with pm.config(target=target):
                pm.attention(*given, causal=True, out=out)
                np.testing.assert_allclose(
                    out.astype(np.float64), want[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
                )


@pytest.mark.thin(3)
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 21, 32])
def test_tiles_of_few_queries(queries, target):
    """Queries that fill register tiles, or all but some rows of one; keys that fill blocks, or no tile; odd heads."""
    turn = queries + HERE.index(target)
    sizes = [(16, 64, 64), (17, 6, 20), (15, 32, 33), (300, 64, 40), (257, 33, 32), (1100, 18, 96)]
    with pm.config(target=target):
        for group, (keys, d, dv) in zip((1, 2, 1, 3, 1, 1), cover.some(sizes, turn, 3), strict=False):
            x = operands((1, 2 * group, 2, queries, keys, d, dv), seed=turn)
            given = [guarded(y.ravel()).reshape(y.shape) for y in x]
            for how in cover.some(({}, {"causal": True}, {"window": 40}), turn, 2):
                check(*given, exact(*x, **how), **how)


def test_few_queries_see_what_is_not_finite():
    """Infinities and NaN stay in the rows of their query: keys of score -inf have weight 0, padding has no effect."""
    for queries in (2, 3, 6, 8, 13):
        q, k, v = operands((1, 1, 1, queries, 70, 18, 18))
        q = np.abs(q)
        k[0, 0, 33, 5] = -INF
        v[0, 0, 33] = 7.0
        np.testing.assert_allclose(pm.attention(q, k, v), exact(q, k, v)[0], rtol=2e-5, atol=2e-5)
        q[0, 0, 1, 3] = np.nan
        found, others = pm.attention(q, k, v), np.arange(queries) != 1
        assert np.isnan(found[0, 0, 1]).all()
        np.testing.assert_allclose(found[0, 0, others], exact(q, k, v)[0][0, 0, others], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("m", [1, 3])
def test_heads_that_share_keys_are_rows_of_one(m):
    """Groups of heads that fill tiles (AMX) give what each head alone gives, with all options that do not tell rows."""
    q, k, v = operands((2, 24, 2, m, 520, 64, 48), BF16)
    for how in ({}, {"scale": 0.2}, {"lengths": np.array([520, 65])}, {"causal": True}, {"window": 100}):
        check(q, k, v, exact(q, k, v, **how), **how)
        out = np.zeros((2, 24, m, 48), BF16)
        assert pm.attention(q, k, v, out=out, **how) is out
        np.testing.assert_array_equal(out, pm.attention(q, k, v, **how))
    for part in ((..., slice(0, 40)), (..., slice(1, 33))):  # no whole steps of tiles, and misaligned
        check(q[part], k[part], v, exact(q[part], k[part], v))
    turned = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    np.testing.assert_array_equal(pm.attention(turned, k, v), pm.attention(q, k, v))
    with pytest.raises(ValueError, match="shape"):
        pm.attention(q, k, v, out=np.zeros((2, 24, m, 47), BF16))


def test_results_do_not_depend_on_threads():
    for shape in ((2, 4, 2, 150, 700, 64, 64), (1, 2, 1, 1, 5000, 64, 64)):
        x = operands(shape)
        found = []
        for threads in (1, 2, 3):
            with pm.config(threads=threads):
                found.append(pm.attention(*x, causal=True))
        assert all((y == found[0]).all() for y in found)


# -- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": np.zeros((3, 4), np.float32)}, r"q has shape \(3, 4\)"),
        ({"q": np.zeros((1, 2, 3, 5), np.float32)}, "5 columns and k 4"),
        ({"q": np.zeros((1, 3, 3, 4), np.float32)}, "3 heads and k 2"),
        ({"v": np.zeros((1, 2, 6, 4), np.float32)}, "do not fit"),
        ({"k": np.zeros((2, 2, 5, 4), np.float32)}, "do not fit"),
        ({"window": 0}, "window is 0"),
        ({"lengths": [6]}, "lengths go from 6 to 6; with 5 keys pass 0 to 5"),
        ({"lengths": [1, 2]}, r"lengths have shape \(2,\)"),
    ],
)
def test_what_does_not_fit(change, words):
    q, k, v = operands((1, 2, 2, 3, 5, 4, 4))
    given = {"q": q, "k": k, "v": v} | change
    with pytest.raises(ValueError, match=words):
        pm.attention(**given)


def test_other_types_are_named():
    q, k, v = operands((1, 2, 2, 3, 5, 4, 4))
    with pytest.raises(TypeError, match="float64"):
        pm.attention(q.astype(np.float64), k, v)
    with pytest.raises(TypeError, match="must be equal"):
        pm.attention(q.astype(np.float16), k, v)
    with pytest.raises(TypeError, match="q has elements of int16"):
        pm.attention(*(x.astype(np.int16) for x in operands((1, 16, 1, 1, 512, 16, 16))))
    with pytest.raises(TypeError, match=r"window is 1\.5"):
        pm.attention(q, k, v, window=1.5)
    with pytest.raises(TypeError, match="lengths have dtype float64"):
        pm.attention(q, k, v, lengths=[1.0])
    with pytest.raises(TraceError, match="line"):
        pm.attention(q, k, v, score=lambda s, i: s if s > 0 else -s)  # noqa: ARG005
