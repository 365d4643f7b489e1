"""Meaning of block programs: what a record computes, tile by tile, on NumPy arrays.

Owns `run`. Values of a tile have a dimension for each label of the program, of extent 1 where they do not vary.
Expressions are in float32 and int32, as in kernels, and of float64 operands in float64; accumulators are in float64 and
int64 between tiles, so that the extents of tiles change results by roundings of float32 only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.ir.block_program import ACCUMULATED, TileGemm, TileReduce, TileTransfer
from portmm.spec.epilogue import REDUCTIONS, summed, varies
from portmm.spec.expr_ops import NUMPY, OPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portmm.ir.block_program import BlockProgram, Operator
    from portmm.spec.expr import Expr

Array = np.ndarray[Any, Any]
Tile = dict[str, range]
"""The part of each label that a tile has."""


def run(
    program: BlockProgram,
    arrays: Sequence[Array],
    tiles: Mapping[str, int] | None = None,
    numbers: Sequence[float] = (),
    **extents: int,
) -> None:
    """Compute a block program, writing to the arrays of its results.

    Args:
        program: the block program.
        arrays: one for each operand, its dimensions in the order of the operand's labels.
        tiles: extent of a tile along labels of the grid and the loop; the last one may be shorter. By default all.
        numbers: scalar arguments.
        extents: of labels that no operand has.

    Raises:
        ValueError: shapes do not match.
    """
    for x, array in zip(program.operands, arrays, strict=True):
        if array.ndim != len(x.axes):
            raise ValueError(f"an array of shape {array.shape} for an operand along {x.axes}")
        for label, extent in zip(x.axes, array.shape, strict=True):
            if extents.setdefault(label, extent) != extent:
                raise ValueError(f"{label} has extents {extents[label]} and {extent}")
    for label in filter(str.isupper, extents):
        if not extents[label] or extents[label.lower()] % extents[label]:
            raise ValueError(f"{extents[label.lower()]} of {label.lower()} in {extents[label]} equal blocks")
    of, step = {x: extents[x] for x in extents if x.islower()}, tiles or {}
    whole = {x: range(n) for x, n in of.items()}
    parts = [[range(at, min(at + by, n)) for at in range(0, n, by)] for n, by in (
        (of[x], step.get(x, of[x]) or 1) for x in program.grid if x in of)]  # fmt: skip
    by = step.get(program.loop, of[program.loop]) or 1
    along = [range(at, min(at + by, of[program.loop])) for at in range(0, of[program.loop], by)]
    for part in product(*parts):
        here = whole | dict(zip((x for x in program.grid if x in of), part, strict=True))
        _Point(program, arrays, numbers, extents, here).passes(along)


@dataclass
class _Point:
    """A tile of the grid.

    Attributes:
        extents: of all labels.
        here: the part of each label that it has.
        state: accumulators.
    """

    program: BlockProgram
    arrays: Sequence[Array]
    numbers: Sequence[float]
    extents: Mapping[str, int]
    here: Tile
    state: dict[Expr, Array] = field(default_factory=dict)

    def passes(self, along: list[range]) -> None:
        """All passes over the tiles of the loop."""
        loop, nothing = self.program.loop, np.errstate(all="ignore")
        axes = varies(self.program.fused.steps, self.program.operands)
        with nothing:
            for one in self.program.passes:
                for x in one:
                    if self.program.carried(x):
                        start = REDUCTIONS[x.value.args[0]] if isinstance(x, TileReduce) else 0
                        shape = [len(r) if y in axes[x.value] else 1 for y, r in self.here.items()]
                        self.state[x.value] = np.full(shape, start, np.int64 if x.value.dtype == "s32" else np.float64)
                for part in along:
                    self._step(one, self.here | {loop: part})
                for x in one:
                    if isinstance(x, TileTransfer) and loop not in self.program.operands[x.operand].axes:
                        self._store(x, self.here | {loop: range(0)})

    def _step(self, one: Sequence[Operator], tile: Tile) -> None:
        """A tile of the loop in a pass."""
        values: dict[Expr, Any] = {}
        before = dict(self.state)
        for x in one:
            if isinstance(x, TileTransfer):
                if self.program.loop in self.program.operands[x.operand].axes:
                    self._store(x, tile)
            elif isinstance(x, (TileReduce, TileGemm)) and self.program.carried(x):
                kept, axis = self.state[x.value], list(tile).index(self.program.loop)
                if x.rescaled is not None:
                    then, now = self._value(x.rescaled, tile, before, {}), self._value(x.rescaled, tile, self.state, {})
                    kept = kept * np.exp(then - now, dtype=np.float64)
                values = {} if x.rescaled is not None else values
                more = self._sum(x.value, tile, values, axis)
                self.state[x.value] = np.maximum(kept, more) if x.value.args[0] == "max" else kept + more

    def _sum(self, x: Expr, tile: Tile, values: dict[Expr, Any], axis: int) -> Array:
        """The reduction of a tile along an axis."""
        terms = [self._value(y, tile, self.state, values) for y in x.inner]
        wide = np.int64 if x.dtype == "s32" else np.float64
        if x.op == "contract":
            left, right = (y.astype(wide) for y in terms)
            terms = [left * right]
        shape = list(terms[0].shape)
        shape[axis] = len(list(tile.values())[axis])
        every = np.broadcast_to(terms[0], shape)
        if x.args[0] == "max":
            return np.asarray(every.max(axis=axis, keepdims=True))
        return np.asarray(every.sum(axis=axis, keepdims=True, dtype=wide))

    def _value(self, x: Expr, tile: Tile, state: Mapping[Expr, Array], values: dict[Expr, Any]) -> Array:
        """An expression in a tile."""
        if x not in values:
            values[x] = self._computed(x, tile, state, values)
        found: Array = values[x]
        return found

    def _computed(self, x: Expr, tile: Tile, state: Mapping[Expr, Array], values: dict[Expr, Any]) -> Array:
        double = any(y.dtype == np.float64 for y in self.arrays)
        to = np.float64 if double and x.dtype == "f32" else NUMPY[x.dtype]
        if x.op in ACCUMULATED and x in state:
            return state[x].astype(to)
        if x.op == "contract":
            return self._sum(x, tile, values, list(tile).index(summed(x))).astype(to)
        if x.op == "load":
            return self._loaded(x.args[0], tile).astype(to)
        if x.op == "index":
            return self._along(x.args[0], tile, np.array(tile[x.args[0]], np.int32))
        if x.op in ("const", "number", "extent"):
            source: Any = {"number": self.numbers, "extent": self.extents}.get(x.op)
            return np.full((1,) * len(tile), x.args[0] if source is None else source[x.args[0]], to)
        if x.op in OPS:
            return np.asarray(OPS[x.op][1](*(self._value(y, tile, state, values) for y in x.inner)))
        raise ValueError(f"{x!r} has no meaning in a block program")

    @staticmethod
    def _along(label: str, tile: Tile, row: Array) -> Array:
        """A vector along a label."""
        return row.reshape([len(row) if y == label else 1 for y in tile])

    def _at(self, operand: int, tile: Tile) -> tuple[Array, ...]:
        """Indices of the elements of an operand in a tile, in the order of its labels."""
        rows = [(y, np.array(tile[y.lower()], np.int64)) for y in self.program.operands[operand].axes]
        each = [r * self.extents[y] // self.extents[y.lower()] if y.isupper() else r for y, r in rows]
        return tuple(self._along(y.lower(), tile, r) for (y, _), r in zip(rows, each, strict=True))

    def _loaded(self, operand: int, tile: Tile) -> Array:
        found: Array = self.arrays[operand][self._at(operand, tile)]
        return found.reshape(found.shape or (1,) * len(tile))

    def _store(self, x: TileTransfer, tile: Tile) -> None:
        """A result, rounded to integers and limited where its operand has these."""
        to, value = self.arrays[x.operand], self._value(x.value, tile, self.state, {})
        if to.dtype.kind in "iu" and value.dtype.kind == "f":
            limits = np.iinfo(to.dtype)
            value = np.clip(np.rint(value), limits.min, limits.max)
        axes = self.program.operands[x.operand].axes
        shape = [len(r) if y in axes else 1 for y, r in tile.items()]
        to[self._at(x.operand, tile)] = np.broadcast_to(value, shape).astype(to.dtype)
