"""Attention: softmax(Q . K^T) . V, in one kernel that keeps no matrix of scores.

Owns `attention`. Imports `arrays.numpy_arrays`, `ops.attention_gpu`, `dispatch.cpu`, `arrays.interop`,
`trace.bind`, `ops.attention_shapes`, `kernels`, `util.memo`, `dispatch.config`, `trace.tracer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import interop, numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config
from portmm.errors import BuildError, TraceError
from portmm.ops import matmul as matmul_op
from portmm.ops.attention_shapes import (
    NAMES,
    Shape,
    array,
    by_numpy,
    count,
    lengths_of,
    refuse_others,
    score_of,
    shape_of,
    starts_of,
)
from portmm.runtime.cpu import runtime
from portmm.spec.epilogue import C, Fused, acc, index
from portmm.spec.expr import Expr, real
from portmm.trace.bind import Around, Bound, substituted
from portmm.trace.tracer import Indices, Traced, described
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from portmm.target.target import Target

Array = np.ndarray[Any, Any]
TURNED = {"m": "n", "n": "m"}
FEW = 16
"""Queries of a head up to which it is faster not to fill vectors with them (kernels/cpu/flash_decoding.py): measured on Zen 4, with
2048 keys; half as many where products are of units of two, which that program does not use."""
TASKS = 64
"""Runs that keys of few queries are cut in, all heads together: for that many threads."""
SHORTEST = 512
"""Keys of a run, at least: enough to be worth handing out."""
FORK = 1e6
"""Multiply-adds from which threads share the work: some 30 us."""
MOST_KINDS = 1024
"""Kinds of calls remembered before starting afresh."""
_NOTHING = (None,) * 7


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: Any = None,
    offset: Any = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """The mean of rows of v, weighted for each query by the softmax of its scores over the keys.

    Each head of k and v serves as many neighbouring heads of q as there are more of these (grouped and multi-query
    attention). Sums and the softmax are computed in float32. A query that sees no key has a result of zeros. Memory
    beside the result grows with the sequence, not with its square. `score` and `mask` are traced as an epilogue of
    `matmul` is: they may read arrays by axes (`slopes[i.h]`), and numbers that they capture may change from call to
    call.

    Args:
        q: queries, (..., heads, queries, d), of float32, bfloat16 or float16.
        k: keys, (..., heads of keys, keys, d), of the same type.
        v: values, (..., heads of keys, keys, dv), of the same type.
        score: score(s, i) of a product s of query i.q and key i.kv, of item i.b and head i.h.
        mask: mask(i) says whether query i.q sees key i.kv.
        scale: what products are multiplied by, before `score`; by default 1 / sqrt(d), or 1 where `score` is given.
        causal: no query sees keys after its own position.
        window: queries see keys less than so far from their position, which is as for `causal`.
        lengths: how many of its keys each item has, an integer or one for each item; the others are not read.
        offset: the position of the first query among the keys, an integer or one for each item; the others follow.
            By default the last query is at the last key there is room for, keys less queries. Beside a cache
            that is filled up to `lengths`, give `lengths` less the number of queries. (Functions have i.q
            count from 0 all the same.)
        return_lse: also return the logarithms of the sums of the exponentials of scores, (..., heads, queries).
        out: where to put the result.

    Returns:
        An array (..., heads, queries, dv) of the type of q, or that and the logarithms (-inf where there is no key).

    Raises:
        TypeError: the types of q, k and v differ, or are others; a setting has the wrong type.
        ValueError: shapes do not fit.
        TraceError: `score` or `mask` does what cannot be traced.
    """
    scale = None if scale is None else float(scale)
    window = None if window is None else count(window, "window", 1)
    plain = None
    if score is None and mask is None and lengths is None and out is None and offset is None:
        plain = _kind(q, k, v, scale, causal, window, return_lse)
        known: _Again | None = _plain.get(plain) if plain else None
        if known:
            return known(q, k, v)
    refuse_others(score=score, mask=mask)
    if (taker := numpy_arrays.taker(q, k, v, lengths, offset)) is not None:
        more = {"score": score, "mask": mask, "scale": scale, "causal": causal, "window": window, "out": out}
        more |= {"lengths": lengths, "offset": offset, "return_lse": return_lse}
        return taker.call_(attention, (q, k, v), more)
    if interop.on_device(q) or interop.on_device(k) or interop.on_device(v):
        from portmm.ops import attention_gpu

        asked_for = attention_gpu.Asked(score, mask, scale, causal, window, lengths, offset, return_lse)
        return attention_gpu.attention((q, k, v, out), asked_for)
    shape = shape_of(*(array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))))
    far = shape.n if window is None else min(window, shape.m + shape.n)
    if out is not None:
        numpy_arrays.check_out(out, shape.result, shape.dtype)
    factor = 1 / math.sqrt(shape.d) if scale is None and score is None else scale
    asked = _Asked(score_of(score, mask, factor), causal, window, far, return_lse)
    many = None if lengths is None else lengths_of(lengths, shape)
    starts = None if offset is None else starts_of(offset, shape)
    result, lse, ready = _computed(shape, asked, many, starts, out)
    if plain and ready is not None and all(map(_same, shape.operands, (q, k, v))):
        found = dict.fromkeys(ready.bound.traced.numbers, factor)
        _plain.keep(plain, _Again(ready, replace(shape, operands=()), found, far, shape.result, return_lse))
    return _given(result, lse, out)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What attention is to be.

    Attributes:
        function: what a score is, and whether it counts.
        causal: keys after a query's position are not seen.
        window: how near a key must be, or None.
        far: the same as a number.
        lse: logarithms are wanted.
    """

    function: Callable[..., Any]
    causal: bool
    window: int | None
    far: int
    lse: bool


def _computed(
    shape: Shape, asked: _Asked, many: Array | None, starts: Array | None, out: Any
) -> tuple[Array, Array | None, _Ready | None]:
    """The result, the logarithms if they are wanted, and what computed them."""
    operands, dtype, wanted = shape.operands, shape.dtype, shape.result
    result = out if out is not None and _writes(out, dtype, operands) else np.empty(wanted, dtype)
    lse = np.empty(wanted[:-1], np.float32) if asked.lse else None
    if 0 in (shape.items, shape.heads, shape.m, shape.dv, shape.n):
        result[...] = 0
        if lse is not None:
            lse[...] = -np.inf
        return result, lse, None
    around = Around.of(asked.function)
    flags = (asked.causal, asked.window is None, asked.lse, many is None, starts is None)
    forms = tuple([(x.shape, x.strides, x.__array_interface__["data"][0] % 4) for x in operands])
    results = [_four(result, shape)]
    key = ("attention", dtype, forms, flags, results[0].strides)
    try:
        ready: _Ready = around.ready(key, lambda traced: _make(traced, shape, flags, results[0]), _leaves(), 4)
    except BuildError as error:
        fall_back(error)
        made = by_numpy(shape, asked.function, asked.causal, asked.window, many, starts)
        result[...] = made[0].reshape(wanted)
        return result, made[1].reshape(wanted[:-1]) if asked.lse else None, None
    if result is out and _overlaps(out, around.found.values()):
        result = np.empty(wanted, dtype)  # scores read what would be written
        results = [_four(result, shape)]
    results += [_four(lse[..., None], shape)] if lse is not None else []
    results += [x for x in (many, starts) if x is not None]
    ready.execute(shape, operands, around.found, results, asked.far)
    return result, lse, ready


def _given(result: Array, lse: Array | None, out: Any) -> Any:
    """What a call returns."""
    if out is not None and result is not out:
        out[...] = result
        result = out
    return result if lse is None else (result, lse)


_plain = Memory(MOST_KINDS)


def _kind(q: Any, k: Any, v: Any, *how: Any) -> Any:
    """What sets calls without functions apart; None if that is not said so soon."""
    if not type(q) is type(k) is type(v) is np.ndarray:
        return None
    forms = (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
    at = (k.__array_interface__["data"][0] % 4, q.flags.aligned and k.flags.aligned and v.flags.aligned)
    return (*forms, *at, *how, config.current(), config.limit())


def _same(x: Array, y: Array) -> bool:
    """An operand is where and as it was given."""
    return bool(x.__array_interface__["data"] == y.__array_interface__["data"] and x.strides[-3:] == y.strides[-3:])


@dataclass(frozen=True, slots=True)
class _Again:
    """A call without functions, like one before."""

    ready: _Ready
    shape: Shape
    found: dict[Any, Any]
    far: int
    wanted: tuple[int, ...]
    lse: bool

    def __call__(self, *operands: Array) -> Any:
        result = np.empty(self.wanted, self.shape.dtype)
        if not self.lse:
            self.ready.execute(self.shape, operands, self.found, [result], self.far)
            return result
        lse = np.empty(self.wanted[:-1], np.float32)
        self.ready.execute(self.shape, operands, self.found, [result, lse], self.far)
        return result, lse


@cache
def _leaves() -> tuple[Expr, Indices]:
    """What score and mask are given."""
    return acc(), Indices(NAMES)


def _writes(out: Array, dtype: np.dtype[Any], operands: tuple[Array, ...]) -> bool:
    """A kernel can write straight to `out`."""
    dense = numpy_arrays.addressable(out, dtype) and out.strides[-1] == dtype.itemsize and out.flags.c_contiguous
    return dense and not _overlaps(out, operands)


def _overlaps(out: Array, read: Iterable[Any]) -> bool:
    """Some array may share memory with the result."""
    return any(isinstance(x, np.ndarray) and np.may_share_memory(out, x) for x in read)


def _four(x: Array, shape: Shape) -> Array:
    return x if x.ndim == 4 else x.reshape(shape.items, *x.shape[-3:])


@dataclass(frozen=True, slots=True)
class _Ready:
    """A kernel for one kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        step: keys of a block.
        run: keys of a run, 0 if there are no runs.
        kr: elements of a head that lie side by side in a unit.
        deep: elements of a head that one step multiplies.
    """

    route: Any
    bound: Bound
    step: int
    run: int
    kr: int
    deep: int

    def execute(
        self, shape: Shape, operands: tuple[Array, ...], found: dict[Any, Any], results: list[Array], far: int
    ) -> None:
        """Run the kernel; of operands that are in order, only the addresses matter."""
        q, k, v = operands
        d = shape.d
        if self.run:
            q = np.ascontiguousarray(q)
        elif self.kr > 1:
            q, k, d = _whole(q, k, self.kr, self.deep)
        table, numbers, alive = self.bound.fill(found, [], [q, k, v, *results])
        runtime().execute(
            self.route, shape.m, shape.n, d, shape.items * shape.heads, 0, shape.heads, shape.group, 0,
            0, far, self.step, 0, 0, shape.n - shape.m, shape.dv, self.run, *_NOTHING, table, numbers,
        )  # fmt: skip
        del alive


def _whole(q: Array, k: Array, kr: int, deep: int) -> tuple[Array, Array, int]:
    """Queries and keys in whole steps: zeros are added, and keys copied, where need be."""
    size, odd = k.itemsize, q.shape[-1] % deep
    if odd:
        more = [(0, 0)] * (q.ndim - 1) + [(0, deep - odd)]
        q, k = np.pad(q, more), np.pad(k, more)
    elif k.__array_interface__["data"][0] % (kr * size) or any([s % (kr * size) for s in k.strides[:-1]]):  # noqa: C419
        k = np.ascontiguousarray(k).copy()
    return q, k, q.shape[-1]


def _real(traced: Traced) -> Traced:
    """The same with a result of f32."""
    return replace(traced, results=tuple((real(x), None) for x, _ in traced.results))


def turned(traced: Traced) -> Traced:
    """The same with rows and columns exchanged."""

    def change(x: Expr) -> Expr | None:
        return index(TURNED.get(x.args[0], x.args[0])) if x.op == "index" else None

    done: dict[Expr, Expr] = {}
    results = tuple((real(substituted(x, change, done)), None) for x, _ in traced.results)
    views = [tuple(TURNED.get(x, x) if isinstance(x, str) else x for x in s.view) for s in traced.sources]
    sources = tuple(replace(s, view=view) for s, view in zip(traced.sources, views, strict=True))
    operands = tuple(described(s.array, s.view) for s in sources)
    return replace(traced, results=results, sources=sources, operands=operands)


def _make(traced: Traced, shape: Shape, flags: tuple[bool, ...], result: Array) -> _Ready:
    from portmm.dispatch import cpu as cpu_dispatch
    from portmm.kernels.cpu.attention_geometry import Form, Geometry, keys_of
    from portmm.kernels.cpu.online_softmax import Bounds

    causal, endless, with_lse, all_keys, no_starts = flags
    if len(traced.results) > 1:
        raise TraceError("a score is one value, not a tuple")
    made, target = _real(traced), config.target()
    held = numpy_arrays.name_of(shape.dtype)
    matmul_op.begin()
    runtime()  # without one, there is no use in making a kernel
    wanted = Fused(made.operands, ((C, made.results[0][0]),))
    isa, atom, _ = unit = cpu_dispatch.attention_unit(held, wanted, target, shape.m)
    few = shape.m <= FEW // atom.k_pack
    made = made if few else turned(traced)
    fused = Fused(made.operands, ((C, made.results[0][0]),))
    geometry = Geometry.of(isa, atom)
    masks = bool(isa.spelling(atom, "load_mask", held))
    reads = atom.k_pack == 1 and not atom.tiled and (masks or not shape.dv % geometry.pv_n)
    bounds = Bounds(causal, not endless)
    form = Form(
        str(fused),
        held,
        held,
        bounds,
        lengths=not all_keys,
        starts=not no_starts,
        lse=with_lse,
        packs=not few and not reads,
        few=few,
    )
    step = keys_of(_near(target), geometry, max(shape.d, shape.dv))
    run = 0
    if few:
        items = shape.items * shape.heads // shape.group
        run = max(SHORTEST, -(-shape.n // max(1, TASKS // items)))
        step = 256
    macs = shape.items * shape.heads * shape.m * shape.n * (shape.d + shape.dv)
    workers = config.get_num_threads() if macs > FORK else 1
    q, k, v = shape.operands
    if few:
        q = np.ascontiguousarray(q)
    elif atom.k_pack > 1:
        q, k, _ = _whole(q, k, atom.k_pack, atom.k)
    fields = {"m": shape.m, "n": shape.n, "k": q.shape[-1], "batch": shape.items * shape.heads, "workers": workers}
    fields |= {"a_m": shape.heads, "a_k": shape.group, "b_n": step, "c_n": shape.dv, "c_batch": run}
    route = cpu_dispatch.attention_route(form, unit, fields)
    rows = [_strides(x) for x in (q, k, v, result)]
    rows += [(shape.heads * shape.m, 1, 0, shape.m)] if with_lse else []
    rows += [(1,)] * ((not all_keys) + (not no_starts))
    size = (shape.m, shape.n) if few else (shape.n, shape.m)
    bound = Bound(made, (*size, shape.items, shape.heads), [], rows)
    return _Ready(route, bound, step, run, atom.k_pack, atom.k)


def _strides(x: Array) -> tuple[int, ...]:
    """Strides along items, rows, columns and heads, in elements."""
    b, h, m, n = (s // x.itemsize for s in x.strides)
    return b, m, n, h


def _near(target: Target) -> int:
    """Bytes of the cache that a block should stay in."""
    level = target.level("L2") or target.level("L1")
    return level.bytes if level else 1 << 18
