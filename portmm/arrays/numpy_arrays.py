"""NumPy's matmul semantics, reduced to strided batches.

Owns the rules for dtypes, shapes, broadcasting, strides and `out=`. It returns
canonical operands, a batch with one stride per operand, and a table of offsets
for batch shapes that one stride cannot express.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from portmm.spec.dtype import BY_NAME, EXTENSION_TYPES, FP8, accumulator, natural, spell
from portmm.util.array_subclasses import refuse_class
from portmm.util.records import dataclass

FACTORS = ("f32", "f64", "bf16", "f16", "s8", "u8")
"""Types that kernels multiply in the host's memory."""
_BY_NUMPY = {BY_NAME[x].numpy: x for x in (*FACTORS, "s32", *FP8)}
_RESULTS = {"f32": ("f32", "bf16", "f16"), "f64": ("f64",), "s32": ("s32",)}
"""Accumulator type -> types of results that kernels write."""
LONGEST = {"s8": (2**31 - 1) // (128 * 128), "u8": (2**31 - 1) // (255 * 128)}
"""Type of A -> the largest k whose sum of products with int8 fits int32."""

LINE = 64
"""Bytes of a cache line."""

Array = np.ndarray[Any, Any]
DTypes = tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]


@lru_cache(maxsize=256)
def name_of(dtype: np.dtype[Any]) -> str:
    """Portmm's name of a type in any byte order; empty for an unsupported one."""
    return _BY_NUMPY.get(dtype.name, "")


@lru_cache(maxsize=256)
def numpy_name(dtype: np.dtype[Any]) -> str:
    """NumPy's name of a type, which takes Python each time."""
    return dtype.name


def numpy_of(name: str) -> np.dtype[Any]:
    """NumPy's type of a name of portmm's.

    Raises:
        TypeError: NumPy lacks it, and there is no ml_dtypes.
    """
    numpy_name = BY_NAME[name].numpy
    if name not in EXTENSION_TYPES:
        return np.dtype(numpy_name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(f"{numpy_name} arrays need the package ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, numpy_name))


def word(dtypes: DTypes) -> str:
    """The types of A, B and C as spelled in a `Problem`."""
    a, b, c = map(name_of, dtypes)
    return spell(a, b, c)


def types_of(a: np.dtype[Any], b: np.dtype[Any], out: np.dtype[Any] | None = None) -> DTypes:
    """The operand types of A and B, and the result type: `out` if kernels can write it.

    Types that no kernel multiplies are promoted as NumPy does.

    Raises:
        TypeError: the two types have no product.
    """
    left, right = a.newbyteorder("="), b.newbyteorder("=")
    try:
        acc = accumulator(name_of(left), name_of(right))
    except ValueError as refused:
        left = right = np.result_type(left, right)
        if name_of(left) not in ("f32", "f64"):
            raise TypeError(f"cannot multiply {a} by {b}: {refused}") from refused
        acc = name_of(left)
    requested = name_of(out) if out is not None else ""
    result = requested if requested in _RESULTS[acc] else natural(name_of(left), name_of(right))
    return left, right, left if name_of(left) == result else numpy_of(result)


@lru_cache(maxsize=256)
def summed_in(a: np.dtype[Any], b: np.dtype[Any], dtype: np.dtype[Any]) -> tuple[int, np.dtype[Any] | None]:
    """The largest k without conversion, and the type that operands of a larger k are converted to, or None.

    Raises:
        TypeError: the two types have no product, or `dtype` cannot hold the result.
    """
    left, right, natural = types_of(a, b)
    if not np.can_cast(natural, dtype, casting="same_kind"):
        raise TypeError(f"dtype is {dtype}, which cannot hold {natural} results")
    acc = accumulator(*map(name_of, (left, right)))
    if acc == "s32":
        narrow = dtype.kind in "iu" and dtype.itemsize <= np.dtype(np.int32).itemsize  # which wraps around as well
        return LONGEST[name_of(left)], None if narrow else np.dtype(np.float64)
    if dtype.kind not in "fc":
        return 0, None
    precision = np.finfo(dtype).dtype  # of a complex type, that of its parts
    return 0, precision if precision.itemsize > numpy_of(acc).itemsize else None


class Operand(NamedTuple):
    """A canonical operand: native, aligned, strides in whole elements.

    Attributes:
        array: at least 2-D; referenced to keep its memory alive.
        layout: "row", "col" or "any".
        row: stride between rows, in elements.
        col: stride between columns, in elements.
    """

    array: Array
    layout: str
    row: int
    col: int

    @property
    def address(self) -> int:
        """Address of element zero."""
        return int(self.array.__array_interface__["data"][0])


def as_operand(x: Any, name: str, *, matrix: bool = True) -> Array:
    """`x` as an array of a supported type.

    Raises:
        TypeError: its type is not supported, or its class: see `refuse_class`.
        ValueError: it is a scalar.
    """
    if type(x) is np.ndarray:  # a call less for the usual one
        array = x
    else:
        refuse_class(x, name, matrix=matrix)
        array = np.asarray(x)
    if name_of(array.dtype) not in FACTORS:
        supported = ", ".join(BY_NAME[x].numpy for x in FACTORS)
        where = " in the host's memory, floats of eight bits on devices only" if name_of(array.dtype) in FP8 else ""
        raise TypeError(f"{name} has dtype {array.dtype}; portmm multiplies {supported}{where}: convert it with astype")
    if array.ndim == 0:
        raise ValueError(f"{name} is a scalar; matmul needs at least one dimension, use * to scale")
    return array


def addressable(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether kernels can address the elements in place: native, aligned, strides in whole elements."""
    return array.dtype == dtype and array.flags.aligned and not any(s % dtype.itemsize for s in array.strides)


def rows_of(**operands: Any) -> list[tuple[Array, str]]:
    """Operands by their names as native arrays with contiguous rows, copied only if they must be, and their types.

    Raises:
        TypeError: one is of a class that is refused.
    """
    arrays = []
    for name, x in operands.items():
        refuse_class(x, name, matrix=False)
        array = np.asarray(x)
        dtype = array.dtype.newbyteorder("=")
        neighbours = array.ndim and (array.strides[-1] == dtype.itemsize or array.shape[-1] == 1)
        if not neighbours or not addressable(array, dtype):
            array = np.require(array, dtype, ("C", "A"))
        arrays.append((array, name_of(dtype)))
    return arrays


def check_readable(name: str, x: Array) -> None:
    """Check that kernels read an array as it is.

    Raises:
        TypeError: its class has arithmetic of its own, or masks.
        ValueError: it is not aligned, or of another byte order.
    """
    refuse_class(x, name, matrix=False)
    if not addressable(x, x.dtype.newbyteorder("=")):
        raise ValueError(f"{name} is not aligned to its elements, or of another byte order; copy it first")


def dense_at(out: Any, dtype: np.dtype[Any], *sources: Any) -> bool:
    """Whether a kernel that reads arrays can write a dense result of native `dtype` straight to `out`."""
    if not isinstance(out, np.ndarray) or not addressable(out, dtype):
        return False
    if not (out.flags.c_contiguous and out.flags.writeable):
        return False
    for x in sources:  # noqa: SIM110 - a generator takes longer
        if np.may_share_memory(out, x):
            return False
    return True


def canonical(array: Array, dtype: np.dtype[Any]) -> Operand:
    """An operand that kernels can read, copied only if it must be."""
    size = dtype.itemsize
    if not addressable(array, dtype):
        array = np.require(array, dtype, ("C", "A"))
    rows, cols = array.shape[-2:]
    row, col = (s // size for s in array.strides[-2:])
    # The stride of a dimension of extent 1 is never used; choose the one that makes it contiguous.
    row, col = (cols if rows == 1 else row), (1 if cols == 1 else col)
    if col == 1 and (rows == 1 or row >= cols):
        return Operand(array, "row", row, 1)
    if rows == 1:
        return Operand(array, "any", row, col)
    if row == 1 and (cols == 1 or col >= rows):
        return Operand(array, "col", 1, col)
    return Operand(array, "any", row, col)


def product_shape(
    a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int]]:
    """The shape of a product, that of its batch, and m, n and k; vectors are a row or a column that the result lacks.

    Raises:
        ValueError: an operand is a scalar, inner dimensions differ, or batch shapes do not broadcast.
    """
    if not a or not b:
        raise ValueError("an operand is a scalar; matmul needs at least one dimension, use * to scale")
    (*lead, m, k), (*other, rows, n) = a if len(a) > 1 else (1, *a), b if len(b) > 1 else (*b, 1)
    if k != rows:
        raise ValueError(
            f"cannot multiply {a} by {b}, which differ in k: a has {k} columns, b has {rows} rows; these must be equal"
        )
    batch = tuple(lead or other)
    if lead and other and lead != other:
        try:
            batch = np.broadcast_shapes(tuple(lead), tuple(other))
        except ValueError as error:
            raise ValueError(
                f"cannot multiply {a} by {b}: batch dimensions {tuple(lead)} and {tuple(other)} do not broadcast"
            ) from error
    return (*batch, *(() if len(a) == 1 else (m,)), *(() if len(b) == 1 else (n,))), batch, (m, n, k)


def shape_of(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a product.

    Raises:
        ValueError: as for `product_shape`.
    """
    return product_shape(a, b)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The strides of a batch.

    Attributes:
        count: items along the stride.
        strides: element strides of a, b and c from one item to the next.
        outer: offsets (a, b, c) at which the batch is repeated, int64 triples,
            or None for once.
    """

    count: int
    strides: tuple[int, int, int]
    outer: Array | None


def strides_over(array: Array, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of an operand's batch dimensions, 0 where it is broadcast."""
    own = array.shape[:-2]
    size = array.dtype.itemsize
    steps = [0 if n == 1 else s // size for n, s in zip(own, array.strides[:-2], strict=True)]
    return (0,) * (len(batch) - len(own)) + tuple(steps)


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Dimensions of several arrays, with their strides, as few as possible: evenly strided ones are one dimension."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for i, n in enumerate(shape):
        if n == 1:
            continue
        step = tuple(s[i] for s in strides)
        if dims and all(x == n * y for x, y in zip(dims[-1][1], step, strict=True)):
            dims[-1] = (dims[-1][0] * n, step)
        else:
            dims.append((n, step))
    return dims


def collapse(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> Batch:
    """Merge evenly strided batch dimensions, and take the largest of the rest as the batch."""
    dims = merged(shape, strides)
    if not dims:
        return Batch(1, (0, 0, 0), None)
    inner = max(range(len(dims)), key=lambda i: dims[i][0])
    count, (a, b, c) = dims.pop(inner)
    if not dims:
        return Batch(count, (a, b, c), None)
    grid = np.indices([n for n, _ in dims]).reshape(len(dims), -1).T
    outer = grid.astype(np.int64) @ np.array([step for _, step in dims], dtype=np.int64)
    return Batch(count, (a, b, c), np.ascontiguousarray(outer))


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`out` as an array that can take the result.

    Raises:
        TypeError: it is no array, or cannot hold the result's type.
        ValueError: its shape differs, or it is read-only.
    """
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is {type(out).__name__}; pass a numpy array")
    refuse_class(out, "out")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the product has shape {shape}")
    if not out.flags.writeable:
        raise ValueError("out is read-only; pass a writeable array")
    if not np.can_cast(dtype, out.dtype, casting="same_kind"):
        raise TypeError(f"out has dtype {out.dtype}, which cannot hold {dtype} results")
    return out


def single(out: Any) -> Any:
    """The array of an `out`, which may be a tuple of one, as in NumPy.

    Raises:
        ValueError: the tuple has another length.
    """
    if type(out) is not tuple:
        return out
    if len(out) != 1:
        raise ValueError(f"out is a tuple of {len(out)}; a product has one result")
    return out[0]


def put(out: Array, result: Array) -> None:
    """Copy a result to `out` in its type: overflow becomes an infinity, without a warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, result, casting="same_kind")


def spread(out: Any, shape: tuple[int, ...], core: int, dtype: np.dtype[Any]) -> tuple[int, ...]:
    """The product's shape as `out` has it: operands broadcast with the batch of `out`, as in `numpy.matmul`.

    Args:
        out: the array of the result.
        shape: of the product.
        core: the number of its last dimensions that are rows and columns, which never broadcast.
        dtype: of the product.

    Returns:
        `shape`, without leading dimensions of extent 1 which `out` does not have.

    Raises:
        TypeError: `out` is no array, or cannot hold the result's type.
        ValueError: the product does not broadcast to the shape of `out`, or `out` is read-only.
    """
    if not isinstance(out, np.ndarray) or out.shape == shape:
        check_out(out, shape, dtype)
        return shape
    own, batch = len(out.shape) - core, shape[: len(shape) - core]
    spare = max(0, len(batch) - own)
    spreads = own >= 0 and all(n == 1 for n in batch[:spare]) and out.shape[own:] == shape[len(batch) :]
    if spreads:
        spreads = all(n in (1, extent) for n, extent in zip(batch[::-1], out.shape[:own][::-1], strict=False))
    check_out(out, out.shape if spreads else shape, dtype)
    return shape[spare:]


def contiguous(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The strides in bytes of an array in C's order, for elements of `size` bytes."""
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return tuple(reversed(strides))


def span_of(shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[int, int]:
    """The first byte of an array's elements, and their end, from its first element; `size` is that of an element."""
    ends = [(max(n, 1) - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(x for x in ends if x < 0), sum(x for x in ends if x > 0) + size


def stand_in(shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None = None) -> Array:
    """An array of these strides in bytes, by default dense, over one element of memory, which must not be read."""
    # A view of raw bytes: NumPy does not parse the name of an 8-bit float.
    raw = np.empty(1, f"V{dtype.itemsize}")
    steps = contiguous(shape, dtype.itemsize) if strides is None else strides
    return np.lib.stride_tricks.as_strided(raw, shape, steps, writeable=False).view(dtype)


def aligned_empty(elements: int, dtype: Any) -> Array:
    """An uninitialised 1-D array that starts on a cache line."""
    size = np.dtype(dtype).itemsize
    raw = np.empty(elements * size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + elements * size].view(dtype)
