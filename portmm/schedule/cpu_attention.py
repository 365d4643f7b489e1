"""Schedules of attention on CPUs: register tiles of both products, and blocks of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.schedule.cpu_blocking import capacity
from portmm.schedule.parts import ALL, PACKED, OperandPlan, Parallel, Tile
from portmm.schedule.program import Footprint, Program
from portmm.schedule.roofline import Work
from portmm.schedule.schedule import Schedule
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target


def attention_schedule(isa: Isa, atom: Atom, *, packs: bool = False) -> Schedule:
    """A schedule with the fewest loads per multiply-add, of blocks of about `queries`.

    The first product is K . Q^T: its rows are keys, its columns queries. With `packs`, V is packed first.
    """
    if atom.tiled:
        side = 2 * atom.m  # two by two tiles of sums: of keys, or columns of V, by queries, in strips of a tile
        return _schedule(isa, (atom.n, side), (2 * atom.n, side), MODEL.queries, packs)

    def rows(v: int) -> int:
        return min(int(MODEL.in_place_rows), (isa.registers - v - 1) // v)

    first = min((v for v in (1, 2, 3, 4) if rows(v) > 0), key=lambda v: (v + rows(v)) / (v * rows(v)))
    first = first if isa.registers >= 32 else min(first, 2)
    nr, pv_m = first * atom.n, rows(2)
    step = next(x for x in range(nr, nr * pv_m + 1, nr) if x % pv_m == 0)
    return _schedule(isa, (nr, rows(first)), (2 * atom.n, pv_m), max(1, MODEL.queries // step) * step, packs)


def _schedule(isa: Isa, scores: tuple[int, int], values: tuple[int, int], queries: int, packs: bool) -> Schedule:
    """A schedule for register tiles, n by m, of both products."""
    (nr, mr), (pv_n, pv_m) = scores, values
    tiles = (
        Tile("registers", mr, nr, 1), Tile("L1", mr, nr, ALL), Tile("L2", ALL, queries, ALL), Tile("L3", ALL, ALL, ALL),
    )  # fmt: skip
    return Schedule(
        "attention",
        isa.name,
        "f32",
        tiles,
        b=OperandPlan("col", (PACKED,)),
        parallel=Parallel("batch", cell=(pv_m, pv_n)),
        v=OperandPlan("row", (PACKED,) * packs),
    )


def by_pairs(isa: Isa, lanes: Atom, dtype: str) -> bool:
    """Whether scores of few queries are computed by vectors of pairs of elements (kernels/cpu/row_pairs.py)."""
    return isa.shuffles and dtype == "f32" and lanes.n >= MODEL.pair_lanes


def few_queries(isa: Isa, atom: Atom, dtype: str) -> int:
    """Queries of a head up to which vectors along keys are faster (kernels/cpu/flash_decoding.py)."""
    if atom.tiled:
        return 0
    wide = by_pairs(isa, atom, dtype) and isa.registers >= 32
    return int(MODEL.few_by_pairs if wide else MODEL.few_queries) // atom.k_pack


def packs_values(isa: Isa, atom: Atom, dtype: str, dv: int, columns: int) -> bool:
    """Whether V is packed: `columns` of a register tile cannot be read where they are in rows of `dv` elements."""
    masks = bool(isa.spelling(atom, "load_mask", dtype))
    return atom.k_pack > 1 or atom.tiled or not (masks or not dv % columns)


class Geometry:
    """The sizes of tiles of a schedule, by their names in kernels.

    Attributes:
        nr, mr: the first product's register tile: queries, and keys.
        pv_n, pv_m: the second product's: columns of V, and queries.
        queries: of a block.
    """

    __slots__ = ("mr", "nr", "pv_m", "pv_n", "queries")

    def __init__(self, s: Schedule) -> None:
        self.nr, self.mr, self.queries = s.nr, s.mr, s.tile("L2").n
        self.pv_m, self.pv_n = s.parallel.cell


def keys_of(s: Schedule, target: Target, head: int) -> int:
    """Keys of a block: as many as fit half of L2 with their scores, K and V, in whole tiles of both products."""
    near = capacity(target, "L2") or capacity(target, "L1") or MODEL.unknown_l2
    step = s.mr * 2
    return max(1, min(int(MODEL.most_keys), near // 2 // footprint(s, 1, head)["L2"]) // step) * step


def footprint(s: Schedule, keys: int, head: int) -> Footprint:
    """Bytes of the scores, K and V of some keys."""
    return {"L2": 4 * (s.tile("L2").n + 2 * head) * keys}


def work(heads: int, queries: int, keys: int, elements: int) -> Work:
    """Multiply-adds of both products, for the elements of a head of K and of V together."""
    return Work({"multiply-adds": heads * queries * keys * elements}, 0.0)


def candidates(isa: Isa, atom: Atom) -> tuple[Schedule, ...]:
    """The only schedule of an atom."""
    return (attention_schedule(isa, atom),)


PROGRAM = Program("cpu.attention", candidates, footprint, work)
