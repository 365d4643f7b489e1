"""`matmul` with prologues and an epilogue.

Owns the call: what a function makes of the sums is part of the product's kernel,
unless a reduction needs whole rows of them, or no kernel can be made; then it goes
over the result. Imports `ops.matmul`, `arrays.numpy_arrays`, `trace.bind`, `spec.problem`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError, TraceError
from portmm.ops import call_fastpath
from portmm.ops import matmul as matmul_op
from portmm.ops.prepack import current, is_packed, of_codes
from portmm.ops.rowwise import BYTES_PER_SECOND, over_rows
from portmm.runtime.cpu import runtime
from portmm.spec.dtype import BY_NAME, accumulator, spell
from portmm.spec.epilogue import acc
from portmm.spec.problem import Problem
from portmm.spec.row_classes import row_class
from portmm.trace.bind import Around, Bound, dense, native, settle, typed
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
"""Seconds of one more call of a kernel."""
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
    if interop.on_device(a) or interop.on_device(b):
        return _on_device((a, b, out), dtype, epilogue, prologue_a, prologue_b)
    left = numpy_arrays.as_operand(a, "a")
    right = current(b) if hasattr(b, "family") else _plain(b)
    if prologue_a is not None:
        left = _before(prologue_a, _rows(left, "a"), {"m": "m", "k": "n", "b": "b"})
    if prologue_b is not None:
        if not isinstance(right, np.ndarray):
            raise TypeError("b is packed; give prologue_b the weight as it was, or pack what it makes of it")
        right = _before(prologue_b, _rows(right, "b"), {"k": "m", "n": "n", "b": "b"})
    if epilogue is None:
        result = matmul_op.matmul(left, right, out, dtype=dtype)
        return in_class_of(result, a, b) if out is None else result
    if left.ndim < 2 or len(right.shape) < 2:
        raise ValueError(f"an epilogue takes matrices; got {left.shape} by {right.shape}: add a dimension of 1")
    result = _multiply(left, right, out, dtype, epilogue)
    return in_class_of(result, a, b) if out is None else result


def _on_device(operands: tuple[Any, Any, Any], dtype: Any, epilogue: Any, prologue_a: Any, prologue_b: Any) -> Any:
    """The same of arrays on a device."""
    from portmm.ops import fused_matmul_gpu, matmul_gpu

    if of_codes(operands[1]):
        from portmm.ops import int4_gpu

        return int4_gpu.around(operands, dtype, epilogue, prologue_a, prologue_b)
    given = matmul_gpu.adopted(*operands)
    assert given is not None  # noqa: S101 - one of them is there
    left, right, out = given
    right = replace(right, queue=left.queue)  # one queue for all, that of A
    if prologue_a is not None:
        left = fused_matmul_gpu.before(prologue_a, left, "a", {"m": "m", "k": "n", "b": "b"})
    if prologue_b is not None:
        right = fused_matmul_gpu.before(prologue_b, right, "b", {"k": "m", "n": "n", "b": "b"})
    if epilogue is None:
        return matmul_gpu.matmul((left, right, out), dtype)
    return fused_matmul_gpu.matmul((left, right, out), dtype, epilogue)


def _before(function: Callable[..., Any], x: Array, names: dict[str, str]) -> Array:
    """What a prologue makes of an operand."""
    results, several = over_rows(function, (x,), names)
    if several:
        raise TraceError(f"a prologue gives one value, not a tuple of {len(results)}")
    return np.ascontiguousarray(np.broadcast_to(results[0], x.shape))


def _plain(b: Any) -> Any:
    """A weight that is no packed one."""
    from portmm.weights.quantized import Quantized

    if isinstance(b, Quantized):
        from portmm.ops.int4_panels import fold

        return fold(b)
    return numpy_arrays.as_operand(b, "b")


def _rows(x: Array, name: str) -> Array:
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {x.shape}; a prologue takes matrices")
    return x


@dataclass(frozen=True, slots=True)
class _Ready:
    """One kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        numbers: strides of the operands of the product, a_m to b_batch.
        size: rows, columns and items of a batch.
        results: shapes and types.
        several: the function gives a tuple.
        vectors: what the last step of integer sums reads: scales of 1.
        direct: A and B are read where they lie.
        rows: the least and the largest M that it serves.
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
        """The same for another M of those that it serves."""
        if m == self.size[0]:
            return self
        results = tuple([((m, *shape[1:]), t) for shape, t in self.results])
        vectors = self.vectors if self.vectors[0] is None else (numpy_arrays.ones(m), *self.vectors[1:])
        return replace(self, size=(m, *self.size[1:]), results=results, vectors=vectors)


class Call:
    """A product and what becomes of it."""

    def __init__(self, left: Array, right: Any, wanted: np.dtype[Any] | None, first: np.dtype[Any] | None) -> None:
        self.left, self.right, self.wanted, self.first = left, right, wanted, first
        self.array = isinstance(right, np.ndarray)
        self.coded = not self.array and not is_packed(right)
        self.batch, (self.m, self.n) = numpy_arrays.result_shape(left, right.shape)
        self.k, self.items = left.shape[-1], math.prod(self.batch)

    def types(self) -> numpy_arrays.DTypes:
        """The types of the operands, and the usual one of a result."""
        if self.coded:
            left = self.left.dtype.newbyteorder("=")
            return left, np.dtype(np.uint8), self.wanted or left
        left, right, usual = numpy_arrays.types_of(
            self.left.dtype, self.right.dtype if self.array else self.right.owner.dtype
        )
        usual = np.dtype(np.float32) if usual.kind in "iu" else usual
        return left, right, (self.wanted or usual).newbyteorder("=")

    def sums(self) -> str:
        """The type of the sums."""
        types = self.types()
        return accumulator(numpy_arrays.name_of(types[0]), "u4" if self.coded else numpy_arrays.name_of(types[1]))

    def ready(self, traced: Traced) -> _Ready | ScheduleError:
        """The kernel for calls of this kind, or why there is none."""
        try:
            return self.chosen(typed(traced, self.first))
        except ScheduleError as error:
            return ScheduleError(str(error))  # without its traceback, whose frames hold operands: it is remembered

    def chosen(self, traced: Traced) -> _Ready:
        """The kernel for calls of this kind.

        Raises:
            ScheduleError: there is none.
        """
        step = self.settled(traced)
        size = self.size(step)
        rows, other = self.operands(size, self.types())
        right = other if isinstance(other, numpy_arrays.Operand) else None
        p = self.problem(step, rows.layout, right.layout if right else "")
        if (rows.layout, p.b) == ("row", "col") and _better_apart(p, step):
            raise ScheduleError("the product alone, and a kernel over its rows, are predicted to be faster")
        matmul_op.begin()
        route, shared = matmul_op.routed(p)
        strides = (right.row, right.col, _apart(right, size)) if right else (other.b_k, other.b_n, 0)
        numbers = (rows.row, rows.col, _apart(rows, size), *strides)
        seen = (self.m, self.n, self.items)
        bound = Bound(traced, seen, [], [dense(x, seen) for x in step.axes[1:]])
        shapes = [(*self.batch, self.m, self.n if "n" in axes else 1) for axes in step.axes]
        vectors: tuple[Any, ...] = (None,) * 6
        if p.post:
            vectors = (numpy_arrays.ones(size[0]), numpy_arrays.ones(-(-self.n // PAD) * PAD), *vectors[2:])
        direct = _lies(self.left, rows) and (right is None or _lies(self.right, right))
        results = tuple(zip(shapes, step.types, strict=True))
        # Whether a B by columns is better multiplied apart depends on M.
        shared &= self.left.ndim == len(self.right.shape) == 2 and (rows.layout, p.b) != ("row", "col")
        served = bound.served(row_class(size[0])) if shared else (size[0], size[0])
        return _Ready(route, bound, numbers, size, results, traced.several, vectors, direct, served, shared)

    def settled(self, traced: Traced) -> Step:
        """What is fused.

        Raises:
            ScheduleError: it cannot be, or there is nothing to multiply.
        """
        step = self.step(traced)
        if 0 in (self.items, self.m, self.n, self.k):
            raise ScheduleError("there is nothing to multiply")
        return step

    def step(self, traced: Traced) -> Step:
        """What is fused, whatever the size.

        Raises:
            ScheduleError: it cannot be.
        """
        sums = self.sums()
        if sums == "f64" or (self.coded and sums == "s32"):
            raise ScheduleError(f"expressions are in float32, not in {sums}")
        step = settle(traced, (), self.types()[2], ends=True)
        if not step.wide:
            raise ScheduleError("its first result is the same along a row")
        if step.fused.reductions or step.fused.column_reductions:
            raise ScheduleError("a reduction needs whole rows, or columns, of sums")
        if sums == "s32" and step.types[0] == np.int32:
            raise ScheduleError("scaled sums of integers are not written as s32")
        return step

    def size(self, step: Step) -> tuple[int, int, int]:
        """Rows, columns, items: where items share B and are alike, all rows are of one."""
        joined = self.items == 1 or (len(self.right.shape) == 2 and self.joins(step))
        return (self.m * self.items, self.n, 1) if joined else (self.m, self.n, self.items)

    def problem(self, step: Step, a: str, b: str) -> Problem:
        """What is computed, A and B having these layouts."""
        types, (m, n, items) = self.types(), self.size(step)
        held = "u4" if self.coded else numpy_arrays.name_of(types[1])
        word = spell(numpy_arrays.name_of(types[0]), held, numpy_arrays.name_of(step.types[0]))
        return Problem(
            m, n, self.k, word, items, a, b or ("codes" if self.coded else "packed"), fused=step.text,
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

    def joins(self, step: Step) -> bool:
        """Rows of all items are alike: no operand or index tells items apart in another way than rows."""
        if any(x.op == "index" and x.args[0] in "bm" for x in step.fused.steps):
            return False
        for source in step.traced.sources:
            at = [source.view.index(x) for x in "bm" if source.view.count(x) == 1]
            if not {"b", "m"} & set(source.view):
                continue
            steps = native(source.array).strides  # of the copy, where one is read
            if len(at) != len("bm") or steps[at[0]] != self.m * steps[at[1]]:
                return False
        return True

    def split(self, epilogue: Callable[..., Any], out: Any) -> Any:
        """The product first, then the epilogue over its rows."""
        sums = self.sums()
        if sums == "f64":
            raise TypeError("expressions are in float32; convert float64 operands, or multiply without an epilogue")
        product = matmul_op.matmul(self.left, self.right, dtype=np.int32 if sums == "s32" else np.float32)
        product = product.astype(np.float32, copy=False)  # as in one kernel
        results, several = over_rows(epilogue, (product,), NAMES, dtype=self.types()[2], first=self.first)
        return fit(list(results), out, several=several)


def _better_apart(p: Problem, step: Step) -> bool:
    """Programs that cannot fuse, the dot products of a B by columns, are faster by more than another pass takes."""
    from portmm.dispatch import cpu as cpu_dispatch

    target, threads = config.target(), config.get_num_threads()
    alone = replace(p, fused="", post="", dtype=spell(*p.types[:2], p.acc))
    passes = p.batch * p.m * p.n * BY_NAME["f32"].bytes * (2 + len(step.fused.operands)) / BYTES_PER_SECOND
    seconds = [cpu_dispatch.choose(x, target, threads).cost.seconds for x in (p, alone)]
    return seconds[1] + passes + CALL < seconds[0]


def _apart(x: numpy_arrays.Operand, size: tuple[int, int, int]) -> int:
    """Elements from one item of a batch to the next."""
    return x.array.strides[0] // x.array.itemsize if size[2] > 1 and x.array.ndim == 3 else 0


def _lies(x: Array, read: numpy_arrays.Operand) -> bool:
    """An operand is read where it lies."""
    return bool(read.address == x.__array_interface__["data"][0])


def _kind(around: Around, call: Call, about: tuple[Any, ...]) -> _Ready | ScheduleError:
    """The kernel for calls of a kind, or why there is none: that for the class of M, if it serves this M."""
    left = call.left
    if left.ndim == len(call.right.shape) == 2:
        m, k = left.shape
        found: _Ready | ScheduleError = around.ready((row_class(m)[1], k, about), call.ready, _VALUES, 2)
        if isinstance(found, _Ready) and found.rows[0] <= m <= found.rows[1]:
            return found.at(m)
        return around.ready((left.shape, about), call.ready, _VALUES, 2)  # type: ignore[no-any-return]
    return around.ready((left.shape, about), call.ready, _VALUES, 3)  # type: ignore[no-any-return]


def _multiply(left: Array, right: Any, out: Any, dtype: Any, epilogue: Callable[..., Any]) -> Any:
    """A product and its epilogue, in one kernel or in two."""
    dtype = None if dtype is None else np.dtype(dtype)
    seen = call_fastpath.see(epilogue, left, right, out, dtype)
    found = None if seen is None else call_fastpath.known(seen, out)
    if seen is not None and found is not None:
        return found(seen, out)
    first = out.dtype.newbyteorder("=") if dtype is None and isinstance(out, np.ndarray) else None
    if first == np.float64:
        first = None  # what is computed in float32 is converted
    around = Around.of(epilogue)
    panels = getattr(right, "owner", right)
    held = (right.strides, right.dtype, right.flags.aligned) if panels is right else right.family
    about = (left.strides, left.dtype, left.flags.aligned, right.shape, held, dtype, first)
    call = Call(left, right, dtype, first)
    try:
        ready = _kind(around, call, about)
    except BuildError as error:
        fall_back(error)
        return call.split(epilogue, out)
    if not isinstance(ready, _Ready):
        return call.split(epilogue, out)
    results = [np.empty(s, t) for s, t in ready.results]
    if out is not None and _writable(out, results[0], (left, panels), ready.bound, around.found):
        results[0] = out
    a, b = left, panels
    if not ready.direct:
        rows, other = call.operands(ready.size, call.types())
        a, b = rows.array, other.array if isinstance(other, numpy_arrays.Operand) else panels
    operands, numbers, alive = ready.bound.fill(around.found, [], results[1:])
    m, n, batch = ready.size
    a_m, a_k, a_batch, b_k, b_n, b_batch = ready.numbers
    runtime().execute(
        ready.route, m, n, left.shape[-1], batch, a, a_m, a_k, a_batch, b, b_k, b_n, b_batch,
        results[0], n, 1, m * n, None, *ready.vectors, operands, numbers,
    )  # fmt: skip
    del alive
    if seen is not None and around.lasting and ready.direct and (out is None or out is results[0]):

        def made(
            template: Array, sources: tuple[int, ...], taken: tuple[int, ...], *, whole: bool
        ) -> call_fastpath.Quick:
            middle = (ready.numbers[:3], ready.numbers[3:])
            sizes, after = (0 if whole else m, n, left.shape[-1], batch), (n, 1, m * n, None, *ready.vectors)
            return call_fastpath.Quick(
                ready.route, sizes, middle, after, template, sources, taken, ready.results, ready.several
            )

        call_fastpath.keep(seen, ready.bound, made, 2 + (out is not None), shared=ready.shared)
    return results[0] if out is None and not ready.several else fit(results, out, several=ready.several)


def _writable(out: Any, like: Array, inputs: tuple[Array, ...], bound: Bound, found: dict[Any, Any]) -> bool:
    """Kernels can write the first result to `out`, where what they read may lie only element upon element."""
    numpy_arrays.check_out(out, like.shape, like.dtype)
    if out.dtype != like.dtype or not (out.flags.aligned and out.flags.c_contiguous):
        return False
    if any(np.may_share_memory(out, x) for x in inputs):
        return False
    place = (out.__array_interface__["data"], out.shape, out.strides, tuple("bmn"[-out.ndim :]))
    for source in bound.traced.sources:
        x = resolve(source.key, found)
        if np.may_share_memory(out, x) and (x.__array_interface__["data"], x.shape, x.strides, source.view) != place:
            return False
    return True


def fit(results: list[Array], out: Any, *, several: bool) -> Any:
    """What the caller gets."""
    if out is not None and results[0] is not out:
        numpy_arrays.check_out(out, results[0].shape, results[0].dtype)
        np.copyto(out, results[0], casting="same_kind")
        results[0] = out
    return tuple(results) if several else results[0]


def posed(a: Any, b: Any, dtype: Any, epilogue: Callable[..., Any], *, given: bool) -> tuple[Problem, tuple[str, ...]]:
    """The problem that `matmul` poses with an epilogue, and what is to be said of it.

    Args:
        a: an array.
        b: an array, or a packed weight.
        dtype: of the result, if that is `given`.
        epilogue: the function.
        given: the caller says what type the result has.
    """
    left, right = numpy_arrays.as_operand(a, "a"), b if hasattr(b, "family") else _plain(b)
    call = Call(left, right, np.dtype(dtype) if given else None, None)
    traced, _ = trace(epilogue, (acc(), _INDICES), by_value=False, rank=2 if left.ndim == len(right.shape) == 2 else 3)
    try:
        step = call.settled(traced)
    except ScheduleError as error:
        from portmm.arrays.problem_of import pose

        return pose(a, b), (f"the epilogue is a kernel of its own, over the rows of the product: {error}",)
    rows, other = call.operands(call.size(step), call.types())
    p = call.problem(step, rows.layout, other.layout if isinstance(other, numpy_arrays.Operand) else "")
    if (p.a, p.b) == ("row", "col") and _better_apart(p, step):
        return replace(p, fused=""), ("the epilogue is a kernel of its own: predicted to be faster",)
    return p, ("the epilogue is part of the kernel",)
