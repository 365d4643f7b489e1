"""Interop with arrays of other libraries, in the memory of a device.

Owns the support of CuPy, PyTorch, PyOpenCL, and of objects with
`__cuda_array_interface__` or `__dlpack__`: reading the address, strides and type
of their arrays, and allocating new ones.

A library is recognised by the names of an object's classes and is never
imported for that: an array of it can only come from where it is loaded.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays.numpy_arrays import numpy_of
from portmm.errors import NoDeviceError
from portmm.spec.dtype import BY_NAME, BY_NUMPY, EXTENSION_TYPES
from portmm.weights.kinds import WeightKind

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

_LIBRARY_TYPES = {"cupy": ("cupy", "ndarray"), "torch": ("torch", "Tensor"), "pyopencl": ("pyopencl.array", "Array")}

WIDEST = 16
"""Bytes of the widest vector access."""

# DLPack's device types: CUDA, and CUDA's managed memory.
_DLPACK_CUDA = frozenset((2, 13))


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


def _kind(x: object) -> str:
    """The library of an object, "host" if it is never on a device, or "" if unknown."""
    cls: Any = type(x)  # mypy does not know it as hashable
    return _kind_of(cls)


@lru_cache(maxsize=256)
def _kind_of(cls: type) -> str:
    if issubclass(cls, (np.ndarray, np.generic, int, float, complex, str, bytes, list, tuple, dict)):
        return "host"
    if getattr(cls, "weight_kind", None) is WeightKind.DEVICE_PANELS:
        return "packed"
    for library, (module, name) in _LIBRARY_TYPES.items():
        array = getattr(sys.modules.get(module), name, None)  # an array of a library that is not loaded cannot be here
        if isinstance(array, type) and issubclass(cls, array):
            return library
    return ""


def adopt(x: Any) -> DeviceArray | None:
    """The description of an array on a device; None for anything else.

    Raises:
        TypeError: its element type or layout is unknown to portmm.
        NoDeviceError: it is on a CUDA device, and there is no CuPy to ask which.
    """
    if type(x) is np.ndarray:
        return None
    kind = _kind(x)
    if kind == "host":
        return None
    if kind:
        return _LIBRARIES[kind](x)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(x, interface)
    return _from_dlpack(x)


def on_device(x: Any) -> bool:
    """Whether `adopt` recognises an array on a device; examines no more than the class, where that suffices."""
    if type(x) is np.ndarray:
        return False
    kind = _kind(x)
    if kind == "host":
        return False
    if kind:
        return bool(x.is_cuda) if kind == "torch" else True
    cls: Any = type(x)
    return hasattr(cls, "__cuda_array_interface__") or (hasattr(cls, "__dlpack_device__") and adopt(x) is not None)


def lay(x: Any) -> tuple[Any, ...]:
    """The properties of an array on a device that kernels depend on."""
    array = adopt(x)
    assert array is not None  # noqa: S101 - `on_device` is true
    return array.kind


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


def _named(numpy_name: str, native: bool, what: str) -> str:
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
def _known(dtype: np.dtype[Any], what: str) -> str:
    """Portmm's name of an element type of NumPy, remembered as the `name` of a dtype is slow.

    Raises:
        TypeError: it has none.
    """
    return _named(dtype.name, dtype.isnative, what)


def contiguous(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """The strides in bytes of an array in C's order, for elements of `size` bytes."""
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return tuple(reversed(strides))


# -- CUDA ----------------------------------------------------------------------------


def _cupy(why: str) -> Any:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise NoDeviceError(
            f"{why} needs CuPy, which cannot be imported: {error}; `pip install cupy-cuda13x`"
        ) from error


def _from_cupy(x: Any) -> DeviceArray:
    number = int(x.device.id)
    return DeviceArray(
        source=x,
        language="cuda",
        device=("cuda", number),
        pointer=int(x.data.ptr),
        shape=tuple(x.shape),
        strides=tuple(x.strides),
        dtype=_known(x.dtype, "a CuPy array"),
        queue=_current_stream(sys.modules["cupy"], number),
        readonly=False,
    )


def _current_stream(cupy: Any, device: int) -> int:
    return int(cupy.cuda.get_current_stream(device).ptr)


def _from_torch(x: Any) -> DeviceArray | None:
    if not x.is_cuda:
        return None
    torch = sys.modules["torch"]
    if getattr(x, "requires_grad", False) and torch.is_grad_enabled():
        raise TypeError(
            "a tensor requires gradients, which portmm does not compute; detach() it, or use torch.no_grad()"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"a tensor has layout {x.layout}; portmm takes strided ones: use to_dense()")
    if x.is_neg():
        raise TypeError("a tensor is a view that changes signs when it is read; use resolve_neg()")
    size = x.element_size()
    return DeviceArray(
        source=x,
        language="cuda",
        device=("cuda", int(x.device.index)),
        pointer=int(x.data_ptr()),
        shape=tuple(x.shape),
        strides=tuple(s * size for s in x.stride()),
        dtype=_named(str(x.dtype).removeprefix("torch."), native=True, what="a tensor"),
        queue=int(torch.cuda.current_stream(x.device).cuda_stream),
        readonly=False,
    )


def _from_interface(x: Any, interface: dict[str, Any]) -> DeviceArray:
    """From the CUDA array interface, versions 0 to 3."""
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
    return DeviceArray(
        source=x,
        language="cuda",
        device=("cuda", number),
        pointer=int(address or 0),
        shape=shape,
        strides=contiguous(shape, dtype.itemsize) if strides is None else tuple(int(s) for s in strides),
        dtype=_named(dtype.name, dtype.isnative, what),
        queue=_current_stream(cupy, number) if stream is None else int(stream),
        readonly=bool(readonly),
    )


def _device_of(cupy: Any, address: int | None) -> int:
    runtime = cupy.cuda.runtime
    # An array without elements has no address, and may be anywhere.
    return int(runtime.pointerGetAttributes(address).device if address else runtime.getDevice())


def _from_dlpack(x: Any) -> DeviceArray | None:
    where = getattr(x, "__dlpack_device__", None)
    if where is None or not hasattr(x, "__dlpack__") or int(where()[0]) not in _DLPACK_CUDA:
        return None
    return _from_cupy(_cupy(f"an array of type {type(x).__name__}").from_dlpack(x))


# -- OpenCL --------------------------------------------------------------------------


def _from_pyopencl(x: Any) -> DeviceArray:
    from portmm.runtime.opencl import default_queue

    queue = x.queue if x.queue is not None else default_queue(x.context)
    return DeviceArray(
        source=x,
        language="opencl",
        device=("opencl", queue.context.int_ptr, queue.device.int_ptr),
        pointer=(x.base_data, int(x.offset)),
        shape=tuple(int(n) for n in x.shape),
        strides=tuple(int(s) for s in x.strides),
        dtype=_known(x.dtype, "a PyOpenCL array"),
        queue=queue,
        readonly=_read_only(x.base_data),
    )


def _read_only(memory: Any) -> bool:
    cl = sys.modules["pyopencl"]
    return isinstance(memory, cl.MemoryObjectHolder) and bool(memory.flags & cl.mem_flags.READ_ONLY)


def memory(buffer: Any) -> tuple[int, int]:
    """The root allocation of an OpenCL buffer, and the offset in it: a sub-buffer has that of its parent."""
    info = sys.modules["pyopencl"].mem_info
    if not hasattr(buffer, "get_info"):
        return 0, int(getattr(buffer, "svm_ptr", 0))
    root = buffer.get_info(info.ASSOCIATED_MEMOBJECT)
    if root is None:
        return int(buffer.int_ptr), 0
    return int(root.int_ptr), int(buffer.get_info(info.OFFSET))


_LIBRARIES: dict[str, Callable[[Any], DeviceArray | None]] = {
    "cupy": _from_cupy,
    "torch": _from_torch,
    "pyopencl": _from_pyopencl,
    "packed": lambda x: adopt(x.array),
}


# -- new arrays ----------------------------------------------------------------------


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
    kind = _kind(x.source)
    make = {"torch": _torch_empty, "pyopencl": _pyopencl_empty}.get(kind, _cupy_empty)
    array = make(x, shape, dtype)
    described = _LIBRARIES[_kind(array)](array)
    if described is None:
        raise TypeError(f"{type(array).__name__} was allocated in the host's memory, not on {_spell(x.device)}")
    return array, described if described.queue == x.queue else replace(described, queue=x.queue)


def _torch_empty(x: DeviceArray, shape: tuple[int, ...], dtype: str) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, BY_NAME[dtype].numpy), device=x.source.device)


def _cupy_empty(x: DeviceArray, shape: tuple[int, ...], dtype: str) -> Any:
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


def _pyopencl_empty(x: DeviceArray, shape: tuple[int, ...], dtype: str) -> Any:
    array = import_module("pyopencl.array")
    return array.Array(x.queue, shape, numpy_of(dtype), allocator=x.source.allocator)


# -- several arrays, and launches ----------------------------------------------------


def _spell(device: tuple[Hashable, ...]) -> str:
    language, *where = device
    return f"{language}:{where[0]}" if language == "cuda" else f"OpenCL device {where[-1]:#x} of context {where[0]:#x}"


def same_device(arrays: Sequence[DeviceArray]) -> tuple[Hashable, ...]:
    """The one device of all arrays.

    Raises:
        ValueError: they are on several; the message names two.
    """
    first = arrays[0].device
    for i, x in enumerate(arrays):
        if x.device != first:
            raise ValueError(
                f"array 0 is on {_spell(first)} and array {i} on {_spell(x.device)}; copy them to one device first"
            )
    return first


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
