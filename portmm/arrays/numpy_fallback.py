"""NumPy in place of kernels.

Owns the one warning that it computes, and products and panels as kernels make them: slow and right. Imports `arrays.numpy_arrays`,
`spec.dtype`, `spec.problem`.
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

_said: list[str] = []


def fall_back(error: Exception) -> None:
    """Say once per process that NumPy does the work, and why."""
    if not _said:
        _said.append(str(error))
        warn(f"portmm computes with NumPy, which is slower: {error}")


def forget() -> None:
    """Say it again when it happens again."""
    _said.clear()


def product(left: Array, right: Array) -> Any:
    """The product in the type that kernels sum in, then in that of the result."""
    types = numpy_arrays.types_of(left.dtype, right.dtype)
    wide = numpy_arrays.numpy_of(accumulator(*map(numpy_arrays.name_of, types[:2])))
    return np.matmul(left.astype(wide, copy=False), right.astype(wide, copy=False)).astype(types[2], copy=False)


def pack(array: Array, owner: Array, layout: Family) -> None:
    """Fill the panels of a packed weight, with the sums of their columns if they have them.

    Args:
        array: the weight, (..., k, n), of the panels' type.
        owner: the panels' memory.
        layout: how they lie.
    """
    *batch, k, n = array.shape
    nr, kr, count = layout.nr, layout.kr, math.prod(batch)
    panels, depth = -(-n // nr), -(-k // kr)
    whole = np.zeros((count, depth * kr, panels * nr), owner.dtype)
    whole[:, :k, :n] = array.reshape(count, k, n)
    units = whole.reshape(count, depth, kr, panels, nr).transpose(0, 3, 1, 4, 2)
    owner[...] = 0
    rows = owner.reshape(count, panels, layout.panel(k) * kr)
    rows[:, :, : depth * nr * kr] = units.reshape(count, panels, depth * nr * kr)
    if layout.sums:
        sums = whole.sum(axis=1, dtype=np.int32).reshape(count, panels, nr)
        ends = rows[:, :, -nr * sums.itemsize // owner.itemsize :]
        ends[...] = sums.view(owner.dtype).reshape(ends.shape)


def quantised_rows(left: Array) -> tuple[Array, Array]:
    """Codes of s8 and the scale of each row, in float32; a row that is not finite has a scale that is not, either."""
    rows = left.astype(np.float32)
    with np.errstate(all="ignore"):
        most = np.abs(rows).max(axis=-1, initial=0)
        inverse = np.where(most > 0, np.float32(127) / most, np.float32(0))
        scaled = np.where(np.isfinite(rows) & np.isfinite(inverse[..., None]), rows * inverse[..., None], 0)
        codes = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
        return codes, np.where(np.isnan(most), most, most / np.float32(127)).reshape(-1)


def scaled(sums: Array, vectors: tuple[Array | None, ...], columns: Array, dtype: np.dtype[Any]) -> Array:
    """The last step of quantised products (kernels/cpu/epilogue.py): zero points, scales, bias, rounding.

    Args:
        sums: int32, (m, n), or floats that only scales and a bias are for.
        vectors: a_scale, b_scale, bias, a_zero, a_sum, b_zero, as kernels take them; of columns, padded.
        columns: sums of the columns of B, for zero points of A.
        dtype: of the result.
    """
    a_scale, b_scale, bias, a_zero, a_sum, b_zero = vectors
    m, n = sums.shape
    if sums.dtype.kind == "i":
        whole = sums.astype(np.int64)
        if a_zero is not None:
            whole += np.asarray(a_zero[:m], np.int64)[:, None] * columns
        if a_sum is not None and b_zero is not None:
            whole += np.asarray(a_sum[:m], np.int64)[:, None] * np.asarray(b_zero[:n], np.int64)
        sums = whole.astype(np.int32)  # modulo 2**32, as kernels sum
    with np.errstate(all="ignore"):
        values = sums.astype(np.float32)
        if b_scale is not None:
            values *= b_scale[:n]
        wide = values.astype(np.float64)
        if a_scale is not None:
            wide *= a_scale[:m, None]
        if bias is not None:
            wide += bias[:n]
        found: Array = wide.astype(np.float32)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            found = np.clip(np.rint(found), info.min, info.max)
        return found.astype(dtype)
