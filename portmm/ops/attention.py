"""Attention: softmax(Q . K^T) . V, in one kernel that stores no matrix of scores.

Owns `attention` in the host's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import config
from portmm.errors import BuildError, TraceError
from portmm.ops import host_matmul
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
from portmm.spec.row_classes import last_of_class
from portmm.trace.bind import Bound, UserFunction, substituted
from portmm.trace.tracer import Indices, Traced, described
from portmm.util.memo import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from portmm.target.target import Target

Array = np.ndarray[Any, Any]
_TRANSPOSED = {"m": "n", "n": "m"}
FEW = 16
"""Queries of a head up to which vectors along queries are slower (kernels/cpu/flash_decoding.py): measured on Zen 4,
with 2048 keys; half as many for atoms that multiply units of two, which that program does not use."""
TASKS = 64
"""KV splits of few queries, all heads together: for that many threads."""
SHORTEST = 512
"""Least keys of a KV split: enough to be worth a task."""
FORK = 1e6
"""Multiply-adds from which threads pay: some 30 us."""
MOST_KINDS = 1024
"""Kinds of calls remembered before the memo is emptied."""
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
    """Attention: for each query the mean of the rows of v, weighted by the softmax of its scores over the keys.

    Each head of k and v serves a group of consecutive heads of q (grouped and multi-query attention). Sums and the
    softmax are computed in float32. A query that sees no key has a result of zeros. Memory in addition to the result
    grows linearly with the sequence. `score` and `mask` are traced like an epilogue of `matmul`: they may read arrays
    by axes (`slopes[i.h]`), and numbers that they capture may change from call to call.

    Args:
        q: queries, (..., heads, queries, d), of float32, bfloat16 or float16.
        k: keys, (..., heads of keys, keys, d), of the same type.
        v: values, (..., heads of keys, keys, dv), of the same type.
        score: score(s, i) of a product s of query i.q and key i.kv, of item i.b and head i.h.
        mask: mask(i) is true where query i.q sees key i.kv.
        scale: the factor of products, before `score`; by default 1 / sqrt(d), or 1 where `score` is given.
        causal: no query sees keys after its own position.
        window: queries see only keys at distances less than this from their position, which is as for `causal`.
        lengths: the number of keys of each item, an integer or one for each item; the others are not read.
        offset: the position of the first query among the keys, an integer or one for each item; the others follow.
            By default the last query is at the last key, keys less queries. For a cache that is filled up to
            `lengths`, pass `lengths` less the number of queries. (In functions i.q still
            counts from 0.)
        return_lse: also return the logarithms of the sums of the exponentials of scores, (..., heads, queries).
        out: the array of the result.

    Returns:
        An array (..., heads, queries, dv) of the type of q, or that and the logarithms (-inf where there is no key).

    Raises:
        TypeError: the types of q, k and v differ, or are not supported; a setting has the wrong type.
        ValueError: shapes do not match.
        TraceError: `score` or `mask` cannot be traced.
    """
    scale = None if scale is None else float(scale)
    window = None if window is None else count(window, "window", 1)
    plain = None
    if score is None and mask is None and lengths is None and out is None and offset is None:
        plain = _kind(q, k, v, scale, causal, window, return_lse)
        known: _Again | None = _plain.get(plain) if plain else None
        if known is not None:
            return known(q, k, v)
    refuse_others(score=score, mask=mask)
    if (tracer := numpy_arrays.tracing_operand(q, k, v, lengths, offset)) is not None:
        more = {"score": score, "mask": mask, "scale": scale, "causal": causal, "window": window, "out": out}
        more |= {"lengths": lengths, "offset": offset, "return_lse": return_lse}
        return tracer.call_(attention, (q, k, v), more)
    if libraries.on_device(q) or libraries.on_device(k) or libraries.on_device(v):
        from portmm.ops import attention_gpu

        device_options = attention_gpu.Options(score, mask, scale, causal, window, lengths, offset, return_lse)
        return attention_gpu.attention((q, k, v, out), device_options)
    shape = shape_of(*(array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))))
    far = shape.n if window is None else min(window, shape.m + shape.n)
    if out is not None:
        numpy_arrays.check_out(out, shape.result, shape.dtype)
    factor = 1 / math.sqrt(shape.d) if scale is None and score is None else scale
    options = _Options(score_of(score, mask, factor), causal, window, far, return_lse)
    many = None if lengths is None else lengths_of(lengths, shape)
    starts = None if offset is None else starts_of(offset, shape)
    result, lse, ready = _computed(shape, options, many, starts, out)
    if plain and ready is not None and all(map(_same, shape.operands, (q, k, v))):
        numbers = [factor] * len(ready.bound.traced.numbers)
        _plain.keep(plain, _Again(ready, shape, window, numbers, lse=return_lse))
    return _put(result, lse, out)


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of an attention call.

    Attributes:
        function: the score, -inf where masked.
        causal: keys after a query's position are masked.
        window: distance from which keys are masked, or None.
        far: the window as a number.
        lse: logarithms are returned.
    """

    function: Callable[..., Any]
    causal: bool
    window: int | None
    far: int
    lse: bool


def _computed(
    shape: Shape, options: _Options, many: Array | None, starts: Array | None, out: Any
) -> tuple[Array, Array | None, _Ready | None]:
    """The result, the logarithms if they are returned, and the kernel."""
    operands, dtype, result_shape = shape.operands, shape.dtype, shape.result
    result = out if out is not None and _writes(out, dtype, operands) else np.empty(result_shape, dtype)
    lse = np.empty(result_shape[:-1], np.float32) if options.lse else None
    if 0 in (shape.items, shape.heads, shape.m, shape.dv, shape.n):
        result[...] = 0
        if lse is not None:
            lse[...] = -np.inf
        return result, lse, None
    user_function = UserFunction.of(options.function)
    flags = (options.causal, options.window is None, options.lse, many is None, starts is None)
    forms = tuple([(x.shape, x.strides, x.__array_interface__["data"][0] % 4) for x in operands])
    results = [_four(result, shape)]
    key = ("attention", dtype, forms, flags, results[0].strides)
    try:
        ready: _Ready = user_function.ready(key, lambda traced: _make(traced, shape, flags, results[0]), _leaves(), 4)
    except BuildError as error:
        fall_back(error)
        fallback = by_numpy(shape, options.function, options.causal, options.window, many, starts)
        result[...] = fallback[0].reshape(result_shape)
        return result, fallback[1].reshape(result_shape[:-1]) if options.lse else None, None
    if result is out and _overlaps(out, user_function.closure.values()):
        result = np.empty(result_shape, dtype)  # scores would read what the kernel overwrites
        results = [_four(result, shape)]
    results += [_four(lse[..., None], shape)] if lse is not None else []
    results += [x for x in (many, starts) if x is not None]
    ready.execute(shape, operands, user_function.closure, results, options.far)
    return result, lse, ready


def _put(result: Array, lse: Array | None, out: Any) -> Any:
    """The values that a call returns, after the copy to `out`."""
    if out is not None and result is not out:
        out[...] = result
        result = out
    return result if lse is None else (result, lse)


_plain = Memory(MOST_KINDS)


def _kind(q: Any, k: Any, v: Any, *options: Any) -> Any:
    """The memo key of calls without functions; None if a call needs the general path.

    Numbers of queries and keys are replaced by the last of their classes where operands are dense: strides follow from
    them.
    """
    if not type(q) is type(k) is type(v) is np.ndarray or not q.ndim == k.ndim == v.ndim > 2:
        return None
    a, b, c = q.flags, k.flags, v.flags
    at = (k.__array_interface__["data"][0] % 4, a.aligned and b.aligned and c.aligned)
    rest = (q.dtype, k.dtype, v.dtype, *at, *options, config.current(), config.limit())
    (*lead, m, d), (*heads, n, e), (*others, rows, dv) = q.shape, k.shape, v.shape
    if not (a.c_contiguous and b.c_contiguous and c.c_contiguous and heads == others and n == rows):
        return (q.shape, q.strides, k.shape, k.strides, v.shape, v.strides, *rest)
    spread = math.prod(lead) * m * n * (d + dv) > FORK
    return (last_of_class(m), last_of_class(n), spread, *lead, *heads, d, e, dv, *rest)


def _same(x: Array, y: Array) -> bool:
    """Whether an operand was used without a copy."""
    return bool(x.__array_interface__["data"] == y.__array_interface__["data"] and x.strides[-3:] == y.strides[-3:])


class _Again:
    """The kernel of a call without functions, for calls whose numbers of queries and keys are of the same classes.

    Args:
        ready: the kernel.
        shape: of the first call.
        window: the distance of keys from a query, or None.
        numbers: of the score.
        lse: also return the logarithms of the sums.
    """

    def __init__(self, ready: _Ready, shape: Shape, window: int | None, numbers: list[Any], *, lse: bool) -> None:
        self.ready, self.window, self.lse, self.dtype = ready, window, lse, shape.dtype
        self.numbers = np.array(numbers or [0], np.float32)
        self.sizes = shape.items * shape.heads, shape.heads, shape.group, shape.dv
        self.last = shape.m, shape.n, ready.bound.template
        # Strides of dense operands along items, rows, columns and heads: a fixed part, and parts by query and by key.
        h, kv_heads = shape.heads, shape.heads // shape.group
        self.fixed, self.by_query, self.by_key = (np.zeros_like(ready.bound.template) for _ in range(3))
        d = -(-shape.d // ready.k_step) * ready.k_step if ready.kr > 1 and not ready.run else shape.d  # see `readable`
        widths = (d, d, shape.dv, shape.dv)
        for i, (width, many, steps) in enumerate(zip(widths, (h, kv_heads, kv_heads, h), "qkkq", strict=True)):
            self.fixed[i, 2:4] = width, 1
            (self.by_query if steps == "q" else self.by_key)[i, [1, 4]] = many * width, width
        if lse:
            self.fixed[4, 2] = 1
            self.by_query[4, [1, 4]] = h, 1

    def template(self, m: int, n: int) -> Array:
        """The table of operands for m queries and n keys, without addresses."""
        last = self.last
        if last[0] != m or last[1] != n:
            last = self.last = m, n, self.fixed + self.by_query * m + self.by_key * n
        return last[2]

    def __call__(self, q: Array, k: Array, v: Array) -> Any:
        (*_, m, d), n, (batch, heads, group, dv) = q.shape, k.shape[-2], self.sizes
        result = np.empty((*q.shape[:-1], dv), self.dtype)
        lse = np.empty(q.shape[:-1], np.float32) if self.lse else None
        q, k, d = self.ready.readable(q, k)
        table = self.template(m, n).copy()
        table[:, 0] = list(map(runtime().address, (q, k, v, result) if lse is None else (q, k, v, result, lse)))
        far = n if self.window is None else min(self.window, m + n)
        self.ready.launch((m, n, d, batch, heads, group, dv), far, table, self.numbers)
        return result if lse is None else (result, lse)


@cache
def _leaves() -> tuple[Expr, Indices]:
    """The placeholder arguments of score and mask."""
    return acc(), Indices(NAMES)


def _writes(out: Array, dtype: np.dtype[Any], operands: tuple[Array, ...]) -> bool:
    """Whether a kernel can write straight to `out`."""
    dense = numpy_arrays.addressable(out, dtype) and out.strides[-1] == dtype.itemsize and out.flags.c_contiguous
    return dense and not _overlaps(out, operands)


def _overlaps(out: Array, read: Iterable[Any]) -> bool:
    """Whether an array may share memory with the result."""
    return any(isinstance(x, np.ndarray) and np.may_share_memory(out, x) for x in read)


def _four(x: Array, shape: Shape) -> Array:
    return x if x.ndim == 4 else x.reshape(shape.items, *x.shape[-3:])


@dataclass(frozen=True, slots=True)
class _Ready:
    """The kernel for one kind of call.

    Attributes:
        route: the kernel.
        bound: its operands.
        step: keys of a block.
        run: keys of a KV split, 0 without splits.
        kr: consecutive elements of a head in a unit of the atom.
        k_step: elements of a head that one step multiplies.
    """

    route: Any
    bound: Bound
    step: int
    run: int
    kr: int
    k_step: int

    def execute(
        self, shape: Shape, operands: tuple[Array, ...], captured: dict[Any, Any], results: list[Array], far: int
    ) -> None:
        """Run the kernel; operands differ from those it was made for only in addresses."""
        q, k, v = operands
        q, k, d = self.readable(q, k)
        table, numbers, alive = self.bound.fill(captured, [], [q, k, v, *results])
        sizes = shape.m, shape.n, d, shape.items * shape.heads, shape.heads, shape.group, shape.dv
        self.launch(sizes, far, table, numbers)
        del alive

    def readable(self, q: Array, k: Array) -> tuple[Array, Array, int]:
        """Queries and keys as the kernel reads them, and the elements of a head."""
        if self.run:
            return np.ascontiguousarray(q), k, q.shape[-1]
        return _whole_steps(q, k, self.kr, self.k_step) if self.kr > 1 else (q, k, q.shape[-1])

    def launch(self, sizes: tuple[int, ...], far: int, table: Array, numbers: Array) -> None:
        """Run the kernel.

        Args:
            sizes: queries, keys, elements of a head of Q, heads of all items, of one item, heads that share keys, and
                elements of a head of V.
            far: how near a key must be.
            table: the operands.
            numbers: those of the score.
        """
        m, n, d, batch, heads, group, dv = sizes
        runtime().execute(
            self.route, m, n, d, batch, 0, heads, group, 0,
            0, far, self.step, 0, 0, n - m, dv, self.run, *_NOTHING, table, numbers,
        )  # fmt: skip


def _whole_steps(q: Array, k: Array, kr: int, k_step: int) -> tuple[Array, Array, int]:
    """Queries and keys padded with zeros to whole steps, and keys copied where they are misaligned."""
    size, remainder = k.itemsize, q.shape[-1] % k_step
    if remainder:
        padding = [(0, 0)] * (q.ndim - 1) + [(0, k_step - remainder)]
        q, k = (np.ascontiguousarray(np.pad(x, padding)) for x in (q, k))  # `np.pad` keeps the order of Fortran
    elif k.__array_interface__["data"][0] % (kr * size) or any([s % (kr * size) for s in k.strides[:-1]]):  # noqa: C419
        k = np.ascontiguousarray(k).copy()
    return q, k, q.shape[-1]


def _real(traced: Traced) -> Traced:
    """The traced function with a result of f32."""
    return replace(traced, results=tuple((real(x), None) for x, _ in traced.results))


def transposed(traced: Traced) -> Traced:
    """The traced function with rows and columns exchanged."""

    def change(x: Expr) -> Expr | None:
        return index(_TRANSPOSED.get(x.args[0], x.args[0])) if x.op == "index" else None

    done: dict[Expr, Expr] = {}
    results = tuple((real(substituted(x, change, done)), None) for x, _ in traced.results)
    views = [tuple(_TRANSPOSED.get(x, x) if isinstance(x, str) else x for x in s.view) for s in traced.sources]
    sources = tuple(replace(s, view=view) for s, view in zip(traced.sources, views, strict=True))
    operands = tuple(described(s.array, s.view) for s in sources)
    return replace(traced, results=results, sources=sources, operands=operands)


def _make(traced: Traced, shape: Shape, flags: tuple[bool, ...], result: Array) -> _Ready:
    from portmm.dispatch import cpu_routes, cpu_units
    from portmm.kernels.cpu.attention_geometry import Form, Geometry, keys_of
    from portmm.kernels.cpu.online_softmax import Bounds

    causal, no_window, with_lse, all_keys, no_starts = flags
    if len(traced.results) > 1:
        raise TraceError("a score is one value, not a tuple")
    function, target = _real(traced), config.target()
    dtype = numpy_arrays.name_of(shape.dtype)
    host_matmul.begin()
    runtime()  # raises before a kernel is lowered in vain
    fused = Fused(function.operands, ((C, function.results[0][0]),))
    isa, atom, _ = unit = cpu_units.attention_unit(dtype, fused, target, last_of_class(shape.m))
    few = shape.m <= FEW // atom.k_pack
    function = function if few else transposed(traced)
    fused = Fused(function.operands, ((C, function.results[0][0]),))
    geometry = Geometry.of(isa, atom)
    masks = bool(isa.spelling(atom, "load_mask", dtype))
    reads = atom.k_pack == 1 and not atom.tiled and (masks or not shape.dv % geometry.pv_n)
    bounds = Bounds(causal, not no_window)
    form = Form(
        str(fused),
        dtype,
        dtype,
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
        run = max(SHORTEST, -(-last_of_class(shape.n) // max(1, TASKS // items)))
        step = 256
    macs = shape.items * shape.heads * shape.m * shape.n * (shape.d + shape.dv)
    workers = config.get_num_threads() if macs > FORK else 1
    q, k, v = shape.operands
    if few:
        q = np.ascontiguousarray(q)
    elif atom.k_pack > 1:
        q, k, _ = _whole_steps(q, k, atom.k_pack, atom.k)
    # Scratch is that of the largest of the classes of both, for which the route may be kept.
    fields = {
        "m": last_of_class(shape.m),
        "n": last_of_class(shape.n),
        "k": q.shape[-1],
        "batch": shape.items * shape.heads,
        "workers": workers,
    }
    fields |= {"a_m": shape.heads, "a_k": shape.group, "b_n": step, "c_n": shape.dv, "c_batch": run}
    route = cpu_routes.attention_route(form, unit, fields)
    rows = [_strides(x) for x in (q, k, v, result)]
    rows += [(shape.heads * shape.m, 1, 0, shape.m)] if with_lse else []
    rows += [(1,)] * ((not all_keys) + (not no_starts))
    size = (shape.m, shape.n) if few else (shape.n, shape.m)
    bound = Bound(function, (*size, shape.items, shape.heads), [], rows)
    return _Ready(route, bound, step, run, atom.k_pack, atom.k)


def _strides(x: Array) -> tuple[int, ...]:
    """Strides along items, rows, columns and heads, in elements."""
    b, h, m, n = (s // x.itemsize for s in x.strides)
    return b, m, n, h


def _near(target: Target) -> int:
    """Bytes of the cache in which a block should fit."""
    level = target.level("L2") or target.level("L1")
    return level.bytes if level else 1 << 18
