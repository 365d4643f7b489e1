"""Candidate schedules for matrix units that multiply fragments of a warp: see `kernels.gpu.mma`.

Owns their enumeration, and their registers and shared memory. A warp's tile is as square as its registers allow,
because it loads (WM + WN) words for WM x WN products; a block has no more rows, or columns, than the problem.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from portmm.schedule.parts import THROUGH, AtomUse
from portmm.schedule.program import (
    LEAST_COPY,
    VECTOR_BYTES,
    Program,
    Waves,
    asynchronous,
    compulsory,
    counted,
    device_of,
    device_tiles,
    schedule_of,
    staged,
)
from portmm.schedule.roofline import Work
from portmm.spec.dtype import BY_NAME, FP8
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

BLOCKS = (
    (128, 256, 64, 64), (256, 128, 64, 64), (128, 128, 64, 64), (128, 128, 64, 32), (128, 64, 64, 32),
    (64, 128, 32, 64), (64, 64, 32, 32), (32, 128, 32, 32), (128, 32, 32, 32), (32, 64, 16, 32), (64, 32, 32, 16),
    (16, 128, 16, 32), (16, 64, 16, 16), (128, 16, 32, 16), (64, 16, 16, 16),
    (8, 128, 8, 32), (8, 64, 8, 16), (128, 8, 32, 8), (64, 8, 16, 8),
)  # fmt: skip
"""Rows and columns of a block and of a warp. Those of 8 need an atom with as few rows or columns."""
DEPTHS = (64, 128)
"""Bytes of a row of A, or column of B, in shared memory: two or four atoms."""
STAGES = (3, 4, 5)
"""Tiles in shared memory where copies are asynchronous."""
WIDE = (2, 4)
"""Bytes of elements whose fragments are loaded transposed: PTX ISA, ldmatrix; and word by word."""
NARROW, LEAST = 2, 8
"""Largest element, in bytes, of results that are stored through shared memory, and the least that a thread then stores
at once: with 16 bits of each of two lanes, memory would run at half of its bandwidth."""
FEW = 32
"""Rows of a block's tile up to which operands are exchanged: atoms have half as many columns as rows."""
SPLITS = (1, 2, 4, 8, 16)


def candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules for a problem, none if fragments cannot be loaded from the layouts of its operands."""
    if atom.unit != "warp" or p.a == "any" or p.b not in ("row", "col") or p.deterministic:
        return
    sizes = [BY_NAME[x].bytes for x in p.types[:2]]
    for layout, along_k, size in ((p.a, "row", sizes[0]), (p.b, "col", sizes[1])):
        if layout != along_k and size not in WIDE:
            return
    lanes = lanes_of(atom)
    stored = min(vectors[2], VECTOR_BYTES // BY_NAME[p.types[2]].bytes)
    moved = [min(v, VECTOR_BYTES // x) for v, x in zip(vectors, sizes, strict=False)]
    copies = asynchronous(target) and min(v * x for v, x in zip(moved, sizes, strict=True)) >= LEAST_COPY
    for bm, bn, wm, wn in BLOCKS:
        for swap in (False, True):
            m, n = (atom.n, atom.m) if swap else (atom.m, atom.n)
            if wm % m or wn % n or (swap and (bm > FEW or p.types[0] != p.types[1])):
                continue
            down, across = lanes[::-1] if swap else lanes
            # Hopper multiplies floats of eight bits as f16: of deeper tiles, compilers keep too many of both types.
            for depth in DEPTHS[:1] if p.types[0] in FP8 else DEPTHS:
                tiles = device_tiles((wm // down, wn // across, atom.k), (wm, wn, atom.k), (bm, bn, depth // sizes[0]))
                vectors = (moved[0], moved[1], min(stored, bn))
                one = schedule_of("mma", p, isa, tiles, THROUGH, vectors, AtomUse(swap=swap))
                yield from staged(one, p, target, STAGES if copies else (2,), SPLITS, copies=copies)


def lanes_of(atom: Atom) -> tuple[int, int]:
    """Lanes of a warp along the rows and along the columns of an atom's sums."""
    sums = atom.acc_fragment
    assert sums is not None  # noqa: S101 - units of a warp have one
    return sums.lane_rows, sums.lane_columns


def fragments(s: Schedule) -> int:
    """Registers of a lane for the fragments of one step of k."""
    warp = s.tiles[1]
    a, b, _ = (BY_NAME[x].bytes for x in s.types)
    return (warp.m * a + warp.n * b) * warp.k // (4 * s.warp_lanes)


def transfers(s: Schedule) -> int:
    """Vectors that a thread moves for one tile of both operands."""
    sizes = ((s.block.m, s.a.vector), (s.block.n, s.b.vector))
    return sum(-(-x * s.block.k // v // s.threads) for x, v in sizes)


def registers(s: Schedule) -> int:
    """Registers of a thread."""
    a, b, _ = (BY_NAME[x].bytes for x in s.types)
    waiting = 0 if s.a.asynchronous else (s.block.m * a + s.block.n * b) * s.block.k // (4 * s.threads)
    # Floats of eight bits are converted to f16 where there is no unit for them; words are rounded to tf32.
    operands = fragments(s) * (3 if s.types[0] in FP8 else 2 if s.types[0] == "f32" else 1)
    addresses = MODEL.mma_addresses + MODEL.per_copy * transfers(s) + MODEL.swapped_rows * s.atom.swap
    return int(s.mr * s.nr + operands + waiting + addresses)


def shared_bytes(s: Schedule) -> int:
    """Shared memory of a block."""
    a, b, _ = (BY_NAME[x].bytes for x in s.types)
    tiles = (s.block.m * a + s.block.n * b) * s.block.k * s.stages
    return max(tiles, staging(s))


def staging(s: Schedule) -> int:
    """Shared memory of results before they are stored: see `kernels.gpu.epilogue_store`."""
    size = BY_NAME[s.types[2]].bytes
    narrow = s.c.layout == "row" and not s.slices and size <= NARROW and s.c.vector * size >= LEAST
    return s.block.m * (s.block.n * size + VECTOR_BYTES) if narrow else 0


def work(p: Problem, s: Schedule, atom: Atom, target: Target, occupied: int) -> Work:
    """Work of the busiest processor."""
    del atom
    v, warp, warps = Waves.of(p, s, target, occupied), s.tiles[1], s.threads // device_of(target).warp
    a, b, _ = (BY_NAME[x].bytes for x in p.types)
    depth = v.steps * s.block.k
    tiles = s.block.m * a + s.block.n * b
    counts = {
        "multiply-adds": v.rounds * s.block.m * s.block.n * depth,
        "shared memory": v.rounds * depth * (warps * (warp.m * a + warp.n * b) + tiles),
        "moves": v.rounds * depth * (s.block.m / s.a.vector + s.block.n / s.b.vector),
        "L2": v.blocks * depth * tiles / v.busy,
        "memory": compulsory(p),
    }
    # The waits for the last stages, and the stores of sums, overlap with multiplications of other blocks only.
    ending = s.mr * s.nr * MODEL.ending * warps / PARTS
    waits = ceil(v.rounds / v.together) * (MODEL.wait + v.steps * MODEL.matrix_step / v.together)
    filled = min(1.0, v.together * warps / MODEL.matrix_warps)
    return Work(counts, waits + v.rounds * ending / v.together, filled)


PROGRAM = Program(
    "gpu.mma",
    candidates,
    counted(registers, shared_bytes),
    work,
    device=True,
    dynamic_shared=True,
    grouped=True,
    fixup=True,
)
