"""Usual layouts, of operands in memory, in panels and in shared memory.

Owns constructors of `Layout`, and `Views`, the operands of a product that are more than arrays with strides.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from portmm.spec.layout import Layout
from portmm.spec.layout_index import Sum, as_sum
from portmm.spec.layout_transforms import Xor

if TYPE_CHECKING:
    from portmm.spec.layout_index import Size

VECTOR = 16
"""Bytes of the widest access to memory of a thread of a device."""
BANKS = 128
"""Bytes after which the banks of shared memory repeat."""


class Views(NamedTuple):
    """The operands of a product that are views.

    Attributes:
        a: layout (m, k) of A, or None.
        b: layout (k, n) of B, or None.
        padding: value of elements in padding, an integer.
    """

    a: Layout | None = None
    b: Layout | None = None
    padding: int = 0

    def rows(self, name: str) -> Layout | None:
        """The layout of rows of A, or of columns of B, by k; None if this operand is no view."""
        if name == "a" or self.b is None:
            return self.a if name == "a" else None
        return self.b.permute(1, 0)


PLAIN = Views()
"""Operands that are arrays with strides."""


def _ceil(x: Size, by: int) -> Sum:
    """Quotient rounded up."""
    return (as_sum(x) + by - 1) // by


def row_major(*shape: Size) -> Layout:
    """Rows without gaps, the last axis fastest."""
    return Layout(shape)


def column_major(*shape: Size) -> Layout:
    """Columns without gaps, the first axis fastest."""
    return Layout(shape, tuple(reversed(row_major(*reversed(shape)).stride)))


@cache
def operand(name: str, word: str, axes: str = "") -> Layout:
    """Layout of a matrix of a product, with strides that are arguments of kernels: a_m and a_k of A.

    Args:
        name: "a" of axes m and k, "b" of k and n, or "c" of m and n.
        word: "row" or "col", whose elements are contiguous, or "any"; columns of int4 values are as those of "col".
        axes: order of the coordinate.
    """
    own = {"a": "mk", "b": "kn", "c": "mn"}[name]
    contiguous = {"row": own[1], "col": own[0], "codes": own[0]}.get(word)
    axes = axes or own
    return Layout(tuple(axes), tuple(1 if x == contiguous else f"{name}_{x}" for x in axes))


def panels(k: Size, n: Size, nr: int, kr: int = 1, step: Size | None = None, *, items: Size = 0) -> Layout:
    """Operand (k, n) in panels [k / KR][NR][KR] of NR columns; KR neighbours along k are a unit.

    These are panels of B; of A, with rows in the place of columns; units of VNNI, tiles of AMX, and two-row units of
    Arm. Panels are `step` elements apart, by default without gaps. A batch has `items`, one after the other; else the
    coordinate has no item.
    """
    units, count = _ceil(k, kr), _ceil(n, nr)
    of_panel = units * (nr * kr) if step is None else step
    memory = Layout((items or 1, count, units, nr, kr), (count * of_panel, of_panel, nr * kr, kr, 1))
    batch = memory.permute(0, 2, 4, 1, 3).merge(1, 2).merge(2, 2).slice(1, 0, k).slice(2, 0, n)
    return batch if items else batch.freeze(0, 0)


def in_panels(matrix: Layout, nr: int, kr: int = 1) -> Layout:
    """View (panel, unit, column, element) of a matrix (k, n): the source of each element of its padded panels."""
    padded = matrix.pad_to(0, kr).pad_to(1, nr)
    return padded.unmerge(1, None, nr).unmerge(0, None, kr).permute(2, 0, 3, 1)


def swizzle(width: int, size: int, together: int = 1) -> Xor:
    """Swizzle of lines of vectors of 16 bytes in shared memory: of the vector by the line, of elements of `size` bytes.

    Eight lines of one vector lie in different banks, which repeat after 128 bytes: vectors are xored with the number
    of 128 bytes that lines fill, in pairs if two neighbours are read `together`. One at a time is the swizzle of 128,
    64 and 32 bytes of TMA.
    """
    each, most = max(1, BANKS // (width * size)), min(width * size, BANKS) // VECTOR
    return Xor(1, 0, each, most // together, together)


@cache
def swizzled(width: int, size: int, together: int = 1) -> Layout:
    """Layout (line, vector, element) of such lines."""
    shape, stride = ("lines", "vectors", VECTOR // size), (width, VECTOR // size, 1)
    return Layout(shape, stride, transforms=(swizzle(width, size, together),))


def swizzled_tile(size: int, depth: int, *, along_k: bool) -> Layout:
    """Tile (row, k), of elements of `size` bytes, as copies of boxes write it and tensor cores read it.

    Lines of 128 bytes are swizzled in eights. A line is `depth` elements of a row along k, or one k of as many rows as
    it has elements; strips of these rows follow one another.
    """
    line, bits = BANKS // size, (3, (VECTOR // size).bit_length() - 1, 3)
    if along_k:
        return Layout(("rows", depth), swizzle=bits)
    return Layout(("strips", depth, line), swizzle=bits).permute(0, 2, 1).merge(0, 2)


def windows(
    image: Layout, kernel: tuple[Size, Size], stride: tuple[Size, Size] = (1, 1), dilation: tuple[Size, Size] = (1, 1)
) -> Layout:
    """Matrix (n y x, c r s) of the windows of a padded image (n, c, h, w), one in each row (im2col)."""
    view = image
    for axis in (3, 2):
        reach = (as_sum(kernel[axis - 2]) - 1) * dilation[axis - 2] + 1
        count = (image.extents[axis] - reach) // stride[axis - 2] + 1
        view = view.embed(axis, (count, kernel[axis - 2]), (stride[axis - 2], dilation[axis - 2]))
    return view.permute(0, 2, 4, 1, 3, 5).merge(0, 3).merge(1, 3)
