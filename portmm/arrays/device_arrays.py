"""Arrays of devices, as products see them: shapes, strides, alignment, memory.

Owns `Matrix`, and the questions that all calls on devices ask of their operands. Imports
`arrays.interop`, `dispatch.gpu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, numpy_arrays
from portmm.dispatch import gpu as gpu_dispatch
from portmm.spec.dtype import BY_NAME, accumulator, natural

if TYPE_CHECKING:
    from portmm.arrays.interop import Foreign
    from portmm.dispatch.gpu import Machine

_RESULTS = {"f32": ("f32", "f16", "bf16", "e4m3", "e5m2"), "s32": ("s32",), "f64": ("f64",)}


def machine_of(x: Foreign) -> Machine:
    """The device of an array."""
    if x.language == "cuda":
        return gpu_dispatch.machine(x.device, x.device[1])
    return gpu_dispatch.machine(x.device, (x.queue.context, x.queue.device))


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand as kernels read it.

    Attributes:
        layout: "row", "col" or "any".
        row: elements between rows.
        col: elements between columns.
        vector: elements that may be moved at once.
    """

    layout: str
    row: int
    col: int
    vector: int


def matrix(x: Foreign, rows: int, cols: int, steps: tuple[int, int], others: tuple[int, ...] = ()) -> Matrix:
    """How a matrix lies, of so many elements from one row to the next, from one column, and between others."""
    row, col = steps
    layout = "row" if col == 1 or cols == 1 else "col" if row == 1 or rows == 1 else "any"
    if layout == "any":
        return Matrix(layout, row, col, 1)
    row, col = (row if rows > 1 else cols, 1) if layout == "row" else (1, col if cols > 1 else rows)
    far, near = (row, cols) if layout == "row" else (col, rows)
    size = BY_NAME[x.dtype].bytes
    # Where lines overlap or go backwards, the copy engine of a GPU cannot address them: it wants whole vectors.
    most = interop.WIDEST // (2 * size if far < near or min(others, default=0) < 0 else size)
    vector = math.gcd(far, near, x.at // size, *others, most)
    return Matrix(layout, row, col, vector & -vector)


def elements(x: Foreign) -> tuple[int, ...]:
    """Strides in elements.

    Raises:
        ValueError: they are no whole ones.
    """
    size = BY_NAME[x.dtype].bytes
    if any(s % size for s in x.strides):
        raise ValueError(f"an array of {x.dtype} has strides {x.strides} bytes, which are no whole elements; copy it")
    return tuple(s // size if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True))


def shapes(a: Foreign, b: Foreign) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int]]:
    """The shape of a product, that of its batch, and its size m, n, k.

    Raises:
        ValueError: the operands do not fit.
    """
    if not a.shape or not b.shape:
        raise ValueError("matmul takes arrays of one dimension at least, not scalars")
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    if left[-1] != right[-2]:
        raise ValueError(f"cannot multiply {a.shape} by {b.shape}: {left[-1]} columns meet {right[-2]} rows")
    try:
        batch = np.broadcast_shapes(left[:-2], right[:-2])
    except ValueError as error:
        raise ValueError(
            f"cannot multiply {a.shape} by {b.shape}: batch dimensions {left[:-2]} and {right[:-2]} do not broadcast"
        ) from error
    m, n = left[-2], right[-1]
    rows, columns = (() if len(a.shape) == 1 else (m,)), (() if len(b.shape) == 1 else (n,))
    return (*batch, *rows, *columns), batch, (m, n, left[-1])


def over(x: Foreign, batch: tuple[int, ...], used: int) -> tuple[int, ...]:
    """Strides of an operand along a batch, 0 where it is broadcast; its last `used` dimensions are no batch."""
    own = elements(x)[: len(x.shape) - used]
    return (0,) * (len(batch) - len(own)) + own


def shifted(place: Any, offset: int, x: Foreign) -> Any:
    """An address some elements further."""
    return place + offset * BY_NAME[x.dtype].bytes if isinstance(place, int) else (place[0], place[1] + offset)


def result_type(a: str, b: str, wanted: str) -> str:
    """The type of a product's elements.

    Raises:
        TypeError: the two do not multiply, or their sums do not become what is wanted.
    """
    try:
        held = accumulator(a, b)
    except ValueError as error:
        raise TypeError(f"cannot multiply {a} by {b}: {error}") from error
    if wanted and wanted not in _RESULTS[held]:
        raise TypeError(f"products of {a} and {b} become {', '.join(_RESULTS[held])}, not {wanted}")
    return wanted or natural(a, b)


def check_out(out: Foreign, shape: tuple[int, ...]) -> None:
    """An output can take a result.

    Raises:
        ValueError: it has another shape, repeats elements, or is read-only.
    """
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the product has {shape}")
    if out.readonly or (out.size and any(n > 1 and s == 0 for n, s in zip(shape, out.strides, strict=True))):
        raise ValueError("out is read-only, or several of its elements are one")


def check_type(out: Foreign, dtype: str) -> None:
    """An output can take results of a type, as NumPy casts them.

    Raises:
        TypeError: it cannot.
    """
    wide = out.dtype == "f64" != dtype
    if wide or not np.can_cast(numpy_arrays.numpy_of(dtype), numpy_arrays.numpy_of(out.dtype), casting="same_kind"):
        raise TypeError(f"out has elements of {out.dtype}, which cannot hold results of {dtype} on a device")


def check_apart(out: Foreign, operands: dict[str, tuple[Foreign, ...]]) -> None:
    """The output of a plan lies on none of its operands, by name.

    Raises:
        ValueError: it overlaps one.
    """
    for name, parts in operands.items():
        if overlap(out, parts):
            raise ValueError(f"out overlaps {name} in memory; give another array")


def overlap(out: Foreign, others: tuple[Foreign, ...]) -> bool:
    """Memory of a result may be that of an operand."""
    return any(_extent(out, x) for x in others)


def _extent(x: Foreign, y: Foreign) -> bool:
    (base, first, last), (other, begin, end) = _span(x), _span(y)
    return bool(x.size and y.size and base == other and first < end and begin < last)


def _span(x: Foreign) -> tuple[Any, int, int]:
    """Where the bytes of an array lie: in which memory, from where, to where."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(x.shape, x.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(x.shape, x.strides, strict=True))
    base, at = (0, 0) if x.language == "cuda" else interop.memory(x.pointer[0])
    return base, at + x.at + low, at + x.at + high + BY_NAME[x.dtype].bytes
