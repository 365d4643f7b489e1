"""CUDA devices: facts, loading of cubins, launches of kernels.

Owns the calls of CUDA's driver, through CuPy, which is imported at the
first use. The module is a `backends.Backend`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.codegen.cuda import WAIT
from portmm.errors import BuildError, DeviceError, NoDeviceError
from portmm.runtime.backends import Facts
from portmm.runtime.cuda_launch import PreparedLaunch
from portmm.util import locks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.build.nvrtc import Cubin

# CUDA C++ Programming Guide, "Compute Capabilities": more needs an opt-in per kernel.
_SHARED_DEFAULT = 48 << 10

# Major versions whose matrix instructions exist only in architecture-specific code (sm_90a, sm_100a).
_SPECIFIC = frozenset((9, 10))

# Zeros of 32 bits: a ring for launches, more than can be in flight at once, and those reserved for captured
# launches, as a model's graphs have thousands, and memory cannot be allocated while a stream is being captured.
# They are allocated in multiples of a cache line; a new bank is made when fewer than the last of these are left.
_RING, _KEPT, _LINE, _ENOUGH = 1 << 21, 1 << 20, 1 << 5, 1 << 16
# The least architecture whose grids may begin before those before have ended: PTX ISA, griddepcontrol.
_WAITING = 90
# CUDA's handle of the default stream of a process: cudaStreamLegacy.
_LEGACY = 1
# cudaDeviceAttr, of driver_types.h.
_CLOCKS = {"clockRate": 13, "memoryClockRate": 36}

_lock = locks.lock()
_banks: dict[int, _Bank] = {}
_kept: list[_Bank] = []
_functions: dict[tuple[int, str | bytes, str], Function] = {}


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel in a device's memory.

    Attributes:
        call: CuPy's function, which keeps its module loaded.
        name: of the kernel.
        device: the number of its device.
        cubin: the cubin that it was loaded from.
        waits: it waits for the grid before its own, and may be launched while that runs.
    """

    call: Any
    name: str
    device: int
    cubin: Cubin
    waits: bool = False


@dataclass(slots=True)
class _Bank:
    """Zeros in a device's memory: the position in the ring, and the number reserved for captured launches."""

    array: Any
    next: int = 0
    reserved: int = 0


def _cupy() -> Any:
    cupy = sys.modules.get("cupy")  # a launch has no time for an import
    if cupy is not None:
        return cupy
    try:
        return import_module("cupy")
    except ImportError as error:
        raise NoDeviceError(
            f"CUDA kernels are launched through CuPy, which cannot be imported: {error}; "
            "`pip install cupy-cuda13x`, or cupy-cuda12x for a driver of CUDA 12"
        ) from error


# CuPy's errors of CUDA's run time and driver are RuntimeErrors.


def current(device: int | None = None) -> int:
    """The validated number of a device, by default of the current one.

    Raises:
        NoDeviceError: there is none, or none of this number, or no CuPy.
    """
    runtime = _cupy().cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
        number = int(runtime.getDevice()) if device is None else device
    except RuntimeError as error:
        raise NoDeviceError(f"CUDA finds no device: {error}; install NVIDIA's driver") from error
    if not 0 <= number < count:
        raise NoDeviceError(f"there is no CUDA device {number}; there are {count}, numbered from 0")
    return number


def architecture(major: int, minor: int) -> str:
    """The architecture that code for a compute capability is compiled for: "80", "90a", "120"."""
    return f"{major}{minor}{'a' if major in _SPECIFIC else ''}"


def facts(device: int | None = None) -> Facts:
    """The facts of a device from the driver, by default of the current one.

    Raises:
        NoDeviceError: there is no such device, or no CuPy.
    """
    return _facts(current(device))


@cache
def _facts(device: int) -> Facts:
    runtime = _cupy().cuda.runtime
    properties = runtime.getDeviceProperties(device)
    name = properties["name"]
    driver = int(runtime.driverGetVersion())
    most = getattr(runtime, "cudaDevAttrMaxSharedMemoryPerBlockOptin", None)
    registers = getattr(runtime, "cudaDevAttrMaxRegistersPerMultiprocessor", None)
    return Facts(
        language="cuda",
        name=name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name),
        vendor="NVIDIA",
        kind="gpu",
        processors=int(properties["multiProcessorCount"]),
        warp=int(properties["warpSize"]),
        block_threads=int(properties["maxThreadsPerBlock"]),
        shared_bytes=int(properties["sharedMemPerBlock"]),
        registers=0 if registers is None else int(runtime.deviceGetAttribute(registers, device)),
        l2_bytes=int(properties["l2CacheSize"]),
        memory_bytes=int(properties["totalGlobalMem"]),
        clock_ghz=_clock(runtime, properties, "clockRate", device) / 1e6,
        # The clock is in kHz, the bus in bits, and data move on both edges.
        bandwidth_gbs=2e-6 * _clock(runtime, properties, "memoryClockRate", device) * properties["memoryBusWidth"] / 8,
        architecture=architecture(int(properties["major"]), int(properties["minor"])),
        extensions=(),
        driver=f"{driver // 1000}.{driver % 1000 // 10}",
        shared_most=int(properties["sharedMemPerBlock"] if most is None else runtime.deviceGetAttribute(most, device)),
    )


def _clock(runtime: Any, properties: dict[str, Any], name: str, device: int) -> int:
    """A clock in kHz, 0 if unknown: CUDA 13 has it among the attributes, no longer among the properties."""
    if name in properties:
        return int(properties[name])
    try:
        return int(runtime.deviceGetAttribute(_CLOCKS[name], device))
    except RuntimeError:
        return 0


facts_of = facts


def handle_of(device: tuple[Any, ...], _queue: Any) -> int:
    """The number of a device."""
    return int(device[1])


def tensor_map(*fields: Any) -> Any:
    """A tensor map as an argument of a kernel: see `tensor_map.tensor_map`."""
    from portmm.runtime import tensor_map as maps

    return maps.tensor_map(*fields)


def title_of(device: tuple[Any, ...]) -> str:
    """The name of a device in messages."""
    return f"cuda:{device[1]}"


def build(text: str, name: str, architecture: str, device: int) -> Function:
    """Compile a source for a device, or find it in the cache, and load its kernel.

    Raises:
        NoCompilerError: there is no NVRTC.
        BuildError: the compiler failed.
    """
    from portmm.build.nvrtc import compile_cuda

    waits = WAIT in text and int(architecture.rstrip("af")) >= _WAITING
    return load(compile_cuda(text, name, architecture), name, device, waits=waits)


def load(cubin: Cubin, name: str, device: int | None = None, *, waits: bool = False) -> Function:
    """Load the kernel `name` of `cubin` on a device, by default the current one, once; perhaps one that `waits`.

    Raises:
        NoDeviceError: there is no such device, or no CuPy.
        BuildError: the device does not load the code, or the code has no such kernel.
    """
    number = current(device)
    key = (number, cubin.key or cubin.code, name)
    with _lock:
        function = _functions.get(key)
        if function is None:
            function = _functions[key] = _load(cubin, name, number, waits)
    return function


def _load(cubin: Cubin, name: str, device: int, waits: bool) -> Function:
    cuda = _cupy().cuda
    try:
        with cuda.Device(device):
            module = cuda.function.Module()
            module.load(cubin.code)
            return Function(module.get_function(name), name, device, cubin, waits)
    except RuntimeError as error:
        here = facts(device)
        version = ".".join(map(str, cubin.version))
        raise BuildError(
            f"{here.name} does not load kernel {name}: {error}; it takes code for {here.architecture}, and this is "
            f"for {cubin.architecture or 'another'} by NVRTC {version}, with a driver of CUDA {here.driver}; "
            "compile for the device's architecture, with an NVRTC that is not newer than the driver"
        ) from error


def _grant(function: Function, shared: int) -> None:
    """Raise the limit of dynamic shared memory of a kernel above the default."""
    cuda, ptr = _cupy().cuda, function.call.ptr
    driver = cuda.driver
    attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    try:
        limit = driver.funcGetAttribute(attribute, ptr)
    except RuntimeError:
        # A thread that has not used CUDA's run time yet has no context, and driver calls do not create one.
        cuda.runtime.memGetInfo()
        limit = driver.funcGetAttribute(attribute, ptr)
    if limit < shared:
        driver.funcSetAttribute(ptr, attribute, shared)


def launch(  # noqa: PLR0917 - the parameters of a launch
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: Sequence[tuple[str, Any]],
    stream: int,
    shared: int = 0,
) -> None:
    """Launch a kernel on a stream, asynchronously.

    The memory it uses must live until it has run; stream-ordered allocators of
    libraries ensure that on the stream that they use themselves.

    Args:
        function: a result of `load`.
        grid: blocks along each of up to three dimensions; nothing runs if one is 0.
        block: threads along each.
        arguments: pairs of a kind, "pointer", "int", "long", "float" or "map", and a value;
            of a pointer its address, None for NULL; of a map a result of `tensor_map.tensor_map`.
        stream: CUDA's handle; 0 is the default stream.
        shared: bytes of dynamic shared memory.

    Raises:
        DeviceError: the driver refused the launch.
        ValueError: a kind is unknown.
    """
    prepared(function, grid, block, arguments, (), shared)({}, stream)


def prepared(  # noqa: PLR0917 - the parameters of a launch
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: Sequence[tuple[str, Any]],
    left: Sequence[tuple[int, str]],
    shared: int = 0,
) -> PreparedLaunch:
    """A launch with the arguments that are `left` open, by index and name: see `cuda_launch.PreparedLaunch`."""
    large = shared + function.cubin.shared > _SHARED_DEFAULT
    grant = partial(_grant, function, shared) if large else None
    return PreparedLaunch(function, grid, block, arguments, left, shared, grant)


def counters(device: int, count: int, stream: int) -> int:
    """The address of at least `count` integers of 32 bits that are 0 when the next launched kernel begins.

    Kernels restore the zeros. Each launch has its own: the handle of a destroyed stream may be reused before its
    kernels have run. A captured launch reserves them, as its graph may run at any time; but a graph must not run
    concurrently with another one of the same capture.

    Raises:
        DeviceError: a stream is being captured, and there are none left.
    """
    cuda = _cupy().cuda
    # The default stream cannot be captured, and must not be queried while another is.
    captured = stream > _LEGACY and bool(cuda.runtime.streamIsCapturing(stream))
    wanted = -(-count // _LINE) * _LINE
    with _lock:
        bank = _bank(device, wanted if captured else _ENOUGH, captured=captured)
        if captured:
            bank.reserved += wanted
            at = _RING + bank.reserved - wanted
        else:
            at = bank.next if bank.next + wanted <= _RING else 0
            bank.next = at + wanted
    return int(bank.array.data.ptr) + at * 4


def _bank(device: int, wanted: int, *, captured: bool) -> _Bank:
    """A bank of zeros on a device with `wanted` unreserved ones; a new bank synchronizes with the device."""
    bank = _banks.get(device)
    if bank is not None and bank.reserved + wanted <= _KEPT:
        return bank
    if captured:
        raise DeviceError(
            "a stream is being captured, and kernels whose blocks share a tile need memory that cannot be "
            "allocated now: call the same product once outside of the capture first, or capture fewer calls in all"
        )
    cupy = _cupy()
    with cupy.cuda.Device(device):
        bank = _banks[device] = _Bank(cupy.empty((_RING + _KEPT,), np.int32))
        bank.array[...] = 0
        cupy.cuda.runtime.deviceSynchronize()
    _kept.append(bank)
    return bank
