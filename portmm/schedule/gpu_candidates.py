"""The schedules worth considering for a problem on a device.

Owns the enumeration, and what makes a schedule of a device legal: at each level, what a tile
needs is no more than there is. Imports `schedule.schedule`, `spec.problem`, `target.target`. As for CPUs, a
handful of tiles serves every shape.

Registers of a thread: MR x NR sums, of floats twice but for few (`beside`), a row and a column of operands,
and what is on its way to shared memory; addresses take some `ADDRESSES` more. A block of threads must leave room for
`resident` blocks, so that one computes while another waits. Shared memory: BM x BK of A and
BK x BN of B, as often as there are stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.schedule import gpu_gemv, gpu_mma, gpu_w4a16, gpu_wgmma
from portmm.schedule.schedule import ALL, Schedule, Tile
from portmm.spec.dtype import BY_NAME, CODES_KR, types, unfolded
from portmm.target.device import STATIC_SHARED
from portmm.target.summation import sets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from portmm.spec.problem import Problem
    from portmm.target.target import Atom, Isa, Target

ADDRESSES, PIECE, SPREAD_PIECE, DIRECT_ADDRESSES = 30, 4, 5, 36
"""Registers of a thread for counters and what a compiler needs, for the addresses of a piece that it moves, of one
whose units go to several rows of shared memory, and of threads that read where operands lie. The least with which
NVRTC 13 spills nothing, of tiles of all sizes: no document says them."""
PARTS = 4
"""NVIDIA's processors since Volta have four parts with registers of their own, and a warp stays in one."""
MOST_VECTOR = 16
"""Bytes that a thread moves at once, at most."""
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
GROUP = 8
"""Rows of tiles that are swept together: what they read of B stays in L2."""
SPLITS = (1, 2, 4, 8, 16, 32)
SPLIT_STEPS = 4
"""Steps of k that a slice has at least."""
ASYNCHRONOUS = 80
"""PTX ISA, cp.async: architectures from sm_80 on."""
STAGES = 3
"""Tiles in shared memory where copies are asynchronous."""
_MATRIX = {"warp": gpu_mma.candidates, "warpgroup": gpu_wgmma.candidates}
"""Who multiplies together -> its schedules."""
AHEAD = 64
"""Registers for the sums of slices that are on their way."""
FEW = 8
"""Sums of a thread, at most, whose totals wait in shared memory: those of the largest tile, 2 x 4, of devices with 64
registers for a thread, which has no room for a second set there; those of larger tiles would fill shared memory."""
TICKET = 16
"""Bytes of shared memory in which the threads of a block learn whether it is the last of its tile."""
BUSY = 2
"""Blocks for each processor from which k need not be split."""


def asynchronous(target: Target) -> bool:
    """The device copies to shared memory past its registers."""
    device = target.device
    number = device.architecture.rstrip("af") if device else ""
    return number.isdigit() and int(number) >= ASYNCHRONOUS


def candidates(p: Problem, target: Target, vectors: tuple[int, int, int]) -> list[Schedule]:
    """Legal schedules for a problem, in a fixed order.

    Args:
        p: what to compute.
        target: a device.
        vectors: elements of A, B and C that may be moved at once, as strides, sizes and
            addresses allow.

    Raises:
        ScheduleError: the device has no unit for the problem's types, or none is legal.
    """
    if target.device is None:
        raise ScheduleError(f"{target.name} is no device")
    found: dict[Schedule, None] = {}
    for isa, atom in units(p.dtype, target, tf32=p.tf32):
        if atom.unit:
            make = gpu_w4a16.candidates if p.b == "codes" else _MATRIX[atom.unit]
            ways = make(p, isa, atom, target, vectors, asynchronous=asynchronous(target))
            found |= {_bounded(s, target): None for s in _joined(ways, target) if not illegal(s, p, target)}
            continue
        programs = [] if p.b == "codes" else list(_direct(p, isa, atom, target, vectors))
        if (on_gpu(target) and atom.acc != "f64") or p.b == "codes":
            programs = [*_shared(p, isa, atom, target, vectors), *programs]
        if on_gpu(target) or p.b == "codes":
            programs += gpu_gemv.candidates(p, isa, atom, target, vectors)
        found |= {_bounded(s, target): None for s in _joined(programs, target) if not illegal(s, p, target)}
    if p.grouped:
        found = {replace(s, grouped=True): None for s in found if PROGRAMS[s.program].grouped and s.split == 1}
    if not found:
        raise ScheduleError(f"no legal schedule for {p} on {target.name}")
    # Rows may be any number: batches come in all sizes, weights do not.
    return [replace(s, static=(ALL, p.n, p.k)) for s in found] if p.static else list(found)


def _joined(every: Iterable[Schedule], target: Target) -> Iterator[Schedule]:
    """Schedules, and those whose slices of k are added in the same kernel."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    for s in every:
        yield s
        if s.split > 1 and PROGRAMS[s.program].joins and device.language == "cuda":
            yield replace(s, joined=True)


def _bounded(s: Schedule, target: Target) -> Schedule:
    """A schedule that says how many blocks share a processor's registers, where its compiler takes that."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    limited = device.language == "cuda" and device.registers and s.program != "stream"
    bounded = replace(s, resident=resident(s, target)) if limited else s
    if not s.persistent:
        return bounded
    blocks = device.processors * max(1, bounded.resident)
    return replace(bounded, persistent=blocks // s.cluster * s.cluster)


def on_gpu(target: Target) -> bool:
    """Threads run in step and share memory of their own, unlike those of a CPU under OpenCL."""
    return target.device is not None and not target.device.lanes


def units(dtype: str, target: Target, *, tf32: bool = False) -> list[tuple[Isa, Atom]]:
    """What can multiply these types, best first; with `tf32`, also what rounds f32 to it.

    Raises:
        ScheduleError: nothing can.
    """
    found = []
    for isa in target.isas:
        a, b, _ = types(dtype)
        exact = (t for t in isa.atoms if (t.k_pack > 1 or t.unit) and [a, b] == [t.a, t.b] and (tf32 or a != "f32"))
        atom = next(exact, None) or isa.atom(unfolded(dtype))
        if atom is not None:
            found.append((isa, atom))
        if b == "u4":
            found += [(isa, t) for t in isa.atoms if t.unit == "warp" and t.a == t.b == a]
    if target.device is not None and target.device.language != "cuda":
        # OpenCL has no word for units that threads multiply with together.
        found = [(isa, atom) for isa, atom in found if not atom.unit]
    if not found:
        raise ScheduleError(f"{target.name} does not multiply {dtype}")
    return found


def illegal(s: Schedule, p: Problem, target: Target) -> str:
    """Why a schedule cannot be used for a problem on a device, or an empty string."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    if s.threads > device.block_threads:
        return f"needs {s.threads} threads of {device.block_threads} in a block"
    if device.thread_registers and on_gpu(target) and registers(s) > device.thread_registers:
        return f"needs {registers(s)} registers of {device.thread_registers} in a thread"
    if device.registers and registers(s) * s.threads > device.registers:
        return f"needs {registers(s) * s.threads} registers of {device.registers} in a processor"
    most = device.shared_bytes if PROGRAMS[s.program].asks else min(device.shared_bytes, STATIC_SHARED)
    if shared_bytes(s) > most:
        return f"needs {shared_bytes(s)} bytes of {device.shared_bytes} of shared memory"
    steps = 1 if s.program == "stream" else SPLIT_STEPS
    return "" if s.split == 1 or p.k >= s.split * steps * s.block.k * s.kr else "slices of k are too short"


def registers(s: Schedule) -> int:
    """Registers of a thread."""
    return PROGRAMS[s.program].registers(s)


def shared_bytes(s: Schedule) -> int:
    """Shared memory of a block."""
    return PROGRAMS[s.program].shared_bytes(s) + (TICKET if s.joined else 0)


def at_once(s: Schedule) -> int:
    """Slices whose sums the last block of a tile reads at once."""
    return max(1, min(s.split, AHEAD // (s.mr * s.nr)))


def _of_threads(s: Schedule) -> int:
    """Registers of a thread that multiplies what it loads from shared memory."""
    a, b, _ = s.types
    sizes = ((s.block.m, a), (s.block.n, b))
    waiting = 0 if s.copies else sum(-(-x * s.block.k * s.kr * BY_NAME[t].bytes // (4 * s.threads)) for x, t in sizes)
    sums = s.mr * s.nr * (1 if beside(s) else sets(a, b))
    return sums + s.mr + s.nr + waiting + ADDRESSES + _turns(s, 0) + _turns(s, 1)


def beside(s: Schedule) -> bool:
    """Sums of runs of k wait in shared memory, not in registers, of threads that multiply what lies there."""
    return s.mr * s.nr <= FEW and sets(*s.types[:2]) > 1


def _totals(s: Schedule) -> int:
    """Bytes of shared memory in which they wait."""
    return 4 * s.mr * s.nr * s.threads if beside(s) else 0


def _of_readers(s: Schedule) -> int:
    """Registers of a thread that reads operands where they lie."""
    words = 2 if s.types[0] == s.types[1] == "f64" else 1
    parts = s.mr + s.nr
    return words * (sets(*s.types[:2]) * s.mr * s.nr + parts) + 2 * parts + DIRECT_ADDRESSES


def _turns(s: Schedule, side: int) -> int:
    """Registers for the addresses of the pieces of A (0) or B (1) that a thread moves: see `kernels.feeding`."""
    along_k = s.along_k(side)
    rows, vector = (s.block.m, s.block.n)[side], s.vectors[side]
    units = max(1, vector // s.kr) if along_k else 1
    lines = 1 if along_k else vector
    turns = -(-(rows // lines) * (s.block.k // units) // s.threads)
    return turns * (SPREAD_PIECE + (s.kr > 1) if along_k and not s.copies else PIECE)


@dataclass(frozen=True, slots=True)
class Program:
    """What a block program of devices needs, and what can be asked of it.

    Attributes:
        registers: of a thread.
        shared_bytes: of a block.
        asks: it may have more shared memory than a kernel has unasked.
        grouped: its blocks find the group that their rows are of.
        joins: its last block of a tile can add what all slices of k summed, on devices that order memory.
    """

    registers: Callable[[Schedule], int]
    shared_bytes: Callable[[Schedule], int]
    asks: bool = False
    grouped: bool = False
    joins: bool = False


_CODED = Program(gpu_w4a16.registers, gpu_w4a16.shared_bytes, asks=True)
PROGRAMS = {
    "simt": Program(
        _of_threads, lambda s: (s.block.m + s.block.n) * s.block.k * 4 * s.stages + _totals(s), grouped=True, joins=True
    ),
    "direct": Program(_of_readers, lambda _: 0, grouped=True),
    "stream": Program(gpu_gemv.registers, gpu_gemv.shared_bytes),
    "mma": Program(gpu_mma.registers, gpu_mma.shared_bytes, asks=True, grouped=True, joins=True),
    "wgmma": Program(gpu_wgmma.registers, gpu_wgmma.shared_bytes, asks=True, grouped=True),
    **dict.fromkeys(gpu_w4a16.PROGRAMS, _CODED),
}
"""By name; those of `lower.GRID_PROGRAMS`."""


def resident(s: Schedule, target: Target) -> int:
    """Blocks that a processor holds at once."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    most = [8]
    if device.registers:
        each = -(-registers(s) // 8) * 8  # registers are given out in groups of 8
        warps = PARTS * (device.registers // (PARTS * each * device.warp))
        most.append(warps * device.warp // s.threads)
    if device.threads:
        most.append(device.threads // s.threads)
    if shared_bytes(s) and device.processor_shared_bytes:
        most.append(device.processor_shared_bytes // (shared_bytes(s) + gpu_wgmma.RESERVED))
    return max(1, min(most))


def _warp(lanes: int) -> tuple[int, int]:
    """Threads of a warp, down and across: as square as can be, rather wide."""
    down = 1 << (lanes.bit_length() - 1) // 2
    return down, lanes // down


def _shared(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: tuple[int, int, int]) -> Iterator[Schedule]:
    """Tiles that pass through shared memory."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    down, across = _warp(max(device.warp, 16))
    for mr, nr in TILES:
        for high, wide in WARPS:
            bm, bn = mr * down * high, nr * across * wide
            depth = DEPTH if (bm + bn) * DEPTH * 8 <= device.shared_bytes else DEPTH // 2
            warp, block = Tile("warp", mr * down, nr * across, 1), Tile("shared", bm, bn, depth)
            tiles = (Tile("registers", mr, nr, 1), warp, block, Tile("L2", GROUP * bm, ALL, ALL))
            cell = (min(mr, 4), min(nr, 4))
            one = _schedule("simt", p, isa, atom, tiles, cell, vectors)
            if one is not None:
                yield from _fed(one, p, atom, target)


def _fed(s: Schedule, p: Problem, atom: Atom, target: Target) -> Iterator[Schedule]:
    """A schedule with its stages, and with slices of k where there are few blocks."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    plain = set(s.types[:2]) == {"f32"} and atom.k_pack == 1
    ways = [replace(s, stages=2)]
    if asynchronous(target) and plain:
        ways.append(replace(s, stages=STAGES, copies=True))
    tiles = -(-p.m // s.block.m) * -(-p.n // s.block.n) * p.batch
    for way in ways:
        for split in SPLITS:
            if split == 1 or tiles * split <= BUSY * device.processors:
                yield replace(way, split=split)


def _schedule(  # noqa: PLR0917 - parts of one record
    program: str, p: Problem, isa: Isa, atom: Atom, tiles: tuple[Tile, ...], cell: tuple[int, int],
    vectors: tuple[int, int, int],
) -> Schedule | None:  # fmt: skip
    """A schedule whose operands are moved as wide as they may be, or None if tiles are too small for threads."""
    s = Schedule(
        program, isa.name, p.dtype, tiles, (tiles[0].m,), a=p.a, b=p.b, pack_a=False, pack_b=False, kr=atom.k_pack,
        fused=p.fused, stages=1, cell=cell, c="row" if p.c == "row" else "any", group=gpu_gemv.group_of(p),
    )  # fmt: skip
    if program == "direct":
        return replace(s, vectors=(1, 1, min(vectors[2], cell[1])))
    wide = [_piece(s, side, vectors[side]) for side in (0, 1)]
    if 0 in wide:
        return None
    return replace(s, vectors=(wide[0], wide[1], _stored(p, cell, vectors[2])))


def _stored(p: Problem, cell: tuple[int, int], vector: int) -> int:
    return min(vector, cell[1]) if p.c == "row" else 1


def _piece(s: Schedule, side: int, vector: int) -> int:
    """Elements of A (0) or B (1) that a thread moves at once; 0 if there are fewer of them than threads."""
    layout = (s.a, s.b)[side]
    if layout == "codes":
        return CODES_KR
    rows, size = (s.block.m, s.block.n)[side], BY_NAME[s.types[side]].bytes
    along_k = s.along_k(side)
    most = min(vector, MOST_VECTOR // size) if layout != "any" else 1
    if s.kr > 1:
        # Units of four bytes are moved whole, or woven from rows of four.
        most = (most if along_k else min(most, s.kr)) if most >= s.kr else 1
        deep = max(1, most // s.kr) if along_k else 1
    else:
        deep = most if along_k else 1
    high = 1 if along_k else most
    while most > 1 and (s.block.k % deep or rows % high or rows * s.block.k < s.threads * deep * high):
        if s.kr > 1 and most <= s.kr:
            return 1 if rows * s.block.k >= s.threads else 0
        most //= 2
        deep, high = (max(1, most // s.kr), 1) if along_k else (1, most)
    return most if rows * s.block.k >= s.threads else 0


def _direct(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: tuple[int, int, int]) -> Iterator[Schedule]:
    """Tiles that are read where they lie."""
    if atom.k_pack > 1:
        return
    gpu = on_gpu(target)
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    lanes = max(device.warp, 16) if gpu else LANES
    shapes = ((4, 4), (4, 1), (1, 4), (2, 2), (1, 1)) if gpu else LANE_TILES
    for mr, nr in shapes:
        for high in (1, 4) if gpu else (1,):
            tiles = (
                Tile("registers", mr, nr, 1), Tile("warp", mr, nr * lanes, 1),
                Tile("shared", mr * high, nr * lanes, 1), Tile("L2", GROUP * mr * high, ALL, ALL),
            )  # fmt: skip
            one = _schedule("direct", p, isa, atom, tiles, (mr, 1), vectors)
            if one is not None:
                yield one
