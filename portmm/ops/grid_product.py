"""Products of arrays on a device, of every kind: plain, with an epilogue, of quantized weights, of groups of rows.

Owns the call: operands are read in place, whatever their strides, on the stream or queue of A, asynchronously. The
kernels of a kind of call are remembered (`kernel_call`), so that a further one fills in addresses and launches. The
epilogue is part of the product's kernel, unless a reduction needs whole rows of the product; then it is a kernel over
the rows of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Self

import numpy as np

from portmm.arrays import operand
from portmm.arrays.device_kinds import kinds
from portmm.arrays.grid_call import Copy, GridCall, Product, Shape, arranged, grid_call
from portmm.arrays.interop import adopt_all
from portmm.arrays.libraries import place_of
from portmm.arrays.numpy_arrays import numpy_of
from portmm.arrays.operand import Operand, dense_like, named, overlap
from portmm.dispatch import config, device_routes
from portmm.dispatch.machine import MOST, Machine, machine_of
from portmm.errors import DeviceError, ScheduleError
from portmm.ops import repeated_call
from portmm.ops.epilogues import NAMES, VALUES, fused, fusible, rank_of
from portmm.ops.kernel_call import Captures, KernelCall, contiguous, over_rows, via_temporary
from portmm.ops.row_kernels import before
from portmm.spec.dtype import BY_NAME, accumulator
from portmm.trace.bind import Step, UserFunction, dense, typed
from portmm.trace.tracer import Traced, trace
from portmm.util.memo import Memory
from portmm.weights.kinds import WeightKind, weight_kind

MOST_KINDS = 1024
"""Kinds of calls remembered before the memo is emptied."""
TALLEST = 256
"""Rows of the largest tile: the last tile of a group is partial."""
_ready = Memory(MOST_KINDS, "calls")


# -- operands --------------------------------------------------------------------------


def adopted(a: Any, b: Any, out: Any = None, ends: Any = None) -> Product:
    """The operands of a product on a device.

    Raises:
        TypeError: some of them are in the host's memory, a type is not supported, or the ends of groups are not of s32.
        ValueError: they are on several devices, or their shapes do not match.
        ScheduleError: there are too many rows in groups.
    """
    weight = b if weight_kind(b) is WeightKind.DEVICE_INT4 else None
    there = adopt_all({"a": a, "b": b if weight is None else weight.codes}, {"ends": ends, "out": out})
    x = Product(there["a"], there["b"], there.get("out"), weight, there.get("ends"))
    if x.ends is not None:
        if x.ends.dtype != "s32":
            raise TypeError(f"ends has elements of {x.ends.dtype}; they are int32: convert them")
        if len(x.ends.shape) != 1 or (x.ends.shape[0] > 1 and operand.elements(x.ends)[0] != 1):
            raise ValueError(f"ends has shape {x.ends.shape}, strides {x.ends.strides}; pass one dense row of integers")
        rows, groups = x.a.shape, x.b.shape
        _check_groups(rows, groups, x.ends.shape[0])
        if rows[0] + groups[0] * TALLEST > MOST:
            raise ScheduleError(f"{rows[0]} rows in {groups[0]} groups: kernels count in 32 bits; split a")
    return x


def _check_groups(a: tuple[int, ...], b: tuple[int, ...], ends: int) -> None:
    """Check the shapes of rows and matrices."""
    if len(a) != 2 or len(b) != 3:
        raise ValueError(f"a has shape {a} and b {b}; groups take (rows, k) and (groups, k, n)")
    if a[1] != b[1]:
        raise ValueError(f"cannot multiply {a} by {b}: a has {a[1]} columns, b has {b[1]} rows")
    if ends != b[0] or not ends:
        raise ValueError(f"ends has {ends} elements, b has {b[0]} matrices; there is one for each group, at least one")


# -- calls -----------------------------------------------------------------------------


def product(
    a: Any, b: Any, out: Any = None, *, dtype: Any = None, epilogue: Any = None, prologue_a: Any = None,
    prologue_b: Any = None, ends: Any = None,
) -> Any:  # fmt: skip
    """The product of arrays on a device: see `matmul.matmul`, and `grouped_matmul.grouped_matmul`."""
    x = adopted(a, b, out, ends)
    if prologue_a is not None:
        x = replace(x, a=before(over_rows, spread, prologue_a, x.a, "a"))
    if prologue_b is not None:
        if x.weight is not None:
            raise TypeError("b is an int4 weight; quantize the result of prologue_b")
        right = replace(x.b, queue=x.a.queue)  # one queue for all, that of A
        x = replace(x, b=before(over_rows, spread, prologue_b, right, "b"))
    repeated = ((a, b) if out is None else (a, b, out), (dtype,)) if prologue_a is prologue_b is ends is None else None
    call = GridProduct(x, "" if dtype is None else named(dtype), repeated)
    return call.plain().source if epilogue is None else fused(call, epilogue)


def spread(x: Operand, shape: tuple[int, ...]) -> Operand:
    """The array with these extents, by strides of 0."""
    strides = [s if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True)]
    return replace(x, shape=shape, strides=tuple(strides))


@dataclass(frozen=True, slots=True, eq=False)
class GridProduct:
    """A call on a device: see `epilogues.fused`.

    Attributes:
        x: the operands.
        requested: type of the result, or empty.
        repeated: arrays and form of further calls like this one: see `repeated_call.again`; None where they take this
            way, too.
    """

    x: Product
    requested: str = ""
    repeated: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that kernels depend on."""
        return (*self.x.kind, self.requested)

    @property
    def parts(self) -> dict[str, Operand]:
        """The operands by the names of kernels' parameters."""
        return self.x.parts

    @property
    def shapes(self) -> tuple[Shape, Shape, tuple[int, int, int]]:
        """The shape of the result, that of a batch, and m, n and k."""
        return self.x.shapes

    @property
    def values(self) -> tuple[Any, ...]:
        """The placeholder arguments of an epilogue."""
        return VALUES

    @property
    def rank(self) -> int:
        """The number of indices of an epilogue's elements."""
        return rank_of(self.x.a.shape, self.x.b.shape) if self.x.ends is None else 3

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, columns and items, as an epilogue's operands see them."""
        _, batch, (m, n, _) = self.shapes
        return m, n, math.prod(batch) if self.x.ends is None else self.x.b.shape[0]

    def sums(self) -> str:
        """The accumulator's type."""
        return accumulator(self.x.a.dtype, self.x.b.dtype)

    def usual(self) -> np.dtype[Any]:
        """The type of a result with an epilogue, by default."""
        natural = "f32" if self.sums() == "s32" else operand.result_type(self.x.a.dtype, self.x.b.dtype)
        return numpy_of(self.requested or natural)

    def step(self, traced: Traced) -> Step:
        """The epilogue as expressions.

        Raises:
            ScheduleError: it cannot be fused.
        """
        traced = typed(traced, None if self.x.out is None else numpy_of(self.x.out.dtype))
        return fusible(traced, self.sums(), self.usual)

    def first_type(self, step: Step | None) -> str:
        """The type in which kernels write the first result."""
        x = self.x
        if step is not None:
            return named(step.types[0])
        return operand.result_type(x.a.dtype, x.b.dtype, self.requested if x.out is None else x.out.dtype)

    def plain(self) -> Operand:
        """The product without an epilogue."""
        x, out, requested = self.x, self.x.out, self.requested
        if out is not None and (requested not in ("", out.dtype) or not self.writes(out)):
            operand.check_out(out, self.shapes[0])
            operand.check_type(out, requested or out.dtype)
            via_temporary(out, x.a, requested or out.dtype, lambda to: self.into(to, "").plain().source)
            return out
        key = (self.kind, config.current())
        ready: KernelCall | None = _ready.get(key)
        if ready is None:
            ready = _ready.keep(key, self.prepared())
        result = ready.run(self.parts, x.a, out)[0]
        if self.repeated:
            repeated_call.keep(*self.repeated, ready, self.parts, out)
        return result

    def into(self, out: Operand | None, requested: str) -> Self:
        """The call with another array for its result."""
        return replace(self, x=replace(self.x, out=out), requested=requested, repeated=None)

    def writes(self, out: Operand, *others: Operand) -> bool:
        """Whether kernels can write to an array: it overlaps neither the operands nor others."""
        return not overlap(out, (*self.parts.values(), *others))

    def kernel(self, function: UserFunction) -> KernelCall | ScheduleError:
        """The kernels of product and epilogue, or the reason why there are none."""

        def make(traced: Traced) -> KernelCall | ScheduleError:
            try:
                return self.prepared(traced)
            except ScheduleError as error:
                if self.x.ends is not None:
                    raise
                return ScheduleError(str(error))  # for the memo without its traceback, whose frames reference operands

        return function.ready(("device", *self.kind), make, self.values, self.rank)

    def run(self, kernel: KernelCall, function: UserFunction) -> Any:
        """The results of the kernels."""
        x, out, closure = self.x, self.x.out, function.closure
        read = kernel.captures.arrays(closure, x.a)
        if out is not None and not kernel.converts and not self.writes(out, *read):
            # Kernels are specialised for the layout of a result: a temporary has another.
            run = function.function
            return via_temporary(out, x.a, out.dtype, lambda to: fused(self.into(to, self.requested), run))
        results = kernel.run(self.parts, x.a, out, closure, read)
        if self.repeated:
            repeated_call.keep(*self.repeated, kernel, self.parts, out, function, read)
        return kernel.returned(results)

    def split(self, epilogue: Callable[..., Any]) -> Any:
        """The results of two kernels."""
        sums, out = self.sums(), self.x.out
        rows = self.into(None, sums).plain()
        if sums != "f32":
            rows = contiguous(rows, "f32")  # as in one kernel
        first = None if out is None or out.dtype == "f64" else numpy_of(out.dtype)
        results, several = over_rows(epilogue, (rows,), NAMES, out, self.usual(), first=first)
        return tuple(y.source for y in results) if several else results[0].source

    def prepared(self, traced: Traced | None = None, *, static: bool = False) -> KernelCall:
        """The kernels of a kind of call, with a traced epilogue if there is one; `static`: specialised for its n and k.

        Raises:
            TypeError: the types have no product, or a captured array is in the host's memory.
            ValueError: shapes do not match.
        """
        x, size = self.x, self.size
        shape, batch, (m, n, _) = self.shapes
        on, out = machine_of(x.a), x.out
        step = None if traced is None else self.step(traced)
        first = self.first_type(step)
        if out is not None:
            operand.check_out(out, shape)
            operand.check_type(out, first)
        results, captures = [("c", shape, first)], Captures()
        values: dict[str, Any] = {}
        if step is not None and traced is not None:
            captures = Captures.of(traced, size)
            count = len(traced.sources)
            for i, (axes, t) in enumerate(zip(step.axes[1:], step.types[1:], strict=True), count):
                results.append((f"x{i}_all", self.shaped((*batch, m, n if "n" in axes else 1)), named(t)))
            written = [dense(axes, size) for axes in step.axes[1:]]
            written = written if x.ends is None else [(0, *steps[1:]) for steps in written]  # rows of all groups
            for i, steps in enumerate((*captures.strides, *written)):
                values |= dict(zip((f"x{i}_b", f"x{i}_m", f"x{i}_n"), steps, strict=False))
        converts = out is not None and out.dtype != first
        several = traced is not None and traced.several
        if 0 in shape:
            return KernelCall(on, tuple(results), (), several=several, converts=converts)
        ready: KernelCall = self.launches(on, first, step, values, static=static)
        return replace(ready, results=tuple(results), several=several, captures=captures, converts=converts)

    def shaped(self, shape: Shape) -> Shape:
        """The shape in which the caller sees a result of the product."""
        return shape

    def launches(self, on: Machine, first: str, step: Step | None, values: dict[str, Any], *, static: bool) -> Any:
        """The kernels of a product that is not empty, as a `KernelCall` without results.

        Args:
            on: the device.
            first: type of the first result.
            step: the epilogue, or None.
            values: numbers of its operands, by name.
            static: specialised for n and k.

        Raises:
            ScheduleError: no kernel computes it.
        """
        x = self.x
        call = grid_call(x, first, "" if step is None else step.text)
        if step is not None and call.outer is not None:
            raise ScheduleError("an epilogue takes an evenly strided batch; copy the operands first")
        p, vectors, values = call.problem, call.vectors, call.values | values
        copies: tuple[Copy, ...] = ()
        if call.outer is None:
            p, vectors, values, copies = arranged(p, vectors, values, on)
        # An empty sum is zero: kernels of any k write zeros.
        at_least_one_k = replace(p, k=max(p.k, 1), static=static and p.k > 0 and on.language == "cuda")
        launches, workspace = device_routes.route(at_least_one_k, on, vectors).launches(values, p)
        sides = (x.b, x.a) if call.transposed else (x.a, x.b)
        sizes = [*(BY_NAME[y.dtype].bytes for y in sides), BY_NAME[first].bytes]
        repeats = np.zeros((1, 3), np.int64) if call.outer is None else call.outer
        moved = [[(s, int(i), size) for s, i, size in zip("abc", at, sizes, strict=True) if i] for at in repeats]
        every = tuple((launch, tuple(moves)) for moves in moved for launch in launches)
        return KernelCall(on, (), every, workspace, copies=copies, swapped=call.transposed)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A product resolved for arrays of one kind.

    Attributes:
        like: the operands that it was made for, without their memory.
        weight: the weight that is part of it, or None.
        ready: the kernels.
        repeated: further calls, by the kinds of their arrays.
    """

    like: Product
    weight: Any
    ready: KernelCall
    repeated: dict[Any, repeated_call.RepeatedCall] = field(default_factory=dict)

    def __reduce__(self) -> NoReturn:
        raise DeviceError(
            "a plan for arrays on a device belongs to the device's context and cannot be pickled; make it where it runs"
        )

    def __call__(self, a: Any, b: Any = None, out: Any = None) -> Any:
        """The product.

        Raises:
            TypeError: an operand is not on a device.
            ValueError: an operand is not like that of the plan, or `out` overlaps one.
        """
        if self.weight is not None:
            return self._first(a, self.weight, out if b is None else b)
        now = kinds((a, b) if out is None else (a, b, out))
        if now is None:
            return self._first(a, b, out)
        call = self.repeated.get(now[0])
        if call is not None:
            result = call.run(now[1], out, now[1][-1])
            if result is not NotImplemented:
                return result
        return self._first(a, b, out, now[0])

    def _first(self, a: Any, b: Any, out: Any, key: tuple[Any, ...] = ()) -> Any:
        """The product, after all checks; further ones of these kinds repeat it."""
        if place_of(a, b) != "device":
            raise TypeError("this plan is for arrays on a device, and these are in the host's memory")
        x = adopted(a, b, out)
        for name in ("a", "b", "out"):
            own, planned = getattr(x, name), getattr(self.like, name)
            if own is not None and planned is not None and own.kind != planned.kind:
                raise ValueError(f"{name} is {_described(own)}, the plan takes {_described(planned)}")
        _, shape, dtype = self.ready.results[0]
        new = dense_like(x.a, shape, dtype)
        if x.out is not None:
            operand.check_out(x.out, shape)
            b_name, b_parts = ("b", (x.b,)) if self.weight is None else ("the weight", (*self.weight.parts.values(),))
            operand.check_apart(x.out, {"a": (x.a,), b_name: b_parts})
            if self.like.out is None and x.out.kind != new.kind:
                raise ValueError("the plan was made for an out that is C-contiguous; pass an out when making the plan")
        elif self.like.out is not None and not operand.is_dense(self.like.out):
            raise ValueError("the plan was made for an out of other strides than a new array's; pass one like it")
        result = self.ready.run(x.parts, x.a, x.out)[0].source
        if key and repeated_call.repeats(self.ready, x.a):
            self.repeated[key] = repeated_call.RepeatedCall(self.ready, x.parts, x.out)
        return result


def _described(x: Operand) -> str:
    """A kind of array, as text for messages."""
    shape, strides, dtype, device, aligned, _ = x.kind
    return f"{dtype} of shape {shape}, strides {strides}, aligned to {aligned} bytes, on {device[0]}"


def plan(x: Product) -> Plan:
    """A callable for arrays of these kinds: see `matmul.plan`."""
    kinds = [None if y is None else replace(y, source=None) for y in (x.a, x.b, x.out)]
    return Plan(Product(*kinds), x.weight, GridProduct(x).prepared(static=x.weight is None))  # type: ignore[arg-type]


def question(x: Product, epilogue: Callable[..., Any] | None = None) -> tuple[GridCall, tuple[str, ...]]:
    """The problem of a call, and notes for `explain`."""
    plain, product = None, GridProduct(x)
    if x.ends is not None:
        _check_groups(x.a.shape, x.b.shape, *x.b.shape[:1])
    if epilogue is not None:
        traced, *_ = trace(epilogue, VALUES, by_value=False, rank=product.rank)
        Captures.of(traced, product.size)  # raises if it captures what kernels cannot read
        try:
            step = product.step(traced)
            call = grid_call(x, named(step.types[0]), step.text)
        except ScheduleError as error:
            plain = error
            if x.ends is not None:
                raise
        else:
            if call.outer is None:
                return call, ("the epilogue is part of the kernel",) if x.ends is None else ()
            plain = ScheduleError("an epilogue takes an evenly strided batch; copy the operands first")
    call = grid_call(x, product.first_type(None))
    note = f"the epilogue is a separate kernel, over the rows of the product: {plain}"
    return call, () if plain is None else (note,)
