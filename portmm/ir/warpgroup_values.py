"""Meaning of what warpgroups do: barriers in shared memory, copies of boxes (TMA), and products of matrices there.

Owns the primitives of `targets/isa/wgmma.toml` that a product needs whose results go from registers to memory. Copies
and products take place when they are started, which kernels must allow at any time before they wait; those of clusters
have no meaning here. Sums are those of a `Fragment`, whose lanes are the threads of four warps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import BrokenBarrierError, Condition
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.ir import warp_values

if TYPE_CHECKING:
    from portmm.ir.grid_kernel import MapOf
    from portmm.target.fragment import Fragment

    Array = np.ndarray[Any, Any]

LINE, VECTOR, LINES = 128, 16, 8
"""Bytes of a line of shared memory and of the vectors that are swizzled in it, and lines after which these repeat."""
ROWS, WIDE = 64, 64
"""Rows of a product, and rows that are neighbours in a line where rows are contiguous."""
SILENT = ("tma_prefetch", "mbarrier_init_fence", "wgmma_fence", "wgmma_commit", "wgmma_wait", "wgmma_sums", "registers")
"""Beginnings of the names of primitives that change no value."""
PRODUCT = re.compile(r"wgmma_m64n(\d+)k(\d+)_\w+_([km])([kn])")
"""A name of a product: its columns, steps of k, and along which dimension each side is contiguous."""
_PARTS = (0, 16, 32)
"""Bits at which a descriptor's address, and its strides, begin."""


@dataclass(slots=True)
class Mbarrier:
    """A barrier in shared memory: its phase ends when all arrivals and bytes that it expects are there.

    Attributes:
        count: arrivals of a phase.
    """

    count: int
    phase: int = 0
    arrived: int = 0
    bytes: int = 0
    broken: bool = False
    changed: Condition = field(default_factory=Condition)

    def add(self, arrivals: int, bytes_: int) -> None:
        """Count arrivals, and bytes that are expected, or that have landed if they are negative."""
        with self.changed:
            self.arrived, self.bytes = self.arrived + arrivals, self.bytes + bytes_
            if self.arrived == self.count and not self.bytes:
                self.phase, self.arrived = 1 - self.phase, 0
                self.changed.notify_all()

    def wait(self, parity: int, seconds: float) -> None:
        """Wait until the phase of a parity has ended.

        Raises:
            BrokenBarrierError: it does not end.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: self.broken or self.phase != parity, seconds) or self.broken:
                raise BrokenBarrierError

    def abort(self) -> None:
        """Release all threads that wait."""
        with self.changed:
            self.broken = True
            self.changed.notify_all()


def _swizzled(at: Array) -> Array:
    """Byte addresses with the vectors of eight lines exchanged."""
    return at ^ at // LINE % LINES * VECTOR


def box(of: MapOf, tensor: Array, at: Sequence[int]) -> Array:
    """Bytes of the lines of a box of a tensor (items, rows, elements) from a coordinate on; zeros out of bounds."""
    x, y, z = at
    across, lines, _ = of.box
    whole = np.zeros((lines, across), tensor.dtype)
    part = tensor[z, max(y, 0) : y + lines, max(x, 0) : x + across]
    whole[: part.shape[0], : part.shape[1]] = part
    if of.rounds:
        warp_values.primitive("tf32_round")(whole.view(np.uint32))
    return whole.view(np.uint8)


def land(shared: Array, to: int, lines: Array) -> None:
    """Store the bytes of lines in shared memory, swizzled."""
    at = _swizzled(to + np.arange(lines.size))
    shared[at] = lines.reshape(-1)


def descriptor(at: int, leading: int, stride: int) -> int:
    """A matrix in shared memory as an integer: its address, and its strides, in vectors."""
    return sum(x // VECTOR << bit for x, bit in zip((at, leading, stride), _PARTS, strict=True))


def _matrix(shared: Array, described: int, dtype: np.dtype, size: tuple[int, int], *, along_k: bool) -> Array:
    """The rows and elements of k of a described matrix."""
    first, leading, stride = ((described >> bit & 0x3FFF) * VECTOR for bit in _PARTS)
    row, k = np.ogrid[: size[0], : size[1]]
    if along_k:
        at = row // LINES * stride + row % LINES * LINE + k * dtype.itemsize
    else:
        at = row // WIDE * leading + row % WIDE * dtype.itemsize + k // LINES * stride + k % LINES * LINE
    return shared.view(dtype)[_swizzled(first + at) // dtype.itemsize]


def product(form: re.Match[str], shared: Array, sides: Sequence[int], types: Sequence[np.dtype]) -> Array:
    """The product of two described matrices, in a wide type."""
    n, k, (left, right) = int(form[1]), int(form[2]), form.groups()[2:]
    a = _matrix(shared, sides[0], types[0], (ROWS, k), along_k=left == "k")
    b = _matrix(shared, sides[1], types[1], (n, k), along_k=right == "k")
    wide = np.int64 if a.dtype.kind in "iu" else np.float64
    return a.astype(wide) @ b.astype(wide).T


def of_lane(whole: Array, sums: Fragment, lane: int) -> Array:
    """The elements of a product that a lane of a warpgroup has, in the order of its registers."""
    rows, columns = zip(*(sums.place(lane, i) for i in range(sums.elements)), strict=True)
    parts = whole.reshape(len(whole), -1, sums.columns)
    return np.stack([parts[row, :, column] for row, column in zip(rows, columns, strict=True)], 1).reshape(-1)
