"""Weights of few bits in formats of others: bytes are written here by their documents, not by the importer."""

from __future__ import annotations

import numpy as np
import pytest
from test_quantized import same

from portmm.weights.checkpoints import from_awq, from_gguf, from_gptq, from_int4
from portmm.weights.quantized import dequantize

pytestmark = pytest.mark.calls


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
