"""Candidate schedules of CPUs' tile units (AMX)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.schedule.cpu_blocking import base_schedule, blocking, capacity, fits_l2, may_pack_once, uniform_tiles
from portmm.schedule.parts import ALL, PACKED_ONCE, Parallel
from portmm.spec.dtype import BY_NAME
from portmm.spec.problem import family
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.program import Vectors
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target


def candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules of units that multiply tiles: R by V of sums, R of A and at least one of B."""
    del vectors
    ready = p.b in ("packed", "codes")
    widths = [family(p.family).nr] if ready else [atom.n, 2 * atom.n][: -(-p.n // atom.n)]
    for nr in widths if atom.tiled else ():
        v, odd = divmod(nr, atom.n)
        if odd:
            continue
        rows = min(-(-p.m // atom.m), 2, (isa.registers - 1) // (v + 1))
        if rows < 1:
            continue
        mr = rows * atom.m
        base = base_schedule("tiles", p, isa, uniform_tiles(mr, nr, ALL, ALL, ALL, 1), True, p.b != "packed")
        if p.static or (p.batch > 1 and fits_l2(p, target)):
            yield replace(base, parallel=Parallel("batch"))
        if p.static:
            continue
        if p.m <= mr:
            if p.b == "packed" and p.k * p.n * BY_NAME[p.types[1]].bytes > capacity(target, "L2"):
                base = replace(base, b=base.b.prefetched(MODEL.tiles_ahead))
            yield from _thin_tiles(base, p, isa, atom)
            continue
        for depth in MODEL.tile_depths:
            _, *blocks = blocking(p, target, atom, mr, nr, depth)
            s = replace(base, tiles=(base.tiles[0], *blocks))
            yield s
            if may_pack_once(p, atom):
                yield replace(s, b=s.b.with_pack(PACKED_ONCE))


def _thin_tiles(base: Schedule, p: Problem, isa: Isa, atom: Atom) -> Iterator[Schedule]:
    """Schedules for an M of one register tile."""
    yield base
    rows, v = base.mr // atom.m, base.nr // atom.n
    if p.b == "codes":
        yield replace(base, tiles=uniform_tiles(base.mr, base.nr, MODEL.repack_steps * atom.deep, ALL, ALL, 1))
    # The sums of two panels' columns are not adjacent.
    if p.b == "packed" and (2 * v + 1) * rows < isa.registers and "column_sum" not in p.fused:
        yield replace(base, b=base.b.covering(2))
