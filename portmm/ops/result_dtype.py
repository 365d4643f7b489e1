"""Products of a type that was asked for.

Owns the precision of `matmul(a, b, dtype=...)`. As in NumPy, sums have the precision of the type: where kernels
sum in a lesser one, operands are converted first. Imports `arrays.numpy_arrays`, `spec.dtype`, `ops.prepack`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.ops.prepack import is_coded, unpack
from portmm.spec.dtype import accumulator
from portmm.util.array_subclasses import in_class_of

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
LONGEST = {"s8": (2**31 - 1) // (128 * 128), "u8": (2**31 - 1) // (255 * 128)}
"""Type of A -> the longest sum of its products with int8 that fits int32: each is at most so large."""


def product(a: Any, b: Any, out: Any, dtype: np.dtype[Any], multiply: Callable[[Any, Any, Any], Any]) -> Any:
    """The product of `a` and `b` in a type, and from there in that of `out`, if there is one.

    Args:
        a: an array.
        b: an array or a packed weight.
        out: where to put the result, or None.
        dtype: of the result.
        multiply: (a, b, out) to a product that is summed in the type that `dtype.accumulator` says.

    Raises:
        TypeError: a type is not supported, or `dtype` or `out` cannot hold the result.
        ValueError: shapes do not fit.
    """
    left = numpy_arrays.as_operand(a, "a")
    coded = is_coded(b)
    right = b if coded or hasattr(b, "family") else numpy_arrays.as_operand(b, "b")
    shape = numpy_arrays.shape_of(left, right.shape)
    held = np.dtype(np.float32) if coded else right.dtype if isinstance(right, np.ndarray) else right.owner.dtype
    fits, wide = _summed_in(left.dtype, held, dtype)
    wide = wide if left.shape[-1] > fits else None
    if wide is not None:
        left, right = left.astype(wide), numbers(right).astype(wide, copy=False)
    if out is not None and wide is None and getattr(out, "dtype", None) == dtype:
        return multiply(left, right, out)
    result: Any = np.empty(shape, dtype)
    if wide is not None and wide.itemsize > np.dtype(np.float64).itemsize:
        result[...] = np.matmul(left, right)  # no kernel sums in it
    elif dtype.kind in "iu" and wide is not None:
        result[...] = multiply(left, right, None)  # exact, though float64
    else:
        multiply(left, right, result)
    if out is None:
        return in_class_of(result if shape else result[()], a, b)
    core = (left.ndim > 1) + (len(right.shape) > 1)
    numpy_arrays.put(out, result.reshape(numpy_arrays.spread(out, shape, core, dtype)))
    return out


@lru_cache(maxsize=256)
def _summed_in(a: np.dtype[Any], b: np.dtype[Any], dtype: np.dtype[Any]) -> tuple[int, np.dtype[Any] | None]:
    """How long sums may be, and the type that operands of longer ones are converted to; None if they never are.

    Raises:
        TypeError: the two do not multiply, or `dtype` cannot hold the result.
    """
    left, right, natural = numpy_arrays.types_of(a, b)
    if not np.can_cast(natural, dtype, casting="same_kind"):
        raise TypeError(f"dtype is {dtype}, which cannot hold {natural} results")
    acc = accumulator(*map(numpy_arrays.name_of, (left, right)))
    if acc == "s32":
        narrow = dtype.kind in "iu" and dtype.itemsize <= np.dtype(np.int32).itemsize  # which wraps around as well
        return LONGEST[numpy_arrays.name_of(left)], None if narrow else np.dtype(np.float64)
    if dtype.kind not in "fc":
        return 0, None
    asked = np.finfo(dtype).dtype  # of a complex type, that of its parts
    return 0, asked if asked.itemsize > numpy_arrays.numpy_of(acc).itemsize else None


def numbers(b: Any, dtype: Any = np.float32) -> Array:
    """A right operand as an ordinary array: one of four bits in a type that is given."""
    if isinstance(b, np.ndarray) or not (is_coded(b) or hasattr(b, "family")):
        return numpy_arrays.as_operand(b, "b")
    if not is_coded(b):
        return unpack(b)
    from portmm.ops.int4_panels import Folded, unfold
    from portmm.weights.quantized import dequantize

    return dequantize(unfold(b) if isinstance(b, Folded) else b, dtype)
