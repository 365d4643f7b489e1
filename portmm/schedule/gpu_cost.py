"""Cost model of device schedules: a roofline over the work of their programs.

The time of a kernel is that of the slowest of its overlapping terms on the busiest processor, a share of the others,
what nothing overlaps, and a launch. All terms are kept, so that `explain` can show the reasons of a selection.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from portmm.schedule.epilogue_work import EpilogueWork
from portmm.schedule.legality import occupancy
from portmm.schedule.program import at_once, blocks, device_of
from portmm.schedule.programs import PROGRAMS
from portmm.schedule.roofline import Cost, roofline
from portmm.target.device import PARTS
from portmm.target.model import DEVICE as MODEL

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.target import Target


def cost(p: Problem, s: Schedule, atom: Atom, target: Target) -> Cost:
    """The predicted time of a schedule that is legal for a problem."""
    work = PROGRAMS[s.program].work(p, s, atom, target, occupancy(s, target))
    hertz, plain = _hertz(target), target.rates.get("simt_f32", MODEL.default_rate)
    own = target.rates.get(atom.name, MODEL.default_matrix_rate if atom.unit else plain)
    rates = {
        "multiply-adds": own * work.filled, "loads": MODEL.lane_words, "shared memory": MODEL.shared_bytes,
        "moves": MODEL.moves, "L2": MODEL.l2_bytes_per_cycle, "latency": 1.0, "additions": MODEL.adds,
        "dequantising": MODEL.integer_lanes, "instructions": PARTS, "epilogue": 1.0,
    }  # fmt: skip
    ending = EpilogueWork.of(p, device=True)
    rates["memory"] = 1e9 * _bandwidth(target) / hertz
    counts = work.counts | {"memory": work.counts["memory"] + ending.moved(p)}
    added = {"waiting": work.waiting / hertz, "launch": MODEL.launch} | _slices(p, s, target)
    if ending.operations:
        each = ending.operations * MODEL.epilogue_issue / plain + len(ending.whole) * MODEL.epilogue_load
        counts["epilogue"], added["epilogue"] = _ended(p, s, target, each, hertz)
    return roofline(counts, rates, added, MODEL.exposed, hertz=hertz)


def _ended(p: Problem, s: Schedule, target: Target, each: float, hertz: float) -> tuple[float, float]:
    """Cycles of epilogues that other work hides, and the seconds of those that nothing does; `each`: of an element.

    Other blocks of a processor hide them, or a warpgroup that multiplies its own tile: all but those of the last tile,
    for which half of the threads are left. Warpgroups that share a tile finish it together.
    """
    tiles = blocks(s, p) * s.parallel.split
    busy = min(device_of(target).processors, tiles)
    cycles = float(p.batch * p.m * p.n) * each / busy
    seen = 0.0
    if s.parallel.warpgroups:
        seen = 2 * cycles / ceil(tiles / busy) if s.parallel.pingpong else cycles
    return max(cycles - seen, 0.0), seen / hertz


def copying(moved: float, target: Target) -> float:
    """Seconds of a kernel that copies, for the bytes that it reads and writes together."""
    return float(MODEL.launch + moved / (1e9 * _bandwidth(target)))


def _slices(p: Problem, s: Schedule, target: Target) -> dict[str, float]:
    """The time of the split-K reduction, if k is split."""
    split = s.parallel.split
    if split == 1:
        return {}
    sums, bandwidth = 4 * p.batch * p.m * p.n, 2e9 * _bandwidth(target)
    if s.parallel.fixup:
        # All blocks write, and one of each tile reads slice after slice, with nothing to overlap.
        read = 4 * split * s.block.m * s.block.n / MODEL.alone_bytes
        waits = (2 + ceil(split / at_once(s))) * MODEL.wait + read
        return {"slices": waits / _hertz(target) + sums * split / bandwidth}
    return {"slices": MODEL.launch + sums * (2 * split + 1) / bandwidth}


def _bandwidth(target: Target) -> float:
    return (target.device.memory_gbs if target.device else 0) or MODEL.default_gbs


def _hertz(target: Target) -> float:
    return 1e9 * (target.frequency_ghz or MODEL.default_ghz)
