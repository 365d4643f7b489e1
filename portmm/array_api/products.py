"""Products of the array API by kernels of portmm.

Owns the choice: two NumPy arrays of one float type are multiplied by portmm, whose other results, as int32 of two of
int8, are not those of the standard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import PortmmError
from portmm.ops.einsum import einsum
from portmm.ops.matmul import matmul as product

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

FLOATS = "efd"


@cache
def base() -> Any:
    """NumPy's namespace of the standard: its own from NumPy 2 on, else that of array-api-compat.

    Raises:
        PortmmError: there is neither.
    """
    if hasattr(np, "__array_api_version__"):
        return np
    from importlib import import_module

    try:
        return import_module("array_api_compat.numpy")
    except ImportError as error:
        raise PortmmError(f"portmm.array_api needs NumPy 2, or array-api-compat: {error}") from error


def _has_kernels(x1: Any, x2: Any) -> bool:
    return type(x1) is type(x2) is np.ndarray and x1.dtype == x2.dtype and x1.dtype.char in FLOATS


def matmul(x1: Any, x2: Any, /) -> Any:
    """The matrix product: see `matmul` of the standard, and `portmm.matmul`.

    Raises:
        ValueError: shapes do not match.
    """
    return product(x1, x2) if _has_kernels(x1, x2) else base().matmul(x1, x2)


def tensordot(x1: Any, x2: Any, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Any:
    """The sum of products over axes of both arrays: see `tensordot` of the standard.

    Args:
        x1: an array.
        x2: an array.
        axes: the number of last axes of `x1` and first axes of `x2`, or those of each, in order.

    Raises:
        ValueError: axes do not match.
    """
    if not _has_kernels(x1, x2):
        return base().tensordot(x1, x2, axes=axes)
    if isinstance(axes, int):
        own, other = list(range(x1.ndim - axes, x1.ndim)), list(range(axes))
    else:
        own, other = ([range(x.ndim)[i] for i in y] for x, y in zip((x1, x2), axes, strict=True))
    if [x1.shape[i] for i in own] != [x2.shape[i] for i in other]:  # einsum would broadcast extents of 1
        raise ValueError(f"axes {axes} of shapes {x1.shape} and {x2.shape} do not have the same extents")
    left = list(range(x1.ndim))
    right = [left[own[other.index(i)]] if i in other else x1.ndim + i for i in range(x2.ndim)]
    result = [i for i in left if i not in own] + [i for i in right if i >= x1.ndim]
    return einsum(x1, left, x2, right, result)
