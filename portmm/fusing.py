"""Products with what surrounds them: prologues, an epilogue, rows on their own.

Owns `matmul`'s way from functions to kernels, and `rows`, element-wise functions and
reductions without a product. Imports `api`, `arrays`, `call`, `dispatch`, `fused`,
`trace`. What the sums become is part of the product's kernel, unless it takes a
reduction along rows: then a second kernel goes over them. A prologue goes over its
operand first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm import api, arrays, settings
from portmm.errors import BuildError, ScheduleError, TraceError
from portmm.expr import Expr, const, node, ordered
from portmm.fused import AXES, C, Fused, Operand, load, parse, varies
from portmm.fused import given as of_given
from portmm.run.host import runtime
from portmm.trace import Indices, Traced, described, element, resolve, surroundings, trace

if TYPE_CHECKING:
    from collections.abc import Callable

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
    operands = [*given, *traced.operands]
    along = varies(ordered(tuple(values)), tuple(operands))
    results, axes = [], []
    for i, x in enumerate(values):
        whole = ends and i == 0
        axes.append(AXES if whole or "n" in along[x] else "bm")
        results.append((C if whole else len(operands), x))
        if not whole:
            operands.append(Operand(arrays.name_of(types[i]), axes[i]))
    return Step(traced, str(Fused(tuple(operands), tuple(results))), first, types, tuple(axes))


def _one_or_none() -> tuple[Expr, Expr]:
    return const(1.0), const(0.0)


@dataclass(frozen=True, slots=True)
class Ready:
    """A kernel over rows for one kind of call.

    Attributes:
        step: its expressions.
        route: the kernel.
        size: rows, columns, items of a batch.
        shapes: of the results.
        known: `step.traced` holds for other calls of this kind.
    """

    step: Step
    route: Any
    size: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], ...]


_ready: dict[Any, Any] = {}


def remembered(key: Any, make: Callable[[], Any]) -> Any:
    """What `make` makes for a kind of call, made once; of a key of None, each time."""
    if key is None:
        return make()
    found = _ready.get(key)
    if found is None:
        found = make()
        if len(_ready) >= MOST_KINDS:
            _ready.clear()
        _ready[key] = found
    return found


def traced(function: Callable[..., Any], values: tuple[Any, ...], rank: int) -> tuple[Traced, Any, dict[Any, Any]]:
    """A function's expressions, a key for its kind of surroundings or None, and what these are now."""
    kind, found, known = surroundings(function)
    names = tuple((x.args, x.dtype) if isinstance(x, Expr) else x.kind for x in values)
    numbers = tuple(float(x) for x in found.values() if not isinstance(x, np.ndarray))
    for by_value in (False, True):
        key = ("trace", kind, names, rank, numbers if by_value else None)
        if known and key in _ready:
            made = _ready[key]
            if made is None:
                continue
            return made, key, found
        try:
            made, lasting = trace(function, values, by_value=by_value, rank=rank)
        except TraceError:
            if by_value or not numbers:
                raise
            if known:
                remembered(key, lambda: None)
                _ready[key] = None
            continue
        if known and lasting:
            remembered(key, lambda made=made: made)
            return made, key, found
        return made, None, {x.key: x.array for x in made.sources} | {k: found[k] for k in made.numbers}
    raise AssertionError  # the second way returns or raises


def table(
    step: Step,
    given: list[tuple[int, ...]],
    found: dict[Any, Any],
    size: tuple[int, int, int],
    results: list[Array],
    *,
    joined: int = 0,
) -> tuple[Array, Array, list[Array]]:
    """The operands and numbers of a call, as the argument block has them, and arrays that must live as long.

    `joined` rows make an item of a batch whose items are all rows of one product.
    """
    rows, alive = list(given), []
    m, n, batch = size
    for source in step.traced.sources:
        array = _native(resolve(source.key, found))
        alive.append(array)
        rows.append(_located(array, source, (joined, n, m // joined) if joined else size))
    for x, axes in zip(results, step.axes[len(step.axes) - len(results) :], strict=True):
        rows.append((x.__array_interface__["data"][0], *_dense(axes, size)))
    numbers = np.array([resolve(key, found) for key in step.traced.numbers] or [0], np.float32)
    return np.array(rows, np.int64).reshape(len(rows), 1 + len(AXES)), numbers, alive


def _dense(axes: str, size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Strides of a dense result along a batch, rows and columns."""
    m, n, _ = size
    width = n if "n" in axes else 1
    return m * width, width, 1 if "n" in axes else 0


def _native(x: Array) -> Array:
    """An operand that kernels can read."""
    kind, as_it_is = element(x.dtype)
    if as_it_is and x.flags.aligned and not any([s % x.itemsize for s in x.strides]):
        return x if x.dtype.kind != "b" else x.view(np.uint8)
    if x.dtype.kind in "iu" and x.size and x.dtype.itemsize > 4 and (x.min() < -(2**31) or x.max() >= 2**31):
        raise ValueError("an operand of int64 has values beyond int32, which expressions compute with")
    return x.astype(arrays.numpy_of(kind))


def _located(x: Array, source: Any, size: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Where an operand lies, and its strides along a batch, rows and columns, in elements."""
    m, n, batch = size
    extents = {"b": batch, "m": m, "n": n}
    at, strides = int(x.__array_interface__["data"][0]), dict.fromkeys(AXES, 0)
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


def over_rows(
    function: Callable[..., Any], given: tuple[Array, ...], names: dict[str, str], out: Any = None, dtype: Any = None
) -> tuple[Array, ...]:
    """A function of values in arrays of one shape, element by element, with reductions along the last axis.

    Args:
        function: takes a value for each array, and the indices.
        given: arrays of one shape, (..., m, n).
        names: what the function calls the axes -> axes.
        out: where to put the one result, dense and of its type.
        dtype: type of results that no `cast` gives one, by default that of the first array.
    """
    *lead, m, n = given[0].shape
    size = (m, n, int(np.prod(lead)))
    usual = np.dtype(dtype) if dtype is not None else given[0].dtype.newbyteorder("=")
    values = [_native(x.reshape(size[2], m, n)) for x in given]
    views = tuple(described(x, ("b", "m", "n")) for x in values)
    leaves = tuple(of_given(i, x.dtype) for i, x in enumerate(views))
    made, kind, found = traced(function, (*leaves, Indices(names)), 3 if lead else 2)
    key = kind and (kind, size, tuple(lead), views, usual, settings.current(), settings.limit())

    def make() -> Ready:
        step = settle(made, views, usual, ends=False)
        bytes_ = m * n * size[2] * 4 * len(step.fused.operands)
        workers = settings.get_num_threads() if bytes_ > FORK * BYTES_PER_SECOND else 1
        from portmm import dispatch

        api.begin()
        route = dispatch.rows_route(step.text, size, settings.target(), workers)
        shapes = tuple((*lead, m, n if "n" in axes else 1) for axes in step.axes)
        return Ready(step, route, size, shapes)

    ready: Ready = remembered(key, make)
    results = [np.empty(s, t) for s, t in zip(ready.shapes, ready.step.types, strict=True)]
    if out is not None:
        results[0] = out
    rows = [(int(x.__array_interface__["data"][0]), *(s // x.itemsize for s in x.strides)) for x in values]
    operands, numbers, alive = table(replace(ready.step, traced=made), rows, found, size, results)
    if 0 not in size:
        runtime().execute(
            ready.route, m, n, 1, size[2], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, None, None, None, None, None, None, None, operands, numbers
        )  # fmt: skip
    del alive
    return tuple(results)
