"""Products of quantised operands that lie on a device, with their scales.

Owns `linear` for such arrays: what a caller says about scales and a bias becomes an epilogue, so that codes are
multiplied by whatever multiplies integers, and nothing else passes through memory. Imports `ops.matmul`, `arrays.interop`,
`ops.rowwise_gpu`, `spec.elementwise`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop
from portmm.ops import matmul as matmul_op
from portmm.ops import rowwise_gpu
from portmm.spec.elementwise import cast, quantize_rows
from portmm.trace.closures import traced_through

if TYPE_CHECKING:
    from collections.abc import Callable

_ROWS = {"m": "m", "n": "n", "b": "b"}


def linear(  # noqa: PLR0917 - operands, then what `scaled.linear` was told
    x: Any, w: Any, bias: Any, said: dict[str, Any], dtype: Any, out: Any, epilogue: Callable[..., Any] | None
) -> Any:
    """X . w + bias of arrays on one device: see `scaled.linear`.

    Args:
        x: codes of int8 or uint8, or floats that are `dynamic`, (..., m, k).
        w: codes of int8, (k, n).
        bias: (n,), or None.
        said: its other options, by name.
        dtype: of the result, or None.
        out: where to put it, or None.
        epilogue: what becomes of the scaled sums, or None.

    Raises:
        TypeError: an operand is in the host's memory or of another type, or there are zero points.
        ValueError: shapes do not fit, or `out_scale` stands beside an epilogue.
    """
    left, weight = interop.adopt(x), interop.adopt(w)
    if left is None or weight is None:
        name, kind = ("x", x) if left is None else ("w", w)
        raise TypeError(
            f"{name} is a {type(kind).__name__} in the host's memory, the other is on a device: copy it there"
        )
    for name in ("x_zero", "w_zero"):
        if not isinstance(said[name], (int, np.integer)) or said[name] != 0:
            raise TypeError(
                f"{name} is given: on a device codes have no zero points; add what they come to, "
                "- x_zero * x_scale * w_scale * (sums of w's columns), to the bias"
            )
    if said["dynamic"] and not left.shape[-1]:
        # Rows of nothing have no largest element.
        x, left = interop.empty_like(left, left.shape, "s8")
        said = said | {"x_scale": 1.0, "dynamic": False}
    elif said["dynamic"]:
        # Scales of small rows would be none of float16's numbers.
        found, _ = rowwise_gpu.over_rows(lambda v, _i: quantize_rows(v), (left,), _ROWS, dtype="f32")
        (made, _), (scales, _) = found
        x, left, said = made, interop.adopt(made), said | {"x_scale": scales}
        assert left is not None  # noqa: S101 - made on the device
    if left.dtype not in ("s8", "u8") or weight.dtype != "s8":
        raise TypeError(
            f"x has elements of {left.dtype} and w of {weight.dtype}; on a device linear takes int8 or uint8 by int8, "
            "and floats that are dynamic: multiply others with matmul"
        )
    if epilogue is not None and said["out_scale"] is not None:
        raise ValueError("out_scale is given beside an epilogue; let that scale and cast the result")
    wanted = dtype
    if said["out_scale"] is not None and dtype is None:
        wanted = np.int8 if left.dtype == "s8" else np.uint8
    usual = None if said["out_scale"] is not None else wanted
    return matmul_op.matmul(x, w, out, dtype=usual, epilogue=_ending(bias, said, wanted, epilogue))


def _ending(bias: Any, said: dict[str, Any], dtype: Any, epilogue: Callable[..., Any] | None) -> Callable[..., Any]:
    """What becomes of a sum: a function of it and its place."""
    rows: Any
    columns: Any
    rows, columns = (x if interop.on_device(x) else float(x) for x in (said["x_scale"], said["w_scale"]))
    by_row, by_column, again = interop.on_device(rows), interop.on_device(columns), said["out_scale"] is not None
    last, zero = float(said["out_scale"] or 1.0), float(said["out_zero"])
    kept = bool(said["dynamic"])  # scales of rows that were quantised keep their axis
    several = by_row and len(rows.shape) - kept > 1

    @traced_through
    def ending(acc: Any, i: Any) -> Any:
        value = acc
        if by_row and kept:
            value = value * (rows[i.b, i.m, 0] if several else rows[i.m, 0])
        elif by_row:
            value = value * (rows[i.b, i.m] if several else rows[i.m])
        else:
            value = value * rows
        value = value * (columns[i.n] if by_column else columns)
        if bias is not None:
            value = value + bias[i.n]
        if epilogue is not None:
            return epilogue(value, i)
        return cast(value / last + zero, dtype) if again else value

    return ending
