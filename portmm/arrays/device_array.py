"""Array on a device, as its library describes it.

Owns `DeviceArray`, its views and its spelling as an argument of a launch, and portmm's names of element types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of
from portmm.spec.dtype import BY_NAME, BY_NUMPY

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

WIDEST = 16
"""Bytes of the widest vector access."""


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array on a device, as its library describes it.

    Attributes:
        source: the array, which keeps the memory alive.
        language: of kernels on its device, "cuda" or "opencl".
        device: ("cuda", number), or ("opencl", address of the context, address of the device).
        pointer: of element zero: an address, or a buffer and an offset in bytes;
            (None, 0) of an OpenCL array without elements.
        shape: elements along each dimension.
        strides: bytes between elements along each dimension; any sign.
        dtype: portmm's name of the elements' type.
        queue: CUDA's handle of the library's current stream, or PyOpenCL's queue.
        readonly: its library forbids writing.
    """

    source: Any
    language: str
    device: tuple[Hashable, ...]
    pointer: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    queue: Any
    readonly: bool

    @property
    def at(self) -> int:
        """The address of element zero, or its offset in a buffer, in bytes."""
        return int(self.pointer) if self.language == "cuda" else int(self.pointer[1])

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that kernels depend on: all but the address, of which only the alignment."""
        return (self.shape, self.strides, self.dtype, self.device, math.gcd(self.at, WIDEST), self.readonly)

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size


def transposed(x: DeviceArray) -> DeviceArray:
    """The array with its last two dimensions exchanged."""
    shape, strides = (*x.shape[:-2], *x.shape[:-3:-1]), (*x.strides[:-2], *x.strides[:-3:-1])
    return replace(x, shape=shape, strides=strides)


def standin(x: DeviceArray) -> np.ndarray[Any, Any]:
    """A stand-in for an array on a device: in the host's memory, of its shape, strides and type, for tracing.

    It has memory of one element, and must not be read.

    Raises:
        TypeError: NumPy lacks the type, and there is no ml_dtypes.
    """
    dtype = numpy_of(x.dtype)
    # A view of raw bytes: NumPy does not parse the name of an 8-bit float.
    raw = np.empty(1, f"V{dtype.itemsize}")
    return np.lib.stride_tricks.as_strided(raw, x.shape, x.strides, writeable=False).view(dtype)


def contiguous(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """The strides in bytes of an array in C's order, for elements of `size` bytes."""
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return tuple(reversed(strides))


def type_name(numpy_name: str, what: str, *, native: bool = True) -> str:
    """Portmm's name of an element type, from NumPy's name.

    Raises:
        TypeError: it has none.
    """
    known = BY_NUMPY.get(numpy_name)
    if known is None or not native:
        order = "" if native else " of the other byte order"
        supported = ", ".join(BY_NUMPY)
        raise TypeError(
            f"{what} has elements of type {numpy_name}{order}; portmm takes {supported}: convert them first"
        )
    return known.name


@lru_cache(maxsize=64)
def type_of(dtype: np.dtype[Any], what: str) -> str:
    """Portmm's name of an element type of NumPy, remembered as the `name` of a dtype is slow.

    Raises:
        TypeError: it has none.
    """
    return type_name(dtype.name, what, native=dtype.isnative)


def same_device(arrays: Sequence[DeviceArray]) -> tuple[Hashable, ...]:
    """The one device of all arrays.

    Raises:
        ValueError: they are on several; the message names two.
    """
    first = arrays[0].device
    for i, x in enumerate(arrays):
        if x.device != first:
            raise ValueError(
                f"array 0 is on {device_name(first)} and array {i} on {device_name(x.device)}; "
                "copy them to one device first"
            )
    return first


def device_name(device: tuple[Hashable, ...]) -> str:
    """The name of a device in messages."""
    language, *where = device
    return f"{language}:{where[0]}" if language == "cuda" else f"OpenCL device {where[-1]:#x} of context {where[0]:#x}"


def argument(x: DeviceArray) -> tuple[str, Any]:
    """An argument of `launch` for an array, at its element zero.

    Raises:
        ValueError: its elements are not aligned to their size.
    """
    size = BY_NAME[x.dtype].bytes
    at = x.pointer if x.language == "cuda" else x.pointer[1]
    if at % size:
        raise ValueError(f"an array of {x.dtype} begins {at % size} bytes past a multiple of {size}; copy it first")
    return ("pointer", at if x.language == "cuda" else (x.pointer[0], at // size))
