"""Candidate schedules for a product with few rows on a device (gemv, skinny gemm): see `kernels.gpu.gemv`.

Owns their enumeration, and their registers and shared memory. They differ in the bytes in flight, the length of
the runs that neighbouring threads read, and the number of blocks; the cost model selects.
On CPUs under OpenCL `kernels.gpu.naive` streams as fast, without barriers.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from portmm.schedule.parts import ALL, LOAD, AtomUse, Tile
from portmm.schedule.program import Program, Waves, compulsory, device_of, on_gpu, partitioned, schedule_of
from portmm.schedule.roofline import Work
from portmm.spec.dtype import BY_NAME, CODES_KR, size
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portmm.schedule.program import Footprint, Vectors
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

ROWS = 8
"""Maximum M: with more rows, multiply-adds take longer than B."""
BANKS = 32
SPLITS = (2, 4, 8, 16, 32, 64)


def candidates(p: Problem, isa: Isa, atom: Atom, target: Target, vectors: Vectors) -> Iterator[Schedule]:
    """Schedules for a problem, none if it has many rows."""
    if p.m > ROWS or p.deterministic or atom.unit or not (on_gpu(target) or p.b == "codes"):
        return
    k_contiguous = p.b in ("col", "codes")
    whole_units = k_contiguous and p.a == "row" and min(vectors[:2]) >= atom.k_pack
    if atom.k_pack > 1 and not whole_units:
        return
    vector = vectors[1] if p.b != "any" else 1
    width = vector // atom.k_pack if k_contiguous else 1
    warp = target.device.warp if target.device else 1
    shapes = _along_k(warp) if k_contiguous else _along_n(warp, vector, p.m)
    for nr, shared, across in shapes:
        loads = -(-p.k // (shared * width * atom.k_pack))
        elements = nr * (vector if k_contiguous else 1)
        most = min(loads, MODEL.unrolled // (p.m * nr * width), int(MODEL.in_flight // (size(p.types[1]) * elements)))
        for unroll in _unrolls(most):
            one = _schedule(p, isa, atom, (nr, unroll, shared, across), (width, vector, vectors[0]), target)
            yield from _split(one, p, target)


def _unrolls(most: int) -> tuple[int, ...]:
    """Numbers of vectors that a thread loads at once: the two largest powers of two that are useful."""
    unrolls = [x for x in (8, 4, 2, 1) if x <= max(most, 1)]
    return tuple(unrolls[:2])


def _along_k(warp: int) -> Iterator[tuple[int, int, int]]:
    """Columns of a thread, threads along k and along n, where k is contiguous in B."""
    for nr in (1, 2, 4):
        for shared in (max(warp // 4, 1), warp, 4 * warp):
            for threads in (4 * warp, 8 * warp):
                yield nr, shared, threads // shared


def _along_n(warp: int, vector: int, m: int) -> Iterator[tuple[int, int, int]]:
    """The same where n is contiguous in B: a thread's columns are those of a vector, or, of many sums, half."""
    for nr in (vector, vector // 2) if vector * m > MODEL.gemv_sums else (vector,):
        for across in (warp // 16, warp // 8, warp // 4, warp // 2, warp):
            for threads in (4 * warp, 8 * warp, 16 * warp, 32 * warp):
                if across:
                    yield nr, threads // across, across


def _schedule(  # noqa: PLR0917 - parts of one record
    p: Problem, isa: Isa, atom: Atom, shape: tuple[int, int, int, int], moved: tuple[int, int, int], target: Target
) -> Schedule:
    nr, unroll, shared, across = shape
    width, b_vector, a_vector = moved
    depth, warp = unroll * width, target.device.warp if target.device else 1
    k_contiguous = p.b in ("col", "codes")
    near = min(warp, shared if k_contiguous else across)
    far = max(1, min(warp // near, across if k_contiguous else shared))
    lanes_k, lanes_n = (near, far) if k_contiguous else (far, near)
    tiles = (
        Tile("registers", p.m, nr, depth), Tile("warp", p.m, nr * lanes_n, depth * lanes_k),
        Tile("shared", p.m, nr * across, depth * shared), Tile("L2", p.m, ALL, ALL),
    )  # fmt: skip
    chunk = min(a_vector, width * atom.k_pack, CODES_KR if p.b == "codes" else a_vector) if p.a == "row" else 1
    vectors = (chunk, b_vector if k_contiguous else nr, 1)
    return schedule_of("stream", p, isa, tiles, LOAD, vectors, AtomUse(kr=atom.k_pack))


def _split(s: Schedule, p: Problem, target: Target) -> Iterator[Schedule]:
    """A schedule, and its variants with slices of k where there are few blocks."""
    processors, tiles = device_of(target).processors, -(-p.n // s.block.n) * p.batch
    yield s
    if p.acc != "f64":
        enough = [x for x in SPLITS if tiles < processors < 1.5 * tiles * x]
        yield from (partitioned(s, split=x) for x in enough[:2])


def along_k(s: Schedule) -> bool:
    """Whether k is contiguous in B."""
    return s.b.layout in ("col", "codes")


def width(s: Schedule) -> int:
    """Units of k in one vector of a thread."""
    return s.b.vector // s.atom.kr if along_k(s) else 1


def k_threads(s: Schedule) -> int:
    """Threads of a block that split k: those with the same columns."""
    return s.block.k // s.tiles[0].k


def bytes_in_flight(s: Schedule) -> int:
    """Bytes of B that a thread has in flight."""
    return int(s.nr * s.tiles[0].k * s.atom.kr * size(s.types[1]))


def footprint(s: Schedule) -> Footprint:
    """Registers of a thread, and shared memory of a block."""
    return {"registers": registers(s), "shared": shared_words(s) * (8 if s.dtype == "f64" else 4)}


def registers(s: Schedule) -> int:
    """Registers of a thread."""
    a, b, _ = s.types
    chunk = s.a.vector // s.atom.kr or 1
    narrow = s.atom.kr == 1 and BY_NAME[b].bytes < BY_NAME["f32"].bytes
    parts = (s.nr if narrow else 0) * chunk + chunk + -(-chunk * s.atom.kr * BY_NAME[a].bytes // 4)
    addresses = 2 * (s.mr + (s.nr if along_k(s) else 1))
    if s.b.layout == "codes":
        parts, addresses = CODES_KR * (s.nr + 1) + s.mr * (s.nr + 1), addresses + 4 * s.nr
    words = 2 if a == b == "f64" else 1
    return int(words * (s.mr * s.nr + parts) + -(-bytes_in_flight(s) // 4) + addresses + MODEL.gemv_addresses)


def partial_sum_strides(s: Schedule) -> tuple[int, int]:
    """Strides of partial sums in shared memory, in words: of outputs, and of the threads that share one.

    Threads of a warp write one output each at a time, and add one each: all of them use different banks.
    """
    across = s.block.n // s.nr
    outputs = s.mr * s.block.n
    if along_k(s):
        return k_threads(s) + 1, 1
    return 1, outputs if across >= BANKS else -(-outputs // BANKS) * BANKS + across


def shared_words(s: Schedule) -> int:
    """Words of shared memory of a block for partial sums."""
    outputs, (far, near) = s.mr * s.block.n, partial_sum_strides(s)
    return (outputs - 1) * far + (k_threads(s) - 1) * near + 1


def work(p: Problem, s: Schedule, atom: Atom, target: Target, occupied: int) -> Work:
    """Work of the busiest processor."""
    del atom
    v, kr, (a, b, _) = Waves.of(p, s, target, occupied), s.atom.kr, map(size, p.types)
    units = ceil(p.k / kr / s.parallel.split)
    # Elements narrower than sums are converted: of B once, of A by every thread that reads it.
    of_a, of_b = s.mr * s.block.n // s.nr, s.block.n
    # An int4 value takes three operations.
    narrow = (a < 4) * of_a + (3 if b < 1 else b < 4) * of_b if kr == 1 else 0
    words = (n * kr * max(4, x * e) / (4 * x) for n, x, e in ((of_a, s.a.vector, a), (of_b, s.b.vector, b)))
    loads = ceil(units / (k_threads(s) * width(s)))
    latencies = ceil(loads * width(s) / s.tiles[0].k)
    run = bytes_in_flight(s) * k_threads(s) * width(s) / s.tiles[0].k / s.nr if along_k(s) else s.block.n * b
    counts = {
        "multiply-adds": v.rounds * (s.mr * s.block.n + narrow) * units * (1 + MODEL.issue),
        "loads": v.rounds * units * sum(words),
        "L2": v.blocks * units * kr * (s.block.n * b) / v.busy,
        "memory": compulsory(p) * (1 + MODEL.short * (max(MODEL.line / run, 1) - 1)),
        "latency": ceil(v.rounds / v.together) * latencies * MODEL.far,
    }
    # A thread waits for each vector of A before it multiplies: its loads are not in flight with those of B.
    vectors = s.mr * ceil(s.tiles[0].k * kr / s.a.vector) if s.b.layout == "col" else 0
    waits = ceil(v.rounds / v.together) * latencies * vectors * MODEL.near
    waits += MODEL.wait + MODEL.add * (k_threads(s) ** 0.5 * 2 + ceil(s.mr * s.block.n / s.threads))
    return Work(counts, waits)


PROGRAM = Program("gpu.gemv", candidates, footprint, work, device=True, bounded=False, slice_steps=1)
