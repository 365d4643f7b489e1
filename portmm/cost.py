"""How long a schedule will take, and why.

Owns the cost model. Imports `schedule`, `problem`, `target`. Predicted time is
the largest of the terms that overlap (multiply-adds, loads, traffic of each
level), a share of the others, since overlap is never perfect, and those that do
not overlap (packing, tile set-up, forking). All terms are kept, so that
`explain` can show what a choice rests on. Rates are measured ones where the
target has them, described ones otherwise. Most of the constants below
were fitted to what every candidate took on one thread of a Zen 4, with AVX-512
and with AVX2 (`bench/exhaustive.py`, `bench/fit_cost.py`); docs/performance.md
says how near to the best candidate the choices come.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.candidates import PACK_ROWS, RUN_BYTES, SUM_COLUMNS
from portmm.cost_columns import FLAGS, WHOLE, Column, Columns, Flags, columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.problem import Problem
    from portmm.schedule import Schedule
    from portmm.target import Atom, Isa, Target

DEFAULT_GHZ = 3.0
DEFAULT_BYTES_PER_CYCLE = {"L1": 64.0, "L2": 32.0, "L3": 10.0, "memory": 5.0}
"""Per core, where neither a description nor a measurement says more."""
LOADS_PER_CYCLE = 2.0
"""Load ports of every out-of-order core described so far."""
LOOP_CYCLES = 0.03
"""Counting, comparing and branching: one fused micro-operation of the few a core starts per cycle."""
CONFLICTS = 0.31
"""Share of the loads that a multiply-add has to wait for: banks, lines split in two, full queues."""
APART = 0.12
"""Further share of the time of a micro-kernel that reads a strided B in place one
line of a row at once; with more lines it is shared by them."""
LINE = 64
PASSING = 4
"""Ways of a set of L1 that B and C pass through."""
CROWDED, THRASHED = 1.05, 1.4
"""Slowdown when rows of A that start in one set of L1 leave less than PASSING ways;
and when they leave one at most and nothing is asked for ahead: measured at M = 7
and 8, K = 4096 on Zen 4."""
AHEAD_CYCLES = 0.5
"""Asking for one stream ahead, each step: an address and a prefetch beside the multiply-adds."""
FILLS, OVERFULL = 24, 1.35
"""Lines that a core can wait for at once, and the slowdown of a stream that asks for more."""
TILE_CYCLES = 70.0
"""Calling a micro-kernel, computing its addresses, leaving its loop."""
CONFIGURE = 100.0
"""Configuring tiles for a block and giving them up. Assumed."""
CARRIED = 4.5
"""Cycles for a line of a tile's sums to go to scratch and come back for the next block of k: with K = 768 in three
blocks products took 1.1 to 1.3 of the time of one, on Sapphire Rapids."""
EXPOSED = 0.05
"""Share of a shorter overlapped term that still shows."""
SHORT_RUNS, SHORT_AHEAD = 1.5, 1.55
"""Further times that reading a strided B takes longer than reading a panel, row by
row, for runs of one line; with the next rows asked for meanwhile, the second."""
COPY_ONCE, COPY_PASSING = 3.7, 6.4
"""Cycles to copy a vector into a panel: from long runs, and from the shorter runs of panels packed in passing."""
CUT_RUNS = 1.4
"""Slowdown of a stream whose rows threads cut: each piece starts with misses. Measured 1.2 to 1.7."""
CONVERT = 1.0
"""Cycles to convert a fragment as it is loaded: two instructions beside the load, on ports that multiply."""
WEAVE = 2.0
"""Cycles per row of a unit to put a vector of units together."""
DECODE = 1.0
"""Cycles to make a vector of numbers of codes that are multiplied at once."""
GROUP_END, GROUP_WAITS = 3.0, 2.0
"""Multiply-adds' worth of converting a vector of integer sums and adding it scaled, and of fetching
what it is added to where there is no register for that."""
UNFOLD = 4.0
"""Cycles to make a vector of numbers of codes."""
FINISH = 4.0
"""Cycles to turn a vector of sums into elements of C."""
BOTH_FAR = 1.3
"""Slowdown of tiles when both operands come from L2: measured on Sapphire Rapids, 1.90 TFLOP/s for 2.50."""
HOME = 0.8
"""Part of a level that is held by what has its home there."""
STREAMS = 16
"""Rows that a hardware prefetcher follows at once; past that, each row of a
strided operand starts with a miss."""
FORK_SECONDS = 1.0e-6
"""One hand-over of tasks to awake threads."""
MOST_SIMULATED = 64
"""Tasks whose hand-over is played through; with more, it would take longer than it is worth."""
TASK_SECONDS = 1.0e-7
OPTIONAL = frozenset(("L3", "memory", "sums"))
"""Terms that not every problem and schedule has."""

Array = np.ndarray[Any, np.dtype[np.float64]]
"""Numbers by number of rows, or one for all of them, then by candidate."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds, by term.

    Attributes:
        seconds: the prediction.
        overlapped: terms of which the largest counts.
        added: terms that add up.
    """

    seconds: float
    overlapped: dict[str, float]
    added: dict[str, float]

    @property
    def bound(self) -> str:
        """The overlapped term that decides."""
        return max(self.overlapped, key=self.overlapped.__getitem__)


def hertz(target: Target) -> float:
    """Cycles per second of a core."""
    return (target.frequency_ghz or DEFAULT_GHZ) * 1e9


def bytes_per_cycle(target: Target, name: str) -> float:
    """Bandwidth of a level, or of memory: measured, described, or assumed."""
    measured = target.measured.get(name, 0.0)
    if measured:
        return measured * 1e9 / hertz(target)
    level = target.level(name)
    described = level.load_bytes_per_cycle if level else 0.0
    return described or DEFAULT_BYTES_PER_CYCLE[name]


def macs_per_cycle(target: Target, isa: Isa | None, atom: Atom, dtype: str) -> float:
    """Mac instructions of an atom that one core starts per cycle: measured, described, or assumed."""
    measured = target.measured.get(atom.name, 0.0)
    if measured:
        return measured * 1e9 / (2 * atom.m * atom.n * atom.k) / hertz(target)
    # Narrow atoms of an ISA start as often as its widest, which is what a description gives.
    widest = isa.atom(dtype) if isa else None
    known = target.rates.get(atom.name) or (target.rates.get(widest.name) if widest else None)
    return known or (1 / atom.m if atom.tiled else 2.0 if atom.n > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class Table:
    """Candidates for one kind of problem on one machine, and all that their costs owe to these alone.

    Attributes:
        target: the machine.
        x: the candidates.
        rate: multiply-add instructions per cycle.
        steps: cycles of a step beside its multiply-adds and loads.
        crowded: slowdown where rows of A in place start in one set of L1.
        apart: slowdown of multiply-adds by short runs of a strided B.
        runs: slowdown of reading a strided B, likewise.
        copy_a, copy_b: cycles to pack one unit of A, and of B.
        packs: cycles that packing takes whatever its extent.
        carried: cycles for a vector of sums to be stored and loaded, in one block of k, and in several.
        cut: threads cut the rows of a stream.
        firsts: of each group of candidates that are cut into tasks alike, the first.
        group_of: the group of each candidate.
        reach: bytes that have their home in each level.
        bandwidth: bytes per cycle of each level, and of memory.
        some: names of the flags that some candidate has, "panels" if one visits several, "strips" if one has some.
    """

    target: Target
    x: Columns
    rate: Column
    steps: Column
    crowded: Column
    apart: Column
    runs: Column
    copy_a: Column
    copy_b: Column
    packs: Column
    carried: tuple[Column, Column]
    cut: Flags
    firsts: np.ndarray[Any, np.dtype[np.intp]]
    group_of: np.ndarray[Any, np.dtype[np.intp]]
    reach: Column
    bandwidth: Column
    some: frozenset[str]


def table(q: Problem, schedules: Sequence[Schedule], atoms: Sequence[Atom], target: Target) -> Table:
    """The table of schedules for problems like `q`, which has C by rows."""
    x = columns(q, schedules, atoms, target)
    pairs = list(zip(schedules, atoms, strict=True))
    level = target.level("L1")
    ways = level.ways if level else WHOLE
    tight = np.where((x.mr + 1 >= ways) & ~x.ahead, THRASHED, np.where(x.mr + PASSING >= ways, CROWDED, 1.0))
    lines = np.maximum(1.0, x.wide * x.b / LINE)
    streams = x.ahead * (1.0 + ~x.pack_a + (x.once | ~x.pack_b))
    folds = np.array([atom.n.bit_length() if s.program == "dot" else 0 for s, atom in pairs])
    over = np.where(x.over_k, x.kc, np.where(x.over_batch, -1.0, 0.0))
    kinds = np.stack((x.wide, x.mc, x.nc, over), axis=1)
    _, firsts, group_of = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    return Table(
        target,
        x,
        rate=np.array([macs_per_cycle(target, target.isa(s.isa), atom, s.dtype) for s, atom in pairs]),
        steps=LOOP_CYCLES + AHEAD_CYCLES * streams,
        crowded=np.where(x.rows_in_place, tight, 1.0),
        apart=1.0 + APART / lines,
        runs=1.0 + np.where(x.asks, SHORT_AHEAD, SHORT_RUNS) / lines,
        copy_a=np.array([_copying(s, atom, "a") for s, atom in pairs]),
        copy_b=np.array([_copying(s, atom, "b") for s, atom in pairs]),
        packs=50.0 * x.pack_a + 50.0 * x.pack_b,
        carried=(1.0 + folds, np.where(x.tiled, CARRIED, 1.0 + folds)),
        cut=x.strided & ~x.asks & ~(x.over_k | x.over_batch),
        firsts=firsts,
        group_of=group_of.reshape(-1),
        # A core's share of L3 may be less than its L2: the first level that holds something is its home.
        reach=np.maximum.accumulate([target.counted(x.name) * HOME for x in target.levels] or [0.0])[
            : len(target.levels)
        ],
        some=_some(x),
        bandwidth=np.array([bytes_per_cycle(target, name) for name in (*(x.name for x in target.levels), "memory")]),
    )


def _some(x: Columns) -> frozenset[str]:
    found = {name for name in FLAGS if getattr(x, name).any()}
    found |= {"panels"} if (x.panels > 1).any() else set()
    return frozenset(found | ({"strips"} if (x.strip_rows > 1).any() else set()))


def _copying(s: Schedule, atom: Atom, operand: str) -> float:
    """Cycles to pack a unit, a few a vector as measured, and the shuffles of an operand that turns; 0 if it is not."""
    if operand == "a":
        packed, layout, straight, woven = s.pack_a, s.a, "row" if atom.tiled else "col", "col"
    else:
        straight = woven = "codes" if s.b == "codes" else "row"
        packed, layout = s.pack_b, s.b
    if not packed:
        return 0.0
    if layout == "any" or (layout != straight and atom.n == 1):
        each = 1.5
    else:
        # A turned block of L x L elements takes L log2(L) shuffles.
        copy = COPY_ONCE if s.once and straight == "row" else COPY_PASSING
        each = (copy if layout == straight else copy + atom.n.bit_length()) / atom.n
    if layout == "codes":
        each = UNFOLD * atom.k_pack / atom.n
    if atom.k_pack > 1 and layout == woven:
        each += WEAVE * atom.k_pack / atom.n
    return each


def cost(p: Problem, s: Schedule, atom: Atom, target: Target, workers: int = 1) -> Cost:
    """Predict the time of schedule `s` for problem `p` on `target`.

    Args:
        p: the problem, as the caller states it.
        s: a legal schedule for it.
        atom: the schedule's atom.
        target: the machine.
        workers: threads that share the work.

    Returns:
        Seconds, with terms.
    """
    q = p.transposed() if s.swap else p
    return costs(table(q, (s,), (atom,), target), q, (q.m,), (workers,))[0].at(0)[0]


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds of candidates, by number of rows, then by candidate.

    Attributes:
        seconds: the predictions.
        overlapped: terms of which the largest counts; 0 for levels that nothing comes from.
        added: terms that add up.
    """

    seconds: Array
    overlapped: dict[str, Array]
    added: dict[str, Array]

    def at(self, row: int) -> list[Cost]:
        """The costs of all candidates for one number of rows."""
        shape = self.seconds.shape

        def terms(held: dict[str, Array]) -> list[dict[str, float]]:
            every = [np.broadcast_to(x, shape)[row].tolist() for x in held.values()]
            named = (dict(zip(held, one, strict=True)) for one in zip(*every, strict=True))
            return [{name: x for name, x in one.items() if x or name not in OPTIONAL} for one in named]

        seconds = self.seconds[row].tolist()
        return list(map(Cost, seconds, terms(self.overlapped), terms(self.added)))


def costs(t: Table, q: Problem, rows: Sequence[int], workers: Sequence[int]) -> list[Costs]:
    """Predict the times of all candidates of a table.

    Args:
        t: the table.
        q: a problem of the kind that the table is for, with C by rows, whatever its M.
        rows: values of M.
        workers: numbers of threads that share the work.

    Returns:
        The predictions for each number of threads.
    """
    v = _Extents.of(t, q, rows)
    traffic, slowed = _traffic(v)
    work, setup, packing = {"compute": _compute(v), **traffic}, _tile_setup(v), _packing_b(v)
    return [_timed(v, work, slowed, setup, packing, n) for n in workers]


@dataclass(frozen=True, slots=True)
class _Extents:
    """A problem cut into the blocks of each candidate.

    Attributes:
        t: the candidates.
        q: the problem, whatever its M.
        m: values of M.
        k: steps of a full sum: units of k.
        visits: visits of the micro-kernel across C.
        blocks: blocks of rows.
        slices: register tiles along M.
        passes: blocks of k.
        depth: units of k of a block.
        rows: rows of a block.
        fewest: pieces that NC cuts the columns into.
        heights: heights of the slices: at most two.
        counts: how many slices have each.
    """

    t: Table
    q: Problem
    m: Array
    k: Array
    visits: Array
    blocks: Array
    slices: Array
    passes: Array
    depth: Array
    rows: Array
    fewest: Array
    heights: Array
    counts: Array

    @classmethod
    def of(cls, t: Table, q: Problem, rows: Sequence[int]) -> _Extents:
        """The extents of a problem, for several values of M."""
        x, m = t.x, np.array(rows, np.float64)[:, np.newaxis]
        k = np.ceil(q.k / x.k_pack)
        slices = np.ceil(m / x.mr)
        low = np.floor(m / slices)
        taller = m - low * slices
        return cls(
            t,
            q,
            m,
            k,
            visits=np.ceil(q.n / x.wide),
            blocks=np.ceil(m / x.mc),
            slices=slices,
            passes=np.ceil(k / x.kc),
            depth=np.minimum(k, x.kc),
            rows=np.minimum(m, x.mc),
            fewest=np.ceil(q.n / x.nc),
            heights=np.array((low + 1, low)),
            counts=np.array((taller, slices - taller)),
        )

    def home(self, size: Array) -> Any:
        """The nearest level that can hold `size` bytes: its place among the levels, memory being last."""
        return self.t.reach.searchsorted(size)


def _timed(  # noqa: PLR0917 - one place calls it
    v: _Extents,
    work: dict[str, Array],
    slowed: dict[str, Array],
    setup: Array,
    packing_b: Array,
    workers: int,
) -> Costs:
    """Times of cut-up work that several threads share."""
    t, q, x = v.t, v.q, v.t.x
    shares, tasks, threads, share = _shared(v, workers)
    # A block of A is packed once per share of columns.
    packing = packing_b + (v.m * v.k) * shares * t.copy_a if "pack_a" in t.some else packing_b
    scale = q.batch / hertz(t.target)
    part = share * scale
    overlapped = {name: each * part for name, each in work.items()}
    if workers > 1 and slowed:
        overlapped |= {name: np.where(threads > 1, each, work[name]) * part for name, each in slowed.items()}
    packers = threads
    if "once" in t.some:
        most = np.ceil(q.n * x.b / RUN_BYTES) * np.ceil(v.k / PACK_ROWS)
        packers = np.where(x.once, np.minimum(threads, most), threads)
    added = {"tiles": setup * part, "packing": packing * scale / packers}
    if "over_k" in t.some:
        size = v.m * q.n * tasks * x.c
        sums = 2 * size / t.bandwidth[v.home(size)]
        added["sums"] = x.over_k * (sums * scale / np.minimum(threads, v.m * np.ceil(q.n / SUM_COLUMNS)))
    if workers > 1:
        phases = np.where(x.over_batch, 1.0, np.where(x.over_k, 2.0 * q.batch, q.batch)) + x.once * q.batch
        added["threads"] = phases * FORK_SECONDS + tasks * TASK_SECONDS
    terms = list(overlapped.values())
    longest = total = terms[0]
    for each in terms[1:]:
        longest, total = np.maximum(longest, each), total + each
    seconds = longest + EXPOSED * (total - longest) + sum(added.values())
    return Costs(seconds, overlapped, added)


def _compute(v: _Extents) -> Array:
    """Cycles of one item: per step of k, the slowest of mac ports, load ports and latency."""
    t, x, h = v.t, v.t.x, v.heights
    # A tile takes as long as it has rows.
    strips = np.ceil(h / x.strip_rows) if "strips" in t.some else h
    macs = strips * (x.vectors / np.where(x.tiled, x.m, 1.0))
    if "decodes" in t.some:
        macs = np.where(x.decodes, h * x.vectors * (1 + _group_ends(v)) + DECODE * x.vectors + h, macs)
    if t.some & {"left", "right"}:
        macs = macs + CONVERT * (h * x.left + x.vectors * x.right) * t.rate
    loads = (strips + x.vectors * x.deep) / LOADS_PER_CYCLE
    # A chain advances one step per latency; unrolling cannot help it.
    step = np.maximum(np.maximum(macs / t.rate, loads), x.latency) + CONFLICTS * loads
    cycles: Array = (v.counts * (step + t.steps)).sum(axis=0) * (v.visits * np.ceil(v.k / x.covers))
    if "tiled" in t.some:
        cycles = cycles * np.where(x.tiled & ~_b_fits(v, "L1"), BOTH_FAR, 1.0)
    return cycles * _crowding(v) * np.where(_short(v), t.apart, 1.0)


def _group_ends(v: _Extents) -> Array:
    """Cost of scaling a group's integer sums, per multiply-add of the group."""
    x = v.t.x
    waiting = 2 * v.heights * np.floor(x.vectors / x.panels) > x.registers
    return np.where(x.spans, (GROUP_END + GROUP_WAITS * waiting) * x.k_pack / np.maximum(x.group, 1.0), 0.0)


def _short(v: _Extents) -> Flags:
    """B is read in place, and its rows lie apart."""
    return v.t.x.strided & (v.q.n > v.t.x.wide)


def _crowding(v: _Extents) -> Array | float:
    """Slowdown by rows of an A in place that start in one set of L1, of which B and C need ways too."""
    level = v.t.target.level("L1")
    if level is None or "rows_in_place" not in v.t.some:
        return 1.0
    aligned = (v.q.k * v.t.x.a) % (level.bytes // level.ways) == 0
    return np.where(aligned & (v.m != 1), v.t.crowded, 1.0) if aligned.any() else 1.0


def _tile_setup(v: _Extents) -> Array:
    """Cycles to start and finish register tiles: one access to C per vector and block of k."""
    t, x, q = v.t, v.t.x, v.q
    # A sum over lanes folds them in half, a shuffle and an addition each time.
    each = np.where(v.passes > 1, t.carried[1], t.carried[0])
    one = (v.counts * (TILE_CYCLES + x.latency + v.heights * (x.vectors * each))).sum(axis=0)
    cycles: Array = one * (v.visits * v.passes) + np.where(x.static, 0.0, 40.0)
    if "finishes" in t.some:
        cycles = cycles + x.finishes * (FINISH * v.m * np.ceil(q.n / x.line))
    if "tiled" in t.some:
        cycles = cycles + x.tiled * (CONFIGURE * v.blocks)
    return cycles


def _packing_b(v: _Extents) -> Array:
    """Cycles to pack B: a panel once per block of rows, or all of it once for all threads."""
    t, x, q = v.t, v.t.x, v.q
    cycles = t.packs
    if "pack_b" in t.some:
        columns = v.visits * x.wide if "panels" not in t.some else np.ceil(q.n * x.panels / x.wide) * x.wide / x.panels
        cycles = cycles + v.k * columns * np.where(x.once, 1.0, v.blocks) * t.copy_b
    if "once" in t.some:
        # The copy is written to, and comes back from, where it fits; half of that overlaps.
        size = v.k * q.n * x.b
        cycles = cycles + x.once * (size / t.bandwidth[v.home(size)])
    return cycles


def _b_fits(v: _Extents, name: str) -> Flags:
    """A panel of B and the slice of A that passes fit a level."""
    x, level = v.t.x, v.t.target.level(name)
    fits: Flags = (x.wide * x.b + x.mr * x.a) * v.depth <= (level.bytes if level else WHOLE)
    return fits


def _b_stays(v: _Extents, name: str) -> Flags:
    """A panel of B keeps its place in a level while the slices of A pass.

    Rows of a B in place lie a stride apart; only so many of them fit as sets
    that the stride reaches have ways. So it is in L1, whose sets follow the
    addresses that a program sees, and in L2, where matrices lie in large pages
    and the next panel comes in meanwhile.
    """
    x, level, fits = v.t.x, v.t.target.level(name), _b_fits(v, name)
    if level is None or "strided" not in v.t.some:
        return fits
    sets = level.bytes // (level.line * level.ways)
    # All rows in place hold elements of one type.
    step = max(1, int(v.q.n * x.b[x.strided][0]) // level.line)
    lines = np.maximum(1.0, x.wide * x.b // level.line)
    panels = np.where(x.ahead, 2.0, 1.0) if name != "L1" else 1.0
    room = level.ways * np.minimum(sets // gcd(step, sets), sets // lines)
    stays: Flags = fits & (~x.strided | (np.minimum(x.kc, v.q.k) * panels <= room))
    return stays


def _traffic(v: _Extents) -> tuple[dict[str, Array], dict[str, Array]]:
    """Cycles that each level's loads take for one item; and where threads cut rows of B, for those levels it slows."""
    t, x, q, levels = v.t, v.t.x, v.q, v.t.target
    names = [level.name for level in levels.levels]
    capacity = {level.name: levels.counted(level.name) for level in levels.levels}
    stays, short = _b_stays(v, "L1"), _short(v)
    across = v.visits * x.wide * v.k
    # Registers <- L1: every step of k reads MR of A and NR of B per tile.
    reads = v.visits * v.m * v.k * x.a + v.slices * across * x.b
    # L1 <- L2: a block of A passes once per visit, B once if it stays.
    block = v.rows * v.depth * x.a
    a_once = v.m * v.k
    a_l2 = a_once * np.where(block <= capacity.get("L1", 0) // 2, 1.0, v.visits)
    b_l2 = across * np.where(stays, v.blocks, v.slices * np.where(short, t.runs, 1.0))
    c_once = v.m * q.n
    c_again = c_once * (2 * v.passes - 2)
    # Between passes over k, the block of C waits in the nearest level that holds it.
    c_home = v.home(np.minimum(c_once, v.rows * np.minimum(x.nc, q.n)) * x.c)
    near = names.index("L1") if "L1" in names else WHOLE
    l2 = a_l2 * x.a + b_l2 * x.b + (c_once + c_again * (c_home != near)) * x.c
    bandwidth = {name: float(each) for name, each in zip((*names, "memory"), t.bandwidth, strict=True)}
    terms = {
        "L1": reads / (bandwidth.get("L1") or DEFAULT_BYTES_PER_CYCLE["L1"]),
        "L2": l2 / (bandwidth.get("L2") or DEFAULT_BYTES_PER_CYCLE["L2"]),
    }
    home = v.home(_bytes(v))
    nearest = sum(name in ("L1", "L2") for name in names)
    beyond = home >= nearest
    if not beyond.any():
        return terms, {}
    # L2 <- further out: B once per block of rows, C once per pass, A again if its block does not fit.
    a_fits = block <= capacity.get("L2", 0)
    b_again = np.where(a_fits & _b_stays(v, "L2"), v.blocks, v.slices)
    b_bytes, a_bytes = v.k * q.n * x.b_far, a_once * x.a_far
    c_far = c_once * x.c_stored + c_again * x.c * (c_home >= nearest)
    outer = b_bytes * b_again + c_far + a_bytes * np.where(a_fits, 1.0, v.visits)
    slow = np.where(short & (v.depth > STREAMS), t.runs, 1.0)
    slow = slow * np.where(short & ~x.asks & (v.depth * x.wide * x.b > FILLS * LINE), OVERFULL, 1.0)
    far = b_bytes * np.where(b_bytes > capacity.get("L3", 0), b_again, 1.0)
    c_last = c_once * x.c_stored + c_again * x.c * (c_home == len(names))
    in_memory = home == len(names)

    def outside(slow: Array) -> dict[str, Array]:
        from_memory = in_memory * ((far * slow + c_last + a_bytes) / bandwidth["memory"])
        if "L3" in names:
            return {"L3": beyond * (outer * slow / bandwidth["L3"]), "memory": from_memory}
        return {"memory": np.where(in_memory, from_memory, beyond * (outer * slow / bandwidth["memory"]))}

    cut = short & t.cut
    return terms | outside(slow), outside(slow * np.where(cut, CUT_RUNS, 1.0)) if cut.any() else {}


def _bytes(v: _Extents) -> Array:
    """Compulsory traffic, as `Problem.bytes` has it, by number of rows."""
    q = v.q
    a, b, c = (x.bytes for x in q.elements)
    return q.batch * (v.m * q.k * a + q.k * q.n * b + v.m * q.n * c)


def _shared(v: _Extents, workers: int) -> tuple[Array, Array, Array, Array]:
    """Pieces of the columns, tasks, threads that have some, and the part of the work that the busiest one does.

    A task is taken by the next thread that is free.
    """
    t, x, q = v.t, v.t.x, v.q
    if workers == 1:
        one = np.ones(1)
        return np.where(x.over_k | x.over_batch, 1.0, v.fewest), one, one, one
    first, of = t.firsts, t.group_of
    visits, blocks, fewest, passes = v.visits[first], v.blocks[:, first], v.fewest[first], v.passes[first]
    over_k, over_batch = x.over_k[first], x.over_batch[first]

    def cut(threads: Any) -> tuple[Array, Array]:
        shares = np.maximum(fewest, np.minimum(visits, np.ceil((threads - 1) * 4 / blocks)))
        tasks = np.where(over_k, np.minimum(threads, passes), blocks * shares)
        return shares, np.where(over_batch, np.minimum(q.batch, threads * 4), tasks)

    shares, tasks = cut(workers)
    packed = np.where(over_k | over_batch, 1.0, shares)[:, of]
    threads = np.minimum(workers, tasks)
    parts, mine = cut(threads)
    share = np.ceil(mine / threads) / mine
    played = ~(over_k | over_batch) & (threads > 1) & (mine <= MOST_SIMULATED)
    for i, j in zip(*map(np.ndarray.tolist, played.nonzero()), strict=True):
        share[i, j] = _busiest(int(visits[j]), int(parts[i, j]), int(blocks[i, j]), int(threads[i, j]))
    return packed, tasks[:, of], threads[:, of], np.where(threads == 1, 1.0, share)[:, of]


@lru_cache(maxsize=4096)
def _busiest(visits: int, shares: int, blocks: int, threads: int) -> float:
    """Part of all visits that the busiest thread makes, each taking the next task when free."""
    low, wider = divmod(visits, shares)
    load = [0] * threads  # a heap
    for task in range(shares * blocks):
        heapreplace(load, load[0] + low + (task % shares < wider))
    return max(load) / (visits * blocks)
