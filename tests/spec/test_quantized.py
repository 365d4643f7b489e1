"""Weights of few bits: half a scale away at most, and read from others' bytes as their documents say."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portmm.errors import PackError
from portmm.weights import safetensors
from portmm.weights.checkpoints import from_awq, from_gguf, from_gptq, from_int4
from portmm.weights.quantized import Quantized, dequantize, load_quantized, quantize, save_quantized

pytestmark = pytest.mark.calls

BOTH = pytest.mark.parametrize("symmetric", [True, False])
WIDTHS = pytest.mark.parametrize("bits", [4, 8])
F32 = np.finfo(np.float32)
fuzz = settings(derandomize=True, deadline=None, max_examples=200, database=None)


def record(k=5, n=3, *, bits=4, group=2, seed=0):
    """A record with other offsets than its scales ask for."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (k, n), dtype=np.uint8)
    scales, offsets = rng.standard_normal((2, -(-k // group), n), dtype=np.float32)
    return Quantized(codes, scales, offsets, bits, group)


def same(p, q):
    """Two records agree in everything."""
    np.testing.assert_array_equal(p.codes, q.codes)
    np.testing.assert_array_equal(p.scales, q.scales)
    np.testing.assert_array_equal(p.offsets, q.offsets)
    assert (p.bits, p.group, p.symmetric, p.nbytes) == (q.bits, q.group, q.symmetric, q.nbytes)


def check_bound(w, q):
    """Each weight is half a scale from what it becomes; float32 adds some bits of the largest product."""
    rows = np.arange(len(w)) // q.group
    scales = q.scales.astype(np.float64)[rows]
    got = dequantize(q).astype(np.float64)
    assert np.isfinite(got).all()
    assert (np.abs(got - np.asarray(w, np.float64)) <= scales * (0.5 + 2**q.bits * 2.0**-22)).all()


# The record


@BOTH
@WIDTHS
def test_a_record_by_hand(bits, symmetric):
    half = 2 ** (bits - 1)
    scales = np.array([[0.5, 2.0]], np.float32)
    offsets = -half * scales if symmetric else np.array([[1.0, -3.0]], np.float32)
    codes = np.array([[0, 1], [half, 15]], np.uint8)
    q = Quantized(codes, scales, offsets, bits, 128)
    assert (q.shape, q.groups, q.symmetric) == ((2, 2), 1, symmetric)
    assert q.nbytes == 4 * bits // 8 + 8 + (0 if symmetric else 8)
    want = [[-half / 2, 2 - 2 * half], [0, 30 - 2 * half]] if symmetric else [[1, -1], [half / 2 + 1, 27]]
    np.testing.assert_array_equal(dequantize(q), want)


def test_a_record_is_read_only_and_keeps_its_arrays():
    codes = np.zeros((4, 2), np.uint8)
    scales = np.ones((2, 2), np.float32)
    q = Quantized(codes, scales, scales, 4, 2)
    for array in (q.codes, q.scales, q.offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
    assert np.shares_memory(q.codes, codes)
    assert codes.flags.writeable
    with pytest.raises(AttributeError):
        q.bits = 8


def test_strided_arrays_become_contiguous():
    wide = np.arange(24, dtype=np.uint8).reshape(4, 6) % 16
    scales = np.arange(6, dtype=np.float32).reshape(2, 3)
    q = Quantized(wide[:, ::2], scales.T[:, ::-1].T.copy("F"), np.broadcast_to(np.float32(0), (2, 3)), 4, 2)
    np.testing.assert_array_equal(q.codes, wide[:, ::2])
    np.testing.assert_array_equal(q.scales, scales[::-1])
    assert all(x.flags.c_contiguous and x.flags.aligned for x in (q.codes, q.scales, q.offsets))


def test_records_can_be_copied_and_pickled():
    q = record()
    same(pickle.loads(pickle.dumps(q)), q)  # noqa: S301  # its own
    same(copy.deepcopy(q), q)


CODES = np.zeros((5, 3), np.uint8)
SCALES = np.ones((3, 3), np.float32)
HUGE = np.full((3, 3), 3e37, np.float32)
NAN = np.where(np.eye(3) > 0, np.nan, 1).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"bits": 16}, "bits is 16"),
        ({"group": 0}, "group is 0"),
        ({"group": -2}, "group is -2"),
        ({"group": 4}, r"scales has shape \(3, 3\).*need \(2, 3\)"),
        ({"codes": CODES + 16}, "codes has a value 16; codes of 4 bits end at 15"),
        ({"codes": CODES.astype(np.int8)}, "codes has dtype int8"),
        ({"codes": CODES[0]}, r"codes has dtype uint8 and shape \(3,\)"),
        ({"codes": None}, "codes has dtype object"),
        ({"scales": SCALES.astype(np.float16)}, "scales has dtype float16"),
        ({"scales": SCALES.astype(">f4")}, "scales has dtype >f4"),
        ({"scales": SCALES[:, :2]}, r"scales has shape \(3, 2\)"),
        ({"offsets": SCALES[:2]}, r"offsets has shape \(2, 3\)"),
        ({"offsets": NAN}, "group 0 of column 0 has scale 1.0 and offset nan"),
        ({"scales": NAN}, "has scale nan"),
        ({"scales": -NAN * np.inf}, "has scale"),
        # 15 of them are beyond float32, whatever is subtracted afterwards.
        ({"scales": HUGE, "offsets": -8 * HUGE}, "has scale 3.*e.37"),
        ({"scales": HUGE / 2, "offsets": 10 * HUGE}, "no finite float32"),
    ],
)
def test_what_is_no_record_is_refused_in_words(change, words):
    good = {"codes": CODES, "scales": SCALES, "offsets": SCALES, "bits": 4, "group": 2}
    Quantized(**good)
    with pytest.raises(ValueError, match=words):
        Quantized(**(good | change))


@pytest.mark.parametrize("change", [{"bits": 4.0}, {"group": 2.0}, {"group": None}])
def test_numbers_are_whole(change):
    good = {"codes": CODES, "scales": SCALES, "offsets": SCALES, "bits": 4, "group": 2}
    with pytest.raises(TypeError):
        Quantized(**(good | change))


# From floats and back


def test_symmetric_by_hand():
    w = np.array([[7.0, -3.5], [-7.0, 1.25], [2.5, 0.75], [-3.5, 0.25]], np.float32)
    q = quantize(w, group=None)
    np.testing.assert_array_equal(q.scales, [[1.0, 0.5]])
    np.testing.assert_array_equal(q.offsets, [[-8.0, -4.0]])
    # Halves go to even: 2.5 to 2, -3.5 to -4, 1.25 / 0.5 to 2, 0.75 / 0.5 to 2, 0.25 / 0.5 to 0.
    np.testing.assert_array_equal(q.codes, [[15, 1], [1, 10], [10, 10], [4, 8]])
    np.testing.assert_array_equal(dequantize(q), [[7, -3.5], [-7, 1], [2, 1], [-4, 0]])
    assert (q.bits, q.group, q.symmetric) == (4, 4, True)


def test_symmetric_of_eight_bits_by_hand():
    q = quantize(np.array([[127.0], [-127.0], [0.5], [-63.0]]), bits=8, group=0)
    assert (q.scales, q.offsets) == (1.0, -128.0)
    np.testing.assert_array_equal(q.codes.ravel(), [255, 1, 128, 65])


def test_asymmetric_by_hand():
    w = np.array([[-3.0, 1.0, -1.0], [12.0, 15.0, -15.0], [0.0, 2.5, -2.5]], np.float32)
    q = quantize(w, group=None, symmetric=False)
    np.testing.assert_array_equal(q.scales, np.ones((1, 3)))
    # Column 1 has no negative weight and column 2 no positive one; the range includes 0 all the same.
    np.testing.assert_array_equal(q.offsets, [[-3.0, 0.0, -15.0]])
    np.testing.assert_array_equal(q.codes, [[0, 1, 14], [15, 15, 0], [3, 2, 13]])
    assert not np.signbit(q.offsets[0, 1])
    assert not q.symmetric


def test_asymmetric_of_eight_bits_by_hand():
    q = quantize(np.array([[-55.0], [200.0], [0.0]]), bits=8, symmetric=False)
    np.testing.assert_array_equal((q.scales, q.offsets), [[[1.0]], [[-55.0]]])
    np.testing.assert_array_equal(q.codes.ravel(), [0, 255, 55])


@BOTH
@WIDTHS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", ">f4", "float64"])
def test_all_float_types_are_taken(bits, symmetric, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    w = np.random.default_rng(1).standard_normal((70, 9)).astype(dtype)
    q = quantize(w, bits=bits, group=32, symmetric=symmetric)
    assert (q.groups, q.group, q.bits, q.symmetric) == (3, 32, bits, symmetric)
    check_bound(w.astype(np.float64), q)
    same(quantize(np.asfortranarray(w)[:, :], bits=bits, group=32, symmetric=symmetric), q)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_all_float_types_are_given(dtype):
    to = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    q = record(40, 6, group=16)
    got = dequantize(q, to)
    assert got.dtype == to
    rows = np.arange(40) // 16
    exact = q.scales[rows].astype(float) * q.codes + q.offsets[rows]
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 0}[dtype]
    assert (np.abs(got.astype(float) - exact) <= eps * 50).all()


@pytest.mark.parametrize("group", [32, 64, 128, 1, 7, 1000, None, 0])
def test_groups(group):
    w = np.random.default_rng(2).standard_normal((200, 4))
    q = quantize(w, group=group)
    rows = group or 200
    assert (q.group, q.groups) == (rows, -(-200 // rows))
    for g in range(q.groups):
        part = w[g * rows : (g + 1) * rows]
        same(quantize(part, group=rows), Quantized(q.codes[g * rows :][:rows], q.scales[[g]], q.offsets[[g]], 4, rows))
        np.testing.assert_array_equal(q.scales[g], (np.abs(part).max(axis=0) / 7).astype(np.float32))
    check_bound(w, q)


@BOTH
@WIDTHS
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1), (1, 5), (5, 1)])
@pytest.mark.parametrize("group", [None, 1, 2, 128])
def test_small_shapes(shape, bits, symmetric, group):
    w = np.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)
    q = quantize(w, bits=bits, symmetric=symmetric, group=group)
    assert q.shape == shape
    check_bound(w, q)


@BOTH
@WIDTHS
def test_zeros_stay_zero(bits, symmetric):
    w = np.zeros((64, 3), np.float32)
    w[32:, 1] = -1.0
    w[1, 2] = 3.7
    q = quantize(w, bits=bits, symmetric=symmetric, group=32)
    for dtype in (np.float32, np.float16):
        got = dequantize(q, dtype)
        assert (got[w == 0] == 0).all()
    exact = dequantize(q, np.float64)
    assert (exact[:, :1] == 0).all()


EXTREMES = {
    "1e38": [1e38, -1e38, 1.0, 0.0],
    "one side": [1e38, 0.9e38, 0.0, 1e-45],
    "normal and tiny": [1e-38, -1.2e-38, 1e-45, 0.0],
    "smallest": [1e-45, -1e-45, 0.0, 0.0],
    "some subnormals": [1.4e-44, -1e-44, 3e-45, 0.0],
    "scale subnormal": [7e-38, -6e-38, 1e-38, 0.0],
    "beyond float32, below": [1e-300, -5e-324, 0.0, 0.0],
}


@BOTH
@WIDTHS
@pytest.mark.parametrize("column", EXTREMES.values(), ids=EXTREMES.keys())
def test_extremes(column, bits, symmetric):
    w = np.array([column, column[::-1]]).T
    q = quantize(w, bits=bits, symmetric=symmetric)
    assert (np.abs(q.scales) >= F32.tiny).all()
    check_bound(w, q)
    check_bound(w.astype(np.float32), quantize(w.astype(np.float32), bits=bits, symmetric=symmetric))


@BOTH
@WIDTHS
@pytest.mark.parametrize("value", [F32.max, 1e39, 1e300])
def test_what_no_float32_can_scale_is_refused(bits, symmetric, value):
    with pytest.raises(ValueError, match="column 1 of w reaches from"):
        quantize(np.array([[1, value], [2, -value]]), bits=bits, symmetric=symmetric)


@pytest.mark.parametrize(
    ("w", "how", "error", "words"),
    [
        (np.zeros((2, 2), np.int8), {}, TypeError, "w has dtype int8"),
        (np.zeros((2, 2), complex), {}, TypeError, "complex128"),
        (np.zeros(2), {}, ValueError, r"shape \(2,\)"),
        (np.zeros((2, 2, 2)), {}, ValueError, r"shape \(2, 2, 2\)"),
        (np.zeros((2, 2)), {"bits": 2}, ValueError, "bits is 2"),
        (np.zeros((2, 2)), {"group": -1}, ValueError, "group is -1"),
        (np.zeros((2, 2)), {"group": 1.5}, TypeError, "float"),
        (np.array([[0, 0], [0, 0], [0, np.nan]]), {"group": 2}, ValueError, r"w\[2, 1\] is nan"),
        (np.array([[0, 0], [-np.inf, 0]]), {}, ValueError, r"w\[1, 0\] is -inf"),
    ],
)
def test_what_cannot_be_quantized_is_refused(w, how, error, words):
    with pytest.raises(error, match=words):
        quantize(w, **how)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, "U3"])
def test_weights_become_floats_only(dtype):
    with pytest.raises(TypeError, match="dtype is"):
        dequantize(record(), dtype)


@fuzz
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(0, 5)),
    group=st.none() | st.integers(1, 50),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    exponent=st.integers(-320, 37),
    seed=st.integers(0, 2**32 - 1),
)
def test_half_a_scale_at_most(shape, group, bits, symmetric, exponent, seed):  # noqa: PLR0917  # as many as vary
    rng = np.random.default_rng(seed)
    w = rng.uniform(-1, 1, shape) * 10.0**exponent * rng.choice([1, 1, 1e-3, 0], shape)
    w = np.where(rng.random(shape[1]) < 0.3, np.abs(w), w)
    q = quantize(w, bits=bits, group=group, symmetric=symmetric)
    check_bound(w, q)
    assert q.symmetric or not symmetric
    assert (dequantize(q)[w == 0] == 0).all()


@fuzz
@given(
    k=st.integers(1, 20),
    group=st.integers(1, 25),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_whole_multiples_of_a_scale_are_exact(k, group, bits, seed):
    rng = np.random.default_rng(seed)
    half = 2 ** (bits - 1)
    whole = rng.integers(1 - half, half, (k, 3)).astype(float)
    whole[::group] = 1 - half
    w = whole * 2.0 ** rng.integers(-20, 20, (1, 3))
    q = quantize(w, bits=bits, group=group)
    np.testing.assert_array_equal(dequantize(q), w)
    same(quantize(dequantize(q), bits=bits, group=group), q)


# Formats of others: bytes written here by their documents, not by the importer


def words(*hexadecimal):
    """32-bit words, spelled with the highest nibble first."""
    return np.array([int(h.replace("_", ""), 16) for h in hexadecimal], np.uint32).view(np.int32)


def test_gptq_by_hand():
    # Words go down k, the first row in the lowest nibble; zero points go along n.
    qweight = np.stack([words("7654_3210", "fedc_ba98"), words("0000_000f", "1000_0000")]).T
    qweight = np.concatenate([qweight, np.zeros((2, 6), np.int32)], axis=1)
    qzeros = words("0000_00e7", "0000_0f02").reshape(2, 1)
    scales = np.tile(np.array([[1.0], [0.5]], np.float16), (1, 8))
    q = from_gptq(qweight, qzeros, scales)
    assert (q.shape, q.group, q.bits, q.groups) == ((16, 8), 8, 4, 2)
    np.testing.assert_array_equal(q.codes[:, 0], np.arange(16))
    np.testing.assert_array_equal(q.codes[:, 1], [15] + [0] * 14 + [1])
    # Version 1 stores one less: 7 is 8, e is 15, 2 is 3, and f is 0, which is stored as -1.
    w = dequantize(q)
    np.testing.assert_array_equal(w[:8, 0], np.arange(8) - 8)
    np.testing.assert_array_equal(w[8:, 0], (np.arange(8, 16) - 3) * 0.5)
    np.testing.assert_array_equal(w[:8, 1], np.array([15, 0, 0, 0, 0, 0, 0, 0]) - 15)
    np.testing.assert_array_equal(w[8:, 1], np.array([0, 0, 0, 0, 0, 0, 0, 1]) * 0.5 - 0.5)
    np.testing.assert_array_equal(w[8:, 2], np.full(8, -0.0))


def test_gptq_zero_points_of_one_word():
    qzeros = words("89ab_cdef").reshape(1, 1)
    for v1, zeros in ((True, [0, 15, 14, 13, 12, 11, 10, 9]), (False, [15, 14, 13, 12, 11, 10, 9, 8])):
        q = from_gptq(np.zeros((1, 8), np.int32), qzeros, np.full((1, 8), 2.0), v1=v1)
        np.testing.assert_array_equal(q.offsets[0], -2.0 * np.array(zeros))
        assert not np.signbit(q.offsets[q.offsets == 0]).any()


def test_gptq_symmetric_is_seen_as_such():
    assert from_gptq(np.zeros((1, 8), np.int32), words("77777777")[None], np.ones((1, 8), np.float16)).symmetric
    two = from_gptq(np.zeros((1, 8), np.int32), words("88888888")[None], np.ones((1, 8), np.float16), v1=False)
    assert two.symmetric


def test_gptq_of_eight_bits_by_hand():
    qweight = np.array([[0x03020100, 0], [0x7F80FF01, 0]] * 2, np.uint32)
    qweight = np.concatenate([qweight, qweight], axis=1)
    q = from_gptq(qweight, words("ff00_7f80").reshape(1, 1), np.array([[1.0, 2.0, 3.0, 4.0]]), bits=8)
    np.testing.assert_array_equal(q.codes[:, 2], [0, 1, 2, 3, 0x01, 0xFF, 0x80, 0x7F] * 2)
    np.testing.assert_array_equal(q.offsets, -np.array([[129.0, 128 * 2, 1 * 3, 0 * 4]]))
    assert (q.bits, q.group) == (8, 16)


def test_gptq_in_activation_order():
    rng = np.random.default_rng(3)
    for k, size in ((32, 8), (40, 16)):
        groups = -(-k // size)
        qweight = rng.integers(-(2**31), 2**31, (k // 8, 8), dtype=np.int64).astype(np.int32)
        qzeros = rng.integers(-(2**31), 2**31, (groups, 1), dtype=np.int64).astype(np.int32)
        scales, g_idx = rng.random((groups, 8), np.float32), rng.permutation(np.arange(k) // size)
        q, order = from_gptq(qweight, qzeros, scales, g_idx, reorder=True)
        codes = (
            ((qweight.view(np.uint32)[:, None] >> (4 * np.arange(8))[:, None]) & 15).reshape(k, 8).astype(np.float64)
        )
        zeros = (((qzeros.view(np.uint32) >> (4 * np.arange(8))) & 15) + 1) & 15
        want = scales[g_idx] * (codes - zeros[g_idx])
        np.testing.assert_allclose(dequantize(q, np.float64), want[order], rtol=1e-6, atol=1e-6)
        assert q.group == size
        x = rng.random((3, k))
        np.testing.assert_allclose(x[:, order] @ dequantize(q, np.float64), x @ want, rtol=1e-5, atol=1e-5)
    plain, order = from_gptq(*gptq(32, 8, 2), reorder=True)
    assert (plain.group, order.tolist()) == (16, list(range(32)))
    for g_idx, match in (
        (np.arange(32) % 3, "below 2"),
        (np.r_[np.zeros(12, int), np.ones(20, int)], "group 0 has 12"),
    ):
        with pytest.raises(ValueError, match=match):
            from_gptq(*gptq(32, 8, 2), g_idx, reorder=True)
    with pytest.raises(ValueError, match="group 1 has 20 rows"):
        from_gptq(*gptq(32, 8, 2), np.r_[np.zeros(12, int), np.ones(20, int)], group=12, reorder=True)


def gptq(k=32, n=8, groups=2):
    return np.zeros((k // 8, n), np.int32), np.zeros((groups, n // 8), np.int32), np.ones((groups, n), np.float16)


def test_gptq_groups():
    assert from_gptq(*gptq(32, 8, 2)).group == 16
    assert from_gptq(*gptq(40, 8, 3), np.arange(40) // 16).group == 16
    assert from_gptq(*gptq(40, 8, 3), group=16).group == 16
    assert from_gptq(*gptq(24, 8, 1), np.zeros(24, np.int32)).group == 24
    assert from_gptq(*gptq(0, 8, 0), np.zeros(0, np.int32)).shape == (0, 8)
    with pytest.raises(ValueError, match="40 rows do not divide into 3 groups"):
        from_gptq(*gptq(40, 8, 3))
    with pytest.raises(ValueError, match="scales has shape"):
        from_gptq(*gptq(40, 8, 3), group=40)


@pytest.mark.parametrize(
    ("g_idx", "words"),
    [
        (np.arange(32)[::-1] // 16, "row 0 into group 1, not 0.*activation order.*reorder"),
        (np.arange(32) % 2, "row 1 into group 1, not 0"),
        (np.ones(32, int), "row 0 into group 1"),
        (np.arange(31) // 16, r"g_idx has dtype int64 and shape \(31,\)"),
        (np.arange(32) / 16, "g_idx has dtype float64"),
    ],
)
def test_gptq_in_activation_order_is_refused(g_idx, words):
    with pytest.raises(ValueError, match=words):
        from_gptq(*gptq(), g_idx)


def test_awq_by_hand():
    # From the lowest nibble, a word has columns 0 2 4 6 1 3 5 7: here column c holds c + 1, and c + 9.
    row, other = "8642_7531", "0eca_fdb9"
    qweight = np.stack([words(row, other), words("0000_0000", "0001_0000"), words("ffff_ffff", "0000_0010")])
    qweight = np.concatenate([qweight, np.zeros((1, 2), np.int32)])
    qzeros = np.stack([words(row, "0000_0000"), words("8888_8888", "8888_8888")])
    scales = np.stack([np.full(16, 0.5), np.full(16, 2.0)]).astype(np.float16)
    q = from_awq(qweight, qzeros, scales)
    assert (q.shape, q.group, q.bits) == ((4, 16), 2, 4)
    np.testing.assert_array_equal(q.codes[0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0])
    # Nibble 4 is column 1, nibble 1 is column 2.
    np.testing.assert_array_equal(q.codes[1], [0] * 9 + [1] + [0] * 6)
    np.testing.assert_array_equal(q.codes[2], [15] * 8 + [0, 0, 1] + [0] * 5)
    w = dequantize(q)
    np.testing.assert_array_equal(w[0], [0] * 8 + [4.5, 5, 5.5, 6, 6.5, 7, 7.5, 0])
    np.testing.assert_array_equal(w[1, :8], -0.5 * np.arange(1, 9))
    np.testing.assert_array_equal(w[3], np.full(16, -16.0))


def test_awq_has_four_bits():
    with pytest.raises(ValueError, match="bits is 8"):
        from_awq(np.zeros((2, 1), np.int32), np.zeros((1, 1), np.int32), np.ones((1, 4)), bits=8)


GOOD = {"qweight": np.zeros((8, 8), np.int32), "qzeros": np.zeros((2, 1), np.int32), "scales": np.ones((2, 8))}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"qweight": np.zeros((8, 8), np.int64)}, TypeError, "qweight has dtype int64"),
        ({"qweight": np.zeros((8, 8))}, TypeError, "qweight has dtype float64"),
        ({"qweight": np.zeros(8, np.int32)}, ValueError, r"qweight has shape \(8,\)"),
        ({"qzeros": np.zeros((2, 1), np.uint8)}, TypeError, "qzeros has dtype uint8"),
        ({"qzeros": np.zeros((2, 2), np.int32)}, ValueError, r"zero points \(2, 16\)"),
        ({"qzeros": np.zeros((1, 1), np.int32)}, ValueError, r"zero points \(1, 8\)"),
        ({"scales": np.ones((2, 9))}, ValueError, r"scales \(2, 9\)"),
        ({"scales": np.ones(8)}, ValueError, r"scales has shape \(8,\)"),
        ({"scales": np.ones((2, 8), int)}, TypeError, "scales has dtype int64"),
        ({"scales": np.full((2, 8), np.nan)}, ValueError, "has scale nan"),
        ({"scales": np.full((2, 8), 1e300)}, ValueError, "has scale inf"),
    ],
)
def test_packed_words_that_do_not_fit_are_refused(change, error, words):
    from_gptq(**GOOD)
    with pytest.raises(error, match=words):
        from_gptq(**(GOOD | change))
    narrow = {"qweight": np.zeros((8, 1), np.int32)}
    from_awq(**(GOOD | narrow))
    with pytest.raises(error, match=words):
        from_awq(**(GOOD | narrow | change))


def block(nibbles, *floats):
    """A block of GGUF: floats in float16, then 16 bytes with elements j and j + 16."""
    head = b"".join(np.array(f, "<f2").tobytes() for f in floats)
    return head + bytes(nibbles[j] + 16 * nibbles[j + 16] for j in range(16))


UP, DOWN = list(range(16)) * 2, [*range(15, -1, -1), *[8] * 16]


def test_gguf_q4_0_by_hand():
    literal = bytes.fromhex("0038 00102030405060708090a0b0c0d0e0f0")
    assert np.frombuffer(literal[:2], "<f2") == 0.5
    w = dequantize(from_gguf(literal, (32, 1)))
    np.testing.assert_array_equal(w[:, 0], [-4.0] * 16 + [(j - 8) * 0.5 for j in range(16)])
    # d may be negative: ggml takes the value of largest magnitude by -8.
    data = block(UP, 1.0) + block(DOWN, -2.0) + block(DOWN, 0.25) + block(UP, 0.0)
    q = from_gguf(data, (64, 2))
    assert (q.shape, q.group, q.bits, q.symmetric) == ((64, 2), 32, 4, True)
    np.testing.assert_array_equal(q.scales, [[1.0, 0.25], [-2.0, 0.0]])
    w = dequantize(q)
    np.testing.assert_array_equal(w[:32, 0], np.array(UP) - 8)
    np.testing.assert_array_equal(w[32:, 0], -2.0 * (np.array(DOWN) - 8))
    np.testing.assert_array_equal(w[:32, 1], 0.25 * (np.array(DOWN) - 8))
    np.testing.assert_array_equal(w[32:, 1], np.zeros(32))


def test_gguf_q4_1_by_hand():
    data = block(UP, 0.5, -3.0) + block(DOWN, 2.0, 1.0)
    q = from_gguf(data, (32, 2), kind="Q4_1")
    w = dequantize(q)
    np.testing.assert_array_equal(w[:, 0], 0.5 * np.array(UP) - 3)
    np.testing.assert_array_equal(w[:, 1], 2.0 * np.array(DOWN) + 1)
    assert not q.symmetric
    for buffer in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8).reshape(2, 20)):
        same(from_gguf(buffer, (32, 2), kind="Q4_1"), q)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (32, 0)])
def test_gguf_of_nothing(kind, shape):
    q = from_gguf(b"", shape, kind=kind)
    assert q.shape == shape
    assert dequantize(q).shape == shape


@pytest.mark.parametrize(
    ("data", "shape", "kind", "words"),
    [
        (bytes(18), (32, 1), "Q5_0", "kind is 'Q5_0'"),
        (bytes(18), (31, 1), "Q4_0", r"shape is \(31, 1\)"),
        (bytes(18), (-32, -1), "Q4_0", "shape is"),
        (bytes(17), (32, 1), "Q4_0", "data has 17 bytes; Q4_0 .* 1 blocks of 18, 18 bytes"),
        (bytes(18), (32, 1), "Q4_1", "data has 18 bytes"),
        (bytes(36), (32, 1), "Q4_0", "data has 36 bytes"),
        (b"\xff\xff" + bytes(16), (32, 1), "Q4_0", "has scale nan"),
        (bytes(2) + b"\0\x7c" + bytes(16), (32, 1), "Q4_1", "offset inf"),
    ],
)
def test_gguf_that_does_not_fit_is_refused(data, shape, kind, words):
    with pytest.raises(ValueError, match=words):
        from_gguf(data, shape, kind=kind)


def test_int4_by_hand():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    w = np.array([[-8, 7], [0, -1], [3, 3]], ml_dtypes.int4)
    scales = np.array([[0.5, 1.0], [2.0, 4.0]], ml_dtypes.bfloat16)
    q = from_int4(w, scales, group=2)
    assert (q.shape, q.group, q.bits, q.symmetric) == ((3, 2), 2, 4, True)
    np.testing.assert_array_equal(q.codes, [[0, 15], [8, 7], [11, 11]])
    np.testing.assert_array_equal(dequantize(q), [[-4, 7], [0, -1], [6, 12]])
    zeros = np.array([[1, -2], [-8, 7]], ml_dtypes.int4)
    np.testing.assert_array_equal(dequantize(from_int4(w, scales, zeros, group=2)), [[-4.5, 9], [-0.5, 1], [22, -16]])


def test_uint4_by_hand():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    w = np.array([[0, 15], [8, 7]], ml_dtypes.uint4)
    scales = np.array([[0.5, 2.0]], np.float32)
    np.testing.assert_array_equal(dequantize(from_int4(w, scales)), [[0, 30], [4, 14]])
    np.testing.assert_array_equal(dequantize(from_int4(w, scales, np.array([[7.5, 8]]))), [[-3.75, 14], [0.25, -2]])
    assert from_int4(w, scales, np.full((1, 2), 8, ml_dtypes.uint4)).symmetric
    assert from_int4(w[:0], scales[:0]).shape == (0, 2)


def test_int4_that_does_not_fit_is_refused():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    w = np.zeros((6, 2), ml_dtypes.int4)
    ones = np.ones((2, 2), np.float32)
    with pytest.raises(TypeError, match="w has dtype int8"):
        from_int4(w.astype(np.int8), ones)
    with pytest.raises(ValueError, match=r"w has shape \(2,\)"):
        from_int4(w[0], ones)
    with pytest.raises(ValueError, match=r"zero points \(2,\)"):
        from_int4(w, ones, np.zeros(2))
    with pytest.raises(ValueError, match="6 rows do not divide into 4 groups"):
        from_int4(w, np.ones((4, 2), np.float32))
    with pytest.raises(ValueError, match="offset nan"):
        from_int4(w, ones, np.full((2, 2), np.nan))


# Files


@pytest.fixture
def file(tmp_path):
    return tmp_path / "w.safetensors"


@BOTH
@WIDTHS
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1), (7, 5), (64, 32)])
def test_files_round_trip(file, shape, bits, symmetric):
    w = np.linspace(-1, 2, shape[0] * shape[1]).reshape(shape)
    q = quantize(w, bits=bits, group=16, symmetric=symmetric)
    save_quantized(q, file)
    same(load_quantized(file), q)


def test_files_have_the_information_and_no_more(file):
    q = quantize(np.random.default_rng(3).standard_normal((4096, 64)), group=64)
    save_quantized(q, file)
    assert q.nbytes == 4096 * 64 // 2 + 64 * 64 * 4
    assert file.stat().st_size <= q.nbytes + 512


def test_a_file_by_hand(file):
    q = Quantized(np.array([[1], [2], [3]], np.uint8), np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32), 4, 9)
    save_quantized(q, file)
    tensors, about = safetensors.read(file)
    assert about == {"format": "portmm.weights.quantized", "version": "1", "bits": "4", "group": "9", "rows": "3"}
    np.testing.assert_array_equal(tensors["codes"], [[0x21], [0x03]])
    assert set(tensors) == {"codes", "scales", "offsets"}


def test_codes_of_eight_bits_stay_in_the_file(file):
    save_quantized(record(64, 64, bits=8), file)
    base = load_quantized(file).codes
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


@pytest.mark.parametrize(
    ("drop", "change", "about", "words"),
    [
        ("", {}, {"format": "pt"}, "has format 'pt', version '1'; expected 'portmm.weights.quantized'"),
        ("", {}, {"version": "2"}, "version '2'"),
        ("codes", {}, {}, "no entry 'codes'"),
        ("scales", {}, {}, "no entry 'scales'"),
        ("", {}, {"bits": "5"}, "bits is 5"),
        ("", {}, {"bits": "four"}, "four"),
        ("", {}, {"group": "0"}, "group is 0"),
        ("", {}, {"group": "9" * 5000}, "sound"),
        ("", {}, {"group": "9" * 40}, "scales has shape"),
        ("", {}, {"rows": "9"}, "9 rows of 4 bits"),
        ("", {}, {"rows": "-5"}, "rows"),
        ("", {"codes": np.zeros((3, 3), np.float32)}, {}, "codes has dtype float32"),
        ("", {"codes": np.zeros(3, np.uint8)}, {}, "codes has dtype uint8 and shape"),
        ("", {"scales": np.zeros((3, 3))}, {}, "scales has dtype float64"),
        ("", {"scales": np.full((3, 3), np.inf, np.float32)}, {}, "has scale inf"),
        ("", {"offsets": np.zeros((3, 2), np.float32)}, {}, "offsets has shape"),
    ],
)
def test_other_files_are_refused_in_words(file, drop, change, about, words):
    save_quantized(record(), file)
    tensors, meta = safetensors.read(file, mmap=False)
    tensors.pop(drop, None)
    safetensors.write(file, tensors | change, meta | about)
    with pytest.raises(PackError, match=words) as caught:
        load_quantized(file)
    assert str(file) in str(caught.value)


def test_metadata_that_lack_an_entry_are_refused(file):
    save_quantized(record(), file)
    tensors, meta = safetensors.read(file, mmap=False)
    del meta["rows"]
    safetensors.write(file, tensors, meta)
    with pytest.raises(PackError, match="no entry 'rows'"):
        load_quantized(file)
    file.write_bytes(b"no tensors")
    with pytest.raises(PackError, match="not a sound safetensors file"):
        load_quantized(file)


def test_attributes_of_the_matrix_are_written_once():
    from portmm.ops.int4_panels import PackedInt4
    from portmm.ops.int4_words import DeviceInt4
    from portmm.weights.quantized import QuantizedMatrix

    for kind in (Quantized, PackedInt4, DeviceInt4):
        assert issubclass(kind, QuantizedMatrix)
        assert not {"ndim", "dtype", "size"} & set(vars(kind)), kind
    q = record(5, 3)
    assert (q.ndim, q.dtype, q.size) == (2, np.float32, 15)
    assert not hasattr(q, "__dict__")
