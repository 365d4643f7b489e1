"""Candidate schedules for the matrix units of warpgroups: see `kernels.gpu.wgmma`.

Owns their enumeration, their registers and shared memory, and the shape of a warpgroup's tile. The copy engine needs
addresses and strides that are multiples of 16 bytes: for other operands there are no candidates here.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, gcd
from typing import TYPE_CHECKING

from portmm.schedule.parts import TMA, AtomUse, Parallel
from portmm.schedule.program import (
    Program,
    Waves,
    asynchronous,
    blocks,
    compulsory,
    counted,
    device_of,
    device_tiles,
    partitioned,
    schedule_of,
    with_stages,
)
from portmm.schedule.roofline import Work
from portmm.schedule.schedule import WARPGROUP
from portmm.spec.convolution import of_windows
from portmm.spec.dtype import BY_NAME
from portmm.target.device import RESERVED
from portmm.target.model import DEVICE as MODEL
from portmm.util.memo import cached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portmm.schedule.program import Vectors
    from portmm.schedule.schedule import Schedule
    from portmm.spec.convolution import Convolution
    from portmm.spec.epilogue import Operand
    from portmm.spec.layout import Layout
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

STRIP = 64
"""Rows that one instruction multiplies."""
LINE = 128
"""Bytes of a swizzled row of shared memory: the depth of a tile."""
SWIZZLED = 1024
"""Alignment of tiles, in bytes: eight swizzled rows."""
WIDE_ROWS = 64
"""Rows of a tile in one swizzled row where M or N is contiguous, for elements of two bytes."""
WIDE = 2
ALIGNED = 16
"""Alignment in bytes that the copy engine needs of addresses and strides."""
BARRIERS = 1024
"""Bytes of shared memory for barriers, and for the alignment of the buffers behind them."""
BUFFERS = 2
"""Buffers for panels of C in shared memory, per warpgroup: one is filled while the other is read."""
SLOTS, MOST = 3, 2
"""Panels of arrays of C's size that are in shared memory at once, per warpgroup, and number of such arrays."""
PLANE = 2
"""Dimensions of images that the copy engine reads windows of."""
MOST_CORNER, MOST_STEP = 128, 8
"""Bounds of a corner of the pixels at which windows begin, and of their distance."""
VIEWS = 64
"""Views that are remembered: each is asked for by all candidates."""
MOST_STAGES, LEAST_STAGES = 16, 3
FEW = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Rows of A that replace the atom's columns."""
MOST_COLUMNS = 256
SPLITS = (1, 2, 4, 8, 16)


# -- the shape of a schedule ---------------------------------------------------


def columns(s: Schedule) -> int:
    """Columns that one instruction multiplies."""
    return s.tiles[1].m if s.atom.swap else s.tiles[1].n


def strips(s: Schedule) -> int:
    """Number of instructions of a warpgroup along M."""
    return (s.tiles[1].n if s.atom.swap else s.tiles[1].m) // STRIP


def padded_rows(rows: int, *, along_k: bool) -> int:
    """Rows of a tile in shared memory, padded to whole swizzled rows."""
    return rows if along_k else -(-rows // WIDE_ROWS) * WIDE_ROWS


def staged(s: Schedule) -> bool:
    """Whether C is stored through shared memory: elements of 16 bits in rows that the copy engine can address."""
    size = BY_NAME[s.types[2]].bytes
    sent = s.c.layout == "row" and not (s.slices or s.parallel.grouped)
    return sent and s.c.vector * size == ALIGNED and size == WIDE and bool(panel(s))


def panel(s: Schedule) -> int:
    """Columns of C that are stored at once: as many as fill a swizzled row, or a half or a quarter of it; or 0."""
    n = STRIP if s.atom.swap else columns(s)
    return next((x for x in (64, 32, 16) if n % x == 0), 0)


def column_operands(s: Schedule) -> tuple[int, ...]:
    """Operands of columns alone of a fused epilogue, whose elements of a tile wait in shared memory."""
    return _operands(s, lambda x: {"n"} <= set(x.axes) <= {"b", "n"})


def whole_operands(s: Schedule) -> tuple[int, ...]:
    """Operands of rows and columns of a fused epilogue, of 16 bits, whose panels come through shared memory."""
    axes = {"m", "n"}, {"b", "m", "n"}
    whole = _operands(s, lambda x: axes[0] <= set(x.axes) <= axes[1] and BY_NAME[x.dtype].bytes == WIDE)
    return whole[:MOST]


def _operands(s: Schedule, comes: Callable[[Operand], bool]) -> tuple[int, ...]:
    """Operands that are read alone, and whose elements lie side by side."""
    if not s.fused or s.atom.swap or not staged(s):
        return ()
    written = dict(s.fused.results)
    return tuple(i for i, x in enumerate(s.fused.operands) if i not in written and x.dense and comes(x))


def panel_rows(s: Schedule) -> int:
    """Number of rows of C of a panel, which one TMA store sends."""
    return columns(s) if s.atom.swap else STRIP


def panels(s: Schedule) -> int:
    """Number of panels of the tile of a warpgroup."""
    return strips(s) * (1 if s.atom.swap else columns(s) // panel(s))


def panel_buffers(s: Schedule) -> int:
    """Number of panels in shared memory of each warpgroup: of C, or of operands, whose results take their place."""
    read = len(whole_operands(s))
    return min(SLOTS, panels(s)) * read if read else min(BUFFERS, panels(s))


@cached("routes", VIEWS)
def boxes(view: Layout, dtype: str) -> tuple[Convolution, tuple[int, ...]] | None:
    """Convolution whose windows the copy engine reads by itself, and the strides of its images; or None.

    It takes images of two dimensions whose channels fill lines, and eight bits of each coordinate of a window: CUDA
    Driver API, cuTensorMapEncodeIm2col.
    """
    images, size = of_windows(view), BY_NAME[dtype].bytes
    if images is None or len(images[0].spatial) != PLANE or images[0].channels * size % LINE:
        return None
    x, (*strides, channel) = images
    ends = [n - (reach - 1) for n, reach in zip(x.after, x.reach, strict=True)]
    inside = all(-MOST_CORNER <= y < MOST_CORNER for y in (*(-n for n in x.before), *ends))
    near = max(x.reach) <= 2 * MOST_CORNER and max(x.stride) <= MOST_STEP
    return images if inside and near and channel == 1 and _nested(x, strides, size) else None


def _nested(x: Convolution, strides: list[int], size: int) -> bool:
    """Whether steps along each axis of images are multiples of those below, no less than what these take, and aligned.

    Strides of axes of length 1 are not used; that of a single image is 0.
    """
    within, below = x.channels, 1
    for n, step in zip((*reversed(x.spatial), 0), reversed(strides), strict=True):
        if n == 1 or not (n or step):
            continue
        if step < within or step % below or step * size % ALIGNED:
            return False
        within, below = n * step, step
    return True


def sharing(s: Schedule) -> int:
    """Blocks of a cluster that load the same columns of B; of int4 values they have slices of k instead."""
    return 1 if s.b.layout == "codes" else s.parallel.cluster


def sums(s: Schedule) -> int:
    """Registers of a lane for sums."""
    return strips(s) * columns(s) * STRIP // WARPGROUP


def promoted(s: Schedule) -> bool:
    """Whether products of a stage have their own sums, which threads add to sums of f32.

    For floats of eight bits the units keep about 14 bits of a sum, which is measurable from a few hundred products
    on: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    return _apart(s.types[0])


def _apart(dtype: str) -> bool:
    """Whether products of floats of this type have sums of their own: see `promoted`."""
    return BY_NAME[dtype].bytes == 1 and BY_NAME[dtype].eps > 0


def sum_registers(s: Schedule) -> int:
    """Registers of a lane for sums, and for those of a stage; of int4 values also for what is made of them."""
    if s.b.layout == "codes":
        return int(sums(s) + MODEL.unfolding_registers * (2 * strips(s) - 1))
    return sums(s) * (2 if promoted(s) else 1)


def budgets(s: Schedule) -> tuple[int, int]:
    """Registers of a thread of the producer and of the consumer warpgroups; zeros where they stay as allocated."""
    exchanged = s.parallel.warpgroups > 1 and sum_registers(s) + MODEL.wgmma_addresses > MODEL.entry_registers
    return (MODEL.producer_registers, MODEL.consumer_registers) if exchanged else (0, 0)


def spans(s: Schedule) -> int:
    """Runs of k of a stage that share the scales of int4 values."""
    return s.block.k // gcd(s.b.group, s.block.k)


def registers(s: Schedule) -> int:
    """Registers of a thread at the start of a block."""
    own = int(sum_registers(s) + MODEL.wgmma_addresses)
    return min(own, MODEL.entry_registers) if s.parallel.warpgroups > 1 else own


def stage_bytes(s: Schedule) -> int:
    """Shared memory of one stage."""
    a, b, _ = (BY_NAME[x].bytes for x in s.types)
    if s.b.layout == "codes":
        factors = 2 * BY_NAME["f32"].bytes * spans(s)
        return s.block.m * s.block.k * a + s.block.n * (s.block.k // 2 + factors)
    rows = (
        padded_rows(s.block.m, along_k=s.a.layout == "row") * a
        + padded_rows(s.block.n, along_k=s.b.layout == "col") * b
    )
    return rows * s.block.k


def result_bytes(s: Schedule) -> int:
    """Shared memory for C, and for operands of fused expressions."""
    if not staged(s):
        return 0
    operands = s.fused.operands if s.fused else ()
    of_columns = sum(columns(s) * BY_NAME[operands[i].dtype].bytes for i in column_operands(s))
    groups = s.parallel.warpgroups // k_groups(s)
    return groups * (panel_buffers(s) * panel_rows(s) * panel(s) * WIDE + of_columns)


def k_groups(s: Schedule) -> int:
    """Warpgroups that take turns at the steps of k of the same tile, of int4 values."""
    return s.parallel.warpgroups * s.tiles[1].n // s.block.n if s.b.layout == "codes" else 1


def far_sums(s: Schedule) -> int:
    """Sums that other blocks of a cluster, which have slices of k, send to the first."""
    return (s.parallel.cluster // sharing(s) - 1) * sums(s) * s.parallel.warpgroups // k_groups(s) * WARPGROUP


def near_sums(s: Schedule) -> int:
    """Sums that other warpgroups of a tile leave for the first."""
    return (k_groups(s) - 1) * sums(s) * s.parallel.warpgroups // k_groups(s) * WARPGROUP


def moved_bytes(s: Schedule) -> int:
    """Shared memory for sums of other warpgroups and blocks."""
    return (far_sums(s) + near_sums(s)) * BY_NAME["f32"].bytes


def shared_bytes(s: Schedule) -> int:
    """Shared memory of a block."""
    barriers = 8 * (2 * s.stages + 2 * s.parallel.pingpong)
    return stage_bytes(s) * s.stages + result_bytes(s) + moved_bytes(s) + barriers


# -- enumeration -----------------------------------------------------------------


def candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules for a problem, none if the copy engine cannot address its operands."""
    sizes = [BY_NAME[x].bytes for x in p.types]
    if atom.unit != "warpgroup" or not asynchronous(target) or p.k < atom.k or p.deterministic:
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
        # Where threads add the sums of a stage, both warpgroups multiply in each other's pauses: in turns on tiles of
        # their own they took 1.4 times the time on an H200.
        if _partly_filled(p, block) or (pingpong and (p.grouped or _apart(p.types[0]))):
            continue
        n = part[0] if swap else part[1]
        rows = 2 * (part[1] if swap else part[0]) // STRIP
        mr, nr = (n // 4, rows) if swap else (rows, n // 4)
        tiles = device_tiles((mr, nr, atom.k), (*part, atom.k), (*block, LINE // sizes[0]))
        parallel = Parallel(warpgroups=groups, pingpong=pingpong, persistent=0 if p.grouped else 1, grouped=p.grouped)
        moved = (ALIGNED // sizes[0], ALIGNED // sizes[1], stored or 1)
        one = schedule_of("wgmma", p, isa, tiles, TMA, moved, AtomUse(swap=swap), parallel)
        if sum_registers(one) + MODEL.wgmma_addresses > MODEL.consumer_registers:
            continue
        if not panel(one) or not stored:
            one = replace(one, c=one.c.moved(min(2, vectors[2])))
        yield from _staged(one, p, target)


def _partly_filled(p: Problem, block: tuple[int, int]) -> bool:
    """Whether M or N is contiguous and fills a part of a swizzled row: no published kernel has descriptors of that."""
    contiguous = (p.a != "row", p.b != "col")
    return any(rows % WIDE_ROWS for rows, side in zip(block, contiguous, strict=True) if side)


def _shapes(p: Problem, atom: Atom) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool, int, bool]]:
    """Tiles of a block and of a warpgroup, whether operands are exchanged, warpgroups, and whether they alternate."""
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
        for groups, strip in ((1, 1), (1, 2), (2, 1), (2, 2)):
            yield (few, groups * strip * STRIP), (few, strip * STRIP), True, groups, False


def _staged(s: Schedule, p: Problem, target: Target) -> Iterator[Schedule]:
    """Variants with as many stages as fit, in clusters, and with slices of k where there are few blocks."""
    device, x, tiles = device_of(target), s.parallel, blocks(s, p)
    several = x.warpgroups == 1 and 2 * registers(s) * s.threads <= device.registers
    for together in (1, 2) if several else (1,):
        for split in SPLITS:
            if split > 1 and (tiles * split > 2 * device.processors or x.pingpong or x.grouped):
                continue
            steps = -(-p.k // s.block.k) // split
            # Sums of slices are added in the same kernel: that takes less time than a second launch.
            one = partitioned(s, split=split, fixup=split > 1, persistent=x.persistent if split == 1 else 0)
            stages = min(stages_of(one, target, together), MOST_STAGES, max(steps, LEAST_STAGES))
            if stages >= LEAST_STAGES:
                yield from _paired(with_stages(one, stages, TMA), p, tiles > device.processors // 2)


def stages_of(s: Schedule, target: Target, blocks: int) -> int:
    """Number of stages that fit, for a number of blocks on a processor."""
    device = device_of(target)
    whole = device.processor_shared_bytes or device.shared_bytes
    room = min(device.shared_bytes, whole // blocks - RESERVED) - BARRIERS - result_bytes(s) - moved_bytes(s)
    return room // stage_bytes(s)


def _paired(s: Schedule, p: Problem, many: bool) -> Iterator[Schedule]:
    """A schedule, and the same in clusters, where halves of B are whole swizzled rows."""
    yield s
    pairs = (s.b.layout == "col" and s.block.n % 16 == 0) or s.block.n % (2 * WIDE_ROWS) == 0
    if many and pairs and not (s.atom.swap or s.parallel.grouped) and s.parallel.split == 1 and p.m > s.block.m:
        yield partitioned(s, cluster=2)


# -- work --------------------------------------------------------------------------


def work(p: Problem, s: Schedule, atom: Atom, target: Target, occupied: int) -> Work:
    """Work of the busiest processor."""
    del atom
    x, processors = s.parallel, device_of(target).processors
    tiles = ceil(p.m / (s.block.m * x.cluster)) * -(-p.n // s.block.n) * p.batch * x.split * x.cluster
    rounds, steps = ceil(tiles / min(processors // x.cluster * x.cluster, tiles)), Waves.of(p, s, target, 1).steps
    a, b, _ = (BY_NAME[t].bytes for t in p.types)
    sums_of_block, copied = s.block.m * s.block.n, s.block.m * a + s.block.n * b / x.cluster
    # Each instruction reads its 64 rows and all of its columns from shared memory.
    read = sums_of_block // columns(s) * a + sums_of_block // STRIP * b + s.block.m * a + s.block.n * b
    counts = {
        "multiply-adds": rounds * sums_of_block * steps * s.block.k,
        "shared memory": rounds * steps * s.block.k * read * MODEL.engine_read,
        "L2": rounds * steps * s.block.k * copied / MODEL.tile_gain,
        "latency": rounds * steps * MODEL.engine_wait / (s.stages * min(occupied, rounds)),
        "memory": compulsory(p),
    }
    if promoted(s):
        counts["additions"] = rounds * steps * sums_of_block
    # Stores, and the waits of a step, are hidden while other warpgroups or blocks multiply.
    others = max(2 if x.pingpong else 1, min(occupied, rounds))
    stored = sums(s) * x.warpgroups / (2 if x.pingpong else 1) * (MODEL.sending if staged(s) else MODEL.ending)
    waits = (1 if x.pingpong else ceil(rounds / others)) * (stored + MODEL.meet)
    waits += rounds * steps * MODEL.tile_step / max(others, 1 if x.pingpong else x.warpgroups)
    # A stage is empty when both blocks of a cluster have multiplied it.
    waits += rounds * steps * MODEL.paired_step if x.cluster > 1 else 0.0
    return Work(counts, MODEL.tile_start + waits)


PROGRAM = Program(
    "gpu.wgmma", candidates, counted(registers, shared_bytes), work, device=True, dynamic_shared=True, grouped=True
)
