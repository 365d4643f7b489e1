"""Table of candidates on CPUs: all that the cost model reads of them and that no size changes.

Owns `Table`, and the rates of a machine: measured ones where the target has them, described ones otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.schedule.epilogue_work import EpilogueWork
from portmm.schedule.schedule import Schedule, by_columns, finishes, finishes_in_c, sweeps
from portmm.spec.dtype import BY_NAME, parts, size
from portmm.target.model import CPU as MODEL
from portmm.target.model import Model

if TYPE_CHECKING:
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.isa import Isa
    from portmm.target.target import Target

WHOLE = 1e300
"""Extent of a block that covers all of a dimension: no size exceeds it, and sizes over it round up to 1."""
DEFAULT_BYTES_PER_CYCLE = {"L1": 64.0, "L2": 32.0, "L3": 10.0, "memory": 5.0}
"""Bandwidth per core, where there is neither a description nor a measurement."""
LINE = 64


def hertz(target: Target) -> float:
    """Cycles per second of a core."""
    return (target.frequency_ghz or MODEL.default_ghz) * 1e9


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


class Table:
    """Candidates for one kind of problem on one machine, as arrays with an element for each, and as facts of all.

    Attributes:
        mr, mc, kc, nc: extents of blocks, `WHOLE` for all of a dimension.
        thread_rows: rows of each thread from which threads that sweep panels have rows of their own.
        visit_n: columns of one call of the micro-kernel.
        vectors: fragments of B, or tiles, that a step loads.
        covers: elements or units of k that a step covers.
        deep: `Atom.deep`.
        m: rows of the atom.
        strip_rows: rows of one left fragment, 1 for tiles, whose time is proportional to their rows.
        k_pack: adjacent elements of k in a fragment.
        latency: cycles of a multiply-add.
        vector: sums in a vector.
        a, b, c: bytes of the elements that micro-kernels read of A and B, and of a sum.
        a_far, b_far: bytes in memory of one unit of A, and of B.
        registers: of the instruction set.
        group: rows of int4 or int8 values that share a scale, 0 for none.
        panels: panels of B that one call of the micro-kernel covers.
        parts: parts of an element of A, of which each is multiplied.
        rate: multiply-add instructions per cycle.
        steps: cycles of a step besides its multiply-adds and loads.
        begins: cycles to start and leave a register tile.
        unhidden: see `_unhidden`.
        sweeps: a micro-kernel call covers all columns, in long streams of B.
        swept: columns of one call of the micro-kernel, or of all of those in a sweep.
        crowded: slowdown where rows of A in place start in one set of L1.
        apart: slowdown of multiply-adds by short runs of a strided B.
        runs: slowdown of reading a strided B, likewise; of a B that is packed in passing, of reading its rows.
        near: columns of B that are packed together in passing.
        copy_a, copy_b: cycles to pack one unit of A, and of B.
        packs: cycles that packing takes at any extent.
        carried, carried_on: cycles for a vector of sums to be stored and loaded, in one block of k, and in several.
        tiled, over_k, over_batch: kind of the atom, and the parallel dimension.
        pack_a, pack_b, once, ahead: as in a schedule.
        left, right: fragments are converted each time they are loaded.
        decodes: quantized values are multiplied without repacking; `spans`, by atoms that sum a group at a time.
        prefetches: the next rows of a B in place are prefetched; `along`, what comes next in the same rows.
        inside: B is packed by the micro-kernel of a block's first slice of rows.
        c_ahead: a call of the micro-kernel covers many slices of rows, and prefetches those of C.
        strided: B is read in place, by rows.
        gathers: B is packed in passing, from rows.
        dots: dot products of rows of A and columns of B in place.
        rows_in_place: A is read in place, by rows.
        finishes: sums are converted before they are stored in C, in so many cycles a vector: `finish`.
        static: sizes are compiled in.
        cut: threads split the rows of a stream.
        count: number of candidates.
        some: names of the flags that some candidate has, "panels" if one covers several, "strips" if one has some.
        target: the machine.
        model: constants of the cost model for it.
        hertz: its cycles per second.
        elements: bytes of an element of A, B and C.
        operations: of a fused epilogue, of each element of C.
        whole: bytes of its arrays with an element for each of C's.
        firsts: the first of each group of candidates that are partitioned into tasks alike.
        group_of: the group of each candidate.
        reach: bytes of the largest data that stays in each level.
        bandwidth: bytes per cycle of each level, and of memory; `rates`, by their names.
        strided_bytes: bytes of an element of B where it is read in place; 0 if it never is. `rows_bytes`, of A.
        sets: name, bytes of a line and number of sets of each level.
    """

    def __init__(self, q: Problem, schedules: Sequence[Schedule], atoms: Sequence[Atom], target: Target) -> None:
        """Make the table of schedules for problems like `q`, which has C by rows."""
        sizes = tuple(map(size, q.types[:2]))
        model = MODEL.of(target.name)
        rows = [_facts(s, atom, target, model, sizes) for s, atom in zip(schedules, atoms, strict=True)]
        flags = {name for name, x in rows[0].items() if isinstance(x, bool)}
        columns = {name: np.array([x[name] for x in rows], bool if name in flags else float) for name in rows[0]}
        self.__dict__.update(columns)
        self.count, self.target, self.hertz, self.model = len(rows), target, hertz(target), model
        self.elements = tuple(x.bytes for x in q.elements)
        ending = EpilogueWork.of(q)
        self.operations, self.whole = ending.operations, sum(size(x.dtype) for x in ending.whole)
        self.some = frozenset(
            {name for name in flags if columns[name].any()}
            | ({"panels"} if (self.panels > 1).any() else set())
            | ({"strips"} if (self.strip_rows > 1).any() else set())
            | ({"unhidden"} if self.unhidden.any() else set())
        )
        over = np.where(self.over_k, self.kc, np.where(self.over_batch, -1.0, 0.0))
        kinds = np.stack((self.visit_n, self.mc, self.nc, self.thread_rows, over), axis=1)
        _, self.firsts, groups = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
        self.group_of = groups.reshape(-1)
        # A core's share of L3 may be less than its L2: data stays in the first level that it fits.
        near = [target.counted(x.name) * model.home for x in target.levels]
        self.reach = np.maximum.accumulate(near or [0.0])[: len(near)]
        rates = {name: bytes_per_cycle(target, name) for name in (*(x.name for x in target.levels), "memory")}
        self.bandwidth, self.rates = np.array([*rates.values()]), DEFAULT_BYTES_PER_CYCLE | rates
        # All rows in place hold elements of one type.
        strided = "strided" in self.some
        self.strided_bytes = float(self.b[self.strided][0]) if strided else 0.0
        in_rows = "rows_in_place" in self.some
        self.rows_bytes = float(self.a[self.rows_in_place][0]) if in_rows else 0.0
        placed = strided or in_rows
        self.sets = tuple((x.name, x.line, x.bytes // (x.line * x.ways)) for x in target.levels) if placed else ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A column of `_facts`."""


def _facts(s: Schedule, atom: Atom, target: Target, model: Model, sizes: Sequence[float]) -> dict[str, float]:
    """The columns of one candidate; flags are bools."""
    isa, level = target.isa(s.isa), target.level("L1")
    left, right = s.element_types(atom)
    pack_a, pack_b, ahead = s.a.packed, s.b.packed, s.c.prefetch > 0
    columns = by_columns(s, atom)
    c_ahead, ahead = columns and ahead, ahead and not columns
    copied = s.program == "dot" and pack_b  # all columns by a few rows at a time
    once = s.b.once or copied
    dots, decodes = s.program == "dot", s.b.layout == "codes" and not pack_b
    over_k, over_batch = s.parallel.over == "k", s.parallel.over == "batch"
    strided, in_place = s.b.layout == "row" and not pack_b, s.a.layout == "row" and not pack_a
    prefetches, sweeping = ahead or s.b.prefetch > 0, sweeps(s, atom)
    over_panels = sweeping and not strided
    own_rows = over_panels and not (s.mc or over_k or over_batch)
    cut = parts(s.types[0], atom.a) if atom.tiled and decodes else 1
    visit_n, b = s.nr * s.b.panels, sizes[1] * atom.k_pack if decodes else BY_NAME[right].bytes
    gathers, near = pack_b and not once and s.b.layout == "row", max(s.tiles[2].n, visit_n)
    lines, ways = max(1.0, visit_n * b / LINE), level.ways if level else WHOLE
    run = max(1.0, near * sizes[1] / LINE) if gathers else lines
    # Rows of C do not meet those of A where sums are in tiles of their own, and sweeps of panels leave some ways.
    crowded = model.crowded if s.mr + model.passing >= ways and (strided or not sweeping) else 1.0
    thrashed = 1.0 if s.c.packed else model.thrashed
    carried = 1.0 + (atom.n.bit_length() if dots else 0)
    return {
        "mr": s.mr, "mc": model.dot_rows if copied else s.mc or WHOLE,
        "thread_rows": (model.thread_rows if pack_b else model.thread_rows_ready) if own_rows else WHOLE,
        "kc": s.kc or WHOLE, "nc": s.nc or WHOLE, "visit_n": visit_n,
        "vectors": s.nr if dots else s.nr // atom.n * s.b.panels, "covers": atom.n if dots else atom.deep,
        "deep": atom.deep, "m": atom.m, "strip_rows": 1 if atom.tiled else atom.m, "k_pack": atom.k_pack,
        "latency": atom.latency, "vector": isa.columns(atom) if isa else atom.n, "a": BY_NAME[left].bytes * cut, "b": b,
        "parts": cut,
        "c": BY_NAME[atom.acc].bytes, "a_far": sizes[0] * atom.k_pack, "b_far": sizes[1] * atom.k_pack,
        "registers": isa.registers if isa else 0, "group": s.b.group, "panels": s.b.panels,
        "rate": macs_per_cycle(target, isa, atom, s.dtype),
        "steps": model.loop_cycles + model.ahead_cycles * ahead * (1.0 + (not pack_a) + (once or not pack_b))
        + model.line_ahead * lines * (s.b.prefetch > 0 or (s.b.along > 0 and not over_panels))
        + over_panels * lines * (model.panel_line if s.b.along else model.panel_waits),
        "begins": model.panel_cycles if over_panels
        else model.sweep_cycles + model.sweep_line * lines * (not s.b.along) if sweeping
        else model.dot_cycles if dots else model.begin_tiles if atom.tiled
        else model.static_cycles if s.static else model.inside_cycles if s.b.inside or columns else model.tile_cycles,
        "crowded": (thrashed if s.mr + 1 >= ways and not ahead else crowded) if in_place else 1.0,
        "apart": 1.0 + model.apart / lines * (not sweeping),
        "sweeps": sweeping, "swept": (s.nc or near if over_panels else s.nc or WHOLE) if sweeping else visit_n,
        "unhidden": _unhidden(s, model, sweeping),
        "runs": 1.0 + (model.short_ahead if prefetches and not gathers else model.short_runs) / run, "near": near,
        "copy_a": _copying(s, atom, model, "a"), "copy_b": _copying(s, atom, model, "b"),
        "packs": model.pack_cycles * (pack_a + pack_b), "carried": carried,
        "carried_on": model.carried if atom.tiled else carried,
        "tiled": atom.tiled, "over_k": over_k, "over_batch": over_batch,
        "pack_a": pack_a, "pack_b": pack_b, "once": once, "ahead": ahead, "left": left != atom.left,
        "right": right != atom.right and not decodes, "decodes": decodes,
        "spans": decodes and atom.takes_int4 and s.b.group > 0, "prefetches": prefetches, "along": s.b.along > 0,
        "inside": s.b.inside, "c_ahead": c_ahead,
        "strided": strided, "gathers": gathers, "dots": dots and not copied,
        "rows_in_place": in_place, "finishes": not dots and finishes(s, atom), "static": s.static is not None,
        "finish": model.finish_in_c if finishes_in_c(s, atom) else model.finish,
        "cut": strided and not (prefetches or s.b.along or over_k or over_batch),
    }  # fmt: skip


def _unhidden(s: Schedule, model: Model, sweeping: bool) -> float:
    """Time that reading B from its cache adds to blocks that are not prefetched, as a multiple."""
    if s.b.once:
        return float(model.unhidden_once)
    if s.b.inside:
        return 0.0
    if sweeping:
        return float(model.unhidden_panels if s.b.layout == "packed" else 0.0)
    if s.c.prefetch:
        return 0.0
    return float(model.unhidden if s.b.packed else model.unhidden_rows if s.b.layout == "row" else 0.0)


def _copying(s: Schedule, atom: Atom, model: Model, operand: str) -> float:
    """Cycles to pack a unit: a few per vector, and the shuffles of a transposed operand; 0 if it is not packed."""
    if operand == "a":
        packed, layout, straight, interleaved = s.a.packed, s.a.layout, "row" if atom.tiled else "col", "col"
    else:
        straight = interleaved = "codes" if s.b.layout == "codes" else "row"
        packed, layout = s.b.packed, s.b.layout
    if not packed:
        return 0.0
    if operand == "b" and s.b.inside:
        return float(model.copy_inside) / atom.n
    if layout == "any" or (layout != straight and atom.n == 1) or s.program == "dot":
        each: float = model.copy_element
    else:
        # A transposed block of L x L elements takes L log2(L) shuffles, besides which loads and stores are made.
        once = model.copy_once_tiles if atom.tiled else model.copy_once
        copy = once if s.b.once and straight == "row" else model.copy_passing
        # A vector takes instructions, its lines take bandwidth.
        line = min(1.0, atom.n * BY_NAME[atom.left if operand == "a" else atom.right].bytes / LINE)
        copy *= model.copy_vector + (1.0 - model.copy_vector) * line
        shuffles = 0 if layout == straight else atom.n.bit_length()
        each = (max(copy, shuffles) + model.copy_exposed * min(copy, shuffles)) / atom.n
    if layout == "codes":
        each = model.dequantize * atom.k_pack / atom.n
    if atom.k_pack > 1 and layout == interleaved:
        each += model.interleave * atom.k_pack / atom.n
    return each
