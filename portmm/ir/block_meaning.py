"""Meaning of block programs: what a record computes, tile by tile, on arrays.

Owns `run`, and `Reals`, the arithmetic of NumPy's floats. Values of a tile have a dimension for each label of the
program, of extent 1 where they do not vary. Expressions are in float32 and int32, as in kernels, and of float64
operands in float64; accumulators are in float64 and int64 between tiles, so that the extents of tiles change results by
roundings of float32 only. Another `Arithmetic` gives the same record a meaning over other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from portmm.ir.block_program import BlockProgram, Pass, TileGemm, TileReduce, TileTransfer
from portmm.spec.epilogue import REDUCTIONS, summed, varies
from portmm.spec.expr_ops import NUMPY, OPS

if TYPE_CHECKING:
    from portmm.spec.expr import Expr

Array = np.ndarray[Any, Any]
Tile = dict[str, range]
"""The part of each label that a tile has."""
Values = dict["Expr", Any]
Places = dict[tuple[Any, ...], tuple[Array, ...]]
"""Indices of the elements of operands in tiles."""
_WIDE = {"s32": np.int64, "f32": np.float64}
"""Type of expressions -> that of accumulators."""


class Arithmetic(Protocol):
    """Operations on the values of a tile, whose leading dimensions are its labels."""

    def element(self, array: Any, at: tuple[Array, ...], rank: int) -> Any:
        """Elements of an operand, as a value of `rank` dimensions."""

    def number(self, x: Any, dtype: str) -> Any:
        """A literal, an index or an argument as a value of a type of expressions."""

    def function(self, x: Expr) -> tuple[str, Expr] | None:
        """A function of one value that an expression spells out, by name, where the arithmetic has its own."""

    def apply(self, op: str, dtype: str, values: Sequence[Any]) -> Any:
        """The result of an operation of expressions or of a named function."""

    def start(self, kind: str, shape: list[int], dtype: str) -> Any:
        """An accumulator of sums ("add", or the label of a contraction) or maxima ("max"), before any tile."""

    def total(self, kind: str, dtype: str, terms: Sequence[Any], axis: int, extent: int) -> Any:
        """The sum or maximum of a value, or of the product of two, along an axis."""

    def together(self, kind: str, kept: Any, more: Any) -> Any:
        """An accumulator with the sum or maximum of a further tile."""

    def rescaled(self, kept: Any, before: Any, now: Any) -> Any:
        """An accumulator times exp(before - now)."""

    def read(self, state: Any, dtype: str) -> Any:
        """The value of an accumulator in expressions."""

    def store(self, array: Any, at: tuple[Array, ...], value: Any, shape: list[int]) -> None:
        """Store of a value, broadcast to a shape, to elements of an operand."""


class Reals:
    """The arithmetic of NumPy's floats: see `Arithmetic`.

    Args:
        real: type of expressions on floats.
    """

    def __init__(self, real: Any = np.float32) -> None:
        self.types = {**NUMPY, "f32": real}

    def element(self, array: Array, at: tuple[Array, ...], rank: int) -> Any:
        """Elements of an operand."""
        x = np.asarray(array[at])
        return x.reshape(x.shape or [1] * rank).astype(self.types["s32" if x.dtype == np.int32 else "f32"])

    def number(self, x: Any, dtype: str) -> Any:
        """A literal, an index or an argument."""
        return np.asarray(x, self.types[dtype])

    @staticmethod
    def function(_: Expr) -> None:
        """No function: expressions are as they are."""
        return

    def apply(self, op: str, dtype: str, values: Sequence[Any]) -> Any:
        """The result of an operation."""
        return np.asarray(OPS[op].plain(*values), self.types[dtype])

    @staticmethod
    def start(kind: str, shape: list[int], dtype: str) -> Any:
        """An accumulator before any tile."""
        return np.full(shape, REDUCTIONS.get(kind, 0), _WIDE[dtype])

    @staticmethod
    def total(kind: str, dtype: str, terms: Sequence[Any], axis: int, extent: int) -> Any:
        """The sum or maximum along an axis."""
        wide = [x.astype(_WIDE[dtype]) for x in terms]
        every = wide[0] * wide[1] if len(wide) > 1 else wide[0]
        shape = (*every.shape[:axis], extent, *every.shape[axis + 1 :])
        reduce = np.max if kind == "max" else np.sum
        return np.asarray(reduce(np.broadcast_to(every, shape), axis=axis, keepdims=True))

    @staticmethod
    def together(kind: str, kept: Any, more: Any) -> Any:
        """An accumulator with a further tile."""
        return np.maximum(kept, more) if kind == "max" else kept + more

    @staticmethod
    def rescaled(kept: Any, before: Any, now: Any) -> Any:
        """An accumulator times exp(before - now)."""
        return kept * np.exp(before - now, dtype=np.float64)

    def read(self, state: Any, dtype: str) -> Any:
        """The value of an accumulator."""
        return np.asarray(state, self.types[dtype])

    @staticmethod
    def store(array: Array, at: tuple[Array, ...], value: Any, shape: list[int]) -> None:
        """Store of a value, rounded to integers and limited where its operand has these."""
        if array.dtype.kind in "iu" and value.dtype.kind == "f":
            limits = np.iinfo(array.dtype)
            value = np.clip(np.rint(value), limits.min, limits.max)
        array[at or ...] = np.broadcast_to(value, shape).astype(array.dtype)


def run(
    program: BlockProgram,
    arrays: Sequence[Any],
    tiles: Mapping[str, int] | None = None,
    numbers: Sequence[float] = (),
    arithmetic: Arithmetic | None = None,
    *,
    nested: bool = False,
    **extents: int,
) -> None:
    """Compute a block program, writing to the arrays of its results.

    Args:
        program: the block program.
        arrays: one for each operand, its dimensions in the order of the operand's labels.
        tiles: extent of a tile along labels of the grid and the loop; the last one may be shorter. By default all.
        numbers: scalar arguments.
        arithmetic: the numbers that are computed with, by default `Reals`.
        nested: the grid is divided along one label after the other, the last part of each further: so few tiles have
            borders along each label.
        extents: of labels that no operand has.

    Raises:
        ValueError: shapes do not match.
    """
    for x, array in zip(program.operands, arrays, strict=True):
        if len(array.shape) != len(x.axes) or any(
            extents.setdefault(y, n) != n for y, n in zip(x.axes, array.shape, strict=True)
        ):
            raise ValueError(f"an array of shape {array.shape} for an operand along {x.axes}; others have {extents}")
    for label in filter(str.isupper, extents):
        if not extents[label] or extents[label.lower()] % extents[label]:
            raise ValueError(f"{extents[label.lower()]} of {label.lower()} in {extents[label]} equal blocks")
    if arithmetic is None:
        arithmetic = Reals(np.float64 if any(x.dtype == np.float64 for x in arrays) else np.float32)

    def parts(label: str) -> list[range]:
        n = extents[label]
        by = (tiles or {}).get(label, n) or 1
        return [range(at, min(at + by, n)) for at in range(0, n, by)]

    places: Places = {}
    source = {"number": numbers, "extent": extents}
    whole, grid = {x: range(n) for x, n in extents.items() if x.islower()}, [x for x in program.grid if x in extents]
    with np.errstate(all="ignore"):
        for here in (_nested if nested else product)(*map(parts, grid)):
            tile = whole | dict(zip(grid, here, strict=True))
            _Point(program, arrays, source, arithmetic, places).passes(tile, parts(program.loop))


def _nested(*labels: list[range]) -> Iterator[tuple[range, ...]]:
    """Tiles of a grid, of the parts of each label: whole along the labels after one, before which they are the last."""
    for i, parts in enumerate(labels):
        before, after = (x[-1] for x in labels[:i]), labels[i + 1 :]
        ends = (*before,), (*(range(x[0].start, x[-1].stop) for x in after),)
        yield from ((*ends[0], x, *ends[1]) for x in parts[:-1])
    yield tuple(x[-1] for x in labels)


def varying(program: BlockProgram) -> dict[Expr, frozenset[str]]:
    """The labels along which each expression of a program varies, which the program keeps."""
    known = program.__dict__
    if "varies" not in known:
        known["varies"] = varies(program.fused.steps, program.operands)
    axes: dict[Expr, frozenset[str]] = known["varies"]
    return axes


class _Point:
    """A tile of the grid, with its accumulators."""

    def __init__(
        self, program: BlockProgram, arrays: Sequence[Any], source: dict[str, Any], arithmetic: Arithmetic,
        places: Places,
    ) -> None:  # fmt: skip
        self.program, self.arrays, self.arithmetic = program, arrays, arithmetic
        self.source, self.places = source, places
        self.state: Values = {}
        self.axes = varying(program)

    def passes(self, here: Tile, along: list[range]) -> None:
        """All passes over the tiles of the loop."""
        axes, loop = self.axes, self.program.loop
        for one in self.program.passes:
            for x in filter(self.program.carried, one):
                shape = [len(r) if y in axes[x.value] else 1 for y, r in here.items()]
                self.state[x.value] = self.arithmetic.start(x.value.args[0], shape, x.value.dtype)
            for part in along:
                self._step(one, here | {loop: part})
            for x in one:
                if isinstance(x, TileTransfer) and loop not in self.program.operands[x.operand].axes:
                    self._store(x, here | {loop: range(0)})

    def _step(self, one: Pass, tile: Tile) -> None:
        """A tile of the loop in a pass: what is rescaled by r has values of its own, of its accumulators."""
        known: dict[Expr | None, Values] = {None: {}}
        factors: dict[Expr, tuple[Any, Any]] = {}
        rescales = any(isinstance(x, (TileReduce, TileGemm)) and x.rescaled is not None for x in one)
        before = self._kept() if rescales else self
        for x in one:
            if isinstance(x, TileTransfer) and self.program.loop in self.program.operands[x.operand].axes:
                self._store(x, tile)
            elif isinstance(x, (TileReduce, TileGemm)) and self.program.carried(x):
                kept, r = self.state[x.value], x.rescaled
                if r is not None:
                    if r not in factors:
                        known[r] = dict(known[None])
                        factors[r] = before.value(r, tile, {}), self.value(r, tile, known[r])
                    kept = self.arithmetic.rescaled(kept, *factors[r])
                more = self._sum(x.value, tile, known[r])
                self.state[x.value] = self.arithmetic.together(x.value.args[0], kept, more)

    def _kept(self) -> _Point:
        """The same tile of the grid, with its accumulators as they are."""
        point = _Point(self.program, self.arrays, self.source, self.arithmetic, self.places)
        point.state = dict(self.state)
        return point

    def _sum(self, x: Expr, tile: Tile, known: Values) -> Any:
        """The sum or maximum of a tile along the label of an expression."""
        terms, axis = [self.value(y, tile, known) for y in x.inner], list(tile).index(summed(x))
        return self.arithmetic.total(x.args[0], x.dtype, terms, axis, len(tile[summed(x)]))

    def value(self, x: Expr, tile: Tile, known: Values) -> Any:
        """An expression in a tile; `known` ones are remembered."""
        if x not in known:
            known[x] = self._value(x, tile, known)
        return known[x]

    def _value(self, x: Expr, tile: Tile, known: Values) -> Any:
        """An expression in a tile."""
        to = self.arithmetic
        if x in self.state:
            return to.read(self.state[x], x.dtype)
        if x.op == "contract":
            return to.read(self._sum(x, tile, known), x.dtype)
        if x.op == "load":
            return to.element(self.arrays[x.args[0]], self._at(x.args[0], tile), len(tile))
        if x.op == "index":
            return to.number(_along(x.args[0], tile, np.array(tile[x.args[0]])), x.dtype)
        if x.op not in OPS:
            number = x.args[0] if x.op == "const" else self.source[x.op][x.args[0]]
            return to.number(np.full([1] * len(tile), number), x.dtype)
        named = to.function(x)
        op, inner = (x.op, x.inner) if named is None else (named[0], (named[1],))
        return to.apply(op, x.dtype, [self.value(y, tile, known) for y in inner])

    def _at(self, operand: int, tile: Tile) -> tuple[Array, ...]:
        """Indices of the elements of an operand in a tile, in the order of its labels."""
        extents, axes = self.source["extent"], self.program.operands[operand].axes
        key = (axes, *tile, *(tile[y.lower()] for y in axes))
        if key not in self.places:
            indices = []
            for y in axes:
                row = np.array(tile[y.lower()], np.int64)
                indices.append(_along(y.lower(), tile, row * extents[y] // extents[y.lower()] if y.isupper() else row))
            self.places[key] = tuple(indices)
        return self.places[key]

    def _store(self, x: TileTransfer, tile: Tile) -> None:
        """A result."""
        to, value, axes = self.arrays[x.operand], self.value(x.value, tile, {}), self.program.operands[x.operand].axes
        shape = [len(r) if y in axes else 1 for y, r in tile.items()]
        self.arithmetic.store(to, self._at(x.operand, tile), value, shape)


def _along(label: str, tile: Tile, row: Array) -> Array:
    """A vector along a label."""
    return row.reshape([len(row) if y == label else 1 for y in tile])
