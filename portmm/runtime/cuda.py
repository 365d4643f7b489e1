"""CUDA devices: what they are, loading cubins, launching kernels.

Owns all that is said to CUDA's driver, through CuPy, which is imported at the
first use. May import `errors`, `build.nvrtc`, `runtime.device_facts`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import BuildError, DeviceError, NoDeviceError
from portmm.runtime.device_facts import Facts
from portmm.util import locks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.build.nvrtc import Cubin

# CUDA C++ Programming Guide, "Compute Capabilities": more has to be asked for, kernel by kernel.
_SHARED_UNASKED = 48 << 10

# Chips whose matrix instructions exist only in code for that very chip.
_SPECIFIC = frozenset((9, 10))

# CuPy passes NumPy's scalars by value, in their own sizes.
_SCALARS = {"pointer": np.uint64, "int": np.int32, "long": np.int64, "float": np.float32}

# Zeros of 32 bits: those that launches take in turn, more than can be on their way at once, and those that captured
# launches keep, as a model's graphs have thousands, and no memory can be asked for while a stream is being captured.
# They are given in multiples of a line; a new bank is made when fewer than the last are left.
_RING, _KEPT, _LINE, _ENOUGH = 1 << 21, 1 << 20, 1 << 5, 1 << 16
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
        cubin: what it was loaded from.
    """

    call: Any
    name: str
    device: int
    cubin: Cubin


@dataclass(slots=True)
class _Bank:
    """Zeros in a device's memory: how many are taken of those that are taken in turn, and of the others, for good."""

    array: Any
    turn: int = 0
    given: int = 0


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream as CuPy's functions want it: they read `ptr` alone."""

    ptr: int


def _cupy() -> Any:
    found = sys.modules.get("cupy")  # a launch has no time for an import
    if found is not None:
        return found
    try:
        return import_module("cupy")
    except ImportError as error:
        raise NoDeviceError(
            f"CUDA kernels are launched through CuPy, which cannot be imported: {error}; "
            "`pip install cupy-cuda13x`, or cupy-cuda12x for a driver of CUDA 12"
        ) from error


# CuPy's errors, of the run time and of the driver, are RuntimeErrors.


def _number(device: int | None) -> int:
    """The number of a device that exists, by default the current one.

    Raises:
        NoDeviceError: there is none, or none of this number.
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


def current(device: int | None = None) -> int:
    """The number of a device, by default of the current one.

    Raises:
        NoDeviceError: there is no such device, or no CuPy.
    """
    return _number(device)


def architecture(major: int, minor: int) -> str:
    """What code for a compute capability is compiled for: "80", "90a", "120"."""
    return f"{major}{minor}{'a' if major in _SPECIFIC else ''}"


def facts(device: int | None = None) -> Facts:
    """What the driver says of a device, by default the current one.

    Raises:
        NoDeviceError: there is no such device, or no CuPy.
    """
    return _facts(_number(device))


@cache
def _facts(device: int) -> Facts:
    runtime = _cupy().cuda.runtime
    found = runtime.getDeviceProperties(device)
    name = found["name"]
    driver = int(runtime.driverGetVersion())
    most = getattr(runtime, "cudaDevAttrMaxSharedMemoryPerBlockOptin", None)
    registers = getattr(runtime, "cudaDevAttrMaxRegistersPerMultiprocessor", None)
    return Facts(
        language="cuda",
        name=name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name),
        vendor="NVIDIA",
        kind="gpu",
        processors=int(found["multiProcessorCount"]),
        warp=int(found["warpSize"]),
        block_threads=int(found["maxThreadsPerBlock"]),
        shared_bytes=int(found["sharedMemPerBlock"]),
        registers=0 if registers is None else int(runtime.deviceGetAttribute(registers, device)),
        l2_bytes=int(found["l2CacheSize"]),
        memory_bytes=int(found["totalGlobalMem"]),
        clock_ghz=_clock(runtime, found, "clockRate", device) / 1e6,
        # The clock is in kHz, the bus in bits, and data move on both edges.
        bandwidth_gbs=2e-6 * _clock(runtime, found, "memoryClockRate", device) * found["memoryBusWidth"] / 8,
        architecture=architecture(int(found["major"]), int(found["minor"])),
        extensions=(),
        driver=f"{driver // 1000}.{driver % 1000 // 10}",
        shared_most=int(found["sharedMemPerBlock"] if most is None else runtime.deviceGetAttribute(most, device)),
    )


def _clock(runtime: Any, found: dict[str, Any], name: str, device: int) -> int:
    """A clock in kHz, 0 if nobody says: CUDA 13 has it among the attributes, no longer among the properties."""
    if name in found:
        return int(found[name])
    try:
        return int(runtime.deviceGetAttribute(_CLOCKS[name], device))
    except RuntimeError:
        return 0


def load(cubin: Cubin, name: str, device: int | None = None) -> Function:
    """The kernel `name` of `cubin` on a device, by default the current one; loaded once.

    Raises:
        NoDeviceError: there is no such device, or no CuPy.
        BuildError: the device does not take the code, or the code has no such kernel.
    """
    number = _number(device)
    key = (number, cubin.key or cubin.code, name)
    with _lock:
        found = _functions.get(key)
        if found is None:
            found = _functions[key] = _load(cubin, name, number)
    return found


def _load(cubin: Cubin, name: str, device: int) -> Function:
    cuda = _cupy().cuda
    try:
        with cuda.Device(device):
            module = cuda.function.Module()
            module.load(cubin.code)
            return Function(module.get_function(name), name, device, cubin)
    except RuntimeError as error:
        here = facts(device)
        version = ".".join(map(str, cubin.version))
        raise BuildError(
            f"{here.name} does not load kernel {name}: {error}; it takes code for {here.architecture}, and this is "
            f"for {cubin.architecture or 'another'} by NVRTC {version}, with a driver of CUDA {here.driver}; "
            "compile for the device's architecture, with an NVRTC that is not newer than the driver"
        ) from error


def _grant(function: Function, shared: int) -> None:
    """Let a kernel have more shared memory than it may have unasked."""
    cuda, ptr = _cupy().cuda, function.call.ptr
    driver = cuda.driver
    attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    try:
        held = driver.funcGetAttribute(attribute, ptr)
    except RuntimeError:
        # A thread that has not used CUDA's run time yet has no context, which the driver's own calls do not make.
        cuda.runtime.memGetInfo()
        held = driver.funcGetAttribute(attribute, ptr)
    if held < shared:
        driver.funcSetAttribute(ptr, attribute, shared)


def _start(  # noqa: PLR0917 - what a launch has
    function: Function, grid: tuple[int, ...], block: tuple[int, ...], words: tuple[Any, ...], stream: int, shared: int
) -> None:
    """Launch on the current device, which is the function's."""
    if shared + function.cubin.shared > _SHARED_UNASKED:
        _grant(function, shared)
    function.call(grid, block, words, shared, _Stream(stream))


def launch(  # noqa: PLR0917 - what a launch has
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: Sequence[tuple[str, Any]],
    stream: int,
    shared: int = 0,
) -> None:
    """Put a kernel into a stream, and return before it has run.

    The memory it uses must live until then; libraries whose memory is bound to
    a stream see to that for the stream that they use themselves.

    Args:
        function: what `load` gave.
        grid: blocks along each of up to three dimensions; nothing runs if one is 0.
        block: threads along each.
        arguments: pairs of a kind, "pointer", "int", "long", "float" or "map", and a value;
            of a pointer its address, None for NULL; of a map what `tensor_map.tensor_map` gave.
        stream: CUDA's handle; 0 is the default stream.
        shared: bytes of dynamic shared memory.

    Raises:
        DeviceError: the driver refused the launch.
        ValueError: a kind is unknown.
    """
    if 0 in grid:
        return
    words = _words(arguments)
    cuda = _cupy().cuda
    try:
        if cuda.runtime.getDevice() == function.device:
            _start(function, grid, block, words, stream, shared)
        else:
            with cuda.Device(function.device):
                _start(function, grid, block, words, stream, shared)
    except RuntimeError as error:
        raise DeviceError(
            f"CUDA did not launch {function.name} with grid {grid}, block {block} and {shared} bytes of dynamic "
            f"shared memory: {error}"
        ) from error


def _words(arguments: Sequence[tuple[str, Any]]) -> tuple[Any, ...]:
    try:
        return tuple(x if kind == "map" else _SCALARS[kind](0 if x is None else x) for kind, x in arguments)
    except KeyError as error:
        raise ValueError(f"arguments of kind {error} are unknown; use one of {', '.join((*_SCALARS, 'map'))}") from None


def counters(device: int, count: int, stream: int) -> int:
    """The address of at least `count` integers of 32 bits that are 0 when a kernel that is launched next begins.

    Kernels leave them so. Each launch has its own: a handle of a stream may be another's before what it was used for
    has run. A launch that is captured keeps them, as its graph may run at any time; but a graph must not run beside
    another one of the same capture.

    Raises:
        DeviceError: a stream is being captured, and there are none left.
    """
    cuda = _cupy().cuda
    # The default stream cannot be captured, and must not be asked while another is.
    captured = stream > _LEGACY and bool(cuda.runtime.streamIsCapturing(stream))
    wanted = -(-count // _LINE) * _LINE
    with _lock:
        bank = _bank(device, wanted if captured else _ENOUGH, captured=captured)
        if captured:
            bank.given += wanted
            at = _RING + bank.given - wanted
        else:
            at = bank.turn if bank.turn + wanted <= _RING else 0
            bank.turn = at + wanted
    return int(bank.array.data.ptr) + at * 4


def _bank(device: int, wanted: int, *, captured: bool) -> _Bank:
    """A device's zeros, of which so many are not given yet; the device is waited for when they are made.

    Raises:
        DeviceError: they would have to be made while a stream is being captured.
    """
    bank = _banks.get(device)
    if bank is not None and bank.given + wanted <= _KEPT:
        return bank
    if captured:
        raise DeviceError(
            "a stream is being captured, and kernels whose blocks share a tile need memory that cannot be asked "
            "for now: call the same product once outside of the capture first, or capture fewer calls in all"
        )
    cupy = _cupy()
    with cupy.cuda.Device(device):
        bank = _banks[device] = _Bank(cupy.empty((_RING + _KEPT,), np.int32))
        bank.array[...] = 0
        cupy.cuda.runtime.deviceSynchronize()
    _kept.append(bank)
    return bank
