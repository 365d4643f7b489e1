"""Backends of devices: what a language of kernels has of its own.

Owns `Facts`, a device as its driver describes it; the protocol `Backend`, which the modules `cuda` and `opencl` of this
package follow; and `backend`, which loads the one that an operand names. What is above is written once for all of them.
The processor's is `cffi_runtime.CffiRuntime`: its launches are C throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from portmm.util.records import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """A device as its driver describes it; facts that a driver does not report are 0 or "".

    Attributes:
        language: of its kernels, "cuda" or "opencl".
        name: as the driver spells it.
        vendor: likewise.
        kind: "gpu", "cpu" or "accelerator".
        processors: multiprocessors, or compute units.
        warp: threads in a warp, or the preferred multiple of work-group sizes.
        block_threads: the most threads of a block, or of a work-group.
        shared_bytes: shared, or local, memory that every kernel may declare for a block.
        registers: of 32 bits, of one multiprocessor.
        l2_bytes: the cache that all multiprocessors share.
        memory_bytes: the device's memory.
        clock_ghz: the highest clock.
        bandwidth_gbs: of the memory, in 10**9 bytes a second.
        architecture: the target of CUDA code, as "80" or "90a"; "" for OpenCL.
        extensions: of OpenCL, in order.
        driver: its version; for CUDA, the newest toolkit whose code it loads.
        shared_most: most shared memory of a block with opt-in at its launch; `shared_bytes` or more.
    """

    language: str
    name: str
    vendor: str
    kind: str
    processors: int
    warp: int
    block_threads: int
    shared_bytes: int
    registers: int
    l2_bytes: int
    memory_bytes: int
    clock_ghz: float
    bandwidth_gbs: float
    architecture: str
    extensions: tuple[str, ...]
    driver: str
    shared_most: int = 0


class Backend(Protocol):
    """A language of kernels: its compiler, and its launches.

    A handle is what a driver knows a device by: CUDA's number, or OpenCL's context and device.
    """

    facts_of: Callable[[Any], Facts]
    """The facts of the device of a handle."""
    tensor_map: Callable[..., Any]
    """A tensor map as an argument of a kernel: see `tensor_map.tensor_map`. Only kernels of CUDA have some."""

    def handle_of(self, device: tuple[Hashable, ...], queue: Any) -> Any:
        """The handle of the device of a queue."""

    def title_of(self, device: tuple[Hashable, ...]) -> str:
        """The name of a device in messages."""

    def build(self, text: str, name: str, architecture: str, handle: Any) -> Any:
        """Compile a source, or find it in the cache, and load its kernel."""

    def prepared(  # noqa: PLR0917 - the parameters of a launch
        self,
        function: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[tuple[str, Any]],
        left: Sequence[tuple[int, str]],
        shared: int = 0,
    ) -> Callable[[dict[str, Any], Any], Any]:
        """A function that enqueues a kernel with `shared` bytes of dynamic shared memory.

        It takes the arguments that are `left` open, by index and name, and a queue; in the place of an open map is a
        function of its address.
        """

    def counters(self, handle: Any, count: int, queue: Any) -> Any:
        """The address of at least `count` zeros, for kernels of a queue that restore them."""

    def memory_of(self, buffer: Any) -> tuple[Any, int]:
        """The allocation that a buffer is part of, and the offset in it; not asked where pointers are addresses."""


@cache
def backend(language: str) -> Backend:
    """The backend of "cuda" or "opencl"."""
    return import_module(f"portmm.runtime.{language}")
