"""Runs of a layout: neighbours along an axis that are a constant step apart, for loops without divisions.

Owns `Runs` and `runs`. A layout is separable along an axis where its offset, and each index that padding depends on, is
a term of that axis plus terms of the others. The windows of a convolution are separable, so that a block of them has
one address for each row, one offset for each run, and in its interior no test of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portmm.spec.layout_index import ZERO, Leaf, Sum, as_sum, bounds, coordinate, evaluate, leaves

if TYPE_CHECKING:
    from portmm.spec.layout import Layout

RUN, WITHIN = "run", "within"
"""Coordinates of an element of an axis: the number of its run, and its place in the run."""


@dataclass(frozen=True, slots=True)
class Runs:
    """An axis as runs of equal length.

    Attributes:
        length: elements of a run, which divides the extent of the axis.
        step: difference of the offsets of neighbours in a run.
        offset: offset of a run's first element less that of the axis' first, a sum of the run's number.
        indices: likewise of the index of each condition of the layout.
        reach: the least and the greatest difference of each of these indices within a run.
    """

    length: Sum
    step: Sum
    offset: Sum
    indices: tuple[Sum, ...]
    reach: tuple[tuple[Sum, Sum], ...]

    def offset_of(self, run: Any, names: Callable[[str], Any]) -> Any:
        """Offset of a run's first element less that of the axis' first."""
        return _value(self.offset, run, names)

    def indices_of(self, run: Any, names: Callable[[str], Any]) -> list[Any]:
        """Index of each condition at a run's first element, less that at the axis' first."""
        return [_value(x, run, names) for x in self.indices]


def runs(layout: Layout, axis: int, *, still: bool = False) -> Runs | None:
    """The longest runs of an axis; None if the layout is not separable along it.

    Args:
        layout: the layout.
        axis: the axis.
        still: whether the elements of a run are all in padding or all not, for each index of the other axes.
    """
    sums = (layout.form, *(x.index for x in layout.conditions))
    parts = [_part(x, axis) for x in sums]
    if any(x is None for x in parts):
        return None
    extent = layout.extents[axis]
    kept = [x for x in parts if x is not None]
    options = (_runs(kept, axis, extent, x, still=still) for x in _lengths(kept, axis, extent))
    return next(x for x in options if x)


def _value(x: Sum, run: Any, names: Callable[[str], Any]) -> Any:
    return evaluate(x, lambda leaf: names(leaf.name) if leaf.extent is None else run)


def _part(x: Sum, axis: int) -> Sum | None:
    """The terms of a sum that depend on one axis; None if some of them depend on others too."""
    own = ZERO
    for product, times in x.terms:
        term = Sum(((product, times),))
        among = {leaf.name for leaf in leaves(term) if leaf.extent is not None}
        if f"i{axis}" in among:
            if len(among) > 1:
                return None
            own += term
    return own


def _lengths(parts: Sequence[Sum], axis: int, extent: Sum) -> list[Sum]:
    """Lengths that runs may have, the longest first: the extent, divisors in quotients and remainders, and 1."""
    name = f"i{axis}"

    def divisors(x: Sum) -> Iterator[Sum]:
        for product, _ in x.terms:
            for factor in product:
                if not isinstance(factor, Leaf) and any(y.name == name for y in leaves(factor.left)):
                    yield factor.right
                    yield from divisors(factor.left)

    def size(x: Sum) -> tuple[int, int]:
        return max((len(product) for product, _ in x.terms), default=0), max([x.constant, *(c for _, c in x.terms)])

    inner = dict.fromkeys(y for x in parts for y in divisors(x))
    return [extent, *sorted(inner, key=size, reverse=True), as_sum(1)]


def _runs(parts: Sequence[Sum], axis: int, extent: Sum, length: Sum, *, still: bool) -> Runs | None:
    """Runs of a length, if offsets have a constant step within each."""
    if extent % length != 0:
        return None
    first = coordinate(RUN, extent // length) * length
    at = first + coordinate(WITHIN, length)
    name = f"i{axis}"

    def of(x: Sum, index: Sum) -> Sum:
        return as_sum(evaluate(x, lambda leaf: index if leaf.name == name else as_sum(leaf.name)))

    changes = [of(x, at) - of(x, first) for x in parts]
    begins = [of(x, first) - of(x, ZERO) for x in parts]
    step = _slope(changes[0])
    reach = [bounds(x) if all(leaf.name != RUN for leaf in leaves(x)) else None for x in changes[1:]]
    sure = [x for x in reach if x is not None]
    if step is None or len(sure) < len(reach) or (still and any(x != 0 for x in changes[1:])):
        return None
    return Runs(length, step, begins[0], tuple(begins[1:]), tuple(sure))


def _slope(change: Sum) -> Sum | None:
    """The factor of the place in a run, in a sum that is a multiple of it; else None."""
    slope = ZERO
    for product, times in change.terms:
        rest = tuple(x for x in product if not (isinstance(x, Leaf) and x.name == WITHIN))
        if len(rest) != len(product) - 1 or any(not isinstance(x, Leaf) or x.extent is not None for x in rest):
            return None
        slope += Sum(((rest, times),)) if rest else times
    return None if change.constant else slope
