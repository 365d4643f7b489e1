"""`matmul` with an epilogue, of arrays on a device.

Owns the call: what a function makes of the sums is part of the product's kernel, unless a reduction
needs whole rows of them; then it goes over the result. Imports `trace.bind`, `ops.matmul_gpu`, `ops.rowwise_gpu`,
`trace.tracer`. Captured arrays are on the same device; nothing is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_arrays, interop, numpy_arrays, relayout
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import ScheduleError, TraceError
from portmm.ops import matmul_gpu, rowwise_gpu
from portmm.ops.rowwise_gpu import addresses, captured, contiguous, over_rows, start
from portmm.spec.dtype import accumulator
from portmm.spec.epilogue import acc, operand_types
from portmm.trace.bind import Around, dense, located, settle, typed
from portmm.trace.closures import resolve
from portmm.trace.tracer import Indices, trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.interop import Foreign
    from portmm.dispatch.gpu import Launch, Machine
    from portmm.trace.bind import Step
    from portmm.trace.tracer import Source, Traced

NAMES = {"m": "m", "n": "n", "b": "b"}
_VALUES = (acc(), Indices(NAMES))


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A B that is more than one array.

    Attributes:
        family: how it lies, as a `Problem` says it.
        vector: elements that a thread takes at once.
        numbers: parameter of kernels -> its value.
        parts: parameter of kernels -> an array.
        product: A times it, without an epilogue, in f32.
    """

    family: str
    vector: int
    numbers: dict[str, int]
    parts: dict[str, Foreign]
    product: Callable[[Foreign], Any]


def matmul(
    given: tuple[Foreign, Foreign, Foreign | None], dtype: Any, epilogue: Callable[..., Any],
    weight: Weight | None = None,
) -> Any:  # fmt: skip
    """The product of arrays on a device, and what a function makes of it: see `api.matmul`; B may be a `weight`.

    Raises:
        TypeError: an operand that the function captures is not on this device.
        ScheduleError: no kernel computes it.
    """
    a, b, out = given
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise ValueError(f"an epilogue takes matrices; got {a.shape} by {b.shape}: add a dimension of 1")
    around = Around.of(epilogue)
    wanted = matmul_gpu.named(dtype) if dtype is not None else ""
    held = b.kind if weight is None else (b.kind, weight.family)
    key = ("device", a.kind, held, None if out is None else out.kind, wanted)
    rank = 2 if len(a.shape) == len(b.shape) == 2 else 3

    def make(traced: Traced) -> _Ready | ScheduleError:
        try:
            return _prepare(given, wanted, traced, weight)
        except ScheduleError as error:
            return ScheduleError(str(error))  # without its traceback, whose frames hold operands: it is remembered

    ready: _Ready | ScheduleError = around.ready(key, make, _VALUES, rank)
    if isinstance(ready, ScheduleError):
        return _split(given, wanted, epilogue, weight)
    read, parts = ready.captured(around.found, a), {"b": b} if weight is None else weight.parts
    if out is None or ready.apart or not device_arrays.overlap(out, (a, *parts.values(), *read)):
        return ready.run(given, parts, read, around.found)
    _, to = interop.empty_like(replace(out, queue=a.queue), out.shape, out.dtype)
    results = matmul((a, b, to), dtype, epilogue, weight)
    result = rowwise_gpu.copied(out, to)
    return (result, *results[1:]) if ready.several else result


def before(function: Callable[..., Any], x: Foreign, name: str, names: dict[str, str]) -> Foreign:
    """What a prologue makes of an operand.

    Raises:
        TraceError: it gives several values.
    """
    if len(x.shape) < 2:
        raise ValueError(f"{name} has shape {x.shape}; a prologue takes matrices")
    results, several = over_rows(function, (x,), names)
    if several:
        raise TraceError(f"a prologue gives one value, not a tuple of {len(results)}")
    _, found = results[0]
    strides = [s if n > 1 else 0 for n, s in zip(found.shape, found.strides, strict=True)]
    return replace(found, shape=x.shape, strides=tuple(strides))


def _split(
    given: tuple[Foreign, Foreign, Foreign | None], wanted: str, epilogue: Callable[..., Any], weight: Weight | None
) -> Any:
    """The product first, then the epilogue over its rows."""
    a, b, out = given
    held = accumulator(a.dtype, b.dtype)
    if held == "f64":
        raise TypeError("expressions are in float32; convert float64 operands, or multiply without an epilogue")
    made = matmul_gpu.matmul((a, b, None), numpy_arrays.numpy_of(held)) if weight is None else weight.product(a)
    product = interop.adopt(made)
    assert product is not None  # noqa: S101 - a device's product
    product = replace(product, queue=a.queue)
    if held != "f32":
        _, product = contiguous(product, "f32")  # as in one kernel
    usual = wanted or _usual(a, b)
    results, several = over_rows(
        epilogue, (product,), NAMES, out, usual, first="" if out is None or out.dtype == "f64" else out.dtype
    )
    return tuple(x for x, _ in results) if several else results[0][0]


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """One kind of call.

    Attributes:
        on: the device.
        results: shapes and types.
        several: the function gives a tuple.
        launches: kernels.
        workspace: elements of 32 bits, and their type.
        sources: arrays that the function captures, and how far into each, in bytes, its first element is.
        numbers: where the numbers of a call come from.
        apart: `out` is of another type than the result, which is converted to it.
        copies: operands that are laid out anew first.
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

    def captured(self, found: dict[Any, Any], like: Foreign) -> list[Foreign]:
        """The arrays that the function captures now."""
        return [captured(x, found, like) for x, _ in self.sources]

    def run(
        self, given: tuple[Foreign, Foreign, Foreign | None], parts: dict[str, Foreign], read: list[Foreign],
        found: dict[Any, Any],
    ) -> Any:  # fmt: skip
        """Launch everything, B being made of parts."""
        a, _, out = given
        made = [interop.empty_like(a, *x) for x in self.results]
        if out is not None and not self.apart:
            made[0] = (out.source, out)
        if math.prod(self.results[0][0]):
            self.launch({"a": a, **parts, "c": made[0][1]}, [*read, *(x for _, x in made[1:])], found)
        if out is not None and self.apart:
            made[0] = (rowwise_gpu.copied(out, made[0][1]), out)
        return tuple(x for x, _ in made) if self.several else made[0][0]

    def launch(self, product: dict[str, Foreign], others: list[Foreign], found: dict[Any, Any]) -> None:
        """Give kernels their addresses and numbers."""
        values = {name: interop.argument(x)[1] for name, x in product.items()}
        values |= addresses(others, [at for _, at in self.sources] + [0] * (len(others) - len(self.sources)))
        values |= {f"number_{i}": float(resolve(key, found)) for i, key in enumerate(self.numbers)}
        copies = relayout.run(self.copies, self.on, values, product["a"])
        elements, held = self.workspace
        start(self.launches, self.on, values, elements, product["a"], held)
        del copies  # their library frees them when the queue is done with them


def _prepare(
    given: tuple[Foreign, Foreign, Foreign | None], wanted: str, traced: Traced, weight: Weight | None
) -> _Ready:
    """What a kind of call comes to.

    Raises:
        TypeError: a captured array is in the host's memory.
        ScheduleError: no kernel computes it.
    """
    a, b, out = given
    step, kinds, call = _posed(given, wanted, traced, weight)
    apart = out is not None and out.dtype != kinds[0][1]
    shape, batch, size = device_arrays.shapes(a, b)
    m, n, items = size[0], size[1], math.prod(batch)
    on = device_arrays.machine_of(a)
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
    found = gpu_dispatch.route(p, on, vectors)
    launches, workspace = matmul_gpu.bound(found, values, p)
    return _Ready(
        on, tuple(kinds), traced.several, launches, workspace, tuple((x, steps[0]) for x, steps in sources),
        traced.numbers, apart, copies,
    )  # fmt: skip


Kinds = list[tuple[tuple[int, ...], str]]


def _posed(
    given: tuple[Foreign, Foreign, Foreign | None], wanted: str, traced: Traced, weight: Weight | None
) -> tuple[Step, Kinds, matmul_gpu.Posed]:
    """What is fused, shapes and types of its results, and the problem.

    Raises:
        TypeError: a captured array is in the host's memory.
        ScheduleError: no kernel computes it.
    """
    if not all(x.device for x in traced.sources):
        raise TypeError("the epilogue captures an array in the host's memory; copy it to the device of the operands")
    a, b, out = given
    shape, batch, size = device_arrays.shapes(a, b)
    step = settled(a, b, out, wanted, traced)
    types = [numpy_arrays.name_of(x) for x in step.types]
    if out is not None:
        device_arrays.check_out(out, shape)
    kinds = [((*batch, size[0], size[1] if "n" in axes else 1), t) for axes, t in zip(step.axes, types, strict=True)]
    kinds[0] = (shape, types[0])
    if out is not None:
        device_arrays.check_type(out, types[0])
    direct = out is not None and out.dtype == types[0]
    to = out if out is not None and direct else interop.empty_like(a, *kinds[0])[1]
    call = matmul_gpu.posed((a, b, to), batch, size, step.text)
    if call.walk.outer is not None:
        raise ScheduleError("an epilogue takes a batch whose items lie evenly; copy the operands first")
    return step, kinds, call if weight is None else weighed(call, weight)


def weighed(call: matmul_gpu.Posed, weight: Weight) -> matmul_gpu.Posed:
    """The same of a B that is a weight."""
    p = replace(call.problem, b="codes", family=weight.family)
    return replace(call, problem=p, vectors=(call.vectors[0], weight.vector, call.vectors[2]))


def question(
    given: tuple[Foreign, Foreign, Foreign | None], epilogue: Callable[..., Any], weight: Weight | None = None
) -> tuple[matmul_gpu.Posed, tuple[str, ...]]:
    """The problem that a call with an epilogue poses, and what is to be said of it."""
    a, b, _ = given
    rank = 2 if len(a.shape) == len(b.shape) == 2 else 3
    traced, _ = trace(epilogue, _VALUES, by_value=False, rank=rank)
    try:
        return _posed(given, "", traced, weight)[2], ("the epilogue is part of the kernel",)
    except ScheduleError as error:
        said = f"the epilogue is a kernel of its own, over the rows of the product: {error}"
        call = matmul_gpu.question(given)
        return call if weight is None else weighed(call, weight), (said,)


def _usual(a: Foreign, b: Foreign) -> str:
    """The type of a result that is not said: beside codes that of A."""
    if accumulator(a.dtype, b.dtype) == "s32":
        return "f32"
    return a.dtype if b.dtype == "u4" else device_arrays.result_type(a.dtype, b.dtype, "")


def settled(a: Foreign, b: Foreign, out: Foreign | None, wanted: str, traced: Traced) -> Step:
    """What is fused.

    Raises:
        ScheduleError: it cannot be.
    """
    held = accumulator(a.dtype, b.dtype)
    if held == "f64":
        raise ScheduleError("expressions are in float32; convert float64 operands, or multiply without an epilogue")
    usual = wanted or _usual(a, b)
    first = None if out is None else numpy_arrays.numpy_of(out.dtype)
    step = settle(typed(traced, first), (), numpy_arrays.numpy_of(usual), ends=True)
    if not step.wide:
        raise ScheduleError("its first result is the same along a row")
    if step.fused.reductions or step.fused.column_reductions:
        raise ScheduleError("a reduction needs whole rows, or columns, of sums")
    if held == "s32" and step.types[0] == np.int32:
        raise ScheduleError("scaled sums of integers are not written as s32")
    return step
