"""Launches of kernels over a grid: arguments by name, bound in two steps.

Owns `Launch`, a kernel with all arguments that do not vary per call, and `bind`, which makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portmm.errors import ScheduleError
from portmm.ir.interpreter import evaluate
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.dispatch.machine import Machine
    from portmm.ir.grid_kernel import GridKernel, MapOf
    from portmm.runtime.backends import Backend

MOST = (1 << 31) - 1 - (1 << 16)
"""Integers of kernels have 32 bits; the last iteration of a loop, and the last tile, reach past the end."""

MAPPED = 16
"""Alignment in bytes of the strides of tensor maps."""


@dataclass(frozen=True, slots=True, eq=False)
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
    """

    function: Any
    grid: tuple[int, int]
    threads: int
    arguments: tuple[tuple[str, Any], ...]
    open: tuple[tuple[int, str], ...]
    shared: int = 0
    counters: int = 0

    def run(self, on: Machine, values: dict[str, Any], queue: Any) -> None:
        """Launch with the addresses and numbers of a call."""
        arguments, there = list(self.arguments), on.backend
        if self.counters:
            values = values | {"counters": there.counters(on.handle, self.counters, queue)}
        for i, name in self.open:
            kind, value = arguments[i]
            arguments[i] = (kind, value.at(there, values[name]) if kind == "map" else values[name])
        there.launch(self.function, self.grid, (self.threads,), arguments, queue, self.shared)


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
    box: tuple[int, int, int]
    swizzle: int

    def at(self, there: Backend, address: int) -> Any:
        """The map of memory at an address, as an argument of a kernel."""
        return there.tensor_map(self.dtype, address, self.sizes, self.strides, self.box, self.swizzle)


def _mapping(x: MapOf, values: dict[str, Any]) -> Mapping:
    size = BY_NAME[x.dtype].bytes
    sizes, strides = (tuple(evaluate(y, values) for y in z) for z in (x.sizes, x.strides))
    # The stride of an axis of length 1 is unused, but the copy engine (TMA) checks its alignment.
    steps = [s * size if n > 1 else MAPPED for n, s in zip(sizes[1:], strides, strict=True)]
    return Mapping(x.dtype, sizes, tuple(steps), x.box, x.swizzle)
