"""Products of arrays in the host's memory.

Owns the path from arrays to a problem and a kernel. Ordinary 2-D arrays never reach this module: the runtime's C
goes from arrays to the kernel by itself and calls `_resolve` once per shape. Batches, vectors and other
strides reach `_planner` once for each set of shapes and strides, which makes a plan: native operands of one kind,
reduced to the numbers of a kernel call. Nothing is converted there: where a kernel cannot read the operands in place,
there is no plan. Operands that no kernel can read in place go to `_general` every time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from portmm.arrays import libraries, numpy_arrays, scratch_budget
from portmm.arrays.call import STATIC_BATCH, Call, problem, reduce_call
from portmm.arrays.numpy_fallback import fall_back
from portmm.arrays.numpy_fallback import product as product_by_numpy
from portmm.dispatch import config
from portmm.errors import BuildError, PortmmError, ScheduleError
from portmm.ops import routes
from portmm.ops.prepack import current, fixed, is_packed, is_quantized, register_bf16, unpack
from portmm.runtime import route_cache
from portmm.runtime.cpu import runtime
from portmm.spec.row_classes import row_class, rows
from portmm.util import locks
from portmm.util.array_subclasses import in_class_of

MOST_OFFSETS = 512
"""Repetitions past which a call is not planned: plans are remembered, 24 bytes
each, and so many kernel calls outweigh the general path's 35 microseconds."""


def matrices(x: np.ndarray[Any, Any], *, vector_a: bool, vector_b: bool) -> np.ndarray[Any, Any]:
    """A result with dimensions of 1 in place of those that vector operands lack."""
    view = x[..., np.newaxis] if vector_b else x
    return view[..., np.newaxis, :] if vector_a else view


def register_types(types: numpy_arrays.DTypes) -> None:
    """Register bfloat16 with the runtime when it first occurs."""
    if any([numpy_arrays.name_of(x) == "bf16" for x in types]):  # noqa: C419 - faster
        register_bf16()


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


def make_plan(
    a: np.ndarray[Any, Any], b: Any, out: Any, *, bind: bool, static: bool = False, detail: Any = None
) -> Any:
    """The plan for operands of these kinds, or None where a kernel cannot read them in place.

    With `bind` a packed b is part of the plan, else its panels are an argument. `detail` is attached to it.
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
    forms = (a.shape, a.strides), b_form, (result.shape, result.strides)
    return runtime().make_plan(kernel, *forms, bare, call.walk.outer, detail=detail)


def numpy_plan(a: np.ndarray[Any, Any], b: Any, out: Any, detail: Any = None) -> Any:
    """A plan that NumPy executes."""
    from portmm.runtime.cffi_records import PlainPlan

    right = unpack(b) if is_packed(b) else b
    types = numpy_arrays.types_of(a.dtype, right.dtype, None if out is None else out.dtype)
    register_types(types)
    shape = numpy_arrays.shape_of(a.shape, right.shape)
    result = np.empty(shape, types[2]) if out is None else numpy_arrays.check_out(out, shape, types[2])
    forms = ((a.shape, a.strides), fixed(b) if is_packed(b) else (b.shape, b.strides), (result.shape, result.strides))
    plan_ = PlainPlan(numpy_arrays.word(types), forms, lambda x, y: product_by_numpy(x, right if is_packed(b) else y))
    plan_.detail = detail
    return plan_


HEAD_START = 0.015
"""Seconds in which the runtime's compiler starts, undisturbed by the imports and the selection of this thread."""

_lock = locks.lock()
_state: dict[str, Any] = {}


def on_device(a: Any, b: Any, out: Any, **options: Any) -> Any:
    """The product of arrays on a device: see `matmul.matmul`."""
    global there  # noqa: PLW0603 - replaced once, so that no other call asks for it
    from portmm.ops import grid_product, repeated_call

    there = repeated_call.product
    return grid_product.product(a, b, out, **options)


def _elsewhere(where: str, a: Any, b: Any, out: Any) -> Any:
    """The product of operands that are traced, on a device, or tensors."""
    from portmm.arrays.interop import elsewhere

    return elsewhere(where, product, on_device, (a, b), {"out": out}, "matmul_")


def product(a: Any, b: Any, out: Any = None, *, dtype: Any = None) -> Any:
    """A product of NumPy's arrays without prologues and epilogue: see `matmul.matmul`."""
    if dtype is None:
        return fast(a, b, out)
    from portmm.ops import result_dtype

    return result_dtype.product(a, b, out, np.dtype(dtype), fast)


def _start(a: Any, b: Any, out: Any) -> Any:
    """The first call of a process: build the runtime, then multiply. A device needs no runtime."""
    result = there(a, b, out)
    if result is not NotImplemented:
        return result
    out = numpy_arrays.single(out)
    if where := libraries.place_of(a, b, out):
        return _elsewhere(where, a, b, out)
    begin(a, b, out)
    return fast(a, b, out)


def _not_again(*_call: Any) -> Any:
    """No call is known before the runtime is loaded, or of a device."""
    return NotImplemented


fast: Callable[[Any, Any, Any], Any] = _start
again: Callable[..., Any] = _not_again
attend: Callable[..., Any] = _not_again
"""`CffiRuntime.repeat` and `attend`, once that is loaded."""
there: Callable[..., Any] = _not_again
"""`repeated_call.product`, once arrays on a device were multiplied."""


def begin(a: Any = None, b: Any = None, out: Any = None) -> None:
    """Load the runtime under the current settings: built now if need be, in parallel with this product's kernel."""
    global fast, again, attend  # noqa: PLW0603 - replaced once, so that later calls cost nothing
    if fast is _start or _is_due():
        with _lock:
            if fast is _start or _is_due():
                fast = _begin(a, b, out)
                if "runtime" in _state:
                    again, attend = _state["runtime"].repeat, _state["runtime"].attend


def _is_due() -> bool:
    """Whether to look for a compiler again: the reason why there was none may have passed."""
    return fast is _without_compiler and time.monotonic() >= _state.get("retry_at", math.inf)


def _begin(a: Any, b: Any, out: Any) -> Callable[[Any, Any, Any], Any]:
    from portmm.build import kernel_store
    from portmm.dispatch import base_kernels

    if hasattr(sys.modules.get("threadpoolctl"), "register"):
        from portmm.dispatch.threadpools import register_threadpoolctl

        register_threadpoolctl()
    try:
        rt = base_kernels.run_time() if base_kernels.leads() and not config.target_name() else None
        _state["basic"] = rt is not None
        if rt is None and kernel_store.bundles():
            rt = runtime()  # without the route cache, whose key takes longer than all else of a first call
        elif rt is None:
            kept = route_cache.of_target(config.target_name())
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
    if not _state["basic"] or config.limit() or config.overridden():
        _settings()  # routes of the base set have their number of threads, and most need no count of cores
    scratch_budget.bound(rt)
    return rt.matmul


def _build_ahead(a: Any, b: Any, out: Any) -> None:
    """Build the runtime and the first product's kernel in parallel; each waits for a compiler.

    Errors are suppressed here: they are raised again where the result is needed.
    """
    import threading

    def start() -> None:
        with suppress(Exception):
            runtime()

    builder = threading.Thread(target=start, name="portmm-build")
    builder.start()
    builder.join(HEAD_START)
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return
    with suppress(PortmmError, TypeError, ValueError):
        from portmm.dispatch import cpu_kernels, schedule_choice

        call = reduced(a, b, out)[0]
        if call is not None:
            choice = schedule_choice.choose(call.problem, config.target(), config.get_num_threads())
            isa = cpu_kernels.isa_of(choice.schedule, choice.target)
            cpu_kernels.build_kernel(cpu_kernels.kernel_of(choice.schedule, isa))


def _settings() -> None:
    rt = _state.get("runtime")
    if rt is not None:
        from portmm.build import kernel_store
        from portmm.dispatch import base_kernels

        rt.set_override(config.overridden())
        if not config.overridden() and _state.get("basic"):
            rt.set_num_threads(config.limit() or base_kernels.cores())
        elif not config.overridden():
            without = config.limit() or kernel_store.bundles()
            kept = None if without else route_cache.of_target(config.target_name())
            rt.set_num_threads(kept.cores if kept and kept.cores else config.get_num_threads())


def _without_compiler(a: Any, b: Any, out: Any) -> Any:
    if _is_due():
        begin(a, b, out)
        if fast is not _without_compiler:
            return fast(a, b, out)
    result = there(a, b, out)
    if result is not NotImplemented:
        return result
    out = numpy_arrays.single(out)
    if where := libraries.place_of(a, b, out):
        return _elsewhere(where, a, b, out)
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
    dtype: str, m: int, n: int, k: int, a: str, b: str, c: str, family: str, dense: bool, batch: int = 1
) -> Any:
    """Callback of the runtime for a new shape, or None: a route, and whether it serves a class of rows.

    In place of the latter is None where the route is for one call.
    """
    p = problem(dtype, (m, n, k), (a, b, c), family, batch, dense=dense, static=batch >= STATIC_BATCH)
    try:
        kernel, shared = routes.routed_for_call(p)
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
    if out is not None and out.shape != numpy_arrays.shape_of(a.shape, b.shape):
        return None  # the product broadcasts to it
    try:
        plan_ = make_plan(a, b, out, bind=False)
    except ScheduleError:
        return None  # a packed weight for another machine
    except BuildError as error:
        fall_back(error)
        return None
    return plan_


def _general(a: Any, b: Any, out: Any) -> Any:
    """The general path: any product that NumPy accepts."""
    result = there(a, b, out)
    if result is not NotImplemented:
        return result
    if config.overridden():
        from portmm.ops import settings_plans

        planned = settings_plans.multiply(_planner, a, b, out)
        if planned is not None:
            return planned
    out = numpy_arrays.single(out)
    if where := libraries.place_of(a, b, out):
        return _elsewhere(where, a, b, out)
    result = _by_quantized(a, b, out) if is_quantized(b) else _product(a, b, out)
    return in_class_of(result, a, b) if out is None else result


def _product(a: Any, b: Any, out: Any) -> Any:
    """A product of arrays, or of an array and a packed weight."""
    left, b = numpy_arrays.as_operand(a, "a"), current(b)
    panels = is_packed(b)
    right: Any = b if panels else numpy_arrays.as_operand(b, "b")
    b_type = right.owner.dtype if panels else right.dtype
    types = numpy_arrays.types_of(left.dtype, b_type, getattr(out, "dtype", None))
    register_types(types)
    if panels and types[1] != b_type:
        right, panels = unpack(b), False
    dtype, shape = types[2], numpy_arrays.shape_of(left.shape, right.shape)
    vector_a, vector_b = left.ndim == 1, not panels and right.ndim == 1
    left = left[np.newaxis, :] if vector_a else left
    right = right[:, np.newaxis] if vector_b else right
    out_shape = shape if out is None else numpy_arrays.spread(out, shape, 2 - vector_a - vector_b, dtype)
    vectors = {"vector_a": vector_a, "vector_b": vector_b}
    target = None if out is None or out.shape != shape else np.asarray(out)
    direct = target is not None and _usable(matrices(target, **vectors), types, left, right)
    result = target if target is not None and direct else np.empty(shape, dtype)
    _compute(left, right, matrices(result, **vectors), types)
    if out is None:
        return result[()] if result.ndim == 0 else result
    if not direct:
        numpy_arrays.put(out, result.reshape(out_shape))
    return out


def _by_quantized(a: Any, b: Any, out: Any) -> Any:
    """A product with a quantized weight, prepacked now if it is not yet."""
    from portmm.ops.product_kernel import operand_b
    from portmm.ops.quantized_kernel import int4_product

    return int4_product(a, operand_b(b), out, product)


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
        kernel, _ = routes.routed_first(call.problem)
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
