"""Operands of calls: arrays as their libraries describe them.

Owns `Operand`, its views, its address as an argument of a launch, the checks that all calls make on operands, and
`Matrix`, an operand as kernels read it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from portmm.arrays.numpy_arrays import contiguous, merged, numpy_of, span_of, stand_in
from portmm.runtime.backends import backend
from portmm.spec.dtype import BY_NAME, BY_NUMPY, accumulator, natural
from portmm.util.records import dataclass, replace

WIDEST = 16
"""Bytes of the widest vector access."""
_RESULTS = {"f32": ("f32", "f16", "bf16", "e4m3", "e5m2"), "s32": ("s32",), "f64": ("f64",)}
_OF_INT4 = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Operand:
    """An array on a device, as its library describes it.

    Attributes:
        source: the array, which keeps the memory alive.
        language: of kernels on its device, "cuda" or "opencl".
        device: ("cuda", number), or ("opencl", address of the context, address of the device).
        pointer: of element zero: an address, or a buffer and an offset in bytes;
            (None, 0) of an OpenCL array without elements.
        shape: elements along each dimension.
        strides: bytes between elements along each dimension; any sign.
        dtype: portmm's name of the elements' type.
        queue: CUDA's handle of the library's current stream, or PyOpenCL's queue.
        readonly: its library forbids writing.
    """

    source: Any
    language: str
    device: tuple[Hashable, ...]
    pointer: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    queue: Any
    readonly: bool

    @property
    def at(self) -> int:
        """The address of element zero, or its offset in a buffer, in bytes."""
        return self.pointer if isinstance(self.pointer, int) else int(self.pointer[1])

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that kernels depend on: all but the address, of which only the alignment."""
        return (self.shape, self.strides, self.dtype, self.device, math.gcd(self.at, WIDEST), self.readonly)

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size


def transposed(x: Operand) -> Operand:
    """The array with its last two dimensions exchanged."""
    shape, strides = (*x.shape[:-2], *x.shape[:-3:-1]), (*x.strides[:-2], *x.strides[:-3:-1])
    return replace(x, shape=shape, strides=strides)


def standin(x: Operand) -> np.ndarray[Any, Any]:
    """A stand-in for an array on a device: in the host's memory, of its shape, strides and type, for tracing.

    It has memory of one element, and must not be read.

    Raises:
        TypeError: NumPy lacks the type, and there is no ml_dtypes.
    """
    return stand_in(x.shape, numpy_of(x.dtype), x.strides)


def dense_like(x: Operand, shape: Sequence[int], dtype: str) -> Operand:
    """A description of a new array on the device of another, without memory: C-contiguous, and aligned as these are."""
    strides = contiguous(tuple(shape), BY_NAME[dtype].bytes)
    pointer = 0 if isinstance(x.pointer, int) else (None, 0)
    return replace(x, source=None, pointer=pointer, shape=tuple(shape), strides=strides, dtype=dtype, readonly=False)


def type_name(numpy_name: str, what: str, *, native: bool = True) -> str:
    """Portmm's name of an element type, from NumPy's name.

    Raises:
        TypeError: it has none.
    """
    known = BY_NUMPY.get(numpy_name)
    if known is None or not native:
        order = "" if native else " of the other byte order"
        supported = ", ".join(BY_NUMPY)
        raise TypeError(
            f"{what} has elements of type {numpy_name}{order}; portmm takes {supported}: convert them first"
        )
    return known.name


@lru_cache(maxsize=64)
def type_of(dtype: np.dtype[Any], what: str) -> str:
    """Portmm's name of an element type of NumPy, remembered as the `name` of a dtype is slow.

    Raises:
        TypeError: it has none.
    """
    return type_name(dtype.name, what, native=dtype.isnative)


@lru_cache(maxsize=64)
def named(dtype: Any) -> str:
    """Portmm's name of a requested type, by NumPy's, PyTorch's or its own name.

    Raises:
        TypeError: it is unknown.
    """
    text = str(dtype).removeprefix("torch.")
    name = text if text in BY_NUMPY else np.dtype(dtype).name
    if name not in BY_NUMPY:
        raise TypeError(f"dtype {dtype!r} is not supported; use one of {', '.join(BY_NUMPY)}")
    return BY_NUMPY[name].name


def is_dense(x: Operand) -> bool:
    """Whether elements lie as in a new array."""
    steps = contiguous(x.shape, BY_NAME[x.dtype].bytes)
    return all(n == 1 or s == t for n, s, t in zip(x.shape, x.strides, steps, strict=True))


def same_device(arrays: Sequence[Operand]) -> tuple[Hashable, ...]:
    """The one device of all arrays.

    Raises:
        ValueError: they are on several; the message names two.
    """
    first = arrays[0].device
    for i, x in enumerate(arrays):
        if x.device != first:
            raise ValueError(
                f"array 0 is on {title_of(first)} and array {i} on {title_of(x.device)}; copy them to one device first"
            )
    return first


def title_of(device: tuple[Hashable, ...]) -> str:
    """The name of a device in messages."""
    return backend(str(device[0])).title_of(device)


def address(x: Operand, offset: int = 0) -> Any:
    """The address of element zero, advanced by some bytes, as a kernel takes it.

    Raises:
        ValueError: elements are not aligned to their size.
    """
    size, at = BY_NAME[x.dtype].bytes, x.at
    if at % size:
        raise ValueError(f"an array of {x.dtype} begins {at % size} bytes past a multiple of {size}; copy it first")
    return at + offset if isinstance(x.pointer, int) else (x.pointer[0], (at + offset) // size)


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


def matrix(x: Operand, rows: int, cols: int, steps: tuple[int, int], others: tuple[int, ...] = ()) -> Matrix:
    """The operand of a matrix with strides `steps` between rows and columns, and `others` along a batch."""
    row, col = steps
    layout = "row" if col == 1 or cols == 1 else "col" if row == 1 or rows == 1 else "any"
    if layout == "any":
        return Matrix(layout, row, col, 1)
    row, col = (row if rows > 1 else cols, 1) if layout == "row" else (1, col if cols > 1 else rows)
    major, minor = (row, cols) if layout == "row" else (col, rows)
    size = BY_NAME[x.dtype].bytes
    # Where rows overlap or have negative strides, the TMA of a GPU cannot address them: it needs whole vectors.
    most = WIDEST // (2 * size if major < minor or min(others, default=0) < 0 else size)
    vector = math.gcd(major, minor, x.at // size, *others, most)
    return Matrix(layout, row, col, vector & -vector)


def elements(x: Operand) -> tuple[int, ...]:
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


def over(x: Operand, batch: tuple[int, ...], used: int) -> tuple[int, ...]:
    """Strides of an operand along a batch, 0 where it is broadcast; its last `used` dimensions are not batch."""
    own = elements(x)[: len(x.shape) - used]
    return (0,) * (len(batch) - len(own)) + own


def item_step(x: Operand, used: int) -> int | None:
    """Elements between the items of a batch, but for the last `used` dimensions; None if they are not evenly spaced."""
    dims = merged([max(n, 1) for n in x.shape[:-used]], [elements(x)[:-used]])
    return None if len(dims) > 1 else dims[0][1][0] if dims else 0


def result_type(a: str, b: str, requested: str = "") -> str:
    """The type of a product's elements; with an int4 weight that of A.

    Raises:
        TypeError: the two types have no product, or kernels do not write it in the requested type.
    """
    try:
        acc = accumulator(a, b)
    except ValueError as error:
        raise TypeError(f"cannot multiply {a} by {b}: {error}") from error
    if b == "u4" and a not in _OF_INT4:
        raise TypeError(f"a has elements of {a}; on a device those of products with int4 weights are {_OF_INT4}")
    written = _OF_INT4 if b == "u4" else _RESULTS[acc]
    if requested and requested not in written:
        raise TypeError(f"products of {a} and {b} become {', '.join(written)}, not {requested}")
    return requested or (a if b == "u4" else natural(a, b))


def check_out(out: Operand, shape: tuple[int, ...]) -> None:
    """Check that an output can hold a result.

    Raises:
        ValueError: it has another shape, repeats elements, or is read-only.
    """
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the product has {shape}")
    if out.readonly or (out.size and any(n > 1 and s == 0 for n, s in zip(shape, out.strides, strict=True))):
        raise ValueError("out is read-only, or some of its elements share memory")


def check_type(out: Operand, dtype: str) -> None:
    """Check that an output can hold results of a type, by NumPy's same-kind casting.

    Raises:
        TypeError: it cannot.
    """
    to_f64 = out.dtype == "f64" != dtype
    if to_f64 or not np.can_cast(numpy_of(dtype), numpy_of(out.dtype), casting="same_kind"):
        raise TypeError(f"out has elements of {out.dtype}, which cannot hold results of {dtype} on a device")


def check_apart(out: Operand, operands: dict[str, tuple[Operand, ...]]) -> None:
    """Check that the output of a plan overlaps none of its operands.

    Raises:
        ValueError: it overlaps one.
    """
    for name, parts in operands.items():
        if overlap(out, parts):
            raise ValueError(f"out overlaps {name} in memory; pass another array")


def overlap(out: Operand, others: tuple[Operand, ...]) -> bool:
    """Whether memory of a result may be that of an operand."""
    return any(_extent(out, x) for x in others)


def _extent(x: Operand, y: Operand) -> bool:
    (base, first, last), (other, begin, end) = _span(x), _span(y)
    return bool(x.size and y.size and base == other and first < end and begin < last)


def _span(x: Operand) -> tuple[Any, int, int]:
    """The memory of an array and the range of its bytes there."""
    low, end = span_of(x.shape, x.strides, BY_NAME[x.dtype].bytes)
    base, at = (0, 0) if isinstance(x.pointer, int) else backend(x.language).memory_of(x.pointer[0])
    return base, at + x.at + low, at + x.at + end
