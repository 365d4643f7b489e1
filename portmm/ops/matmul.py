"""Matrix products: `matmul` and `plan`.

Owns the path from arrays to a problem and a kernel. Ordinary 2-D arrays never reach this module: the runtime's C
goes from arrays to the kernel by itself and calls `_resolve` once per shape. Batches, vectors and other
strides reach `_planner` once for each set of shapes and strides; operands that no
kernel can read in place go to `_general` every time.
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, numpy_arrays, scratch_arena
from portmm.arrays.call import Call, problem, reduce_call
from portmm.arrays.numpy_fallback import fall_back
from portmm.arrays.numpy_fallback import product as product_by_numpy
from portmm.dispatch import config
from portmm.errors import BuildError, PortmmError, ScheduleError
from portmm.ops.prepack import current, fixed, is_int4_on_device, is_packed, is_quantized, register_dtype, unpack
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.spec.row_classes import row_class, rows
from portmm.util import locks
from portmm.util.array_subclasses import in_class_of
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.spec.problem import Problem

MOST_OFFSETS = 512
"""Repetitions past which a call is not planned: plans are remembered, 24 bytes
each, and so many kernel calls outweigh the general path's 35 microseconds."""
HEAD_START = 0.015
"""Seconds in which the runtime's compiler starts, undisturbed by the imports and the selection of this thread."""

MOST_CLASSES = 4096
"""Routes of row classes remembered for calls through Python."""

_lock = locks.lock()
_state: dict[str, Any] = {}
_classes = Memory(MOST_CLASSES)


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

    Arrays of CuPy, PyTorch and PyOpenCL on a device are multiplied there, in place,
    on the stream or queue of `a`, asynchronously; the result is an array of the same library. There,
    float8_e4m3fn and float8_e5m2 are multiplied, too: two of them give bfloat16 unless `dtype` is set.

    Args:
        a: float32, float64, float16, bfloat16 (of ml_dtypes), int8 or uint8,
            (..., m, k) or (k,); any strides, byte order and alignment.
        b: as `a`, (..., k, n) or (k,), but no uint8 with integers; or a weight
            from `pack`. Floats of two types, and floats by int8 or uint8, multiply
            without copies. An int4 weight is scale * code + offset
            in float32, which AMX tiles round to bfloat16 if `a` is bfloat16, and a device's
            tensor cores, of many rows, to the type of `a` where that is the result's, too;
            with one, an infinity in `a` may give NaN.
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
        if (tracer := numpy_arrays.tracing_operand(a, b)) is not None:
            functions = {"epilogue": epilogue, "prologue_a": prologue_a, "prologue_b": prologue_b}
            return tracer.matmul_(a, b, out, dtype, functions)
        return _fused_matmul[0](a, b, numpy_arrays.single(out), dtype, epilogue, prologue_a, prologue_b)
    if dtype is not None:
        return _typed(a, b, out, dtype)
    return _fast(a, b, out)


def register_fused(function: Callable[..., Any]) -> None:
    """Register the product with an epilogue or prologues, of a module that imports this one."""
    _fused_matmul[:] = [function]


_fused_matmul: list[Callable[..., Any]] = []


def _there(a: Any, b: Any, out: Any = None) -> Any:
    """The operands as arrays of a device; None if they are in the host's memory."""
    if is_int4_on_device(b):
        return a, b, out
    if not (interop.on_device(a) or interop.on_device(b)):
        return None
    from portmm.ops import matmul_gpu

    return matmul_gpu.adopted(a, b, out)


def _on_device(operands: Any, dtype: Any = None) -> Any:
    if is_int4_on_device(operands[1]):
        from portmm.ops import int4_gpu

        a, b, out = operands
        return int4_gpu.product(a, b, out, dtype)
    from portmm.ops import matmul_gpu

    return matmul_gpu.matmul(operands, dtype)


def _typed(a: Any, b: Any, out: Any, dtype: Any) -> Any:
    """A product with a requested result type."""
    out = numpy_arrays.single(out)
    if (there := _there(a, b, out)) is not None:
        return _on_device(there, dtype)
    if (tracer := numpy_arrays.tracing_operand(a, b)) is not None:
        return tracer.matmul_(a, b, out, np.dtype(dtype), {})
    from portmm.ops import result_dtype

    return result_dtype.product(a, b, out, np.dtype(dtype), _fast)


def _start(a: Any, b: Any, out: Any) -> Any:
    """The first call of a process: build the runtime, then multiply. A device needs no runtime."""
    out = numpy_arrays.single(out)
    if (there := _there(a, b, out)) is not None:
        return _on_device(there)
    begin(a, b, out)
    return _fast(a, b, out)


_fast: Callable[[Any, Any, Any], Any] = _start


def begin(a: Any = None, b: Any = None, out: Any = None) -> None:
    """Load the runtime under the current settings: built now if need be, in parallel with this product's kernel."""
    global _fast  # noqa: PLW0603 - replaced once, so that later calls cost nothing
    if _fast is _start or _is_due():
        with _lock:
            if _fast is _start or _is_due():
                _fast = _begin(a, b, out)


def _is_due() -> bool:
    """Whether to look for a compiler again: the reason why there was none may have passed."""
    return _fast is _without_compiler and time.monotonic() >= _state.get("retry_at", math.inf)


def _begin(a: Any, b: Any, out: Any) -> Callable[[Any, Any, Any], Any]:
    kept = route_cache.of_target(_target_name())
    try:
        if kept is None or not kept.lines:
            _build_ahead(a, b, out)
        rt = route_cache.runtime(kept)
    except BuildError as error:
        fall_back(error)
        _state["retry_at"] = error.retry_at
        return _without_compiler
    rt.set_slow(_general)
    rt.set_resolver(_resolve, True)
    rt.set_planner(_planner)
    config.on_change(_settings)
    _state["runtime"] = rt
    _settings()
    scratch_arena.bound(rt)
    return rt.matmul


def _build_ahead(a: Any, b: Any, out: Any) -> None:
    """Build the runtime and the first product's kernel in parallel; each waits for a compiler.

    Errors are suppressed here: they are raised again where the result is needed.
    """

    def start() -> None:
        with suppress(Exception):
            runtime()

    builder = threading.Thread(target=start, name="portmm-build")
    builder.start()
    builder.join(HEAD_START)
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return
    with suppress(PortmmError, TypeError, ValueError):
        from portmm.dispatch import cpu as cpu_dispatch

        call = _reduce(a, b, out)[0]
        if call is not None:
            choice = cpu_dispatch.choose(call.problem, config.target(), config.get_num_threads())
            isa = cpu_dispatch.isa_of(choice.schedule, choice.target)
            cpu_dispatch.build_kernel(cpu_dispatch.kernel_of(choice.schedule, isa))


def _settings() -> None:
    rt = _state.get("runtime")
    if rt is not None:
        rt.set_override(config.overridden())
        if not config.overridden():
            kept = None if config.limit() else route_cache.of_target(_target_name())
            rt.set_num_threads(kept.cores if kept and kept.cores else config.get_num_threads())


def _target_name() -> str:
    return config.current().target or os.environ.get("PORTMM_TARGET", "")


def route(p: Problem) -> Any:
    """A launchable kernel for a problem: from the memo or the route cache, or selected and built now.

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    return routed(p)[0]


def routed(p: Problem) -> tuple[Any, bool]:
    """A launchable kernel, and whether it serves all problems of the class of `p` (see `row_classes`).

    Raises:
        ScheduleError: no schedule is legal.
        NoCompilerError: there is no compiler.
        BuildError: the compiler failed.
    """
    name, limit = _target_name(), config.limit()
    least, most = rows(p)
    but_rows = p.but_rows
    key = (most, but_rows, name, limit)
    kernel = _classes.get(key)
    if kernel is not None:
        return kernel, True
    kept = route_cache.of_target(name)
    if kept is not None:
        of_class = route_cache.question(p, (least, most), limit)
        of_m = route_cache.question(p, (p.m, p.m), limit) if least < most else of_class
        kernel = route_cache.route(kept, of_class, runtime(), p)
        if kernel is not None:
            return _classes.keep(key, kernel), True
        if least < most and (kernel := route_cache.route(kept, of_m, runtime(), p)) is not None:
            return kernel, False
    from portmm.dispatch import cpu as cpu_dispatch

    target = config.target()
    kernel, served = cpu_dispatch.routed(p, target, limit or config.get_num_threads(), kept)
    shared = served == (least, most)
    if kept is not None:
        route_cache.keep(kept, of_class if shared else of_m, kernel, target)
    return (_classes.keep(key, kernel), True) if shared else (kernel, False)


def _without_compiler(a: Any, b: Any, out: Any) -> Any:
    if _is_due():
        begin(a, b, out)
        if _fast is not _without_compiler:
            return _fast(a, b, out)
    out = numpy_arrays.single(out)
    if (tracer := numpy_arrays.tracing_operand(a, b)) is not None:
        return tracer.matmul_(a, b, out, None, {})
    if (there := _there(a, b, out)) is not None:
        return _on_device(there)
    from portmm.ops.result_dtype import numbers

    left = numpy_arrays.as_operand(a, "a")
    right = numbers(b, left.dtype.newbyteorder("="))
    result = product_by_numpy(left, right)
    if out is None:
        return in_class_of(result, a, b)
    core = (left.ndim > 1) + (right.ndim > 1)
    numpy_arrays.put(out, np.asarray(result).reshape(numpy_arrays.spread(out, np.shape(result), core, result.dtype)))
    return out


def _resolve(  # noqa: PLR0917 - the runtime passes positions only
    dtype: str, m: int, n: int, k: int, a: str, b: str, c: str, family: str, dense: bool
) -> Any:
    """Callback of the runtime for a new shape: a route and whether it serves a class of rows, or None."""
    p = problem(dtype, (m, n, k), (a, b, c), family, dense=dense)
    try:
        kernel, shared = routed(p)
        return kernel, shared and rows(p) == row_class(m)
    except ScheduleError:
        return None  # a packed weight for another machine, or with C by columns
    except BuildError as error:
        fall_back(error)
        return None


def _planner(a: Any, b: Any, out: Any) -> Any:
    """Callback of the runtime for new operands: a plan, or None for the general path."""
    right = b.owner.dtype if is_packed(b) else b.dtype
    types = numpy_arrays.types_of(a.dtype, right, None if out is None else out.dtype)
    if (a.dtype, right) != types[:2] or (out is not None and out.dtype != types[2]):
        return None  # something must be converted first
    if out is not None and out.shape != numpy_arrays.shape_of(a, b.shape):
        return None  # the product broadcasts to it
    try:
        plan_ = _make_plan(a, b, out, bind=False)
    except ScheduleError:
        return None  # a packed weight for another machine
    except BuildError as error:
        fall_back(error)
        return None
    return plan_


def _general(a: Any, b: Any, out: Any) -> Any:
    """The general path: any product that NumPy accepts."""
    out = numpy_arrays.single(out)
    if (tracer := numpy_arrays.tracing_operand(a, b)) is not None:
        return tracer.matmul_(a, b, out, None, {})
    if (there := _there(a, b, out)) is not None:
        return _on_device(there)
    result = _by_quantized(a, b, out) if is_quantized(b) else _product(a, b, out)
    return in_class_of(result, a, b) if out is None else result


def _product(a: Any, b: Any, out: Any) -> Any:
    """A product of arrays, or of an array and a packed weight."""
    left, b = numpy_arrays.as_operand(a, "a"), current(b)
    panels = is_packed(b)
    right: Any = b if panels else numpy_arrays.as_operand(b, "b")
    b_type = right.owner.dtype if panels else right.dtype
    types = numpy_arrays.types_of(left.dtype, b_type, getattr(out, "dtype", None))
    _introduce(types)
    if panels and types[1] != b_type:
        right, panels = unpack(b), False
    dtype, shape = types[2], numpy_arrays.shape_of(left, right.shape)
    vector_a, vector_b = left.ndim == 1, not panels and right.ndim == 1
    left = left[np.newaxis, :] if vector_a else left
    right = right[:, np.newaxis] if vector_b else right
    out_shape = shape if out is None else numpy_arrays.spread(out, shape, 2 - vector_a - vector_b, dtype)
    vectors = {"vector_a": vector_a, "vector_b": vector_b}
    target = None if out is None or out.shape != shape else np.asarray(out)
    direct = target is not None and _usable(_matrices(target, **vectors), types, left, right)
    result = target if target is not None and direct else np.empty(shape, dtype)
    _compute(left, right, _matrices(result, **vectors), types)
    if out is None:
        return result[()] if result.ndim == 0 else result
    if not direct:
        numpy_arrays.put(out, result.reshape(out_shape))
    return out


def _by_quantized(a: Any, b: Any, out: Any) -> Any:
    """A product with a quantized weight, prepacked now if it is not yet."""
    from portmm.ops.int4_panels import PackedInt4, pack_int4, product

    return product(a, b if isinstance(b, PackedInt4) else pack_int4(b), out, route, matmul)


def _matrices(x: np.ndarray[Any, Any], *, vector_a: bool, vector_b: bool) -> np.ndarray[Any, Any]:
    """A result with dimensions of 1 in place of those that vector operands lack."""
    view = x[..., np.newaxis] if vector_b else x
    return view[..., np.newaxis, :] if vector_a else view


def _introduce(types: numpy_arrays.DTypes) -> None:
    """Register bfloat16 with the runtime when it first occurs, as it is not NumPy's."""
    for x in types:
        if numpy_arrays.name_of(x) == "bf16":
            register_dtype(x)


def _usable(out: np.ndarray[Any, Any], types: numpy_arrays.DTypes, left: Any, right: Any) -> bool:
    """Whether kernels may write straight to `out`."""
    if not numpy_arrays.addressable(out, types[2]):
        return False
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.strides, strict=True)):
        return False
    sources = [left, right if isinstance(right, np.ndarray) else right.owner]
    if any(np.may_share_memory(out, x) for x in sources):
        return False
    return numpy_arrays.canonical(out, types[2]).layout in _layouts(types, is_packed=not isinstance(right, np.ndarray))


def _layouts(types: numpy_arrays.DTypes, *, is_packed: bool) -> tuple[str, ...]:
    """The layouts of C that kernels write: columns if A and B can be exchanged, which panels and some types forbid."""
    return ("row",) if is_packed or numpy_arrays.name_of(types[0]) == "u8" else ("row", "col")


def _compute(left: Any, right: Any, view: np.ndarray[Any, Any], types: numpy_arrays.DTypes) -> None:
    if view.size == 0:
        return
    if left.shape[-1] == 0:
        view[...] = 0
        return
    try:
        call = reduce_call(left, right, view, types)
        kernel = route(call.problem)
    except ScheduleError:
        if isinstance(right, np.ndarray):
            raise
        _compute(left, unpack(right), view, types)
        return
    except BuildError as error:
        fall_back(error)
        view[...] = product_by_numpy(left, right if isinstance(right, np.ndarray) else unpack(right))
        return
    _state["runtime"].execute(kernel, *call.numbers(), call.walk.outer)


def plan(a: Any, b: Any, out: Any = None) -> Any:
    """A callable for one shape, resolved now: for hot loops.

    Args:
        a: an example; its shape, strides and dtype are what the plan takes.
        b: as `a`, or a weight from `pack`, which is then part of the plan.
        out: an example of the output; without one, C-contiguous outputs.

    Returns:
        A callable plan(a, b, out=None), or plan(a, out=None) with a packed
        weight, that checks its arguments and runs one kernel. `out` must not
        overlap an input.

    Raises:
        TypeError: a dtype is not supported, or the two differ.
        ValueError: shapes do not match, or no kernel can read an operand in place.
        ScheduleError: the packed weight was made for another machine, or `out` is column-major with one.
    """
    if is_quantized(b) and not is_int4_on_device(b):
        raise TypeError("a plan takes arrays and packed weights; an int4 weight has a memo of its calls: use matmul")
    if (there := _there(a, b, out)) is not None:
        if is_int4_on_device(b):
            from portmm.ops import int4_gpu

            return int4_gpu.plan(*there)
        from portmm.ops import matmul_gpu

        return matmul_gpu.plan(there)
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
    try:
        plan_ = _make_plan(left, right, out, bind=True, static=True)
    except BuildError as error:
        fall_back(error)
        return _plain_plan(left, right, out)
    if plan_ is None:
        raise ValueError(
            "a plan takes an out by rows or columns, without repeated elements, and an evenly spaced batch"
        )
    return plan_


def _make_plan(a: np.ndarray[Any, Any], b: Any, out: Any, *, bind: bool, static: bool = False) -> Any:
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
    call, result = _reduce(a, b, out, static=static)
    if call is None or (call.walk.outer is not None and len(call.walk.outer) > MOST_OFFSETS):
        return None
    kernel = route(call.problem)
    numbers = call.numbers()
    bare = (*numbers[:4], *numbers[5:8], *numbers[9:12], *numbers[13:])
    panels = b.owner if packed else b
    b_form = b if packed and bind else (panels.shape, panels.strides)
    return runtime().make_plan(
        kernel, (a.shape, a.strides), b_form, (result.shape, result.strides), bare, call.walk.outer
    )


def _plain_plan(a: np.ndarray[Any, Any], b: Any, out: Any) -> Any:
    """A plan that NumPy executes."""
    from portmm.runtime.no_compiler import PlainPlan

    unpacked = unpack(b) if is_packed(b) else None
    right = b if unpacked is None else unpacked
    types = numpy_arrays.types_of(a.dtype, right.dtype, None if out is None else out.dtype)
    _introduce(types)
    result = (
        np.empty(numpy_arrays.shape_of(a, right.shape), types[2])
        if out is None
        else numpy_arrays.check_out(out, numpy_arrays.shape_of(a, b.shape), types[2])
    )
    forms = ((a.shape, a.strides), fixed(b) if is_packed(b) else (b.shape, b.strides), (result.shape, result.strides))
    return PlainPlan(
        numpy_arrays.word(types), forms, lambda x, y: product_by_numpy(x, y if unpacked is None else unpacked)
    )


def _reduce(a: np.ndarray[Any, Any], b: Any, out: Any, *, static: bool = False) -> tuple[Call | None, Any]:
    """The call for native operands of one type, and an array like the result.

    None in place of the call where a kernel cannot read the operands in place.
    """
    packed = not isinstance(b, np.ndarray)
    types = numpy_arrays.types_of(a.dtype, b.owner.dtype if packed else b.dtype, None if out is None else out.dtype)
    _introduce(types)
    dtype = types[2]
    vector_a, vector_b = a.ndim == 1, not packed and b.ndim == 1
    left, right, shape = (
        a[np.newaxis, :] if vector_a else a,
        b[:, np.newaxis] if vector_b else b,
        numpy_arrays.shape_of(a, b.shape),
    )
    result = np.empty(shape, dtype) if out is None else numpy_arrays.check_out(out, shape, dtype)
    if 0 in shape or 0 in left.shape or any(n > 1 and s == 0 for n, s in zip(shape, result.strides, strict=True)):
        return None, result
    view = _matrices(result, vector_a=vector_a, vector_b=vector_b)
    if numpy_arrays.canonical(view, dtype).layout not in ("row", "col"):
        return None, result
    call = reduce_call(left, right, view, types, static=static)
    in_place = call.a.array is left and call.c.array is view and (packed or call.b.array is right)
    return (call if in_place else None), result
