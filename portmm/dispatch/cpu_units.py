"""Units of a CPU: the instruction set and the atom that compute products of given types, or expressions.

Owns their selection by rate, and the packed layouts of weights that follow from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.errors import ScheduleError, TargetError
from portmm.schedule.candidates import PACKED_VECTORS, units
from portmm.schedule.cpu_table import macs_per_cycle
from portmm.spec.dtype import CODES_KR, types
from portmm.spec.problem import Family
from portmm.target.supports import lacks

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.epilogue import Fused
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

USUAL_GROUP = 128
"""Rows of an int4 weight that share a scale, by default."""


def isa_of(s: Schedule, target: Target) -> Isa:
    """The ISA record that a schedule names.

    Raises:
        TargetError: the target lacks it.
    """
    isa = target.isa(s.isa)
    if isa is None:
        raise TargetError(f"schedule needs {s.isa}, which {target.name} does not have")
    return isa


def packing_unit(dtype: str, target: Target) -> tuple[Isa, Atom]:
    """The unit that weights for products of these types are packed for: the fastest one.

    Raises:
        ScheduleError: no atom of the target multiplies these types.
    """
    return max(units(dtype, target), key=lambda unit: _rate(unit, dtype, target))


def int4_unit(target: Target) -> tuple[Isa, Atom]:
    """The unit that int4 weights are packed for.

    Raises:
        ScheduleError: no atom of the target multiplies int4 values.
    """
    return units("f32-u4-f32", target)[0]


def family(dtype: str, target: Target) -> str:
    """The packed layout that suits a target: see `PACKED_VECTORS`; of int4 values, in groups of the default size.

    Raises:
        ScheduleError: no atom of the target multiplies these types.
    """
    if types(dtype)[1] == "u4":
        return str(family_of_codes(target, USUAL_GROUP))
    isa, atom = packing_unit(dtype, target)
    return str(Family(types(dtype)[1], isa.columns(atom) * PACKED_VECTORS, atom.k_pack, atom.acc == "s32"))


def family_of_codes(target: Target, group: int) -> Family:
    """The packed layout of an int4 weight on a target: one for all types of A.

    Raises:
        ScheduleError: no atom of the target multiplies int4 values.
    """
    _, atom = int4_unit(target)
    return Family("u4", atom.n * PACKED_VECTORS, CODES_KR, group=group)


def unit_for(fused: Fused, target: Target) -> tuple[Isa, Atom]:
    """The instruction set, and its vectors of f32, that compute fused expressions.

    Raises:
        ScheduleError: none of the target's can.
    """
    missing = ""
    for isa in target.isas:
        real = isa.atom("f32")
        missing = lacks(isa, real, fused) if real else "f32"
        if real and not missing:
            return isa, real
    raise ScheduleError(f"{target.name} has no {missing} for {fused}")


def attention_unit(dtype: str, fused: Fused, target: Target, rows: int) -> tuple[Isa, Atom, Atom]:
    """The fastest unit for products of a type that attention kernels support, and its vectors of f32.

    Units with more rows than there are `rows` of queries are excluded.

    Raises:
        ScheduleError: there is none.
    """
    fits = []
    for isa, atom in units(f"{dtype}-{dtype}-f32" if dtype != "f32" else dtype, target):
        real = isa.vector("f32", atom.n)
        lines = isa.row_atom(atom) or atom
        interleaves = atom.k_pack == 1 or isa.spelling(lines, "load_rows", "f32", atom.right)
        if (
            (rows >= atom.m if atom.tiled else atom.m == 1)
            and atom.acc == "f32"
            and interleaves
            and real
            and not lacks(isa, real, fused)
        ):
            fits.append((_rate((isa, atom), dtype, target), isa, atom, real))
    if not fits:
        raise ScheduleError(f"{target.name} has no unit that computes {fused} of {dtype}")
    return max(fits, key=lambda x: x[0])[1:]


def _rate(unit: tuple[Isa, Atom], dtype: str, target: Target) -> float:
    """Multiply-adds of elements per cycle of a unit."""
    isa, atom = unit
    return macs_per_cycle(target, isa, atom, dtype) * atom.m * atom.n * atom.k
