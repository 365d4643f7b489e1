"""Row-wise functions of arrays on a device: element-wise, with reductions along rows or down columns.

Owns `over_rows`, the counterpart of `rowwise.over_rows`. Kernels are launched on the stream or queue of the first
array, asynchronously, and those of a kind of call are remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from portmm.arrays import device_array, device_operands, interop, numpy_arrays
from portmm.dispatch.gpu_rows import launches
from portmm.errors import ScheduleError, TraceError
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import Fused, Operand, argument, load
from portmm.spec.expr import ordered, real
from portmm.spec.expr_functions import rounded
from portmm.trace.bind import WRITTEN, UserFunction, bind_operands, dense, located, typed
from portmm.trace.buffers import walk
from portmm.trace.closures import resolve
from portmm.trace.column_reductions import split_column_reductions
from portmm.trace.recorder import described, element, readable_in_place
from portmm.trace.tracer import Indices

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from portmm.arrays.device_array import DeviceArray
    from portmm.dispatch.gpu import Launch, Machine
    from portmm.trace.recorder import Source
    from portmm.trace.tracer import Traced

NewArray = tuple[Any, "DeviceArray"]
"""An array of its library, and its description for kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The kernels of one kind of call.

    Attributes:
        on: the device.
        launches: kernels.
        workspace: elements of f32 between them.
        sources: captured arrays, and offsets of their first elements, in bytes.
        numbers: keys of the numbers of a call.
        results: shapes and types.
        several: the function returns a tuple.
        order: of kernels that reduce columns, the indices of the function's results: see `column_reductions`.
        passed: the number of their results that are operands of the next kernel.
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

    def run(
        self, closure: dict[Any, Any], arrays: list[DeviceArray], like: DeviceArray, out: DeviceArray | None
    ) -> list[NewArray]:
        """Launch the kernels and return the results; the first is `out` if there is one."""
        read = [captured(x, closure, like) for x, _ in self.sources]
        results = [interop.empty_like(like, *x) for x in self.results]
        if out is not None:
            results[0] = (out.source, out)
        starts = [0] * len(arrays) + [at for _, at in self.sources] + [0] * len(results)
        values = addresses([*arrays, *read, *(x for _, x in results)], starts)
        values |= {f"number_{i}": float(resolve(key, closure)) for i, key in enumerate(self.numbers)}
        start(self.launches, self.on, values, self.workspace, like)
        return results


def addresses(operands: list[DeviceArray], starts: list[int]) -> dict[str, Any]:
    """The addresses of operands, at offsets into their arrays, in bytes, by the names of kernel parameters."""
    pointers = [device_array.argument(x)[1] for x in operands]
    return {
        f"x{i}_all": device_operands.shifted(pointer, at // BY_NAME[x.dtype].bytes, x) if at else pointer
        for i, (x, pointer, at) in enumerate(zip(operands, pointers, starts, strict=True))
    }


def start(  # noqa: PLR0917 - arguments of a launch
    every: tuple[Launch, ...],
    on: Machine,
    values: dict[str, Any],
    workspace: int,
    like: DeviceArray,
    dtype: str = "f32",
) -> None:
    """Launch kernels on the queue of an array, with a workspace of elements of type `dtype`."""
    scratch: Any = None
    if workspace:
        scratch, work = interop.empty_like(like, (workspace,), dtype)
        values["work"] = device_array.argument(work)[1]
    for launch in every:
        launch.run(on, values, like.queue)
    del scratch  # its library frees it when the queue is done with it


def captured(source: Source, closure: dict[Any, Any], like: DeviceArray) -> DeviceArray:
    """An array that a function captures, on the device of the others."""
    x = interop.adopt(closure[source.key] if source.key in closure else resolve(source.key, closure))
    assert x is not None  # noqa: S101 - it was adopted when the function was traced
    device_array.same_device([like, x])
    return x


def over_rows(
    function: Callable[..., Any],
    arrays: tuple[DeviceArray, ...],
    names: dict[str, str],
    out: DeviceArray | None = None,
    dtype: str = "",
    *,
    first: str = "",
) -> tuple[tuple[NewArray, ...], bool]:
    """The results of a function over arrays of one shape, element-wise, with reductions along the last axis.

    Args:
        function: takes a value for each array, and the indices.
        arrays: arrays of one shape, (..., m, n).
        names: names of indices -> axes.
        out: the array of a single result, as in `rowwise.over_rows`.
        dtype: type of results without a `cast`, by default that of the first array.
        first: of the first of them, if different.

    Returns:
        The results, dense, and whether the function returned a tuple.

    Raises:
        TypeError: an array, or one that the function captures, is not on this device, or of an unsupported type.
        TraceError: the function cannot be traced.
        ScheduleError: no kernel computes it.
    """
    device_array.same_device(arrays)
    like = arrays[0]
    *lead, m, n = like.shape
    size = (m, n, math.prod(lead))
    values = [flat(readable(x), size) for x in arrays]
    usual = numpy_arrays.numpy_of(dtype or like.dtype)
    user_function = UserFunction.of(function)
    key = ("rows on a device", tuple([x.kind for x in values]), tuple(lead), usual, first, tuple(names.items()))

    def make(traced: Traced) -> tuple[_Rows, ...]:
        traced = typed(traced, numpy_arrays.numpy_of(first) if first else None)
        return _prepare(traced, user_function.closure, values, usual, lead)

    types = [element(numpy_arrays.numpy_of(x.dtype))[0] for x in values]
    leaves = (*(argument(i, x) for i, x in enumerate(types)), Indices(names))
    ready: tuple[_Rows, ...] = user_function.ready(key, make, leaves, 3 if lead else 2)
    head = ready[0]
    direct = None
    if out is not None and head.order is None:
        read = [*values, *(captured(x, user_function.closure, like) for x, _ in head.sources)]
        direct = out if _takes(out, head.results[0], read) else None
    results = head.run(user_function.closure, values, like, direct)
    if head.order is not None:
        passed = [x for _, x in results[: head.passed]]
        rest = ready[1].run(user_function.closure, [*values, *passed], like, None) if len(ready) > 1 else []
        results = [results[i] if i >= 0 else rest[-1 - i] for i in head.order]
    if out is not None and direct is None:
        device_operands.check_out(out, results[0][1].shape)
        device_operands.check_type(out, results[0][1].dtype)
        results[0] = (copied(out, results[0][1]), out)
    return tuple(results), head.several


def readable(x: DeviceArray) -> DeviceArray:
    """The array, if expressions read its type.

    Raises:
        TypeError: they do not.
    """
    if x.dtype not in WRITTEN:
        raise TypeError(f"expressions on a device read {', '.join(WRITTEN)}, not {x.dtype}: convert the array first")
    return x


def flat(x: DeviceArray, size: tuple[int, int, int]) -> DeviceArray:
    """The array as (batch, m, n), copied where its batch is not evenly strided."""
    m, n, batch = size
    *lead, row, column = device_operands.elements(x)
    dims = [(count, s) for count, s in zip(x.shape[:-2], lead, strict=True) if count > 1]
    if any(s != count * t for (_, s), (count, t) in pairwise(dims)):
        return flat(contiguous(x)[1], size)
    step = dims[-1][1] if dims else 0
    width = BY_NAME[x.dtype].bytes
    return replace(x, shape=(batch, m, n), strides=(step * width, row * width, column * width))


def contiguous(x: DeviceArray, dtype: str = "") -> NewArray:
    """A C-contiguous copy, of another type if one is requested."""
    copied_array, to = interop.empty_like(x, x.shape, dtype or x.dtype)
    copy(x, to)
    return copied_array, to


def copy(x: DeviceArray, to: DeviceArray) -> None:
    """Copy the elements of an array to another of its shape, whatever the strides of both."""
    if not x.size:
        return
    if x.dtype == to.dtype == "f64":
        x, to = _words(x), _words(to)
    steps = [(0, 0, *device_operands.elements(x)), (0, 0, *device_operands.elements(to))]
    operands = Operand(x.dtype, "bmn", dense=False), Operand(to.dtype, "bmn", dense=steps[1][-1] == 1)
    text = str(Fused(operands, ((1, _as(x, to)),)))
    w = walk((1, 1, *x.shape)[:-1], [s[:-1] for s in steps])
    n = x.shape[-1] if x.shape else 1
    strides = [(w.batch[1][i], w.rows[1][i], steps[i][-1]) for i in range(2)]
    on = device_operands.machine_of(x)
    every, workspace = launches(text, (w.rows[0], n, w.batch[0]), strides, [1, 1], on)
    for moved in w.repeats:
        starts = [i * BY_NAME[y.dtype].bytes for i, y in zip(moved, (x, to), strict=True)]
        start(every, on, addresses([x, to], starts), workspace, x)


def copied(out: DeviceArray, result: DeviceArray) -> Any:
    """The array of a call's `out`, after a copy of the result on the queue of `result`."""
    copy(result, out)
    return out.source


def _words(x: DeviceArray) -> DeviceArray:
    """An array of float64 as one of pairs of s32: expressions have no float64."""
    return replace(x, shape=(*x.shape, 2), strides=(*x.strides, 4), dtype="s32")


def _as(x: DeviceArray, to: DeviceArray) -> Any:
    value = load(0, x.dtype)
    return real(value) if to.dtype != "s32" else rounded(value) if value.dtype == "f32" else value


def _takes(out: DeviceArray, result: tuple[tuple[int, ...], str], operands: list[DeviceArray]) -> bool:
    """Whether kernels can write their first result to `out`: dense, aligned, and no overlap with operands.

    Raises:
        TypeError: it cannot take the type of the result.
        ValueError: it cannot take the result at all.
    """
    device_operands.check_out(out, result[0])
    device_operands.check_type(out, result[1])
    contiguous_strides = device_array.contiguous(out.shape, BY_NAME[out.dtype].bytes)
    same = all(n == 1 or s == t for n, s, t in zip(out.shape, out.strides, contiguous_strides, strict=True))
    aligned = math.gcd(out.at, device_array.WIDEST) == device_array.WIDEST
    return same and aligned and out.dtype == result[1] and not device_operands.overlap(out, tuple(operands))


def _prepare(
    traced: Traced, closure: dict[Any, Any], arrays: list[DeviceArray], usual: np.dtype[Any], lead: list[int]
) -> tuple[_Rows, ...]:
    """The kernels of a function.

    Raises:
        TypeError: a captured array is in the host's memory, or of an unsupported type.
        TraceError: columns would have to be reduced twice.
    """
    batch, m, n = arrays[0].shape
    aligned = [math.gcd(x.at, device_array.WIDEST) for x in arrays]
    call = _Call((m, n, batch), lead, usual, arrays[0], _sources(traced, closure, arrays[0]))
    views = tuple([described(device_array.standin(x), ("b", "m", "n")) for x in arrays])
    layouts = list(zip(map(device_operands.elements, arrays), aligned, strict=True))
    split = split_column_reductions(traced, len(arrays), usual)
    if split is None:
        return (call.rows(traced, views, layouts),)
    sums, rest, order, passed = split
    try:
        kernel = replace(call.rows(sums, views, layouts), order=order, passed=passed)
        if not rest.results:
            return (kernel,)
        column_layouts = [(dense("bn", call.size), device_array.WIDEST)] * passed
        operands = (*views, *(Operand("f32", "bn"),) * passed)
        return kernel, call.rows(rest, operands, [*layouts, *column_layouts])
    except ScheduleError as error:
        if not any(x.op == "fold" for x in ordered(tuple(x for x, _ in rest.results))):
            raise
        raise TraceError("results of column reductions cannot be reduced down columns again: take two steps") from error


def _sources(traced: Traced, closure: dict[Any, Any], like: DeviceArray) -> list[DeviceArray]:
    """The arrays that a function captures.

    Raises:
        TypeError: one is in the host's memory, or of an unsupported type.
    """
    for x in traced.sources:
        if not x.device:
            raise TypeError("the function captures an array in the host's memory; copy it to the device of the others")
        if not readable_in_place(x.array):
            raise TypeError(f"the function captures an array of {x.array.dtype}, which kernels cannot read: convert it")
    return [captured(x, closure, like) for x in traced.sources]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The common arguments of the kernels of a call.

    Attributes:
        size: rows, columns, items.
        lead: the shape of the batch.
        usual: type of results.
        like: the first array.
        sources: captured arrays.
    """

    size: tuple[int, int, int]
    lead: list[int]
    usual: np.dtype[Any]
    like: DeviceArray
    sources: list[DeviceArray]

    def rows(self, traced: Traced, views: tuple[Operand, ...], layouts: list[tuple[tuple[int, ...], int]]) -> _Rows:
        """The kernels of a function over rows, or of sums down columns."""
        m, n, _ = self.size
        step = bind_operands(traced, views, self.usual, ends=False)
        at = [located(x.array, x, self.size) for x in traced.sources]
        layouts = [
            *layouts,
            *((s[1:4], math.gcd(x.at + s[0], device_array.WIDEST)) for x, s in zip(self.sources, at, strict=True)),
        ]
        layouts += [(dense(x, self.size), device_array.WIDEST) for x in step.axes]
        on = device_operands.machine_of(self.like)
        every, workspace = launches(step.text, self.size, [s for s, _ in layouts], [a for _, a in layouts], on)
        shapes = [(*self.lead, m if "m" in x else 1, n if "n" in x else 1) for x in step.axes]
        results = tuple((s, numpy_arrays.name_of(t)) for s, t in zip(shapes, step.types, strict=True))
        offsets = tuple((x, s[0]) for x, s in zip(traced.sources, at, strict=True))
        return _Rows(on, every, workspace, offsets, traced.numbers, results, traced.several)
