"""Libraries of arrays, recognised by the class of an object.

Owns `library_of`, and `place_of`, which calls in the host's memory ask about their operands: nothing of what reads
arrays on devices is imported for the answer. Nor is a library: an array of it can only come from where it is loaded.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from portmm.weights.kinds import ON_HOST, WeightKind

_LIBRARY_TYPES = {"cupy": ("cupy", "ndarray"), "torch": ("torch", "Tensor"), "pyopencl": ("pyopencl.array", "Array")}
_ON_DEVICE = {WeightKind.DEVICE_PANELS: "packed", WeightKind.DEVICE_INT4: "int4"}
# DLPack's device types: CUDA, and CUDA's managed memory.
_DLPACK_CUDA = frozenset((2, 13))


def library_of(x: object) -> str:
    """The library of an object, "packed" or "int4" for weights on a device, "host" for what never is, "" if unknown."""
    cls: Any = type(x)  # mypy does not know it as hashable
    return _library_of(cls)


@lru_cache(maxsize=256)
def _library_of(cls: type) -> str:
    kind = getattr(cls, "weight_kind", None)
    plain = (np.ndarray, np.generic, int, float, complex, str, bytes, list, tuple, dict, type(None))
    if issubclass(cls, plain) or kind in ON_HOST:
        return "host"
    if kind in _ON_DEVICE:
        return _ON_DEVICE[kind]
    for library, (module, name) in _LIBRARY_TYPES.items():
        array = getattr(sys.modules.get(module), name, None)  # an array of a library that is not loaded cannot be here
        if isinstance(array, type) and issubclass(cls, array):
            return library
    return ""


def place_of(*values: Any) -> str:
    """Where the arrays of a call are: "traced", "device" or "tensors" of PyTorch; empty for NumPy's, the usual ones."""
    for x in values:  # a generator takes twice as long
        if type(x) is not np.ndarray and x is not None and library_of(x) != "host":
            break
    else:
        return ""
    if any(hasattr(x, "call_") for x in values):
        return "traced"
    if any(on_device(x) or library_of(x) == "int4" for x in values):
        return "device"
    return "tensors" if any(map(is_tensor, values)) else ""


def on_device(x: Any) -> bool:
    """Whether an object is an array on a device; examines no more than the class, where that suffices."""
    if type(x) is np.ndarray:
        return False
    library = library_of(x)
    if library in ("host", "int4"):
        return False
    if library:
        return bool(x.is_cuda) if library == "torch" else True
    cls: Any = type(x)
    return hasattr(cls, "__cuda_array_interface__") or (hasattr(cls, "__dlpack_device__") and exports_cuda(x))


def is_tensor(x: Any) -> bool:
    """Whether an object is a tensor of PyTorch in the host's memory."""
    return type(x) is not np.ndarray and library_of(x) == "torch" and not x.is_cuda


def any_tensor(x: Any) -> bool:
    """Whether one of PyTorch's tensors in the host's memory is among values, or in their lists, tuples and dicts."""
    if isinstance(x, dict):
        return any(map(any_tensor, x.values()))
    return any(map(any_tensor, x)) if isinstance(x, (list, tuple)) else is_tensor(x)


def exporter_of(x: Any) -> str:
    """The library of an object, or the protocol by which it is read on a device; empty if there is none."""
    if library := library_of(x):
        return library
    if getattr(x, "__cuda_array_interface__", None) is not None:
        return "interface"
    return "dlpack" if exports_cuda(x) else ""


def exports_cuda(x: Any) -> bool:
    """Whether an object exports memory of a CUDA device by DLPack."""
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and hasattr(x, "__dlpack__") and int(where()[0]) in _DLPACK_CUDA
