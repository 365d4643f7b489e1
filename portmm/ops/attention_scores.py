"""Scores of attention: the function of a product before the softmax, traced, and attention's reference in NumPy.

Owns what only calls with functions, a window or lengths need, those without a kernel of the base set, and those without
a compiler: a first call by the base set does not load it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from portmm.errors import TraceError
from portmm.spec.elementwise import where
from portmm.spec.epilogue import C, Fused, acc
from portmm.spec.expr import real
from portmm.trace.closures import traced_through
from portmm.trace.tracer import Traced, indices

if TYPE_CHECKING:
    from portmm.ops.attention_shapes import Options, Shape

Array = np.ndarray[Any, Any]
NAMES = {"b": "b", "h": "h", "q": "m", "kv": "n"}
"""Names of the axes in score and mask: kernels have queries along rows and keys along columns, or transposed."""


@cache
def values() -> tuple[Any, ...]:
    """The placeholder arguments of both."""
    return acc(), indices(NAMES)


def function_of(options: Options, d: int) -> Callable[..., Any]:
    """The function of a product before the softmax, for heads of `d` elements: factor, score and mask."""
    scored, mask = _scored(options.score, options.factor(d)), options.mask
    if mask is None:
        return scored

    def function(s: Any, i: Any) -> Any:
        return where(mask(i), scored(s, i), -math.inf)

    return traced_through(function)


def _scored(score: Any, factor: float | None) -> Callable[..., Any]:
    if score is None:

        def function(s: Any, i: Any) -> Any:  # noqa: ARG001 - the signature of all
            return s * factor
    elif factor is None:

        def function(s: Any, i: Any) -> Any:
            return score(s, i)
    else:

        def function(s: Any, i: Any) -> Any:
            return score(s * factor, i)

    return traced_through(function)


def score_expression(traced: Traced, *, factors: bool = False) -> Fused:
    """The traced score as an epilogue expression, of f32; with `factors`, that of a key's values follows it.

    Raises:
        TraceError: it is more values.
    """
    if len(traced.results) > 1 + factors:
        raise TraceError("a score is one value, not a tuple")
    return Fused(traced.operands, tuple((C, real(x)) for x, _ in traced.results))


def by_numpy(  # noqa: PLR0917 - the options of attention
    shape: Shape,
    function: Callable[[Any, Any], Any],
    causal: bool,
    window: int | None,
    lengths: Array | None,
    starts: Array | None,
) -> tuple[Array, Array]:
    """The result in float32 and the logarithms, (items, heads, queries, columns); it stores all scores."""
    q, k, v = (x.astype(np.float32) for x in shape.operands)
    k, v = np.repeat(k, shape.group, 1), np.repeat(v, shape.group, 1)
    item, head = np.arange(shape.items)[:, None, None, None], np.arange(shape.heads)[:, None, None]
    row, key = np.arange(shape.m)[:, None], np.arange(shape.n)
    with np.errstate(all="ignore"):
        s = function(q @ k.swapaxes(-1, -2), SimpleNamespace(b=item, h=head, q=row, kv=key))
        offset = shape.n - shape.m if starts is None else starts[:, None, None, None]
        position, seen = row + offset, not causal or key <= row + offset
        if window is not None:
            seen = seen & (key > position - window) & (causal | (key < position + window))
        if lengths is not None:
            seen = seen & (key < lengths[:, None, None, None])
        s = np.where(seen, s, np.float32(-np.inf)).astype(np.float32)
        maximum = np.maximum(s.max(-1, keepdims=True), np.float32(-3e38))
        w = np.exp(s - maximum)
        total = w.sum(-1, keepdims=True)
        return np.where(total == 0, np.float32(0), w @ v / total), (maximum + np.log(total))[..., 0]
