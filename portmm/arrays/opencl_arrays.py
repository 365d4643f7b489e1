"""Arrays of PyOpenCL.

Owns the reading of their buffers, strides, types and queues, and the allocation of new ones.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from portmm.arrays.device_array import DeviceArray, type_of
from portmm.arrays.numpy_arrays import numpy_of


def from_pyopencl(x: Any) -> DeviceArray:
    """The description of an array of PyOpenCL's."""
    from portmm.runtime.opencl import default_queue

    queue = x.queue if x.queue is not None else default_queue(x.context)
    return DeviceArray(
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


def memory(buffer: Any) -> tuple[int, int]:
    """The root allocation of an OpenCL buffer, and the offset in it: a sub-buffer has that of its parent."""
    info = sys.modules["pyopencl"].mem_info
    if not hasattr(buffer, "get_info"):
        return 0, int(getattr(buffer, "svm_ptr", 0))
    root = buffer.get_info(info.ASSOCIATED_MEMOBJECT)
    if root is None:
        return int(buffer.int_ptr), 0
    return int(root.int_ptr), int(buffer.get_info(info.OFFSET))


def pyopencl_empty(x: DeviceArray, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array on the queue of an array, of its allocator."""
    array = import_module("pyopencl.array")
    return array.Array(x.queue, shape, numpy_of(dtype), allocator=x.source.allocator)
