"""Fused matmul of arrays on a device.

Owns the call: the epilogue is part of the product's kernel, unless a reduction
needs whole rows of the product; then it is a kernel over the rows of the result. Captured arrays are on the same
device; nothing is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_array, device_operands, interop, numpy_arrays, relayout
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import ScheduleError, TraceError
from portmm.ops import matmul_gpu, rowwise_gpu
from portmm.ops.rowwise_gpu import addresses, captured, contiguous, over_rows, start
from portmm.spec.dtype import accumulator
from portmm.spec.epilogue import acc, operand_types
from portmm.trace.bind import UserFunction, bind_operands, dense, located, typed
from portmm.trace.closures import resolve
from portmm.trace.tracer import Indices, trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.device_array import DeviceArray
    from portmm.dispatch.gpu import Launch, Machine
    from portmm.trace.bind import Step
    from portmm.trace.recorder import Source
    from portmm.trace.tracer import Traced

NAMES = {"m": "m", "n": "n", "b": "b"}
_VALUES = (acc(), Indices(NAMES))


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A B in several arrays, an int4 weight.

    Attributes:
        family: its layout, as in a `Problem`.
        vector: elements of a vector access.
        numbers: parameter of kernels -> its value.
        parts: parameter of kernels -> an array.
        product: the function of A to the product without an epilogue, in f32.
    """

    family: str
    vector: int
    numbers: dict[str, int]
    parts: dict[str, DeviceArray]
    product: Callable[[DeviceArray], Any]


def matmul(
    operands: tuple[DeviceArray, DeviceArray, DeviceArray | None], dtype: Any, epilogue: Callable[..., Any],
    weight: Weight | None = None,
) -> Any:  # fmt: skip
    """The product of arrays on a device with an epilogue: see `matmul.matmul`; B may be a `weight`.

    Raises:
        TypeError: an operand that the function captures is not on this device.
        ScheduleError: no kernel computes it.
    """
    a, b, out = operands
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise ValueError(f"an epilogue takes matrices; got {a.shape} by {b.shape}: add a dimension of 1")
    user_function = UserFunction.of(epilogue)
    requested = matmul_gpu.named(dtype) if dtype is not None else ""
    b_kind = b.kind if weight is None else (b.kind, weight.family)
    key = ("device", a.kind, b_kind, None if out is None else out.kind, requested)
    rank = 2 if len(a.shape) == len(b.shape) == 2 else 3

    def make(traced: Traced) -> _Ready | ScheduleError:
        try:
            return _prepare(operands, requested, traced, weight)
        except ScheduleError as error:
            return ScheduleError(str(error))  # for the memo without its traceback, whose frames reference operands

    ready: _Ready | ScheduleError = user_function.ready(key, make, _VALUES, rank)
    if isinstance(ready, ScheduleError):
        return _split(operands, requested, epilogue, weight)
    read, parts = ready.captured(user_function.closure, a), {"b": b} if weight is None else weight.parts
    if out is None or ready.apart or not device_operands.overlap(out, (a, *parts.values(), *read)):
        return ready.run(operands, parts, read, user_function.closure)
    _, to = interop.empty_like(replace(out, queue=a.queue), out.shape, out.dtype)
    results = matmul((a, b, to), dtype, epilogue, weight)
    result = rowwise_gpu.copied(out, to)
    return (result, *results[1:]) if ready.several else result


def before(function: Callable[..., Any], x: DeviceArray, name: str, names: dict[str, str]) -> DeviceArray:
    """An operand after its prologue.

    Raises:
        TraceError: it returns a tuple.
    """
    if len(x.shape) < 2:
        raise ValueError(f"{name} has shape {x.shape}; a prologue takes matrices")
    results, several = over_rows(function, (x,), names)
    if several:
        raise TraceError(f"a prologue returns one value, not a tuple of {len(results)}")
    _, result = results[0]
    strides = [s if n > 1 else 0 for n, s in zip(result.shape, result.strides, strict=True)]
    return replace(result, shape=x.shape, strides=tuple(strides))


def _split(
    operands: tuple[DeviceArray, DeviceArray, DeviceArray | None],
    requested: str,
    epilogue: Callable[..., Any],
    weight: Weight | None,
) -> Any:
    """The product first, then the epilogue over its rows."""
    a, b, out = operands
    acc_type = accumulator(a.dtype, b.dtype)
    if acc_type == "f64":
        raise TypeError("expressions are in float32; convert float64 operands, or multiply without an epilogue")
    result = matmul_gpu.matmul((a, b, None), numpy_arrays.numpy_of(acc_type)) if weight is None else weight.product(a)
    product = interop.adopt(result)
    assert product is not None  # noqa: S101 - a device's product
    product = replace(product, queue=a.queue)
    if acc_type != "f32":
        _, product = contiguous(product, "f32")  # as in one kernel
    usual = requested or _usual(a, b)
    results, several = over_rows(
        epilogue, (product,), NAMES, out, usual, first="" if out is None or out.dtype == "f64" else out.dtype
    )
    return tuple(x for x, _ in results) if several else results[0][0]


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """The kernels of one kind of call.

    Attributes:
        on: the device.
        results: shapes and types.
        several: the function returns a tuple.
        launches: kernels.
        workspace: elements of 32 bits, and their type.
        sources: captured arrays, and offsets of their first elements, in bytes.
        numbers: keys of the numbers of a call.
        apart: `out` is of another type than the result, which is converted to it.
        copies: relayout copies that come first.
    """

    on: Machine
    results: tuple[tuple[tuple[int, ...], str], ...]
    several: bool
    launches: tuple[Launch, ...]
    workspace: tuple[int, str]
    sources: tuple[tuple[Source, int], ...]
    numbers: tuple[tuple[Any, ...], ...]
    apart: bool = False
    copies: tuple[relayout.Copy, ...] = ()

    def captured(self, closure: dict[Any, Any], like: DeviceArray) -> list[DeviceArray]:
        """The arrays that the function captures."""
        return [captured(x, closure, like) for x, _ in self.sources]

    def run(
        self, operands: tuple[DeviceArray, DeviceArray, DeviceArray | None], parts: dict[str, DeviceArray],
        read: list[DeviceArray],
        closure: dict[Any, Any],
    ) -> Any:  # fmt: skip
        """Launch the kernels and return the results; `parts` are the arrays of B."""
        a, _, out = operands
        results = [interop.empty_like(a, *x) for x in self.results]
        if out is not None and not self.apart:
            results[0] = (out.source, out)
        if math.prod(self.results[0][0]):
            self.launch({"a": a, **parts, "c": results[0][1]}, [*read, *(x for _, x in results[1:])], closure)
        if out is not None and self.apart:
            results[0] = (rowwise_gpu.copied(out, results[0][1]), out)
        return tuple(x for x, _ in results) if self.several else results[0][0]

    def launch(self, product: dict[str, DeviceArray], others: list[DeviceArray], closure: dict[Any, Any]) -> None:
        """Launch the kernels with their addresses and numbers."""
        values = {name: device_array.argument(x)[1] for name, x in product.items()}
        values |= addresses(others, [at for _, at in self.sources] + [0] * (len(others) - len(self.sources)))
        values |= {f"number_{i}": float(resolve(key, closure)) for i, key in enumerate(self.numbers)}
        copies = relayout.run(self.copies, self.on, values, product["a"])
        elements, dtype = self.workspace
        start(self.launches, self.on, values, elements, product["a"], dtype)
        del copies  # their library frees them when the queue is done with them


def _prepare(
    operands: tuple[DeviceArray, DeviceArray, DeviceArray | None], requested: str, traced: Traced, weight: Weight | None
) -> _Ready:
    """The kernels of a kind of call.

    Raises:
        TypeError: a captured array is in the host's memory.
        ScheduleError: no kernel computes it.
    """
    a, b, out = operands
    step, kinds, call = _fused_problem(operands, requested, traced, weight)
    apart = out is not None and out.dtype != kinds[0][1]
    shape, batch, size = device_operands.shapes(a, b)
    m, n, items = size[0], size[1], math.prod(batch)
    on = device_operands.machine_of(a)
    p = replace(call.problem, k=max(size[2], 1))
    sources = [(x, located(x.array, x, (m, n, items))) for x in traced.sources]
    strides = [steps[1:] for _, steps in sources] + [dense(x, (m, n, items)) for x in step.axes[1:]]
    values = call.values() | ({} if weight is None else weight.numbers)
    for i, (b_step, m_step, n_step, *_) in enumerate(strides):
        values |= {f"x{i}_b": b_step, f"x{i}_m": m_step, f"x{i}_n": n_step}
    assert len(strides) == len(operand_types(step.text))  # noqa: S101
    if 0 in shape:
        return _Ready(on, tuple(kinds), traced.several, (), (0, ""), (), (), apart)
    p, vectors, values, copies = relayout.arranged(p, call.vectors, values, on)
    route = gpu_dispatch.route(p, on, vectors)
    launches, workspace = matmul_gpu.bound(route, values, p)
    return _Ready(
        on, tuple(kinds), traced.several, launches, workspace, tuple((x, steps[0]) for x, steps in sources),
        traced.numbers, apart, copies,
    )  # fmt: skip


Kinds = list[tuple[tuple[int, ...], str]]


def _fused_problem(
    operands: tuple[DeviceArray, DeviceArray, DeviceArray | None], requested: str, traced: Traced, weight: Weight | None
) -> tuple[Step, Kinds, matmul_gpu.DeviceProblem]:
    """The expressions, shapes and types of results, and the problem.

    Raises:
        TypeError: a captured array is in the host's memory.
        ScheduleError: no kernel computes it.
    """
    if not all(x.device for x in traced.sources):
        raise TypeError("the epilogue captures an array in the host's memory; copy it to the device of the operands")
    a, b, out = operands
    shape, batch, size = device_operands.shapes(a, b)
    step = fusible_step(a, b, out, requested, traced)
    types = [numpy_arrays.name_of(x) for x in step.types]
    if out is not None:
        device_operands.check_out(out, shape)
    kinds = [((*batch, size[0], size[1] if "n" in axes else 1), t) for axes, t in zip(step.axes, types, strict=True)]
    kinds[0] = (shape, types[0])
    if out is not None:
        device_operands.check_type(out, types[0])
    direct = out is not None and out.dtype == types[0]
    to = out if out is not None and direct else interop.empty_like(a, *kinds[0])[1]
    call = matmul_gpu.device_problem((a, b, to), batch, size, step.text)
    if call.walk.outer is not None:
        raise ScheduleError("an epilogue takes an evenly strided batch; copy the operands first")
    return step, kinds, call if weight is None else weighed(call, weight)


def weighed(call: matmul_gpu.DeviceProblem, weight: Weight) -> matmul_gpu.DeviceProblem:
    """The problem with an int4 weight as B."""
    p = replace(call.problem, b="codes", family=weight.family)
    return replace(call, problem=p, vectors=(call.vectors[0], weight.vector, call.vectors[2]))


def question(
    operands: tuple[DeviceArray, DeviceArray, DeviceArray | None],
    epilogue: Callable[..., Any],
    weight: Weight | None = None,
) -> tuple[matmul_gpu.DeviceProblem, tuple[str, ...]]:
    """The problem of a call with an epilogue, and notes for `explain`."""
    a, b, _ = operands
    rank = 2 if len(a.shape) == len(b.shape) == 2 else 3
    traced, _ = trace(epilogue, _VALUES, by_value=False, rank=rank)
    try:
        return _fused_problem(operands, "", traced, weight)[2], ("the epilogue is part of the kernel",)
    except ScheduleError as error:
        note = f"the epilogue is a separate kernel, over the rows of the product: {error}"
        call = matmul_gpu.question(operands)
        return call if weight is None else weighed(call, weight), (note,)


def _usual(a: DeviceArray, b: DeviceArray) -> str:
    """The default type of a result: that of A for an int4 B."""
    if accumulator(a.dtype, b.dtype) == "s32":
        return "f32"
    return a.dtype if b.dtype == "u4" else device_operands.result_type(a.dtype, b.dtype, "")


def fusible_step(a: DeviceArray, b: DeviceArray, out: DeviceArray | None, requested: str, traced: Traced) -> Step:
    """The epilogue as expressions, if it can be fused.

    Raises:
        ScheduleError: it cannot be.
    """
    acc_type = accumulator(a.dtype, b.dtype)
    if acc_type == "f64":
        raise ScheduleError("expressions are in float32; convert float64 operands, or multiply without an epilogue")
    usual = requested or _usual(a, b)
    first = None if out is None else numpy_arrays.numpy_of(out.dtype)
    step = bind_operands(typed(traced, first), (), numpy_arrays.numpy_of(usual), ends=True)
    if not step.wide:
        raise ScheduleError("its first result is constant along a row")
    if step.fused.reductions or step.fused.column_reductions:
        raise ScheduleError("a reduction needs whole rows, or columns, of sums")
    if acc_type == "s32" and step.types[0] == np.int32:
        raise ScheduleError("scaled sums of integers are not written as s32")
    return step
