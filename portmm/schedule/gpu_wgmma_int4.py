"""Candidate schedules for int4 weights on the matrix units of warpgroups: see `kernels.gpu.wgmma_int4`.

Owns their enumeration, and their work. A block has 64 or 128 columns of the weight for each warpgroup, and as many
rows of A as the atom has columns, so that few rows cost little and many share the words that are unfolded for them.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from portmm.schedule.gpu_wgmma import (
    ALIGNED,
    FEW,
    LEAST_STAGES,
    MOST_COLUMNS,
    SPLITS,
    STRIP,
    columns,
    far_sums,
    k_groups,
    near_sums,
    registers,
    shared_bytes,
    staged,
    stages_of,
    strips,
    sum_registers,
    sums,
)
from portmm.schedule.parts import TMA, AtomUse, Parallel
from portmm.schedule.program import (
    Program,
    Waves,
    asynchronous,
    blocks,
    counted,
    device_of,
    device_tiles,
    partitioned,
    schedule_of,
    with_stages,
)
from portmm.schedule.roofline import Work
from portmm.spec.dtype import BY_NAME, size
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.program import Vectors
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

UNIT = 32
"""Elements of k that a lane has words of at once: all of one group."""
DEPTHS = (64, 128, 256)
"""Elements of k of a stage: lines of words are 32, 64 or 128 bytes."""
SHORT = 128
"""Rows of a block below which stages are not of the least depth, whose copies are of short runs."""
MANY = (128, 256)
"""Rows of a block where there are more than fit one."""
SHAPES = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4))
"""Warpgroups, 64 columns of each, and warpgroups that share a tile, at whose steps of k they take turns."""
TURNS = 3
"""The last of these are for few rows: those with more sums keep units busy, and have no room for more stages."""
MOST_STAGES = 12
MOST_CLUSTER, MOST_FAR = 2, 8192
"""Blocks of a cluster that have slices of k, and sums that they send to the first of them, one by one. Clusters of
four are often fewer at once than processors have room for."""
WARPS, LEAST_ROWS = 4, 16
"""Warps of a warpgroup, and rows of A below which multiplications take no less time."""


def serves(p: Problem, atom: Atom) -> bool:
    """Whether an atom multiplies these int4 values by rows of A of its own type, which are no wider than results."""
    fits = p.b == "codes" and p.types[1] == "u4" and atom.unit == "warpgroup" and atom.a == atom.b == p.types[0]
    return (
        fits and atom.acc == "f32" and BY_NAME[p.types[2]].bytes == BY_NAME[atom.a].bytes == 2 and p.group % UNIT == 0
    )


def candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules for a problem, none if the copy engine cannot address A."""
    if not serves(p, atom) or not asynchronous(target) or p.a != "row" or p.deterministic:
        return
    if vectors[0] * 2 < ALIGNED or p.k < UNIT:
        return
    stored = ALIGNED // 2 if p.c == "row" and vectors[2] * 2 >= ALIGNED else min(2, vectors[2])
    for rows in _rows(p):
        for groups, strip, turns in SHAPES[: -TURNS if rows >= SHORT else None]:
            for depth in DEPTHS[rows < SHORT :]:
                part = (rows, strip * STRIP)
                tiles = device_tiles(
                    (rows // 4, 2 * strip, atom.k), (*part, atom.k), (rows, groups // turns * strip * STRIP, depth)
                )
                parallel = Parallel(warpgroups=groups, persistent=1)
                moved = (ALIGNED // 2, UNIT, stored)
                one = schedule_of("wgmma_int4", p, isa, tiles, TMA, moved, AtomUse(swap=True), parallel)
                if sum_registers(one) + MODEL.wgmma_addresses <= MODEL.consumer_registers:
                    yield from _staged(one, p, target)


def _rows(p: Problem) -> list[int]:
    """Rows of a block: as few as there are, or many."""
    few = next((n for n in (*FEW, 160, 192, 224, MOST_COLUMNS) if n >= p.m), 0)
    return sorted({*([few] if few else []), *(n for n in MANY if n <= p.m)})


def _staged(s: Schedule, p: Problem, target: Target) -> Iterator[Schedule]:
    """Variants with as many stages as fit, and with slices of k where there are few blocks."""
    device, x, tiles = device_of(target), s.parallel, blocks(s, p)
    several = 2 * registers(s) * s.threads <= device.registers
    for together in (1, 2) if several else (1,):
        for split in SPLITS:
            if split > 1 and tiles * split > 2 * device.processors:
                continue
            steps = -(-p.k // s.block.k) // split
            alone = partitioned(s, persistent=x.persistent if split == 1 else 0)
            ways = [partitioned(alone, split=split, fixup=split > 1)]
            # Sums of slices are added in shared memory where they are few.
            joined = partitioned(alone, cluster=split)
            ways += [joined] if 1 < split <= MOST_CLUSTER and far_sums(joined) <= MOST_FAR else []
            for one in ways:
                # A stage is always the same warpgroup's, so that none is a phase of its barriers ahead of others, and
                # each has two: it waits for the next before it releases one.
                turns = k_groups(one)
                least = max(LEAST_STAGES, 2 * turns)
                stages = min(stages_of(one, target, together), MOST_STAGES, max(steps, least))
                stages -= stages % turns
                if stages >= least:
                    yield with_stages(one, stages, TMA)


def work(p: Problem, s: Schedule, atom: Atom, target: Target, occupied: int) -> Work:
    """Work of the busiest processor."""
    del atom
    x, block = s.parallel, s.block
    # Blocks of a cluster have slices of k.
    v = Waves.of(p, partitioned(s, split=x.split * x.cluster), target, occupied)
    a, b, c = (size(y) for y in p.types)
    b += 8 / (s.b.group or p.k)
    depth, wide = v.rounds * v.steps * block.k, block.n / STRIP
    copied = block.m * a + block.n * b
    # A warpgroup makes fragments, then starts their multiplications: of others at the same time some are in between.
    units = v.rounds * v.steps * block.k / UNIT * strips(s) / (k_groups(s) * v.together)
    counts = {
        "multiply-adds": depth * block.n * max(block.m, LEAST_ROWS),
        "instructions": depth * wide * WARPS * MODEL.unit_operations / UNIT,
        "shared memory": depth * (wide * block.m * a + block.n * 4 * b + copied) * MODEL.engine_read,
        "L2": depth * copied / MODEL.int4_gain,
        "latency": units * (MODEL.unit_wait + columns(s) / 4),
        "memory": p.batch * (p.m * p.k * a + p.m * p.n * c) + p.k * p.n * b,
    }  # fmt: skip
    own = x.warpgroups // k_groups(s)
    stored = sums(s) * own * (MODEL.sending if staged(s) else MODEL.ending)
    waits = ceil(v.rounds / v.together) * (stored + MODEL.meet) + (near_sums(s) + far_sums(s)) / MODEL.near_rate
    waits += v.rounds * v.steps * MODEL.unit_step * wide / v.together
    waits += MODEL.cluster_meet if x.cluster > 1 else 0.0
    return Work(counts, MODEL.engine_start + waits)


PROGRAM = Program(
    "gpu.wgmma_int4", candidates, counted(registers, shared_bytes), work, device=True, dynamic_shared=True,
    slice_steps=2,
)  # fmt: skip
