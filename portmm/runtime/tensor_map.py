"""Tensor maps (TMA descriptors), by which a GPU's copy engine addresses boxes of a tensor in global memory.

Owns the call of CUDA's driver that encodes them, through ctypes, as CuPy does not wrap it. CUDA Driver API,
"Tensor Map Object Management". A map contains an address, so each call of a kernel needs
its own; those of the last calls are cached.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from portmm.errors import DeviceError, NoDeviceError
from portmm.spec.dtype import BY_NAME
from portmm.util.memo import cached

LIBRARY = "libcuda.so.1"
BYTES, ALIGNED = 128, 64
"""Size and alignment of a map."""
KEPT = 4096
"""Cached maps: a call has two or three."""

# CUtensorMapDataType, by bytes: copies of unsigned integers do not interpret elements.
_KINDS = {1: 0, 2: 1, 4: 2, 8: 4}
# The same for f32 that copies round to the nearest of tf32.
_TFLOAT32 = 11
# CUtensorMapSwizzle, by bytes.
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
# CUtensorMapInterleave, CUtensorMapL2promotion (lines of 256 bytes), CUtensorMapFloatOOBfill (zeros).
_PLAIN, _PROMOTED, _ZEROS = 0, 3, 0


@cache
def _driver() -> Any:
    """The library of CUDA's driver."""
    import ctypes

    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NoDeviceError(f"CUDA's driver cannot be loaded: {error}; install NVIDIA's driver") from error


def _why(driver: Any, status: int) -> str:
    import ctypes

    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"an unknown error").decode("ascii", "replace")


@cached("calls", KEPT)
def tensor_map(  # noqa: PLR0917 - the fields of a map
    dtype: str, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int,
    rounds: bool = False, pixels: tuple[tuple[int, int], ...] | None = None,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """A tensor map, as an array of one element that CuPy passes to a kernel by value.

    Args:
        dtype: of the elements.
        address: of the first one; a multiple of 16.
        sizes: elements along up to five axes, the contiguous one first.
        strides: bytes between elements along each axis but the first; multiples of 16.
        box: elements along each axis that a copy transfers; of images, channels and pixels.
        swizzle: span in bytes of the swizzle in shared memory: 0, 32, 64 or 128.
        rounds: copies round elements, which are f32, to the nearest of tf32.
        pixels: the first, the last and the distance along x and y of pixels at which windows of images begin; None
            for boxes.

    Raises:
        NoDeviceError: there is no driver.
        DeviceError: the driver is too old, or refuses the tensor.
    """
    import ctypes

    driver = _driver()
    try:
        encode = driver.cuTensorMapEncodeTiled if pixels is None else driver.cuTensorMapEncodeIm2col
    except AttributeError as error:
        raise DeviceError(f"CUDA's driver has no tensor maps: {error}; update it to one of CUDA 12 or newer") from error
    memory = np.zeros(BYTES + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    map_ = memory[start : start + BYTES]
    rank, words = len(sizes), ctypes.c_uint32
    steps = (words * rank)(*(1,) * rank)
    moved: tuple[Any, ...] = ((words * rank)(*box), steps) if pixels is None else _windows(box, pixels)
    status = encode(
        ctypes.c_void_p(map_.ctypes.data), _TFLOAT32 if rounds else _KINDS[BY_NAME[dtype].bytes], words(rank),
        ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides),
        *moved, _PLAIN, _SWIZZLES[swizzle], _PROMOTED, _ZEROS,
    )  # fmt: skip
    if status:
        raise DeviceError(
            f"CUDA makes no tensor map of {dtype} at {address:#x}, sizes {sizes}, strides {strides} bytes, "
            f"boxes {box}, swizzle {swizzle}: {_why(driver, status)}; copy the operand to an array without gaps"
        )
    return map_.view(f"V{BYTES}")


def _windows(box: tuple[int, ...], pixels: tuple[tuple[int, int], ...]) -> tuple[Any, ...]:
    """Arguments of cuTensorMapEncodeIm2col: corners, channels and pixels of a copy, and distances along all axes."""
    import ctypes

    lower, upper, step = pixels
    corners = ((ctypes.c_int * len(x))(*x) for x in (lower, upper))
    return (*corners, *map(ctypes.c_uint32, box), (ctypes.c_uint32 * (len(step) + 2))(1, *step, 1))
