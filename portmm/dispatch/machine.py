"""Devices that kernels are launched on, and launches: arguments by name, bound in two steps.

Owns `Machine`, a device as its driver reports it, and its description: counts that a driver reports replace those of
the device's description; everything else is taken from the description. Owns `Launch`, a kernel over a grid with all
arguments that do not vary per call, and `bind`, which makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from portmm.errors import ScheduleError
from portmm.ir.interpreter import evaluate
from portmm.runtime.backends import Backend, Facts, backend
from portmm.spec.dtype import BY_NAME
from portmm.target.reported_device import device_target
from portmm.target.target import GENERIC_DEVICES, Target
from portmm.util import locks
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import GridKernel, MapOf, PixelBox


def source(kernel: GridKernel, language: str) -> str:
    """The source of a kernel in "cuda" or "opencl"."""
    return str(import_module(f"portmm.codegen.{language}").source(kernel))


def described(facts: Facts) -> Target:
    """The description of a device that a driver reports."""
    digits = facts.architecture.rstrip("af")
    target = device_target(facts.name, f"{digits[:-1]}.{digits[-1]}" if digits else "", facts.kind)
    device = target.device
    assert device is not None  # noqa: S101 - devices have one
    reported = replace(
        device,
        block_threads=min(device.block_threads, facts.block_threads),
        shared_bytes=min(device.shared_bytes, facts.shared_most or facts.shared_bytes),
        memory_bytes=facts.memory_bytes,
    )
    # OpenCL's compute units differ by vendor; a description counts multiprocessors.
    if facts.language == "cuda" or target.name in GENERIC_DEVICES:
        reported = replace(reported, processors=facts.processors)
    # A CUDA GPU may be used through OpenCL, which lacks some of its instructions.
    reported = replace(reported, language=facts.language, architecture=facts.architecture)
    if facts.language == "cuda":
        reported = replace(reported, memory_gbs=facts.bandwidth_gbs or device.memory_gbs)
    return replace(target, device=reported)


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """A device that kernels can be launched on.

    Attributes:
        key: identifies a device in the process.
        language: of its kernels.
        handle: CUDA's number of the device, or OpenCL's context and device.
        target: its description.
    """

    key: tuple[Any, ...]
    language: str
    handle: Any
    target: Target

    @property
    def backend(self) -> Backend:
        """The module that compiles and launches its kernels."""
        return backend(self.language)

    def load(self, kernel: GridKernel) -> Any:
        """The compiled kernel."""
        device = self.target.device
        assert device is not None  # noqa: S101 - devices have one
        return self.backend.build(source(kernel, self.language), kernel.name, device.architecture, self.handle)

    def loaded(self, key: Any, lower: Callable[[], Sequence[GridKernel]]) -> tuple[tuple[GridKernel, Any], ...]:
        """Kernels and their compiled functions, lowered and compiled once for a key."""
        kernels: tuple[tuple[GridKernel, Any], ...] | None = _loaded.get((key, self.key))
        if kernels is None:
            kernels = _loaded.keep((key, self.key), tuple([(x, self.load(x)) for x in lower()]))
        return kernels


MOST_KERNELS = 4096
"""Keys of compiled kernels kept before all are dropped: an endless series of schedules must not fill memory."""
_loaded = Memory(MOST_KERNELS, "kernels")
_machines: dict[tuple[Any, ...], Machine] = {}
_lock = locks.lock()


def machine(key: tuple[Any, ...], queue: Any = None) -> Machine:
    """The device of a key, as operands have it, with one of its queues: ("cuda", number), or ("opencl", ...)."""
    device = _machines.get(key)
    if device is None:
        there = backend(key[0])
        handle = there.handle_of(key, queue)
        facts = there.facts_of(handle)
        with _lock:
            device = _machines.setdefault(key, Machine(key, key[0], handle, described(facts)))
    return device


def machine_of(x: Any) -> Machine:
    """The device of an operand."""
    return machine(x.device, x.queue)


MOST = (1 << 31) - 1 - (1 << 16)
"""Integers of kernels have 32 bits; the last iteration of a loop, and the last tile, reach past the end."""

MAPPED = 16
"""Alignment in bytes of the strides of tensor maps."""


@dataclass(slots=True, eq=False)
class Launch:
    """One kernel of a call, with all arguments bound that do not vary per call.

    Attributes:
        function: the function that the driver launches.
        grid: blocks.
        threads: of a block.
        arguments: kind and value of each argument; the value of a map is all but its address.
        open: index and name of those that vary per call.
        shared: bytes of dynamic shared memory.
        counters: number of zeros that the kernel counts in, and restores.
        prepared: what its backend keeps of it, since its first run.
    """

    function: Any
    grid: tuple[int, int]
    threads: int
    arguments: tuple[tuple[str, Any], ...]
    open: tuple[tuple[int, str], ...]
    shared: int = 0
    counters: int = 0
    prepared: Callable[[dict[str, Any], Any], Any] | None = None

    def run(self, on: Machine, values: dict[str, Any], queue: Any) -> None:
        """Launch with the addresses and numbers of a call."""
        prepared = self.prepared
        if prepared is None:
            prepared = self.prepared = self._prepared(on.backend)
        if self.counters:
            values = values | {"counters": on.backend.counters(on.handle, self.counters, queue)}
        prepared(values, queue)

    def _prepared(self, there: Backend) -> Callable[[dict[str, Any], Any], Any]:
        arguments = [(kind, partial(x.at, there) if isinstance(x, Mapping) else x) for kind, x in self.arguments]
        return there.prepared(self.function, self.grid, (self.threads,), arguments, self.open, self.shared)


def bind(kernel: GridKernel, function: Any, values: dict[str, Any]) -> Launch:
    """A launch of a kernel with numbers bound by name; pointers, and names not among `values`, vary per call.

    Raises:
        ScheduleError: a number does not fit the kernel's integers, or there are too many blocks.
    """
    arguments = tuple((x.kind, _mapping(x.map, values) if x.map else values.get(x.name)) for x in kernel.arguments)
    named = ((x.name, values.get(x.name)) for x in kernel.arguments if x.kind == "int")
    large = [f"{name} is {v}" for name, v in named if v is not None and v > MOST]
    blocks, slices = (evaluate(x, values) for x in kernel.grid)
    if large or blocks >= 1 << 31:
        raise ScheduleError(f"{', '.join(large) or f'{blocks} blocks'}: kernels count in 32 bits; split the arrays")
    left = tuple(
        (i, x.map.pointer if x.map else x.name) for i, x in enumerate(kernel.arguments) if x.name not in values
    )
    shared = kernel.shared_bytes if kernel.dynamic else 0
    counters = blocks if any(x.name == "counters" for x in kernel.arguments) else 0
    return Launch(function, (blocks, slices), kernel.threads, arguments, left, shared, counters)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A tensor map without its address: see `MapOf`; strides are in bytes."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    rounds: bool = False
    pixels: PixelBox | None = None

    def at(self, there: Backend, address: int) -> Any:
        """The map of memory at an address, as an argument of a kernel."""
        return there.tensor_map(
            self.dtype, address, self.sizes, self.strides, self.box, self.swizzle, self.rounds, self.pixels
        )


def _mapping(x: MapOf, values: dict[str, Any]) -> Mapping:
    size = BY_NAME[x.dtype].bytes
    sizes, strides = (tuple(evaluate(y, values) for y in z) for z in (x.sizes, x.strides))
    # The stride of an axis of length 1 is unused, but the copy engine (TMA) checks its alignment.
    steps = [s * size if n > 1 else MAPPED for n, s in zip(sizes[1:], strides, strict=True)]
    return Mapping(x.dtype, sizes, tuple(steps), x.box, x.swizzle, x.rounds, x.pixels)
