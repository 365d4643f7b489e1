"""Footprints of CPUs' kernels: registers, and the bytes of tiles that caches keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.schedule.parts import ALL
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from portmm.schedule.parts import Tile
    from portmm.schedule.program import Footprint
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom


def footprint(s: Schedule, p: Problem, atom: Atom) -> Footprint:
    """Registers of the largest micro-kernel, and the bytes of each tile.

    A level limits only the tiles that the schedule keeps there: a tile
    whose extents are ALL is streamed through it.
    """
    tiles = {x.level: tile_bytes(x, s, p, atom) for x in s.tiles[1:] if ALL not in (x.m, x.n, x.k)}
    return {"registers": registers(s, atom)} | tiles


def registers(s: Schedule, atom: Atom) -> int:
    """Number of live vector registers, or tiles, of the largest micro-kernel of a schedule."""
    if s.program == "tiles":
        rows, columns = s.mr // atom.m, s.nr // atom.n * s.b.panels
        return rows * columns + rows + 1
    if s.program == "dot":
        return s.mr * s.nr + s.mr + 2
    columns = s.nr // atom.n * s.b.panels
    if s.b.layout == "codes" and not s.b.packed:
        # Sums over a group and over all of k; words, int4 values, a broadcast, a table. Where a group
        # takes few steps, sums over all of k may stay in memory.
        sums = 1 if atom.takes_int4 else 2
        return (max(s.heights) * sums + 2) * columns + 2
    return atom.strips(max(s.heights)) * columns + columns + 1


def tile_bytes(tile: Tile, s: Schedule, p: Problem, atom: Atom) -> int:
    """Bytes that must stay in a tile's level while the tile is computed.

    L1 has a panel of B and a slice of A, or, of a panel that
    is streamed from L2, as much of its depth as fits; L2
    the block of A (MC x KC) and the panels of B that are packed together: Low et al., "Analytical Modeling
    Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016, section 4. L3
    has the block of C (MC x NC) between passes over k.
    """
    m, n = (p.n, p.m) if s.atom.swap else (p.m, p.n)
    depth = -(-p.k // s.atom.kr)
    tm, tn, tk = min(tile.m or m, m), min(tile.n or n, n), min(tile.k or depth, depth)
    a, b = (BY_NAME[x].bytes for x in s.element_types(atom))
    if tile.level == "L1":
        return (s.mr * a + s.nr * s.b.panels * b) * tk
    if tile.level == "L2":
        return (tm * a + max(tn if tile.n else 0, s.nr * s.b.panels) * b) * tk
    return tm * tn * BY_NAME[atom.acc].bytes
