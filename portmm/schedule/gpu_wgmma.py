"""The schedules worth considering for units that whole warpgroups multiply with: see `kernels.wgmma`.

Owns their enumeration, what they need of registers and shared memory, and the shape of what a warpgroup has.
Imports `schedule.schedule`, `spec.problem`, `target.target`. The copy engine wants addresses and strides of 16 bytes: where
operands lie otherwise, nothing is offered here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portmm.schedule.schedule import ALL, WARPGROUP, Schedule, Tile
from portmm.spec.dtype import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.spec.problem import Problem
    from portmm.target.target import Atom, Isa, Target

STRIP = 64
"""Rows that one instruction multiplies."""
LINE = 128
"""Bytes of a line of shared memory whose pieces are exchanged: the depth of a tile."""
SWIZZLED = 1024
"""What tiles are aligned to: eight lines."""
WIDE_ROWS = 64
"""Rows of a line where rows are side by side, of elements of two bytes."""
WIDE = 2
ALIGNED = 16
"""Bytes that the copy engine wants addresses and strides to be multiples of."""
BARRIERS = 1024
"""Bytes of shared memory for barriers, and for aligning what is behind them."""
BUFFERS = 2
"""Pieces of C in shared memory, of each warpgroup: one is filled while the other is read."""
MOST_STAGES, LEAST_STAGES = 16, 3
FEW = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Rows of A that take the place of the atom's columns."""
RESERVED = 1024
"""Bytes of shared memory that each block on a processor takes besides: CUDA C++ Programming Guide, "Shared Memory"."""
MOST_COLUMNS = 256
GROUP = 8
SPLITS = (1, 2, 4, 8, 16)
ADDRESSES = 64
"""Registers of a thread beside its sums; the least with which NVRTC 13 spills nothing."""
ENTRY = 168
"""Registers of a thread as a block of three warpgroups begins, most."""
DOWN, UP = 40, 232
"""What the warpgroup that asks for copies gives back, so that two others may have more."""


# -- the shape of a schedule ---------------------------------------------------


def columns(s: Schedule) -> int:
    """Columns that one instruction multiplies."""
    return s.tiles[1].m if s.swap else s.tiles[1].n


def strips(s: Schedule) -> int:
    """Instructions below each other of a warpgroup."""
    return (s.tiles[1].n if s.swap else s.tiles[1].m) // STRIP


def held_rows(rows: int, *, along_k: bool) -> int:
    """Rows of a tile in shared memory: whole lines."""
    return rows if along_k else -(-rows // WIDE_ROWS) * WIDE_ROWS


def staged(s: Schedule) -> bool:
    """C passes through shared memory: halves in rows that the copy engine can address."""
    size = BY_NAME[s.types[2]].bytes
    sent = s.c == "row" and not (s.slices or s.grouped)
    return sent and s.vectors[2] * size == ALIGNED and size == WIDE and bool(panel(s))


def panel(s: Schedule) -> int:
    """Columns of C that are sent at once: as many as fill a line of shared memory, or a half or a quarter; or 0."""
    wide = STRIP if s.swap else columns(s)
    return next((x for x in (64, 32, 16) if wide % x == 0), 0)


def sums(s: Schedule) -> int:
    """Registers of a lane for sums."""
    return strips(s) * columns(s) * STRIP // WARPGROUP


def promoted(s: Schedule) -> bool:
    """Products of a stage are summed apart, and added to sums of f32 by threads.

    Of floats of eight bits the units keep 14 bits or so as they sum, which is seen from a few hundred products
    on: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    kind = BY_NAME[s.types[0]]
    return kind.bytes == 1 and kind.eps > 0


def held(s: Schedule) -> int:
    """Registers of a lane for sums, and for those of a stage."""
    return sums(s) * (2 if promoted(s) else 1)


def budgets(s: Schedule) -> tuple[int, int]:
    """Registers of a thread once warpgroups have shared them out: of the one that feeds, of others; zeros: as begun."""
    return (DOWN, UP) if s.groups > 1 and held(s) + ADDRESSES > ENTRY else (0, 0)


def registers(s: Schedule) -> int:
    """Registers of a thread as a block begins."""
    return min(held(s) + ADDRESSES, ENTRY) if s.groups > 1 else held(s) + ADDRESSES


def stage_bytes(s: Schedule) -> int:
    """Shared memory of one stage."""
    a, b, _ = (BY_NAME[x].bytes for x in s.types)
    rows = held_rows(s.block.m, along_k=s.a == "row") * a + held_rows(s.block.n, along_k=s.b == "col") * b
    return rows * s.block.k


def result_bytes(s: Schedule) -> int:
    """Shared memory for C."""
    if not staged(s):
        return 0
    lines, across = (columns(s), 1) if s.swap else (STRIP, columns(s) // panel(s))
    return s.groups * min(BUFFERS, strips(s) * across) * lines * panel(s) * WIDE


def shared_bytes(s: Schedule) -> int:
    """Shared memory of a block."""
    barriers = 8 * (2 * s.stages + 2 * s.pingpong)
    return stage_bytes(s) * s.stages + result_bytes(s) + barriers


# -- enumeration -----------------------------------------------------------------


def candidates(
    p: Problem, isa: Isa, atom: Atom, target: Target, vectors: tuple[int, int, int], *, asynchronous: bool
) -> Iterator[Schedule]:
    """Schedules for a problem, none if the copy engine cannot address its operands.

    Args:
        p: what to compute.
        isa: the instruction set.
        atom: multiplies.
        target: a device.
        vectors: elements of A, B and C that may be moved at once.
        asynchronous: the device copies to shared memory past its registers.
    """
    device = target.device
    sizes = [BY_NAME[x].bytes for x in p.types]
    if device is None or device.language != "cuda" or not asynchronous or p.k < atom.k or p.deterministic:
        return
    if p.a not in ("row", "col") or p.b not in ("row", "col"):
        return
    if any(v * x < ALIGNED for v, x in zip(vectors[:2], sizes[:2], strict=True)):
        return
    for layout, along_k, size in ((p.a, "row", sizes[0]), (p.b, "col", sizes[1])):
        if layout != along_k and size != WIDE:
            return
    sent = p.c == "row" and not p.grouped and sizes[2] == WIDE
    stored = ALIGNED // sizes[2] if sent and vectors[2] * sizes[2] >= ALIGNED else 0
    for block, part, swap, groups, pingpong in _shapes(p, atom):
        if _in_parts(p, block) or (p.grouped and pingpong):
            continue
        n = part[0] if swap else part[1]
        below = 2 * (part[1] if swap else part[0]) // STRIP
        mr, nr = (n // 4, below) if swap else (below, n // 4)
        tiles = (
            Tile("registers", mr, nr, atom.k), Tile("warp", *part, atom.k),
            Tile("shared", *block, LINE // sizes[0]), Tile("L2", GROUP * block[0], ALL, ALL),
        )  # fmt: skip
        one = Schedule(
            "wgmma", isa.name, p.dtype, tiles, (mr,), a=p.a, b=p.b, pack_a=False, pack_b=False, swap=swap,
            fused=p.fused, stages=LEAST_STAGES, vectors=(ALIGNED // sizes[0], ALIGNED // sizes[1], stored or 1),
            c="row" if p.c == "row" else "any", groups=groups, pingpong=pingpong, persistent=0 if p.grouped else 1,
            grouped=p.grouped,
        )  # fmt: skip
        if held(one) + ADDRESSES > UP:
            continue
        if not panel(one) or not stored:
            one = replace(one, vectors=(*one.vectors[:2], min(2, vectors[2])))
        yield from _fed(one, p, target)


def _in_parts(p: Problem, block: tuple[int, int]) -> bool:
    """Rows that lie side by side would fill a part of a line only: descriptors of that are in no published kernel."""
    beside = (p.a != "row", p.b != "col")
    return any(rows % WIDE_ROWS for rows, side in zip(block, beside, strict=True) if side)


def _shapes(p: Problem, atom: Atom) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool, int, bool]]:
    """Tiles of a block and of a warpgroup, whether operands are exchanged, warpgroups, and whether they take turns."""
    for n in range(64, MOST_COLUMNS + 1, 16) if p.m > STRIP else ():
        yield (2 * STRIP, n), (STRIP, n), False, 2, False
        yield (STRIP, n), (STRIP, n), False, 2, True
    for n in (64, 96, 128, 192, 256):
        yield (STRIP, n), (STRIP, n), False, 1, False
    if p.m > 2 * STRIP:
        yield (4 * STRIP, 128), (2 * STRIP, 128), False, 2, False
    for n in (96, 128) if p.m > STRIP else ():
        yield (2 * STRIP, n), (2 * STRIP, n), False, 2, True
    few = next((n for n in FEW if n >= p.m and n % atom.n == 0), 0)
    if few and p.types[0] == p.types[1]:
        for groups, below in ((1, 1), (1, 2), (2, 1), (2, 2)):
            yield (few, groups * below * STRIP), (few, below * STRIP), True, groups, False


def _fed(s: Schedule, p: Problem, target: Target) -> Iterator[Schedule]:
    """A schedule with as many stages as fit, in clusters, and with slices of k where there are few blocks."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    tiles = -(-p.m // s.block.m) * -(-p.n // s.block.n) * p.batch
    several = s.groups == 1 and 2 * registers(s) * s.threads <= device.registers
    for blocks in (1, 2) if several else (1,):
        for split in SPLITS:
            if split > 1 and (tiles * split > 2 * device.processors or s.pingpong or s.grouped):
                continue
            steps = -(-p.k // s.block.k) // split
            # What slices leave is added in the same kernel: a second one takes longer to launch than that.
            one = replace(s, split=split, joined=split > 1, persistent=s.persistent if split == 1 else 0)
            stages = min(_stages(one, target, blocks), MOST_STAGES, max(steps, LEAST_STAGES))
            if stages >= LEAST_STAGES:
                yield from _paired(replace(one, stages=stages), p, tiles > device.processors // 2)


def _stages(s: Schedule, target: Target, blocks: int) -> int:
    """Stages that fit, of so many blocks on a processor."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    whole = device.processor_shared_bytes or device.shared_bytes
    room = min(device.shared_bytes, whole // blocks - RESERVED) - BARRIERS - result_bytes(s)
    return room // stage_bytes(s)


def _paired(s: Schedule, p: Problem, many: bool) -> Iterator[Schedule]:
    """A schedule, and the same in clusters, where halves of B are whole lines."""
    yield s
    pairs = (s.b == "col" and s.block.n % 16 == 0) or s.block.n % (2 * WIDE_ROWS) == 0
    if many and pairs and not (s.swap or s.grouped) and s.split == 1 and p.m > s.block.m:
        yield replace(s, cluster=2)
