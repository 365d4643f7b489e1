"""Candidate schedules for w4a16: `kernels.gpu.w4a16`, `kernels.gpu.w4a16_dequantize`.

Owns their enumeration, their registers and shared memory, and their numbers of instructions. For few rows of A, warps
split k (slice-K): memory is then the limit, and blocks with few columns keep all of its channels busy. For more, a
warp has as many rows as registers allow, because it dequantizes the words of its columns by itself; for many, a block
dequantizes them once.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from portmm.schedule import gpu_mma
from portmm.schedule.gpu_variants import LEAST_COPY, VECTOR_BYTES, device_tiles, schedule_of, staged
from portmm.schedule.parts import ASYNC, AtomUse
from portmm.spec.dtype import BY_NAME, CODES_KR, spell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

PROGRAMS = ("coded", "dequant")
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
ADDRESSES = 44
"""Registers of a thread for counters and addresses; the least with which NVRTC 13 spills nothing."""
DEQUANTIZE_REGISTERS = 8
"""Registers of a thread that dequantizes words."""
BIT_OPERATIONS, FLOAT_OPERATIONS = 16, 12
"""Instructions that dequantize a word to eight rounded floats: on bits, and on floats."""
PER_WORD = 10
"""Instructions that dequantize a word to eight floats: see `kernels.gpu.w4a16`."""
PER_ATOM = 8
"""Instructions that scale the sums of an atom."""


def serves(p: Problem, atom: Atom) -> bool:
    """Whether an atom multiplies these int4 values: by A of its own type, with all words of four lanes in one group."""
    fits = p.b == "codes" and p.types[1] == "u4" and atom.unit == "warp" and atom.a == atom.b == p.types[0]
    return fits and (atom.m, atom.n, atom.k) == (16, 8, 16) and atom.acc == "f32" and p.group % ROUND == 0


def candidates(
    p: Problem, isa: Isa, atom: Atom, target: Target, vectors: tuple[int, int, int], *, asynchronous: bool
) -> Iterator[Schedule]:
    """Schedules for a problem, none if the layout of A does not allow asynchronous copies.

    Args:
        p: the problem.
        isa: the instruction set.
        atom: its matrix instruction.
        target: a device.
        vectors: elements of A, B and C that may be moved at once.
        asynchronous: the device copies from global to shared memory without registers.
    """
    size = BY_NAME[p.types[0]].bytes
    moved, most_stored = min(vectors[0], VECTOR_BYTES // size), vectors[2]
    if not (serves(p, atom) and asynchronous and p.a == "row" and moved * size >= LEAST_COPY) or p.deterministic:
        return
    group, (down, across) = p.group, gpu_mma.lanes_of(atom)
    for bm, bn, wm, wn, bk, shared in BLOCKS:
        part = bk // shared
        most = TOGETHER if wm * wn < LARGE else 1
        words = next(x for x in (4, 2, 1) if x <= most and gcd(group, part) % (ROUND * x) == 0)
        tiles = device_tiles((wm // across, wn // down, part), (wm, wn, part), (bm, bn, bk))
        vectors = (moved, words * CODES_KR, min(2, most_stored))
        one = schedule_of("coded", p, isa, tiles, ASYNC, vectors, AtomUse(swap=True))
        yield from staged(one, p, target, STAGES, SPLITS, copies=True)
    # Rounding a weight loses no more accuracy than rounding a result to the same type.
    rounded = BY_NAME[p.types[2]].bytes == size
    for bm, bn, wm, wn, bk in LARGE_BLOCKS if rounded else ():
        tiles = device_tiles((wm // down, wn // across, atom.k), (wm, wn, atom.k), (bm, bn, bk))
        vectors = (moved, TOGETHER * CODES_KR, min(most_stored, VECTOR_BYTES // size))
        one = schedule_of("dequant", p, isa, tiles, ASYNC, vectors)
        yield from staged(one, p, target, LARGE_STAGES, SPLITS, copies=True)


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
        return gpu_mma.registers(plain(s)) + DEQUANTIZE_REGISTERS
    warp = s.tiles[1]
    rows, columns, words = warp.m // 8, warp.n // 16, s.b.vector // CODES_KR
    return 8 * rows * columns + 10 * rows + 2 * columns * words + 8 + ADDRESSES


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
        return BIT_OPERATIONS * words, (FLOAT_OPERATIONS + 1.5) * words + multiplied
    rows, columns = warp.m // 8, warp.n // 16
    words = 2 * columns * PER_WORD / ROUND
    scaled = (PER_ATOM * rows * columns + 4 * rows + 4 * columns) / span(s)
    loads = (rows + 2 * columns) / ROUND
    multiplied = rows * (2 * columns + 1) / ROUND
    warps = s.threads // s.warp_lanes // warps_along_k(s)
    return warps * words, warps * (scaled + loads + multiplied)
