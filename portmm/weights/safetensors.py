"""Files of named arrays, in the safetensors format.

Owns `read`, `mapped` and `write`. `ml_dtypes` is needed only for files with its types. A file
is eight bytes with the length of a header, the header in JSON, and the data of the
tensors, little-endian, in C order and without gaps:
https://huggingface.co/docs/safetensors#format. Nothing in a file is executed, and
every size is compared with the file's before use.

The format has no padding between tensors, and so no file can start each of them on
a cache line. The data of `write` start at a multiple of 64 bytes, and tensors are
ordered by the largest power of two, up to 64, that divides their sizes. So all
elements are aligned, and tensors of whole cache lines start on one. Stronger
alignment takes a copy of the tensor.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from portmm.errors import PackError

if TYPE_CHECKING:
    from io import BufferedReader

Array = np.ndarray[Any, Any]
Location = str | os.PathLike[str]

METADATA = "__metadata__"
LINE = 64
# The limits of the safetensors library, and of NumPy 1 for dimensions.
MAX_HEADER = 100_000_000
MAX_NDIM = 32

_CODES = "F64 f8, F32 f4, F16 f2, I64 i8, I32 i4, I16 i2, I8 i1, U32 u4, U16 u2, U8 u1, BOOL ?"
_DTYPES = {name: np.dtype("<" + code) for name, code in (pair.split() for pair in _CODES.split(", "))}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_OTHERS = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Types that NumPy lacks, by their names in `ml_dtypes`."""
_OTHER_NAMES = {dtype: name for name, dtype in _OTHERS.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a header; `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def write(path: Location, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays to a file atomically: readers see the old file or the new one.

    Args:
        path: the file; an existing one is replaced.
        tensors: arrays by name, of float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, int8 to
            int64, uint8 to uint32 or bool; strided ones are copied, one at a time.
        metadata: text by name, stored with the arrays.

    Raises:
        TypeError: an array has another dtype, or a name or a text is no string.
        ValueError: a tensor has the name "__metadata__", a name cannot be spelled
            in UTF-8, or the header is longer than readers accept.
        OSError: the file cannot be written; no partial file remains.
    """
    arrays = {name: np.asarray(x) for name, x in tensors.items()}
    order = sorted(arrays, key=lambda name: -_grain(arrays[name].nbytes))
    header: dict[str, Any] = {METADATA: _texts(metadata)} if metadata else {}
    at = 0
    for name in order:
        end = at + arrays[name].nbytes
        header[_tensor_name(name)] = {
            "dtype": _spelling(name, arrays[name].dtype),
            "shape": arrays[name].shape,
            "data_offsets": (at, end),
        }
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % LINE)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header has {len(text)} bytes; readers accept {MAX_HEADER}: store fewer tensors")
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write(_bytes(arrays[name]).data)
            file.flush()
            # Without it, a crash soon after may leave the new name on an empty file.
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Location, *, mmap: bool = True) -> tuple[dict[str, Array], dict[str, str]]:
    """Read the arrays of a safetensors file.

    Args:
        path: a file of this module or of any safetensors library.
        mmap: map the file instead of reading it: bytes come from disk when they
            are used, and processes share them. The file must not be truncated
            meanwhile; `write` never truncates a file in use.

    Returns:
        Arrays by name, read-only and with aligned elements (copied where the
        file has them unaligned), and the metadata.

    Raises:
        PackError: the file is malformed, or has types of ml_dtypes, which is not installed.
        OSError: the file cannot be opened or read.
    """
    tensors, metadata = _open(path, mmap=mmap)
    return dict(tensors), metadata


def mapped(path: Location) -> tuple[Mapping[str, Array], dict[str, str]]:
    """The arrays of a safetensors file, each made when it is asked for, and the metadata.

    As `read`, for files of any size: a tensor that the file has unaligned is copied at each look, and no other one with
    it.
    """
    return _open(path, mmap=True)


class _Tensors(Mapping[str, Array]):
    """Arrays of a file's bytes, by name."""

    def __init__(self, where: str, data: Array, entries: list[_Entry]) -> None:
        self._where, self._data, self._entries = where, data, {e.name: e for e in entries}

    def __getitem__(self, name: str) -> Array:
        return _tensor(self._where, self._data, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _open(path: Location, *, mmap: bool) -> tuple[_Tensors, dict[str, str]]:
    where = os.fspath(path)
    with open(path, "rb", opener=_opened) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise _fault(where, "it is no regular file")
        size = info.st_size
        raw = _header_bytes(where, file, size)
        entries, metadata = _header(where, raw, size - 8 - len(raw))
        data = _mapped(where, file, size)[8 + len(raw) :] if mmap else _loaded(where, file, size - 8 - len(raw))
    return _Tensors(where, data, entries), metadata


def _opened(path: str, flags: int) -> int:
    # Opening a pipe without a writer would block for ever.
    return os.open(path, flags | os.O_NONBLOCK)


def _grain(nbytes: int) -> int:
    """The largest power of two, up to a cache line, that divides a size."""
    return min(LINE, nbytes & -nbytes) or LINE


def _texts(metadata: Mapping[str, str]) -> dict[str, str]:
    for item in metadata.items():
        if not all(isinstance(x, str) for x in item):
            raise TypeError(f"metadata has {item[0]!r}: {item[1]!r}; names and texts are strings")
    return dict(metadata)


def _tensor_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a tensor is named {name!r}; names are strings")
    if name == METADATA:
        raise ValueError(f"a tensor is named {METADATA!r}, which the format reserves; choose another name")
    return name


def _spelling(name: str, dtype: np.dtype[Any]) -> str:
    """Name of a dtype in the format."""
    spelling = _OTHER_NAMES.get(dtype.name) or _NAMES.get(dtype.newbyteorder("<"))
    if spelling is None:
        supported = ", ".join([*(d.name for d in _NAMES), *_OTHER_NAMES])
        raise TypeError(f"tensor {name!r} has dtype {dtype}; a file holds {supported}")
    return spelling


def _bytes(array: Array) -> Array:
    """The bytes of an array in the format's order."""
    dtype = array.dtype if array.dtype.name in _OTHER_NAMES else array.dtype.newbyteorder("<")
    return np.asarray(array, dtype, order="C").reshape(-1).view(np.uint8)


def _fault(where: str, what: str) -> PackError:
    return PackError(f"{where} is not a sound safetensors file: {what}")


def _header_bytes(where: str, file: BufferedReader, size: int) -> bytes:
    if size < 8:
        raise _fault(where, f"it has {size} bytes, and its header's length alone takes 8")
    length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_HEADER, size - 8):
        raise _fault(where, f"its header claims {length} bytes; the file has {size} and headers at most {MAX_HEADER}")
    raw = file.read(length)
    if raw[:1] != b"{":
        raise _fault(where, f"its header starts with {raw[:1]!r}, not with '{{'")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise ValueError(f"the key {reprlib.repr(name)} occurs twice")
        mapping[name] = value
    return mapping


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _header(where: str, raw: bytes, size: int) -> tuple[list[_Entry], dict[str, str]]:
    """The tensors of a header, `size` bytes in total, and the metadata."""
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _fault(where, f"its header cannot be parsed: {error}") from error
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise _fault(where, f"{METADATA} is {reprlib.repr(metadata)}, not a map from strings to strings")
    entries = [_entry(where, name, value) for name, value in header.items()]
    at = 0
    for e in sorted(entries, key=lambda e: (e.begin, e.end)):
        if e.begin != at:
            raise _fault(where, f"tensor {reprlib.repr(e.name)} starts at {e.begin}; the one before it ends at {at}")
        at = e.end
    if at != size:
        raise _fault(where, f"its tensors take {at} bytes, but {size} follow the header")
    return entries, metadata


def _entry(where: str, name: str, value: Any) -> _Entry:
    label = f"tensor {reprlib.repr(name)}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise _fault(where, f"{label} is {reprlib.repr(value)}; it needs dtype, shape and data_offsets")
    shape = _counts(where, f"{label} has shape", value["shape"])
    offsets = _counts(where, f"{label} has data_offsets", value["data_offsets"])
    dtype = _dtype(where, label, value["dtype"])
    # NumPy rejects the strides of an empty array whose other extents are too large.
    if len(shape) > MAX_NDIM or math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
        raise _fault(where, f"{label} has shape {reprlib.repr(shape)}, more than can be addressed")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise _fault(
            where,
            f"{label} of {dtype.name} and shape {reprlib.repr(shape)} takes {math.prod(shape) * dtype.itemsize} bytes; "
            f"its data_offsets are {reprlib.repr(offsets)}",
        )
    return _Entry(name, dtype, shape, *offsets)


def _counts(where: str, label: str, value: Any) -> tuple[int, ...]:
    """A list of extents or offsets; numbers of JSON can be of any size or type."""
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise _fault(where, f"{label} {reprlib.repr(value)}, not a list of counts below 2**63")
    return tuple(value)


def _dtype(where: str, label: str, name: Any) -> np.dtype[Any]:
    other = _OTHERS.get(name) if isinstance(name, str) else None
    if other is not None:
        try:
            import ml_dtypes
        except ImportError as error:
            raise PackError(
                f"{where}: {label} is {other}, which NumPy lacks: install it with pip install ml_dtypes"
            ) from error
        return np.dtype(getattr(ml_dtypes, other))
    if not isinstance(name, str) or name not in _DTYPES:
        supported = ", ".join([*_DTYPES, *_OTHERS])
        raise _fault(where, f"{label} has dtype {reprlib.repr(name)}; supported are {supported}")
    return _DTYPES[name]


def _mapped(where: str, file: BufferedReader, size: int) -> Array:
    try:
        # Slices of a plain array cost a tenth of a memmap's, and keep it alive as well.
        return np.asarray(np.memmap(file, np.uint8, "r", shape=(size,)))
    except ValueError as error:
        raise _fault(where, f"it was cut short while it was opened: {error}") from error


def _loaded(where: str, file: BufferedReader, size: int) -> Array:
    """The next bytes of a file, aligned to a cache line as in a mapped file."""
    raw = np.empty(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    data = raw[start : start + size]
    got = file.readinto(data.data)
    if got != size:
        raise _fault(where, f"it was cut short while it was read: {got} of {size} bytes came")
    data.flags.writeable = False
    return data


def _tensor(where: str, data: Array, entry: _Entry) -> Array:
    raw = data[entry.begin : entry.end]
    # NumPy's operations differ in their results for a bool that is neither 0 nor 1.
    if entry.dtype == np.bool_ and raw.size and raw.max() > 1:
        raise _fault(where, f"tensor {reprlib.repr(entry.name)} is BOOL and has a byte {raw.max()}")
    array = raw.view(entry.dtype).reshape(entry.shape)
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return array
