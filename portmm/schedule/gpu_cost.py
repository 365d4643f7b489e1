"""Cost model of device schedules: predicted time, by term.

Owns the cost model of devices. The time of a kernel is that of its slowest part,
for each wave of blocks that run at once: multiply-adds, the words that threads
load for them, traffic from L2 and from memory; the time of a launch is added. All
terms are kept, so that `explain` can show the reasons of a selection.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from portmm.schedule.cpu_cost import Cost
from portmm.schedule.gpu_candidates import PARTS, at_once, occupancy
from portmm.schedule.gpu_gemv import along_k, bytes_in_flight, k_threads, width
from portmm.schedule.gpu_variants import on_gpu
from portmm.schedule.gpu_w4a16 import PROGRAMS, instructions
from portmm.schedule.gpu_wgmma import STRIP, columns, promoted, staged, sums
from portmm.spec.dtype import BY_NAME, size

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.target import Target

DEFAULT_GHZ = 1.5
DEFAULT_GBS = 100.0
LAUNCH = 3e-6
"""Seconds of an empty kernel: a few microseconds, by CUDA's documentation."""
WAIT = 600.0
"""Latency of a tile from memory, in cycles."""
SHARED_WORDS = 16.0
"""Words that a processor loads from shared memory in a cycle: half of its banks, as vectors alternate."""
CACHED_WORDS = 16.0
"""Words that it loads from its first cache in a cycle."""
L2_BYTES_PER_CYCLE = 24.0
"""Bytes per cycle from L2 to a processor while all others load too: 5.5 TB/s for 132 processors."""
ALONE_BYTES = 48.0
"""The same while few others load: three quarters of the 64 bytes of a path from L2."""
EXPOSED = 0.2
"""Share of the shorter overlapped terms that adds to the time."""
WARPS_NEEDED = 4
"""Warps of a processor that hide each other's latencies, with many independent sums each."""
ISSUE = 0.06
"""Overhead of loops and addresses, as a share of the time of multiply-adds."""
STEP, COPIED_STEP, NAIVE_STEP = 64.0, 40.0, 30.0
"""Cycles of a step of k that no other thread hides: barriers, waits, the branch of the loop."""
FAR = 1000.0
"""Latency of a vector from memory under load, in cycles: 500 to 700 ns."""
ADD = 40.0
"""Cycles to add the partial sum of another thread."""
LINE, SHORT = 128.0, 0.05
"""Bytes of the shortest run at full bandwidth, and the slowdown of each halving below that."""
LANE_WORDS = 32.0
"""Words that lanes load from the first cache in a cycle, of the same or neighbouring addresses."""
DEFAULT_MATRIX_RATE = 256.0
MATRIX_WARPS = 4
"""Warps of a processor that keep its units for fragments busy, with many independent sums each."""
SHARED_BYTES = 128.0
"""Bytes that a processor moves between registers and shared memory in a cycle: all banks."""
MATRIX_STEP = 60.0
"""Cycles of a step of k for barriers and for the latency of fragments."""
ENDING = 3.0
"""Instructions that store a sum, or a part of them."""
ENGINE_BYTES = 48.0
"""Bytes per cycle from L2 to a processor's copy engine: neighbours request the same at the same time."""
ENGINE_WAIT, ENGINE_START = 1000.0, 1600.0
"""Latency of its copy of a tile, in cycles, and of the first one of a block: tensor maps are fetched, too."""
SENDING, MEET = 1.5, 300.0
"""Cycles to store a sum through shared memory, and to synchronise and wait for the first."""
ADDS = 128.0
"""Sums that a processor adds in a cycle."""
GROUP_STEP = 30.0
"""Cycles of a step of k in which a warpgroup waits for a barrier, and others may multiply."""
INTEGER_LANES = 64.0
"""Bit operations of a processor in a cycle: CUDA C++ Best Practices Guide, compute capability 8.0 to 9.0."""
ADD_SHARE = 2.0
"""Instructions that add the partial sum of another warp."""
MOVES = 16.0
"""Vectors that a processor moves to shared memory in a cycle."""


def cost(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of a schedule that is legal for a problem."""
    return _COSTS[s.program](p, s, atom, target)


def _by_threads(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.gpu.simt` and `kernels.gpu.naive`."""
    device = target.device
    assert device is not None  # noqa: S101 - checked by `candidates`
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, target.rates.get("simt_f32", 32.0))
    tiles = ceil(p.m / s.block.m) * ceil(p.n / s.block.n) * p.batch
    blocks = tiles * s.parallel.split
    occupied = occupancy(s, target)
    # A block starts when another ends: in the last wave, some processors have fewer.
    rounds = ceil(blocks / device.processors)
    together = min(occupied, rounds)
    depth = ceil(ceil(p.k / atom.k_pack) / s.parallel.split)
    macs = s.block.m * s.block.n * depth
    filled = min(1.0, together * s.threads / (device.warp * WARPS_NEEDED)) if on_gpu(target) else 1.0
    work = rounds * macs / rate * (1 + ISSUE) / filled
    overlapped = {"multiply-adds": work / hertz}
    if s.program == "direct":
        # On CPUs lanes share A, and a vector counts as a word.
        words = (s.mr + s.nr) / (s.mr * s.nr) * macs
        overlapped["loads"] = rounds * words / (CACHED_WORDS if on_gpu(target) else 2 * rate) / hertz
    else:
        warp = s.tiles[1]
        words = (warp.m + warp.n) / (warp.m * warp.n) * macs
        overlapped["shared memory"] = rounds * words / SHARED_WORDS / hertz
        vectors = depth * (s.block.m / max(1, s.a.vector // s.atom.kr) + s.block.n / max(1, s.b.vector // s.atom.kr))
        overlapped["moves"] = rounds * vectors / MOVES / hertz
    a, b, c = (BY_NAME[x].bytes for x in p.types)
    traffic = blocks * depth * atom.k_pack * (s.block.m * a + s.block.n * b)
    overlapped["L2"] = traffic / (min(device.processors, blocks) * L2_BYTES_PER_CYCLE) / hertz
    once = p.batch * (p.m * p.k * a + p.k * p.n * b) + p.batch * p.m * p.n * c
    overlapped["memory"] = once / (1e9 * _bandwidth(target))
    steps = depth if s.program == "direct" else ceil(depth / s.block.k)
    each = NAIVE_STEP if s.program == "direct" else COPIED_STEP if s.a.asynchronous else STEP
    waits = ceil(rounds / together) if on_gpu(target) else 0
    return _in_all(p, s, target, overlapped, waits * (WAIT + steps * each) / hertz)


def copying(moved: int, target: Target) -> float:
    """Seconds of a kernel that copies, for the bytes that it reads and writes together."""
    return LAUNCH + moved / (1e9 * _bandwidth(target))


def _slices(p: Problem, s: Schedule, target: Target) -> dict[str, float]:
    """The time of the split-K reduction, if k is split."""
    if s.parallel.split == 1:
        return {}
    if s.parallel.fixup:
        # All blocks write, and one of each tile reads slice after slice, with nothing to overlap.
        hertz = _hertz(target)
        read = 4 * s.parallel.split * s.block.m * s.block.n / ALONE_BYTES
        return {
            "slices": ((2 + ceil(s.parallel.split / at_once(s))) * WAIT + read) / hertz
            + 4 * p.batch * p.m * p.n * s.parallel.split / (2e9 * _bandwidth(target))
        }
    traffic = 4 * p.batch * p.m * p.n * (2 * s.parallel.split + 1)
    return {"slices": LAUNCH + traffic / (2e9 * _bandwidth(target))}


def _bandwidth(target: Target) -> float:
    return (target.device.memory_gbs if target.device else 0) or DEFAULT_GBS


def _hertz(target: Target) -> float:
    return 1e9 * (target.frequency_ghz or DEFAULT_GHZ)


def _in_all(p: Problem, s: Schedule, target: Target, overlapped: dict[str, float], waiting: float) -> Cost:
    """The time of a kernel whose longest overlapped term hides most of the others, with the added terms."""
    added = {"waiting": waiting, "launch": LAUNCH} | _slices(p, s, target)
    most = max(overlapped.values())
    hidden = most + EXPOSED * (sum(overlapped.values()) - most)
    return Cost(hidden + sum(added.values()), overlapped, added)


def _by_warps(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.gpu.mma`."""
    device = target.device
    assert device is not None  # noqa: S101 - checked by `candidates`
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, DEFAULT_MATRIX_RATE)
    blocks = ceil(p.m / s.block.m) * ceil(p.n / s.block.n) * p.batch * s.parallel.split
    rounds = ceil(blocks / device.processors)
    together = min(occupancy(s, target), rounds)
    a, b, c = (BY_NAME[x].bytes for x in p.types)
    steps = ceil(ceil(p.k / s.block.k) / s.parallel.split)
    depth, warp, warps = steps * s.block.k, s.tiles[1], s.threads // device.warp
    filled = min(1.0, together * warps / MATRIX_WARPS)
    loaded = warps * (warp.m * a + warp.n * b) + s.block.m * a + s.block.n * b
    moved = depth * (s.block.m / s.a.vector + s.block.n / s.b.vector)
    overlapped = {
        "multiply-adds": rounds * s.block.m * s.block.n * depth / rate / filled / hertz,
        "shared memory": rounds * depth * loaded / SHARED_BYTES / hertz,
        "moves": rounds * moved / MOVES / hertz,
        "L2": blocks * depth * (s.block.m * a + s.block.n * b)
        / (min(device.processors, blocks) * L2_BYTES_PER_CYCLE) / hertz,
        "memory": p.batch * (p.m * p.k * a + p.k * p.n * b + p.m * p.n * c) / (1e9 * _bandwidth(target)),
    }  # fmt: skip
    # The waits for the last stages, and the stores of sums, overlap with multiplications of other blocks only.
    ending = s.mr * s.nr * ENDING * warps / PARTS
    waits = ceil(rounds / together) * (WAIT + steps * MATRIX_STEP / together) + rounds * ending / together
    return _in_all(p, s, target, overlapped, waits / hertz)


def _by_warpgroups(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.gpu.wgmma`."""
    device = target.device
    assert device is not None  # noqa: S101 - checked by `candidates`
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, DEFAULT_MATRIX_RATE)
    pairs = ceil(p.m / (s.block.m * s.parallel.cluster)) * ceil(p.n / s.block.n) * p.batch * s.parallel.split
    tiles = pairs * s.parallel.cluster
    busy = min(device.processors // s.parallel.cluster * s.parallel.cluster, tiles)
    rounds = ceil(tiles / busy)
    a, b, c = (BY_NAME[x].bytes for x in p.types)
    steps = ceil(ceil(p.k / s.block.k) / s.parallel.split)
    depth, n = steps * s.block.k, columns(s)
    # Each instruction reads its 64 rows and all of its columns from shared memory.
    read = (s.block.m * s.block.n // n * a + s.block.m * s.block.n // STRIP * b) + s.block.m * a + s.block.n * b
    copied = s.block.m * a + s.block.n * b / s.parallel.cluster
    # Stores, and the waits of a step, are hidden while other warpgroups or blocks multiply.
    others = max(2 if s.parallel.pingpong else 1, min(occupancy(s, target), rounds))
    overlapped = {
        "multiply-adds": rounds * s.block.m * s.block.n * depth / rate / hertz,
        "shared memory": rounds * depth * read / SHARED_BYTES / hertz,
        "L2": rounds * depth * copied / ENGINE_BYTES / hertz,
        "latency": rounds * steps * ENGINE_WAIT / (s.stages * min(occupancy(s, target), rounds)) / hertz,
        "memory": p.batch * (p.m * p.k * a + p.k * p.n * b + p.m * p.n * c) / (1e9 * _bandwidth(target)),
    }
    if promoted(s):
        overlapped["additions"] = rounds * steps * s.block.m * s.block.n / ADDS / hertz
    ending = (
        sums(s) * s.parallel.warpgroups / (2 if s.parallel.pingpong else 1) * (SENDING if staged(s) else ENDING) + MEET
    )
    shown = ceil(rounds / others) * ending if others > 1 else rounds * ending
    waits = (
        ENGINE_START
        + shown
        + rounds * steps * GROUP_STEP / max(others, 1 if s.parallel.pingpong else s.parallel.warpgroups)
    )
    return _in_all(p, s, target, overlapped, waits / hertz)


def _w4a16(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.gpu.w4a16`, or `kernels.gpu.w4a16_dequantize`."""
    device = target.device
    assert device is not None  # noqa: S101 - checked by `candidates`
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, DEFAULT_MATRIX_RATE)
    blocks = ceil(p.m / s.block.m) * ceil(p.n / s.block.n) * p.batch * s.parallel.split
    rounds = ceil(blocks / device.processors)
    together = min(occupancy(s, target), rounds)
    a, b, c = (size(x) for x in p.types)
    # Int4 values, and for each group of them a scale and an offset.
    b += 8 / (s.b.group or p.k)
    steps = ceil(ceil(p.k / s.block.k) / s.parallel.split)
    depth, warp, warps = steps * s.block.k, s.tiles[1], s.threads // device.warp
    once = s.program == "dequant"
    sharing = 1 if once else s.block.k // warp.k
    filled = min(1.0, together * warps / MATRIX_WARPS)
    # Fragments of A are multiplied by ones, too, where they are multiplied by int4 values.
    atoms = s.block.m * s.block.n * (1 if once else 1 + atom.n / warp.n)
    dequantizing, others = instructions(s)
    floats = s.block.n * (a + b) if once else 0
    loaded = warps / sharing * (warp.m * a + warp.n * (a if once else b)) + s.block.m * a + s.block.n * b + floats
    moved = depth * (s.block.m / s.a.vector + s.block.n / 32)
    traffic = depth * (s.block.m * a + s.block.n * b)
    overlapped = {
        "multiply-adds": rounds * atoms * depth / rate / filled / hertz,
        "dequantising": rounds * depth * dequantizing * device.warp / INTEGER_LANES / filled / hertz,
        "instructions": rounds * depth * (dequantizing + others) / PARTS / filled / hertz,
        "shared memory": rounds * depth * loaded / SHARED_BYTES / hertz,
        "moves": rounds * moved / MOVES / hertz,
        "L2": blocks * traffic / (min(device.processors, blocks) * L2_BYTES_PER_CYCLE) / hertz,
        "memory": p.batch * (p.m * p.k * a + p.m * p.n * c) / (1e9 * _bandwidth(target))
        + p.k * p.n * b / (1e9 * _bandwidth(target)),
    }  # fmt: skip
    if not once:
        overlapped["latency"] = ceil(rounds / together) * ceil(steps / max(1, s.stages - 1)) * FAR / hertz
    ending = s.mr * s.nr * (ENDING * warps + ADD_SHARE * (sharing - 1)) / PARTS
    waits = ceil(rounds / together) * (WAIT + steps * MATRIX_STEP / together) + rounds * ending / together
    return _in_all(p, s, target, overlapped, waits / hertz)


def _gemv(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.gpu.gemv`."""
    device = target.device
    assert device is not None  # noqa: S101 - checked by `candidates`
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, target.rates.get("simt_f32", 32.0))
    a, b, c = (size(x) for x in p.types)
    blocks = ceil(p.n / s.block.n) * p.batch * s.parallel.split
    rounds = ceil(blocks / device.processors)
    together = min(occupancy(s, target), rounds)
    units = ceil(p.k / s.atom.kr / s.parallel.split)
    # Elements narrower than sums are converted: of B once, of A by every thread that reads it.
    of_a, of_b = s.mr * s.block.n // s.nr, s.block.n
    # An int4 value takes three operations.
    narrow = (a < 4) * of_a + (3 if b < 1 else b < 4) * of_b if s.atom.kr == 1 else 0
    ops = (s.mr * s.block.n + narrow) * units
    words = [n * s.atom.kr * max(4, v * x) / (4 * v) for n, v, x in ((of_a, s.a.vector, a), (of_b, s.b.vector, b))]
    loads = ceil(units / (k_threads(s) * width(s)))
    latencies = ceil(loads * width(s) / s.tiles[0].k)
    run = bytes_in_flight(s) * k_threads(s) * width(s) / s.tiles[0].k / s.nr if along_k(s) else s.block.n * b
    once = p.batch * (p.m * p.k * a + p.k * p.n * b + p.m * p.n * c)
    overlapped = {
        "multiply-adds": rounds * ops / rate * (1 + ISSUE) / hertz,
        "loads": rounds * units * sum(words) / LANE_WORDS / hertz,
        "L2": blocks
        * units
        * s.atom.kr
        * (s.block.n * b)
        / (min(device.processors, blocks) * L2_BYTES_PER_CYCLE)
        / hertz,
        "memory": once * (1 + SHORT * (max(LINE / run, 1) - 1)) / (1e9 * _bandwidth(target)),
        "latency": ceil(rounds / together) * latencies * FAR / hertz,
    }
    ends = WAIT + ADD * (k_threads(s) ** 0.5 * 2 + ceil(s.mr * s.block.n / s.threads))
    return _in_all(p, s, target, overlapped, ends / hertz)


_COSTS = {
    "simt": _by_threads, "direct": _by_threads, "stream": _gemv, "mma": _by_warps, "wgmma": _by_warpgroups,
    **dict.fromkeys(PROGRAMS, _w4a16),
}  # fmt: skip
