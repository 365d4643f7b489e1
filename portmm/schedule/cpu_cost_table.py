"""Table of candidates on CPUs: the parts of their costs that do not depend on sizes.

Owns `Table`, and the rates of a machine: measured ones where the target has them, described ones otherwise. Most of
the constants were fitted, as `schedule.cpu_cost` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from portmm.schedule.cpu_cost_columns import FLAGS, WHOLE, Column, Columns, Flags, columns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

DEFAULT_GHZ = 3.0
DEFAULT_BYTES_PER_CYCLE = {"L1": 64.0, "L2": 32.0, "L3": 10.0, "memory": 5.0}
"""Bandwidth per core, where there is neither a description nor a measurement."""
LOOP_CYCLES = 0.03
"""Cycles to count, compare and branch: one fused micro-operation of the few that a core starts per cycle."""
APART = 0.12
"""Slowdown of a micro-kernel that reads a strided B in place one cache line of a row at a time;
with more lines per row it is divided among them."""
LINE = 64
PASSING = 4
"""Ways of a set of L1 that B and C pass through."""
CROWDED, THRASHED = 1.05, 1.4
"""Slowdown when rows of A that start in one set of L1 leave less than PASSING ways;
and when they leave one at most and nothing is prefetched: measured at M = 7
and 8, K = 4096 on Zen 4."""
AHEAD_CYCLES = 0.5
"""Cycles to prefetch one stream, each step: an address and a prefetch besides the multiply-adds."""
CARRIED = 4.5
"""Cycles to store a row of a tile's sums to scratch and load it for the next block of k: with K = 768 in three
blocks products took 1.1 to 1.3 of the time of one, on Sapphire Rapids."""
SHORT_RUNS, SHORT_AHEAD = 1.5, 1.55
"""Extra time of reading a strided B, as a multiple of that of a panel, row by row, for runs of one cache line;
the second applies where the next rows are prefetched meanwhile."""
COPY_ONCE, COPY_PASSING = 3.7, 6.4
"""Cycles to copy a vector into a panel: from long runs, and from the shorter runs of panels packed between tiles."""
INTERLEAVE = 2.0
"""Cycles per row of a unit to interleave a vector of units."""
DEQUANTIZE = 4.0
"""Cycles to convert a vector of int4 or int8 values to numbers."""
HOME = 0.8
"""Part of a level that is occupied by the data that fits it."""


def hertz(target: Target) -> float:
    """Cycles per second of a core."""
    return (target.frequency_ghz or DEFAULT_GHZ) * 1e9


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
    some: frozenset[str]


def table(q: Problem, schedules: Sequence[Schedule], atoms: Sequence[Atom], target: Target) -> Table:
    """The table of schedules for problems like `q`, which has C by rows."""
    x = columns(q, schedules, atoms, target)
    pairs = list(zip(schedules, atoms, strict=True))
    level = target.level("L1")
    ways = level.ways if level else WHOLE
    tight = np.where((x.mr + 1 >= ways) & ~x.ahead, THRASHED, np.where(x.mr + PASSING >= ways, CROWDED, 1.0))
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
        steps=LOOP_CYCLES + AHEAD_CYCLES * streams,
        crowded=np.where(x.rows_in_place, tight, 1.0),
        apart=1.0 + APART / lines,
        runs=1.0 + np.where(x.prefetches, SHORT_AHEAD, SHORT_RUNS) / lines,
        copy_a=np.array([_copying(s, atom, "a") for s, atom in pairs]),
        copy_b=np.array([_copying(s, atom, "b") for s, atom in pairs]),
        packs=50.0 * x.pack_a + 50.0 * x.pack_b,
        carried=(1.0 + halvings, np.where(x.tiled, CARRIED, 1.0 + halvings)),
        cut=x.strided & ~x.prefetches & ~(x.over_k | x.over_batch),
        firsts=firsts,
        group_of=group_of.reshape(-1),
        # A core's share of L3 may be less than its L2: data stays in the first level that it fits.
        reach=np.maximum.accumulate([target.counted(x.name) * HOME for x in target.levels] or [0.0])[
            : len(target.levels)
        ],
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
        copy = COPY_ONCE if s.b.once and straight == "row" else COPY_PASSING
        each = (copy if layout == straight else copy + atom.n.bit_length()) / atom.n
    if layout == "codes":
        each = DEQUANTIZE * atom.k_pack / atom.n
    if atom.k_pack > 1 and layout == interleaved:
        each += INTERLEAVE * atom.k_pack / atom.n
    return each
