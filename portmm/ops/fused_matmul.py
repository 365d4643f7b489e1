"""Fused matmul: products with prologues and an epilogue.

Owns the call: the epilogue is part of the product's kernel, unless a reduction needs whole rows
of the product, or no kernel can be built; then it is a kernel over the rows of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError, TraceError
from portmm.ops import call_fastpath, host_matmul, routes
from portmm.ops.prepack import current, is_int4_on_device, is_packed
from portmm.ops.rowwise import BYTES_PER_SECOND, over_rows
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import BY_NAME, accumulator, spell
from portmm.spec.epilogue import acc
from portmm.spec.problem import Problem
from portmm.spec.row_classes import last_of_class, row_class
from portmm.trace.bind import Bound, UserFunction, bind_operands, dense, native, typed
from portmm.trace.closures import resolve
from portmm.trace.tracer import Indices, trace
from portmm.util.array_subclasses import in_class_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.trace.bind import Step
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]
NAMES = {"m": "m", "n": "n", "b": "b"}
_INDICES = Indices(NAMES)
_VALUES = (acc(), _INDICES)
CALL = 20e-6
"""Seconds of an additional kernel call."""
PAD = 64
"""Vectors along columns are padded to a multiple of this."""


def matmul(  # noqa: PLR0917 - the operands, then the functions
    a: Any,
    b: Any,
    out: Any,
    dtype: Any,
    epilogue: Callable[..., Any] | None,
    prologue_a: Callable[..., Any] | None,
    prologue_b: Callable[..., Any] | None,
) -> Any:
    """The product with prologues and an epilogue: see `matmul.matmul`."""
    if libraries.on_device(a) or libraries.on_device(b):
        return _on_device((a, b, out), dtype, epilogue, prologue_a, prologue_b)
    left = numpy_arrays.as_operand(a, "a")
    right = current(b) if hasattr(b, "family") else _plain(b)
    if prologue_a is not None:
        left = _before(prologue_a, _rows(left, "a"), {"m": "m", "k": "n", "b": "b"})
    if prologue_b is not None:
        if not isinstance(right, np.ndarray):
            raise TypeError("b is packed; apply prologue_b to the original weight, or pack its result")
        right = _before(prologue_b, _rows(right, "b"), {"k": "m", "n": "n", "b": "b"})
    if epilogue is None:
        result = host_matmul.product(left, right, out, dtype=dtype)
        return in_class_of(result, a, b) if out is None else result
    if left.ndim < 2 or len(right.shape) < 2:
        raise ValueError(f"an epilogue takes matrices; got {left.shape} by {right.shape}: add a dimension of 1")
    result = _multiply(left, right, out, dtype, epilogue)
    if out is not None or type(a) is type(b) is np.ndarray:  # a call less for the usual ones
        return result
    return in_class_of(result, a, b)


def _on_device(operands: tuple[Any, Any, Any], dtype: Any, epilogue: Any, prologue_a: Any, prologue_b: Any) -> Any:
    """The same for arrays on a device."""
    from portmm.ops import fused_matmul_gpu, matmul_gpu

    if is_int4_on_device(operands[1]):
        from portmm.ops import int4_gpu

        return int4_gpu.fused_matmul(operands, dtype, epilogue, prologue_a, prologue_b)
    adopted = matmul_gpu.adopted(*operands)
    assert adopted is not None  # noqa: S101 - one of them is on a device
    left, right, out = adopted
    right = replace(right, queue=left.queue)  # one queue for all, that of A
    if prologue_a is not None:
        left = fused_matmul_gpu.before(prologue_a, left, "a", {"m": "m", "k": "n", "b": "b"})
    if prologue_b is not None:
        right = fused_matmul_gpu.before(prologue_b, right, "b", {"k": "m", "n": "n", "b": "b"})
    if epilogue is None:
        return matmul_gpu.matmul((left, right, out), dtype)
    return fused_matmul_gpu.matmul((left, right, out), dtype, epilogue)


def _before(function: Callable[..., Any], x: Array, names: dict[str, str]) -> Array:
    """An operand after its prologue."""
    results, several = over_rows(function, (x,), names)
    if several:
        raise TraceError(f"a prologue returns one value, not a tuple of {len(results)}")
    return np.ascontiguousarray(np.broadcast_to(results[0], x.shape))


def _plain(b: Any) -> Any:
    """A weight that is not prepacked, as an operand."""
    from portmm.weights.quantized import Quantized

    if isinstance(b, Quantized):
        from portmm.ops.int4_panels import pack_int4

        return pack_int4(b)
    return numpy_arrays.as_operand(b, "b")


def _rows(x: Array, name: str) -> Array:
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {x.shape}; a prologue takes matrices")
    return x


@dataclass(frozen=True, slots=True)
class _Ready:
    """The kernel of one kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        numbers: strides of the operands of the product, a_m to b_batch.
        size: rows, columns and items of a batch.
        results: shapes and types.
        several: the function returns a tuple.
        vectors: inputs of the epilogue of integer sums: scales of 1.
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
    vectors: tuple[Any, ...]
    direct: bool
    rows: tuple[int, int]
    shared: bool

    def at(self, m: int) -> _Ready:
        """The same for another M of those that it supports."""
        if m == self.size[0]:
            return self
        results = tuple([((m, *shape[1:]), t) for shape, t in self.results])
        vectors = self.vectors if self.vectors[0] is None else (numpy_arrays.ones(m), *self.vectors[1:])
        return replace(self, size=(m, *self.size[1:]), results=results, vectors=vectors)


class Call:
    """A product with an epilogue."""

    def __init__(self, left: Array, right: Any, wanted: np.dtype[Any] | None, first: np.dtype[Any] | None) -> None:
        self.left, self.right, self.wanted, self.first = left, right, wanted, first
        self.array = isinstance(right, np.ndarray)
        self.int4 = not self.array and not is_packed(right)
        self.batch, (self.m, self.n) = numpy_arrays.result_shape(left, right.shape)
        self.k, self.items = left.shape[-1], math.prod(self.batch)

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

    def ready(self, traced: Traced) -> _Ready | ScheduleError:
        """The kernel for calls of this kind, or the reason why there is none."""
        try:
            return self.selected(typed(traced, self.first))
        except ScheduleError as error:
            return ScheduleError(str(error))  # for the memo without its traceback, whose frames reference operands

    def selected(self, traced: Traced) -> _Ready:
        """The kernel for calls of this kind.

        Raises:
            ScheduleError: there is none.
        """
        step = self.fusible_step(traced)
        size = self.size(step)
        rows, other = self.operands(size, self.types())
        right = other if isinstance(other, numpy_arrays.Operand) else None
        p = self.problem(step, rows.layout, right.layout if right else "")
        if (rows.layout, p.b) == ("row", "col") and _better_unfused(p, step):
            raise ScheduleError("the product, and a separate kernel over its rows, are predicted to be faster")
        host_matmul.begin()
        route, shared = routes.routed(p)
        strides = (right.row, right.col, _item_stride(right, size)) if right else (other.b_k, other.b_n, 0)
        numbers = (rows.row, rows.col, _item_stride(rows, size), *strides)
        seen = (self.m, self.n, self.items)
        bound = Bound(traced, seen, [], [dense(x, seen) for x in step.axes[1:]])
        shapes = [(*self.batch, self.m, self.n if "n" in axes else 1) for axes in step.axes]
        vectors: tuple[Any, ...] = (None,) * 6
        if p.post:
            vectors = (numpy_arrays.ones(size[0]), numpy_arrays.ones(-(-self.n // PAD) * PAD), *vectors[2:])
        direct = _in_place(self.left, rows) and (right is None or _in_place(self.right, right))
        results = tuple(zip(shapes, step.types, strict=True))
        # Whether fusing pays with a column-major B depends on M.
        shared &= self.left.ndim == len(self.right.shape) == 2 and (rows.layout, p.b) != ("row", "col")
        served = bound.served(row_class(size[0])) if shared else (size[0], size[0])
        return _Ready(route, bound, numbers, size, results, traced.several, vectors, direct, served, shared)

    def fusible_step(self, traced: Traced) -> Step:
        """The epilogue as expressions, if it can be fused.

        Raises:
            ScheduleError: it cannot be, or the product is empty.
        """
        step = self.step(traced)
        if 0 in (self.items, self.m, self.n, self.k):
            raise ScheduleError("the product is empty")
        return step

    def step(self, traced: Traced) -> Step:
        """The epilogue as expressions, whatever the size.

        Raises:
            ScheduleError: it cannot be.
        """
        sums = self.sums()
        if sums == "f64" or (self.int4 and sums == "s32"):
            raise ScheduleError(f"expressions are in float32, not in {sums}")
        step = bind_operands(traced, (), self.types()[2], ends=True)
        if not step.wide:
            raise ScheduleError("its first result is constant along a row")
        if step.fused.reductions or step.fused.column_reductions:
            raise ScheduleError("a reduction needs whole rows, or columns, of sums")
        if sums == "s32" and step.types[0] == np.int32:
            raise ScheduleError("scaled sums of integers are not written as s32")
        return step

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
            post="scale" if self.sums() == "s32" else "",
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

    def split(self, epilogue: Callable[..., Any], out: Any) -> Any:
        """The product first, then the epilogue over its rows."""
        sums = self.sums()
        if sums == "f64":
            raise TypeError("expressions are in float32; convert float64 operands, or multiply without an epilogue")
        product = host_matmul.product(self.left, self.right, dtype=np.int32 if sums == "s32" else np.float32)
        product = product.astype(np.float32, copy=False)  # as in one kernel
        results, several = over_rows(epilogue, (product,), NAMES, dtype=self.types()[2], first=self.first)
        return fit(list(results), out, several=several)


def _better_unfused(p: Problem, step: Step) -> bool:
    """Whether kernels that cannot fuse, dot products with a column-major B, gain more than another pass costs."""
    from portmm.dispatch import cpu_selection

    target, threads = config.target(), config.get_num_threads()
    alone = replace(p, fused="", post="", dtype=spell(*p.types[:2], p.acc))
    passes = p.batch * p.m * p.n * BY_NAME["f32"].bytes * (2 + len(step.fused.operands)) / BYTES_PER_SECOND
    seconds = [cpu_selection.choose(x, target, threads).cost.seconds for x in (p, alone)]
    return seconds[1] + passes + CALL < seconds[0]


def _item_stride(x: numpy_arrays.Operand, size: tuple[int, int, int]) -> int:
    """Stride of the items of a batch, in elements."""
    return x.array.strides[0] // x.array.itemsize if size[2] > 1 and x.array.ndim == 3 else 0


def _in_place(x: Array, read: numpy_arrays.Operand) -> bool:
    """Whether an operand is read without a copy."""
    return bool(read.address == x.__array_interface__["data"][0])


def _kind(user_function: UserFunction, call: Call, other_keys: tuple[Any, ...]) -> _Ready | ScheduleError:
    """The kernel for calls of a kind, that of the class of M if it supports this M, or the reason why there is none."""
    left = call.left
    if left.ndim == len(call.right.shape) == 2:
        m, k = left.shape
        ready: _Ready | ScheduleError = user_function.ready((row_class(m)[1], k, other_keys), call.ready, _VALUES, 2)
        if isinstance(ready, _Ready) and ready.rows[0] <= m <= ready.rows[1]:
            return ready.at(m)
        return user_function.ready((left.shape, other_keys), call.ready, _VALUES, 2)  # type: ignore[no-any-return]
    return user_function.ready((left.shape, other_keys), call.ready, _VALUES, 3)  # type: ignore[no-any-return]


def _multiply(left: Array, right: Any, out: Any, dtype: Any, epilogue: Callable[..., Any]) -> Any:
    """A product and its epilogue, in one kernel or in two."""
    dtype = None if dtype is None else np.dtype(dtype)
    seen = call_fastpath.see(epilogue, left, right, out, dtype)
    fast_path = None if seen is None else call_fastpath.known(seen, out)
    if seen is not None and fast_path is not None:
        return fast_path(seen, out)
    first = out.dtype.newbyteorder("=") if dtype is None and isinstance(out, np.ndarray) else None
    if first == np.float64:
        first = None  # results in float32 are converted
    user_function = UserFunction.of(epilogue)
    panels = getattr(right, "owner", right)
    b_kind = (right.strides, right.dtype, right.flags.aligned) if panels is right else right.family
    other_keys = (left.strides, left.dtype, left.flags.aligned, right.shape, b_kind, dtype, first)
    call = Call(left, right, dtype, first)
    try:
        ready = _kind(user_function, call, other_keys)
    except BuildError as error:
        fall_back(error)
        return call.split(epilogue, out)
    if not isinstance(ready, _Ready):
        return call.split(epilogue, out)
    results = [np.empty(s, t) for s, t in ready.results]
    if out is not None and _writable(out, results[0], (left, panels), ready.bound, user_function.closure):
        results[0] = out
    a, b = left, panels
    if not ready.direct:
        rows, other = call.operands(ready.size, call.types())
        a, b = rows.array, other.array if isinstance(other, numpy_arrays.Operand) else panels
    operands, numbers, alive = ready.bound.fill(user_function.closure, [], results[1:])
    m, n, batch = ready.size
    a_m, a_k, a_batch, b_k, b_n, b_batch = ready.numbers
    runtime().execute(
        ready.route, m, n, left.shape[-1], batch, a, a_m, a_k, a_batch, b, b_k, b_n, b_batch,
        results[0], n, 1, m * n, None, *ready.vectors, operands, numbers,
    )  # fmt: skip
    del alive
    if seen is not None and user_function.lasting and ready.direct and (out is None or out is results[0]):

        def build(
            template: Array, sources: tuple[int, ...], taken: tuple[int, ...], *, by_class: bool
        ) -> call_fastpath.FastPath:
            middle = (ready.numbers[:3], ready.numbers[3:])
            several = by_class and last_of_class(m) != row_class(m)[0]
            sizes, after = (0 if several else m, n, left.shape[-1], batch), (n, 1, m * n, None, *ready.vectors)
            return call_fastpath.FastPath(
                ready.route, sizes, middle, after, template, sources, taken, ready.results, ready.several
            )

        call_fastpath.keep(seen, ready.bound, build, 2 + (out is not None), shared=ready.shared)
    return results[0] if out is None and not ready.several else fit(results, out, several=ready.several)


def _writable(out: Any, like: Array, inputs: tuple[Array, ...], bound: Bound, captured: dict[Any, Any]) -> bool:
    """Whether kernels can write the first result to `out`: inputs overlap it only element by element."""
    numpy_arrays.check_out(out, like.shape, like.dtype)
    if out.dtype != like.dtype or not (out.flags.aligned and out.flags.c_contiguous):
        return False
    if any(np.may_share_memory(out, x) for x in inputs):
        return False
    layout = (out.__array_interface__["data"], out.shape, out.strides, tuple("bmn"[-out.ndim :]))
    for source in bound.traced.sources:
        x = resolve(source.key, captured)
        if np.may_share_memory(out, x) and (x.__array_interface__["data"], x.shape, x.strides, source.view) != layout:
            return False
    return True


def fit(results: list[Array], out: Any, *, several: bool) -> Any:
    """The results of a call, the first copied to `out` if it is not that."""
    if out is not None and results[0] is not out:
        numpy_arrays.check_out(out, results[0].shape, results[0].dtype)
        np.copyto(out, results[0], casting="same_kind")
        results[0] = out
    return tuple(results) if several else results[0]


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
    left, right = numpy_arrays.as_operand(a, "a"), b if hasattr(b, "family") else _plain(b)
    call = Call(left, right, np.dtype(dtype) if typed_result else None, None)
    traced, _ = trace(epilogue, (acc(), _INDICES), by_value=False, rank=2 if left.ndim == len(right.shape) == 2 else 3)
    try:
        step = call.fusible_step(traced)
    except ScheduleError as error:
        from portmm.arrays.problem_of import problem_of_call

        return problem_of_call(a, b), (f"the epilogue is a separate kernel, over the rows of the product: {error}",)
    rows, other = call.operands(call.size(step), call.types())
    p = call.problem(step, rows.layout, other.layout if isinstance(other, numpy_arrays.Operand) else "")
    if (p.a, p.b) == ("row", "col") and _better_unfused(p, step):
        return replace(p, fused=""), ("the epilogue is a separate kernel: predicted to be faster",)
    return p, ("the epilogue is part of the kernel",)
