"""Attention with factors of scores and of values: what a norm of queries and of values leaves, past both products.

Owns `attention_by_factors`, which the search of equivalent programs uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portmm.arrays import libraries
from portmm.errors import ScheduleError
from portmm.ops.attention import launch_of
from portmm.runtime.cpu import runtime
from portmm.trace.closures import traced_through


def attention_by_factors(q: Any, k: Any, v: Any, factors: tuple[Any, Any, Any], *, scale: float) -> Any:
    """The mean of rows of v, weighted by the softmax of q k^T times `scale`, with factors of all rows.

    Products are exact and sums are float32: weights are cut into as many parts as narrow operands need.

    Args:
        q: queries, (heads, queries, d), of float32 or bfloat16.
        k: keys, (heads, keys, d), of the same type.
        v: values, (heads, keys, dv), of the same type.
        factors: of scores, one of each query, (heads, queries), and of each key, (heads, keys), and one of each row of
            v; they are of float32, or None.
        scale: a factor of all scores.

    Returns:
        An array (heads, queries, dv) of float32.

    Raises:
        ScheduleError: no unit of the target computes it.
    """
    if libraries.place_of(q, k, v) == "traced":
        from portmm.arrays.interop import elsewhere

        if not q.dtype == k.dtype == v.dtype:
            raise ScheduleError("attention by factors is of operands of one type")
        call = attention_by_factors
        return elsewhere("traced", call, call, (q, k, v, factors), {"scale": scale})
    out = np.empty((1, *q.shape[:-1], v.shape[-1]), np.float32)
    rows, keys, values = (x if x is None else x[None] for x in factors)
    rows = None if rows is None else rows * np.float32(scale)
    launch = launch_of(q[None], k[None], v[None], _scores(rows, keys, values, float(scale)), out, factors=True)
    runtime().execute(launch.route, *launch.numbers, None, launch.table, launch.scalars, *launch.arrays)
    return out[0]


def _scores(rows: Any, keys: Any, values: Any, scale: float) -> Callable[..., Any]:
    """The function of a product that gives its score, and the factor of its key's values if there is one."""

    def function(s: Any, i: Any) -> Any:
        s = s * scale if rows is None else s * rows[i.b, i.h, i.q]
        if keys is not None:
            s = s * keys[i.b, i.h, i.kv]
        return s if values is None else (s, values[i.b, i.h, i.kv])

    return traced_through(function)
