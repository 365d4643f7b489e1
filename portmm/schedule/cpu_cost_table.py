"""Table of candidates on CPUs: the parts of their costs that do not depend on sizes.

Owns `Table`, and the rates of a machine: measured ones where the target has them, described ones otherwise. Most of
the constants were fitted, as `schedule.cpu_cost` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from portmm.schedule.cpu_cost_columns import FLAGS, WHOLE, Column, Columns, Flags, columns
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

DEFAULT_BYTES_PER_CYCLE = {"L1": 64.0, "L2": 32.0, "L3": 10.0, "memory": 5.0}
"""Bandwidth per core, where there is neither a description nor a measurement."""
LINE = 64


def hertz(target: Target) -> float:
    """Cycles per second of a core."""
    return (target.frequency_ghz or MODEL.default_ghz) * 1e9


def bytes_per_cycle(target: Target, name: str) -> float:
    """Bandwidth of a level, or of memory: measured, described, or assumed."""
    measured = target.measured.get(name, 0.0)
    if measured:
        return measured * 1e9 / hertz(target)
    level = target.level(name)
    described = level.load_bytes_per_cycle if level else 0.0
    return described or DEFAULT_BYTES_PER_CYCLE[name]


def macs_per_cycle(target: Target, isa: Isa | None, atom: Atom, dtype: str) -> float:
    """Mac instructions of an atom that one core starts per cycle: measured, described, or assumed."""
    measured = target.measured.get(atom.name, 0.0)
    if measured:
        return measured * 1e9 / (2 * atom.m * atom.n * atom.k) / hertz(target)
    # Narrow atoms of an ISA start as often as its widest, which is what a description gives.
    widest = isa.atom(dtype) if isa else None
    known = target.rates.get(atom.name) or (target.rates.get(widest.name) if widest else None)
    return known or (1 / atom.m if atom.tiled else 2.0 if atom.n > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class Table:
    """Candidates for one kind of problem on one machine, with the parts of their costs that no size changes.

    Attributes:
        target: the machine.
        x: the candidates.
        elements: bytes of an element of A, B and C.
        rate: multiply-add instructions per cycle.
        steps: cycles of a step besides its multiply-adds and loads.
        crowded: slowdown where rows of A in place start in one set of L1.
        apart: slowdown of multiply-adds by short runs of a strided B.
        runs: slowdown of reading a strided B, likewise.
        copy_a, copy_b: cycles to pack one unit of A, and of B.
        packs: cycles that packing takes at any extent.
        carried: cycles for a vector of sums to be stored and loaded, in one block of k, and in several.
        cut: threads split the rows of a stream.
        firsts: the first of each group of candidates that are partitioned into tasks alike.
        group_of: the group of each candidate.
        reach: bytes of the largest data that stays in each level.
        bandwidth: bytes per cycle of each level, and of memory.
        strided: bytes of an element of B where it is read in place; 0 if it never is.
        sets: name, bytes of a line and number of sets of each level.
        some: names of the flags that some candidate has, "panels" if one covers several, "strips" if one has some.
    """

    target: Target
    x: Columns
    elements: tuple[float, float, float]
    rate: Column
    steps: Column
    crowded: Column
    apart: Column
    runs: Column
    copy_a: Column
    copy_b: Column
    packs: Column
    carried: tuple[Column, Column]
    cut: Flags
    firsts: np.ndarray[Any, np.dtype[np.intp]]
    group_of: np.ndarray[Any, np.dtype[np.intp]]
    reach: Column
    bandwidth: Column
    strided: float
    sets: tuple[tuple[str, int, int], ...]
    some: frozenset[str]


def table(q: Problem, schedules: Sequence[Schedule], atoms: Sequence[Atom], target: Target) -> Table:
    """The table of schedules for problems like `q`, which has C by rows."""
    x = columns(q, schedules, atoms, target)
    pairs = list(zip(schedules, atoms, strict=True))
    level = target.level("L1")
    ways = level.ways if level else WHOLE
    tight = np.where(
        (x.mr + 1 >= ways) & ~x.ahead, MODEL.thrashed, np.where(x.mr + MODEL.passing >= ways, MODEL.crowded, 1.0)
    )
    lines = np.maximum(1.0, x.visit_n * x.b / LINE)
    streams = x.ahead * (1.0 + ~x.pack_a + (x.once | ~x.pack_b))
    halvings = np.array([atom.n.bit_length() if s.program == "dot" else 0 for s, atom in pairs])
    over = np.where(x.over_k, x.kc, np.where(x.over_batch, -1.0, 0.0))
    kinds = np.stack((x.visit_n, x.mc, x.nc, over), axis=1)
    a, b, c = q.elements
    _, firsts, group_of = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    return Table(
        target,
        x,
        (a.bytes, b.bytes, c.bytes),
        rate=np.array([macs_per_cycle(target, target.isa(s.isa), atom, s.dtype) for s, atom in pairs]),
        steps=MODEL.loop_cycles + MODEL.ahead_cycles * streams,
        crowded=np.where(x.rows_in_place, tight, 1.0),
        apart=1.0 + MODEL.apart / lines,
        runs=1.0 + np.where(x.prefetches, MODEL.short_ahead, MODEL.short_runs) / lines,
        copy_a=np.array([_copying(s, atom, "a") for s, atom in pairs]),
        copy_b=np.array([_copying(s, atom, "b") for s, atom in pairs]),
        packs=50.0 * x.pack_a + 50.0 * x.pack_b,
        carried=(1.0 + halvings, np.where(x.tiled, MODEL.carried, 1.0 + halvings)),
        cut=x.strided & ~x.prefetches & ~(x.over_k | x.over_batch),
        firsts=firsts,
        group_of=group_of.reshape(-1),
        # A core's share of L3 may be less than its L2: data stays in the first level that it fits.
        reach=np.maximum.accumulate([target.counted(x.name) * MODEL.home for x in target.levels] or [0.0])[
            : len(target.levels)
        ],
        # All rows in place hold elements of one type.
        strided=float(x.b[x.strided][0]) if x.strided.any() else 0.0,
        sets=tuple((x.name, x.line, x.bytes // (x.line * x.ways)) for x in target.levels) if x.strided.any() else (),
        some=_some(x),
        bandwidth=np.array([bytes_per_cycle(target, name) for name in (*(x.name for x in target.levels), "memory")]),
    )


def _some(x: Columns) -> frozenset[str]:
    flags = {name for name in FLAGS if getattr(x, name).any()}
    flags |= {"panels"} if (x.panels > 1).any() else set()
    return frozenset(flags | ({"strips"} if (x.strip_rows > 1).any() else set()))


def _copying(s: Schedule, atom: Atom, operand: str) -> float:
    """Cycles to pack a unit: a few per vector, and the shuffles of a transposed operand; 0 if it is not packed."""
    if operand == "a":
        packed, layout, straight, interleaved = s.a.packed, s.a.layout, "row" if atom.tiled else "col", "col"
    else:
        straight = interleaved = "codes" if s.b.layout == "codes" else "row"
        packed, layout = s.b.packed, s.b.layout
    if not packed:
        return 0.0
    if layout == "any" or (layout != straight and atom.n == 1):
        each = 1.5
    else:
        # A transposed block of L x L elements takes L log2(L) shuffles.
        copy = MODEL.copy_once if s.b.once and straight == "row" else MODEL.copy_passing
        each = (copy if layout == straight else copy + atom.n.bit_length()) / atom.n
    if layout == "codes":
        each = MODEL.dequantize * atom.k_pack / atom.n
    if atom.k_pack > 1 and layout == interleaved:
        each += MODEL.interleave * atom.k_pack / atom.n
    return each
