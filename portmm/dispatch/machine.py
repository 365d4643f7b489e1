"""Devices that kernels are launched on.

Owns `Machine`, a device as its driver reports it, and its description: counts that a driver reports replace those of
the device's description; everything else is taken from the description.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from portmm.runtime.backends import backend
from portmm.target.reported_device import device_target
from portmm.target.target import GENERIC_DEVICES
from portmm.util import locks
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portmm.ir.grid_kernel import GridKernel
    from portmm.runtime.backends import Backend
    from portmm.runtime.device_facts import Facts
    from portmm.target.target import Target


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
        """The compiled kernel.

        Raises:
            NoCompilerError: there is no compiler.
            BuildError: the compiler failed.
        """
        device = self.target.device
        assert device is not None  # noqa: S101 - devices have one
        return self.backend.build(source(kernel, self.language), kernel.name, device.architecture, self.handle)

    def loaded(self, key: Any, lower: Callable[[], Sequence[GridKernel]]) -> tuple[tuple[GridKernel, Any], ...]:
        """Kernels and their compiled functions, lowered and compiled once for a key.

        Raises:
            NoCompilerError: there is no compiler.
            BuildError: the compiler failed.
        """
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
