"""Cost model of CPU schedules: multiply-adds, tiles, packing, traffic of cache levels, and load balance of threads.

Owns the work of the programs of CPUs, each term by value of M, then by candidate, and the times that follow from it.
Rates are measured ones where the target has them, described ones otherwise. Most of the constants were fitted to the
times of every candidate on one thread of a Zen 4, with AVX-512 and with AVX2 (`bench/exhaustive.py`,
`bench/fit_cost.py`); docs/performance.md compares selected schedules with the best candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.schedule.cpu_partition import Array, Extents, Partition, shared
from portmm.schedule.cpu_table import LINE, WHOLE, Table
from portmm.schedule.roofline import Cost, Work, roofline

if TYPE_CHECKING:
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.target import Target

Flags = np.ndarray[Any, np.dtype[np.bool_]]


def cost(p: Problem, s: Schedule, atom: Atom, target: Target, workers: int = 1) -> Cost:
    """Predict the time of a legal schedule for a problem, with C in the caller's layout, by a number of threads."""
    q = p.transposed() if s.atom.swap else p
    return costs(Table(q, (s,), (atom,), target), q, (q.m,), (workers,))[0].at(0)[0]


def costs(t: Table, q: Problem, rows: Sequence[int], workers: Sequence[int]) -> list[Cost]:
    """Predict the times of all candidates of a table.

    Args:
        t: the table.
        q: a problem of the kind that the table is for, with C by rows, at any M.
        rows: values of M.
        workers: numbers of threads that share the work.

    Returns:
        The predictions for each number of threads.
    """
    v = Extents.of(t, q, rows)
    return [timed(v, n, shared(v, n)) for n in workers]


def timed(v: Extents, workers: int, among: Partition) -> Cost:
    """Times of work that several threads share, partitioned as `shared` returns it."""
    t, (row_blocks, column_blocks, tasks, threads, share) = v.t, among
    own, packing = work(v, threads if workers > 1 else None), packing_b(v, row_blocks)
    if "pack_a" in t.some:  # a block of A is packed once per block of columns
        packing = packing + (v.m * v.k) * column_blocks * t.copy_a
    scale = v.batch / t.hertz
    packers = threads
    if "once" in t.some:
        most = np.ceil(v.n * t.b / t.model.run_bytes) * np.ceil(v.k / t.model.pack_rows)
        packers = np.where(t.once, np.minimum(threads, most), threads)
    waiting = own.waiting
    if workers > 1 and "sweeps" in t.some:  # each task starts in all rows of C again
        rows = np.where(t.strided, t.model.cut_cycles * v.m, t.model.tile_cycles * v.slices)
        waiting = waiting + t.sweeps * (rows * v.passes * (column_blocks - 1.0))
    added = {"tiles": waiting * (share * scale), "packing": packing * scale / packers}
    if t.operations or t.whole:
        added["epilogue"] = ending(v) * (share * scale)
    if "over_k" in t.some:
        size = v.m * v.n * tasks * t.c
        sums = np.where(threads > 1, size / t.model.between_cores, 2 * v.outward(size))
        added["sums"] = t.over_k * (sums * scale / np.minimum(threads, v.m * np.ceil(v.n / t.model.sum_columns)))
    if workers > 1:
        phases = np.where(t.over_batch, 1.0, np.where(t.over_k, 2.0 * v.batch, v.batch)) + t.once * v.batch
        added["threads"] = phases * t.model.fork_seconds + tasks * t.model.task_seconds
    return roofline(own.counts, t.rates, added, t.model.exposed, scale=share * scale)


def work(v: Extents, threads: Any = None) -> Work:
    """Work of one item: cycles of multiply-adds, bytes of each level, and cycles of tiles; `threads` if several."""
    return Work({"compute": compute(v), **traffic(v, threads)}, tile_setup(v))


def compute(v: Extents) -> Array:
    """Cycles of one item: per step of k, the slowest of mac ports, load ports and latency."""
    t, mr = v.t, v.mr_variants
    # The time of a tile is proportional to its rows.
    strips = np.ceil(mr / t.strip_rows) if "strips" in t.some else mr
    macs = strips * (t.vectors / np.where(t.tiled, t.m, 1.0))
    if "decodes" in t.some:
        decoded = mr * t.vectors * (1 + _group_ends(v)) + t.model.decode * t.vectors + mr
        more = (t.parts - 1) * np.maximum(strips, t.model.tile_least)
        macs = np.where(t.decodes & ~t.tiled, decoded, macs + more * (t.vectors / np.where(t.tiled, t.m, 1.0)))
    if t.some & {"left", "right"}:
        macs = macs + t.model.convert * (mr * t.left + t.vectors * t.right) * t.rate
    loads = (strips + t.vectors * t.deep) / t.model.loads_per_cycle
    if "dots" in t.some:  # vectors of all operands, few of which are in one line
        loads = np.where(t.dots, loads * t.model.dot_loads, loads)
    # A chain advances one step per latency, however far it is unrolled.
    ports, conflicts = np.maximum(macs / t.rate, loads), t.model.conflicts * loads
    step = np.maximum(ports, t.latency) + conflicts
    if "tiled" in t.some:  # a chain of few tiles waits longer than their loads
        step = np.where(t.tiled, np.maximum(ports + conflicts, t.latency), step)
    cycles: Array = (v.counts * (step + t.steps + _tile_decoding(v))).sum(axis=0) * (v.visits * np.ceil(v.k / t.covers))
    if "tiled" in t.some:
        cycles = cycles * np.where(t.tiled & ~_b_fits(v, "L1"), t.model.both_far, 1.0)
    return cycles * _crowding(v) * np.where(_short(v), t.apart, 1.0)


def _group_ends(v: Extents) -> Array:
    """Cost of scaling a group's integer sums, per multiply-add of the group."""
    t = v.t
    waiting = 2 * v.mr_variants * np.floor(t.vectors / t.panels) > t.registers
    ends = t.model.group_end + t.model.group_waits * waiting
    return np.where(t.spans, ends * t.k_pack / np.maximum(t.group, 1.0), 0.0)


def _tile_decoding(v: Extents) -> Any:
    """Cycles of a step of tiles in which int4 values are converted, and its share of scaling a group's sums."""
    t = v.t
    if not ("decodes" in t.some and "tiled" in t.some):
        return 0.0
    ends = np.where(t.group > 0, t.covers * t.k_pack / np.maximum(t.group, 1.0), 0.0)
    each = t.model.decode_tile * t.deep + t.model.tile_group_end * v.mr_variants * ends
    return t.decodes * t.tiled * (t.vectors * each)


def _short(v: Extents) -> Any:
    """Whether B is read in place, in rows with a stride."""
    return v.t.strided & (v.n > v.t.visit_n)


def _crowding(v: Extents) -> Array | float:
    """Slowdown by rows of an A in place that start in one set of L1, where B and C need ways too."""
    level = v.t.target.level("L1")
    if level is None or "rows_in_place" not in v.t.some:
        return 1.0
    aligned = (v.elements * v.t.a) % (level.bytes // level.ways) == 0
    return np.where(aligned & (v.m != 1), v.t.crowded, 1.0)


def tile_setup(v: Extents) -> Array:
    """Cycles to start and finish register tiles: one access to C per vector and block of k."""
    t = v.t
    # A sum over lanes halves them repeatedly, with a shuffle and an addition each time.
    each = np.where(v.passes > 1, t.carried_on, t.carried)
    one = (v.counts * (t.begins + t.latency + v.mr_variants * (t.vectors * each))).sum(axis=0)
    cycles: Array = one * (v.visits * v.passes) + np.where(t.static, 0.0, t.model.kernel_cycles)
    if "strided" in t.some:
        cycles = cycles + t.model.walk * _page_walks(v)
    if "sweeps" in t.some:  # a call for all columns of a slice
        cycles = cycles + t.sweeps * (t.model.tile_cycles * v.slices * v.passes * np.ceil(v.n / t.swept))
    if "inside" in t.some:  # tiles of C in short runs, which are prefetched by columns of tiles alone
        waits = t.inside & ~(t.c_ahead & (v.n <= t.visit_n))
        cycles = cycles + waits * (t.model.inside_sums * v.passes * v.outward(v.m * v.n * t.c))
    if "dots" in t.some:
        block = v.rows * v.depth * t.a
        far = t.dots & (block > t.target.counted("L1") // 2)
        cycles = cycles + far * (t.model.dot_exposed * v.visits * v.outward(block))
    if "finishes" in t.some:
        cycles = cycles + t.finishes * (t.finish * v.m * np.ceil(v.n / t.vector))
    if "tiled" in t.some:
        cycles = cycles + t.tiled * (t.model.configure * v.blocks)
    return cycles


def ending(v: Extents) -> Any:
    """Cycles of a fused epilogue besides a store: its operations, and its arrays, of which few lines are under way."""
    t = v.t
    size = v.m * v.n
    level = v.home(_bytes(v) + v.batch * size * t.whole)
    reads = t.model.epilogue_reads * t.whole * size / np.choose(level, t.bandwidth)
    return t.model.epilogue_operation * t.operations * (v.m * np.ceil(v.n / t.vector)) + reads


def _page_walks(v: Extents) -> Any:
    """Pages that blocks of a B in place start which are not in the first TLB: a panel of more of them than it holds.

    Arrays of less than a large page are in small ones. Sweeps read each page along its rows.
    """
    t, row = v.t, v.n * v.t.strided_bytes
    pages = v.depth * np.minimum(1.0, row / t.model.page_bytes)
    missed = _short(v) & ~t.sweeps & (pages > t.model.pages) & (v.elements * row < t.model.large_page_bytes)
    return missed * (v.slices * v.visits * v.passes * pages)


def packing_b(v: Extents, row_blocks: Any) -> Any:
    """Cycles to pack B: a panel once per block of rows, or all of it once for all threads."""
    t = v.t
    cycles = t.packs
    if "pack_b" in t.some:
        columns = (
            v.visits * t.visit_n
            if "panels" not in t.some
            else np.ceil(v.n * t.panels / t.visit_n) * t.visit_n / t.panels
        )
        cycles = cycles + v.k * columns * np.where(t.once, 1.0, row_blocks) * t.copy_b
    if "inside" in t.some:  # rows of what L2 does not hold are late
        far = np.maximum(0.0, v.k * v.n * t.b_far - t.target.counted("L2"))
        cycles = cycles + t.inside * t.model.unhidden_inside * (row_blocks * v.outward(far))
    if "unhidden" in t.some:  # rows that lie in one tile are a stream, which hardware follows
        streamed = np.where(t.strided & (v.n <= t.visit_n), t.model.unhidden_stream, 1.0)
        cycles = cycles + streamed * t.unhidden * (np.where(t.once, 1.0, row_blocks) * v.outward(v.k * v.n * t.b_far))
    if "once" in t.some:
        # The copy is written to, and read from, the level that it fits beside B; half of that overlaps.
        cycles = cycles + t.once * v.outward(v.k * v.n * t.b, 2.0)
    return cycles


def _b_fits(v: Extents, name: str) -> Flags:
    """Whether a panel of B and a slice of A fit a level."""
    t, level = v.t, v.t.target.level(name)
    width = np.where(t.sweeps, np.minimum(v.n, t.swept), t.visit_n) if "sweeps" in t.some else t.visit_n
    rows = t.mr * t.a * np.where(t.tiled & (name == "L1"), t.deep, v.depth)  # tiles of A pass by L1
    return width * t.b * v.depth + rows <= (level.bytes if level else WHOLE)


def _b_stays(v: Extents, name: str) -> Flags:
    """Whether a panel of B stays in a level while the slices of A pass.

    Rows of a B in place have a stride; no more of them fit than the sets that
    the stride reaches have ways. This holds in L1, whose sets follow virtual
    addresses, and in L2, where matrices are in large pages
    and the next panel is prefetched meanwhile.
    """
    t, level, fits = v.t, v.t.target.level(name), _b_fits(v, name)
    if level is None or "strided" not in v.t.some:
        return fits
    sets = level.bytes // (level.line * level.ways)
    lines = np.maximum(1.0, t.visit_n * t.b // level.line)
    panels = np.where(t.ahead, 2.0, 1.0) if name != "L1" else 1.0
    room = level.ways * np.minimum(v.reached["B" + name], sets // lines)
    return fits & (~t.strided | (np.minimum(t.kc, v.elements) * panels <= room))


def _a_stays(v: Extents, name: str) -> Any:
    """Whether rows of a block of an A in place stay in a level: no more than fit the sets that their stride reaches."""
    t, level = v.t, v.t.target.level(name)
    if level is None or "rows_in_place" not in t.some:
        return True
    sets = level.bytes // (level.line * level.ways)
    lines = np.maximum(1.0, v.depth * t.a / level.line)
    room = level.ways * np.minimum(v.reached["A" + name], np.floor(sets / lines))
    return ~t.rows_in_place | (v.rows <= room)


def traffic(v: Extents, threads: Any = None) -> dict[str, Array]:
    """Bytes of each level's loads for one item; more of the levels that are slower where threads split rows of B."""
    t, levels = v.t, v.t.target
    names = [level.name for level in levels.levels]
    capacity = {level.name: levels.counted(level.name) for level in levels.levels}
    stays, short = _b_stays(v, "L1"), _short(v)
    across = v.visits * t.visit_n * v.k
    # Registers <- L1: every step of k reads MR of A and NR of B per tile.
    reads = v.visits * v.m * v.k * t.a + v.slices * across * t.b
    # L1 <- L2: a block of A passes once per visit, B once if it stays.
    block = v.rows * v.depth * t.a
    a_once = v.m * v.k
    over_panels = t.sweeps & ~t.strided
    again = np.where(over_panels, np.ceil(v.n / t.swept), v.visits)
    a_l2 = a_once * np.where(block <= capacity.get("L1", 0) // 2, 1.0, again)
    b_l2 = across * np.where(stays, v.blocks, v.slices * np.where(short, t.runs, 1.0))
    c_once = v.m * v.n
    c_again = c_once * (2 * v.passes - 2)
    # Between passes over k, the block of C stays in the nearest level with room for it.
    c_home = v.home(np.minimum(c_once, v.rows * np.minimum(t.nc, v.n)) * t.c)
    near = names.index("L1") if "L1" in names else WHOLE
    l2 = a_l2 * t.a + b_l2 * t.b + (c_once + c_again * (c_home != near)) * t.c
    home = v.home(_bytes(v))
    nearest = sum(name in ("L1", "L2") for name in names)
    beyond = home >= nearest
    # L2 <- further out: B once per block of rows, C once per pass, A again if its block does not fit.
    a_fits = block <= capacity.get("L2", 0)
    b_again = np.where((a_fits | over_panels) & _b_stays(v, "L2"), v.blocks, v.slices)
    b_bytes, a_bytes = v.k * v.n * t.b_far, a_once * t.a_far
    c_far = c_once * t.elements[2] + c_again * t.c * (c_home >= nearest)
    outer = b_bytes * b_again + c_far + a_bytes * np.where(a_fits & _a_stays(v, "L2"), 1.0, again)
    # Rows of B are read a run at a time, by micro-kernels or to pack them.
    apart = short | (t.gathers & (v.n > t.near)) if "gathers" in t.some else short
    slow = np.where(apart & (v.depth > t.model.streams), t.runs, 1.0)
    slow = slow * np.where(
        short & ~t.prefetches & ~t.sweeps & (v.depth * t.visit_n * t.b > t.model.fills * LINE), t.model.overfull, 1.0
    )
    wide = t.sweeps & short & (v.m != 1) & (v.depth * t.visit_n * t.b > t.model.fills * LINE)
    slow = slow * np.where(wide, t.model.overfull_sweep, 1.0)
    slow = slow * np.where(short & _unswept(v, b_bytes), t.model.shared_runs, 1.0)
    # Prefetchers fetch lines in pairs: of a shorter run, neighbours are gone when the next panel reads them.
    scattered = short & (t.visit_n * t.b < t.model.long_run) & ~_b_stays(v, "L2")
    slow = slow * np.where(scattered & (v.depth > t.model.streams), t.runs, 1.0)
    far = b_bytes * np.where(b_bytes > capacity.get("L3", 0), b_again, 1.0)
    c_last = c_once * t.elements[2] + c_again * t.c * (c_home == len(names))
    in_memory = home == len(names)

    if threads is not None and t.cut.any():
        slow = slow * np.where(short & t.cut & (threads > 1), t.model.cut_runs, 1.0)
    # A core's window of instructions holds fewer lines of B the more rows multiply each. Hardware follows the rows of a
    # B that is in the last level, if nobody else fills it: prefetches only cost there (Zen 5, 4x1024x4096: 371 us, 267
    # without them).
    kept = 2 * v.depth * v.n * t.b + v.m * v.n * t.c <= t.model.home * capacity.get("L2", 0)
    kept = kept & (b_bytes > t.model.home * levels.largest)
    seen = np.where(t.sweeps & t.prefetches & kept, 1.0 / (1.0 + t.model.unseen * (v.m - 1.0)), 1.0)
    hidden: Any = 1.0
    if "along" in t.some:
        seen, hidden = np.where(t.along, t.model.along, seen), np.where(t.along, t.model.along, 1.0)
    # Lines of memory come later than those of L3: prefetchers follow fewer rows there.
    late = np.where(t.sweeps & short & (v.depth > t.model.far_streams), np.maximum(slow, t.runs), slow)
    from_memory, from_beyond = far * (late * seen) + c_last + a_bytes, beyond * (outer * slow * hidden)
    if "L3" in names:
        return {"L1": reads, "L2": l2, "L3": from_beyond, "memory": in_memory * from_memory}
    return {"L1": reads, "L2": l2, "memory": np.where(in_memory, from_memory, from_beyond)}


def _unswept(v: Extents, b_bytes: Any) -> Any:
    """Whether few rows read, a run at a time, a B that takes more of a large last level than others may leave it."""
    t, l2 = v.t, v.t.target.counted("L2")
    far = (b_bytes > t.model.panels_far * l2) & (b_bytes <= t.model.apart_share * t.target.largest)
    return far & ~t.sweeps & (v.depth > t.model.streams) & (v.m <= t.model.few_rows)


def _bytes(v: Extents) -> Any:
    """Compulsory traffic, as in `Problem.bytes`, by value of M."""
    a, b, c = v.t.elements
    return v.batch * (v.m * v.elements * a + v.elements * v.n * b + v.m * v.n * c)
