"""Quantized linear layers of arrays on a device.

Owns `linear` for such arrays: scales and a bias become an epilogue of an integer
product, so that nothing else passes through memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, libraries
from portmm.ops import rowwise_gpu
from portmm.ops.matmul import matmul
from portmm.spec.elementwise import cast, maximum, minimum, quantize_rows
from portmm.trace.closures import traced_through

if TYPE_CHECKING:
    from collections.abc import Callable

_ROWS = {"m": "m", "n": "n", "b": "b"}


def linear(  # noqa: PLR0917 - operands, then the options of `linear.linear`
    x: Any, w: Any, bias: Any, options: dict[str, Any], dtype: Any, out: Any, epilogue: Callable[..., Any] | None
) -> Any:
    """X . w + bias of arrays on one device: see `linear.linear`.

    Args:
        x: int8 or uint8 values, or floats that are `dynamic`, (..., m, k).
        w: int8 values, (k, n).
        bias: (n,), or None.
        options: the other options, by name.
        dtype: of the result, or None.
        out: the array of the result, or None.
        epilogue: a function of the scaled sums, or None.

    Raises:
        TypeError: an operand is in the host's memory or of another type, or there are zero points.
        ValueError: shapes do not match, or `out_scale` is passed with an epilogue.
    """
    left, weight = interop.adopt(x), interop.adopt(w)
    if left is None or weight is None:
        name, kind = ("x", x) if left is None else ("w", w)
        raise TypeError(
            f"{name} is a {type(kind).__name__} in the host's memory, the other is on a device: copy it there"
        )
    for name in ("x_zero", "w_zero"):
        if not isinstance(options[name], (int, np.integer)) or options[name] != 0:
            raise TypeError(
                f"{name} is set: on a device values have no zero points; add their contribution, "
                "- x_zero * x_scale * w_scale * (sums of w's columns), to the bias"
            )
    if options["dynamic"] and not left.shape[-1]:
        # Empty rows have no largest element.
        x, left = interop.empty_like(left, left.shape, "s8")
        options = options | {"x_scale": 1.0, "dynamic": False}
    elif options["dynamic"]:
        # Scales of small rows would underflow in float16.
        results, _ = rowwise_gpu.over_rows(lambda v, _i: quantize_rows(v), (left,), _ROWS, dtype="f32")
        (values, _), (scales, _) = results
        x, left, options = values, interop.adopt(values), options | {"x_scale": scales}
        assert left is not None  # noqa: S101 - allocated on the device
    if left.dtype not in ("s8", "u8") or weight.dtype != "s8":
        raise TypeError(
            f"x has elements of {left.dtype} and w of {weight.dtype}; on a device linear takes int8 or uint8 by int8, "
            "and floats that are dynamic: multiply others with matmul"
        )
    if epilogue is not None and options["out_scale"] is not None:
        raise ValueError("out_scale is passed with an epilogue; let that scale and cast the result")
    result_type = dtype
    if options["out_scale"] is not None and dtype is None:
        result_type = np.int8 if left.dtype == "s8" else np.uint8
    usual = None if options["out_scale"] is not None else result_type
    return matmul(x, w, out, dtype=usual, epilogue=_epilogue(bias, options, result_type, epilogue))


def _epilogue(
    bias: Any, options: dict[str, Any], dtype: Any, epilogue: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The function of a sum and its indices: scales, bias, zero point and the user's epilogue."""
    rows: Any
    columns: Any
    rows, columns = (x if libraries.on_device(x) else float(x) for x in (options["x_scale"], options["w_scale"]))
    by_row, by_column, requantize = (
        libraries.on_device(rows),
        libraries.on_device(columns),
        options["out_scale"] is not None,
    )
    last, zero = float(options["out_scale"] or 1.0), float(options["out_zero"])
    early = requantize and last >= 1
    kept_axis = bool(options["dynamic"])  # scales of dynamic rows keep their axis
    several = by_row and len(rows.shape) - kept_axis > 1

    @traced_through
    def apply(acc: Any, i: Any) -> Any:
        row, column = rows, columns[i.n] if by_column else columns
        if by_row:
            at = (i.b, i.m) if several else (i.m,)
            row = rows[*at, 0] if kept_axis else rows[at]
        # What makes an integer smaller comes first, so that no step leaves float32 unless the result does.
        value = acc * minimum(row, 1.0)
        value = value / last if early else value
        value = value * column * maximum(row, 1.0)
        if bias is not None:
            value = value + (bias[i.n] / last if early else bias[i.n])
        if epilogue is not None:
            return epilogue(value, i)
        if not requantize:
            return value
        return cast((value if early else value / last) + zero, dtype)

    return apply
