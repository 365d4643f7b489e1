"""Arrays of PyOpenCL.

Owns the reading of their buffers, strides, types and queues, and the allocation of new ones.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from portmm.arrays.numpy_arrays import numpy_of
from portmm.arrays.operand import Operand, type_of


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
