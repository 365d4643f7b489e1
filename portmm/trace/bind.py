"""Binding of a traced function to a kernel: expressions with numbered operands, and the table of operands of a call.

Owns `bind_operands`, which numbers operands and results; `Bound`, which computes the table's strides once for all calls
of a kind; `UserFunction`, a user's function at one call, with the memo of the kernels of functions; and
`split_column_reductions`, which makes two functions of one that reduces columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.errors import TraceError
from portmm.spec.epilogue import PRODUCT, C, Fused, Operand, argument, load, parse, spelled, varies
from portmm.spec.expr import Expr, const, node, ordered, real
from portmm.spec.expr_functions import rounded, substituted
from portmm.spec.problem import AXES
from portmm.trace.closures import resolve
from portmm.trace.guards import Way, find, remember
from portmm.trace.recorder import Source, described, native
from portmm.trace.tracer import Traced, trace
from portmm.util.memo import Memory
from portmm.util.records import dataclass, replace

Array = np.ndarray[Any, Any]
MOST_KINDS = 1024
"""Kinds of calls remembered before the memo is emptied."""
WRITTEN = ("f32", "f16", "bf16", "e4m3", "e5m2", "s8", "u8", "s32")
"""Types that results may have."""


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel over rows, or the epilogue of a product.

    Attributes:
        traced: the function.
        text: the expressions; results are numbered after the operands.
        first: number of operands before the captured ones: the values that the function takes as arguments.
        types: of the results.
        axes: of the results.
        wide: the first result varies along a row, or is constant.
    """

    traced: Traced
    text: str
    first: int
    types: tuple[np.dtype[Any], ...]
    axes: tuple[str, ...]
    wide: bool = True

    @property
    def fused(self) -> Fused:
        """The expressions."""
        return parse(self.text)


def result_types(traced: Traced, usual: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """The type of each result: the one of `cast`, else the usual one.

    Raises:
        TraceError: kernels cannot write a type.
    """
    dtypes = []
    for x, cast_to in traced.results:
        dtype = (
            np.dtype(cast_to).newbyteorder("=")
            if cast_to is not None
            else np.dtype(np.uint8 if x.dtype == "mask" else np.int32)
            if x.dtype != "f32"
            else usual
        )
        if numpy_arrays.name_of(dtype) not in WRITTEN:
            raise TraceError(f"a result of {dtype} cannot be written; cast it to one of {', '.join(WRITTEN)}")
        dtypes.append(dtype)
    return tuple(dtypes)


def filled(template: Expr, values: list[Any]) -> Expr:
    """An expression whose placeholders of arguments are replaced by these values."""
    return substituted(template, lambda x: values[x.args[0]] if x.op == "given" else None, {})


def bind_operands(
    traced: Traced, arguments: tuple[Operand, ...], usual: np.dtype[Any], *, ends: bool, sums: Expr | None = None
) -> Step:
    """The expressions as a kernel takes them: arguments first, then captured operands, then results.

    With `ends` they are the epilogue of a product: the first result is C, and `sums`, an expression of the arguments,
    takes the place of the product's sums.
    """
    first = len(arguments)

    def change(x: Expr) -> Expr | None:
        if x.op == "load":
            return load(x.args[0] + first, (*arguments, *traced.operands)[x.args[0] + first].dtype)
        if x.op == "acc":
            return sums
        return load(x.args[0], arguments[x.args[0]].dtype) if x.op == "given" else None

    done: dict[Expr, Expr] = {}
    values = [substituted(x, change, done) for x, _ in traced.results]
    values = [unmasked(x) for x in values]
    types = result_types(traced, usual)
    values = [_converted(x, t) for x, t in zip(values, types, strict=True)]
    operands = [*arguments, *traced.operands]
    along = varies(ordered(tuple(values)), tuple(operands))
    results, axes = [], []
    for i, x in enumerate(values):
        is_product = ends and i == 0
        down_only = "m" not in along[x] and any(y.op == "fold" for y in ordered((x,)))
        axes.append(PRODUCT if is_product else f"b{'' if down_only else 'm'}{'n' if 'n' in along[x] else ''}")
        results.append((C if is_product else len(operands), x))
        if not is_product:
            operands.append(Operand(numpy_arrays.name_of(types[i]), axes[i]))
    text = spelled(Fused(tuple(operands), tuple(results)))
    return Step(traced, text, first, types, tuple(axes), "n" in along[values[0]] or not along[values[0]])


def _converted(x: Expr, dtype: np.dtype[Any]) -> Expr:
    """A value converted for a result of some type."""
    if dtype == np.int32:
        return rounded(x) if x.dtype == "f32" else x
    return real(x)


def typed(traced: Traced, first: np.dtype[Any] | None) -> Traced:
    """The traced function with a type for its first result, unless `cast` set one."""
    (x, cast_to), *rest = traced.results
    return traced if first is None or cast_to is not None else replace(traced, results=((x, first), *rest))


def unmasked(x: Expr) -> Expr:
    """A value that kernels can write: of a mask, 1 or 0."""
    return node("select", (x, const(1.0), const(0.0)), "f32") if x.dtype == "mask" else x


_ready = Memory(MOST_KINDS, "calls")


@dataclass(slots=True)
class UserFunction:
    """A user's function at one call.

    Attributes:
        function: the function.
        closure: the arrays and numbers that it captures, by their keys.
        lasting: later calls take the same kernel.
        way: the kernel with the guards on what the function captures, where it is lasting.
    """

    function: Callable[..., Any]
    closure: dict[Any, Any] = field(default_factory=dict)
    lasting: bool = True
    way: Way | None = None

    def ready(self, key: tuple[Any, ...], make: Callable[[Traced], Any], values: tuple[Any, ...], rank: int) -> Any:
        """The kernel of the function for a kind of call, from the memo or by `make`."""
        key = (code_of(self.function), key, config.current(), config.limit())
        way, captured = find(_ready, key, self.function)
        if way is not None:
            self.closure, self.lasting, self.way = captured, True, way
            return way.result
        by_value = captured is not None
        try:
            traced, elements, captures = trace(self.function, values, by_value=by_value, rank=rank)
        except TraceError:
            by_value = True
            traced, elements, captures = trace(self.function, values, by_value=by_value, rank=rank)
        self.closure, self.lasting = elements.captured, elements.lasting
        kernel = make(traced)
        self.lasting &= getattr(kernel, "lasting", True)
        if self.lasting:
            self.way = Way(captures.finished(), kernel)
            remember(_ready, key, self.way, self.function, by_value=by_value)
        return kernel

    def known(self, key: tuple[Any, ...]) -> Any:
        """The kernel of the function for a kind of call, from the memo, or None."""
        way, captured = find(_ready, (code_of(self.function), key, config.current(), config.limit()), self.function)
        self.closure = captured
        return None if way is None else way.result


def code_of(function: Any) -> Any:
    """The part that all functions of one kind share: no class of the user's, which the memo would keep alive."""
    own: Any = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return type(function) if own is None else own


_GONE = np.empty(0, np.float32)


class Bound:
    """The operands of a kernel: a table computed once for all calls of a kind.

    Args:
        traced: the function.
        size: rows, columns and items of a batch, and possibly heads, as operands see them.
        arguments: strides, along a batch, rows and columns, of the operands before the captured ones.
        results: those of the operands after them.
    """

    def __init__(
        self,
        traced: Traced,
        size: tuple[int, ...],
        arguments: list[tuple[int, ...]],
        results: list[tuple[int, ...]],
    ) -> None:
        self.size, self.first = size, len(arguments)
        if any(x.device for x in traced.sources):
            raise TypeError(
                "the function captures an array on a device, but its argument is in the host's memory; copy it"
            )
        # The memo must not keep arrays alive.
        self.traced = replace(traced, sources=tuple([replace(x, array=_GONE) for x in traced.sources]))
        named = [(x, zip(x.view, x.array.shape, strict=True)) for x in traced.sources]
        self.along = [(length, x.exact) for x, axes in named for name, length in axes if name == "m"]
        self.converts = [i for i, x in enumerate(traced.sources) if native(x.array) is not x.array]
        rows = [located(native(x.array), x, size) for x in traced.sources]
        self.template = np.array(
            [_row(x) for x in arguments] + rows + [_row(x) for x in results] or [_row(())], np.int64
        )
        self.none = np.zeros(1, np.float32)

    def served(self, rows: tuple[int, int]) -> tuple[int, int]:
        """The range of rows for which operands of these layouts are long enough, within a range of rows."""
        if any(exact for _, exact in self.along):
            return self.size[0], self.size[0]
        return rows[0], min([rows[1], *[length for length, _ in self.along]])

    def apart(self, to: Array, view: tuple[str, ...], captured: dict[Any, Any]) -> bool:
        """Whether these share no memory with a result along `view`, or the very elements that they are read for."""
        same = (to.__array_interface__["data"], to.shape, to.strides, view)
        for source in self.traced.sources:
            x = resolve(source.key, captured)
            if np.may_share_memory(to, x) and (x.__array_interface__["data"], x.shape, x.strides, source.view) != same:
                return False
        return True

    def fill(self, captured: dict[Any, Any], before: Sequence[Any], after: list[Any]) -> tuple[Any, ...]:
        """The last arguments of `execute`: the table of a call, its numbers, and the arrays of its rows."""
        traced, table, numbers = self.traced, self.template, self.none
        arrays_ = [captured[x.key] if x.key in captured else resolve(x.key, captured) for x in traced.sources]
        if self.converts:
            arrays_, table = [native(x) for x in arrays_], table.copy()
            for i in self.converts:
                table[self.first + i] = located(arrays_[i], traced.sources[i], self.size)
        if traced.numbers:
            numbers = np.array([resolve(x, captured) for x in traced.numbers], np.float32)
        return (table, numbers, *before, *arrays_, *after)


def _row(strides: tuple[int, ...]) -> tuple[int, ...]:
    """A row of the table: an address of 0, filled in by each call, and strides, padded with zeros."""
    return (0, *strides, *(0,) * (len(AXES) - len(strides)))


def located(x: Array, source: Source, size: tuple[int, ...]) -> tuple[int, ...]:
    """The offset of an operand's first element, in bytes, and its strides, in elements.

    Raises:
        ValueError: the array is shorter than the result.
    """
    extents, at, strides = dict(zip("mnbh", size, strict=False)), 0, dict.fromkeys(AXES, 0)
    for axis, length, step in zip(source.view, x.shape, x.strides, strict=True):
        if isinstance(axis, int):
            if not -length <= axis < length:
                raise ValueError(f"an operand of shape {x.shape} is indexed by {axis}")
            at += (axis % length) * step
        elif axis:
            extent = extents[axis]
            if length < extent or (source.exact and length != extent):
                raise ValueError(
                    f"an operand of shape {x.shape} does not fit: {axis} needs {extent}, its axis has {length}"
                )
            strides[axis] += step // x.itemsize
    return (at, *strides.values())


def dense(axes: str, size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Strides of a dense result along a batch, rows and columns."""
    m, n, _ = size
    columns, rows = n if "n" in axes else 1, m if "m" in axes else 1
    return rows * columns, columns if "m" in axes else 0, 1 if "n" in axes else 0


def bind_rows(
    there: Any, traced: Traced, views: list[Any], columns: tuple[Operand, ...], usual: np.dtype[Any]
) -> tuple[Step, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The expressions of a function over rows of arrays, and the shapes and strides of its results.

    Args:
        there: has the `lead` dimensions of the arrays, and `size`.
        traced: the function.
        views: the arrays, or stand-ins.
        columns: operands after these.
        usual: type of results without a `cast`.
    """
    step = bind_operands(traced, (*[described(x, ("b", "m", "n")) for x in views], *columns), usual, ends=False)
    m, n, _ = there.size
    shapes = [(*there.lead, m if "m" in x else 1, n if "n" in x else 1) for x in step.axes]
    return step, shapes, [dense(x, there.size) for x in step.axes]


def split_column_reductions(
    traced: Traced, first: int, usual: np.dtype[Any]
) -> tuple[Traced, Traced, tuple[int, ...], int] | None:
    """The function split in two, the reductions of columns and the rest; None where no column is reduced.

    The two come with the index of each result, among those of the first function or, counted down from -1, among the
    rest, and with the number of reductions, which are arguments of the rest after the `first` ones.

    Raises:
        TraceError: columns are reduced of values that are reduced along rows.
    """
    steps = ordered(tuple(x for x, _ in traced.results))
    reductions = [x for x in steps if x.op == "fold"]
    if not reductions:
        return None
    if any(y.op == "reduce" for x in reductions for y in ordered(x.inner)):
        raise TraceError("columns of values that are reduced along rows cannot be reduced in kernels: take two steps")
    along = varies(steps, traced.operands)
    whole: dict[Expr, Expr] = {}

    def change(x: Expr) -> Expr | None:
        if x.dtype != "f32" or "m" in along[x] or not any(y.op == "fold" for y in ordered((x,))):
            return None
        return whole.setdefault(x, argument(first + len(whole), "f32"))

    done: dict[Expr, Expr] = {}
    results = [(substituted(x, change, done), dtype) for x, dtype in traced.results]
    sums = [(x, np.dtype(np.float32)) for x in whole]
    order: list[int] = []
    rest: list[tuple[Expr, Any]] = []
    for x, (new, dtype) in zip(traced.results, results, strict=True):
        if x[0] in whole:  # a result by itself
            order.append(len(sums))
            sums.append((x[0], usual if dtype is None else dtype))
        else:
            order.append(-1 - len(rest))
            rest.append((new, dtype))
    return replace(traced, results=tuple(sums)), replace(traced, results=tuple(rest)), tuple(order), len(whole)
