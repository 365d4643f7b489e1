"""`matmul` with prologues and an epilogue.

Owns the call: what a function makes of the sums is part of the product's kernel,
unless a reduction needs whole rows of them, or no kernel can be made; then it goes
over the result. Imports `api`, `arrays`, `fusing`, `problem`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm import api, arrays, settings
from portmm.dtype import accumulator, spell
from portmm.errors import ScheduleError, TraceError
from portmm.fused import acc
from portmm.fusing import Step, over_rows, remembered, settle, table, traced
from portmm.packed import packed_class
from portmm.problem import Problem
from portmm.run.host import runtime
from portmm.trace import Indices

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
NAMES = {"m": "m", "n": "n", "b": "b"}
PAD = 64
"""Vectors by columns reach to a multiple of this."""


def matmul(  # noqa: PLR0917 - the operands, then what surrounds them
    a: Any,
    b: Any,
    out: Any,
    dtype: Any,
    epilogue: Callable[..., Any] | None,
    prologue_a: Callable[..., Any] | None,
    prologue_b: Callable[..., Any] | None,
) -> Any:
    """See `api.matmul`."""
    left = arrays.as_operand(a, "a")
    right = b if hasattr(b, "family") else _plain(b)
    if prologue_a is not None:
        (left,) = over_rows(prologue_a, (_rows(left, "a"),), {"m": "m", "k": "n", "b": "b"})
    if prologue_b is not None:
        if not isinstance(right, np.ndarray):
            raise TypeError("b is packed; give prologue_b the weight as it was, or pack what it makes of it")
        (right,) = over_rows(prologue_b, (_rows(right, "b"),), {"k": "m", "n": "n", "b": "b"})
    if epilogue is None:
        return api.matmul(left, right, out, dtype=dtype)
    if left.ndim < 2 or len(right.shape) < 2:
        raise ValueError(f"an epilogue takes matrices; got {left.shape} by {right.shape}: add a dimension of 1")
    call = _Call(left, right, out, dtype, epilogue)
    try:
        return call.fused()
    except ScheduleError:
        return call.split()


def _plain(b: Any) -> Any:
    """A weight that is no packed one."""
    from portmm.quantized import Quantized

    if isinstance(b, Quantized):
        from portmm.folded import fold

        return fold(b)
    return arrays.as_operand(b, "b")


def _rows(x: Array, name: str) -> Array:
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {x.shape}; a prologue takes matrices")
    return x


@dataclass(frozen=True, slots=True)
class _Ready:
    """One kind of call.

    Attributes:
        step: what is fused.
        route: the kernel; None if there is nothing to compute.
        numbers: of the argument block, with addresses left out.
        shapes: of the results.
        scales: the sums are of integers, which scales of 1 make floats of.
    """

    step: Step
    route: Any
    numbers: tuple[int, ...]
    size: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], ...]
    scales: bool


class _Call:
    """A product and what becomes of it."""

    def __init__(self, left: Array, right: Any, out: Any, dtype: Any, epilogue: Callable[..., Any]) -> None:
        self.left, self.right, self.out, self.epilogue = left, right, out, epilogue
        self.packed = isinstance(right, packed_class())
        self.coded = not self.packed and not isinstance(right, np.ndarray)
        self.batch, (self.m, self.n) = arrays.result_shape(left, right.shape)
        self.k = left.shape[-1]
        self.wanted = np.dtype(dtype) if dtype is not None else out.dtype if isinstance(out, np.ndarray) else None

    def values(self) -> tuple[Any, ...]:
        return (acc(), Indices(NAMES))

    def types(self) -> arrays.DTypes:
        """The types of the operands, and the usual one of a result."""
        held = np.dtype(np.uint8) if self.coded else self.right.owner.dtype if self.packed else self.right.dtype
        if self.coded:
            left = self.left.dtype.newbyteorder("=")
            return left, held, self.wanted or left
        left, right, usual = arrays.types_of(self.left.dtype, held)
        usual = np.dtype(np.float32) if usual.kind in "iu" else usual
        return left, right, (self.wanted or usual).newbyteorder("=")

    def fused(self) -> Any:
        """In one kernel.

        Raises:
            ScheduleError: there is none.
        """
        rank = 3 if self.batch else 2
        made, kind, found = traced(self.epilogue, self.values(), rank)
        types = self.types()
        right = self.right
        held = (right.family, right.shape) if not isinstance(right, np.ndarray) else (right.strides, right.dtype, right.flags.aligned)
        left = self.left
        key = kind and ("matmul", kind, left.shape, left.strides, left.dtype, left.flags.aligned, right.shape, held, types[2])
        key = key and (*key, settings.current(), settings.limit())
        ready: _Ready | ScheduleError = remembered(key, lambda: self.ready(made, types))
        if isinstance(ready, ScheduleError):
            raise ready
        results = self.results(ready, found)
        self.run(ready, types, replace(ready.step, traced=made), found, results)
        return self.given(results, made.several)

    def results(self, ready: _Ready, found: dict[Any, Any]) -> list[Array]:
        """Arrays for the results: the first is `out`, where kernels can write it."""
        results = [np.empty(s, t) for s, t in zip(ready.shapes, ready.step.types, strict=True)]
        out = self.out
        if out is None:
            return results
        arrays.check_out(out, results[0].shape, results[0].dtype)
        inputs = [x for x in (self.left, getattr(self.right, "owner", self.right), *found.values()) if isinstance(x, np.ndarray)]
        if (
            out.dtype == results[0].dtype and out.flags.aligned and out.flags.c_contiguous
            and not any(np.may_share_memory(out, x) and not _same(out, x, self.left) for x in inputs)
        ):  # fmt: skip
            results[0] = out
        return results

    def given(self, results: list[Array], several: bool) -> Any:  # noqa: FBT001 - said by the function
        """What the caller gets."""
        if self.out is not None and results[0] is not self.out:
            np.copyto(self.out, results[0], casting="same_kind")
            results[0] = self.out
        return tuple(results) if several else results[0]

    def ready(self, made: Any, types: arrays.DTypes) -> _Ready | ScheduleError:
        """The kernel for calls of this kind."""
        try:
            return self.chosen(made, types)
        except ScheduleError as error:
            return error

    def chosen(self, made: Any, types: arrays.DTypes) -> _Ready:
        step = settle(made, (), types[2], ends=True)
        if step.fused.reductions:
            raise ScheduleError("a reduction needs whole rows of sums")
        a, b = arrays.name_of(types[0]), "u4" if self.coded else arrays.name_of(types[1])
        sums = accumulator(a, b)
        if sums == "f64" or (self.coded and sums == "s32"):
            raise ScheduleError(f"expressions are in float32, not in {sums}")
        batch = int(np.prod(self.batch))
        shape = tuple((*self.batch, self.m, self.n if "n" in axes else 1) for axes in step.axes)
        if 0 in (batch, self.m, self.n, self.k):
            raise ScheduleError("there is nothing to multiply")
        size, rows, right, numbers = self.laid_out(step, types, batch)
        layout = "codes" if self.coded else "packed" if self.packed else right.layout
        scales = sums == "s32"
        p = Problem(
            size[0], self.n, self.k, spell(a, b, arrays.name_of(step.types[0])), size[2], rows.layout, layout,
            family="" if isinstance(right, arrays.Operand) else right.family, fused=step.text,
            deterministic=settings.current().deterministic, post="scale" if scales else "",
        )  # fmt: skip
        api.begin()
        route = api.route(p)
        return _Ready(step, route, numbers, size, shape, scales)

    def laid_out(self, step: Step, types: arrays.DTypes, batch: int) -> tuple[tuple[int, int, int], Any, Any, tuple[int, ...]]:
        """The size of the product, its operands, and their strides; items of a batch with one B are more rows."""
        left, right = self.left, self.right
        one = len(right.shape) == 2
        if batch == 1 or (one and self.joins(step)):
            batch, m = 1, self.m * batch
            rows = arrays.canonical(left.reshape(m, self.k), types[0])
            steps = [0, 0]
        else:
            m = self.m
            items = left if left.shape[:-2] == self.batch else np.broadcast_to(left, (*self.batch, m, self.k))
            rows = arrays.canonical(items.reshape(batch, m, self.k), types[0])
            steps = [rows.array.strides[0] // rows.array.itemsize, 0]
        if not isinstance(right, np.ndarray):
            if not one:
                raise ScheduleError("a batch of packed weights")
            return (m, self.n, batch), rows, right, (rows.row, rows.col, steps[0], right.b_k, right.b_n, 0)
        if one or batch == 1:
            other = arrays.canonical(right.reshape(self.k, self.n), types[1])
        else:
            items = np.broadcast_to(right, (*self.batch, self.k, self.n)).reshape(batch, self.k, self.n)
            other = arrays.canonical(items, types[1])
            steps[1] = other.array.strides[0] // other.array.itemsize
        return (m, self.n, batch), rows, other, (rows.row, rows.col, steps[0], other.row, other.col, steps[1])

    def joins(self, step: Step) -> bool:
        """Rows of all items are alike: no operand or index tells items apart in another way than rows."""
        if not self.batch:
            return True
        if any(x.op == "index" and x.args[0] in "bm" for x in step.fused.steps):
            return False
        for source, operand in zip(step.traced.sources, step.fused.operands, strict=False):
            if not set("bm") & set(operand.axes):
                continue
            x, at = source.array, {axis: i for i, axis in enumerate(source.view)}
            if not ({"b", "m"} <= at.keys() and x.strides[at["b"]] == self.m * x.strides[at["m"]]):
                return False
        return True

    def run(self, ready: _Ready, types: arrays.DTypes, step: Step, found: dict[Any, Any], results: list[Array]) -> None:
        left, right = self.left, self.right
        m, n, batch = ready.size
        if batch == 1:
            rows = arrays.canonical(left.reshape(m, self.k), types[0]).array
        else:
            items = left if left.shape[:-2] == self.batch else np.broadcast_to(left, (*self.batch, m, self.k))
            rows = arrays.canonical(items.reshape(batch, m, self.k), types[0]).array
        if isinstance(right, np.ndarray):
            shape = (self.k, n) if len(right.shape) == 2 or batch == 1 else (batch, self.k, n)
            other = np.broadcast_to(right, (*self.batch, self.k, n)) if len(shape) == 3 else right
            other = arrays.canonical(other.reshape(shape), types[1]).array
        else:
            other = right.owner
        joined = (self.m * int(np.prod(self.batch)) != self.m) and batch == 1
        operands, numbers, alive = table(step, [], found, ready.size, results[1:], joined=self.m if joined else 0)
        a_m, a_k, a_batch, b_k, b_n, b_batch = ready.numbers
        scales: list[Any] = [None] * 6
        if ready.scales:
            scales[:2] = np.ones(m, np.float32), np.ones(-(-n // PAD) * PAD, np.float32)
        runtime().execute(
            ready.route, m, n, self.k, batch, rows, a_m, a_k, a_batch, other, b_k, b_n, b_batch,
            results[0], n, 1, m * n, None, *scales, operands, numbers,
        )  # fmt: skip
        del alive

    def split(self) -> Any:
        """The product first, then the epilogue over its rows."""
        types = self.types()
        if accumulator(*("u4" if self.coded and i else arrays.name_of(x) for i, x in enumerate(types[:2]))) == "f64":
            raise TypeError("an epilogue is computed in float32; convert float64 operands, or do without")
        right = self.right
        whole = types[0].kind in "iu" and types[1].kind in "iu" and not self.coded
        sums = api.matmul(self.left, right, dtype=np.int32 if whole else np.float32)
        rank_results = over_rows(self.epilogue, (sums,), NAMES, dtype=types[2])
        results = list(rank_results)
        if self.out is not None:
            arrays.check_out(self.out, results[0].shape, results[0].dtype)
        return self.given(results, len(results) > 1)


def _same(out: Array, x: Array, left: Array) -> bool:
    """An operand that is `out` itself, element by element: each is read before it is written."""
    return x is not left and (x.__array_interface__["data"], x.shape, x.strides) == (
        out.__array_interface__["data"], out.shape, out.strides,
    )  # fmt: skip
