"""Products with a requested result type.

Owns the precision of `matmul(a, b, dtype=...)`. As in NumPy, sums have the precision of the type: where kernels
have a less precise accumulator, operands are converted first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.ops.prepack import is_quantized, unpack
from portmm.util.array_subclasses import in_class_of

Array = np.ndarray[Any, Any]


def product(a: Any, b: Any, out: Any, dtype: np.dtype[Any], multiply: Callable[[Any, Any, Any], Any]) -> Any:
    """The product of `a` and `b` in a type, converted to that of `out`, if there is one.

    Args:
        a: an array.
        b: an array or a packed weight.
        out: the array of the result, or None.
        dtype: of the result.
        multiply: (a, b, out) to a product that is summed in the type of `dtype.accumulator`.

    Raises:
        TypeError: a type is not supported, or `dtype` or `out` cannot hold the result.
        ValueError: shapes do not match.
    """
    left = numpy_arrays.as_operand(a, "a")
    quantized = is_quantized(b)
    right = b if quantized or hasattr(b, "family") else numpy_arrays.as_operand(b, "b")
    shape = numpy_arrays.shape_of(left.shape, right.shape)
    b_type = np.dtype(np.float32) if quantized else right.dtype if isinstance(right, np.ndarray) else right.owner.dtype
    longest, converted = numpy_arrays.summed_in(left.dtype, b_type, dtype)
    converted = converted if left.shape[-1] > longest else None
    if converted is not None:
        left, right = left.astype(converted), numbers(right).astype(converted, copy=False)
    if out is not None and converted is None and getattr(out, "dtype", None) == dtype:
        return multiply(left, right, out)
    result: Any = np.empty(shape, dtype)
    if converted is not None and converted.itemsize > np.dtype(np.float64).itemsize:
        result[...] = np.matmul(left, right)  # no kernel has such an accumulator
    elif dtype.kind in "iu" and converted is not None:
        result[...] = multiply(left, right, None)  # exact, though float64
    else:
        multiply(left, right, result)
    if out is None:
        return in_class_of(result if shape else result[()], a, b)
    core = (left.ndim > 1) + (len(right.shape) > 1)
    numpy_arrays.put(out, result.reshape(numpy_arrays.spread(out, shape, core, dtype)))
    return out


def numbers(b: Any, dtype: Any = np.float32) -> Array:
    """The right operand as an ordinary array: an int4 weight dequantized to `dtype`."""
    if isinstance(b, np.ndarray) or not (is_quantized(b) or hasattr(b, "family")):
        return numpy_arrays.as_operand(b, "b")
    if not is_quantized(b):
        return unpack(b)
    from portmm.ops.int4_panels import PackedInt4, unpack_int4
    from portmm.weights.quantized import dequantize

    return dequantize(unpack_int4(b) if isinstance(b, PackedInt4) else b, dtype)
