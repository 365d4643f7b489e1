"""Weights of few bits: half a scale away at most, and the same from a file."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portmm.errors import PackError
from portmm.weights import safetensors
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
