"""Interop with arrays of other libraries, in the memory of a device.

Owns the support of CuPy, PyTorch, PyOpenCL, and of objects with
`__cuda_array_interface__` or `__dlpack__`: one description of their arrays, and new arrays of the same library.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import cupy_arrays, pyopencl_arrays, torch_tensors
from portmm.arrays.libraries import library_of
from portmm.arrays.operand import Operand, same_device, title_of

if TYPE_CHECKING:
    from collections.abc import Callable


def adopt(x: Any) -> Operand | None:
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
        return cupy_arrays.from_interface(x, interface)
    return cupy_arrays.from_dlpack(x)


def adopt_all(arrays: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Operand]:
    """The descriptions of arrays on one device, by name; `optional` ones may be None, and are left out then.

    Raises:
        TypeError: one is in the host's memory, or of an unsupported type.
        ValueError: they are on several devices.
    """
    operands = {}
    for name, x in (arrays | {n: x for n, x in (optional or {}).items() if x is not None}).items():
        operand = x if isinstance(x, Operand) else adopt(x)
        if operand is None:
            kind = type(x).__name__
            raise TypeError(f"{name} is a {kind} in the host's memory, others are on a device: copy it there first")
        operands[name] = operand
    same_device(list(operands.values()))
    return operands


def lay(x: Any) -> tuple[Any, ...]:
    """The properties of an array on a device that kernels depend on."""
    array = adopt(x)
    assert array is not None  # noqa: S101 - `libraries.on_device` is true
    return array.kind


_READERS: dict[str, Callable[[Any], Operand | None]] = {
    "cupy": cupy_arrays.from_cupy,
    "torch": torch_tensors.from_torch,
    "pyopencl": pyopencl_arrays.from_pyopencl,
    "packed": lambda x: adopt(x.array),
}
_MAKERS: dict[str, Callable[[Operand, tuple[int, ...], str], Any]] = {
    "torch": torch_tensors.torch_empty,
    "pyopencl": pyopencl_arrays.pyopencl_empty,
}


def empty_like(x: Operand, shape: tuple[int, ...], dtype: str) -> Operand:
    """A new array of the same library, on the same device and queue, C-contiguous and uninitialised.

    Arrays of libraries that are known only by an interface get one of CuPy's.

    Args:
        x: the result of `adopt`.
        shape: of the new array.
        dtype: portmm's name of its elements' type.

    Returns:
        The description of the array, which is its `source`.

    Raises:
        TypeError: the library has no such element type.
    """
    array = _MAKERS.get(library_of(x.source), cupy_arrays.cupy_empty)(x, shape, dtype)
    described = _READERS[library_of(array)](array)
    if described is None:
        raise TypeError(f"{type(array).__name__} was allocated in the host's memory, not on {title_of(x.device)}")
    return described if described.queue == x.queue else replace(described, queue=x.queue)
