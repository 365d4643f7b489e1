"""Candidates that sweep the rows of a B in place, with all of K in a block or with sums in tiles of their own.

Owns when products are of such a shape, and such matrices so far, that this pays, and the KC of such sweeps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from portmm.schedule.cpu_blocking import (
    a_in_place,
    base_schedule,
    both_in_place,
    cache_tiles,
    least_of,
    tallest,
    whole_depth,
)
from portmm.schedule.parts import AHEAD, ALL, PACKED, PACKED_INSIDE
from portmm.schedule.schedule import by_columns, reads_matrix
from portmm.spec.dtype import UNCONVERTED, DType
from portmm.target.model import CPU as MODEL
from portmm.target.summation import RUN

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

    Elements = tuple[DType, DType, DType]


class Caches(NamedTuple):
    """Caches of a machine, which sweeps depend on; extents of levels that it lacks are 0.

    Attributes:
        l1: bytes of L1; `line`, of its lines; `ways` and `sets` of it.
        l2: bytes of L2.
        last: bytes of the last level that a B may take if nobody else uses it.
        far: bytes of a B from which it comes from afar: of the most that stays in the last level, a share.
    """

    l1: int
    line: int
    ways: int
    sets: int
    l2: int
    last: float
    far: float

    def stay(self, row: int) -> int:
        """Number of rows of `row` bytes that stay in L1 if a line of each is read: rows of one set share its ways."""
        return self.ways * (self.sets // gcd(max(1, row // self.line), self.sets))


def caches(target: Target) -> Caches:
    """The caches of a machine."""
    l1, l2 = target.level("L1"), target.level("L2")
    last = MODEL.home * target.largest
    far = float(MODEL.apart_share) * max([target.counted(x.name) for x in target.levels], default=0)
    if l1 is None:
        return Caches(0, 1, 1, 1, l2.bytes if l2 else 0, last, far)
    return Caches(l1.bytes, l1.line, l1.ways, l1.bytes // (l1.line * l1.ways), l2.bytes if l2 else 0, last, far)


def in_pairs(nr: int, isa: Isa, atom: Atom) -> bool:
    """Whether a register tile has pairs of vectors: lines of 64 bytes are prefetched by the hardware in pairs."""
    return nr % (2 * isa.columns(atom)) == 0


def shallow(p: Problem, isa: Isa, atom: Atom, target: Target, nr: int) -> Iterator[Schedule]:
    """Schedules for a K of one block and a large C: slices of rows sweep all columns, and C is stored in long runs."""
    mr = min(tallest(isa, atom, nr), MODEL.in_place_rows)
    kc = shallow_depth(p.elements, p.m, p.n, p.k, caches(target))
    if kc and p.m > mr and in_pairs(nr, isa, atom) and both_in_place(p, isa, atom, nr):
        yield base_schedule("gemm", p, isa, cache_tiles(mr, nr, kc, ALL, ALL, least_of(mr)), False, False)


def over_panels(p: Problem, isa: Isa, atom: Atom, nr: int, has: Caches) -> Iterator[Schedule]:
    """Schedules whose slices of rows of A sweep panels of B that stay in L2, a run of k deep.

    Rows of C are stored in long runs, and B is packed once. Shallow rows of a B are better left in place. Slices of
    less than half of the largest tile have too few multiply-adds in a step (llvm-mca, Skylake: 6 x 32 0.85 of the peak,
    14 x 32 0.93). Of blocks that are packed before panels pass them, slices come in order from any level. All wait for
    panels from L2 unless these are prefetched. The tallest slices in place take 0.95 of the time of eight rows (Granite
    Rapids, prepacked: 128x768x768, 784x128x1152), and need no packing.
    """
    depth, top = panel_depth(p.k, MODEL.panel_depths), tallest(isa, atom, nr)
    # Rows of A that start in one set of L1 leave two ways to panels.
    mr = min(top, MODEL.in_place_rows, max(1, has.ways - 2))
    near = panel_columns(depth, nr, p.elements[1].bytes, has)
    if p.m <= mr or not near or p.dtype not in UNCONVERTED or (p.b == "row" and depth < RUN):
        return
    if p.fused and (p.types[2] != "f32" or reads_matrix(p.fused)):
        return
    if nr == 2 * isa.columns(atom) and a_in_place(p, isa, atom):
        ready = p.b == "packed"
        tall = () if p.a == "col" else ((top, False), (top - 2, False))
        for rows, pack_a in dict.fromkeys(((mr, False), *tall, (top, True), (top - 2, True))):
            if 2 * rows < top or p.m <= rows:
                continue
            nc, few = (near, 0) if ready and not pack_a else (ALL, near)
            registers, l1, l2, l3 = cache_tiles(rows, nr, depth, ALL, nc, least_of(rows), near=few)
            l3 = l3._replace(m=-(-MODEL.sweep_rows // rows) * rows) if pack_a else l3
            s = base_schedule("gemm", p, isa, (registers, l1._replace(n=ALL), l2, l3), pack_a, not ready)
            yield s
            yield replace(s, b=s.b.prefetched(0, MODEL.steps_ahead * nr))


def packed_inside(p: Problem, isa: Isa, atom: Atom, target: Target, nr: int) -> Iterator[Schedule]:
    """Schedules whose first slice of each block of rows packs a panel as it multiplies by it, for the other slices.

    B is read once per block, so that a block has as many rows of A as stay in L2 while panels pass. A is in place, or,
    beside panels of two vectors, packed: rows in place that start in one set of L1 leave no ways to others. Columns of
    register tiles prefetch C, and A in place, where these are not in L2.
    """
    kc, top = panel_depth(p.k, MODEL.column_depths), tallest(isa, atom, nr)
    has, size = caches(target), p.elements[0].bytes
    vectors = nr // isa.columns(atom)
    if (vectors < 2 and p.n > nr) or p.dtype not in UNCONVERTED or not both_in_place(p, isa, atom, nr):
        return
    for mr, pack_a in dict.fromkeys(((min(top, MODEL.in_place_rows), False), (top, False), (top, True))):
        rows = _block_rows(mr, kc * size, has)
        if mr < p.m and (vectors == 2 or not pack_a):
            near = min(kc, has.l1 // ((mr + nr) * size))
            tiles = whole_depth(p, p.k, cache_tiles(mr, nr, kc, rows, ALL, least_of(mr), first=near))
            s = base_schedule("gemm", p, isa, tiles, pack_a, False)
            yield _columns_ahead(replace(s, b=s.b.with_pack(PACKED_INSIDE)), p, atom, has)


def ready_panels(p: Problem, isa: Isa, atom: Atom, target: Target, nr: int) -> Iterator[Schedule]:
    """Schedules by columns of register tiles for few steps of k and one or two panels that are packed before."""
    mr, has = min(tallest(isa, atom, nr), MODEL.in_place_rows), caches(target)
    kc, size = panel_depth(p.k, MODEL.column_depths), p.elements[0].bytes
    few = p.k <= kc <= MODEL.column_depths[-1] and p.n <= 2 * nr <= 4 * isa.columns(atom) and 0 < mr < p.m
    if p.b != "packed" or not few or not a_in_place(p, isa, atom):
        return
    rows = _block_rows(mr, kc * size, has)
    s = base_schedule("gemm", p, isa, cache_tiles(mr, nr, kc, rows, ALL, least_of(mr)), False, False)
    if by_columns(s, atom):
        yield _columns_ahead(s, p, atom, has)


def _block_rows(mr: int, row: int, has: Caches) -> int:
    """Rows of a block of A, in whole slices, that stay in L2 while panels pass; a row has `row` bytes."""
    return int(max(mr, int(MODEL.inside_share * has.l2) // row // mr * mr))


def _columns_ahead(s: Schedule, p: Problem, atom: Atom, has: Caches) -> Schedule:
    """The schedule, with prefetches of C and of A if it has columns of register tiles and L2 does not hold these."""
    return replace(s, c=AHEAD) if by_columns(s, atom) and p.bytes > has.l2 else s


def panel_depth(k: int, depths: Sequence[int]) -> int:
    """KC of such sweeps: a run, or the least of `depths` that has all of K."""
    return int(depths[bisect_left(depths, k)]) if k <= depths[-1] else RUN


def panel_columns(depth: int, nr: int, size: int, has: Caches) -> int:
    """Number of columns of the panels that stay in L2 while slices of rows pass, in elements of `size` bytes."""
    columns = min(MODEL.panel_share * has.l2 / depth, MODEL.panel_bytes) // size
    return int(columns // nr * nr)


def shallow_depth(elements: Elements, m: int, n: int, k: int, has: Caches) -> int:
    """KC of a sweep that has all of K in a block, for an item of C that takes much of L2; 0 where there is none.

    With very few steps of k, calls of a micro-kernel for each register tile take longer than its multiply-adds, so that
    sweeps pay for a C beyond L1. A row of B that is read in part waits in L1 for the next register tile.
    """
    (_, b, c), depths = elements, MODEL.stream_depths
    if not (has.l1 and has.l2) or k > depths[-1]:
        return 0
    few = k <= MODEL.few_steps and n * c.bytes >= MODEL.long_rows
    if m * n * c.bytes <= (has.l1 if few else MODEL.shallow_share * has.l2) or k > has.stay(n * b.bytes):
        return 0
    return int(depths[bisect_left(depths, k)])


def sums_apart(p: Problem, isa: Isa, atom: Atom, target: Target, nr: int) -> Iterator[Schedule]:
    """Schedules for some rows by a B beyond L2: slices of them sweep its columns, with sums in tiles of their own.

    Rows of C that start in one set of L1 would leave it no ways for rows of B. Columns are cut so that sums stay in L2.
    A few rows of a B from memory are swept at a time, and of one that takes more of a large last level than others may
    leave it; of one that may be in the last level, as many as stay in L2.
    """
    size, pair = p.elements[1].bytes, 2 * isa.columns(atom)
    has = caches(target)
    least = MODEL.sums_in_c_wide if crowds_l2(p.elements, p.m, p.n, has) else MODEL.sums_in_c
    if not (least < p.m <= MODEL.apart_rows and nr == pair and both_in_place(p, isa, atom, nr)):
        return
    top = tallest(isa, atom, nr)

    def swept(mr: int, kc: int, width: int, ahead: int) -> Schedule:
        tiles = cache_tiles(mr, nr, kc, ALL, width // size // nr * nr, least_of(mr))
        base = base_schedule("gemm", p, isa, tiles, False, False)
        return replace(base, b=base.b.prefetched(0, ahead // size), c=base.c.with_pack(PACKED))

    few, remote = p.m <= MODEL.few_rows, p.k * p.n * size > has.far
    shared = few and not remote and p.k * p.n * size > MODEL.panels_far * has.l2
    if few and (remote or shared):
        depth, ahead = MODEL.shared_stream if shared else (MODEL.apart_depth, MODEL.ahead_bytes)
        mr = min(p.m, top) if shared or p.m <= top else min(top, MODEL.in_place_rows)
        for width in MODEL.apart_bytes:
            yield swept(mr, depth, width, ahead)
    kc = near_depth(p.n * size, nr * size, has)
    if p.k > kc and not shared and streams_near(p.elements, p.m, p.n, p.k, has):
        yield swept(min(p.m, top), kc, MODEL.near_bytes, MODEL.near_ahead)


def near_depth(row: int, run: int, has: Caches) -> int:
    """KC of such sweeps for rows of `row` bytes that are read `run` bytes at a time.

    Lines are fetched in pairs. Of a shorter run, the other line waits in L1.
    """
    return int(MODEL.near_depth) if not has.l1 or run >= 2 * has.line else min(int(MODEL.near_depth), has.stay(row))


def streams_near(elements: Elements, m: int, n: int, k: int, has: Caches) -> bool:
    """Whether a B in the last level, of long rows, may be better streamed than read or packed by panels.

    This holds for few slices of rows of C, more of them if rows of B start in one set of L1, and for a B that takes
    much of the level. A larger B certainly comes from memory, and a smaller one stays in L2.
    """
    row = n * elements[1].bytes
    if not (has.l1 and has.l2 and 2 * row >= MODEL.near_bytes and has.l2 < k * row <= has.last):
        return False
    aligned = row % (has.line * has.sets) == 0
    return bool(m <= MODEL.near_rows * (1 + aligned) or k * row > has.far)


def crowds_l2(elements: Elements, rows: int, columns: int, has: Caches) -> bool:
    """Whether rows of B that are asked for ahead leave L2 before they are read: two blocks of them, and C, exceed it.

    Args:
        elements: types of A, B and C.
        rows: of C.
        columns: of B.
        has: the caches of the machine.
    """
    _, b, c = elements
    return bool(0 < has.l2 < columns * (2 * MODEL.apart_depth * b.bytes + rows * c.bytes))
