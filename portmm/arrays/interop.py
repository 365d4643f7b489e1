"""Interop with arrays of other libraries.

Owns the support of CuPy, PyTorch, PyOpenCL, and of objects with `__cuda_array_interface__` or `__dlpack__`: the reading
of addresses, strides, types and streams, one description of their arrays on a device, and new arrays of the same
library; for tensors of PyTorch in the host's memory, views of them as NumPy's arrays, and `through`, a call of a
function of such arrays; and `elsewhere`, a call whose arrays are not NumPy's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from portmm.arrays import device_kinds
from portmm.arrays.libraries import exporter_of, library_of
from portmm.arrays.numpy_arrays import contiguous, name_of, numpy_of
from portmm.arrays.operand import Operand, same_device, title_of, type_name, type_of
from portmm.errors import NoDeviceError
from portmm.spec.dtype import BY_NAME, BY_NUMPY, EXTENSION_TYPES
from portmm.util.records import dataclass, replace


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


def from_interface(x: Any) -> Operand:
    """The description of an object with the CUDA array interface, versions 0 to 3.

    Raises:
        TypeError: it has a mask, or its element type is unknown to portmm.
        NoDeviceError: there is no CuPy to ask which device it is on.
    """
    what, interface = f"an array of type {type(x).__name__}", x.__cuda_array_interface__
    cupy = _cupy(what)
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


def from_dlpack(x: Any) -> Operand:
    """The description of an object that exports memory of a CUDA device by DLPack.

    Raises:
        NoDeviceError: there is no CuPy to import it.
    """
    return from_cupy(_cupy(f"an array of type {type(x).__name__}").from_dlpack(x))


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
    return make(_Handle(queue)) if make else cupy.cuda.ExternalStream(queue)


def from_pyopencl(x: Any) -> Operand:
    """The description of an array of PyOpenCL's."""
    from portmm.runtime.opencl import default_queue

    queue = x.queue if x.queue is not None else default_queue(x.context)
    return Operand(
        source=x,
        language="opencl",
        device=("opencl", queue.context.int_ptr, queue.device.int_ptr),
        pointer=(x.base_data, int(x.offset)),
        shape=tuple(int(n) for n in x.shape),
        strides=tuple(int(s) for s in x.strides),
        dtype=type_of(x.dtype, "a PyOpenCL array"),
        queue=queue,
        readonly=_read_only(x.base_data),
    )


def _read_only(memory: Any) -> bool:
    cl = sys.modules["pyopencl"]
    return isinstance(memory, cl.MemoryObjectHolder) and bool(memory.flags & cl.mem_flags.READ_ONLY)


def pyopencl_empty(x: Operand, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array on the queue of an array, of its allocator."""
    array = import_module("pyopencl.array")
    return array.Array(x.queue, shape, numpy_of(dtype), allocator=x.source.allocator)


def from_torch(x: Any) -> Operand | None:
    """The description of a tensor of PyTorch's; None if it is in the host's memory.

    Raises:
        TypeError: it requires gradients, or its layout or element type is unknown to portmm.
    """
    if not x.is_cuda:
        return None
    torch = _checked(x)
    size, number = x.element_size(), int(x.device.index)
    return Operand(
        source=x,
        language="cuda",
        device=("cuda", number),
        pointer=int(x.data_ptr()),
        shape=tuple(x.shape),
        strides=tuple([s * size for s in x.stride()]),
        dtype=_tensor_type(x.dtype),
        queue=device_kinds.stream_of(torch, number),
        readonly=False,
    )


@lru_cache(maxsize=64)
def _tensor_type(dtype: Any) -> str:
    """Portmm's name of an element type of PyTorch.

    Raises:
        TypeError: it has none.
    """
    return type_name(str(dtype).removeprefix("torch."), "a tensor")


def _checked(x: Any) -> Any:
    """PyTorch, if portmm can read a tensor of it."""
    torch = sys.modules["torch"]
    if getattr(x, "requires_grad", False) and torch.is_grad_enabled():
        raise TypeError(
            "a tensor requires gradients, which portmm does not compute; detach() it, or use torch.no_grad()"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"a tensor has layout {x.layout}; portmm takes strided ones: use to_dense()")
    if x.is_neg():
        raise TypeError("a tensor is a view that changes signs when it is read; use resolve_neg()")
    return torch


def torch_empty(x: Operand, shape: tuple[int, ...], dtype: str) -> Any:
    """A new tensor on the device of an array."""
    torch = sys.modules["torch"]
    known = getattr(torch, BY_NAME[dtype].numpy)
    return torch.empty_strided(shape, contiguous(shape, 1), dtype=known, device=x.source.device)


# -- in the host's memory --------------------------------------------------------------


def through(function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """The results, as tensors, of a function of NumPy's arrays that is called with tensors in the host's memory.

    Raises:
        TypeError: a tensor requires gradients, or its layout or element type is unknown to portmm.
    """
    tensors: dict[int, Any] = {}

    def read(x: Any) -> Any:
        if isinstance(x, (list, tuple, dict)):
            return _rebuilt(x, read)
        library = library_of(x)
        if library == "torch" and not x.is_cuda:
            view = as_numpy(x)
            tensors[id(view)] = x, view
            return view
        return numpy_of(BY_NUMPY[str(x)[6:]].name) if not library and str(x).startswith("torch.") else x

    def written(x: Any) -> Any:
        if isinstance(x, (list, tuple, dict)):
            return _rebuilt(x, written)
        if id(x) in tensors:  # an `out`
            return tensors[id(x)][0]
        return as_tensor(x) if isinstance(x, (np.ndarray, np.generic)) else x

    return written(function(*map(read, operands), **{name: read(x) for name, x in options.items()}))


def _rebuilt(x: Any, function: Callable[[Any], Any]) -> Any:
    """A list, tuple or dict with a function of its items in their place."""
    if isinstance(x, dict):
        return {key: function(y) for key, y in x.items()}
    items = [function(y) for y in x]
    return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)


def elsewhere(  # noqa: PLR0917 - the place, the functions there, and their arguments
    where: str,
    function: Callable[..., Any],
    there: Callable[..., Any],
    operands: tuple[Any, ...],
    options: dict[str, Any],
    record: str = "call_",
) -> Any:
    """The result of a call whose arrays are not NumPy's: see `libraries.place_of`.

    Args:
        where: their place.
        function: of arrays of NumPy's, which tensors are passed to as views.
        there: the same of arrays on a device.
        operands: the first arguments.
        options: the others.
        record: the method of a tracer that records the call.
    """
    if where == "traced":
        tracer = next(x for x in (*operands, *options.values()) if hasattr(x, record))
        return getattr(tracer, record)(function, operands, options)
    return there(*operands, **options) if where == "device" else through(function, *operands, **options)


def as_numpy(x: Any) -> np.ndarray[Any, Any]:
    """A view of a tensor as an array of NumPy's.

    Raises:
        TypeError: it requires gradients, or its layout or element type has none.
    """
    torch, bare = _checked(x), x.detach()
    known = BY_NUMPY.get(str(x.dtype).removeprefix("torch."))
    if known is None or known.name not in EXTENSION_TYPES:
        return bare.numpy()
    bits = torch.int16 if known.bytes > 1 else torch.uint8
    return np.asarray(bare.view(bits).numpy()).view(numpy_of(known.name))


def as_tensor(x: Any) -> Any:
    """A tensor over the memory of an array of NumPy's."""
    torch, array = sys.modules["torch"], np.asarray(x)
    name = name_of(array.dtype)
    if name not in EXTENSION_TYPES:
        return torch.from_numpy(array)
    bits = np.int16 if array.itemsize > 1 else np.uint8
    return torch.from_numpy(array.view(bits)).view(getattr(torch, BY_NAME[name].numpy))


def adopt(x: Any) -> Operand | None:
    """The description of an array on a device; None for anything else.

    Raises:
        TypeError: its element type or layout is unknown to portmm.
        NoDeviceError: it is on a CUDA device, and there is no CuPy to ask which.
    """
    reader = None if type(x) is np.ndarray else _READERS.get(exporter_of(x))
    return None if reader is None else reader(x)


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
    known = device_kinds.kind(x)
    if known is not None:
        return known[0]
    array = adopt(x)
    assert array is not None  # noqa: S101 - `libraries.on_device` is true
    return array.kind


_READERS: dict[str, Callable[[Any], Operand | None]] = {
    "cupy": from_cupy,
    "torch": from_torch,
    "pyopencl": from_pyopencl,
    "packed": lambda x: adopt(x.array),
    "interface": from_interface,
    "dlpack": from_dlpack,
}
_MAKERS: dict[str, Callable[[Operand, tuple[int, ...], str], Any]] = {
    "torch": torch_empty,
    "pyopencl": pyopencl_empty,
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
    maker, of_queue = _MAKERS.get(library_of(x.source), cupy_empty), x.queue
    array = maker(x, shape, dtype)
    if maker is torch_empty:
        strides, at = contiguous(shape, BY_NAME[dtype].bytes), int(array.data_ptr())
        if array.is_cuda:
            return Operand(array, x.language, x.device, at, shape, strides, dtype, of_queue, readonly=False)
    described = _READERS[library_of(array)](array)
    if described is None:
        raise TypeError(f"{type(array).__name__} was allocated in the host's memory, not on {title_of(x.device)}")
    return described if described.queue == of_queue else replace(described, queue=of_queue)
