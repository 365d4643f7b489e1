"""Products of arrays on a device.

Owns `matmul` and `plan` of CuPy's, PyTorch's and PyOpenCL's arrays: they are read in
place, whatever their strides, on the stream or queue of the first, asynchronously. The kernels
of a kind of call are remembered, so that a further one fills in addresses and launches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_array, device_operands, interop, numpy_arrays, relayout
from portmm.dispatch import config
from portmm.dispatch import gpu as gpu_dispatch
from portmm.ops import rowwise_gpu
from portmm.schedule.gpu_gemv import ROWS
from portmm.spec.dtype import BY_NAME, BY_NUMPY, accumulator, spell
from portmm.spec.problem import Problem
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.device_array import DeviceArray
    from portmm.dispatch.gpu import Launch, Machine

MOST_KINDS = 1024
"""Kinds of calls remembered before the memo is emptied."""


def adopted(a: Any, b: Any, out: Any = None) -> tuple[DeviceArray, DeviceArray, DeviceArray | None] | None:
    """The operands as a device's arrays; None if neither is one.

    Raises:
        TypeError: only one of them is, or a type is not supported.
        ValueError: they are on several devices.
    """
    left, right = interop.adopt(a), interop.adopt(b)
    if left is None and right is None:
        return None
    to = None if out is None else interop.adopt(out)
    for name, x, original in (("a", left, a), ("b", right, b), ("out", to, out)):
        if x is None and original is not None:
            kind = type(original).__name__
            raise TypeError(f"{name} is a {kind} in the host's memory, others are on a device: copy it there first")
    assert left is not None  # noqa: S101 - shown above
    assert right is not None  # noqa: S101
    device_array.same_device([x for x in (left, right, to) if x is not None])
    return left, right, to


def matmul(operands: tuple[DeviceArray, DeviceArray, DeviceArray | None], dtype: Any = None) -> Any:
    """The product of arrays on a device: see `matmul.matmul`."""
    a, b, out = operands
    requested = named(dtype) if dtype is not None else ""
    if out is not None and (requested not in ("", out.dtype) or device_operands.overlap(out, (a, b))):
        return via_temporary(out, requested, device_operands.shapes(a, b)[0], a, lambda to: matmul((a, b, to)))
    requested = requested if out is None else ""
    key = (a.kind, b.kind, None if out is None else out.kind, requested, config.current())
    ready: _Ready | None = _ready.get(key)
    if ready is None:
        ready = _ready.keep(key, _prepare(a, b, out, requested))
    return ready.run(a, b, out)


def via_temporary(
    out: DeviceArray, dtype: str, shape: tuple[int, ...], a: DeviceArray, run: Callable[[DeviceArray], Any]
) -> Any:
    """`out`, copied from a new array that `run` fills: of `dtype`, or of its own type if that is empty.

    Raises:
        TypeError: it cannot take results of the type.
        ValueError: it cannot take the result at all.
    """
    device_operands.check_out(out, shape)
    device_operands.check_type(out, dtype or out.dtype)
    _, to = interop.empty_like(replace(out, queue=a.queue), shape, dtype or out.dtype)
    run(to)
    return rowwise_gpu.copied(out, to)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A product resolved for arrays of one kind.

    Attributes:
        kinds: of A and B, and of C or None.
        ready: the kernels.
    """

    kinds: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...] | None]
    ready: _Ready

    @property
    def dense(self) -> bool:
        """Whether results are laid out as new arrays."""
        shape, strides, dtype, *_ = self.ready.like
        contiguous = device_array.contiguous(shape, BY_NAME[dtype].bytes)
        return all(n == 1 or s == t for n, s, t in zip(shape, strides, contiguous, strict=True))

    def __call__(self, a: Any, b: Any, out: Any = None) -> Any:
        """The product.

        Raises:
            TypeError: an operand is not on a device.
            ValueError: an operand is not like that of the plan, or `out` overlaps one.
        """
        arrays = adopted(a, b, out)
        if arrays is None:
            raise TypeError("this plan is for arrays on a device, and these are in the host's memory")
        for name, x, kind in zip(("a", "b", "out"), arrays, self.kinds, strict=True):
            if x is not None and kind is not None and x.kind != kind:
                raise ValueError(f"{name} is {described(x.kind)}, the plan takes {described(kind)}")
        if arrays[2] is not None:
            device_operands.check_out(arrays[2], self.ready.shape)
            device_operands.check_apart(arrays[2], {"a": (arrays[0],), "b": (arrays[1],)})
            if self.kinds[2] is None and arrays[2].kind != self.ready.like:
                raise ValueError("the plan was made for an out that is C-contiguous; pass an out when making the plan")
        elif self.kinds[2] is not None and not self.dense:
            raise ValueError("the plan was made for an out of other strides than a new array's; pass one like it")
        return self.ready.run(*arrays)


def described(kind: tuple[Any, ...]) -> str:
    """A kind of array, as text for messages."""
    shape, strides, dtype, device, aligned, _ = kind
    return f"{dtype} of shape {shape}, strides {strides}, aligned to {aligned} bytes, on {device[0]}"


def plan(operands: tuple[DeviceArray, DeviceArray, DeviceArray | None]) -> Plan:
    """A callable for arrays of these kinds: see `matmul.plan`."""
    a, b, out = operands
    return Plan((a.kind, b.kind, None if out is None else out.kind), _prepare(a, b, out, "", static=True))


_ready = Memory(MOST_KINDS)


@lru_cache(maxsize=64)
def named(dtype: Any) -> str:
    """Portmm's name of a requested type, by NumPy's, PyTorch's or its own name.

    Raises:
        TypeError: it is unknown.
    """
    text = str(dtype).removeprefix("torch.")
    name = text if text in BY_NUMPY else np.dtype(dtype).name
    if name not in BY_NUMPY:
        raise TypeError(f"dtype {dtype!r} is not supported; use one of {', '.join(BY_NUMPY)}")
    return BY_NUMPY[name].name


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """The kernels of one kind of call.

    Attributes:
        on: the device.
        shape: of the result.
        dtype: of the result.
        launches: kernels, with offsets into A, B and C, in elements.
        workspace: elements of 32 bits, and their type.
        like: the kind of a result that a call allocates.
        transposed: kernels compute C^T = B^T . A^T.
        copies: relayout copies that come first.
    """

    on: Machine
    shape: tuple[int, ...]
    dtype: str
    like: tuple[Any, ...]
    launches: tuple[tuple[Launch, tuple[int, int, int]], ...]
    workspace: tuple[int, str] = (0, "f32")
    transposed: bool = False
    copies: tuple[relayout.Copy, ...] = ()

    def run(self, a: DeviceArray, b: DeviceArray, out: DeviceArray | None) -> Any:
        """Launch the kernels and return the result."""
        result: Any = None
        if out is None:
            result, out = interop.empty_like(a, self.shape, self.dtype)
        else:
            result = out.source
        pointers: dict[str, Any] = {}
        scratch: Any = None
        copies: list[Any] = []
        if self.workspace[0]:
            scratch, work = interop.empty_like(a, (self.workspace[0],), self.workspace[1])
            pointers["work"] = device_array.argument(work)[1]
        addresses = [device_array.argument(x)[1] for x in (a, b, out)]
        names = "bac" if self.transposed else "abc"
        if self.copies:
            pointers |= dict(zip(names, addresses, strict=True))
            copies = relayout.run(self.copies, self.on, pointers, a)
            addresses = [pointers[x] for x in names]
        for launch, moved in self.launches:
            for name, address, x, offset in zip(names, addresses, (a, b, out), moved, strict=True):
                pointers[name] = device_operands.shifted(address, offset, x) if offset else address
            launch.run(self.on, pointers, a.queue)
        del scratch, copies  # their library frees them when the queue is done with them
        return result


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """A call reduced to a problem.

    Attributes:
        problem: of one item, or one evenly strided batch of them.
        parts: A, B and C.
        walk: the batches.
        vectors: elements of the widest vector accesses.
        transposed: A is the user's B^T, and so on.
    """

    problem: Problem
    parts: tuple[device_operands.Matrix, device_operands.Matrix, device_operands.Matrix]
    walk: numpy_arrays.Batch
    vectors: tuple[int, int, int]
    transposed: bool = False

    def values(self) -> dict[str, int]:
        """The numbers of a kernel, by name."""
        p, (a, b, c), (a_batch, b_batch, c_batch) = self.problem, self.parts, self.walk.strides
        return {
            "m": p.m, "n": p.n, "k": p.k, "batch": p.batch, "a_m": a.row, "a_k": a.col, "a_batch": a_batch,
            "b_k": b.row, "b_n": b.col, "b_batch": b_batch, "c_m": c.row, "c_n": c.col, "c_batch": c_batch,
        }  # fmt: skip


def device_problem(
    operands: tuple[DeviceArray, DeviceArray, DeviceArray],
    batch: tuple[int, ...],
    size: tuple[int, int, int],
    fused: str = "",
) -> DeviceProblem:
    """The problem of A, B and a result of the third's layout, with expressions of the sums if there are any."""
    a, b, to = operands
    m, n, k = size
    used = (min(2, len(a.shape)), min(2, len(b.shape)), (len(a.shape) > 1) + (len(b.shape) > 1))
    steps = [device_operands.over(x, batch, count) for x, count in zip((a, b, to), used, strict=True)]
    a_m, a_k = (0, *device_operands.elements(a))[-2:] if used[0] == 1 else device_operands.elements(a)[-2:]
    b_k, b_n = (*device_operands.elements(b)[-1:], 0) if used[1] == 1 else device_operands.elements(b)[-2:]
    ends = list(device_operands.elements(to)[len(batch) :])
    c_m = ends.pop(0) if used[0] == 2 else 0
    c_n = ends.pop(0) if used[1] == 2 else 0
    if not fused and not any(steps[1]):
        # One B for the whole batch: evenly strided items are more rows of one product. Expressions depend on rows.
        rows = numpy_arrays.collapse((*batch, m), tuple((*s, x) for s, x in zip(steps, (a_m, 0, c_m), strict=True)))
        if rows.outer is None and rows.count == math.prod(batch) * m <= gpu_dispatch.MOST:
            m, (a_m, _, c_m) = rows.count, rows.strides
            batch, steps = (), [(), (), ()]
    transposed = not fused and _transposes(m, n, a.dtype, b.dtype)
    if transposed:
        a, b, m, n, steps = b, a, n, m, [steps[1], steps[0], steps[2]]
        (a_m, a_k), (b_k, b_n), (c_m, c_n) = (b_n, b_k), (a_k, a_m), (c_n, c_m)
    walk = numpy_arrays.collapse(batch, tuple(steps))
    inner = [*zip(*steps, strict=True)]
    strides = [tuple(x[i] for x in inner) for i in range(3)]
    parts = (
        device_operands.matrix(a, m, k, (a_m, a_k), strides[0]),
        device_operands.matrix(b, k, n, (b_k, b_n), strides[1]),
        device_operands.matrix(to, m, n, (c_m, c_n), strides[2]),
    )
    # Column-major or any strides: kernels support both.
    c = "row" if parts[2].layout == "row" else "col"
    vector = parts[2].vector if c == "row" else 1
    word = spell(a.dtype, b.dtype, to.dtype)
    deterministic = config.current().deterministic
    post = "scale" if fused and accumulator(a.dtype, b.dtype) == "s32" else ""
    p = Problem(
        m, n, k, word, walk.count, parts[0].layout, parts[1].layout, c, deterministic=deterministic, post=post,
        fused=fused, tf32=config.rounds(word),
    )  # fmt: skip
    return DeviceProblem(p, parts, walk, (parts[0].vector, parts[1].vector, vector), transposed)


def _transposes(m: int, n: int, a: str, b: str) -> bool:
    """Whether C^T = B^T . A^T is faster: with few columns, as the gemv kernels are for few rows."""
    try:
        accumulator(b, a)
    except ValueError:
        return False
    return n <= ROWS < m


def result(
    a: DeviceArray, b: DeviceArray, out: DeviceArray | None, requested: str
) -> tuple[tuple[int, ...], str, DeviceArray]:
    """The shape and type of a product, and an array like it.

    Raises:
        TypeError: the types have no product.
        ValueError: shapes do not match.
    """
    shape = device_operands.shapes(a, b)[0]
    c = device_operands.result_type(a.dtype, b.dtype, requested if out is None else out.dtype)
    if out is not None:
        device_operands.check_out(out, shape)
    return shape, c, out or interop.empty_like(a, shape, c)[1]


def question(operands: tuple[DeviceArray, DeviceArray, DeviceArray | None]) -> DeviceProblem:
    """The problem of a call."""
    a, b, out = operands
    _, batch, size = device_operands.shapes(a, b)
    return device_problem((a, b, result(a, b, out, "")[2]), batch, size)


def _prepare(
    a: DeviceArray, b: DeviceArray, out: DeviceArray | None, requested: str, *, static: bool = False
) -> _Ready:
    """The kernels of a kind of call; `static`: specialised for its n and k.

    Raises:
        TypeError: the types have no product.
        ValueError: shapes do not match.
    """
    shape, c, to = result(a, b, out, requested)
    on = device_operands.machine_of(a)
    if 0 in shape:
        return _Ready(on, shape, c, to.kind, ())
    _, batch, size = device_operands.shapes(a, b)
    call = device_problem((a, b, to), batch, size)
    p, values, vectors = call.problem, call.values(), call.vectors
    copies: tuple[relayout.Copy, ...] = ()
    if call.walk.outer is None:
        p, vectors, values, copies = relayout.arranged(p, vectors, values, on)
    # An empty sum is zero: kernels of any k write zeros.
    at_least_one_k = replace(p, k=max(p.k, 1), static=static and p.k > 0 and on.language == "cuda")
    route = gpu_dispatch.route(at_least_one_k, on, vectors)
    launches, workspace = bound(route, values, p)
    repeats = [(0, 0, 0)] if call.walk.outer is None else [tuple(map(int, x)) for x in call.walk.outer]
    if call.transposed:
        repeats = [(left, right, result) for right, left, result in repeats]
    every = tuple((launch, moved) for moved in repeats for launch in launches)
    return _Ready(on, shape, c, to.kind, every, workspace, call.transposed, copies)  # type: ignore[arg-type]


def bound(route: gpu_dispatch.Route, values: dict[str, Any], p: Problem) -> tuple[tuple[Launch, ...], tuple[int, str]]:
    """The kernels of a route with their numbers, and the elements of 32 bits of their workspace, and its type."""
    workspace = (route.workspace(p.m, p.n, p.batch), p.acc)
    kernels = list(zip(route.kernels, route.functions, strict=True))
    apart = {"c_m": p.n, "c_batch": p.m * p.n} if route.choice.schedule.slices else {}
    launches = [gpu_dispatch.bind(*kernels[0], values | apart)]
    launches += [gpu_dispatch.bind(*x, values | {"work_batch": p.m * p.n}) for x in kernels[1:]]
    return tuple(launches), workspace
