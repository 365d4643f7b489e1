"""Attention of arrays on a device.

Owns the call: shapes, tiles, kernels, addresses. Operands are read in place, on the stream or queue of the
queries, without synchronisation; the kernels of a kind of call are remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import operand
from portmm.arrays.interop import adopt_all
from portmm.arrays.numpy_arrays import contiguous
from portmm.codegen.lower import lower_program
from portmm.dispatch.machine import bind, machine_of
from portmm.ir.attention_program import Bounds, Form, of_attention
from portmm.ops.attention_shapes import NAMES, SUPPORTED, score_expression, score_of, sizes_of
from portmm.ops.kernel_call import Captures, Closure, KernelCall, via_temporary
from portmm.schedule import gpu_mma_attention
from portmm.schedule.gpu_attention import AttentionSizes
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import acc
from portmm.trace.bind import UserFunction
from portmm.trace.tracer import indices

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.operand import Operand
    from portmm.dispatch.machine import Machine
    from portmm.ir.block_program import BlockProgram
    from portmm.schedule.schedule import Schedule
    from portmm.trace.tracer import Traced

_VALUES = (acc(), indices(NAMES))


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an attention call: arguments of `attention.attention`."""

    score: Callable[..., Any] | None
    mask: Callable[..., Any] | None
    scale: float | None
    causal: bool
    window: int | None
    lengths: Any
    offset: Any
    lse: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """The arrays and sizes of a call.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        out: the array of the result, or None.
        lengths: keys of each item on the device, or None.
        starts: positions of first queries on the device, or None.
        sizes: see `attention_shapes.sizes_of`.
    """

    q: Operand
    k: Operand
    v: Operand
    out: Operand | None
    lengths: Operand | None
    starts: Operand | None
    sizes: tuple[int, int, int, int, int, int, int]

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the items."""
        return self.q.shape[:-3]

    @property
    def parts(self) -> dict[str, Operand]:
        """The operands by the names of kernels' parameters."""
        parts = {"q": self.q, "k": self.k, "v": self.v, "lengths": self.lengths, "starts": self.starts}
        return {name: x for name, x in parts.items() if x is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        _, heads, _, m, *_, dv = self.sizes
        return (*self.lead, heads, m, dv)


def attention(operands: tuple[Any, Any, Any, Any], options: Options) -> Any:
    """Attention of `operands` q, k, v and out: see `attention.attention`.

    Raises:
        TypeError: an array is in the host's memory, or of an unsupported type.
        ValueError: shapes do not match, or arrays are on several devices.
        TraceError: a function cannot be traced.
        ScheduleError: the device has too little shared memory.
    """
    call, numbers = _adopted(operands, options)
    scale = 1 / math.sqrt(call.sizes[5]) if options.scale is None and options.score is None else options.scale
    user_function = UserFunction(score_of(options.score, options.mask, scale))
    flags = (options.causal, options.window is not None, options.lse)
    arrays = (call.q, call.k, call.v, call.out, call.lengths, call.starts)
    key = ("attention on device", *(None if x is None else x.kind for x in arrays), flags)
    ready: KernelCall = user_function.ready(key, lambda traced: _prepare(call, flags, traced), _VALUES, 4)
    read = ready.captures.arrays(user_function.closure, call.q)
    others = (*(x for x in arrays if x is not None and x is not call.out), *read)
    if call.out is not None and operand.overlap(call.out, others):
        return via_temporary(
            call.out, call.q, call.out.dtype, lambda to: attention((*operands[:3], to.source), options)
        )
    return ready.returned(ready.run(call.parts, call.q, call.out, user_function.closure, read, **numbers))


def launch(operands: tuple[Any, Any, Any, Any], options: Options, traced: Traced, closure: Closure) -> list[Operand]:
    """The results of attention with a score that is traced: see `attention`; the first is written to `out`."""
    call, numbers = _adopted(operands, options)
    ready = _prepare(call, (options.causal, options.window is not None, options.lse), traced)
    return ready.run(call.parts, call.q, call.out, closure, ready.captures.arrays(closure, call.q), **numbers)


# -- operands --------------------------------------------------------------------------------


def _adopted(operands: tuple[Any, Any, Any, Any], options: Options) -> tuple[_Call, dict[str, int]]:
    """The arrays of a call, and its numbers."""
    there = adopt_all(dict(zip("qkv", operands, strict=False)), {"out": operands[3]})
    q, k, v, out = there["q"], there["k"], there["v"], there.get("out")
    sizes = sizes_of(*[(_long_type(x), x.shape) for x in (q, k, v)])
    _, _, _, m, n, *_ = sizes
    lead = q.shape[:-3]
    seen, lengths = _by_item(options.lengths, "lengths", lead, (0, n), n)
    offset, starts = _by_item(options.offset, "offset", lead, (-m, n), n - m)
    call = _Call(q, k, v, out, lengths, starts, sizes)
    operand.same_device([x for x in (q, k, v, out, lengths, starts) if x is not None])
    if out is not None:
        operand.check_out(out, call.shape)
        if _long_type(out) not in SUPPORTED:
            raise TypeError(f"out has elements of {_long_type(out)}; attention writes {', '.join(SUPPORTED)}")
    window = m + n if options.window is None else min(options.window, m + n)
    return call, {"n": min(seen, n), "offset": offset, "window": window}


def _long_type(x: Operand) -> str:
    return BY_NAME[x.dtype].numpy


def _by_item(
    x: Any, name: str, lead: tuple[int, ...], limits: tuple[int, int], usual: int
) -> tuple[int, Operand | None]:
    """One integer for all items, or an array on the device of one for each.

    Raises:
        TypeError: it is neither.
        ValueError: it is out of range, or of another shape.
    """
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


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of an operand.

    Attributes:
        steps: strides of items, heads, rows and columns, in elements.
        vector: elements of the widest vector access.
    """

    steps: tuple[int, int, int, int]
    vector: int

    @property
    def loose(self) -> bool:
        """Whether rows are not contiguous."""
        return self.steps[3] != 1


def _layout(x: Operand, name: str) -> _Layout:
    """The layout of an operand.

    Raises:
        ValueError: its items are not evenly strided.
    """
    own = operand.elements(x)
    dims = [(count, step) for count, step in zip(x.shape[:-3], own[:-3], strict=True) if count != 1]
    if any(step != count * inner for (_, step), (count, inner) in pairwise(dims)):
        raise ValueError(f"the items of {name} are not evenly strided: shape {x.shape}, strides {x.strides}; copy it")
    item = dims[-1][1] if dims else 0
    head, row, column = own[-3:]
    column = column if x.shape[-1] > 1 else 1
    vector = math.gcd(item, head, row, x.shape[-1], x.at // BY_NAME[x.dtype].bytes, operand.WIDEST)
    return _Layout((item, head, row, column), vector if column == 1 else 1)


# -- a kind of call --------------------------------------------------------------------------


def _prepare(call: _Call, flags: tuple[bool, bool, bool], traced: Traced) -> KernelCall:
    """The kernels of a kind of call.

    Raises:
        TypeError: a captured array is in the host's memory, or of an unsupported type.
        TraceError: a score is a tuple.
        ScheduleError: the device has too little shared memory.
    """
    to = call.q.dtype if call.out is None else call.out.dtype
    items, heads, group, m, n, d, dv = call.sizes
    on = machine_of(call.q)
    captures = Captures.of(traced, (m, n, items, heads), "a function")
    program = _program(call, flags, traced, to)
    results = (("o", call.shape, to), *((("lse", call.shape[:-1], "f32"),) if flags[2] else ()))
    if 0 in (items, heads, m, dv):
        return KernelCall(on, results, (), several=flags[2])
    layouts = {x: _layout(y, x) for x, y in zip("qkv", (call.q, call.k, call.v), strict=True)}
    layouts["o"] = _layout(call.out or operand.dense_like(call.q, call.shape, to), "out")
    q, k, v, o = (x.vector for x in layouts.values())
    loose = "".join(name for name, x in layouts.items() if x.loose)
    request = AttentionSizes(call.q.dtype, d, dv, m, items * heads, group, n, (q, k, v, o), loose)
    schedule = gpu_mma_attention.choices(request, on.target)[0]
    runs, run = gpu_mma_attention.splits(schedule, request, on.target)
    rows = items * heads * m
    values = {"m": m, "heads": heads, "group": group, "few": heads // group, "items": items, "runs": runs, "run": run}
    values |= {"all_rows": rows, "mosts_at": runs * rows * dv, "sums_at": runs * rows * (dv + 1)}
    for name, y in layouts.items():
        names = (f"{name}_{axis}" for axis in ("b", "h", "n" if name in "kv" else "m", "d"))
        values |= dict(zip(names, y.steps, strict=True))
    for i, steps in enumerate(captures.strides):
        values |= dict(zip((f"x{i}_{y}" for y in "bmnh"), steps, strict=True))
    launches = tuple((bind(*x, values), ()) for x in _code(program, schedule, on))
    scratch = runs * rows * (dv + 2) if schedule.parallel.over == "keys" else 0
    return KernelCall(on, results, launches, (scratch, "f32"), flags[2], captures)


def _program(call: _Call, flags: tuple[bool, bool, bool], traced: Traced, to: str) -> BlockProgram:
    """The attention as a block program."""
    causal, windowed, lse = flags
    score, bounds = score_expression(traced), Bounds(causal, windowed)
    return of_attention(Form(score, call.q.dtype, to, bounds, call.lengths is not None, call.starts is not None, lse))


def _code(program: BlockProgram, s: Schedule, on: Machine) -> tuple[tuple[Any, Any], ...]:
    """Kernels, with their loaded functions."""
    unit = gpu_mma_attention.unit_of(s, on.target)
    return on.loaded((program, s), lambda: lower_program(program, s, *unit))
