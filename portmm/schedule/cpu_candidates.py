"""Candidate schedules for a problem on a CPU.

Owns the enumeration: which block programs, register tiles, blockings and
packings are tried. All candidates are legal. Block sizes are those of `cpu_blocking`;
candidates of tile units are in `cpu_tile_candidates`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.schedule.cpu_blocking import (
    DEEP,
    IN_PLACE_ROWS,
    RUN_BYTES,
    SHALLOW,
    base_schedule,
    blocking,
    capacity,
    fits_l2,
    least_of,
    may_pack_once,
    tallest,
    uniform_tiles,
    whole_depth,
    widths,
)
from portmm.schedule.cpu_textbook import blockings, fits
from portmm.schedule.cpu_tile_candidates import tile_schedules
from portmm.schedule.legality import illegal
from portmm.schedule.parts import ALL, PACKED, PACKED_ONCE, PREFETCHED, AtomUse, OperandPlan, Parallel, Staging, Tile
from portmm.schedule.schedule import Schedule, finishes, shifts
from portmm.spec.dtype import BY_NAME, unit
from portmm.spec.epilogue import parse
from portmm.spec.problem import family
from portmm.target.summation import RUN
from portmm.target.supports import lacks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

STREAM_DEPTHS = (8, 32)
"""KC when B is streamed in place: few rows, so that each is read along its length."""
ROWS_AHEAD_FROM = 3
"""M from which the next rows of a streamed B are prefetched. On Zen 5 that took 1.17 and 1.30 of the time at
M = 1 and 2, where loads alone keep up with memory, and 0.95 to 0.78 at M = 3 to 8 (N = K = 4096)."""
REPACK_DEPTHS = (64, RUN)
"""KC when int4 or int8 values of B are repacked for a few rows: repacked rows stay in L1, or are a run."""
INTERLEAVED_DEPTHS = (8, 32)
"""KC, in units, when B is interleaved for a few rows: long runs of a few rows at a time."""
DEINT4_ROWS = 4
"""Rows of A that are multiplied by quantized values without repacking; for more, repacking first is faster."""
INT4_ROWS = (1, 2, 4, 6, 8, 10, 12, 14)
"""Values of MR for units that are multiplied by a word of quantized values at once."""
INT4_BLOCK = 256
"""MC that keeps units of A in L2 while panels of quantized values are streamed."""
THIN_ROWS = 16
"""M up to which all of A stays in registers or L1 and B is streamed once."""
PACKED_VECTORS = 2
"""Width of a prepacked panel: with two vectors, 14 rows fit 32 registers, so that
a weight is streamed once for M up to 14, and a large M still runs at full rate."""
DOT_TILES = ((4, 4), (2, 4), (1, 4), (1, 8), (4, 1), (1, 1))
"""MR x NR of the dot program."""
FEW_ROWS = 64
"""M up to which a B in place may be better streamed than packed."""
FEW_BYTES = 2048
"""Bytes of an item of a batch up to which the hardware prefetcher is fast enough."""
SPLIT_DEPTH = 16
"""K per M or N from which threads may share k: C is then small compared with the operands."""
SPLIT_STEPS = 16
"""Blocks of k from which threads may share a stream along k."""
STATIC_LIMIT = 64
"""Largest dimension for which sizes are compiled in."""

AHEAD = OperandPlan(stagings=(PREFETCHED,))
OVER_K = Parallel("k")


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
            for s in _programs(q, isa, x, target):
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


def _programs(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    if atom.tiled:
        yield from tile_schedules(p, isa, atom, target)
        return
    if p.b == "codes" and atom.takes_int4:
        yield from _int4_interleaved(p, isa, atom)
        return
    if p.static or (p.batch > 1 and fits_l2(p, target)):
        yield from _whole(p, isa, atom, target)
    if not p.static:
        yield from _thin(p, isa, atom, target.rows_ahead)
        yield from _dots(p, isa, atom)
        yield from _blocked(p, isa, atom, target)


def _blocked(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules for large products: A and B packed, or either read in place."""
    depth = -(-p.k // atom.k_pack)
    split = not p.deterministic and p.k > SPLIT_DEPTH * max(p.m, p.n)
    for nr in widths(isa, atom, p):
        top = tallest(isa, atom, nr)
        for mr in dict.fromkeys((top, top - 2, min(top, IN_PLACE_ROWS))):
            if mr < 1 or p.m <= mr:
                continue
            tiles = whole_depth(p, depth, blocking(p, target, atom, mr, nr, DEEP if p.b == "packed" else SHALLOW))
            base = replace(base_schedule("gemm", p, isa, tiles, False, False), c=AHEAD)
            if may_pack_once(p, atom):
                deep = replace(base, tiles=whole_depth(p, depth, blocking(p, target, atom, mr, nr, DEEP)))
                yield from (s for s in _packings(deep, p, isa, atom, PACKED_ONCE) if s.b.once)
            for s in _packings(base, p, isa, atom):
                yield s
                if split and depth > 2 * s.kc and _adds_up(s, p, atom):
                    yield replace(s, parallel=OVER_K)
            yield from _textbook(base, p, isa, atom, target)
            if _both_in_place(p, isa, atom, nr) and mr <= IN_PLACE_ROWS and p.m <= FEW_ROWS:
                stream = tuple([t._replace(k=min(t.k, 2 * STREAM_DEPTHS[-1])) for t in base.tiles[1:]])
                yield replace(base, tiles=(base.tiles[0], *stream))


def _textbook(base: Schedule, p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules with the same register tile and block sizes of the literature, if it has the largest MR."""
    top = tallest(isa, atom, base.nr)
    for tiles in blockings(p, target, atom, base.mr, base.nr):
        for s in _packings(replace(base, tiles=tiles), p, isa, atom):
            if s.mr == (top if s.a.packed else min(top, IN_PLACE_ROWS)) and fits(s, p, atom):
                yield s


def _packings(s: Schedule, p: Problem, isa: Isa, atom: Atom, pack_b: Staging = PACKED) -> Iterator[Schedule]:
    """Variants of a schedule: both operands packed, or those that can be read in place left there."""
    a, b = s.a.with_pack(None), s.b.with_pack(None)
    s = replace(s, a=a.with_pack(PACKED), b=b if p.b == "packed" else b.with_pack(pack_b))
    yield s
    # A static kernel has the strides of A as constants, and so no rows to address.
    few = p.a == "col" or (p.a == "row" and (s.mr <= IN_PLACE_ROWS or p.static))
    if few and _a_in_place(p, isa, atom):
        yield replace(s, a=a)
        if _in_place(p, isa, atom, s.nr):
            yield replace(s, a=a, b=b)


def _adds_up(s: Schedule, p: Problem, atom: Atom) -> bool:
    """Whether C is the sum over blocks of k alone, with no step at the start or the end that must happen once."""
    return not (p.post or p.fused or finishes(s, atom) or shifts(s, atom))


def _a_in_place(p: Problem, isa: Isa, atom: Atom) -> bool:
    """Whether left fragments can be read from A in place: no units, and a conversion if one is needed."""
    return p.a != "any" and atom.k_pack == 1 and bool(isa.spelling(atom, "load_a", p.types[0]))


def _in_place(p: Problem, isa: Isa, atom: Atom, nr: int) -> bool:
    """Whether B can be read in place: rows along n, and no read past the last column."""
    if p.b != "row" or atom.k_pack > 1 or not isa.spelling(atom, "load_b", p.types[1]):
        return False
    return p.n % nr == 0 or bool(atom.mask and isa.spelling(atom, "load_mask", p.types[1]))


def _both_in_place(p: Problem, isa: Isa, atom: Atom, nr: int) -> bool:
    return _in_place(p, isa, atom, nr) and _a_in_place(p, isa, atom)


def _thin(p: Problem, isa: Isa, atom: Atom, rows_ahead: int) -> Iterator[Schedule]:
    """Schedules for an M of a few rows: every row in registers, B is streamed once."""
    if p.m > THIN_ROWS:
        return
    if p.b == "codes" and not p.deterministic:
        yield from _decoded(p, isa, atom)
    for nr in widths(isa, atom, p):
        if p.m > tallest(isa, atom, nr):
            continue
        most = max(1, tallest(isa, atom, nr) // p.m) if p.b == "packed" else 1
        if "azero" in p.post:
            most = 1  # the sums of two panels' columns are not adjacent
        for panels in dict.fromkeys((1, min(2, most), min(4, most), min(8, most))):
            base = base_schedule("gemm", p, isa, uniform_tiles(p.m, nr, ALL, ALL, ALL), True, True)
            base = replace(base, b=base.b.covering(panels))
            if p.b == "codes":
                depths = (replace(base, tiles=uniform_tiles(p.m, nr, kc, ALL, ALL)) for kc in REPACK_DEPTHS)
                yield from (s for one in depths for s in _packings(one, p, isa, atom))
            else:
                if atom.k_pack == 1 or p.b != "row":
                    yield from _packings(base, p, isa, atom)
                yield from _streamed(base, p, isa, atom, rows_ahead)


def _streamed(base: Schedule, p: Problem, isa: Isa, atom: Atom, rows_ahead: int) -> Iterator[Schedule]:
    """Schedules with B in place, streamed a few rows at a time; or, of units, interleaved a few rows at a time.

    Whole columns of units are not interleaved: each row would be a miss for a few bytes.
    """
    nr = base.nr
    if atom.k_pack > 1 and p.b == "row":
        near = max(1, RUN_BYTES // (nr * BY_NAME[p.types[1]].bytes)) * nr
        for kc in INTERLEAVED_DEPTHS:
            tiles = uniform_tiles(p.m, nr, kc, ALL, ALL)
            yield replace(base, tiles=(*tiles[:2], tiles[2]._replace(n=near), tiles[3]))
    if not _in_place(p, isa, atom, nr):
        return
    in_place = replace(base, b=base.b.with_pack(None))
    yield in_place
    if not _a_in_place(p, isa, atom):
        return
    for kc in STREAM_DEPTHS:
        tiles = uniform_tiles(p.m, nr, kc, ALL, ALL)
        prefetch = rows_ahead if p.m >= ROWS_AHEAD_FROM else 0
        s = replace(in_place, tiles=tiles, a=base.a.with_pack(None), b=in_place.b.prefetched(prefetch))
        yield s
        if not p.deterministic and p.k > SPLIT_STEPS * kc and _adds_up(s, p, atom):
            yield replace(s, parallel=OVER_K)


def _decoded(p: Problem, isa: Isa, atom: Atom) -> Iterator[Schedule]:
    """Schedules for an M of a few rows, times quantized values without repacking, a few rows at a time."""
    for nr in widths(isa, atom, p):
        for mr in range(min(p.m, DEINT4_ROWS), 0, -1):  # illegal ones, of too many registers, are dropped later
            base = _int4_schedule(p, isa, mr, nr)
            yield base
            if p.a == "row" and _a_in_place(p, isa, atom):
                yield replace(base, a=base.a.with_pack(None))


def _int4_interleaved(p: Problem, isa: Isa, atom: Atom) -> Iterator[Schedule]:
    """Schedules for any M, times quantized values without repacking: units of integers or of bf16.

    The unused part of the last word along k has values of zero, so the integers of A there
    are arbitrary, if they can be read: A is packed.
    """
    for nr in widths(isa, atom, p):
        for mr in dict.fromkeys(min(p.m, x) for x in INT4_ROWS):
            yield _int4_schedule(p, isa, mr, nr)
            if p.m > INT4_BLOCK:
                yield _int4_schedule(p, isa, mr, nr, INT4_BLOCK // mr * mr)


def _int4_schedule(p: Problem, isa: Isa, mr: int, nr: int, mc: int = ALL) -> Schedule:
    tiles = uniform_tiles(mr, nr, ALL, mc, ALL, 0 if p.m <= mr else least_of(mr))
    return base_schedule("gemm", p, isa, tiles, True, False)


def _dots(p: Problem, isa: Isa, atom: Atom) -> Iterator[Schedule]:
    """Schedules of the dot program: both operands along k, and k long enough to sum over lanes."""
    if p.deterministic or p.fused or p.a != "row" or p.b != "col" or (atom.n > 1 and not (isa.shuffles or atom.reduce)):
        return
    # Without masks, the remainder of k is added to C one by one, rounded each time.
    rounds = p.types[2] != atom.acc and not atom.mask and atom.n > 1
    # Vectors of integers have units.
    if atom.k_pack > 1 or rounds or (atom.acc == "s32" and (atom.n > 1 or p.types[2] != atom.acc)):
        return
    for mr, nr in DOT_TILES:
        if (mr <= p.m and nr <= p.n) or mr == nr == 1:
            tiles = (Tile("registers", mr, nr, atom.n), *(Tile(x, ALL, nr, ALL) for x in ("L1", "L2", "L3")))
            yield base_schedule("dot", p, isa, tiles, False, False)


def _whole(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules for products that fit a private cache: no loop over blocks, one item after the other."""
    # A batch that does not stay in L2 is prefetched an item ahead.
    ahead = p.bytes > capacity(target, "L2") and p.bytes > FEW_BYTES * p.batch
    for nr in widths(isa, atom, p):
        top = tallest(isa, atom, nr)
        for limit in dict.fromkeys((top, min(top, IN_PLACE_ROWS))):
            slices = -(-p.m // limit)
            # The tallest of equal slices; a kernel for any M keeps the limit itself.
            mr = -(-p.m // slices) if p.static or slices == 1 else limit
            least = p.m // slices if p.static or slices == 1 else least_of(mr)
            base = base_schedule("gemm", p, isa, uniform_tiles(mr, nr, ALL, ALL, ALL, least), False, False, "batch")
            yield from _packings(replace(base, c=AHEAD) if ahead else base, p, isa, atom)
