"""Meaning of block programs: what a record computes, tile by tile, on NumPy arrays.

Owns `run`. Values of a tile have a dimension for each label of the program, of extent 1 where they do not vary.
Expressions are in float32 and int32, as in kernels, and of float64 operands in float64; accumulators are in float64 and
int64 between tiles, so that the extents of tiles change results by roundings of float32 only.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.ir.block_program import TileGemm, TileReduce, TileTransfer
from portmm.spec.epilogue import REDUCTIONS, summed, varies
from portmm.spec.expr_ops import NUMPY, OPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portmm.ir.block_program import BlockProgram, Pass
    from portmm.spec.expr import Expr

Array = np.ndarray[Any, Any]
Tile = dict[str, range]
"""The part of each label that a tile has."""
Values = dict["Expr", Array]
_WIDE = {"s32": np.int64, "f32": np.float64}
"""Type of expressions -> that of accumulators."""


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
        if array.ndim != len(x.axes) or any(
            extents.setdefault(y, n) != n for y, n in zip(x.axes, array.shape, strict=True)
        ):
            raise ValueError(f"an array of shape {array.shape} for an operand along {x.axes}; others have {extents}")
    for label in filter(str.isupper, extents):
        if not extents[label] or extents[label.lower()] % extents[label]:
            raise ValueError(f"{extents[label.lower()]} of {label.lower()} in {extents[label]} equal blocks")

    def parts(label: str) -> list[range]:
        n = extents[label]
        by = (tiles or {}).get(label, n) or 1
        return [range(at, min(at + by, n)) for at in range(0, n, by)]

    whole, grid = {x: range(n) for x, n in extents.items() if x.islower()}, [x for x in program.grid if x in extents]
    with np.errstate(all="ignore"):
        for here in product(*map(parts, grid)):
            tile = whole | dict(zip(grid, here, strict=True))
            _Point(program, arrays, numbers, extents).passes(tile, parts(program.loop))


class _Point:
    """A tile of the grid, with its accumulators."""

    def __init__(
        self, program: BlockProgram, arrays: Sequence[Array], numbers: Sequence[float], extents: Mapping[str, int]
    ) -> None:
        self.program, self.arrays = program, arrays
        self.source: dict[str, Any] = {"number": numbers, "extent": extents}
        self.real = np.float64 if any(x.dtype == np.float64 for x in arrays) else np.float32
        self.state: Values = {}

    def passes(self, here: Tile, along: list[range]) -> None:
        """All passes over the tiles of the loop."""
        axes, loop = varies(self.program.fused.steps, self.program.operands), self.program.loop
        for one in self.program.passes:
            for x in filter(self.program.carried, one):
                start = REDUCTIONS[x.value.args[0]] if isinstance(x, TileReduce) else 0
                shape = [len(r) if y in axes[x.value] else 1 for y, r in here.items()]
                self.state[x.value] = np.full(shape, start, _WIDE[x.value.dtype])
            for part in along:
                self._step(one, here | {loop: part})
            for x in one:
                if isinstance(x, TileTransfer) and loop not in self.program.operands[x.operand].axes:
                    self._store(x, here | {loop: range(0)})

    def _step(self, one: Pass, tile: Tile) -> None:
        """A tile of the loop in a pass."""
        known: Values = {}
        before = _Point(self.program, self.arrays, *self.source.values())
        before.state = dict(self.state)
        for x in one:
            if isinstance(x, TileTransfer) and self.program.loop in self.program.operands[x.operand].axes:
                self._store(x, tile)
            elif isinstance(x, (TileReduce, TileGemm)) and self.program.carried(x):
                kept = self.state[x.value]
                if x.rescaled is not None:
                    then, now, known = before.value(x.rescaled, tile, {}), self.value(x.rescaled, tile, {}), {}
                    kept = kept * np.exp(then - now, dtype=np.float64)
                more = self._sum(x.value, tile, known)
                self.state[x.value] = np.maximum(kept, more) if x.value.args[0] == "max" else kept + more

    def _sum(self, x: Expr, tile: Tile, known: Values) -> Array:
        """The sum or maximum of a tile along the label of an expression."""
        terms, axis = [self.value(y, tile, known).astype(_WIDE[x.dtype]) for y in x.inner], list(tile).index(summed(x))
        every = terms[0] * terms[1] if x.op == "contract" else terms[0]
        shape = (*every.shape[:axis], len(tile[summed(x)]), *every.shape[axis + 1 :])
        reduce = np.max if x.args[0] == "max" else np.sum
        return np.asarray(reduce(np.broadcast_to(every, shape), axis=axis, keepdims=True))

    def value(self, x: Expr, tile: Tile, known: Values) -> Array:
        """An expression in a tile; `known` ones are remembered."""
        if x in known:
            return known[x]
        to = self.real if x.dtype == "f32" else NUMPY[x.dtype]
        if x in self.state:
            result = self.state[x]
        elif x.op == "contract":
            result = self._sum(x, tile, known)
        elif x.op == "load":
            result = np.asarray(self.arrays[x.args[0]][self._at(x.args[0], tile)])
            result = result.reshape(result.shape or [1] * len(tile))
        elif x.op == "index":
            result = _along(x.args[0], tile, np.array(tile[x.args[0]]))
        elif x.op in OPS:
            result = OPS[x.op].plain(*(self.value(y, tile, known) for y in x.inner))
        else:
            number = x.args[0] if x.op == "const" else self.source[x.op][x.args[0]]
            result = np.full([1] * len(tile), number)
        known[x] = np.asarray(result, to)
        return known[x]

    def _at(self, operand: int, tile: Tile) -> tuple[Array, ...]:
        """Indices of the elements of an operand in a tile, in the order of its labels."""
        extents, indices = self.source["extent"], []
        for y in self.program.operands[operand].axes:
            row = np.array(tile[y.lower()], np.int64)
            indices.append(_along(y.lower(), tile, row * extents[y] // extents[y.lower()] if y.isupper() else row))
        return tuple(indices)

    def _store(self, x: TileTransfer, tile: Tile) -> None:
        """A result, rounded to integers and limited where its operand has these."""
        to, value, axes = self.arrays[x.operand], self.value(x.value, tile, {}), self.program.operands[x.operand].axes
        if to.dtype.kind in "iu" and value.dtype.kind == "f":
            limits = np.iinfo(to.dtype)
            value = np.clip(np.rint(value), limits.min, limits.max)
        shape = [len(r) if y in axes else 1 for y, r in tile.items()]
        to[self._at(x.operand, tile)] = np.broadcast_to(value, shape).astype(to.dtype)


def _along(label: str, tile: Tile, row: Array) -> Array:
    """A vector along a label."""
    return row.reshape([len(row) if y == label else 1 for y in tile])
