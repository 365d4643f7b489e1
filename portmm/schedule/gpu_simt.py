"""The simt and naive programs: plain threads that multiply operands from shared memory, or in place.

Owns their candidates, footprint and work: see `kernels.gpu.simt` and `kernels.gpu.naive`. As for CPUs, a handful of
tiles serves every shape.

Registers of a thread: MR x NR sums, of floats twice except for small tiles (`sums_in_shared`), a row and a column of
operands, and elements in flight to shared memory; addresses take some more. Shared memory: BM x BK of A and BK x BN
of B, for each stage.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from portmm.schedule.parts import LOAD, THROUGH, AtomUse, Parallel
from portmm.schedule.program import (
    VECTOR_BYTES,
    Program,
    Waves,
    asynchronous,
    compulsory,
    device_of,
    device_tiles,
    on_gpu,
    schedule_of,
    staged,
)
from portmm.schedule.roofline import Work
from portmm.spec.dtype import BY_NAME, CODES_KR, size
from portmm.target.model import DEVICE as MODEL
from portmm.target.summation import sets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.parts import Tile
    from portmm.schedule.program import Footprint, Vectors
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

TILES = ((8, 8), (8, 4), (4, 8), (4, 4), (2, 4), (1, 4))
"""MR x NR of a GPU's threads."""
WARPS = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2))
"""Warps of a block, down and across."""
DEPTH = 16
"""Units of k in shared memory, of those that fit."""
LANE_TILES = ((8, 3), (8, 2), (12, 2), (6, 4), (4, 4), (4, 2), (2, 2), (1, 4), (1, 1))
"""MR and vectors of columns of a CPU's threads: sums fit its registers, as MR x NR of a micro-kernel."""
LANES = 16
"""Threads of a CPU's block: lanes of its widest vectors."""
SPLITS = (1, 2, 4, 8, 16, 32)
STAGES = 3
"""Tiles in shared memory where copies are asynchronous."""
FEW = 8
"""Maximum number of sums of a thread whose totals are kept in shared memory: those of the largest tile, 2 x 4, of
devices with 64 registers for a thread, which has no registers for a second set; those of larger tiles would fill
shared memory."""


# -- candidates ------------------------------------------------------------------


def _warp(lanes: int) -> tuple[int, int]:
    """Threads of a warp, down and across: as square as possible, with no fewer across than down."""
    down = 1 << (lanes.bit_length() - 1) // 2
    return down, lanes // down


def simt_candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules with tiles in shared memory."""
    if atom.unit or not (p.b == "codes" or (on_gpu(target) and atom.acc != "f64")):
        return
    device = device_of(target)
    plain = asynchronous(target) and set(p.types[:2]) == {"f32"} and atom.k_pack == 1
    down, across = _warp(max(device.warp, 16))
    for mr, nr in TILES:
        for warps_m, warps_n in WARPS:
            bm, bn = mr * down * warps_m, nr * across * warps_n
            depth = DEPTH if (bm + bn) * DEPTH * 8 <= device.shared_bytes else DEPTH // 2
            tiles = device_tiles((mr, nr, 1), (mr * down, nr * across, 1), (bm, bn, depth))
            cell = (min(mr, 4), min(nr, 4))
            one = _schedule("simt", p, isa, atom, tiles, cell, vectors)
            if one is not None:
                yield from staged(one, p, target, (2,), SPLITS, copies=False)
                if plain:
                    yield from staged(one, p, target, (STAGES,), SPLITS, copies=True)


def naive_candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules that read operands in place."""
    if atom.unit or atom.k_pack > 1 or p.b == "codes":
        return
    gpu = on_gpu(target)
    device = device_of(target)
    lanes = max(device.warp, 16) if gpu else LANES
    shapes = ((4, 4), (4, 1), (1, 4), (2, 2), (1, 1)) if gpu else LANE_TILES
    for mr, nr in shapes:
        for warps_m in (1, 4) if gpu else (1,):
            tiles = device_tiles((mr, nr, 1), (mr, nr * lanes, 1), (mr * warps_m, nr * lanes, 1))
            one = _schedule("direct", p, isa, atom, tiles, (mr, 1), vectors)
            if one is not None:
                yield one


def _schedule(  # noqa: PLR0917 - parts of one record
    program: str, p: Problem, isa: Isa, atom: Atom, tiles: tuple[Tile, ...], cell: tuple[int, int],
    vectors: tuple[int, int, int],
) -> Schedule | None:  # fmt: skip
    """A schedule with the widest transfers of operands, or None if tiles have fewer elements than threads."""
    use, parallel = AtomUse(kr=atom.k_pack), Parallel(cell=cell)
    if program == "direct":
        return schedule_of(program, p, isa, tiles, LOAD, (1, 1, min(vectors[2], cell[1])), use, parallel)
    s = schedule_of(program, p, isa, tiles, THROUGH, (1, 1, _stored(p, cell, vectors[2])), use, parallel)
    a, b = (_transfer_vector(s, side, vectors[side]) for side in (0, 1))
    return replace(s, a=s.a.moved(a), b=s.b.moved(b)) if a and b else None


def _stored(p: Problem, cell: tuple[int, int], vector: int) -> int:
    return min(vector, cell[1]) if p.c == "row" else 1


def _transfer_vector(s: Schedule, side: int, vector: int) -> int:
    """Elements of A (0) or B (1) that a thread moves at once; 0 if there are fewer of them than threads."""
    layout = (s.a, s.b)[side].layout
    if layout == "codes":
        return CODES_KR
    rows, size = (s.block.m, s.block.n)[side], BY_NAME[s.types[side]].bytes
    along_k = s.along_k(side)
    most = min(vector, VECTOR_BYTES // size) if layout != "any" else 1
    if s.atom.kr > 1:
        # Units of four bytes are moved whole, or interleaved from rows of four.
        most = (most if along_k else min(most, s.atom.kr)) if most >= s.atom.kr else 1
        in_k = max(1, most // s.atom.kr) if along_k else 1
    else:
        in_k = most if along_k else 1
    in_rows = 1 if along_k else most
    while most > 1 and (s.block.k % in_k or rows % in_rows or rows * s.block.k < s.threads * in_k * in_rows):
        if s.atom.kr > 1 and most <= s.atom.kr:
            return 1 if rows * s.block.k >= s.threads else 0
        most //= 2
        in_k, in_rows = (max(1, most // s.atom.kr), 1) if along_k else (1, most)
    return most if rows * s.block.k >= s.threads else 0


# -- footprint -------------------------------------------------------------------


def simt_footprint(s: Schedule) -> Footprint:
    """Registers of a thread, and shared memory of a block."""
    a, b, _ = s.types
    sizes = ((s.block.m, a), (s.block.n, b))
    waiting = (
        0
        if s.a.asynchronous
        else sum(-(-x * s.block.k * s.atom.kr * BY_NAME[t].bytes // (4 * s.threads)) for x, t in sizes)
    )
    sums = s.mr * s.nr * (1 if sums_in_shared(s) else sets(a, b))
    addresses = MODEL.simt_addresses + _address_registers(s, 0) + _address_registers(s, 1)
    registers = sums + s.mr + s.nr + waiting + addresses
    tiles = (s.block.m + s.block.n) * s.block.k * 4 * s.stages
    totals = 4 * s.mr * s.nr * s.threads if sums_in_shared(s) else 0  # over runs of k
    return {"registers": registers, "shared": tiles + totals}


def sums_in_shared(s: Schedule) -> bool:
    """Whether totals over runs of k are kept in shared memory, not in registers, by the simt program."""
    return s.mr * s.nr <= FEW and sets(*s.types[:2]) > 1


def naive_footprint(s: Schedule) -> Footprint:
    """Registers of a thread."""
    words = 2 if s.types[0] == s.types[1] == "f64" else 1
    parts = s.mr + s.nr
    sums = sets(*s.types[:2]) * s.mr * s.nr
    return {"registers": words * (sums + parts) + 2 * parts + MODEL.naive_addresses}


def _address_registers(s: Schedule, side: int) -> int:
    """Registers for the addresses of the vectors of A (0) or B (1) that a thread moves: `gpu.global_to_shared`."""
    along_k = s.along_k(side)
    rows, vector = (s.block.m, s.block.n)[side], (s.a, s.b)[side].vector
    units = max(1, vector // s.atom.kr) if along_k else 1
    vector_rows = 1 if along_k else vector
    transfers = -(-(rows // vector_rows) * (s.block.k // units) // s.threads)
    scattered = along_k and not s.a.asynchronous
    return int(transfers * (MODEL.per_scattered_vector + (s.atom.kr > 1) if scattered else MODEL.per_vector))


# -- work ------------------------------------------------------------------------


def work(p: Problem, s: Schedule, atom: Atom, target: Target, occupied: int) -> Work:
    """Work of the busiest processor."""
    v, device, in_place = Waves.of(p, s, target, occupied), device_of(target), s.program == "direct"
    a, b, _ = (size(x) for x in p.types)
    depth = ceil(ceil(p.k / atom.k_pack) / s.parallel.split)
    macs = s.block.m * s.block.n * depth
    issue = MODEL.issue + (MODEL.copied_issue if s.a.asynchronous else 0)
    counts = {"multiply-adds": v.rounds * macs * (1 + issue)}
    if in_place:
        # On CPUs lanes share A, and a vector counts as a word.
        words = v.rounds * (s.mr + s.nr) / (s.mr * s.nr) * macs
        rate = target.rates.get(atom.name, target.rates.get("simt_f32", MODEL.default_rate))
        counts["loads"] = words * (2 if on_gpu(target) else MODEL.lane_words / (2 * rate))
    else:
        warp = s.tiles[1]
        # Half of the banks are idle, as vectors alternate.
        counts["shared memory"] = v.rounds * 8 * (warp.m + warp.n) / (warp.m * warp.n) * macs
        rows = (n / max(1, x.vector // s.atom.kr) for n, x in ((s.block.m, s.a), (s.block.n, s.b)))
        counts["moves"] = v.rounds * depth * sum(rows)
    counts["L2"] = v.blocks * depth * atom.k_pack * (s.block.m * a + s.block.n * b) / v.busy
    counts["memory"] = compulsory(p)
    steps = depth if in_place else ceil(depth / s.block.k)
    each = MODEL.naive_step if in_place else MODEL.copied_step if s.a.asynchronous else MODEL.step
    waits = ceil(v.rounds / v.together) * (MODEL.wait + steps * each) if on_gpu(target) else 0.0
    filled = min(1.0, v.together * s.threads / (device.warp * MODEL.warps_needed)) if on_gpu(target) else 1.0
    return Work(counts, waits, filled)


SIMT = Program("gpu.simt", simt_candidates, simt_footprint, work, device=True, grouped=True, fixup=True)
NAIVE = Program("gpu.naive", naive_candidates, naive_footprint, work, device=True, grouped=True)
