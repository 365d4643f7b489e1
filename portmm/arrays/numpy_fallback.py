"""NumPy fallback: products and panels computed without kernels.

Owns the one warning that NumPy computes, and products and panels equal to those of kernels: slow and correct.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.spec.dtype import accumulator
from portmm.util.user_warnings import warn

if TYPE_CHECKING:
    from portmm.spec.problem import Family

Array = np.ndarray[Any, Any]

_warned: list[str] = []


def fall_back(error: Exception) -> None:
    """Warn once per process that NumPy computes, and why.

    Raises:
        Exception: the error itself, where `$PORTMM_MISSING` says that a missing kernel is one.
    """
    from portmm.dispatch import missing  # not by calls of kernels that are there

    if missing.strict():
        raise error
    if not _warned:
        _warned.append(str(error))
        warn(f"portmm computes with NumPy, which is slower: {error}")


def forget() -> None:
    """Repeat the warning at the next fallback."""
    _warned.clear()


def product(left: Array, right: Array) -> Any:
    """The product in the accumulator's type, converted to that of the result."""
    types = numpy_arrays.types_of(left.dtype, right.dtype)
    acc = numpy_arrays.numpy_of(accumulator(*map(numpy_arrays.name_of, types[:2])))
    return np.matmul(left.astype(acc, copy=False), right.astype(acc, copy=False)).astype(types[2], copy=False)


def pack(array: Array, owner: Array, layout: Family) -> None:
    """Fill the panels of a packed weight, with column sums if the layout has them.

    Args:
        array: the weight, (..., k, n), of the panels' type.
        owner: the panels' memory.
        layout: of the panels.
    """
    from portmm.spec.layouts import in_panels, row_major

    *batch, k, n = array.shape
    view = in_panels(row_major(k, n), layout.nr, layout.kr)
    owner[...] = 0
    items = owner.reshape(math.prod(batch), -1, layout.panel(k) * layout.kr)
    for matrix, panels in zip(array.reshape(-1, k, n), items, strict=True):
        units = view.gather(matrix)
        panels[:, : units[0].size] = units.reshape(len(units), -1)
        if layout.sums:
            sums = units.sum(axis=(1, 3), dtype=np.int32).view(owner.dtype)
            panels[:, -sums.shape[1] :] = sums


def quantized_rows(left: Array) -> tuple[Array, Array]:
    """Int8 values and the float32 scale of each row; the scale of a row that is not finite is not finite, either."""
    rows = left.astype(np.float32)
    with np.errstate(all="ignore"):
        absmax = np.abs(rows).max(axis=-1, initial=0)
        inverse = np.where(absmax > 0, np.float32(127) / absmax, np.float32(0))
        scaled = np.where(np.isfinite(rows) & np.isfinite(inverse[..., None]), rows * inverse[..., None], 0)
        values = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
        return values, np.where(np.isnan(absmax), absmax, absmax / np.float32(127)).reshape(-1)
