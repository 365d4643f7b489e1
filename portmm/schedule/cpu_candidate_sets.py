"""Sets of candidates on CPUs, enumerated once for all problems that share them.

Owns the cache of candidate lists and of their cost tables. Enumeration compares sizes with a few thresholds only
(see `_Kind.features`): problems on the same sides of all of them have the same candidates.
tests/schedule/test_candidate_sets.py compares this with fresh enumerations.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import field, replace
from math import gcd, lcm
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.schedule.candidates import legal_of, proposals, units_for
from portmm.schedule.cost_tape import Tape
from portmm.schedule.cpu_gemm import DOT_TILES
from portmm.schedule.cpu_streams import caches, crowds_l2, near_depth, panel_depth, shallow_depth, streams_near
from portmm.schedule.cpu_table import Table
from portmm.schedule.cpu_textbook import follows
from portmm.schedule.legality import illegal
from portmm.spec.dtype import BY_NAME
from portmm.target.model import CPU as MODEL
from portmm.util.memo import Memory
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.schedule.cpu_cost import Flags
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

MOST_SETS = 256
"""Sets cached before the cache is cleared: about 50 KB each."""
MOST_KINDS = 256
UNLIMITED = 1 << 40
"""Extent larger than all blocks: a footprint that is legal there is legal at any size."""
REACHES = (2048, 8192, UNLIMITED)
"""Extents between which the blocks that fit a level may differ: the literature's fill levels only if C is large."""
WIDEST = 5
"""Maximum number of vectors of B in a register tile."""


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """Legal schedules for a problem, with the table of the cost model.

    Attributes:
        schedules: in the order of `candidates`.
        table: the same, as columns.
        textbook: flags of the schedules that a textbook gives.
        some_textbook, all_textbook: whether any is set, and whether all are.
        tapes: tapes of the table that have been requested.
    """

    schedules: tuple[Schedule, ...]
    table: Table
    textbook: Flags
    some_textbook: bool
    all_textbook: bool
    tapes: dict[tuple[int, bool], Tape | None] = field(default_factory=dict, compare=False)

    def tape(self, rows: int, *, several: bool) -> Tape | None:
        """The tape of the table for a number of values of M; None the first time, when NumPy takes less time."""
        key = rows, several
        if key not in self.tapes:
            self.tapes[key] = None
            return None
        tape = self.tapes[key]
        if tape is None:
            tape = self.tapes[key] = Tape.of(self.table, rows, several=several)
        return tape


class _Kind:
    """Thresholds of sizes for problems that differ in sizes only; all apply to the kernel's M, N and K.

    Attributes:
        target: the machine, kept alive since its identity is part of a key.
        swap: the kernel computes the transpose.
        exact: no two sizes have the same candidates.
        max_m: M up to which each M differs.
        max_n: N up to which each N differs.
        n_divisor: larger N differ by their greatest common divisor with this.
        strips: rows of the atoms that multiply tiles.
        packs: k per unit and bytes of a right fragment, of each instruction set.
        caches: what sweeps depend on.
        private: bytes of a thread's private cache.
        few: N up to which textbook blockings read A in place.
        exact_k: every K differs.
        chains: sums are one chain, so that k is never split across threads.
    """

    def __init__(self, p: Problem, target: Target) -> None:
        self.target, self.swap, self.exact = target, p.c == "col", p.static
        self.exact_k, self.chains = bool(p.fused), p.deterministic
        q = p.transposed() if self.swap else p
        pairs = units_for(q, target)
        atoms = [t for isa, _ in pairs for x in isa.atoms if (t := isa.atom(q.dtype, x.n)) is not None]
        vectors = {isa.columns(atom) for isa, atom in pairs} | {atom.n for atom in atoms}
        l1, l2 = target.level("L1"), target.level("L2")
        self.caches = caches(target)
        self.private = x.bytes if (x := l2 or l1) else UNLIMITED
        self.max_m = max(MODEL.thin_rows, *(MODEL.tallest * atom.m for _, atom in pairs if not atom.tiled), 0)
        self.max_n = max(WIDEST * max(vectors), *(nr for _, nr in DOT_TILES))
        # Without masks, B is read in place only if panels cover all of its columns.
        masked = all(atom.mask for _, atom in pairs)
        self.n_divisor = 1 if masked else lcm(*(v * x for x in vectors for v in range(1, WIDEST + 1)))
        self.strips = tuple({atom.m for _, atom in pairs if atom.tiled})
        self.packs = tuple({(atom.k_pack, BY_NAME[atom.right].bytes) for atom in atoms})
        self.few = tuple(sorted({MODEL.few_vectors * atom.n for atom in atoms}))

    def features(self, p: Problem, rows: int) -> tuple[Any, ...]:
        """Features of problems like `p` with `rows` rows that the enumeration depends on besides the kind."""
        m, n, k = (p.n, rows, p.k) if self.swap else (rows, p.n, p.k)
        if self.exact:
            return m, n, k, p.batch
        split = not self.chains and k > MODEL.split_depth * max(m, n)
        batched: tuple[Any, ...] = ()
        if p.batch > 1:
            size = replace(p, m=rows).bytes
            batched = (size // p.batch <= self.private, size > self.caches.l2, size > MODEL.few_bytes * p.batch)
        elements, has = p.elements, self.caches
        row = n * elements[1].bytes
        least = near_depth(row, 0, has)
        return (
            replace(p, m=rows).bytes > has.l2,
            k * row > has.far,
            k * row > MODEL.panels_near * has.l2,
            k * row > MODEL.panels_far * has.l2,
            shallow_depth(elements, m, n, k, has),
            panel_depth(k, MODEL.column_depths),
            streams_near(elements, m, n, k, has),
            (least, k > least, k > MODEL.near_depth),
            crowds_l2(elements, m, n, has),
            m
            if m <= self.max_m
            else (m <= MODEL.few_rows, m <= MODEL.apart_rows, m <= MODEL.int4_tile_block, m <= MODEL.int4_block),
            n if n <= self.max_n else -gcd(n, self.n_divisor),
            *(min(-(-m // strip), 3) for strip in self.strips),
            *(-(-k // pack) * n * each <= MODEL.most_packed for pack, each in self.packs),
            k * n * BY_NAME[p.types[1]].bytes > has.l2,
            *(k > MODEL.split_steps * depth for depth in MODEL.stream_depths),
            *(n <= most for most in self.few),
            (bisect_left(REACHES, m), bisect_left(REACHES, n), bisect_left(REACHES, k)),
            k if split or self.exact_k else 0,
            split,
            batched,
        )


_kinds, _sets = Memory(MOST_KINDS, "routes"), Memory(MOST_SETS, "routes")


def candidate_set(p: Problem, target: Target, rows: int | None = None) -> CandidateSet:
    """The candidates for a problem, or for one like it with `rows` rows."""
    rows = p.m if rows is None else rows
    key, kind = _key(p, target, rows)
    result: CandidateSet | None = _sets.get(key)
    if result is None:
        p = replace(p, m=rows)
        proposed = list(proposals(p, target))
        alike = None if kind.exact else _legal_alike(proposed, p, target)
        result = _tabulated(p, target, alike or legal_of(proposed, p, target))
        if kind.exact or alike is not None:
            _sets.keep(key, result)
    return result


def _legal_alike(proposed: list[tuple[Schedule, Isa, Atom]], p: Problem, target: Target) -> list[Schedule] | None:
    """The schedules that are legal for all problems between the same extents as `p`, if others are for none of these.

    The footprint of a schedule grows with sizes.
    """
    m, n, k = (REACHES[bisect_left(REACHES, size)] for size in (p.m, p.n, p.k))
    least, most = replace(p, m=1, n=1, k=1), replace(p, m=m, n=n, k=k)
    legal: dict[Schedule, None] = {}
    for s, isa, atom in proposed:
        if not illegal(s, most, isa, atom, target):
            legal[s] = None
        elif not illegal(s, least, isa, atom, target):
            return None
    return list(legal)


_about = attrgetter("dtype", "a", "b", "c", "family", "deterministic", "static", "source", "fused")


def _key(p: Problem, target: Target, rows: int) -> tuple[Any, _Kind]:
    about = (id(target), _about(p))
    kind: _Kind | None = _kinds.get(about)
    if kind is None or kind.target is not target:
        kind = _kinds.keep(about, _Kind(p, target))
    return (about, kind.features(p, rows)), kind


def _tabulated(p: Problem, target: Target, schedules: list[Schedule]) -> CandidateSet:
    """Schedules with their table of the cost model."""
    q = p.transposed() if p.c == "col" else p
    atoms = [target.atom(s.isa, s.dtype, s.atom.lanes) for s in schedules]
    flags = [follows(s, p, target) for s in schedules]
    costs = Table(q, schedules, [x for x in atoms if x is not None], target)
    return CandidateSet(tuple(schedules), costs, np.array(flags), any(flags), all(flags))
