"""Files of arrays: others can read them, and no file of others can do harm."""

from __future__ import annotations

import json
import os
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portmm.errors import PackError
from portmm.weights.safetensors import read, write

DTYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool"]
fuzz = settings(derandomize=True, deadline=None, max_examples=200, database=None)
HEADER = b'{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}'


def spell(header, data=b"", length=None):
    """The bytes of a file with this header: an object, or text as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "x.safetensors"


def test_the_bytes_are_as_the_format_says(file):
    write(file, {"x": np.array([[1.0, -2.0]], np.float32)}, {"a": "b"})
    padded = HEADER.ljust(128 - 8)
    assert file.read_bytes() == (120).to_bytes(8, "little") + padded + bytes.fromhex("0000803f 000000c0")


@pytest.mark.parametrize("mmap", [True, False])
def test_bytes_written_by_hand_are_read(file, mmap):
    file.write_bytes(spell(HEADER + b"   ", bytes.fromhex("0000803f 000000c0")))
    arrays, metadata = read(file, mmap=mmap)
    assert metadata == {"a": "b"}
    assert list(arrays) == ["x"]
    assert arrays["x"].dtype == np.float32
    np.testing.assert_array_equal(arrays["x"], [[1.0, -2.0]])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trips(file, dtype, mmap):
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 2, (6, 10)) if dtype == "bool" else rng.integers(-99, 99, (6, 10))
    x = wide.astype(dtype)
    tensors = {"plain": x, "strided": x[::2, ::-3], "turned": x.T, "scalar": x[1, 2], "empty": x[:0], "": x[:1]}
    write(file, tensors, {"größe": "⅓", "": ""})
    arrays, metadata = read(file, mmap=mmap)
    assert metadata == {"größe": "⅓", "": ""}
    assert set(arrays) == set(tensors)
    for name, want in tensors.items():
        got = arrays[name]
        assert got.dtype == dtype
        assert got.shape == np.shape(want)
        assert got.flags.aligned
        assert got.flags.c_contiguous
        assert not got.flags.writeable
        np.testing.assert_array_equal(got, want)


def test_byte_order_is_little(file):
    write(file, {"x": np.array([1, 2], ">i4")})
    assert file.read_bytes().endswith(bytes.fromhex("01000000 02000000"))
    np.testing.assert_array_equal(read(file)[0]["x"], [1, 2])


def test_bfloat16(file):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([[1.5, -3.0, np.inf]], ml_dtypes.bfloat16)
    write(file, {"x": x, "turned": x.T})
    arrays, _ = read(file)
    assert arrays["x"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(arrays["x"].astype(float), x.astype(float))
    assert arrays["turned"].shape == (3, 1)
    assert file.read_bytes()[-12:] == bytes.fromhex("c03f 40c0 807f") * 2


def test_bfloat16_without_ml_dtypes_says_what_to_install(file, monkeypatch):
    file.write_bytes(spell({"x": tensor("BF16", (4,))}, bytes(8)))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(PackError, match="pip install ml_dtypes") as caught:
        read(file)
    assert str(file) in str(caught.value)


def test_no_tensors(file):
    write(file, {})
    assert read(file) == ({}, {})
    assert read(file, mmap=False) == ({}, {})


@pytest.mark.parametrize("mmap", [True, False])
def test_whole_cache_lines_start_on_one(file, mmap):
    tensors = {"odd": np.zeros(3, np.int8), "f64": np.zeros(5), "f16": np.zeros(7, np.float16)}
    tensors |= {"line": np.zeros(64, np.uint8), "lines": np.zeros((4, 16), np.float32), "none": np.zeros((0, 3))}
    write(file, tensors)
    assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == 0
    arrays, _ = read(file, mmap=mmap)
    # Elements are aligned where they lie: nothing was copied out of the file's bytes.
    assert all(x.base is not None and x.flags.aligned for x in arrays.values())
    assert all(arrays[name].ctypes.data % 64 == 0 for name in ("line", "lines"))


@pytest.mark.parametrize("mmap", [True, False])
def test_what_lies_unaligned_is_copied(file, mmap):
    data = b"\1" + np.array([1.5, 2.5]).tobytes()
    file.write_bytes(spell({"a": tensor("U8", (1,), (0, 1)), "b": tensor("F64", (2,), (1, 17))}, data))
    x = read(file, mmap=mmap)[0]["b"]
    np.testing.assert_array_equal(x, [1.5, 2.5])
    assert x.flags.aligned
    assert not x.flags.writeable


def test_arrays_outlive_the_name_of_the_file(file):
    write(file, {"x": np.arange(9)})
    x = read(file)[0]["x"]
    write(file, {"x": np.zeros(1)})
    file.unlink()
    np.testing.assert_array_equal(x, np.arange(9))


@pytest.mark.parametrize(
    ("tensors", "metadata", "error", "words"),
    [
        ({"x": np.zeros(2, complex)}, None, TypeError, "'x' has dtype complex128"),
        ({"x": np.array(["a"])}, None, TypeError, "dtype <U1"),
        ({"x": np.array([None])}, None, TypeError, "dtype object"),
        ({"x": np.zeros(2, "f4,i4")}, None, TypeError, "'x' has dtype"),
        ({"__metadata__": np.zeros(2)}, None, ValueError, "reserves"),
        ({3: np.zeros(2)}, None, TypeError, "named 3"),
        ({"\ud800": np.zeros(2)}, None, ValueError, "surrogates"),
        ({}, {"a": 3}, TypeError, "'a': 3"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(file, tensors, metadata, error, words):
    file.write_text("before")
    with pytest.raises(error, match=words):
        write(file, tensors, metadata)
    assert file.read_text() == "before"
    assert list(file.parent.iterdir()) == [file]


def test_a_failure_leaves_the_old_file_and_no_other(file, monkeypatch):
    file.write_text("before")

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(file, {"x": np.zeros(9)})
    assert file.read_text() == "before"
    assert list(file.parent.iterdir()) == [file]


def test_a_missing_file_is_an_oserror(file):
    with pytest.raises(FileNotFoundError):
        read(file)


def test_the_library_reads_ours(file):
    library = pytest.importorskip("safetensors.numpy")
    tensors = {d: np.arange(12).reshape(3, 4).astype(d) for d in DTYPES} | {"none": np.zeros((0, 3), np.float32)}
    write(file, tensors, {"who": "we"})
    found = library.load_file(file)
    assert set(found) == set(tensors)
    for name, want in tensors.items():
        assert found[name].dtype == want.dtype
        np.testing.assert_array_equal(found[name], want)
    with pytest.importorskip("safetensors").safe_open(file, framework="np") as opened:
        assert opened.metadata() == {"who": "we"}


def test_we_read_the_librarys(file):
    library = pytest.importorskip("safetensors.numpy")
    tensors = {d: np.arange(12).reshape(3, 4).astype(d) for d in DTYPES} | {"none": np.zeros((0, 3), np.float32)}
    library.save_file(tensors, file, {"who": "they"})
    found, metadata = read(file)
    assert metadata == {"who": "they"}
    assert set(found) == set(tensors)
    for name, want in tensors.items():
        assert found[name].dtype == want.dtype
        np.testing.assert_array_equal(found[name], want)


TWO = {"x": tensor(), "y": tensor(offsets=(8, 16))}
HOSTILE = {
    "empty": (b"", "has 0 bytes"),
    "seven bytes": (bytes(7), "has 7 bytes"),
    "no header": (bytes(8), "starts with b''"),
    "longer than the file": (spell({}, length=3), "claims 3 bytes"),
    "as long as it gets": (spell({}, length=2**64 - 1), "claims 18446744073709551615 bytes"),
    "a list": (spell([1]), "starts with"),
    "a space first": (spell(b" {}"), "starts with"),
    "half": (spell(b'{"x":'), "cannot be parsed"),
    "not UTF-8": (spell(b'{"\xff":1}'), "cannot be parsed"),
    "UTF-16": (spell('{"__metadata__":{}}'.encode("utf-16-le")), "cannot be parsed"),
    "trailing": (spell(b"{}x"), "cannot be parsed"),
    "deep": (spell(b'{"x":' + b"[" * 200_000), "cannot be parsed"),
    "NaN": (spell(b'{"x":NaN}'), "NaN is not JSON"),
    "a very long number": (spell(b'{"x":' + b"9" * 10_000 + b"}"), "cannot be parsed"),
    "duplicate tensors": (spell(b'{"x":1,"x":2}'), "'x' occurs twice"),
    "duplicate fields": (spell(b'{"x":{"dtype":"U8","dtype":"F32"}}'), "'dtype' occurs twice"),
    "metadata no map": (spell({"__metadata__": [1]}), "__metadata__ is"),
    "metadata no text": (spell({"__metadata__": {"a": 1}}), "__metadata__ is"),
    "no dict": (spell({"x": 3}), "'x' is 3"),
    "no shape": (spell({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "needs dtype, shape"),
    "unknown dtype": (spell({"x": tensor("F8_E8M0", (8,))}, bytes(8)), "has dtype 'F8_E8M0'; supported"),
    "dtype no text": (spell({"x": tensor(["F32"])}, bytes(8)), "has dtype"),
    "object": (spell({"x": tensor("O")}, bytes(8)), "has dtype 'O'"),
    "shape no list": (spell({"x": tensor() | {"shape": 2}}, bytes(8)), "has shape 2"),
    "negative extent": (spell({"x": tensor(shape=(-1, -2))}, bytes(8)), "has shape"),
    "extent of floats": (spell({"x": tensor(shape=(2.0,))}, bytes(8)), "has shape"),
    "extent true": (spell({"x": tensor("F64", shape=(True,))}, bytes(8)), "has shape"),
    "extent huge": (spell({"x": tensor(shape=(10**30,))}, bytes(8)), "has shape"),
    "too much": (spell({"x": tensor(shape=(2**40, 2**40))}, bytes(8)), "more than can be addressed"),
    "empty and absurd": (spell({"x": tensor(shape=(0, 2**62, 2**62), offsets=(0, 0))}), "more than can be addressed"),
    "many dimensions": (spell({"x": tensor("U8", (1,) * 99, (0, 1))}, bytes(1)), "more than can be addressed"),
    "offsets of one": (spell({"x": tensor(offsets=(8,))}, bytes(8)), "data_offsets are"),
    "offsets of three": (spell({"x": tensor(offsets=(0, 8, 8))}, bytes(8)), "data_offsets are"),
    "offsets text": (spell({"x": tensor(offsets="08")}, bytes(8)), "data_offsets"),
    "negative offset": (spell({"x": tensor(offsets=(-8, 0))}, bytes(8)), "data_offsets"),
    "backwards": (spell({"x": tensor(offsets=(8, 0))}, bytes(8)), "data_offsets are"),
    "not the shape's": (spell({"x": tensor(shape=(3,))}, bytes(8)), "takes 12 bytes"),
    "a gigabyte of eight bytes": (spell({"x": tensor(shape=(2**28,), offsets=(0, 2**30))}, bytes(8)), "8 follow"),
    "overlap": (spell(TWO | {"y": tensor(offsets=(4, 12))}, bytes(12)), "ends at 8"),
    "the same bytes twice": (spell(TWO | {"y": tensor()}, bytes(8)), "ends at 8"),
    "gap": (spell(TWO | {"y": tensor(offsets=(9, 17))}, bytes(17)), "starts at 9; the one before it ends at 8"),
    "gap first": (spell({"x": tensor(offsets=(1, 9))}, bytes(9)), "starts at 1"),
    "data left": (spell(TWO, bytes(17)), "but 17 follow"),
    "cut short": (spell(TWO, bytes(15)), "but 15 follow"),
    "data without tensors": (spell({}, bytes(1)), "but 1 follow"),
    "no bool": (spell({"x": tensor("BOOL", (2,), (0, 2))}, b"\1\2"), "BOOL and has a byte 2"),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(("data", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_refused_in_words(file, data, words, mmap):
    file.write_bytes(data)
    with pytest.raises(PackError) as caught:
        read(file, mmap=mmap)
    text = str(caught.value)
    assert words in text
    assert text.startswith(str(file))
    assert len(text) < 400 + len(str(file))


def test_a_hostile_header_of_many_keys_is_refused_soon(file):
    keys = b"".join(b'"%d":0,' % i for i in range(100_000))
    file.write_bytes(spell(b"{" + keys + b'"99999":0}'))
    with pytest.raises(PackError, match="'99999' occurs twice"):
        read(file)


MUTATED = spell(
    {"__metadata__": {"a": "b"}, "x": tensor("F32", (2, 3), (0, 24)), "y": tensor("BOOL", (3,), (24, 27))},
    bytes(24) + b"\1\0\1",
)
SNIPPETS = [b"[", b"{", b"}", b'"', b"-1", b"1e9", b"null", b"true", b"99999999999999999999", b"\xff", b"\0", b",", b""]


def mutated(rng):
    """The file with some bytes flipped, replaced by JSON, moved or lost."""
    data = bytearray(MUTATED)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) or 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + rng.randint(0, 3)] = rng.choice(SNIPPETS)
            case 2:
                del data[at : at + rng.randint(1, 9)]
            case 3:
                data[at:at] = data[: rng.randint(1, 20)]
    return bytes(data)


def survives(file, data):
    """Reading gives arrays of no more bytes than the file, or a PackError."""
    file.write_bytes(data)
    for mmap in (True, False):
        try:
            arrays, metadata = read(file, mmap=mmap)
        except PackError:
            continue
        assert sum(x.nbytes for x in arrays.values()) <= len(data)
        assert all(isinstance(x, str) for item in metadata.items() for x in item)


def test_mutated_files_are_read_or_refused(file):
    rng = random.Random(7)  # noqa: S311  # chosen for its repeatability
    for _ in range(1000):
        survives(file, mutated(rng))


def test_every_prefix_and_every_lie_about_the_length(file):
    for i in range(len(MUTATED)):
        survives(file, MUTATED[:i])
        survives(file, i.to_bytes(8, "little") + MUTATED[8:])


WORDS = st.sampled_from(["", "F32", "U8", "BF16", "BOOL", "x", "\0", "\ud800"])
KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
)


@fuzz
@given(header=st.dictionaries(st.sampled_from(["__metadata__", "x", "y"]), JSON), size=st.integers(0, 20))
def test_any_header_is_read_or_refused(tmp_path_factory, header, size):
    survives(tmp_path_factory.getbasetemp() / "any.safetensors", spell(header, bytes(size)))


@fuzz
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
    names=st.lists(st.text('aé⅓"\\\0 😀', max_size=4), min_size=5, max_size=5, unique=True),
)
def test_any_arrays_round_trip(tmp_path_factory, shapes, dtypes, names):
    file = tmp_path_factory.getbasetemp() / "round.safetensors"
    tensors = {n: np.ones(shape, d) for n, shape, d in zip(names, shapes, dtypes, strict=False)}
    write(file, tensors)
    found, _ = read(file)
    assert {n: (x.shape, x.dtype) for n, x in found.items()} == {n: (x.shape, x.dtype) for n, x in tensors.items()}
    assert all((x == 1).all() for x in found.values())
