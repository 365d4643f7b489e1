"""Candidate schedules for a problem on a device.

Owns the enumeration, and the rules that make a schedule of a device legal: at each level, a tile
needs no more than the device has. As for CPUs, a handful of tiles serves every shape.

Registers of a thread: MR x NR sums, of floats twice except for small tiles (`sums_in_shared`), a row and a column of
operands, and elements in flight to shared memory; addresses take some `ADDRESSES` more. A block of threads must leave
room for `occupancy` blocks, so that one computes while another waits. Shared memory: BM x BK of A and
BK x BN of B, for each stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portmm.errors import ScheduleError
from portmm.schedule import gpu_gemv, gpu_mma, gpu_w4a16, gpu_wgmma
from portmm.schedule.gpu_variants import (
    VECTOR_BYTES,
    asynchronous,
    device_of,
    device_tiles,
    on_gpu,
    schedule_of,
    shares,
    staged,
)
from portmm.schedule.parts import ALL, LOAD, THROUGH, AtomUse, Parallel
from portmm.spec.dtype import BY_NAME, CODES_KR, dequantized_types, types
from portmm.target.device import STATIC_SHARED
from portmm.target.primitives import has_primitive, multiplies
from portmm.target.summation import sets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from portmm.schedule.parts import Tile
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

ADDRESSES, PER_VECTOR, PER_SCATTERED_VECTOR, NAIVE_ADDRESSES = 30, 4, 5, 36
"""Registers of a thread for counters and the compiler's temporaries, for the addresses of a vector that it moves, of
one whose units go to several rows of shared memory, and of threads that read operands in place. The least with which
NVRTC 13 spills nothing, of tiles of all sizes: they are not documented."""
PARTS = 4
"""NVIDIA's processors since Volta have four parts with registers of their own, and a warp stays in one."""
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
SPLIT_STEPS = 4
"""Minimum number of steps of k in a slice."""
STAGES = 3
"""Tiles in shared memory where copies are asynchronous."""
_MATRIX = {"warp": gpu_mma.candidates, "warpgroup": gpu_wgmma.candidates}
"""Scope of a matrix unit -> its schedules."""
AHEAD = 64
"""Registers for the sums of slices in flight."""
FEW = 8
"""Maximum number of sums of a thread whose totals are kept in shared memory: those of the largest tile, 2 x 4, of
devices with 64 registers for a thread, which has no registers for a second set; those of larger tiles would fill
shared memory."""
TICKET = 16
"""Bytes of shared memory that tell the threads of a block whether it is the last of its tile."""
FIXUP = "last_to_come"
"""Primitive that a split-K fixup needs: which block of a tile is the last, with the others' sums visible to it."""


def candidates(p: Problem, target: Target, vectors: tuple[int, int, int]) -> list[Schedule]:
    """Legal schedules for a problem, in a fixed order.

    Args:
        p: the problem.
        target: a device.
        vectors: elements of A, B and C that may be moved at once, as strides, sizes and
            addresses allow.

    Raises:
        ScheduleError: the device has no unit for the problem's types, or none is legal.
    """
    device_of(target)
    legal: dict[Schedule, None] = {}
    for isa, atom in units(p.dtype, target, tf32=p.tf32):
        if atom.unit:
            make = gpu_w4a16.candidates if p.b == "codes" else _MATRIX[atom.unit]
            proposed = make(p, isa, atom, target, vectors, asynchronous=asynchronous(target))
            legal |= {_bounded(s, target): None for s in _with_fixup(proposed, target) if not illegal(s, p, target)}
            continue
        programs = [] if p.b == "codes" else list(_naive(p, isa, atom, target, vectors))
        if (on_gpu(target) and atom.acc != "f64") or p.b == "codes":
            programs = [*_shared(p, isa, atom, target, vectors), *programs]
        if on_gpu(target) or p.b == "codes":
            programs += gpu_gemv.candidates(p, isa, atom, target, vectors)
        legal |= {_bounded(s, target): None for s in _with_fixup(programs, target) if not illegal(s, p, target)}
    if p.grouped:
        legal = {shares(s, grouped=True): None for s in legal if PROGRAMS[s.program].grouped and s.parallel.split == 1}
    if not legal:
        raise ScheduleError(f"no legal schedule for {p} on {target.name}")
    # M is not compiled in: batches have all sizes, weights do not.
    return [replace(s, static=(ALL, p.n, p.k)) for s in legal] if p.static else list(legal)


def _with_fixup(schedules: Iterable[Schedule], target: Target) -> Iterator[Schedule]:
    """Schedules, and those of them with a split-K fixup: slices of k are added in the same kernel."""
    language = device_of(target).language
    for s in schedules:
        yield s
        isa = target.isa(s.isa)
        if s.parallel.split > 1 and PROGRAMS[s.program].fixup and isa and has_primitive(isa, FIXUP, language):
            yield shares(s, fixup=True)


def _bounded(s: Schedule, target: Target) -> Schedule:
    """A schedule with its occupancy, where the device's compiler takes that as a bound."""
    device = device_of(target)
    limited = device.bounded and device.registers and s.program != "stream"
    bounded = shares(s, occupancy=occupancy(s, target)) if limited else s
    x = bounded.parallel
    if not x.persistent:
        return bounded
    most = device.processors * max(1, x.occupancy)
    return shares(bounded, persistent=most // x.cluster * x.cluster)


def units(dtype: str, target: Target, *, tf32: bool = False) -> list[tuple[Isa, Atom]]:
    """Instruction sets and atoms that multiply these types, best first; with `tf32`, also those that round f32 to it.

    Raises:
        ScheduleError: there are none.
    """
    pairs = []
    for isa in target.isas:
        a, b, _ = types(dtype)
        exact = (t for t in isa.atoms if (t.k_pack > 1 or t.unit) and [a, b] == [t.a, t.b] and (tf32 or not t.rounds))
        atom = next(exact, None) or isa.atom(dequantized_types(dtype))
        if atom is not None:
            pairs.append((isa, atom))
        if b == "u4":
            pairs += [(isa, t) for t in isa.atoms if t.unit == "warp" and t.a == t.b == a]
    if target.device is not None:
        pairs = [(isa, atom) for isa, atom in pairs if multiplies(isa, atom, target.device)]
    if not pairs:
        raise ScheduleError(f"{target.name} does not multiply {dtype}")
    return pairs


def illegal(s: Schedule, p: Problem, target: Target) -> str:
    """Why a schedule cannot be used for a problem on a device, or an empty string."""
    device = device_of(target)
    if s.threads > device.block_threads:
        return f"needs {s.threads} threads of {device.block_threads} in a block"
    if device.thread_registers and on_gpu(target) and registers(s) > device.thread_registers:
        return f"needs {registers(s)} registers of {device.thread_registers} in a thread"
    if device.registers and registers(s) * s.threads > device.registers:
        return f"needs {registers(s) * s.threads} registers of {device.registers} in a processor"
    most = device.shared_bytes if PROGRAMS[s.program].dynamic_shared else min(device.shared_bytes, STATIC_SHARED)
    if shared_bytes(s) > most:
        return f"needs {shared_bytes(s)} bytes of {device.shared_bytes} of shared memory"
    steps = 1 if s.program == "stream" else SPLIT_STEPS
    return (
        ""
        if s.parallel.split == 1 or p.k >= s.parallel.split * steps * s.block.k * s.atom.kr
        else "slices of k are too short"
    )


def registers(s: Schedule) -> int:
    """Registers of a thread."""
    return PROGRAMS[s.program].registers(s)


def shared_bytes(s: Schedule) -> int:
    """Shared memory of a block."""
    return PROGRAMS[s.program].shared_bytes(s) + (TICKET if s.parallel.fixup else 0)


def at_once(s: Schedule) -> int:
    """Number of slices whose sums the last block of a tile reads at once."""
    return max(1, min(s.parallel.split, AHEAD // (s.mr * s.nr)))


def _simt_registers(s: Schedule) -> int:
    """Registers of a thread of the simt program, which multiplies operands from shared memory."""
    a, b, _ = s.types
    sizes = ((s.block.m, a), (s.block.n, b))
    waiting = (
        0
        if s.a.asynchronous
        else sum(-(-x * s.block.k * s.atom.kr * BY_NAME[t].bytes // (4 * s.threads)) for x, t in sizes)
    )
    sums = s.mr * s.nr * (1 if sums_in_shared(s) else sets(a, b))
    return sums + s.mr + s.nr + waiting + ADDRESSES + _address_registers(s, 0) + _address_registers(s, 1)


def sums_in_shared(s: Schedule) -> bool:
    """Whether totals over runs of k are kept in shared memory, not in registers, by the simt program."""
    return s.mr * s.nr <= FEW and sets(*s.types[:2]) > 1


def _totals(s: Schedule) -> int:
    """Bytes of shared memory for totals over runs of k."""
    return 4 * s.mr * s.nr * s.threads if sums_in_shared(s) else 0


def _naive_registers(s: Schedule) -> int:
    """Registers of a thread of the naive program, which reads operands in place."""
    words = 2 if s.types[0] == s.types[1] == "f64" else 1
    parts = s.mr + s.nr
    return words * (sets(*s.types[:2]) * s.mr * s.nr + parts) + 2 * parts + NAIVE_ADDRESSES


def _address_registers(s: Schedule, side: int) -> int:
    """Registers for the addresses of the vectors of A (0) or B (1) that a thread moves: `gpu.global_to_shared`."""
    along_k = s.along_k(side)
    rows, vector = (s.block.m, s.block.n)[side], (s.a, s.b)[side].vector
    units = max(1, vector // s.atom.kr) if along_k else 1
    vector_rows = 1 if along_k else vector
    transfers = -(-(rows // vector_rows) * (s.block.k // units) // s.threads)
    return transfers * (PER_SCATTERED_VECTOR + (s.atom.kr > 1) if along_k and not s.a.asynchronous else PER_VECTOR)


@dataclass(frozen=True, slots=True)
class Program:
    """Resources and features of a block program of devices.

    Attributes:
        registers: of a thread.
        shared_bytes: of a block.
        dynamic_shared: it may have more shared memory than a kernel has statically.
        grouped: it supports grouped matmuls, whose blocks find the group of their rows.
        fixup: its last block of a tile can add the sums of all slices of k, on devices that order memory.
    """

    registers: Callable[[Schedule], int]
    shared_bytes: Callable[[Schedule], int]
    dynamic_shared: bool = False
    grouped: bool = False
    fixup: bool = False


_W4A16 = Program(gpu_w4a16.registers, gpu_w4a16.shared_bytes, dynamic_shared=True)
PROGRAMS = {
    "simt": Program(
        _simt_registers,
        lambda s: (s.block.m + s.block.n) * s.block.k * 4 * s.stages + _totals(s),
        grouped=True,
        fixup=True,
    ),
    "direct": Program(_naive_registers, lambda _: 0, grouped=True),
    "stream": Program(gpu_gemv.registers, gpu_gemv.shared_bytes),
    "mma": Program(gpu_mma.registers, gpu_mma.shared_bytes, dynamic_shared=True, grouped=True, fixup=True),
    "wgmma": Program(gpu_wgmma.registers, gpu_wgmma.shared_bytes, dynamic_shared=True, grouped=True),
    **dict.fromkeys(gpu_w4a16.PROGRAMS, _W4A16),
}
"""Block programs by name, those of `lower.GRID_PROGRAMS`."""


def occupancy(s: Schedule, target: Target) -> int:
    """Number of blocks that run on a processor at once."""
    device = device_of(target)
    most = [8]
    if device.registers:
        each = -(-registers(s) // 8) * 8  # registers are allocated in groups of 8
        warps = PARTS * (device.registers // (PARTS * each * device.warp))
        most.append(warps * device.warp // s.threads)
    if device.threads:
        most.append(device.threads // s.threads)
    if shared_bytes(s) and device.processor_shared_bytes:
        most.append(device.processor_shared_bytes // (shared_bytes(s) + gpu_wgmma.RESERVED))
    return max(1, min(most))


def _warp(lanes: int) -> tuple[int, int]:
    """Threads of a warp, down and across: as square as possible, with no fewer across than down."""
    down = 1 << (lanes.bit_length() - 1) // 2
    return down, lanes // down


def _shared(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: tuple[int, int, int]) -> Iterator[Schedule]:
    """Schedules of the simt program, with tiles in shared memory."""
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


def _naive(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: tuple[int, int, int]) -> Iterator[Schedule]:
    """Schedules of the naive program, which reads operands in place."""
    if atom.k_pack > 1:
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
