"""Kernels of products with an epilogue, in the host's memory: their problem, and operands as one kernel reads them.

Owns `ProductKernel`, the kernel of one kind of call, whatever its epilogue: a user's function, the scales of `linear`,
or one after the other. Owns the decision whether a product and its epilogue are one kernel. They are not where a
reduction needs whole rows of the product, or where kernels that cannot fuse are predicted to gain more than another
pass costs. Functions for tracing are imported where there is a function: `linear` without one loads none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.errors import ScheduleError
from portmm.ops import routes
from portmm.ops.prepack import current, is_packed, pack, unpack
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import BY_NAME, accumulator, spell
from portmm.spec.problem import AXES, Problem
from portmm.spec.row_classes import row_class
from portmm.util.memo import cached
from portmm.util.records import dataclass, replace
from portmm.weights.kinds import WeightKind, weight_kind

if TYPE_CHECKING:
    from portmm.spec.dequantization import Dequantization
    from portmm.trace.bind import Bound, Step
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]
CALL = 20e-6
"""Seconds of an additional kernel call."""


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """The kernel of one kind of call.

    Attributes:
        results: shapes and types.
        rows: the least and the largest M that it supports.
        route: the kernel; None where NumPy computes: for empty sums, and without a compiler.
        bound: its operands; without a user's function the table of those of `linear`, without addresses.
        strides: of the operands of the product, a_m to b_batch.
        size: rows, columns and items of a batch.
        several: the function returns a tuple.
        direct: A and B are read in place.
        shared: all M of the class have this kernel.
        weight: B, if it had to be packed for another unit.
        lasting: later calls take the same kernel; not while a better one than that of the base set is in the making.
    """

    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    rows: tuple[int, int]
    route: Any = None
    bound: Any = None
    strides: tuple[int, ...] = ()
    size: tuple[int, int, int] = (0, 0, 1)
    several: bool = False
    direct: bool = True
    shared: bool = False
    weight: Any = None
    lasting: bool = True

    def at(self, m: int) -> ProductKernel:
        """The same for another M of those that it supports."""
        if m == self.size[0]:
            return self
        results = tuple([((m, *shape[1:]), t) for shape, t in self.results])
        return replace(self, size=(m, *self.size[1:]), results=results)

    def run(self, m: int, a: Array, b: Array, out: Array, operands: tuple[Any, ...]) -> None:
        """Run it for m rows; `operands` are the last arguments of `execute`, those of the epilogue."""
        _, n, batch = self.size
        a_m, a_k, a_batch, b_k, b_n, b_batch = self.strides
        runtime().execute(
            self.route, m, n, a.shape[-1], batch, a, a_m, a_k, a_batch, b, b_k, b_n, b_batch,
            out, n, 1, m * n, None, *operands,
        )  # fmt: skip


class HostProduct:
    """A product with an epilogue, in the host's memory; the run time is loaded before its kernel is selected.

    Args:
        left: A.
        right: B, an array or a packed weight.
        wanted: the requested type of results, or None.
        first: the type of the first result, if different.
        after: scales, zero points and a bias of `linear`, before the user's function, or None.
    """

    def __init__(
        self, left: Array, right: Any, wanted: np.dtype[Any] | None, first: np.dtype[Any] | None,
        after: Dequantization | None = None,
    ) -> None:  # fmt: skip
        self.left, self.right, self.wanted, self.first, self.after = left, right, wanted, first, after
        self.array = isinstance(right, np.ndarray)
        self.int4 = not self.array and not is_packed(right)
        self.dynamic = after is not None and after.dynamic
        _, self.batch, (self.m, self.n, self.k) = numpy_arrays.product_shape(left.shape, right.shape)
        self.items = math.prod(self.batch)

    def types(self) -> numpy_arrays.DTypes:
        """The types of the operands, and the default one of a result."""
        factor = np.dtype(np.int8) if self.dynamic else self.left.dtype
        if self.int4:
            left = factor.newbyteorder("=")
            return left, np.dtype(np.uint8), self.wanted or left
        left, right, usual = numpy_arrays.types_of(factor, self.right.dtype if self.array else self.right.owner.dtype)
        usual = np.dtype(np.float32) if usual.kind in "iu" else usual
        return left, right, (self.wanted or usual).newbyteorder("=")

    def sums(self) -> str:
        """The accumulator's type."""
        types = self.types()
        return accumulator(numpy_arrays.name_of(types[0]), "u4" if self.int4 else numpy_arrays.name_of(types[1]))

    def usual(self) -> np.dtype[Any]:
        """The default type of a result with an epilogue."""
        return self.types()[2]

    def ready(self, traced: Traced | None, *place: Any) -> Any:
        """The kernel for calls of this kind, or the reason why there is none; `place`: arguments of `selected`."""
        try:
            return self.selected(traced, *place)
        except ScheduleError as error:
            return ScheduleError(str(error))  # for the memo without its traceback, whose frames reference operands

    def selected(self, traced: Traced | None = None) -> ProductKernel:
        """The kernel for calls of this kind, with the user's function, if there is one.

        Raises:
            ScheduleError: there is none.
        """
        step = None if traced is None else self.step(traced)
        p, rows, other = self.question(step)
        if step is not None and better_unfused(p, step):
            raise ScheduleError("the product, and a separate kernel over its rows, are predicted to be faster")
        size, right = self.size(step), other if isinstance(other, numpy_arrays.Operand) else None
        if step is not None and self.after is not None and size[2] > 1:
            raise ScheduleError("scales are those of the rows of one product")
        route, shared, repacked = self._routed(p, repacks=step is None)
        lasting, shared = shared is not None, bool(shared)
        other = other if repacked is None else repacked
        strides = (right.row, right.col, _item_stride(right, size)) if right else (other.b_k, other.b_n, 0)
        strides = (rows.row, rows.col, _item_stride(rows, size), *strides)
        direct = _in_place(self.left, rows) and (right is None or _in_place(self.right, right))
        if step is None:
            served = row_class(size[0]) if shared else (size[0], size[0])
            results = (((*self.batch, self.m, self.n), self.types()[2]),)
            table = _table(self.after)
            return ProductKernel(results, served, route, table, strides, size, False, direct, shared, repacked, lasting)
        bound, results = self._bound(step)
        # Whether fusing pays with a column-major B depends on M.
        shared &= self.left.ndim == len(self.right.shape) == 2 and (rows.layout, p.b) != ("row", "col")
        served = bound.served(row_class(size[0])) if shared else (size[0], size[0])
        several = step.traced.several
        return ProductKernel(results, served, route, bound, strides, size, several, direct, shared, None, lasting)

    def _bound(self, step: Step) -> tuple[Bound, tuple[Any, ...]]:
        """The operands of an epilogue, and its results."""
        from portmm.trace.bind import Bound, dense

        seen = (self.m, self.n, self.items)
        arguments = [] if self.after is None else [tuple(map(int, row[1:])) for row in _table(self.after)]
        bound = Bound(step.traced, seen, arguments, [dense(x, seen) for x in step.axes[1:]])
        shapes = [(*self.batch, self.m, self.n if "n" in axes else 1) for axes in step.axes]
        return bound, tuple(zip(shapes, step.types, strict=True))

    def _routed(self, p: Problem, *, repacks: bool) -> tuple[Any, bool | None, Any]:
        """A route, as of `routes.routed_first`, and B, if that was packed on another machine and is packed again."""
        try:
            return (*routes.routed_first(p), None)
        except ScheduleError:
            if self.array or not repacks:
                raise
        if self.int4:
            from portmm.ops.int4_panels import pack_int4, unpack_int4

            weight: Any = pack_int4(unpack_int4(self.right))
        else:
            weight = pack(unpack(self.right), activations=self.types()[0])
        return (*routes.routed(replace(p, family=weight.family)), weight)

    def question(self, step: Step | None) -> tuple[Problem, numpy_arrays.Operand, Any]:
        """The problem, and A and B as one kernel reads them.

        Raises:
            ScheduleError: the product is empty.
        """
        if 0 in (self.items, self.m, self.n, self.k):
            raise ScheduleError("the product is empty")
        rows, other = self.operands(self.size(step), self.types())
        p = self.problem(step, rows.layout, other.layout if isinstance(other, numpy_arrays.Operand) else "")
        return p, rows, other

    def step(self, traced: Traced) -> Step:
        """The user's function as expressions, whatever the size.

        Raises:
            ScheduleError: it cannot be one.
        """
        from portmm.ops.epilogues import fusible
        from portmm.trace.bind import typed

        sums = self.sums() if self.after is None else "s32"
        if self.int4 and self.after is None and sums == "s32":
            raise ScheduleError(f"expressions are in float32, not in {sums}")
        return fusible(typed(traced, self.first), sums, self.usual, self.after)

    def step_of_part(self, traced: Traced, axes: str) -> tuple[Step, int]:
        """The user's function for a part of rows, columns or items: see `epilogues.step_of_part`."""
        from portmm.ops.epilogues import step_of_part

        return step_of_part(self.step, traced, axes)

    def size(self, step: Step | None) -> tuple[int, int, int]:
        """Rows, columns, items; where B is shared and rows are alike, all items are rows of one."""
        merged = self.items == 1 or (len(self.right.shape) == 2 and (step is None or merges(step, self.m)))
        return (self.m * self.items, self.n, 1) if merged else (self.m, self.n, self.items)

    def problem(self, step: Step | None, a: str, b: str) -> Problem:
        """The problem with A and B in these layouts."""
        types, (m, n, items) = self.types(), self.size(step)
        b_type = "u4" if self.int4 else numpy_arrays.name_of(types[1])
        text = step.text if step is not None else "" if self.after is None else self.after.text
        result = types[2] if step is None else step.types[0]
        return Problem(
            m, n, self.k, spell(numpy_arrays.name_of(types[0]), b_type, numpy_arrays.name_of(result)), items, a,
            b or ("codes" if self.int4 else "packed"), family="" if self.array else self.right.family,
            deterministic=config.current().deterministic, fused=text,
            source=numpy_arrays.name_of(self.left.dtype) if self.dynamic else "",
        )  # fmt: skip

    def operands(self, size: tuple[int, int, int], types: numpy_arrays.DTypes) -> tuple[numpy_arrays.Operand, Any]:
        """A and B as kernels read them."""
        m, n, batch = size
        left, right = self.left, self.right
        if batch > 1 and left.shape[:-2] != self.batch:
            left = np.broadcast_to(left, (*self.batch, m, self.k))
        left = left.reshape((batch, m, self.k) if batch > 1 else (m, self.k))
        if self.dynamic:  # whole rows of floats are quantized
            left = left if left.strides[1] == left.itemsize else np.ascontiguousarray(left)
            rows = numpy_arrays.canonical(left, left.dtype.newbyteorder("="))._replace(layout="row")
        else:
            rows = numpy_arrays.canonical(left, types[0])
        if not self.array:
            if len(right.shape) != 2:
                raise ScheduleError("a batch of packed weights")
            return rows, right
        if batch > 1 and len(right.shape) > 2:
            right = np.broadcast_to(right, (*self.batch, self.k, n)).reshape(batch, self.k, n)
        else:
            right = right.reshape(self.k, n)
        return rows, numpy_arrays.canonical(right, types[1])

    def read(self, kernel: ProductKernel) -> tuple[Array, Array]:
        """The memory of A and B as a kernel reads it, copied where it must be."""
        if kernel.direct:
            return self.left, getattr(self.right, "owner", self.right)
        rows, other = self.operands(kernel.size, self.types())
        return rows.array, other.array if isinstance(other, numpy_arrays.Operand) else other.owner


def first_type(out: Any, dtype: Any) -> np.dtype[Any] | None:
    """The type of the first result, where it is that of `out`: results in float32 are converted to float64."""
    first = out.dtype.newbyteorder("=") if dtype is None and isinstance(out, np.ndarray) else None
    return None if first == np.float64 else first


def of_part(
    table: Array, numbers: Array, types: Sequence[str], at: tuple[int, int, int], first: tuple[int, tuple[int, ...]]
) -> tuple[Array, Array]:
    """The table of operands, and the numbers, of a part of rows, columns or items.

    Args:
        table: that of all.
        numbers: those of all.
        types: of the operands.
        at: the first item, row and column.
        first: the place of `step_of_part`, and the indices that begin there.
    """
    table, (place, values) = table.copy(), first
    for row, dtype in zip(table, types, strict=False):
        row[0] += sum(i * s for i, s in zip(at, row[1:], strict=False)) * BY_NAME[dtype].bytes
    if place >= 0:
        numbers = np.concatenate([numbers[:place], np.array(values, np.int32).view(np.float32)])
    return table, numbers


def merges(step: Step, m: int) -> bool:
    """Whether items of m rows are one product: no operand or index of an epilogue separates items from rows."""
    from portmm.trace.recorder import native

    if any(x.op == "index" and x.args[0] in "bm" for x in step.fused.steps):
        return False
    for source in step.traced.sources:
        at = [source.view.index(x) for x in "bm" if source.view.count(x) == 1]
        if not {"b", "m"} & set(source.view):
            continue
        steps = native(source.array).strides  # of the copy, where one is made
        if len(at) != len("bm") or steps[at[0]] != m * steps[at[1]]:
            return False
    return True


@cached("calls", 1024)
def _table(how: Dequantization | None) -> Array:
    """The operands of scales, zero points and a bias, without addresses: one element for each row, or column."""
    axes = () if how is None else how.axes
    return np.array([(0, *(int(axis == x) for axis in AXES)) for x in axes], np.int64)


def operand_b(b: Any) -> Any:
    """The right operand: an array, or a packed weight; a quantized one is packed."""
    if type(b) is not np.ndarray:
        if hasattr(b, "family"):
            return current(b)
        if weight_kind(b) is WeightKind.QUANTIZED:
            from portmm.ops.int4_panels import pack_int4

            return pack_int4(b)
    return numpy_arrays.as_operand(b, "b")


def better_unfused(p: Problem, step: Step) -> bool:
    """Whether kernels that cannot fuse, dot products with a column-major B, gain more than another pass costs."""
    if (p.a, p.b) != ("row", "col"):
        return False
    from portmm.dispatch import schedule_choice
    from portmm.target.model import CPU

    target, threads = config.target(), config.get_num_threads()
    alone = replace(p, fused="", dtype=spell(*p.types[:2], p.acc))
    passes = p.batch * p.m * p.n * BY_NAME["f32"].bytes * (2 + len(step.fused.operands)) / CPU.least_bandwidth
    fused, plain = [schedule_choice.choose(x, target, threads).cost for x in (p, alone)]
    # Either kernel computes the epilogue; its arrays are among the passes.
    return bool(plain.seconds + passes + CALL < fused.seconds - fused.added.get("epilogue", 0.0))


def _item_stride(x: numpy_arrays.Operand, size: tuple[int, int, int]) -> int:
    """Stride of the items of a batch, in elements."""
    return x.array.strides[0] // x.array.itemsize if size[2] > 1 and x.array.ndim == 3 else 0


def _in_place(x: Array, read: numpy_arrays.Operand) -> bool:
    """Whether an operand is read without a copy."""
    return bool(read.address == x.__array_interface__["data"][0])
