"""Block sizes of CPU schedules: register tiles from the number of registers, blocks from the capacities of caches.

Owns these, and what kernels need of each level.

They depend on the target only, never on the problem, so that a handful of kernels serves every shape. With V vectors of
B per row, MR = (registers - V - 1) / V rows of accumulators leave room for V of B and one broadcast. KC, MC and NC
follow from the capacities of L1, L2 and L3 (Low et al. 2016).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from portmm.schedule.parts import ALL, PACKED, OperandPlan, Parallel, Tile
from portmm.schedule.schedule import Schedule
from portmm.spec.dtype import BY_NAME, UNCONVERTED, unit
from portmm.spec.problem import Problem, family
from portmm.target.model import CPU as MODEL
from portmm.target.summation import depth as whole_run

if TYPE_CHECKING:
    from portmm.schedule.program import Footprint
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target


def widths(isa: Isa, atom: Atom, p: Problem) -> list[int]:
    """Values of NR that suit the problem."""
    vector = isa.columns(atom)
    if p.b in ("packed", "codes"):
        nr = family(p.family).nr
        return [nr] if nr % vector == 0 and tallest(isa, atom, nr) else []
    needed = -(-p.n // vector)
    most = 4 if isa.registers >= 32 else 3
    # Five vectors in one tile: in two tiles, of six or eight vectors, a sixth or more is lost.
    most += most == 4 and needed == most + 1 and p.dtype in UNCONVERTED
    return [v * vector for v in range(1, most + 1) if v <= max(1, needed) and tallest(isa, atom, v * vector)]


def tallest(isa: Isa, atom: Atom, nr: int) -> int:
    """Largest MR: rows of accumulators that fit the registers with NR columns of B and a left fragment."""
    v = nr // atom.n
    return int(min(MODEL.tallest, (isa.registers - v - 1) // v) * atom.m)


def least_of(mr: int) -> int:
    """Least MR variant for more than MR rows: an even partition has slices of about MR/2 to MR rows."""
    return (mr + 1) // 2


def cache_tiles(  # noqa: PLR0917 - a tile is two numbers
    mr: int, nr: int, kc: int, mc: int, nc: int, least: int = 0, *, first: int | None = None, near: int = 0
) -> tuple[Tile, ...]:
    """Tiles of all levels, of blocks of MC x NC x KC; the least variant of the micro-kernel has `least` rows.

    KC is that of all caches, but for L1 where it has another depth, `first`; L2 has one panel, or `near` columns.
    """
    registers = Tile("registers", mr, nr, 1, least if least < mr else 0)
    l1 = Tile("L1", mr, nr, kc if first is None else first)
    return (registers, l1, Tile("L2", mc, near or nr, kc), Tile("L3", mc, nc, kc))


def base_schedule(  # noqa: PLR0917 - parts of one record
    program: str, p: Problem, isa: Isa, tiles: tuple[Tile, ...], pack_a: bool, pack_b: bool, over: str = "tiles"
) -> Schedule:
    """A schedule for a problem, with C by rows, of the ISA's widest atom."""
    a, b = (PACKED,) if pack_a else (), (PACKED,) if pack_b else ()
    return Schedule(
        program, isa.name, p.dtype, tiles, a=OperandPlan(p.a, a, 0, p.source),
        b=OperandPlan(p.b, b, p.group, "", p.symmetric, p.e2m1, p.half),
        parallel=Parallel(over), epilogue=p.fused, static=(p.m, p.n, p.k) if p.static else None,
    )  # fmt: skip


def blocking(  # noqa: PLR0917 - a tile is two numbers
    p: Problem, target: Target, atom: Atom, mr: int, nr: int, depth: float
) -> tuple[Tile, ...]:
    """Tiles that fill the caches, KC being `depth` times the depth that fits L1 with a slice of A.

    KC counts fragments' units of k, and all sizes are those of fragments.
    """
    in_b = unit(p.types[1], atom.k_pack) if p.b == "packed" else atom.right
    a, b, c = (BY_NAME[x].bytes for x in (atom.left, in_b, atom.acc))
    l1, l2, l3 = (capacity(target, x) for x in ("L1", "L2", "L3"))
    fits = max(1, l1 // (mr * a + nr * b))
    room = l2 or 8 * l1
    most = room // (mr * a + nr * b)
    kc = whole_run(max(atom.deep, (int(fits * depth) if l2 else fits) // atom.deep * atom.deep), atom, most)
    mc = max(mr, int(room // (kc * a) * MODEL.a_share) // mr * mr)
    near = max(1, min(MODEL.run_bytes // (nr * b), int(room // (kc * b) * MODEL.b_share) // nr)) * nr
    nc = max(near, int((l3 or 8 * l2) * MODEL.c_share) // c // mc // near * near)
    return cache_tiles(mr, nr, kc, mc, nc, least_of(mr), first=min(fits, kc), near=near)


def panel_in_l1(target: Target, atom: Atom, mr: int, nr: int) -> Iterator[tuple[Tile, ...]]:
    """Tiles of caches for units that multiply tiles: a panel of B stays in L1, which tiles of A pass by from L2.

    KC counts units of k. Sums of a block of C stay in L2 between blocks of k.
    """
    l1, l2 = capacity(target, "L1"), capacity(target, "L2")
    a, b, c = (BY_NAME[x].bytes for x in (atom.left, atom.right, atom.acc))
    kc = int(MODEL.panel_l1_share * l1) // (nr * b) // atom.deep * atom.deep
    mc = int(MODEL.passing_share * l2) // (max(1, kc) * a) // mr * mr
    nc = int(MODEL.sums_share * l2) // (max(1, mc) * c) // (2 * nr) * (2 * nr)
    if kc and mc and nc:
        yield cache_tiles(mr, nr, kc, mc, nc, near=2 * nr)[1:]


def whole_depth(p: Problem, depth: int, tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """Tiles with all of k in one block and fewer rows, where an epilogue follows and k is not much deeper.

    Sums of several blocks would be stored in scratch of the size of C, and read once more.
    """
    kc, mr = tiles[2].k, tiles[0].m
    if not p.fused or not kc < depth <= MODEL.whole_depth * kc:
        return tiles
    mc = max(mr, tiles[2].m * kc // depth // mr * mr)
    return (tiles[0], tiles[1]._replace(k=ALL), *(x._replace(m=mc, k=ALL) for x in tiles[2:]))


def capacity(target: Target, name: str) -> int:
    """Bytes of a memory level, 0 if there is none of this name."""
    level = target.level(name)
    return level.bytes if level else 0


def fits_l2(p: Problem, target: Target) -> bool:
    """Whether one item of a batch fits L2, the private cache of a thread."""
    level = target.level("L2") or target.level("L1")
    return level is None or p.bytes // max(1, p.batch) <= level.bytes


def a_in_place(p: Problem, isa: Isa, atom: Atom) -> bool:
    """Whether left fragments can be read from A in place: no units, and a conversion if one is needed."""
    return p.a != "any" and atom.k_pack == 1 and bool(isa.spelling(atom, "load_a", p.types[0]))


def b_in_place(p: Problem, isa: Isa, atom: Atom, nr: int) -> bool:
    """Whether B can be read in place: rows along n, and no read past the last column."""
    if p.b != "row" or atom.k_pack > 1 or not isa.spelling(atom, "load_b", p.types[1]):
        return False
    return p.n % nr == 0 or bool(atom.mask and isa.spelling(atom, "load_mask", p.types[1]))


def both_in_place(p: Problem, isa: Isa, atom: Atom, nr: int) -> bool:
    """Whether neither A nor B needs to be packed."""
    return b_in_place(p, isa, atom, nr) and a_in_place(p, isa, atom)


def may_pack_once(p: Problem, atom: Atom) -> bool:
    """Whether B may be packed as a whole, before it is used."""
    return p.b != "packed" and -(-p.k // atom.k_pack) * p.n * BY_NAME[atom.right].bytes <= MODEL.most_packed


# -- footprints ------------------------------------------------------------------


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
    is streamed from L2, as much of its depth as fits; for units that multiply tiles, a panel and one step of A. L2
    the block of A (MC x KC) and the panels of B that are packed together: Low et al., "Analytical Modeling
    Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016, section 4. L3
    has the block of C (MC x NC) between passes over k.
    """
    m, n = (p.n, p.m) if s.atom.swap else (p.m, p.n)
    depth = -(-p.k // s.atom.kr)
    tm, tn, tk = min(tile.m or m, m), min(tile.n or n, n), min(tile.k or depth, depth)
    a, b = (BY_NAME[x].bytes for x in s.element_types(atom))
    if tile.level == "L1":
        rows = s.mr * a * (min(tk, atom.deep) if s.program == "tiles" else tk)
        return rows + s.nr * s.b.panels * b * tk
    if tile.level == "L2":
        return (tm * a + max(tn if tile.n else 0, s.nr * s.b.panels) * b) * tk
    return tm * tn * BY_NAME[atom.acc].bytes
