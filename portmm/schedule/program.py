"""Block programs as records, and what the pages of devices share.

Owns `Program`, the waves of blocks of a kernel on a device, and the constructor of a device's schedule, with variants
by stages and by slices of k. A program's page is a module that enumerates its candidates and counts what these need
and do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.errors import ScheduleError
from portmm.schedule.parts import (
    ALL,
    ASYNC,
    LOAD,
    REGISTERS,
    SHARED,
    THROUGH,
    AtomUse,
    OperandPlan,
    Parallel,
    Staging,
    Tile,
)
from portmm.schedule.schedule import Schedule
from portmm.spec.dtype import size
from portmm.target.device import PARTS, STATIC_SHARED, Device
from portmm.target.model import DEVICE as MODEL
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

Vectors = tuple[int, int, int]
"""Elements of A, B and C that may be moved at once, as strides, sizes and addresses allow."""
Footprint = dict[str, int]
"""The demand of a kernel on a memory level: bytes, or registers."""
VECTOR_BYTES = 16
"""Largest vector that a thread moves at once, in bytes."""
LEAST_COPY = 4
"""Minimum size of an asynchronous copy, in bytes: PTX ISA, cp.async."""
ASYNCHRONOUS = 80
"""PTX ISA, cp.async: architectures from sm_80 on."""
GROUP = 8
"""Rows of tiles that are scheduled together, so that B stays in L2 between them."""
TICKET = 16
"""Bytes of shared memory that tell the threads of a block whether it is the last of its tile."""


class Waves(NamedTuple):
    """The blocks of a kernel on the processors of a device.

    Attributes:
        blocks: all of them.
        rounds: of the busiest processor: a block starts when another ends, so that in the last wave some have fewer.
        together: that run on it at once.
        busy: processors with a block.
        steps: of k, of a block.
    """

    blocks: int
    rounds: int
    together: int
    busy: int
    steps: int

    @classmethod
    def of(cls, p: Problem, s: Schedule, target: Target, occupied: int) -> Waves:
        """The waves of a schedule of which `occupied` blocks fit a processor."""
        processors, number = device_of(target).processors, blocks(s, p) * s.parallel.split
        rounds = ceil(number / processors)
        steps = ceil(ceil(p.k / (s.block.k * s.atom.kr)) / s.parallel.split)
        return cls(number, rounds, min(occupied, rounds), min(processors, number), steps)


@dataclass(frozen=True, slots=True)
class Program:
    """A block program.

    Attributes:
        builder: the module of `kernels/` whose `build` makes a kernel of a schedule, an ISA and an atom.
        candidates: schedules for a problem, an ISA and its atom on a target, legal or not; those of attention, and of
            `rows`, for sizes.
        footprint: what a schedule needs of each level.
        work: what a schedule does, as `Work`: of a device, for the number of blocks that fit a processor; of a CPU,
            of all candidates at once; of attention in plain threads, what candidates are ordered by.
        device: it is for devices.
        dynamic_shared: it may have more shared memory than a kernel has statically.
        grouped: it supports grouped matmuls, whose blocks find the group of their rows.
        fixup: its last block of a tile can add the sums of all slices of k, on devices that order memory.
        bounded: its compiler is told how many blocks must fit a processor.
        slice_steps: minimum number of steps of k in a slice.
        time: of attention by matrix units, the estimated time of a schedule, in cycles of a processor.
        unit: of the same, the instruction of a target for a type, or None.
    """

    builder: str
    candidates: Callable[..., Iterable[Schedule]]
    footprint: Callable[..., Footprint]
    work: Callable[..., Any]
    device: bool = False
    dynamic_shared: bool = False
    grouped: bool = False
    fixup: bool = False
    bounded: bool = True
    slice_steps: int = 4
    time: Callable[..., float] | None = None
    unit: Callable[[str, Target], tuple[Isa, Atom] | None] | None = None


def counted(registers: Callable[[Schedule], int], shared_bytes: Callable[[Schedule], int]) -> Callable[..., Footprint]:
    """The footprint of a program whose page counts registers of a thread, and shared memory of a block."""
    return lambda s: {"registers": registers(s), "shared": shared_bytes(s)}


def footprint_of(s: Schedule, registers: int, shared: int) -> Footprint:
    """The footprint of a schedule of a device, for registers of a thread and bytes of a block."""
    return {"threads": s.threads, "registers": registers, "processor": registers * s.threads, "shared": shared}


def capacities_of(target: Target, *, dynamic: bool) -> Footprint:
    """Capacities of the levels of a device, with `dynamic` shared memory or not; 0 where one is not known."""
    device = device_of(target)
    return {
        "threads": device.block_threads,
        "registers": device.thread_registers if on_gpu(target) else 0,
        "processor": device.registers,
        "shared": device.shared_bytes if dynamic else min(device.shared_bytes, STATIC_SHARED),
    }


def exceeded(needs: Footprint, has: Footprint) -> str:
    """The first level that has less than a footprint needs, or an empty string."""
    for level, x in needs.items():
        if x > (has.get(level) or x):
            return level
    return ""


def compulsory(p: Problem) -> float:
    """Bytes of A, B and C, once each."""
    a, b, c = (size(x) for x in p.types)
    return p.batch * (p.m * p.k * a + p.k * p.n * b + p.m * p.n * c)


# -- schedules of devices --------------------------------------------------------


def device_of(target: Target) -> Device:
    """The device of a target.

    Raises:
        ScheduleError: it is none.
    """
    if target.device is None:
        raise ScheduleError(f"{target.name} is no device")
    return target.device


def asynchronous(target: Target) -> bool:
    """Whether the device copies from global to shared memory without registers."""
    device = target.device
    number = device.architecture.rstrip("af") if device else ""
    return number.isdigit() and int(number) >= ASYNCHRONOUS


def on_gpu(target: Target) -> bool:
    """Whether the device is a GPU, whose threads run in warps with shared memory, and not a CPU under OpenCL."""
    return target.device is not None and not target.device.lanes


def room(device: Device, registers: int, warp: int) -> int:
    """Number of warps of `warp` lanes that a processor has registers for, which are allocated in groups of eight."""
    return PARTS * (device.registers // (PARTS * (-(-registers // 8) * 8) * warp))


def device_tiles(*sizes: tuple[int, int, int]) -> tuple[Tile, ...]:
    """The tiles of a thread, a warp, a block, and all blocks of a raster."""
    tiles = map(Tile, (REGISTERS, "warp", SHARED), *zip(*sizes, strict=True))
    return (*tiles, Tile("L2", GROUP * sizes[2][0], ALL, ALL))


def schedule_of(  # noqa: PLR0917 - parts of one record
    program: str, p: Problem, isa: Isa, tiles: tuple[Tile, ...], method: str, vectors: tuple[int, int, int],
    atom: AtomUse = AtomUse(), parallel: Parallel = Parallel(),
) -> Schedule:  # fmt: skip
    """A schedule for a problem on a device, with one stage.

    Args:
        program: the block program.
        p: the problem.
        isa: the instruction set.
        tiles: of all levels.
        method: what fills shared memory, `LOAD` where operands are read in place.
        vectors: elements of A, B and C that a thread moves at once.
        atom: the atom.
        parallel: the partition of the work.
    """
    level = REGISTERS if method == LOAD else SHARED
    a, b = ((Staging(level, method, 1, x),) for x in vectors[:2])
    c = OperandPlan("row" if p.c == "row" else "any", (Staging(REGISTERS, LOAD, 1, vectors[2]),))
    return Schedule(
        program, isa.name, p.dtype, tiles, atom, OperandPlan(p.a, a), OperandPlan(p.b, b, p.group), c, parallel,
        p.fused,
    )  # fmt: skip


def at_once(s: Schedule) -> int:
    """Number of slices whose sums the last block of a tile reads at once."""
    return max(1, min(s.parallel.split, int(MODEL.slices_ahead) // (s.mr * s.nr)))


def with_stages(s: Schedule, stages: int, method: str) -> Schedule:
    """A schedule with another number of tiles in shared memory, and another method of filling them."""
    return replace(s, a=s.a.filled(method, stages), b=s.b.filled(method, stages))


def partitioned(s: Schedule, **fields: Any) -> Schedule:
    """A schedule with another partition of the work: fields of `Parallel`."""
    return replace(s, parallel=s.parallel._replace(**fields))


def blocks(s: Schedule, p: Problem) -> int:
    """Number of tiles of a problem."""
    return -(-p.m // s.block.m) * -(-p.n // s.block.n) * p.batch


def staged(
    s: Schedule, p: Problem, target: Target, stages: tuple[int, ...], splits: tuple[int, ...], *, copies: bool
) -> Iterator[Schedule]:
    """Variants of a schedule by stages, and by slices of k where there are few blocks."""
    most, tiles = MODEL.busy_blocks * device_of(target).processors, blocks(s, p)
    for number in stages:
        filled = with_stages(s, number, ASYNC if copies else THROUGH)
        yield from (partitioned(filled, split=x) for x in splits if x == 1 or tiles * x <= most)
