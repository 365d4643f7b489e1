"""GGUF: blocks of every type as floats, and files, damaged ones among them."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import struct

import numpy as np
import pytest

import portmm as pm
from portmm.weights.gguf import KINDS

K, N = 512, 7
DIGESTS = {
    "F32": "16661fdd0145be0f",
    "F16": "dbf1e8582a1e471b",
    "BF16": "088604d778379538",
    "Q4_0": "ce7694c1a03a532e",
    "Q4_1": "79c7491a912e16ba",
    "Q5_0": "d315388434aebc0b",
    "Q5_1": "9e85503ae6c4a5a5",
    "Q8_0": "54115b8eb25f4251",
    "Q2_K": "49b9a56f05384771",
    "Q3_K": "cb005f84cbca7960",
    "Q4_K": "750eafe147b498fe",
    "Q5_K": "8fecd69b75a921e0",
    "Q6_K": "a314054e1482d01a",
    "IQ4_NL": "b61f456304e126b7",
    "IQ4_XS": "56ddc6c8150fc2de",
    "MXFP4": "3447803b757720cd",
}
"""Of the floats of random bytes, which the `gguf` package dequantizes to the same."""


def random_bytes(kind, seed=0):
    size = N * K // KINDS[kind].elements * KINDS[kind].block.itemsize
    return random.Random(seed).randbytes(size)  # noqa: S311 - the same bytes with any NumPy


def digest(x):
    plain = np.where(np.isnan(x), np.float32(0), x) + np.float32(0)  # one NaN, one zero
    return hashlib.sha256(np.ascontiguousarray(plain.T).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_llama_cpp(kind):
    data = random_bytes(kind)
    w = pm.dequantize_gguf(data, (K, N), kind=kind)
    assert (w.shape, w.dtype, w.T.flags.c_contiguous) == ((K, N), np.float32, True)
    assert digest(w) == DIGESTS[kind]
    if importlib.util.find_spec("gguf"):
        import gguf

        with np.errstate(all="ignore"):  # random scales overflow
            want = gguf.quants.dequantize(
                np.frombuffer(data, np.uint8).reshape(N, -1), getattr(gguf.GGMLQuantizationType, kind)
            )
        np.testing.assert_array_equal(w.T, want)


def test_arguments():
    for data, shape, kind, match in (
        (b"", (32, 1), "Q9_9", "known are F32"),
        (bytes(17), (32, 1), "Q4_0", "17 bytes; Q4_0 of shape"),
        (bytes(18), (31, 1), "Q4_0", "multiple of 32"),
        (b"", (-32, 1), "Q4_0", "multiple of 32"),
        (b"", (1 << 62, 0), "F32", "multiple of 1"),
    ):
        with pytest.raises(ValueError, match=match):
            pm.dequantize_gguf(data, shape, kind=kind)


def string(x):
    return struct.pack("<Q", len(x)) + x


def written(tensors, keys=(), version=3, alignment=32):
    """A file, by the format's description."""
    infos, body = b"", b""
    for name, shape, kind, data in tensors:
        body += bytes(-len(body) % alignment)
        infos += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, KINDS[kind].number, len(body))
        body += data
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + infos
    return head + bytes(-len(head) % alignment) + body


KEYS = (
    string(b"general.name") + struct.pack("<I", 8) + string("Größe".encode()),
    string(b"layers") + struct.pack("<II", 4, 32),
    string(b"ready") + struct.pack("<IB", 7, 1),
    string(b"scores") + struct.pack("<IIQ3f", 9, 6, 3, 0.5, 1.5, -2),
    string(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + string(b"a") + string(b"bc"),
)
TENSORS = [
    (b"w", (K, N), "Q6_K", random_bytes("Q6_K")),
    (b"bias", (N,), "F32", bytes(4 * N)),
    (b"x", (32, 2, 3), "Q8_0", bytes(34 * 6)),
]


def test_files(tmp_path):
    path = tmp_path / "model.gguf"
    for version, alignment in ((3, 32), (2, 64)):
        more = () if alignment == 32 else (string(b"general.alignment") + struct.pack("<II", 4, alignment),)
        path.write_bytes(written(TENSORS, KEYS + more, version, alignment))
        file = pm.open_gguf(path)
        assert file.metadata["general.name"] == "Größe"
        assert (file.metadata["layers"], file.metadata["ready"], file.metadata["tokens"]) == (32, True, ["a", "bc"])
        np.testing.assert_array_equal(file.metadata["scores"], [0.5, 1.5, -2])
        w = file.tensors["w"]
        assert (w.kind, w.shape, w.data.readonly) == ("Q6_K", (K, N), True)
        assert digest(w.dequantized().T) == DIGESTS["Q6_K"]
        assert {n: t.dequantized().shape for n, t in file.tensors.items()} == {
            "w": (N, K),
            "bias": (N,),
            "x": (3, 2, 32),
        }


def test_files_of_the_reference(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: its files are not read")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    x = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    for kind in ("F32", "Q8_0", "Q4_0", "BF16"):
        of = getattr(gguf.GGMLQuantizationType, kind)
        writer.add_tensor(kind, gguf.quants.quantize(x, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = pm.open_gguf(tmp_path / "m.gguf")
    assert file.metadata["general.architecture"] == "llama"
    for kind, t in file.tensors.items():
        want = gguf.quants.dequantize(
            gguf.quants.quantize(x, getattr(gguf.GGMLQuantizationType, kind)), getattr(gguf.GGMLQuantizationType, kind)
        )
        np.testing.assert_array_equal(t.dequantized(), want)


def test_damaged_files_are_refused(tmp_path):
    path, whole = tmp_path / "model.gguf", written(TENSORS, KEYS)
    deep = string(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + struct.pack("<IQ", 4, 0)
    cases = {
        b"": "empty",
        b"GGML" + whole[4:]: "does not begin",
        whole[:4] + struct.pack("<I", 1) + whole[8:]: "version is 1",
        whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:]: "announced",
        written(TENSORS[:1] * 2): "'w' occurs twice",
        written([], KEYS[:1] * 2): "'general.name' occurs twice",
        written([], (deep,)): "nested too deeply",
        written([], (string(b"\xff\xfe") + struct.pack("<II", 4, 1),)): "not UTF-8",
        written([], (string(b"a") + struct.pack("<II", 99, 1),)): "unknown type 99",
        written([], (string(b"general.alignment") + struct.pack("<II", 4, 3),)): "alignment is 3",
        written([(b"w", (100,), "Q4_0", b"")]): "rows of 100",
        written([(b"w", (1 << 40, 1 << 40, 32), "F32", b"")]): "not in the file",
        written([(b"w", (1, 1, 1, 1, 1), "F32", bytes(4))]): "5 dimensions",
        whole[:-1]: "not in the file",
    }
    for data, match in cases.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=match):
            pm.open_gguf(path)
    head, rng = len(whole) - sum(len(t[3]) for t in TENSORS) - 64, random.Random(1)  # noqa: S311 - no secret
    for _ in range(400):  # any other damage of the header is refused, or read within the file
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(head)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        try:
            file = pm.open_gguf(path)
        except ValueError:
            continue
        assert sum(t.data.nbytes for t in file.tensors.values()) <= len(TENSORS) * len(data)
