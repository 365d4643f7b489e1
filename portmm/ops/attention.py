"""Attention: softmax(Q . K^T) . V, in one kernel that stores no matrix of scores.

Owns `attention` in the host's memory: its options, its results, and NumPy in the place of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portmm.arrays import libraries, numpy_arrays
from portmm.arrays.numpy_fallback import fall_back
from portmm.dispatch import base_kernels, config
from portmm.errors import BuildError
from portmm.ops import host_matmul
from portmm.ops.attention_launch import AttentionKernel, basic_kernel
from portmm.ops.attention_shapes import Options, Shape, by_item, count, refuse_others, shape_of

if TYPE_CHECKING:
    from portmm.trace.tracer import Traced

Array = np.ndarray[Any, Any]

_met: list[bool] = []
"""Whether a call without functions was met: by the base set, kinds are remembered from the second on, as that is a
module to load."""
there: Callable[..., Any] | None = None
"""`grid_attention.again`, once there was a call on a device."""


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
            `lengths`, pass `lengths` less the number of queries. It is from minus the number of queries to the
            number of keys. (In functions i.q still counts from 0.)
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
    kind = call = None
    if there is not None and type(q) is not np.ndarray:
        result = there((q, k, v, out), Options(score, mask, scale, causal, window, lengths, offset, return_lse))
        if result is not NotImplemented:
            return result
    if score is None and mask is None and lengths is None and out is None and offset is None:
        call = (q, k, v, scale, causal, window, return_lse, config.current(), config.limit())
        result = host_matmul.attend(*call)
        if result is NotImplemented and (_met or not base_kernels.active()):
            from portmm.ops import attention_fastpath

            result, kind = attention_fastpath.again(call)
        if result is not NotImplemented:
            return result
        _met[:] = [True]
    refuse_others(score=score, mask=mask)
    if where := libraries.place_of(q, k, v, lengths, offset, out):
        from portmm.arrays.interop import elsewhere

        more = {"score": score, "mask": mask, "scale": scale, "causal": causal, "window": window, "out": out}
        more |= {"lengths": lengths, "offset": offset, "return_lse": return_lse}
        return elsewhere(where, attention, _on_device, (q, k, v), more)
    options = Options(score, mask, scale, causal, window, lengths, offset, return_lse)
    if options.plain_rows:
        result = _by_groups((q, k, v), options, out)
        if result is not NotImplemented:
            return result
    return _on_host((q, k, v), options, out, kind and (kind, call))


def _on_host(operands: tuple[Any, Any, Any], options: Options, out: Any, known: Any) -> Any:
    """The same for NumPy's arrays; `known` is the kind of the call and its arguments, if others may be like it."""
    q, k, v = operands
    rows = numpy_arrays.rows_of(q=q, k=k, v=v)
    shape, direct = shape_of(*rows), False
    if out is not None:
        numpy_arrays.check_out(out, shape.result, shape.dtype)
        direct = numpy_arrays.dense_at(out, shape.dtype, *shape.operands)
    result, lse, kernel = _computed(shape, options, out if direct else None)
    if known and kernel is not None:
        from portmm.ops import attention_fastpath

        (kind, call), numbers = known, [options.factor(shape.d)] * kernel.factors
        attention_fastpath.keep(kind, operands, kernel, shape, options.window, numbers, lse=options.lse, call=call)
    if out is not None and result is not out:
        out[...] = result
        result = out
    return result if lse is None else (result, lse)


def _by_groups(operands: tuple[Any, Any, Any], options: Options, out: Any) -> Any:
    """Attention with heads that share keys as rows of one, where that is faster; else NotImplemented."""
    q, k, v = operands
    if not type(q) is type(k) is type(v) is np.ndarray or not q.ndim == k.ndim == v.ndim > 2:
        return NotImplemented
    if q.shape[-3] == k.shape[-3]:
        return NotImplemented
    from portmm.ops import attention_groups

    rows = attention_groups.joined(q, k, v, causal=options.causal, offset=options.offset)
    if rows is None:
        return NotImplemented
    shape, to = (*q.shape[:-1], v.shape[-1]), None
    if out is not None:
        if type(out) is not np.ndarray or out.shape != shape or not out.flags.c_contiguous:
            return NotImplemented
        to = out.reshape(*rows.shape[:-1], shape[-1])
    more = {"scale": options.scale, "lengths": options.lengths, "return_lse": options.lse, "out": to}
    result = attention(rows, k, v, **more)
    result, *lse = result if options.lse else (result,)
    result = result.reshape(shape) if out is None else out
    return (result, lse[0].reshape(shape[:-1])) if lse else result


def _on_device(q: Any, k: Any, v: Any, *, out: Any, return_lse: bool, **options: Any) -> Any:
    """The same for arrays on a device."""
    global there  # noqa: PLW0603 - replaced once, so that no other call asks for it
    from portmm.ops import grid_attention

    there = grid_attention.again
    return grid_attention.attention((q, k, v, out), Options(**options, lse=return_lse))


def _computed(shape: Shape, options: Options, out: Any) -> tuple[Array, Array | None, AttentionKernel | None]:
    """The result, the logarithms if they are returned, and the kernel; `out`, if there is one, takes the result."""
    causal, window, operands = options.causal, options.window, shape.operands
    many = None if options.lengths is None else by_item(options.lengths, "lengths", shape, 0)
    starts = None if options.offset is None else by_item(options.offset, "offsets", shape, -shape.m)
    result = np.empty(shape.result, shape.dtype) if out is None else out
    lse = np.empty(shape.result[:-1], np.float32) if options.lse else None
    if 0 in (shape.items, shape.heads, shape.m, shape.dv, shape.n):
        result[...] = 0
        if lse is not None:
            lse[...] = -np.inf
        return result, lse, None
    captured: dict[Any, Any] = {}
    kernel, results = None, [_four(result, shape)]
    if options.plain:
        with suppress(BuildError):  # it is raised again below
            kernel = basic_kernel(shape, options.factor(shape.d), results[0], causal=causal)
    if kernel is None:
        try:
            kernel, captured = _traced_kernel(shape, options, results[0])
        except BuildError as error:
            from portmm.ops.attention_scores import by_numpy, function_of

            fall_back(error)
            fallback = by_numpy(shape, function_of(options, shape.d), causal, window, many, starts)
            result[...] = fallback[0].reshape(shape.result)
            return result, fallback[1].reshape(shape.result[:-1]) if options.lse else None, None
        if result is out and any(np.may_share_memory(out, x) for x in captured.values() if isinstance(x, np.ndarray)):
            result = np.empty(shape.result, shape.dtype)  # scores would read what the kernel overwrites
            results = [_four(result, shape)]
    results += [] if lse is None else [_four(lse[..., None], shape)]
    results += [x for x in (many, starts) if x is not None]
    kernel.execute(shape, operands, captured, results, shape.far(window))
    return result, lse, kernel


def _traced_kernel(shape: Shape, options: Options, result: Array) -> tuple[AttentionKernel, dict[Any, Any]]:
    """The kernel of a traced score, for a result (items, heads, rows, columns), and what the score captures."""
    from portmm.ops.attention_kernel import make_kernel
    from portmm.ops.attention_scores import function_of, values
    from portmm.trace.bind import UserFunction

    user_function = UserFunction(function_of(options, shape.d))
    flags = (options.causal, options.window is None, options.lse, options.lengths is None, options.offset is None)
    forms = tuple([(x.dtype, x.shape, x.strides, x.__array_interface__["data"][0] % 4) for x in shape.operands])
    key = ("attention", forms, flags, result.strides, result.dtype)

    def make(traced: Traced) -> AttentionKernel:
        return make_kernel(traced, shape, flags, result, factors=options.factors)

    kernel = user_function.ready(key, make, values(), 4)
    return kernel, user_function.closure


class Launch(NamedTuple):
    """The one launch of a call.

    Attributes:
        route: the kernel.
        numbers: its 16 integers.
        table: a row for each operand: the offset of its first element, in bytes, and strides.
        scalars: numbers of the score, None if it has none.
        arrays: the operands.
    """

    route: Any
    numbers: tuple[int, ...]
    table: Array
    scalars: Any
    arrays: tuple[Array, ...]


def launch_of(
    q: Array, k: Array, v: Array, score: Callable[..., Any], out: Array, *, factors: bool = False
) -> Launch:  # fmt: skip
    """The launch of `attention(q, k, v, score=score, out=out)`, which does not run: programs of kernels contain it.

    With `factors` the score may be two values, see `attention_program.Form`.

    Raises:
        TraceError: the score cannot be traced.
        ScheduleError: no unit of the target computes it.
    """
    shape = shape_of(*numpy_arrays.rows_of(q=q, k=k, v=v))
    options = Options(score, None, None, False, None, None, None, lse=False, factors=factors)
    result = _four(out, shape)
    kernel, captured = _traced_kernel(shape, options, result)
    q, k, v = shape.operands
    q, k, d = kernel.readable(q, k)
    sizes = shape.m, shape.n, d, shape.items * shape.heads, shape.heads, shape.group, shape.dv
    table, scalars, *arrays = kernel.bound.fill(captured, [], [q, k, v, result])
    scalars = scalars if kernel.bound.traced.numbers else None
    return Launch(kernel.route, kernel.numbers(sizes, shape.far(None)), table, scalars, tuple(arrays))


def _four(x: Array, shape: Shape) -> Array:
    """The array with four axes; the stride of an axis of extent 1 is what it would be in a new dense array.

    Rows of the heads that share keys are apart by the stride of queries, of which there may be one.
    """
    sizes = (shape.items, *x.shape[-3:])
    if x.flags.c_contiguous:
        return x.reshape(-1).reshape(sizes)
    return x if x.ndim == 4 else x.reshape(sizes)
