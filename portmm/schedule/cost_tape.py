"""The cost model of CPU schedules as a list of operations on the columns of one table.

Owns `Tape`: what the model's functions do to columns, recorded by running them once on `Recorded` in place of arrays,
so that the C of the runtime can repeat it without a call of NumPy for each step. Both do the same operations on
float64 in the same order, so that results are the same to the bit. Columns that depend on the table alone are computed
when the tape is recorded.

A column has an element for each value of M and candidate. An operation is five integers: its number in
`OPERATIONS`, the column that it writes, and up to three columns that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.schedule.cpu_cost import timed
from portmm.schedule.cpu_partition import Array, Extents, Partition, reached, shared
from portmm.util.records import dataclass

if TYPE_CHECKING:
    from portmm.schedule.cpu_table import Table
    from portmm.spec.problem import Problem

SHARED = len(Partition._fields)
"""Number of columns about several threads."""

OPERATIONS = (
    *("add", "subtract", "multiply", "divide", "minimum", "maximum", "ceil", "floor", "remainder"),
    *("less", "less_equal", "equal", "not_equal", "where"),
)
"""Names of operations; the number of each is its index (see runtime/tape.c)."""
_SWAPPED = {"greater": "less", "greater_equal": "less_equal"}
# Flags are 0 and 1.
_FLAGS = {"bitwise_and": "multiply", "bitwise_or": "maximum"}


class Recorded(np.lib.mixins.NDArrayOperatorsMixin):
    """A column of a tape that is being recorded, or one for each of several values of MR."""

    __slots__ = ("recorder", "slots")

    def __init__(self, recorder: Recorder, slots: tuple[int, ...]) -> None:
        self.recorder, self.slots = recorder, slots

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Record a function of elements."""
        if method != "__call__" or options:
            return NotImplemented
        name = ufunc.__name__
        if name == "invert":
            return self.recorder.record("subtract", 1.0, self)
        if name in _SWAPPED:
            return self.recorder.record(_SWAPPED[name], *reversed(inputs))
        return self.recorder.record(_FLAGS.get(name, name), *inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        """Record a function of arrays."""
        del types
        known = _FUNCTIONS.get(function)
        return NotImplemented if known is None or options else known(self.recorder, *args)

    def sum(self, axis: int) -> Recorded:
        """The sum over values of MR."""
        assert axis == 0  # noqa: S101 - the model sums over nothing else
        first, *rest = [Recorded(self.recorder, (slot,)) for slot in self.slots]
        for x in rest:
            first = first + x
        return first


def _searchsorted(recorder: Recorder, bounds: Array, x: Recorded) -> Recorded:
    """`np.searchsorted`: the number of bounds that are less."""
    total = recorder.record("add", 0.0, 0.0)
    for bound in bounds.tolist():
        total = total + (x > bound)
    return total


def _choose(recorder: Recorder, at: Recorded, values: Array) -> Recorded:
    """`np.choose`: the value at each index."""
    *first, last = values.tolist()
    result: Any = last
    for i, value in enumerate(first):
        result = recorder.record("where", at == float(i), value, result)
    return recorder.record("add", result, 0.0) if isinstance(result, float) else result


_FUNCTIONS: dict[Any, Callable[..., Recorded]] = {
    np.where: lambda recorder, *args: recorder.record("where", *args),
    np.stack: lambda recorder, columns: Recorded(recorder, tuple([y for x in columns for y in recorder.slots(x)])),
    np.searchsorted: _searchsorted,
    np.choose: _choose,
}


class Recorder:
    """Operations and constants recorded so far: columns are numbered in order, constants separately, below zero."""

    def __init__(self, shape: tuple[int, int], inputs: int) -> None:
        self.shape, self.count = shape, inputs
        self.constants: dict[bytes, int] = {}
        self.operations: dict[tuple[int, ...], int] = {}

    def input(self, slot: int) -> Recorded:
        """A column that is an argument of each run of the tape."""
        return Recorded(self, (slot,))

    def slots(self, x: Any) -> tuple[int, ...]:
        """Numbers of the columns of an operand."""
        if isinstance(x, Recorded):
            return x.slots
        column = np.ascontiguousarray(np.broadcast_to(np.asarray(x, np.float64), self.shape))
        return (self.constants.setdefault(column.tobytes(), -1 - len(self.constants)),)

    def record(self, name: str, *operands: Any) -> Recorded:
        """An operation, or one for each value of MR; an operation that was recorded before is reused."""
        read = [self.slots(x) for x in operands]
        results = []
        for i in range(max(map(len, read))):
            key = (OPERATIONS.index(name), *[x[i % len(x)] for x in read])
            if key not in self.operations:
                self.operations[key] = self.count
                self.count += 1
            results.append(self.operations[key])
        return Recorded(self, tuple(results))


def placed(recorder: Recorder, result: int, inputs: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The operations that the result needs; the buffer of a column is reused after its last use."""
    by_place = {slot: key for key, slot in recorder.operations.items()}
    last, needed = {result: result}, {result}
    for slot in range(result, inputs - 1, -1):
        if slot in needed:
            for x in by_place[slot][1:]:
                needed.add(x)
                last.setdefault(x, slot)
    constants = len(recorder.constants)
    where = {x: -1 - x for x in range(-constants, 0)} | {x: constants + x for x in range(inputs)}
    free: list[int] = []
    most = constants + inputs
    code = []
    for slot in range(inputs, result + 1):
        if slot not in needed:
            continue
        number, *read = by_place[slot]
        at = [where[x] for x in read]
        free += [where[x] for x in dict.fromkeys(read) if x >= inputs and last[x] == slot]
        if free:
            where[slot] = free.pop()
        else:
            where[slot], most = most, most + 1
        code.append((number, where[slot], *at, *(0,) * (3 - len(at))))
    return np.array(code, np.int32)


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
        names = list(reached(t, 1, 1))
        among = SHARED if several else 0
        recorder = Recorder((rows, t.count), among + 4 + len(names))
        sizes = [recorder.input(among + i) for i in range(4 + len(names))]
        v = Extents(t, (sizes[0], sizes[1], sizes[2], sizes[3]), dict(zip(names, sizes[4:], strict=True)))
        inputs: list[Any] = [recorder.input(i) for i in range(among)]
        parts = Partition(*inputs) if several else shared(v, 1)
        seconds = timed(v, 2 if several else 1, parts).seconds
        constants = np.array([np.frombuffer(x, np.float64) for x in recorder.constants])
        return cls(placed(recorder, seconds.slots[0], among + 4 + len(names)), constants, recorder.shape, several)

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
        for x in (q.n, q.k, q.batch, *reached(t, q.n, q.k).values()):
            sizes += [x] * len(rows)  # type: ignore[list-item]
        among = None
        if self.several:
            parts = shared(Extents.of(t, q, rows), workers)
            among = np.array([np.broadcast_to(x, self.shape).ravel() for x in parts])
        columns = np.array(sizes, np.float64).reshape(-1, len(rows))  # from a flat list, in half the time
        return run(self.code, self.constants, columns, among).reshape(self.shape)
