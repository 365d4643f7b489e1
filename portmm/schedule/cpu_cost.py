"""Cost model of CPU schedules: predicted time, by term.

Owns the cost model; its terms are in `cpu_cost_terms`. Predicted time is the largest
of the terms that overlap (multiply-adds, loads, traffic of each level), a share
of the others, since overlap is never perfect, and those that do not overlap
(packing, tile set-up, forking). All terms are kept, so that `explain` can show
the reasons of a selection. Rates are measured ones where the target has them,
described ones otherwise. Most of the constants were fitted to the times of
every candidate on one thread of a Zen 4, with AVX-512 and with AVX2
(`bench/exhaustive.py`, `bench/fit_cost.py`); docs/performance.md compares
selected schedules with the best candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from portmm.schedule.cpu_blocking import PACK_ROWS, RUN_BYTES, SUM_COLUMNS
from portmm.schedule.cpu_cost_table import hertz, table
from portmm.schedule.cpu_cost_terms import Extents, Sizes, compute, packing_b, shared, tile_setup, traffic
from portmm.schedule.roofline import roofline
from portmm.target.model import CPU as MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portmm.schedule.cpu_cost_table import Table
    from portmm.schedule.cpu_cost_terms import Array
    from portmm.schedule.schedule import Schedule
    from portmm.spec.problem import Problem
    from portmm.target.atom import Atom
    from portmm.target.target import Target

OPTIONAL = frozenset(("L3", "memory", "sums"))
"""Terms that only some problems and schedules have."""


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
        """The largest overlapped term."""
        return max(self.overlapped, key=self.overlapped.__getitem__)


def cost(p: Problem, s: Schedule, atom: Atom, target: Target, workers: int = 1) -> Cost:
    """Predict the time of schedule `s` for problem `p` on `target`.

    Args:
        p: the problem, with C in the caller's layout.
        s: a legal schedule for it.
        atom: the schedule's atom.
        target: the machine.
        workers: threads that share the work.

    Returns:
        Seconds, with terms.
    """
    q = p.transposed() if s.atom.swap else p
    return costs(table(q, (s,), (atom,), target), q, (q.m,), (workers,))[0].at(0)[0]


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds of candidates, by value of M, then by candidate.

    Attributes:
        seconds: the predictions.
        overlapped: terms of which the largest counts; 0 for levels that no data comes from.
        added: terms that add up.
    """

    seconds: Array
    overlapped: dict[str, Array]
    added: dict[str, Array]

    def at(self, row: int) -> list[Cost]:
        """The costs of all candidates for one value of M."""
        shape = self.seconds.shape

        def terms(arrays: dict[str, Array]) -> list[dict[str, float]]:
            every = [np.broadcast_to(x, shape)[row].tolist() for x in arrays.values()]
            named = (dict(zip(arrays, one, strict=True)) for one in zip(*every, strict=True))
            return [{name: x for name, x in one.items() if x or name not in OPTIONAL} for one in named]

        seconds = self.seconds[row].tolist()
        return list(map(Cost, seconds, terms(self.overlapped), terms(self.added)))


def costs(t: Table, q: Problem, rows: Sequence[int], workers: Sequence[int]) -> list[Costs]:
    """Predict the times of all candidates of a table.

    Args:
        t: the table.
        q: a problem of the kind that the table is for, with C by rows, at any M.
        rows: values of M.
        workers: numbers of threads that share the work.

    Returns:
        The predictions for each number of threads.
    """
    v = Extents.of(t, Sizes.of(t, q, rows))
    work = Work.of(v)
    return [timed(v, work, n, shared(v, n)) for n in workers]


@dataclass(frozen=True, slots=True)
class Work:
    """Cycles of one item, for any number of threads.

    Attributes:
        overlapped: multiply-adds, and the loads of each level.
        slowed: the loads of the levels that are slower where threads split rows of B.
        setup: of register tiles.
        packing: of B.
    """

    overlapped: dict[str, Array]
    slowed: dict[str, Array]
    setup: Array
    packing: Array

    @classmethod
    def of(cls, v: Extents) -> Work:
        """The work of problems."""
        loads, slowed = traffic(v)
        return cls({"compute": compute(v), **loads}, slowed, tile_setup(v), packing_b(v))


def timed(v: Extents, work: Work, workers: int, among: tuple[Array, Array, Array, Array]) -> Costs:
    """Times of partitioned work that several threads share.

    Args:
        v: the problems.
        work: their cycles.
        workers: threads that share it.
        among: the partition among threads, as `shared` returns it.
    """
    t, q, x = v.t, v.sizes, v.t.x
    column_blocks, tasks, threads, share = among
    # A block of A is packed once per block of columns.
    packing = work.packing + (v.m * v.k) * column_blocks * t.copy_a if "pack_a" in t.some else work.packing
    scale = q.batch / hertz(t.target)
    part = share * scale
    overlapped = {name: each * part for name, each in work.overlapped.items()}
    if workers > 1:
        slowed = {name: np.where(threads > 1, each, work.overlapped[name]) for name, each in work.slowed.items()}
        overlapped |= {name: each * part for name, each in slowed.items()}
    packers = threads
    if "once" in t.some:
        most = np.ceil(q.n * x.b / RUN_BYTES) * np.ceil(v.k / PACK_ROWS)
        packers = np.where(x.once, np.minimum(threads, most), threads)
    added = {"tiles": work.setup * part, "packing": packing * scale / packers}
    if "over_k" in t.some:
        sums = 2 * v.outward(v.m * q.n * tasks * x.c)
        added["sums"] = x.over_k * (sums * scale / np.minimum(threads, v.m * np.ceil(q.n / SUM_COLUMNS)))
    if workers > 1:
        phases = np.where(x.over_batch, 1.0, np.where(x.over_k, 2.0 * q.batch, q.batch)) + x.once * q.batch
        added["threads"] = phases * MODEL.fork_seconds + tasks * MODEL.task_seconds
    seconds = roofline([*overlapped.values()], [*added.values()], MODEL.exposed)
    return Costs(seconds, overlapped, added)
