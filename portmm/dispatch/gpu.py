"""Dispatch of problems to compiled kernels on a device.

Owns the selection of a schedule for a device, `Machine`, a device as its driver reports it, and the
memo of kernels compiled for it. Counts that a driver reports replace those of the device's
description; everything else is taken from the description.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portmm.codegen.lower import grid_atom, lower_grid
from portmm.dispatch.schedule_choice import Choice, overlaid
from portmm.errors import ScheduleError
from portmm.ir.interpreter import evaluate
from portmm.schedule.gpu_candidates import candidates
from portmm.schedule.gpu_cost import cost
from portmm.spec.dtype import BY_NAME
from portmm.target.reported_device import device_target
from portmm.target.target import GENERIC_DEVICES
from portmm.util import locks
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.ir.grid_kernel import GridKernel, MapOf
    from portmm.runtime.device_facts import Facts
    from portmm.schedule.cpu_cost import Cost
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.isa import Isa
    from portmm.target.target import Target

MOST_ROUTES = 4096
"""Routes kept before all are dropped: an endless series of new shapes must not fill memory."""

MOST = (1 << 31) - 1 - (1 << 16)
"""Integers of kernels have 32 bits; the last iteration of a loop, and the last tile, reach past the end."""

MAPPED = 16
"""Alignment in bytes of the strides of tensor maps."""

Vectors = tuple[int, int, int]


def choose(p: Problem, target: Target, vectors: Vectors, *, tuned: bool = True) -> Choice:
    """The schedule measured to be fastest, or the one with the least predicted time; the first of equals.

    Args:
        p: the problem.
        target: the device.
        vectors: elements of a vector access to A, B and C.
        tuned: look in the database of tuned schedules.

    Raises:
        ScheduleError: no schedule is legal, or the product is empty.
    """
    if 0 in (p.m, p.n, p.k, p.batch):
        raise ScheduleError(f"{p} has no products: there is nothing to choose")
    listed = candidates(p, target, vectors)
    timed = [(_predicted(p, s, target), s) for s in listed]
    ranked = sorted(enumerate(timed), key=lambda x: (x[1][0].seconds, x[0]))
    (_, (terms, best)), *rest = ranked
    choice = Choice(p, target, 1, best, terms, tuple((s, c) for _, (c, s) in rest))
    return overlaid(choice, listed, 1, _predicted) if tuned else choice


def _predicted(p: Problem, s: Schedule, target: Target, _workers: int = 1) -> Cost:
    return cost(p, s, grid_atom(_isa(s, target), s), target)


def _isa(s: Schedule, target: Target) -> Isa:
    isa = target.isa(s.isa)
    assert isa is not None  # noqa: S101 - candidates are the target's
    return isa


def source(kernel: GridKernel, language: str) -> str:
    """The source of a kernel in "cuda" or "opencl"."""
    from portmm.codegen import cuda, opencl

    return cuda.source(kernel) if language == "cuda" else opencl.source(kernel)


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

    def load(self, kernel: GridKernel) -> Any:
        """The compiled kernel.

        Raises:
            NoCompilerError: there is no NVRTC.
            BuildError: the compiler failed.
        """
        text = source(kernel, self.language)
        if self.language == "cuda":
            from portmm.build.nvrtc import compile_cuda
            from portmm.runtime import cuda

            assert self.target.device is not None  # noqa: S101 - devices have one
            return cuda.load(compile_cuda(text, kernel.name, self.target.device.architecture), kernel.name, self.handle)
        from portmm.runtime import opencl

        return opencl.load(opencl.compile_opencl(text, kernel.name, *self.handle), kernel.name)

    def mapped(self, x: Mapping, address: int) -> Any:
        """A tensor map as a kernel argument."""
        from portmm.runtime import tensor_map

        return tensor_map.tensor_map(x.dtype, address, x.sizes, x.strides, x.box, x.swizzle)

    def counters(self, count: int, queue: Any) -> Any:
        """The address of at least `count` zeros, for kernels of a CUDA stream that restore them."""
        from portmm.runtime import cuda

        return cuda.counters(self.handle, count, queue)

    def launch(  # noqa: PLR0917 - the parameters of a launch
        self, function: Any, grid: tuple[int, int], threads: int, arguments: Sequence[Any], queue: Any, shared: int = 0
    ) -> None:
        """Enqueue a kernel in a stream or a queue, with `shared` bytes of shared memory."""
        if self.language == "cuda":
            from portmm.runtime import cuda

            cuda.launch(function, grid, (threads,), arguments, queue, shared)
        else:
            from portmm.runtime import opencl

            opencl.launch(function, grid, (threads, 1), arguments, queue)


_machines: dict[tuple[Any, ...], Machine] = {}
_lock = locks.lock()


def machine(key: tuple[Any, ...], handle: Any) -> Machine:
    """The device of a key: ("cuda", number), or ("opencl", ...) with a context and a device as the handle."""
    device = _machines.get(key)
    if device is None:
        if key[0] == "cuda":
            from portmm.runtime import cuda

            facts = cuda.facts(handle)
        else:
            from portmm.runtime import opencl

            facts = opencl.facts(handle[1])
        with _lock:
            device = _machines.setdefault(key, Machine(key, key[0], handle, described(facts)))
    return device


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
        arguments = list(self.arguments)
        if self.counters:
            values = values | {"counters": on.counters(self.counters, queue)}
        for i, name in self.open:
            kind, value = arguments[i]
            arguments[i] = (kind, on.mapped(value, values[name]) if kind == "map" else values[name])
        on.launch(self.function, self.grid, self.threads, arguments, queue, self.shared)


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


def _mapping(x: MapOf, values: dict[str, Any]) -> Mapping:
    size = BY_NAME[x.dtype].bytes
    sizes, strides = (tuple(evaluate(y, values) for y in z) for z in (x.sizes, x.strides))
    # The stride of an axis of length 1 is unused, but the copy engine (TMA) checks its alignment.
    steps = [s * size if n > 1 else MAPPED for n, s in zip(sizes[1:], strides, strict=True)]
    return Mapping(x.dtype, sizes, tuple(steps), x.box, x.swizzle)


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The compiled kernels of a problem on a device.

    Attributes:
        choice: the schedule, and its alternatives.
        kernels: in the order in which they run.
        functions: their compiled functions.
    """

    choice: Choice
    kernels: tuple[GridKernel, ...]
    functions: tuple[Any, ...]

    def workspace(self, m: int, n: int, batch: int) -> int:
        """Elements of 32 bits for the partial sums of k splits, which another kernel or block reduces."""
        s = self.choice.schedule
        if s.parallel.fixup:  # full tiles
            return s.parallel.split * batch * -(-m // s.block.m) * -(-n // s.block.n) * s.block.m * s.block.n
        return s.parallel.split * batch * m * n if s.parallel.split > 1 else 0


_routes = Memory(MOST_ROUTES)
_loaded = Memory(MOST_ROUTES)


def route(p: Problem, on: Machine, vectors: Vectors) -> Route:
    """Kernels for a problem, selected and compiled once per problem and device.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    key = (p, on.key, vectors)
    kept: Route | None = _routes.get(key)
    if kept is None:
        choice = choose(p, on.target, vectors)
        kept = _routes.keep(key, Route(choice, *_code(choice.schedule, on)))
    return kept


def routes(requested: Sequence[tuple[Problem, Vectors]], on: Machine, compilers: int) -> list[Route]:
    """Routes for several problems, whose kernels are compiled in parallel by `compilers` threads.

    Raises:
        ScheduleError: no schedule is legal for one of them.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    new = [choose(p, on.target, vectors).schedule for p, vectors in requested if (p, on.key, vectors) not in _routes]
    with ThreadPoolExecutor(compilers) as pool:
        list(pool.map(lambda s: _code(s, on), dict.fromkeys(new)))
    return [route(p, on, vectors) for p, vectors in requested]


def _code(s: Schedule, on: Machine) -> tuple[tuple[GridKernel, ...], tuple[Any, ...]]:
    """The compiled kernels of a schedule, which serve other sizes too."""
    compiled: tuple[tuple[GridKernel, ...], tuple[Any, ...]] | None = _loaded.get((s, on.key))
    if compiled is None:
        kernels = lower_grid(s, _isa(s, on.target))
        compiled = _loaded.keep((s, on.key), (kernels, tuple(on.load(x) for x in kernels)))
    return compiled
