"""Memory in pages of its own, huge ones where the system gives them.

Owns anonymous maps, the memory of packed weights: its size, its alignment, and its huge pages; weights that adjoin each
other; and vectors of ones.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.ir.abi import HUGE_PAGE
from portmm.util import locks

LEAST = 1 << 22
"""Bytes of a weight from which huge pages of its own pay.

NumPy asks for huge pages from 4 MiB on, but its memory starts within one. In turns: weights of 4 to 8 MiB, M = 1 to 16,
1.04 to 1.09 of the rate in NumPy's memory on Granite Rapids, none on Zen 5; of 16 to 64 MiB there 1.03, 0.99 at the
lowest. Weights of 4 MiB take 0.2 ms more to be packed where malloc has kept memory.
"""
CHUNK = 64 << 20
"""Bytes of memory that is asked for at a time, for weights that adjoin each other."""


def anonymous(size: int) -> mmap.mmap:
    """Private pages that return to the system as soon as their last reference goes.

    Raises:
        MemoryError: there is no memory for them.
    """
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes of pages") from error


def advise_huge(pages: mmap.mmap, start: int, length: int) -> None:
    """Ask for huge pages in a part of a map; a system without them ignores it."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE, start, length)
        except OSError:  # a kernel that was built without them
            return


class Chunk:
    """Memory in huge pages, for arrays of a type one after the other; it is free again when the last of them is.

    Attributes:
        scratch: memory for values of one step, which the next one overwrites.
    """

    __slots__ = ("free", "lock", "scratch")

    def __init__(self) -> None:
        self.free: dict[Any, numpy_arrays.Array] = {}
        self.scratch: numpy_arrays.Array | None = None
        self.lock = locks.lock()

    def take(self, size: int, dtype: np.dtype[Any]) -> numpy_arrays.Array:
        """Some bytes that begin a cache line."""
        with self.lock:
            free = self.free.get(dtype)
            if free is None or len(free) < size:
                free = _own_pages(max(CHUNK, size))
            self.free[dtype] = free[-(-size // numpy_arrays.LINE) * numpy_arrays.LINE :]
        return free[:size]


_chunk: ContextVar[Chunk | None] = ContextVar("chunk", default=None)


@contextmanager
def adjoining(chunk: Chunk | None = None) -> Iterator[None]:
    """Let lasting arrays of a block of code adjoin each other, in a chunk of their own or in this one.

    What ends in the middle of a huge page has small ones there, and what malloc has kept has many. To fill a small page
    takes ten times as long, for its bytes, as a huge one, and products of weights of 2 to 9 MiB that are read from
    memory have 1.01 to 1.02 of their rate in huge ones (Zen 5, float32, 128 rows and convolutions).
    """
    token = _chunk.set(chunk or Chunk())
    try:
        yield
    finally:
        _chunk.reset(token)


def adjoining_empty(elements: int, dtype: Any) -> numpy_arrays.Array | None:
    """An uninitialised 1-D array in the chunk of the block of code; None outside of one, or for no elements."""
    chunk, dtype = _chunk.get(), np.dtype(dtype)
    size = elements * dtype.itemsize
    return chunk.take(size, dtype).view(dtype) if chunk is not None and size else None


def scratch_empty(size: int) -> numpy_arrays.Array:
    """Uninitialised bytes, in a block of `adjoining` those of the call before, since new pages take their time."""
    chunk = _chunk.get()
    if chunk is None:
        return np.empty(size, np.uint8)
    if chunk.scratch is None or len(chunk.scratch) < size:
        chunk.scratch = np.empty(size, np.uint8)
    return chunk.scratch[:size]


def adjoined(arrays: list[numpy_arrays.Array]) -> numpy_arrays.Array | None:
    """One read-only array of arrays of a chunk, if each begins where the one before ends; else None."""
    base = arrays[0].base
    if base is None or any(x.base is not base or x.dtype != arrays[0].dtype for x in arrays):
        return None
    begins = [x.ctypes.data for x in arrays]
    if any(begin + x.nbytes != end for x, (begin, end) in zip(arrays, pairwise(begins), strict=False)):
        return None
    whole = base.reshape(-1).view(np.uint8)[begins[0] - base.ctypes.data :][: sum(x.nbytes for x in arrays)]
    joined = whole.view(arrays[0].dtype)
    joined.flags.writeable = False
    return joined


def lasting_empty(elements: int, dtype: Any) -> numpy_arrays.Array:
    """An uninitialised 1-D array that starts on a cache line; on huge pages of its own from `LEAST` bytes on.

    What does not fill the last huge page lies in small ones, so that no memory is lost. In a block of `adjoining` it is
    in the block's chunk.
    """
    shared = adjoining_empty(elements, dtype)
    if shared is not None:
        return shared
    size = elements * np.dtype(dtype).itemsize
    if size < LEAST:
        return numpy_arrays.aligned_empty(elements, dtype)
    return _own_pages(size).view(dtype)


def _own_pages(size: int) -> numpy_arrays.Array:
    """Bytes that start on a huge page of their own."""
    pages = anonymous(size + HUGE_PAGE)
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE
    advise_huge(pages, start, size // HUGE_PAGE * HUGE_PAGE)
    return raw[start : start + size]


def can_be_addressed(shape: tuple[int, ...], item_bytes: int) -> bool:
    """Whether strides of an array of this shape and bytes per element fit 64 bits; extents of 0 count as 1."""
    return math.prod(max(n, 1) for n in shape) * item_bytes < 1 << 63


def page_ends(x: numpy_arrays.Array, size: int) -> tuple[int, int]:
    """The index, in units of `size` bytes, of the end of the first huge page that ends in `x`, and their count."""
    first = HUGE_PAGE - 1 - x.ctypes.data % HUGE_PAGE
    return first // size, max(0, -(-(x.nbytes - first) // HUGE_PAGE))


def aligned_readonly(x: numpy_arrays.Array, count: int) -> numpy_arrays.Array:
    """The first `count` elements, read-only, on a cache line: a view of `x` where it starts on one, else a copy."""
    target = x.reshape(-1)[:count]
    if x.ctypes.data % numpy_arrays.LINE or not x.flags.c_contiguous:
        target = numpy_arrays.aligned_empty(count, x.dtype)
        target[...] = x.reshape(-1)[:count]
    target.flags.writeable = False
    return target


_ones = np.ones(0, np.float32)


def ones(count: int) -> numpy_arrays.Array:
    """A read-only vector of ones in float32, which shares its memory with all others.

    Calls of thousands of shapes keep such vectors: each is no longer than the rows of its call.
    """
    global _ones  # noqa: PLW0603 - replaced by a longer one
    vector = _ones
    if vector.size < count:
        vector = numpy_arrays.aligned_empty(max(1024, 1 << (count - 1).bit_length()), np.float32)
        vector[:] = 1
        vector.flags.writeable = False
        _ones = vector
    return vector[:count]
