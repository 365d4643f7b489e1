"""Selection of a schedule of attention on a device: by matrix units where they can, else by plain threads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.schedule import gpu_attention, gpu_mma_attention
from portmm.schedule.candidates import units
from portmm.schedule.programs import PROGRAMS

if TYPE_CHECKING:
    from portmm.schedule.gpu_attention import AttentionSizes
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target


def candidates(shape: AttentionSizes, target: Target) -> list[Schedule]:
    """Legal schedules, best first: those of matrix units, if there are any, before those of threads.

    Raises:
        ScheduleError: there are none.
    """
    programs = (PROGRAMS[x] for x in ("mma_attention", "simt_attention"))
    listed = next(s for x in programs if (s := list(x.candidates(shape, target))))
    isa, _ = unit(listed[0], target)
    return [replace(s, isa=isa.name) for s in listed]


def splits(s: Schedule, shape: AttentionSizes, target: Target) -> tuple[int, int]:
    """Number of KV splits of a schedule, and the keys of each."""
    if s.program == "mma_attention":
        return gpu_mma_attention.splits(s, shape, target)
    return gpu_attention.splits(s, shape, target)


def unit(s: Schedule, target: Target) -> tuple[Isa, Atom]:
    """The instruction set and the atom of a schedule."""
    matrix = gpu_mma_attention.unit(s.dtype, target) if s.program == "mma_attention" else None
    return matrix or units("f32", target)[0]
