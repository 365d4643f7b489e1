"""Buffers of a program: addresses, strides, and the loops of kernels over them.

Owns `Place`, an array of a program before it is called; `walk`, which makes one or two loops of many dimensions; and
`Arena`, the memory plan. Shapes and strides are known when a program is made; only addresses come with a call.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from portmm.arrays.numpy_arrays import merged, span_of
from portmm.errors import ScheduleError
from portmm.util.records import dataclass

Array = np.ndarray[Any, Any]
MOST_REPEATS = 64
"""Calls of one kernel for dimensions that its loops do not reach."""


@dataclass(eq=False, slots=True)
class Place:
    """An array of a program.

    Attributes:
        root: the name, in a program's text, of the base address.
        offset: bytes from there to its first element.
        like: an array of this shape, type and strides.
        text: the expression of the array, in a program's text.
    """

    root: str
    offset: int
    like: Array
    text: str

    @property
    def address(self) -> str:
        """The address of its first element, in a program's text."""
        return f"{self.root}+{self.offset}" if self.offset else self.root

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Strides, in elements, along each dimension of a shape that it is broadcast to."""
        x = self.like
        own = [0 if n == 1 else s // x.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
        return (*(0,) * (len(shape) - len(own)), *own)


def looked(place: Place, function: Any, text: str = "") -> Place | None:
    """A view of a buffer; None if that takes a copy.

    The function is applied to uninitialized memory of the array's extent: nothing is read, wherever the array is.
    """
    like = place.like
    low, end = span_of(like.shape, like.strides, like.itemsize)
    memory = np.empty(end - low, np.uint8)
    shadow = np.ndarray(like.shape, like.dtype, memory, -low, like.strides)
    view = function(shadow)
    if view.size and not np.may_share_memory(view, memory):
        return None
    offset = view.__array_interface__["data"][0] - shadow.__array_interface__["data"][0] if view.size else 0
    return Place(place.root, place.offset + offset, view, text)


@dataclass(frozen=True, slots=True)
class Walk:
    """The loops of a kernel over some dimensions of several arrays.

    Attributes:
        rows: their number, and the stride of each array.
        batch: items, and strides.
        repeats: offsets of each array, in elements, for every launch of the kernel.
    """

    rows: tuple[int, tuple[int, ...]]
    batch: tuple[int, tuple[int, ...]]
    repeats: list[tuple[int, ...]]


def walk(shape: tuple[int, ...], strides: list[tuple[int, ...]], still: int = -1, *, whole: bool = False) -> Walk:
    """The loops over all dimensions of a shape, with dimensions merged where strides allow it.

    Args:
        shape: dimensions, the rows of a matrix last.
        strides: of each array.
        still: an array that must not advance along rows.
        whole: rows stay those of a matrix, as the kernel depends on their indices.

    Raises:
        ScheduleError: the dimensions need too many launches.
    """
    none = (0,) * len(strides)
    apart = whole and bool(shape)
    dims = merged(shape[: len(shape) - apart], strides)
    dims += [(shape[-1], tuple(s[-1] for s in strides))] if apart else []
    rows = (1, none)
    if dims and (whole or still < 0 or dims[-1][1][still] == 0):
        rows = dims.pop()
    batch = dims.pop(max(range(len(dims)), key=lambda i: dims[i][0])) if dims else (1, none)
    count = int(np.prod([n for n, _ in dims]))
    if count > MOST_REPEATS:
        raise ScheduleError(f"{count} calls of a kernel for the dimensions of {shape}")
    indices = product(*(range(n) for n, _ in dims))
    repeats = [
        tuple(sum(i * s[a] for i, (_, s) in zip(at, dims, strict=True)) for a in range(len(strides))) for at in indices
    ]
    return Walk(rows, batch, repeats)


class Arena:
    """Memory of intermediate results: bytes are reused after the last reader has run."""

    def __init__(self) -> None:
        self.size = 0
        self.taken: list[tuple[int, int, int]] = []

    def take(self, size: int, now: int, until: int) -> int:
        """The offset of new memory that is live from one step to another."""
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
        """Extend the lifetime of the memory at an offset."""
        self.taken = [(s, e, max(u, until) if s == at else u) for s, e, u in self.taken]
