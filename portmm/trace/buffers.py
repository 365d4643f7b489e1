"""Where arrays lie, and how kernels walk over them.

Owns `Place`, an array of a program before it is called, and `walk`, which makes
one or two loops of many dimensions. Imports `arrays.numpy_arrays`, `spec.epilogue`. Shapes and strides
are known when a program is made; only addresses come with a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from portmm.errors import ScheduleError

Array = np.ndarray[Any, Any]
MOST_REPEATS = 64
"""Calls of one kernel for dimensions that its loops do not reach."""


@dataclass(eq=False, slots=True)
class Place:
    """An array of a program.

    Attributes:
        root: the name, in a program's text, of the address that it is counted from.
        offset: how far from there its first element lies, in bytes.
        like: an array of this shape, type and strides.
        text: what makes the array, in a program's text.
    """

    root: str
    offset: int
    like: Array
    text: str

    @property
    def address(self) -> str:
        """Where its first element is, in a program's text."""
        return f"{self.root}+{self.offset}" if self.offset else self.root

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Elements from one to the next along each dimension of a shape that it is broadcast to."""
        x = self.like
        own = [0 if n == 1 else s // x.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
        return (*(0,) * (len(shape) - len(own)), *own)


def looked(place: Place, function: Any, text: str) -> Place | None:
    """A view of a place; None if that takes a copy."""
    found = function(place.like)
    if found.size and not np.may_share_memory(found, place.like):
        return None
    moved = found.__array_interface__["data"][0] - place.like.__array_interface__["data"][0]
    return Place(place.root, place.offset + (moved if found.size else 0), found, text)


@dataclass(frozen=True, slots=True)
class Walk:
    """How a kernel goes over some dimensions of several arrays.

    Attributes:
        rows: how many, and the stride of each array.
        batch: items, and strides.
        repeats: offsets of each array, in elements, for every time that the kernel runs.
    """

    rows: tuple[int, tuple[int, ...]]
    batch: tuple[int, tuple[int, ...]]
    repeats: list[tuple[int, ...]]


def walk(shape: tuple[int, ...], strides: list[tuple[int, ...]], still: int = -1, *, whole: bool = False) -> Walk:
    """The loops over all dimensions of a shape.

    Args:
        shape: dimensions, the rows of a matrix last.
        strides: of each array.
        still: an array that must stay where it is along rows.
        whole: rows stay those of a matrix, as their numbers matter.

    Raises:
        ScheduleError: there are too many loops.
    """
    none = (0,) * len(strides)
    dims: list[tuple[int, tuple[int, ...]]] = []
    for axis, n in enumerate(shape):
        step = tuple(s[axis] for s in strides)
        last = axis == len(shape) - 1
        if n == 1 and not (last and whole):
            continue
        merges = dims and not (last and whole) and all(x == n * y for x, y in zip(dims[-1][1], step, strict=True))
        if merges:
            dims[-1] = (dims[-1][0] * n, step)
        else:
            dims.append((n, step))
    rows = (1, none)
    if dims and (whole or still < 0 or dims[-1][1][still] == 0):
        rows = dims.pop()
    batch = dims.pop(max(range(len(dims)), key=lambda i: dims[i][0])) if dims else (1, none)
    count = int(np.prod([n for n, _ in dims]))
    if count > MOST_REPEATS:
        raise ScheduleError(f"{count} calls of a kernel for the dimensions of {shape}")
    places = product(*(range(n) for n, _ in dims))
    repeats = [
        tuple(sum(i * s[a] for i, (_, s) in zip(at, dims, strict=True)) for a in range(len(strides))) for at in places
    ]
    return Walk(rows, batch, repeats)


class Arena:
    """Memory for what lives between kernels: bytes that are free again when the last reader has run."""

    def __init__(self) -> None:
        self.size = 0
        self.taken: list[tuple[int, int, int]] = []

    def take(self, size: int, now: int, until: int) -> int:
        """Room from one step to another: where it begins."""
        size = -(-max(size, 1) // 64) * 64
        self.taken = [x for x in self.taken if x[2] >= now]
        at = 0
        for start, end, _ in sorted(self.taken):
            if at + size <= start:
                break
            at = max(at, end)
        self.taken.append((at, at + size, until))
        self.size = max(self.size, at + size)
        return at

    def keep(self, at: int, until: int) -> None:
        """Let what begins there live longer."""
        self.taken = [(s, e, max(u, until) if s == at else u) for s, e, u in self.taken]
