"""Coordinate transforms: views of an array, from a coordinate of the view to an index of the array below.

Owns `Pad`, `Embed`, `Merge`, `Broadcast`, `Permute` and `Xor`; a slice, a frozen axis and an unmerged one are embedded.
Each has `extents`, those of the view; `down`, the index below; `move`, the change of that index by a change of the
coordinate: constant where the map is affine, with carries where it is not; and `gather`, the view of an array of
NumPy. Only padding makes an index invalid, so conditions and safe vector lengths follow from the composition of all
maps: see `Layout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add, mul
from typing import Any

import numpy as np

from portmm.spec.layout_index import ZERO, Sum
from portmm.util.records import dataclass

Values = tuple[Any, ...]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a coordinate.

    Attributes:
        delta: the change of the index of each axis; the integer 0 for none.
        index: the new coordinate.
        below: the index below before the change.
        size: value of a sum of sizes.
    """

    delta: Values
    index: Values
    below: Values
    size: Callable[[Sum], Any]


@dataclass(frozen=True, slots=True)
class Pad:
    """Padding of an axis with zeros, which are `before` its first element and `after` its last."""

    axis: int
    before: Sum
    after: Sum

    def extents(self, below: Values) -> Values:
        """Extents of the view."""
        return _with(below, self.axis, below[self.axis] + self.before + self.after)

    def down(self, index: Values) -> Values:
        """Index of the array below, out of its bounds in padding."""
        return _with(index, self.axis, index[self.axis] - self.before)

    def move(self, by: Move) -> Values:
        """Change of the index below."""
        return by.delta

    def gather(self, array: Array) -> Array:
        """The view of an array, a copy where there is padding."""
        if self.before == self.after == 0:
            return array
        shape, first = list(array.shape), int(self.before)
        shape[self.axis] += first + int(self.after)
        padded = np.zeros(shape, array.dtype)
        padded[(slice(None),) * self.axis + (slice(first, first + array.shape[self.axis]),)] = array
        return padded


@dataclass(frozen=True, slots=True)
class Embed:
    """One axis as an affine function of the axes in its place.

    Attributes:
        axis: of the array below.
        shape: extents of the axes in its place.
        stride: of each of them.
        begin: index of their origin.
    """

    axis: int
    shape: tuple[Sum, ...]
    stride: tuple[Sum, ...]
    begin: Sum

    def _places(self, below: Values, own: Values) -> Values:
        """Values of all axes of the view."""
        return (*below[: self.axis], *own, *below[self.axis + 1 :])

    def extents(self, below: Values) -> Values:
        """Extents of the view."""
        return self._places(below, self.shape)

    def _whole(self, index: Values, own: Any) -> Values:
        return (*index[: self.axis], own, *index[self.axis + len(self.shape) :])

    def down(self, index: Values) -> Values:
        """Index of the array below."""
        terms = [index[self.axis + i] * s for i, s in enumerate(self.stride)]
        return self._whole(index, reduce(add, terms, ZERO) + self.begin)

    def move(self, by: Move) -> Values:
        """Change of the index below."""
        terms = [
            by.delta[self.axis + i] * by.size(s) for i, s in enumerate(self.stride) if moves(by.delta[self.axis + i])
        ]
        return self._whole(by.delta, total(terms))

    def gather(self, array: Array) -> Array:
        """The view of an array, which shares its memory.

        Raises:
            ValueError: the view exceeds the array.
        """
        shape, stride, begin = [int(x) for x in self.shape], [int(x) for x in self.stride], int(self.begin)
        ends = [(x - 1) * s for x, s in zip(shape, stride, strict=True)]
        least, most = (begin + sum(f(x, 0) for x in ends) for f in (min, max))
        if 0 not in shape and not 0 <= least <= most < array.shape[self.axis]:
            raise ValueError(f"indices {least} to {most} exceed an axis of {array.shape[self.axis]}: pad it first")
        origin = array[(slice(None),) * self.axis + (slice(begin, None),)]
        strides = self._places(array.strides, tuple(array.strides[self.axis] * s for s in stride))
        return np.lib.stride_tricks.as_strided(origin, self._places(array.shape, tuple(shape)), strides)


@dataclass(frozen=True, slots=True)
class Merge:
    """Several neighbouring axes as one, the last of them fastest.

    Attributes:
        axis: the first of them.
        shape: their extents.
    """

    axis: int
    shape: tuple[Sum, ...]

    def extents(self, below: Values) -> Values:
        """Extents of the view."""
        return (*below[: self.axis], reduce(mul, self.shape), *below[self.axis + len(self.shape) :])

    def _digits(self, index: Values, digits: list[Any]) -> Values:
        """Values of all axes below, from those of the merged ones, the last first."""
        return (*index[: self.axis], *reversed(digits), *index[self.axis + 1 :])

    def down(self, index: Values) -> Values:
        """Index of the array below: the digits of a number."""
        rest, digits = index[self.axis], []
        for extent in reversed(self.shape[1:]):
            digits.append(rest % extent)
            rest //= extent
        return self._digits(index, [*digits, rest])

    def move(self, by: Move) -> Values:
        """Change of the index below: the digits of the change, with carries."""
        changes: list[Any] = []
        rest, carry = by.delta[self.axis], 0
        for i in range(len(self.shape) - 1, 0, -1):
            old, extent = by.below[self.axis + i], by.size(self.shape[i])
            if isinstance(rest, int) and (rest == 0 or isinstance(extent, int)):
                rest, digit = divmod(rest, extent) if rest else (0, 0)
                change = total([x for x in (digit, carry) if moves(x)])
                carry = 1 - is_less(old + change, extent) if moves(change) else 0
                changes.append(change - carry * extent if moves(change) else 0)
            else:
                new = old + rest + carry
                changes.append(new % extent - old)
                rest, carry = new // extent, 0
        changes.append(total([x for x in (rest, carry) if moves(x)]))
        return self._digits(by.delta, changes)

    def gather(self, array: Array) -> Array:
        """The view of an array, copied where its axes are not contiguous."""
        end = self.axis + len(self.shape)
        whole = math.prod(array.shape[self.axis : end])
        return array.reshape(*array.shape[: self.axis], whole, *array.shape[end:])


@dataclass(frozen=True, slots=True)
class Broadcast:
    """An additional axis, of an extent, on which elements do not depend."""

    axis: int
    extent: Sum

    def extents(self, below: Values) -> Values:
        """Extents of the view."""
        return (*below[: self.axis], self.extent, *below[self.axis :])

    def down(self, index: Values) -> Values:
        """Index of the array below."""
        return (*index[: self.axis], *index[self.axis + 1 :])

    def move(self, by: Move) -> Values:
        """Change of the index below."""
        return self.down(by.delta)

    def gather(self, array: Array) -> Array:
        """The view of an array, which shares its memory."""
        shape = (*array.shape[: self.axis], int(self.extent), *array.shape[self.axis :])
        return np.broadcast_to(np.expand_dims(array, self.axis), shape)


@dataclass(frozen=True, slots=True)
class Permute:
    """Axes in another order: for each axis of the view, the axis below."""

    order: tuple[int, ...]

    def extents(self, below: Values) -> Values:
        """Extents of the view."""
        return tuple(below[x] for x in self.order)

    def down(self, index: Values) -> Values:
        """Index of the array below."""
        return tuple(index[self.order.index(x)] for x in range(len(self.order)))

    def move(self, by: Move) -> Values:
        """Change of the index below."""
        return self.down(by.delta)

    def gather(self, array: Array) -> Array:
        """The view of an array, which shares its memory."""
        return array.transpose(self.order)


@dataclass(frozen=True, slots=True)
class Xor:
    """An axis whose index is xored with bits of another's: index ^ other / divide % modulo * times.

    Attributes:
        axis: the axis, whose extent is a multiple of modulo * times.
        by: the other axis.
        divide: see above.
        modulo: a power of two.
        times: likewise.
    """

    axis: int
    by: int
    divide: int
    modulo: int
    times: int

    def extents(self, below: Values) -> Values:
        """Extents of the view."""
        return below

    def number(self, other: Any) -> Any:
        """The number that indices are xored with."""
        return other // self.divide % self.modulo * self.times

    def down(self, index: Values) -> Values:
        """Index of the array below."""
        return _with(index, self.axis, index[self.axis] ^ self.number(index[self.by]))

    def move(self, by: Move) -> Values:
        """Change of the index below, from its new value."""
        if not moves(by.delta[self.axis]) and not moves(by.delta[self.by]):
            return by.delta
        return _with(by.delta, self.axis, self.down(by.index)[self.axis] - by.below[self.axis])

    def gather(self, array: Array) -> Array:
        """The view of an array, a copy."""
        return array[self.down(tuple(np.ogrid[tuple(slice(0, x) for x in array.shape)]))]


Transform = Pad | Embed | Merge | Broadcast | Permute | Xor


def moves(x: Any) -> bool:
    """Whether a change is not the integer 0."""
    return not isinstance(x, int) or x != 0


def total(values: list[Any]) -> Any:
    """Sum of values with operators, 0 if there are none."""
    return reduce(add, values) if values else 0


def is_less(x: Any, y: Any) -> Any:
    """1 if x < y, else 0; index expressions of kernels compare by `lt`."""
    if hasattr(y, "lt") and isinstance(x, int):
        x = y * 0 + x
    return x.lt(y) if hasattr(x, "lt") else (x < y) * 1


def _with(index: Values, axis: int, value: Any) -> Values:
    return (*index[:axis], value, *index[axis + 1 :])
