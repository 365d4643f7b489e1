"""Candidate schedules for a problem on a CPU.

Owns the enumeration over instruction sets and block programs. All candidates are legal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.schedule.legality import illegal
from portmm.schedule.parts import AtomUse
from portmm.schedule.programs import PROGRAMS
from portmm.spec.dtype import unit
from portmm.spec.epilogue import parse
from portmm.spec.problem import family
from portmm.target.supports import lacks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

PACKED_VECTORS = 2
"""Width of a prepacked panel: with two vectors, 14 rows fit 32 registers, so that
a weight is streamed once for M up to 14, and a large M still runs at full rate."""
STATIC_LIMIT = 64
"""Largest dimension for which sizes are compiled in."""


UNUSED = (0, 0, 0)
"""Elements that threads of a device may move at once."""


def candidates(p: Problem, target: Target) -> list[Schedule]:
    """Legal schedules for a problem, in a fixed order.

    Raises:
        ScheduleError: the target has no atom for the problem's type.
    """
    return legal_of(proposals(p, target), p, target)


def legal_of(proposed: Iterable[tuple[Schedule, Isa, Atom]], p: Problem, target: Target) -> list[Schedule]:
    """Legal schedules among proposals, each once.

    Raises:
        ScheduleError: none is legal.
    """
    legal = dict.fromkeys(s for s, isa, atom in proposed if not illegal(s, p, isa, atom, target))
    if not legal:
        raise ScheduleError(f"no legal schedule for {p} on {target.name}")
    return list(legal)


def proposals(p: Problem, target: Target) -> Iterator[tuple[Schedule, Isa, Atom]]:
    """Proposed schedules, legal or not, with the instruction sets and atoms that they name.

    Raises:
        ScheduleError: the target has no atom for the problem's type.
    """
    swap = p.c == "col"
    q = p.transposed() if swap else p
    legal = False
    for isa, atom in units(q.dtype, target):
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


def units(dtype: str, target: Target) -> list[tuple[Isa, Atom]]:
    """Instruction sets to try for a product of these types, each with its widest atom.

    These are the target's best, and all up to the first that extends no other:
    an extension may multiply in larger units, which is faster for some shapes only.

    Raises:
        ScheduleError: the target has no atom for these types.
    """
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


def _reads(isa: Isa, atom: Atom, p: Problem) -> bool:
    """Whether the atom can read the panels of a packed B."""
    packed = family(p.family)
    if packed.kr != atom.k_pack or packed.sums != (atom.acc == "s32"):
        return False
    return bool(isa.spelling(atom, "load_b", unit(p.types[1], packed.kr)))
