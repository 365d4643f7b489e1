"""How long a schedule of a device will take, and why.

Owns the cost model of devices. Imports `schedule.cpu_cost` for the record, `schedule.gpu_candidates`. A kernel is
as slow as its slowest part, of each wave of blocks that processors hold at once:
multiply-adds, the words that threads load for them, what passes from L2 and
from memory; and a launch takes its time. All terms are kept, so that `explain`
can show what a choice rests on.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from portmm.schedule.cpu_cost import Cost
from portmm.schedule.gpu_candidates import PARTS, at_once, on_gpu, resident
from portmm.schedule.gpu_gemv import along_k, flying, shares, width
from portmm.schedule.gpu_w4a16 import PROGRAMS, instructions
from portmm.schedule.gpu_wgmma import STRIP, columns, promoted, staged, sums
from portmm.spec.dtype import BY_NAME, size

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.target import Atom, Target

DEFAULT_GHZ = 1.5
DEFAULT_GBS = 100.0
LAUNCH = 3e-6
"""Seconds of a kernel that does nothing: what CUDA's documentation calls a few microseconds."""
WAIT = 600.0
"""Cycles from asking memory for a tile to having it."""
SHARED_WORDS = 16.0
"""Words that a processor loads from shared memory in a cycle: half of its banks, as vectors take turns."""
CACHED_WORDS = 16.0
"""Words that it loads from its first cache in a cycle."""
L2_BYTES_PER_CYCLE = 24.0
"""That a processor gets from L2 in a cycle while all others ask too: 5.5 TB/s of 132 processors."""
ALONE_BYTES = 48.0
"""That it gets while few others ask: three quarters of the 64 that a path from L2 has."""
EXPOSED = 0.2
"""Share of the shorter overlapped terms that still shows."""
WARPS_NEEDED = 4
"""Warps of a processor that hide each other's latencies, with many independent sums each."""
ISSUE = 0.06
"""Further share of the time of multiply-adds that loops and addresses take."""
STEP, COPIED_STEP, DIRECT_STEP = 64.0, 40.0, 30.0
"""Cycles of a step of k that no other thread hides: barriers, waiting, leaving the loop."""
FAR = 1000.0
"""Cycles from asking memory for a vector to having it while many others ask, too: 500 to 700 ns."""
ADD = 40.0
"""Cycles of adding what another thread has of a sum."""
LINE, SHORT = 128.0, 0.05
"""Bytes from which on the length of a run does not matter to memory, and what each halving below adds at first."""
LANE_WORDS = 32.0
"""Words that lanes get from the first cache in a cycle, where they ask for neighbours or for the same."""
DEFAULT_MATRIX_RATE = 256.0
MATRIX_WARPS = 4
"""Warps of a processor that keep its units for fragments busy, with many independent sums each."""
SHARED_BYTES = 128.0
"""That a processor moves between registers and shared memory in a cycle: all banks."""
MATRIX_STEP = 60.0
"""Cycles of a step of k in which a block meets and waits for fragments."""
ENDING = 3.0
"""Instructions that store a sum, or a part of them."""
ENGINE_BYTES = 48.0
"""That a processor's copy engine gets from L2 in a cycle: neighbours ask for the same at the same time."""
ENGINE_WAIT, ENGINE_START = 1000.0, 1600.0
"""Cycles from asking it for a tile to having it, and from a block's begin to the first: maps are fetched, too."""
SENDING, MEET = 1.5, 300.0
"""Cycles of storing a sum through shared memory, and of meeting and waiting for the first."""
ADDS = 128.0
"""Sums that a processor adds in a cycle."""
GROUP_STEP = 30.0
"""Cycles of a step of k in which a warpgroup waits for a barrier, and others may multiply."""
INTEGER_LANES = 64.0
"""Operations on bits that a processor does in a cycle: CUDA C++ Best Practices Guide, compute capability 8.0 to 9.0."""
ADD_SHARE = 2.0
"""Instructions that add what another warp has of a sum."""
MOVES = 16.0
"""Pieces that a processor moves to shared memory in a cycle."""


def cost(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of a schedule that is legal for a problem."""
    return _COSTS[s.program](p, s, atom, target)


def _by_threads(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.simt` and `kernels.direct`."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, target.rates.get("simt_f32", 32.0))
    tiles = ceil(p.m / s.block.m) * ceil(p.n / s.block.n) * p.batch
    blocks = tiles * s.split
    held = resident(s, target)
    # Blocks are handed out as others end: of the last ones, some processors have fewer.
    rounds = ceil(blocks / device.processors)
    together = min(held, rounds)
    depth = ceil(ceil(p.k / atom.k_pack) / s.split)
    macs = s.block.m * s.block.n * depth
    filled = min(1.0, together * s.threads / (device.warp * WARPS_NEEDED)) if on_gpu(target) else 1.0
    work = rounds * macs / rate * (1 + ISSUE) / filled
    overlapped = {"multiply-adds": work / hertz}
    if s.program == "direct":
        # On CPUs lanes share A, and a vector is a word.
        words = (s.mr + s.nr) / (s.mr * s.nr) * macs
        overlapped["loads"] = rounds * words / (CACHED_WORDS if on_gpu(target) else 2 * rate) / hertz
    else:
        warp = s.tiles[1]
        words = (warp.m + warp.n) / (warp.m * warp.n) * macs
        overlapped["shared memory"] = rounds * words / SHARED_WORDS / hertz
        pieces = depth * (s.block.m / max(1, s.vectors[0] // s.kr) + s.block.n / max(1, s.vectors[1] // s.kr))
        overlapped["moves"] = rounds * pieces / MOVES / hertz
    a, b, c = (BY_NAME[x].bytes for x in p.types)
    passing = blocks * depth * atom.k_pack * (s.block.m * a + s.block.n * b)
    overlapped["L2"] = passing / (min(device.processors, blocks) * L2_BYTES_PER_CYCLE) / hertz
    once = p.batch * (p.m * p.k * a + p.k * p.n * b) + p.batch * p.m * p.n * c
    overlapped["memory"] = once / (1e9 * _bandwidth(target))
    steps = depth if s.program == "direct" else ceil(depth / s.block.k)
    each = DIRECT_STEP if s.program == "direct" else COPIED_STEP if s.copies else STEP
    waits = ceil(rounds / together) if on_gpu(target) else 0
    return _in_all(p, s, target, overlapped, waits * (WAIT + steps * each) / hertz)


def copying(moved: int, target: Target) -> float:
    """Seconds in which a kernel copies what reads and writes so many bytes together."""
    return LAUNCH + moved / (1e9 * _bandwidth(target))


def _slices(p: Problem, s: Schedule, target: Target) -> dict[str, float]:
    """The time of adding slices of k, if there are several."""
    if s.split == 1:
        return {}
    if s.joined:
        # All blocks write, and one of each tile reads slice after slice, while there is nothing else to do.
        hertz = _hertz(target)
        read = 4 * s.split * s.block.m * s.block.n / ALONE_BYTES
        return {
            "slices": ((2 + ceil(s.split / at_once(s))) * WAIT + read) / hertz
            + 4 * p.batch * p.m * p.n * s.split / (2e9 * _bandwidth(target))
        }
    traffic = 4 * p.batch * p.m * p.n * (2 * s.split + 1)
    return {"slices": LAUNCH + traffic / (2e9 * _bandwidth(target))}


def _bandwidth(target: Target) -> float:
    return (target.device.memory_gbs if target.device else 0) or DEFAULT_GBS


def _hertz(target: Target) -> float:
    return 1e9 * (target.frequency_ghz or DEFAULT_GHZ)


def _in_all(p: Problem, s: Schedule, target: Target, overlapped: dict[str, float], waiting: float) -> Cost:
    """The time of a kernel whose longest overlapped term hides most of the others, and of what is added to it."""
    added = {"waiting": waiting, "launch": LAUNCH} | _slices(p, s, target)
    most = max(overlapped.values())
    hidden = most + EXPOSED * (sum(overlapped.values()) - most)
    return Cost(hidden + sum(added.values()), overlapped, added)


def _multiplied(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.mma`."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, DEFAULT_MATRIX_RATE)
    blocks = ceil(p.m / s.block.m) * ceil(p.n / s.block.n) * p.batch * s.split
    rounds = ceil(blocks / device.processors)
    together = min(resident(s, target), rounds)
    a, b, c = (BY_NAME[x].bytes for x in p.types)
    steps = ceil(ceil(p.k / s.block.k) / s.split)
    depth, warp, warps = steps * s.block.k, s.tiles[1], s.threads // device.warp
    filled = min(1.0, together * warps / MATRIX_WARPS)
    loaded = warps * (warp.m * a + warp.n * b) + s.block.m * a + s.block.n * b
    moved = depth * (s.block.m / s.vectors[0] + s.block.n / s.vectors[1])
    overlapped = {
        "multiply-adds": rounds * s.block.m * s.block.n * depth / rate / filled / hertz,
        "shared memory": rounds * depth * loaded / SHARED_BYTES / hertz,
        "moves": rounds * moved / MOVES / hertz,
        "L2": blocks * depth * (s.block.m * a + s.block.n * b)
        / (min(device.processors, blocks) * L2_BYTES_PER_CYCLE) / hertz,
        "memory": p.batch * (p.m * p.k * a + p.k * p.n * b + p.m * p.n * c) / (1e9 * _bandwidth(target)),
    }  # fmt: skip
    # The last stages are waited for, and sums are stored, while nothing is multiplied, but by other blocks.
    ending = s.mr * s.nr * ENDING * warps / PARTS
    waits = ceil(rounds / together) * (WAIT + steps * MATRIX_STEP / together) + rounds * ending / together
    return _in_all(p, s, target, overlapped, waits / hertz)


def _grouped(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.wgmma`."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, DEFAULT_MATRIX_RATE)
    pairs = ceil(p.m / (s.block.m * s.cluster)) * ceil(p.n / s.block.n) * p.batch * s.split
    tiles = pairs * s.cluster
    busy = min(device.processors // s.cluster * s.cluster, tiles)
    rounds = ceil(tiles / busy)
    a, b, c = (BY_NAME[x].bytes for x in p.types)
    steps = ceil(ceil(p.k / s.block.k) / s.split)
    depth, wide = steps * s.block.k, columns(s)
    # Each instruction reads its 64 rows and all of its columns from shared memory.
    read = (s.block.m * s.block.n // wide * a + s.block.m * s.block.n // STRIP * b) + s.block.m * a + s.block.n * b
    brought = s.block.m * a + s.block.n * b / s.cluster
    # Whoever stores while others multiply hides it; and so with what a step waits for.
    others = max(2 if s.pingpong else 1, min(resident(s, target), rounds))
    overlapped = {
        "multiply-adds": rounds * s.block.m * s.block.n * depth / rate / hertz,
        "shared memory": rounds * depth * read / SHARED_BYTES / hertz,
        "L2": rounds * depth * brought / ENGINE_BYTES / hertz,
        "latency": rounds * steps * ENGINE_WAIT / (s.stages * min(resident(s, target), rounds)) / hertz,
        "memory": p.batch * (p.m * p.k * a + p.k * p.n * b + p.m * p.n * c) / (1e9 * _bandwidth(target)),
    }
    if promoted(s):
        overlapped["additions"] = rounds * steps * s.block.m * s.block.n / ADDS / hertz
    ending = sums(s) * s.groups / (2 if s.pingpong else 1) * (SENDING if staged(s) else ENDING) + MEET
    shown = ceil(rounds / others) * ending if others > 1 else rounds * ending
    waits = ENGINE_START + shown + rounds * steps * GROUP_STEP / max(others, 1 if s.pingpong else s.groups)
    return _in_all(p, s, target, overlapped, waits / hertz)


def _decoded(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.coded`, or `kernels.dequant`."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, DEFAULT_MATRIX_RATE)
    blocks = ceil(p.m / s.block.m) * ceil(p.n / s.block.n) * p.batch * s.split
    rounds = ceil(blocks / device.processors)
    together = min(resident(s, target), rounds)
    a, b, c = (size(x) for x in p.types)
    # Codes, and for each group of them a scale and an offset.
    b += 8 / (s.group or p.k)
    steps = ceil(ceil(p.k / s.block.k) / s.split)
    depth, warp, warps = steps * s.block.k, s.tiles[1], s.threads // device.warp
    once = s.program == "dequant"
    sharing = 1 if once else s.block.k // warp.k
    filled = min(1.0, together * warps / MATRIX_WARPS)
    # Fragments of A are multiplied by ones, too, where codes are.
    atoms = s.block.m * s.block.n * (1 if once else 1 + atom.n / warp.n)
    codes, others = instructions(s)
    made = s.block.n * (a + b) if once else 0
    loaded = warps / sharing * (warp.m * a + warp.n * (a if once else b)) + s.block.m * a + s.block.n * b + made
    moved = depth * (s.block.m / s.vectors[0] + s.block.n / 32)
    passing = depth * (s.block.m * a + s.block.n * b)
    overlapped = {
        "multiply-adds": rounds * atoms * depth / rate / filled / hertz,
        "dequantising": rounds * depth * codes * device.warp / INTEGER_LANES / filled / hertz,
        "instructions": rounds * depth * (codes + others) / PARTS / filled / hertz,
        "shared memory": rounds * depth * loaded / SHARED_BYTES / hertz,
        "moves": rounds * moved / MOVES / hertz,
        "L2": blocks * passing / (min(device.processors, blocks) * L2_BYTES_PER_CYCLE) / hertz,
        "memory": p.batch * (p.m * p.k * a + p.m * p.n * c) / (1e9 * _bandwidth(target))
        + p.k * p.n * b / (1e9 * _bandwidth(target)),
    }  # fmt: skip
    if not once:
        overlapped["latency"] = ceil(rounds / together) * ceil(steps / max(1, s.stages - 1)) * FAR / hertz
    ending = s.mr * s.nr * (ENDING * warps + ADD_SHARE * (sharing - 1)) / PARTS
    waits = ceil(rounds / together) * (WAIT + steps * MATRIX_STEP / together) + rounds * ending / together
    return _in_all(p, s, target, overlapped, waits / hertz)


def _streamed(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of `kernels.stream`."""
    device = target.device
    assert device is not None  # noqa: S101 - `candidates` looked
    hertz = _hertz(target)
    rate = target.rates.get(atom.name, target.rates.get("simt_f32", 32.0))
    a, b, c = (size(x) for x in p.types)
    blocks = ceil(p.n / s.block.n) * p.batch * s.split
    rounds = ceil(blocks / device.processors)
    together = min(resident(s, target), rounds)
    units = ceil(p.k / s.kr / s.split)
    # What is narrower than sums is converted: of B once, of A by every thread that reads it.
    of_a, of_b = s.mr * s.block.n // s.nr, s.block.n
    # A code takes three operations.
    narrow = (a < 4) * of_a + (3 if b < 1 else b < 4) * of_b if s.kr == 1 else 0
    ops = (s.mr * s.block.n + narrow) * units
    words = [n * s.kr * max(4, v * x) / (4 * v) for n, v, x in ((of_a, s.vectors[0], a), (of_b, s.vectors[1], b))]
    turns = ceil(units / (shares(s) * width(s)))
    asks = ceil(turns * width(s) / s.tiles[0].k)
    run = flying(s) * shares(s) * width(s) / s.tiles[0].k / s.nr if along_k(s) else s.block.n * b
    once = p.batch * (p.m * p.k * a + p.k * p.n * b + p.m * p.n * c)
    overlapped = {
        "multiply-adds": rounds * ops / rate * (1 + ISSUE) / hertz,
        "loads": rounds * units * sum(words) / LANE_WORDS / hertz,
        "L2": blocks * units * s.kr * (s.block.n * b) / (min(device.processors, blocks) * L2_BYTES_PER_CYCLE) / hertz,
        "memory": once * (1 + SHORT * (max(LINE / run, 1) - 1)) / (1e9 * _bandwidth(target)),
        "latency": ceil(rounds / together) * asks * FAR / hertz,
    }
    ends = WAIT + ADD * (shares(s) ** 0.5 * 2 + ceil(s.mr * s.block.n / s.threads))
    return _in_all(p, s, target, overlapped, ends / hertz)


_COSTS = {
    "simt": _by_threads, "direct": _by_threads, "stream": _streamed, "mma": _multiplied, "wgmma": _grouped,
    **dict.fromkeys(PROGRAMS, _decoded),
}  # fmt: skip
