"""Block sizes of the literature, which are within a few per cent of the best on any CPU.

Owns these block sizes, and the rule that selects them on a chip without stored searches. A is packed by blocks, B
just before use; block sizes follow from capacities alone (Goto & van de Geijn, ACM TOMS 34(3), 2008; Low et al.,
"Analytical Modeling Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from portmm.schedule.cpu_blocking import cache_tiles, least_of
from portmm.schedule.parts import ALL, Tile
from portmm.spec.dtype import BY_NAME, size
from portmm.target.model import CPU as MODEL
from portmm.target.summation import RUN

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.target import Target

DEPTH = RUN
"""KC, in elements: one run. The panels of 6x16 and 4x24 floats take 27 and 35 KiB, for an L1 of 32 KiB. On Zen 4
with AVX2 256, 320 and 384 are within 2 % of each other; 320 is also OpenBLAS's for Haswell."""
PANELS = 2
"""Panels of B that are packed together: at least two lines of each row, which prefetchers fetch in pairs."""
VECTORS = (2, 3)
"""Vectors of a row of a register tile: 6x16 and 4x24 of AVX2. With fewer, B is loaded too often; with more, A."""
MOST_VECTORS = 4
"""The same for an A in place, of which few rows can be addressed: 6x64 of AVX-512."""
ORIGIN = "textbook"
"""Name of the origin of a selection by the rule below."""


def blockings(p: Problem, target: Target, atom: Atom, mr: int, nr: int) -> tuple[tuple[Tile, ...], ...]:
    """Tiles of a schedule that packs B just before use, one for each part of L2.

    Empty for a register tile that is too narrow, or too wide, to be a textbook's. KC counts units of k. Where an
    epilogue follows, all of k is one block unless that is much deeper: sums of several blocks are stored in scratch.

    Args:
        p: the problem, with C by rows.
        target: the machine.
        atom: its multiply-add.
        mr: rows of the register tile.
        nr: its columns.
    """
    if not VECTORS[0] <= nr // atom.n <= MOST_VECTORS:
        return ()
    a, b = (BY_NAME[x].bytes for x in (atom.left, atom.right))
    l1, l2, l3 = (target.counted(x) for x in ("L1", "L2", "L3"))
    l2 = l2 or 8 * l1
    fits = max(1, l1 // (mr * a + nr * b))
    kc = max(1, min(DEPTH // atom.k_pack, int(MODEL.beyond_l1 * fits)) // atom.deep) * atom.deep
    depth = -(-p.k // atom.k_pack)
    whole = bool(p.fused) and kc < depth <= MODEL.whole_depth * kc
    near = PANELS * nr
    nc = max(1, max(l2, l3 or 8 * l2) // (kc * b) // near) * near
    variants = []
    for part in MODEL.part_of_l2:
        mc = max(mr, (int(part * l2) // (depth if whole else kc) - near * b) // a // mr * mr)
        k = ALL if whole else kc
        first = ALL if whole else min(fits, kc)
        variants.append(cache_tiles(mr, nr, k, mc, nc, least_of(mr), first=first, near=near))
    return tuple(dict.fromkeys(variants))


def fits(s: Schedule, p: Problem, atom: Atom) -> bool:
    """Whether a schedule with these tiles packs as the literature does: B just before use, and A if it is reused.

    Args:
        s: the schedule.
        p: the problem, with C by rows.
        atom: its multiply-add.
    """
    if s.b.layout in ("packed", "codes") or not s.b.packed or s.b.once or s.parallel.over != "tiles":
        return False
    return s.nr // atom.n in VECTORS if s.a.packed else p.n <= MODEL.few_vectors * atom.n


def follows(s: Schedule, p: Problem, target: Target) -> bool:
    """Whether a schedule for a problem is a textbook's."""
    if s.program != "gemm" or s.tiles[2].n != PANELS * s.nr:
        return False
    atom = target.atom(s.isa, s.dtype, s.atom.lanes)
    q = p.transposed() if s.atom.swap else p
    return atom is not None and fits(s, q, atom) and s.tiles in blockings(q, target, atom, s.mr, s.nr)


def preferred(
    ranked: Sequence[tuple[float, Schedule]], p: Problem, target: Target, textbook: Sequence[bool] | None = None
) -> int:
    """Index of the selected candidate, of candidates by predicted time.

    On a chip whose searches are stored it is the first of those that were searched: the model was fitted to these,
    and textbook blockings were not among them. On any other chip the model separates products that need blocks from
    others, but ranks blockings poorly. So where K is not short and the best candidate has blocks of rows
    and columns, and does not stream B in place in long runs, the first textbook blocking for the same unit is selected
    if it is predicted within `MODEL.within` of it. Sweeps of panels have all rows in a block, panels that are
    packed inside a micro-kernel all columns, and they stay.

    Args:
        ranked: predicted seconds and schedules.
        p: their problem.
        target: the machine.
        textbook: flags of the schedules that follow a textbook, if known.
    """
    if target.searches:
        return next((i for i, (_, s) in enumerate(ranked) if not follows(s, p, target)), 0)
    least, best = ranked[0]
    if p.k < MODEL.short * DEPTH or best.program != "gemm" or ALL in (best.mc, best.nc):
        return 0
    if not best.b.packed and best.b.layout == "row" and best.nr * size(best.types[1]) >= MODEL.long_run:
        return 0
    for i, (seconds, s) in enumerate(ranked):
        if least < MODEL.within * seconds:
            break
        if (s.isa, s.atom.kr) == (best.isa, best.atom.kr) and (
            follows(s, p, target) if textbook is None else textbook[i]
        ):
            return i
    return 0
