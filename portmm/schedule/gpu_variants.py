"""Schedules of devices: what the candidates of all programs share.

Owns the constructor of a device's schedule, and its variants by stages and slices of k.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.spec.problem import Problem
    from portmm.target.device import Device
    from portmm.target.isa import Isa
    from portmm.target.target import Target

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
