"""Arrays on CUDA devices: CuPy's, and objects with `__cuda_array_interface__` or `__dlpack__`.

Owns the reading of their addresses, strides, types and streams, and the allocation of new ones.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from portmm.arrays.libraries import exports_cuda
from portmm.arrays.numpy_arrays import numpy_of
from portmm.arrays.operand import Operand, contiguous, type_name, type_of
from portmm.errors import NoDeviceError
from portmm.spec.dtype import BY_NAME, EXTENSION_TYPES


def from_cupy(x: Any) -> Operand:
    """The description of an array of CuPy's."""
    number = int(x.device.id)
    return Operand(
        source=x,
        language="cuda",
        device=("cuda", number),
        pointer=int(x.data.ptr),
        shape=tuple(x.shape),
        strides=tuple(x.strides),
        dtype=type_of(x.dtype, "a CuPy array"),
        queue=_current_stream(sys.modules["cupy"], number),
        readonly=False,
    )


def from_interface(x: Any, interface: dict[str, Any]) -> Operand:
    """The description of an object with the CUDA array interface, versions 0 to 3.

    Raises:
        TypeError: it has a mask, or its element type is unknown to portmm.
        NoDeviceError: there is no CuPy to ask which device it is on.
    """
    cupy = _cupy(f"an array of type {type(x).__name__}")
    what = f"an array of type {type(x).__name__}"
    if interface.get("mask") is not None:
        raise TypeError(f"{what} has a mask; portmm multiplies arrays without masks: fill it first")
    dtype = np.dtype(interface["typestr"])
    shape = tuple(int(n) for n in interface["shape"])
    strides = interface.get("strides")
    address, readonly = interface["data"]
    number = _device_of(cupy, address)
    stream = interface.get("stream")
    return Operand(
        source=x,
        language="cuda",
        device=("cuda", number),
        pointer=int(address or 0),
        shape=shape,
        strides=contiguous(shape, dtype.itemsize) if strides is None else tuple(int(s) for s in strides),
        dtype=type_name(dtype.name, what, native=dtype.isnative),
        queue=_current_stream(cupy, number) if stream is None else int(stream),
        readonly=bool(readonly),
    )


def from_dlpack(x: Any) -> Operand | None:
    """The description of an object that exports memory of a CUDA device by DLPack; None for any other.

    Raises:
        NoDeviceError: there is no CuPy to import it.
    """
    return from_cupy(_cupy(f"an array of type {type(x).__name__}").from_dlpack(x)) if exports_cuda(x) else None


def _cupy(why: str) -> Any:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise NoDeviceError(
            f"{why} needs CuPy, which cannot be imported: {error}; `pip install cupy-cuda13x`"
        ) from error


def _current_stream(cupy: Any, device: int) -> int:
    return int(cupy.cuda.get_current_stream(device).ptr)


def _device_of(cupy: Any, address: int | None) -> int:
    runtime = cupy.cuda.runtime
    # An array without elements has no address, and may be anywhere.
    return int(runtime.pointerGetAttributes(address).device if address else runtime.getDevice())


def cupy_empty(x: Operand, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array of CuPy's on the device of an array, in its stream.

    Raises:
        TypeError: CuPy has no such element type.
        NoDeviceError: CuPy cannot be imported.
    """
    cupy = _cupy("a new array")
    number = x.device[1]
    with cupy.cuda.Device(number), _working_in(cupy, number, x.queue):
        try:
            return cupy.empty(shape, dtype=numpy_of(dtype))
        except (TypeError, ValueError) as error:
            if dtype not in EXTENSION_TYPES:
                raise
            name = BY_NAME[dtype].numpy
            raise TypeError(
                f"CuPy {cupy.__version__} cannot allocate an array of {name}: {error}; "
                f"pass out, or a dtype that it supports"
            ) from error


@dataclass(frozen=True, slots=True)
class _Handle:
    """A stream, by the protocol in which libraries exchange them."""

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)


def _working_in(cupy: Any, device: Any, queue: int) -> AbstractContextManager[Any]:
    """A context in which CuPy allocates for a stream: its pool reuses memory that the stream may still use."""
    if _current_stream(cupy, device) == queue:
        return nullcontext()
    make: Any = getattr(cupy.cuda.Stream, "from_external", None)
    stream: AbstractContextManager[Any] = make(_Handle(queue)) if make else cupy.cuda.ExternalStream(queue)
    return stream
