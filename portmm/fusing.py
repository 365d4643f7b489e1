"""Products with what surrounds them: prologues, an epilogue, rows on their own.

Owns `matmul`'s way from functions to kernels, and `rows`, element-wise functions and
reductions without a product. Imports `api`, `arrays`, `call`, `dispatch`, `fused`,
`trace`. What the sums become is part of the product's kernel, unless it takes a
reduction along rows: then a second kernel goes over them. A prologue goes over its
operand first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm import api, arrays, settings
from portmm.dtype import BY_NAME
from portmm.errors import BuildError, TraceError
from portmm.expr import Expr, const, node, ordered, rounded
from portmm.fused import AXES, PRODUCT, C, Fused, Operand, load, parse, varies
from portmm.fused import given as of_given
from portmm.run.host import runtime
from portmm.trace import Indices, Traced, arity, described, element, lies, resolve, surroundings, trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.trace import Source

Array = np.ndarray[Any, Any]
MOST_KINDS = 1024
"""Kinds of calls remembered before starting afresh."""
WRITTEN = ("f32", "f16", "bf16", "s8", "u8", "s32")
"""Types that results may have."""
BYTES_PER_SECOND = 8e9
"""At least what a core moves: rows that one moves in less than FORK are left to it."""
FORK = 20e-6


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel over rows, or the end of a product.

    Attributes:
        traced: the function.
        text: the expressions, results numbered after what is read.
        first: operands that come before those that the function captures: values that it is given.
        types: of the results.
        axes: of the results.
    """

    traced: Traced
    text: str
    first: int
    types: tuple[np.dtype[Any], ...]
    axes: tuple[str, ...]

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
            np.dtype(asked)
            if asked is not None
            else np.dtype(np.uint8 if x.dtype == "mask" else np.int32)
            if x.dtype != "f32"
            else usual
        )
        if arrays.name_of(wanted) not in WRITTEN or (x.dtype == "s32" and wanted != np.int32):
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
    values = [rounded(x) if x.dtype == "f32" and t == np.int32 else x for x, t in zip(values, types, strict=True)]
    operands = [*given, *traced.operands]
    along = varies(ordered(tuple(values)), tuple(operands))
    results, axes = [], []
    for i, x in enumerate(values):
        whole = ends and i == 0
        down_only = "m" not in along[x] and any(y.op == "fold" for y in ordered((x,)))
        axes.append(PRODUCT if whole or "n" in along[x] else "bm")
        if down_only:
            axes[-1] = "bn" if "n" in along[x] else "b"
        results.append((C if whole else len(operands), x))
        if not whole:
            operands.append(Operand(arrays.name_of(types[i]), axes[i]))
    return Step(traced, str(Fused(tuple(operands), tuple(results))), first, types, tuple(axes))


def _one_or_none() -> tuple[Expr, Expr]:
    return const(1.0), const(0.0)


_ready: dict[Any, Any] = {}


def remember(key: Any, made: Any) -> Any:
    """Keep what was made for a kind of call, unless the kind is None."""
    if key is not None:
        if len(_ready) >= MOST_KINDS:
            _ready.clear()
        _ready[key] = made
    return made


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
        whole = None if self.kind is None else (self.kind, key, settings.current(), settings.limit())
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
            self.found.update({x.key: x.array for x in traced.sources} | dict(traced.values))
        return remember(whole if lasting else None, make(traced))

    def numbers(self) -> tuple[float, ...]:
        """The numbers that it captures."""
        return tuple([float(x) for x in self.found.values() if not isinstance(x, np.ndarray)])


BY_VALUE = object()
"""In place of a kernel: the function looks at numbers that it captures."""


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
        self.traced, self.size, self.first = traced, size, len(given)
        self.converts = [i for i, x in enumerate(traced.sources) if _native(x.array) is not x.array]
        rows = [located(_native(x.array), x, size) for x in traced.sources]
        self.template = np.array([_row(x) for x in given] + rows + [_row(x) for x in results] or [_row(())], np.int64)
        self.none = np.zeros(1, np.float32)

    def fill(self, found: dict[Any, Any], before: list[Any], after: list[Any]) -> tuple[Array, Array, Any]:
        """The table of a call, its numbers, and what must live as long."""
        traced, table, alive = self.traced, self.template.copy(), None
        arrays_ = [found[x.key] if x.key in found else resolve(x.key, found) for x in traced.sources]
        if self.converts:
            alive = [_native(x) for x in arrays_]
            for i in self.converts:
                table[self.first + i] = located(alive[i], traced.sources[i], self.size)
            arrays_ = alive
        everything = [*before, *arrays_, *after]
        if everything:
            table[:, 0] += [x.__array_interface__["data"][0] for x in everything]
        if not traced.numbers:
            return table, self.none, alive
        return table, np.array([resolve(x, found) for x in traced.numbers], np.float32), alive


def _row(strides: tuple[int, ...]) -> tuple[int, ...]:
    """An address to come, and strides, 0 where there are no more."""
    return (0, *strides, *(0,) * (len(AXES) - len(strides)))


def _native(x: Array) -> Array:
    """An operand that kernels can read."""
    if lies(x):
        return x
    if x.dtype.kind in "iu" and x.size and x.dtype.itemsize > 4 and (x.min() < -(2**31) or x.max() >= 2**31):
        raise ValueError("an operand of int64 has values beyond int32, which expressions compute with")
    return x.astype(arrays.numpy_of(element(x.dtype)[0]), order="C")


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


@lru_cache(maxsize=64)
def _leaves(types: tuple[str, ...], names: tuple[tuple[str, str], ...]) -> tuple[Any, ...]:
    """What a function is given in place of arrays of these types, and the indices."""
    return (*(of_given(i, x) for i, x in enumerate(types)), Indices(dict(names)))


class _Numbers:
    """The places of all elements of arrays of a shape (..., m, n), as `Indices` has those of one."""

    def __init__(self, shape: tuple[int, ...], names: dict[str, str]) -> None:
        *lead, m, n = shape
        batch = np.arange(math.prod(lead)).reshape(*lead, 1, 1)
        every = {"b": batch, "m": np.arange(m)[:, None], "n": np.arange(n)[None, :]}
        for name, axis in names.items():
            setattr(self, name, every[axis])


def by_numpy(
    function: Callable[..., Any], given: tuple[Array, ...], names: dict[str, str], usual: np.dtype[Any]
) -> tuple[tuple[Array, ...], bool]:
    """What `over_rows` gives, computed with NumPy in float32."""
    shape = given[0].shape
    values = [x.astype(np.float32) if element(x.dtype)[0] != "s32" else x for x in given]
    both = (*values, _Numbers(shape, names))
    found = function(*both[: arity(function, len(both))])
    results = []
    for x in found if isinstance(found, tuple) else (found,):
        made = np.asarray(x)
        made = made.astype(usual) if made.dtype.kind == "f" and made.dtype.itemsize >= BY_NAME["f32"].bytes else made
        wide = shape[-1] if made.ndim and made.shape[-1] != 1 else 1
        results.append(np.ascontiguousarray(np.broadcast_to(made, (*shape[:-1], wide))))
    return tuple(results), isinstance(found, tuple)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A kernel over rows for one kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        size: rows, columns, items of a batch.
        results: shapes and types.
        several: the function gives a tuple.
        order: of a kernel that reduces columns, where the function's results are: see `down`.
        passed: how many of its results the next kernel is given.
    """

    route: Any
    bound: Bound
    size: tuple[int, int, int]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    several: bool
    order: tuple[int, ...] | None = None
    passed: int = 0

    def run(self, found: dict[Any, Any], values: list[Array], out: Any) -> list[Array]:
        """The results, of which the first is `out` if that is given."""
        results = [np.empty(s, t) for s, t in self.results]
        if out is not None:
            results[0] = out
        operands, numbers, alive = self.bound.fill(found, values, results)
        m, n, batch = self.size
        if m and batch:
            runtime().execute(
                self.route, m, n, 1, batch, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, *_NOTHING, operands, numbers
            )
        del alive
        return results


_NOTHING = (None,) * 7


def over_rows(
    function: Callable[..., Any], given: tuple[Array, ...], names: dict[str, str], out: Any = None, dtype: Any = None
) -> tuple[tuple[Array, ...], bool]:
    """A function of values in arrays of one shape, element by element, with reductions along the last axis.

    Args:
        function: takes a value for each array, and the indices.
        given: arrays of one shape, (..., m, n).
        names: what the function calls the axes -> axes.
        out: where to put the one result, dense and of its type.
        dtype: type of results that no `cast` gives one, by default that of the first array.

    Returns:
        The results, and whether the function gave a tuple of them.
    """
    *lead, m, n = given[0].shape
    size = (m, n, math.prod(lead))
    values = [_native(x.reshape(size[2], m, n)) for x in given]
    usual = np.dtype(dtype) if dtype is not None else given[0].dtype.newbyteorder("=")
    around = Around.of(function)
    key = ("rows", tuple([(x.shape, x.strides, x.dtype) for x in values]), len(lead), usual, tuple(names))

    views = tuple([described(x, ("b", "m", "n")) for x in values])
    strides = [tuple([s // x.itemsize for s in x.strides]) for x in values]

    def make(traced: Traced) -> tuple[_Rows, ...]:
        api.begin()
        split = down(traced, len(values), usual)
        if split is None:
            return (_rows(traced, size, views, strides, usual, lead),)
        first, rest, order, passed = split
        kernel = replace(_rows(first, size, views, strides, usual, lead), order=order, passed=passed)
        if not rest.results:
            return (kernel,)
        sums, lines = (Operand("f32", "bn"),) * passed, [dense("bn", size)] * passed
        return kernel, _rows(rest, size, (*views, *sums), [*strides, *lines], usual, lead)

    leaves = _leaves(tuple([element(x.dtype)[0] for x in values]), tuple(names.items()))
    try:
        ready: tuple[_Rows, ...] = around.ready(key, make, leaves, 3 if lead else 2)
    except BuildError as error:
        api.fall_back(error)
        return by_numpy(function, given, names, usual)
    first = ready[0]
    if first.order is None:
        return tuple(first.run(around.found, values, out)), first.several
    if not m:  # a kernel of no rows does nothing
        return by_numpy(function, given, names, usual)
    sums = first.run(around.found, values, None)
    rest = ready[1].run(around.found, values + sums[: first.passed], None) if len(ready) > 1 else []
    results = [sums[i] if i >= 0 else rest[-1 - i] for i in first.order]
    if out is not None:
        np.copyto(out, results[0])
        results[0] = out
    return tuple(results), first.several


def _rows(  # noqa: PLR0917 - what they read is three of them
    traced: Traced,
    size: tuple[int, int, int],
    views: tuple[Operand, ...],
    strides: list[tuple[int, ...]],
    usual: np.dtype[Any],
    lead: list[int],
) -> _Rows:
    """The kernel of a function over rows, or of sums down columns."""
    from portmm import dispatch

    m, n, _ = size
    step = settle(traced, views, usual, ends=False)
    bytes_ = math.prod(size) * 4 * len(step.fused.operands)
    workers = settings.get_num_threads() if bytes_ > FORK * BYTES_PER_SECOND else 1
    route = dispatch.rows_route(step.text, size, settings.target(), workers)
    bound = Bound(traced, size, strides, [dense(x, size) for x in step.axes])
    shapes = [(*lead, m if "m" in x else 1, n if "n" in x else 1) for x in step.axes]
    return _Rows(route, bound, size, tuple(zip(shapes, step.types, strict=True)), traced.several)


def down(traced: Traced, given: int, usual: np.dtype[Any]) -> tuple[Traced, Traced, tuple[int, ...], int] | None:
    """What is to be known of whole columns first, and the rest, which is given it; None where there is nothing.

    Then come the places of the results among those of the first, or, counted down from -1, among the rest; and
    how many of the first are given to the rest.

    Raises:
        TraceError: columns are reduced of what is reduced along rows.
    """
    steps = ordered(tuple(x for x, _ in traced.results))
    folds = [x for x in steps if x.op == "fold"]
    if not folds:
        return None
    if any(y.op == "reduce" for x in folds for y in ordered((x,))):
        raise TraceError("columns of what is reduced along rows cannot be reduced in kernels: take two steps")
    along = varies(steps, traced.operands)
    whole: dict[Expr, Expr] = {}

    def change(x: Expr) -> Expr | None:
        if x.dtype != "f32" or "m" in along[x] or not any(y.op == "fold" for y in ordered((x,))):
            return None
        return whole.setdefault(x, of_given(given + len(whole), "f32"))

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
