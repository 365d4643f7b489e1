"""Addresses of elements of layouts, as index expressions of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portmm.ir.index import Index, const, var
from portmm.spec.layout_index import Sum, evaluate

if TYPE_CHECKING:
    from portmm.spec.layout import Condition, Layout


def offset(layout: Layout, *index: Index | int, **sizes: Index) -> Index:
    """Offset of an element; names of sizes and strides are variables of a kernel, or have a value here."""
    value: Index | int = layout.offset(index, lambda name: sizes.get(name) or var(name))
    return value if isinstance(value, Index) else const(value)


def value(x: Sum) -> Index:
    """A sum of sizes, whose names are variables of a kernel."""
    total: Index | int = evaluate(x, lambda leaf: var(leaf.name))
    return const(0) + total


def tests(x: Condition, least: Index, most: Index) -> list[Index]:
    """Tests that a condition of a layout holds for all indices from one to another."""
    below = [] if x.least is None else [1 - least.lt(value(x.least))]
    return below if x.end is None else [*below, most.lt(value(x.end))]


def strides(layout: Layout) -> list[Index]:
    """Strides of the axes of an array in memory."""
    return [value(x) for x in layout.stride]
