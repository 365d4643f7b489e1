"""Block programs as records: all that selection knows of one.

Owns `Program`, and what the waves of blocks of a kernel on a device are. A program's page is a module that
enumerates its candidates and counts what these need and do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from portmm.schedule.gpu_variants import blocks, device_of, on_gpu
from portmm.spec.dtype import size
from portmm.target.device import STATIC_SHARED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Target

Vectors = tuple[int, int, int]
"""Elements of A, B and C that may be moved at once, as strides, sizes and addresses allow."""
Footprint = dict[str, int]
"""The demand of a kernel on a memory level: bytes, or registers."""


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
            of all candidates at once; of attention, what candidates are ordered by.
        device: it is for devices.
        dynamic_shared: it may have more shared memory than a kernel has statically.
        grouped: it supports grouped matmuls, whose blocks find the group of their rows.
        fixup: its last block of a tile can add the sums of all slices of k, on devices that order memory.
        bounded: its compiler is told how many blocks must fit a processor.
        slice_steps: minimum number of steps of k in a slice.
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
