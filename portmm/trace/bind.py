"""From a traced function to what a kernel takes: expressions, and a table of operands.

Owns `settle`, which numbers operands and results, `Bound`, which lays them out once for
all calls of a kind, and `Around`, which remembers what was made of a function. Imports
`arrays.numpy_arrays`, `spec.epilogue`, `util.memo`, `dispatch.config`, `trace.tracer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.dispatch import config
from portmm.errors import TraceError
from portmm.runtime.cpu import runtime
from portmm.spec.epilogue import AXES, PRODUCT, C, Fused, Operand, load, parse, varies
from portmm.spec.expr import Expr, const, node, ordered, real, rounded
from portmm.trace.closures import resolve, surroundings
from portmm.trace.tracer import Traced, element, lies, trace
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.trace.tracer import Source

Array = np.ndarray[Any, Any]
MOST_KINDS = 1024
"""Kinds of calls remembered before starting afresh."""
WRITTEN = ("f32", "f16", "bf16", "e4m3", "e5m2", "s8", "u8", "s32")
"""Types that results may have."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel over rows, or the end of a product.

    Attributes:
        traced: the function.
        text: the expressions, results numbered after what is read.
        first: operands that come before those that the function captures: values that it is given.
        types: of the results.
        axes: of the results.
        wide: the first varies along a row, or is the same everywhere.
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
    """The type of each result: as `cast` said, else the usual one.

    Raises:
        TraceError: kernels do not write it.
    """
    found = []
    for x, asked in traced.results:
        wanted = (
            np.dtype(asked).newbyteorder("=")
            if asked is not None
            else np.dtype(np.uint8 if x.dtype == "mask" else np.int32)
            if x.dtype != "f32"
            else usual
        )
        if numpy_arrays.name_of(wanted) not in WRITTEN:
            raise TraceError(f"a result of {wanted} cannot be written; cast it to one of {', '.join(WRITTEN)}")
        found.append(wanted)
    return tuple(found)


def substituted(root: Expr, change: Callable[[Expr], Expr | None], done: dict[Expr, Expr]) -> Expr:
    """An expression with some of its parts replaced."""
    if root not in done:
        new = change(root)
        if new is None:
            args = tuple(substituted(y, change, done) if isinstance(y, Expr) else y for y in root.args)
            new = root if all(x is y for x, y in zip(args, root.args, strict=True)) else node(root.op, args, root.dtype)
        done[root] = new
    return done[root]


def filled(template: Expr, values: list[Any]) -> Expr:
    """An expression of values given, of these."""
    return substituted(template, lambda x: values[x.args[0]] if x.op == "given" else None, {})


def settle(traced: Traced, given: tuple[Operand, ...], usual: np.dtype[Any], *, ends: bool) -> Step:
    """The expressions as a kernel takes them: values given first, then operands, then results.

    With `ends` they are the end of a product: the first result is C.
    """
    first = len(given)

    def change(x: Expr) -> Expr | None:
        if x.op == "load":
            return load(x.args[0] + first, (*given, *traced.operands)[x.args[0] + first].dtype)
        return load(x.args[0], given[x.args[0]].dtype) if x.op == "given" else None

    done: dict[Expr, Expr] = {}
    values = [substituted(x, change, done) for x, _ in traced.results]
    values = [node("select", (x, *_one_or_none()), "f32") if x.dtype == "mask" else x for x in values]
    types = result_types(traced, usual)
    values = [_converted(x, t) for x, t in zip(values, types, strict=True)]
    operands = [*given, *traced.operands]
    along = varies(ordered(tuple(values)), tuple(operands))
    results, axes = [], []
    for i, x in enumerate(values):
        whole = ends and i == 0
        down_only = "m" not in along[x] and any(y.op == "fold" for y in ordered((x,)))
        axes.append(PRODUCT if whole else f"b{'' if down_only else 'm'}{'n' if 'n' in along[x] else ''}")
        results.append((C if whole else len(operands), x))
        if not whole:
            operands.append(Operand(numpy_arrays.name_of(types[i]), axes[i]))
    text = str(Fused(tuple(operands), tuple(results)))
    return Step(traced, text, first, types, tuple(axes), "n" in along[values[0]] or not along[values[0]])


def _converted(x: Expr, dtype: np.dtype[Any]) -> Expr:
    """A value as a result of some type takes it."""
    if dtype == np.int32:
        return rounded(x) if x.dtype == "f32" else x
    return real(x)


def typed(traced: Traced, first: np.dtype[Any] | None) -> Traced:
    """The same with a type for the first result, where nobody asked for one."""
    (x, asked), *rest = traced.results
    return traced if first is None or asked is not None else replace(traced, results=((x, first), *rest))


def _one_or_none() -> tuple[Expr, Expr]:
    return const(1.0), const(0.0)


_ready = Memory(MOST_KINDS)


def remember(key: Any, made: Any) -> Any:
    """Keep what was made for a kind of call, unless the kind is None."""
    return made if key is None else _ready.keep(key, made)


@dataclass(slots=True)
class Around:
    """A function, seen at one call.

    Attributes:
        function: the function.
        kind: of what it captures; None if that cannot be told.
        found: the arrays and numbers that it captures.
        lasting: the next function of this kind comes to the same.
    """

    function: Callable[..., Any]
    kind: Any
    found: dict[Any, Any]
    lasting: bool = True

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Around:
        """What a function captures now."""
        kind, found, known = surroundings(function)
        return cls(function, kind if known else None, found)

    def ready(self, key: tuple[Any, ...], make: Callable[[Traced], Any], values: tuple[Any, ...], rank: int) -> Any:
        """What was, or is now, made of the function for a kind of call."""
        whole = None if self.kind is None else (self.kind, key, config.current(), config.limit())
        found = _ready.get(whole) if whole is not None else None
        known = found is BY_VALUE
        found = _ready.get((whole, self.numbers())) if known else found
        if found is not None:
            return found
        by_value = known
        try:
            traced, lasting = trace(self.function, values, by_value=by_value, rank=rank)
        except TraceError:
            by_value = True
            traced, lasting = trace(self.function, values, by_value=by_value, rank=rank)
        if by_value and lasting:
            remember(whole, BY_VALUE)
            whole = None if whole is None else (whole, self.numbers())  # type: ignore[assignment]
        self.lasting = lasting
        if not lasting:
            self.found.update({x.key: x.there if x.device else x.array for x in traced.sources} | dict(traced.values))
        return remember(whole if lasting else None, make(traced))

    def numbers(self) -> tuple[str, ...]:
        """The numbers that it captures, told apart by their bits."""
        return tuple([float(x).hex() for x in self.found.values() if isinstance(x, (float, np.floating))])


BY_VALUE = object()
"""In place of a kernel: the function looks at numbers that it captures."""


_GONE = np.empty(0, np.float32)


class Bound:
    """The operands of a kernel, laid out once for all calls of a kind.

    Args:
        traced: the function's.
        size: rows, columns and items of a batch, and maybe heads, as operands see them.
        given: strides, along a batch, rows and columns, of the operands that come before the function's.
        results: those of operands that come after.
    """

    def __init__(
        self,
        traced: Traced,
        size: tuple[int, ...],
        given: list[tuple[int, ...]],
        results: list[tuple[int, ...]],
    ) -> None:
        self.size, self.first = size, len(given)
        if any(x.device for x in traced.sources):
            raise TypeError(
                "the function captures an array on a device, and is given one in the host's memory; copy it"
            )
        # What is remembered must not keep arrays alive.
        self.traced = replace(traced, sources=tuple([replace(x, array=_GONE) for x in traced.sources]))
        named = [(x, zip(x.view, x.array.shape, strict=True)) for x in traced.sources]
        self.along = [(length, x.exact) for x, axes in named for name, length in axes if name == "m"]
        self.converts = [i for i, x in enumerate(traced.sources) if native(x.array) is not x.array]
        rows = [located(native(x.array), x, size) for x in traced.sources]
        self.template = np.array([_row(x) for x in given] + rows + [_row(x) for x in results] or [_row(())], np.int64)
        self.none = np.zeros(1, np.float32)

    def served(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Of rows from the least to the largest, those that operands laid out like these have: they may end before."""
        if any(exact for _, exact in self.along):
            return self.size[0], self.size[0]
        return rows[0], min([rows[1], *[length for length, _ in self.along]])

    def fill(self, found: dict[Any, Any], before: list[Any], after: list[Any]) -> tuple[Array, Array, Any]:
        """The table of a call, its numbers, and what must live as long."""
        traced, table, alive = self.traced, self.template.copy(), None
        arrays_ = [found[x.key] if x.key in found else resolve(x.key, found) for x in traced.sources]
        if self.converts:
            alive = [native(x) for x in arrays_]
            for i in self.converts:
                table[self.first + i] = located(alive[i], traced.sources[i], self.size)
            arrays_ = alive
        everything = [*before, *arrays_, *after]
        if everything:
            table[:, 0] += list(map(runtime().address, everything))
        if not traced.numbers:
            return table, self.none, alive
        return table, np.array([resolve(x, found) for x in traced.numbers], np.float32), alive


def _row(strides: tuple[int, ...]) -> tuple[int, ...]:
    """An address to come, and strides, 0 where there are no more."""
    return (0, *strides, *(0,) * (len(AXES) - len(strides)))


def native(x: Array) -> Array:
    """An operand that kernels can read."""
    if lies(x):
        return x
    if x.dtype.kind in "iu" and x.size and x.dtype.itemsize > 4 and (x.min() < -(2**31) or x.max() >= 2**31):
        raise ValueError("an operand of int64 has values beyond int32, which expressions compute with")
    return x.astype(numpy_arrays.numpy_of(element(x.dtype)[0]), order="C")


def located(x: Array, source: Source, size: tuple[int, ...]) -> tuple[int, ...]:
    """How far the first element of an operand lies from the array's, in bytes, and its strides, in elements.

    Raises:
        ValueError: the array does not reach as far as the result.
    """
    extents, at, strides = dict(zip("mnbh", size, strict=False)), 0, dict.fromkeys(AXES, 0)
    for axis, length, step in zip(source.view, x.shape, x.strides, strict=True):
        if isinstance(axis, int):
            if not -length <= axis < length:
                raise ValueError(f"an operand of shape {x.shape} is indexed by {axis}")
            at += (axis % length) * step
        elif axis:
            wanted = extents[axis]
            if length < wanted or (source.exact and length != wanted):
                raise ValueError(
                    f"an operand of shape {x.shape} does not fit: {axis} goes to {wanted}, its axis to {length}"
                )
            strides[axis] += step // x.itemsize
    return (at, *strides.values())


def dense(axes: str, size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Strides of a dense result along a batch, rows and columns."""
    m, n, _ = size
    width, height = n if "n" in axes else 1, m if "m" in axes else 1
    return height * width, width if "m" in axes else 0, 1 if "n" in axes else 0
