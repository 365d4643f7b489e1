"""Plans of products on the host: operands of one kind, reduced to the numbers of a kernel call.

Owns the reduction of native operands to a call, and the plan that the runtime executes. Nothing here converts: where a
kernel cannot read the operands in place, there is no plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portmm.arrays import numpy_arrays
from portmm.arrays.call import Call, reduce_call
from portmm.arrays.numpy_fallback import product as product_by_numpy
from portmm.ops import routes
from portmm.ops.prepack import fixed, is_packed, register_dtype, unpack
from portmm.runtime.cpu import runtime

MOST_OFFSETS = 512
"""Repetitions past which a call is not planned: plans are remembered, 24 bytes
each, and so many kernel calls outweigh the general path's 35 microseconds."""


def matrices(x: np.ndarray[Any, Any], *, vector_a: bool, vector_b: bool) -> np.ndarray[Any, Any]:
    """A result with dimensions of 1 in place of those that vector operands lack."""
    view = x[..., np.newaxis] if vector_b else x
    return view[..., np.newaxis, :] if vector_a else view


def register_types(types: numpy_arrays.DTypes) -> None:
    """Register bfloat16 with the runtime when it first occurs, as it is not NumPy's."""
    for x in types:
        if numpy_arrays.name_of(x) == "bf16":
            register_dtype(x)


def reduced(a: np.ndarray[Any, Any], b: Any, out: Any, *, static: bool = False) -> tuple[Call | None, Any]:
    """The call for native operands of one type, and an array like the result.

    None in place of the call where a kernel cannot read the operands in place.
    """
    packed = not isinstance(b, np.ndarray)
    types = numpy_arrays.types_of(a.dtype, b.owner.dtype if packed else b.dtype, None if out is None else out.dtype)
    register_types(types)
    dtype = types[2]
    vector_a, vector_b = a.ndim == 1, not packed and b.ndim == 1
    left, right, shape = (
        a[np.newaxis, :] if vector_a else a,
        b[:, np.newaxis] if vector_b else b,
        numpy_arrays.shape_of(a.shape, b.shape),
    )
    result = np.empty(shape, dtype) if out is None else numpy_arrays.check_out(out, shape, dtype)
    if 0 in shape or 0 in left.shape or any(n > 1 and s == 0 for n, s in zip(shape, result.strides, strict=True)):
        return None, result
    view = matrices(result, vector_a=vector_a, vector_b=vector_b)
    if numpy_arrays.canonical(view, dtype).layout not in ("row", "col"):
        return None, result
    call = reduce_call(left, right, view, types, static=static)
    in_place = call.a.array is left and call.c.array is view and (packed or call.b.array is right)
    return (call if in_place else None), result


def make_plan(a: np.ndarray[Any, Any], b: Any, out: Any, *, bind: bool, static: bool = False) -> Any:
    """The plan for operands of these kinds, or None where a kernel cannot read them in place.

    With `bind` a packed b is part of the plan, else its panels are an argument.
    """
    packed = is_packed(b)
    left, right = a.dtype, b.owner.dtype if packed else b.dtype
    if numpy_arrays.types_of(left, right)[:2] != (left, right):
        raise TypeError(f"a plan takes native arrays that multiply without conversion; got {left} and {right}")
    if (
        bind
        and isinstance(out, np.ndarray)
        and out.dtype != (result_type := numpy_arrays.types_of(left, right, out.dtype)[2])
    ):
        raise TypeError(f"out has dtype {out.dtype}; a plan for these operands writes {result_type}")
    call, result = reduced(a, b, out, static=static)
    if call is None or (call.walk.outer is not None and len(call.walk.outer) > MOST_OFFSETS):
        return None
    kernel = routes.route(call.problem)
    numbers = call.numbers()
    bare = (*numbers[:4], *numbers[5:8], *numbers[9:12], *numbers[13:])
    panels = b.owner if packed else b
    b_form = b if packed and bind else (panels.shape, panels.strides)
    return runtime().make_plan(
        kernel, (a.shape, a.strides), b_form, (result.shape, result.strides), bare, call.walk.outer
    )


def numpy_plan(a: np.ndarray[Any, Any], b: Any, out: Any) -> Any:
    """A plan that NumPy executes."""
    from portmm.runtime.no_compiler import PlainPlan

    unpacked = unpack(b) if is_packed(b) else None
    right = b if unpacked is None else unpacked
    types = numpy_arrays.types_of(a.dtype, right.dtype, None if out is None else out.dtype)
    register_types(types)
    result = (
        np.empty(numpy_arrays.shape_of(a.shape, right.shape), types[2])
        if out is None
        else numpy_arrays.check_out(out, numpy_arrays.shape_of(a.shape, b.shape), types[2])
    )
    forms = ((a.shape, a.strides), fixed(b) if is_packed(b) else (b.shape, b.strides), (result.shape, result.strides))
    return PlainPlan(
        numpy_arrays.word(types), forms, lambda x, y: product_by_numpy(x, y if unpacked is None else unpacked)
    )
