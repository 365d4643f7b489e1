"""Tensor maps: how the copy engine of a GPU finds boxes of a tensor in global memory.

Owns the call of CUDA's driver that makes them, through ctypes, as CuPy has no name for it. May import `spec.dtype`,
`errors`. CUDA Driver API, "Tensor Map Object Management". A map holds an address, so each call of a kernel needs
its own; those of the last calls are kept.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from portmm.errors import DeviceError, NoDeviceError
from portmm.spec.dtype import BY_NAME

LIBRARY = "libcuda.so.1"
BYTES, ALIGNED = 128, 64
"""Of a map, and what the driver wants one to be aligned to."""
KEPT = 4096
"""Maps that are remembered: a call has two or three."""

# CUtensorMapDataType: copies do not look at what the bytes mean.
_KINDS = {1: 0, 2: 1, 4: 2, 8: 4}
# CUtensorMapSwizzle, by bytes.
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
# CUtensorMapInterleave, CUtensorMapL2promotion (lines of 256 bytes), CUtensorMapFloatOOBfill (zeros).
_PLAIN, _PROMOTED, _ZEROS = 0, 3, 0


@cache
def _driver() -> Any:
    """CUDA's driver.

    Raises:
        NoDeviceError: there is none.
    """
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


@lru_cache(KEPT)
def tensor_map(  # noqa: PLR0917 - what the driver is told
    dtype: str, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> np.ndarray[Any, Any]:
    """A tensor map, as an array of one element that CuPy passes to a kernel by value.

    Args:
        dtype: of the elements.
        address: of the first one; a multiple of 16.
        sizes: elements along three axes, the dense one first.
        strides: bytes from one line to the next, and from one item to the next; multiples of 16.
        box: elements along each axis that a copy moves.
        swizzle: bytes of a line in shared memory whose pieces are exchanged: 0, 32, 64 or 128.

    Raises:
        NoDeviceError: there is no driver.
        DeviceError: the driver is too old, or refuses the tensor.
    """
    import ctypes

    driver = _driver()
    try:
        encode = driver.cuTensorMapEncodeTiled
    except AttributeError as error:
        raise DeviceError(f"CUDA's driver has no tensor maps: {error}; update it to one of CUDA 12 or newer") from error
    room = np.zeros(BYTES + ALIGNED, np.uint8)
    start = -room.ctypes.data % ALIGNED
    made = room[start : start + BYTES]
    rank = len(sizes)
    status = encode(
        ctypes.c_void_p(made.ctypes.data), _KINDS[BY_NAME[dtype].bytes], ctypes.c_uint32(rank),
        ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*(1,) * rank), _PLAIN, _SWIZZLES[swizzle],
        _PROMOTED, _ZEROS,
    )  # fmt: skip
    if status:
        raise DeviceError(
            f"CUDA makes no tensor map of {dtype} at {address:#x}, sizes {sizes}, strides {strides} bytes, "
            f"boxes {box}, swizzle {swizzle}: {_why(driver, status)}; copy the operand to an array without gaps"
        )
    return made.view(f"V{BYTES}")
