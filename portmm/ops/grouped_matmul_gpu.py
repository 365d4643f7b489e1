"""Grouped matmul of arrays on a device.

Owns `matmul` of such groups. Their ends are on the device as well and are read by the kernel, without
synchronisation: the grid has the blocks of the worst case, and each block searches for its group, or exits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portmm.arrays import device_array, device_operands, interop
from portmm.dispatch import config
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import ScheduleError
from portmm.ops import fused_matmul_gpu, matmul_gpu, rowwise_gpu
from portmm.spec.dtype import accumulator, spell
from portmm.spec.epilogue import acc
from portmm.spec.problem import Problem
from portmm.trace.bind import UserFunction, dense, located
from portmm.trace.closures import resolve
from portmm.trace.tracer import Indices, trace
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.device_array import DeviceArray
    from portmm.dispatch.gpu import Launch, Machine
    from portmm.trace.recorder import Source
    from portmm.trace.tracer import Traced

MOST_KINDS = 1024
"""Kinds of calls remembered before the memo is emptied."""
TALLEST = 256
"""Rows of the largest tile: the last tile of a group is partial."""
NAMES = {"m": "m", "n": "n", "b": "b"}
_VALUES = (acc(), Indices(NAMES))
_ready = Memory(MOST_KINDS)


@dataclass(frozen=True, slots=True)
class Groups:
    """The arrays of a call: rows, a matrix for each group, ends of groups, and the output."""

    a: DeviceArray
    b: DeviceArray
    ends: DeviceArray
    out: DeviceArray | None

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, columns and k."""
        return self.a.shape[0], self.b.shape[2], self.a.shape[1]

    @property
    def kind(self) -> tuple[Any, ...]:
        """All that kernels depend on, without addresses."""
        return self.a.kind, self.b.kind, None if self.out is None else self.out.kind


def adopted(a: Any, b: Any, ends: Any, out: Any) -> Groups:
    """The arrays of a call.

    Raises:
        TypeError: some are in the host's memory, or `ends` is not of s32.
        ValueError: shapes do not match, or are on several devices.
    """
    arrays: list[DeviceArray] = []
    for name, x in (("a", a), ("b", b), ("ends", ends), *((("out", out),) if out is not None else ())):
        array = interop.adopt(x)
        if array is None:
            kind = type(x).__name__
            raise TypeError(f"{name} is a {kind} in the host's memory, others are on a device: copy it there first")
        arrays.append(array)
    device_array.same_device(arrays)
    left, right, last, *to = arrays
    if last.dtype != "s32":
        raise TypeError(f"ends has elements of {last.dtype}; they are int32: convert them")
    if len(last.shape) != 1 or (last.shape[0] > 1 and device_operands.elements(last)[0] != 1):
        raise ValueError(f"ends has shape {last.shape}, strides {last.strides}; pass one dense row of integers")
    check_shapes(left.shape, right.shape, last.shape[0])
    if left.shape[0] + right.shape[0] * TALLEST > gpu_dispatch.MOST:
        raise ScheduleError(f"{left.shape[0]} rows in {right.shape[0]} groups: kernels count in 32 bits; split a")
    return Groups(left, right, last, to[0] if to else None)


def check_shapes(a: tuple[int, ...], b: tuple[int, ...], ends: int) -> None:
    """Check the shapes of rows and matrices.

    Raises:
        ValueError: they do not.
    """
    if len(a) != 2 or len(b) != 3:
        raise ValueError(f"a has shape {a} and b {b}; groups take (rows, k) and (groups, k, n)")
    if a[1] != b[1]:
        raise ValueError(f"cannot multiply {a} by {b}: a has {a[1]} columns, b has {b[1]} rows")
    if ends != b[0] or not ends:
        raise ValueError(f"ends has {ends} elements, b has {b[0]} matrices; there is one for each group, at least one")


def matmul(x: Groups, dtype: Any, epilogue: Callable[..., Any] | None) -> Any:
    """The products of groups on a device: see `grouped_matmul.grouped_matmul`.

    Raises:
        TypeError: the types have no product, or the epilogue captures an array in the host's memory.
        ScheduleError: no kernel computes it.
    """
    requested = matmul_gpu.named(dtype) if dtype is not None and x.out is None else ""
    closure: dict[Any, Any] = {}
    ready: _Ready
    if epilogue is None:
        key = (*x.kind, requested, config.current().deterministic)
        ready = _ready.get(key) or _ready.keep(key, _plain(x, requested))
    else:
        user_function = UserFunction.of(epilogue)
        key = ("groups on a device", *x.kind, requested)
        ready = user_function.ready(key, lambda traced: _fused(x, requested, traced), _VALUES, 3)
        closure = user_function.closure
    read = [rowwise_gpu.captured(s, closure, x.a) for s, _ in ready.sources]
    if x.out is None or ready.apart or not device_operands.overlap(x.out, (x.a, x.b, x.ends, *read)):
        return ready.call(x, read, closure)
    # Kernels are specialised for the layout of a result: a temporary has another.
    _, to = interop.empty_like(replace(x.out, queue=x.a.queue), x.out.shape, x.out.dtype)
    results = matmul(replace(x, out=to), dtype, epilogue)
    result = rowwise_gpu.copied(x.out, to)
    return (result, *results[1:]) if ready.several else result


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """The kernels of one kind of call.

    Attributes:
        on: the device.
        results: shapes and types.
        launches: kernels.
        several: the function returns a tuple.
        sources: captured arrays, and offsets of their first elements, in bytes.
        numbers: keys of the numbers of a call.
        apart: `out` is of another type than the result, which is converted to it.
    """

    on: Machine
    results: tuple[tuple[tuple[int, ...], str], ...]
    launches: tuple[Launch, ...]
    several: bool = False
    sources: tuple[tuple[Source, int], ...] = ()
    numbers: tuple[tuple[Any, ...], ...] = ()
    apart: bool = False

    def call(self, x: Groups, read: list[DeviceArray], closure: dict[Any, Any]) -> Any:
        """Launch the kernels and return the results; `read` are the captured arrays."""
        out = x.out
        results = [interop.empty_like(x.a, *result) for result in self.results]
        if out is not None and not self.apart:
            results[0] = (out.source, out)
        if self.launches:
            self.launch(x, read, [y for _, y in results], closure)
        if out is not None and self.apart:
            results[0] = (rowwise_gpu.copied(out, results[0][1]), out)
        return tuple(y for y, _ in results) if self.several else results[0][0]

    def launch(self, x: Groups, read: list[DeviceArray], results: list[DeviceArray], closure: dict[Any, Any]) -> None:
        """Launch the kernels with their addresses and numbers."""
        first, *others = results
        pointers = {"a": x.a, "b": x.b, "ends": x.ends, "c": first}
        values = {name: device_array.argument(y)[1] for name, y in pointers.items()}
        starts = [at for _, at in self.sources] + [0] * len(others)
        values |= rowwise_gpu.addresses([*read, *others], starts)
        values |= {f"number_{i}": float(resolve(key, closure)) for i, key in enumerate(self.numbers)}
        rowwise_gpu.start(self.launches, self.on, values, 0, x.a)


@dataclass(frozen=True, slots=True)
class GroupedProblem:
    """A call reduced to a problem.

    Attributes:
        problem: of groups of equal sizes.
        values: the numbers of a kernel, by name.
        vectors: elements of the widest vector accesses.
    """

    problem: Problem
    values: dict[str, int]
    vectors: tuple[int, int, int]


def grouped_problem(x: Groups, to: DeviceArray, fused: str = "") -> GroupedProblem:
    """The problem of a call whose result is laid out like an array."""
    (m, n, k), groups = x.size, x.b.shape[0]
    (a_m, a_k), (b_batch, b_k, b_n), (c_m, c_n) = map(device_operands.elements, (x.a, x.b, to))
    a = device_operands.matrix(x.a, m, k, (a_m, a_k))
    b = device_operands.matrix(x.b, k, n, (b_k, b_n), (b_batch,))
    c = device_operands.matrix(to, m, n, (c_m, c_n))
    by_rows = c.layout == "row"
    # A group may begin at any row.
    vectors = (1 if a.layout == "col" else a.vector, b.vector, c.vector if by_rows else 1)
    each = -(-m // groups)
    p = Problem(
        1 << max(each - 1, 0).bit_length(), n, max(k, 1), spell(x.a.dtype, x.b.dtype, to.dtype), groups,
        a.layout, b.layout, "row" if by_rows else "col", deterministic=config.current().deterministic,
        post="scale" if fused and accumulator(x.a.dtype, x.b.dtype) == "s32" else "", fused=fused, grouped=True,
    )  # fmt: skip
    values = {
        "m": m, "n": n, "k": k, "batch": groups, "a_m": a.row, "a_k": a.col, "a_batch": 0, "b_k": b.row, "b_n": b.col,
        "b_batch": b_batch, "c_m": c.row, "c_n": c.col, "c_batch": 0,
    }  # fmt: skip
    return GroupedProblem(p, values, vectors)


def question(
    a: DeviceArray, b: DeviceArray, out: DeviceArray | None, epilogue: Callable[..., Any] | None
) -> GroupedProblem:
    """The problem of a call, whatever the ends of groups."""
    check_shapes(a.shape, b.shape, *b.shape[:1])
    x = Groups(a, b, a, out)
    c, to = _result(x, "")
    if epilogue is None:
        return grouped_problem(x, to)
    traced, _ = trace(epilogue, _VALUES, by_value=False, rank=3)
    step = fused_matmul_gpu.fusible_step(a, b, out, "", traced)
    first = matmul_gpu.named(step.types[0])
    return grouped_problem(x, to if c == first else interop.empty_like(a, to.shape, first)[1], step.text)


def _result(x: Groups, requested: str) -> tuple[str, DeviceArray]:
    """The type of the result, and an array like it."""
    shape = (x.size[0], x.size[1])
    c = device_operands.result_type(x.a.dtype, x.b.dtype, requested if x.out is None else x.out.dtype)
    if x.out is not None:
        device_operands.check_out(x.out, shape)
    return c, x.out or interop.empty_like(x.a, shape, c)[1]


def _launches(x: Groups, call: GroupedProblem, values: dict[str, Any]) -> tuple[Launch, ...]:
    """The kernels of a call with their numbers."""
    route = gpu_dispatch.route(call.problem, device_operands.machine_of(x.a), call.vectors)
    return tuple(
        gpu_dispatch.bind(kernel, function, values)
        for kernel, function in zip(route.kernels, route.functions, strict=True)
    )


def _plain(x: Groups, requested: str) -> _Ready:
    """The kernels of a kind of call without an epilogue."""
    c, to = _result(x, requested)
    shape = (x.size[0], x.size[1])
    call = grouped_problem(x, to)
    launches = _launches(x, call, call.values) if 0 not in shape else ()
    return _Ready(device_operands.machine_of(x.a), ((shape, c),), launches)


def _fused(x: Groups, requested: str, traced: Traced) -> _Ready:
    """The kernels of a kind of call with an epilogue.

    Raises:
        TypeError: a captured array is in the host's memory.
        ScheduleError: the epilogue reduces.
    """
    if not all(y.device for y in traced.sources):
        raise TypeError("the epilogue captures an array in the host's memory; copy it to the device of the operands")
    m, n, _ = x.size
    step = fused_matmul_gpu.fusible_step(x.a, x.b, x.out, requested, traced)
    types = [matmul_gpu.named(y) for y in step.types]
    if x.out is not None:
        device_operands.check_out(x.out, (m, n))
        device_operands.check_type(x.out, types[0])
    results = [((m, n if "n" in axes else 1), y) for axes, y in zip(step.axes, types, strict=True)]
    results[0] = ((m, n), types[0])
    direct = x.out is not None and x.out.dtype == types[0]
    to = x.out if x.out is not None and direct else interop.empty_like(x.a, *results[0])[1]
    size = (m, n, x.b.shape[0])
    sources = [(y, located(y.array, y, size)) for y in traced.sources]
    strides = [steps[1:4] for _, steps in sources] + [(0, *dense(y, size)[1:]) for y in step.axes[1:]]
    call = grouped_problem(x, to, step.text)
    values: dict[str, Any] = dict(call.values)
    for i, (b_step, m_step, n_step) in enumerate(strides):
        values |= {f"x{i}_b": b_step, f"x{i}_m": m_step, f"x{i}_n": n_step}
    launches = _launches(x, call, values) if 0 not in (m, n) else ()
    return _Ready(
        device_operands.machine_of(x.a), tuple(results), launches, traced.several,
        tuple((y, steps[0]) for y, steps in sources), traced.numbers, x.out is not None and not direct,
    )  # fmt: skip
