"""Backends of devices: what a language of kernels has of its own.

Owns the protocol `Backend`, which the modules `cuda` and `opencl` of this package follow, and `backend`, which loads
the one that an operand names. What is above is written once for all of them. The processor's is `cpu.Runtime`: its
launches are C throughout.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from portmm.runtime.device_facts import Facts


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
        """Compile a source, or find it in the cache, and load its kernel.

        Raises:
            NoCompilerError: there is no compiler.
            BuildError: the compiler failed.
        """

    def launch(  # noqa: PLR0917 - the parameters of a launch
        self,
        function: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[tuple[str, Any]],
        queue: Any,
        shared: int = 0,
    ) -> Any:
        """Enqueue a kernel with `shared` bytes of dynamic shared memory."""

    def counters(self, handle: Any, count: int, queue: Any) -> Any:
        """The address of at least `count` zeros, for kernels of a queue that restore them."""

    def memory_of(self, buffer: Any) -> tuple[Any, int]:
        """The allocation that a buffer is part of, and the offset in it; not asked where pointers are addresses."""


@cache
def backend(language: str) -> Backend:
    """The backend of "cuda" or "opencl"."""
    module: Any = import_module(f"portmm.runtime.{language}")
    return module  # type: ignore[no-any-return]
