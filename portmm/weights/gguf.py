"""GGUF files: their tensors in memory maps, and the blocks of their types as floats.

Owns `open_gguf` and `dequantize_gguf`. The layouts are those of llama.cpp (ggml-common.h, ggml-quants.c, and
docs/gguf.md of ggml): a row of k elements is blocks of 32 or 256, each with scales of its own.
"""

from __future__ import annotations

import math
import mmap
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import CheckpointError

if TYPE_CHECKING:
    from portmm.weights.quantized import Quantized
    from portmm.weights.safetensors import Array

BLOCKS = 1 << 14
"""Blocks that are dequantized at a time: some tens of MiB beside the result."""
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Values of MXFP4, doubled."""


def _bits(q: Array, run: int, bits: int) -> Array:
    """Fields of bytes: of each run of bytes first all lowest fields, then the next ones; (blocks, elements)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (q.reshape(len(q), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(q), -1)


def _float(x: Array) -> Array:
    return x.astype(np.float32)[:, None]


def _five(b: Array) -> Array:
    high: Array = np.unpackbits(b["h"], axis=1, bitorder="little")
    low: Array = _bits(b["q"], 16, 4)
    return low + (high << 4)


def _signed(q: Array, zero: int) -> Array:
    return q.astype(np.float32) - np.float32(zero)


def _pairs(s: Array) -> tuple[Array, Array]:
    """Scales and minima of 6 bits, eight each, of twelve bytes."""
    a, b, c = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], 1)
    return scales, np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], 1)


def _grouped(b: Array, q: Array, scales: Array, minima: Array) -> Array:
    """Groups of a block of 256, d * scale * q - dmin * minimum."""
    d, m = _float(b["d"]) * scales.astype(np.float32), _float(b["dmin"]) * minima.astype(np.float32)
    values = q.reshape(len(b), scales.shape[1], -1).astype(np.float32)
    result: Array = d[..., None] * values - m[..., None]
    return result.reshape(len(b), -1)


def _scaled(b: Array, q: Array, scales: Array) -> Array:
    """Groups of a block of 256, d * scale * q."""
    d = _float(b["d"]) * scales.astype(np.float32)
    return (d[..., None] * q.reshape(len(b), scales.shape[1], -1)).reshape(len(b), -1)


def _q3(b: Array) -> Array:
    scales = _bits(b["s"][:, :8], 8, 4) | (_bits(b["s"][:, 8:], 4, 2) << 4)
    q = _bits(b["q"], 32, 2).astype(np.float32) - 4 * (1 - _bits(b["h"], 32, 1).astype(np.float32))
    return _scaled(b, q, _signed(scales, 32))


def _q6(b: Array) -> Array:
    return _scaled(b, _signed(_bits(b["q"], 64, 4) | (_bits(b["h"], 32, 2) << 4), 32), b["s"])


def _iq4_xs(b: Array) -> Array:
    low = _bits(b["l"], 1, 4)
    high = (b["h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    return _scaled(b, _IQ4[_bits(b["q"], 16, 4)], _signed(low | (high.astype(np.uint8) << 4), 32))


def _mxfp4(b: Array) -> Array:
    return np.ldexp(np.float32(1), b["e"].astype(np.int32) - 128)[:, None] * _FP4[_bits(b["q"], 16, 4)]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of a GGUF file.

    Attributes:
        number: in files.
        elements: of a block.
        block: its fields.
        values: the floats of blocks, (blocks, elements).
    """

    number: int
    elements: int
    block: np.dtype[Any]
    values: Callable[[Array], Array]


def _kind(number: int, elements: int, fields: str, values: Callable[[Array], Array]) -> Kind:
    """A kind whose fields are written as in "d:<f2 q:u1*16"."""
    parts = [x.partition(":")[::2] for x in fields.split()]
    named = [(n, t.partition("*")[0], *((int(t.partition("*")[2]),) if "*" in t else ())) for n, t in parts]
    return Kind(number, elements, np.dtype(named), values)


KINDS: dict[str, Kind] = {
    "F32": _kind(0, 1, "x:<f4", lambda b: _float(b["x"])),
    "F16": _kind(1, 1, "x:<f2", lambda b: _float(b["x"])),
    "BF16": _kind(30, 1, "x:<u2", lambda b: (b["x"].astype(np.uint32) << 16).view(np.float32)[:, None]),
    "Q4_0": _kind(2, 32, "d:<f2 q:u1*16", lambda b: _float(b["d"]) * _signed(_bits(b["q"], 16, 4), 8)),
    "Q4_1": _kind(3, 32, "d:<f2 m:<f2 q:u1*16", lambda b: _float(b["d"]) * _bits(b["q"], 16, 4) + _float(b["m"])),
    "Q5_0": _kind(6, 32, "d:<f2 h:u1*4 q:u1*16", lambda b: _float(b["d"]) * _signed(_five(b), 16)),
    "Q5_1": _kind(7, 32, "d:<f2 m:<f2 h:u1*4 q:u1*16", lambda b: _float(b["d"]) * _five(b) + _float(b["m"])),
    "Q8_0": _kind(8, 32, "d:<f2 q:i1*32", lambda b: _float(b["d"]) * b["q"]),
    "Q2_K": _kind(
        10, 256, "s:u1*16 q:u1*64 d:<f2 dmin:<f2",
        lambda b: _grouped(b, _bits(b["q"], 32, 2), b["s"] & 15, b["s"] >> 4),
    ),
    "Q3_K": _kind(11, 256, "h:u1*32 q:u1*64 s:u1*12 d:<f2", _q3),
    "Q4_K": _kind(
        12, 256, "d:<f2 dmin:<f2 s:u1*12 q:u1*128", lambda b: _grouped(b, _bits(b["q"], 32, 4), *_pairs(b["s"]))
    ),
    "Q5_K": _kind(
        13, 256, "d:<f2 dmin:<f2 s:u1*12 h:u1*32 q:u1*128",
        lambda b: _grouped(b, _bits(b["q"], 32, 4) | (_bits(b["h"], 32, 1) << 4), *_pairs(b["s"])),
    ),
    "Q6_K": _kind(14, 256, "q:u1*128 h:u1*64 s:i1*16 d:<f2", _q6),
    "IQ4_NL": _kind(20, 32, "d:<f2 q:u1*16", lambda b: _float(b["d"]) * _IQ4[_bits(b["q"], 16, 4)]),
    "IQ4_XS": _kind(23, 256, "d:<f2 h:<u2 l:u1*4 q:u1*128", _iq4_xs),
    "MXFP4": _kind(39, 32, "e:u1 q:u1*16", _mxfp4),
}  # fmt: skip
"""The types that are read, by name."""
_BY_NUMBER = {kind.number: name for name, kind in KINDS.items()}


def dequantize_gguf(data: Any, shape: tuple[int, int], *, kind: str) -> Array:
    """A matrix of a GGUF file as floats, to the bit as llama.cpp's own tools compute them.

    Args:
        data: the tensor's bytes, or a contiguous buffer of them, as a map of a file.
        shape: (k, n), which is the order of GGUF's own `ne`.
        kind: the name of a type: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS or MXFP4.

    Returns:
        float32, (k, n), the transpose of a C-contiguous array, as the file has it.

    Raises:
        ValueError: the kind is not known, its blocks do not divide k, or the bytes are not those of the shape.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; known are {', '.join(KINDS)}")
    known = KINDS[kind]
    k, n = (operator.index(x) for x in shape)
    if k < 0 or n < 0 or k % known.elements or max(k, 1) * max(n, 1) >= 1 << 61:
        raise ValueError(
            f"shape is {(k, n)}; k must be a multiple of {known.elements}, the elements of a block of {kind}"
        )
    view = memoryview(data)
    wanted = n * (k // known.elements) * known.block.itemsize
    if view.nbytes != wanted:
        raise ValueError(f"data has {view.nbytes} bytes; {kind} of shape {(k, n)} has {wanted}")
    out = np.empty((n, k), np.float32)
    if not out.size:
        return out.T
    blocks, rows = np.frombuffer(view, known.block), out.reshape(-1, known.elements)
    step = BLOCKS * 256 // known.elements
    with np.errstate(all="ignore"):  # files may have infinite scales
        for i in range(0, len(blocks), step):
            rows[i : i + step] = known.values(blocks[i : i + step])
    return out.T


# -- files -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        kind: the name of its type.
        shape: its extents, the contiguous one first, as GGUF writes them.
        data: its bytes in a map of the file.
    """

    kind: str
    shape: tuple[int, ...]
    data: memoryview

    def quantized(self) -> Quantized:
        """A matrix of type Q4_0, Q4_1 or MXFP4 as values of four bits with scales, (inputs, outputs).

        Raises:
            ValueError: it is no matrix of these.
        """
        from portmm.weights.checkpoints import from_gguf

        if len(self.shape) != 2:
            raise ValueError(f"the tensor has shape {self.shape}; a matrix of int4 values has two extents")
        return from_gguf(self.data, self.shape, kind=self.kind)

    def dequantized(self) -> Array:
        """The tensor as floats, in NumPy's order of extents: a weight is (outputs, inputs)."""
        k = self.shape[0] if self.shape else 1
        n = math.prod(self.shape[1:])
        return dequantize_gguf(self.data, (k, n), kind=self.kind).T.reshape(self.shape[::-1])


@dataclass(frozen=True, slots=True)
class Gguf:
    """A file whose tensors are mapped into memory.

    Attributes:
        metadata: its keys and values.
        tensors: by name.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY, _BOOL = 8, 9, 7
MOST_DIMENSIONS, MOST_DEPTH = 4, 4


class _Cursor:
    """A position in a header, which reads no byte beyond the file."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data, self.at, self.name = data, 0, name

    def refuse(self, why: str) -> CheckpointError:
        """The error for a file that is damaged."""
        return CheckpointError(f"{self.name} is no GGUF file that can be read: {why}, at byte {self.at}")

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        if size > len(self.data) - self.at:
            raise self.refuse(f"{size} bytes are announced and {len(self.data) - self.at} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> int:
        """The next number."""
        return int(np.frombuffer(self.take(np.dtype(code).itemsize), code)[0])

    def string(self) -> str:
        """The next string."""
        try:
            return str(bytes(self.take(self.number("<u8"))), "utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse("a string is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value of a type."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("<u4"), self.number("<u8")
            if depth >= MOST_DEPTH:
                raise self.refuse("arrays of arrays are nested too deeply")
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner])
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).copy()
            if count > (len(self.data) - self.at) // 8:  # an item has a length of eight bytes
                raise self.refuse(f"an array of {count} items is announced")
            return [self.value(inner, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.refuse(f"a value has the unknown type {kind}")
        value = np.frombuffer(self.take(np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[0]
        return bool(value) if kind == _BOOL else value.item()


def open_gguf(path: Any) -> Gguf:
    """A GGUF file, version 2 or 3: its metadata, and its tensors in a map of the file, of which nothing is copied.

    Args:
        path: of the file, which must stay as it is while tensors are in use.

    Raises:
        CheckpointError: the file is damaged: a length, an offset or a type is not possible, or a name occurs twice.
        OSError: it cannot be read.
    """
    name = str(path)
    with Path(path).open("rb") as file:
        try:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError as error:
            raise CheckpointError(f"{name} is empty") from error
    cursor = _Cursor(view, name)
    if bytes(cursor.take(4)) != b"GGUF":
        raise cursor.refuse("it does not begin with GGUF")
    if (version := cursor.number("<u4")) not in (2, 3):
        raise cursor.refuse(f"its version is {version}, not 2 or 3")
    tensors, keys = cursor.number("<u8"), cursor.number("<u8")
    if max(tensors, keys) > len(view):
        raise cursor.refuse(f"{tensors} tensors and {keys} keys are announced")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.refuse(f"the key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("<u4"))
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.refuse(f"its alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    for title, shape, number, offset in infos:
        if title in placed:
            raise cursor.refuse(f"the tensor {title!r} occurs twice")
        placed[title] = _tensor(cursor, (title, shape, number), start + offset, alignment)
    return Gguf(metadata, placed)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """The name, extents, type and offset of the next tensor."""
    title, count = cursor.string(), cursor.number("<u4")
    if count > MOST_DIMENSIONS:
        raise cursor.refuse(f"the tensor {title!r} has {count} dimensions")
    shape = tuple([cursor.number("<u8") for _ in range(count)])
    return title, shape, cursor.number("<u4"), cursor.number("<u8")


def _tensor(cursor: _Cursor, info: tuple[str, tuple[int, ...], int], at: int, alignment: int) -> GgufTensor:
    """A tensor at a byte of the file; types that are not known are refused."""
    title, shape, number = info
    if number not in _BY_NUMBER:
        raise cursor.refuse(f"the tensor {title!r} has type {number}; known are {', '.join(KINDS)}")
    name = _BY_NUMBER[number]
    kind = KINDS[name]
    k, size = shape[0] if shape else 1, math.prod(shape)
    if k % kind.elements:
        raise cursor.refuse(f"the tensor {title!r} has rows of {k} elements, and blocks of {name} have {kind.elements}")
    nbytes = size // kind.elements * kind.block.itemsize
    if at % alignment or at + nbytes > len(cursor.data):
        raise cursor.refuse(f"the tensor {title!r} of {nbytes} bytes at {at} is not aligned, or not in the file")
    return GgufTensor(name, shape, cursor.data[at : at + nbytes])
