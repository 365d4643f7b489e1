"""Products with quantized weights on the host: of floats and int4 values, and `linear`, whose epilogue has scales.

Owns the memo of their kernels without a user's function, and the rules for types, shapes and options of `linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import numpy_arrays, numpy_fallback
from portmm.dispatch import config
from portmm.errors import BuildError, ScheduleError
from portmm.ops.product_kernel import HostProduct, ProductKernel
from portmm.spec.dequantization import Dequantization
from portmm.spec.problem import family
from portmm.spec.row_classes import last_of_class, row_class
from portmm.util.memo import Memory, cached

if TYPE_CHECKING:
    from portmm.ops.int4_panels import PackedInt4

LONGEST_GROUP = (2**31 - 1) // (128 * 15)
"""Rows of int4 values whose sum of products with int8 is below 2**31."""
MOST_CALLS = 1024
"""Kinds of calls remembered before the memo is emptied."""

_kernels = Memory(MOST_CALLS, "calls")

Array = np.ndarray[Any, Any]


class LinearOptions(NamedTuple):
    """The options of a call that kernels depend on: vectors that are not default, and types."""

    dtype: np.dtype[Any] | None
    dynamic: bool
    x_zero: bool
    w_zero: bool
    x_scale: bool
    bias: bool
    requantize: bool

    @property
    def dequantization(self) -> Dequantization:
        """The steps of a kernel's epilogue."""
        return Dequantization(self.x_zero, self.w_zero, self.bias or self.requantize, self.dynamic)


def layout_of(x: Array) -> tuple[Any, ...]:
    """Columns and strides of x, independent of its number of rows where possible."""
    if x.ndim == 2:
        return x.shape[1], x.strides
    return (x.shape[-1], None) if x.flags.c_contiguous else (x.shape, x.strides)


def kernel_of(key: tuple[Any, ...], m: int, make: Callable[..., HostProduct], *operands: Any) -> ProductKernel:
    """The kernel for operands of this kind, from the memo: for the class of M, where that has one kernel.

    Args:
        key: the kind.
        m: rows of A.
        make: makes the product, of
        operands: its arguments.
    """
    key = (*key, config.current(), config.limit())
    kernel: ProductKernel | None = _kernels.get(key) or _kernels.get((m, key))
    if kernel is None:
        product = make(*operands)
        if 0 in (m, *product.right.shape):
            return _by_numpy(product)
        try:
            kernel = product.selected()
        except BuildError as error:
            numpy_fallback.fall_back(error)
            return _by_numpy(product)
        if kernel.weight is None and kernel.lasting:
            _kernels.keep(key if kernel.rows == row_class(m) else (m, key), kernel)
    return kernel


def _by_numpy(product: HostProduct) -> ProductKernel:
    """A record for a call without a kernel."""
    return ProductKernel(((product.left.shape, product.types()[2]),), (0, 0))


def run(  # noqa: PLR0917 - operands, then those of the epilogue
    kernel: ProductKernel, m: int, left: Array, weight: Any, out: Array, operands: tuple[Any, ...] = ()
) -> None:
    """Run a kernel of such a kind; `operands` are those of its epilogue."""
    rows = left if kernel.direct else np.require(left, left.dtype.newbyteorder("="), ("C", "A"))
    kernel.run(m, rows, (weight if kernel.weight is None else kernel.weight).owner, out, operands)


# -- products with weights of four bits ------------------------------------------------


def int4_product(a: Any, w: PackedInt4, out: Any, multiply: Callable[[Any, Any, Any], Any]) -> Any:
    """The product of float activations and a prepacked int4 weight; `multiply` does so by a dequantized one.

    Raises:
        TypeError: activations are no floats that kernels multiply, or `out` cannot hold the result.
        ValueError: shapes do not match.
    """
    left = numpy_arrays.as_operand(a, "a")
    shape, m = (*left.shape[:-1], w.shape[1]), prod(left.shape[:-1])
    wanted = None if out is None else numpy_arrays.check_out(out, shape, left.dtype.newbyteorder("=")).dtype
    key = ("int4", last_of_class(m), *layout_of(left), left.dtype, left.flags.aligned, w.family, w.shape, wanted)
    try:
        kernel = kernel_of(key, m, _by_int4, left, w, wanted)
    except ScheduleError:  # there is none on this machine
        kernel = _by_numpy(_by_int4(left, w, wanted))
    ((_, written),) = kernel.results
    direct = numpy_arrays.dense_at(out, written, left)
    result = out if direct else np.empty(shape, written)
    if result.size and kernel.route is not None:
        run(kernel, m, left, w, result)
    elif result.size:
        from portmm.ops.int4_panels import unpack_int4
        from portmm.weights.quantized import dequantize

        np.copyto(result, multiply(left, dequantize(unpack_int4(w)), None), casting="same_kind")
    if out is None or direct:
        return result
    np.copyto(out, result, casting="same_kind")
    return out


def _by_int4(left: Array, w: PackedInt4, wanted: np.dtype[Any] | None) -> HostProduct:
    """The product of a call."""
    floats = ("f32", "f16", "bf16")
    if numpy_arrays.name_of(left.dtype) not in floats:
        raise TypeError(
            f"a has dtype {left.dtype}; an int4 weight is multiplied by float32, float16 or bfloat16, "
            "and in linear by int8"
        )
    written = None if wanted is None or numpy_arrays.name_of(wanted) not in floats else wanted.newbyteorder("=")
    return HostProduct(left, w, written, None)


# -- linear ----------------------------------------------------------------------------


def product_of(left: Array, weight: Any, options: LinearOptions) -> HostProduct:
    """The product of a call, with its scales.

    Raises:
        TypeError: a type is not supported.
        ValueError: shapes do not match, or an option does not go with the types.
        ScheduleError: the weight is packed for activations of another type.
    """
    types = _types_of(left.dtype, options.dtype, requantize=options.requantize, dynamic=options.dynamic)
    _check(left, weight, types, options)
    return HostProduct(left, weight, types[2], None, options.dequantization)


def _check(left: Array, weight: Any, types: numpy_arrays.DTypes, options: LinearOptions) -> None:
    """Check shapes and types of operands, and the options for them."""
    k = left.shape[-1]
    if len(weight.shape) != 2 or weight.shape[0] != k:
        raise ValueError(f"w has shape {weight.shape}; x has {k} columns, so w must have shape ({k}, n)")
    w_type = family(weight.family).dtype
    if w_type not in ("s8", "u4"):
        raise TypeError(f"w has dtype {weight.dtype}; linear takes int8 or int4 values, use matmul for floats")
    if numpy_arrays.name_of(left.dtype) not in ("s8", "u8") and (options.x_scale or options.x_zero):
        raise ValueError(f"x has dtype {left.dtype}: only integers have a scale and a zero point")
    if options.dynamic and options.w_zero:
        raise ValueError("w_zero is set: with dynamic rows the weight has none; quantize x first, and pass x_scale")
    if w_type == "s8":
        if options.w_zero and numpy_arrays.name_of(types[0]) not in ("s8", "u8"):
            raise ValueError(
                f"w_zero is set, and x has dtype {left.dtype}: only products of integers have zero points; pass an "
                "integer x with x_scale, or dequantize w first"
            )
        if numpy_arrays.name_of(types[0]) in ("s8", "u8") and not family(weight.family).sums and 0 not in left.shape:
            raise ScheduleError(
                f"w is packed as {weight.family}, for activations of another type: pack it for {types[0]}"
            )
    else:
        _check_int4(weight, types, options)


def _check_int4(weight: Any, types: numpy_arrays.DTypes, options: LinearOptions) -> None:
    """Check types and options for an int4 weight."""
    if options.x_zero or options.w_zero:
        raise ValueError("x_zero or w_zero is set: an int4 weight has zero points of its own only")
    if types[0] == np.uint8:
        raise TypeError("x has dtype uint8; an int4 weight is multiplied by int8 or floats")
    group = family(weight.family).group or weight.shape[0]
    if types[0] == np.int8 and group > LONGEST_GROUP:
        raise ValueError(
            f"w has groups of {group} rows; sums in int32 are exact up to {LONGEST_GROUP}: quantize in smaller groups"
        )


@cached("calls", MOST_CALLS)
def _types_of(x: np.dtype[Any], dtype: np.dtype[Any] | None, *, requantize: bool, dynamic: bool) -> numpy_arrays.DTypes:
    """The types of the product."""
    if dynamic and numpy_arrays.name_of(x) not in ("f32", "f16", "bf16"):
        raise TypeError(f"x has dtype {x}: only float32, float16 and bfloat16 rows are quantized")
    factor = np.dtype(np.int8) if dynamic else x
    if numpy_arrays.name_of(factor) not in ("s8", "u8", "f32", "f16", "bf16"):
        raise TypeError(f"x has dtype {x}; linear takes int8, uint8, float32, float16 and bfloat16")
    usual = factor if requantize else np.dtype(np.float32)
    result = (usual if dtype is None else dtype).newbyteorder("=")
    allowed = ("s8", "u8") if requantize else ("f32", "f16", "bf16")
    if numpy_arrays.name_of(result) not in allowed:
        raise TypeError(f"dtype is {result}; {'with' if requantize else 'without'} out_scale use one of {allowed}")
    left, right, _ = numpy_arrays.types_of(factor, np.dtype(np.int8))
    return left, right, result
