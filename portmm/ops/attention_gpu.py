"""Attention of arrays on a device.

Owns the call: shapes, tiles, kernels, addresses. Operands are read in place, on the stream or queue of the
queries, without synchronisation; the kernels of a kind of call are remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_array, device_operands, interop
from portmm.codegen.lower import lower_grid_attention
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import TraceError
from portmm.ops import rowwise_gpu
from portmm.ops.attention_shapes import NAMES, STORAGE_TYPES, score_of, sizes_of
from portmm.schedule import gpu_attention_choice
from portmm.schedule.gpu_attention import AttentionSizes
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import C, Fused, acc
from portmm.spec.expr import real
from portmm.trace.bind import UserFunction, located
from portmm.trace.closures import resolve
from portmm.trace.recorder import readable_in_place
from portmm.trace.tracer import Indices
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.device_array import DeviceArray
    from portmm.dispatch.gpu import Launch, Machine
    from portmm.kernels.cpu.attention_geometry import Form
    from portmm.schedule.schedule import Schedule
    from portmm.trace.recorder import Source
    from portmm.trace.tracer import Traced

MOST_KINDS = 1024
"""Kinds of kernels remembered before the memo is emptied."""
_VALUES = (acc(), Indices(NAMES))


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

    q: DeviceArray
    k: DeviceArray
    v: DeviceArray
    out: DeviceArray | None
    lengths: DeviceArray | None
    starts: DeviceArray | None
    sizes: tuple[int, int, int, int, int, int, int]

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the items."""
        return self.q.shape[:-3]

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
    user_function = UserFunction.of(score_of(options.score, options.mask, scale))
    flags = (options.causal, options.window is not None, options.lse)
    arrays = (call.q, call.k, call.v, call.out, call.lengths, call.starts)
    key = ("attention on device", *(None if x is None else x.kind for x in arrays), flags)
    ready: _Ready = user_function.ready(key, lambda traced: _prepare(call, flags, traced), _VALUES, 4)
    read = ready.captured(user_function.closure, call.q)
    others = (*(x for x in arrays if x is not None and x is not call.out), *read)
    if call.out is not None and device_operands.overlap(call.out, others):
        result_array, described = interop.empty_like(replace(call.out, queue=call.q.queue), call.shape, call.out.dtype)
        result = attention((*operands[:3], result_array), options)
        copied = rowwise_gpu.copied(call.out, described)
        return (copied, result[1]) if options.lse else copied
    return ready.run(call, numbers, read, user_function.closure)


# -- operands --------------------------------------------------------------------------------


def _adopted(operands: tuple[Any, Any, Any, Any], options: Options) -> tuple[_Call, dict[str, int]]:
    """The arrays of a call, and its numbers."""
    q, k, v = (_there(x, name) for x, name in zip(operands, "qkv", strict=False))
    out = None if operands[3] is None else _there(operands[3], "out")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in STORAGE_TYPES:
            raise TypeError(
                f"{name} has elements of {_long_type(x)}; attention takes {', '.join(map(_long, STORAGE_TYPES))}"
            )
        if len(x.shape) < 3:
            raise ValueError(f"{name} has shape {x.shape}; pass (..., heads, rows, columns)")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are of {_long_type(q)}, {_long_type(k)} and {_long_type(v)}; these must be equal")
    sizes = sizes_of(q.shape, k.shape, v.shape)
    _, _, _, m, n, *_ = sizes
    lead = q.shape[:-3]
    seen, lengths = _by_item(options.lengths, "lengths", lead, (0, n), n)
    offset, starts = _by_item(options.offset, "offset", lead, (-m, n), n - m)
    call = _Call(q, k, v, out, lengths, starts, sizes)
    device_array.same_device([x for x in (q, k, v, out, lengths, starts) if x is not None])
    if out is not None:
        device_operands.check_out(out, call.shape)
        if out.dtype not in STORAGE_TYPES:
            raise TypeError(
                f"out has elements of {_long_type(out)}; attention writes {', '.join(map(_long, STORAGE_TYPES))}"
            )
    window = m + n if options.window is None else min(options.window, m + n)
    return call, {"n": min(seen, n), "offset": offset, "window": window}


def _there(x: Any, name: str) -> DeviceArray:
    """An array on a device.

    Raises:
        TypeError: it is in the host's memory.
    """
    array = interop.adopt(x)
    if array is None:
        kind = type(x).__name__
        raise TypeError(f"{name} is a {kind} in the host's memory, others are on a device: copy it there first")
    return array


def _long(name: str) -> str:
    return BY_NAME[name].numpy


def _long_type(x: DeviceArray) -> str:
    return _long(x.dtype)


def _by_item(
    x: Any, name: str, lead: tuple[int, ...], limits: tuple[int, int], usual: int
) -> tuple[int, DeviceArray | None]:
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
    array = _there(x, name)
    if array.dtype != "s32":
        raise TypeError(f"{name} has elements of {_long_type(array)}; pass int32, or one integer")
    size = BY_NAME[array.dtype].bytes
    if array.shape != lead or (array.size > 1 and array.strides != device_array.contiguous(lead, size)):
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


def _layout(x: DeviceArray, name: str) -> _Layout:
    """The layout of an operand.

    Raises:
        ValueError: its items are not evenly strided.
    """
    own = device_operands.elements(x)
    dims = [(count, step) for count, step in zip(x.shape[:-3], own[:-3], strict=True) if count != 1]
    if any(step != count * inner for (_, step), (count, inner) in pairwise(dims)):
        raise ValueError(f"the items of {name} are not evenly strided: shape {x.shape}, strides {x.strides}; copy it")
    item = dims[-1][1] if dims else 0
    head, row, column = own[-3:]
    column = column if x.shape[-1] > 1 else 1
    vector = math.gcd(item, head, row, x.shape[-1], x.at // BY_NAME[x.dtype].bytes, device_array.WIDEST)
    return _Layout((item, head, row, column), vector if column == 1 else 1)


# -- a kind of call --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """The kernels of one kind of call.

    Attributes:
        on: the device.
        launches: kernels.
        to: type of the result.
        lse: logarithms are returned.
        scratch: elements of f32 for the partial results of KV splits.
        sources: captured arrays, and offsets of their first elements, in bytes.
        numbers: keys of the numbers of a call.
    """

    on: Machine
    launches: tuple[Launch, ...]
    to: str
    lse: bool
    scratch: int
    sources: tuple[tuple[Source, int], ...]
    numbers: tuple[tuple[Any, ...], ...]

    def captured(self, closure: dict[Any, Any], like: DeviceArray) -> list[DeviceArray]:
        """The arrays that functions capture, on the device of the operands."""
        return [rowwise_gpu.captured(x, closure, like) for x, _ in self.sources]

    def run(self, call: _Call, numbers: dict[str, int], read: list[DeviceArray], closure: dict[Any, Any]) -> Any:
        """Launch the kernels and return the results."""
        q, out = call.q, call.out
        result, described = (out.source, out) if out is not None else interop.empty_like(q, call.shape, self.to)
        values: dict[str, Any] = {**numbers, "o": device_array.argument(described)[1]}
        values |= {x: device_array.argument(y)[1] for x, y in zip("qkv", (q, call.k, call.v), strict=True)}
        for name, x in (("lengths", call.lengths), ("starts", call.starts)):
            if x is not None:
                values[name] = device_array.argument(x)[1]
        values |= rowwise_gpu.addresses(read, [at for _, at in self.sources])
        values |= {f"number_{i}": float(resolve(key, closure)) for i, key in enumerate(self.numbers)}
        lse = None
        if self.lse:
            lse, there = interop.empty_like(q, call.shape[:-1], "f32")
            values["lse"] = device_array.argument(there)[1]
        rowwise_gpu.start(self.launches, self.on, values, self.scratch, q)
        return (result, lse) if self.lse else result


def _prepare(call: _Call, flags: tuple[bool, bool, bool], traced: Traced) -> _Ready:
    """The kernels of a kind of call.

    Raises:
        TypeError: a captured array is in the host's memory, or of an unsupported type.
        TraceError: a score is a tuple.
        ScheduleError: the device has too little shared memory.
    """
    for x in traced.sources:
        if not x.device:
            raise TypeError("a function captures an array in the host's memory; copy it to the device of the operands")
        if not readable_in_place(x.array):
            raise TypeError(f"a function captures an array of {x.array.dtype}, which kernels cannot read; convert it")
    to = call.q.dtype if call.out is None else call.out.dtype
    items, heads, group, m, n, d, dv = call.sizes
    on = device_operands.machine_of(call.q)
    form = _form(call, flags, traced, to)
    sources = [(x, located(x.array, x, (m, n, items, heads))) for x in traced.sources]
    common = (to, flags[2])
    if 0 in (items, heads, m, dv):
        return _Ready(on, (), *common, 0, (), ())
    layouts = {x: _layout(y, x) for x, y in zip("qkv", (call.q, call.k, call.v), strict=True)}
    layouts["o"] = _layout(call.out or interop.empty_like(call.q, call.shape, to)[1], "out")
    q, k, v, o = (x.vector for x in layouts.values())
    loose = "".join(name for name, x in layouts.items() if x.loose)
    request = AttentionSizes(call.q.dtype, d, dv, m, items * heads, group, n, (q, k, v, o), loose)
    schedule = gpu_attention_choice.candidates(request, on.target)[0]
    runs, run = gpu_attention_choice.splits(schedule, request, on.target)
    rows = items * heads * m
    values = {"m": m, "heads": heads, "group": group, "few": heads // group, "items": items, "runs": runs, "run": run}
    values |= {"all_rows": rows, "mosts_at": runs * rows * dv, "sums_at": runs * rows * (dv + 1)}
    for name, y in layouts.items():
        names = (f"{name}_{axis}" for axis in ("b", "h", "n" if name in "kv" else "m", "d"))
        values |= dict(zip(names, y.steps, strict=True))
    for i, (_, (_, *steps)) in enumerate(sources):
        values |= dict(zip((f"x{i}_{y}" for y in "bmnh"), steps, strict=True))
    launches = tuple(gpu_dispatch.bind(*x, values) for x in _code(form, schedule, on))
    scratch = runs * rows * (dv + 2) if schedule.parallel.over == "keys" else 0
    return _Ready(on, launches, *common, scratch, tuple((x, steps[0]) for x, steps in sources), traced.numbers)


def _form(call: _Call, flags: tuple[bool, bool, bool], traced: Traced, to: str) -> Form:
    """The form of the attention kernel."""
    from portmm.kernels.cpu.attention_geometry import Form
    from portmm.kernels.cpu.online_softmax import Bounds

    if len(traced.results) > 1:
        raise TraceError("a score is one value, not a tuple")
    causal, windowed, lse = flags
    score = str(Fused(traced.operands, ((C, real(traced.results[0][0])),)))
    arrays = {"lengths": call.lengths is not None, "starts": call.starts is not None}
    return Form(score, call.q.dtype, to, Bounds(causal, windowed), **arrays, lse=lse)


_loaded = Memory(MOST_KINDS)


def _code(form: Form, s: Schedule, on: Machine) -> tuple[tuple[Any, Any], ...]:
    """Kernels, with their loaded functions."""
    key = (form, s, on.key)
    loaded: tuple[tuple[Any, Any], ...] | None = _loaded.get(key)
    if loaded is None:
        kernels = lower_grid_attention(*gpu_attention_choice.unit(s, on.target), form, s)
        loaded = _loaded.keep(key, tuple((x, on.load(x)) for x in kernels))
    return loaded
