"""Candidate schedules for a problem, on every kind of machine: those of all programs that are legal.

Owns the enumeration over instruction sets, atoms and block programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.schedule.legality import illegal, occupancy
from portmm.schedule.parts import ALL, AtomUse
from portmm.schedule.program import Vectors, device_of, partitioned
from portmm.schedule.programs import PROGRAMS
from portmm.spec.dtype import dequantized_types, types, unit
from portmm.spec.epilogue import parse
from portmm.spec.problem import Problem, family
from portmm.target.supports import has_primitive, lacks, multiplies

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

    Proposal = tuple[Schedule, Isa, Atom]

PACKED_VECTORS = 2
"""Width of a prepacked panel: with two vectors, 14 rows fit 32 registers, so that
a weight is streamed once for M up to 14, and a large M still runs at full rate."""
STATIC_LIMIT = 64
"""Largest dimension for which sizes are compiled in, of any three."""
STATIC_WORK, STATIC_MOST = 1 << 15, 512
"""Multiply-adds up to which they are, too, and the largest dimension then: calls and tiles take as long as these."""
FIXUP = "last_to_come"
"""Primitive that a split-K fixup needs: which block of a tile is the last, with the others' sums visible to it."""
UNUSED = (0, 0, 0)
"""Elements that threads of a device may move at once, on CPUs."""


def compiled_in(m: int, n: int, k: int) -> bool:
    """Whether a product that is repeated has a kernel of its own, with its sizes compiled in."""
    most = max(m, n, k)
    return most <= STATIC_LIMIT or (most <= STATIC_MOST and m * n * k <= STATIC_WORK)


def candidates(p: Problem, target: Target, vectors: Vectors = UNUSED) -> list[Schedule]:
    """Legal schedules for a problem, in a fixed order.

    Args:
        p: the problem.
        target: the machine.
        vectors: of a device, elements of A, B and C that may be moved at once, as strides, sizes and addresses allow.

    Raises:
        ScheduleError: the target has no unit for the problem's types, or no schedule is legal.
    """
    if target.device is None:
        return legal_of(proposals(p, target), p, target)
    legal = dict.fromkeys(_bounded(s, target) for s in legal_of(_on_device(p, target, vectors), p, target))
    if p.grouped:
        alone = [s for s in legal if PROGRAMS[s.program].grouped and s.parallel.split == 1]
        legal = dict.fromkeys(partitioned(s, grouped=True) for s in alone)
        _require(legal, p, target)
    # M is not compiled in: batches have all sizes, weights do not.
    return [replace(s, static=(ALL, p.n, p.k)) for s in legal] if p.static else list(legal)


def legal_of(proposed: Iterable[Proposal], p: Problem, target: Target) -> list[Schedule]:
    """Legal schedules among proposals, each once.

    Raises:
        ScheduleError: none is legal.
    """
    legal = dict.fromkeys(s for s, isa, atom in proposed if not illegal(s, p, isa, atom, target))
    _require(legal, p, target)
    return list(legal)


def _require(legal: Iterable[Schedule], p: Problem, target: Target) -> None:
    if not legal:
        raise ScheduleError(f"no legal schedule for {p} on {target.name}")


def units(dtype: str, target: Target, *, tf32: bool = False) -> list[tuple[Isa, Atom]]:
    """Instruction sets to try for a product of these types, best first, each with its atom.

    Of a CPU, these are the target's best, and all up to the first that extends no other: an extension may multiply in
    larger units, which is faster for some shapes only. Of a device they are all; with `tf32`, also atoms that round
    f32 to it.

    Raises:
        ScheduleError: the target has no atom for these types.
    """
    if target.device is not None:
        return _device_units(dtype, target, tf32=tf32)
    pairs = []
    for isa in target.isas:
        atom = isa.atom(dtype)
        if atom is not None:
            pairs.append((isa, atom))
            if isa.base is None:
                break
    if not pairs:
        have = ", ".join(x.name for x in target.isas) or "none"
        raise ScheduleError(f"no atom for {dtype} on {target.name}; its instruction sets are {have}")
    return pairs


# -- CPUs ------------------------------------------------------------------------


def units_for(p: Problem, target: Target) -> list[tuple[Isa, Atom]]:
    """Instruction sets to try for a problem on a CPU, as `units`.

    A packed B whose panels none of these reads may suit other instruction sets of the target: a wheel's base set packs
    for a level of processors, whose vectors may be shorter than this target's. Units of one lane are left out: an
    unpacked B is faster.

    Raises:
        ScheduleError: the target has no atom for the problem's type.
    """
    pairs = units(p.dtype, target)
    if p.b not in ("packed", "codes") or any(takes_panels(p, *x) for x in pairs):
        return pairs
    every = ((isa, atom) for isa in target.isas if (atom := isa.atom(p.dtype)) is not None)
    return [x for x in every if x[1].n > 1 and takes_panels(p, *x)] or pairs


def takes_panels(p: Problem, isa: Isa, atom: Atom) -> bool:
    """Whether panels of a packed B are multiples of an atom's vectors; those of codes have one unit for all atoms."""
    packed = family(p.family)
    return packed.nr % isa.columns(atom) == 0 and (p.b == "codes" or packed.kr == atom.k_pack)


def proposals(p: Problem, target: Target) -> Iterator[Proposal]:
    """Proposed schedules of a CPU, legal or not, with the instruction sets and atoms that they name.

    Raises:
        ScheduleError: the target has no atom for the problem's type.
    """
    swap = p.c == "col"
    q = p.transposed() if swap else p
    legal = False
    for isa, atom in units_for(q, target):
        if legal and p.deterministic and p.acc != "s32":
            break  # Units of several elements of k round each in their own way: one of them for all shapes.
        if (p.b == "packed" and not _reads(isa, atom, p)) or (p.source and not isa.quantises(atom, p.source)):
            continue
        if p.fused and not _fuses(isa, isa.columns(atom), p.fused):
            continue
        narrow = isa.narrower(q.dtype, q.n)
        narrow = None if narrow and p.fused and not _fuses(isa, narrow.n, p.fused) else narrow
        for lanes, x in ((narrow.n, narrow), (0, atom)) if narrow else ((0, atom),):
            use, own = AtomUse(lanes, atom.k_pack, swap), isa.atom(q.dtype, lanes) or atom
            programs = [y for y in PROGRAMS.values() if not y.device]
            for s in (s for y in programs for s in y.candidates(q, isa, x, target, UNUSED)):
                one = replace(s, atom=use)
                legal = legal or not illegal(one, p, isa, own, target)
                yield one, isa, own


def _fuses(isa: Isa, lanes: int, text: str) -> bool:
    """Whether vectors as wide as an atom's sums support the operations of an epilogue expression."""
    real = isa.vector("f32", lanes)
    return real is not None and not lacks(isa, real, parse(text))


def _reads(isa: Isa, atom: Atom, p: Problem) -> bool:
    """Whether the atom can read the panels of a packed B."""
    packed = family(p.family)
    if packed.kr != atom.k_pack or packed.sums != (atom.acc == "s32"):
        return False
    return bool(isa.spelling(atom, "load_b", unit(p.types[1], packed.kr)))


# -- devices ---------------------------------------------------------------------


def _on_device(p: Problem, target: Target, vectors: Vectors) -> Iterator[Proposal]:
    """Proposed schedules, and those of them with a split-K fixup: slices of k are added in the same kernel."""
    language, programs = device_of(target).language, [x for x in PROGRAMS.values() if x.device]
    for isa, atom in units(p.dtype, target, tf32=p.tf32):
        joins = has_primitive(isa, FIXUP, language)
        for program in programs:
            for s in program.candidates(p, isa, atom, target, vectors):
                yield s, isa, atom
                if s.parallel.split > 1 and program.fixup and joins:
                    yield partitioned(s, fixup=True), isa, atom


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


def _device_units(dtype: str, target: Target, *, tf32: bool) -> list[tuple[Isa, Atom]]:
    pairs, (a, b, _) = [], types(dtype)
    for isa in target.isas:
        exact = (t for t in isa.atoms if (t.k_pack > 1 or t.unit) and [a, b] == [t.a, t.b] and (tf32 or not t.rounds))
        atom = next(exact, None) or isa.atom(dequantized_types(dtype))
        if atom is not None:
            pairs.append((isa, atom))
        if b == "u4":
            pairs += [(isa, t) for t in isa.atoms if t.unit and t.a == t.b == a and not t.rounds]
    pairs = [(isa, atom) for isa, atom in pairs if multiplies(isa, atom, device_of(target))]
    if not pairs:
        raise ScheduleError(f"{target.name} does not multiply {dtype}")
    return pairs
