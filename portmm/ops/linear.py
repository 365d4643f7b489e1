"""Quantized linear layers: products of quantized operands, with their scales.

Owns `linear`: scales, zero points and a bias, reduced to the vectors that a kernel's epilogue
reads (`spec.dequantization`), the run of the kernel, and NumPy in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import libraries, numpy_arrays, numpy_fallback
from portmm.errors import BuildError, ScheduleError
from portmm.ops import host_matmul
from portmm.ops.linear_vectors import is_default, scaled_in_float64, vectors_of, zero_point
from portmm.ops.prepack import current, is_packed, pack, unpack
from portmm.ops.quantized_kernel import LinearOptions, kernel_of, layout_of, product_of, run
from portmm.spec.row_classes import last_of_class
from portmm.util.array_subclasses import refuse_class
from portmm.weights.kinds import WeightKind, weight_kind

if TYPE_CHECKING:
    from portmm.ops.product_kernel import HostProduct, ProductKernel
    from portmm.trace.bind import UserFunction

Array = np.ndarray[Any, Any]
SCALED_TWICE = "out_scale is passed with an epilogue; let that scale and cast the result"


def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    x_scale: Any = 1.0,
    x_zero: Any = 0,
    w_scale: Any = 1.0,
    w_zero: Any = 0,
    out_scale: Any = None,
    out_zero: int = 0,
    dynamic: bool = False,
    dtype: Any = None,
    out: Any = None,
    epilogue: Callable[..., Any] | None = None,
) -> Any:
    """X . w + bias for quantized operands: values are scale * (code - zero).

    The sum over k is exact in integers, zero points included, modulo 2**32; then follow
    three roundings in float32 and one to the result. With an int4 weight
    sums are exact within a group, and the groups are summed in float32. Results that float32 can hold are
    finite, however large or small the scales are: with scales of w above 2**96 sums are scaled in float64, which takes
    longer.

    Args:
        x: int8 or uint8 values (..., k), or float32, float16 or bfloat16 values,
            which have no scale or zero point and are multiplied without conversion, or are `dynamic`. Arrays on a
            device are integers, or dynamic, and have no zero points; w, scales and a bias are there too.
        w: int8 values (k, n), or those packed by `pack` for the dtype of `x`, or an int4 weight
            from `quantize`, packed or not. An unpacked weight is packed in
            every call.
        bias: (n,), of the result's values; none by default.
        x_scale: a number, or one for each row: x's shape without k.
        x_zero: as `x_scale`, integers.
        w_scale: a number, or one for each column, (n,).
        w_zero: as `w_scale`, integers, not with `dynamic`. Zero points of w cost a sum
            over x. An int4 weight has its own, and takes an `x` without any.
        out_scale: quantize the result: round to nearest even, saturate.
        out_zero: zero point of the result.
        dynamic: dynamic quantization: quantize the float rows of `x` to int8, each by its largest
            magnitude: values are x * (127 / max |x|), in float32, rounded half to even, and
            their scale is max |x| / 127. The results of a row with a NaN or an infinity are all
            not finite. `w` must be packed for int8.
        dtype: float32, float16 or bfloat16; with `out_scale` int8 or uint8. By
            default float32, or the type of `x` with `out_scale`.
        out: the array of the result, of that type.
        epilogue: a function of the scaled sums, as in `matmul`, before they are rounded.
            Not with `out_scale`: `quantize_rows` and `cast` do that.

    Returns:
        The result, (..., n), of type `dtype`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes do not match, a scale is negative or not finite, or a zero point
            does not fit 16 bits.
        ScheduleError: `w` was packed for other activations.
    """
    if where := libraries.place_of(x, w, bias, x_scale, w_scale, out):
        from portmm.arrays.interop import elsewhere

        more = {"x_scale": x_scale, "x_zero": x_zero, "w_scale": w_scale, "w_zero": w_zero, "out_scale": out_scale}
        more |= {"out_zero": out_zero, "dynamic": dynamic, "dtype": dtype, "out": out, "epilogue": epilogue}
        return elsewhere(where, linear, _on_device, (x, w), {"bias": bias, **more})
    left = numpy_arrays.as_operand(x, "x", matrix=False)
    if weight_kind(w) is WeightKind.INT4_PANELS:
        weight = w
    elif is_packed(w):
        weight = current(w)
    else:
        weight = _weight(w, np.dtype(np.int8) if dynamic else left.dtype)
    options_used = (not is_default(x_zero, 0), not is_default(w_zero, 0), not is_default(x_scale, 1))
    options = LinearOptions(
        None if dtype is None else np.dtype(dtype), dynamic, *options_used, bias is not None, out_scale is not None
    )
    m = left.shape[0] if left.ndim == 2 else prod(left.shape[:-1])
    key = (last_of_class(m), *layout_of(left), left.dtype, left.flags.aligned, weight.family, weight.shape, options)
    scaling = (x_scale, x_zero, w_scale, w_zero, out_scale, out_zero)
    if epilogue is not None:
        return _fusing()[0](_Fused(key, (left, weight, options), out, bias, scaling), epilogue)
    kernel, shape = kernel_of(key, m, _begun, left, weight, options), (*left.shape[:-1], weight.shape[1])
    ((_, written),) = kernel.results
    vectors = vectors_of(left, (m, shape[-1]), bias, scaling, _unit(left, weight, options), dynamic=dynamic)
    if vectors is None or kernel.route is None:
        into = np.empty(shape, written if dtype is None else dtype) if out is None else out
        result = _checked_out(into, shape, written)
        if result.size:
            rows = left.reshape(m, left.shape[-1])
            result[...] = _by_numpy(rows, weight, written, bias, scaling, dynamic=dynamic).reshape(shape)
        return result
    if out is None:
        result = np.empty(shape, written)
        to = result
    else:
        result = _checked_out(out, shape, written)
        to = result if numpy_arrays.dense_at(result, written, left, *vectors) else np.empty(shape, written)
    run(kernel, m, left, weight, to, (kernel.bound, None, *vectors))
    if to is not result:
        result[...] = to
    return result if out is not None or dtype is None else result.astype(dtype, copy=False)


def _begun(*call: Any) -> HostProduct:
    """The product of a call, after the run time is loaded."""
    host_matmul.begin()
    return product_of(*call)


class _Fused:
    """A call with an epilogue in the host's memory: see `epilogues.fused`."""

    def __init__(self, key: tuple[Any, ...], operands: tuple[Any, ...], out: Any, bias: Any, scaling: Any) -> None:
        self.key, self.operands, self.out, self.bias, self.scaling = ("linear", key), operands, out, bias, scaling
        left, _, options = operands
        if left.ndim < 2:
            raise ValueError(f"an epilogue takes matrices; got x of shape {left.shape}: add a dimension of 1")
        if options.requantize:
            raise ValueError(SCALED_TWICE)

    def sums(self) -> str:
        """The type of the scaled sums."""
        return "f32"

    def kernel(self, function: UserFunction) -> tuple[ProductKernel, Any] | ScheduleError:
        """The kernel and the vectors of its epilogue, or the reason why there is none."""
        left, weight, options = self.operands
        _, kernel_of, *_ = _fusing()
        try:
            kernel = kernel_of(function, left, weight, self.key, lambda traced: _begun(*self.operands).ready(traced))
        except BuildError as error:
            numpy_fallback.fall_back(error)
            return ScheduleError(str(error))
        if isinstance(kernel, ScheduleError):
            return kernel
        size, unit = (prod(left.shape[:-1]), weight.shape[1]), _unit(*self.operands)
        vectors = vectors_of(left, size, self.bias, self.scaling, unit, dynamic=options.dynamic)
        return ScheduleError("float32 may not hold scaled sums") if vectors is None else (kernel, vectors)

    def run(self, ready: tuple[ProductKernel, Any], function: UserFunction) -> Any:
        """The results of the kernel."""
        (kernel, vectors), (left, weight, _), out = ready, self.operands, self.out
        (shape, written), *more = kernel.results
        # An array that the epilogue captures may be `out`, read elsewhere than where it is written.
        apart = out is not None and not function.closure and out.shape == shape
        direct = apart and numpy_arrays.dense_at(out, written, left, *vectors)
        results = [out if direct else np.empty(shape, written), *(np.empty(s, t) for s, t in more)]
        operands = kernel.bound.fill(function.closure, vectors, results[1:])
        run(kernel, prod(left.shape[:-1]), left, weight, results[0], operands)
        return _fusing()[2](results, out, several=kernel.several)

    def split(self, epilogue: Callable[..., Any]) -> Any:
        """The results of two kernels, the second one over rows."""
        _, _, fit, over_rows, axes = _fusing()
        left, weight, options = self.operands
        names = ("x_scale", "x_zero", "w_scale", "w_zero", "out_scale", "out_zero")
        by_name, f32 = dict(zip(names, self.scaling, strict=True)), np.dtype(np.float32)
        product = linear(left, weight, self.bias, **by_name, dynamic=options.dynamic, dtype=f32)
        results, several = over_rows(epilogue, (product,), axes, dtype=options.dtype or f32)
        return fit(list(results), self.out, several=several)


@cache
def _fusing() -> tuple[Any, ...]:
    """Functions that only calls with an epilogue import, once: three imports in a function take two microseconds."""
    from portmm.ops import epilogues, fused_matmul, rowwise

    return epilogues.fused, fused_matmul.kernel_of, fused_matmul.fit, rowwise.over_rows, epilogues.NAMES


def _unit(left: Array, weight: Any, options: LinearOptions) -> float:
    """A bound on what a unit of an integer sum is multiplied by before the vectors of the epilogue."""
    integers = options.dynamic or left.dtype.kind in "iu"
    rescaled = options.dynamic or options.x_scale or options.requantize
    if not (integers and rescaled and weight_kind(weight) is WeightKind.INT4_PANELS):
        return 1.0
    from portmm.ops.int4_panels import largest_weight

    return largest_weight(weight)


def _by_numpy(
    left: Array, weight: Any, dtype: np.dtype[Any], bias: Any, scaling: tuple[Any, ...], *, dynamic: bool
) -> Array:
    """The result by NumPy, scaled in float64: without a kernel, and where float32 would overflow."""
    _, x_zero, _, w_zero, *_ = scaling
    rows = None
    if dynamic:
        left, rows = numpy_fallback.quantized_rows(left)
    if weight_kind(weight) is WeightKind.INT4_PANELS:
        from portmm.ops.int4_panels import unpack_int4
        from portmm.weights.quantized import dequantize

        # Values and scales are exact in float64, in which groups are summed, too.
        sums = left.astype(np.float64) @ dequantize(unpack_int4(weight), np.float64)
    elif left.dtype.kind in "iu":
        # Exact as well, by libraries that have no integers; kernels sum modulo 2**32.
        codes, columns = left.astype(np.float64) - np.reshape(x_zero, (-1, 1)), np.reshape(w_zero, (1, -1))
        sums = (codes @ (unpack(weight).astype(np.float64) - columns)).astype(np.int64).astype(np.int32)
    else:
        sums = left.astype(np.float32) @ unpack(weight).astype(np.float32)
    return scaled_in_float64(sums, rows, bias, scaling, dtype)


def _checked_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    into = numpy_arrays.check_out(out, shape, dtype)
    if into.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"out has dtype {into.dtype}; the result is {dtype}: set it with dtype=")
    return into


def _weight(w: Any, activations: np.dtype[Any]) -> Any:
    """The packed weight of an unpacked one."""
    if weight_kind(w) is WeightKind.QUANTIZED:
        return pack(w)
    refuse_class(w, "w")
    codes = np.asarray(w)
    if codes.ndim != 2:
        raise ValueError(f"w has shape {codes.shape}; it must be a matrix")
    return pack(codes, activations=activations.newbyteorder("="))


# -- on a device -----------------------------------------------------------------------


def _on_device(
    x: Any, w: Any, bias: Any, *, dtype: Any, out: Any, epilogue: Callable[..., Any] | None, **options: Any
) -> Any:
    """The same for arrays on one device: scales and a bias are an epilogue of an integer product."""
    from portmm.arrays import interop
    from portmm.ops import grid_product
    from portmm.ops.epilogues import NAMES
    from portmm.ops.kernel_call import over_rows
    from portmm.spec.elementwise import quantize_rows

    there = interop.adopt_all({"x": x, "w": w})
    left, weight = there["x"], there["w"]
    for name in ("x_zero", "w_zero"):
        if not isinstance(options[name], (int, np.integer)) or options[name] != 0:
            raise TypeError(
                f"{name} is set: on a device values have no zero points; add their contribution, "
                "- x_zero * x_scale * w_scale * (sums of w's columns), to the bias"
            )
    if options["dynamic"] and not left.shape[-1]:
        # Empty rows have no largest element.
        left, options = interop.empty_like(left, left.shape, "s8"), options | {"x_scale": 1.0, "dynamic": False}
    elif options["dynamic"]:
        # Scales of small rows would underflow in float16.
        (left, scales), _ = over_rows(lambda v, _i: quantize_rows(v), (left,), NAMES, dtype=np.float32)
        options = options | {"x_scale": scales.source}
    if left.dtype not in ("s8", "u8") or weight.dtype != "s8":
        raise TypeError(
            f"x has elements of {left.dtype} and w of {weight.dtype}; on a device linear takes int8 or uint8 by int8, "
            "and floats that are dynamic: multiply others with matmul"
        )
    requantize = options["out_scale"] is not None
    if epilogue is not None and requantize:
        raise ValueError(SCALED_TWICE)
    if requantize and dtype is None:
        dtype = np.int8 if left.dtype == "s8" else np.uint8
    step = _epilogue(bias, options, dtype, epilogue)
    return grid_product.product(left, weight, out, dtype=None if requantize else dtype, epilogue=step)


def _scalar(name: str, value: Any) -> Any:
    """A scale that is a number, checked; one for each row or column stays on the device."""
    if libraries.on_device(value):
        return value
    number = float(value)
    if not 0 <= number < inf:
        raise ValueError(f"{name} must be finite and not negative; it is {number}")
    return number


def _epilogue(
    bias: Any, options: dict[str, Any], dtype: Any, epilogue: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The function of a sum and its indices: scales, bias, zero point and the user's epilogue."""
    from portmm.spec.elementwise import cast, maximum, minimum
    from portmm.trace.closures import traced_through

    rows: Any
    columns: Any
    rows, columns = (_scalar(name, options[name]) for name in ("x_scale", "w_scale"))
    by_row, by_column, requantize = (
        libraries.on_device(rows),
        libraries.on_device(columns),
        options["out_scale"] is not None,
    )
    last = _scalar("out_scale", options["out_scale"]) if requantize else 1.0
    if not last:
        raise ValueError("out_scale is 0; it must be positive")
    zero = float(zero_point(options["out_zero"]))
    early = requantize and last >= 1
    kept_axis = bool(options["dynamic"])  # scales of dynamic rows keep their axis
    several = by_row and len(rows.shape) - kept_axis > 1

    @traced_through
    def apply(acc: Any, i: Any) -> Any:
        row, column = rows, columns[i.n] if by_column else columns
        if by_row:
            at = (i.b, i.m) if several else (i.m,)
            row = rows[*at, 0] if kept_axis else rows[at]
        # Factors below 1 first: no intermediate value overflows float32 unless the result does.
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
