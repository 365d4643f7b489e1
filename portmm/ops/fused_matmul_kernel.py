"""Kernel of a product with its epilogue: the problem of both, and operands as one kernel reads them.

Owns the decision whether they are one kernel. They are not where a reduction needs whole rows of the product, or where
kernels that cannot fuse are predicted to gain more than another pass costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.errors import ScheduleError
from portmm.ops import host_matmul, routes
from portmm.ops.epilogues import VALUES, fusible
from portmm.ops.prepack import current, is_packed
from portmm.spec.dtype import BY_NAME, accumulator, spell
from portmm.spec.problem import Problem
from portmm.spec.row_classes import row_class
from portmm.target.model import CPU
from portmm.trace.bind import Bound, dense, native, typed
from portmm.trace.tracer import trace
from portmm.weights.kinds import WeightKind, weight_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.trace.bind import Step
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]
CALL = 20e-6
"""Seconds of an additional kernel call."""


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """The kernel of one kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        numbers: strides of the operands of the product, a_m to b_batch.
        size: rows, columns and items of a batch.
        results: shapes and types.
        several: the function returns a tuple.
        direct: A and B are read in place.
        rows: the least and the largest M that it supports.
        shared: all M of the class have this kernel.
    """

    route: Any
    bound: Bound
    numbers: tuple[int, ...]
    size: tuple[int, int, int]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    several: bool
    direct: bool
    rows: tuple[int, int]
    shared: bool

    def at(self, m: int) -> FusedKernel:
        """The same for another M of those that it supports."""
        if m == self.size[0]:
            return self
        results = tuple([((m, *shape[1:]), t) for shape, t in self.results])
        return replace(self, size=(m, *self.size[1:]), results=results)


class FusedProduct:
    """A product with an epilogue, in the host's memory."""

    def __init__(self, left: Array, right: Any, wanted: np.dtype[Any] | None, first: np.dtype[Any] | None) -> None:
        self.left, self.right, self.wanted, self.first = left, right, wanted, first
        self.array = isinstance(right, np.ndarray)
        self.int4 = not self.array and not is_packed(right)
        _, self.batch, (self.m, self.n, self.k) = numpy_arrays.product_shape(left.shape, right.shape)
        self.items = math.prod(self.batch)

    def types(self) -> numpy_arrays.DTypes:
        """The types of the operands, and the default one of a result."""
        if self.int4:
            left = self.left.dtype.newbyteorder("=")
            return left, np.dtype(np.uint8), self.wanted or left
        left, right, usual = numpy_arrays.types_of(
            self.left.dtype, self.right.dtype if self.array else self.right.owner.dtype
        )
        usual = np.dtype(np.float32) if usual.kind in "iu" else usual
        return left, right, (self.wanted or usual).newbyteorder("=")

    def sums(self) -> str:
        """The accumulator's type."""
        types = self.types()
        return accumulator(numpy_arrays.name_of(types[0]), "u4" if self.int4 else numpy_arrays.name_of(types[1]))

    def ready(self, traced: Traced) -> FusedKernel | ScheduleError:
        """The kernel for calls of this kind, or the reason why there is none."""
        try:
            return self.selected(typed(traced, self.first))
        except ScheduleError as error:
            return ScheduleError(str(error))  # for the memo without its traceback, whose frames reference operands

    def selected(self, traced: Traced) -> FusedKernel:
        """The kernel for calls of this kind.

        Raises:
            ScheduleError: there is none.
        """
        step, p, rows, other = self.question(traced)
        if _better_unfused(p, step):
            raise ScheduleError("the product, and a separate kernel over its rows, are predicted to be faster")
        size, right = self.size(step), other if isinstance(other, numpy_arrays.Operand) else None
        host_matmul.begin()
        route, shared = routes.routed(p)
        strides = (right.row, right.col, _item_stride(right, size)) if right else (other.b_k, other.b_n, 0)
        numbers = (rows.row, rows.col, _item_stride(rows, size), *strides)
        seen = (self.m, self.n, self.items)
        bound = Bound(traced, seen, [], [dense(x, seen) for x in step.axes[1:]])
        shapes = [(*self.batch, self.m, self.n if "n" in axes else 1) for axes in step.axes]
        direct = _in_place(self.left, rows) and (right is None or _in_place(self.right, right))
        results = tuple(zip(shapes, step.types, strict=True))
        # Whether fusing pays with a column-major B depends on M.
        shared &= self.left.ndim == len(self.right.shape) == 2 and (rows.layout, p.b) != ("row", "col")
        served = bound.served(row_class(size[0])) if shared else (size[0], size[0])
        return FusedKernel(route, bound, numbers, size, results, traced.several, direct, served, shared)

    def question(self, traced: Traced) -> tuple[Step, Problem, numpy_arrays.Operand, Any]:
        """The epilogue as expressions, the problem, and A and B as one kernel reads them.

        Raises:
            ScheduleError: the epilogue cannot be fused, or the product is empty.
        """
        step = self.step(traced)
        if 0 in (self.items, self.m, self.n, self.k):
            raise ScheduleError("the product is empty")
        rows, other = self.operands(self.size(step), self.types())
        p = self.problem(step, rows.layout, other.layout if isinstance(other, numpy_arrays.Operand) else "")
        return step, p, rows, other

    def step(self, traced: Traced) -> Step:
        """The epilogue as expressions, whatever the size.

        Raises:
            ScheduleError: it cannot be.
        """
        sums = self.sums()
        if self.int4 and sums == "s32":
            raise ScheduleError(f"expressions are in float32, not in {sums}")
        return fusible(traced, sums, lambda: self.types()[2])

    def size(self, step: Step) -> tuple[int, int, int]:
        """Rows, columns, items; where B is shared and rows are alike, all items are rows of one."""
        merges = self.items == 1 or (len(self.right.shape) == 2 and self.merges(step))
        return (self.m * self.items, self.n, 1) if merges else (self.m, self.n, self.items)

    def problem(self, step: Step, a: str, b: str) -> Problem:
        """The problem with A and B in these layouts."""
        types, (m, n, items) = self.types(), self.size(step)
        b_type = "u4" if self.int4 else numpy_arrays.name_of(types[1])
        word = spell(numpy_arrays.name_of(types[0]), b_type, numpy_arrays.name_of(step.types[0]))
        return Problem(
            m, n, self.k, word, items, a, b or ("codes" if self.int4 else "packed"), fused=step.text,
            family="" if self.array else self.right.family, deterministic=config.current().deterministic,
        )  # fmt: skip

    def operands(self, size: tuple[int, int, int], types: numpy_arrays.DTypes) -> tuple[numpy_arrays.Operand, Any]:
        """A and B as kernels read them."""
        m, n, batch = size
        left, right = self.left, self.right
        if batch > 1 and left.shape[:-2] != self.batch:
            left = np.broadcast_to(left, (*self.batch, m, self.k))
        rows = numpy_arrays.canonical(left.reshape((batch, m, self.k) if batch > 1 else (m, self.k)), types[0])
        if not self.array:
            if len(right.shape) != 2:
                raise ScheduleError("a batch of packed weights")
            return rows, right
        if batch > 1 and len(right.shape) > 2:
            right = np.broadcast_to(right, (*self.batch, self.k, n)).reshape(batch, self.k, n)
        else:
            right = right.reshape(self.k, n)
        return rows, numpy_arrays.canonical(right, types[1])

    def merges(self, step: Step) -> bool:
        """Whether the items are rows of one product: no operand or index separates items from rows."""
        if any(x.op == "index" and x.args[0] in "bm" for x in step.fused.steps):
            return False
        for source in step.traced.sources:
            at = [source.view.index(x) for x in "bm" if source.view.count(x) == 1]
            if not {"b", "m"} & set(source.view):
                continue
            steps = native(source.array).strides  # of the copy, where one is made
            if len(at) != len("bm") or steps[at[0]] != self.m * steps[at[1]]:
                return False
        return True


def operand_b(b: Any) -> Any:
    """The right operand: an array, or a packed weight; a quantized one is packed."""
    if type(b) is not np.ndarray:
        if hasattr(b, "family"):
            return current(b)
        if weight_kind(b) is WeightKind.QUANTIZED:
            from portmm.ops.int4_panels import pack_int4

            return pack_int4(b)
    return numpy_arrays.as_operand(b, "b")


def fused_problem(
    a: Any, b: Any, dtype: Any, epilogue: Callable[..., Any], *, typed_result: bool
) -> tuple[Problem, tuple[str, ...]]:
    """The problem of a product with an epilogue, and notes for `explain`.

    Args:
        a: an array.
        b: an array, or a packed weight.
        dtype: of the result, if `typed_result`.
        epilogue: the function.
        typed_result: the user has passed a result type.
    """
    left, right = numpy_arrays.as_operand(a, "a"), operand_b(b)
    call = FusedProduct(left, right, np.dtype(dtype) if typed_result else None, None)
    traced, _ = trace(epilogue, VALUES, by_value=False, rank=2 if left.ndim == len(right.shape) == 2 else 3)
    try:
        step, p, _, _ = call.question(traced)
    except ScheduleError as error:
        from portmm.arrays.call import problem_of_call

        return problem_of_call(a, b), (f"the epilogue is a separate kernel, over the rows of the product: {error}",)
    if _better_unfused(p, step):
        return replace(p, fused=""), ("the epilogue is a separate kernel: predicted to be faster",)
    return p, ("the epilogue is part of the kernel",)


def _better_unfused(p: Problem, step: Step) -> bool:
    """Whether kernels that cannot fuse, dot products with a column-major B, gain more than another pass costs."""
    if (p.a, p.b) != ("row", "col"):
        return False
    from portmm.dispatch import schedule_choice

    target, threads = config.target(), config.get_num_threads()
    alone = replace(p, fused="", dtype=spell(*p.types[:2], p.acc))
    passes = p.batch * p.m * p.n * BY_NAME["f32"].bytes * (2 + len(step.fused.operands)) / CPU.least_bandwidth
    seconds = [schedule_choice.choose(x, target, threads).cost.seconds for x in (p, alone)]
    return bool(seconds[1] + passes + CALL < seconds[0])


def _item_stride(x: numpy_arrays.Operand, size: tuple[int, int, int]) -> int:
    """Stride of the items of a batch, in elements."""
    return x.array.strides[0] // x.array.itemsize if size[2] > 1 and x.array.ndim == 3 else 0


def _in_place(x: Array, read: numpy_arrays.Operand) -> bool:
    """Whether an operand is read without a copy."""
    return bool(read.address == x.__array_interface__["data"][0])
