"""Candidates of the program of units that multiply tiles (AMX): register tiles, blockings and packings.

Schedules have C by rows, as those of `cpu_gemm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.schedule.cpu_blocking import (
    base_schedule,
    blocking,
    cache_tiles,
    capacity,
    fits_l2,
    may_pack_once,
    panel_in_l1,
)
from portmm.schedule.parts import AHEAD, ALL, PACKED_ONCE, Parallel
from portmm.spec.dtype import BY_NAME
from portmm.spec.problem import Problem, family
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from portmm.schedule.program import Vectors
    from portmm.schedule.schedule import Schedule
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target


def tiles(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules of units that multiply tiles: R by V of sums, R of A and at least one of B."""
    del vectors
    if not atom.tiled:
        return
    if p.b == "codes" and not p.deterministic and isa.decodes_tiles(atom, p.types[0]):
        yield from _converted(p, atom, isa)
    if p.b != "codes" or (p.types[0] == atom.a and atom.acc == "f32"):
        yield from _panels(p, isa, atom, target)


def _panels(p: Problem, isa: Isa, atom: Atom, target: Target) -> Iterator[Schedule]:
    """Schedules by panels of the unit's own elements."""
    ready = p.b in ("packed", "codes")
    for nr in [family(p.family).nr] if ready else [atom.n, 2 * atom.n][: -(-p.n // atom.n)]:
        v, odd = divmod(nr, atom.n)
        if odd:
            continue
        rows = min(-(-p.m // atom.m), 2, (isa.registers - 1) // (v + 1))
        if rows < 1:
            continue
        mr = rows * atom.m
        base = base_schedule("tiles", p, isa, cache_tiles(mr, nr, ALL, ALL, ALL, 1), True, p.b != "packed")
        if p.static or (p.batch > 1 and fits_l2(p, target)):
            yield replace(base, parallel=Parallel("batch"))
        if p.static:
            continue
        if p.m <= mr:
            far = p.k * p.n * BY_NAME[p.types[1]].bytes > capacity(target, "L2")
            if p.b == "packed" and far:
                base = replace(base, b=base.b.prefetched(MODEL.tiles_ahead))
            yield from _one_tile(base, p, isa, atom, far=far)
            continue
        # Panels of a B that is packed once, or before, come from an outer cache, and the next ones are prefetched.
        for levels in (blocking(p, target, atom, mr, nr, MODEL.tile_depth)[1:], *panel_in_l1(target, atom, mr, nr)):
            s = replace(base, tiles=(base.tiles[0], *levels))
            yield replace(s, c=AHEAD) if p.b == "packed" else s
            if may_pack_once(p, atom):
                yield replace(s, b=s.b.with_pack(PACKED_ONCE), c=AHEAD)


def _converted(p: Problem, atom: Atom, isa: Isa) -> Iterator[Schedule]:
    """Schedules times quantized values that are converted in tiles, four tiles of sums at a time."""
    nr = family(p.family).nr
    if nr % atom.n or (p.group and p.group % atom.k) or p.static:
        return
    for rows, panels in ((1, 4 * atom.n // nr), (2, 2 * atom.n // nr)):
        mr = rows * atom.m
        if panels < 1 or (rows > 1 and p.m <= atom.m) or ("column_sum" in p.fused and panels > 1):
            continue
        block = int(MODEL.int4_tile_block)
        for mc in (ALL, block) if p.m > block else (ALL,):
            tiles = cache_tiles(mr, nr, ALL, mc, ALL, 1)
            base = base_schedule("tiles", p, isa, tiles, True, False)
            yield replace(base, b=base.b.covering(panels))


def _one_tile(base: Schedule, p: Problem, isa: Isa, atom: Atom, *, far: bool) -> Iterator[Schedule]:
    """Schedules for an M of one register tile, by a B that is `far` beyond L2 or not: two panels at once, or one."""
    yield base
    rows, v = base.mr // atom.m, base.nr // atom.n
    if p.b == "codes":
        yield replace(base, tiles=cache_tiles(base.mr, base.nr, MODEL.repack_steps * atom.deep, ALL, ALL, 1))
    # The sums of two panels' columns are not adjacent.
    if p.b == "packed" and far and (2 * v + 1) * rows < isa.registers and "column_sum" not in p.fused:
        yield replace(base, b=base.b.covering(2))
