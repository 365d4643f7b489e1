"""Candidates of the programs of CPUs, gemm, dot and tiles: register tiles, blockings and packings.

Block sizes are those of `cpu_blocking`. Schedules have C by rows, and the widest atom: `candidates` sets others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.schedule.cpu_blocking import (
    a_in_place,
    b_in_place,
    base_schedule,
    blocking,
    both_in_place,
    cache_tiles,
    capacity,
    fits_l2,
    least_of,
    may_pack_once,
    tallest,
    whole_depth,
    widths,
)
from portmm.schedule.cpu_streams import caches, in_pairs, over_panels, packed_inside, ready_panels, shallow, sums_apart
from portmm.schedule.cpu_textbook import blockings, fits
from portmm.schedule.parts import AHEAD, ALL, PACKED, PACKED_ONCE, OperandPlan, Parallel, Staging, Tile
from portmm.schedule.schedule import Schedule, finishes, shifts
from portmm.spec.dtype import BY_NAME, UNCONVERTED
from portmm.spec.problem import Problem, family
from portmm.target.model import CPU as MODEL
from portmm.target.summation import RUN

if TYPE_CHECKING:
    from portmm.schedule.program import Vectors
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

REPACK_DEPTHS = (64, RUN)
"""KC when int4 or int8 values of B are repacked for a few rows: repacked rows stay in L1, or are a run."""
INT4_ROWS = (1, 2, 4, 6, 8, 10, 12, 14)
"""Values of MR for units that are multiplied by a word of quantized values at once."""
DOT_TILES = ((4, 4), (2, 4), (1, 4), (1, 8), (8, 1), (4, 1), (1, 1))
"""MR x NR of the dot program."""
DOT_ROWS = 16
"""M up to which the dot program divides rows into slices of nearly equal heights, where MR does not divide it."""
FEW_COLUMNS = 8
"""Columns of a B by rows, or of a panel, that the dot program copies, at most: fewer than a vector of AVX-512 has."""
OVER_K = Parallel("k")


def candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules of the gemm program."""
    del vectors
    if atom.tiled:
        return
    if p.b == "codes" and atom.takes_int4:
        yield from _int4_interleaved(p, isa, atom, target)
        return
    if p.static or (p.batch > 1 and fits_l2(p, target)):
        yield from _whole(p, isa, atom, target)
    if not p.static:
        yield from _thin(p, isa, atom, target)
        yield from _blocked(p, isa, atom, target)


def dots(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules of the dot program: both operands along k, or a B of a few columns that are copied."""
    del target, vectors
    if atom.tiled:
        return
    panel = family(p.family).nr if p.b == "packed" else 0
    copied = p.n <= FEW_COLUMNS and p.dtype in UNCONVERTED and (p.b == "row" or p.n <= panel)
    if p.deterministic or p.fused or p.a != "row" or not (copied or p.b == "col"):
        return
    if atom.n > 1 and not (isa.shuffles or atom.reduce):
        return
    # Without masks, the remainder of k is added to C one by one, rounded each time.
    rounds = p.types[2] != atom.acc and not atom.mask and atom.n > 1
    # Vectors of integers have units.
    if atom.k_pack > 1 or rounds or (atom.acc == "s32" and (atom.n > 1 or p.types[2] != atom.acc)):
        return
    n = max(1, p.n)
    few = min(n, 3 if n == 6 else 4)
    # With all columns in a tile, A is read once.
    narrow = ((4, few), (2, few), (1, few), (2, n), (1, n))
    tiles_of = narrow if copied else (*DOT_TILES, *narrow, (3, few)) if n <= FEW_COLUMNS else (*DOT_TILES, (3, 4))
    for mr, nr in dict.fromkeys(tiles_of):
        if (mr <= p.m and nr <= p.n) or mr == nr == 1:
            # Of few rows, slices are of nearly equal heights: single rows wait for each addition.
            even = not copied and mr < p.m <= DOT_ROWS and p.m % mr
            registers = Tile("registers", mr, nr, atom.n, least_of(mr) if even else 0)
            _, l1, *outer = cache_tiles(mr, nr, ALL, ALL, nr, near=panel)
            yield base_schedule("dot", p, isa, (registers, l1._replace(m=ALL), *outer), False, copied)


def _blocked(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules for large products: A and B packed, or either read in place."""
    depth = -(-p.k // atom.k_pack)
    split = not p.deterministic and p.k > MODEL.split_depth * max(p.m, p.n)
    for nr in widths(isa, atom, p):
        top = tallest(isa, atom, nr)
        yield from shallow(p, isa, atom, target, nr)
        yield from sums_apart(p, isa, atom, target, nr)
        yield from over_panels(p, isa, atom, nr, caches(target))
        yield from packed_inside(p, isa, atom, target, nr)
        yield from ready_panels(p, isa, atom, target, nr)
        for mr in dict.fromkeys((top, top - 2, min(top, MODEL.in_place_rows))):
            if mr < 1 or p.m <= mr:
                continue
            tiles = whole_depth(
                p, depth, blocking(p, target, atom, mr, nr, MODEL.deep if p.b == "packed" else MODEL.shallow)
            )
            base = replace(base_schedule("gemm", p, isa, tiles, False, False), c=AHEAD)
            if may_pack_once(p, atom):
                deep = replace(base, tiles=whole_depth(p, depth, blocking(p, target, atom, mr, nr, MODEL.deep)))
                yield from (s for s in _packings(deep, p, isa, atom, PACKED_ONCE) if s.b.once)
            ready = p.b == "packed"
            far_off = ready and p.k * p.n * p.elements[1].bytes > MODEL.panels_near * capacity(target, "L2")
            followed = not target.tile_prefetch and (p.dtype in UNCONVERTED or (ready and not far_off))
            plain = replace(base, c=OperandPlan())
            if followed and not far_off:
                base = plain
            for s in _packings(base, p, isa, atom):
                if followed and far_off and not s.a.packed:
                    continue  # panels from memory are prefetched, and A in place would be with them
                yield from _shared(s, split and depth > 2 * s.kc and _adds_up(s, p, atom))
            if base.c.stagings and p.dtype in UNCONVERTED and (p.n <= nr or p.bytes <= capacity(target, "L2")):
                # Operands in L2, and rows of A beside one panel, need no prefetches, each of which takes a load slot in
                # every step of k (Granite Rapids, prepacked: 300x10x3856 1.3, 4096x24x512 1.27, 512x32x4096 1.08).
                yield from (x for s in _packings(plain, p, isa, atom) for x in _shared(s, False))
            yield from _textbook(base, p, isa, atom, target)
            if both_in_place(p, isa, atom, nr) and p.m <= MODEL.few_rows:
                stream = tuple([t._replace(k=min(t.k, 2 * MODEL.stream_depths[-1])) for t in base.tiles[1:]])
                yield replace(base, tiles=(base.tiles[0], *stream))


def _shared(s: Schedule, split: bool) -> Iterator[Schedule]:
    """A schedule, perhaps with k split among threads, or with blocks of few rows to share where panels of B are few."""
    yield s
    if split:
        yield replace(s, parallel=OVER_K)
    if not (s.a.packed or s.b.packed):
        rows = MODEL.short_blocks * s.mr
        yield replace(s, tiles=tuple([t._replace(m=rows) if t.level in ("L2", "L3") else t for t in s.tiles]))


def _textbook(base: Schedule, p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules with the same register tile and block sizes of the literature, if it has the largest MR.

    C is prefetched: with all of L2 for A and B it comes from L3 or memory. Zen 5, 2048 and 3072 cubed: 207 -> 224
    GFLOP/s; 640 cubed runs alike.
    """
    base = replace(base, c=AHEAD)
    top = tallest(isa, atom, base.nr)
    for tiles in blockings(p, target, atom, base.mr, base.nr):
        for s in _packings(replace(base, tiles=tiles), p, isa, atom):
            if s.mr == (top if s.a.packed else min(top, MODEL.in_place_rows)) and fits(s, p, atom):
                yield s


def _packings(s: Schedule, p: Problem, isa: Isa, atom: Atom, pack_b: Staging = PACKED) -> Iterator[Schedule]:
    """Variants of a schedule: both operands packed, or those that can be read in place left there."""
    a, b = s.a.with_pack(None), s.b.with_pack(None)
    s = replace(s, a=a.with_pack(PACKED), b=b if p.b == "packed" else b.with_pack(pack_b))
    yield s
    # Measured for floats that are not converted; a static kernel has the strides of A as constants.
    few = s.mr <= MODEL.in_place_rows or p.a == "col" or p.static
    if (few or p.dtype in UNCONVERTED) and a_in_place(p, isa, atom):
        yield replace(s, a=a)
        # With a stride of B, too, 14 rows by 32 columns take 1.07 of the time of 12 (Granite Rapids, 65536x32x32).
        if few and b_in_place(p, isa, atom, s.nr):
            yield replace(s, a=a, b=b)


def _adds_up(s: Schedule, p: Problem, atom: Atom) -> bool:
    """Whether C is the sum over blocks of k alone, with no step at the start or the end that must happen once."""
    return not (p.fused or finishes(s, atom) or shifts(s, atom))


def _thin(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules for an M of a few rows: every row in registers, B is streamed once."""
    if p.m > MODEL.thin_rows:
        return
    if p.b == "codes" and not p.deterministic:
        yield from _decoded(p, isa, atom, target)
    every = widths(isa, atom, p)
    # B is read twice by two slices: of three vectors, one with all rows is faster than two that are wider.
    whole = any(p.m <= tallest(isa, atom, nr) and nr >= 3 * isa.columns(atom) for nr in every)
    for nr in every:
        if p.m > tallest(isa, atom, nr):
            # The rows of B are still in L2 when the second slice reads them; prefetches would ask for them twice.
            if p.m <= 2 * tallest(isa, atom, nr) and not whole and in_pairs(nr, isa, atom):
                tiles = cache_tiles(-(-p.m // 2), nr, ALL, ALL, ALL, p.m // 2)
                yield from _swept(base_schedule("gemm", p, isa, tiles, True, False), p, isa, atom, 0)
            continue
        most = max(1, tallest(isa, atom, nr) // p.m) if p.b == "packed" else 1
        if "column_sum" in p.fused:
            most = 1  # the sums of two panels' columns are not adjacent
        for panels in dict.fromkeys((1, min(2, most), min(4, most), min(8, most))):
            base = base_schedule("gemm", p, isa, cache_tiles(p.m, nr, ALL, ALL, ALL), True, True)
            base = replace(base, b=base.b.covering(panels))
            if p.b == "codes":
                depths = (replace(base, tiles=cache_tiles(p.m, nr, kc, ALL, ALL)) for kc in REPACK_DEPTHS)
                yield from (s for one in depths for s in _packings(one, p, isa, atom))
            else:
                yield from _of_panels(base, p, isa, atom, target)
                yield from _streamed(base, p, isa, atom, target.rows_ahead)


def _of_panels(base: Schedule, p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules with all rows in registers by panels of all of k, those from afar perhaps prefetched along the panel.

    A core's window of instructions holds the fewer lines of B the more rows multiply each, and of one whose elements
    are widened, for any number of rows: several panels of these are prefetched from L3, too. Few rows are multiplied by
    several panels at once instead, or, where registers suffice for one, by a panel that is prefetched.
    """
    if atom.k_pack > 1 and p.b == "row":
        return
    size, few, near = p.elements[1].bytes, p.m <= MODEL.panel_rows, capacity(target, "L2")
    widened, lone = size < BY_NAME[atom.right].bytes, 2 * p.m >= tallest(isa, atom, base.nr)
    if base.b.panels > 1:
        ahead, far, distance = few and widened, near, MODEL.several_ahead
    else:
        ahead, far = widened or lone or not few, min(caches(target).far, MODEL.panels_far * near)
        distance = MODEL.widened_ahead if few and widened else MODEL.panel_ahead
    if ahead and p.b == "packed" and p.k * p.n * size > far:
        base = replace(base, b=base.b.prefetched(0, distance // (size * atom.k_pack)))
    yield from _packings(base, p, isa, atom)


def _streamed(base: Schedule, p: Problem, isa: Isa, atom: Atom, rows_ahead: int) -> Iterator[Schedule]:
    """Schedules with B in place, streamed a few rows at a time; or, of units, interleaved a few rows at a time.

    Whole columns of units are not interleaved: each row would be a miss for a few bytes.
    """
    nr = base.nr
    if atom.k_pack > 1 and p.b == "row":
        near = max(1, MODEL.run_bytes // (nr * BY_NAME[p.types[1]].bytes)) * nr
        for kc in MODEL.interleaved_depths:
            yield replace(base, tiles=cache_tiles(p.m, nr, kc, ALL, ALL, near=near))
    if b_in_place(p, isa, atom, nr):
        yield replace(base, b=base.b.with_pack(None))
        yield from _swept(base, p, isa, atom, rows_ahead)


def _swept(base: Schedule, p: Problem, isa: Isa, atom: Atom, rows_ahead: int) -> Iterator[Schedule]:
    """Schedules with A and B in place, that stream a few rows of B at a time, alone or with a prefetch of as many."""
    if not both_in_place(p, isa, atom, base.nr):
        return
    followed = [(kc, 0) for kc in MODEL.stream_depths]
    for kc, prefetch in (*followed, *((kc, kc) for kc in MODEL.ahead_depths if kc <= rows_ahead)):
        tiles = (base.tiles[0], *cache_tiles(base.mr, base.nr, kc, ALL, ALL)[1:])
        s = replace(base, tiles=tiles, a=base.a.with_pack(None), b=base.b.with_pack(None).prefetched(prefetch))
        yield s
        if not p.deterministic and p.k > MODEL.split_steps * kc and _adds_up(s, p, atom):
            yield replace(s, parallel=OVER_K)


def _decoded(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules for an M of a few rows, times quantized values without repacking, a few rows at a time."""
    for nr in widths(isa, atom, p):
        for mr in range(min(p.m, MODEL.decoded_rows), 0, -1):  # illegal ones, of too many registers, are dropped later
            for base in _int4_schedules(p, isa, target, mr, nr):
                yield base
                if p.a == "row" and a_in_place(p, isa, atom):
                    yield replace(base, a=base.a.with_pack(None))


def _int4_interleaved(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules for any M, times quantized values without repacking: units of integers or of bf16.

    The unused part of the last word along k has values of zero, so the integers of A there
    are arbitrary, if they can be read: A is packed.
    """
    for nr in widths(isa, atom, p):
        for mr in dict.fromkeys(min(p.m, x) for x in INT4_ROWS):
            yield from _int4_schedules(p, isa, target, mr, nr)
            if p.m > MODEL.int4_block:
                yield from _int4_schedules(p, isa, target, mr, nr, MODEL.int4_block // mr * mr)


def _int4_schedules(  # noqa: PLR0917 - two callers
    p: Problem, isa: Isa, target: Target, mr: int, nr: int, mc: int = ALL
) -> Iterator[Schedule]:
    """Schedules of register tiles by panels of int4 values.

    Panels that exceed L2, and that one tile alone reads, are prefetched, perhaps two at once: memory is read faster in
    two places.
    """
    tiles = cache_tiles(mr, nr, ALL, mc, ALL, 0 if p.m <= mr else least_of(mr))
    s = base_schedule("gemm", p, isa, tiles, True, False)
    if p.m > mr or p.k * p.n * BY_NAME[p.types[1]].bytes <= capacity(target, "L2"):
        yield s
        return
    for panels in (1, 2, 4):
        yield replace(s, b=s.b.prefetched(0, MODEL.several_ahead // BY_NAME["s32"].bytes).covering(panels))


def _whole(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules for products that fit a private cache: no loop over blocks, one item after the other."""
    # A batch that does not stay in L2 is prefetched an item ahead.
    ahead = p.bytes > capacity(target, "L2") and p.bytes > MODEL.few_bytes * p.batch
    for nr in widths(isa, atom, p):
        top, all_rows = tallest(isa, atom, nr), (isa.registers - 1) * atom.n // nr - 1
        limits = (top, min(top, MODEL.in_place_rows), *((p.m,) if p.static and top < p.m <= all_rows else ()))
        for limit in dict.fromkeys(limits):
            slices = -(-p.m // limit)
            # The tallest of equal slices; a kernel for any M keeps the limit itself.
            mr = -(-p.m // slices) if p.static or slices == 1 else limit
            least = p.m // slices if p.static or slices == 1 else least_of(mr)
            base = base_schedule("gemm", p, isa, cache_tiles(mr, nr, ALL, ALL, ALL, least), False, False, "batch")
            yield from _packings(replace(base, c=AHEAD) if ahead else base, p, isa, atom)
