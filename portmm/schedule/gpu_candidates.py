"""Candidate schedules for a problem on a device: those of all programs that are legal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.schedule.gpu_variants import device_of, partitioned
from portmm.schedule.legality import illegal, occupancy
from portmm.schedule.parts import ALL
from portmm.schedule.programs import PROGRAMS
from portmm.spec.dtype import dequantized_types, types
from portmm.target.primitives import has_primitive, multiplies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

FIXUP = "last_to_come"
"""Primitive that a split-K fixup needs: which block of a tile is the last, with the others' sums visible to it."""


def candidates(p: Problem, target: Target, vectors: tuple[int, int, int]) -> list[Schedule]:
    """Legal schedules for a problem, in a fixed order.

    Args:
        p: the problem.
        target: a device.
        vectors: elements of A, B and C that may be moved at once, as strides, sizes and
            addresses allow.

    Raises:
        ScheduleError: the device has no unit for the problem's types, or none is legal.
    """
    device_of(target)
    legal: dict[Schedule, None] = {}
    for isa, atom in units(p.dtype, target, tf32=p.tf32):
        programs = (x for x in PROGRAMS.values() if x.device)
        proposed = (s for x in programs for s in x.candidates(p, isa, atom, target, vectors))
        legal |= {
            _bounded(s, target): None for s in _with_fixup(proposed, target) if not illegal(s, p, isa, atom, target)
        }
    if p.grouped:
        legal = {
            partitioned(s, grouped=True): None for s in legal if PROGRAMS[s.program].grouped and s.parallel.split == 1
        }
    if not legal:
        raise ScheduleError(f"no legal schedule for {p} on {target.name}")
    # M is not compiled in: batches have all sizes, weights do not.
    return [replace(s, static=(ALL, p.n, p.k)) for s in legal] if p.static else list(legal)


def _with_fixup(schedules: Iterable[Schedule], target: Target) -> Iterator[Schedule]:
    """Schedules, and those of them with a split-K fixup: slices of k are added in the same kernel."""
    language = device_of(target).language
    for s in schedules:
        yield s
        isa = target.isa(s.isa)
        if s.parallel.split > 1 and PROGRAMS[s.program].fixup and isa and has_primitive(isa, FIXUP, language):
            yield partitioned(s, fixup=True)


def _bounded(s: Schedule, target: Target) -> Schedule:
    """A schedule with its occupancy, where the device's compiler takes that as a bound."""
    device = device_of(target)
    limited = device.bounded and device.registers and PROGRAMS[s.program].bounded
    bounded = partitioned(s, occupancy=occupancy(s, target)) if limited else s
    x = bounded.parallel
    if not x.persistent:
        return bounded
    most = device.processors * max(1, x.occupancy)
    return partitioned(bounded, persistent=most // x.cluster * x.cluster)


def units(dtype: str, target: Target, *, tf32: bool = False) -> list[tuple[Isa, Atom]]:
    """Instruction sets and atoms that multiply these types, best first; with `tf32`, also those that round f32 to it.

    Raises:
        ScheduleError: there are none.
    """
    pairs = []
    for isa in target.isas:
        a, b, _ = types(dtype)
        exact = (t for t in isa.atoms if (t.k_pack > 1 or t.unit) and [a, b] == [t.a, t.b] and (tf32 or not t.rounds))
        atom = next(exact, None) or isa.atom(dequantized_types(dtype))
        if atom is not None:
            pairs.append((isa, atom))
        if b == "u4":
            pairs += [(isa, t) for t in isa.atoms if t.unit == "warp" and t.a == t.b == a]
    if target.device is not None:
        pairs = [(isa, atom) for isa, atom in pairs if multiplies(isa, atom, target.device)]
    if not pairs:
        raise ScheduleError(f"{target.name} does not multiply {dtype}")
    return pairs
