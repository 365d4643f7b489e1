"""The tier of a test session, and the share of a product of configurations that it runs.

Faults come from one value, or from two that meet; seldom from three. So by default a product of axes is thinned to
combinations in which every two values of different axes meet, and PORTMM_TESTS=all runs the whole of it.
"""

from __future__ import annotations

import os
from itertools import combinations, product
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TIERS = ("fast", "rest", "full", "all")
TIER = os.environ.get("PORTMM_TESTS", "") or TIERS[0]
"""The fast tier, what it leaves, both with every run of a kernel repeated, or that without thinning of products."""
ALL = TIER == "all"
"""Leave out nothing, however long it takes."""
EVERY_RUN = TIER in ("full", "all")
"""Repeat runs of kernels that have passed; see passed.py."""


def unoptimised(words: tuple[str, ...]) -> tuple[str, ...]:
    """A compiler's words for kernels that are called, and not looked at."""
    return tuple("-O0" if x == "-O2" else x for x in words)


def pairs(*axes: Iterable[Any], turn: int = 0, where: Callable[..., Any] | None = None) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis in which every two values of different axes meet; or all of them.

    Other turns give other combinations. `where` says which there are.
    """
    numbered = [tuple(zip(*xs, strict=True)) for xs in product(*map(enumerate, axes))]
    every = {places: xs for places, xs in numbered if where is None or where(*xs)}
    return [every[places] for places in (every if ALL else sorted(_covering(list(every), turn)))]


def some(values: Iterable[Any], which: int, step: int) -> list[Any]:
    """Each `step`-th of some values, so that `which` = 0, 1, ... step - 1 get others and none is left out; or all."""
    found = list(values)
    return found if ALL else found[which % step :: step]


def _meetings(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(places), min(2, len(places))))


def _covering(every: list[tuple[int, ...]], turn: int) -> list[tuple[int, ...]]:
    """Greedily, the combination with most meetings that are new; of equals, one by a number that looks random."""
    left = {places: _meetings(places) for places in sorted(every, key=lambda x: crc32(bytes((*x, turn))))}
    seen: set[Any] = set()
    kept = []
    while left:
        left = {places: new for places, found in left.items() if (new := found - seen)}
        if left:
            kept.append(max(left, key=lambda x: len(left[x])))
            seen |= left.pop(kept[-1])
    return kept
