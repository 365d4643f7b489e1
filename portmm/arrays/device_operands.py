"""Device arrays as operands of products: shapes, strides, alignment, memory.

Owns `Matrix`, and the checks that all calls on devices make on their operands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_array, numpy_arrays, opencl_arrays
from portmm.dispatch import gpu as gpu_dispatch
from portmm.spec.dtype import BY_NAME, accumulator, natural

if TYPE_CHECKING:
    from portmm.arrays.device_array import DeviceArray
    from portmm.dispatch.gpu import Machine

_RESULTS = {"f32": ("f32", "f16", "bf16", "e4m3", "e5m2"), "s32": ("s32",), "f64": ("f64",)}


def machine_of(x: DeviceArray) -> Machine:
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
        vector: elements of the widest vector access.
    """

    layout: str
    row: int
    col: int
    vector: int


def matrix(x: DeviceArray, rows: int, cols: int, steps: tuple[int, int], others: tuple[int, ...] = ()) -> Matrix:
    """The operand of a matrix with strides `steps` between rows and columns, and `others` along a batch."""
    row, col = steps
    layout = "row" if col == 1 or cols == 1 else "col" if row == 1 or rows == 1 else "any"
    if layout == "any":
        return Matrix(layout, row, col, 1)
    row, col = (row if rows > 1 else cols, 1) if layout == "row" else (1, col if cols > 1 else rows)
    major, minor = (row, cols) if layout == "row" else (col, rows)
    size = BY_NAME[x.dtype].bytes
    # Where rows overlap or have negative strides, the TMA of a GPU cannot address them: it needs whole vectors.
    most = device_array.WIDEST // (2 * size if major < minor or min(others, default=0) < 0 else size)
    vector = math.gcd(major, minor, x.at // size, *others, most)
    return Matrix(layout, row, col, vector & -vector)


def elements(x: DeviceArray) -> tuple[int, ...]:
    """Strides in elements.

    Raises:
        ValueError: they are not multiples of the element size.
    """
    size = BY_NAME[x.dtype].bytes
    if any(s % size for s in x.strides):
        raise ValueError(
            f"an array of {x.dtype} has strides {x.strides} bytes, not multiples of the element size; copy it"
        )
    return tuple(s // size if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True))


def shapes(a: DeviceArray, b: DeviceArray) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int]]:
    """The shape of a product, that of its batch, and its size m, n, k.

    Raises:
        ValueError: shapes do not match.
    """
    if not a.shape or not b.shape:
        raise ValueError("matmul takes arrays of one dimension at least, not scalars")
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    if left[-1] != right[-2]:
        raise ValueError(f"cannot multiply {a.shape} by {b.shape}: a has {left[-1]} columns, b has {right[-2]} rows")
    try:
        batch = np.broadcast_shapes(left[:-2], right[:-2])
    except ValueError as error:
        raise ValueError(
            f"cannot multiply {a.shape} by {b.shape}: batch dimensions {left[:-2]} and {right[:-2]} do not broadcast"
        ) from error
    m, n = left[-2], right[-1]
    rows, columns = (() if len(a.shape) == 1 else (m,)), (() if len(b.shape) == 1 else (n,))
    return (*batch, *rows, *columns), batch, (m, n, left[-1])


def over(x: DeviceArray, batch: tuple[int, ...], used: int) -> tuple[int, ...]:
    """Strides of an operand along a batch, 0 where it is broadcast; its last `used` dimensions are not batch."""
    own = elements(x)[: len(x.shape) - used]
    return (0,) * (len(batch) - len(own)) + own


def shifted(address: Any, offset: int, x: DeviceArray) -> Any:
    """An address advanced by some elements."""
    return address + offset * BY_NAME[x.dtype].bytes if isinstance(address, int) else (address[0], address[1] + offset)


def result_type(a: str, b: str, requested: str) -> str:
    """The type of a product's elements.

    Raises:
        TypeError: the two types have no product, or kernels do not write it in the requested type.
    """
    try:
        acc = accumulator(a, b)
    except ValueError as error:
        raise TypeError(f"cannot multiply {a} by {b}: {error}") from error
    if requested and requested not in _RESULTS[acc]:
        raise TypeError(f"products of {a} and {b} become {', '.join(_RESULTS[acc])}, not {requested}")
    return requested or natural(a, b)


def check_out(out: DeviceArray, shape: tuple[int, ...]) -> None:
    """Check that an output can hold a result.

    Raises:
        ValueError: it has another shape, repeats elements, or is read-only.
    """
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the product has {shape}")
    if out.readonly or (out.size and any(n > 1 and s == 0 for n, s in zip(shape, out.strides, strict=True))):
        raise ValueError("out is read-only, or some of its elements share memory")


def check_type(out: DeviceArray, dtype: str) -> None:
    """Check that an output can hold results of a type, by NumPy's same-kind casting.

    Raises:
        TypeError: it cannot.
    """
    to_f64 = out.dtype == "f64" != dtype
    if to_f64 or not np.can_cast(numpy_arrays.numpy_of(dtype), numpy_arrays.numpy_of(out.dtype), casting="same_kind"):
        raise TypeError(f"out has elements of {out.dtype}, which cannot hold results of {dtype} on a device")


def check_apart(out: DeviceArray, operands: dict[str, tuple[DeviceArray, ...]]) -> None:
    """Check that the output of a plan overlaps none of its operands.

    Raises:
        ValueError: it overlaps one.
    """
    for name, parts in operands.items():
        if overlap(out, parts):
            raise ValueError(f"out overlaps {name} in memory; pass another array")


def overlap(out: DeviceArray, others: tuple[DeviceArray, ...]) -> bool:
    """Whether memory of a result may be that of an operand."""
    return any(_extent(out, x) for x in others)


def _extent(x: DeviceArray, y: DeviceArray) -> bool:
    (base, first, last), (other, begin, end) = _span(x), _span(y)
    return bool(x.size and y.size and base == other and first < end and begin < last)


def _span(x: DeviceArray) -> tuple[Any, int, int]:
    """The memory of an array and the range of its bytes there."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(x.shape, x.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(x.shape, x.strides, strict=True))
    base, at = (0, 0) if x.language == "cuda" else opencl_arrays.memory(x.pointer[0])
    return base, at + x.at + low, at + x.at + high + BY_NAME[x.dtype].bytes
