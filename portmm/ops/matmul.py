"""Matrix products: `matmul` and `plan`.

Owns the public functions. `host_matmul` and `grid_product` multiply; `fused_matmul` is imported by the first call with
an epilogue or a prologue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.dispatch import config
from portmm.ops import host_matmul
from portmm.ops.prepack import current, is_packed, is_quantized

TRACER = "portmm.trace.bind"
"""A module that is loaded once a function was traced: the next takes less time than its outline."""


def matmul(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    dtype: Any = None,
    epilogue: Callable[..., Any] | None = None,
    prologue_a: Callable[..., Any] | None = None,
    prologue_b: Callable[..., Any] | None = None,
) -> Any:
    """The matrix product of two arrays, like `numpy.matmul`.

    Floats are summed in float32, float64 in float64. Integers, int8 or uint8 by
    int8, are summed exactly in int32, modulo 2**32 should k be so large. A narrow
    float result is rounded once, to nearest even, and to infinity on overflow.
    Units that multiply bfloat16 (AVX512-BF16, AMX, BFDOT, BFMMLA) flush subnormals to zero.

    Tensors of PyTorch in the host's memory are operands like NumPy's arrays, and give tensors.
    Arrays of CuPy, PyTorch and PyOpenCL on a device are multiplied there, in place,
    on the stream or queue of `a`, asynchronously; the result is an array of the same library. There,
    float8_e4m3fn and float8_e5m2 are multiplied, too: two of them give bfloat16 unless `dtype` is set.

    Args:
        a: float32, float64, float16, bfloat16 (of ml_dtypes), int8 or uint8,
            (..., m, k) or (k,); any strides, byte order and alignment.
        b: as `a`, (..., k, n) or (k,), but no uint8 with integers; or a weight
            from `pack`. Floats of two types, and floats by int8 or uint8, multiply
            without copies. An int4 weight is scale * code + offset
            in float32, which AMX tiles of many rows round to bfloat16 if `a` is bfloat16, and a device's
            tensor cores, of many rows, to the type of `a` where that is the result's, too;
            with one, an infinity in `a` may give NaN. AMX multiplies codes by float32 elements without rounding
            them, but for what these have below 2**-126; sums of elements by codes may overflow where they
            are within the largest float32 by a group's length times 8.
        out: the array of the result or a tuple of it; may overlap an input. The operands broadcast with
            its leading dimensions. Kernels write float32, float16 and bfloat16 results of narrow floats directly.
        dtype: type of the result, before the copy to `out`. As in NumPy, sums have that precision: for a wider
            type the operands are converted, which costs a copy, and an unpacked one of a packed weight. By default
            that of both operands if they have one float type, else float32, float64, or int32.
        epilogue: a function (acc, i) of an element's sum and its
            indices i.m, i.n, i.b (row, column, item of a batch). It may read arrays that it
            captures, as in bias[i.n], and return several results; see `portmm.spec.elementwise`.
        prologue_a: a function (a, i) of an element of A and its indices i.m, i.k.
        prologue_b: likewise of B, i.k and i.n.

    Returns:
        The product, (..., m, n), with leading dimensions broadcast, of the class of the result of `numpy.matmul`
        (`np.matrix` and others); `out` if passed. Of
        several results of an epilogue, a tuple; one that is constant along a row has extent 1 there.

    Raises:
        TypeError: a dtype is not supported, or `dtype` or `out` cannot hold the result; an operand is a masked
            array, or of a class with arithmetic of its own.
        ValueError: shapes do not match.
        TraceError: a function cannot be traced.
    """
    if epilogue is not None or prologue_a is not None or prologue_b is not None:
        if prologue_a is prologue_b is None:
            result = host_matmul.again(epilogue, a, b, out, dtype, config.current())
            if result is NotImplemented:
                result = host_matmul.there(a, b, out, dtype, epilogue)
            if result is not NotImplemented:
                return result
    elif dtype is None:
        return host_matmul.fast(a, b, out)
    out = numpy_arrays.single(out)
    if where := libraries.place_of(a, b, out):
        from portmm.arrays.interop import elsewhere

        options = {"out": out, "dtype": dtype, "epilogue": epilogue, "prologue_a": prologue_a, "prologue_b": prologue_b}
        return elsewhere(where, matmul, host_matmul.on_device, (a, b), options, "matmul_")
    if epilogue is None and prologue_a is None and prologue_b is None:
        return host_matmul.product(a, b, out, dtype=dtype)
    if epilogue is not None and prologue_a is prologue_b is out is dtype is None and TRACER not in sys.modules:
        from portmm.ops import outlined_matmul

        result = outlined_matmul.product(a, b, epilogue)
        if result is not None:
            return result
    from portmm.ops import fused_matmul

    return fused_matmul.matmul(a, b, out, dtype, epilogue, prologue_a, prologue_b)


def plan(a: Any, b: Any, out: Any = None) -> Any:
    """A callable for one shape, resolved now: for hot loops.

    Args:
        a: an example; its shape, strides and dtype are what the plan takes.
        b: as `a`, or a weight from `pack`, which is then part of the plan.
        out: an example of the output; without one, C-contiguous outputs.

    Returns:
        A callable plan(a, b, out=None), or plan(a, out=None) with a packed
        weight, that checks its arguments and runs one kernel. `out` must not
        overlap an input. Its attribute `pointer` has the addresses of a C function
        int f(const void *plan, const void *a, const void *b, void *c) and of its
        first argument, for loops in C, Cython or Numba: f checks nothing, and holds
        no lock of the interpreter. A plan may be pickled, as its description: the process that
        loads it makes the plan again, by kernels for its own machine.

    Raises:
        TypeError: a dtype is not supported, or the two differ.
        ValueError: shapes do not match, or no kernel can read an operand in place.
        ScheduleError: the packed weight was made for another machine, or `out` is column-major with one.
    """
    where = libraries.place_of(a, b, out)
    if where == "device":
        from portmm.ops import grid_product

        return grid_product.plan(grid_product.adopted(a, b, out))
    if is_quantized(b):
        raise TypeError("a plan takes arrays and packed weights; an int4 weight has a memo of its calls: use matmul")
    if where == "tensors":
        from portmm.arrays.interop import through

        return partial(through, through(plan, a, b, out))
    left = numpy_arrays.as_operand(a, "a", matrix=False)
    right = current(b) if is_packed(b) else numpy_arrays.as_operand(b, "b", matrix=False)
    for name, x in (("a", left), ("b", right), ("out", out)):
        if not isinstance(x, np.ndarray):
            continue
        if x.size == 0:
            raise ValueError(f"{name} is empty; a plan takes arrays with elements")
        if not numpy_arrays.addressable(x, x.dtype):
            raise ValueError(
                f"{name} is not aligned to its elements, or its strides are not multiples of their size; copy it first"
            )
    from portmm.ops import plan_state

    return plan_state.make(left, right, out)
