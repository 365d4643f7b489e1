"""Attention of arrays that lie on a device.

Owns the call: shapes, tiles, kernels, addresses. Operands are read where they lie, on the stream or queue of the
queries, and nothing waits; what was found out about a kind of call is remembered. Imports
`schedule.gpu_attention`, `schedule.gpu_mma_attention`, `arrays.interop`, `trace.bind`, `dispatch.gpu`, `ops.attention_shapes`, `kernels`, `codegen.lower`,
`ops.matmul_gpu`, `trace.tracer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import device_arrays, interop
from portmm.codegen.lower import lower_grid_attention
from portmm.dispatch import gpu as gpu_dispatch
from portmm.errors import TraceError
from portmm.ops import rowwise_gpu
from portmm.ops.attention_shapes import HELD, NAMES, score_of, sizes_of
from portmm.schedule import gpu_attention, gpu_mma_attention
from portmm.schedule.gpu_candidates import units
from portmm.schedule.gpu_mma_attention import MatrixTiling
from portmm.spec.dtype import BY_NAME
from portmm.spec.epilogue import C, Fused, acc
from portmm.spec.expr import real
from portmm.trace.bind import Around, located
from portmm.trace.closures import resolve
from portmm.trace.tracer import Indices, lies
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from portmm.arrays.interop import Foreign
    from portmm.dispatch.gpu import Launch, Machine
    from portmm.kernels.cpu.attention_geometry import Form
    from portmm.schedule.gpu_attention import Tiling
    from portmm.target.target import Target
    from portmm.trace.tracer import Source, Traced

MOST_KINDS = 1024
"""Kinds of kernels remembered before starting afresh."""
_VALUES = (acc(), Indices(NAMES))


@dataclass(frozen=True, slots=True)
class Asked:
    """What attention is to be: the arguments of `attend.attention`."""

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
        out: where the result goes, or None.
        lengths: keys of each item on the device, or None.
        starts: positions of first queries on the device, or None.
        sizes: see `heads.sizes_of`.
    """

    q: Foreign
    k: Foreign
    v: Foreign
    out: Foreign | None
    lengths: Foreign | None
    starts: Foreign | None
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


def attention(given: tuple[Any, Any, Any, Any], asked: Asked) -> Any:
    """See `attend.attention`: `given` are q, k, v and out.

    Raises:
        TypeError: an array is in the host's memory, or of a type that kernels do not read.
        ValueError: shapes do not fit, or arrays are on several devices.
        TraceError: a function does what cannot be traced.
        ScheduleError: the device has too little shared memory.
    """
    call, numbers = _adopted(given, asked)
    scale = 1 / math.sqrt(call.sizes[5]) if asked.scale is None and asked.score is None else asked.scale
    around = Around.of(score_of(asked.score, asked.mask, scale))
    flags = (asked.causal, asked.window is not None, asked.lse)
    arrays = (call.q, call.k, call.v, call.out, call.lengths, call.starts)
    key = ("attention on device", *(None if x is None else x.kind for x in arrays), flags)
    ready: _Ready = around.ready(key, lambda traced: _prepare(call, flags, traced), _VALUES, 4)
    read = ready.captured(around.found, call.q)
    others = (*(x for x in arrays if x is not None and x is not call.out), *read)
    if call.out is not None and device_arrays.overlap(call.out, others):
        made, to = interop.empty_like(replace(call.out, queue=call.q.queue), call.shape, call.out.dtype)
        result = attention((*given[:3], made), asked)
        copied = rowwise_gpu.copied(call.out, to)
        return (copied, result[1]) if asked.lse else copied
    return ready.run(call, numbers, read, around.found)


# -- operands --------------------------------------------------------------------------------


def _adopted(given: tuple[Any, Any, Any, Any], asked: Asked) -> tuple[_Call, dict[str, int]]:
    """The arrays of a call, and its numbers."""
    q, k, v = (_there(x, name) for x, name in zip(given, "qkv", strict=False))
    out = None if given[3] is None else _there(given[3], "out")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in HELD:
            raise TypeError(f"{name} has elements of {_said(x)}; attention takes {', '.join(map(_long, HELD))}")
        if len(x.shape) < 3:
            raise ValueError(f"{name} has shape {x.shape}; give (..., heads, rows, columns)")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are of {_said(q)}, {_said(k)} and {_said(v)}; these must be equal")
    sizes = sizes_of(q.shape, k.shape, v.shape)
    _, _, _, m, n, *_ = sizes
    lead = q.shape[:-3]
    seen, lengths = _by_item(asked.lengths, "lengths", lead, (0, n), n)
    offset, starts = _by_item(asked.offset, "offset", lead, (-m, n), n - m)
    call = _Call(q, k, v, out, lengths, starts, sizes)
    interop.same_device([x for x in (q, k, v, out, lengths, starts) if x is not None])
    if out is not None:
        device_arrays.check_out(out, call.shape)
        if out.dtype not in HELD:
            raise TypeError(f"out has elements of {_said(out)}; attention gives {', '.join(map(_long, HELD))}")
    window = m + n if asked.window is None else min(asked.window, m + n)
    return call, {"n": min(seen, n), "offset": offset, "window": window}


def _there(x: Any, name: str) -> Foreign:
    """An array on a device.

    Raises:
        TypeError: it is in the host's memory.
    """
    found = interop.adopt(x)
    if found is None:
        kind = type(x).__name__
        raise TypeError(f"{name} is a {kind} in the host's memory, others are on a device: copy it there first")
    return found


def _long(name: str) -> str:
    return BY_NAME[name].numpy


def _said(x: Foreign) -> str:
    return _long(x.dtype)


def _by_item(
    x: Any, name: str, lead: tuple[int, ...], limits: tuple[int, int], usual: int
) -> tuple[int, Foreign | None]:
    """One integer for all items, or an array on the device of one for each.

    Raises:
        TypeError: it is neither.
        ValueError: it is out of range, or of another shape.
    """
    if x is None:
        return usual, None
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        if not limits[0] <= x <= limits[1]:
            raise ValueError(f"{name} is {x}; there are {limits[1]} keys: give {limits[0]} to {limits[1]}")
        return int(x), None
    found = _there(x, name)
    if found.dtype != "s32":
        raise TypeError(f"{name} has elements of {_said(found)}; give int32, or one integer")
    size = BY_NAME[found.dtype].bytes
    if found.shape != lead or (found.size > 1 and found.strides != interop.contiguous(lead, size)):
        raise ValueError(f"{name} has shape {found.shape} and strides {found.strides}; give {lead}, in C's order")
    return usual, found


@dataclass(frozen=True, slots=True)
class _Laid:
    """How an operand lies.

    Attributes:
        steps: elements from one item, head, row and column to the next.
        vector: elements that may be moved at once.
    """

    steps: tuple[int, int, int, int]
    vector: int

    @property
    def loose(self) -> bool:
        """Neighbours of a row are not neighbours in memory."""
        return self.steps[3] != 1


def _laid(x: Foreign, name: str) -> _Laid:
    """How an operand lies.

    Raises:
        ValueError: its items do not lie evenly.
    """
    own = device_arrays.elements(x)
    dims = [(count, step) for count, step in zip(x.shape[:-3], own[:-3], strict=True) if count != 1]
    if any(step != count * inner for (_, step), (count, inner) in pairwise(dims)):
        raise ValueError(f"the items of {name} do not lie evenly: shape {x.shape}, strides {x.strides}; copy it")
    item = dims[-1][1] if dims else 0
    head, row, column = own[-3:]
    column = column if x.shape[-1] > 1 else 1
    vector = math.gcd(item, head, row, x.shape[-1], x.at // BY_NAME[x.dtype].bytes, interop.WIDEST)
    return _Laid((item, head, row, column), vector if column == 1 else 1)


# -- a kind of call --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """One kind of call.

    Attributes:
        on: the device.
        launches: kernels.
        to: type of the result.
        lse: logarithms are wanted.
        scratch: elements of f32 that runs of keys leave what they come to in.
        sources: arrays that functions capture, and how far into each, in bytes, its first element is.
        numbers: where the numbers of a call come from.
    """

    on: Machine
    launches: tuple[Launch, ...]
    to: str
    lse: bool
    scratch: int
    sources: tuple[tuple[Source, int], ...]
    numbers: tuple[tuple[Any, ...], ...]

    def captured(self, found: dict[Any, Any], like: Foreign) -> list[Foreign]:
        """The arrays that functions capture, on the device of the operands."""
        return [rowwise_gpu.captured(x, found, like) for x, _ in self.sources]

    def run(self, call: _Call, numbers: dict[str, int], read: list[Foreign], found: dict[Any, Any]) -> Any:
        """Launch everything."""
        q, out = call.q, call.out
        made, to = (out.source, out) if out is not None else interop.empty_like(q, call.shape, self.to)
        values: dict[str, Any] = {**numbers, "o": interop.argument(to)[1]}
        values |= {x: interop.argument(y)[1] for x, y in zip("qkv", (q, call.k, call.v), strict=True)}
        for name, x in (("lengths", call.lengths), ("starts", call.starts)):
            if x is not None:
                values[name] = interop.argument(x)[1]
        values |= rowwise_gpu.addresses(read, [at for _, at in self.sources])
        values |= {f"number_{i}": float(resolve(key, found)) for i, key in enumerate(self.numbers)}
        lse = None
        if self.lse:
            lse, there = interop.empty_like(q, call.shape[:-1], "f32")
            values["lse"] = interop.argument(there)[1]
        rowwise_gpu.start(self.launches, self.on, values, self.scratch, q)
        return (made, lse) if self.lse else made


def _prepare(call: _Call, flags: tuple[bool, bool, bool], traced: Traced) -> _Ready:
    """What a kind of call comes to.

    Raises:
        TypeError: a captured array is in the host's memory, or of a type that kernels do not read.
        TraceError: a score is no value.
        ScheduleError: the device has too little shared memory.
    """
    for x in traced.sources:
        if not x.device:
            raise TypeError("a function captures an array in the host's memory; copy it to the device of the operands")
        if not lies(x.array):
            raise TypeError(f"a function captures an array of {x.array.dtype}, which kernels do not read; convert it")
    to = call.q.dtype if call.out is None else call.out.dtype
    items, heads, group, m, n, d, dv = call.sizes
    on = device_arrays.machine_of(call.q)
    form = _form(call, flags, traced, to)
    sources = [(x, located(x.array, x, (m, n, items, heads))) for x in traced.sources]
    found = (to, flags[2])
    if 0 in (items, heads, m, dv):
        return _Ready(on, (), *found, 0, (), ())
    laid = {x: _laid(y, x) for x, y in zip("qkv", (call.q, call.k, call.v), strict=True)}
    laid["o"] = _laid(call.out or interop.empty_like(call.q, call.shape, to)[1], "out")
    q, k, v, o = (x.vector for x in laid.values())
    loose = "".join(name for name, x in laid.items() if x.loose)
    wanted = gpu_attention.Asked(call.q.dtype, d, dv, m, items * heads, group, n, (q, k, v, o), loose)
    tiling, runs, run = _tiled(wanted, on.target)
    rows = items * heads * m
    values = {"m": m, "heads": heads, "group": group, "few": heads // group, "items": items, "runs": runs, "run": run}
    values |= {"all_rows": rows, "mosts_at": runs * rows * dv, "sums_at": runs * rows * (dv + 1)}
    for name, y in laid.items():
        names = (f"{name}_{axis}" for axis in ("b", "h", "n" if name in "kv" else "m", "d"))
        values |= dict(zip(names, y.steps, strict=True))
    for i, (_, (_, *steps)) in enumerate(sources):
        values |= dict(zip((f"x{i}_{y}" for y in "bmnh"), steps, strict=True))
    launches = tuple(gpu_dispatch.bind(*x, values) for x in _code(form, tiling, on))
    scratch = runs * rows * (dv + 2) if tiling.runs else 0
    return _Ready(on, launches, *found, scratch, tuple((x, steps[0]) for x, steps in sources), traced.numbers)


def _tiled(wanted: gpu_attention.Asked, target: Target) -> tuple[Tiling | MatrixTiling, int, int]:
    """The tiles to use, how many runs the keys are cut in, and the keys of each: by matrix units where these can."""
    matrix = gpu_mma_attention.choose(wanted, target)
    if matrix is not None:
        return matrix, *gpu_mma_attention.runs_of(matrix, wanted, target)
    tiling = gpu_attention.choose(wanted, target)
    return tiling, *gpu_attention.runs_of(tiling, wanted, target)


def _form(call: _Call, flags: tuple[bool, bool, bool], traced: Traced, to: str) -> Form:
    """The kind of attention."""
    from portmm.kernels.cpu.attention_geometry import Form
    from portmm.kernels.cpu.online_softmax import Bounds

    if len(traced.results) > 1:
        raise TraceError("a score is one value, not a tuple")
    causal, near, lse = flags
    score = str(Fused(traced.operands, ((C, real(traced.results[0][0])),)))
    given = {"lengths": call.lengths is not None, "starts": call.starts is not None}
    return Form(score, call.q.dtype, to, Bounds(causal, near), **given, lse=lse)


_loaded = Memory(MOST_KINDS)


def _code(form: Form, tiling: Tiling | MatrixTiling, on: Machine) -> tuple[tuple[Any, Any], ...]:
    """Kernels, and what the driver made of them."""
    key = (form, tiling, on.key)
    found: tuple[tuple[Any, Any], ...] | None = _loaded.get(key)
    if found is None:
        matrix = gpu_mma_attention.unit(form.dtype, on.target) if isinstance(tiling, MatrixTiling) else None
        isa, atom = matrix or units("f32", on.target)[0]
        kernels = lower_grid_attention(isa, atom, form, tiling)
        found = _loaded.keep(key, tuple((x, on.load(x)) for x in kernels))
    return found
