"""Attention of arrays on a device.

Owns the call: shapes, tiles, kernels, addresses. Operands are read in place, on the stream or queue of the
queries, without synchronisation; the kernels of a kind of call are remembered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import operand
from portmm.arrays.interop import adopt_all
from portmm.arrays.numpy_arrays import contiguous
from portmm.codegen.lower import lower_program
from portmm.dispatch.machine import bind, machine_of
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ops import repeated_call
from portmm.ops.attention_scores import function_of, score_expression, values
from portmm.ops.attention_shapes import SUPPORTED, Options, Shape, sizes_of
from portmm.ops.kernel_call import Captures, Closure, KernelCall, via_temporary
from portmm.schedule import gpu_attention_choice
from portmm.schedule.gpu_attention import AttentionSizes
from portmm.spec.dtype import BY_NAME
from portmm.trace.bind import UserFunction

if TYPE_CHECKING:
    from portmm.arrays.operand import Operand
    from portmm.trace.tracer import Traced


_Parts = dict[str, "Operand"]
"""q, k and v, and lengths and starts of items that are arrays, by the names of kernels' parameters."""


def attention(operands: tuple[Any, Any, Any, Any], options: Options) -> Any:
    """Attention of `operands` q, k, v and out: see `attention.attention`.

    Raises:
        TypeError: an array is in the host's memory, or of an unsupported type.
        ValueError: shapes do not match, or arrays are on several devices.
        TraceError: a function cannot be traced.
        ScheduleError: the device has too little shared memory.
    """
    shape, parts, out, numbers = _adopted(operands, options)
    q, user_function = parts["q"], UserFunction(function_of(options, shape.d))
    kinds = tuple((name, x.kind) for name, x in parts.items())
    key = ("attention on device", kinds, out and out.kind, options.causal, options.window is None, options.lse)
    ready: KernelCall = user_function.ready(
        key, lambda traced: _prepare(shape, parts, out, options, traced), values(), 4
    )
    read = ready.captures.arrays(user_function.closure, q)
    if out is not None and operand.overlap(out, (*parts.values(), *read)):
        return via_temporary(out, q, out.dtype, lambda to: attention((*shape.operands, to), options))
    results = ready.run(parts, q, out, user_function.closure, read, **numbers)
    repeated_call.keep(*_arrays(operands, options), ready, parts, out, user_function, read)
    return ready.returned(results)


def _arrays(operands: tuple[Any, Any, Any, Any], options: Options) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The operands of a call, arrays of its options, and its result; and what the call is besides their kinds."""
    q, k, v, out = operands
    numbers = [x is None or type(x) is int for x in (options.lengths, options.offset)]
    by_item = [x for x, number in zip((options.lengths, options.offset), numbers, strict=True) if not number]
    form = "attention", out is None, options.causal, options.window is None, options.lse, *numbers
    return ((q, k, v, *by_item) if out is None else (q, k, v, *by_item, out)), form


def again(operands: tuple[Any, Any, Any, Any], options: Options) -> Any:
    """The attention of a call that is like an earlier one but for addresses; NotImplemented if there was none."""
    q, k, _, out = operands
    queries: tuple[int, ...] = getattr(q, "shape", ())
    keys: tuple[int, ...] = getattr(k, "shape", ())
    if min(len(queries), len(keys)) < 3:
        return NotImplemented
    m, d, n = queries[-2], queries[-1], keys[-2]
    seen, offset, window = options.lengths, options.offset, options.window
    seen, offset = seen if type(seen) is int else n, offset if type(offset) is int else n - m
    if not (0 <= seen <= n and -m <= offset <= n):
        return NotImplemented
    most = m + n if window is None else min(window, m + n)
    arrays, form = _arrays(operands, options)
    return repeated_call.again(arrays, form, function_of(options, d), out, n=seen, offset=offset, window=most)


def launch(operands: tuple[Any, Any, Any, Any], options: Options, traced: Traced, closure: Closure) -> list[Operand]:
    """The results of attention with a score that is traced: see `attention`; the first is written to `out`."""
    shape, parts, out, numbers = _adopted(operands, options)
    ready, q = _prepare(shape, parts, out, options, traced), parts["q"]
    return ready.run(parts, q, out, closure, ready.captures.arrays(closure, q), **numbers)


# -- operands --------------------------------------------------------------------------------


def _adopted(
    operands: tuple[Any, Any, Any, Any], options: Options
) -> tuple[Shape, _Parts, Operand | None, dict[str, int]]:
    """The shape of a call, its arrays, that of the result, and numbers by the names of kernels' parameters."""
    there = adopt_all(dict(zip("qkv", operands, strict=False)), {"out": operands[3]})
    out, q = there.pop("out", None), there["q"]
    sizes, lead = sizes_of(*[(_long_type(x), x.shape) for x in there.values()]), q.shape[:-3]
    shape = Shape(lead, *sizes, q.dtype, q.dtype, tuple(there.values()))
    m, n = shape.m, shape.n
    seen, lengths = _by_item(options.lengths, "lengths", lead, (0, n), n)
    offset, starts = _by_item(options.offset, "offset", lead, (-m, n), n - m)
    if by_item := {name: x for name, x in (("lengths", lengths), ("starts", starts)) if x is not None}:
        there |= by_item
        operand.same_device([q, *by_item.values()])
    if out is not None:
        operand.check_out(out, shape.result)
        if _long_type(out) not in SUPPORTED:
            raise TypeError(f"out has elements of {_long_type(out)}; attention writes {', '.join(SUPPORTED)}")
    window = m + n if options.window is None else min(options.window, m + n)
    return shape, there, out, {"n": min(seen, n), "offset": offset, "window": window}


def _long_type(x: Operand) -> str:
    return BY_NAME[x.dtype].numpy


def _by_item(
    x: Any, name: str, lead: tuple[int, ...], limits: tuple[int, int], usual: int
) -> tuple[int, Operand | None]:
    """One integer for all items, or an array on the device of one for each."""
    if x is None:
        return usual, None
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        if not limits[0] <= x <= limits[1]:
            raise ValueError(f"{name} is {x}; there are {limits[1]} keys: pass {limits[0]} to {limits[1]}")
        return int(x), None
    array = adopt_all({name: x})[name]
    if array.dtype != "s32":
        raise TypeError(f"{name} has elements of {_long_type(array)}; pass int32, or one integer")
    size = BY_NAME[array.dtype].bytes
    if array.shape != lead or (array.size > 1 and array.strides != contiguous(lead, size)):
        raise ValueError(f"{name} has shape {array.shape} and strides {array.strides}; pass {lead}, C-contiguous")
    return usual, array


def _layout(x: Operand, name: str) -> tuple[tuple[int, int, int, int], int]:
    """Strides of items, heads, rows and columns, in elements, and elements of the widest vector access."""
    item, (*_, head, row, column) = operand.item_step(x, 3), operand.elements(x)
    if item is None:
        raise ValueError(f"the items of {name} are not evenly strided: shape {x.shape}, strides {x.strides}; copy it")
    column = column if x.shape[-1] > 1 else 1
    vector = math.gcd(item, head, row, x.shape[-1], x.at // BY_NAME[x.dtype].bytes, operand.WIDEST)
    return (item, head, row, column), vector if column == 1 else 1


def _boxed(steps: tuple[int, int, int, int], rows: int, width: int) -> bool:
    """Whether rows do not overlap, and nothing runs backwards."""
    return min(steps) >= 0 and (rows == 1 or steps[2] >= width)


# -- a kind of call --------------------------------------------------------------------------


def _prepare(shape: Shape, parts: _Parts, out: Operand | None, options: Options, traced: Traced) -> KernelCall:
    """The kernels of a kind of call."""
    q, lse = parts["q"], options.lse
    to = (q if out is None else out).dtype
    items, heads, group, m, n, d, dv = shape.items, shape.heads, shape.group, shape.m, shape.n, shape.d, shape.dv
    on = machine_of(q)
    captures = Captures.of(traced, (m, n, items, heads), "a function")
    bounds = Bounds(options.causal, options.window is not None)
    program = of_attention(
        Form(score_expression(traced), q.dtype, to, bounds, "lengths" in parts, "starts" in parts, lse)
    )
    results = (("o", shape.result, to), *((("lse", shape.result[:-1], "f32"),) if lse else ()))
    if 0 in (items, heads, m, dv):
        return KernelCall(on, results, (), several=lse)
    layouts = {x: _layout(parts[x], x) for x in "qkv"}
    layouts["o"] = _layout(out or operand.dense_like(q, shape.result, to), "out")
    q_vector, k_vector, v_vector, o_vector = (vector for _, vector in layouts.values())
    vectors = q_vector, k_vector, v_vector, o_vector
    loose = "".join(name for name, (steps, _) in layouts.items() if steps[3] != 1)
    lines = {"q": (m, d), "k": (n, d), "v": (n, dv)}
    boxed = all(_boxed(layouts[x][0], *lines[x]) for x in "qkv")
    request = AttentionSizes(q.dtype, d, dv, m, items * heads, group, n, vectors, loose, boxed, options.causal)
    schedule = gpu_attention_choice.choices(request, on.target)[0]
    runs, run = gpu_attention_choice.splits(schedule, request, on.target)
    rows = items * heads * m
    values = {"m": m, "keys": n, "heads": heads, "group": group, "few": heads // group, "items": items}
    values |= {"runs": runs, "run": run}
    values |= {"all_rows": rows, "mosts_at": runs * rows * dv, "sums_at": runs * rows * (dv + 1)}
    for name, (steps, _) in layouts.items():
        values |= dict(zip((f"{name}_{x}" for x in ("b", "h", "n" if name in "kv" else "m", "d")), steps, strict=True))
    for i, strides in enumerate(captures.strides):
        values |= dict(zip((f"x{i}_{y}" for y in "bmnh"), strides, strict=True))
    unit = gpu_attention_choice.unit_of(schedule, on.target)
    code = on.loaded((program, schedule), lambda: lower_program(program, schedule, *unit))
    scratch = runs * rows * (dv + 2) if schedule.parallel.over == "keys" else 0
    return KernelCall(on, results, tuple((bind(*x, values), ()) for x in code), (scratch, "f32"), lse, captures)
