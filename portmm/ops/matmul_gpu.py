"""Products of arrays that lie on a device.

Owns `matmul` and `plan` of CuPy's, PyTorch's and PyOpenCL's arrays: they are read where they
lie, whatever their strides, on the stream or queue of the first, and nothing waits. What was
found out about a kind of call is remembered, so that a further one fills in addresses and
launches. Imports `arrays.interop`, `dispatch.gpu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_arrays, interop, numpy_arrays, relayout
from portmm.dispatch import config
from portmm.dispatch import gpu as gpu_dispatch
from portmm.ops import rowwise_gpu
from portmm.schedule.gpu_gemv import ROWS
from portmm.spec.dtype import BY_NAME, BY_NUMPY, accumulator, spell
from portmm.spec.problem import Problem
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.interop import Foreign
    from portmm.dispatch.gpu import Launch, Machine

MOST_KINDS = 1024
"""Kinds of calls remembered before starting afresh."""


def adopted(a: Any, b: Any, out: Any = None) -> tuple[Foreign, Foreign, Foreign | None] | None:
    """The operands as a device's arrays; None if neither is one.

    Raises:
        TypeError: only one of them is, or a type is not supported.
        ValueError: they are on several devices.
    """
    left, right = interop.adopt(a), interop.adopt(b)
    if left is None and right is None:
        return None
    to = None if out is None else interop.adopt(out)
    for name, x, given in (("a", left, a), ("b", right, b), ("out", to, out)):
        if x is None and given is not None:
            kind = type(given).__name__
            raise TypeError(f"{name} is a {kind} in the host's memory, others are on a device: copy it there first")
    assert left is not None  # noqa: S101 - shown above
    assert right is not None  # noqa: S101
    interop.same_device([x for x in (left, right, to) if x is not None])
    return left, right, to


def matmul(given: tuple[Foreign, Foreign, Foreign | None], dtype: Any = None) -> Any:
    """The product of arrays on a device: see `api.matmul`."""
    a, b, out = given
    wanted = named(dtype) if dtype is not None else ""
    if out is not None and (wanted not in ("", out.dtype) or device_arrays.overlap(out, (a, b))):
        return beside(out, wanted, device_arrays.shapes(a, b)[0], a, lambda to: matmul((a, b, to)))
    wanted = wanted if out is None else ""
    key = (a.kind, b.kind, None if out is None else out.kind, wanted, config.current())
    ready: _Ready | None = _ready.get(key)
    if ready is None:
        ready = _ready.keep(key, _prepare(a, b, out, wanted))
    return ready.run(a, b, out)


def beside(out: Foreign, dtype: str, shape: tuple[int, ...], a: Foreign, run: Callable[[Foreign], Any]) -> Any:
    """`out`, filled from a new array that `run` fills: of `dtype`, or of its own type if that is empty.

    Raises:
        TypeError: it cannot take results of the type.
        ValueError: it cannot take the result at all.
    """
    device_arrays.check_out(out, shape)
    device_arrays.check_type(out, dtype or out.dtype)
    _, to = interop.empty_like(replace(out, queue=a.queue), shape, dtype or out.dtype)
    run(to)
    return rowwise_gpu.copied(out, to)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A product of arrays like those that it was made with, resolved: call it with others of their kind.

    Attributes:
        kinds: of A and B, and of C or None.
        ready: what runs.
    """

    kinds: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...] | None]
    ready: _Ready

    @property
    def dense(self) -> bool:
        """Results lie as those of new arrays do."""
        shape, strides, dtype, *_ = self.ready.like
        laid = interop.contiguous(shape, BY_NAME[dtype].bytes)
        return all(n == 1 or s == t for n, s, t in zip(shape, strides, laid, strict=True))

    def __call__(self, a: Any, b: Any, out: Any = None) -> Any:
        """The product.

        Raises:
            TypeError: an operand is not on a device.
            ValueError: an operand is not like that of the plan, or `out` overlaps one.
        """
        found = adopted(a, b, out)
        if found is None:
            raise TypeError("this plan is for arrays on a device, and these are in the host's memory")
        for name, x, kind in zip(("a", "b", "out"), found, self.kinds, strict=True):
            if x is not None and kind is not None and x.kind != kind:
                raise ValueError(f"{name} is {said(x.kind)}, the plan takes {said(kind)}")
        if found[2] is not None:
            device_arrays.check_out(found[2], self.ready.shape)
            device_arrays.check_apart(found[2], {"a": (found[0],), "b": (found[1],)})
            if self.kinds[2] is None and found[2].kind != self.ready.like:
                raise ValueError("the plan was made for an out in C's order; give one when it is made")
        elif self.kinds[2] is not None and not self.dense:
            raise ValueError("the plan was made for an out of other strides than a new array's; give one like it")
        return self.ready.run(*found)


def said(kind: tuple[Any, ...]) -> str:
    """A kind of array, in words."""
    shape, strides, dtype, device, aligned, _ = kind
    return f"{dtype} of shape {shape}, strides {strides}, aligned to {aligned} bytes, on {device[0]}"


def plan(given: tuple[Foreign, Foreign, Foreign | None]) -> Plan:
    """A callable for arrays like these: see `api.plan`."""
    a, b, out = given
    return Plan((a.kind, b.kind, None if out is None else out.kind), _prepare(a, b, out, "", static=True))


_ready = Memory(MOST_KINDS)


@lru_cache(maxsize=64)
def named(dtype: Any) -> str:
    """The type that was asked for, by NumPy's, PyTorch's or their names.

    Raises:
        TypeError: there is none.
    """
    text = str(dtype).removeprefix("torch.")
    name = text if text in BY_NUMPY else np.dtype(dtype).name
    if name not in BY_NUMPY:
        raise TypeError(f"dtype {dtype!r} is not supported; use one of {', '.join(BY_NUMPY)}")
    return BY_NUMPY[name].name


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """One kind of call.

    Attributes:
        on: the device.
        shape: of the result.
        dtype: of the result.
        launches: kernels, and how far into A, B and C each begins, in elements.
        workspace: elements of 32 bits, and their type.
        like: the kind of a result that is made by a call.
        turned: kernels compute C^T = B^T . A^T.
        copies: operands that are laid out anew first.
    """

    on: Machine
    shape: tuple[int, ...]
    dtype: str
    like: tuple[Any, ...]
    launches: tuple[tuple[Launch, tuple[int, int, int]], ...]
    workspace: tuple[int, str] = (0, "f32")
    turned: bool = False
    copies: tuple[relayout.Copy, ...] = ()

    def run(self, a: Foreign, b: Foreign, out: Foreign | None) -> Any:
        """Launch everything."""
        made: Any = None
        if out is None:
            made, out = interop.empty_like(a, self.shape, self.dtype)
        else:
            made = out.source
        places: dict[str, Any] = {}
        scratch: Any = None
        copies: list[Any] = []
        if self.workspace[0]:
            scratch, work = interop.empty_like(a, (self.workspace[0],), self.workspace[1])
            places["work"] = interop.argument(work)[1]
        whole = [interop.argument(x)[1] for x in (a, b, out)]
        names = "bac" if self.turned else "abc"
        if self.copies:
            places |= dict(zip(names, whole, strict=True))
            copies = relayout.run(self.copies, self.on, places, a)
            whole = [places[x] for x in names]
        for launch, moved in self.launches:
            for name, place, x, offset in zip(names, whole, (a, b, out), moved, strict=True):
                places[name] = device_arrays.shifted(place, offset, x) if offset else place
            launch.run(self.on, places, a.queue)
        del scratch, copies  # their library frees them when the queue is done with them
        return made


@dataclass(frozen=True, slots=True)
class Posed:
    """A call reduced to a problem.

    Attributes:
        problem: of one item, or one evenly spaced run of them.
        parts: A, B and C.
        walk: the runs.
        vectors: elements that may be moved at once.
        turned: A is what the caller calls B^T, and so on.
    """

    problem: Problem
    parts: tuple[device_arrays.Matrix, device_arrays.Matrix, device_arrays.Matrix]
    walk: numpy_arrays.Batch
    vectors: tuple[int, int, int]
    turned: bool = False

    def values(self) -> dict[str, int]:
        """The numbers of a kernel, by name."""
        p, (a, b, c), (a_batch, b_batch, c_batch) = self.problem, self.parts, self.walk.strides
        return {
            "m": p.m, "n": p.n, "k": p.k, "batch": p.batch, "a_m": a.row, "a_k": a.col, "a_batch": a_batch,
            "b_k": b.row, "b_n": b.col, "b_batch": b_batch, "c_m": c.row, "c_n": c.col, "c_batch": c_batch,
        }  # fmt: skip


def posed(
    given: tuple[Foreign, Foreign, Foreign], batch: tuple[int, ...], size: tuple[int, int, int], fused: str = ""
) -> Posed:
    """The problem of A, B and a result that lies like the third, with expressions of the sums if there are any."""
    a, b, to = given
    m, n, k = size
    used = (min(2, len(a.shape)), min(2, len(b.shape)), (len(a.shape) > 1) + (len(b.shape) > 1))
    steps = [device_arrays.over(x, batch, count) for x, count in zip((a, b, to), used, strict=True)]
    a_m, a_k = (0, *device_arrays.elements(a))[-2:] if used[0] == 1 else device_arrays.elements(a)[-2:]
    b_k, b_n = (*device_arrays.elements(b)[-1:], 0) if used[1] == 1 else device_arrays.elements(b)[-2:]
    ends = list(device_arrays.elements(to)[len(batch) :])
    c_m = ends.pop(0) if used[0] == 2 else 0
    c_n = ends.pop(0) if used[1] == 2 else 0
    if not fused and not any(steps[1]):
        # One B for the whole batch: its items are more rows of one product, if they lie evenly. Expressions count rows.
        rows = numpy_arrays.collapse((*batch, m), tuple((*s, x) for s, x in zip(steps, (a_m, 0, c_m), strict=True)))
        if rows.outer is None and rows.count == math.prod(batch) * m <= gpu_dispatch.MOST:
            m, (a_m, _, c_m) = rows.count, rows.strides
            batch, steps = (), [(), (), ()]
    turned = not fused and _turns(m, n, a.dtype, b.dtype)
    if turned:
        a, b, m, n, steps = b, a, n, m, [steps[1], steps[0], steps[2]]
        (a_m, a_k), (b_k, b_n), (c_m, c_n) = (b_n, b_k), (a_k, a_m), (c_n, c_m)
    walk = numpy_arrays.collapse(batch, tuple(steps))
    inner = [*zip(*steps, strict=True)]
    strides = [tuple(x[i] for x in inner) for i in range(3)]
    parts = (
        device_arrays.matrix(a, m, k, (a_m, a_k), strides[0]), device_arrays.matrix(b, k, n, (b_k, b_n), strides[1]),
        device_arrays.matrix(to, m, n, (c_m, c_n), strides[2]),
    )  # fmt: skip
    # By columns or with any strides: kernels take both.
    c = "row" if parts[2].layout == "row" else "col"
    vector = parts[2].vector if c == "row" else 1
    word = spell(a.dtype, b.dtype, to.dtype)
    deterministic = config.current().deterministic
    post = "scale" if fused and accumulator(a.dtype, b.dtype) == "s32" else ""
    p = Problem(
        m, n, k, word, walk.count, parts[0].layout, parts[1].layout, c, deterministic=deterministic, post=post,
        fused=fused, tf32=config.rounds(word),
    )  # fmt: skip
    return Posed(p, parts, walk, (parts[0].vector, parts[1].vector, vector), turned)


def _turns(m: int, n: int, a: str, b: str) -> bool:
    """Whether C^T = B^T . A^T is the better product: few rows stream the other operand past."""
    try:
        accumulator(b, a)
    except ValueError:
        return False
    return n <= ROWS < m


def result(a: Foreign, b: Foreign, out: Foreign | None, wanted: str) -> tuple[tuple[int, ...], str, Foreign]:
    """The shape and type of a product, and an array like it.

    Raises:
        TypeError: the types do not multiply.
        ValueError: shapes do not fit.
    """
    shape = device_arrays.shapes(a, b)[0]
    c = device_arrays.result_type(a.dtype, b.dtype, wanted if out is None else out.dtype)
    if out is not None:
        device_arrays.check_out(out, shape)
    return shape, c, out or interop.empty_like(a, shape, c)[1]


def question(given: tuple[Foreign, Foreign, Foreign | None]) -> Posed:
    """The problem that a call poses."""
    a, b, out = given
    _, batch, size = device_arrays.shapes(a, b)
    return posed((a, b, result(a, b, out, "")[2]), batch, size)


def _prepare(a: Foreign, b: Foreign, out: Foreign | None, wanted: str, *, static: bool = False) -> _Ready:
    """What a kind of call comes to; `static`: by kernels for its n and k alone.

    Raises:
        TypeError: the types do not multiply.
        ValueError: shapes do not fit.
    """
    shape, c, to = result(a, b, out, wanted)
    on = device_arrays.machine_of(a)
    if 0 in shape:
        return _Ready(on, shape, c, to.kind, ())
    _, batch, size = device_arrays.shapes(a, b)
    call = posed((a, b, to), batch, size)
    p, values, vectors = call.problem, call.values(), call.vectors
    copies: tuple[relayout.Copy, ...] = ()
    if call.walk.outer is None:
        p, vectors, values, copies = relayout.arranged(p, vectors, values, on)
    # Nothing to sum is a sum of nothing: kernels of any k leave zeros.
    asked = replace(p, k=max(p.k, 1), static=static and p.k > 0 and on.language == "cuda")
    found = gpu_dispatch.route(asked, on, vectors)
    launches, workspace = bound(found, values, p)
    repeats = [(0, 0, 0)] if call.walk.outer is None else [tuple(map(int, x)) for x in call.walk.outer]
    if call.turned:
        repeats = [(left, right, result) for right, left, result in repeats]
    every = tuple((launch, moved) for moved in repeats for launch in launches)
    return _Ready(on, shape, c, to.kind, every, workspace, call.turned, copies)  # type: ignore[arg-type]


def bound(found: gpu_dispatch.Route, values: dict[str, Any], p: Problem) -> tuple[tuple[Launch, ...], tuple[int, str]]:
    """The kernels of a route with their numbers, and the elements of 32 bits between them, and their type."""
    held = (found.workspace(p.m, p.n, p.batch), p.acc)
    kernels = list(zip(found.kernels, found.functions, strict=True))
    apart = {"c_m": p.n, "c_batch": p.m * p.n} if found.choice.schedule.slices else {}
    launches = [gpu_dispatch.bind(*kernels[0], values | apart)]
    launches += [gpu_dispatch.bind(*x, values | {"work_batch": p.m * p.n}) for x in kernels[1:]]
    return tuple(launches), held
