"""Interop with arrays of other libraries, in the memory of a device.

Owns the support of CuPy, PyTorch, PyOpenCL, and of objects with
`__cuda_array_interface__` or `__dlpack__`: one description of their arrays, and new arrays of the same library.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import cuda_arrays, opencl_arrays
from portmm.arrays.device_array import DeviceArray, device_name
from portmm.arrays.libraries import library_of

if TYPE_CHECKING:
    from collections.abc import Callable


def adopt(x: Any) -> DeviceArray | None:
    """The description of an array on a device; None for anything else.

    Raises:
        TypeError: its element type or layout is unknown to portmm.
        NoDeviceError: it is on a CUDA device, and there is no CuPy to ask which.
    """
    if type(x) is np.ndarray:
        return None
    library = library_of(x)
    if library == "host":
        return None
    if library:
        return _READERS[library](x)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        return cuda_arrays.from_interface(x, interface)
    return cuda_arrays.from_dlpack(x)


def lay(x: Any) -> tuple[Any, ...]:
    """The properties of an array on a device that kernels depend on."""
    array = adopt(x)
    assert array is not None  # noqa: S101 - `libraries.on_device` is true
    return array.kind


_READERS: dict[str, Callable[[Any], DeviceArray | None]] = {
    "cupy": cuda_arrays.from_cupy,
    "torch": cuda_arrays.from_torch,
    "pyopencl": opencl_arrays.from_pyopencl,
    "packed": lambda x: adopt(x.array),
}
_MAKERS: dict[str, Callable[[DeviceArray, tuple[int, ...], str], Any]] = {
    "torch": cuda_arrays.torch_empty,
    "pyopencl": opencl_arrays.pyopencl_empty,
}


def empty_like(x: DeviceArray, shape: tuple[int, ...], dtype: str) -> tuple[Any, DeviceArray]:
    """A new array of the same library, on the same device and queue, C-contiguous and uninitialised.

    Arrays of libraries that are known only by an interface get one of CuPy's.

    Args:
        x: the result of `adopt`.
        shape: of the new array.
        dtype: portmm's name of its elements' type.

    Returns:
        The array, and its description.

    Raises:
        TypeError: the library has no such element type.
    """
    array = _MAKERS.get(library_of(x.source), cuda_arrays.cupy_empty)(x, shape, dtype)
    described = _READERS[library_of(array)](array)
    if described is None:
        raise TypeError(f"{type(array).__name__} was allocated in the host's memory, not on {device_name(x.device)}")
    return array, described if described.queue == x.queue else replace(described, queue=x.queue)
