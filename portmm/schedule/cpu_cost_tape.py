"""The cost model of CPU schedules as a list of operations on the columns of one table.

Owns `Tape`. Columns that depend on the table alone are computed when the tape is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.schedule.cost_tape import Recorder, placed
from portmm.schedule.cpu_cost import Work, timed
from portmm.schedule.cpu_cost_terms import Array, Extents, Sizes, reached, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portmm.schedule.cpu_cost_table import Table
    from portmm.spec.problem import Problem

SHARED = 4
"""Number of columns about several threads, as `cpu_cost_terms.shared` returns them."""


@dataclass(frozen=True, slots=True)
class Tape:
    """Operations that predict the seconds of all candidates of a table.

    Attributes:
        code: the operations, five integers each; the last computes the predictions.
        constants: the first columns.
        shape: number of values of M, and of candidates.
        several: threads share the work; the columns of `shared` follow the constants.
    """

    code: np.ndarray[Any, np.dtype[np.int32]]
    constants: Array
    shape: tuple[int, int]
    several: bool

    @classmethod
    def of(cls, t: Table, rows: int, *, several: bool) -> Tape:
        """The tape of a table, for a number of values of M, and one thread or several."""
        names = tuple([level.name for level in t.target.levels]) if "strided" in t.some else ()
        among = SHARED if several else 0
        shape = (rows, t.x.mr.size)
        recorder = Recorder(shape, among + 4 + len(names))
        m, n, k, batch, *sets = [recorder.input(among + i) for i in range(4 + len(names))]
        sizes = Sizes(m, n, k, batch, dict(zip(names, sets, strict=True)))  # type: ignore[arg-type]
        v = Extents.of(t, sizes)
        parts: Any = [recorder.input(i) for i in range(among)] if several else shared(v, 1)
        seconds: Any = timed(v, Work.of(v), 2 if several else 1, tuple(parts)).seconds
        constants = np.array([np.frombuffer(x, np.float64) for x in recorder.constants])
        return cls(placed(recorder, seconds.slots[0], among + 4 + len(names)), constants, shape, several)

    def replayed(self, run: Callable[..., Array], t: Table, q: Problem, rows: Sequence[int], workers: int) -> Array:
        """Predicted seconds, by value of M, then by candidate.

        Args:
            run: interpreter of the operations.
            t: the table that the tape was recorded from.
            q: a problem of the kind that the table is for, with C by rows, at any M.
            rows: values of M, as many as the tape is for.
            workers: threads that share the work.
        """
        sizes = [*rows]
        for x in (q.n, q.k, q.batch, *reached(t, q.n).values()):
            sizes += [x] * len(rows)  # type: ignore[list-item]
        among = None
        if self.several:
            parts = shared(Extents.of(t, Sizes.of(t, q, rows)), workers)
            among = np.array([np.broadcast_to(x, self.shape).ravel() for x in parts])
        columns = np.array(sizes, np.float64).reshape(-1, len(rows))  # from a flat list, in half the time
        return run(self.code, self.constants, columns, among).reshape(self.shape)
