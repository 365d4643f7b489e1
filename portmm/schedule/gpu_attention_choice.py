"""Choice between the programs of attention of devices: warpgroups, fragments of warps, or plain threads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.schedule import gpu_attention, gpu_mma_attention, gpu_wgmma_attention
from portmm.schedule.candidates import units
from portmm.schedule.gpu_attention import split_keys
from portmm.schedule.gpu_mma_attention import MatrixTiling, occupancy
from portmm.schedule.program import device_of
from portmm.schedule.programs import PROGRAMS
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from portmm.schedule.gpu_attention import AttentionSizes
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target


def splits(s: Schedule, shape: AttentionSizes, target: Target) -> tuple[int, int]:
    """Number of KV splits of a schedule, and the keys of each: a function of the sizes and the device alone."""
    if s.program != "mma_attention":
        return gpu_attention.splits(s, shape, target)
    device = device_of(target)
    blocks = shape.heads // shape.group * -(-shape.queries * shape.group // s.block.m)
    busy = min(MODEL.split_blocks, occupancy(MatrixTiling(s), device)) * device.processors
    return split_keys(s, shape, min(MODEL.most_splits, max(1, busy // blocks), -(-shape.keys // MODEL.split_keys)))


def choices(shape: AttentionSizes, target: Target) -> list[Schedule]:
    """Legal schedules, best first: those of matrix units, or, where there are none, those of plain threads.

    Raises:
        ScheduleError: there are none of either.
    """
    listed = matrix_units(shape, target) or gpu_attention.candidates(shape, target)
    return [replace(s, isa=unit_of(s, target)[0].name) for s in listed]


def matrix_units(shape: AttentionSizes, target: Target) -> list[Schedule]:
    """Legal schedules of matrix units: those of warpgroups, then those of warps, each fastest first."""
    return [*gpu_wgmma_attention.candidates(shape, target), *gpu_mma_attention.candidates(shape, target)]


def time(s: Schedule, shape: AttentionSizes, target: Target) -> float | None:
    """Estimated time of a schedule in cycles of a processor; None where nothing estimates it."""
    estimated = PROGRAMS[s.program].time
    return estimated(s, shape, target) if estimated else None


def unit_of(s: Schedule, target: Target) -> tuple[Isa, Atom]:
    """The instruction set and the atom of a schedule of any program."""
    unit = PROGRAMS[s.program].unit
    return (unit(s.dtype, target) if unit else None) or units("f32", target)[0]
