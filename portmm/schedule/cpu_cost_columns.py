"""Columns of numbers that describe candidates on CPUs.

Owns `Columns`: the facts about each of several schedules that the cost model reads, as arrays with one element per
schedule, so that it prices all candidates for a problem at once. Nothing here depends on the sizes of a problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.schedule.schedule import finishes
from portmm.spec.dtype import BY_NAME, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.target import Target

Column = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
WHOLE = 1e300
"""Extent of a block that covers all of a dimension: no size exceeds it, and sizes over it round up to 1."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Facts about schedules of one type of product, one element per schedule.

    Attributes:
        mr, mc, kc, nc: extents of blocks, `WHOLE` for all of a dimension.
        visit_n: columns of one call of the micro-kernel.
        vectors: fragments of B, or tiles, that a step loads.
        covers: elements or units of k that a step covers.
        deep: `Atom.deep`.
        n, m: columns and rows of the atom.
        strip_rows: rows of one left fragment, 1 for tiles, whose time is proportional to their rows.
        k_pack: adjacent elements of k in a fragment.
        latency: cycles of a multiply-add.
        vector: sums in a vector.
        a, b, c: bytes of the elements that micro-kernels read of A and B, and of a sum.
        a_far, b_far: bytes in memory of one unit of A, and of B.
        c_stored: bytes of an element of C.
        registers: of the instruction set.
        group: rows of int4 or int8 values that share a scale, 0 for none.
        panels: panels of B that one call of the micro-kernel covers.
        tiled, dots, over_k, over_batch: kind of the atom, program and parallel dimension.
        pack_a, pack_b, once, ahead: as in a schedule.
        left, right: fragments are converted each time they are loaded.
        decodes: quantized values are multiplied without repacking; `spans`, by atoms that sum a group at a time.
        prefetches: the next rows of a B in place are prefetched.
        strided: B is read in place, by rows.
        rows_in_place: A is read in place, by rows.
        finishes: sums are converted before they are stored in C.
        static: sizes are compiled in.
    """

    mr: Column
    mc: Column
    kc: Column
    nc: Column
    visit_n: Column
    vectors: Column
    covers: Column
    deep: Column
    n: Column
    m: Column
    strip_rows: Column
    k_pack: Column
    latency: Column
    vector: Column
    a: Column
    b: Column
    c: Column
    a_far: Column
    b_far: Column
    c_stored: float
    registers: Column
    group: Column
    panels: Column
    tiled: Flags
    dots: Flags
    over_k: Flags
    over_batch: Flags
    pack_a: Flags
    pack_b: Flags
    once: Flags
    ahead: Flags
    left: Flags
    right: Flags
    decodes: Flags
    spans: Flags
    prefetches: Flags
    strided: Flags
    rows_in_place: Flags
    finishes: Flags
    static: Flags


FLAGS = frozenset(name for name, kind in Columns.__annotations__.items() if kind == "Flags")
"""Names of the columns that are flags."""


def columns(q: Problem, schedules: Sequence[Schedule], atoms: Sequence[Atom], target: Target) -> Columns:
    """Facts about schedules for problems like `q`, which has C by rows."""
    a, b, c = map(size, q.types)
    rows = [_facts(s, atom, target, (a, b)) for s, atom in zip(schedules, atoms, strict=True)]
    arrays: dict[str, Any] = {
        name: np.array([x[name] for x in rows], np.bool_ if name in FLAGS else np.float64) for name in rows[0]
    }
    return Columns(c_stored=c, **arrays)


def _facts(s: Schedule, atom: Atom, target: Target, sizes: tuple[float, float]) -> dict[str, float]:
    isa = target.isa(s.isa)
    left, right = s.element_types(atom)
    decodes = s.b.layout == "codes" and not s.b.packed
    dots = s.program == "dot"
    return {
        "mr": s.mr,
        "mc": s.mc or WHOLE,
        "kc": s.kc or WHOLE,
        "nc": s.nc or WHOLE,
        "visit_n": s.nr * s.b.panels,
        "vectors": s.nr if dots else s.nr // atom.n * s.b.panels,
        "covers": atom.n if dots else atom.deep,
        "deep": atom.deep,
        "n": atom.n,
        "m": atom.m,
        "strip_rows": 1 if atom.tiled else atom.m,
        "k_pack": atom.k_pack,
        "latency": atom.latency,
        "vector": isa.columns(atom) if isa else atom.n,
        "a": BY_NAME[left].bytes,
        "b": sizes[1] * atom.k_pack if decodes else BY_NAME[right].bytes,
        "c": BY_NAME[atom.acc].bytes,
        "a_far": sizes[0] * atom.k_pack,
        "b_far": sizes[1] * atom.k_pack,
        "registers": isa.registers if isa else 0,
        "group": s.b.group,
        "panels": s.b.panels,
        "tiled": atom.tiled,
        "dots": dots,
        "over_k": s.parallel.over == "k",
        "over_batch": s.parallel.over == "batch",
        "pack_a": s.a.packed,
        "pack_b": s.b.packed,
        "once": s.b.once,
        "ahead": s.c.prefetch,
        "left": left != atom.left,
        "right": right != atom.right and not decodes,
        "decodes": decodes,
        "spans": decodes and atom.takes_int4 and s.b.group > 0,
        "prefetches": s.c.prefetch or s.b.prefetch > 0,
        "strided": s.b.layout == "row" and not s.b.packed,
        "rows_in_place": s.a.layout == "row" and not s.a.packed,
        "finishes": not dots and finishes(s, atom),
        "static": s.static is not None,
    }
