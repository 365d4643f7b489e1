"""Candidate schedules for w4a16: `kernels.gpu.w4a16`, `kernels.gpu.w4a16_dequantize`.

Owns their enumeration, their registers and shared memory, and their numbers of instructions. For few rows of A, warps
split k (slice-K): memory is then the limit, and blocks with few columns keep all of its channels busy. For more, a
warp has as many rows as registers allow, because it dequantizes the words of its columns by itself; for many, a block
dequantizes them once.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, gcd
from typing import TYPE_CHECKING

from portmm.schedule import gpu_mma
from portmm.schedule.parts import ASYNC, AtomUse
from portmm.schedule.program import (
    LEAST_COPY,
    VECTOR_BYTES,
    Program,
    Waves,
    asynchronous,
    counted,
    device_of,
    device_tiles,
    schedule_of,
    staged,
)
from portmm.schedule.roofline import Work
from portmm.spec.dtype import BY_NAME, CODES_KR, size, spell
from portmm.target.device import PARTS
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.program import Vectors
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

PROGRAMS = ("coded", "dequant", "wgmma_int4")
BLOCKS = (
    (128, 128, 32, 64, 128, 1), (128, 256, 64, 32, 128, 1), (64, 256, 32, 64, 128, 1), (128, 128, 64, 32, 128, 1),
    (64, 128, 32, 32, 128, 1), (64, 64, 32, 16, 128, 1),
    (32, 128, 32, 32, 128, 1), (32, 64, 32, 32, 256, 2), (32, 32, 32, 32, 512, 4),
    (16, 128, 16, 32, 256, 1), (16, 64, 16, 32, 256, 2), (16, 32, 16, 32, 512, 4), (16, 16, 16, 16, 512, 4),
    (8, 128, 8, 32, 256, 1), (8, 64, 8, 32, 256, 2), (8, 32, 8, 32, 512, 4), (8, 16, 8, 16, 512, 4),
)  # fmt: skip
"""Rows and columns of a block and of a warp, elements of k of a block, and the warps that split these."""
LARGE_BLOCKS = (
    (128, 256, 64, 64, 32), (256, 128, 64, 64, 32), (128, 128, 64, 64, 32), (128, 128, 64, 32, 64),
    (64, 256, 32, 64, 64),
)  # fmt: skip
"""Rows and columns of a block and of a warp where a block dequantizes words, and the depth that it dequantizes."""
LARGE_STAGES = (3, 4, 5)
STAGES = (2, 3, 4, 6)
TOGETHER = 4
"""Words that a thread loads at once."""
LARGE = 32 * 64
"""Sums of a warp from which its lanes have registers for one word only."""
ROUND = 4 * CODES_KR
"""Elements of k in the words of four lanes: all of one group."""
SPLITS = (1, 2, 4, 8)
FEW_ROWS = 16
"""Rows of a block up to which the time is that of reading weights."""


def serves(p: Problem, atom: Atom) -> bool:
    """Whether an atom multiplies these int4 values: by A of its own type, with all words of four lanes in one group."""
    fits = p.b == "codes" and p.types[1] == "u4" and atom.unit == "warp" and atom.a == atom.b == p.types[0]
    return fits and (atom.m, atom.n, atom.k) == (16, 8, 16) and atom.acc == "f32" and p.group % ROUND == 0


def in_slices(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules of warps that dequantize words of their own, and split k (slice-K) for few rows.

    There are none if the layout of A does not allow asynchronous copies.
    """
    if not _copies(p, atom, target, vectors):
        return
    down, across = gpu_mma.lanes_of(atom)
    for bm, bn, wm, wn, bk, shared in BLOCKS:
        part = bk // shared
        most = TOGETHER if wm * wn < LARGE else 1
        words = next(x for x in (4, 2, 1) if x <= most and gcd(p.group, part) % (ROUND * x) == 0)
        tiles = device_tiles((wm // across, wn // down, part), (wm, wn, part), (bm, bn, bk))
        moved = (_moved(p, vectors), words * CODES_KR, min(2, vectors[2]))
        one = schedule_of("coded", p, isa, tiles, ASYNC, moved, AtomUse(swap=True))
        yield from staged(one, p, target, STAGES, SPLITS, copies=True)


def dequantized(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules of blocks that dequantize words once for all of their warps."""
    bytes_ = BY_NAME[p.types[0]].bytes
    # Rounding a weight loses no more accuracy than rounding a result to the same type.
    if not _copies(p, atom, target, vectors) or BY_NAME[p.types[2]].bytes != bytes_:
        return
    down, across = gpu_mma.lanes_of(atom)
    for bm, bn, wm, wn, bk in LARGE_BLOCKS:
        tiles = device_tiles((wm // down, wn // across, atom.k), (wm, wn, atom.k), (bm, bn, bk))
        moved = (_moved(p, vectors), TOGETHER * CODES_KR, min(vectors[2], VECTOR_BYTES // bytes_))
        one = schedule_of("dequant", p, isa, tiles, ASYNC, moved)
        yield from staged(one, p, target, LARGE_STAGES, SPLITS, copies=True)


def _moved(p: Problem, vectors: Vectors) -> int:
    """Elements of A that a thread moves at once."""
    return min(vectors[0], VECTOR_BYTES // BY_NAME[p.types[0]].bytes)


def _copies(p: Problem, atom: Atom, target: Target, vectors: Vectors) -> bool:
    """Whether A can be copied asynchronously, for an atom that multiplies these int4 values."""
    copied = _moved(p, vectors) * BY_NAME[p.types[0]].bytes >= LEAST_COPY
    return serves(p, atom) and asynchronous(target) and p.a == "row" and copied and not p.deterministic


def span(s: Schedule) -> int:
    """Number of elements of k that a warp sums before it scales."""
    return gcd(s.b.group, s.tiles[1].k)


def warps_along_k(s: Schedule) -> int:
    """Warps of a block that split k: those with the same sums."""
    return s.block.k // s.tiles[1].k


def plain(s: Schedule) -> Schedule:
    """The schedule of `kernels.gpu.mma` for the floats that a block dequantizes."""
    a, _, c = s.types
    return replace(s, b=s.b._replace(layout="col"), dtype=spell(a, a, c))


def registers(s: Schedule) -> int:
    """Registers of a thread."""
    if s.program == "dequant":
        return int(gpu_mma.registers(plain(s)) + MODEL.dequantize_registers)
    warp = s.tiles[1]
    rows, columns, words = warp.m // 8, warp.n // 16, s.b.vector // CODES_KR
    return int(8 * rows * columns + 10 * rows + 2 * columns * words + 8 + MODEL.w4a16_addresses)


def shared_bytes(s: Schedule) -> int:
    """Shared memory of a block."""
    if s.program == "dequant":
        floats = (s.stages * s.block.m + 2 * s.block.n) * s.block.k * BY_NAME[s.types[0]].bytes
        return floats + s.stages * s.block.n * s.block.k // 2
    block, each = s.block, s.block.k // span(s)
    stage = block.m * block.k * BY_NAME[s.types[0]].bytes + block.n * block.k // 2
    ends = (stage * s.stages, 4 * block.n * each * s.stages, 4 * block.n * each * s.stages)
    partial_sums = 4 * block.m * block.n * (warps_along_k(s) - 1)
    return sum(ends) + partial_sums


def instructions(s: Schedule) -> tuple[float, float]:
    """Instructions of all lanes of a block, for each element of k: those that dequantize, and all others."""
    warp = s.tiles[1]
    if s.program == "dequant":
        words, warps = s.block.n / CODES_KR / s.warp_lanes, s.threads // s.warp_lanes
        multiplied = warps * ((warp.m // 16) * (warp.n // 8) + (warp.m + warp.n) / 32) / 16
        return MODEL.bit_operations * words, (MODEL.float_operations + 1.5) * words + multiplied
    rows, columns = warp.m // 8, warp.n // 16
    words = 2 * columns * MODEL.word_operations / ROUND
    scaled = (MODEL.atom_operations * rows * columns + 4 * rows + 4 * columns) / span(s)
    loads = (rows + 2 * columns) / ROUND
    multiplied = rows * (2 * columns + 1) / ROUND
    warps = s.threads // s.warp_lanes // warps_along_k(s)
    return warps * words, warps * (scaled + loads + multiplied)


def work(p: Problem, s: Schedule, atom: Atom, target: Target, occupied: int) -> Work:
    """Work of the busiest processor."""
    lanes = device_of(target).warp
    v, warp, warps, once = Waves.of(p, s, target, occupied), s.tiles[1], s.threads // lanes, s.program == "dequant"
    a, b, c = (size(x) for x in p.types)
    b += 8 / (s.b.group or p.k)
    depth, sharing = v.steps * s.block.k, 1 if once else warps_along_k(s)
    filled = min(1.0, v.together * warps / MODEL.matrix_warps)
    # Fragments of A are multiplied by ones, too, where they are multiplied by int4 values.
    atoms = s.block.m * s.block.n * (1 if once else 1 + atom.n / warp.n)
    # Of few rows memory is late, not the units.
    late = 1.0 if s.block.m <= FEW_ROWS else MODEL.dequantized_issue if once else MODEL.coded_issue
    dequantizing, others = instructions(s)
    floats, tiles = s.block.n * (a + b) if once else 0, s.block.m * a + s.block.n * b
    counts = {
        "multiply-adds": v.rounds * atoms * depth * late,
        "dequantising": v.rounds * depth * dequantizing * lanes / filled,
        "instructions": v.rounds * depth * (dequantizing + others) / filled,
        "shared memory": v.rounds * depth
        * (warps / sharing * (warp.m * a + warp.n * (a if once else b)) + tiles + floats),
        "moves": v.rounds * depth * (s.block.m / s.a.vector + s.block.n / 32),
        "L2": v.blocks * depth * tiles * MODEL.coded_l2 / v.busy,
        # Int4 values, and for each group of them a scale and an offset.
        "memory": p.batch * (p.m * p.k * a + p.m * p.n * c) + p.k * p.n * b,
    }  # fmt: skip
    if not once:
        counts["latency"] = ceil(v.rounds / v.together) * ceil(v.steps / max(1, s.stages - 1)) * MODEL.far
    ending = s.mr * s.nr * (MODEL.ending * warps + MODEL.add_share * (sharing - 1)) / PARTS
    waits = ceil(v.rounds / v.together) * (MODEL.wait + v.steps * MODEL.matrix_step / v.together)
    return Work(counts, waits + v.rounds * ending / v.together, filled)


SLICED = Program("gpu.w4a16", in_slices, counted(registers, shared_bytes), work, device=True, dynamic_shared=True)
DEQUANTIZED = Program(
    "gpu.w4a16_dequantize", dequantized, counted(registers, shared_bytes), work, device=True, dynamic_shared=True
)
