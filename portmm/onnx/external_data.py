"""Constants in files beside a model: mapped into memory, so that only what is read takes any.

Owns `mapped` and `released`: a constant that was packed is not read again, and its memory is given back.
"""

from __future__ import annotations

import mmap
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def is_external(tensor: Any) -> bool:
    """Test whether a tensor's elements are in another file."""
    return bool(tensor.data_location == tensor.EXTERNAL)


def mapped(tensor: Any, folder: str, dtype: Any) -> Array | None:
    """The array of a tensor in a file below a folder, or None if the package onnx must read it.

    Args:
        tensor: its protocol buffer.
        folder: of the model.
        dtype: of its elements, at least a byte each.
    """
    entries = {x.key: x.value for x in tensor.external_data}
    root = Path(folder).resolve()
    path = (root / entries.get("location", "")).resolve()
    count, offset = int(np.prod(tensor.dims)), int(entries.get("offset", 0))
    size = count * dtype.itemsize
    inside = path.is_relative_to(root) and path.is_file() and 0 <= offset <= path.stat().st_size - size
    if not inside or not size or int(entries.get("length", size)) != size or offset % dtype.itemsize:
        return None
    return np.frombuffer(_map(str(path), path.stat().st_mtime_ns), dtype, count, offset).reshape(tuple(tensor.dims))


@lru_cache(maxsize=4)
def _map(path: str, changed: int) -> mmap.mmap:
    """A file in memory, to read; once for each time at which it was changed."""
    del changed
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def released(array: Array) -> None:
    """Give back the memory of a mapped array that was read; it is read from its file again, if it is needed."""
    base: Any = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap.mmap) and array.nbytes >= mmap.PAGESIZE:
        first = array.__array_interface__["data"][0] - np.frombuffer(base, np.uint8).__array_interface__["data"][0]
        low, high = first // mmap.PAGESIZE * mmap.PAGESIZE, first + array.nbytes
        base.madvise(mmap.MADV_DONTNEED, low, high - low)
