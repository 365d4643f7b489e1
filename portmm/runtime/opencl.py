"""OpenCL devices: facts, kernels of programs, launches.

Owns the calls of OpenCL's drivers, through PyOpenCL, but those that build programs. The module is a `backends.Backend`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import BuildError, DeviceError, NoDeviceError
from portmm.runtime.backends import Facts
from portmm.runtime.opencl_programs import Program, compile_opencl, pyopencl
from portmm.util import locks

if TYPE_CHECKING:
    from threading import Lock

# OpenCL C fixes the sizes of its types, on every device.
_SCALARS = {"int": np.int32, "long": np.int64, "float": np.float32}
_KINDS = ("pointer", *_SCALARS)

# Names in drivers of the size of a subgroup, the most standard first.
_WARPS = ("preferred_work_group_size_multiple", "warp_size_nv", "wavefront_width_amd")

_lock = locks.lock()
_queues: dict[int, tuple[Any, Any]] = {}


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel, for all threads.

    Attributes:
        kernel: PyOpenCL's. Its arguments are state between `set_arg` and the
            launch, so one thread at a time may do both.
        name: of the kernel.
        lock: taken for both.
    """

    kernel: Any
    name: str
    lock: Lock = field(default_factory=locks.lock)


def default_device() -> Any:
    """The first GPU, or else the first device, that any driver offers.

    Raises:
        NoDeviceError: there is none, or no PyOpenCL.
    """
    cl = pyopencl()
    devices = []
    reason = "no driver (ICD) is registered"
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        platforms, reason = [], str(error)
    for platform in platforms:
        try:
            devices += platform.get_devices()
        except cl.Error as error:  # other drivers may work
            reason = f"{platform.name}: {error}"
    if not devices:
        raise NoDeviceError(
            f"there is no OpenCL device: {reason}; install a driver, the GPU vendor's or pocl-opencl-icd; "
            "where /etc/OpenCL/vendors cannot be written to, OCL_ICD_VENDORS names a folder with its .icd file"
        )
    return next((d for d in devices if d.type & cl.device_type.GPU), devices[0])


def facts(device: Any = None) -> Facts:
    """The facts of a device of PyOpenCL from its driver, by default of `default_device()`.

    Raises:
        NoDeviceError: there is no device, or no PyOpenCL.
        DeviceError: the driver does not describe it.
    """
    cl = pyopencl()
    device = default_device() if device is None else device
    try:
        return _facts(cl, device)
    except cl.Error as error:
        raise DeviceError(f"the OpenCL driver does not describe {device}: {error}; install a newer driver") from error


def _facts(cl: Any, device: Any) -> Facts:
    kinds = ((cl.device_type.GPU, "gpu"), (cl.device_type.CPU, "cpu"))
    local = int(device.local_mem_size)
    return Facts(
        language="opencl",
        name=device.name.strip("\0 "),
        vendor=device.vendor.strip("\0 "),
        kind=next((kind for bit, kind in kinds if device.type & bit), "accelerator"),
        processors=int(device.max_compute_units),
        warp=next(filter(None, (_optional(cl, device, name) for name in _WARPS)), 1),
        block_threads=int(device.max_work_group_size),
        shared_bytes=local,
        registers=_optional(cl, device, "registers_per_block_nv"),
        l2_bytes=int(device.global_mem_cache_size),
        memory_bytes=int(device.global_mem_size),
        clock_ghz=device.max_clock_frequency / 1000,
        bandwidth_gbs=0.0,
        architecture="",
        extensions=tuple(sorted(device.extensions.split())),
        driver=device.driver_version,
        shared_most=local,
    )


def _optional(cl: Any, device: Any, name: str) -> int:
    """A number that only some drivers report; 0 from others."""
    try:
        return int(getattr(device, name))
    except (cl.Error, AttributeError, TypeError):
        return 0


def default_queue(context: Any) -> Any:
    """A queue for arrays without one: one per context.

    Raises:
        DeviceError: the driver fails to create one.
    """
    cl = pyopencl()
    with _lock:
        entry = _queues.get(context.int_ptr)
        if entry is None:
            try:
                # Stored with its context, so that its address is not reused: not every driver's queue refers to it.
                entry = _queues[context.int_ptr] = (context, cl.CommandQueue(context))
            except cl.Error as error:
                raise DeviceError(f"the OpenCL driver makes no queue for {context}: {error}") from error
    return entry[1]


def facts_of(handle: tuple[Any, Any]) -> Facts:
    """The facts of the device of a handle."""
    return facts(handle[1])


def handle_of(_device: tuple[Any, ...], queue: Any) -> tuple[Any, Any]:
    """The context and the device of a queue."""
    return queue.context, queue.device


def title_of(device: tuple[Any, ...]) -> str:
    """The name of a device in messages."""
    return f"OpenCL device {device[-1]:#x} of context {device[1]:#x}"


def memory_of(buffer: Any) -> tuple[int, int]:
    """The root allocation of a buffer, and the offset in it: a sub-buffer has that of its parent."""
    info = sys.modules["pyopencl"].mem_info  # a call has no time for an import
    if not hasattr(buffer, "get_info"):
        return 0, int(getattr(buffer, "svm_ptr", 0))
    root = buffer.get_info(info.ASSOCIATED_MEMOBJECT)
    if root is None:
        return int(buffer.int_ptr), 0
    return int(root.int_ptr), int(buffer.get_info(info.OFFSET))


def build(text: str, name: str, _architecture: str, handle: tuple[Any, Any]) -> Function:
    """Compile a source for a device, or find it in the cache, and load its kernel."""
    return load(compile_opencl(text, name, *handle), name)


# -- launching -----------------------------------------------------------------------


def load(program: Program, name: str) -> Function:
    """Create the kernel `name` of a program.

    Raises:
        BuildError: the program has no such kernel.
    """
    cl = pyopencl()
    try:
        return Function(cl.Kernel(program.program, name), name)
    except cl.Error as error:
        raise BuildError(f"program {program.name} has no kernel {name}: {error}; is it declared __kernel?") from error


def launch(
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: Sequence[tuple[str, Any]],
    queue: Any,
    _shared: int = 0,
    *,
    wait_for: Sequence[Any] | None = None,
) -> Any:
    """Launch a kernel on a queue, asynchronously.

    Args:
        function: a result of `load`.
        grid: work-groups along each of up to three dimensions; nothing runs if one is 0.
        block: work-items of a group along each.
        arguments: pairs of a kind, "pointer", "int", "long" or "float", and a value. A
            pointer is a buffer, or memory of SVM, and an offset in elements, which the
            kernel takes as two parameters, the second a long; None is NULL.
        queue: PyOpenCL's.
        _shared: bytes of shared memory, which kernels of OpenCL declare themselves.
        wait_for: events to wait for; without them, a launch on an out-of-order queue is ordered after
            all earlier commands and before all later ones.

    Returns:
        PyOpenCL's event of the launch; None if nothing runs.

    Raises:
        DeviceError: the driver refused an argument or the launch.
        ValueError: a kind is unknown.
    """
    if 0 in grid:
        return None
    cl = pyopencl()
    words = _words(arguments)
    block += (1,) * (len(grid) - len(block))
    size = tuple(g * b for g, b in zip_longest(grid, block, fillvalue=1))
    try:
        with function.lock:
            for i, word in enumerate(words):
                function.kernel.set_arg(i, word)
            any_order = queue.properties & cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
            if wait_for is not None or not any_order:
                return cl.enqueue_nd_range_kernel(queue, function.kernel, size, block, wait_for=wait_for)
            cl.enqueue_barrier(queue)
            event = cl.enqueue_nd_range_kernel(queue, function.kernel, size, block)
            cl.enqueue_barrier(queue)
            return event
    except cl.Error as error:
        raise DeviceError(
            f"OpenCL did not launch {function.name} with grid {grid}, block {block} and {len(words)} parameters: "
            f"{error}"
        ) from error


def prepared(  # noqa: PLR0917 - the parameters of a launch
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: Sequence[tuple[str, Any]],
    left: Sequence[tuple[int, str]],
    shared: int = 0,
) -> Callable[[dict[str, Any], Any], Any]:
    """A function of the arguments that are `left` open, by name, and a queue: see `launch`."""

    def run(values: dict[str, Any], queue: Any) -> Any:
        every = list(arguments)
        for i, name in left:
            every[i] = every[i][0], values[name]
        return launch(function, grid, block, every, queue, shared)

    return run


def _words(arguments: Sequence[tuple[str, Any]]) -> list[Any]:
    words: list[Any] = []
    for kind, value in arguments:
        if kind == "pointer":
            buffer, offset = (None, 0) if value is None else value
            words += (buffer, np.int64(offset))
        elif kind in _SCALARS:
            words.append(_SCALARS[kind](value))
        else:
            raise ValueError(f"arguments of kind {kind!r} are unknown; use one of {', '.join(_KINDS)}")
    return words
