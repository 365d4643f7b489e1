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
from math import ceil, gcd
from typing import TYPE_CHECKING

from portmm.candidates import PACK_ROWS, RUN_BYTES, SUM_COLUMNS
from portmm.dtype import BY_NAME, size
from portmm.schedule import finishes

if TYPE_CHECKING:
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
STREAMS = 16
"""Rows that a hardware prefetcher follows at once; past that, each row of a
strided operand starts with a miss."""
FORK_SECONDS = 1.0e-6
"""One hand-over of tasks to awake threads."""
MOST_SIMULATED = 64
"""Tasks whose hand-over is played through; with more, it would take longer than it is worth."""
TASK_SECONDS = 1.0e-7


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


@dataclass(frozen=True, slots=True)
class _View:
    """A schedule's product with C by rows, and the machine in cycles."""

    p: Problem
    s: Schedule
    atom: Atom
    target: Target

    @property
    def wide(self) -> int:
        """Columns of one visit."""
        return self.s.nr * self.s.panels

    @property
    def visits(self) -> int:
        """Visits across C."""
        return -(-self.p.n // self.wide)

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        return -(-self.p.m // self.s.mc) if self.s.mc else 1

    @property
    def hertz(self) -> float:
        return (self.target.frequency_ghz or DEFAULT_GHZ) * 1e9

    @property
    def macs_per_cycle(self) -> float:
        """Mac instructions started per cycle."""
        isa = self.target.isa(self.s.isa)
        return macs_per_cycle(self.target, isa, self.atom, self.s.dtype)

    @property
    def line(self) -> int:
        """Sums in a vector."""
        isa = self.target.isa(self.s.isa)
        return isa.columns(self.atom) if isa else self.atom.n

    @property
    def k(self) -> int:
        """Steps of a full sum: units of k."""
        return -(-self.p.k // self.atom.k_pack)

    @property
    def sizes(self) -> tuple[float, float, float]:
        """Bytes of what micro-kernels read of A and B, elements or units, and of a sum."""
        a, b = self.s.given(self.atom)
        held = self.stored[1] if _decodes(self) else BY_NAME[b].bytes
        return BY_NAME[a].bytes, held, BY_NAME[self.atom.acc].bytes

    @property
    def stored(self) -> tuple[float, float, float]:
        """Bytes in memory that belong to one unit of A, of B, and to an element of C."""
        a, b, c = map(size, self.p.types)
        return a * self.atom.k_pack, b * self.atom.k_pack, c

    def bytes_per_cycle(self, name: str) -> float:
        measured = self.target.measured.get(name, 0.0)
        if measured:
            return measured * 1e9 / self.hertz
        level = self.target.level(name)
        described = level.load_bytes_per_cycle if level else 0.0
        return described or DEFAULT_BYTES_PER_CYCLE[name]

    def home(self, size: float) -> str:
        """The nearest level that can hold `size` bytes."""
        for level in self.target.levels:
            if size <= level.bytes * 0.8:
                return level.name
        return "memory"


def macs_per_cycle(target: Target, isa: Isa | None, atom: Atom, dtype: str) -> float:
    """Mac instructions of an atom that one core starts per cycle: measured, described, or assumed."""
    measured = target.measured.get(atom.name, 0.0)
    if measured:
        hertz = (target.frequency_ghz or DEFAULT_GHZ) * 1e9
        return measured * 1e9 / (2 * atom.m * atom.n * atom.k) / hertz
    # Narrow atoms of an ISA start as often as its widest, which is what a description gives.
    widest = isa.atom(dtype) if isa else None
    known = target.rates.get(atom.name) or (target.rates.get(widest.name) if widest else None)
    return known or (1 / atom.m if atom.tiled else 2.0 if atom.n > 1 else 1.0)


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
    v = _View(q, s, atom, target)
    tasks = _tasks(v, workers)
    threads = min(workers, tasks)
    share = _share(v, threads)
    overlapped = {"compute": _compute(v) * share} | {k: x * share for k, x in _traffic(v, threads).items()}
    added = {"tiles": _tile_setup(v) * share, "packing": _packing(v, workers) / _packers(v, threads)}
    scale = q.batch / v.hertz
    overlapped = {k: x * scale for k, x in overlapped.items()}
    added = {k: x * scale for k, x in added.items()}
    if s.over == "k":
        size = q.m * q.n * tasks * v.sizes[2]
        sums = 2 * size / v.bytes_per_cycle(v.home(size))
        added["sums"] = sums * scale / min(threads, q.m * -(-q.n // SUM_COLUMNS))
    if workers > 1:
        added["threads"] = _phases(v) * FORK_SECONDS + tasks * TASK_SECONDS
    longest = max(overlapped.values())
    hidden = longest + EXPOSED * (sum(overlapped.values()) - longest)
    return Cost(hidden + sum(added.values()), overlapped, added)


def _slices(v: _View) -> tuple[tuple[int, int], ...]:
    """(height, how many) of the slices that M is cut into: at most two heights."""
    m, mr = v.p.m, v.s.mr
    count = -(-m // mr)
    low, taller = divmod(m, count)
    return ((low + 1, taller), (low, count - taller))


def _blocks_k(v: _View) -> int:
    return -(-v.k // v.s.kc) if v.s.kc else 1


def _tasks(v: _View, workers: int) -> int:
    if v.s.over == "batch":
        return min(v.p.batch, workers * 4)
    if v.s.over == "k":
        return min(workers, _blocks_k(v))
    return v.blocks * _shares(v, workers)


def _packers(v: _View, threads: int) -> int:
    """Threads that pack at the same time: each what it needs, or a share of all."""
    if not v.s.once:
        return threads
    return min(threads, ceil(v.p.n * v.sizes[1] / RUN_BYTES) * -(-v.k // PACK_ROWS))


def _share(v: _View, threads: int) -> float:
    """Part of the work that the busiest thread does, each taking the next task when free."""
    if threads == 1:
        return 1.0
    tasks = _tasks(v, threads)
    if v.s.over != "tiles" or tasks > MOST_SIMULATED:
        return -(-tasks // threads) / tasks
    shares = _shares(v, threads)
    low, wider = divmod(v.visits, shares)
    load = [0] * threads
    for task in range(tasks):
        load[load.index(min(load))] += low + (task % shares < wider)
    return max(load) / (v.visits * v.blocks)


def _phases(v: _View) -> int:
    """Times that work is handed to the threads."""
    return {"batch": 1, "tiles": v.p.batch, "k": 2 * v.p.batch}[v.s.over] + v.s.once * v.p.batch


def _tile(v: _View) -> tuple[int, int]:
    """Vectors, or tiles, that a register tile loads of B per step, and elements or units of k that a step covers."""
    if v.s.program == "dot":
        return v.s.nr, v.atom.n
    return v.s.nr // v.atom.n * v.s.panels, v.atom.deep


def _compute(v: _View) -> float:
    """Cycles of one item: per step of k, the slowest of mac ports, load ports and latency."""
    atom = v.atom
    wide, depth = _tile(v)
    cycles = 0.0
    left, right = _converts(v)
    for h, count in _slices(v):
        # A tile takes as long as it has rows.
        strips = h if atom.tiled else atom.strips(h)
        macs = strips * wide / (atom.m if atom.tiled else 1)
        if _decodes(v):
            macs = h * wide * (1 + _group_ends(v, h)) + DECODE * wide + h
        macs += CONVERT * (h * left + wide * right) * v.macs_per_cycle
        loads = (strips + wide * atom.deep) / LOADS_PER_CYCLE
        # A chain advances one step per latency; unrolling cannot help it.
        step = max(macs / v.macs_per_cycle, loads, float(atom.latency)) + CONFLICTS * loads
        cycles += count * (step + LOOP_CYCLES + AHEAD_CYCLES * _streams(v))
    far = BOTH_FAR if atom.tiled and not _b_fits(v, "L1") else 1.0
    return cycles * v.visits * -(-v.k // depth) * far * _crowding(v) * _apart(v, APART)


def _decodes(v: _View) -> bool:
    """Codes are multiplied as they lie."""
    return v.s.b == "codes" and not v.s.pack_b


def _group_ends(v: _View, height: int) -> float:
    """What a group's integer sums cost when they are scaled, per multiply-add of the group."""
    s, isa = v.s, v.target.isa(v.s.isa)
    if not v.atom.takes_codes or not s.group or isa is None:
        return 0.0
    waiting = 2 * height * (s.nr // v.atom.n) > isa.registers
    return (GROUP_END + GROUP_WAITS * waiting) * v.atom.k_pack / s.group


def _converts(v: _View) -> tuple[bool, bool]:
    """Whether fragments of A and of B are converted each time they are loaded."""
    a, b = v.s.given(v.atom)
    return a != v.atom.left, b != v.atom.right and not _decodes(v)


def _streams(v: _View) -> int:
    """Operands that the micro-kernel asks for ahead."""
    s = v.s
    return s.ahead * (1 + (not s.pack_a) + (s.once or not s.pack_b))


def _asks(v: _View) -> bool:
    """The next rows of a B in place are asked for while these are worked on."""
    return v.s.ahead or v.s.prefetch > 0


def _short(v: _View) -> bool:
    """B is read in place, and its rows lie apart."""
    return v.s.b == "row" and not v.s.pack_b and v.p.n > v.wide


def _apart(v: _View, price: float) -> float:
    """Slowdown by reading runs of a row, given what it is for a run of one line."""
    run = v.wide * v.sizes[1]
    return 1.0 + price / max(1.0, run / LINE) if _short(v) else 1.0


def _crowding(v: _View) -> float:
    """Slowdown by rows of an A in place that start in one set of L1, of which B and C need ways too."""
    s, level = v.s, v.target.level("L1")
    if level is None or s.pack_a or s.a != "row" or v.p.m == 1:
        return 1.0
    if v.p.k * v.sizes[0] % (level.bytes // level.ways):
        return 1.0
    if s.mr + 1 >= level.ways and not s.ahead:
        return THRASHED
    return CROWDED if s.mr + PASSING >= level.ways else 1.0


def _tile_setup(v: _View) -> float:
    """Cycles to start and finish register tiles: one access to C per vector and block of k."""
    s, atom = v.s, v.atom
    wide, _ = _tile(v)
    passes = _blocks_k(v)
    # A sum over lanes folds them in half, a shuffle and an addition each time.
    folds = atom.n.bit_length() if s.program == "dot" else 0
    each = CARRIED if atom.tiled and passes > 1 else 1.0 + folds
    one = sum(count * (TILE_CYCLES + h * wide * each + atom.latency) for h, count in _slices(v))
    ends = FINISH * v.p.m * -(-v.p.n // v.line) if s.program != "dot" and finishes(s, atom) else 0.0
    ends += CONFIGURE * v.blocks if atom.tiled else 0.0
    return one * v.visits * passes + ends + (0.0 if s.static else 40.0)


def _shares(v: _View, workers: int) -> int:
    """Pieces that the columns are cut into."""
    fewest = -(-v.p.n // v.s.nc) if v.s.nc else 1
    return max(fewest, min(v.visits, -(-(workers - 1) * 4 // v.blocks)))


def _packing(v: _View, workers: int) -> float:
    """Cycles to pack: a panel of B once per block of rows, a block of A once per share of columns.

    Reading the operand is part of the traffic; this is the copying itself, a
    few cycles a vector as measured, and the shuffles of an operand that turns.
    """
    s, p, atom = v.s, v.p, v.atom
    cycles = 0.0
    straight_a = "row" if atom.tiled else "col"
    straight_b = "codes" if s.b == "codes" else "row"
    for packed, layout, straight, woven, extent, again in (
        (s.pack_a, s.a, straight_a, "col", p.m * v.k, _shares(v, workers) if s.over == "tiles" else 1),
        (s.pack_b, s.b, straight_b, straight_b, v.k * -(-p.n // s.nr) * s.nr, 1 if s.once else v.blocks),
    ):
        if not packed:
            continue
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
        cycles += extent * again * each + 50.0
    if s.once:
        # The copy is written to, and comes back from, where it fits; half of that overlaps.
        size = v.k * p.n * v.sizes[1]
        cycles += size / v.bytes_per_cycle(v.home(size))
    return cycles


def _b_fits(v: _View, name: str) -> bool:
    """A panel of B and the slice of A that passes fit a level."""
    level = v.target.level(name)
    depth = min(v.s.kc or v.k, v.k)
    a, b, _ = v.sizes
    return level is None or (v.wide * b + v.s.mr * a) * depth <= level.bytes


def _b_stays(v: _View, name: str) -> bool:
    """A panel of B keeps its place in a level while the slices of A pass.

    Rows of a B in place lie a stride apart; only so many of them fit as sets
    that the stride reaches have ways. So it is in L1, whose sets follow the
    addresses that a program sees, and in L2, where matrices lie in large pages
    and the next panel comes in meanwhile.
    """
    s, p, size = v.s, v.p, v.sizes[1]
    level = v.target.level(name)
    if not _b_fits(v, name):
        return False
    if level is None or s.pack_b or s.b != "row":
        return True
    sets = level.bytes // (level.line * level.ways)
    step = max(1, int(p.n * size) // level.line)
    lines = max(1, int(v.wide * size) // level.line)
    panels = 2 if name != "L1" and s.ahead else 1
    return min(s.kc or p.k, p.k) * panels <= level.ways * min(sets // gcd(step, sets), sets // lines)


def _traffic(v: _View, threads: int) -> dict[str, float]:
    """Cycles that each level's loads take, for one item."""
    s, p, k = v.s, v.p, v.k
    (a_size, b_size, c_size), (a_far, b_far, c_stored) = v.sizes, v.stored
    capacity = {x.name: x.bytes for x in v.target.levels}
    passes = _blocks_k(v)
    slices = -(-p.m // s.mr)
    wide, visits, blocks_m = v.wide, v.visits, v.blocks
    depth, rows = min(s.kc or k, k), min(s.mc or p.m, p.m)
    stays = _b_stays(v, "L1")
    # Registers <- L1: every step of k reads MR of A and NR of B per tile.
    l1 = (visits * p.m * a_size + slices * visits * wide * b_size) * k
    # L1 <- L2: a block of A passes once per visit, B once if it stays.
    b_l2 = (blocks_m if stays else slices) * k * visits * wide
    a_l2 = p.m * k * (1 if rows * depth * a_size <= capacity.get("L1", 0) // 2 else visits)
    c_once, c_again = p.m * p.n, p.m * p.n * (2 * passes - 2)
    # Between passes over k, the block of C waits in the nearest level that holds it.
    c_home = v.home(min(c_once, rows * min(s.nc or p.n, p.n)) * c_size)
    # Rows of a strided B are short runs: a prefetcher has to find each anew.
    short, runs = _short(v), _apart(v, SHORT_AHEAD if _asks(v) else SHORT_RUNS)
    streamed = b_l2 * (1.0 if stays else runs)
    l2 = a_l2 * a_size + streamed * b_size + (c_once + c_again * (c_home != "L1")) * c_size
    terms = {"L1": l1 / v.bytes_per_cycle("L1"), "L2": l2 / v.bytes_per_cycle("L2")}
    # L2 <- further out: B once per block of rows, C once per pass, A again if its block does not fit.
    a_fits = rows * depth * a_size <= capacity.get("L2", 0)
    b_again = blocks_m if a_fits and _b_stays(v, "L2") else slices
    c_far = c_once * c_stored + c_again * c_size * (c_home not in ("L1", "L2"))
    outer = k * p.n * b_far * b_again + c_far + p.m * k * a_far * (1 if a_fits else visits)
    home = v.home(p.bytes)
    if home in ("L1", "L2"):
        return terms
    slow = runs if short and depth > STREAMS else 1.0
    if short and not _asks(v):
        slow *= OVERFULL if depth * wide * b_size > FILLS * LINE else 1.0
        slow *= CUT_RUNS if threads > 1 and s.over == "tiles" else 1.0
    name = "L3" if "L3" in capacity else "memory"
    terms[name] = outer * slow / v.bytes_per_cycle(name)
    if home == "memory":
        far = k * p.n * b_far * (b_again if k * p.n * b_far > capacity.get("L3", 0) else 1)
        c_last = c_once * c_stored + c_again * c_size * (c_home == "memory")
        terms["memory"] = (far * slow + c_last + p.m * k * a_far) / v.bytes_per_cycle("memory")
    return terms
