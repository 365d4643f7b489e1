"""Functions over rows of arrays on a device: element-wise, with reductions along rows or down columns.

Owns `over_rows`, as `rows` has it for arrays in the host's memory. Imports `dispatch.gpu_rows`, `trace.bind`,
`ops.matmul_gpu`, `ops.rowwise`, `trace.tracer`. Nothing waits: kernels are put on the stream or queue of the first array, and what was
found out about a kind of call is remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from portmm.arrays import device_arrays, interop, numpy_arrays
from portmm.dispatch.gpu_rows import launches
from portmm.errors import ScheduleError, TraceError
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import Fused, Operand, argument, load
from portmm.spec.expr import ordered, real, rounded
from portmm.trace.bind import WRITTEN, Around, dense, located, settle, typed
from portmm.trace.buffers import walk
from portmm.trace.closures import resolve
from portmm.trace.column_reductions import down
from portmm.trace.tracer import Indices, described, element, lies

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from portmm.arrays.interop import Foreign
    from portmm.dispatch.gpu import Launch, Machine
    from portmm.trace.tracer import Source, Traced

Made = tuple[Any, "Foreign"]
"""An array of its library, and what kernels must know of it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Kernels over rows, or columns, for one kind of call.

    Attributes:
        on: the device.
        launches: kernels.
        workspace: elements of f32 between them.
        sources: arrays that the function captures, and how far into each, in bytes, its first element is.
        numbers: where the numbers of a call come from.
        results: shapes and types.
        several: the function gives a tuple.
        order: of kernels that reduce columns, where the function's results are: see `rows.down`.
        passed: how many of their results the next kernel is given.
    """

    on: Machine
    launches: tuple[Launch, ...]
    workspace: int
    sources: tuple[tuple[Source, int], ...]
    numbers: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[tuple[int, ...], str], ...]
    several: bool
    order: tuple[int, ...] | None = None
    passed: int = 0

    def run(self, found: dict[Any, Any], given: list[Foreign], like: Foreign, out: Foreign | None) -> list[Made]:
        """Launch everything: the results, of which the first is `out` if that is given."""
        read = [captured(x, found, like) for x, _ in self.sources]
        made = [interop.empty_like(like, *x) for x in self.results]
        if out is not None:
            made[0] = (out.source, out)
        starts = [0] * len(given) + [at for _, at in self.sources] + [0] * len(made)
        values = addresses([*given, *read, *(x for _, x in made)], starts)
        values |= {f"number_{i}": float(resolve(key, found)) for i, key in enumerate(self.numbers)}
        start(self.launches, self.on, values, self.workspace, like)
        return made


def addresses(operands: list[Foreign], starts: list[int]) -> dict[str, Any]:
    """Where operands begin, so many bytes into each array, by the names that kernels give them."""
    places = [interop.argument(x)[1] for x in operands]
    return {
        f"x{i}_all": device_arrays.shifted(place, at // BY_NAME[x.dtype].bytes, x) if at else place
        for i, (x, place, at) in enumerate(zip(operands, places, starts, strict=True))
    }


def start(  # noqa: PLR0917 - what a launch has
    every: tuple[Launch, ...], on: Machine, values: dict[str, Any], workspace: int, like: Foreign, held: str = "f32"
) -> None:
    """Put kernels on the queue of an array; `workspace` elements of type `held` are between them."""
    scratch: Any = None
    if workspace:
        scratch, work = interop.empty_like(like, (workspace,), held)
        values["work"] = interop.argument(work)[1]
    for launch in every:
        launch.run(on, values, like.queue)
    del scratch  # its library frees it when the queue is done with it


def captured(source: Source, found: dict[Any, Any], like: Foreign) -> Foreign:
    """An array that a function captures, on the device of the others."""
    x = interop.adopt(found[source.key] if source.key in found else resolve(source.key, found))
    assert x is not None  # noqa: S101 - it was looked at when the function was traced
    interop.same_device([like, x])
    return x


def over_rows(
    function: Callable[..., Any],
    given: tuple[Foreign, ...],
    names: dict[str, str],
    out: Foreign | None = None,
    dtype: str = "",
    *,
    first: str = "",
) -> tuple[tuple[Made, ...], bool]:
    """A function of values in arrays of one shape, element by element, with reductions along the last axis.

    Args:
        function: takes a value for each array, and the indices.
        given: arrays of one shape, (..., m, n).
        names: what the function calls the axes -> axes.
        out: where to put the one result; what it has to be `rows.over_rows` says.
        dtype: type of results that no `cast` gives one, by default that of the first array.
        first: of the first of them, if it is another.

    Returns:
        The results, dense, and whether the function gave a tuple of them.

    Raises:
        TypeError: an array, or one that the function captures, is not on this device, or no kernel reads its type.
        TraceError: the function cannot be traced.
        ScheduleError: there is no kernel.
    """
    interop.same_device(given)
    like = given[0]
    *lead, m, n = like.shape
    size = (m, n, math.prod(lead))
    values = [flat(readable(x), size) for x in given]
    usual = numpy_arrays.numpy_of(dtype or like.dtype)
    around = Around.of(function)
    key = ("rows on a device", tuple([x.kind for x in values]), tuple(lead), usual, first, tuple(names.items()))

    def make(traced: Traced) -> tuple[_Rows, ...]:
        traced = typed(traced, numpy_arrays.numpy_of(first) if first else None)
        return _prepare(traced, around.found, values, usual, lead)

    types = [element(numpy_arrays.numpy_of(x.dtype))[0] for x in values]
    leaves = (*(argument(i, x) for i, x in enumerate(types)), Indices(names))
    ready: tuple[_Rows, ...] = around.ready(key, make, leaves, 3 if lead else 2)
    head = ready[0]
    direct = None
    if out is not None and head.order is None:
        read = [*values, *(captured(x, around.found, like) for x, _ in head.sources)]
        direct = out if _takes(out, head.results[0], read) else None
    results = head.run(around.found, values, like, direct)
    if head.order is not None:
        passed = [x for _, x in results[: head.passed]]
        rest = ready[1].run(around.found, [*values, *passed], like, None) if len(ready) > 1 else []
        results = [results[i] if i >= 0 else rest[-1 - i] for i in head.order]
    if out is not None and direct is None:
        device_arrays.check_out(out, results[0][1].shape)
        device_arrays.check_type(out, results[0][1].dtype)
        results[0] = (copied(out, results[0][1]), out)
    return tuple(results), head.several


def readable(x: Foreign) -> Foreign:
    """The array itself.

    Raises:
        TypeError: expressions do not read its type.
    """
    if x.dtype not in WRITTEN:
        raise TypeError(f"expressions on a device read {', '.join(WRITTEN)}, not {x.dtype}: convert the array first")
    return x


def flat(x: Foreign, size: tuple[int, int, int]) -> Foreign:
    """The array as (batch, m, n), copied where its batch does not lie evenly."""
    m, n, batch = size
    *lead, row, column = device_arrays.elements(x)
    dims = [(count, s) for count, s in zip(x.shape[:-2], lead, strict=True) if count > 1]
    if any(s != count * t for (_, s), (count, t) in pairwise(dims)):
        return flat(contiguous(x)[1], size)
    step = dims[-1][1] if dims else 0
    width = BY_NAME[x.dtype].bytes
    return replace(x, shape=(batch, m, n), strides=(step * width, row * width, column * width))


def contiguous(x: Foreign, dtype: str = "") -> Made:
    """A copy in C's order, of another type if one is given."""
    made, to = interop.empty_like(x, x.shape, dtype or x.dtype)
    copy(x, to)
    return made, to


def copy(x: Foreign, to: Foreign) -> None:
    """The elements of an array to another of its shape, whatever the strides of both."""
    if not x.size:
        return
    if x.dtype == to.dtype == "f64":
        x, to = _words(x), _words(to)
    steps = [(0, 0, *device_arrays.elements(x)), (0, 0, *device_arrays.elements(to))]
    lies_so = Operand(x.dtype, "bmn", dense=False), Operand(to.dtype, "bmn", dense=steps[1][-1] == 1)
    text = str(Fused(lies_so, ((1, _as(x, to)),)))
    w = walk((1, 1, *x.shape)[:-1], [s[:-1] for s in steps])
    n = x.shape[-1] if x.shape else 1
    strides = [(w.batch[1][i], w.rows[1][i], steps[i][-1]) for i in range(2)]
    on = device_arrays.machine_of(x)
    every, workspace = launches(text, (w.rows[0], n, w.batch[0]), strides, [1, 1], on)
    for moved in w.repeats:
        starts = [i * BY_NAME[y.dtype].bytes for i, y in zip(moved, (x, to), strict=True)]
        start(every, on, addresses([x, to], starts), workspace, x)


def copied(out: Foreign, made: Foreign) -> Any:
    """The array of a call's `out`, with the elements of another, in the order of the queue that this was made for."""
    copy(made, out)
    return out.source


def _words(x: Foreign) -> Foreign:
    """An array of float64 as one of integers of half the size: expressions have no float64."""
    return replace(x, shape=(*x.shape, 2), strides=(*x.strides, 4), dtype="s32")


def _as(x: Foreign, to: Foreign) -> Any:
    value = load(0, x.dtype)
    return real(value) if to.dtype != "s32" else rounded(value) if value.dtype == "f32" else value


def _takes(out: Foreign, result: tuple[tuple[int, ...], str], given: list[Foreign]) -> bool:
    """Kernels can write their first result to `out`: it lies as that would, and on nothing that they read.

    Raises:
        TypeError: it cannot take the type of the result.
        ValueError: it cannot take the result at all.
    """
    device_arrays.check_out(out, result[0])
    device_arrays.check_type(out, result[1])
    laid = interop.contiguous(out.shape, BY_NAME[out.dtype].bytes)
    same = all(n == 1 or s == t for n, s, t in zip(out.shape, out.strides, laid, strict=True))
    aligned = math.gcd(out.at, interop.WIDEST) == interop.WIDEST
    return same and aligned and out.dtype == result[1] and not device_arrays.overlap(out, tuple(given))


def _prepare(
    traced: Traced, found: dict[Any, Any], given: list[Foreign], usual: np.dtype[Any], lead: list[int]
) -> tuple[_Rows, ...]:
    """The kernels of a function.

    Raises:
        TypeError: a captured array is in the host's memory, or of a type that kernels do not read.
        TraceError: columns would have to be reduced twice.
    """
    batch, m, n = given[0].shape
    aligned = [math.gcd(x.at, interop.WIDEST) for x in given]
    call = _Call((m, n, batch), lead, usual, given[0], _sources(traced, found, given[0]))
    views = tuple([described(interop.standin(x), ("b", "m", "n")) for x in given])
    lay = list(zip(map(device_arrays.elements, given), aligned, strict=True))
    split = down(traced, len(given), usual)
    if split is None:
        return (call.rows(traced, views, lay),)
    sums, rest, order, passed = split
    try:
        kernel = replace(call.rows(sums, views, lay), order=order, passed=passed)
        if not rest.results:
            return (kernel,)
        lines = [(dense("bn", call.size), interop.WIDEST)] * passed
        more = (*views, *(Operand("f32", "bn"),) * passed)
        return kernel, call.rows(rest, more, [*lay, *lines])
    except ScheduleError as error:
        if not any(x.op == "fold" for x in ordered(tuple(x for x, _ in rest.results))):
            raise
        raise TraceError("what is reduced down columns cannot be reduced again there: take two steps") from error


def _sources(traced: Traced, found: dict[Any, Any], like: Foreign) -> list[Foreign]:
    """The arrays that a function captures now.

    Raises:
        TypeError: one is in the host's memory, or of a type that kernels do not read.
    """
    for x in traced.sources:
        if not x.device:
            raise TypeError("the function captures an array in the host's memory; copy it to the device of the others")
        if not lies(x.array):
            raise TypeError(f"the function captures an array of {x.array.dtype}, which kernels do not read: convert it")
    return [captured(x, found, like) for x in traced.sources]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A kind of call.

    Attributes:
        size: rows, columns, items.
        lead: the shape of the batch.
        usual: type of results.
        like: the first array.
        sources: arrays that the function captures.
    """

    size: tuple[int, int, int]
    lead: list[int]
    usual: np.dtype[Any]
    like: Foreign
    sources: list[Foreign]

    def rows(self, traced: Traced, views: tuple[Operand, ...], lay: list[tuple[tuple[int, ...], int]]) -> _Rows:
        """The kernels of a function over rows, or of sums down columns."""
        m, n, _ = self.size
        step = settle(traced, views, self.usual, ends=False)
        at = [located(x.array, x, self.size) for x in traced.sources]
        lay = [*lay, *((s[1:4], math.gcd(x.at + s[0], interop.WIDEST)) for x, s in zip(self.sources, at, strict=True))]
        lay += [(dense(x, self.size), interop.WIDEST) for x in step.axes]
        on = device_arrays.machine_of(self.like)
        every, workspace = launches(step.text, self.size, [s for s, _ in lay], [a for _, a in lay], on)
        shapes = [(*self.lead, m if "m" in x else 1, n if "n" in x else 1) for x in step.axes]
        results = tuple((s, numpy_arrays.name_of(t)) for s, t in zip(shapes, step.types, strict=True))
        kept = tuple((x, s[0]) for x, s in zip(traced.sources, at, strict=True))
        return _Rows(on, every, workspace, kept, traced.numbers, results, traced.several)
