"""Legality of schedules: what a kernel needs of each level is at most what the target has there.

Owns `illegal`, on every kind of machine alike, and the number of blocks that run on a processor of a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.schedule.program import TICKET, Footprint, capacities_of, device_of, exceeded, footprint_of, room
from portmm.schedule.programs import PROGRAMS
from portmm.schedule.schedule import Schedule, finishes, finishes_in_c, shifts, sweeps, sweeps_panels
from portmm.target.device import RESERVED
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

NOUNS = {
    "registers": "registers", "shared": "bytes of shared memory", "threads": "threads in a block",
    "processor": "registers in a processor",
}  # fmt: skip


def footprint(s: Schedule, p: Problem, atom: Atom) -> Footprint:
    """Registers or bytes of each level that a schedule needs."""
    if not s.on_device:
        return PROGRAMS[s.program].footprint(s, p, atom)
    return footprint_of(s, *_of_block(s))


def _of_block(s: Schedule) -> tuple[int, int]:
    """Registers of a thread of a device, and shared memory of a block."""
    own = PROGRAMS[s.program].footprint(s)
    return own["registers"], own.get("shared", 0) + (TICKET if s.parallel.fixup else 0)


def capacities(s: Schedule, isa: Isa, target: Target) -> Footprint:
    """Capacities of the levels of a target; those that are absent, or 0, limit nothing."""
    if target.device is None or not s.on_device:
        return {"registers": isa.registers} | {x.name: x.bytes for x in target.levels}
    return capacities_of(target, dynamic=PROGRAMS[s.program].dynamic_shared)


def inconsistent(s: Schedule) -> str:
    """The contradiction between parts of a schedule, for any problem, or an empty string."""
    if s.b.once and s.parallel.over != "tiles":
        return "packs B once for all threads, but does not have over=tiles"
    if s.program == "gemm" and s.b.packed and s.b.layout == "packed":
        return "packs a B that is in panels already"
    if s.b.inside and (s.program != "gemm" or s.b.layout != "row" or s.static or s.b.panels > 1):
        return "packs B inside a micro-kernel, which reads whole rows of one panel, of any size"
    return ""


def illegal(s: Schedule, p: Problem, isa: Isa, atom: Atom, target: Target) -> str:
    """The reason why a schedule cannot be used for a problem on a target, or an empty string."""
    if inconsistent(s):
        return inconsistent(s)
    if not s.on_device and p.b in ("packed", "codes") and s.family != p.family:
        return f"reads panels of {s.family}, but B is packed as {p.family}"
    if not s.on_device and (why := _cannot_sweep(s, atom) or _cannot_pack_inside(s, atom)):
        return why
    needs, has = footprint(s, p, atom), capacities(s, isa, target)
    if level := exceeded(needs, has):
        return f"needs {needs[level]} of {has[level]} {NOUNS.get(level, f'bytes of {level}')}"
    split = s.parallel.split
    if split > 1 and p.k < split * PROGRAMS[s.program].slice_steps * s.block.k * s.atom.kr:
        return "slices of k are too short"
    return ""


def _cannot_sweep(s: Schedule, atom: Atom) -> str:
    """The reason why a schedule for a sweep has no kernel, or an empty string."""
    if s.c.packed and (sweeps_panels(s) or not sweeps(s, atom)):
        return "keeps sums in tiles of their own, but no sweep of a B in place in blocks of k has any"
    if not sweeps_panels(s):
        return ""
    why = ""
    if not s.kc or s.static or s.b.panels > 1 or s.c.prefetch or s.b.prefetch:
        why = "with all of k in a block, sizes compiled in, several panels at a time or prefetches of rows"
    elif s.b.layout == "codes" or not (s.b.packed or s.b.layout == "packed"):
        why = "of quantized values or of a B in place"
    elif finishes(s, atom) and not finishes_in_c(s, atom):
        why = "whose sums are finished by an epilogue that needs them apart from C"
    return f"has all columns in the tile of L1, but no kernel sweeps panels {why}" if why else ""


def _cannot_pack_inside(s: Schedule, atom: Atom) -> str:
    """The reason why no micro-kernel packs B, or an empty string."""
    if s.b.inside and (s.types[1] != atom.right or sweeps_panels(s) or shifts(s, atom)):
        return "packs B inside a micro-kernel, which does not convert or sum its elements"
    return ""


def device_registers(s: Schedule) -> int:
    """Registers of a thread of a device."""
    return _of_block(s)[0]


def shared_bytes(s: Schedule) -> int:
    """Shared memory of a block."""
    return _of_block(s)[1]


def occupancy(s: Schedule, target: Target) -> int:
    """Number of blocks that run on a processor at once."""
    device, most = device_of(target), [int(MODEL.most_occupancy)]
    registers, shared = _of_block(s)
    if device.registers:
        most.append(room(device, registers, device.warp) * device.warp // s.threads)
    if device.threads:
        most.append(device.threads // s.threads)
    if shared and device.processor_shared_bytes:
        most.append(device.processor_shared_bytes // (shared + RESERVED))
    return max(1, min(most))
